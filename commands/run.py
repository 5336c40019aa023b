"""`ssdplan run`: training by a plan."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ssdplan.plans.errors import UsageError
from ssdplan.plans.plan import Plan
from ssdplan.plans.progress import ProgressLine
from ssdplan.plans.units import format_seconds

from . import options as of

if TYPE_CHECKING:
    from ssdplan.executor.metrics import StepMetrics


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=call)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="what ssdplan solve wrote")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="PATH",
        help="a .txt, .jsonl, .parquet or .arrow file, or a directory",
    )
    parser.add_argument("--steps", type=of.count, required=True, metavar="N", help="optimizer updates")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="a new directory for the run")
    parser.add_argument("--model", metavar="DIR|NAME", help="the model, if it moved since it was profiled")
    parser.add_argument(
        "--volume", type=Path, action="append", metavar="PATH", help="where the store lies; repeatable [RUN]"
    )
    parser.add_argument("--lr", type=of.positive, default=1e-5, metavar="X", help="learning rate")
    parser.add_argument("--weight-decay", type=of.nonnegative, default=0.01, metavar="X", help="decoupled weight decay")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of samples, and of dropout")
    parser.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let samples share rows, or give each a row of its own",
    )
    parser.add_argument(
        "--attend-across", action="store_true", help="samples that share a row attend to each other, as one long text"
    )
    of.add_data_options(parser)
    held_out = parser.add_mutually_exclusive_group()
    held_out.add_argument("--eval-data", type=Path, metavar="PATH", help="held-out data, evaluated first and last")
    held_out.add_argument(
        "--eval-split", type=of.share, metavar="F", help="hold a fraction of the data out of training, and evaluate it"
    )
    held_out.add_argument("--eval-samples", type=of.count, metavar="N", help="hold N samples out, and evaluate them")
    parser.add_argument("--eval-every", type=of.count, metavar="N", help="and after every N steps")
    parser.add_argument("--serial", action="store_true", help="one operation at a time: slow, and easy to believe")
    parser.add_argument(
        "--replan",
        action="store_true",
        help="when the first steps show another machine than the profile's, move to the plan that solve would choose",
    )
    parser.add_argument(
        "--stall-after",
        type=of.positive,
        metavar="SECONDS",
        help="tell what a step waits for in which no operation ends for so long [60, or 5 predicted steps]",
    )
    parser.add_argument(
        "--stall-abort", type=of.positive, metavar="SECONDS", help="end the run when none ends for so long [never]"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def call(options: argparse.Namespace) -> int:
    if options.eval_every and not (options.eval_data or options.eval_split or options.eval_samples):
        raise UsageError("--eval-every needs --eval-data, --eval-split or --eval-samples")
    if options.attend_across and not options.pack:
        raise UsageError("--attend-across is for rows that samples share; leave it out with --no-pack")
    plan = Plan.load(options.plan)
    plan.refuse_fp16()
    plan.refuse_estimates()
    of.settle_process()
    from ssdplan.executor.checks import DTYPES
    from ssdplan.executor.data import HoldOut
    from ssdplan.executor.device import open_device
    from ssdplan.executor.hub import find_model
    from ssdplan.executor.model import open_model
    from ssdplan.executor.optimizer import AdamW
    from ssdplan.executor.recipe import Recipe, Watch
    from ssdplan.executor.train import train
    from ssdplan.planner.replan import Replanner
    from ssdplan.plans.report import describe_report

    if not (options.model or plan.model.path):
        raise UsageError(f"{options.plan}: the plan names no model directory; give --model")
    line = ProgressLine("run")
    recipe = Recipe(
        steps=options.steps,
        optimizer=AdamW(lr=options.lr, weight_decay=options.weight_decay),
        seed=options.seed,
        pack=options.pack,
        attend_across=options.attend_across,
        data_format=options.data_format,
        hold_out=HoldOut(options.eval_split, options.eval_samples)
        if options.eval_split or options.eval_samples
        else None,
        token_cache=of.token_cache(options),
        eval_every=options.eval_every or 0,
        serial=options.serial,
        replan=options.replan,
        stall_after_seconds=options.stall_after,
        stall_abort_seconds=options.stall_abort,
    )

    def step(metrics: "StepMetrics") -> None:
        left = (options.steps - metrics.step) * metrics.step_seconds
        eta = f"  {format_seconds(left)} left" if left else ""
        line.say(
            f"run: step {metrics.step}/{options.steps}  loss {metrics.loss:.4f}"
            f"  {metrics.tokens_per_second:.0f} tokens/s{eta}"
        )

    def evaluation(number: int, loss: float) -> None:
        line.note(f"held-out loss after {number} steps: {loss:.4f}")

    try:
        result = train(
            plan,
            open_model(find_model(options.model or plan.model.path), DTYPES[plan.decision.precision]),
            open_device(plan.machine.device),
            data=options.data,
            out=options.out,
            recipe=recipe,
            eval_data=options.eval_data,
            volumes=options.volume or (),
            watch=Watch(loading=line, step=step, evaluation=evaluation, note=line.note),
            advisor=Replanner(plan),
        )
    finally:
        line.done()
    report = options.out / "report.json"
    print(report.read_text(encoding="utf-8") if options.json else describe_report(report))
    line.note(f"the model is in {result.model_directory}")
    return 0
