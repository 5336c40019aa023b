"""Sessions: opens and closes a plan's session, and replaces it by that of another plan.

Owns the order in which a session's memory, store, states and layers are made and closed. What a step is,
`runtime/session.py` says; which batch it takes, the caller.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ssdplan.plans.analysis.drift import Expectation
from ssdplan.plans.documents.metrics import METRICS
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import SsdplanError, StallError
from ssdplan.plans.graph.ops import Graph, Schedule
from ssdplan.plans.graph.timeline import lanes_of
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import format_bytes

from .checks import compact, schedule_of
from .device.interface import Device
from .device.tensors import DTYPES
from .memory.arenas import Memory
from .memory.migration import Snapshotted, Source, carry_over, settle
from .memory.states import Holding, States
from .memory.store_records import Records
from .model.layers import Layers
from .model.model import StreamedModel
from .model.saved import Keeping
from .model.weights import Weights
from .ranks.group import ALONE, Ranks
from .recipe import Recipe, Watch
from .runtime.operations import Operations
from .runtime.pace import Pacer
from .runtime.runner import IN_FLIGHT, OverlappedRunner, Runner, SerialRunner
from .runtime.session import Session
from .runtime.watchdog import Patience, Watchdog, Words
from .snapshots.kept_weights import KeptWeights
from .snapshots.resume import Kept
from .snapshots.run_directory import RunDirectory
from .snapshots.stores import free_number, new_store, store_beside
from .store import Store
from .zeroth_order import table_rows

Describe = Callable[[tuple[bool, ...]], dict[str, Any]]
"""`Store.made` -> the metadata of a snapshot in that store."""


class Sessions:
    """The session that is open, and how that of another plan takes its place."""

    def __init__(
        self,
        model: StreamedModel,
        device: Device,
        directory: RunDirectory,
        volumes: Sequence[Path],
        recipe: Recipe,
        watch: Watch,
        *,
        evaluated: bool,
        expectation: Callable[[Graph], Expectation] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`volumes`: where stores are to lie. `evaluated`: whether there will be evaluations. `expectation`: what the
        operations of a graph are to last, in a run that emulates another machine."""
        self._model, self._device, self._directory, self._volumes = model, device, directory, volumes
        self._recipe, self._watch, self._evaluated = recipe, watch, evaluated
        self._expectation, self._ranks = expectation, ranks
        self._stack = contextlib.ExitStack()
        self._current: Session | None = None
        self._left: Store | None = None
        """The store that the run moves away from."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)

    @property
    def current(self) -> Session:
        assert self._current is not None
        return self._current

    def begin(
        self,
        plan: Plan,
        schedule: Schedule,
        records: Records,
        *,
        again: bool = False,
        weights: KeptWeights | None = None,
    ) -> None:
        """The first session of a run, its states from the model's files, or from `weights` that it kept. `again`: a
        crash may have left files."""
        store = None
        if records.records or self._recipe.durable_store:  # a rank may own nothing of a small model
            store = new_store(
                self._directory,
                self._volumes,
                plan,
                records,
                durable=self._recipe.durable_store,
                keep=self._recipe.keep,
                first_volume=free_number(self._volumes) if again else 0,
            )
        self._open(plan, schedule, records, store, held=False, weights=weights)

    def resume(self, kept: Kept, plan: Plan, schedule: Schedule, records: Records) -> None:
        """The first session of a run that goes on from its last snapshot: in the same store, unless the plan is
        another, or it is to lie elsewhere, or to keep another number of snapshots. Then the states move to a store of
        its own first, and the other goes once they are durable there.

        Raises StoreError, DiskFullError, IoFailure; until the states are durable elsewhere the snapshot stays.
        """
        assert kept.snapshot is not None
        before = build_schedule(kept.plan.model, kept.plan.decision, self._ranks.rank)
        its = Records.of(before, snapshots=True)
        with contextlib.ExitStack() as stack:
            store = Store.open(kept.volumes, its.records)
            stack.callback(store.close)
            store.own(kept.snapshot.made)
            same = plan.sha256() == kept.plan.sha256() and store.keep == self._recipe.keep
            if same and kept.lies_in(self._volumes):
                self._directory.moved(plan)
                self._directory.change(volumes=self._volumes, left=kept.unseen)
                stack.pop_all()
            else:
                source, snapshot = Snapshotted(before, its.places(before), store), kept.snapshot
                other = self._beside(plan, records)
                self._stage(source, schedule, records, other, lambda made: snapshot.with_files(made).metadata())
                with self._leaving(other):
                    self._directory.change(volumes=self._volumes, left=(*kept.unseen, *store.paths))
                    stack.pop_all()
                    store.remove()
                    self._directory.moved(plan)
                    self._directory.change(left=kept.unseen)
                store = other
        self._open(plan, schedule, records, store, held=True)

    def move(self, plan: Plan, describe: Describe | None) -> str | None:
        """Go on with another plan of the same batch; losses and weights stay what they would be. Returns the name that
        the plan so far has in the run's directory from now on. None when that cannot be, with a note of why; then
        nothing has changed.

        The other plan's store is made beside the first and holds all states before the first goes. With snapshots that
        is one itself: `describe` says what it says.
        """
        session = self.current
        session.flush()
        try:
            schedule = schedule_of(plan, self._model, self._device)
            records = Records.of(schedule, snapshots=True)
            store = self._beside(plan, records)
        except SsdplanError as error:
            self._watch.note(f"the run keeps its plan, since it cannot move to the other: {error}")
            return None
        self._stage(Holding(session.schedule, session.memory, session.store), schedule, records, store, describe)
        with self._leaving(store):
            self._current, self._left = None, session.store
            del session
            self._stack.close()
            earlier = self._directory.moved(plan)
        self._open(plan, schedule, records, store, held=True)
        return earlier

    def _beside(self, plan: Plan, records: Records) -> Store:
        durable, keep = self._recipe.durable_store, self._recipe.keep
        return store_beside(self._directory, self._volumes, plan, records, durable=durable, keep=keep)

    def _stage(
        self, source: Source, schedule: Schedule, records: Records, store: Store, describe: Describe | None
    ) -> None:
        """Bring the states of `source` to the store, durably if a snapshot is described; it goes when that fails."""
        try:
            carry_over([source], schedule, records, store, self._watch.loading)
            if describe:
                store.commit(describe(store.made))
        except BaseException:
            store.remove()
            self._directory.forget_ahead()
            raise

    @contextlib.contextmanager
    def _leaving(self, store: Store) -> Iterator[None]:
        """Should what is within fail, `store` is left as a run leaves its store."""
        try:
            yield
        except BaseException as error:
            self._leave(store, error)
            raise

    def _open(
        self,
        plan: Plan,
        schedule: Schedule,
        records: Records,
        store: Store | None,
        *,
        held: bool,
        weights: KeptWeights | None = None,
    ) -> None:
        """`held`: the states are in the store; else they are in the model's files, or in kept `weights`."""
        if store is not None:
            self._stack.push(lambda kind, error, at: self._leave(store, error))
        self._current = self._stack.enter_context(
            _session(
                plan,
                self._model,
                self._device,
                schedule,
                records,
                store,
                self._recipe,
                self._watch,
                held=held,
                kept=weights,
                evaluated=self._evaluated,
                expectation=self._expectation,
                ranks=self._ranks,
            )
        )

    def _leave(self, store: Store, error: BaseException | None) -> None:
        """The end of a store: it goes when the run has left it, or has no snapshot in it that could be of use."""
        if isinstance(error, StallError):
            error.left_open = (error.left_open, store)
        elif store is self._left or not store.generation:
            store.remove()
        else:
            store.close()
        if store is self._left or not self._recipe.durable_store:
            return
        again = f"ssdplan run --resume {self._directory.path}"
        if not store.generation:
            if self._directory.folder.has_file(METRICS):  # else nothing stays of the run
                self._watch.note(f"no snapshot was taken yet; {again} begins again")
            return
        step, places = store.metadata["step"], " ".join(map(str, store.paths))
        kept = f"the states after step {step}, the last snapshot, are in {places}"
        if self._ranks.size > 1:
            kept += f" (those of rank {self._ranks.rank})"
        if error is not None:
            self._watch.note(f"{kept}; go on with {again}")
            return
        self._watch.note(
            f"{kept}, {format_bytes(store.nbytes)}: {again} --steps N trains on from them, N above {step}, and ssdplan "
            f"volume drop {self._directory.path} --yes removes them"
        )


