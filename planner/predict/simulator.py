"""The simulator: when every operation of a graph would run at a profile's rates.

Owns the model of time: one lane a resource, ready ops in the graph's order (the executor's policy), and how lanes that
share a drive or the cores slow each other. It never changes a graph and schedules nothing that is not in it.
"""

import heapq
from collections.abc import Sequence
from math import inf

from ssdplan.plans.analysis.drift import TIE, Expectation
from ssdplan.plans.documents.matrices import seconds_of
from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import (
    Machine,
    Model,
    Network,
)
from ssdplan.plans.documents.rates import NORM_SHARE, device_update_rate, perturb_seconds, rows_rates, update_rate
from ssdplan.plans.graph.collectives import AddShares, Collective, Gather
from ssdplan.plans.graph.ops import (
    RESOURCES,
    Backward,
    Forward,
    Graph,
    Op,
    Perturb,
    Resource,
    Schedule,
    SumSquares,
    TakeRows,
    Transfer,
    Update,
)
from ssdplan.plans.graph.timeline import Timeline

from .dram import host_moves, shares_of
from .drive import bandwidth_kept, combined_frontier, io_cores, shared_fraction, unsummed_io_cores

_LANE: dict[Resource, int] = {resource: number for number, resource in enumerate(RESOURCES)}
_COMPUTE, _CPU = _LANE["compute"], _LANE["cpu"]
_NONE = -1
LEAST_CORES = 0.25
"""What is left to compute however much a drive takes: a scheduler gives everyone a share."""
COMPUTE_AND_UPDATES = (0.25, 0.75)
"""What compute and updates of the same cores keep of their paces beside each other, where nobody measured it: the
threads of updates sleep between two of them, and who slept goes first; nothing is lost."""


def simulate(graph: Graph, model: Model, machine: Machine, micro_batch_size: int) -> Timeline:
    """Run `graph` in time: event-driven list scheduling with rates that change when lanes start and stop.

    Each lane runs one op at a time; an op is ready when all of its waits have ended, and a free lane takes the ready op
    that is first in the graph. A read and a write that run together share the drive at one point of its frontier. When
    compute shares the CPU, compute or updates want all cores, a copy to or from the device wants one, and these slow in
    proportion when more cores are wanted than reads and writes leave them (what those take is the mean of all in the
    graph, as some sum their bytes and of some an update does); the drive keeps what it was measured to keep beside
    compute, and compute and updates, collectives and compute, and collectives and copies what they were measured to
    keep beside each other. What begins to compute behind an update or beside one, or behind another stage's layer,
    finds nothing of its own in caches. Deterministic.
    """
    return _simulated(graph, model, machine, micro_batch_size)[0]


def _simulated(
    graph: Graph, model: Model, machine: Machine, micro_batch_size: int
) -> tuple[Timeline, tuple[float, ...]]:
    """The timeline, and the seconds that each op would have taken had nothing run beside it."""
    ops = graph.ops
    speeds = _speeds(machine, graph.ops)
    lanes = [_LANE[op.resource] for op in ops]
    alone, longer = _seconds_alone(ops, model, machine, micro_batch_size)
    stages = [op.stage if isinstance(op, Forward | Backward) else _NONE for op in ops]
    missing = [len(op.waits) for op in ops]
    followers: list[list[int]] = [[] for _ in ops]
    for op in ops:
        for before in op.waits:
            followers[before].append(op.index)

    starts, ends = [0.0] * len(ops), [0.0] * len(ops)
    ready: list[list[int]] = [[] for _ in RESOURCES]
    for op in ops:
        if not op.waits:
            ready[lanes[op.index]].append(op.index)  # in order, so already a heap
    running = [-1] * len(RESOURCES)
    until = [inf] * len(RESOURCES)
    speed = [1.0] * len(RESOURCES)
    warm = _NONE
    """The stage whose layer is in caches, as far as these hold it."""
    spoils = machine.compute_shares_cpu
    """Whether an update leaves nothing of a layer there."""
    now, mask, left, slowed = 0.0, 0, len(ops), False
    everyone = sorted(range(len(RESOURCES)), key=lambda lane: lane == _COMPUTE)  # last, beside what began as it did
    while left:
        for lane in everyone:
            if running[lane] < 0 and ready[lane]:
                index = heapq.heappop(ready[lane])
                running[lane], starts[index] = index, now
                if lane == _COMPUTE:
                    if stages[index] != warm or (spoils and running[_CPU] >= 0):
                        alone[index] += longer[index]
                    warm = stages[index]
                until[lane] = now + alone[index]
                speed[lane] = 1.0
                mask |= 1 << lane
        wanted = speeds[mask]
        if slowed or wanted is not None:
            slowed = wanted is not None
            for lane in everyone:
                if running[lane] >= 0:
                    new = 1.0 if wanted is None else wanted[lane]
                    if new != speed[lane]:
                        until[lane] = now + (until[lane] - now) * speed[lane] / new
                        speed[lane] = new
        assert mask, "a graph whose waits form a cycle"
        now = min(until)
        together = now * (1.0 + TIE)
        for lane in everyone:
            if until[lane] <= together:
                index = running[lane]
                ends[index] = now
                if lane == _CPU and spoils and running[_COMPUTE] < 0:
                    warm = _NONE
                running[lane], until[lane] = -1, inf
                mask &= ~(1 << lane)
                left -= 1
                for follower in followers[index]:
                    missing[follower] -= 1
                    if missing[follower] == 0:
                        heapq.heappush(ready[lanes[follower]], follower)
    return Timeline(graph, tuple(starts), tuple(ends)), tuple(alone)


