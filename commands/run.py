"""`ssdplan run`: training by a plan."""

import contextlib
import io
import os
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ssdplan.executor.ranks.place import (
    Place,
    directory_of,
    named_rank,
    place_of,
    settle_rank,
)
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.run import OptionValue
from ssdplan.plans.errors import MismatchError, UsageError
from ssdplan.plans.units import format_bytes, format_seconds
from ssdplan.plans.views.live_line import FIRST_STEPS, Pace, live_line
from ssdplan.plans.views.progress_line import ProgressLine

from .parsing import options as of
from .parsing import outputs
from .parsing.command import Command
from .ranks.of_run import asked_ranks, going_on, launched, once, patience, require_alone, require_ranks, volumes_of
from .resolved import as_kept, as_written, over, restored
from .run_options import EXCLUSIVE, Options, plan_argument, sections

if TYPE_CHECKING:
    from ssdplan.executor.ranks.group import Ranks
    from ssdplan.executor.snapshots.resume import Kept
    from ssdplan.plans.documents.metrics import SnapshotCost, StepMetrics


def command() -> Command:
    return Command(Options, call, [plan_argument()], sections(), exclusive=EXCLUSIVE, tells_given=True)


def _require_one_directory(options: Options) -> None:
    """Raise UsageError where a run is to go on in another directory than its own."""
    resume, out = options.resume, options.out
    if resume is not None and out is not None and out.absolute() != resume.absolute():
        raise UsageError(f"--out {out}: a run goes on in its own directory; leave it out")


@dataclass(frozen=True)
class Listener:
    """Who runs it from Python, in the place of a terminal."""

    stream: TextIO
    """Gets what a terminal would show of progress; of results nothing is printed."""
    length: Callable[[int], None]
    step: Callable[["StepMetrics"], bool | None]
    """Both as `executor/recipe.py` has them of a `Watch`."""


def call(options: Options, listener: Listener | None = None) -> int:
    of.require_engine()
    said = _said(options)
    options = _with(options, said)
    _require_one_directory(options)
    outputs.require_folder(options.out, "--out")
    if isinstance(options.tensorboard, Path):
        outputs.require_folder(options.tensorboard, "--tensorboard")
    place = place_of(os.environ)
    if place:
        settle_rank(place)
        with named_rank(place.rank), once(place):
            options = replace(options, volume=volumes_of(options.volume, place))
    elif (ranks := asked_ranks(options)) > 1:
        return launched(options, ranks)
    if options.resume is None:
        if lacking := _lacking(said, "PLAN", "--data", _LENGTH, "--out"):
            raise UsageError(f"run needs {', '.join(lacking)}; to go on with a run that was stopped, give --resume RUN")
        if options.resume_anyway:
            raise UsageError("--resume-anyway: there is nothing to go on with; give --resume RUN")
        if options.adopt:
            raise UsageError("--adopt: there is nothing to go on with; give --resume RUN")
        with once(place):
            return _run(options, None, said, said, place, listener=listener)
    of.settle_process()
    from ssdplan.executor.snapshots.run_directory import require_run

    with named_rank(place.rank if place else None), once(place), contextlib.ExitStack() as stack:
        if not (place and place.rank):
            require_run(options.resume)  # before torch is loaded, which takes seconds
        joined_ranks = stack.enter_context(going_on(options, said, place, options.resume))
        from ssdplan.executor.snapshots.resume import reopened

        directory = directory_of(options.resume, joined_ranks.rank)
        kept = stack.enter_context(reopened(directory, options.volume, adopt=options.adopt))
        now = said
        said = over(now, _started(kept, now), command())
        if lacking := _lacking(said, "--data", _LENGTH):
            raise UsageError(f"{kept.directory.path / 'run.json'}: it does not say {', '.join(lacking)}; give it again")
        return _run(_with(options, said), kept, said, now, place, joined_ranks, listener)


_LENGTH = "--steps or --epochs"


def _lacking(said: Collection[str], *needed: str) -> list[str]:
    """Of what is needed, in the words of the command line, what was not said."""
    return [words for words in needed if not any(name.strip("-").lower() in said for name in words.split(" or "))]


_NOT_KEPT = frozenset({"plan", "out", "volume", "resume", "resume_anyway", "adopt", "ranks"})
"""Where a run lies, what it trains by, and how it was told to go on: not what it was started with."""


