"""A training run: build, train, close. Plan and model in; metrics, trace, report and a model directory out.

Owns the order of a run's life and its directory. It schedules nothing: each step runs one graph of the plan's schedule.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ssdplan.native import process
from ssdplan.plans.calibration import Advisor
from ssdplan.plans.errors import NumericalError, UsageError
from ssdplan.plans.plan import Plan
from ssdplan.plans.timeline import Timeline
from ssdplan.plans.trace import write_trace
from ssdplan.plans.units import format_seconds

from .calibration import Calibrator
from .checks import check, compact, look_ahead, require_memory
from .data import Batch, HoldOut, TextData
from .device import Device
from .export import export_model
from .interruption import Interruption
from .keeper import Keeper
from .metrics import Compared, History, MetricsFile, SnapshotCost, StepMetrics, compare, cut_back, write_report
from .model import StreamedModel
from .recipe import Recipe, Watch
from .records import Records
from .resume import Kept
from .run_directory import METRICS, MODEL, SCHEMA, OptionValue, Run, RunDirectory
from .scaling import LossScale
from .session import Sessions, store_bytes_of
from .snapshots import Origin
from .tokens import load_tokenizer


@dataclass(frozen=True)
class Result:
    """What a finished run found."""

    losses: list[float]
    eval_losses: dict[int, float]
    compared: list[Compared]
    model_directory: Path


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
    options: Mapping[str, OptionValue] | None = None,
    resume: Kept | None = None,
    anyway: bool = False,
) -> Result:
    """Replay `plan` for `recipe.steps` steps. `out` must not exist or be empty; the store lies in it unless `volumes`.

    With an `advisor` the first steps are compared with the plan's figures (`calibration.Calibrator`); `recipe.replan`
    needs one. `options` are what the command line would need to do the same, for run.json. With `resume`, that run goes
    on in its own directory `out`, to the same bits under any plan, as long as model, data, recipe and batch are the
    same; `anyway`: even if they are not. `volumes` are then where its store is, or is to be.
    Raises MismatchError when plan and model do not belong together or the run is another, and the errors of data,
    memory and store; what was made before the first step of a new run is removed then. KeyboardInterrupt after a
    snapshot, if the run takes any, when SIGINT or SIGTERM asked for the end.
    """
    watch = watch or Watch()
    recipe.require_sense()
    began = time.perf_counter()
    if recipe.serial and recipe.stall_abort_seconds is not None:
        raise UsageError("--stall-abort: a run with --serial cannot leave an operation that hangs; choose one of them")
    torch.set_num_threads(plan.machine.compute_threads)
    schedule = check(plan, model, device)
    texts = _Texts(plan, recipe, data, eval_data, load_tokenizer(model.path), model, watch)
    origin = Origin.of(plan, model, texts.content, recipe) if recipe.snapshots else None
    if resume:
        assert origin, "a run that goes on keeps snapshots"
        resume.require_same(plan, origin, recipe, watch.note if anyway else None)
    compact()
    require_memory(plan, device)
    with contextlib.ExitStack() as stack:
        if resume:
            run = resume.directory
            run.change(options=options)
        else:
            named = tuple(str(place.absolute()) for place in volumes)
            document = Run(schema=SCHEMA, options=dict(options or {}), volumes=named, snapshots=recipe.snapshots)
            run = stack.enter_context(RunDirectory.create(out, document, plan))
        records = Records.of(schedule, snapshots=recipe.snapshots)
        look_ahead(plan, model, run.path, volumes, 0 if resume else store_bytes_of(records, recipe), watch)
        evaluated, places = texts.evaluated, volumes or run.volumes
        sessions = stack.enter_context(Sessions(model, device, run, places, recipe, watch, evaluated=evaluated))
        history = History()
        if resume and resume.snapshot:
            resume.tidy()
            history = cut_back(run.path / METRICS, resume.step)
            sessions.resume(resume, plan, schedule, records)
        elif resume:
            watch.note("the run was stopped before its first snapshot, so it begins again")
            resume.begin_again(plan, places)
            sessions.begin(plan, schedule, records, again=True)
        else:
            sessions.begin(plan, schedule, records)
        metrics_file = stack.enter_context(MetricsFile(run.path / METRICS))
        if resume:
            metrics_file.write_resumed(resume.step, time.perf_counter() - began)
        scaling = recipe.loss_scale if plan.decision.precision == "fp16" else None
        if scaling and resume and resume.snapshot and resume.snapshot.scaling:
            scaling = LossScale(**resume.snapshot.scaling.model_dump())
        keeper = Keeper(origin, plan, recipe, metrics_file, watch, resume.step if resume else 0) if origin else None
        interruption = Interruption(
            lambda: watch.note("stops with a snapshot when this step ends; a second signal stops it now")
        )
        if keeper:
            stack.enter_context(interruption)
        try:
            return _steps(
                sessions,
                plan,
                texts,
                recipe,
                run,
                model,
                watch,
                advisor,
                metrics_file,
                history,
                scaling,
                keeper,
                interruption,
            )
        except KeyboardInterrupt:
            if not keeper:
                watch.note("nothing is kept, since the run took no snapshots (--snapshot-every, --snapshot-minutes)")
            raise


class _Texts:
    """The training text, and the held-out text if there is one, as batches of the plan's size."""

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        data: Path,
        eval_data: Path | None,
        tokenizer: object,
        model: StreamedModel,
        watch: Watch,
    ) -> None:
        self._decision, self._seed = plan.decision, recipe.seed
        length = plan.decision.sequence_length

        def text(path: Path, hold_out: HoldOut | None = None) -> TextData:
            found = TextData(
                path,
                tokenizer,
                sequence_length=length,
                pack=recipe.pack,
                attend_across=recipe.attend_across,
                format=recipe.data_format,
                hold_out=hold_out,
                cache=recipe.token_cache,
                vocab_size=model.vocab_size,
                progress=lambda done, total: watch.loading(done / total, f"tokenising {path}"),
            )
            if found.has_borders and not recipe.attend_across:
                model.require_apart(length)
            for remark in found.remarks():
                watch.note(remark)
            return found

        if eval_data and recipe.hold_out:
            raise UsageError("held-out data of their own and a share of the training data: give one of the two")
        self._training = text(data, recipe.hold_out)
        self._held_out = text(eval_data) if eval_data else self._training.held_out

    @property
    def content(self) -> dict[str, str]:
        """What the training text is (`TextData.content`)."""
        return self._training.content

    def step(self, step: int) -> list[Batch]:
        decision = self._decision
        return self._training.micro_batches(
            step,
            micro_batches=decision.micro_batches,
            micro_batch_size=decision.micro_batch_size,
            seed=self._seed,
        )

    @property
    def evaluated(self) -> bool:
        """Whether there is held-out text."""
        return self._held_out is not None

    def held_out(self) -> Iterator[list[Batch]] | None:
        if self._held_out is None:
            return None
        return self._held_out.eval_batches(self._decision.micro_batch_size, micro_batches=self._decision.micro_batches)


