"""A time made for tests: it moves only when all that runs in it sleeps, so a busy machine makes nothing last longer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from heapq import heappop, heappush
from typing import Any

Gate = threading.Lock
STUCK_SECONDS = 300.0
"""Of the machine's own time: a test whose threads all wait for each other ends."""


class MadeTime:
    """Threads of it run one at a time, in the order in which they are due, and at one moment in the order in which they
    asked: the same test takes the same turns each time."""

    def __init__(self) -> None:
        self.now = 100.0
        self._due: list[tuple[float, int, Gate]] = []
        self._asked = itertools.count()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        gate = self.gate()
        self.wake(gate, self.now + seconds)
        self.park(gate)

    def threads(self, count: int) -> Executor:
        return MadeThreads(self)

    def gate(self) -> Gate:
        """What one thread waits at."""
        gate = threading.Lock()
        gate.acquire()
        return gate

    def wake(self, gate: Gate, at: float) -> None:
        heappush(self._due, (at, next(self._asked), gate))

    def park(self, gate: Gate) -> None:
        """Let others run until this thread's turn comes."""
        self.pass_on()
        assert gate.acquire(timeout=STUCK_SECONDS), "no turn of this thread came"

    def pass_on(self) -> None:
        assert self._due, "all wait for each other"
        at, _, gate = heappop(self._due)
        self.now = max(self.now, at)
        gate.release()


class MadeTurn:
    """A lock of threads of a made time, which pass it on in the order in which they asked for it."""

    def __init__(self, time: MadeTime) -> None:
        self._time, self._held = time, False
        self._waiting: list[Gate] = []

    def __enter__(self) -> None:
        if not self._held:
            self._held = True
            return
        gate = self._time.gate()
        self._waiting.append(gate)
        self._time.park(gate)

    def __exit__(self, *error: object) -> None:
        if self._waiting:
            self._time.wake(self._waiting.pop(0), self._time.now)  # who still holds it
        else:
            self._held = False


class MadeThreads(Executor):
    """As many threads as calls."""

    def __init__(self, time: MadeTime) -> None:
        self._time = time
        self._futures: list[MadeFuture] = []

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future, gate = MadeFuture(self._time), self._time.gate()

        def run() -> None:
            assert gate.acquire(timeout=STUCK_SECONDS)
            try:
                future.set_result(call(*given, **named))
            except BaseException as error:
                future.set_exception(error)
            self._time.pass_on()

        self._futures.append(future)
        threading.Thread(target=run, daemon=True).start()
        self._time.wake(gate, self._time.now)
        self._time.sleep(0)  # it begins at once
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        assert wait and not cancel_futures
        for future in self._futures:
            future.rest()


class MadeFuture(Future[Any]):
    """Whoever waits for it lets others run."""

    def __init__(self, time: MadeTime) -> None:
        super().__init__()
        self._time = time

    def rest(self) -> None:
        if self.done():
            return
        gate = self._time.gate()
        self.add_done_callback(lambda _: self._time.wake(gate, self._time.now))
        self._time.park(gate)

    def result(self, timeout: float | None = None) -> Any:
        assert timeout is None
        self.rest()
        return super().result()
