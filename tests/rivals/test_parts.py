"""The parts of a comparison: batches held to the executor's, processes to the kernel, figures to arithmetic."""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.executor.model.layers import MicroBatch
from ssdplan.executor.optimizer.zeroth_order import MeZO
from ssdplan.plans.errors import UsageError
from ssdplan.rivals import estimator_arm, processes, torch_arm
from ssdplan.rivals.arms import Batch, arms_of, memory_bytes, missing, profile_command, run_command, solve_command
from ssdplan.rivals.compare import _round
from ssdplan.rivals.comparison import Comparison, Round, Surroundings, arm_result, held_together, ratios
from ssdplan.rivals.comparison_text import arms_frame, describe_comparison
from ssdplan.rivals.job import EPS, LEARNING_RATE, SEED, WEIGHT_DECAY, ZEROTH_ORDER_LEARNING_RATE, Job, batches
from ssdplan.rivals.making import Order, make
from ssdplan.rivals.picture import draw
from ssdplan.rivals.processes import environment, run
from ssdplan.rivals.shapes import ModelFacts, Shape
from tests.bounds import HANG_SECONDS
from tests.executor.test_zeroth_order import InMemory
from tests.made.models import make_model, make_tokenizer
from tests.plans.read_csv import cell, written_and_read

SHAPE = "hidden=32,layers=2,heads=4,vocab=101"


def made(tmp_path, **changed):
    order = {
        "directory": str(tmp_path), "shape": SHAPE, "model": "", "data": "", "vocab": 101, "rows": 10,
        "row_tokens": 16, "seed": 0, "precision": "bf16",
    }  # fmt: skip
    make(Order(**(order | changed)))
    return tmp_path


def job(home, **changed):
    fields = {
        "model": str(home / "model"), "rows": str(home / "rows.npy"), "metrics": str(home / "metrics.jsonl"),
        "swap": str(home), "micro_batch_size": 2, "micro_batches": 3, "steps": 5, "threads": 1, "settings": "plain",
        "precision": "bf16",
    }  # fmt: skip
    return Job(**(fields | changed))


def test_batches_are_those_of_a_run_epoch_after_epoch(tmp_path):
    home = made(tmp_path)
    tokenizer = load_tokenizer(home / "model")
    data = TextData(home / "text.txt", tokenizer, sequence_length=16, vocab_size=101)
    assert data.samples == 10
    seen = list(batches(job(home)))
    assert len(seen) == 5, "30 rows of 10: three epochs"
    for step, micro_batches in enumerate(seen):
        theirs = data.micro_batches(step, micro_batches=3, micro_batch_size=2, seed=SEED)
        for ours, other in zip(micro_batches, theirs, strict=True):
            assert np.array_equal(ours, other.input_ids) and np.array_equal(other.labels, other.input_ids)
    assert not np.array_equal(seen[0][0], seen[1][0])


