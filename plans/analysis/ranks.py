"""Several ranks side by side: one step as each of them measured it, on one clock, and for whom the others waited.

Owns the clock, which begins where the first of them began and is set by the moment at which all had ended the step; and
what held the others up. A rank's clock and another's need not agree.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import MismatchError
from ..graph.collectives import Collective
from ..graph.ops import Resource
from ..graph.timeline import Timeline
from .work import work_of


@dataclass(frozen=True, slots=True)
class Held:
    """What of a step the others waited for one rank."""

    rank: int
    seconds: float
    """Of the others, in the mean, over all collectives that this rank was the last to begin."""
    causes: tuple[tuple[Resource, str, float], ...]
    """What it was at meanwhile, without which it could not begin: resource, kind of work, seconds of these; the longest
    first. What is left of the seconds, it took to begin operations."""


def shifts(timelines: Sequence[Timeline]) -> tuple[float, ...]:
    """Rank -> seconds by which its step began after the first one. Raises MismatchError where a timeline does not say
    when all had ended it."""
    met = [timeline.met for timeline in timelines]
    if any(moment is None for moment in met):
        raise MismatchError("a step of several ranks that does not say when all of them had ended it")
    latest = max(moment for moment in met if moment is not None)
    return tuple(latest - moment for moment in met if moment is not None)


def held_up(timelines: Sequence[Timeline]) -> tuple[Held, ...]:
    """Who held the others up in a step, the longest first; `timelines`: of each rank, whose collectives are the same.
    Raises MismatchError where they are not, and as `shifts`."""
    late = shifts(timelines)
    each = [[op for op in timeline.graph.ops if isinstance(op, Collective)] for timeline in timelines]
    if len({tuple(map(str, ops)) for ops in each}) > 1:
        raise MismatchError("ranks that did not run the same collectives; their traces are of several steps")
    seconds: Counter[int] = Counter()
    causes: dict[int, Counter[tuple[Resource, str]]] = {rank: Counter() for rank in range(len(timelines))}
    for ops in zip(*each, strict=True):
        began = [late[rank] + timelines[rank].starts[op.index] for rank, op in enumerate(ops)]
        last = max(range(len(began)), key=began.__getitem__)
        waited = sum(began[last] - moment for moment in began) / (len(began) - 1)
        seconds[last] += waited
        since = min(began)
        for index, within in _meanwhile(timelines[last], ops[last].index, since - late[last]):
            op = timelines[last].graph.ops[index]
            causes[last][op.resource, work_of(op)] += within * waited / (began[last] - since)
    return tuple(
        Held(rank, took, tuple((*what, part) for what, part in causes[rank].most_common()))
        for rank, took in seconds.most_common()
    )


def _meanwhile(timeline: Timeline, index: int, since: float) -> Iterator[tuple[int, float]]:
    """(op, seconds) of each op behind `since` in the chain of those that op `index` waited for last."""
    until = timeline.starts[index]
    while until > since and (before := timeline.last_wait(index)) is not None:
        index, begin = before, max(timeline.starts[before], since)
        within = min(timeline.ends[index], until) - begin
        if within > 0:
            yield index, within
        until = min(until, begin)
