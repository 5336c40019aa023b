"""A session: the memory, store, states and layers of one plan, from its first step to its last.

Owns a step, a flush, a snapshot and an evaluation in terms of the plan's graphs. `executor/sessions.py` opens and
closes it.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.graph.ops import Graph, Schedule, Tier
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.homes import device_tier

from ..data.text_data import Batch
from ..device.interface import Action, Device
from ..memory.arenas import Memory
from ..memory.states import States
from ..memory.store_records import Records
from ..metrics.metrics import SnapshotCost
from ..model.layers import Layers, MicroBatch
from ..optimizer.adamw import AdamW
from ..optimizer.loss_scale import LossScale
from ..optimizer.zeroth_order import MeZO, Move, Pass
from ..ranks.ended import Ended, sums_of_all
from ..ranks.group import ALONE, Ranks
from ..store import Store
from .operations import Operations
from .pace import Pacer
from .runner import Runner


@dataclass
class Session:
    """What lives from the first step to the last."""

    schedule: Schedule
    memory: Memory
    store: Store | None
    records: Records
    layers: Layers
    operations: Operations
    states: States
    runner: Runner
    device: Device
    actions: dict[str, list[Action]]
    pending: bool = False
    pending_here: tuple[Move, ...] = ()
    """Updates of a zeroth-order plan that are pending: of parameters that are updated where they are."""
    pending_away: tuple[Move, ...] = ()
    """Of parameters that are updated elsewhere: all since they were last written where they live."""
    optimizer: MeZO | None = None
    """Whose they are."""
    written_every: int = 1
    """Steps of a zeroth-order plan from one that writes parameters to the next."""
    threads: int = 1
    """That update parameters."""
    pacer: Pacer | None = None
    """Of a run that emulates another machine."""
    ranks: Ranks = ALONE
    """That train together."""

    def run(self, graph: Graph) -> Timeline:
        return self.runner.run(graph, self.actions[graph.name])

    def train_step(
        self, step: int, batches: list[Batch], optimizer: AdamW, scaling: LossScale | None = None
    ) -> tuple[float, int, Timeline]:
        """One step (from 0): loss, valid tokens, when each op ran. With `scaling` it is skipped if it overflows
        (`operations.overflow`): all its updates are delayed, and none is pending then."""
        scale, skipped = (scaling.scale, scaling.skipped) if scaling else (None, 0)
        tokens = self._begin_layers(step, batches, loss_scale=scale or 1.0)
        self.operations.begin(optimizer, step + 1 - skipped, scale)
        timeline = self.run(self.schedule.steady if self.pending else self.schedule.first)
        loss = self._end_layers()
        if self.ranks.size > 1:  # all have ended the step, and a moment later each knows
            timeline = replace(timeline, met=time.perf_counter() - timeline.began)
        self.pending = bool(self.schedule.flush.ops) and not self.operations.overflow
        return loss, tokens, timeline

    def _begin_layers(self, step: int, batches: list[Batch], *, training: bool = True, loss_scale: float = 1.0) -> int:
        """Hand a step's batches, of which this rank takes its own, to the layers. Returns the valid tokens of all."""
        every = _on_torch(batches)
        each = len(every) // self.ranks.size
        tokens = sum(batch.label_tokens() for batch in every) if self.ranks.size > 1 else None
        with self.device.lane("compute"):  # what it makes is there when compute begins
            own = self.layers.begin_step(
                step,
                every[self.ranks.rank * each :][:each],
                training=training,
                normaliser=tokens,
                loss_scale=loss_scale,
                first=self.ranks.rank * each,
            )
        return own if tokens is None else tokens

    def _end_layers(self) -> float:
        """The loss of the step that has ended, of all ranks; what they found of its gradients is agreed upon."""
        loss = self.layers.end_step()
        if self.ranks.size == 1:
            return loss
        told = self.ranks.tell(self.operations.ended(loss).words())
        ended = Ended.of_all([Ended.read(words) for words in told])
        self.operations.agree(ended)
        return ended.loss

    def zeroth_order_step(
        self, step: int, batches: list[Batch], optimizer: MeZO
    ) -> tuple[list[tuple[float, float]], int, Timeline]:
        """One step (from 0) of a zeroth-order plan: the losses at plus and minus eps along each direction, valid
        tokens, when each op ran. What follows from the losses, `move` is told."""
        tokens = self._begin_layers(step, batches)
        self._begin_passes(optimizer, step)
        writes = (step + 1) % self.written_every == 0
        timeline = self.run(self.schedule.steady if writes else self.schedule.unwritten)
        along, parts = zip(*self.layers.end_zeroth_order_step(), strict=True)
        found = dict(zip(along, sums_of_all(self.ranks, parts), strict=True))
        losses = [(found[number, "plus"], found[number, "minus"]) for number in range(len(found) // 2)]
        if writes:
            self.pending_away = ()
        self.pending_here = ()
        return losses, tokens, timeline

    def _begin_passes(self, optimizer: MeZO, step: int) -> None:
        """What passes do from here on: all that is pending, and the copies of a step."""
        passes = Pass(optimizer, step, self.pending_here, self.threads, lagging=self.pending_away)
        self.operations.begin_zeroth_order(passes)

    def move(self, optimizer: MeZO, moves: tuple[Move, ...]) -> None:
        """From here on these updates are pending too, those of a later step after those of an earlier one."""
        self.optimizer = optimizer
        self.pending_here += moves
        self.pending_away += moves

    def flush(self) -> None:
        """Finish the delayed updates, so that all parameters are those of the last step."""
        if self.pending_away or self.pending_here:
            assert self.optimizer is not None
            self._begin_passes(self.optimizer, 0)
            self.run(self.schedule.flush)
            self.pending_here = self.pending_away = ()
        if self.pending:
            self.operations.finish()
            self.run(self.schedule.flush)
            self.pending = False

    def snapshot(self, metadata: dict[str, Any]) -> SnapshotCost:
        """Make the states as they are durable, delayed updates included, with what `metadata` says of them."""
        assert self.store is not None
        began = time.perf_counter()
        self.flush()
        flushed, before = time.perf_counter(), self.store.bytes_written
        self.records.snapshot(self.store, self.memory, metadata)
        return SnapshotCost(time.perf_counter() - flushed, self.store.bytes_written - before, flushed - began)

    def evaluate(self, passes: Iterator[list[Batch]]) -> float:
        """Mean loss over all valid tokens of the held-out text."""
        self.flush()
        total, count = 0.0, 0
        for number, batches in enumerate(passes):
            tokens = self._begin_layers(number, batches, training=False)
            self.run(self.schedule.evaluate)
            total += self._end_layers() * tokens
            count += tokens
        return total / count

    def traffic(self) -> tuple[int, int]:
        """Bytes that the store has read and written so far."""
        return (self.store.bytes_read, self.store.bytes_written) if self.store else (0, 0)

    def peak_bytes(self, tier: Tier, plan: Plan) -> int:
        """The tier's arena as far as it is used, and on the one that compute works on what compute takes besides; of a
        GPU what its allocator held at most."""
        if tier == "device" and (taken := self.device.taken()):
            return taken.reserved
        decision, arena = plan.decision, self.memory.touched[tier]
        if tier != device_tier(decision):
            return arena
        context = decision.micro_batches * plan.model.context_bytes[decision.micro_batch_size]
        return arena + self.operations.workspace_bytes + context


def _on_torch(batches: list[Batch]) -> list[MicroBatch]:
    return [
        MicroBatch(
            torch.from_numpy(batch.input_ids),
            torch.from_numpy(batch.labels),
            None if batch.attention_mask is None else torch.from_numpy(batch.attention_mask),
            None if batch.position_ids is None else torch.from_numpy(batch.position_ids),
        )
        for batch in batches
    ]
