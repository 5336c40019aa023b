"""Devices for runners alone: what has ended at once, and what ends when a test lets it."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.device.interface import Begun
from ssdplan.executor.runtime.operations import Operations
from ssdplan.executor.runtime.runner import OF_THE_DEVICE
from ssdplan.plans.graph.ops import Buffer, Graph, Op, Resource, Transfer
from tests.bounds import HANG_SECONDS


def in_place(resource: Resource, action: Callable[[], object], after: Sequence[Begun]) -> None:
    """Each lane does its work where it is given."""
    action()


class CheckingDevice(EmulatedDevice):
    """Takes work of its lanes, does it late and in an order of a test's choice, and says where two ops that touch the
    same bytes are not ordered.

    Whether they are ordered does not hang on when they happen to run. Of each op it keeps all that is known to be
    before it, a bit each: what is before it in its lane, what it was told to be behind, and what the host saw end
    before it gave the op. What an op is about to overwrite is poisoned first, so that whoever still reads it is wrong.
    """

    def __init__(self, pick: Callable[[Sequence["Taken"]], "Taken"], late: int = 50) -> None:
        """`pick`: the one to do next, of the first of each lane that wait for nothing; they are in order of coming.
        `late`: chances that other threads have before it is done."""
        super().__init__()
        self._late = late
        self.most_taken: dict[Resource, int] = dict.fromkeys(sorted(OF_THE_DEVICE), 0)
        self._pick, self._changed = pick, threading.Condition()
        self._lanes: dict[Resource, list[Taken]] = {lane: [] for lane in sorted(OF_THE_DEVICE)}
        self._graph: Watched | None = None
        self._thread = threading.Thread(target=self._work, name="made device", daemon=True)
        self._stopped = False
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive()

    def submit(self, resource: Resource, action: Any, after: Sequence[Begun]) -> Any:
        op, watched = action.op, action.watched
        with self._changed:
            if watched is not self._graph or watched.over():
                watched.begin()
                self._graph = watched
            watched.enter(op, [each for each in after if isinstance(each, Taken)])
            if resource in self._lanes:
                taken = Taken(self, action, resource, after)
                self._lanes[resource].append(taken)
                self.most_taken[resource] = max(self.most_taken[resource], len(self._lanes[resource]))
                self._changed.notify_all()
                return taken
        action.poison()
        rest = action()
        if rest is not None:
            rest()
        with self._changed:
            watched.ended |= 1 << op.index
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                while not any(self._lanes.values()):
                    if self._stopped:
                        return
                    self._changed.wait()
            for _ in range(self._late):
                time.sleep(0)  # others run meanwhile, where they can
            with self._changed:
                heads = [lane[0] for lane in self._lanes.values() if lane]
                free = [head for head in heads if all(each.done for each in head.after)]
                taken = self._pick(sorted(free, key=lambda head: head.number))
            try:
                taken.action.poison()
                taken.rest = taken.action()
            except BaseException as error:
                taken.error = error
            with self._changed:
                self._lanes[taken.resource].pop(0)
                taken.done = True
                self._changed.notify_all()


class Taken:
    """Work that a checking device has taken."""

    counted = itertools.count()

    def __init__(self, device: CheckingDevice, action: "Checked", resource: Resource, after: Sequence[Begun]) -> None:
        self.device, self.action, self.resource = device, action, resource
        self.after = [each for each in after if isinstance(each, Taken)]
        self.number, self.done = next(self.counted), False
        self.rest: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self.moment = time.perf_counter()

    @property
    def holds(self) -> bool:
        return self.action.holds

    def wait(self) -> tuple[float, float]:
        with self.device._changed:
            assert self.device._changed.wait_for(lambda: self.done, HANG_SECONDS)
        if self.error is not None:
            raise self.error
        if self.rest is not None:
            self.rest()
        with self.device._changed:
            self.action.watched.ended |= 1 << self.action.op.index
        return self.moment, time.perf_counter()


class Watched:
    """A graph while it runs: what has been given, what has ended, and what is before what; sets are a bit an op.
    `strict`: the first race ends the run. `by_lanes`: what a lane has before an op is before it; else only if the op
    waits for it."""

    def __init__(self, graph: Graph, buffers: Sequence[Buffer], *, strict: bool = True, by_lanes: bool = True) -> None:
        self.graph, self.strict, self.by_lanes = graph, strict, by_lanes
        self.races: list[tuple[frozenset[int], str]] = []
        """Which two ops, and in words."""
        self.conflicts = conflicts(graph, buffers)
        self.begin()

    def begin(self) -> None:
        self.given = self.ended = 0
        self.before = [0] * len(self.graph.ops)
        self.last: dict[Resource, int] = {}

    def over(self) -> bool:
        return self.ended == (1 << len(self.graph.ops)) - 1

    def enter(self, op: Op, after: Sequence[Taken]) -> None:
        behind = {each.action.op.index for each in after}
        if op.resource in OF_THE_DEVICE:
            own = self.given & sum(1 << wait for wait in op.waits if self.graph.ops[wait].resource == op.resource)
            behind |= {wait for wait in op.waits if own >> wait & 1}  # the lane has them before it
            if self.by_lanes and op.resource in self.last:
                behind.add(self.last[op.resource])
        behind |= {wait for wait in op.waits if self.ended >> wait & 1}
        for other in behind:
            self.before[op.index] |= self.before[other] | 1 << other
        for wait in op.waits:
            if not self.before[op.index] >> wait & 1:
                self._race(op, "begins before", self.graph.ops[wait], " has ended")
        wrong = self.conflicts[op.index] & self.given & ~(self.before[op.index] & ((1 << op.index) - 1))
        for other in self.graph.ops:
            if wrong >> other.index & 1:
                self._race(op, "may run together with", other)
        self.given |= 1 << op.index
        if op.resource in OF_THE_DEVICE:
            self.last[op.resource] = op.index

    def _race(self, op: Op, how: str, other: Op, end: str = "") -> None:
        words = f"{op} (op {op.index}) {how} {other} (op {other.index}){end}"
        self.races.append((frozenset((op.index, other.index)), words))
        if self.strict:
            raise RaceError(words)


class RaceError(Exception):
    """Two ops touch the same bytes in no order."""


def conflicts(graph: Graph, buffers: Sequence[Buffer]) -> list[int]:
    """Of each op, the others that touch bytes that it touches, where one of the two writes."""
    spans: list[tuple[str, int, int, int, bool]] = []
    for op in graph.ops:
        for region, writes in [(each, False) for each in op.reads] + [(each, True) for each in op.writes]:
            buffer = buffers[region.buffer]
            spans.append((buffer.tier, buffer.offset + region.start, buffer.offset + region.stop, op.index, writes))
    found = [0] * len(graph.ops)
    spans.sort()
    for number, (tier, _, stop, index, writes) in enumerate(spans):
        for other_tier, other_start, _, other, other_writes in itertools.islice(spans, number + 1, None):
            if other_tier != tier or other_start >= stop:
                break
            if other != index and (writes or other_writes):
                found[index] |= 1 << other
                found[other] |= 1 << index
    return found


class Checked:
    """An action that knows its op."""

    def __init__(
        self, op: Op, watched: Watched, action: Callable[[], Any], overwritten: Sequence[torch.Tensor] = ()
    ) -> None:
        self.op, self.watched, self._action, self._overwritten = op, watched, action, overwritten

    @property
    def holds(self) -> bool:
        return isinstance(self.op, Transfer) and self.op.kind == "d2h" and self.op.final_gradient

    def poison(self) -> None:
        for place in self._overwritten:
            place.fill_(0xFF)

    def __call__(self) -> Any:
        return self._action()


def checked(operations: Operations, graph: Graph, actions: Sequence[Callable[[], Any]]) -> list[Checked]:
    """What a graph is bound to, for a checking device."""
    memory = operations._memory
    watched = Watched(graph, memory._schedule.buffers)
    found = []
    for op, action in zip(graph.ops, actions, strict=True):
        kept = {region.buffer for region in op.reads}
        overwritten = [
            memory.view(region) for region in op.writes if region.buffer not in kept and memory.tier(region) != "ssd"
        ]
        found.append(Checked(op, watched, action, overwritten))
    return found
