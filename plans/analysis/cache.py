"""Cache: what of its data a step finds in time, read off its graph and its times, predicted or measured.

Owns the definitions of the figures that 10Cache reports (sections 4.2.2 to 4.2.8) and the one computation of them.
Nothing is decided by them. A plan moves all data by operations of its graph and looks nothing up, so a hit means here
that nobody waited: what was needed was there, or had come, when it could be used.

An operation is *late for some data* by the time from the moment at which it could have begun without that data to the
moment at which the last transfer of that data ended, if that is positive. It could have begun without the data when the
operation before it on its lane had ended and so had everything else that it waits for. What threads take to wake up is
in no figure.

*A use* is a state's parameters (or a piece of them, where they come in pieces) in one stage, by the operations of
compute that read them there. It is one however many micro-batches run in the stage, as the first of them finds the
parameters or waits, and the others find them there. It counts for the operation of the stage that begins first. To a
use belong the transfers of its parameters that no earlier use has had. Its *wait* is how late its operation is for
them, whatever other states of the layer have to come too.

| figure | what it is | 10Cache |
|---|---|---|
| device hit rate | share of the uses without a wait: what stays on the device, and what came in time | 4.2.3, 4.2.7 |
| waits below | share of the uses whose wait is shorter than 0.01, 0.03 or 0.1 ms | 4.2.2, 4.2.5 |
| host hit rate | of the uses with copies from host, share of those none of whose copies is late for reads from ssd | |
| optimizer miss rate | share of the updates that are late for their optimizer states | 4.2.7 |
| compute waits | the seconds by which all operations of compute together are late for data of any kind | |
| memory use | peak over budget; on ssd the store over what was free there | 4.2.8 |
| states on ssd | how many states have parameters there, or optimizer states | 4.2.6 |

Where ours differ from the paper's: it counts tensors, we count states, which move as one. Its memory use is that of the
whole card and of all DRAM, as its tools show it; ours is of the budgets that the plan was made for. It has no hit rate
of host memory and no sum of waits; it never moves activations, so we count these in the sum alone. With unified memory
compute works on host memory itself: there is no device hit rate, and the host hit rate is the share of the uses without
a wait.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean

from ..documents.metrics import CacheFigures
from ..documents.plan import Plan
from ..documents.stripe_shares import room
from ..graph.collectives import Gather
from ..graph.contents import Content
from ..graph.ops import Backward, Forward, Graph, Op, Perturb, Region, Resource, Schedule, Tier, Transfer, Update
from ..graph.timeline import CLOCK_SECONDS, Timeline

FIGURES = tuple(each.name for each in fields(CacheFigures))
THRESHOLDS_SECONDS = (1e-5, 3e-5, 1e-4)
"""Of waits (10Cache, section 2.3): nine of ten kernels of its models take about the last."""
Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An operation and what it waits for: transfers of the data in question, transfers of other data that it reads, and
    all else. Indices of operations."""

    op: int
    data: Indices
    other_data: Indices
    others: Indices


@dataclass(frozen=True, slots=True)
class _Use:
    """Parameters in one stage."""

    ops: Indices
    """Of compute, that read them."""
    arrivals: Indices
    """Transfers that bring them for this use."""


@dataclass(frozen=True, slots=True)
class Accesses:
    """What a graph alone says of its figures, so that each of its timelines is read quickly."""

    graph: Graph
    lanes: tuple[Indices, ...]
    """The operations of each lane on which somebody may wait for data."""
    compute: tuple[_Waiting, ...]
    """Its operations; their data are parameters."""
    uses: tuple[_Use, ...]
    uploads: tuple[tuple[_Waiting, ...], ...]
    """Of each use with copies from host to device these copies; their data are reads from ssd."""
    updates: tuple[_Waiting, ...]
    """Their data are optimizer states."""


