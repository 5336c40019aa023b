"""Compares the engine with fio: the same files, blocks, depth and kind of buffers, in runs that take turns.

Owns files of its own in the directories that it is given, for as long as it runs and never longer, and the way in which
fio is called. Only ratios of neighbouring runs are worth quoting: absolute figures drift on most machines. It never
imports torch, and it never installs fio: where there is none, the result says so.
"""

import ctypes
import json
import os
import shutil
import stat
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ssdplan.native import Arena, Engine, IoError, NoSpaceError
from ssdplan.plans.errors import DiskFullError, IoFailure, UsageError
from ssdplan.plans.units import format_bytes

from ..measure import Progress, portion

MIB = 1 << 20
BLOCK = MIB
"""Bytes of one transfer, of the engine and of fio, and the unit in which several files take turns."""
DEPTH = 32
"""Blocks in flight."""
REQUEST_BLOCKS = 8
WINDOW_REQUESTS = 2 * DEPTH // REQUEST_BLOCKS
"""Requests under way at a time: twice the depth, so that waiting for the oldest leaves the engine enough to do."""
SMALLEST = 64 * MIB
SAMPLE_SECONDS = 0.4
"""About how long one run lasts: the files are gone through as often as that takes."""
FIO_SECONDS = 120
"""Beyond this a run of fio counts as hung."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """What is moved. Both programs go through the files in sequence, each direction from the start."""

    name: str
    fio: str
    """fio's name for it."""


PATTERNS = (Pattern("read", "read"), Pattern("write", "write"), Pattern("read and write 1:1", "rw"))


@dataclass(frozen=True, slots=True)
class Fio:
    """The fio that was found."""

    path: str
    version: str
    huge_page_bytes: int
    """How much of its memory huge pages back when it is asked to use them; 0 where it cannot be made to."""


@dataclass(frozen=True, slots=True)
class FioMissing:
    """There is nothing to compare with, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One pattern. Samples are bytes a second in the order of the rounds; a round runs each program once."""

    name: str
    ours: tuple[float, ...]
    fio: tuple[float, ...]
    """fio with huge-page-backed, registered buffers, as the engine's are; empty without fio."""
    fio_default: tuple[float, ...]
    """fio as it comes: ordinary pages, not registered; empty without fio."""

    @property
    def ours_bandwidth(self) -> float:
        return statistics.median(self.ours)

    @property
    def fio_bandwidth(self) -> float | None:
        return statistics.median(self.fio) if self.fio else None

    @property
    def fio_default_bandwidth(self) -> float | None:
        return statistics.median(self.fio_default) if self.fio_default else None

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ours over fio's with the same kind of buffers, round by round."""
        return tuple(a / b for a, b in zip(self.ours, self.fio, strict=False))

    @property
    def default_ratios(self) -> tuple[float, ...]:
        """Ours over fio's as it comes, round by round."""
        return tuple(a / b for a, b in zip(self.ours, self.fio_default, strict=False))

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.fio else None

    @property
    def default_ratio(self) -> float | None:
        return statistics.median(self.default_ratios) if self.fio_default else None


@dataclass(frozen=True, slots=True)
class EngineBench:
    """What was measured, on what, against what."""

    paths: tuple[str, ...]
    nbytes: int
    """The size of the files together."""
    engine: str
    """The engine's description of itself."""
    huge_page_bytes: int
    """How much of the engine's buffers huge pages back."""
    buffer_bytes: int
    fio: Fio | FioMissing
    rows: tuple[EngineRow, ...]


def _engine_as_deep() -> Engine:
    """With as many blocks in flight as fio has."""
    return Engine(queue_depth=DEPTH)


def measure_engine(
    paths: Sequence[Path],
    *,
    nbytes: int,
    pairs: int,
    progress: Progress,
    overwrite_devices: bool = False,
    patterns: Sequence[Pattern] = PATTERNS,
    open_engine: Callable[[], Engine] = _engine_as_deep,
) -> EngineBench:
    """Measure each of `patterns` in `pairs` rounds of one run of ours, one of fio, and one of fio with its own buffers.

    Each path is a directory, in which a file of `nbytes / len(paths)` is made, written and at the end removed; several
    are striped block by block. With `overwrite_devices` it may also be a block device, WHOSE CONTENT IS LOST: as much
    of it from the start is used. One that is mounted or otherwise in use is refused.

    Errors: UsageError for a path or number that cannot be, DiskFullError, IoFailure where the drive, or fio, fails.
    """
    if not paths or pairs < 1:
        raise UsageError("measuring the engine needs at least one directory and one pair of runs")
    each = nbytes // len(paths) // (REQUEST_BLOCKS * BLOCK) * (REQUEST_BLOCKS * BLOCK)
    if each < SMALLEST:
        raise UsageError(f"{format_bytes(nbytes)} over {len(paths)} paths are too few: {format_bytes(SMALLEST)} each")
    for path in paths:
        _check(path, each, overwrite_devices)
    try:
        with _opened(paths, each, open_engine) as bench:
            bench.write_all(portion(progress, 0.0, 0.1))
            fio = bench.find_fio()
            rows = []
            for number, pattern in enumerate(patterns):
                share = portion(progress, 0.1 + 0.9 * number / len(patterns), 0.1 + 0.9 * (number + 1) / len(patterns))
                rows.append(_row(bench, fio, pattern, pairs, share))
            return EngineBench(
                paths=tuple(map(str, paths)),
                nbytes=each * len(paths),
                engine=bench.engine.description,
                huge_page_bytes=bench.arena.huge_bytes,
                buffer_bytes=bench.arena.nbytes,
                fio=fio,
                rows=tuple(rows),
            )
    except NoSpaceError as error:
        raise DiskFullError(f"{error.filename}: no space left for the file that measures it") from error
    except IoError as error:
        raise IoFailure(f"{error.filename}: cannot be measured: {error.strerror}") from error


