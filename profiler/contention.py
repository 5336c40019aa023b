"""Measures how much computing, a drive, updates and collectives slow each other down where all want the processor.

Owns the figures of each way: how much slower a layer runs while the drive reads or writes as a store does, with
checksums and without, and how much of its bandwidth the drive keeps meanwhile; and what a layer and updates, or a layer
or copies and collectives keep of their paces beside each other. The processor time of the others tells too little:
compute runs on all cores at once and waits for the slowest of them, so what is taken of one is lost on all.
"""

import statistics
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from ssdplan.native import Engine, IoError

from .clock import REAL, Clock
from .measure import FEWEST, Limits, Measurement, Progress, mean_of, repeat
from .parts import Blank, Ranks
from .storage import IN_FLIGHT, MIB, PLACES, SMALLEST_FILE, Direction, explained, opened

USED_BYTES = 4 * SMALLEST_FILE
REQUEST_BYTES = 12 * MIB
WINDOW_SECONDS = 0.5
"""Of two beside each other, half of it of one alone; shorter where the limits leave no time for that. A virtual machine
that rested may do more than its share for a tenth of a second, and a step goes on. (On two cores, beside writes that
nobody sums: 0.96 to 1.43 cores in windows of 0.12 s, 1.37 to 1.80 in these.)"""
SHORTEST_WINDOW_SECONDS = 0.12
LEAST_KEPT = 0.1
"""Of what it was alone, whatever was measured: a scheduler gives everyone a share."""

Work = Callable[[], float]
"""Computes something for some milliseconds, as a step does, and returns how long it took."""


@dataclass(frozen=True, slots=True)
class Contention:
    """What a volume and compute leave each other."""

    read_cores: float
    """Of the machine's, that compute does without while the volume reads at full bandwidth."""
    write_cores: float
    read_cores_unsummed: float
    """The same where nobody sums what is moved, as of states that an update sums in passing."""
    write_cores_unsummed: float
    bandwidth_kept: float
    """The fraction of its bandwidth that the volume keeps while compute runs."""


@dataclass(frozen=True, slots=True)
class _Load:
    """What a drive does beside compute."""

    direction: Direction
    summed: bool
    """Whether its threads take the checksum of what it moves."""

    def __str__(self) -> str:
        return f"{self.direction}s" + ("" if self.summed else " what nobody sums")


_LOADS = (
    _Load("read", summed=True),
    _Load("read", summed=False),
    _Load("write", summed=True),
    _Load("write", summed=False),
)


def measure_contention(
    directory: Path,
    work: Work,
    cores: int,
    limits: Limits,
    progress: Progress,
    *,
    blank: Blank | None = None,
    reach: int = USED_BYTES,
    open_engine: Callable[[], Engine] = Engine,
    clock: Clock = REAL,
) -> tuple[Contention, list[str]]:
    """What `work`, which uses all `cores`, and `directory`'s drive take from each other, measured at places of `blank`
    or of a file as `storage.measure_volume` does; and notes for people. `clock` is the one that `work` and the engine
    pass time of.

    Errors: as `storage.measure_volume`.
    """
    kept: dict[_Load, list[float]] = {load: [] for load in _LOADS}
    try:
        with opened(
            directory, blank, reach, USED_BYTES, IN_FLIGHT * PLACES * REQUEST_BYTES, open_engine, clock
        ) as bench:
            bench.write_all(limits.seconds, lambda fraction, what: None)

            window = _window(limits, len(_LOADS))

            def computed(load: _Load) -> float:
                """The fraction of its speed that compute keeps."""
                moving = partial(bench.moving, load.direction, REQUEST_BYTES, IN_FLIGHT, summed=load.summed)
                compute, drive = _beside(work, moving, window, clock)
                kept[load].append(drive)
                return compute

            figures = {load: partial(computed, load) for load in _LOADS}
            found = repeat(figures, limits, progress, f"{directory}: beside compute", clock=clock)
    except IoError as error:
        raise explained(error, directory) from error
    notes = [
        f"{directory}: what compute keeps while it {load}: {trouble}"
        for load, measured in found.items()
        if (trouble := measured.trouble())
    ]
    moved = {load: _fraction(statistics.median(each)) for load, each in kept.items()}
    taken = {load: _cores(found[load], moved[load], cores) for load in _LOADS}
    read, read_unsummed = _in_order(*(taken[load] for load in _LOADS if load.direction == "read"))
    write, write_unsummed = _in_order(*(taken[load] for load in _LOADS if load.direction == "write"))
    return Contention(read, write, read_unsummed, write_unsummed, statistics.fmean(moved.values())), notes