def accesses_of(graph: Graph) -> Accesses:
    """What has to be known of a graph once, whatever its operations take."""
    ops = graph.ops
    lanes: dict[Resource, list[int]] = {"compute": [], "cpu": [], "h2d": []}
    computed = {
        region.buffer
        for op in ops
        if isinstance(op, Perturb)
        for region in (op.plus, op.minus, op.rounded)
        if region is not None
    }
    """Places of parameters that compute itself has made: copies, which nothing brings."""
    compute, updates = [], []
    reading: dict[tuple[int, Region], list[int]] = {}
    arrivals: dict[tuple[int, Region], list[int]] = {}
    had: set[int] = set()
    for op in ops:
        if op.resource in lanes:
            lanes[op.resource].append(op.index)
        if op.resource == "compute":
            parameters = tuple(region for region in _parameters(op) if region.buffer not in computed)
            compute.append(_waiting(ops, op, parameters, Content.PARAMETERS))
            for region in parameters:
                use = (op.stage, region)
                reading.setdefault(use, []).append(op.index)
                brought = [wait for wait in _bringing(ops, op, region, Content.PARAMETERS) if wait not in had]
                arrivals.setdefault(use, []).extend(brought)
                had.update(brought)
        if isinstance(op, Update):
            updates.append(_waiting(ops, op, (op.optimizer,), Content.OPTIMIZER_STATES))
    uses = tuple(_Use(tuple(reading[use]), tuple(arrivals[use])) for use in reading)
    copies = (tuple(_uploads(ops, use.arrivals)) for use in uses)
    return Accesses(
        graph,
        tuple(tuple(lane) for lane in lanes.values()),
        tuple(compute),
        uses,
        tuple(each for each in copies if each),
        tuple(updates),
    )


def _parameters(op: Op) -> tuple[Region, ...]:
    """Where an operation of compute reads parameters."""
    match op:
        case Forward() | Backward():
            return op.weights
        case Perturb():
            return (op.parameters,)
        case _:
            return ()


def _uploads(ops: Sequence[Op], arrivals: Indices) -> Iterator[_Waiting]:
    for arrival in arrivals:
        op = ops[arrival]
        if isinstance(op, Transfer) and op.kind == "h2d":
            yield _waiting(ops, op, (op.source,), op.content)


def _waiting(ops: Sequence[Op], op: Op, data: Sequence[Region], content: Content) -> _Waiting:
    """`op`, whose data of `content` lie at `data`."""
    mine = {wait for region in data for wait in _bringing(ops, op, region, content)}
    others = {wait for region in op.reads for wait in _bringing(ops, op, region, None)} - mine
    rest = tuple(wait for wait in op.waits if wait not in mine and wait not in others)
    return _Waiting(op.index, tuple(sorted(mine)), tuple(sorted(others)), rest)


def _bringing(ops: Sequence[Op], op: Op, region: Region, content: Content | None) -> Iterator[int]:
    """The transfers, of `content` if that is named, that `op` waits for and that wrote into `region`; what gathers
    parameters of other ranks among them."""
    for wait in op.waits:
        before = ops[wait]
        if isinstance(before, Transfer):
            brought, of = before.target, before.content
        elif isinstance(before, Gather):
            brought, of = before.whole, Content.PARAMETERS
        else:
            continue
        if content in (None, of) and _overlap(brought, region):
            yield wait


def _overlap(one: Region, other: Region) -> bool:
    return one.buffer == other.buffer and one.start < other.stop and other.start < one.stop


# The figures of a timeline.


def figures_of(accesses: Accesses, timeline: Timeline, *, unified: bool, slower: float = 1.0) -> CacheFigures:
    """The figures of one run of the graph, without the use of memory, which no timeline shows. `slower`: how many times
    as long an emulated machine's operations last; so do the waits that are counted."""
    assert timeline.graph is accesses.graph
    starts, ends = timeline.starts, timeline.ends
    free = _free(accesses, timeline)
    without_parameters: dict[int, float] = {}
    """Operation of compute -> when it could have begun, had its parameters been there."""
    lost = 0.0
    for each in accesses.compute:
        begins = _latest(ends, each.others, free[each.op])
        without_parameters[each.op] = _latest(ends, each.other_data, begins)
        lost += _late(ends, each.data + each.other_data, begins)
    waits = [
        _late(ends, use.arrivals, without_parameters[min(use.ops, key=lambda op: (starts[op], op))])
        for use in accesses.uses
    ]
    hits = _share(wait == 0.0 for wait in waits)
    from_host = _share(all(_in_time(each, ends, free) for each in uploads) for uploads in accesses.uploads)
    below = [_share(wait < slower * threshold for wait in waits) for threshold in THRESHOLDS_SECONDS]
    return CacheFigures(
        device_hit_rate=None if unified else hits,
        host_hit_rate=hits if unified else from_host,
        optimizer_miss_rate=_share(not _in_time(each, ends, free) for each in accesses.updates),
        waits_below_10us=below[0],
        waits_below_30us=below[1],
        waits_below_100us=below[2],
        compute_wait_seconds=lost,
    )


def _free(accesses: Accesses, timeline: Timeline) -> dict[int, float]:
    """Operation -> when its lane had ended all that began before it; 0 for the first of a lane."""
    starts, ends = timeline.starts, timeline.ends
    free: dict[int, float] = {}
    for lane in accesses.lanes:
        until = 0.0
        for index in sorted(lane, key=lambda index: (starts[index], ends[index], index)):
            free[index] = until
            until = max(until, ends[index])
    return free