def _row(bench: "_Bench", fio: Fio | FioMissing, pattern: Pattern, pairs: int, progress: Progress) -> EngineRow:
    total = bench.blocks * BLOCK
    # Fewer and longer runs on a fast drive: the first, which is not kept, tells how fast.
    moved = max(total, round(bench.run(pattern, total) * SAMPLE_SECONDS / total) * total)
    runs: dict[str, Callable[[], float]] = {"ours": partial(bench.run, pattern, moved)}
    if isinstance(fio, Fio):
        runs["fio"] = partial(bench.run_fio, fio.path, pattern, moved, like_ours=True)
        runs["fio_default"] = partial(bench.run_fio, fio.path, pattern, moved, like_ours=False)
    samples: dict[str, list[float]] = {"ours": [], "fio": [], "fio_default": []}
    for turn in range(pairs):
        progress(turn / pairs, f"{pattern.name}: round {turn + 1} of {pairs}")
        # Who goes first changes from round to round: what a run leaves behind it helps or harms all alike.
        for name in list(runs) if turn % 2 == 0 else reversed(list(runs)):
            samples[name].append(runs[name]())
    progress(1.0, pattern.name)
    return EngineRow(pattern.name, tuple(samples["ours"]), tuple(samples["fio"]), tuple(samples["fio_default"]))


def _check(path: Path, nbytes: int, overwrite_devices: bool) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if stat.S_ISBLK(mode):
        if not overwrite_devices:
            raise UsageError(f"{path}: a block device, whose content measuring would destroy; name a directory")
    elif not stat.S_ISDIR(mode):
        raise UsageError(f"{path}: not a directory")
    else:
        usage = shutil.disk_usage(path)
        if usage.total and usage.free < 2 * nbytes:  # a total of nothing is a file system that does not count
            raise DiskFullError(
                f"{path}: measuring takes a file of {format_bytes(nbytes)} and leaves as much; "
                f"{format_bytes(usage.free)} are free"
            )


@contextmanager
def _opened(paths: Sequence[Path], each: int, open_engine: Callable[[], Engine]) -> Iterator["_Bench"]:
    """A bench on `each` bytes of every path. A file's name goes as soon as it is open, so that not even a killed
    process leaves it behind; fio reaches it through this process's descriptors."""
    with ExitStack() as stack:
        engine = open_engine()
        stack.callback(engine.close)  # waits for what is in flight, and only then may the arena go
        files, names = [], []
        for number, path in enumerate(paths):
            if path.is_block_device():
                files.append(engine.open(path))
                names.append(str(path))
                if engine.size(files[-1]) < each:
                    raise UsageError(f"{path}: smaller than {format_bytes(each)}")
                continue
            file = path / f".ssdplan-bench-{os.getpid()}-{number}.tmp"
            files.append(engine.open(file, create_bytes=each))
            try:
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            finally:
                file.unlink()
            stack.callback(os.close, descriptor)
            names.append(f"/proc/{os.getpid()}/fd/{descriptor}")
        yield _Bench(engine, files, names, each)