def simulated_seconds(
    schedule: Schedule, model: Model, machine: Machine, decision: Decision, steady: Timeline | None = None
) -> float:
    """Of a steady step, on average where a zeroth-order plan writes parameters in some steps only. `steady`: the
    timeline of one that writes them, where that is known."""
    written = (steady or simulate(schedule.steady, model, machine, decision.micro_batch_size)).seconds
    every = decision.zeroth_order.written_every if decision.zeroth_order else 1
    if every == 1:
        return written
    unwritten = simulate(schedule.unwritten, model, machine, decision.micro_batch_size).seconds
    return (written + (every - 1) * unwritten) / every


def expectation(graph: Graph, model: Model, machine: Machine, micro_batch_size: int) -> Expectation:
    """The figures that `simulate` counts on, for whoever compares a measured timeline with them."""
    full = (1.0,) * len(RESOURCES)
    speeds = tuple(full if each is None else each for each in _speeds(machine, graph.ops))
    return Expectation(_simulated(graph, model, machine, micro_batch_size)[1], speeds)


def _speeds(machine: Machine, ops: Sequence[Op]) -> list[tuple[float, ...] | None]:
    """For every bit mask of running lanes the speed of each (None: all at full speed)."""
    read, write, h2d, d2h, compute, cpu, network = (
        1 << _LANE[name] for name in ("read", "write", "h2d", "d2h", "compute", "cpu", "network")
    )
    shared = shared_fraction(combined_frontier(machine.volumes))
    beside = bandwidth_kept(machine.volumes) if machine.compute_shares_cpu else 1.0
    read_cores, write_cores = _io_cores(machine, ops)
    together = _together(machine)
    frontier = combined_frontier(machine.volumes)
    moved = {
        read: frontier[0][0], write: frontier[-1][1], h2d: machine.h2d_bandwidth, d2h: machine.d2h_bandwidth,
        cpu: host_moves(machine, ops),
    }  # fmt: skip
    """Bytes a second through DRAM of a lane at full speed."""
    named: dict[int, Resource] = {read: "read", write: "write", h2d: "h2d", d2h: "d2h", cpu: "cpu"}
    speeds: list[tuple[float, ...] | None] = []
    for mask in range(1 << len(RESOURCES)):
        drive = shared if mask & read and mask & write else 1.0
        if mask & (compute | cpu):
            drive *= beside
        core = 1.0
        if machine.compute_shares_cpu:
            wanted = bool(mask & h2d) + bool(mask & d2h) + (machine.cores if mask & (compute | cpu) else 0)
            taken = drive * (bool(mask & read) * read_cores + bool(mask & write) * write_cores)
            core = min(1.0, max(machine.cores - taken, LEAST_CORES) / wanted) if wanted else 1.0
        of = dict.fromkeys(RESOURCES, core) | {"read": drive, "write": drive}
        if machine.dram_bandwidth and not machine.compute_shares_cpu:
            moving = [lane for lane in moved if mask & lane]
            rates = [moved[lane] * (drive if lane in (read, write) else 1.0) for lane in moving]
            for lane, kept in zip(moving, shares_of(rates, machine.dram_bandwidth), strict=True):
                of[named[lane]] *= kept
        if machine.compute_shares_cpu and mask & compute and mask & cpu:
            of["compute"], of["cpu"] = (core * kept for kept in together)
        if mask & network and machine.network:
            computes = compute | (cpu if machine.compute_shares_cpu else 0)
            for others, kept, keeps in _beside_network(machine.network, computes, h2d | d2h):
                if mask & others:
                    of["network"] *= keeps
                for resource in RESOURCES:
                    if mask & others & 1 << _LANE[resource]:
                        of[resource] *= kept
        each = tuple(of[resource] for resource in RESOURCES)
        speeds.append(None if set(each) == {1.0} else each)
    return speeds


