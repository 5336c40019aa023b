"""Drift: what a run measures of its machine, beside what its plan counts on, figure by figure.

Owns how the time of an operation becomes a figure of the profile, and which differences count. Every time is compared
with what the simulator would give the same operation beside the same others, so that operations which share a drive or
the cores are slow by the model and not by drift. It measures nothing and plans nothing itself.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..documents.matrices import longer
from ..documents.plan import Plan
from ..documents.profile import Machine, MixedBandwidth, Model, Timing, Volume
from ..graph.collectives import AddShares, Collective
from ..graph.ops import RESOURCES, Backward, Forward, Graph, Op, Perturb, TakeRows
from ..graph.timeline import Timeline

THRESHOLD = 0.15
"""A figure has drifted when its operations take more than so much longer than they should, or shorter."""
MATTERS = 0.03
"""Of a step: drift that changes it by less is not told."""
_SHARE = 1 / 3
"""Of that: a single figure that has less of it is not named beside others."""

FigureKind = Literal[
    "read",
    "write",
    "read beside writes",
    "write beside reads",
    "h2d",
    "d2h",
    "update",
    "forward",
    "backward",
    "perturb",
]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a profile: the drive's bandwidth in each direction, alone and while the other is at work too; the
    links', the rate of updates, or the seconds of a layer class."""

    kind: FigureKind
    layer_class: str = ""


TIE = 1e-12
"""Operations whose ends lie closer together than this share of the time that has passed end together: which of two
successors goes first is then decided by the graph and not by the last bit of a sum."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the simulator counts on for a graph: the seconds of each operation when nothing else runs; and for each bit
    mask of the resources at work, bit i for RESOURCES[i], at what share of its full speed each of them then works."""

    alone_seconds: tuple[float, ...]
    speeds: tuple[tuple[float, ...], ...]


class Advisor(Protocol):
    """What a run asks of the planner, which it does not know: how its plan does, and would do, with other figures."""

    def expectation(self, graph: Graph) -> Expectation: ...
    def step_seconds(self, graph: Graph, machine: Machine, model: Model) -> float:
        """What this graph of the plan as it is takes with these figures."""

    def predicted(self, plan: Plan, graph: Graph) -> Timeline:
        """When each operation of a graph of `plan`, this one or one that took its place, would run by its profile."""

    def replanned(self, machine: Machine, model: Model) -> Plan:
        """What solve would choose with these figures: for the same budgets, batch and schedule."""


@dataclass(frozen=True)
class Drift:
    """A machine that is not as its profile says."""

    slowdowns: dict[Figure, float]
    """Of the figures that drifted and matter, those that matter most first: measured over expected time."""
    machine: Machine
    model: Model
    """With all figures as measured."""
    step_seconds: float
    """What a step of the plan takes with them."""


def slowdowns(timelines: Sequence[Timeline], expected: Expectation) -> dict[Figure, float]:
    """How many times as long as expected the operations of each figure took, over some steps of one graph.

    Of each step the mean over its operations, weighted by their expected seconds, for a step is their sum; a wild one
    moves it no more than one at the fence would, the rule of profiles. (Medians of the drive's operations, of which
    many are short and some are long, made four steps of 551M, n=1, 8 to 19% too short, these means 2 to 7%.) Of these
    the median over the steps: an odd step of several moves nothing. A figure is left out of which most steps show
    nothing.
    """
    found: dict[Figure, list[float]] = defaultdict(list)
    for timeline in timelines:
        for figure, slowdown in _of_one_step(timeline, expected).items():
            found[figure].append(slowdown)
    return {figure: statistics.median(each) for figure, each in found.items() if 2 * len(each) > len(timelines)}


