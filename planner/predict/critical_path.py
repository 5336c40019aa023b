"""The critical path: why a simulated step takes as long as it does, and why each resource idles meanwhile.

Owns the critical path (the chain of operations, each held up by the one before it, that makes the step as long as it
is) and the split of every resource's idle seconds by what it waited for. It reads a timeline and times nothing itself.

The chains are plain arrays. A networkx graph of the waits and the lanes takes 3.4 times as long to make as all of this
(1.3 s beside 0.39 s of processor time, medians of 5 in turns, for 78,000 operations with 706,000 waits), before a path
is looked for in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ssdplan.plans.documents.profile import Machine
from ssdplan.plans.graph.collectives import AddShares, Exchange, Gather
from ssdplan.plans.graph.contents import CONTENTS
from ssdplan.plans.graph.ops import (
    Backward,
    Forward,
    Op,
    Perturb,
    Region,
    Resource,
    SumSquares,
    TakeRows,
    Transfer,
    Update,
)
from ssdplan.plans.graph.timeline import Timeline, lanes_of

FILL, DRAIN, NO_WORK = "fill", "drain", "no work"
"""Causes to idle: before the first operation of the lane, after its last, and throughout when it has none."""
SHARED_CORES = "compute and updates (shared cores)"
_WRITES_TO: dict[Resource, str] = {
    "read": "host",
    "write": "ssd",
    "h2d": "device",
    "d2h": "host",
    "compute": "device",
    "cpu": "host",
    "network": "device",
}

Seconds = dict[str, float]


@dataclass(frozen=True, slots=True)
class Causes:
    """Where the seconds of a step go."""

    path: tuple[int, ...]
    """Indices of the critical path's operations, from the step's start to its end."""
    path_seconds: dict[Resource, Seconds]
    """Resource -> kind of work -> its seconds on the critical path; all of them together are the step."""
    idle: dict[Resource, Seconds]
    """Resource -> cause -> seconds in which it does nothing. A cause is the resource that was waited for, `host buffer`
    or `device buffer` (memory that something else still used), FILL, DRAIN or NO_WORK."""


def find_causes(timeline: Timeline) -> Causes:
    """The critical path and the causes of idle time of a step that the simulator timed.

    An operation is held up by what ended last of what it waits for and of the operation before it on its lane. An idle
    resource is charged to what ran meanwhile on the chain that held up its next operation; from the first wait in that
    chain that is there only because a slot is used again, back, to the buffer that was not free yet.
    """
    return _Chains(timeline).causes()


def loads(timeline: Timeline, machine: Machine) -> Seconds:
    """What could bound a step, in words -> seconds in which at least one of its operations runs."""
    shared = machine.compute_shares_cpu
    groups: dict[str, tuple[Resource, ...]] = {
        SHARED_CORES if shared else "compute": ("compute", "cpu") if shared else ("compute",),
        "ssd": ("read", "write"),
        "link to device": ("h2d",),
        "link from device": ("d2h",),
    }
    if not shared:
        groups["cpu updates"] = ("cpu",)
    if "network" in lanes_of(timeline.graph):
        groups["network"] = ("network",)
    return {name: _covered(timeline, members) for name, members in groups.items()}


def work(op: Op) -> str:
    """The kind of work of an operation, in the field's words."""
    if isinstance(op, Forward):
        return "forward"
    if isinstance(op, Backward):
        return "backward"
    if isinstance(op, Update):
        return "delayed updates" if op.delayed else "updates"
    if isinstance(op, Perturb):
        return "passes over parameters"
    if isinstance(op, TakeRows):
        return "rows of a table"
    if isinstance(op, SumSquares):
        return "norms of gradients"
    if isinstance(op, Gather):
        return "parameters"
    if isinstance(op, Exchange):
        return "gradient"
    if isinstance(op, AddShares):
        return "adding gradients"
    assert isinstance(op, Transfer)
    return CONTENTS[op.content].words


