"""Measures one volume: what it sustains when it reads, when it writes, and when it does both at once.

Owns a file of its own in the volume's directory, for as long as the measurement runs and never longer, or writes on a
blank volume that it was given. It drives the engine that training uses, in the same pattern: a few requests of a
direction at a time, each of some MiB in sequence, between any two pages of data written before and of memory. It knows
nothing of what a store holds.
"""

import errno
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import torch

from ssdplan.native import Arena, Engine, IoError, checksum
from ssdplan.plans.documents.profile import MixedBandwidth, Volume
from ssdplan.plans.errors import DiskFullError, IoFailure, SsdplanError, UsageError
from ssdplan.plans.room import no_room
from ssdplan.plans.units import PAGE

from .clock import REAL, Clock
from .measure import Limits, Progress, portion, repeat
from .parts import Blank

MIB = 1 << 20
MOST_WRITTEN = 1024 * MIB
"""Before anything is measured, in stretches all over the reach."""
STRETCH = 32 * MIB
LARGEST_REACH = 16 * 1024 * MIB
"""Of the file, of which most is only allocated: about as much as a store would take, for a drive may differ from place
to place. (Of a virtual machine's, both ways at once: 2.9 GB/s at most places and 2.2 at some; while it was slow 1.7,
2.0 and 2.1. A file of 1 GiB is at one place, and a store that is made later at another.)"""
SMALLEST_FILE = 2 * STRETCH
SMALLEST_VOLUME = SMALLEST_FILE + MIB
"""Of the blank ones, which have a little for themselves."""
SHARE_OF_FREE_SPACE = 8
"""The file takes at most one part in so many of what is free."""
LARGEST_REQUEST = 4 * MIB
REQUESTS = (2 * MIB, 3 * MIB, LARGEST_REQUEST)
"""Bytes of one after the other: about what a chunk of an update has, which is most of what a step moves. They begin at
any page, as a store's do. (Of a virtual machine's drive, four of 3 MiB so, beside one of 16 MiB from MiB to MiB: 0.95
times as fast read, 0.89 written, 0.91 both; one of 16 MiB so 1.00, 0.89, 0.97; four of 3 MiB from MiB to MiB 0.98,
0.95, 0.97.)"""
IN_FLIGHT = 4
"""Requests of a direction at once, as the executor has them: the drive works on some while others are checked."""
PLACES = 8
"""In memory for each request under way, in turns, so that it finds as little in caches as a run's do. (Of a drive that
the host of a virtual machine copies for, reads were 0.90 to 1.04 times as fast as with one, writes 0.93 to 0.99.)"""
PLACE_BYTES = LARGEST_REQUEST + PAGE
WINDOW_SECONDS = 0.12
"""How long one sample lasts; longer on a drive that needs longer for REQUESTS_A_WINDOW."""
REQUESTS_A_WINDOW = 3
CHECKSUMS, CHECKSUM_BYTES = 7, 24 * MIB
POOR_MIX = 0.9
"""Below this part of what taking turns would reach, reading and writing at once deserves a note."""


Direction = Literal["read", "write"]
Segment = tuple[int, int, int, int]
"""File, offset, address in memory, bytes."""
Move = Callable[[Sequence[Segment]], object]
"""Returns when the segments have been moved."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What runs at once: so many requests of each direction."""

    name: str
    reads: int
    writes: int


MIXES = (
    Mix("reads", IN_FLIGHT, 0),
    Mix("reads and writes 3:1", 3, 1),
    Mix("reads and writes 1:1", 2, 2),
    Mix("reads and writes 1:3", 1, 3),
    Mix("writes", 0, IN_FLIGHT),
)


