"""The keeper of a run's snapshots: when one is due, what it says, and what it cost.

Owns their times. `snapshots.py` has the document of a snapshot; the store makes it durable.
"""

import time
from dataclasses import asdict
from typing import Any

from ssdplan.plans.documents.metrics import SnapshotCost
from ssdplan.plans.documents.plan import Plan

from ..metrics.metrics import MetricsFile
from ..optimizer.loss_scale import LossScale
from ..recipe import Recipe, Watch
from ..runtime.session import Session
from .snapshots import SCHEMA, Origin, Scaling, Snapshot


class Keeper:
    """Takes a run's snapshots: knows when one is due and what it says, and logs its cost."""

    def __init__(
        self, origin: Origin, plan: Plan, recipe: Recipe, metrics: MetricsFile, watch: Watch, step: int
    ) -> None:
        """`step`: after how many steps the run begins; when that is not 0, there is a snapshot of them."""
        self._origin, self._recipe, self._metrics, self._watch = origin, recipe, metrics, watch
        self._rows = plan.decision.micro_batches * plan.decision.micro_batch_size
        self._last = time.monotonic()
        self._step = step
        self.scaling: LossScale | None = None
        """What a snapshot says of the loss scale; None in precisions that have none."""

    def due(self, step: int) -> bool:
        """Whether one is to be taken after `step` steps."""
        every, minutes = self._recipe.snapshot_every, self._recipe.snapshot_minutes
        return bool(every and step % every == 0) or bool(minutes and time.monotonic() - self._last >= 60 * minutes)

    def describe(self, step: int, made: tuple[bool, ...]) -> dict[str, Any]:
        snapshot = Snapshot(
            schema=SCHEMA,
            step=step,
            samples=step * self._rows,
            origin=self._origin,
            scaling=Scaling(**asdict(self.scaling)) if self.scaling else None,
            made=made,
        )
        return snapshot.metadata()

    def kept(self, step: int, cost: SnapshotCost) -> None:
        """The states after `step` steps are durable by now, and this is what it took."""
        self._last, self._step = time.monotonic(), step
        self._metrics.write_snapshot(step, cost)
        self._watch.snapshot(step, cost)

    def take(self, session: Session, step: int) -> None:
        """Make the states after `step` steps durable, unless they are; the lines of metrics.jsonl until then before
        them."""
        if self._step == step:
            return
        assert session.store is not None
        self._metrics.sync()
        self.kept(step, session.snapshot(self.describe(step, session.store.made)))