def _started(kept: "Kept", now: Collection[str]) -> dict[str, Any]:
    """The options that a run was started with, by its run.json; those that are given `now` count instead.

    Raises UsageError for one that no run keeps, and where the run was begun elsewhere and they choose a place outside
    of it to write to, or an account to report to: only the user does.
    """
    from ssdplan.plans.documents.run import RUN

    directory, source = kept.directory, kept.directory.path / RUN
    if strange := sorted(directory.run.options.keys() & _NOT_KEPT):
        raise UsageError(f"{source}: options.{strange[0]}: is no option that a run keeps; take it out")
    started = restored(command(), directory.run.options, source)
    if directory.known:
        return started
    inside = directory.path.resolve()
    told = {name: started[name] for name in ("token_cache", "tensorboard", "wandb") if name in started.keys() - now}
    outside: dict[str, OptionValue] = {
        name: str(value)
        for name, value in told.items()
        if value and value is not True and not (isinstance(value, Path) and value.resolve().is_relative_to(inside))
    }
    if outside:
        raise UsageError(
            f"{directory.path}: was begun elsewhere or by somebody else, and its {RUN} has it write outside of it: "
            f"{as_written(outside)}; give what is right of that again, or take all of it with --adopt"
        )
    return started


def _said(options: Options) -> dict[str, Any]:
    """The options that the user gave, on the command line or, below that, in a configuration."""
    from .configuration import is_configuration, read_configuration

    said = {name: value for name, value in options.values().items() if name in options.given}
    if options.plan is None or not is_configuration(options.plan):
        return said
    del said["plan"]
    return over(said, read_configuration(options.plan, command()), command())


def _with(options: Options, said: Mapping[str, Any]) -> Options:
    """The options with what was said; what was not said stays as it was, but a configuration is no plan."""
    return replace(options, **{"plan": None, **said})


