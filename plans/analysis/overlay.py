"""Overlay: a measured step laid over the predicted one, operation by operation, and what compute waited for.

Owns the comparison. Both timelines are of one graph, so an operation is the same in both. It predicts and measures
nothing itself; `views/overlay_text.py` has the words. Chains are walked in plain arrays, for the reason that
`planner/predict/critical_path.py` gives.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from heapq import heappop, heappush

from ..documents.plan import Plan
from ..documents.profile import Model
from ..errors import MismatchError
from ..graph.collectives import AddShares, Collective
from ..graph.ops import (
    RESOURCES,
    Backward,
    Forward,
    Op,
    Perturb,
    Resource,
    Schedule,
    SumSquares,
    TakeRows,
    Transfer,
    Update,
)
from ..graph.timeline import CLOCK_SECONDS, Timeline, lanes_of
from .work import RESOURCE_LABELS, work_of

LONGEST = 5
"""Stalls that are told one by one."""
STARTING = "starting operations"
"""What compute waits for when nothing that it needs is running: threads that wake up, work that is handed on."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A piece [start, end) of a gap of the compute lane, in which `waiting` waited, in the end, for `cause`."""

    start: float
    end: float
    waiting: int | None
    """The compute op after the gap; None for the end of the step, which waits for the last op of all."""
    cause: int | None
    """The op that ran meanwhile, and without which `waiting` could not have begun sooner; None where nothing that it
    needs ran."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class KindRow:
    """All operations of one resource, kind of work and class of layer or state, predicted and measured."""

    resource: Resource
    work: str
    layer_class: str
    """Empty for what belongs to no class, such as hidden states."""
    count: int
    predicted_seconds: float
    measured_seconds: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where no time was predicted."""
        return self.measured_seconds / self.predicted_seconds if self.predicted_seconds else None


@dataclass(frozen=True, slots=True)
class ResourceRow:
    """How long a resource works and idles."""

    resource: Resource
    predicted_busy_seconds: float
    measured_busy_seconds: float
    predicted_idle_seconds: float
    measured_idle_seconds: float


@dataclass(frozen=True, slots=True)
class CauseRow:
    """What compute waited for, in all; `resource` and `work` are empty for the starting of operations."""

    resource: Resource | None
    work: str
    predicted_seconds: float
    measured_seconds: float

    @property
    def words(self) -> str:
        return f"{RESOURCE_LABELS.get(self.resource, self.resource)} ({self.work})" if self.resource else STARTING


@dataclass(frozen=True, slots=True)
class LongStall:
    """One of the longest waits of the measured step."""

    start_seconds: float
    seconds: float
    waiting: str
    cause: str


@dataclass(frozen=True, slots=True)
class Overlay:
    """What differs between a predicted and a measured run of one graph. Seconds throughout."""

    predicted: Timeline
    measured: Timeline
    kinds: tuple[KindRow, ...]
    """By resource, then by the largest difference."""
    resources: tuple[ResourceRow, ...]
    causes: tuple[CauseRow, ...]
    """The largest first; with the time in which compute works, they sum to the step."""
    longest: tuple[LongStall, ...]

    def document(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "graph": self.measured.graph.name,
            "predicted_seconds": self.predicted.seconds,
            "measured_seconds": self.measured.seconds,
            "kinds": [{**asdict(row), "ratio": row.ratio} for row in self.kinds],
            "resources": [asdict(row) for row in self.resources],
            "compute_stalls": [asdict(row) for row in self.causes],
            "longest_stalls": [asdict(row) for row in self.longest],
        }


def lay_over(plan: Plan, schedule: Schedule, predicted: Timeline, measured: Timeline) -> Overlay:
    """Compare two timelines of one graph of `schedule`, which is `plan`'s. Raises MismatchError for two graphs."""
    if predicted.graph is not measured.graph:
        raise MismatchError(f"a {predicted.graph.name} step cannot be laid over a {measured.graph.name} one")
    both = (predicted, measured)
    busy = [timeline.busy() for timeline in both]
    pieces = [stalls(timeline) for timeline in both]
    return Overlay(
        predicted=predicted,
        measured=measured,
        kinds=_kinds(plan.model, predicted, measured),
        resources=tuple(
            ResourceRow(
                name, busy[0][name], busy[1][name], predicted.seconds - busy[0][name], measured.seconds - busy[1][name]
            )
            for name in lanes_of(measured.graph)
        ),
        causes=_causes(measured.graph.ops, pieces[0], pieces[1]),
        longest=_longest(measured.graph.ops, pieces[1]),
    )


def stalls(timeline: Timeline) -> tuple[Stall, ...]:
    """Every gap of the compute lane, cut into pieces by what the step was waiting for: the critical path through it.

    From the op after the gap one goes back in time: to the last of its waits to end, or to the op before it on its own
    lane where that ended later (the lane was taken), and so on until the gap begins. What ran at a moment on this way
    is that moment's cause. Pieces of one gap follow each other and cover it; with compute's busy time, all of them sum
    to `timeline.seconds`.
    """
    before = _before_on_lane(timeline)
    compute = sorted((op.index for op in timeline.graph.ops if op.resource == "compute"), key=_by_start(timeline))
    found: list[Stall] = []
    until = 0.0
    for index in compute:
        if timeline.starts[index] > until:
            found += _walk(timeline, before, index, until)
        until = max(until, timeline.ends[index])
    if timeline.seconds > until:
        found += _walk(timeline, before, None, until)
    return tuple(found)


# Stalls.


