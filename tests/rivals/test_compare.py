"""`ssdplan compare` as a user runs it: real arms on a tiny model, what is missing or refused, and what is left."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ssdplan import cli
from ssdplan.rivals import compare as comparing
from ssdplan.rivals.making import Order, make
from ssdplan.rivals.processes import Ended, IoBytes
from tests import watched
from tests.bounds import HANG_SECONDS
from tests.made.models import make_model, make_tokenizer
from tests.plans.read_csv import cell, read_csv
from tests.processor import PRECISION

SHAPE = "hidden=64,layers=2,heads=4,vocab=512"
COMMAND = [sys.executable, "-m", "ssdplan.cli", "compare"]
QUICK = """
import sys
from types import SimpleNamespace
from ssdplan import cli
from ssdplan.rivals import arms, processes
from tests.rivals.forked import Forked
command = arms.profile_command
arms.profile_command = lambda *known: [*command(*known), "--seconds", "1"]
processes.subprocess = SimpleNamespace(Popen=Forked, DEVNULL=-3)
sys.exit(cli.main(["compare", *sys.argv[1:]]))
"""
"""The command, with processes that are forked and a profile that nobody looks at how sure its figures are."""
SLEEPING = """
import sys
from ssdplan import cli
from ssdplan.rivals import compare
arm = "import pathlib, sys, time; job = pathlib.Path(sys.argv[1]); "
arm += "job.with_name('metrics.jsonl').write_text('{}' + chr(10)); time.sleep(100000)"
compare._prepare = lambda bench, arms: None
compare._module = lambda name, job: [sys.executable, "-c", arm, str(job)]
sys.exit(cli.main(["compare", *sys.argv[1:]]))
"""
"""The command, with nothing prepared and an arm that says a step and then nothing."""
TINY = ["--shape", SHAPE, "--sequence-length", "32", "--micro-batches", "2"]


def finished(*arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", QUICK, *map(str, arguments)]
    environment = {**os.environ, watched.ADDRESS: watched.address()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The document of a comparison of the arms that are always there, one of them with too small a budget; and the
    directory that it worked in."""
    home = tmp_path_factory.mktemp("home")
    (home / "volume").mkdir()
    make_tokenizer(make_model("llama", home / "model", vocab=320, hidden=64, layers=4))
    (home / "text.txt").write_text("the" + " the" * 999)  # the same in every row, so that steps can be compared
    done = finished(
        "--model", home / "model", "--data", home / "text.txt", "--sequence-length", 32, "--micro-batches", 2,
        "--arms", "torch,torch-checkpointing,ssdplan", "--host-memory", "64MiB,64KiB",
        "--steps", 4, "--rounds", 1, "--volume", home / "volume", "--work", home / "work", "--plots", home / "plots",
        "--csv", home / "arms.csv", "--json", expect=1,
    )  # fmt: skip
    return json.loads(done.stdout), home


def test_all_arms_train_the_same(found):
    document, _ = found
    plain, *others, _ = document["arms"]
    assert [plain["name"], *(arm["name"] for arm in others)] == ["torch", "torch-checkpointing", "ssdplan 64MiB"]
    assert document["reference"] == "torch" and len(plain["losses"]) == 4
    assert plain["losses"][-1] < plain["losses"][0] - 0.05, "updates show in the losses"
    for arm in others:
        assert arm["losses"] == pytest.approx(plain["losses"], abs=1e-3)
        assert arm["same_training"] is True and arm["loss_difference"] < 1e-3


def test_every_figure_is_measured(found):
    document, home = found
    columns = ("name", "step_seconds", "peak_memory_bytes", "ssd_read_bytes", "missing")
    rows = [tuple(row[column] for column in columns) for row in read_csv(home / "arms.csv")]
    assert rows == [tuple(cell(arm[column]) for column in columns) for arm in document["arms"]]
    assert document["schema"] == "ssdplan.compare/1" and document["memory_counted"] == "VmHWM"
    assert document["machine"]["threads"] >= 1 and {"torch", "transformers"} <= set(document["machine"]["versions"])
    *measured, small = document["arms"]
    assert small["name"] == "ssdplan 64KiB" and small["failed"] and "the least that would do is" in small["missing"]
    for arm in measured:
        assert not arm["missing"] and not arm["failed"]
        assert arm["tokens_per_second"] == pytest.approx(64 / arm["step_seconds"])
        assert arm["step_seconds_low"] <= arm["step_seconds"] <= arm["step_seconds_high"]
        (one,) = arm["rounds"]
        assert len(one["step_seconds"]) == len(one["losses"]) == 4 and min(one["step_seconds"]) > 0
        assert sum(one["step_seconds"]) < one["process_seconds"] and one["others_cores"] >= 0
        # The interpreter with PyTorch and transformers takes more than 200 MiB; this model nothing worth telling.
        assert 200 << 20 < arm["peak_memory_bytes"] < 3 << 30
        assert arm["kernel_read_bytes"] is not None and arm["kernel_write_bytes"] is not None
    ours = measured[-1]
    assert ours["predicted_step_seconds"] > 0 and ours["ssd_read_bytes"] is not None
    assert [(row["ours"], row["rival"]) for row in document["ratios"]] == [
        ("ssdplan 64MiB", "torch"),
        ("ssdplan 64MiB", "torch-checkpointing"),
    ]


