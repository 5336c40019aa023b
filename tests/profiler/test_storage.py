"""What a volume sustains is measured right, told as a frontier that an LP can use, and leaves nothing behind."""

import errno
import mmap
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdplan.executor.runtime import runner
from ssdplan.executor.store.volumes import Blank
from ssdplan.native import Engine, IoError
from ssdplan.plans.errors import DiskFullError, IoFailure, UsageError
from ssdplan.profiler import storage
from ssdplan.profiler.measure import Limits
from ssdplan.profiler.storage import (
    IN_FLIGHT,
    MIB,
    MIXES,
    MOST_WRITTEN,
    PLACES,
    REQUESTS,
    SMALLEST_FILE,
    STRETCH,
    explained,
    frontier,
    measure_volume,
)
from tests.profiler.made_time import MadeTime

QUICK = Limits(seconds=1.5, least=3, most=6)
Segments = Sequence[tuple[int, int, int, int]]


def silent(fraction: float, what: str) -> None:
    pass


class MadeRequest:
    def __init__(self, time: MadeTime, until: float) -> None:
        self.time, self.until = time, until

    def wait(self) -> int:
        self.time.sleep(max(0.0, self.until - self.time()))
        return 0


class MadeDrive:
    """An engine without a drive, which reads and writes at given rates, independently of each other: the requests of a
    direction one after the other. Its time is made too."""

    kind = "threads"

    def __init__(self, read: float = 4e9, write: float = 2e9) -> None:
        self.time = MadeTime()
        self.rates = {"read": read, "write": write}
        self.requests: list[tuple[str, int, int, int]] = []
        self.free = {"read": 0.0, "write": 0.0}
        self.flushed = self.closed = False

    def open(self, path: Path, *, create_bytes: int) -> int:
        path.touch()
        self.size = create_bytes
        return 7

    def _submit(self, kind: str, segments: Segments) -> MadeRequest:
        ((file, offset, address, nbytes),) = segments
        assert file == 7 and offset % 4096 == address % 4096 == nbytes % 4096 == 0 and offset + nbytes <= self.size
        self.requests.append((kind, offset, address, nbytes))
        return MadeRequest(self.time, self.until(kind, nbytes / self.rates[kind]))

    def until(self, kind: str, seconds: float) -> float:
        """When a request that takes so long alone ends."""
        self.free[kind] = max(self.free[kind], self.time()) + seconds
        return self.free[kind]

    def read(self, segments: Segments) -> MadeRequest:
        return self._submit("read", segments)

    def write(self, segments: Segments) -> MadeRequest:
        return self._submit("write", segments)

    def flush(self, file: int) -> None:
        self.flushed = True

    def close(self) -> None:
        self.closed = True


def measure(directory: Path, drive: MadeDrive, progress: Callable[[float, str], None] = silent) -> Any:
    return measure_volume(directory, QUICK, progress, open_engine=lambda: drive, clock=drive.time)  # type: ignore[arg-type, return-value]


rates = st.floats(1e6, 1e10)


@given(read=rates, write=rates, inner=st.lists(st.tuples(st.floats(0.01, 1.3), st.floats(0.01, 1.3)), max_size=6))
def test_the_frontier_is_all_that_was_measured_in_order(
    read: float, write: float, inner: list[tuple[float, float]]
) -> None:
    points = [(read, 0.0), *((r * read, w * write) for r, w in inner), (0.0, write)]
    found = frontier(points)
    assert (found[0].read, found[0].write) == (read, 0.0) and (found[-1].read, found[-1].write) == (0.0, write)
    for one, other in pairwise(found):
        assert one.write * other.read <= other.write * one.read * (1 + 1e-9)
    assert sorted((point.read, point.write) for point in found[1:-1]) == sorted(
        (min(r, read), min(w, write)) for r, w in points[1:-1]
    )


def test_a_mix_that_is_worse_than_turns_is_told_as_it_is() -> None:
    below, above = (30.0, 30.0), (70.0, 60.0)
    found = frontier([(100.0, 0.0), above, below, (0.0, 100.0)])
    assert [(p.read, p.write) for p in found] == [(100, 0), above, below, (0, 100)]


