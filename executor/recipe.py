"""What the user decides about training itself, and whom a run tells what it does.

Owns these two records and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from .learning_rate import LearningRate
from .metrics import StepMetrics
from .optimizer import AdamW
from .scaling import LossScale


@dataclass(frozen=True)
class Recipe:
    """What the user decides about training itself."""

    steps: int
    optimizer: AdamW
    """Its `lr` is the peak of `learning_rate`."""
    learning_rate: LearningRate = field(default_factory=LearningRate)
    loss_scale: LossScale = field(default_factory=LossScale)
    """Of the first step of a run in fp16; the other precisions have none."""
    seed: int = 0
    pack: bool = True
    eval_every: int = 0
    snapshot_every: int = 0
    """Steps between two durable generations of the store; 0 keeps nothing beyond a crash."""
    serial: bool = False
    stall_after_seconds: float | None = None
    """When a step of which nothing ends is told of; None: by the plan (`watchdog.Patience`)."""
    stall_abort_seconds: float | None = None
    """When such a step ends the run; None: never. Not with `serial`, whose ops cannot be left."""
    replan: bool = False
    """Move to a better plan when the first steps show a machine that is not as the plan's profile says."""

    def require_sense(self) -> None:
        """Raise UsageError where a part of it would say nothing, or cannot be."""
        self.learning_rate.require_sense(self.optimizer.lr)
        self.loss_scale.require_sense()

    def optimizer_at(self, updates: int) -> AdamW:
        """The optimizer for the update after `updates` others: with the rate of that one."""
        return replace(self.optimizer, lr=self.learning_rate.at(updates, peak=self.optimizer.lr))


@dataclass
class Watch:
    """What a run tells whoever watches it; every hook does nothing unless given."""

    loading: Callable[[float, str], None] = lambda fraction, what: None
    step: Callable[[StepMetrics], None] = lambda metrics: None
    evaluation: Callable[[int, float], None] = lambda step, loss: None
    note: Callable[[str], None] = field(default=lambda text: None)
