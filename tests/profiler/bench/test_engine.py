"""The engine beside fio: the figures are of the right bytes, nothing is left behind, and a missing fio is a result."""

import json
import os
from pathlib import Path

import pytest

from ssdplan.native import Engine
from ssdplan.plans.errors import IoFailure, UsageError
from ssdplan.profiler.bench import engine as bench_engine
from ssdplan.profiler.bench.engine import PATTERNS, EngineRow, Fio, FioMissing, measure_engine

MIB = 1 << 20

# Stands in for fio: does no I/O, and reports what it was asked to move as moved in one second.
FIO = """#!/usr/bin/env python3
import json, os, sys
if sys.argv[1:] == ["--version"]:
    print("fio-0.0")
    raise SystemExit
options = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
for name in options["filename"].split(":"):
    assert os.stat(name).st_size == int(options["size"]) // len(options["filename"].split(":"))
with open(os.environ["FIO_LOG"], "a") as log:
    print(json.dumps({**options, "huge": os.environ.get("GLIBC_TUNABLES", "")}), file=log)
nbytes = int(options["io_size"])
print(json.dumps({"jobs": [{"error": int(os.environ.get("FIO_ERROR", 0)),
    "read": {"io_bytes": nbytes, "runtime": 1000}, "write": {"io_bytes": 0, "runtime": 0}}]}))
"""


@pytest.fixture
def fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "fio").write_text(FIO)
    (folder / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FIO_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(bench_engine, "SAMPLE_SECONDS", 0.01)
    return tmp_path / "log"


def test_pairs_of_runs_on_two_directories(fio: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    told: list[float] = []
    bench = measure_engine(folders, nbytes=128 * MIB, pairs=2, progress=lambda done, _: told.append(done))
    assert isinstance(bench.fio, Fio)
    assert bench.fio.version == "fio-0.0"
    assert bench.nbytes == 128 * MIB
    assert [row.name for row in bench.rows] == [pattern.name for pattern in PATTERNS]
    assert bench.engine.startswith(("io_uring", "4 threads"))
    assert 0 <= bench.huge_page_bytes <= bench.buffer_bytes
    for row in bench.rows:
        assert len(row.ours) == len(row.fio) == len(row.fio_default) == len(row.ratios) == 2
        assert row.ours_bandwidth > 0
        assert row.ratio == pytest.approx((row.ours[0] / row.fio[0] + row.ours[1] / row.fio[1]) / 2)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert not any(any(folder.iterdir()) for folder in folders)
    # As many runs with huge pages as without (and one to try it); the same bytes for both and for the engine.
    runs = [json.loads(line) for line in fio.read_text().splitlines()]
    assert len(runs) == 1 + 2 * 2 * len(PATTERNS)
    assert sum(1 for run in runs if "hugetlb" in run["huge"] and run["fixedbufs"] == "1") == 1 + 2 * len(PATTERNS)
    assert all(run["direct"] == "1" and run["bs"] == str(MIB) and run["allow_file_create"] == "0" for run in runs)


def test_ratios_are_of_runs_of_the_same_round() -> None:
    row = EngineRow("read", ours=(1.0, 4.0, 3.0), fio=(2.0, 4.0, 1.0), fio_default=(1.0, 1.0, 1.0))
    assert row.ratios == (0.5, 1.0, 3.0)
    assert (row.ratio, row.default_ratio, row.ours_bandwidth, row.fio_bandwidth) == (1.0, 3.0, 3.0, 2.0)
    alone = EngineRow("read", ours=(1.0,), fio=(), fio_default=())
    assert (alone.ratios, alone.ratio, alone.fio_bandwidth, alone.default_ratio) == ((), None, None, None)


def test_without_fio_the_engine_is_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bench_engine, "SAMPLE_SECONDS", 0.01)
    bench = measure_engine([tmp_path], nbytes=64 * MIB, pairs=1, progress=lambda *_: None, patterns=PATTERNS[:1])
    assert bench.fio == FioMissing("fio is not installed")
    assert bench.rows[0].ours_bandwidth > 0
    assert bench.rows[0].ratio is None


def test_a_fio_that_fails_is_a_result_too(fio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIO_ERROR", "22")
    bench = measure_engine([tmp_path], nbytes=64 * MIB, pairs=1, progress=lambda *_: None, patterns=PATTERNS[:1])
    assert isinstance(bench.fio, FioMissing)
    assert "22" in bench.fio.reason
    assert bench.rows[0].fio == ()


def test_the_engine_moves_what_it_reports(fio: Path, tmp_path: Path) -> None:
    engines: list[Engine] = []

    def counted() -> Engine:
        engines.append(Engine())
        return engines[-1]

    measure_engine(
        [tmp_path], nbytes=64 * MIB, pairs=1, progress=lambda *_: None, patterns=PATTERNS[:1], open_engine=counted
    )
    moved = json.loads(fio.read_text().splitlines()[-1])["io_size"]
    written, first = 64, 64  # the file once, and the run that tells how long the others should be
    assert engines[0].transfers == written + first + int(moved) // MIB


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")

    def measure(paths: list[Path], nbytes: int = 64 * MIB, pairs: int = 1) -> None:
        measure_engine(paths, nbytes=nbytes, pairs=pairs, progress=lambda *_: None)

    for paths, match in (([], "at least one"), ([tmp_path / "absent"], "absent"), ([tmp_path / "file"], "directory")):
        with pytest.raises(UsageError, match=match):
            measure(paths)
    with pytest.raises(UsageError, match="too few"):
        measure([tmp_path], nbytes=MIB)
    with pytest.raises(UsageError, match="pair"):
        measure([tmp_path], pairs=0)
    assert (tmp_path / "file").read_bytes() == b"kept"
    if Path("/dev/shm").is_dir() and Path("/dev/loop0").is_block_device():
        with pytest.raises(UsageError, match="destroy"):
            measure([Path("/dev/loop0")])


def test_a_fio_that_fails_later_is_an_error(fio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench_engine._Bench.find_fio

    def then_broken(self: bench_engine._Bench) -> Fio | FioMissing:
        fio_found = found(self)
        monkeypatch.setenv("FIO_ERROR", "5")
        return fio_found

    monkeypatch.setattr(bench_engine._Bench, "find_fio", then_broken)
    with pytest.raises(IoFailure, match="fio failed: error 5"):
        measure_engine([tmp_path], nbytes=64 * MIB, pairs=1, progress=lambda *_: None)
    assert not list(tmp_path.glob("*.tmp"))
