"""`ssdplan run`: training by a plan."""

import argparse
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdplan.plans.errors import UsageError
from ssdplan.plans.live import FIRST_STEPS, Pace, live_line
from ssdplan.plans.plan import Plan
from ssdplan.plans.progress import ProgressLine
from ssdplan.plans.units import format_bytes, format_seconds

from . import options as of
from .resolved import OptionValue, as_kept, as_written, given, mark_defaults, over, resolved, restored

if TYPE_CHECKING:
    from ssdplan.executor.metrics import SnapshotCost, StepMetrics
    from ssdplan.executor.resume import Kept


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=call)
    parser.add_argument(
        "plan",
        type=of.path,
        nargs="?",
        metavar="PLAN|CONFIG",
        help="what ssdplan solve wrote; or, where its name ends in .yaml or .yml, a configuration: a file of lines "
        "`option: value` with these options' long names, and `plan`, over which options given here count",
    )
    trained = parser.add_argument_group("what to train, and for how long")
    trained.add_argument(
        "--data", type=of.path, metavar="PATH", help="a .txt, .jsonl, .parquet or .arrow file, or a directory"
    )
    trained.add_argument("--steps", type=of.count, metavar="N", help="optimizer updates")
    trained.add_argument("--out", type=of.path, metavar="RUN", help="a new directory for the run")
    trained.add_argument(
        "--model", type=of.model, metavar="DIR|NAME", help="the model, if it moved since it was profiled [the plan's]"
    )
    trained.add_argument(
        "--volume", type=of.path, action="append", metavar="PATH", help="where the store lies; repeatable [RUN]"
    )
    read = parser.add_argument_group("how data are read")
    read.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let samples share rows, or give each a row of its own",
    )
    read.add_argument(
        "--attend-across",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="samples that share a row attend to each other, as one long text",
    )
    of.add_data_options(read)
    read.add_argument("--seed", type=of.seed, default=0, metavar="N", help="of the order of samples, and of dropout")
    rate = parser.add_argument_group("learning rate")
    rate.add_argument("--lr", type=of.positive, default=1e-5, metavar="X", help="learning rate, at its peak")
    rate.add_argument(
        "--lr-schedule",
        choices=["constant", "linear", "cosine", "wsd"],
        default="constant",
        help="how the learning rate goes on from its peak; wsd: it stays there, and decays at the end",
    )
    rate.add_argument(
        "--warmup-steps",
        type=of.steps_or_share,
        default=0,
        metavar="N|F",
        help="steps in which the learning rate rises to its peak; below 1, a share of --steps",
    )
    rate.add_argument(
        "--decay-steps",
        type=of.steps_or_share,
        metavar="N|F",
        help="steps in which wsd decays; below 1, a share of --steps [0.1]",
    )
    rate.add_argument("--min-lr", type=of.nonnegative, default=0.0, metavar="X", help="where the learning rate ends")
    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument("--beta1", type=of.below_one, default=0.9, metavar="X", help="of AdamW's first moment")
    optimizer.add_argument("--beta2", type=of.below_one, default=0.999, metavar="X", help="of AdamW's second moment")
    optimizer.add_argument("--eps", type=of.positive, default=1e-8, metavar="X", help="what AdamW adds to its divisor")
    optimizer.add_argument(
        "--weight-decay", type=of.nonnegative, default=0.01, metavar="X", help="decoupled weight decay"
    )
    optimizer.add_argument(
        "--decay-all",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="let biases and the weights of norms decay too, which else do not",
    )
    optimizer.add_argument(
        "--loss-scale", type=of.positive, metavar="X", help="of a plan in fp16, to begin with: a power of two [65536]"
    )
    optimizer.add_argument(
        "--loss-scale-growth", type=of.count, metavar="N", help="steps without overflow that double it [2000]"
    )
    evaluation = parser.add_argument_group("evaluation, before the first step, after the last, and between")
    held_out = evaluation.add_mutually_exclusive_group()
    held_out.add_argument(
        "--eval-data", type=of.path_or_none, metavar="PATH", help="held-out data; '' ends those of a run [none]"
    )
    held_out.add_argument(
        "--eval-split",
        type=of.share,
        metavar="F",
        help="hold a fraction of the data out of training, and evaluate it [none]",
    )
    held_out.add_argument(
        "--eval-samples", type=of.count, metavar="N", help="hold N samples out, and evaluate them [none]"
    )
    evaluation.add_argument(
        "--eval-every", type=of.count, metavar="N", help="also after every N steps [only first and last]"
    )
    kept = parser.add_argument_group("snapshots, and going on from them")
    kept.add_argument(
        "--snapshot-every", type=of.count, metavar="N", help="make the states durable every N steps [never]"
    )
    kept.add_argument(
        "--snapshot-minutes", type=of.positive, metavar="M", help="also after M minutes, when the step ends [never]"
    )
    kept.add_argument(
        "--keep", type=of.count, default=2, metavar="K", help="snapshots that the store holds: 2, or 1 in less space"
    )
    kept.add_argument(
        "--resume",
        type=of.path,
        metavar="RUN",
        help="go on with a run that was stopped, to the same bits; what it was started with need not be repeated",
    )
    kept.add_argument(
        "--resume-anyway", action="store_true", help="even when model, data, batch or recipe are not what they were"
    )
    kept.add_argument(
        "--adopt",
        action="store_true",
        help="the run's directory was moved or comes from somebody else: the volumes outside of it that --volume names "
        "are this run's, and it may write where its run.json says",
    )
    steps = parser.add_argument_group("how steps run")
    steps.add_argument(
        "--serial",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="one operation at a time: slow, and easy to believe",
    )
    steps.add_argument(
        "--replan",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="when the first steps show another machine than the profile's, move to the plan that solve would choose",
    )
    steps.add_argument(
        "--stall-after",
        type=of.positive,
        metavar="SECONDS",
        help="tell what a step waits for in which no operation ends for so long [60, or 5 predicted steps]",
    )
    steps.add_argument(
        "--stall-abort", type=of.positive, metavar="SECONDS", help="end the run when none ends for so long [never]"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--tensorboard",
        nargs="?",
        type=of.directory,
        const=True,
        metavar="DIR",
        help="also write what metrics.jsonl has as events for TensorBoard [RUN/tensorboard]",
    )
    output.add_argument(
        "--wandb", metavar="PROJECT", help="also send it to Weights & Biases; ENTITY/PROJECT for a team's"
    )
    output.add_argument("--json", action="store_true", help="print the report as JSON")

    mark_defaults(parser)


