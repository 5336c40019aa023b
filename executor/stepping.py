"""Stepping: what one step of a run does with its losses, by gradients or without.

Owns the two kinds of steps in a run's terms. By gradients: the loss scale of fp16, and a loss that is not finite. By
zeroth-order estimates (MeZO): the updates that follow from the losses, and the log of them, which with the first
weights is the state of the run. The graphs say what is computed; the loop, what happens between two steps.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from ssdplan.plans.documents.state_layout import Precision
from ssdplan.plans.errors import NumericalError
from ssdplan.plans.graph.timeline import Timeline

from .data.text_data import Batch
from .optimizer.adamw import AdamW
from .optimizer.loss_scale import LossScale
from .optimizer.zeroth_order import MeZO
from .optimizer.zeroth_order_log import LogFile
from .recipe import Recipe
from .runtime.session import Session


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step found."""

    loss: float
    tokens: int
    """That are learnt."""
    timeline: Timeline
    grad_norm: float
    lr: float
    loss_scale: float = 1.0
    skipped: bool = False
    """Nothing was updated, for something was not finite."""


class Stepping(Protocol):
    """How a run's steps are made."""

    @property
    def scaling(self) -> LossScale | None:
        """Of the next step, in fp16 by gradients."""

    @property
    def resumable(self) -> bool:
        """Whether a run that is stopped can go on without a snapshot of its states."""

    def step(self, session: Session, step: int, batches: list[Batch]) -> Stepped:
        """One step (from 0). Raises NumericalError for what is not finite, unless the step can be skipped."""

    def sync(self) -> None:
        """Make durable what the steps until now have written besides states."""


class FirstOrder:
    """Steps by gradients."""

    resumable = False

    def __init__(self, recipe: Recipe, scaling: LossScale | None, precision: Precision) -> None:
        self._recipe, self.scaling, self._precision = recipe, scaling, precision

    def step(self, session: Session, step: int, batches: list[Batch]) -> Stepped:
        scaling = self.scaling
        optimizer = self._recipe.optimizer_at(step - scaling.skipped if scaling else step)
        assert isinstance(optimizer, AdamW)
        loss, tokens, timeline = session.train_step(step, batches, optimizer, scaling)
        overflow = session.operations.overflow
        if not (overflow or math.isfinite(loss)):
            raise NumericalError(f"step {step + 1}: the loss is {loss}; lower --lr{_more_exactly(self._precision)}")
        if scaling:
            self.scaling = scaling.after(step + 1, overflow)
        return Stepped(
            loss=loss,
            tokens=tokens,
            timeline=timeline,
            grad_norm=session.operations.gradient_norm(),
            lr=optimizer.lr,
            loss_scale=scaling.scale if scaling else 1.0,
            skipped=bool(overflow),
        )

    def sync(self) -> None:
        """Nothing is written besides states."""


class ZerothOrder:
    """Steps without gradients, each of which is in the log before its updates are pending."""

    resumable = True
    scaling = None

    def __init__(self, recipe: Recipe, log: LogFile, precision: Precision) -> None:
        """In fp16 a step whose losses are not finite is logged as one that moves nothing, as by gradients; else it ends
        the run."""
        self._recipe, self._log, self._precision = recipe, log, precision

    def step(self, session: Session, step: int, batches: list[Batch]) -> Stepped:
        optimizer = self._recipe.optimizer_at(step)
        assert isinstance(optimizer, MeZO)
        losses, tokens, timeline = session.zeroth_order_step(step, batches, optimizer)
        every = [loss for both in losses for loss in both]
        finite = all(map(math.isfinite, every))
        if not finite and self._precision != "fp16":
            number = next(number for number, both in enumerate(losses) if not all(map(math.isfinite, both)))
            plus, minus = losses[number]
            raise NumericalError(
                f"step {step + 1}: the losses along direction {number} are {plus} and {minus}; lower --lr or --eps"
                f"{_more_exactly(self._precision)}"
            )
        moves = optimizer.moves(step, losses) if finite else optimizer.nothing(step, len(losses))
        self._log.append(moves)
        self._log.sync()
        session.move(optimizer, moves)
        projected = [optimizer.projected(*both) for both in losses]
        return Stepped(
            loss=sum(every) / len(every),
            tokens=tokens,
            timeline=timeline,
            grad_norm=math.sqrt(sum(each * each for each in projected) / len(projected)),
            lr=optimizer.lr,
            skipped=not finite,
        )

    def sync(self) -> None:
        self._log.sync()


def _more_exactly(precision: Precision) -> str:
    return "" if precision == "fp32" else ", or train with --precision fp32"
