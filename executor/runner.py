"""Runners: walk a graph of operations, one after the other or all lanes at once. Both give the same bits.

Owns threads and the order in which ready ops start; what an op does is given in as a list of actions, one an op. The
policy is the simulator's: each lane runs one op at a time, the ready op of lowest index first.
"""

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ssdplan.plans.schedule import Graph, Resource
from ssdplan.plans.timeline import Timeline

Action = Callable[[], None]
Lane = Callable[[Resource], AbstractContextManager[None]]


class Runner(Protocol):
    """Runs a graph to its end. An action's error is raised in the caller after all lanes have stopped."""

    def run(self, graph: Graph, actions: Sequence[Action]) -> Timeline: ...
    def close(self) -> None: ...


class SerialRunner:
    """The graph in order, one op at a time: slow, and easy to believe."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def run(self, graph: Graph, actions: Sequence[Action]) -> Timeline:
        times = [time.perf_counter()]
        for op, action in zip(graph.ops, actions, strict=True):
            with self._lane(op.resource):
                action()
            times.append(time.perf_counter())
        return Timeline(graph, tuple(t - times[0] for t in times[:-1]), tuple(t - times[0] for t in times[1:]))

    def close(self) -> None:
        pass


class OverlappedRunner:
    """One thread a lane; an op starts when all that it waits for have ended."""

    def __init__(self, lane: Lane, lanes: dict[Resource, str]) -> None:
        self._lane, self._lanes = lane, lanes
        self._lock = threading.Lock()
        self._wake = {name: threading.Condition(self._lock) for name in sorted(set(lanes.values()))}
        self._finished = threading.Condition(self._lock)
        self._ready: dict[str, list[int]] = {name: [] for name in self._wake}
        self._dependents: dict[int, tuple[Graph, list[list[int]]]] = {}
        self._graph: Graph | None = None
        self._actions: Sequence[Action] = ()
        self._current: list[list[int]] = []
        self._missing: list[int] = []
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._left = self._running = 0
        self._error: BaseException | None = None
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, args=(name,), name=f"ssdplan-{name}", daemon=True)
            for name in self._wake
        ]
        for thread in self._threads:
            thread.start()

    def run(self, graph: Graph, actions: Sequence[Action]) -> Timeline:
        """Not reentrant: one graph at a time."""
        assert len(actions) == len(graph.ops)
        dependents = self._dependents_of(graph)
        origin = time.perf_counter()
        with self._lock:
            assert self._graph is None, "a graph is running already"
            self._graph, self._actions, self._error = graph, actions, None
            self._current = dependents
            self._missing = [len(op.waits) for op in graph.ops]
            self._starts, self._ends = [0.0] * len(graph.ops), [0.0] * len(graph.ops)
            self._left, self._running = len(graph.ops), 0
            for op in graph.ops:
                if not op.waits:
                    self._make_ready(op.index)
            while self._left and not (self._error and not self._running):
                try:
                    self._finished.wait()
                except BaseException as interruption:  # what runs must end before its memory may go away
                    self._error = self._error or interruption
            self._graph, self._actions = None, ()
            for ready in self._ready.values():
                ready.clear()
            if self._error:
                raise self._error
        return Timeline(graph, tuple(t - origin for t in self._starts), tuple(t - origin for t in self._ends))

    def close(self) -> None:
        """End the threads; what runs is finished first."""
        with self._lock:
            self._closing = True
            for wake in self._wake.values():
                wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _dependents_of(self, graph: Graph) -> list[list[int]]:
        known = self._dependents.get(id(graph))
        if known is None:
            lists: list[list[int]] = [[] for _ in graph.ops]
            for op in graph.ops:
                for wait in op.waits:
                    lists[wait].append(op.index)
            known = self._dependents[id(graph)] = (graph, lists)
        return known[1]

    def _make_ready(self, index: int) -> None:
        assert self._graph is not None
        name = self._lanes[self._graph.ops[index].resource]
        heapq.heappush(self._ready[name], index)
        self._wake[name].notify()

    def _work(self, name: str) -> None:
        ready, wake = self._ready[name], self._wake[name]
        while True:
            with self._lock:
                while not self._closing and (not ready or self._error):
                    wake.wait()
                if self._closing:
                    return
                index = heapq.heappop(ready)
                assert self._graph is not None
                op, action = self._graph.ops[index], self._actions[index]
                self._running += 1
            start = time.perf_counter()
            error: BaseException | None = None
            try:
                with self._lane(op.resource):
                    action()
            except BaseException as caught:
                error = caught
            end = time.perf_counter()
            with self._lock:
                self._starts[index], self._ends[index] = start, end
                self._running -= 1
                self._left -= 1
                if error is not None:
                    self._error = self._error or error
                elif not self._error:
                    for dependent in self._current[index]:
                        self._missing[dependent] -= 1
                        if not self._missing[dependent]:
                            self._make_ready(dependent)
                if not self._left or self._error:
                    self._finished.notify()