class HeavyDrive(MadeDrive):
    """One request at a time, and a third longer for each that goes the other way than the one before."""

    def __init__(self) -> None:
        super().__init__(0.25e9, 0.25e9)
        self.last = ""

    def until(self, kind: str, seconds: float) -> float:
        end = super().until("read", seconds * (4 / 3 if self.last not in ("", kind) else 1.0))
        self.last = kind
        return end


def test_a_drive_that_is_worse_at_both_than_in_turns(tmp_path: Path) -> None:
    drive = HeavyDrive()
    volume, notes = measure(tmp_path, drive)
    read, write = volume.frontier[0].read, volume.frontier[-1].write
    each = [point.read / read + point.write / write for point in volume.frontier]
    assert len(each) == len(MIXES) and 0.5 < each[2] < 0.9, each
    assert any("of what taking turns would" in note for note in notes)


def test_a_mix_that_beats_an_end_is_cut_to_it() -> None:
    found = frontier([(100.0, 0.0), (110.0, 20.0), (0.0, 100.0)])
    assert [(p.read, p.write) for p in found] == [(100, 0), (100, 20), (0, 100)]


def test_rates_of_a_drive_whose_rates_are_known(tmp_path: Path) -> None:
    read, write = 4e9, 2e9
    drive = MadeDrive(read, write)
    volume, notes = measure(tmp_path, drive)
    points = volume.frontier
    assert points[0].read == pytest.approx(read)
    assert points[-1].write == pytest.approx(write)
    # It reads and writes at once at full rates: some mix reaches well over the line between the ends.
    assert max(p.read / points[0].read + p.write / points[-1].write for p in points) > 1.4
    assert volume.engine == "threads" and any("io_uring" in note for note in notes)
    assert volume.path == str(tmp_path) and volume.free_bytes > 512 * MIB
    assert drive.flushed and drive.closed and not list(tmp_path.iterdir())


