"""A training run: build, train, close. Plan and model in; metrics, trace, report and a model directory out.

Owns the order of a run's life and its directory. It schedules nothing: each step runs one graph of the plan's schedule.
"""

import contextlib
import gc
import itertools
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from ssdplan.native import process
from ssdplan.plans.build import build_schedule
from ssdplan.plans.calibration import Advisor
from ssdplan.plans.errors import (
    DiskFullError,
    MemoryBudgetError,
    MismatchError,
    NumericalError,
    SsdplanError,
    StallError,
    UsageError,
)
from ssdplan.plans.homes import device_tier
from ssdplan.plans.plan import Plan
from ssdplan.plans.schedule import Graph, Schedule, Tier
from ssdplan.plans.timeline import Timeline
from ssdplan.plans.trace import write_trace
from ssdplan.plans.units import format_bytes, format_seconds
from ssdplan.plans.verify import verify

from .calibration import Calibrator
from .data import Batch, TextData
from .device import Device
from .export import export_model
from .layers import Layers, MicroBatch
from .metrics import Compared, MetricsFile, StepMetrics, compare, write_report
from .model import StreamedModel
from .moving import Holding, settle, stage
from .operations import Memory, Operations
from .optimizer import AdamW
from .records import Records
from .runner import IN_FLIGHT, Action, OverlappedRunner, Runner, SerialRunner
from .states import States
from .store import Store
from .tokens import load_tokenizer
from .watchdog import Patience, Watchdog, Words
from .weights import Weights

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Recipe:
    """What the user decides about training itself."""

    steps: int
    optimizer: AdamW
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


@dataclass(frozen=True)
class Result:
    """What a finished run found."""

    losses: list[float]
    eval_losses: dict[int, float]
    compared: list[Compared]
    model_directory: Path


@dataclass
class Watch:
    """What a run tells whoever watches it; every hook does nothing unless given."""

    loading: Callable[[float, str], None] = lambda fraction, what: None
    step: Callable[[StepMetrics], None] = lambda metrics: None
    evaluation: Callable[[int, float], None] = lambda step, loss: None
    note: Callable[[str], None] = field(default=lambda text: None)


def train(
    plan: Plan,
    model: StreamedModel,
    device: Device,
    *,
    data: Path,
    out: Path,
    recipe: Recipe,
    eval_data: Path | None = None,
    volumes: Sequence[Path] = (),
    watch: Watch | None = None,
    advisor: Advisor | None = None,
) -> Result:
    """Replay `plan` for `recipe.steps` steps. `out` must not exist or be empty; the store lies in it unless `volumes`.

    With an `advisor` the first steps are compared with the plan's figures (`calibration.Calibrator`); `recipe.replan`
    needs one.
    Raises MismatchError when plan and model do not belong together, and the errors of data, memory and store; what was
    made before the first step is removed then.
    """
    watch = watch or Watch()
    if recipe.serial and recipe.stall_abort_seconds is not None:
        raise UsageError("--stall-abort: a run with --serial cannot leave an operation that hangs; choose one of them")
    torch.set_num_threads(plan.machine.compute_threads)
    schedule = check(plan, model, device)
    texts = _Texts(plan, recipe, data, eval_data, load_tokenizer(model.path), model.vocab_size)
    _compact()
    _require_memory(plan, device)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: exists already and is not an empty directory; choose another --out, or remove it")
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(_directory(out))
        records = Records.of(schedule, snapshots=bool(recipe.snapshot_every))
        _look_ahead(plan, model, run, volumes, _store_bytes(records, recipe), watch)
        evaluated = eval_data is not None
        sessions = stack.enter_context(_Sessions(model, device, volumes or [run], recipe, watch, evaluated=evaluated))
        sessions.open(plan, schedule, records)
        return _steps(sessions, plan, texts, recipe, run, model, watch, advisor)


