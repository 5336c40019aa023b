"""`ssdplan bench`: compares the parts of ssdplan with their rivals on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from ssdplan.plans.errors import UsageError
from ssdplan.plans.views.progress_line import ProgressLine

from .parsing import kinds, outputs
from .parsing import options as of
from .parsing.command import Command, Section
from .parsing.types import COUNT, NAMES, PATH, SIZE


@dataclass(frozen=True)
class Options:
    only: tuple[str, ...] | None
    volume: Sequence[Path]
    pairs: int
    size: int
    csv: Path | None
    json: bool


def command() -> Command:
    what = (
        click.Option(
            ["--only"],
            type=NAMES,
            metavar="GROUP,GROUP,...",
            help="engine, adam, overflow, quantise, zeroth-order, checksum, page-lock [all]",
        ),
        click.Option(
            ["--volume"],
            type=PATH,
            multiple=True,
            metavar="PATH",
            help="a directory on the ssd to measure; repeatable [.]",
        ),
    )
    how = (
        click.Option(["--pairs"], type=COUNT, default=10, metavar="N", help="runs of each side, in turns"),
        click.Option(["--size"], type=SIZE, default="1GiB", metavar="SIZE", help="size of the files, and of memory"),
    )
    output = (
        of.csv_option("also write the rows here"),
        click.Option(["--json"], is_flag=True, help="print the figures as JSON"),
    )
    return Command(
        Options,
        call,
        sections=[
            Section("What is compared", what),
            Section("How much of it is compared", how),
            Section("Output", output),
        ],
    )


def call(options: Options) -> int:
    if not options.only or "engine" in options.only:
        of.require_engine()
    outputs.require_writable(options.csv, "--csv", kinds.TABLE)
    from ssdplan.profiler.bench.bench import GROUPS, bench
    from ssdplan.profiler.bench.report import describe_bench, rows_frame

    if options.volume and options.only and "engine" not in options.only:
        raise UsageError("--volume is for the engine, which --only leaves out")
    line = ProgressLine("bench")
    try:
        found = bench(
            options.volume or [Path()],
            nbytes=options.size,
            pairs=options.pairs,
            groups=options.only or GROUPS,
            progress=line,
        )
    finally:
        line.done()
    print(found.json() if options.json else describe_bench(found), end="")
    if options.csv:
        of.write_table(rows_frame(found.rows), options.csv)
    return 0