def _in_time(each: _Waiting, ends: Sequence[float], free: Mapping[int, float]) -> bool:
    begins = _latest(ends, each.others + each.other_data, free[each.op])
    return _late(ends, each.data, begins) == 0.0


def _late(ends: Sequence[float], data: Indices, begins: float) -> float:
    """By how many seconds the last of `data` comes after `begins`; 0 within what times are good to."""
    late = _latest(ends, data, begins) - begins
    return late if late > CLOCK_SECONDS else 0.0


def _latest(ends: Sequence[float], ops: Indices, at_least: float) -> float:
    for op in ops:
        at_least = max(at_least, ends[op])
    return at_least


def _share(found: Iterable[bool]) -> float | None:
    every = list(found)
    return sum(every) / len(every) if every else None


# A plan's steps.


class CacheReader:
    """Reads the figures of a plan's steps. What depends on a graph alone is found once for each graph."""

    def __init__(self, plan: Plan) -> None:
        decision = plan.decision
        self._unified = decision.unified_memory
        self._slower = plan.machine.emulation.slower if plan.machine.emulation else 1.0
        self._most: dict[Tier, int] = {
            "device": 0 if self._unified else decision.device_budget_bytes,
            "host": decision.host_budget_bytes,
            "ssd": room(plan.machine.volumes),
        }
        self._accesses: dict[int, Accesses] = {}

    def figures(self, timeline: Timeline, used: Mapping[Tier, int]) -> CacheFigures:
        """Of one step. `used`: of each tier the bytes at their peak, and on ssd those of the store."""
        accesses = self._accesses.get(id(timeline.graph))
        if accesses is None:
            accesses = self._accesses[id(timeline.graph)] = accesses_of(timeline.graph)
        found = figures_of(accesses, timeline, unified=self._unified, slower=self._slower)
        use = {tier: used[tier] / most if most else None for tier, most in self._most.items()}
        return replace(found, device_memory_use=use["device"], host_memory_use=use["host"], ssd_use=use["ssd"])


def predicted_figures(plan: Plan, schedule: Schedule, predict: Callable[[Graph], Timeline]) -> CacheFigures:
    """Those of a steady step of `plan`, whose schedule is given; on average where a zeroth-order plan writes parameters
    in some steps only. `predict`: when each operation of a graph would run."""
    reader, p = CacheReader(plan), plan.prediction
    used: dict[Tier, int] = {"device": p.peak_device_bytes, "host": p.peak_host_bytes, "ssd": p.ssd_bytes}
    steps = [reader.figures(predict(schedule.steady), used)]
    every = plan.decision.zeroth_order.written_every if plan.decision.zeroth_order else 1
    if every > 1:
        steps += [reader.figures(predict(schedule.unwritten), used)] * (every - 1)
    return mean_figures(steps)


def mean_figures(steps: Sequence[CacheFigures]) -> CacheFigures:
    """Of each figure the mean over those steps that have it."""
    told = {name: [value for step in steps if (value := getattr(step, name)) is not None] for name in FIGURES}
    return CacheFigures(**{name: fmean(values) if values else None for name, values in told.items()})


@dataclass(frozen=True, slots=True)
class OnSsd:
    """How many states have parameters, or optimizer states, on ssd between their uses (10Cache, figure 18)."""

    parameters: int
    """States whose parameters live on ssd, or a part of them does."""
    parameters_whole: int
    """Of these, those all of whose parameters do."""
    parameters_of: int
    """All states."""
    optimizer_states: int
    optimizer_states_whole: int
    optimizer_states_of: int
    """States that have optimizer states."""


def states_on_ssd(schedule: Schedule) -> OnSsd:
    """Counted from where a schedule's states live."""
    counts: list[int] = []
    for whose in ("parameters", "optimizer"):
        tiers: dict[int, set[Tier]] = {}
        for home in schedule.homes:
            region: Region | None = getattr(home, whose)
            if region is not None:
                tiers.setdefault(home.state, set()).add(schedule.buffers[region.buffer].tier)
        counts += [sum("ssd" in mine for mine in tiers.values()), sum(mine == {"ssd"} for mine in tiers.values())]
        counts.append(len(tiers))
    return OnSsd(*counts)


@dataclass(frozen=True, slots=True)
class Beside:
    """A plan's figures beside those of a run of it."""

    predicted: CacheFigures | None
    measured: CacheFigures | None
    """None of a plan alone, and of runs of versions that measured none."""
    on_ssd: OnSsd
    on_demand: CacheFigures | None = None
    """The shares of the same batch by ZeRO-Infinity's habits, if somebody has found them."""