def call(options: argparse.Namespace) -> int:
    of.require_engine()
    said = _said(options)
    _take(options, said)
    if options.resume is None:
        lacking = [name for name in ("PLAN", "--data", "--steps", "--out") if name.strip("-").lower() not in said]
        if lacking:
            raise UsageError(f"run needs {', '.join(lacking)}; to go on with a run that was stopped, give --resume RUN")
        if options.resume_anyway is True:
            raise UsageError("--resume-anyway: there is nothing to go on with; give --resume RUN")
        if options.adopt is True:
            raise UsageError("--adopt: there is nothing to go on with; give --resume RUN")
        return _run(resolved(options), None, said, said)
    if options.out is not None and options.out.absolute() != options.resume.absolute():
        raise UsageError(f"--out {options.out}: a run goes on in its own directory; leave it out")
    of.settle_process()
    from ssdplan.executor.run_directory import require_run

    require_run(options.resume)  # before torch is loaded, which takes seconds
    from ssdplan.executor.resume import reopened

    with reopened(options.resume, options.volume or (), adopt=options.adopt is True) as kept:
        now = said
        said = over(now, _started(kept, now), add_options)
        if lacking := [name for name in ("--data", "--steps") if name.strip("-") not in said]:
            raise UsageError(f"{kept.directory.path / 'run.json'}: it does not say {', '.join(lacking)}; give it again")
        _take(options, said)
        return _run(resolved(options), kept, said, now)


_NOT_KEPT = frozenset({"command", "plan", "out", "volume", "resume", "resume_anyway", "adopt"})
"""Where a run lies, what it trains by, and how it was told to go on: not what it was started with."""