def test_a_text_is_read_by_the_models_own_tokenizer(tmp_path):
    source = make_tokenizer(make_model("llama", tmp_path / "source", vocab=320, hidden=32))
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"the quick brown fox jumps {n} times"}) for n in range(9)))
    (tmp_path / "made").mkdir()
    home = made(tmp_path / "made", shape="", model=str(source), data=str(text), vocab=320, rows=4)
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = [token for n in range(9) for token in tokenizer(f"the quick brown fox jumps {n} times")["input_ids"]]
    assert np.load(home / "rows.npy").reshape(-1).tolist() == ids[:64]
    data = TextData(home / "text.txt", load_tokenizer(home / "model"), sequence_length=16, vocab_size=320)
    assert sorted(row.tolist() for b in data.eval_batches(1) for row in b[0].input_ids) == sorted(
        np.load(home / "rows.npy").tolist()
    )
    own, other = (AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (home / "model", source))
    assert all(torch.equal(own[name], other[name].bfloat16()) for name in other)
    (tmp_path / "short").mkdir()
    with pytest.raises(UsageError, match="fewer than one row"):
        made(tmp_path / "short", shape="", model=str(source), data=str(text), vocab=320, row_tokens=4096)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_plain_pytorch_in_memory_is_the_textbooks_loop(tmp_path, precision):
    source = make_model("llama", tmp_path / "source", vocab=320, hidden=32)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    make_tokenizer(source)
    order = {"shape": "", "model": str(source), "data": str(tmp_path / "text.txt"), "vocab": 320}
    home = made(tmp_path, **order, precision=precision)
    given = job(home, steps=3, precision=precision)
    torch_arm.train(given)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(home / "model", dtype=dtype)
    masters = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for master in masters.parameters():
            master.copy_(master.to(dtype))  # exact in fp32: what the checkpoint has is what is trained
    optimizer = torch.optim.AdamW(masters.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for micro_batches, loss in zip(batches(given), losses, strict=True):
        total = 0.0
        for rows in map(torch.from_numpy, micro_batches):
            model.zero_grad()
            one = model(input_ids=rows, labels=rows).loss / len(micro_batches)
            one.backward()
            total += float(one.detach())
            for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
        assert loss == pytest.approx(total, rel=1e-6 if precision == "fp32" else 1e-4)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
                parameter.copy_(master)
    assert losses[0] != losses[-1]


@pytest.mark.parametrize(("precision", "directions"), [("fp32", 1), ("bf16", 3)])
def test_the_estimator_in_memory_is_that_of_the_tests(tmp_path, precision, directions):
    """The oracle moves one model along z and back, and draws its directions by another way."""
    source = make_model("llama", tmp_path / "source", vocab=320, hidden=32)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    make_tokenizer(source)
    order = {"shape": "", "model": str(source), "data": str(tmp_path / "text.txt"), "vocab": 320}
    home = made(tmp_path, **order, precision=precision)
    given = job(home, steps=3, precision=precision, directions=directions)
    estimator_arm.train(given)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    oracle = InMemory(home / "model", MeZO(lr=ZEROTH_ORDER_LEARNING_RATE, eps=EPS, seed=SEED), directions, dtype=dtype)
    expected = []
    for step, micro_batches in enumerate(batches(given)):
        rows = [torch.from_numpy(each) for each in micro_batches]
        found = oracle.step(step, [MicroBatch(each, each, None) for each in rows])
        expected.append(sum(map(sum, found)) / 2 / directions)
    assert losses == pytest.approx(expected, rel=1e-6 if precision == "fp32" else 1e-3)
    assert len(set(losses)) == 3


def test_without_gradients_our_commands_say_so_and_others_are_left_out(tmp_path):
    batch = Batch(sequence_length=32, micro_batch_size=1, micro_batches=2, precision="fp32", directions=4)
    plain, checkpointing, deepspeed, ours = arms_of(("torch", "torch-checkpointing", "deepspeed-lean", "ssdplan"), ())
    assert plain.module(batch) == "ssdplan.rivals.estimator_arm"
    assert plain.module(replace(batch, directions=0)) == "ssdplan.rivals.torch_arm"
    for arm in (checkpointing, deepspeed):
        assert "no training without gradients" in missing(arm, batch)
    solve = solve_command(tmp_path / "profile.json", ours, batch, None, tmp_path / "plan.json")
    assert solve[solve.index("--optimizer") + 1 :][:3] == ["mezo", "--directions", "4"] and "--recompute" not in solve
    run = run_command(tmp_path / "plan.json", tmp_path / "text.txt", tmp_path, batch, 3, tmp_path / "run")
    assert run[run.index("--eps") + 1] == "0.001" and "--weight-decay" not in run
    facts = ModelFacts.of_shape(Shape.parse("hidden=2048,layers=18,heads=16"))
    both = [memory_bytes(plain, facts, each) for each in (batch, replace(batch, directions=0))]
    assert 3 * 4 * facts.parameters < both[0] < both[1]


@pytest.mark.parametrize(("name", "millions"), [("small", 134), ("medium", 589), (SHAPE, 0)])
def test_a_shape_has_as_many_parameters_as_its_model(name, millions):
    shape = Shape.parse(name)
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.parameters // 1_000_000 == millions


def test_what_is_made_is_a_model_of_random_numbers_and_the_same_again(tmp_path):
    homes = [tmp_path / "one", tmp_path / "other"]
    for home in homes:
        home.mkdir()
        made(home)
    one, other = (AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.bfloat16) for home in homes)
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert (
            (mine == 1).all() if "norm" in name else float(mine.detach().float().std()) == pytest.approx(0.02, rel=0.1)
        )
    assert ModelFacts.of_directory(homes[0] / "model").parameters == Shape.parse(SHAPE).parameters


