"""A session: the memory, store, states and layers of one plan, from its first step to its last.

Owns what they are made and closed in, and how the session of another plan takes the place of one that runs. What a step
is, the plan's graphs say; which batch it takes, the caller.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from ssdplan.plans.errors import SsdplanError, StallError
from ssdplan.plans.homes import device_tier
from ssdplan.plans.plan import Plan
from ssdplan.plans.schedule import Graph, Schedule, Tier
from ssdplan.plans.timeline import Timeline
from ssdplan.plans.units import format_bytes

from .checks import DTYPES, compact, schedule_of
from .data import Batch
from .device import Device
from .layers import Layers, MicroBatch
from .model import StreamedModel
from .moving import settle, stage
from .operations import Memory, Operations
from .optimizer import AdamW
from .recipe import Recipe, Watch
from .records import Records
from .runner import IN_FLIGHT, Action, OverlappedRunner, Runner, SerialRunner
from .states import Holding, States
from .store import Store
from .watchdog import Patience, Watchdog, Words
from .weights import Weights


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

    def run(self, graph: Graph) -> Timeline:
        return self.runner.run(graph, self.actions[graph.name])

    def train_step(self, step: int, batches: list[Batch], optimizer: AdamW) -> tuple[float, int, Timeline]:
        """One step (from 0): loss, valid tokens, when each op ran."""
        tokens = self.layers.begin_step(step, _on_torch(batches))
        self.operations.begin(optimizer, step + 1)
        timeline = self.run(self.schedule.steady if self.pending else self.schedule.first)
        self.pending = bool(self.schedule.flush.ops)
        return self.layers.end_step(), tokens, timeline

    def flush(self) -> None:
        """Finish the delayed updates, so that all parameters are those of the last step."""
        if self.pending:
            self.operations.finish()
            self.run(self.schedule.flush)
            self.pending = False

    def snapshot(self, step: int) -> None:
        """Make the states after `step` steps durable."""
        assert self.store is not None
        self.flush()
        self.records.snapshot(self.store, self.memory, {"step": step})

    def evaluate(self, passes: Iterator[list[Batch]]) -> float:
        """Mean loss over all valid tokens of the held-out text."""
        self.flush()
        total, count = 0.0, 0
        for number, batches in enumerate(passes):
            tokens = self.layers.begin_step(number, _on_torch(batches), training=False)
            self.run(self.schedule.evaluate)
            total += self.layers.end_step() * tokens
            count += tokens
        return total / count

    def traffic(self) -> tuple[int, int]:
        """Bytes that the store has read and written so far."""
        return (self.store.bytes_read, self.store.bytes_written) if self.store else (0, 0)

    def peak_bytes(self, tier: Tier, plan: Plan) -> int:
        """The tier's arena as far as it is used, and on the one that compute works on what compute takes besides."""
        decision, arena = plan.decision, self.memory.touched[tier]
        if tier != device_tier(decision):
            return arena
        context = decision.micro_batches * plan.model.context_bytes[decision.micro_batch_size]
        return arena + self.operations.workspace_bytes + context


class Sessions:
    """The session that is open, and how that of another plan takes its place."""

    def __init__(
        self,
        model: StreamedModel,
        device: Device,
        volumes: Sequence[Path],
        recipe: Recipe,
        watch: Watch,
        *,
        evaluated: bool,
    ) -> None:
        """`evaluated`: whether there will be evaluations."""
        self._model, self._device, self._volumes, self._recipe, self._watch = model, device, volumes, recipe, watch
        self._evaluated = evaluated
        self._stack = contextlib.ExitStack()
        self._made = 0
        self._current: Session | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)

    @property
    def current(self) -> Session:
        assert self._current is not None
        return self._current

    def open(self, plan: Plan, schedule: Schedule, records: Records, staged: Store | None = None) -> None:
        self._current = self._stack.enter_context(
            _session(
                plan,
                self._model,
                self._device,
                schedule,
                records,
                self._volumes,
                self._recipe,
                self._watch,
                staged,
                evaluated=self._evaluated,
            )
        )

    def move(self, plan: Plan, step: int) -> bool:
        """Go on with another plan of the same batch after `step` steps; losses and weights stay what they would be.
        False when that cannot be, with a note of why; then nothing has changed.

        The other plan's store is made beside the first, holds all states before the first goes, and with snapshots is
        one itself then.
        """
        session, durable = self.current, bool(self._recipe.snapshot_every)
        session.flush()
        self._made += len(self._volumes)
        try:
            schedule = schedule_of(plan, self._model, self._device)
            records = Records.of(schedule, snapshots=True)
            store = Store.create(
                self._volumes,
                records.records,
                plan.sha256(),
                _bandwidths(plan, len(self._volumes)),
                durable=durable,
                first_volume=self._made,
            )
        except SsdplanError as error:
            self._watch.note(f"the run keeps its plan, since it cannot move to the other: {error}")
            return False
        with contextlib.ExitStack() as stack:
            stack.push(partial(_leave, store, self._watch))
            source = Holding(session.schedule, session.memory, session.store)
            stage(source, schedule, records, store, self._watch.loading)
            if durable:
                store.commit({"step": step})
            self._current = None
            self._stack.close()
            stack.pop_all()
        self.open(plan, schedule, records, store)
        return True


