"""Steps beside the machine's own limit, with the drive measured between any two of them.

It profiles, solves one plan and runs it in this process; at each end of a step it measures what the drive does at that
moment, as a profile does, on what the run's volume has behind the store. The limit of a step is what cannot be hidden:
its compute and update seconds together (they share the cores), or its bytes over the drive's mixed bandwidth, the mean
of both ends of the step, whichever is longer. So a drive that changes within a minute is held against itself.

    python benchmarks/limit.py --work DIR [--only medium] [--host-memory 2GiB] [--micro-batches 1] [--steps 16]
"""

import argparse
import statistics
from collections.abc import Sequence
from itertools import pairwise

from one_plan import OnePlan, add_options, one_plan
from prediction import drive_seconds, limit

from commands import end_on_sigterm
from ssdplan.executor.loop import Loop
from ssdplan.executor.store.volumes import Blank, held_blank
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Volume
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.units import whole_pages

BESIDE_STATES = 64 << 20
"""More than the rest of a store takes: superblocks, tables and the ends of stripes. Where it is too little, a checksum
ends the run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, shape="medium", host_memory="2GiB")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N", help="as ssdplan solve [1]")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="of which the first does not count [16]")
    given = parser.parse_args()
    if given.steps < 2:
        parser.error("--steps: two at least, for the first does not count")
    end_on_sigterm()
    with one_plan(given, micro_batches=given.micro_batches) as one:
        print(table(one.plan, *measured(one, given.steps)))


def measured(one: OnePlan, count: int) -> tuple[list[Timeline], list[Volume]]:
    """The steps of a run, and the drive as it was at the end of each."""
    steps: list[Timeline] = []
    volumes: list[Volume] = []
    between = Loop._between
    with held_blank(one.bench.folder) as blank:
        assert blank
        start = whole_pages(one.plan.prediction.ssd_bytes + BESIDE_STATES)
        behind = Blank(blank.path, start, blank.end)

    def and_the_drive(loop: Loop, done: int) -> None:
        between(loop, done)
        assert loop.timeline
        steps.append(loop.timeline)
        volumes.append(one.bench.drive(behind, behind.end - behind.start))

    one.run(count, (Loop, "_between", and_the_drive))
    return steps, volumes


def table(plan: Plan, steps: Sequence[Timeline], volumes: Sequence[Volume]) -> str:
    """A line a step, and all of them together."""
    profiled = drive_seconds(steps[-1], plan.machine.volumes)
    lines = [f"predicted {plan.prediction.step_seconds:.2f} s, the drive {profiled:.2f} s of it as profiled"]
    seconds, limits, over = [], [], []
    for step, (before, behind) in zip(steps[1:], pairwise(volumes), strict=True):
        around = [drive_seconds(step, [volume]) for volume in (before, behind)]
        most, by = limit(step, plan.machine, step.seconds, statistics.mean(around))
        seconds.append(step.seconds)
        limits.append(most)
        over.append(step.seconds / most)
        lines.append(
            f"step {step.seconds:6.2f} s  limit {most:6.2f} s ({over[-1]:.2f}, {by})  "
            f"drive {around[0]:.2f}, {around[1]:.2f} s"
        )
    together = sum(seconds) / sum(limits)
    lines.append(f"over the limit: median {statistics.median(over):.2f}, of all steps together {together:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
