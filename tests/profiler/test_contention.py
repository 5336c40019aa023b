"""What compute and a drive take from each other is measured right where the truth is known."""

import errno
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdplan.native import IoError
from ssdplan.plans.errors import DiskFullError
from ssdplan.profiler.contention import (
    LEAST_KEPT,
    SHORTEST_WINDOW_SECONDS,
    WINDOW_SECONDS,
    _in_order,
    _window,
    measure_beside_collectives,
    measure_beside_updates,
    measure_contention,
)
from ssdplan.profiler.measure import Limits
from ssdplan.profiler.storage import IN_FLIGHT
from tests.profiler.made_time import MadeTime, MadeTurn
from tests.profiler.test_storage import MadeDrive, Segments, silent

CORES = 4
LIMITS = Limits(seconds=20.0, least=3, most=5)
WORK_SECONDS = 0.01
EXACT = 0.03
"""But for the first and last request of a window."""


@dataclass
class Ending:
    """A request that tells when it has ended."""

    sleep: Callable[[float], None]
    seconds: float
    ended: Callable[[], None]

    def wait(self) -> None:
        self.sleep(self.seconds)
        self.ended()


class SharedDrive(MadeDrive):
    """Reads and writes that slow what computes beside them, and are slowed by it."""

    def __init__(self, slowed: dict[str, float], kept: float) -> None:
        super().__init__(read=4e9, write=2e9)
        self.slowed, self.kept = slowed, kept
        self.moving: list[str] = []
        self.computing = False
        self.most_at_once = 0

    def _summed(self, kind: str, ranges: list[Segments]) -> list[int]:
        ((segment,),) = ranges
        assert segment[1] + segment[3] <= self.size
        self.moving.append(kind)
        self.most_at_once = max(self.most_at_once, len(self.moving))
        self.time.sleep(segment[3] / self._rate(kind))
        self.moving.remove(kind)
        return [0]

    def _submit(self, kind: str, segments: Segments) -> Any:
        """Nobody sums it."""
        self.moving.append(f"{kind} unsummed")
        return Ending(
            self.time.sleep, segments[0][3] / self._rate(kind), lambda: self.moving.remove(f"{kind} unsummed")
        )

    def _rate(self, kind: str) -> float:
        return self.rates[kind] * (self.kept if self.computing else 1.0)

    def read_summed(self, ranges: list[Segments]) -> list[int]:
        return self._summed("read", ranges)

    def write_summed(self, ranges: list[Segments]) -> list[int]:
        return self._summed("write", ranges)

    def work(self) -> float:
        factor = self.slowed[self.moving[0]] if self.moving else 1.0
        self.computing = True
        self.time.sleep(WORK_SECONDS * factor)
        self.computing = False
        return WORK_SECONDS * factor


def test_both_figures_are_those_of_the_machine(tmp_path: Path) -> None:
    slowed = {"read": 1.25, "write": 2.0, "read unsummed": 1.1, "write unsummed": 1.4}
    drive = SharedDrive(slowed, kept=0.8)
    found, notes = measure_contention(
        tmp_path, drive.work, CORES, LIMITS, silent, open_engine=lambda: drive, clock=drive.time
    )
    assert found.bandwidth_kept == pytest.approx(0.8, rel=EXACT)
    # Lost to a drive that moved only so much; at its full bandwidth it would have taken more.
    assert found.read_cores == pytest.approx(CORES * 0.2 / 0.8, rel=EXACT)
    assert found.write_cores == pytest.approx(CORES * 0.5 / 0.8, rel=EXACT)
    assert found.read_cores_unsummed == pytest.approx(CORES * (1 - 1 / 1.1) / 0.8, rel=EXACT)
    assert found.write_cores_unsummed == pytest.approx(CORES * (1 - 1 / 1.4) / 0.8, rel=EXACT)
    assert drive.most_at_once == IN_FLIGHT and drive.closed and not list(tmp_path.iterdir())
    assert not notes, "each is stable"