def _started(kept: "Kept", now: Collection[str]) -> dict[str, Any]:
    """The options that a run was started with, by its run.json; those that are given `now` count instead.

    Raises UsageError for one that no run keeps, and where the run was begun elsewhere and they choose a place outside
    of it to write to, or an account to report to: only the user does.
    """
    from ssdplan.executor.run_directory import RUN

    directory, source = kept.directory, kept.directory.path / RUN
    if strange := sorted(directory.run.options.keys() & _NOT_KEPT):
        raise UsageError(f"{source}: options.{strange[0]}: is no option that a run keeps; take it out")
    started = restored(add_options, directory.run.options, source)
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


def _said(options: argparse.Namespace) -> dict[str, Any]:
    """The options that the user gave, on the command line or, below that, in a configuration."""
    from .configuration import is_configuration, read_configuration

    said = given(options)
    if options.plan is None or not is_configuration(options.plan):
        return said
    del said["plan"]
    return over(said, read_configuration(options.plan, add_options), add_options)


def _take(options: argparse.Namespace, said: Mapping[str, Any]) -> None:
    """Let the options be what was said, and what was not said be as it was; a configuration is no plan."""
    vars(options).update({"plan": None, **said})


def _run(options: argparse.Namespace, kept: "Kept | None", said: Collection[str], now: Collection[str]) -> int:
    """`said`: the names of options that were given, now or when the run began; `now`: those that were given now."""
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
    if options.keep != 2 and not (options.snapshot_every or options.snapshot_minutes):
        raise UsageError(f"--keep {options.keep}: no snapshots are taken; give --snapshot-every N too")
    plan = Plan.load(options.plan) if options.plan else kept.plan if kept else None
    assert plan, "a new run has a plan"
    plan.refuse_estimates()
    if plan.decision.precision != "fp16" and (options.loss_scale or options.loss_scale_growth):
        raise UsageError(f"the plan is in {plan.decision.precision}, which needs no --loss-scale")
    of.settle_process()
    model = _looked_for(options, plan, kept, named="model" in now)
    from ssdplan.executor.checks import DTYPES
    from ssdplan.executor.data.text_data import HoldOut
    from ssdplan.executor.device import open_device
    from ssdplan.executor.learning_rate import DECAY_SHARE, LearningRate, steps_of
    from ssdplan.executor.model import open_model
    from ssdplan.executor.optimizer import AdamW
    from ssdplan.executor.recipe import Recipe, Watch
    from ssdplan.executor.reporting import Reports
    from ssdplan.executor.run_directory import PLAN, on_planned_drives
    from ssdplan.executor.scaling import LossScale
    from ssdplan.executor.train import train
    from ssdplan.planner.replan import Replanner
    from ssdplan.plans.report import describe_report

    events: Path | None = None
    if options.tensorboard:
        events = Path("tensorboard") if options.tensorboard is True else options.tensorboard.absolute()
    reports = Reports(events, options.wandb)
    reports.require_packages()
    from .configuration import configuration

    options.model = str(model.absolute())
    out = kept.directory.path if kept else options.out
    line = ProgressLine("run")
    line.note(_in_full(options, options.plan or out / PLAN, said))
    decay = options.decay_steps
    if decay is None:
        decay = DECAY_SHARE if options.lr_schedule == "wsd" else 0
    recipe = Recipe(
        steps=options.steps,
        optimizer=AdamW(
            lr=options.lr,
            beta1=options.beta1,
            beta2=options.beta2,
            eps=options.eps,
            weight_decay=options.weight_decay,
            decay_all=options.decay_all,
        ),
        learning_rate=LearningRate(
            options.lr_schedule,
            steps=0 if options.lr_schedule == "constant" else options.steps,
            warmup_steps=steps_of(options.warmup_steps, options.steps),
            decay_steps=steps_of(decay, options.steps),
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
        token_cache=of.token_cache(options),
        eval_every=(options.eval_every or 0) if evaluated else 0,
        snapshot_every=options.snapshot_every or 0,
        snapshot_minutes=options.snapshot_minutes,
        keep=options.keep,
        serial=options.serial,
        replan=options.replan,
        stall_after_seconds=options.stall_after,
        stall_abort_seconds=options.stall_abort,
    )

    pace = Pace(options.steps)
    named = options.volume or (list(map(Path, kept.directory.run.volumes)) if kept else [])
    places = named or [out]
    # Of other drives than those that were profiled no rating is known.
    rated = plan.machine if on_planned_drives(plan, places) else None

    def step(metrics: "StepMetrics") -> None:
        words = live_line(
            step=metrics.step,
            steps=options.steps,
            loss=metrics.loss,
            skipped=metrics.skipped,
            tokens_per_second=metrics.tokens_per_second,
            learnt_share=metrics.tokens / metrics.computed_tokens,
            left_seconds=pace.left(metrics.step, metrics.step_seconds),
            written_bytes=metrics.ssd_written_bytes,
            machine=rated,
        )
        line.say(f"run: {words}", seldom=metrics.step < options.steps and pace.told > FIRST_STEPS)

    def evaluation(number: int, loss: float) -> None:
        line.note(f"held-out loss after {number} steps: {loss:.4f}")

    def snapshot(number: int, cost: "SnapshotCost") -> None:
        line.note(
            f"snapshot after {number} steps: {format_bytes(cost.snapshot_bytes)} in "
            f"{format_seconds(cost.snapshot_seconds)}"
        )

    try:
        result = train(
            plan,
            open_model(
                model,
                DTYPES[plan.decision.precision],
                freeze=plan.model.freeze,
                allow_unused_weights=plan.model.allow_unused_weights,
            ),
            open_device(plan.machine.device, plan.machine.device_index),
            data=options.data,
            out=out,
            recipe=recipe,
            eval_data=options.eval_data or None,
            volumes=options.volume or (),
            watch=Watch(loading=line, step=step, evaluation=evaluation, snapshot=snapshot, note=line.note),
            advisor=Replanner(plan),
            reports=reports,
            options=as_kept(options, _NOT_KEPT),
            configuration=configuration(
                as_kept(options, (*_NOT_KEPT, "json")), PLAN, [str(place.absolute()) for place in named]
            ),
            resume=kept,
            anyway=options.resume_anyway,
        )
    finally:
        line.done()
    report = out / "report.json"
    print(report.read_text(encoding="utf-8") if options.json else describe_report(report))
    line.note(f"the model is in {result.model_directory}")
    return 0


def _looked_for(options: argparse.Namespace, plan: Plan, kept: "Kept | None", *, named: bool) -> Path:
    """The model's directory; only one that the user `named` may be had from the hub. Raises UsageError where that, the
    data or the place of a new run is not as it must be, before torch is loaded, which takes seconds."""
    from ssdplan.executor.data.files import find_files
    from ssdplan.executor.hub import find_model, told_model
    from ssdplan.executor.run_directory import PLAN, RUN, require_new

    if kept is None:
        require_new(options.out)
    for path in filter(None, (options.data, options.eval_data)):
        find_files(path)
    if not (options.model or plan.model.path):
        raise UsageError(f"{options.plan}: the plan names no model directory; give --model")
    if options.model and named:
        return find_model(options.model)
    if options.model:
        assert kept is not None, "what was not named now was kept"
        return told_model(options.model, kept.directory.path / RUN)
    return told_model(plan.model.path, options.plan or (kept.directory.path if kept else options.out) / PLAN)


def _in_full(options: argparse.Namespace, plan: Path, said: Collection[str]) -> str:
    """All that decides what the run does, as one would write it; what nobody gave stands apart."""
    shown = as_kept(options, ("command", "plan", "resume", "resume_anyway", "adopt", "json"))
    parts = [f"by {plan}, as told" + (" now or when it began" if options.resume else "")]
    parts += [textwrap.indent(as_written({name: shown[name] for name in shown if name in said}), "  ")]
    rest = {name: value for name, value in shown.items() if name not in said}
    if rest:
        parts += ["and by default", textwrap.indent(as_written(rest), "  ")]
    return "\n".join(parts)
