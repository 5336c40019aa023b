"""Learning rates: the rate of each update, by the schedules that transformers knows.

Owns their formulas. The rate is a function of how many updates were made before, so a run that goes on after a stop
needs to have kept nothing of it; for how many updates a schedule is made is a part of it.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ssdplan.plans.errors import UsageError

Shape = Literal["constant", "linear", "cosine", "wsd"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
DECAY_SHARE = 0.1
"""Of all updates, those that decay by wsd where nobody says how many; MiniCPM, whose schedule it is, takes a tenth."""


@dataclass(frozen=True)
class LearningRate:
    """How the rate goes from its peak; `transformers.get_scheduler` has the same by other names.

    constant: at the peak (constant_with_warmup). linear: straight down to `min_lr` at the last update (linear, and with
    a `min_lr` polynomial of power 1). cosine: half a cosine down to it (cosine, cosine_with_min_lr). wsd: at the peak,
    then half a cosine down during the last `decay_steps` (warmup_stable_decay). Each rises straight to the peak during
    the first `warmup_steps`: from zero, or in wsd from `min_lr`.
    """

    shape: Shape = "constant"
    steps: int = 0
    """Updates in all; the constant needs to know no number."""
    warmup_steps: int = 0
    decay_steps: int = 0
    """Of wsd alone."""
    min_lr: float = 0.0

    def require_sense(self, peak: float) -> None:
        """Raise UsageError where a part of this would say nothing, or cannot be."""
        assert self.steps or self.shape == "constant", "a schedule that falls has an end"
        if self.shape == "constant" and self.min_lr:
            raise UsageError(
                f"--min-lr {self.min_lr:g}: a constant learning rate never falls; choose another --lr-schedule"
            )
        if self.min_lr and self.min_lr >= peak:
            raise UsageError(f"--min-lr {self.min_lr:g}: must be less than --lr {peak:g}")
        if self.shape != "wsd" and self.decay_steps:
            raise UsageError(f"--decay-steps {self.decay_steps}: only --lr-schedule wsd has a decay of its own length")
        if self.shape in ("linear", "cosine") and self.warmup_steps > self.steps:
            raise UsageError(
                f"--warmup-steps {self.warmup_steps}: the run ends after {self.steps}, so the learning rate would "
                "never be at its peak nor fall; take fewer, or --lr-schedule constant for a run that is to go on"
            )
        if self.shape == "wsd" and self.warmup_steps + self.decay_steps > self.steps:
            raise UsageError(
                f"--lr-schedule wsd: {self.warmup_steps} steps of warm-up and {self.decay_steps} of decay are more "
                f"than the {self.steps} steps of the run"
            )

    def at(self, updates: int, *, peak: float) -> float:
        """The rate of the update after `updates` others; beyond the last of the schedule, what it ended with."""
        return peak * self._factor(updates, self.min_lr / peak)

    def _factor(self, updates: int, least: float) -> float:
        if updates < self.warmup_steps:
            low = least if self.shape == "wsd" else 0.0
            return updates / self.warmup_steps * (1.0 - low) + low
        match self.shape:
            case "constant":
                return 1.0
            case "linear":
                return self._falling(1.0 - self._progress(updates), least)
            case "cosine":
                return self._falling(_half_cosine(self._progress(updates)), least)
            case "wsd":
                begins = self.steps - self.decay_steps
                progress = max(updates - begins, 0) / max(self.decay_steps, 1)
                return self._falling(_half_cosine(min(progress, 1.0)), least)

    def _progress(self, updates: int) -> float:
        """The share that is done of what follows the warm-up."""
        return min((updates - self.warmup_steps) / max(self.steps - self.warmup_steps, 1), 1.0)

    def _falling(self, height: float, least: float) -> float:
        """`height` from 1 at the peak to 0 at the end."""
        return height * (1.0 - least) + least


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def steps_of(given: float, steps: int) -> int:
    """A number of steps, or below 1 the share of all `steps`, rounded up, as transformers' `warmup_steps`."""
    return int(given) if given >= 1 else math.ceil(steps * given)