def check(plan: Plan, model: StreamedModel, device: Device) -> Schedule:
    """Refuse a plan that is for another model, device or version of ours; else its schedule.

    Raises MismatchError, and MemoryBudgetError when the machine has not the memory that the plan's budgets promise.
    """
    schedule = _schedule_of(plan, model, device)
    if plan.prediction.peak_device_bytes > device.memory_bytes():
        raise MemoryBudgetError(
            f"the plan needs {plan.prediction.peak_device_bytes} bytes of device memory, {device.memory_bytes()} are "
            "free; solve again with a smaller --device-memory"
        )
    return schedule


def _schedule_of(plan: Plan, model: StreamedModel, device: Device) -> Schedule:
    """What `check` refuses and returns, whatever memory is free at the moment."""
    plan.refuse_fp16()
    if plan.model.fingerprint != model.fingerprint:
        raise MismatchError(
            f"the plan is for {plan.model.name} ({plan.model.architecture}), {model.path} is another model "
            f"({model.architecture}); profile and solve for it"
        )
    ours = [(state.name, state.elements) for state in model.states]
    theirs = [(state.name, state.elements) for state in plan.model.states]
    layers = [(layer.name, tuple(layer.states)) for layer in model.layers]
    if ours != theirs or layers != [(layer.name, tuple(layer.states)) for layer in plan.model.layers]:
        raise MismatchError("the plan's layers and states are not this model's; solve again from a new profile")
    if plan.machine.device != device.kind:
        raise MismatchError(f"the plan is for --device {plan.machine.device}, this run has {device.kind}; solve again")
    schedule = build_schedule(plan.model, plan.decision)
    arenas = (schedule.arenas["host"], schedule.arenas["device"], schedule.arenas["ssd"])
    predicted = plan.prediction
    if arenas != (predicted.host_arena_bytes, predicted.device_arena_bytes, predicted.ssd_bytes):
        raise MismatchError(
            f"the plan predicts arenas of {predicted.host_arena_bytes}, {predicted.device_arena_bytes} and "
            f"{predicted.ssd_bytes} bytes (host, device, ssd), its decision needs "
            f"{arenas[0]}, {arenas[1]} and {arenas[2]}; it was edited or made by another version: solve again"
        )
    for what, needed, budget in (
        ("host", predicted.peak_host_bytes, plan.decision.host_budget_bytes),
        ("device", predicted.peak_device_bytes, plan.decision.device_budget_bytes),
    ):
        if needed > budget:
            raise MemoryBudgetError(
                f"the plan needs {needed} bytes of {what} memory, its budget is {budget}; solve again"
            )
    verify(schedule)
    return schedule


def _compact() -> None:
    """Give back what tokenising or loading left; a tokenizer has cycles of references."""
    gc.collect()
    process.give_back()


def _require_memory(plan: Plan, device: Device) -> None:
    """MemoryBudgetError when this process cannot have the memory that the plan predicts beyond what it has now."""
    predicted = plan.prediction
    needed = predicted.host_arena_bytes + (predicted.peak_device_bytes if device.kind == "cpu" else 0)
    if predicted.peak_process_bytes is not None:
        needed = max(needed, predicted.peak_process_bytes - process.resident_bytes())
    obtainable = process.obtainable_bytes()
    if needed > obtainable:
        raise MemoryBudgetError(
            f"the plan needs {format_bytes(needed)} beyond what the process has, and this machine, its control group "
            f"and ulimit leave {format_bytes(obtainable)}: {format_bytes(needed - obtainable)} are missing; "
            "free some, raise the limit, or solve again with a smaller --host-memory"
        )


def _store_bytes(records: Records, recipe: Recipe) -> int:
    return Store.required_bytes(records.records, durable=bool(recipe.snapshot_every)) if records.records else 0


