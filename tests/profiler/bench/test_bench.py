"""The command as a user runs it, tiny; what it refuses; and what fio's absence leaves."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ssdplan import cli
from ssdplan.native.errors import io_error
from ssdplan.native.process import Memory
from ssdplan.plans.errors import IoFailure, MemoryBudgetError, UsageError
from ssdplan.profiler.bench import bench as module
from ssdplan.profiler.bench.bench import GROUPS, bench, engine_rows
from ssdplan.profiler.bench.engine import EngineBench, EngineRow, Fio, FioMissing
from ssdplan.profiler.bench.report import HEADINGS
from tests import warm
from tests.bounds import HANG_SECONDS
from tests.plans.read_csv import read_csv
from tests.profiler.test_measure import silent

MIB = 1 << 20
COMMAND = [sys.executable, "-m", "ssdplan.cli", "bench"]


def _found(fio: Fio | FioMissing) -> EngineBench:
    there = isinstance(fio, Fio)
    row = EngineRow("read", ours=(9.0, 10.0, 8.0), fio=(10.0, 10.0, 10.0) * there, fio_default=(5.0, 4.0, 4.0) * there)
    return EngineBench(("here",), 64 * MIB, "io_uring", 0, 32 * MIB, fio, (row,))


def test_the_engine_beside_fio() -> None:
    """Ratios round by round: 0.9, 1, 0.8 against the same buffers; 1.8, 2.5, 2 against fio's own."""
    same, default = engine_rows(_found(Fio("fio", "fio-3.33", 0)))
    assert (same.group, same.name, same.unit, same.ours, same.rival) == (
        "engine", "read, fio, same buffers", "B/s", 9.0, 10.0
    )  # fmt: skip
    assert same.ratio is not None and same.ratio.median == pytest.approx(0.9) and same.met is False
    assert default.ratio is not None and default.ratio.median == pytest.approx(2.0) and default.met is True
    assert default.note == "the same buffers make fio 2.50 times as fast here"


def test_without_fio_rows_say_so() -> None:
    rows = engine_rows(_found(FioMissing("fio is not installed")))
    assert [row.missing for row in rows] == ["fio is not installed; install fio, which most distributions have"] * 2
    assert all(row.ours == 9.0 and row.ratio is None and row.met is None and row.target for row in rows)


def test_no_direct_io_is_a_row_and_a_failing_drive_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(number: int) -> None:
        def measure(paths: Sequence[Path], **_: object) -> EngineBench:
            error = io_error(number, os.strerror(number), str(paths[0]), 0, 0)
            raise IoFailure(f"{paths[0]}: cannot be measured: {error.strerror}") from error

        monkeypatch.setattr(module, "measure_engine", measure)

    failing(errno.EINVAL)
    (row,) = bench([tmp_path], nbytes=64 * MIB, pairs=1, groups=["engine"], progress=silent).rows
    assert str(tmp_path) in row.missing and "no direct I/O" in row.missing and row.met is None
    failing(errno.EIO)
    with pytest.raises(IoFailure, match="cannot be measured"):
        bench([tmp_path], nbytes=64 * MIB, pairs=1, groups=["engine"], progress=silent)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"groups": ["adam", "nothing"]}, "name some of engine, adam"),
        ({"groups": ["adam", "adam"]}, "each once"),
        ({"groups": []}, "name some of"),
        ({"nbytes": 63 * MIB}, "at least 64 MiB"),
        ({"volumes": [Path("."), Path("..")], "nbytes": 64 * MIB}, "at least 128 MiB"),
        ({"pairs": 0}, "at least one"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: dict, says: str) -> None:
    given = {"volumes": [Path(".")], "nbytes": 128 * MIB, "pairs": 1, "groups": GROUPS, **arguments}
    with pytest.raises(UsageError, match=says):
        bench(given.pop("volumes"), **given, progress=silent)


def test_too_little_memory_is_refused_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "host_memory", lambda: Memory(total=1 << 30, available=600 * MIB))
    with pytest.raises(MemoryBudgetError, match="needs 768 MiB of memory, and 600 MiB are available; give a smaller"):
        bench([Path()], nbytes=512 * MIB, pairs=1, groups=["adam"], progress=silent)


def _run(*arguments: object, cwd: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = warm.run("bench", *arguments, cwd=cwd)
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def test_the_command_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    done = _run("--size", "64MiB", "--pairs", 1, "--csv", "rows.csv", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert [row["name"] for row in read_csv(tmp_path / "rows.csv")] == [row["name"] for row in document["rows"]]
    (tmp_path / "rows.csv").unlink()
    assert document["pairs"] == 1 and document["size_bytes"] == 64 * MIB
    assert document["volumes"] == [str(tmp_path.resolve())]
    groups = [row["group"] for row in document["rows"]]
    assert list(dict.fromkeys(groups)) == list(GROUPS)
    for row in document["rows"]:
        assert row["ours"] is not None or row["missing"], row
        assert (row["met"] is None) == (row["ratio"] is None or row["target"] is None)
    assert "bench:" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"] and (tmp_path / "mine").read_text() == "kept"


def test_the_text_has_every_group_that_was_asked_for(tmp_path: Path) -> None:
    done = _run("--size", "64MiB", "--pairs", 1, "--only", "page-lock,checksum", cwd=tmp_path)
    assert "Checksum" in done.stdout and "Page-lock" in done.stdout and "Engine" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--only", "adamw"], 2, "name some of engine, adam"),
        (["--pairs", "0"], 2, "whole number"),
        (["--size", "large"], 2, "not a size"),
        (["--volume", "nowhere", "--size", "64MiB", "--only", "engine"], 2, "nowhere"),
        (["--volume", ".", "--only", "adam"], 2, "--volume is for the engine"),
        (["--size", "1000TiB", "--only", "adam"], 4, "smaller --size"),
    ],
)
def test_wrong_usage(arguments: list[str], code: int, says: str, tmp_path: Path) -> None:
    done = _run(*arguments, cwd=tmp_path, expect=code)
    assert says in done.stderr and not done.stdout
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--size", "64MiB", "--pairs", "1000", "--only", "engine"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stderr is not None
        process.stderr.readline()  # it has begun
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=HANG_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and errors.rstrip().endswith("ssdplan: error: interrupted") and not out
    assert not list(tmp_path.iterdir())


def test_every_group_has_its_heading() -> None:
    assert tuple(HEADINGS) == GROUPS


def test_the_options_are_these(capsys: pytest.CaptureFixture[str]) -> None:
    """Options are added, not renamed."""
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    shown = capsys.readouterr().out
    for option in ("--volume", "--pairs", "--size", "--only", "--csv", "--json"):
        assert option in shown
    for group in GROUPS:
        assert group in shown