def test_only_what_is_named_stays(found):
    _, home = found
    assert not list((home / "volume").iterdir())
    assert (home / "work" / "model" / "config.json").exists() and (home / "work" / "profile.json").exists()
    assert (home / "work" / "torch-round-1" / "log.txt").exists()
    assert (home / "plots" / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_trains_the_same_and_its_bytes_are_counted(tmp_path):
    # Parameters of less than a MiB stay in its memory, and where a head is small beside them it stumbles over itself
    # (0.19.8 reads one that is used twice in a row into two buffers); so the least model that it treats as a large one.
    shape, words = "hidden=768,layers=2,heads=12,vocab=8192", " ".join(f"{n:04}" for n in range(7, 8000, 799))
    (tmp_path / "made").mkdir()
    make(Order(str(tmp_path / "made"), shape, "", "", vocab=8192, rows=1, row_tokens=2, seed=0, precision=PRECISION))
    (tmp_path / "text.txt").write_text(f"{words}\n" * 40)
    (tmp_path / "volume").mkdir()
    done = finished(
        "--model", tmp_path / "made" / "model", "--data", tmp_path / "text.txt", "--sequence-length", 32,
        "--micro-batches", 2, "--arms", "torch,deepspeed-fast,deepspeed-lean", "--steps", 5, "--rounds", 1,
        "--precision", PRECISION, "--volume", tmp_path / "volume", "--json",
    )  # fmt: skip
    plain, *others = json.loads(done.stdout)["arms"]
    learnt = plain["losses"][0] - plain["losses"][-1]
    assert learnt > 0.5
    for arm in others:
        if "cannot be built" in arm["missing"]:
            pytest.skip(arm["missing"])
        assert arm["same_training"] and arm["losses"] == pytest.approx(plain["losses"], abs=0.02 * learnt)
        # Of the same buffers: with rotary frequencies in bf16 the first is 9e-4 off.
        assert arm["losses"][0] == pytest.approx(plain["losses"][0], abs=1e-4)
        assert not arm["missing"], arm["missing"]
        # Masters and two moments of each parameter in fp32 go to the drive every step.
        assert arm["kernel_write_bytes"] > 12 * 26_700_000
    assert not list((tmp_path / "volume").iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_all_arms_train_the_same_on_a_gpu(tmp_path):
    done = finished(
        *TINY, "--device", "cuda", "--arms", "torch,torch-checkpointing,ssdplan", "--host-memory", "256MiB",
        "--device-memory", "1GiB", "--steps", 4, "--rounds", 1, "--volume", tmp_path, "--json",
    )  # fmt: skip
    document = json.loads(done.stdout)
    plain, *others = document["arms"]
    assert document["device"] == "cuda" and document["machine"]["device_name"]
    for arm in others:
        assert arm["same_training"] and arm["losses"] == pytest.approx(plain["losses"], abs=2e-3)
    assert all(0 < arm["peak_device_bytes"] < 1 << 30 for arm in document["arms"])


def test_arms_take_turns_and_every_round_turns_the_order_round(tmp_path, monkeypatch, capsys):
    ran = []

    def fake(command, *, log, lines=None, **rest):
        log.touch()
        if lines is not None:
            ran.append(lines.parent.name)
            steps = [{"step": n + 1, "loss": 1.0, "step_seconds": 2.0} for n in range(3)]
            lines.write_text("".join(json.dumps(step) + "\n" for step in steps))
        io = tuple(IoBytes(100 * n, 10 * n) for n in (1, 4, 5))
        return Ended(code=0, seconds=9.0, peak_memory_bytes=1 << 30, timed_out=False, others_cores=0.5, io=io)

    monkeypatch.setattr(comparing, "run", fake)
    arguments = ["--arms", "torch,torch-checkpointing", "--steps", "3", "--rounds", "3", "--volume", str(tmp_path)]
    assert cli.main(["compare", *TINY, *arguments, "--json"]) == 0
    one, other = "torch-round-", "torch-checkpointing-round-"
    assert ran == [one + "1", other + "1", other + "2", one + "2", one + "3", other + "3"]
    arm = json.loads(capsys.readouterr().out)["arms"][0]
    assert (arm["kernel_read_bytes"], arm["kernel_write_bytes"]) == (200, 20), "from the first step's end to the last's"


def test_without_deepspeed_its_row_says_so(tmp_path, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else real(name))
    arguments = ["compare", *TINY, "--arms", "deepspeed-fast,deepspeed-lean", "--volume", str(tmp_path)]
    assert cli.main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("not measured: deepspeed is not installed") == 2
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_a_row_and_not_run(tmp_path, monkeypatch, capsys):
    real = comparing._memory
    monkeypatch.setattr(comparing, "_memory", lambda field: 1 << 20 if field == "MemAvailable" else real(field))
    assert cli.main(["compare", *TINY, "--arms", "torch", "--volume", str(tmp_path), "--json"]) == 0
    (arm,) = json.loads(capsys.readouterr().out)["arms"]
    assert "1 MiB are available" in arm["missing"] and not arm["failed"] and arm["tokens_per_second"] is None


def test_an_arm_that_fails_is_a_row_and_an_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparing, "_prepare", lambda bench, arms: None)
    code = cli.main(["compare", *TINY, "--arms", "torch", "--timeout", "0.2", "--volume", str(tmp_path), "--json"])
    (arm,) = json.loads(capsys.readouterr().out)["arms"]
    assert code == 1 and arm["failed"] and "round 1" in arm["missing"] and "--timeout" in arm["missing"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--model"),
        (["--shape", "small", "--model", "."], "one of them"),
        (["--shape", "large"], "large"),
        (["--shape", "hidden=64,layers=2"], "heads"),
        (["--shape", "hidden=64,layers=2,heads=5"], "multiple"),
        (["--shape", "hidden=64,layers=2,heads=4,width=3"], "width=3"),
        (["--model", "nowhere"], "nowhere"),
        (["--shape", SHAPE, "--data", "text.txt"], "--data needs --model"),
        (["--shape", SHAPE, "--arms", "torch,tensorflow"], "tensorflow"),
        (["--shape", SHAPE, "--arms", "torch,torch"], "each once"),
        (["--shape", SHAPE, "--arms", "torch", "--host-memory", "1GiB"], "--host-memory"),
        (["--shape", SHAPE, "--arms", "torch", "--device-memory", "1GiB"], "--device-memory"),
        (["--shape", SHAPE, "--arms", "torch", "--residency", "optimizer=0"], "--residency"),
        (["--shape", SHAPE, "--host-memory", "1GiB,1GiB"], "twice"),
        (["--shape", SHAPE, "--host-memory", "1000MiB,1000.1MiB"], "look the same"),
        (["--shape", SHAPE, "--steps", "1"], "--steps"),
        (["--shape", SHAPE, "--directions", "2"], "only --optimizer mezo"),
        (["--shape", SHAPE, "--optimizer", "mezo", "--recompute", "all"], "nothing to recompute"),
        (["--shape", SHAPE, "--sequence-length", "1"], "--sequence-length"),
        (["--shape", SHAPE, "--volume", "nowhere"], "nowhere"),
    ],
)
def test_wrong_arguments_are_named(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("error:") == 1 and not captured.out
    assert not list(tmp_path.iterdir())


def test_a_work_directory_with_something_in_it_is_refused(tmp_path, capsys):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine").touch()
    arguments = ["compare", *TINY, "--volume", str(tmp_path), "--work", str(tmp_path / "work")]
    assert cli.main(arguments) == 2 and "not an empty directory" in capsys.readouterr().err


def test_a_disk_without_space_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    real = comparing.shutil.disk_usage
    monkeypatch.setattr(comparing.shutil, "disk_usage", lambda path: real(path)._replace(free=4096))
    assert cli.main(["compare", *TINY, "--volume", str(tmp_path), "--arms", "torch"]) == 5
    assert "free some space" in capsys.readouterr().err and not list(tmp_path.iterdir())


def processes_that_name(text: str) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if text in (place / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(place.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("number", "command"),
    [
        (signal.SIGTERM, [*COMMAND, "--arms", "torch"]),
        (signal.SIGINT, [sys.executable, "-c", SLEEPING, "--arms", "torch"]),
        (signal.SIGKILL, [sys.executable, "-c", SLEEPING, "--arms", "torch"]),
    ],
)
def test_a_killed_comparison_leaves_no_process(tmp_path, number, command):
    command = [*command, *TINY, "--steps", "20000", "--volume", str(tmp_path)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while not list(tmp_path.glob("*/work/torch-round-1/metrics.jsonl")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        arms = [pid for pid in processes_that_name(str(tmp_path)) if pid not in (process.pid, os.getpid())]
        assert arms, "the arm is a process of its own"
        process.send_signal(number)
        _, said = process.communicate(timeout=HANG_SECONDS)
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + HANG_SECONDS
    while processes_that_name(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_that_name(str(tmp_path))
    if number != signal.SIGKILL:
        assert process.returncode == 130 and "interrupted" in said and "Traceback" not in said
        assert not list(tmp_path.iterdir())


def test_the_command_line_is_this(capsys):
    with pytest.raises(SystemExit):
        cli.main(["compare", "--help"])
    shown = capsys.readouterr().out
    options = (
        "--model --shape --data --arms --host-memory --device-memory --sequence-length --micro-batch-size "
        "--micro-batches --precision --device --optimizer --directions --steps --rounds --volume --work --timeout "
        "--plots --csv --json"
    )
    for option in options.split():
        assert option in shown