class _Chains:
    """A timeline with its lanes, and what held up each operation."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.ops = timeline, timeline.graph.ops
        self.resources = [op.resource for op in self.ops]
        self.lanes: dict[Resource, list[int]] = {resource: [] for resource in lanes_of(timeline.graph)}
        starts, ends = timeline.starts, timeline.ends
        for index in sorted(range(len(self.ops)), key=lambda index: (starts[index], ends[index], index)):
            self.lanes[self.resources[index]].append(index)
        self.before = [-1] * len(self.ops)
        """The operation before each on its lane."""
        for lane in self.lanes.values():
            for first, second in pairwise(lane):
                self.before[second] = first
        self.held_up_by = [self._held_up_by(index) for index in range(len(self.ops))]

    def causes(self) -> Causes:
        path = self._path()
        on_path: dict[Resource, Seconds] = {}
        ends, last = self.timeline.ends, 0.0
        for index in path:
            spent = on_path.setdefault(self.resources[index], {})
            _add(spent, work(self.ops[index]), ends[index] - last)
            last = ends[index]
        return Causes(tuple(path), on_path, self._idle())

    def _held_up_by(self, index: int) -> int:
        """What ended last of all that the operation had to wait for; -1 when it waited for nothing. Of two that ended
        together the one on its own lane: had the other ended earlier, nothing would have changed."""
        ends = self.timeline.ends
        found, end = self.before[index], -1.0
        if found >= 0:
            end = ends[found]
        for wait in self.ops[index].waits:
            if ends[wait] > end:
                found, end = wait, ends[wait]
        return found

    def _path(self) -> list[int]:
        ends = self.timeline.ends
        path = []
        index = max(range(len(self.ops)), key=lambda index: ends[index], default=-1)
        while index >= 0:
            path.append(index)
            index = self.held_up_by[index]
        return path[::-1]

    def _idle(self) -> dict[Resource, Seconds]:
        return {resource: self._gaps(lane) for resource, lane in self.lanes.items()}

    def _gaps(self, lane: Sequence[int]) -> Seconds:
        """Cause -> seconds in which none of the lane's operations runs."""
        starts, ends = self.timeline.starts, self.timeline.ends
        if not lane:
            return {NO_WORK: self.timeline.seconds} if self.ops else {}
        causes: Seconds = {}
        _add(causes, FILL, starts[lane[0]])
        for first, second in pairwise(lane):
            if starts[second] > ends[first]:
                self._charge(causes, ends[first], second)
        _add(causes, DRAIN, self.timeline.seconds - ends[lane[-1]])
        return causes

    def _charge(self, causes: Seconds, begin: float, index: int) -> None:
        """Charge the time from `begin` to the start of the operation to what ran on the chain that held it up."""
        until, buffer = self.timeline.starts[index], ""
        while until > begin:
            holder = self.held_up_by[index]
            assert holder >= 0, "an operation that waited for nothing and did not start at once"
            if not buffer and holder in self.ops[index].waits and _takes_over_memory(self.ops[index], self.ops[holder]):
                buffer = f"{_WRITES_TO[self.resources[index]]} buffer"
            before = self.held_up_by[holder]
            since = max(self.timeline.ends[before] if before >= 0 else 0.0, begin)
            _add(causes, buffer or self.resources[holder], until - since)
            index, until = holder, since


def _takes_over_memory(op: Op, before: Op) -> bool:
    """Whether `op` waits for `before` only because it takes over memory: no buffer of both is written by either."""
    return not (
        _overlap(op.reads, before.writes) or _overlap(op.writes, before.writes) or _overlap(op.writes, before.reads)
    )


def _overlap(some: tuple[Region, ...], others: tuple[Region, ...]) -> bool:
    for one in some:
        for other in others:
            if one.buffer == other.buffer and one.start < other.stop and other.start < one.stop:
                return True
    return False


def _covered(timeline: Timeline, resources: tuple[Resource, ...]) -> float:
    """Seconds in which at least one op of `resources` runs."""
    spans = sorted(
        (start, end)
        for op, start, end in zip(timeline.graph.ops, timeline.starts, timeline.ends, strict=True)
        if op.resource in resources
    )
    covered = until = 0.0
    for start, end in spans:
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return covered


def _add(total: Seconds, name: str, seconds: float) -> None:
    if seconds > 0:
        total[name] = total.get(name, 0.0) + seconds