def corrected(machine: Machine, model: Model, slowdowns: dict[Figure, float]) -> tuple[Machine, Model]:
    """Machine and model with these figures as measured and all others as they are.

    A direction of the drive that was seen only alone, or only beside the other, has drifted alike in both; a layer
    class that ran only backward, alike forward.
    """

    def times(figure: Figure) -> float:
        return slowdowns.get(figure, 1.0)

    if any(figure in slowdowns for pair in _DRIVE for figure in pair):
        (read, mixed_read), (write, mixed_write) = (
            (slowdowns.get(alone, times(beside)), slowdowns.get(beside, times(alone))) for alone, beside in _DRIVE
        )
        volumes = tuple(_slower(volume, (read, write), (mixed_read, mixed_write)) for volume in machine.volumes)
        machine = machine.model_copy(update={"volumes": volumes})
    update = times(Figure("update"))
    rates = {
        "h2d_bandwidth": machine.h2d_bandwidth / times(Figure("h2d")),
        "d2h_bandwidth": machine.d2h_bandwidth / times(Figure("d2h")),
        "update_rate": machine.update_rate / update,
        "update_rate_bf16": machine.update_rate_bf16 and machine.update_rate_bf16 / update,
        "update_rate_int8": machine.update_rate_int8 and machine.update_rate_int8 / update,
        "checksum_rate": machine.checksum_rate and machine.checksum_rate / update,
    }
    classes = []
    for entry in model.classes:
        backward = times(Figure("backward", entry.name))
        forward = slowdowns.get(Figure("forward", entry.name), backward)
        timings = tuple(_longer(timing, forward, backward) for timing in entry.timings)
        classes.append(entry.model_copy(update={"timings": timings}))
    changed = {"classes": tuple(classes), "matrix_updates": longer(model.matrix_updates, update)}
    return machine.model_copy(update=rates), model.model_copy(update=changed)


def find_drift(plan: Plan, timelines: Sequence[Timeline], advisor: Advisor) -> Drift | None:
    """What of the plan's machine has drifted enough to matter for its step; None when nothing has.

    `timelines` are of one graph of the plan's schedule.
    """
    graph = timelines[0].graph
    measured = slowdowns(timelines, advisor.expectation(graph))
    drifted = {figure: times for figure, times in measured.items() if max(times, 1 / times) > 1 + THRESHOLD}
    if not drifted:
        return None
    before = advisor.step_seconds(graph, plan.machine, plan.model)

    def effect(figures: dict[Figure, float]) -> float:
        return abs(advisor.step_seconds(graph, *corrected(plan.machine, plan.model, figures)) / before - 1)

    if effect(drifted) < MATTERS:
        return None
    effects = {figure: effect({figure: times}) for figure, times in drifted.items()}
    named = [figure for figure in drifted if effects[figure] >= _SHARE * MATTERS] or list(drifted)
    named.sort(key=lambda figure: -effects[figure])
    machine, model = corrected(plan.machine, plan.model, measured)
    return Drift(
        {figure: drifted[figure] for figure in named}, machine, model, advisor.step_seconds(graph, machine, model)
    )


# Figures and operations.

_DRIVE = ((Figure("read"), Figure("read beside writes")), (Figure("write"), Figure("write beside reads")))
"""Each direction alone, and beside the other."""
_READ, _WRITE = 1 << RESOURCES.index("read"), 1 << RESOURCES.index("write")

Samples = list[tuple[float, float]]
"""(slowdown, weight) of each operation."""
_FENCE = 3.0
"""Interquartile ranges beyond the quartiles at which an operation is wild."""
_ROUNDS = 8
_LEAST_LEFT = 0.1


def _of_one_step(timeline: Timeline, expected: Expectation) -> dict[Figure, float]:
    """The slowdown of each figure in one step."""
    samples: dict[Figure, Samples] = defaultdict(list)
    drive: dict[str, list[tuple[float, float, float]]] = {"read": [], "write": []}
    worked, mixed = _expected_work(timeline, expected)
    for op in timeline.graph.ops:
        alone, done, beside = expected.alone_seconds[op.index], worked[op.index], mixed[op.index]
        if alone <= 0 or done <= 0 or isinstance(op, Collective | AddShares):
            continue  # a collective lasts as long as the slowest rank lets it, and is no figure of this machine
        if op.resource in drive:
            drive[op.resource].append((alone, done - beside, beside))
        else:
            samples[_figure(op)].append((done / alone, alone))
    found = {figure: _weighted_mean(each) for figure, each in samples.items()}
    for figures, moved in zip(_DRIVE, drive.values(), strict=True):
        for figure, slowdown in zip(figures, _alone_and_beside(moved), strict=True):
            if slowdown is not None:
                found[figure] = slowdown
    return found