def measure_beside_updates(
    work: Work,
    update: Callable[[], object],
    limits: Limits,
    progress: Progress,
    *,
    what: str = "compute",
    clock: Clock = REAL,
) -> tuple[tuple[float, float], list[str]]:
    """What `work` and `update`, called again and again, keep of their paces beside each other; and notes for people,
    who know `work` as `what`."""
    kept: list[float] = []
    window = _window(limits, 1)

    def computed() -> float:
        """The fraction of its speed that compute keeps."""
        compute, updates = _beside(work, partial(_Updating, update, clock), window, clock)
        kept.append(updates)
        return compute

    found = repeat({"beside": computed}, limits, progress, f"{what} beside updates", clock=clock)["beside"]
    trouble = found.trouble()
    notes = [f"what is left of {what} beside updates: {trouble}"] if trouble else []
    return (_fraction(found.mean), _fraction(mean_of(kept))), notes


_MOST_CALLS = 4096
"""Of collectives in a window."""


def measure_beside_collectives(
    ranks: Ranks, collective: Callable[[], object], work: Work, *, clock: Clock = REAL
) -> tuple[float, float]:
    """What `work` and `collective`, called again and again, keep of their paces beside each other. All ranks call this
    at the same time. They make as many collectives as each other: each counts by the times of the slowest."""

    def most(*mine: float) -> list[float]:
        """Of what each rank says, the most; what all say is the same everywhere."""
        form = struct.Struct(f"<{len(mine)}d")
        return [max(each) for each in zip(*(form.unpack(told) for told in ranks.tell(form.pack(*mine))), strict=True)]

    def calls(count: int) -> float:
        """Seconds of one, on average over so many."""
        started = clock()
        for _ in range(count):
            collective()
        return (clock() - started) / count

    work()
    once, computed = most(calls(1), work())
    window = max(WINDOW_SECONDS, _WORKS * computed)
    count = min(max(round(window / max(once, window / _MOST_CALLS)), 1), _MOST_CALLS)
    compute, moved = [], []
    for _ in range(FEWEST):
        (by_itself,) = most(calls(count))
        alone = _mean_of(work, window / 2, clock)
        most(0.0)  # all begin at once
        pool = clock.threads(1)
        try:
            running = pool.submit(lambda: calls(count))
            slowed = [work()]
            while not running.done():
                slowed.append(work())
            (beside,) = most(running.result())
        finally:
            pool.shutdown()
        compute.append(alone / statistics.fmean(slowed))
        moved.append(by_itself / beside)
    return _fraction(statistics.median(compute)), _fraction(statistics.median(moved))


_WORKS = 4
"""Runs of the work in a window, at the least: the last of them goes on alone when the collectives have ended."""


class _Other(Protocol):
    """What goes on beside compute for as long as its context lasts, and then knows how fast it went."""

    def end(self, meanwhile: Callable[[], object]) -> None:
        """Begin nothing more, and call `meanwhile` until what is under way has ended."""

    @property
    def per_second(self) -> float: ...


def _beside(
    work: Work, other: Callable[[], AbstractContextManager[_Other]], window: float, clock: Clock
) -> tuple[float, float]:
    """The fractions of their paces that `work` and the other keep beside each other, in one sample."""
    alone = _mean_of(work, window / 2, clock)
    with other() as by_itself:
        clock.sleep(window / 2)
    with other() as beside:
        slowed = _mean_of(work, window, clock)
        beside.end(work)
    return alone / slowed, beside.per_second / by_itself.per_second


class _Updating:
    """A thread that updates without end, as long as the context lasts; afterwards it knows how often it did."""

    def __init__(self, update: Callable[[], object], clock: Clock) -> None:
        self._update, self._clock = update, clock
        self._stop = threading.Event()
        self._pool = clock.threads(1)

    def __enter__(self) -> Self:
        self._running = self._pool.submit(self._run)
        return self

    def end(self, meanwhile: Callable[[], object]) -> None:
        self._stop.set()
        while not self._running.done():
            meanwhile()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    @property
    def per_second(self) -> float:
        return self._running.result()

    def _run(self) -> float:
        started, count = self._clock(), 0
        while not (self._stop.is_set() and count):
            self._update()
            count += 1
        return count / (self._clock() - started)


def _in_order(summed: float, unsummed: float) -> tuple[float, float]:
    """The same, but that what sums takes no less: where it seems to, both are measurements of one figure."""
    if summed >= unsummed:
        return summed, unsummed
    both = (summed + unsummed) / 2
    return both, both


def _cores(computed: Measurement, moved: float, cores: int) -> float:
    """Cores that compute lost, for as much as the drive would have moved had it lost nothing itself; that may be more
    than there are."""
    return cores * (1.0 - _fraction(computed.mean)) / moved


def _fraction(kept: float) -> float:
    return min(max(kept, LEAST_KEPT), 1.0)


def _window(limits: Limits, figures: int) -> float:
    """Seconds of a window of two beside each other, when each figure takes one of them and two half as long
    `limits.least` times."""
    return min(max(limits.seconds / (2 * limits.least * figures), SHORTEST_WINDOW_SECONDS), WINDOW_SECONDS)


def _mean_of(work: Work, window: float, clock: Clock) -> float:
    """Seconds of one run of `work`, over those that fit into a window: a drive that takes of some of them much takes of
    a step as much as of all of them together."""
    started = clock()
    samples = [work()]
    while clock() - started < window:
        samples.append(work())
    return statistics.fmean(samples)
