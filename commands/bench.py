"""`ssdplan bench`: the parts of ssdplan beside their rivals on this machine."""

import argparse
from pathlib import Path

from ssdplan.plans.errors import UsageError
from ssdplan.plans.progress import ProgressLine

from . import options as of


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=call)
    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--only",
        type=of.names,
        metavar="GROUP,GROUP,...",
        help="engine, adam, overflow, quantise, zeroth-order, checksum, page-lock [all]",
    )
    what.add_argument(
        "--volume",
        type=of.path,
        action="append",
        metavar="PATH",
        help="a directory on the ssd to measure; repeatable [.]",
    )
    how = parser.add_argument_group("how much of it")
    how.add_argument("--pairs", type=of.count, default=10, metavar="N", help="runs of each side, in turns")
    how.add_argument("--size", type=of.nbytes, default="1GiB", metavar="SIZE", help="of the files, and of memory")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the figures as JSON")


def call(options: argparse.Namespace) -> int:
    if not options.only or "engine" in options.only:
        of.require_engine()
    from ssdplan.profiler.bench import GROUPS, bench
    from ssdplan.profiler.bench_report import describe_bench

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
    return 0