def _alone_and_beside(moved: Sequence[tuple[float, float, float]]) -> tuple[float | None, float | None]:
    """The slowdowns of one direction of the drive, alone and beside the other; None where no operation ran mostly so.

    Each operation (seconds of its work; what should have been done of it alone, and beside) is a mixture of both. The
    mean of those mostly alone gives the one, with what the other took of them taken away, and so on in turn.
    """
    if not moved:
        return None, None
    start = _weighted_mean([((alone + beside) / work, work) for work, alone, beside in moved])
    times = [start, start]
    seen = [any((each[1] >= each[2]) == (kind == 0) for each in moved) for kind in (0, 1)]
    for _ in range(_ROUNDS):
        for kind in (0, 1):
            mine = [each for each in moved if (each[1] >= each[2]) == (kind == 0)]
            if mine:
                samples: Samples = []
                for work, *parts in mine:
                    left = max(work - parts[1 - kind] / times[1 - kind], _LEAST_LEFT * work)
                    samples.append((parts[kind] / left, left))
                times[kind] = _weighted_mean(samples)
    return times[0] if seen[0] else None, times[1] if seen[1] else None


def _figure(op: Op) -> Figure:
    if isinstance(op, Forward):
        return Figure("forward", op.layer_class)
    if isinstance(op, Backward):
        return Figure("backward", op.layer_class)
    if isinstance(op, Perturb | TakeRows):
        return Figure("perturb")
    kinds: dict[str, FigureKind] = {
        "read": "read",
        "write": "write",
        "h2d": "h2d",
        "d2h": "d2h",
        "cpu": "update",
        "compute": "perturb",
    }
    return Figure(kinds[op.resource])


def _expected_work(timeline: Timeline, expected: Expectation) -> tuple[list[float], list[float]]:
    """How many seconds of its work alone each operation should have done in the time that it took, beside what ran
    with it; and how many of these while both reads and writes ran. Operations of one resource share its speed."""
    resources = [RESOURCES.index(op.resource) for op in timeline.graph.ops]
    worked, mixed = [0.0] * len(resources), [0.0] * len(resources)
    events = [(end, 0, index) for index, end in enumerate(timeline.ends)]
    events += [(start, 1, index) for index, start in enumerate(timeline.starts)]
    at_work = [0] * len(RESOURCES)
    so_far, so_far_mixed = [0.0] * len(RESOURCES), [0.0] * len(RESOURCES)
    before, mask = 0.0, 0
    for moment, starts, index in sorted(events):
        if moment > before:
            speeds, both = expected.speeds[mask], mask & _READ and mask & _WRITE
            for resource, count in enumerate(at_work):
                if count:
                    done = (moment - before) * speeds[resource] / count
                    so_far[resource] += done
                    if both:
                        so_far_mixed[resource] += done
            before = moment
        resource = resources[index]
        sign = -1 if starts else 1
        worked[index] += sign * so_far[resource]
        mixed[index] += sign * so_far_mixed[resource]
        at_work[resource] -= sign
        mask = mask | 1 << resource if at_work[resource] else mask & ~(1 << resource)
    return worked, mixed


def _weighted_mean(samples: Samples) -> float:
    """Of which no sample moves more than one at the fence: as wild as the others make likely."""
    low, high = _quantile(samples, 0.25), _quantile(samples, 0.75)
    fence = _FENCE * (high - low)
    total = sum(weight * min(max(value, low - fence), high + fence) for value, weight in samples)
    return total / sum(weight for _, weight in samples)


def _quantile(samples: Samples, share: float) -> float:
    left = share * sum(weight for _, weight in samples)
    for value, weight in sorted(samples):
        left -= weight
        if left <= 0:
            return value
    return max(samples)[0]  # the sum was rounded


def _slower(volume: Volume, alone: tuple[float, float], together: tuple[float, float]) -> Volume:
    """A volume whose reads and writes take so many times as long: at the ends of its frontier, and between them."""
    first, *between, last = volume.frontier
    if not between:  # nobody measured it: reads and writes alternate
        between = [MixedBandwidth(read=first.read / 2, write=last.write / 2)]
    frontier = (
        MixedBandwidth(read=first.read / alone[0], write=0.0),
        *(MixedBandwidth(read=point.read / together[0], write=point.write / together[1]) for point in between),
        MixedBandwidth(read=0.0, write=last.write / alone[1]),
    )
    return volume.model_copy(update={"frontier": frontier})


def _longer(timing: Timing, forward: float, backward: float) -> Timing:
    return timing.model_copy(
        update={
            "forward_seconds": timing.forward_seconds * forward,
            "backward_seconds": timing.backward_seconds * backward,
            "forward_cold_seconds": timing.forward_cold_seconds * forward,
            "backward_cold_seconds": timing.backward_cold_seconds * backward,
            "rungs": tuple(rung.longer(forward, backward) for rung in timing.rungs),
        }
    )


# Words.