def measure_volume(
    directory: Path,
    limits: Limits,
    progress: Progress,
    *,
    blank: Blank | None = None,
    reach: int = MOST_WRITTEN,
    open_engine: Callable[[], Engine] = Engine,
    clock: Clock = REAL,
) -> tuple[Volume, list[str]]:
    """What the drive of `directory` sustains, and notes for people. It is measured at places spread over `reach` bytes,
    or over what there is: of a file, which is gone when this returns, however it returns; or of `blank`, which lies in
    `directory` or is what `directory` names. `clock` is the one that the engine passes time of.

    Errors: UsageError where it is neither, DiskFullError where too little is free, IoFailure where the drive fails or
    its file system cannot do direct I/O.
    """
    if blank is None and not directory.is_dir():
        raise UsageError(f"{directory}: neither a directory on the drive to use nor a blank volume")
    free = max((free_bytes(directory) or 0) if directory.is_dir() else 0, blank.end if blank else 0)
    try:
        with opened(
            directory, blank, reach, MOST_WRITTEN, IN_FLIGHT * PLACES * PLACE_BYTES, open_engine, clock
        ) as bench:
            uring, notes = bench.engine.kind == "io_uring", []
            bench.write_all(limits.seconds / 3, portion(progress, 0.0, 0.3))
            shares: dict[Mix, list[float]] = {mix: [] for mix in MIXES}
            cores: dict[Mix, list[float]] = {mix: [] for mix in MIXES}

            def rate(mix: Mix) -> float:
                spent = time.process_time()
                read, written, seconds = bench.run(mix)
                cores[mix].append((time.process_time() - spent) / seconds)
                shares[mix].append(read / (read + written))
                return (read + written) / seconds

            figures = {mix: partial(rate, mix) for mix in MIXES}
            part = portion(progress, 0.3, 1.0)
            measured = repeat(figures, limits, part, f"{directory}: bandwidth", clock=clock)
            checked = bench.checksum_rate()
    except IoError as error:
        raise explained(error, directory) from error
    points = []
    for mix, figure in measured.items():
        share = sorted(shares[mix])[len(shares[mix]) // 2]
        points.append((figure.mean * share, figure.mean * (1 - share)))
        if trouble := figure.trouble():
            notes.append(f"{directory}: {mix.name}: {trouble}")
    if not uring:
        notes.append(f"{directory}: io_uring is not to be had here; a pool of threads reads and writes")
    worst = min(efficiency(point, points[0][0], points[-1][1]) for point in points)
    if worst < POOR_MIX:
        notes.append(f"{directory}: reading and writing at once reaches {worst:.0%} of what taking turns would")
    unsummed = [median(cores[MIXES[end]]) for end in (0, -1)]
    reads, writes = (plain + sum(points[end]) / checked for plain, end in zip(unsummed, (0, -1), strict=True))
    return Volume(
        path=str(directory),
        free_bytes=free,
        engine="io_uring" if uring else "threads",
        frontier=frontier(points),
        read_cores=reads,
        write_cores=writes,
        read_cores_unsummed=unsummed[0],
        write_cores_unsummed=unsummed[1],
    ), notes


def free_bytes(directory: Path) -> int | None:
    """What an unprivileged user may still write to the file system of `directory`; None where it does not count."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def frontier(points: Sequence[tuple[float, float]]) -> tuple[MixedBandwidth, ...]:
    """Measured (read, write) bytes/s from reads only (first) to writes only (last), in order of their mixes.

    Mixes that are worse than taking turns stay: a run reads and writes at once and takes no turns. One that reads
    faster than reads alone, or writes faster than writes alone, is noise, and is cut to what they reach.
    """
    (read, _), (_, write) = points[0], points[-1]
    assert read > 0 and write > 0 and points[0][1] == 0 and points[-1][0] == 0
    inner = [(min(r, read), min(w, write)) for r, w in points[1:-1]]
    ordered = sorted(inner, key=lambda point: point[1] / (point[0] + point[1]))
    return tuple(MixedBandwidth(read=r, write=w) for r, w in [(read, 0.0), *ordered, (0.0, write)])


def efficiency(point: tuple[float, float], read: float, write: float) -> float:
    """A mix's bytes a second over what taking turns at `read` and `write` alone would reach."""
    return point[0] / read + point[1] / write


def explained(error: IoError, directory: Path) -> SsdplanError:
    """What an I/O error means for someone who chose `directory` as a volume."""
    if room := no_room(error):
        return DiskFullError(f"{directory}: the file that measures it cannot be made: {room} ({error.strerror})")
    if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
        return IoFailure(
            f"{directory}: no direct I/O on this file system ({error.strerror}); "
            "choose a directory on one that has it, such as ext4 or xfs on the drive itself"
        )
    return IoFailure(f"{directory}: cannot be measured: {error.strerror}")


@contextmanager
def opened(
    directory: Path,
    blank: Blank | None,
    reach: int,
    used_bytes: int,
    memory_bytes: int,
    open_engine: Callable[[], Engine] = Engine,
    clock: Clock = REAL,
) -> Iterator["Bench"]:
    """A bench with so much memory for requests, on `used_bytes` all over `blank` or a new file in `directory`, of
    `reach` bytes where there is room for them. The file's name goes as soon as the engine has it open, so that not even
    a killed process leaves it behind; its space goes with the engine.

    Raises DiskFullError where there is too little room.
    """
    start, room = (blank.start, blank.end - blank.start) if blank else (0, _room(directory))
    nbytes = min(max(reach, SMALLEST_FILE), LARGEST_REACH, room) // MIB * MIB
    if nbytes < SMALLEST_FILE:
        raise DiskFullError(
            f"{blank.path}: this volume has {room / MIB:.0f} MiB; measuring it needs {SMALLEST_FILE // MIB} MiB"
            if blank
            else f"{directory}: {room * SHARE_OF_FREE_SPACE / MIB:.0f} MiB are free; measuring a volume needs "
            f"{SMALLEST_FILE * SHARE_OF_FREE_SPACE // MIB} MiB free (it takes an eighth of them and gives them back)"
        )
    path = blank.path if blank else directory / f".ssdplan-profile-{os.getpid()}-{uuid.uuid4().hex}.tmp"
    engine = open_engine()
    try:
        file = engine.open(path, create_bytes=None if blank else nbytes)
        if not blank:
            path.unlink()
        yield Bench(engine, file, stretches(start, nbytes, used_bytes), Arena(memory_bytes), clock)
    finally:
        engine.close()  # waits for what is in flight, and only then may the arena go
        if not blank:
            path.unlink(missing_ok=True)


def _room(directory: Path) -> int:
    """Bytes that a file may take for a while."""
    free = free_bytes(directory)
    return SMALLEST_FILE if free is None else free // SHARE_OF_FREE_SPACE


def stretches(start: int, nbytes: int, used_bytes: int) -> list[int]:
    """Where stretches begin, of `used_bytes` together at most, that lie evenly in [start, start + nbytes); in an order
    in which the first few do too."""
    count = min(nbytes, used_bytes) // STRETCH
    in_turn = sorted(range(count), key=lambda index: f"{index:016b}"[::-1])
    return [start + index * (nbytes - STRETCH) // (count - 1) // PAGE * PAGE for index in in_turn]


@dataclass
class Bench:
    """An open file, the stretches of it that requests keep to, and memory for requests in one arena."""

    engine: Engine
    file: int
    stretches: list[int]
    arena: Arena
    clock: Clock
    runs: int = field(default=0, init=False)

    def write_all(self, seconds: float, progress: Progress) -> None:
        """Fill the stretches with random bytes: a first write is slow, and reading what was never written costs
        nothing.

        On a drive too slow for that, only as many as `seconds` allow, two at least; the others stay out of use.
        """
        memory = torch.from_dlpack(self.arena).view(torch.int64)
        random_part = memory[: STRETCH // 8]
        random_part.random_(generator=torch.Generator().manual_seed(0))
        for part in memory.split(random_part.numel())[1:]:
            part.copy_(random_part[: part.numel()])
        started, written = self.clock(), 0
        for start in self.stretches:
            if written >= SMALLEST_FILE // STRETCH and self.clock() - started > seconds:
                break
            progress(written / len(self.stretches), "writing a file to measure")
            self.engine.write([(self.file, start, self.arena.address, STRETCH)]).wait()
            written += 1
        self.stretches = sorted(self.stretches[:written])
        self.engine.flush(self.file)

    def checksum_rate(self) -> float:
        """Bytes a second of the checksum that a store takes of all that it reads and writes, by one core."""
        spent = []
        for _ in range(CHECKSUMS):
            started = time.perf_counter()
            checksum(self.arena.address, CHECKSUM_BYTES)
            spent.append(time.perf_counter() - started)
        return CHECKSUM_BYTES / median(spent)

    def _read(self, segments: Sequence[Segment]) -> None:
        self.engine.read(segments).wait()

    def _write(self, segments: Sequence[Segment]) -> None:
        self.engine.write(segments).wait()

    def run(self, mix: Mix) -> tuple[int, int, float]:
        """Keep the requests of `mix` going; returns bytes read, bytes written and seconds.

        Readers and writers keep to every other stretch, as training never reads what is being written, and swap them
        from run to run, so that both meet all.
        """
        self.runs += 1
        first, second = self._halves(self.runs % 2)
        ways = [(self._read, first)] * mix.reads + [(self._write, second)] * mix.writes
        running = self._lanes(ways, REQUESTS, PLACE_BYTES)
        stop = threading.Event()
        started = self.clock()

        def going() -> bool:
            enough = min(lane.requests for lane in running) >= REQUESTS_A_WINDOW
            return not stop.is_set() and not (enough and self.clock() - started >= WINDOW_SECONDS)

        with self.clock.threads(len(running)) as pool:
            try:
                for done in [pool.submit(lane.run, going, stop) for lane in running]:
                    done.result()
            finally:
                stop.set()
        seconds = self.clock() - started
        read, written = (sum(lane.moved for lane in each) for each in (running[: mix.reads], running[mix.reads :]))
        return read, written, seconds

    def _halves(self, parity: int) -> tuple[list[int], list[int]]:
        """Every other stretch, and those between."""
        return self.stretches[parity::2], self.stretches[1 - parity :: 2]

    def _lanes(
        self, ways: Sequence[tuple[Move, Sequence[int]]], sizes: tuple[int, ...], place_bytes: int
    ) -> list["_Lane"]:
        """A lane for each way: how it moves, and in which stretches. They share the arena's places."""
        places = range(self.arena.address, self.arena.address + self.arena.nbytes - place_bytes + 1, place_bytes)
        return [
            _Lane(move, self.file, sizes, where, places[lane :: len(ways)], self.runs * len(ways) + lane, self.clock)
            for lane, (move, where) in enumerate(ways)
        ]

    @contextmanager
    def moving(self, direction: Direction, nbytes: int, lanes: int, *, summed: bool) -> Iterator["Moving"]:
        """Read or write without end, as a store does: requests of `nbytes`, with their checksums or without, `lanes` at
        once, all over the arena. What is yielded knows how much it was when the context has ended."""
        self.runs += 1
        stop = threading.Event()
        summing = self.engine.read_summed if direction == "read" else self.engine.write_summed
        plain = self._read if direction == "read" else self._write

        def move(segments: Sequence[Segment]) -> None:
            if summed:
                summing([segments])
            else:
                plain(segments)

        where, _ = self._halves(direction == "write")
        running = self._lanes([(move, where)] * lanes, (nbytes,), nbytes)
        with self.clock.threads(lanes) as pool:
            moving = Moving(stop, running, self.clock())
            try:
                ends = [pool.submit(lane.run, lambda: not stop.is_set(), stop) for lane in running]
                yield moving
            finally:
                stop.set()
            for end in ends:
                end.result()


@dataclass(frozen=True)
class Moving:
    """What `Bench.moving` moves."""

    _stop: threading.Event
    _lanes: Sequence["_Lane"]
    _started: float

    def end(self, meanwhile: Callable[[], object]) -> None:
        """Begin no more requests, and call `meanwhile` until those under way have ended: the last bytes move beside
        what the others did."""
        self._stop.set()
        while any(lane.ended is None for lane in self._lanes):
            meanwhile()

    @property
    def per_second(self) -> float:
        """Bytes, from the beginning to the end of the last request. All must have ended."""
        ends = [lane.ended for lane in self._lanes if lane.ended is not None]
        assert len(ends) == len(self._lanes)
        return sum(lane.moved for lane in self._lanes) / (max(ends) - self._started)


@dataclass
class _Lane:
    """One direction: request after request, each awaited before the next, as the executor's worker does."""

    move: Move
    file: int
    sizes: tuple[int, ...]
    stretches: Sequence[int]
    addresses: Sequence[int]
    """Where its requests lie in memory, one after the other in turns."""
    seed: int
    clock: Clock
    requests: int = 0
    moved: int = 0
    ended: float | None = None
    """By its clock; None while it runs."""

    def run(self, going: Callable[[], bool], stop: threading.Event) -> None:
        rng = random.Random(self.seed)
        try:
            while going():
                nbytes = self.sizes[self.requests % len(self.sizes)]
                offset = rng.choice(self.stretches) + rng.randrange((STRETCH - nbytes) // PAGE + 1) * PAGE
                address = self.addresses[self.requests % len(self.addresses)]
                self.move([(self.file, offset, address, nbytes)])
                self.moved += nbytes
                self.requests += 1
        except BaseException:
            stop.set()  # the other direction must not wait for this one's requests
            raise
        finally:
            self.ended = self.clock()
