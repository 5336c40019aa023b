"""What the runner itself costs: the share of a step in which it hands out operations, for a 135M model.

Two figures, of one plan. "Empty" runs the steady step's graph with nothing in its operations, by all the threads that a
run has: what is left is the runner. "Lost" is of a real run's last step, of the lane that computes and updates: from
when an operation's last wait had ended and the lane was free until it began. An empty step is an upper bound of what
the runner adds to a real one, where threads hand out operations while others compute. Everything lies in one folder,
which goes when it ends.

    python benchmarks/dispatch.py --work DIR [--micro-batches 16] [--steps 4] [--json FILE]
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from commands import command, end_on_sigterm, python, write_text
from ssdplan.executor.device.device import open_device
from ssdplan.executor.runtime.runner import IN_FLIGHT, OverlappedRunner
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.graph.ops import Schedule
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.trace import read_trace

SMOLLM2_135M = {"hidden": 576, "layers": 30, "vocab": 49152, "intermediate": 1536, "heads": 9, "kv-heads": 3}
EMPTY_RUNS = 25
WARM_RUNS = 3


@dataclass(frozen=True)
class Dispatch:
    """What came out, of one step."""

    operations: int
    step_seconds: float
    """Measured: the median of steady steps."""
    empty_seconds: float
    """Of a step whose operations do nothing, the median."""
    lost_seconds: float
    """By the lane of compute, in the run's last step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="on the drive to train from")
    parser.add_argument("--micro-batches", type=int, default=16, metavar="N", help="[16]")
    parser.add_argument("--sequence-length", type=int, default=256, metavar="N", help="[256]")
    parser.add_argument("--host-memory", default="512MiB", metavar="SIZE", help="[512MiB]")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="of the run; the first is not steady [4]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    given = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="ssdplan-dispatch-", dir=given.work) as folder:
        found = measured(Path(folder), given)
    each = found.operations
    print(f"{each:,} operations in a step of {found.step_seconds:.2f} s")
    for name, seconds in (("empty", found.empty_seconds), ("lost", found.lost_seconds)):
        share = seconds / found.step_seconds
        print(
            f"{name:6} {1e3 * seconds:7.1f} ms a step, {1e6 * seconds / each:5.1f} us an operation, {share:.2%} of it"
        )
    if given.json:
        given.json.write_text(json.dumps(asdict(found), indent=1) + "\n")


def measured(folder: Path, given: argparse.Namespace) -> Dispatch:
    model, data, profile, plan_path, out = (
        folder / name for name in ("model", "data.txt", "profile.json", "plan.json", "run")
    )
    shape = (word for name, size in SMOLLM2_135M.items() for word in (f"--{name}", size))
    python("ssdplan.executor.model.directory.random_model", *shape, "--out", model)
    write_text(data)
    command("profile", "--model", model, "--volume", folder, "--sequence-length", given.sequence_length,
            "--micro-batch-sizes", 1, "-o", profile)  # fmt: skip
    command("solve", profile, "--host-memory", given.host_memory, "--micro-batches", given.micro_batches,
            "-o", plan_path)  # fmt: skip
    command("run", plan_path, "--data", data, "--steps", given.steps, "--out", out)
    plan = Plan.load(plan_path)
    schedule = build_schedule(plan.model, plan.decision)
    rows = json.loads((out / "report.json").read_text())["predictions"]
    return Dispatch(
        operations=len(schedule.steady.ops),
        step_seconds=next(row["measured"] for row in rows if row["quantity"] == "step_seconds"),
        empty_seconds=empty(schedule, plan),
        lost_seconds=lost(read_trace(out / "trace.json", schedule)),
    )


def empty(schedule: Schedule, plan: Plan) -> float:
    """Seconds of a steady step whose operations do nothing."""
    device = open_device(plan.machine.device)
    runner = OverlappedRunner(device.submit, in_flight=IN_FLIGHT)
    nothing = [_nothing] * len(schedule.steady.ops)
    try:
        times = [runner.run(schedule.steady, nothing).seconds for _ in range(WARM_RUNS + EMPTY_RUNS)]
    finally:
        runner.close()
    return statistics.median(times[WARM_RUNS:])


def lost(timeline: Timeline) -> float:
    """Seconds that the lane of compute was free although its next operation waited for nothing any more."""
    ops = [op for op in timeline.graph.ops if op.resource == "compute"]
    free = total = 0.0
    for op in sorted(ops, key=lambda op: timeline.starts[op.index]):
        ready = max([free, *(timeline.ends[wait] for wait in op.waits)])
        total += max(timeline.starts[op.index] - ready, 0.0)
        free = timeline.ends[op.index]
    return total


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