class _StoppedError(Exception):
    """The run was asked to stop, and stands between two operations."""


def _steps(
    sessions: Sessions,
    plan: Plan,
    texts: _Texts,
    recipe: Recipe,
    run: RunDirectory,
    model: StreamedModel,
    watch: Watch,
    advisor: Advisor | None,
    metrics_file: MetricsFile,
    history: History,
    scaling: LossScale | None,
    keeper: Keeper | None,
    interruption: Interruption,
) -> Result:
    session = sessions.current
    calibrator = Calibrator(plan, advisor, watch.note, replan=recipe.replan) if advisor else None
    assert calibrator or not recipe.replan
    losses, eval_losses = history.losses, history.eval_losses
    begun = len(losses)
    if keeper:
        keeper.scaling = scaling
    measured: list[StepMetrics] = []
    timeline: Timeline | None = None
    loading_peak = process.peak_resident_bytes()
    process.forget_peak()

    def stop_if_asked() -> None:
        if interruption.asked:
            raise _StoppedError

    def evaluate(step: int) -> None:
        passes = texts.held_out()
        if passes is not None and step not in eval_losses:
            eval_losses[step] = session.evaluate(stopping(passes))
            metrics_file.write_evaluation(step, eval_losses[step])
            watch.evaluation(step, eval_losses[step])

    def stopping(passes: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        for batches in passes:
            stop_if_asked()
            yield batches

    try:
        if not begun or (recipe.eval_every and begun % recipe.eval_every == 0 and begun < recipe.steps):
            evaluate(begun)
        after_flush = True
        for step in range(begun, recipe.steps):
            batches = texts.step(step)
            read, written = session.traffic()
            start = time.perf_counter()
            optimizer = recipe.optimizer_at(step - scaling.skipped if scaling else step)
            loss, tokens, timeline = session.train_step(step, batches, optimizer, scaling)
            seconds = time.perf_counter() - start
            overflow = session.operations.overflow
            if not (overflow or math.isfinite(loss)):
                raise NumericalError(f"step {step + 1}: the loss is {loss}; lower --lr, or train with --precision fp32")
            now_read, now_written = session.traffic()
            metrics = StepMetrics(
                step=step + 1,
                loss=loss,
                grad_norm=session.operations.gradient_norm(),
                lr=optimizer.lr,
                tokens=tokens,
                step_seconds=seconds,
                tokens_per_second=sum(batch.input_ids.size for batch in batches) / seconds,
                ssd_read_bytes=now_read - read,
                ssd_write_bytes=now_written - written,
                host_peak_bytes=session.peak_bytes("host", plan),
                device_peak_bytes=session.peak_bytes("device", plan),
                process_peak_bytes=process.peak_resident_bytes(),
                loss_scale=scaling.scale if scaling else 1.0,
                skipped=bool(overflow),
            )
            losses.append(loss)
            better = calibrator.take(timeline) if calibrator and not after_flush else None
            if not after_flush or step + 1 == recipe.steps == begun + 1:
                measured.append(metrics)
            after_flush = bool(overflow)
            metrics_file.write(metrics)
            if scaling:
                scaling = scaling.after(step + 1, overflow)
                if keeper:
                    keeper.scaling = scaling
            watch.step(metrics)
            stop_if_asked()
            if keeper and keeper.due(step + 1):
                keeper.take(session, step + 1)
                after_flush = True
            if recipe.eval_every and (step + 1) % recipe.eval_every == 0 and step + 1 < recipe.steps:
                evaluate(step + 1)
                after_flush = True
            if better and step + 1 < recipe.steps:
                start = time.perf_counter()
                earlier = sessions.move(better, partial(keeper.describe, step + 1) if keeper else None)
                session, after_flush = sessions.current, True
                if earlier is not None:
                    plan, measured, seconds = better, [], time.perf_counter() - start
                    if keeper:
                        keeper.kept(step + 1, SnapshotCost(seconds, session.traffic()[1], 0.0))
                    watch.note(
                        f"moved to the other plan after step {step + 1}, in {format_seconds(seconds)}; the first is "
                        f"{earlier}"
                    )
        session.flush()
        evaluate(recipe.steps)
    except _StoppedError:
        if keeper and losses:
            keeper.take(session, len(losses))
        raise KeyboardInterrupt from None
    if keeper:
        keeper.take(session, recipe.steps)
    compared = compare(plan.prediction, measured, {tier: session.memory.touched[tier] for tier in ("host", "device")})
    if timeline:  # else the trace is there, if the run came so far before it was stopped
        name = f"ssdplan run, step {recipe.steps} as measured"
        write_trace(timeline, session.schedule, run.path / "trace.json", name=name)
    write_report(
        run.path / "report.json",
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
    run.put_model_aside(begun)
    destination = run.path / MODEL
    export_model(destination, source=model.path, entries=session.states.entries(), tensors=session.states.tensors())
    return Result(losses, eval_losses, compared, destination)
