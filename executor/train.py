"""A training run: build, train, close. Plan and model in; metrics, trace, report and a model directory out.

Owns the order of a run's life and its directory. It schedules nothing: each step runs one graph of the plan's schedule.
"""

import contextlib
import itertools
import math
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ssdplan.native import process
from ssdplan.plans.calibration import Advisor
from ssdplan.plans.errors import NumericalError, UsageError
from ssdplan.plans.plan import Plan
from ssdplan.plans.trace import write_trace
from ssdplan.plans.units import format_seconds

from .calibration import Calibrator
from .checks import check, compact, look_ahead, require_memory
from .data import Batch, HoldOut, TextData
from .device import Device
from .export import export_model
from .metrics import Compared, MetricsFile, StepMetrics, compare, write_report
from .model import StreamedModel
from .recipe import Recipe, Watch
from .records import Records
from .session import Sessions, store_bytes_of
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
    texts = _Texts(plan, recipe, data, eval_data, load_tokenizer(model.path), model, watch)
    compact()
    require_memory(plan, device)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: exists already and is not an empty directory; choose another --out, or remove it")
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(_directory(out))
        records = Records.of(schedule, snapshots=bool(recipe.snapshot_every))
        look_ahead(plan, model, run, volumes, store_bytes_of(records, recipe), watch)
        evaluated = texts.held_out() is not None
        sessions = stack.enter_context(Sessions(model, device, volumes or [run], recipe, watch, evaluated=evaluated))
        sessions.open(plan, schedule, records)
        return _steps(sessions, plan, texts, recipe, run, model, watch, advisor)


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


def _steps(
    sessions: Sessions,
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
            read, written = session.traffic()
            start = time.perf_counter()
            loss, tokens, timeline = session.train_step(step, batches, recipe.optimizer)
            seconds = time.perf_counter() - start
            if not math.isfinite(loss):
                raise NumericalError(f"step {step + 1}: the loss is {loss}; lower --lr, or train with --precision fp32")
            now_read, now_written = session.traffic()
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
                host_peak_bytes=session.peak_bytes("host", plan),
                device_peak_bytes=session.peak_bytes("device", plan),
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