def python(code, tmp_path, **more):
    return run(
        [sys.executable, "-c", code],
        log=tmp_path / "log.txt",
        environment=environment(),
        **({"timeout": HANG_SECONDS} | more),
    )


def test_lines_that_nobody_saw_before_the_end_are_counted_as_of_it(tmp_path, monkeypatch):
    """On a busy machine a process writes its lines and ends between two looks."""
    lines = tmp_path / "lines.jsonl"
    code = f"open({str(lines)!r}, 'w').write('{{}}\\n' * 3)"

    def sleep_to_its_end(seconds):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep_to_its_end))
    told = []
    ended = python(code, tmp_path, lines=lines, on_line=told.append)
    assert ended.code == 0 and told == [3]
    there = Path("/proc/self/io").exists()
    assert len(ended.io) == (3 if there else 0) and len(set(ended.io)) <= 1


def test_the_kernel_counts_memory_and_bytes(tmp_path):
    lines = tmp_path / "lines.jsonl"
    code = (
        "import os, time\n"
        "block = b'x' * (192 << 20)\n"
        f"for number in range(3):\n"
        f"    with open({str(tmp_path / 'written')!r}, 'ab') as file:\n"
        "        file.write(block[:8 << 20]); file.flush(); os.fsync(file.fileno())\n"
        f"    with open({str(lines)!r}, 'a') as file: file.write('{{}}\\n')\n"
        f"    while not os.path.exists({str(tmp_path)!r} + f'/{{number + 1}}'): time.sleep(0.01)\n"
    )
    told = []

    def on_line(count):
        told.append(count)
        (tmp_path / str(count)).touch()  # it goes on only when the kernel's count of this line has been read

    ended = python(code, tmp_path, lines=lines, on_line=on_line)
    assert ended.code == 0 and not ended.timed_out and told == [1, 2, 3]
    assert 192 << 20 < ended.peak_memory_bytes < 400 << 20
    if ended.io and ended.io[-1].written:  # a memory file system has no drive to write to
        assert ended.io[2].written - ended.io[0].written == pytest.approx(16 << 20, rel=0.05)


def test_a_process_that_takes_too_long_goes_with_its_children(tmp_path):
    child = tmp_path / "child"
    code = (
        "import os, subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r} + '~', 'w').write(str(p.pid))\n"
        f"os.rename({str(child)!r} + '~', {str(child)!r})\n"
        "time.sleep(600)\n"
    )
    # On a clock that stands still until there is a child, and then goes on by a second with each look at it.
    ticks = itertools.count()
    ended = python(code, tmp_path, timeout=3.0, clock=lambda: float(next(ticks)) if child.exists() else 0.0)
    assert ended.timed_out and ended.code == -9
    pid = int(child.read_text())
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                gone = stat.read().rpartition(")")[2].split()[0] in "ZX"
        except FileNotFoundError:
            gone = True
        if gone:
            return
        time.sleep(0.05)
    pytest.fail("the child of the process outlived it")


def test_what_others_run_meanwhile_is_counted(tmp_path, monkeypatch):
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        beside = python("import time; time.sleep(3)", tmp_path)
    finally:
        worker.kill()
        worker.wait()
    assert beside.others_cores > 0.3, "a whole core, or what it gets of a busy machine"
    busy = iter((100.0, 105.0))
    monkeypatch.setattr(processes, "_busy_seconds", lambda: next(busy))
    own = python("import time\nwhile time.process_time() < 2: pass", tmp_path)
    assert 2.5 < own.others_cores * own.seconds < 3.05, "its own two seconds are not others'"


def one_round(number, step_seconds, losses=(3.0, 2.0, 1.0), memory=1 << 30, ssd=None):
    return Round(
        round=number, process_seconds=100.0, peak_memory_bytes=memory, others_cores=0.25 * number,
        step_seconds=(9.0, *step_seconds),
        losses=losses, kernel_read_bytes=1000, kernel_write_bytes=500, ssd_read_bytes=ssd, ssd_write_bytes=ssd,
    )  # fmt: skip