def _look_ahead(
    plan: Plan, model: StreamedModel, run: Path, volumes: Sequence[Path], store_bytes: int, watch: Watch
) -> None:
    """What would only come to light at the end of the run: no space for the model, another drive than the plan's."""
    element = DTYPES[plan.decision.precision].itemsize
    needed = element * sum(tensor.elements for state in model.states for tensor in state.tensors)
    if not volumes:
        needed += store_bytes
    usage = shutil.disk_usage(run)
    if usage.total and usage.free < needed:
        raise DiskFullError(
            f"{run}: the run needs {format_bytes(needed)} here, {format_bytes(usage.free)} are free; free some space, "
            "choose another --out, or put the store elsewhere with --volume"
        )
    planned = [Path(volume.path) for volume in plan.machine.volumes]
    used = [_drive(path) for path in volumes or [run]]
    if store_bytes and used != [_drive(path) for path in planned]:
        names = " ".join(f"--volume {path}" for path in planned)
        watch.note(f"the store is not on the drive that was measured, so times may differ; the plan is for {names}")


def _drive(path: Path) -> int | None:
    """The file system of a directory, or of the nearest one above that exists."""
    for folder in (path.absolute(), *path.absolute().parents):
        if folder.exists():
            return folder.stat().st_dev
    return None


@dataclass
class _Session:
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


class _Texts:
    """The training text, and the held-out text if there is one, as batches of the plan's size."""

    def __init__(
        self, plan: Plan, recipe: Recipe, data: Path, eval_data: Path | None, tokenizer: object, vocab_size: int
    ) -> None:
        self._decision, self._seed = plan.decision, recipe.seed

        def text(path: Path) -> TextData:
            return TextData(
                path,
                tokenizer,
                sequence_length=plan.decision.sequence_length,
                pack=recipe.pack,
                vocab_size=vocab_size,
            )

        self._training = text(data)
        self._held_out = text(eval_data) if eval_data else None

    def step(self, step: int) -> list[Batch]:
        decision = self._decision
        return self._training.micro_batches(
            step,
            micro_batches=decision.micro_batches,
            micro_batch_size=decision.micro_batch_size,
            seed=self._seed,
        )

    def held_out(self) -> Iterator[list[Batch]] | None:
        if self._held_out is None:
            return None
        return self._held_out.eval_batches(self._decision.micro_batch_size, micro_batches=self._decision.micro_batches)


@contextlib.contextmanager
def _directory(out: Path) -> Iterator[Path]:
    """The run's directory; removed again when the run ends before its first step."""
    try:
        made = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: cannot make this directory: {error.strerror}") from error
    try:
        yield out
    except BaseException:
        if not (out / "metrics.jsonl").exists():
            for path in out.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if made:
                out.rmdir()
        raise


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
) -> Iterator[_Session]:
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
                f"store of {format_bytes(_store_bytes(records, recipe))}, engine {store.engine}"
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
        _compact()
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
        session = _Session(schedule, memory, store, records, layers, operations, states, runner, device, actions)
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


class _Sessions:
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
        self._current: _Session | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)

    @property
    def current(self) -> _Session:
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
            schedule = _schedule_of(plan, self._model, self._device)
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


def _leave(store: Store, watch: Watch, kind: object, error: BaseException | None, trace: object) -> None:
    """The end of a run's store: it goes when the run ended well, or has no snapshot that could be of use."""
    if error is None or not store.generation:
        store.remove()
        return
    store.close()
    places = " ".join(map(str, store.paths))
    watch.note(f"the states after step {store.metadata['step']}, the last snapshot, are in {places}")


