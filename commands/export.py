"""`ssdplan export`: the model of a run, from its last snapshot or as it finished."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from ssdplan.plans.views.progress_line import ProgressLine

from .parsing import options as of
from .parsing import outputs
from .parsing.command import Argument, Command
from .parsing.types import DIRECTORY, MODEL, PATH


@dataclass(frozen=True)
class Options:
    run: Path
    to: Path
    model: str | None
    volume: Sequence[Path]
    json: bool


def command() -> Command:
    return Command(
        Options,
        call,
        [
            Argument(["run"], type=DIRECTORY, metavar="RUN", help="a run's directory"),
            click.Option(["--to"], type=DIRECTORY, required=True, metavar="DIR", help="a new directory for the model"),
            click.Option(["--model"], type=MODEL, metavar="DIR|NAME", help="the model that was trained, if it moved"),
            click.Option(
                ["--volume"],
                type=PATH,
                multiple=True,
                metavar="PATH",
                help="where the store lies, if it moved; repeatable",
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
    from ssdplan.executor.snapshots.export_run import export_run

    line = ProgressLine("export")
    try:
        model = find_model(options.model) if options.model else None
        step = export_run(options.run, options.to, model=model, volumes=options.volume, progress=line)
    finally:
        line.done()
    if options.json:
        print(json.dumps({"model": str(options.to), "step": step}))
    line.note(f"the model after {step} steps is in {options.to}" if step else f"the run's model is in {options.to}")
    return 0