def arms():
    ours = arm_result(
        "ssdplan", "ours", [one_round(1, (1.0, 1.0), ssd=990), one_round(2, (2.0, 2.0), memory=3 << 29, ssd=990)],
        tokens=64, predicted_step_seconds=1.5,
    )  # fmt: skip
    rival = arm_result(
        "torch", "theirs", [one_round(1, (3.0, 3.0), (3.001, 2.01, 1.0)), one_round(2, (8.0, 8.0))], tokens=64
    )
    return ours, rival


def test_ratios_are_of_rounds_and_the_first_step_does_not_count():
    ours, rival = arms()
    assert ours.step_seconds == 1.5 and ours.tokens_per_second == pytest.approx(64 / 1.5)
    assert (ours.ssd_read_bytes, ours.kernel_read_bytes, rival.ssd_read_bytes) == (990, 1000, 1000)
    (ratio,) = ratios([rival, ours], {"ssdplan"})
    assert (ratio.speed, ratio.speed_low, ratio.speed_high) == (3.5, 3.25, 3.75)
    assert ratio.memory == 1.5
    reference, (held, _) = held_together([ours, rival])
    assert reference == "ssdplan" and held.loss_difference == 0.0
    _, (_, held) = held_together([ours, rival])
    assert held.loss_difference == pytest.approx(0.01) and held.same_training is True


def test_ours_runs_once_for_each_budget_and_each_way_of_recomputing(tmp_path):
    batch = Batch(sequence_length=32, micro_batch_size=1, micro_batches=2, precision="bf16")
    arms = arms_of(("torch", "ssdplan"), (1 << 30, 2 << 30), ("auto", "all"))
    names = ["torch", "ssdplan 1GiB auto", "ssdplan 1GiB all", "ssdplan 2GiB auto", "ssdplan 2GiB all"]
    assert [arm.name for arm in arms] == names
    assert [(arm.budget, arm.recompute) for arm in arms[1:]] == [
        (budget << 30, recompute) for budget in (1, 2) for recompute in ("auto", "all")
    ]
    for arm in arms[1:]:
        solve = solve_command(tmp_path / "profile.json", arm, batch, None, tmp_path / "plan.json")
        assert solve[solve.index("--recompute") + 1] == arm.recompute and "--residency" not in solve
        shares = {"optimizer": 0.0, "parameters": 0.5}
        solve = solve_command(tmp_path / "profile.json", arm, batch, None, tmp_path / "plan.json", shares)
        assert solve[solve.index("--residency") + 1] == "optimizer=0,parameters=0.5"
    assert "with --recompute all" in arms[2].words and "--recompute" not in arms[1].words
    assert [arm.name for arm in arms_of(("ssdplan",), (), ("none", "paper"))] == ["ssdplan none", "ssdplan paper"]
    for wrong in (("some",), ("all", "all"), ()):
        with pytest.raises(UsageError, match="--recompute"):
            arms_of(("ssdplan",), (), wrong)
    with pytest.raises(UsageError, match="--recompute is for the arm ssdplan"):
        arms_of(("torch",), (), ("all",))