class _Bench:
    """Open files and the buffers for DEPTH blocks."""

    def __init__(self, engine: Engine, files: Sequence[int], names: Sequence[str], each: int) -> None:
        self.engine, self.files, self.names = engine, files, names
        self.blocks = len(files) * each // BLOCK
        self.arena = Arena(DEPTH * BLOCK)
        engine.register(self.arena.address, self.arena.nbytes)
        noise = os.urandom(BLOCK)  # what a drive that compresses must not gain from
        for slot in range(DEPTH):
            ctypes.memmove(self.arena.address + slot * BLOCK, noise[slot:] + noise[:slot], BLOCK)

    def write_all(self, progress: Progress) -> None:
        """Write every block once: reading what was never written costs nothing, and a first write is slow."""
        step = WINDOW_REQUESTS * REQUEST_BLOCKS
        for start in range(0, self.blocks, step):
            progress(start / self.blocks, "writing files to measure")
            blocks = range(start, min(start + step, self.blocks))
            self.engine.write([self._segment(block, block) for block in blocks]).wait()
        for file in self.files:
            self.engine.flush(file)

    def run(self, pattern: Pattern, nbytes: int) -> float:
        """The engine's bytes a second over `nbytes`, in requests of REQUEST_BLOCKS of which some are under way.

        The bytes are not looked at, so the DEPTH slots of memory are used in turn without waiting for each other; that
        keeps as much memory in use as fio does, no more.
        """
        directions = {"read": [self.engine.read], "write": [self.engine.write]}.get(
            pattern.fio, [self.engine.read, self.engine.write]
        )
        places = [0] * len(directions)
        under_way = []
        started = time.perf_counter()
        for number in range(nbytes // BLOCK // REQUEST_BLOCKS):
            turn = number % len(directions)
            blocks = range(places[turn], places[turn] + REQUEST_BLOCKS)
            places[turn] += REQUEST_BLOCKS
            slot = number * REQUEST_BLOCKS
            segments = [self._segment(block % self.blocks, slot + i) for i, block in enumerate(blocks)]
            under_way.append(directions[turn](segments))
            if len(under_way) == WINDOW_REQUESTS:
                under_way.pop(0).wait()
        for request in under_way:
            request.wait()
        return nbytes / (time.perf_counter() - started)

    def _segment(self, block: int, slot: int) -> tuple[int, int, int, int]:
        """Block `block` of all files, which take turns, and a slot of memory."""
        row, file = divmod(block, len(self.files))
        return self.files[file], row * BLOCK, self.arena.address + slot % DEPTH * BLOCK, BLOCK

    def find_fio(self) -> Fio | FioMissing:
        """The fio on the path, tried for a moment."""
        path = shutil.which("fio")
        if path is None:
            return FioMissing("fio is not installed")
        try:
            version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
            process = self._start_fio(path, PATTERNS[0], self.blocks * BLOCK, like_ours=True)
            huge = 0
            while process.poll() is None:
                huge = max(huge, _huge_page_bytes(process.pid))
                time.sleep(0.02)
            _bandwidth(process)
        except (OSError, subprocess.SubprocessError, IoFailure) as error:
            return FioMissing(f"fio does not run here: {error}")
        return Fio(path, version.stdout.strip(), huge)

    def run_fio(self, path: str, pattern: Pattern, nbytes: int, *, like_ours: bool) -> float:
        """fio's bytes a second over `nbytes`. Raises IoFailure."""
        return _bandwidth(self._start_fio(path, pattern, nbytes, like_ours=like_ours))

    def _start_fio(self, path: str, pattern: Pattern, nbytes: int, *, like_ours: bool) -> subprocess.Popen[str]:
        options: Mapping[str, object] = {
            "name": "bench",
            "filename": ":".join(name.replace(":", r"\:") for name in self.names),
            "rw": pattern.fio,
            "bs": BLOCK,
            "size": self.blocks * BLOCK,
            "io_size": nbytes,
            "iodepth": DEPTH,
            "ioengine": "io_uring" if self.engine.kind == "io_uring" else "psync",
            "direct": 1,
            "allow_file_create": 0,
            "overwrite": 1,
            "invalidate": 0,
            "output-format": "json",
        }
        if self.engine.kind != "io_uring":
            options = {**options, "numjobs": 4, "group_reporting": 1, "io_size": nbytes // 4}
        environment = dict(os.environ)
        if like_ours:
            options = {**options, "iomem_align": 2 * MIB, "fixedbufs": 1}
            # The C library then asks for huge pages for what fio allocates; no privilege and no reserve needed.
            environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        command = [path, "--thread", *(f"--{key}={value}" for key, value in options.items())]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd="/"
        )


def _bandwidth(process: subprocess.Popen[str]) -> float:
    """The bytes a second that a run of fio reports. Raises IoFailure."""
    with process:
        try:
            output, errors = process.communicate(timeout=FIO_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise IoFailure(f"fio did not end within {FIO_SECONDS} s") from None
    try:
        job = json.loads(output[output.index("{") :])["jobs"][0]
    except (ValueError, LookupError):
        job = {"error": process.returncode or 1}
    if process.returncode != 0 or job["error"] != 0:
        said = errors.strip().splitlines() or [f"error {job['error']}"]
        raise IoFailure(f"fio failed: {said[0]}")
    directions = [job["read"], job["write"]]
    milliseconds = max(direction["runtime"] for direction in directions)
    return sum(direction["io_bytes"] for direction in directions) / (max(milliseconds, 1) / 1000)


def _huge_page_bytes(pid: int) -> int:
    """What of a process's own memory huge pages back, in bytes; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))