def _steps(
    sessions: _Sessions,
    plan: Plan,
    texts: _Texts,
    recipe: Recipe,
    run: Path,
    model: StreamedModel,
    watch: Watch,
    advisor: Advisor | None,
) -> Result:
    session = sessions.current
    calibrator = Calibrator(plan, advisor, watch.note, replan=recipe.replan) if advisor else None
    assert calibrator or not recipe.replan
    losses: list[float] = []
    measured: list[StepMetrics] = []
    eval_losses: dict[int, float] = {}
    plan.save(run / "plan.json")
    loading_peak = process.peak_resident_bytes()
    process.forget_peak()
    with MetricsFile(run / "metrics.jsonl") as metrics_file:

        def evaluate(step: int) -> None:
            passes = texts.held_out()
            if passes is not None:
                eval_losses[step] = session.evaluate(passes)
                metrics_file.write_evaluation(step, eval_losses[step])
                watch.evaluation(step, eval_losses[step])

        evaluate(0)
        after_flush = True
        for step in range(recipe.steps):
            batches = texts.step(step)
            read, written = _traffic(session.store)
            start = time.perf_counter()
            loss, tokens, timeline = session.train_step(step, batches, recipe.optimizer)
            seconds = time.perf_counter() - start
            if not math.isfinite(loss):
                raise NumericalError(f"step {step + 1}: the loss is {loss}; lower --lr, or train with --precision fp32")
            now_read, now_written = _traffic(session.store)
            metrics = StepMetrics(
                step=step + 1,
                loss=loss,
                grad_norm=session.operations.gradient_norm(),
                lr=recipe.optimizer.lr,
                tokens=tokens,
                step_seconds=seconds,
                tokens_per_second=sum(batch.input_ids.size for batch in batches) / seconds,
                ssd_read_bytes=now_read - read,
                ssd_write_bytes=now_written - written,
                host_peak_bytes=_peak(session, plan, "host"),
                device_peak_bytes=_peak(session, plan, "device"),
                process_peak_bytes=process.peak_resident_bytes(),
            )
            losses.append(loss)
            better = calibrator.take(timeline) if calibrator and not after_flush else None
            if not after_flush or step + 1 == recipe.steps == 1:
                measured.append(metrics)
            after_flush = False
            metrics_file.write(metrics)
            watch.step(metrics)
            if recipe.snapshot_every and (step + 1) % recipe.snapshot_every == 0:
                session.snapshot(step + 1)
                after_flush = True
            if recipe.eval_every and (step + 1) % recipe.eval_every == 0 and step + 1 < recipe.steps:
                evaluate(step + 1)
                after_flush = True
            if better and step + 1 < recipe.steps:
                start = time.perf_counter()
                moved = sessions.move(better, step + 1)
                session, after_flush = sessions.current, True
                if moved:
                    earlier = _keep_earlier(run / "plan.json")
                    plan, measured = better, []
                    plan.save(run / "plan.json")
                    spent = format_seconds(time.perf_counter() - start)
                    watch.note(f"moved to the other plan after step {step + 1}, in {spent}; the first is {earlier}")
        session.flush()
        evaluate(recipe.steps)
    compared = compare(plan.prediction, measured, {tier: session.memory.touched[tier] for tier in ("host", "device")})
    write_trace(timeline, session.schedule, run / "trace.json", name=f"ssdplan run, step {recipe.steps} as measured")
    write_report(
        run / "report.json",
        compared,
        {
            "model": plan.model.name,
            "steps": recipe.steps,
            "steady_steps": len(measured),
            "losses": losses,
            "eval_losses": {str(step): loss for step, loss in eval_losses.items()},
            "loading_process_peak_bytes": loading_peak,
            "median_step_seconds": statistics.median(m.step_seconds for m in measured) if measured else None,
        },
    )
    destination = run / "model"
    export_model(destination, source=model.path, entries=session.states.entries(), tensors=session.states.tensors())
    return Result(losses, eval_losses, compared, destination)


def _keep_earlier(path: Path) -> str:
    """Give a plan that the run has left a name of its own beside the current one's: plan-0.json, then plan-1.json."""
    number = next(n for n in itertools.count() if not path.with_name(f"plan-{n}.json").exists())
    return path.rename(path.with_name(f"plan-{number}.json")).name


def _peak(session: _Session, plan: Plan, tier: Tier) -> int:
    """The tier's arena as far as it is used, and on the one that compute works on what compute takes besides."""
    decision, arena = plan.decision, session.memory.touched[tier]
    if tier != device_tier(decision):
        return arena
    context = decision.micro_batches * plan.model.context_bytes[decision.micro_batch_size]
    return arena + session.operations.workspace_bytes + context


def _traffic(store: Store | None) -> tuple[int, int]:
    return (store.bytes_read, store.bytes_written) if store else (0, 0)


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
        )
        for batch in batches
    ]
