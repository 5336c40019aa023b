"""Runners: walk a graph of operations, one after the other or all lanes at once. Both give the same bits.

Owns threads and the order in which ready ops start; what an op does is given in as a list of actions, one an op. The
policy is the simulator's: each resource is a lane, and a lane takes ready ops in the graph's order. A device may take
an op without waiting for its end; then it is told what that op is behind.
"""

import contextlib
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from types import FrameType
from typing import Protocol

from ssdplan.plans.graph.ops import RESOURCES, Graph, Resource
from ssdplan.plans.graph.timeline import Timeline

from ..device.interface import Action, Begun
from .interruption import ENDS

Submit = Callable[[Resource, Action, Sequence[Begun]], Begun | None]
"""`Device.submit` of `executor/device/interface.py`"""

IN_FLIGHT: dict[Resource, int] = {"read": 4, "write": 4}
"""Lane -> ops that it has under way at once, where that is more than one: while the bytes of one are checked and the
next is set going, the drive works on the other. Ops of a lane start in their order all the same."""
OF_THE_DEVICE: frozenset[Resource] = frozenset(("h2d", "d2h", "compute"))
"""Lanes in which an op may have been taken and not ended."""
MOST_TAKEN = 3
"""Ops that a lane of the device has at most: one that runs, and two behind it. More would keep it no busier, and an
interruption waits for all of them."""
_NONE = -1
_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a graph is that runs at this moment. Times are of time.perf_counter."""

    graph: Graph
    ended: int
    """How many of its ops have ended."""
    last_end: float
    """When the last of them did; when the graph began, as long as none has."""
    running: tuple[tuple[int, float], ...]
    """Each op that runs, and when it began."""


class Runner(Protocol):
    """Runs a graph to its end. An action's error is raised in the caller after all lanes have stopped."""

    def run(self, graph: Graph, actions: Sequence[Action]) -> Timeline: ...
    def standing(self) -> Standing | None:
        """From any thread; None when no graph runs."""

    def abandon(self, error: BaseException) -> None:
        """From any thread: have `run` raise `error` now, though an op hangs, unless it is one of the caller's thread.
        What it works on must be left as it is."""

    def close(self) -> None: ...


