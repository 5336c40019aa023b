"""Steps beside the machine's own limit, with the drive measured between any two of them.

It profiles, solves one plan and runs it in this process; at each end of a step it measures what the drive does at that
moment, as a profile does. The limit of a step is what cannot be hidden: its compute and update seconds together (they
share the cores), or its bytes over the drive's mixed bandwidth, the mean of both ends of the step, whichever is longer.
So a drive that changes within a minute is held against itself.

    python benchmarks/limit.py --work DIR [--only medium] [--host-memory 2GiB] [--micro-batches 1] [--steps 16]
"""

import argparse
import io
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

from prediction import SHAPES, Bench, drive_seconds

from commands import command, end_on_sigterm
from ssdplan import cli
from ssdplan.executor.loop import Loop
from ssdplan.planner.critical import SHARED_CORES, loads
from ssdplan.plans.plan import Plan
from ssdplan.plans.profile import Volume
from ssdplan.plans.timeline import Timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="on the drive to measure")
    parser.add_argument("--only", choices=sorted(SHAPES), default="medium", help="the shape [medium]")
    parser.add_argument("--host-memory", default="2GiB", metavar="SIZE", help="as ssdplan solve [2GiB]")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N", help="as ssdplan solve [1]")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="of which the first does not count [16]")
    parser.add_argument("--precision", default="bf16", metavar="P", help="as ssdplan profile [bf16]")
    parser.add_argument("--shorten", type=int, choices=(1, 2, 4), default=1, help="divide sequence lengths by it [1]")
    given = parser.parse_args()
    if given.steps < 2:
        parser.error("--steps: two at least, for the first does not count")
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="ssdplan-limit-", dir=given.work) as folder:
        bench = Bench(given.only, Path(folder), given.precision, given.shorten)
        bench.profile()
        plan = Path(folder) / "plan.json"
        command("solve", bench.profiled, "--host-memory", given.host_memory, "--micro-batches", given.micro_batches,
                "-o", plan)  # fmt: skip
        measured = Measured(bench)
        measured.run("run", plan, "--data", bench.data, "--volume", bench.folder, "--out", Path(folder) / "run",
                     "--steps", given.steps)  # fmt: skip
        print(table(Plan.load(plan), measured.steps, measured.volumes))


class Measured:
    """A run of which every step is kept, and the drive as it was at the end of each."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.steps: list[Timeline] = []
        self.volumes: list[Volume] = []

    def run(self, *arguments: object) -> None:
        """A command of ssdplan in this process."""
        between = Loop._between

        def and_the_drive(loop: Loop, steps: int) -> None:
            between(loop, steps)
            assert loop.timeline
            self.steps.append(loop.timeline)
            self.volumes.append(self._bench.volume())

        with ExitStack() as stack:
            stack.enter_context(patch.object(Loop, "_between", and_the_drive))
            said = stack.enter_context(redirect_stdout(io.StringIO()))
            stack.enter_context(redirect_stderr(said))
            code = cli.main(list(map(str, arguments)))
        if code:
            raise SystemExit(said.getvalue())


def table(plan: Plan, steps: Sequence[Timeline], volumes: Sequence[Volume]) -> str:
    """A line a step, and all of them together."""
    profiled = drive_seconds(steps[-1], plan.machine.volumes)
    lines = [f"predicted {plan.prediction.step_seconds:.2f} s, the drive {profiled:.2f} s of it as profiled"]
    seconds, limits = [], []
    for step, (before, behind) in zip(steps[1:], pairwise(volumes), strict=True):
        cores = loads(step, plan.machine)[SHARED_CORES]
        around = [drive_seconds(step, [volume]) for volume in (before, behind)]
        seconds.append(step.seconds)
        limits.append(max(cores, statistics.mean(around)))
        lines.append(
            f"step {step.seconds:6.2f} s  cores {cores:6.2f} s  drive {around[0]:6.2f}, {around[1]:6.2f} s  "
            f"over its limit {step.seconds / limits[-1]:.2f}"
        )
    each = statistics.median(map(lambda s, limit: s / limit, seconds, limits))
    lines.append(f"over the limit: median {each:.2f}, of all steps together {sum(seconds) / sum(limits):.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