@contextlib.contextmanager
def _session(
    plan: Plan,
    model: StreamedModel,
    device: Device,
    schedule: Schedule,
    records: Records,
    store: Store | None,
    recipe: Recipe,
    watch: Watch,
    *,
    held: bool,
    kept: KeptWeights | None,
    evaluated: bool,
    expectation: Callable[[Graph], Expectation] | None = None,
    ranks: Ranks = ALONE,
) -> Iterator[Session]:
    """Memory and loaded states; all of it closed again, whatever happens, but the store, which is the caller's. `held`:
    the states are in the store, but for what is frozen, which the model's own files have. `kept`: where they are
    instead of in the model's files."""
    sharing = ranks if plan.decision.shares > 1 else ALONE
    dtypes = [DTYPES[plan.decision.parameters_of(state).name] for state in model.states]
    with contextlib.ExitStack() as stack:
        device.keep_to(plan.decision.device_budget_bytes)
        memory = Memory(schedule, device)
        stack.callback(memory.close)
        if memory.host.note:
            watch.note(f"host memory is not page-locked: {memory.host.note}")
        if store:
            refused = store.register(memory.host.address, memory.host.nbytes)
            stack.callback(store.unregister, memory.host.address)
            if records.records:  # a rank that owns nothing has but the pages of a store
                taken = store.nbytes if all(store.made) else store_bytes_of(records, recipe)
                watch.note(
                    f"store of {format_bytes(taken)}, engine {store.engine}"
                    + (f" (without registered memory: {refused})" if refused else "")
                )
        states = States(model, schedule, memory, store, dtypes, sharing)
        if held:
            words = "moving states to where the plan keeps them"
            settle(Holding(schedule, memory, store), records, dtypes, lambda share: watch.loading(share, words))
        if from_checkpoint := model.frozen_states if held else range(len(model.states)):
            weights = kept.open(model) if kept else Weights(model)
            states.load(weights, from_checkpoint, watch.loading)
            weights.close()
            del weights
        compact()
        if store:
            store.fill(lambda share: watch.loading(share, "writing the rest of the store once"))
        layers = Layers(
            model,
            device.torch_device,
            seed=recipe.seed,
            head_chunk_tokens=plan.model.head_chunk_tokens,
            rungs={
                key: Keeping(frozenset(rung.values), packed=rung.format == "int8")
                for key, rung in plan.saving_rungs().items()
            },
            rows=table_rows(plan, model, device),
        )
        operations = Operations(
            memory,
            device,
            store,
            layers,
            plan.machine,
            model,
            clip_grad_norm=plan.decision.clip_grad_norm,
            decay_all=recipe.optimizer.decay_all or not recipe.optimizer.weight_decay,
            dtypes=dtypes,
            ranks=sharing,
        )
        zeroth_order = plan.decision.zeroth_order
        written_every = zeroth_order.written_every if zeroth_order else 1
        graphs = [schedule.first, schedule.steady, schedule.flush]
        if written_every > 1:
            graphs.append(schedule.unwritten)
        if evaluated:
            graphs.append(schedule.evaluate)
        actions = {graph.name: operations.bind(graph) for graph in graphs}
        pacer = Pacer() if expectation else None
        if pacer and expectation:
            actions = {graph.name: pacer.paced(graph, actions[graph.name], expectation(graph)) for graph in graphs}
        runner: Runner = (
            SerialRunner(device.submit)
            if recipe.serial
            else OverlappedRunner(device.submit, in_flight=IN_FLIGHT, lanes=lanes_of(schedule.steady))
        )
        session = Session(
            schedule,
            memory,
            store,
            records,
            layers,
            operations,
            states,
            runner,
            device,
            actions,
            written_every=written_every,
            threads=plan.machine.update_threads,
            pacer=pacer,
            ranks=ranks,
        )
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


def store_bytes_of(records: Records, recipe: Recipe) -> int:
    if not records.records:
        return 0
    return Store.required_bytes(records.records, durable=recipe.durable_store, keep=recipe.keep)
