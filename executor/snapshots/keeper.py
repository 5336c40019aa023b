"""The keepers of a run's snapshots: when one is due, what it says, and what it cost.

Owns their times. A run by gradients has them in its store, which makes them durable, and `snapshots.py` has the
document of one; a run without gradients keeps its weights (`kept_weights.py`).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ssdplan.plans.documents.metrics import SnapshotCost
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.files import Folder

from ..metrics.metrics import MetricsFile
from ..optimizer.loss_scale import LossScale
from ..optimizer.zeroth_order_log import LogFile
from ..ranks.group import ALONE, Ranks
from ..recipe import Recipe, Watch
from ..runtime.session import Session
from .kept_weights import keep
from .snapshots import SCHEMA, Origin, Scaling, Snapshot


class Keeper(ABC):
    """Takes a run's snapshots: knows when one is due, and logs its cost."""

    def __init__(self, recipe: Recipe, metrics: MetricsFile, watch: Watch, step: int, ranks: Ranks = ALONE) -> None:
        """`step`: after how many steps the run begins; when that is not 0, there is a snapshot of them."""
        self._recipe, self._metrics, self._watch, self._ranks = recipe, metrics, watch, ranks
        self._last = time.monotonic()
        self._step = step
        self.scaling: LossScale | None = None
        """What a snapshot says of the loss scale; None where there is none."""
        self.written_bytes: Callable[[], int] = lambda: 0
        """What the whole run has written by now (`Loop.written_bytes`)."""
        self.besides_bytes = 0
        """Of it what snapshots wrote elsewhere than into the store."""

    def due(self, step: int) -> bool:
        """Whether one is to be taken after `step` steps."""
        every, minutes = self._recipe.snapshot_every, self._recipe.snapshot_minutes
        return bool(every and step % every == 0) or bool(minutes and time.monotonic() - self._last >= 60 * minutes)

    def kept(self, step: int, cost: SnapshotCost) -> None:
        """The states after `step` steps are durable by now, and this is what it took."""
        self._last, self._step = time.monotonic(), step
        cost = replace(cost, ssd_written_bytes=self.written_bytes())
        self._metrics.write_snapshot(step, cost)
        self._watch.snapshot(step, cost)

    def take(self, session: Session, step: int) -> None:
        """Make the states after `step` steps durable, unless they are; the lines of metrics.jsonl until then before
        them."""
        if self._step == step:
            return
        self._metrics.sync()
        cost = self._write(session, step)
        self._ranks.tell(b"")  # it is complete when all ranks' are durable (`agreement.py`)
        self.kept(step, cost)

    @abstractmethod
    def end(self, session: Session, step: int) -> None:
        """The run ends after `step` steps, and may go on from there."""

    @abstractmethod
    def _write(self, session: Session, step: int) -> SnapshotCost: ...


class StoreKeeper(Keeper):
    """Snapshots are generations of the run's store."""

    def __init__(
        self,
        origin: Origin,
        plan: Plan,
        recipe: Recipe,
        metrics: MetricsFile,
        watch: Watch,
        step: int,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(recipe, metrics, watch, step, ranks)
        self._origin = origin
        self._rows = plan.decision.rows

    def describe(self, step: int, made: tuple[bool, ...]) -> dict[str, Any]:
        """What a snapshot says of itself."""
        snapshot = Snapshot(
            schema=SCHEMA,
            step=step,
            samples=step * self._rows,
            origin=self._origin,
            scaling=Scaling(**asdict(self.scaling)) if self.scaling else None,
            made=made,
        )
        return snapshot.metadata()

    def end(self, session: Session, step: int) -> None:
        self.take(session, step)

    def _write(self, session: Session, step: int) -> SnapshotCost:
        assert session.store is not None
        return session.snapshot(self.describe(step, session.store.made))


class WeightsKeeper(Keeper):
    """Snapshots of a run without gradients are its weights: with them the log before them is not needed to go on."""

    def __init__(
        self, folder: Folder, source: Path, log: LogFile, recipe: Recipe, metrics: MetricsFile, watch: Watch, step: int
    ) -> None:
        """`folder`: of the run; `source`: the directory of the model that is trained."""
        super().__init__(recipe, metrics, watch, step)
        self._folder, self._source, self._log = folder, source, log

    def end(self, session: Session, step: int) -> None:
        """Nothing is to be done: the log has every step behind the last weights."""

    def _write(self, session: Session, step: int) -> SnapshotCost:
        began = time.perf_counter()
        session.flush()
        flushed, states = time.perf_counter(), session.states
        entries, tensors = states.entries(rounded=False), states.tensors(rounded=False)
        nbytes = keep(self._folder, self._source, step, self._log.checksum, entries, tensors)
        self.besides_bytes += nbytes
        return SnapshotCost(time.perf_counter() - flushed, nbytes, flushed - began)
