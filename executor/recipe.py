"""The recipe: what the user decides about training itself; and the listeners that a run tells what it does.

Owns these two records, and which of these decisions change numbers.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Self

from ssdplan.plans.documents.metrics import SnapshotCost, StepMetrics

from .data.epochs import Epochs
from .data.text_data import HoldOut
from .optimizer.adamw import AdamW
from .optimizer.learning_rate import LearningRate, steps_of
from .optimizer.loss_scale import LossScale
from .optimizer.zeroth_order import MeZO
from .store import MOST_KEPT

Scalar = bool | int | float | str | None

_WITHOUT_EFFECT = frozenset(
    {
        "steps",
        "epochs",
        "eval_every",
        "snapshot_every",
        "snapshot_minutes",
        "keep",
        "serial",
        "stall_after_seconds",
        "stall_abort_seconds",
        "replan",
        "token_cache",
    }
)
"""Fields of a recipe that change no bit of what a step does. A field that is not here does."""


@dataclass(frozen=True)
class Recipe:
    """What the user decides about training itself."""

    steps: int
    """0 as long as `epochs` say how many, which the data decide."""
    optimizer: AdamW | MeZO
    """Its `lr` is the peak of `learning_rate`."""
    learning_rate: LearningRate = field(default_factory=LearningRate)
    loss_scale: LossScale = field(default_factory=LossScale)
    """Of the first step of a run in fp16; the other precisions have none."""
    seed: int = 0
    pack: bool = True
    attend_across: bool = False
    """Texts that share a row attend to each other."""
    data_format: str | None = None
    """What the fields of the data mean (`formats.FORMATS`), where they would do for several formats."""
    append_eos: bool = False
    """Every conversation learns an end token, whatever the chat template writes."""
    hold_out: HoldOut | None = None
    """Samples of the training data that are evaluated instead of trained on."""
    token_cache: Path | None = None
    """The directory where tokens are kept for the next run; None: nowhere."""
    eval_every: int = 0
    snapshot_every: int = 0
    """Steps between two snapshots: durable generations of the store, from which the run can go on; without gradients
    weights, from which on the log is needed."""
    snapshot_minutes: float | None = None
    """Minutes after which one is taken at the next step's end. With neither, nothing is kept beyond a crash."""
    keep: int = MOST_KEPT
    """How many snapshots the store holds: 2, or 1 in two thirds of the space for optimizer states."""
    serial: bool = False
    stall_after_seconds: float | None = None
    """When a step of which nothing ends is told of; None: by the plan (`watchdog.Patience`)."""
    stall_abort_seconds: float | None = None
    """When such a step ends the run; None: never. Not with `serial`, whose ops cannot be left."""
    replan: bool = False
    """Move to a better plan when the first steps show a machine that is not as the plan's profile says."""
    epochs: Epochs | None = None
    """In the place of `steps`."""

    def lasting(self, rows: int, rows_a_step: int) -> Self:
        """The same for data of so many rows, with its number of steps."""
        if self.epochs is None:
            return self
        steps = self.epochs.steps(rows, rows_a_step)
        rate = replace(
            self.learning_rate,
            steps=0 if self.learning_rate.shape == "constant" else steps,
            warmup_steps=steps_of(self.epochs.warmup, steps),
            decay_steps=steps_of(self.epochs.decay, steps),
        )
        return replace(self, steps=steps, learning_rate=rate, epochs=None)

    def require_sense(self) -> None:
        """Raise UsageError where a part of it would say nothing, or cannot be; with `epochs`, once these are steps."""
        self.learning_rate.require_sense(self.optimizer.lr)
        self.loss_scale.require_sense()

    def optimizer_at(self, updates: int) -> AdamW | MeZO:
        """The optimizer for the update after `updates` others: with the rate of that one."""
        return replace(self.optimizer, lr=self.learning_rate.at(updates, peak=self.optimizer.lr))

    @property
    def snapshots(self) -> bool:
        """Whether the run takes any; it then also takes one when it ends or is asked to stop."""
        return bool(self.snapshot_every or self.snapshot_minutes)

    @property
    def durable_store(self) -> bool:
        """Whether the store holds them: without gradients the log is the state, and a snapshot is the weights."""
        return self.snapshots and isinstance(self.optimizer, AdamW)

    def deciding(self) -> dict[str, Scalar]:
        """All that decides what a step does, by name: the same values give the same losses."""
        return dict(_flat(self, leave_out=_WITHOUT_EFFECT))


@dataclass
class Watch:
    """What a run tells whoever watches it; every hook does nothing unless given."""

    loading: Callable[[float, str], None] = lambda fraction, what: None
    length: Callable[[int], None] = lambda steps: None
    """How many steps the whole run has, once its data were read."""
    step: Callable[[StepMetrics], bool | None] = lambda metrics: None
    """True: the run ends with this step as if it had been the last, with its evaluation, snapshot, report and model."""
    evaluation: Callable[[int, float], None] = lambda step, loss: None
    snapshot: Callable[[int, SnapshotCost], None] = lambda step, cost: None
    note: Callable[[str], None] = field(default=lambda text: None)


def _flat(record: Any, prefix: str = "", leave_out: Collection[str] = ()) -> Iterator[tuple[str, Scalar]]:
    """The fields of a dataclass, those of dataclasses in it under dotted names."""
    for entry in fields(record):
        if entry.name in leave_out:
            continue
        value = getattr(record, entry.name)
        if is_dataclass(value):
            yield from _flat(value, f"{prefix}{entry.name}.")
        elif isinstance(value, tuple):
            yield f"{prefix}{entry.name}", " ".join(map(str, value))
        else:
            assert value is None or isinstance(value, (bool, int, float, str)), f"{prefix}{entry.name} = {value!r}"
            yield f"{prefix}{entry.name}", value