@contextlib.contextmanager
def _session(
    plan: Plan,
    model: StreamedModel,
    device: Device,
    schedule: Schedule,
    records: Records,
    volumes: Sequence[Path],
    recipe: Recipe,
    watch: Watch,
    staged: Store | None,
    *,
    evaluated: bool,
) -> Iterator[Session]:
    """Memory, store and loaded states; all of it closed again, whatever happens. `staged`: the store, when the states
    are in it already (`moving.stage`)."""
    dtype = DTYPES[plan.decision.precision]
    with contextlib.ExitStack() as stack:
        store = staged
        if store:
            stack.push(partial(_leave, store, watch))
        elif records.records:
            durable = bool(recipe.snapshot_every)
            store = Store.create(
                volumes, records.records, plan.sha256(), _bandwidths(plan, len(volumes)), durable=durable
            )
            stack.push(partial(_leave, store, watch))
        memory = Memory(schedule, device)
        stack.callback(memory.close)
        if memory.host.note:
            watch.note(f"host memory is not page-locked: {memory.host.note}")
        if store:
            refused = store.register(memory.host.address, memory.host.nbytes)
            stack.callback(store.unregister, memory.host.address)
            watch.note(
                f"store of {format_bytes(store_bytes_of(records, recipe))}, engine {store.engine}"
                + (f" (without registered memory: {refused})" if refused else "")
            )
        states = States(model, schedule, memory, store, dtype)
        if staged:
            settle(Holding(schedule, memory, store), records, dtype, watch.loading)
        else:
            weights = Weights(model)
            states.load(weights, watch.loading)
            weights.close()
            del weights
        compact()
        if store:
            store.fill(lambda share: watch.loading(share, "writing the rest of the store once"))
        layers = Layers(model, device.torch_device, seed=recipe.seed, head_chunk_tokens=plan.model.head_chunk_tokens)
        clip = plan.decision.clip_grad_norm
        operations = Operations(memory, device, store, layers, plan.machine, dtype, clip_grad_norm=clip)
        graphs = [schedule.first, schedule.steady, schedule.flush]
        if evaluated:
            graphs.append(schedule.evaluate)
        actions = {graph.name: operations.bind(graph) for graph in graphs}
        runner: Runner = (
            SerialRunner(device.lane)
            if recipe.serial
            else OverlappedRunner(device.lane, device.lanes, in_flight=IN_FLIGHT)
        )
        session = Session(schedule, memory, store, records, layers, operations, states, runner, device, actions)
        patience = Patience.of(plan, recipe.stall_after_seconds, recipe.stall_abort_seconds)
        try:
            with Watchdog(patience, runner.standing, Words(plan, schedule, store), watch.note, runner.abandon):
                yield session
        except StallError as error:
            error.left_open = stack.pop_all()
            raise
        finally:
            runner.close()
            actions.clear()


def _leave(store: Store, watch: Watch, kind: object, error: BaseException | None, trace: object) -> None:
    """The end of a run's store: it goes when the run ended well, or has no snapshot that could be of use."""
    if error is None or not store.generation:
        store.remove()
        return
    store.close()
    places = " ".join(map(str, store.paths))
    watch.note(f"the states after step {store.metadata['step']}, the last snapshot, are in {places}")


def store_bytes_of(records: Records, recipe: Recipe) -> int:
    return Store.required_bytes(records.records, durable=bool(recipe.snapshot_every)) if records.records else 0


def _bandwidths(plan: Plan, volumes: int) -> list[float] | None:
    """The shares of the store's volumes, when they are as many as the plan was made for."""
    if volumes != len(plan.machine.volumes):
        return None
    return [1 / (1 / volume.frontier[0].read + 1 / volume.frontier[-1].write) for volume in plan.machine.volumes]


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
