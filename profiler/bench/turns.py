"""Times things that do the same work, in turns, so that what drifts on a machine hits all of them alike.

Owns the order of the runs and the ratio that comes out of them. It knows nothing of what it runs.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..measure import Progress

SAMPLE_SECONDS = 0.1
"""About how long a sample lasts: what runs quickly is run again and again in it."""
REST_SECONDS = 0.01
"""Between samples. Some libraries' threads spin for milliseconds after their work, on cores that the next needs."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of the ratios of neighbouring runs, and their quartiles."""

    median: float
    low: float
    high: float


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
    pairs: int,
    progress: Progress,
    what: str,
    *,
    sample_seconds: float = SAMPLE_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    rest: Callable[[float], None] = time.sleep,
) -> dict[str, tuple[float, ...]]:
    """Seconds that one call of each contender takes, `pairs` samples of each, in the order of the rounds.

    Each round samples every contender once, the next round in the opposite order. Before, each is called twice without
    being counted: to warm up, and to find how many calls make a sample of `sample_seconds`.
    """
    calls = {}
    for name, contender in contenders.items():
        progress(0.0, what)
        contender()
        started = clock()
        contender()
        calls[name] = max(1, round(sample_seconds / max(clock() - started, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for turn in range(pairs):
        progress(turn / pairs, what)
        for name in order:
            rest(REST_SECONDS)
            started = clock()
            for _ in range(calls[name]):
                contenders[name]()
            samples[name].append((clock() - started) / calls[name])
        order.reverse()
    progress(1.0, what)
    return {name: tuple(seconds) for name, seconds in samples.items()}


def ratio_of(larger: Sequence[float], smaller: Sequence[float]) -> Ratio:
    """`larger` over `smaller`, run by run: how many times as much the first is."""
    return spread([a / b for a, b in zip(larger, smaller, strict=True)])


def spread(ratios: Sequence[float]) -> Ratio:
    """The median and the quartiles of at least one ratio."""
    if len(ratios) == 1:
        return Ratio(ratios[0], ratios[0], ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high)