class SerialRunner:
    """The graph in order, one op at a time: slow, and easy to believe."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._graph: Graph | None = None
        self._times: list[float] = []

    def run(self, graph: Graph, actions: Sequence[Action]) -> Timeline:
        self._times = times = [time.perf_counter()]
        self._graph = graph
        try:
            for op, action in zip(graph.ops, actions, strict=True):
                begun = self._submit(op.resource, action, ())
                if begun is not None:
                    begun.wait()
                times.append(time.perf_counter())
        finally:
            self._graph = None
        return Timeline(
            graph, tuple(t - times[0] for t in times[:-1]), tuple(t - times[0] for t in times[1:]), times[0]
        )

    def standing(self) -> Standing | None:
        graph, times = self._graph, self._times
        if graph is None:
            return None
        ended = len(times) - 1
        return Standing(graph, ended, times[ended], ((ended, times[ended]),) if ended < len(graph.ops) else ())

    def abandon(self, error: BaseException) -> None:
        raise AssertionError("ops that run in the caller's thread cannot be left")

    def close(self) -> None:
        pass


class OverlappedRunner:
    """Threads for every lane; an op starts when all that it waits for have ended and its lane has a thread free.

    The thread that ends an op hands on what became ready by it: one op of its own lane it runs itself, so that a lane
    with work never changes threads, and threads of other lanes are woken only where they sleep and there is something
    to do. A thread that is woken knows its op already.

    Compute runs in the thread that calls `run`: a thread of its own would have OpenMP threads of its own beside those
    that the caller's has, and with more of these than cores each wait of theirs becomes a sleep (on two cores a layer
    took 1.4 to 1.7 times as long).

    Where the device takes an op without waiting for its end (`Begun`), ops of its lanes follow at once, behind it on
    the device; ops of other lanes, which may touch what it touches from the host, follow when it has ended. A thread
    for each such lane sleeps until its oldest op has.
    """

    def __init__(
        self, submit: Submit, in_flight: Mapping[Resource, int] | None = None, lanes: Sequence[Resource] = RESOURCES
    ) -> None:
        """`in_flight`: lane -> how many of its ops at once, if not 1; of the device's lanes it is 1. `lanes`: those
        that any graph uses."""
        assert not OF_THE_DEVICE & (in_flight or {}).keys()
        self._submit = submit
        self._programs: dict[int, _Program] = {}
        self._lock = threading.Lock()
        self._run: _Run | None = None
        self._closing = self._abandoned = False
        self._own = _Worker("compute")
        self._threads = [
            _Worker(name) for name in lanes for _ in range((in_flight or {}).get(name, 1)) if name != "compute"
        ]
        self._watched: dict[int, queue.SimpleQueue[tuple[_Run, int, Begun] | None]] = {}
        """Of each lane whose device has taken an op without waiting for it."""
        self._watchers: list[threading.Thread] = []
        self._idle: list[list[_Worker]] = [[] for _ in RESOURCES]
        self._idle[self._own.lane].append(self._own)
        for worker in self._threads:
            self._idle[worker.lane].append(worker)
            worker.thread = threading.Thread(
                target=self._work, args=(worker,), name=f"ssdplan-{worker.name}", daemon=True
            )
            worker.thread.start()

    def run(self, graph: Graph, actions: Sequence[Action]) -> Timeline:
        """Not reentrant: one graph at a time. An interruption (`ENDS`) is raised once what runs has ended."""
        assert len(actions) == len(graph.ops) and self._run is None
        program = self._programs.get(id(graph))
        if program is None:
            program = self._programs[id(graph)] = _Program(graph)
        run = _Run(program, actions, len(self._idle), self._own)
        with _interruptions() as interruptions:
            self._run = run
            try:
                self._serve(run, interruptions)
            except BaseException as interruption:  # from a signal's handler that is not ours, between any two steps
                self._fail(run, interruption)
                self._own.index = _NONE
                while not self._abandoned and (
                    any(worker.index != _NONE for worker in self._threads) or any(run.taken)
                ):
                    time.sleep(_PAUSE_SECONDS)  # what runs must end before its memory may go away
                raise
            finally:
                self._run = None
        if run.error:
            raise run.error
        began = run.began
        return Timeline(graph, tuple([t - began for t in run.starts]), tuple([t - began for t in run.ends]), began)

    def _serve(self, run: "_Run", interruptions: Sequence[BaseException]) -> None:
        """The caller's part of a run: it begins, works for the lane of compute, and returns when all has ended."""
        own = self._own
        index = self._begin(run)
        while True:
            while index != _NONE:
                index = self._perform(run, own, index)
                if interruptions:
                    self._fail(run, interruptions[0])
            if run.over:
                return
            # Not for ever: a signal that another thread took is seen here only between two waits.
            if own.gate.acquire(timeout=_LOOK_SECONDS):
                index = own.index
            if interruptions:
                self._fail(run, interruptions[0])

    def _fail(self, run: "_Run", error: BaseException) -> None:
        with self._lock:
            run.error = run.error or error
            run.check_end()

    def standing(self) -> Standing | None:
        with self._lock:
            run = self._run
            if run is None:
                return None
            workers = [self._own, *self._threads]
            running = [(worker.index, worker.began) for worker in workers if worker.index != _NONE]
            now = time.perf_counter()
            # One that was handed an op a moment ago has not begun it.
            running = [(index, began if began >= run.began else now) for index, began in running]
            running += [
                (index, max(run.starts[index], run.lane_end[lane]))
                for lane, taken in enumerate(run.taken)
                for index in taken
            ]
            return Standing(run.program.graph, len(run.starts) - run.left, run.last_end, tuple(sorted(running)))

    def abandon(self, error: BaseException) -> None:
        with self._lock:
            if self._run is not None:
                self._abandoned = True
                self._run.error = self._run.error or error
                self._run.let_go()

    def close(self) -> None:
        """End the threads, but one that hangs in an op that was abandoned. No graph may be running."""
        assert self._run is None
        self._closing = True
        for worker in self._threads:
            worker.wake()
        for taken in self._watched.values():
            taken.put(None)
        if not self._abandoned:
            for worker in self._threads:
                assert worker.thread is not None
                worker.thread.join()
            for watcher in self._watchers:
                watcher.join()

    def _work(self, worker: "_Worker") -> None:
        while True:
            worker.gate.acquire()
            index = worker.index
            if index == _NONE and self._closing:
                return
            run = self._run
            while index != _NONE:
                assert run is not None
                index = self._perform(run, worker, index)

    def _perform(self, run: "_Run", worker: "_Worker", index: int) -> int:
        """Run an op in the calling thread, which is `worker`'s. Returns the one that it runs next."""
        error: BaseException | None = None
        program, begun = run.program, None
        run.starts[index] = worker.began = time.perf_counter()
        try:
            after = [before for wait in program.behind[index] if (before := run.begun[wait]) is not None]
            begun = self._submit(program.resources[index], run.actions[index], after)
        except BaseException as caught:
            error = caught
        if begun is not None:
            return self._taken(run, worker, index, begun)
        run.ends[index] = end = time.perf_counter()
        return self._ended(run, worker, index, end, error)

    def _taken(self, run: "_Run", worker: "_Worker", index: int, begun: Begun) -> int:
        """Note that the device has taken op `index`, have its end watched, and hand on what may follow behind it there.
        Returns the op that `worker` runs next."""
        lane = worker.lane
        with self._lock:
            run.begun[index] = begun
            run.taken[lane].append(index)
            touched = [] if begun.holds else self._release(run, run.program.on_device[index])
            after, woken = self._hand_out(run, worker, touched)
            watched = self._watched.get(lane)
            if watched is None:
                watched = self._watched[lane] = queue.SimpleQueue()
                watcher = threading.Thread(
                    target=self._watch, args=(lane, watched), name=f"ssdplan-{worker.name}-ends", daemon=True
                )
                self._watchers.append(watcher)
                watcher.start()
        watched.put((run, index, begun))
        for each in woken:
            each.wake()
        return after

    def _watch(self, lane: int, watched: "queue.SimpleQueue[tuple[_Run, int, Begun] | None]") -> None:
        """See the ops of a lane of the device end, in their order."""
        while (item := watched.get()) is not None:
            run, index, begun = item
            error: BaseException | None = None
            launched = run.starts[index]
            try:
                began, end = begun.wait()
            except BaseException as caught:
                error, began, end = caught, launched, time.perf_counter()
            # The device's clock and ours agree to some microseconds, and what came before on host came before.
            run.ends[index] = end = min(max(end, launched), time.perf_counter())
            run.starts[index] = min(max(began, launched), end)
            with self._lock:
                followers = run.program.followers[index] if begun.holds else run.program.on_host[index]
                assert run.taken[lane][0] == index
                run.taken[lane].popleft()
                run.lane_end[lane] = run.last_end = end
                run.begun[index] = None
                run.left -= 1
                run.running -= 1
                if error is not None:
                    run.error = run.error or error
                touched = self._release(run, followers)
                _, woken = self._hand_out(run, None, (*touched, lane))
            for each in woken:
                each.wake()

    def _begin(self, run: "_Run") -> int:
        """Hand out what waits for nothing. Returns the op that the caller itself is to run."""
        with self._lock:
            lanes = run.program.lanes
            for index in run.program.first:
                heappush(run.ready[lanes[index]], index)
            self._idle[self._own.lane].remove(self._own)
            after, woken = self._hand_out(run, self._own, range(len(self._idle)))
        for each in woken:
            each.wake()
        return after

    def _ended(self, run: "_Run", worker: "_Worker", index: int, end: float, error: BaseException | None) -> int:
        """Note that `worker` has ended op `index`, and hand on what became ready. Returns the op that it runs next."""
        with self._lock:
            run.last_end = end
            run.left -= 1
            run.running -= 1
            if error is not None:
                run.error = run.error or error
            touched = self._release(run, run.program.followers[index])
            after, woken = self._hand_out(run, worker, touched)
        for each in woken:
            each.wake()
        return after

    def _release(self, run: "_Run", followers: Iterable[int]) -> list[int]:
        """Note that these wait for one op less. Returns the lanes that have work now and a thread that sleeps. The
        caller holds the lock."""
        touched = []
        missing, lanes, ready, idle = run.missing, run.program.lanes, run.ready, self._idle
        for follower in followers:
            missing[follower] -= 1
            if not missing[follower]:
                lane = lanes[follower]
                heappush(ready[lane], follower)
                if idle[lane]:
                    touched.append(lane)
        return touched

    def _hand_out(self, run: "_Run", worker: "_Worker | None", lanes: Iterable[int]) -> tuple[int, list["_Worker"]]:
        """Give `worker`, which is awake, the first ready op of its lane, and those of `lanes` to threads that sleep;
        returns its op and the threads to wake. The caller holds the lock. A thread without an op is anybody's to wake
        as soon as the lock is free. A lane of the device that has as many ops as it may gets none."""
        woken = []
        after = _NONE
        if run.error is None:
            taken = run.taken
            if worker is not None and run.ready[worker.lane] and len(taken[worker.lane]) < MOST_TAKEN:
                after = heappop(run.ready[worker.lane])
                run.running += 1
            for lane in lanes:
                ready, idle = run.ready[lane], self._idle[lane]
                while ready and idle and len(taken[lane]) < MOST_TAKEN:
                    other = idle.pop()
                    other.index = heappop(ready)
                    run.running += 1
                    woken.append(other)
        if worker is not None:
            worker.index = after
            if after == _NONE:
                self._idle[worker.lane].append(worker)
        run.check_end()
        return after, woken


