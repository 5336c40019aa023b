"""The live line of a run: how far it is, how fast, how long it still takes, and what it has cost the drive.

Owns the estimate of the time that is left, and the words. It prints nothing.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable

from ..analysis.wear import share_of_rating
from ..documents.profile import Machine
from ..units import format_seconds
from .quantities import decimal, loss_figure, number, percent

RECENT_STEPS = 25
KNOWN_STEPS = 3
"""Steps behind which there is an estimate."""
MOSTLY_LEARNT = 0.95
"""Of all positions: a long text whose rows are full has only the first of each that is not learnt."""
MOST_COLUMNS = 100 - len("run: ")
FIRST_STEPS = 10
"""Steps that a log has a line of each of; later ones have one now and then."""


class Pace:
    """How long the steps that are left will take: each the median of the last ones, so that a slow one does not count,
    and what has passed between steps so far (evaluations, snapshots, a move), spread over all of them. The first step
    of a process does not count: libraries are warmed in it."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`steps`: of the whole run."""
        self._steps, self._clock = steps, clock
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self.told = 0
        """Steps, in this process."""
        self._in_steps = 0.0
        self._began = 0.0

    def left(self, step: int, step_seconds: float) -> float | None:
        """Seconds that are left after step `step`, which has just ended and took `step_seconds`; None while too few
        steps are known. To be told of each."""
        now = self._clock()
        if not self.told:
            self._began = now - step_seconds
        else:
            self._recent.append(step_seconds)
        self.told += 1
        self._in_steps += step_seconds
        if self.told < KNOWN_STEPS:
            return None
        between = max(now - self._began - self._in_steps, 0.0) / self.told
        return (self._steps - step) * (statistics.median(self._recent) + between)


def live_line(
    *,
    step: int,
    steps: int,
    loss: float,
    skipped: bool,
    tokens_per_second: float,
    learnt_share: float,
    left_seconds: float | None,
    written_bytes: int,
    machine: Machine | None,
) -> str:
    """The line after a step, of at most 100 columns with the title `run`. `tokens_per_second` counts all positions of
    its rows, of which `learnt_share` are learnt; that is told where prompts and padding are many. `left_seconds`:
    None while nobody knows. `machine`: whose drives were written to, worn as far as their rating is used up; None when
    they are not those that its profile is of."""
    parts = [
        f"step {step}/{steps}",
        "skipped" if skipped else f"loss {loss_figure(loss)}",
        f"{number(tokens_per_second)} tokens/s"
        + (f", {percent(learnt_share)} learnt" if learnt_share < MOSTLY_LEARNT else ""),
    ]
    if left_seconds:
        parts.append(f"{format_seconds(left_seconds)} left")
    if written_bytes:
        share = share_of_rating(machine, written_bytes) if machine else None
        parts.append(f"{decimal(written_bytes)} to ssd")
        worn = "" if share is None else f", {percent(share)} worn"
        if len("  ".join(parts)) + len(worn) <= MOST_COLUMNS:  # else `ssdplan show RUN` has it
            parts[-1] += worn
    return "  ".join(parts)
