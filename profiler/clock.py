"""The clock of measurements: time, sleep and threads, which a test can replace.

Owns the real ones. Whoever measures takes a clock as an argument, so that a test can make a time of its own: there,
what is said to last a while lasts exactly so long, however busy the machine is. Processor time is not part of it.
"""

import time
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol


class Clock(Protocol):
    """Where time passes: for whoever asks, and for threads beside it."""

    def __call__(self) -> float:
        """Seconds since some moment."""

    def sleep(self, seconds: float) -> None: ...

    def threads(self, count: int) -> Executor:
        """So many threads that this time passes for. Leaving the context waits for all that they do."""


class RealClock:
    """The machine's own."""

    def __call__(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def threads(self, count: int) -> Executor:
        return ThreadPoolExecutor(count)


REAL: Clock = RealClock()