def test_the_pattern_is_that_of_training(tmp_path: Path) -> None:
    drive = MadeDrive(read=40e9, write=20e9)
    measure(tmp_path, drive)
    filling = drive.size // STRETCH
    first, rest = drive.requests[:filling], drive.requests[filling:]
    assert {(kind, nbytes) for kind, *_, nbytes in first} == {("write", STRETCH)}
    assert len({start for _, start, *_ in first}) == filling, "all is written before anything is measured"
    assert {nbytes for *_, nbytes in rest} == set(REQUESTS)
    assert len({offset for _, offset, *_ in rest}) > min(len(rest), drive.size // MIB) / 2, "random starts"
    assert any(offset % MIB for _, offset, *_ in rest) and any(address % MIB for *_, address, _ in rest), "at any page"
    reading = {(start, start + nbytes) for kind, start, _, nbytes in rest if kind == "read"}
    assert min(reading)[0] < drive.size / 10 and max(reading)[1] > drive.size * 0.9, "from all of the file"
    read_at = {address for kind, _, address, _ in rest if kind == "read"}
    written_at = {address for kind, _, address, _ in rest if kind == "write"}
    assert len(read_at) == len(written_at) == IN_FLIGHT * PLACES, "a run finds nothing of its states in caches"
    assert min(after - before for before, after in pairwise(sorted(read_at | written_at))) >= max(REQUESTS)


def test_this_drive_against_plain_system_calls(tmp_path: Path) -> None:
    best: list[tuple[float, float]] = [(0.0, 0.0)] * 2
    for attempt in range(5):  # of each the best so far: others may use drive and processor while one is measured
        volume, _ = measure_volume(tmp_path, QUICK, silent)
        assert 0 < volume.read_cores < os.cpu_count() and 0 < volume.write_cores < os.cpu_count()
        assert volume.engine in ("io_uring", "threads")
        read, write = system_call_rates(tmp_path / "plain", attempt)
        assert [path.name for path in tmp_path.iterdir()] == ["plain"]
        (tmp_path / "plain").unlink()
        pairs = ((volume.frontier[0].read, read), (volume.frontier[-1].write, write))
        best = [(max(old[0], new[0]), max(old[1], new[1])) for old, new in zip(best, pairs, strict=True)]
        if all(1 / 3 < ours / plain < 3 for ours, plain in best):
            return
    raise AssertionError(f"(ours, plain) of reads and writes: {best}")


def system_call_rates(path: Path, seed: int) -> tuple[float, float]:
    """Bytes/s of preadv and pwritev of 4 MiB, one at a time in each of four threads, to and from huge pages, past the
    page cache, on written data. (One thread alone waits for its wake-up after each, which a busy machine makes longer
    than the transfer.)"""
    block, blocks, lanes, rng = 4 * MIB, 48, 4, random.Random(seed)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # what is shared is of ordinary pages here, and half as fast
    buffer = mmap.mmap(-1, lanes * block, flags=private)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer.write(random.Random(seed).randbytes(block) * lanes)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    views = [memoryview(buffer)[lane * block : (lane + 1) * block] for lane in range(lanes)]

    def move(call: Callable[[int, list[memoryview], int], int], lane: int, places: Sequence[int]) -> None:
        for place in places:
            assert call(file, [views[lane]], place * block) == block

    try:
        move(os.pwritev, 0, range(blocks))
        os.fsync(file)
        rates: dict[str, list[float]] = {"read": [], "write": []}
        with ThreadPoolExecutor(lanes) as pool:
            for _ in range(5):
                for name, call in (("read", os.preadv), ("write", os.pwritev)):
                    each = [[rng.randrange(blocks) for _ in range(6)] for _ in range(lanes)]
                    started = time.perf_counter()
                    list(pool.map(partial(move, call), range(lanes), each))
                    rates[name].append(6 * lanes * block / (time.perf_counter() - started))
    finally:
        for view in views:
            view.release()
        os.close(file)
    return statistics.median(rates["read"]), statistics.median(rates["write"])


def test_nothing_is_left_by_an_interrupt_or_a_failing_drive(tmp_path: Path) -> None:
    def interrupt(fraction: float, what: str) -> None:
        names = [path.name for path in tmp_path.iterdir()]
        assert not names, "the file has no name while it is measured"
        if fraction > 0.4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_volume(tmp_path, QUICK, interrupt)
    assert not list(tmp_path.iterdir())

    class Failing(MadeDrive):
        def read(self, segments: Segments) -> MadeRequest:
            if len(self.requests) > 40:
                raise IoError(errno.EIO, "read of 1048576 bytes at offset 0: Input/output error", "file")
            return super().read(segments)

    drive = Failing(read=40e9, write=20e9)
    with pytest.raises(IoFailure, match=rf"{tmp_path}.*Input/output error"):
        measure(tmp_path, drive)
    assert drive.closed and not list(tmp_path.iterdir())


def test_nothing_is_left_by_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from ssdplan.profiler.measure import Limits; from ssdplan.profiler.storage import measure_volume\n"
        "measure_volume(Path(sys.argv[1]), Limits(seconds=60), lambda *p: print(p, flush=True))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert not list(tmp_path.iterdir())


def test_refused_direct_io_names_the_path_and_the_way_out(tmp_path: Path) -> None:
    class Refusing(MadeDrive):
        def open(self, path: Path, *, create_bytes: int) -> int:
            path.touch()  # as an engine that fails half-way would
            raise IoError(errno.EINVAL, "open: Invalid argument", str(path))

    drive = Refusing()
    with pytest.raises(IoFailure, match=rf"{tmp_path}: no direct I/O on this file system.*ext4"):
        measure(tmp_path, drive)
    assert drive.closed and not list(tmp_path.iterdir())


def test_a_full_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "free_bytes", lambda directory: 300 * MIB)
    with pytest.raises(DiskFullError, match=rf"{tmp_path}: 300 MiB are free; .* needs 512 MiB"):
        measure(tmp_path, MadeDrive())
    monkeypatch.undo()
    assert isinstance(explained(IoError(errno.ENOSPC, "allocate", "x"), tmp_path), DiskFullError)
    assert isinstance(explained(IoError(errno.EACCES, "create", "x"), tmp_path), IoFailure)


def test_the_file_leaves_seven_eighths_of_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "free_bytes", lambda directory: 1000 * MIB + 1)
    drive = MadeDrive(read=40e9, write=20e9)
    measure(tmp_path, drive)
    assert drive.size == 125 * MIB


