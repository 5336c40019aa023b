"""A training run: build, train, close. Plan and model in; metrics, trace, report and a model directory out.

Owns the order of a run's life and what it leaves in its directory. The steps are the loop's.
"""

import contextlib
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import torch

from ssdplan.native import process
from ssdplan.plans.analysis.cache import mean_figures, predicted_figures, states_on_ssd
from ssdplan.plans.analysis.drift import Advisor, Expectation
from ssdplan.plans.analysis.report import Compared, compare, stolen_share
from ssdplan.plans.documents.metrics import TRACE
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.run import MODEL, SCHEMA, OptionValue, Run
from ssdplan.plans.errors import SsdplanError, UsageError
from ssdplan.plans.graph.ops import Graph, Schedule
from ssdplan.plans.units import format_bytes
from ssdplan.plans.views.trace import trace_of

from .batches import Texts
from .calibration import Calibrator
from .checks import check, compact, look_ahead, require_memory
from .data.reader import Apart
from .device.interface import Device
from .loop import Loop
from .memory.store_records import Records
from .metrics.metrics import History, MetricsFile, cut_back, write_report
from .metrics.reporting import Reports
from .model.directory.export import export_model, require_copyable
from .model.kinds import said_of_muon
from .model.model import StreamedModel
from .model.packed import require_kernels
from .model.saved_form import SavedForm
from .model.weights import Weights
from .optimizer.loss_scale import LossScale
from .optimizer.zeroth_order import MeZO
from .ranks.group import ALONE, Ranks, agreed
from .recipe import Recipe, Watch
from .runtime.interruption import Interruption
from .sessions import Sessions, store_bytes_of
from .snapshots.keeper import Keeper, StoreKeeper, WeightsKeeper
from .snapshots.resume import Kept
from .snapshots.run_directory import RunDirectory
from .snapshots.snapshots import Origin
from .stepping import FirstOrder, Stepping, ZerothOrder
from .zeroth_order import opened_log, require_own_log, require_perturbed


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
    reports: Reports | None = None,
    options: Mapping[str, OptionValue] | None = None,
    configuration: str = "",
    resume: Kept | None = None,
    anyway: bool = False,
    ranks: Ranks = ALONE,
) -> Result:
    """Replay `plan` for `recipe.steps` steps. `out` must not exist or be empty; the store lies in it unless `volumes`.

    With an `advisor` the first steps are compared with the plan's figures (`calibration.Calibrator`), and the report
    has what it predicts of the cache; `recipe.replan` needs one. `reports`: where its metrics go besides metrics.jsonl.
    `options` are what the command line would need to do the same, for run.json, and `configuration` is the text of a
    file that says so to people. With `resume`, that run goes on in its own directory `out`, to the same bits under any
    plan, as long as model, data, recipe and batch are the same; `anyway`: even if they are not. `volumes` are then
    where its store is, or is to be.
    Raises MismatchError when plan and model do not belong together or the run is another, and the errors of data,
    memory and store; what was made before the first step of a new run is removed then. StoppedWithSnapshot after a
    snapshot, if the run takes any, when SIGINT, SIGTERM or SIGHUP asked for the end.
    """
    watch = watch or Watch()
    if recipe.epochs is None:
        recipe.require_sense()
    began = time.perf_counter()
    if recipe.serial and recipe.stall_abort_seconds is not None:
        raise UsageError("--stall-abort: a run with --serial cannot leave an operation that hangs; choose one of them")
    torch.set_num_threads(plan.machine.compute_threads)
    expectation = _emulated(plan, advisor, recipe)
    schedule = check(plan, model, device, ranks)
    assert ranks.size == 1 or not (recipe.replan or (recipe.snapshots and recipe.keep == 1)), "for runs of one rank"
    if not plan.exact:
        require_kernels(device.torch_device)
        watch.note("the plan saves activations in int8: training is not exact (solve without --activations int8 is)")
    for note in (*model.remarks_on_parameters(), *said_of_muon(model.states)):
        watch.note(note)
    require_copyable(model.path)
    with contextlib.closing(Weights(model)) as weights:  # what is wrong with the files is said before data are read
        for note in weights.notes:
            watch.note(note)
    logs = plan.decision.zeroth_order is not None
    if logs:
        require_perturbed(model, recipe)
    elif not recipe.snapshots:
        watch.note(_unkept(schedule, recipe))
    rendered_at = (resume.directory.run.rendered_at if resume else None) or _now_of_rank_0(ranks)
    texts = Texts(plan, recipe, data, eval_data, Apart(model.path), model, watch, rendered_at)
    recipe = recipe.lasting(texts.rows, plan.decision.rows)
    recipe.require_sense()
    watch.note(texts.describe_length(recipe.steps))
    watch.length(recipe.steps)
    keeps = recipe.snapshots or logs
    origin: Origin | None = None
    if keeps or ranks.size > 1:
        origin = Origin.of(plan, model, texts.content, texts.held_out_content, recipe)
        goes_on_from = {"the step from which it goes on": str(resume.step if resume else 0)}
        agreed(ranks, _agreed_upon(plan, origin, recipe) | goes_on_from)
    if resume:
        assert origin, "a run that goes on keeps snapshots"
        resume.require_same(plan, origin, recipe, watch.note if anyway else None)
        if logs and resume.snapshot:
            require_own_log(resume.directory.folder, plan, origin, recipe)
    compact()
    require_memory(plan, device)
    with contextlib.ExitStack() as stack:
        if resume:
            run = resume.directory
            run.change(options=options, rendered_at=rendered_at, steps=recipe.steps)
            run.keep_store()
        else:
            named = tuple(str(place.absolute()) for place in volumes)
            document = Run(
                schema=SCHEMA,
                options=dict(options or {}),
                volumes=named,
                snapshots=keeps,
                rendered_at=rendered_at,
                steps=recipe.steps,
            )
            if ranks.rank:
                ranks.tell(b"")  # rank 0 has made the directory that this one's lies in
                out.parent.mkdir(parents=True, exist_ok=True)
            run = stack.enter_context(RunDirectory.create(out, document, plan))
            if not ranks.rank:
                ranks.tell(b"")
        if configuration:
            run.keep_configuration(configuration)
        records = Records.of(schedule, snapshots=recipe.durable_store)
        look_ahead(plan, model, run.path, volumes, 0 if resume else store_bytes_of(records, recipe), recipe, watch)
        evaluated, places = texts.evaluated, volumes or run.volumes
        history = History()
        if resume and resume.snapshot:
            history = cut_back(run.folder, resume.step)
            resume.tidy(watch.note)
        reporting = stack.enter_context(
            (reports or Reports()).open(
                run.folder,
                len(history.losses),
                resumed=resume is not None,
                identity=run.wandb_identity,
                settings=run.run.options,
                note=watch.note,
            )
        )
        sessions = stack.enter_context(
            Sessions(
                model, device, run, places, recipe, watch, evaluated=evaluated, expectation=expectation, ranks=ranks
            )
        )
        if resume and resume.snapshot and logs:
            if resume.told > resume.step:
                lost = f"the log has {resume.step} of {resume.told} steps"
                watch.note(f"{lost}; the others are made again, bit for bit")
            sessions.begin(plan, schedule, records, again=True, weights=resume.weights)
            run.moved(plan)
        elif resume and resume.snapshot:
            sessions.resume(resume, plan, schedule, records)
        elif resume:
            watch.note("the run was stopped before its first snapshot, so it begins again")
            resume.begin_again(plan, places, watch.note)
            sessions.begin(plan, schedule, records, again=True)
        else:
            sessions.begin(plan, schedule, records)
        if resume:
            run.put_model_aside(resume.told)
        metrics_file = stack.enter_context(MetricsFile(run.folder, reporting.write))
        if resume:
            metrics_file.write_resumed(resume.step, time.perf_counter() - began)
        stepping: Stepping
        keeper: Keeper | None = None
        begun = resume.step if resume else 0
        if logs:
            assert origin
            since = resume.weights.step if resume and resume.weights else 0
            log, moves = opened_log(run.folder, plan, origin, recipe, begun, since)
            stack.enter_context(log)
            assert isinstance(recipe.optimizer, MeZO)
            sessions.current.move(recipe.optimizer, moves)
            stepping = ZerothOrder(recipe, log, plan.decision.precision)
            if recipe.snapshots:
                keeper = WeightsKeeper(run.folder, model.path, log, recipe, metrics_file, watch, since)
        else:
            stepping = FirstOrder(recipe, _scaling(plan, recipe, resume), plan.decision.precision)
            if keeps and origin:
                keeper = StoreKeeper(origin, plan, recipe, metrics_file, watch, begun, ranks)
        how = "" if logs else "with a snapshot "
        interruption = Interruption(lambda: watch.note(f"stops {how}when this step ends; a second signal stops it now"))
        stack.enter_context(interruption)
        if keeps:
            interruption.begin()
        # Steps of a zeroth-order plan differ, so that no few of them say how the machine is.
        calibrator = None
        if advisor and not logs and not ranks.rank:
            calibrator = Calibrator(plan, advisor, watch.note, replan=recipe.replan)
        assert calibrator or not recipe.replan
        loading_peak = process.peak_resident_bytes()
        process.forget_peak()
        loop = Loop(
            sessions,
            plan,
            texts,
            recipe,
            watch,
            metrics_file,
            history,
            stepping,
            keeper,
            interruption,
            calibrator,
            ranks,
            routing=model.routing,
            written_before=history.ssd_written_bytes,
        )
        try:
            loop.run()
            if loop.ended:
                run.change(steps=loop.done)
            return _finish(loop, run, model, loading_peak, advisor, ranks)
        except KeyboardInterrupt:
            if logs:
                done = len(history.losses)
                watch.note(f"its log has {done:,} step(s); go on with ssdplan run --resume {run.path}")
            elif not keeps:
                watch.note("nothing is kept of its steps, since the run took no snapshots (--snapshot-every N)")
            raise