def _run(
    options: Options,
    kept: "Kept | None",
    said: Collection[str],
    now: Collection[str],
    place: Place | None,
    ranks: "Ranks | None" = None,
    listener: Listener | None = None,
) -> int:
    """`said`: the names of options that were given, now or when the run began; `now`: those that were given now.
    `place`: of one of several ranks; `ranks`: all of them, of a run that goes on."""
    evaluated = bool(options.eval_data or options.eval_split or options.eval_samples)
    if options.eval_every and not evaluated and options.eval_data is None:
        raise UsageError("--eval-every needs --eval-data, --eval-split or --eval-samples")
    if options.attend_across and not options.pack:
        raise UsageError("--attend-across is for rows that samples share; leave it out with --no-pack")
    if options.keep > 2:
        raise UsageError(
            f"--keep {options.keep}: the store holds the last 2 snapshots at most, each more would take another place "
            "for all optimizer states; to keep a model for longer, ssdplan export RUN --to DIR writes it"
        )
    plan = Plan.load(options.plan) if options.plan else kept.plan if kept else None
    steps, data, out = options.steps or 0, options.data, kept.directory.path if kept else options.out
    assert plan and (steps or options.epochs) and data and out, "whoever calls this has looked for them"
    plan.refuse_estimates()
    if place:
        require_ranks(plan, place.size)
        require_alone(options)
        out = out if kept else directory_of(out, place.rank)
    elif plan.decision.ranks > 1:
        require_ranks(plan, options.ranks or 1)
    if plan.decision.zeroth_order:
        _require_zeroth_order(options, said)
    if plan.decision.optimizer != "muon":
        _refuse_muon(options, plan)
    if options.keep != 2 and not (options.snapshot_every or options.snapshot_minutes):
        raise UsageError(f"--keep {options.keep}: no snapshots are taken; give --snapshot-every N too")
    if kept and kept.plan.decision.optimizer != plan.decision.optimizer:
        raise MismatchError(
            f"{out}: the run trains by {kept.plan.decision.optimizer}, and this plan by {plan.decision.optimizer}; go "
            "on with a plan for the run's own"
        )
    options = _settled(options, plan)
    if plan.decision.precision != "fp16" and (options.loss_scale or options.loss_scale_growth):
        raise UsageError(f"the plan is in {plan.decision.precision}, which needs no --loss-scale")
    of.settle_process()
    rank, local_rank = (place.rank, place.local_rank) if place else (0, 0)
    model = _looked_for(options, plan, out, kept, rank=rank, named="model" in now)
    from ssdplan.executor.data.epochs import Epochs
    from ssdplan.executor.data.text_data import HoldOut
    from ssdplan.executor.device.device import open_device
    from ssdplan.executor.device.tensors import DTYPES
    from ssdplan.executor.metrics.reporting import Reports
    from ssdplan.executor.model.model import open_model
    from ssdplan.executor.optimizer.adamw import AdamW
    from ssdplan.executor.optimizer.learning_rate import DECAY_SHARE, LearningRate, steps_of
    from ssdplan.executor.optimizer.loss_scale import LossScale
    from ssdplan.executor.optimizer.muon import Muon
    from ssdplan.executor.optimizer.zeroth_order import MeZO
    from ssdplan.executor.ranks.group import joined
    from ssdplan.executor.recipe import Recipe, Watch
    from ssdplan.executor.snapshots.run_directory import on_planned_drives
    from ssdplan.executor.train import train
    from ssdplan.planner.replan import Replanner
    from ssdplan.plans.documents.run import PLAN
    from ssdplan.plans.views.report_text import describe_report

    events: Path | None = None
    if options.tensorboard:
        events = options.tensorboard.absolute() if isinstance(options.tensorboard, Path) else Path("tensorboard")
    reports = Reports(events, options.wandb)
    reports.require_packages()
    from .configuration import configuration

    options = replace(options, model=str(model.absolute()))
    stream = io.StringIO() if rank else listener.stream if listener else None  # rank 0 speaks for all
    line = ProgressLine("run", stream)
    line.note(_in_full(options, options.plan or out / PLAN, said))
    decay = options.decay_steps
    if decay is None:
        decay = DECAY_SHARE if options.lr_schedule == "wsd" else 0
    assert options.lr is not None and options.eps is not None and options.weight_decay is not None
    if plan.decision.masters == "none" and not plan.decision.zeroth_order:
        line.note(
            f"bf16 weights are updated without masters: at --lr {options.lr:g} those above {512 * options.lr:.2g} "
            "stand still (ssdplan solve --masters residual loses nothing)"
        )
    optimizer: AdamW | MeZO = AdamW(
        lr=options.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        eps=options.eps,
        weight_decay=options.weight_decay,
        decay_all=options.decay_all,
    )
    if plan.decision.optimizer == "muon":
        optimizer = Muon(
            **vars(optimizer),
            lr_of_matrices=1.0 if options.muon_lr is None else options.muon_lr / options.lr,
            momentum=Muon.momentum if options.muon_momentum is None else options.muon_momentum,
            adjust_lr=options.muon_adjust_lr or Muon.adjust_lr,
        )
    if plan.decision.zeroth_order:
        optimizer = MeZO(
            lr=options.lr,
            eps=options.eps,
            weight_decay=options.weight_decay,
            seed=options.seed,
            decay_all=options.decay_all,
        )
    recipe = Recipe(
        steps=steps,
        epochs=Epochs(options.epochs, options.warmup_steps, decay) if options.epochs else None,
        optimizer=optimizer,
        learning_rate=LearningRate(
            options.lr_schedule,
            steps=0 if options.lr_schedule == "constant" else steps,
            warmup_steps=steps_of(options.warmup_steps, steps),
            decay_steps=steps_of(decay, steps),
            min_lr=options.min_lr,
        ),
        loss_scale=LossScale(
            scale=options.loss_scale or LossScale.scale,
            growth_interval=options.loss_scale_growth or LossScale.growth_interval,
        ),
        seed=options.seed,
        pack=options.pack,
        attend_across=options.attend_across,
        data_format=options.data_format,
        append_eos=options.append_eos,
        hold_out=HoldOut(options.eval_split, options.eval_samples)
        if options.eval_split or options.eval_samples
        else None,
        token_cache=of.token_cache(options.token_cache),
        eval_every=(options.eval_every or 0) if evaluated else 0,
        snapshot_every=options.snapshot_every or 0,
        snapshot_minutes=options.snapshot_minutes,
        keep=options.keep,
        serial=options.serial,
        replan=options.replan,
        stall_after_seconds=options.stall_after,
        stall_abort_seconds=options.stall_abort,
    )

    pace = Pace(steps)

    def length(number: int) -> None:
        nonlocal steps, pace
        steps, pace = number, Pace(number)
        if listener:
            listener.length(number)

    named = list(options.volume) or (list(map(Path, kept.directory.run.volumes)) if kept else [])
    places = named or [out]
    # Of other drives than those that were profiled no rating is known.
    rated = plan.machine if on_planned_drives(plan, places) else None

    def step(metrics: "StepMetrics") -> bool | None:
        words = live_line(
            step=metrics.step,
            steps=steps,
            loss=metrics.loss,
            skipped=metrics.skipped,
            tokens_per_second=metrics.tokens_per_second,
            learnt_share=metrics.tokens / metrics.computed_tokens,
            left_seconds=pace.left(metrics.step, metrics.step_seconds),
            written_bytes=metrics.ssd_written_bytes,
            machine=rated,
        )
        line.say(f"run: {words}", seldom=metrics.step < steps and pace.told > FIRST_STEPS)
        return listener.step(metrics) if listener else None

    def evaluation(number: int, loss: float) -> None:
        line.note(f"held-out loss after {number} steps: {loss:.4f}")

    def snapshot(number: int, cost: "SnapshotCost") -> None:
        wrote = format_bytes(cost.snapshot_bytes) if cost.snapshot_bytes else "all states were on ssd,"
        line.note(f"snapshot after {number} steps: {wrote} in {format_seconds(cost.snapshot_seconds)}")

    machine, own = plan.machine, rank if place else None
    join = joined(place, machine.device, patience(options, plan)) if ranks is None else contextlib.nullcontext(ranks)
    try:
        with named_rank(own), join as joined_ranks:
            result = train(
                plan,
                open_model(
                    model,
                    DTYPES[plan.decision.precision],
                    freeze=plan.model.freeze,
                    allow_unused_weights=plan.model.allow_unused_weights,
                    muon=plan.model.muon,
                ),
                open_device(machine.device, local_rank if place else machine.device_index),
                data=data,
                out=out,
                recipe=recipe,
                eval_data=options.eval_data or None,
                volumes=options.volume,
                watch=Watch(
                    loading=line, length=length, step=step, evaluation=evaluation, snapshot=snapshot, note=line.note
                ),
                advisor=Replanner(plan),
                reports=reports,
                options=as_kept(options.values(), _NOT_KEPT),
                configuration=configuration(
                    as_kept(options.values(), (*_NOT_KEPT, "json")), PLAN, [str(each.absolute()) for each in named]
                ),
                resume=kept,
                anyway=options.resume_anyway,
                ranks=joined_ranks,
            )
    finally:
        line.done()
    if rank or listener:
        return 0
    report = out / "report.json"
    print(report.read_text(encoding="utf-8") if options.json else describe_report(report))
    line.note(f"the model is in {result.model_directory}")
    return 0