def test_a_slow_drive_is_measured_on_less_data(tmp_path: Path) -> None:
    drive = MadeDrive(read=2e9, write=0.2e9)
    started = drive.time()
    volume, _ = measure(tmp_path, drive)
    assert drive.time() - started < 8
    assert volume.frontier[-1].write == pytest.approx(0.2e9)
    written = {offset // STRETCH for kind, offset, _, nbytes in drive.requests if nbytes == STRETCH}
    read = {offset // STRETCH for kind, offset, *_ in drive.requests if kind == "read"}
    assert read and read <= written, "what was never written is not read"
    assert 2 <= len(written) < drive.size // STRETCH
    assert max(written) - min(written) >= drive.size // STRETCH / 2, "and few stretches lie all over the file too"


def test_places_are_all_over_what_a_store_would_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "free_bytes", lambda directory: 1 << 40)
    drive, reach = MadeDrive(read=40e9, write=20e9), 6 << 30
    measure_volume(tmp_path, QUICK, silent, reach=reach, open_engine=lambda: drive, clock=drive.time)
    assert drive.size == reach
    filled = sorted(offset for _, offset, _, nbytes in drive.requests if nbytes == STRETCH)
    assert len(filled) == MOST_WRITTEN // STRETCH and filled[0] == 0 and filled[-1] == reach - STRETCH
    gaps = [after - before for before, after in pairwise(filled)]
    assert min(gaps) >= STRETCH and max(gaps) - min(gaps) <= 4096
    for direction in ("read", "write"):
        moved = [
            (offset, nbytes) for kind, offset, _, nbytes in drive.requests if kind == direction and nbytes < STRETCH
        ]
        met = {max(start for start in filled if start <= offset) for offset, _ in moved}
        assert len(met) > len(filled) * 0.9, "each direction meets nearly all"
        assert all(any(start <= offset and offset + nbytes <= start + STRETCH for start in filled)
                   for offset, nbytes in moved)  # fmt: skip


def test_however_little_is_asked_it_is_measured(tmp_path: Path) -> None:
    drive = MadeDrive(read=40e9, write=20e9)
    measure_volume(tmp_path, QUICK, silent, reach=4096, open_engine=lambda: drive, clock=drive.time)
    assert drive.size == SMALLEST_FILE


@given(
    start=st.integers(0, 1 << 20), nbytes=st.integers(SMALLEST_FILE, 1 << 44), used=st.integers(SMALLEST_FILE, 1 << 31)
)
def test_stretches_do_not_overlap_and_stay_inside(start: int, nbytes: int, used: int) -> None:
    start = start * 4096
    found = storage.stretches(start, nbytes, used)
    assert len(found) == min(nbytes, used) // STRETCH >= 2
    assert all(place % 4096 == 0 for place in found)
    ordered = sorted(found)
    assert ordered[0] == start and ordered[-1] + STRETCH <= start + nbytes
    assert all(after - before >= STRETCH for before, after in pairwise(ordered))


def test_a_blank_volume_is_measured_itself_and_only_where_it_may_be(tmp_path: Path) -> None:
    path, start, end = tmp_path / "blank", 8192, 8192 + 70 * MIB
    path.write_bytes(b"\x55" * (end + 8192))
    volume, _ = measure_volume(tmp_path, QUICK, silent, blank=Blank(path, start, end))
    after = path.read_bytes()
    assert len(after) == end + 8192
    assert set(after[:start]) == set(after[end:]) == {0x55}
    assert after[start : start + MIB] != b"\x55" * MIB and [each.name for each in tmp_path.iterdir()] == ["blank"]
    assert volume.path == str(tmp_path) and volume.free_bytes >= end
    alone, _ = measure_volume(path, QUICK, silent, blank=Blank(path, start, end))
    assert alone.path == str(path) and alone.free_bytes == end
    with pytest.raises(DiskFullError, match=r"blank: this volume has 63 MiB; measuring it needs 64 MiB"):
        measure_volume(tmp_path, QUICK, silent, blank=Blank(path, start, start + 63 * MIB))


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_volume_is_a_directory_or_blank(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="neither a directory on the drive to use nor a blank volume"):
        measure_volume(tmp_path / name, QUICK, silent, open_engine=Engine)


def test_as_many_requests_as_the_executor_has() -> None:
    assert runner.IN_FLIGHT == {"read": IN_FLIGHT, "write": IN_FLIGHT}


def test_mixes_go_from_reads_to_writes() -> None:
    assert not MIXES[0].writes and not MIXES[-1].reads and all(mix.reads and mix.writes for mix in MIXES[1:-1])
