"""The prefetch table: of each state, where it lives, when a step uses it, and where else it is meanwhile.

Owns what 10Cache (section 3.2.1) keeps in its table, read off the graph and its times: nothing is decided by it. A
state's parameters and its optimizer states have a row each.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from ..documents.profile import Model
from ..graph.contents import Content
from ..graph.ops import Backward, Forward, Op, Perturb, Region, Schedule, TakeRows, Tier, Transfer, Update
from ..graph.timeline import Timeline

What = Literal["parameters", "optimizer states"]
_MOVED: dict[Content, What] = {
    Content.PARAMETERS: "parameters",
    Content.OPTIMIZER_STATES: "optimizer states",
}


@dataclass(frozen=True, slots=True)
class Stay:
    """A state, or a part of it, in a place that is not its home."""

    tier: Tier
    start: float
    """Seconds from the start of the step: when the transfer begins that brings it, or the update that makes it."""
    end: float
    """When the last operation on it ends; the place may be another's from then on."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row: of one state its parameters, or its optimizer states."""

    order: int
    """From 1, by first use."""
    state: str
    state_class: str
    what: What
    home: dict[Tier, int]
    """Bytes that live on each tier; tiers without any are left out."""
    uses: int
    """Operations of a step that compute with it, or update it."""
    first: float | None
    """When the first of them begins, and the last one ends, in seconds from the start of the step; None: a step does
    not use it."""
    last: float | None
    between: int | None
    """Reuse distance: the most bytes of other rows that are used between two uses in a row of this one. None: it is
    used once or never."""
    size_class: int | None
    """Bytes of the largest place that it passes through; None: it stays at home."""
    stays: tuple[Stay, ...]
    """By their start; what overlaps on one tier is one stay."""

    @property
    def nbytes(self) -> int:
        return sum(self.home.values())


@dataclass(slots=True)
class _Found:
    """What a step says of one row."""

    used: list[int] = field(default_factory=list)
    """Indices of operations."""
    buffers: set[int] = field(default_factory=set)
    """Places that it passes through."""


Key = tuple[int, What]
"""A state's index, and what of it."""


def prefetch_table(model: Model, schedule: Schedule, timeline: Timeline) -> tuple[Entry, ...]:
    """The rows of the step that `timeline` is of, by first use; what is never used comes last."""
    graph = timeline.graph
    homes: dict[Key, dict[Tier, int]] = defaultdict(lambda: defaultdict(int))
    at_home: set[int] = set()
    for home in schedule.homes:
        for what, region in _parts(home.parameters, home.optimizer):
            at_home.add(region.buffer)
            homes[home.state, what][schedule.buffers[region.buffer].tier] += region.nbytes
    found: dict[Key, _Found] = {key: _Found() for key in homes}
    touched: dict[int, tuple[float, float]] = {}
    for op in graph.ops:
        for region in (*op.reads, *op.writes):
            start, end = touched.get(region.buffer, (timeline.starts[op.index], 0.0))
            touched[region.buffer] = (start, max(end, timeline.ends[op.index]))
        for key, region in _of(op, model):
            if key not in found:  # of a frozen state there are no optimizer states
                continue
            if not isinstance(op, Transfer):
                found[key].used.append(op.index)
            for each in (op.source, op.target) if isinstance(op, Transfer) else (region,):
                if each.buffer not in at_home:
                    found[key].buffers.add(each.buffer)
    sizes = {key: sum(home.values()) for key, home in homes.items()}
    between = _between(found, sizes, timeline)
    firsts = {key: min((timeline.starts[index] for index in row.used), default=inf) for key, row in found.items()}
    ranked = sorted(found, key=lambda key: (firsts[key], key))
    entries = []
    for order, key in enumerate(ranked, 1):
        state, what = key
        row = found[key]
        stays = [Stay(schedule.buffers[index].tier, *touched[index]) for index in row.buffers]
        entries.append(
            Entry(
                order,
                model.states[state].name,
                model.states[state].state_class,
                what,
                dict(homes[key]),
                len(row.used),
                firsts[key] if row.used else None,
                max(timeline.ends[index] for index in row.used) if row.used else None,
                between[key],
                max((schedule.buffers[index].nbytes for index in row.buffers), default=None),
                tuple(_merged(stays)),
            )
        )
    return tuple(entries)


def _parts(parameters: Region, optimizer: Region | None) -> Iterator[tuple[What, Region]]:
    yield "parameters", parameters
    if optimizer is not None:
        yield "optimizer states", optimizer


def _of(op: Op, model: Model) -> Iterator[tuple[Key, Region]]:
    """The rows that an operation touches, and where."""
    match op:
        case Transfer():
            what = _MOVED.get(op.content)
            if op.state is not None and what:
                yield (op.state, what), op.target
        case Forward() | Backward():
            for state, region in zip(model.layers[op.layer].states, op.weights, strict=True):
                yield (state, "parameters"), region
        case Update():
            yield (op.state, "optimizer states"), op.optimizer
            if op.on_device:
                yield (op.state, "parameters"), op.parameters
        case Perturb():
            yield (op.state, "parameters"), op.parameters
        case TakeRows():
            yield (op.state, "parameters"), op.rows


def _between(found: dict[Key, _Found], sizes: dict[Key, int], timeline: Timeline) -> dict[Key, int | None]:
    """Of each row the most bytes of other rows that are used between two uses in a row of it."""
    uses = sorted((timeline.starts[index], index, key) for key, row in found.items() for index in row.used)
    result: dict[Key, int | None] = dict.fromkeys(found)
    last: dict[Key, int] = {}
    for number, (_, _, key) in enumerate(uses):
        if key in last:
            others = {other for _, _, other in uses[last[key] + 1 : number]} - {key}
            result[key] = max(result[key] or 0, sum(sizes[other] for other in others))
        last[key] = number
    return result


def _merged(stays: list[Stay]) -> Iterator[Stay]:
    """By tier and start; what overlaps or follows at once is one."""
    for tier in ("device", "host", "ssd"):
        start = end = -1.0
        for stay in sorted((each for each in stays if each.tier == tier), key=lambda each: each.start):
            if start >= 0.0 and stay.start > end:
                yield Stay(tier, start, end)
                start = -1.0
            if start < 0.0:
                start, end = stay.start, stay.end
            end = max(end, stay.end)
        if start >= 0.0:
            yield Stay(tier, start, end)