_OF_GRADIENTS = {
    "beta1": "there are no moments",
    "beta2": "there are no moments",
    "loss_scale": "there are no gradients to scale",
    "loss_scale_growth": "there are no gradients to scale",
    "keep": "it keeps the weights of one step, since its log has the others",
    "replan": "no few of its steps say how the machine is",
}
"""Options that say nothing of a run without gradients, and why."""


def _require_zeroth_order(options: Options, said: Collection[str]) -> None:
    """Raise UsageError for what a run by a plan for mezo has no use for."""
    usual = {"beta1": 0.9, "beta2": 0.999, "keep": 2}  # which the configuration of a run has too
    for name, why in _OF_GRADIENTS.items():
        if name in said and getattr(options, name) not in (None, False, usual.get(name)):
            raise UsageError(f"--{name.replace('_', '-')}: the plan is for mezo, and {why}; leave it out")


def _refuse_muon(options: Options, plan: Plan) -> None:
    """Raise UsageError for what only a run by Muon has a use for."""
    for name in ("muon_lr", "muon_momentum", "muon_adjust_lr"):
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')}: the plan is for {plan.decision.optimizer}, which has no such setting; "
                "leave it out"
            )


def _settled(options: Options, plan: Plan) -> Options:
    """The options with the defaults that depend on the optimizer."""
    lr, eps, decay = (1e-6, 1e-3, 0.0) if plan.decision.zeroth_order else (1e-5, 1e-8, 0.01)
    return replace(
        options,
        lr=lr if options.lr is None else options.lr,
        eps=eps if options.eps is None else options.eps,
        weight_decay=decay if options.weight_decay is None else options.weight_decay,
    )


def _looked_for(options: Options, plan: Plan, out: Path, kept: "Kept | None", *, rank: int, named: bool) -> Path:
    """The model's directory; only one that the user `named` may be had from the hub. Raises UsageError where that, the
    data or the place of a new run is not as it must be, before torch is loaded, which takes seconds."""
    from ssdplan.executor.data.reading.files import find_files
    from ssdplan.executor.model.directory.hub import find_model, told_model
    from ssdplan.executor.snapshots.run_directory import require_new
    from ssdplan.plans.documents.run import PLAN, RUN

    if kept is None and options.out:
        require_new(options.out, rank)
    for path in (options.data, options.eval_data):
        if path:
            find_files(path)
    if not (options.model or plan.model.path):
        raise UsageError(f"{options.plan}: the plan names no model directory; give --model")
    if options.model and named:
        return find_model(options.model)
    if options.model:
        assert kept is not None, "what was not named now was kept"
        return told_model(options.model, kept.directory.path / RUN)
    return told_model(plan.model.path, options.plan or out / PLAN)


def _in_full(options: Options, plan: Path, said: Collection[str]) -> str:
    """All that decides what the run does, as one would write it; what nobody gave stands apart."""
    shown = as_kept(options.values(), ("plan", "resume", "resume_anyway", "adopt", "json"))
    parts = [f"by {plan}, as told" + (" now or when it began" if options.resume else "")]
    parts += [textwrap.indent(as_written({name: shown[name] for name in shown if name in said}), "  ")]
    rest = {name: value for name, value in shown.items() if name not in said}
    if rest:
        parts += ["and by default", textwrap.indent(as_written(rest), "  ")]
    return "\n".join(parts)