class QueueingDrive(MadeDrive):
    """One request after the other, a MiB at a time, and slower while something computes: at the end of a window many
    are still under way."""

    def __init__(self, kept: float) -> None:
        super().__init__(read=2e9, write=2e9)
        self.kept, self.turn = kept, MadeTurn(self.time)
        self.computing = False

    def _summed(self, ranges: list[Segments]) -> list[int]:
        ((segment,),) = ranges
        with self.turn:
            for _ in range(segment[3] >> 20):
                self.time.sleep((1 << 20) / 2e9 / (self.kept if self.computing else 1.0))
        return [0]

    def read_summed(self, ranges: list[Segments]) -> list[int]:
        return self._summed(ranges)

    def write_summed(self, ranges: list[Segments]) -> list[int]:
        return self._summed(ranges)

    def _submit(self, kind: str, segments: Segments) -> Any:
        self._summed([segments])
        return Ending(self.time.sleep, 0.0, lambda: None)

    def work(self) -> float:
        self.computing = True
        self.time.sleep(4 * WORK_SECONDS)
        self.computing = False
        return 4 * WORK_SECONDS


def test_what_is_under_way_at_the_end_moves_beside_compute_too(tmp_path: Path) -> None:
    drive = QueueingDrive(kept=0.5)
    found, _ = measure_contention(
        tmp_path, drive.work, CORES, LIMITS, silent, open_engine=lambda: drive, clock=drive.time
    )
    assert found.bandwidth_kept == pytest.approx(0.5, rel=EXACT)


def test_what_a_drive_takes_at_full_bandwidth_may_be_more_than_there_is(tmp_path: Path) -> None:
    """It kept half of its bandwidth and took three quarters of compute."""
    drive = SharedDrive(dict.fromkeys(("read", "write", "read unsummed", "write unsummed"), 4.0), kept=0.5)
    found, _ = measure_contention(
        tmp_path, drive.work, CORES, LIMITS, silent, open_engine=lambda: drive, clock=drive.time
    )
    assert found.read_cores == pytest.approx(1.5 * CORES, rel=EXACT)
    assert found.write_cores_unsummed == pytest.approx(1.5 * CORES, rel=EXACT)


class SharedCores:
    """A layer and updates, of which each slows the other."""

    def __init__(self, compute: float, updates: float) -> None:
        self.time = MadeTime()
        self.kept = {"compute": compute, "updates": updates}
        self.running = {"compute": 0, "updates": 0}

    def _run(self, what: str, other: str, seconds: float) -> float:
        begun = self.time()
        self.running[what] += 1
        self.time.sleep(seconds / (self.kept[what] if self.running[other] else 1.0))
        self.running[what] -= 1
        return self.time() - begun

    def work(self) -> float:
        return self._run("compute", "updates", 2 * WORK_SECONDS)

    def update(self) -> float:
        return self._run("updates", "compute", WORK_SECONDS)


def test_what_compute_and_updates_leave_each_other() -> None:
    cores = SharedCores(compute=0.4, updates=0.5)
    (compute, updates), notes = measure_beside_updates(cores.work, cores.update, LIMITS, silent, clock=cores.time)
    assert compute == pytest.approx(0.4, rel=EXACT) and updates == pytest.approx(0.5, rel=EXACT)
    assert not notes
    cores = SharedCores(compute=1.5, updates=1.5)
    assert measure_beside_updates(cores.work, cores.update, LIMITS, silent, clock=cores.time)[0] == (1.0, 1.0)


