"""Repeats a measurement until its median can be relied on, within a bound of count and of time.

Owns the rules by which a figure counts as stable and a sample as disturbed, and the form of progress reports. It never
knows what is measured.
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ssdplan.native.process import stolen_seconds

Key = TypeVar("Key", bound=Hashable)

Progress = Callable[[float, str], None]
"""Called with the fraction done, from 0 to 1 and never falling, and a few words on what is being done."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop repeating."""

    seconds: float
    """For all figures together. Each figure is measured once in any case."""
    spread: float = 0.03
    """A median with a smaller spread is stable."""
    least: int = 5
    """Samples, undisturbed ones, that each figure gets if there is time for them; fewer if it takes long and others do
    not."""
    most: int = 50

    def __post_init__(self) -> None:
        assert FEWEST <= self.least <= self.most and self.spread > 0 and self.seconds > 0, self


FEWEST = 3
"""Samples without which no median counts as stable."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The median of some samples, and how far it can be trusted."""

    median: float
    spread: float
    """Half of the 95% confidence interval of the median, as a fraction of it; infinite for a single sample."""
    samples: int
    stable: bool

    def trouble(self) -> str | None:
        """What a reader of the figure should know, in a few words; None when it is stable."""
        if self.stable:
            return None
        if self.samples < FEWEST:
            return f"measured {('once', 'twice')[self.samples - 1]} only, for want of time"
        return f"uncertain by {self.spread:.0%} after {self.samples} samples"


def spread_of(samples: Sequence[float]) -> float:
    """The half-width of the median's 95% interval, as a fraction of the median.

    From the quartiles, 1.82 IQR / sqrt(n): for normal noise and many samples (for ten, it covers nearer 85%). A few
    wild samples, as a page fault or a neighbour on the machine makes them, move neither the median nor this.
    """
    if len(samples) < 2:
        return math.inf
    if min(samples) == max(samples):
        return 0.0
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return 1.82 * (high - low) / math.sqrt(len(samples)) / median if median > 0 else math.inf


def repeat(
    figures: Mapping[Key, Callable[[], float]],
    limits: Limits,
    progress: Progress,
    what: str,
    *,
    clock: Callable[[], float] = time.perf_counter,
    stolen: Callable[[], float] = stolen_seconds,
) -> dict[Key, Measurement]:
    """Call each of `figures` again and again, until the median of each is stable or `limits` end it.

    They take turns in rounds, so that whatever drifts on the machine meanwhile hits all of them alike. A sample during
    which `stolen` grew is left out once there are enough others.
    """
    samples: dict[Key, Samples] = {key: Samples() for key in figures}
    spent = dict.fromkeys(figures, 0.0)
    turns = list(figures)
    started = clock()
    done = 0.0
    while turns:
        for key in turns:
            progress(done, what)
            begun, before = clock(), stolen()
            sample = figures[key]()
            ended, after = clock(), stolen()
            samples[key].add(sample, disturbed=after > before)
            spent[key] += ended - begun
            done = max(done, min(1.0, (ended - started) / limits.seconds))
        turns = _next_round(samples, spent, limits)
    progress(1.0, what)
    return {key: _measurement(values, limits) for key, values in samples.items()}


class Samples:
    """Of one figure, those that something disturbed apart from the others."""

    def __init__(self) -> None:
        self._quiet: list[float] = []
        self._disturbed: list[float] = []

    def add(self, sample: float, *, disturbed: bool) -> None:
        (self._disturbed if disturbed else self._quiet).append(sample)

    @property
    def quiet(self) -> int:
        return len(self._quiet)

    @property
    def taken(self) -> int:
        return len(self._quiet) + len(self._disturbed)

    @property
    def values(self) -> list[float]:
        """Those that count: the quiet ones, or all while these are too few."""
        return self._quiet if len(self._quiet) >= FEWEST else self._quiet + self._disturbed


def _measurement(samples: Samples, limits: Limits) -> Measurement:
    values = samples.values
    spread = spread_of(values)
    stable = len(values) >= FEWEST and spread <= limits.spread
    return Measurement(statistics.median(values), spread, len(values), stable)


def _next_round(samples: Mapping[Key, Samples], spent: Mapping[Key, float], limits: Limits) -> list[Key]:
    """Which figures the next round measures; none when all is done or the time is over.

    Everything, if there is time for `least` samples of each. If not, the figures share the time, and what a cheap one
    does not need is left to the others: better to know most of them well than all of them badly.
    """
    enough = all(each.quiet >= limits.least for each in samples.values())
    if enough and all(spread_of(each.values) <= limits.spread for each in samples.values()):
        return []
    if max(each.taken for each in samples.values()) >= limits.most:
        return []
    costs = {key: spent[key] / each.taken for key, each in samples.items()}
    left = limits.seconds - sum(spent.values())
    share = fair_share([limits.least * cost for cost in costs.values()], limits.seconds)
    if share is None:
        return list(samples) if sum(costs.values()) <= left else []
    turns = []
    for key, cost in costs.items():
        if samples[key].quiet < limits.least and spent[key] + cost <= share and cost <= left:
            turns.append(key)
            left -= cost
    return turns


def fair_share(wants: Sequence[float], total: float) -> float | None:
    """The most that each may take of `total` if nobody takes more than it wants; None when there is enough for all."""
    left = total
    for position, want in enumerate(sorted(wants)):
        share = left / (len(wants) - position)
        if want > share:
            return share
        left -= want
    return None


def portion(progress: Progress, start: float, stop: float) -> Progress:
    """The progress of a part of the work, told as progress of the whole between `start` and `stop`."""
    return lambda fraction, what: progress(start + (stop - start) * fraction, what)
