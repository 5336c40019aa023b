"""The loss scale: the factor by which fp16 multiplies a step's loss, so that small gradients do not become zero.

Owns how the scale follows from which steps overflowed, as torch.amp.GradScaler has it. A step that overflows is
skipped: no state, moment or count of the optimizer changes. The record is all that a run needs to go on.
"""

import math
from dataclasses import dataclass, replace

from ssdplan.plans.errors import NumericalError, UsageError

GROWTH, BACKOFF = 2.0, 0.5
LEAST = 1.0
"""A step that overflows at a scale no larger than this overflows by itself: the run ends (as with DeepSpeed and
Megatron)."""
_MOST = 2.0**127
"""GradScaler keeps its scale in fp32, and does not let it become infinite."""


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step, and what was before it. All fields are plain numbers, to be kept in a snapshot."""

    scale: float = 65536.0
    """A power of two, so that scaling rounds nothing but what is too small for fp16."""
    growth_interval: int = 2000
    """So many steps in a row without overflow double the scale."""
    good_steps: int = 0
    """Steps without overflow since the scale last changed."""
    skipped: int = 0
    """Steps of the run that overflowed so far."""

    def after(self, step: int, overflow: str) -> "LossScale":
        """The record after step `step`, in which something overflowed, in words, or nothing.

        Raises NumericalError where no scale would have helped."""
        if overflow:
            if self.scale <= LEAST:
                raise NumericalError(
                    f"step {step}: {overflow} is not finite in fp16, even with a loss scale of {self.scale:g}; lower "
                    "--lr, or train with --precision bf16"
                )
            return replace(self, scale=self.scale * BACKOFF, good_steps=0, skipped=self.skipped + 1)
        good = self.good_steps + 1
        if good < self.growth_interval:
            return replace(self, good_steps=good)
        return replace(self, scale=min(self.scale * GROWTH, _MOST), good_steps=0)

    def require_sense(self) -> None:
        """Raise UsageError for a scale that would round what it scales."""
        if self.scale < LEAST or self.scale > _MOST or math.frexp(self.scale)[0] != 0.5:
            raise UsageError(f"--loss-scale {self.scale:g}: must be a power of two, and at least {LEAST:g}")