def _together(machine: Machine) -> tuple[float, float]:
    """What compute and updates keep of their paces while both run."""
    compute, updates = COMPUTE_AND_UPDATES
    return machine.compute_beside_updates or compute, machine.updates_beside_compute or updates


def _beside_network(network: Network, computes: int, copies: int) -> list[tuple[int, float, float]]:
    """Masks of lanes, what these keep of their paces beside collectives, and what collectives keep beside them."""
    return [
        (computes, network.compute_kept or 1.0, network.kept_beside_compute or 1.0),
        (copies, network.copies_kept or 1.0, network.kept_beside_copies or 1.0),
    ]


def _io_cores(machine: Machine, ops: Sequence[Op]) -> tuple[float, float]:
    """Cores that reads and writes take at full bandwidth, on average over what these operations move: states that an
    update sums in passing take fewer."""
    each = io_cores(machine.volumes), unsummed_io_cores(machine.volumes)
    if each[0] == each[1]:
        return each[0]
    result = []
    for kind, summed, unsummed in zip(("read", "write"), *each, strict=True):
        moved = [op for op in ops if isinstance(op, Transfer) and op.kind == kind]
        total = sum(op.nbytes for op in moved)
        by_updates = sum(op.nbytes for op in moved if op.summed_by_update)
        result.append(summed + (unsummed - summed) * (by_updates / total if total else 0.0))
    return result[0], result[1]


def _device_update_rate(ops: Sequence[Op], machine: Machine) -> float:
    """Of the updates that the device makes among `ops`, if it makes any."""
    formats = {op.formats for op in ops if isinstance(op, Update) and op.on_device}
    rates = [device_update_rate(machine, each) for each in formats]
    assert None not in rates, "updates on a device that nobody measured any on"
    return min((rate for rate in rates if rate is not None), default=1.0)


def _network(machine: Machine) -> Network:
    assert machine.network is not None, "several ranks on a machine whose network nobody measured"
    return machine.network


def _rows_rates(machine: Machine) -> tuple[float, float]:
    rates = rows_rates(machine)
    assert rates is not None, "a table by rows on a machine where nobody measured what host does for it"
    return rates


def _seconds_alone(
    ops: tuple[Op, ...], model: Model, machine: Machine, micro_batch_size: int
) -> tuple[list[float], list[float]]:
    """Seconds of every op when nothing else runs; and how much longer it takes with nothing of its layer in caches."""
    frontier = combined_frontier(machine.volumes)
    bandwidth = {
        "read": frontier[0][0],
        "write": frontier[-1][1],
        "h2d": machine.h2d_bandwidth,
        "d2h": machine.d2h_bandwidth,
    }
    timings = {entry.name: model.timing(entry.name, micro_batch_size) for entry in model.classes}
    on_device = _device_update_rate(ops, machine)
    seconds, longer = [], [0.0] * len(ops)
    for op in ops:
        if isinstance(op, Transfer):
            seconds.append(op.nbytes / bandwidth[op.kind])
        elif isinstance(op, Forward):
            seconds.append(timings[op.layer_class].by_rung(op.rung).forward_seconds)
            longer[op.index] = timings[op.layer_class].forward_cold_seconds
        elif isinstance(op, Backward):
            seconds.append(timings[op.layer_class].by_rung(op.rung).backward_seconds)
            longer[op.index] = timings[op.layer_class].backward_cold_seconds
        elif isinstance(op, TakeRows):
            seconds.append(op.nbytes / _rows_rates(machine)[1])
        elif isinstance(op, Perturb) and op.on_host:
            seconds.append(op.elements * op.waiting / _rows_rates(machine)[0])
        elif isinstance(op, Perturb):
            seconds.append(
                perturb_seconds(machine, op.elements, copies=bool(op.copies), pending=op.waiting, masters=op.masters)
            )
        elif isinstance(op, SumSquares):
            seconds.append(NORM_SHARE * op.elements / on_device)
        elif isinstance(op, Collective):
            network = _network(machine)
            rate = network.gather_bandwidth if isinstance(op, Gather) else network.exchange_bandwidth
            seconds.append(network.latency_seconds + op.nbytes / rate)
        elif isinstance(op, AddShares):
            seconds.append(op.received.nbytes / _network(machine).add_rate)
        else:
            assert isinstance(op, Update)
            needed = op.elements / update_rate(machine, op.formats)
            if op.matrices:
                found = seconds_of(model.matrix_updates, op.matrices, on_device=op.on_device)
                assert found is not None, "an update of matrices on a device that nobody measured any on"
                needed = found
            elif op.on_device:
                needed = (1 - NORM_SHARE) * op.elements / on_device
            if op.stored and machine.checksum_rate:
                needed += op.optimizer.nbytes / machine.checksum_rate
            seconds.append(needed)
    return seconds, longer
