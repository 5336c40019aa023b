"""What the user decides about training itself, and whom a run tells what it does.

Owns these two records and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .data import HoldOut
from .metrics import StepMetrics
from .optimizer import AdamW


@dataclass(frozen=True)
class Recipe:
    """What the user decides about training itself."""

    steps: int
    optimizer: AdamW
    seed: int = 0
    pack: bool = True
    attend_across: bool = False
    """Texts that share a row attend to each other."""
    data_format: str | None = None
    """What the fields of the data mean (`formats.FORMATS`), where they would do for several formats."""
    hold_out: HoldOut | None = None
    """Samples of the training data that are evaluated instead of trained on."""
    token_cache: Path | None = None
    """The directory where tokens are kept for the next run; None: nowhere."""
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


@dataclass
class Watch:
    """What a run tells whoever watches it; every hook does nothing unless given."""

    loading: Callable[[float, str], None] = lambda fraction, what: None
    step: Callable[[StepMetrics], None] = lambda metrics: None
    evaluation: Callable[[int, float], None] = lambda step, loss: None
    note: Callable[[str], None] = field(default=lambda text: None)
