"""Budgets hold for the whole process as the kernel counts it, and one that cannot be kept is refused in time.

What is predicted of a process is held to runs as a shell starts them. Where a limit is set upon what was mapped before
a plan's first byte, processes are forked from one that has that already (`warm.py`).
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssdplan.executor.device.tensors import DTYPES
from ssdplan.executor.model.directory.random_model import Shape, write_random_model
from tests import warm
from tests.bounds import HANG_SECONDS
from tests.extent import short_or_full
from tests.processor import PRECISION

MIB = 1 << 20
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
THREADS_BYTES = 96 * MIB
"""Stacks of the run's threads, 8 MiB each, which a limit of what is mapped counts whole though they are hardly used."""
OPENED = f"""
import torch
from pathlib import Path
import ssdplan.executor.train
from ssdplan.native.process import read_fields, settle_heap
settle_heap()
from ssdplan.executor.model.model import open_model
open_model(Path("model"), {DTYPES[PRECISION]})
print(dict(read_fields(Path("/proc/self/status")))["VmData"].split()[0])
"""
"""Prints what is mapped, in KiB, by a process with torch and the opened model: the base, as such a limit counts it."""


def anew(*arguments: object, cwd: Path, group: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command as a shell starts it, in a control group."""

    def limit() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.run(
        [sys.executable, "-m", "ssdplan.cli", *map(str, arguments)],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
        preexec_fn=limit,
    )


def run(home: Path, out: str, most: int | None = None, group: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Three steps of a process that is forked and has no more than `most` bytes mapped to write to (`ulimit -d`), or
    of one as a shell starts it. Each run has its text tokenised."""
    arguments = ("run", "plan.json", "--data", "text.txt", "--steps", 3, "--out", out, "--lr", "1e-3",
                 "--token-cache", f"{out}-tokens")  # fmt: skip
    if most is not None:
        return warm.run(*arguments, cwd=home, data_bytes=most)
    return anew(*arguments, cwd=home, group=group)


@contextlib.contextmanager
def memory_group(most: int) -> Iterator[Path]:
    """A control group whose processes may have `most` bytes of memory, with what the kernel keeps of files for them;
    skips where none can be made."""
    roots = {Path("/sys/fs/cgroup"): "memory.max", Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes"}
    for root, limit in roots.items():
        group = root / f"ssdplan-test-{os.getpid()}"
        try:
            group.mkdir()
            with (group / limit).open("r+") as file:  # the kernel made it; elsewhere there is none
                file.write(str(most))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            group.rmdir()
        return
    pytest.skip("no control group with a limit of memory can be made here")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A model with 300 MiB of training state, and a plan that has less than half as much for it."""
    path = tmp_path_factory.mktemp("home")
    write_random_model(Shape(hidden=384, layers=6, vocab=16384), path / "model")
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    profile = ("profile", "--model", "model", "--sequence-length", 128, "--micro-batch-sizes", 1, "--seconds", 1,
               "--precision", PRECISION)  # fmt: skip
    solve = ("solve", "profile.json", "--host-memory", "120MiB", "--device-memory", "200MiB", "--global-batch", 2)
    for start, command in ((anew, profile), (warm.run, solve)):
        done = start(*command, cwd=path)
        assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def base(home) -> int:
    """What such a limit counts of a process before a plan's first byte."""
    done = warm.python(OPENED, cwd=home)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) << 10


@pytest.fixture(scope="module")
def free_run(home) -> dict:
    """The report of a run that may take what it likes."""
    done = run(home, "free")
    assert done.returncode == 0, done.stderr
    return json.loads((home / "free" / "report.json").read_text())


def test_the_whole_process_is_predicted(home, free_run):
    plan = json.loads((home / "plan.json").read_text())
    rows = {row["quantity"]: row for row in free_run["predictions"]}
    row = rows["peak_process_bytes"]
    most = plan["prediction"]["peak_process_bytes"]
    kernels = {entry["tokens"]: entry["kept_bytes"] for entry in plan["model"]["kernels"]}
    assert set(kernels) == {32, 64}
    assert sum(kernels.values()) < most / 10
    if PRECISION == "bf16":  # else matrices are multiplied by others than oneDNN, which make none
        assert sum(kernels.values()) > MIB, "oneDNN makes kernels for every number of tokens"
    assert row["predicted"] == most - sum(kernels.values()), "rows of packed text are all full"
    assert row["measured"] <= row["predicted"], "never more than what was promised"
    # The allowances for holes in the heap and for loading are most of what is too much in so small a plan.
    assert row["predicted"] - row["measured"] <= 80 * MIB
    assert free_run["loading_process_peak_bytes"] <= row["predicted"]
    lines = [json.loads(line) for line in (home / "free" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["process_peak_bytes"] for line in lines) == row["measured"]


def test_a_run_keeps_to_its_budgets_under_a_limit_of_the_kernel(home, base, free_run):
    decision = json.loads((home / "plan.json").read_text())["decision"]
    budgets = decision["host_budget_bytes"] + decision["device_budget_bytes"]
    done = run(home, "limited", base + budgets + THREADS_BYTES)
    assert done.returncode == 0, done.stderr
    report = json.loads((home / "limited" / "report.json").read_text())
    assert report["losses"] == free_run["losses"]


def test_a_run_keeps_to_what_was_predicted_of_it_in_a_control_group(home, free_run):
    """The kernel ends a process that needs more, and it counts more than a limit of what is mapped: files too."""
    most = json.loads((home / "plan.json").read_text())["prediction"]["peak_process_bytes"]
    with memory_group(most) as group:
        done = run(home, "grouped", group=group)
    assert done.returncode == 0, done.stderr
    assert json.loads((home / "grouped" / "report.json").read_text())["losses"] == free_run["losses"]


def test_a_limit_that_is_too_small_is_refused_before_a_weight_is_loaded(home, base):
    done = run(home, "refused", base + 100 * MIB)
    assert done.returncode == 4, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert "are missing" in line and "loading" not in done.stderr
    assert "ulimit -d leaves" in line and "control group" not in line and "-v" not in line
    assert "Traceback" not in done.stderr and not (home / "refused").exists()


@pytest.mark.parametrize("more", short_or_full([300, 350], [220, 300, 325, 350]))
def test_no_limit_ends_a_run_without_a_word(home, base, free_run, more):
    """From too little to nearly enough: refused, or the same losses; nothing else."""
    done = run(home, f"most-{more}", base + more * MIB)
    if done.returncode == 0:
        report = json.loads((home / f"most-{more}" / "report.json").read_text())
        assert report["losses"] == free_run["losses"]
    else:
        assert done.returncode == 4, (done.returncode, done.stderr)
        assert "Traceback" not in done.stderr
        assert "step 3/3" not in done.stderr, "what has room for its steps has room to write the model"
