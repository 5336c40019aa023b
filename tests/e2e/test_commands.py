"""The commands as a user runs them, on a tiny model: the whole way, and every wrong input with its exit code."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from ssdplan import cli
from ssdplan.executor.data import apart
from ssdplan.plans.units import parse_bytes
from tests.bounds import HANG_SECONDS
from tests.made.models import make_model, make_tokenizer
from tests.once import once
from tests.warm import ENVIRONMENT, Started, run
from tests.watched import SUBPROCESS

COMMAND = [sys.executable, "-m", "ssdplan.cli"]
QUICK = ("--seconds", 1)
"""For `profile` where nobody looks at how sure its figures are."""
briefly = partial(run, activations=False)
"""A profile without what could be kept of activations, where nobody looks at that either."""


def anew(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command as a shell starts it."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def ssdplan(
    *arguments: object, cwd: Path, expect: int = 0, start: Callable[..., subprocess.CompletedProcess[str]] = run
) -> subprocess.CompletedProcess[str]:
    done = start(*arguments, cwd=cwd)
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def refused(*arguments: object, cwd: Path, code: int) -> str:
    """A command that ends with `code`, one line of error and nothing on standard output."""
    done = ssdplan(*arguments, cwd=cwd, expect=code)
    lines = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(lines) == 1 and not done.stdout, done
    return lines[0]


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """A model, texts, a profile and a plan of a budget that holds a part of the training state."""
    return once(tmp_path_factory, "commands-home", _make_home)


def _make_home(path: Path) -> None:
    make_model("llama", path / "model", layers=4, vocab=320, hidden=64, tied=True)
    make_tokenizer(path / "model")
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (path / "held-out.txt").write_text("over the lazy dog jumps the quick brown fox. " * 8)
    rows = [json.dumps({"text": f"row {i}: " + "the quick brown fox " * (1 + i % 3)}) for i in range(40)]
    (path / "rows.jsonl").write_text("\n".join(rows))
    ssdplan(
        "profile", "--model", "model", "--sequence-length", 32, "--micro-batch-sizes", "1,2", "--precision", "fp32",
        *QUICK, cwd=path,
    )  # fmt: skip
    least = refused("solve", "profile.json", "--host-memory", "64KiB", "--global-batch", 4, cwd=path, code=3)
    budget = least.rsplit("would do is ", 1)[1]
    ssdplan("solve", "profile.json", "--host-memory", budget, "--global-batch", 4, cwd=path)


def test_all_four_commands_work_together(home, tmp_path):
    shown = ssdplan(
        "show", "plan.json", "--plots", tmp_path / "plots", "--trace", tmp_path / "trace.json",
        "--html", tmp_path / "plan.html", cwd=home,
    )  # fmt: skip
    plan = json.loads((home / "plan.json").read_text())
    assert plan["prediction"]["ssd_write_bytes"] > 0, "the budget does not hold the training state"
    assert "micro-batch" in shown.stdout and len(list((tmp_path / "plots").glob("*.png"))) == 3
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    out = tmp_path / "run"
    done = ssdplan(
        "run", "plan.json", "--data", "text.txt", "--eval-data", "held-out.txt", "--eval-every", 4, "--steps", 12,
        "--lr", "3e-3", "--out", out, cwd=home, start=anew,
    )  # fmt: skip
    assert "predicted" in done.stdout and "tokens/s" in done.stderr
    report = json.loads((out / "report.json").read_text())
    exact = {row["quantity"]: row["relative_error"] for row in report["predictions"]}
    for quantity in ("host_arena_bytes", "device_arena_bytes", "ssd_read_bytes", "ssd_write_bytes"):
        assert exact[quantity] == 0.0
    held_out = list(report["eval_losses"].values())
    assert held_out[-1] < held_out[0]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokens = AutoTokenizer.from_pretrained(out / "model")("the quick", return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=4, do_sample=False).shape[1] > tokens["input_ids"].shape[1]
    shown = ssdplan("show", out, "--html", tmp_path / "run.html", cwd=home).stdout
    assert "held-out loss" in shown and "What compute waited for" in shown
    assert "12 of 12 steps; it is done." in shown and "Loss over steps: * training, o held-out" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert "How far compute is behind its prediction" in (tmp_path / "run.html").read_text()
    printed = json.loads(ssdplan("show", out, "--json", cwd=home).stdout)
    overlay = printed.pop("overlay")
    assert printed == report
    assert sum(row["count"] for row in overlay["kinds"]) > 50
    compute = next(row for row in overlay["resources"] if row["resource"] == "compute")
    for side in ("predicted", "measured"):
        waited = sum(row[f"{side}_seconds"] for row in overlay["compute_stalls"])
        assert waited == pytest.approx(compute[f"{side}_idle_seconds"], abs=1e-6)
    trace = json.loads((out / "trace.json").read_text())
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("args", {}).get("op") != 5]
    (out / "trace.json").write_text(json.dumps(trace))
    assert "another plan" in refused("show", out, cwd=home, code=8)
    (out / "trace.json").unlink()
    assert "What compute waited for" not in (shown := ssdplan("show", out, cwd=home)).stdout
    assert "trace.json" in shown.stderr


def test_rows_with_a_part_to_learn_and_a_part_held_out_are_trained_on(home, tmp_path):
    rows = [{"prompt": f"fox {i}", "completion": " over" * (1 + i % 4)} for i in range(80)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    look = ["data", "preview", "--model", "model", "--data", data, "--sequence-length", 32, "--json"]
    shown = json.loads(ssdplan(*look, cwd=home).stdout)
    assert shown["format"] == "completion" and shown["samples"] == 80 and shown["rows"] < 50
    reports = []
    for name, more in (("packed", []), ("padded", ["--no-pack"]), ("across", ["--attend-across"])):
        run = ["run", "plan.json", "--data", data, "--eval-split", 0.2, "--steps", 6, "--lr", "3e-3"]
        ssdplan(*run, "--out", tmp_path / name, *more, cwd=home)
        reports.append(json.loads((tmp_path / name / "report.json").read_text()))
        before, after = reports[-1]["eval_losses"].values()
        assert after < before
        arenas = [row["relative_error"] for row in reports[-1]["predictions"] if "arena" in row["quantity"]]
        assert arenas and not any(arenas)
    packed, padded, across = (report["eval_losses"]["0"] for report in reports)
    assert packed == pytest.approx(padded, rel=1e-5), "what is held out is evaluated as if each had a row of its own"
    assert across != pytest.approx(packed, rel=1e-4)
    base = ["run", "plan.json", "--steps", 1, "--out", tmp_path / "none"]
    assert "--no-pack" in refused(*base, "--data", data, "--attend-across", "--no-pack", cwd=home, code=2)
    both = ["--eval-split", 0.2, "--eval-data", data]
    assert "not allowed with" in refused(*base, "--data", data, *both, cwd=home, code=2)
    data.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    assert "rows.jsonl:2: the row has no field `completion`" in refused(*base, "--data", data, cwd=home, code=2)


def test_serial_and_overlapped_runs_write_the_same_model(home, tmp_path):
    for name, more in (("overlapped", []), ("serial", ["--serial"])):
        ssdplan("run", "plan.json", "--data", "text.txt", "--steps", 3, "--out", tmp_path / name, *more, cwd=home)
    one, other = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("serial", "overlapped"))
    assert one == other


def test_a_machine_unlike_its_profile_is_told_and_replanned(home, tmp_path):
    """A profile whose drive reads and writes a thousand times as slowly as this one, and whose compute is as fast as
    nothing: the plan keeps off the drive, and the run finds out. Whether it moves or not, it trains the same model."""
    profile = json.loads((home / "profile.json").read_text())
    for volume in profile["machine"]["volumes"]:
        for point in volume["frontier"]:
            point["read"], point["write"] = point["read"] / 1000, point["write"] / 1000
    for layer_class in profile["model"]["classes"]:
        for timing in layer_class["timings"]:
            timing["forward_seconds"], timing["backward_seconds"] = 1e-7, 1e-7
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    plan = tmp_path / "plan.json"
    solve = ["solve", tmp_path / "profile.json", "--micro-batches", 2, "--micro-batch-size", 2, "-o", plan]
    least = refused(*solve, "--host-memory", "64KiB", cwd=home, code=3).rsplit("would do is ", 1)[1]
    ssdplan(*solve, "--host-memory", f"{int(1.2 * parse_bytes(least))}B", cwd=home)
    run = ["run", plan, "--data", "text.txt", "--steps", 6, "--lr", "3e-3", "--out"]
    stayed = ssdplan(*run, tmp_path / "stayed", cwd=home).stderr
    replanned = ssdplan(*run, tmp_path / "replanned", "--replan", cwd=home).stderr
    for said in (stayed, replanned):
        assert said.count("the machine is not as its profile says: ") == 1 and "solve would" in said
    assert not (tmp_path / "stayed" / "plan-0.json").exists()
    moved = "moved to the other plan after step 4" in replanned
    assert (tmp_path / "replanned" / "plan-0.json").exists() == moved
    one, other = (tmp_path / name / "model" / "model.safetensors" for name in ("stayed", "replanned"))
    assert one.read_bytes() == other.read_bytes()
    ssdplan("show", tmp_path / "replanned", cwd=home)


def test_a_horizontal_plan_is_solved_shown_and_run(home, tmp_path):
    plan = tmp_path / "plan.json"
    shown = ssdplan(
        "solve", "profile.json", "--host-memory", "64MiB", "--global-batch", 4, "--micro-batch-size", 1,
        "--schedule", "horizontal", "--residency", "optimizer=0.5,parameters=0.5", "-o", plan, "--full", cwd=home,
    ).stdout  # fmt: skip
    assert re.search(r"horizontal, backward recomputes (all|part) of a", shown)
    out = tmp_path / "run"
    ssdplan("run", plan, "--data", "text.txt", "--steps", 2, "--out", out, cwd=home)
    report = json.loads((out / "report.json").read_text())
    exact = {row["quantity"]: row["relative_error"] for row in report["predictions"]}
    for quantity in ("host_arena_bytes", "device_arena_bytes", "ssd_read_bytes", "ssd_write_bytes"):
        assert exact[quantity] == 0.0
    error = refused(
        "solve", "profile.json", "--schedule", "horizontal", "--delay-ratio", 0.5, "-o", plan, cwd=home, code=2
    )
    assert "can only be 0" in error


def test_moments_in_bf16_and_clipping_are_planned_and_run(home, tmp_path):
    plan = tmp_path / "plan.json"
    ssdplan(
        "solve", "profile.json", "--host-memory", "64MiB", "--global-batch", 4, "--optimizer-states", "bf16",
        "--clip-grad-norm", 0.01, "--residency", "optimizer=0.5", "-o", plan, cwd=home,
    )  # fmt: skip
    out = tmp_path / "run"
    ssdplan("run", plan, "--data", "text.txt", "--steps", 3, "--lr", "3e-3", "--out", out, cwd=home)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 3 and all(line["grad_norm"] > 0.01 for line in metrics), "the norm before clipping"
    report = json.loads((out / "report.json").read_text())
    exact = {row["quantity"]: row["relative_error"] for row in report["predictions"]}
    assert exact["ssd_write_bytes"] == exact["host_arena_bytes"] == 0.0


def test_json_is_what_the_file_says(home):
    for command in ("show", "plan.json"), ("show", "profile.json"):
        shown = ssdplan(*command, "--json", cwd=home)
        assert json.loads(shown.stdout) == json.loads((home / command[1]).read_text())


def test_fixed_choices_are_kept(home, tmp_path):
    plan = tmp_path / "plan.json"
    ssdplan(
        "solve", "profile.json", "--host-memory", "64MiB", "--micro-batch-size", 2, "--micro-batches", 3,
        "--delay-ratio", 0.25, "--residency", "parameters=0,optimizer=0.5,checkpoints=1", "-o", plan, cwd=home,
    )  # fmt: skip
    decision = json.loads(plan.read_text())["decision"]
    assert (decision["micro_batch_size"], decision["micro_batches"], decision["delay_ratio"]) == (2, 3, 0.25)
    assert decision["checkpoint_host"] == 1.0
    for placement in decision["placement"].values():
        assert placement["parameters_prompt_host"] == placement["parameters_delayed_host"] == 0
        assert placement["optimizer_prompt_host"] + placement["optimizer_delayed_host"] == pytest.approx(0.5)


def edited(home: Path, where: Path, change) -> Path:
    raw = json.loads((home / "plan.json").read_text())
    change(raw)
    (where / "plan.json").write_text(json.dumps(raw))
    return where / "plan.json"


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (lambda p: p["decision"].update(checkpoint_host=1.2), 2, "decision.checkpoint_host = 1.2"),
        (lambda p: p["decision"].pop("micro_batches"), 2, "decision.micro_batches: this field is missing"),
        (lambda p: p["decision"].update(micro_batchs=2), 2, "did you mean micro_batches?"),
        (lambda p: p["decision"].update(update_chunk_elements=1000), 2, "not a multiple of 2048"),
        (lambda p: p["decision"].update(micro_batches=9), 8, "solve again"),
        (lambda p: p["decision"].update(host_budget_bytes=4096), 4, "host memory"),
        (lambda p: p["model"].update(fingerprint="f" * 64), 8, "another model"),
        (lambda p: p["machine"].update(device="cuda"), 2, "no GPU"),
    ],
)
def test_a_plan_edited_by_hand_is_refused(home, tmp_path, change, code, says):
    plan = edited(home, tmp_path, change)
    out = tmp_path / "run"
    assert says in refused("run", plan, "--data", "text.txt", "--steps", 1, "--out", out, cwd=home, code=code)
    assert not out.exists()


def test_wrong_inputs_are_named(home, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((home / "model" / "config.json").read_bytes())
    run = ["run", "plan.json", "--steps", 1, "--out", tmp_path / "run"]
    cases = [
        (["profile", "--model", tmp_path / "nothing"], 2, "nothing"),
        (["profile", "--model", tmp_path / "bare", "-o", tmp_path / "p.json"], 2, "no weights"),
        (["profile", "--model", "model", "--volume", tmp_path / "none", "-o", tmp_path / "p.json"], 2, "none"),
        (["profile", "--model", "model", "--micro-batch-sizes", "0"], 2, "'0'"),
        (["solve", tmp_path / "none.json"], 2, "none.json"),
        (["solve", "plan.json"], 2, "plan.json"),
        (["solve", "profile.json", "--host-memory", "8Gib!"], 2, "8Gib!"),
        (["solve", "profile.json", "--residency", "weights=1"], 2, "weights=1"),
        (["solve", "profile.json", "--global-batch", "7", "--micro-batch-size", "2"], 2, "7"),
        (["show", tmp_path / "empty.txt"], 2, "empty.txt"),
        (["show", "profile.json", "--html", tmp_path / "p.html"], 2, "no page and no trace"),
        ([*run, "--data", tmp_path / "empty.txt"], 2, "empty.txt"),
        ([*run, "--data", tmp_path / "none.txt"], 2, "none.txt"),
        ([*run, "--data", "text.txt", "--eval-every", 2], 2, "--eval-data"),
        ([*run, "--data", "text.txt", "--serial", "--stall-abort", 9], 2, "--stall-abort"),
        ([*run, "--data", "text.txt", "--volume", "/proc/sys/kernel"], 6, "/proc"),
    ]
    for arguments, code, says in cases:
        assert says in refused(*arguments, cwd=home, code=code), arguments
        assert not (tmp_path / "run").exists() and not (tmp_path / "p.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system without direct I/O")
def test_a_file_system_without_direct_io_is_refused(home, tmp_path):
    (tmp_path / "ramfs").mkdir()
    if subprocess.run(["mount", "-t", "ramfs", "none", tmp_path / "ramfs"], check=False).returncode:
        pytest.skip("this machine does not let us mount a ramfs")
    try:
        volume = ["--volume", tmp_path / "ramfs"]
        profile = ["profile", "--model", "model", *volume, "-o", tmp_path / "p.json"]
        run = ["run", "plan.json", "--data", "text.txt", "--steps", 1, "--out", tmp_path / "run", *volume]
        for arguments in (profile, run):
            assert "direct I/O" in refused(*arguments, cwd=home, code=6)
            assert not list((tmp_path / "ramfs").iterdir())
        assert not (tmp_path / "run").exists() and not (tmp_path / "p.json").exists()
    finally:
        subprocess.run(["umount", tmp_path / "ramfs"], check=True)


def test_a_volume_without_space_is_refused(home, tmp_path, monkeypatch, capsys):
    """A plan whose store is larger than any disk here: many micro-batches of checkpoints on ssd would do the same."""
    real, threads = shutil.disk_usage, torch.get_num_threads()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=4096))
    monkeypatch.setattr(apart, "subprocess", SUBPROCESS)
    monkeypatch.chdir(home)
    try:
        code = cli.main(["run", "plan.json", "--data", "text.txt", "--steps", "1", "--out", str(tmp_path / "run")])
    finally:
        torch.set_num_threads(threads)
    assert code == 5 and "--volume" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_command_line_is_this(tmp_path):
    """Options are added, not renamed: a change here is a change of what users have scripted."""
    shown = {
        command: ssdplan(command, "--help", cwd=tmp_path).stdout
        for command in (
            *("train", "profile", "solve", "show", "run", "export", "volume", "bench", "data", "doctor", "completion"),
        )
    }
    for command, options in {
        "profile": "--model --device --volume --endurance --sequence-length --micro-batch-sizes --precision "
        "--freeze --optimizer --allow-unused-weights --seconds --json --quiet --output",
        "train": "--model --data --out --steps --epochs --from-profile --host-memory --global-batch --lr --volume",
        "solve": "--host-memory --device-memory --global-batch --max-ssd-write-per-step "
        "--optimizer-states --clip-grad-norm "
        "--schedule --micro-batch-size --micro-batches --delay-ratio --residency --json --full --quiet --output "
        "--model --gpu --ssd --cpu --link --figure --sequence-length --micro-batch-sizes --precision --sweep --plots "
        "--csv --solver --write-lp --tokens --price --power --power-price",
        "show": "--plots --html --trace --csv --json --tokens --price --power --power-price",
        "run": "--data --steps --epochs --out --model --volume --lr --weight-decay --seed --pack --no-pack --eval-data "
        "--eval-every --serial --replan --stall-after --stall-abort --json "
        "--lr-schedule --warmup-steps --decay-steps --min-lr --beta1 --beta2 --eps --decay-all --loss-scale "
        "--muon-lr --muon-momentum --muon-adjust-lr "
        "--loss-scale-growth --resume --resume-anyway --adopt --snapshot-every --snapshot-minutes --keep "
        "--attend-across --data-format --append-eos --no-append-eos --token-cache --eval-split --eval-samples "
        "--tensorboard --wandb",
        "export": "--to --model --volume",
        "volume": "init info check drop",
        "data": "preview",
        "doctor": "--json",
        "completion": "bash zsh fish",
        "bench": "--volume --pairs --size --only --csv --json",
    }.items():
        for option in options.split():
            assert option in shown[command], f"{command} {option}"
    assert "{vertical,horizontal,single}" in shown["solve"]


def test_fp16_from_profile_to_model(home, tmp_path):
    """With a schedule, exclusions from decay, and a scale that overflows: a plan in another precision refuses it."""
    recipe = ["--lr", "3e-3", "--lr-schedule", "wsd", "--warmup-steps", "0.25", "--beta2", "0.95", "--min-lr", "1e-4"]
    scale = ["--loss-scale", str(2**24), "--loss-scale-growth", "3"]
    run = ["run", "plan.json", "--data", home / "text.txt", "--steps", 12, "--out", tmp_path / "run", *recipe]
    assert "needs no --loss-scale" in refused(*run, *scale, cwd=home, code=2)
    ssdplan(
        "profile", "--model", home / "model", "--sequence-length", 32, "--micro-batch-sizes", "2",
        "--precision", "fp16", *QUICK, cwd=tmp_path, start=briefly,
    )  # fmt: skip
    ssdplan("solve", "profile.json", "--host-memory", "1GiB", "--global-batch", 4, cwd=tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["decision"]["delay_ratio"] == 1.0
    ssdplan(*run, *scale, cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    skipped = [line["skipped"] for line in lines]
    assert skipped[0] and not all(skipped) and lines[0]["loss_scale"] == 2**24 and lines[0]["grad_norm"] is None
    assert lines[0]["lr"] == pytest.approx(1e-4) and max(line["lr"] for line in lines) > 2e-3
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert "float16" in (config.get("dtype"), config.get("torch_dtype"))


def test_a_what_if_is_solved_and_shown_but_not_run(tmp_path):
    ssdplan(
        "solve", "--model", "smollm2-135m", "--gpu", "RTX-4090", "--ssd", "samsung-990-pro*2", "--host-memory", "2GiB",
        "--micro-batch-sizes", "4", "--micro-batches", "4", "-o", "plan.json",
        cwd=tmp_path,
    )  # fmt: skip
    assert "Estimated from data sheets" in ssdplan("show", "plan.json", cwd=tmp_path).stdout
    (tmp_path / "text.txt").write_text("text " * 100)
    error = refused("run", "plan.json", "--data", "text.txt", "--steps", 1, "--out", "run", cwd=tmp_path, code=8)
    assert "profile this machine" in error and not (tmp_path / "run").exists()
    error = refused("solve", "--model", "smollm2-135n", "--gpu", "rtx-4090", "--ssd", "samsung-990-pro",
                    "--host-memory", "2GiB", cwd=tmp_path, code=2)  # fmt: skip
    assert "smollm2-135m" in error


def as_a_shell(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    """The command as a shell starts it, under way."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a script inherits an ignored SIGINT, which a command rightly goes on ignoring.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(("number", "start"), [(signal.SIGINT, as_a_shell), (signal.SIGTERM, Started)])
def test_an_interrupted_run_ends_cleanly(home, tmp_path, number, start):
    out = tmp_path / "run"
    process = start("run", "plan.json", "--data", "text.txt", "--steps", 100000, "--out", out, cwd=home)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "step 2/" in line:
                break
        assert (out / "volume-0.ssdplan").exists()
        process.send_signal(number)
        _, rest = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and "interrupted" in rest and "Traceback" not in rest
    assert not list(out.glob("*.ssdplan")) and not (out / "model").exists()
    assert len((out / "metrics.jsonl").read_text().splitlines()) >= 2
