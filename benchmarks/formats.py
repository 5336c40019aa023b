"""What formats of optimizer states cost a step that the drive bounds: bytes, and seconds beside those of fp32.

A random model has all its states on ssd and one short micro-batch a step, so that a step is reading, updating and
writing. Each format is solved from one profile, and formats take turns, round by round, in one order and the other. A
step is held against two limits, as its own run's last step has them: the drive's bytes at the rate at which steps with
fp32 states moved theirs, and the time in which the cores computed or updated. Everything lies in one folder, which goes
when it ends.

    python benchmarks/formats.py --work DIR [--hidden 1024] [--layers 24] [--rounds 3] [--steps 7] [--json FILE]
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from commands import command, end_on_sigterm, python, write_text
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.trace import read_trace

FORMATS = (("fp32", "fp32"), ("residual", "fp32"), ("none", "bf16"), ("residual", "int8"))
"""Masters and moments; the first is what the others are held against."""
USUAL = FORMATS[0]


@dataclass(frozen=True)
class Row:
    """One run."""

    masters: str
    moments: str
    bytes_a_parameter: float
    """Read and written a step, of the ssd."""
    predicted_seconds: float
    seconds: float
    """Of a steady step, the mean."""
    core_seconds: float
    """In which the cores computed or updated, of the last step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="on the drive to train from")
    parser.add_argument("--hidden", type=int, default=1024, metavar="N", help="[1024]")
    parser.add_argument("--layers", type=int, default=24, metavar="N", help="[24]")
    parser.add_argument("--vocab", type=int, default=4096, metavar="N", help="[4096]")
    parser.add_argument("--sequence-length", type=int, default=32, metavar="N", help="[32]")
    parser.add_argument("--host-memory", default="1GiB", metavar="SIZE", help="[1GiB]")
    parser.add_argument("--steps", type=int, default=7, metavar="N", help="of each run; the first is not steady [7]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="[3]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    given = parser.parse_args()
    end_on_sigterm()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ssdplan-formats-", dir=given.work) as name:
        folder = Path(name)
        python("ssdplan.executor.model.directory.random_model", "--hidden", given.hidden, "--layers", given.layers,
               "--vocab", given.vocab, "--untied", "--out", folder / "model")  # fmt: skip
        write_text(folder / "data.txt")
        command("profile", "--model", folder / "model", "--volume", folder, "--sequence-length", given.sequence_length,
                "--micro-batch-sizes", 1, "-o", folder / "profile.json")  # fmt: skip
        for number in range(given.rounds):
            for formats in FORMATS if number % 2 == 0 else reversed(FORMATS):
                rows.append(run(folder, formats, given))
                print(f"round {number + 1}: {rows[-1]}", flush=True)
    print(summary(rows))
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def run(folder: Path, formats: tuple[str, str], given: argparse.Namespace) -> Row:
    """Solve and train once."""
    plan_path, out = folder / "plan.json", folder / "run"
    plan_path.unlink(missing_ok=True)
    masters, moments = formats
    command("solve", folder / "profile.json", "--host-memory", given.host_memory, "--micro-batch-size", 1,
            "--micro-batches", 1, "--delay-ratio", 0, "--residency", "parameters=0,optimizer=0,checkpoints=1",
            "--recompute", "all", "--masters", masters, "--optimizer-states", moments, "-o", plan_path)  # fmt: skip
    command("run", plan_path, "--data", folder / "data.txt", "--steps", given.steps, "--volume", folder, "--out", out)
    plan = Plan.load(plan_path)
    report = {row["quantity"]: row for row in json.loads((out / "report.json").read_text())["predictions"]}
    moved = report["ssd_read_bytes"]["measured"] + report["ssd_write_bytes"]["measured"]
    timeline = read_trace(out / "trace.json", build_schedule(plan.model, plan.decision))
    for path in (*folder.glob("*.ssdplan"), *sorted(out.rglob("*"), reverse=True), out):
        path.rmdir() if path.is_dir() else path.unlink()
    return Row(
        masters=masters,
        moments=moments,
        bytes_a_parameter=moved / sum(state.elements for state in plan.model.states),
        predicted_seconds=report["step_seconds"]["predicted"],
        seconds=report["step_seconds"]["measured"],
        core_seconds=busy(timeline, ("compute", "cpu")),
    )


def busy(timeline: Timeline, resources: Iterable[str]) -> float:
    """Seconds of a step in which an operation of one of these resources ran."""
    spans = sorted(
        (timeline.starts[op.index], timeline.ends[op.index]) for op in timeline.graph.ops if op.resource in resources
    )
    total, until = 0.0, float("-inf")
    for start, end in spans:
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def summary(rows: list[Row]) -> str:
    """A line a format, of the medians of its rounds."""
    found = {
        formats: {
            name: statistics.median(getattr(row, name) for row in rows if (row.masters, row.moments) == formats)
            for name in ("bytes_a_parameter", "predicted_seconds", "seconds", "core_seconds")
        }
        for formats in FORMATS
    }
    usual = found[USUAL]
    lines = ["masters   moments  bytes a parameter  predicted  measured  faster  of the bytes' ratio  over its limit"]
    for (masters, moments), row in found.items():
        fewer, faster = usual["bytes_a_parameter"] / row["bytes_a_parameter"], usual["seconds"] / row["seconds"]
        limit = max(usual["seconds"] / fewer, row["core_seconds"])
        lines.append(
            f"{masters:9} {moments:7}  {row['bytes_a_parameter']:17.2f}  {row['predicted_seconds']:7.3f} s "
            f"{row['seconds']:7.3f} s  {faster:5.2f}x  {faster / fewer:18.2f}   {row['seconds'] / limit:13.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
