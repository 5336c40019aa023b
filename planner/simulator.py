"""The simulator: when every operation of a graph would run at a profile's rates.

Owns the model of time: one lane a resource, ready ops in their turns (the executor's policy), and how lanes that share
a drive or the cores slow each other. It never changes a graph and schedules nothing that is not in it.
"""

import heapq
from collections.abc import Sequence
from math import inf

from ssdplan.plans.calibration import Expectation
from ssdplan.plans.profile import Machine, Model, update_rate
from ssdplan.plans.schedule import RESOURCES, Backward, Forward, Graph, Op, Resource, Transfer, Update
from ssdplan.plans.timeline import Timeline
from ssdplan.plans.turns import Turns

from .drive import bandwidth_kept, combined_frontier, io_cores, shared_fraction, unsummed_io_cores

_NONE = -1
LEAST_CORES = 0.25
"""What is left to compute however much a drive takes: a scheduler gives everyone a share."""


def simulate(graph: Graph, model: Model, machine: Machine, micro_batch_size: int) -> Timeline:
    """Run `graph` in time: event-driven list scheduling with rates that change when lanes start and stop.

    Each lane runs one op at a time; an op is ready when all of its waits have ended, and a free lane takes the ready op
    whose turn is first. A read and a write that run together share the drive at one point of its frontier. When compute
    shares the CPU, compute and updates are one lane that wants all cores, a copy to or from the device wants one, and
    these slow in proportion when more cores are wanted than reads and writes leave them (what those take is the mean of
    all in the graph, as some sum their bytes and of some an update does); the drive keeps what it was measured to keep
    beside compute. What computes behind an update, or behind another stage's layer, finds nothing of its own in caches.
    Deterministic.
    """
    return _simulated(graph, model, machine, micro_batch_size)[0]


def _simulated(
    graph: Graph, model: Model, machine: Machine, micro_batch_size: int
) -> tuple[Timeline, tuple[float, ...]]:
    """The timeline, and the seconds that each op would have taken had nothing run beside it."""
    ops = graph.ops
    lane_of, speeds = _lanes(machine, graph.ops)
    lanes = [lane_of[op.resource] for op in ops]
    alone, longer = _seconds_alone(ops, model, machine, micro_batch_size)
    stages = [op.stage if isinstance(op, Forward | Backward) else _NONE for op in ops]
    turns = Turns(ops, shared=lane_of["cpu"] == lane_of["compute"])
    turn_of, op_at = turns.of, turns.ops
    missing = [len(op.waits) for op in ops]
    followers: list[list[int]] = [[] for _ in ops]
    for op in ops:
        for before in op.waits:
            followers[before].append(op.index)

    starts, ends = [0.0] * len(ops), [0.0] * len(ops)
    ready: list[list[int]] = [[] for _ in RESOURCES]
    for turn, index in enumerate(op_at):
        if missing[index] == 0:
            ready[lanes[index]].append(turn)  # in order, so already a heap
    running = [-1] * len(RESOURCES)
    until = [inf] * len(RESOURCES)
    speed = [1.0] * len(RESOURCES)
    warm = [_NONE] * len(RESOURCES)
    """The stage whose layer is in caches, as far as these hold it: that of the op that ran last."""
    now, mask, left, slowed = 0.0, 0, len(ops), False
    everyone = range(len(RESOURCES))
    while left:
        for lane in everyone:
            if running[lane] < 0 and ready[lane]:
                index = op_at[heapq.heappop(ready[lane])]
                running[lane], starts[index] = index, now
                if stages[index] != warm[lane]:
                    alone[index] += longer[index]
                    warm[lane] = stages[index]
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
        for lane in everyone:
            if until[lane] <= now:
                index = running[lane]
                ends[index] = now
                running[lane], until[lane] = -1, inf
                mask &= ~(1 << lane)
                left -= 1
                for follower in followers[index]:
                    missing[follower] -= 1
                    if missing[follower] == 0:
                        heapq.heappush(ready[lanes[follower]], turn_of[follower])
    return Timeline(graph, tuple(starts), tuple(ends)), tuple(alone)


def expectation(graph: Graph, model: Model, machine: Machine, micro_batch_size: int) -> Expectation:
    """The figures that `simulate` counts on, for whoever compares a measured timeline with them."""
    lane_of, speeds = _lanes(machine, graph.ops)
    by_resource = []
    for mask in range(1 << len(RESOURCES)):
        lanes = 0
        for number, resource in enumerate(RESOURCES):
            if mask >> number & 1:
                lanes |= 1 << lane_of[resource]
        each = speeds[lanes]
        by_resource.append(tuple(1.0 if each is None else each[lane_of[resource]] for resource in RESOURCES))
    return Expectation(_simulated(graph, model, machine, micro_batch_size)[1], tuple(by_resource))


def _lanes(machine: Machine, ops: Sequence[Op]) -> tuple[dict[Resource, int], list[tuple[float, ...] | None]]:
    """Resource -> lane; and, for every bit mask of running lanes, the speed of each (None: all at full speed)."""
    lane_of = {resource: number for number, resource in enumerate(RESOURCES)}
    read, write, h2d, d2h = (1 << lane_of[name] for name in ("read", "write", "h2d", "d2h"))
    if machine.compute_shares_cpu:
        lane_of["cpu"] = lane_of["compute"]
    shared = shared_fraction(combined_frontier(machine.volumes))
    beside = bandwidth_kept(machine.volumes) if machine.compute_shares_cpu else 1.0
    read_cores, write_cores = _io_cores(machine, ops)
    speeds: list[tuple[float, ...] | None] = []
    for mask in range(1 << len(RESOURCES)):
        drive = shared if mask & read and mask & write else 1.0
        if mask & (1 << lane_of["compute"]):
            drive *= beside
        core = 1.0
        if machine.compute_shares_cpu:
            wanted = bool(mask & h2d) + bool(mask & d2h)
            wanted += machine.cores if mask & (1 << lane_of["compute"]) else 0
            taken = drive * (bool(mask & read) * read_cores + bool(mask & write) * write_cores)
            core = min(1.0, max(machine.cores - taken, LEAST_CORES) / wanted) if wanted else 1.0
        on_drive = {lane_of["read"], lane_of["write"]}
        each = tuple(drive if lane in on_drive else core for lane in range(len(RESOURCES)))
        speeds.append(None if drive == core == 1.0 else each)
    return lane_of, speeds


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
    seconds, longer = [], [0.0] * len(ops)
    for op in ops:
        if isinstance(op, Transfer):
            seconds.append(op.nbytes / bandwidth[op.kind])
        elif isinstance(op, Forward):
            seconds.append(timings[op.layer_class].forward_seconds)
            longer[op.index] = timings[op.layer_class].forward_cold_seconds
        elif isinstance(op, Backward):
            seconds.append(timings[op.layer_class].backward_seconds)
            longer[op.index] = timings[op.layer_class].backward_cold_seconds
        else:
            assert isinstance(op, Update)
            needed = op.elements / update_rate(machine, op.optimizer_states)
            if op.stored and machine.checksum_rate:
                needed += op.optimizer.nbytes / machine.checksum_rate
            seconds.append(needed)
    return seconds, longer