class TwoAlike:
    """Ranks of which the other says what this one does. `told` has all that was said."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.told: list[bytes] = []

    def gather(self, whole: torch.Tensor) -> None:
        raise AssertionError("not here")

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        raise AssertionError("not here")

    def tell(self, words: bytes) -> list[bytes]:
        self.told.append(words)
        return [words, words]


@pytest.mark.parametrize("longer", [1, 100], ids=["short works", "works longer than a window"])
def test_what_compute_and_collectives_leave_each_other(longer: int) -> None:
    cores = SharedCores(compute=0.6, updates=0.8)

    def work() -> float:
        return sum(cores.work() for _ in range(longer))

    kept, moved = measure_beside_collectives(TwoAlike(), cores.update, work, clock=cores.time)
    # The last work goes on alone, for at most a quarter of the window.
    assert kept == pytest.approx(0.6, abs=0.1) and moved == pytest.approx(0.8, rel=EXACT)
    faster = SharedCores(compute=1.5, updates=1.5)
    assert measure_beside_collectives(TwoAlike(), faster.update, faster.work, clock=faster.time) == (1.0, 1.0)


def test_ranks_make_as_many_collectives_as_each_other() -> None:
    """Rank 1 computes three times as slowly: both take what the slowest says, so that none waits for another's."""

    class Slower(TwoAlike):
        def tell(self, words: bytes) -> list[bytes]:
            return [words, b"".join(struct.pack("<d", 3 * each) for (each,) in struct.iter_unpack("<d", words))]

    counts = []
    for _ in range(2):
        cores, made = SharedCores(compute=0.6, updates=0.8), 0

        def collective(cores: SharedCores = cores) -> None:
            nonlocal made
            made += 1
            cores.update()

        measure_beside_collectives(Slower(), collective, cores.work, clock=cores.time)
        counts.append(made)
    window = max(WINDOW_SECONDS, 4 * 3 * 2 * WORK_SECONDS)
    assert counts == [1 + 2 * 3 * round(window / (3 * WORK_SECONDS))] * 2


def test_windows_are_as_long_as_the_time_allows() -> None:
    def window(seconds: float, figures: int) -> float:
        return _window(Limits(seconds=seconds, least=3), figures)

    assert window(24.0, 4) == WINDOW_SECONDS and window(1.8, 1) == pytest.approx(0.3)
    assert window(0.5, 4) == SHORTEST_WINDOW_SECONDS


@pytest.mark.parametrize(("measured", "told"), [((0.5, 0.2), (0.5, 0.2)), ((0.2, 0.4), (0.3, 0.3))])
def test_summing_takes_no_less_than_not_summing(measured: tuple[float, float], told: tuple[float, float]) -> None:
    assert _in_order(*measured) == pytest.approx(told)


def test_who_takes_nothing_is_not_charged(tmp_path: Path) -> None:
    kinds = ("read", "write", "read unsummed", "write unsummed")
    drive = SharedDrive(dict.fromkeys(kinds, 1.0), kept=1.3)
    found, _ = measure_contention(
        tmp_path, drive.work, CORES, LIMITS, silent, open_engine=lambda: drive, clock=drive.time
    )
    assert found.read_cores == found.write_cores == 0.0 and found.bandwidth_kept == 1.0


def test_a_real_drive_beside_real_work(tmp_path: Path) -> None:
    def work() -> float:
        started = time.perf_counter()
        while time.perf_counter() - started < WORK_SECONDS:
            sum(range(1000))
        return time.perf_counter() - started

    found, _ = measure_contention(tmp_path, work, 1, Limits(seconds=1.0, least=3, most=4), silent)
    most = (1 - LEAST_KEPT) / LEAST_KEPT  # of a core: a machine on which others are busy may leave both very little
    assert 0.0 <= found.read_cores <= most and 0.0 <= found.write_cores <= most
    assert LEAST_KEPT <= found.bandwidth_kept <= 1.0
    assert not list(tmp_path.iterdir())


def test_a_full_drive_is_named_and_left_clean(tmp_path: Path) -> None:
    class Full(MadeDrive):
        def write(self, segments: Segments) -> object:
            raise IoError(errno.ENOSPC, "write", str(tmp_path))

    drive = Full()
    with pytest.raises(DiskFullError, match=str(tmp_path)):
        measure_contention(tmp_path, lambda: 0.01, CORES, LIMITS, silent, open_engine=lambda: drive, clock=drive.time)
    assert drive.closed and not list(tmp_path.iterdir())
