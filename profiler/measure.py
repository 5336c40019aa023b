"""Repeats a measurement until its mean can be relied on, within a bound of count and of time.

Owns the rules by which samples become a figure and a figure counts as stable, and the form of progress reports. It
never knows what is measured.
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

Progress = Callable[[float, str], None]
"""Called with the fraction done, from 0 to 1 and never falling, and a few words on what is being done."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop repeating."""

    seconds: float
    """For all figures together. Each figure is measured once in any case."""
    spread: float = 0.03
    """A mean with a smaller spread is stable."""
    least: int = 5
    """Samples that each figure gets if there is time for them; fewer if it takes long and others do not."""
    most: int = 50

    def __post_init__(self) -> None:
        assert FEWEST <= self.least <= self.most and self.spread > 0 and self.seconds > 0, self


FEWEST = 3
"""Samples without which no mean counts as stable."""
FENCE = 3.0
"""Interquartile ranges beyond the quartiles at which a sample is wild."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The mean of some samples, as `mean_of` has it, and how far it can be trusted."""

    mean: float
    spread: float
    """As `spread_of` has it; infinite for a single sample."""
    samples: int
    stable: bool

    @property
    def rate(self) -> float:
        """How many a second, where seconds of one were measured."""
        return 1 / self.mean

    def trouble(self) -> str | None:
        """What a reader of the figure should know, in a few words; None when it is stable."""
        if self.stable:
            return None
        if self.samples < FEWEST:
            return f"measured {('once', 'twice')[self.samples - 1]} only, for want of time"
        return f"uncertain by {self.spread:.0%} after {self.samples} samples"


def mean_of(samples: Sequence[float]) -> float:
    """The mean, of which a wild sample moves no more than one at the fence would: as wild as the others make likely.

    A step is a sum of what is measured, and lasts as long as its mean says. Where others use the machine most samples
    are short and some are long, so that a median is too short; where none does, a page fault is not what a step is made
    of. (A block of 35 ms on cores that others used, 5 to 50 samples of it in seconds, against half a minute soon after:
    medians were 5 to 8% too short, these 2 to 6%; what is left had changed meanwhile.)
    """
    if len(samples) < 2:
        return samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    fence = FENCE * (high - low)
    return statistics.fmean(min(max(sample, low - fence), high + fence) for sample in samples)


def spread_of(samples: Sequence[float]) -> float:
    """The half-width of the median's 95% interval, as a fraction of the median; for normal noise the mean's is smaller.

    From the quartiles, 1.82 IQR / sqrt(n): for normal noise and many samples (for ten, it covers nearer 85%). A few
    wild samples, as a page fault or a neighbour on the machine makes them, do not move it.
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
) -> dict[Key, Measurement]:
    """Call each of `figures` again and again, until the mean of each is stable or `limits` end it.

    They take turns in rounds, so that whatever drifts on the machine meanwhile hits all of them alike.
    """
    samples: dict[Key, list[float]] = {key: [] for key in figures}
    spent = dict.fromkeys(figures, 0.0)
    turns = list(figures)
    started = clock()
    done = 0.0
    while turns:
        for key in turns:
            progress(done, what)
            begun = clock()
            samples[key].append(figures[key]())
            ended = clock()
            spent[key] += ended - begun
            done = max(done, min(1.0, (ended - started) / limits.seconds))
        turns = _next_round(samples, spent, limits)
    progress(1.0, what)
    return {key: _measurement(values, limits) for key, values in samples.items()}


def _measurement(samples: Sequence[float], limits: Limits) -> Measurement:
    spread = spread_of(samples)
    stable = len(samples) >= FEWEST and spread <= limits.spread
    return Measurement(mean_of(samples), spread, len(samples), stable)


def _next_round(samples: Mapping[Key, Sequence[float]], spent: Mapping[Key, float], limits: Limits) -> list[Key]:
    """Which figures the next round measures; none when all is done or the time is over.

    Everything, if there is time for `least` samples of each. If not, the figures share the time, and what a cheap one
    does not need is left to the others: better to know most of them well than all of them badly.
    """
    counts = {key: len(each) for key, each in samples.items()}
    enough = min(counts.values()) >= limits.least
    if enough and all(spread_of(each) <= limits.spread for each in samples.values()):
        return []
    if max(counts.values()) >= limits.most:
        return []
    costs = {key: spent[key] / count for key, count in counts.items()}
    left = limits.seconds - sum(spent.values())
    share = fair_share([limits.least * cost for cost in costs.values()], limits.seconds)
    if share is None:
        return list(samples) if sum(costs.values()) <= left else []
    turns = []
    for key, cost in costs.items():
        if counts[key] < limits.least and spent[key] + cost <= share and cost <= left:
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