def test_on_a_gpu_commands_environment_and_text_say_so(monkeypatch, tmp_path):
    batch = Batch(sequence_length=32, micro_batch_size=1, micro_batches=2, precision="bf16", device="cuda")
    (ours,) = arms_of(("ssdplan",), (1 << 30,))
    profile = profile_command(tmp_path / "model", tmp_path, batch, tmp_path / "profile.json")
    assert profile[profile.index("--device") + 1] == "cuda"
    solve = solve_command(tmp_path / "profile.json", ours, batch, 24 << 30, tmp_path / "plan.json")
    assert solve[solve.index("--device-memory") + 1] == f"{24 << 30}B"
    assert "--device-memory" not in solve_command(tmp_path / "profile.json", ours, batch, None, tmp_path / "plan.json")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert environment(device="cuda")["CUDA_VISIBLE_DEVICES"] == "3" and environment()["CUDA_VISIBLE_DEVICES"] == ""
    deepspeed, plain = arms_of(("deepspeed-lean", "torch"), ())
    assert "CPU only" in missing(deepspeed, batch) and not missing(plain, batch)
    facts = ModelFacts.of_shape(Shape.parse("hidden=2048,layers=18,heads=16"))
    assert memory_bytes(plain, facts, batch) < memory_bytes(plain, facts, replace(batch, device="cpu")) / 2
    steps = [{"loss": 1.0, "step_seconds": 1.0, "device_peak_bytes": nbytes << 30} for nbytes in (19, 23, 21)]
    io = tuple(processes.IoBytes(0, 0) for _ in steps)
    ended = processes.Ended(0, 9.0, 5 << 30, timed_out=False, others_cores=0.0, io=io)
    result = arm_result("torch-checkpointing", "words", [_round(1, ended, steps, "cuda")], tokens=64)
    assert result.peak_device_bytes == 23 << 30
    found = comparison([result]).model_copy(update={"device": "cuda"})
    found = found.model_copy(update={"machine": found.machine.model_copy(update={"device_name": "A GPU"})})
    text = describe_comparison(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "23 GiB" in text and "on device" in text and "A GPU" in text and "cuda" in text
    assert "on device" not in describe_comparison(comparison([result]))


def test_another_training_is_told(tmp_path):
    ours, _ = arms()
    other = arm_result("torch", "theirs", [one_round(n, (1.0, 1.0), (3.1, 2.0, 1.0)) for n in (1, 2)], tokens=64)
    found = comparison([ours, other])
    assert found.failed and found.arms[1].same_training is False
    assert "not the same training" in describe_comparison(found)


def test_the_table_has_the_figures_of_the_arms(tmp_path):
    gone = arm_result("gone", 'it, or "not"', [], tokens=1, missing="it is not installed")
    found = comparison([*arms(), gone])
    lines = written_and_read(arms_frame(found), tmp_path / "arms.csv")
    document = json.loads(found.text())["arms"]
    assert lines == [
        {name: cell(value) for name, value in arm.items() if name not in ("losses", "rounds")} for arm in document
    ]
    assert lines[2]["step_seconds"] == "" and float(lines[0]["step_seconds"]) == 1.5


def comparison(results, steps=3):
    reference, held = held_together(results)
    return Comparison(
        schema="ssdplan.compare/1", created="2026-01-01T00:00:00+00:00", model="llama 768 x 12", parameters=134_105_856,
        sequence_length=256, micro_batch_size=1, micro_batches=16, steps=steps, rounds=2, volume="volume",
        machine=Surroundings(
            processor="A Processor With A Name That Goes On And On @ 2.40GHz", cores=2, threads=2,
            host_memory_bytes=24 << 30, kernel="6.1", python="3.11.2", versions={"torch": "2.13.0"}, load=0.1,
        ),
        memory_counted="VmHWM", reference=reference, arms=held, ratios=ratios(held, {"ssdplan"}),
    )  # fmt: skip


def test_the_text_fits_and_says_what_is_missing():
    names = ["ssdplan", "torch", "torch-checkpointing", "deepspeed-fast", "deepspeed-lean"]
    names += [f"ssdplan {n}.75GiB" for n in range(2)]
    losses = tuple(1000.0 - n for n in range(41))
    results = [
        arm_result(name, "words " * 30, [one_round(n, (1234.5,) * 40, losses, 20 << 30) for n in (1, 2)], tokens=4096)
        for name in names
    ]
    gone = arm_result("gone", "about it", [], tokens=1, missing="it is not installed")
    found = comparison([*results, gone], steps=41)
    text = describe_comparison(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "0.38 cores while the arms ran, 0.50 at the most; compare on a quiet machine" in text
    assert "not measured: it is not installed" in text and "..." in text and not found.failed
    assert "ssdplan" in text and "2.40GHz" in text
    assert Comparison.model_validate(json.loads(found.text())) == found
    speed, loss = draw(found).axes
    assert len(loss.lines) == len(names) and len(speed.lines) == len(names)
    assert math.isclose(speed.lines[0].get_xdata()[0], 20.0)