@contextlib.contextmanager
def _interruptions() -> Iterator[list[BaseException]]:
    """What handlers of SIGINT, SIGTERM and SIGHUP raise within it is noted, not raised: it would reach the caller's
    thread between any two of its steps."""
    noted: list[BaseException] = []

    def noting(handler: Callable[[int, FrameType | None], object]) -> Callable[[int, FrameType | None], None]:
        def note(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as raised:
                noted.append(raised)

        return note

    mine = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in ENDS} if mine else {}
    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, noting(handler))
    try:
        yield noted
    finally:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)


class _Program:
    """What running a graph needs to know of it, once for all its runs."""

    __slots__ = ("behind", "first", "followers", "graph", "lanes", "on_device", "on_host", "resources", "waits")

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.resources = [op.resource for op in graph.ops]
        self.lanes = [RESOURCES.index(resource) for resource in self.resources]
        self.waits = [len(op.waits) for op in graph.ops]
        self.first = [op.index for op in graph.ops if not op.waits]
        followers: list[list[int]] = [[] for _ in graph.ops]
        for op in graph.ops:
            for wait in op.waits:
                followers[wait].append(op.index)
        self.followers = [tuple(each) for each in followers]
        device = [resource in OF_THE_DEVICE for resource in self.resources]
        self.on_device = [tuple(each for each in of if device[each]) for of in self.followers]
        """Of each op of the device, the followers that are the device's too."""
        self.on_host = [tuple(each for each in of if not device[each]) for of in self.followers]
        self.behind = [
            tuple(wait for wait in op.waits if device[wait] and self.lanes[wait] != self.lanes[op.index])
            if device[op.index]
            else ()
            for op in graph.ops
        ]
        """Of each op of the device, what it waits for in the device's other lanes; in its own it is behind all."""