def _by_start(timeline: Timeline) -> Callable[[int], tuple[float, float, int]]:
    return lambda index: (timeline.starts[index], timeline.ends[index], index)


def _before_on_lane(timeline: Timeline) -> dict[int, int]:
    """Op -> the op of its lane that was the last to end before it began: the one that made room for it, however many a
    lane has under way at once."""
    lanes: dict[Resource, list[int]] = defaultdict(list)
    for op in timeline.graph.ops:
        lanes[op.resource].append(op.index)
    before: dict[int, int] = {}
    for lane in lanes.values():
        under_way: list[tuple[float, int, int]] = []
        latest: tuple[float, int, int] | None = None
        for order, index in enumerate(sorted(lane, key=_by_start(timeline))):
            while under_way and under_way[0][0] <= timeline.starts[index] + CLOCK_SECONDS:
                ended = heappop(under_way)
                latest = ended if latest is None else max(latest, ended)
            if latest is not None:
                before[index] = latest[2]
            heappush(under_way, (timeline.ends[index], order, index))
    return before


def _walk(timeline: Timeline, before: dict[int, int], waiting: int | None, gap: float) -> list[Stall]:
    """The pieces, in order of time, of the gap that began at `gap` and ends where op `waiting` starts."""
    starts, ends = timeline.starts, timeline.ends
    pieces: list[Stall] = []
    seen: set[int] = set()
    if waiting is None:
        at, op = timeline.seconds, max(range(len(ends)), key=lambda index: (ends[index], index))
        candidates = [op]
    else:
        at = starts[waiting]
        candidates = _earlier(timeline, before, waiting)
    while at > gap:
        # A wait before the lane's own past, where both ended at once.
        cause = max(candidates, key=lambda index: ends[index], default=None)
        if cause in seen:  # clocks that disagree: an op that began before what it waited for
            cause = None
        ended = gap if cause is None else max(min(ends[cause], at), gap)
        if ended < at:
            pieces.append(Stall(ended, at, waiting, None))
        if cause is None:
            break
        seen.add(cause)
        began = min(max(starts[cause], gap), ended)
        if began < ended:
            pieces.append(Stall(began, ended, waiting, cause))
        at, candidates = began, _earlier(timeline, before, cause)
    return pieces[::-1]


def _earlier(timeline: Timeline, before: dict[int, int], index: int) -> list[int]:
    """What op `index` could not start before: the last of its waits to end, and the op before it on its lane."""
    last = timeline.last_wait(index)
    earlier = [] if last is None else [last]
    if index in before:
        earlier.append(before[index])
    return earlier


# Sums.


def _kinds(model: Model, predicted: Timeline, measured: Timeline) -> tuple[KindRow, ...]:
    counts: Counter[tuple[Resource, str, str]] = Counter()
    seconds: dict[tuple[Resource, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for op in measured.graph.ops:
        key = (op.resource, work_of(op), _class_of(op, model))
        counts[key] += 1
        for side, timeline in enumerate((predicted, measured)):
            seconds[key][side] += timeline.ends[op.index] - timeline.starts[op.index]
    rows = [KindRow(*key, count, *seconds[key]) for key, count in counts.items()]
    return tuple(sorted(rows, key=lambda row: (RESOURCES.index(row.resource), -_difference(row), row.work)))


def _difference(row: KindRow | CauseRow) -> float:
    return abs(row.measured_seconds - row.predicted_seconds)


def _class_of(op: Op, model: Model) -> str:
    """The class of the layer that computes, or of the state that moves or is updated; empty for hidden states."""
    if isinstance(op, Forward | Backward):
        return op.layer_class
    if isinstance(op, Update | Perturb | TakeRows | SumSquares | Collective | AddShares):
        return model.states[op.state].state_class
    if isinstance(op, Transfer) and op.state is not None:
        return model.states[op.state].state_class
    return ""


def _cause(ops: Sequence[Op], stall: Stall) -> tuple[Resource | None, str]:
    if stall.cause is None:
        return None, ""
    return ops[stall.cause].resource, work_of(ops[stall.cause])


def _causes(ops: Sequence[Op], predicted: Sequence[Stall], measured: Sequence[Stall]) -> tuple[CauseRow, ...]:
    seconds: dict[tuple[Resource | None, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for side, pieces in enumerate((predicted, measured)):
        for stall in pieces:
            seconds[_cause(ops, stall)][side] += stall.seconds
    rows = [CauseRow(*key, *both) for key, both in seconds.items()]
    return tuple(sorted(rows, key=lambda row: (-row.measured_seconds, -row.predicted_seconds, row.words)))


def _longest(ops: Sequence[Op], pieces: Sequence[Stall]) -> tuple[LongStall, ...]:
    """The waits that cost most, each with the cause that has most of it."""
    waits: dict[int | None, list[Stall]] = defaultdict(list)
    for stall in pieces:
        waits[stall.waiting].append(stall)
    total = {waiting: sum(stall.seconds for stall in mine) for waiting, mine in waits.items()}
    found = []
    for waiting in sorted(total, key=lambda waiting: -total[waiting])[:LONGEST]:
        share: dict[tuple[Resource | None, str], float] = defaultdict(float)
        for stall in waits[waiting]:
            share[_cause(ops, stall)] += stall.seconds
        most = max(share, key=lambda cause: share[cause])
        found.append(
            LongStall(
                start_seconds=min(stall.start for stall in waits[waiting]),
                seconds=total[waiting],
                waiting="the end of the step" if waiting is None else str(ops[waiting]),
                cause=CauseRow(*most, 0.0, 0.0).words,
            )
        )
    return tuple(found)


# Words.