def _now_of_rank_0(ranks: Ranks) -> datetime:
    """What all ranks give chat templates for the time."""
    return datetime.fromisoformat(ranks.tell(datetime.now().isoformat().encode())[0].decode())


def _agreed_upon(plan: Plan, origin: Origin, recipe: Recipe) -> dict[str, str]:
    """By names for people what decides a step's numbers and when a run does what: the same on all ranks."""
    when = recipe.steps, recipe.eval_every, recipe.snapshot_every, recipe.snapshot_minutes, recipe.keep
    return {
        "the plan": plan.sha256(),
        "the model": origin.model,
        "the model's weights": origin.weights,
        "the training data": _hashed(origin.data),
        "the held-out data": _hashed(origin.held_out),
        "what run was told to do": _hashed((sorted(origin.recipe.items()), when)),
        "what rounds sums (versions, processor)": _hashed(origin.numerics),
    }


def _hashed(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _scaling(plan: Plan, recipe: Recipe, resume: Kept | None) -> LossScale | None:
    """The loss scale of the first step to come, in fp16."""
    if plan.decision.precision != "fp16":
        return None
    kept = resume.snapshot if resume else None
    return kept.loss_scale(recipe.loss_scale) if kept and kept.scaling else recipe.loss_scale


def _unkept(schedule: Schedule, recipe: Recipe) -> str:
    """What an end before the last step costs a run without snapshots, and what they would take."""
    durable = store_bytes_of(Records.of(schedule, snapshots=True), replace(recipe, snapshot_every=1))
    now = store_bytes_of(Records.of(schedule, snapshots=False), recipe)
    return (
        "no snapshots are taken: if this run is stopped, by Ctrl-C too, all its steps are lost; --snapshot-every N "
        f"keeps them, with a store of {format_bytes(durable)}" + (f" instead of {format_bytes(now)}" if now else "")
    )


def _emulated(plan: Plan, advisor: Advisor | None, recipe: Recipe) -> Callable[[Graph], Expectation] | None:
    """What operations are to last, in a run by a plan for an emulated machine."""
    if plan.machine.emulation is None:
        return None
    assert advisor is not None, "nobody says what the emulated machine takes"
    if recipe.replan:
        raise UsageError(
            "--replan: the plan is for an emulated machine, which is always as its profile says; leave it out"
        )
    return advisor.expectation


def _finish(
    loop: Loop, run: RunDirectory, model: StreamedModel, loading_peak: int, advisor: Advisor | None, ranks: Ranks
) -> Result:
    """Trace, report and model of a run whose steps are done. The model is written even where the others cannot be."""
    each = [json.loads(told) for told in ranks.tell(json.dumps(_moved(loop)).encode())]
    try:
        compared = _write_records(loop, run, model, loading_peak, advisor, each)
    except (SsdplanError, OSError) as error:
        loop.watch.note(f"writes the model nevertheless, and then ends with this error: {error}")
        _write_model(loop, run, model, ranks)
        raise
    destination = _write_model(loop, run, model, ranks)
    return Result(loop.history.losses, loop.history.eval_losses, compared, destination)


def _write_model(loop: Loop, run: RunDirectory, model: StreamedModel, ranks: Ranks) -> Path:
    """Write the model of a run whose steps are done. Returns its directory. Rank 0 writes it, and the others send it
    their parts."""
    states, destination = loop.session.states, run.path / MODEL
    if ranks.rank:
        for _ in states.tensors() if loop.plan.decision.shares > 1 else ():
            pass
        return destination
    run.folder.require_no_link(MODEL)
    form = SavedForm(model)
    entries, tensors = form.entries(states.entries()), form.tensors(states.tensors())
    export_model(destination, source=model.path, entries=entries, tensors=tensors, files=form.files)
    return destination


def _moved(loop: Loop) -> dict[str, float | None]:
    """What this rank took and moved, for the report of all: of a steady step in the median, and by the whole run."""
    measured = loop.measured
    return {
        "step_seconds": _median(m.step_seconds for m in measured),
        "ssd_read_bytes": _median(m.ssd_read_bytes for m in measured),
        "ssd_write_bytes": _median(m.ssd_write_bytes for m in measured),
        "ssd_written_bytes": loop.written_bytes,
    }


def _write_records(
    loop: Loop,
    run: RunDirectory,
    model: StreamedModel,
    loading_peak: int,
    advisor: Advisor | None,
    ranks: Sequence[Mapping[str, object]],
) -> list[Compared]:
    """Write trace and report of a run whose steps are done. `ranks`: what each of them moved. Returns the predictions
    beside what was measured."""
    session, measured, history = loop.session, loop.measured, loop.history
    touched = {tier: session.memory.touched[tier] for tier in ("host", "device")}
    compared = compare(loop.plan, measured, touched, full_rows=loop.texts.full_rows)
    if loop.timeline:  # else the trace is there, if the run came so far before it was stopped
        name = f"ssdplan run, step {loop.done} as measured"
        run.folder.write(TRACE, trace_of(loop.timeline, session.schedule, name=name))
    write_report(
        run.folder,
        compared,
        {
            "model": loop.plan.model.name,
            "steps": loop.done,
            "steady_steps": len(measured),
            "losses": history.losses,
            "eval_losses": {str(step): loss for step, loss in history.eval_losses.items()},
            "loading_process_peak_bytes": loading_peak,
            "allocation_seconds": session.memory.seconds,
            "device_allocated_peak_bytes": taken.allocated if (taken := session.device.taken()) else None,
            "stolen_share": stolen_share(measured, loop.plan.machine.cores),
            "learnt_tokens_per_second": _median(m.learnt_tokens_per_second for m in measured),
            "learnt_share": _median(m.tokens / m.computed_tokens for m in measured),
            "median_step_seconds": _median(m.step_seconds for m in measured),
            "cache": _cache(loop, advisor),
            "ssd_written_bytes": loop.written_bytes,
            "model_bytes": sum(entry.nbytes for entry in SavedForm(model).entries(session.states.entries())),
            **({} if loop.plan.exact else {"activations": "int8"}),
            **({"ranks": list(ranks)} if len(ranks) > 1 else {}),
        },
    )
    return compared


def _cache(loop: Loop, advisor: Advisor | None) -> dict[str, object]:
    """What steady steps find in time: as predicted, if there is who predicts, and the mean as measured."""
    plan, schedule = loop.plan, loop.session.schedule
    predicted = predicted_figures(plan, schedule, partial(advisor.predicted, plan)) if advisor else None
    return {
        "predicted": asdict(predicted) if predicted else None,
        "measured": asdict(mean_figures(loop.measured)) if loop.measured else None,
        "states_on_ssd": asdict(states_on_ssd(schedule)),
    }


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