class _Run:
    """One run of a graph; all but `starts` and `ends` belong to whoever holds the runner's lock."""

    __slots__ = (
        "actions",
        "began",
        "begun",
        "caller",
        "ends",
        "error",
        "lane_end",
        "last_end",
        "left",
        "missing",
        "over",
        "program",
        "ready",
        "running",
        "starts",
        "taken",
    )

    def __init__(self, program: _Program, actions: Sequence[Action], lanes: int, caller: "_Worker") -> None:
        count = len(program.waits)
        self.program, self.actions, self.caller = program, actions, caller
        self.missing = list(program.waits)
        self.ready: list[list[int]] = [[] for _ in range(lanes)]
        self.left, self.running = count, 0
        self.starts, self.ends = [0.0] * count, [0.0] * count
        self.begun: list[Begun | None] = [None] * count
        """What the device has taken and nobody has seen end."""
        self.taken: list[deque[int]] = [deque() for _ in range(lanes)]
        """Of each lane, in order, what the device has taken and nobody has seen end."""
        self.lane_end = [0.0] * lanes
        self.error: BaseException | None = None
        self.over = False
        self.began = self.last_end = time.perf_counter()

    def check_end(self) -> None:
        """Let the caller of `run` go on when nothing runs and nothing will."""
        if not self.left or (self.error is not None and not self.running):
            self.let_go()

    def let_go(self) -> None:
        if not self.over:
            self.over = True
            self.caller.wake()


class _Worker:
    """A thread of a lane, asleep at its gate until it is woken; whoever wakes it gave it an op before."""

    __slots__ = ("began", "gate", "index", "lane", "name", "thread")

    def __init__(self, name: Resource) -> None:
        self.lane, self.name = RESOURCES.index(name), name
        self.gate = threading.Lock()
        self.gate.acquire()
        self.index = _NONE
        self.began = 0.0
        self.thread: threading.Thread | None = None

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # its gate is open already
            self.gate.release()
