"""`ssdplan replay`: the weights of any step of a zeroth-order run, from its first weights and its log."""

import json
from dataclasses import dataclass
from pathlib import Path

import click

from ssdplan.plans.views.progress_line import ProgressLine

from .parsing import options as of
from .parsing import outputs
from .parsing.command import Argument, Command
from .parsing.types import COUNT, DIRECTORY, MODEL


@dataclass(frozen=True)
class Options:
    run: Path
    to: Path
    step: int | None
    model: str | None
    json: bool


def command() -> Command:
    return Command(
        Options,
        call,
        [
            Argument(["run"], type=DIRECTORY, metavar="RUN", help="the directory of a run by a plan for mezo"),
            click.Option(["--to"], type=DIRECTORY, required=True, metavar="DIR", help="a new directory for the model"),
            click.Option(["--step"], type=COUNT, metavar="N", help="after so many steps [all that the log has]"),
            click.Option(
                ["--model"], type=MODEL, metavar="DIR|NAME", help="the model that the run began with, if it moved"
            ),
            click.Option(["--json"], is_flag=True, help="print where the model is, and of which step"),
        ],
    )


def call(options: Options) -> int:
    of.require_engine()
    outputs.require_folder(options.to, "--to")
    of.settle_process()
    from ssdplan.executor.snapshots.run_directory import require_run

    require_run(options.run)  # before torch is loaded, which takes seconds
    from ssdplan.executor.model.directory.hub import find_model
    from ssdplan.executor.snapshots.replay import replay

    line = ProgressLine("replay")
    try:
        model = find_model(options.model) if options.model else None
        step = replay(options.run, options.to, step=options.step, model=model, progress=line)
    finally:
        line.done()
    if options.json:
        print(json.dumps({"model": str(options.to), "step": step}))
    line.note(f"the model after {step} steps is in {options.to}")
    return 0
