"""How close predictions are, and how close steps come to the machine's own limit: a table over configurations.

In each round it profiles, solves every configuration from that profile and runs it at once, so that every prediction
was made before its run, on a profile of the same hour; the next round takes them in the opposite order. What others do
on a shared machine comes and goes in tens of seconds, so a configuration is judged by the medians of all rounds: of
what was predicted, and of what was measured. How far a configuration's runs lie apart from round to round tells what no
prediction can know.

The simulator alone is judged by one traced step: what it gives the plan with the figures that this very step shows, as
a run's calibration finds them. The limit of a step is what cannot be hidden: compute and update seconds together (they
share the cores) as measured in that run, or the bytes of the ssd over its mixed bandwidth as measured right before the
run and right behind it, whichever is longer. All is measured on one blank volume, which the run then takes: a drive may
differ from place to place. Only the commands of ssdplan do the work; what it writes lies in one folder, which goes when
it ends.

    python benchmarks/prediction.py --work DIR [--only small] [--precision fp32] [--shorten 2] [--json FILE]
"""

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from commands import command, end_on_sigterm, python, write_text
from ssdplan.executor.store.volumes import Blank, held_blank
from ssdplan.native import process
from ssdplan.planner.predict.critical_path import SHARED_CORES, loads
from ssdplan.planner.predict.drive import combined_frontier, hull_edges
from ssdplan.planner.replan import Replanner
from ssdplan.plans.analysis.drift import corrected, slowdowns
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Machine, Profile, Volume
from ssdplan.plans.graph.ops import Transfer
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.trace import read_trace
from ssdplan.profiler.measure import Limits
from ssdplan.profiler.storage import measure_volume

SPACE = 24 << 30
"""Bytes that the largest of the models needs for weights, store and export together, with room to spare."""
RUN_SECONDS = 15
"""Of steady steps in each run, at least, as they are predicted."""
VOLUME_BYTES = 8
"""For one of the model's files, which have two for a parameter: 16, more than any state of a parameter."""
DRIVE_SECONDS = 2.0
"""For measuring the drive before and behind each run."""


@dataclass(frozen=True)
class Shape:
    """A random Llama, and how it is trained."""

    hidden: int
    layers: int
    sequence: int


@dataclass(frozen=True)
class Case:
    """One configuration: a shape, its micro-batches, the host budget, and whatever else is fixed."""

    shape: str
    micro_batches: int
    host: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """What came out of one run. Seconds are of a steady step, the medians of the run."""

    case: str
    round: int
    predicted_seconds: float
    measured_seconds: float
    traced_seconds: float
    """Of the step that the run traced."""
    own_seconds: float
    """What the simulator gives the plan with the figures of that very step, as a run's calibration finds them."""
    limit_seconds: float
    limited_by: str
    drive_seconds: tuple[float, float, float]
    """Of a step's bytes at the drive's mixed bandwidth: as profiled, right before the run, and right behind it."""
    host_predicted: float
    host_measured: float
    ssd_predicted: float
    ssd_measured: float
    tokens_per_second: float
    stolen_before: float
    stolen_meanwhile: float
    """Shares of the processors' time that the host gave to others: during the profile, and in the run's steps."""

    @property
    def error(self) -> float:
        return self.measured_seconds / self.predicted_seconds - 1

    @property
    def model_error(self) -> float:
        """Of the simulator alone: what is left when the machine is exactly as its figures say."""
        return self.traced_seconds / self.own_seconds - 1

    @property
    def over_limit(self) -> float:
        return self.measured_seconds / self.limit_seconds

    @property
    def process_error(self) -> float:
        """How much larger the process was predicted than it was."""
        return self.host_predicted / self.host_measured - 1

    @property
    def ssd_error(self) -> float:
        return self.ssd_measured / max(self.ssd_predicted, 1) - 1


FIGURES = ("error", "model_error", "over_limit", "process_error", "ssd_error")
"""Of a row, what its file has beside what was seen."""

SHAPES = {"small": Shape(768, 12, 256), "medium": Shape(1536, 16, 128), "tiny": Shape(128, 4, 64)}
CASES = (
    Case("small", 1, "2GiB"),
    Case("small", 4, "2GiB"),
    Case("small", 16, "2GiB"),
    Case("small", 1, "900MiB"),
    Case("small", 4, "900MiB", ("--delay-ratio", "0.3")),
    Case("small", 16, "900MiB"),
    Case("small", 8, "900MiB", ("--delay-ratio", "1")),
    Case("medium", 1, "5GiB"),
    Case("medium", 4, "5GiB"),
    Case("medium", 1, "2GiB"),
    Case("medium", 4, "2GiB", ("--delay-ratio", "0.5")),
    Case("medium", 16, "2GiB"),
    Case("tiny", 2, "64MiB"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="on the drive to measure")
    parser.add_argument("--only", choices=sorted(SHAPES), help="one shape [small and medium]")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="runs of each configuration, in turns [5]")
    parser.add_argument("--precision", default="bf16", metavar="P", help="as ssdplan profile [bf16]")
    parser.add_argument(
        "--shorten",
        type=int,
        choices=(1, 2, 4),
        default=1,
        help="divide sequence lengths by it, where steps take long [1]",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    given = parser.parse_args()
    end_on_sigterm()
    if shutil.disk_usage(given.work).free < SPACE:
        parser.exit(5, f"error: {given.work}: fewer than {SPACE >> 30} GiB are free\n")
    shapes = [given.only] if given.only else ["small", "medium"]
    found: dict[Case, list[Row]] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="ssdplan-prediction-", dir=given.work) as folder:
            benches = {name: Bench(name, Path(folder), given.precision, given.shorten) for name in shapes}
            for number in range(1, given.rounds + 1):
                for name in shapes if number % 2 else reversed(shapes):
                    benches[name].profile()
                    cases = [case for case in CASES if case.shape == name]
                    for case in cases if number % 2 else reversed(cases):
                        row = benches[name].run(case, number)
                        found.setdefault(case, []).append(row)
                        print(line(row), flush=True)
    finally:  # hours of runs that were ended are worth their sum too
        if found:
            print(summary(found))
            if given.json:
                rows = [row for each in found.values() for row in each]
                told = [asdict(row) | {name: getattr(row, name) for name in FIGURES} for row in rows]
                given.json.write_text(json.dumps(told, indent=1) + "\n")


def summary(found: Mapping[Case, Sequence[Row]]) -> str:
    """A line a configuration, of the medians of its rounds; then how far all of them are from what they should be."""
    lines, errors, over = [], [], []
    for rows in found.values():
        predicted, measured, limits = (
            statistics.median(getattr(row, name) for row in rows)
            for name in ("predicted_seconds", "measured_seconds", "over_limit")
        )
        errors.append(measured / predicted - 1)
        over.append(limits)
        lines.append(
            f"{rows[0].case:38}  predicted {predicted:6.2f} s  measured {measured:6.2f} s ({errors[-1]:+.1%})  "
            f"over its limit {limits:.2f}"
        )
    each = [abs(error) for error in errors]
    alone, process_errors, ssd = ([getattr(row, name) for rows in found.values() for row in rows]
                                  for name in ("model_error", "process_error", "ssd_error"))  # fmt: skip
    singly = [abs(row.error) for rows in found.values() for row in rows]
    again = [
        abs(later.measured_seconds / earlier.measured_seconds - 1)
        for rows in found.values()
        for earlier, later in pairwise(rows)
    ]
    return "\n".join(
        [
            *lines,
            f"error of step seconds: median {statistics.median(each):.1%}, worst {max(each):.1%}; of single runs: "
            f"median {statistics.median(singly):.1%}, worst {max(singly):.1%}",
            *(
                [f"a run by the one before: median {statistics.median(again):.1%}, worst {max(again):.1%}"]
                if again
                else []
            ),
            f"over the limit: worst {max(over):.2f}",
            f"process predicted larger than measured, of single runs: {min(process_errors):.2%} to "
            f"{max(process_errors):.2%}; ssd bytes {min(ssd):+.2%} to {max(ssd):+.2%}",
            f"error by a step's own figures: median {statistics.median(map(abs, alone)):.1%}, worst "
            f"{max(map(abs, alone)):.1%}",
        ]
    )


class Bench:
    """One shape: its model and data, and the last profile of them."""

    def __init__(self, name: str, folder: Path, precision: str, shorten: int) -> None:
        self.shape, self.folder, self.precision = SHAPES[name], folder / name, precision
        self.sequence = self.shape.sequence // shorten
        self.folder.mkdir()
        self.model, self.data = self.folder / "model", self.folder / "data.txt"
        self.profiled, self.stolen = self.folder / "profile.json", 0.0
        shape = self.shape
        python("ssdplan.executor.model.directory.random_model", "--hidden", shape.hidden, "--layers", shape.layers,
               "--untied", "--out", self.model)  # fmt: skip
        nbytes = VOLUME_BYTES * sum(file.stat().st_size for file in self.model.glob("*.safetensors"))
        command("volume", "init", self.folder, "--size", f"{nbytes}B")
        write_text(self.data)

    def profile(self) -> None:
        """Measure the model and the machine anew."""
        begun, stolen = time.perf_counter(), process.stolen_seconds()
        command("profile", "--model", self.model, "--volume", self.folder, "--sequence-length", self.sequence,
                "--micro-batch-sizes", 1, "--precision", self.precision, "-o", self.profiled)  # fmt: skip
        cores_seconds = (time.perf_counter() - begun) * Profile.load(self.profiled).machine.cores
        self.stolen = (process.stolen_seconds() - stolen) / cores_seconds

    def volume(self, plan: Plan) -> Volume:
        """What the drive does at this moment, where the plan's store will lie or lay."""
        with held_blank(self.folder, plan.prediction.ssd_bytes) as blank:
            assert blank, "the volume is smaller than a store"
            return self.drive(blank, plan.prediction.ssd_bytes)

    def drive(self, blank: Blank, reach: int) -> Volume:
        """What the drive does at this moment in so many bytes of `blank`."""
        limits = Limits(seconds=DRIVE_SECONDS)
        found, _ = measure_volume(self.folder, limits, lambda part, what: None, blank=blank, reach=reach)
        return found

    def run(self, case: Case, number: int) -> Row:
        """A run in round `number`, on a plan of the last profile; its first step is not steady."""
        plan_path, out = self.folder / "plan.json", self.folder / "run"
        command("solve", self.profiled, "--host-memory", case.host, "--micro-batches", case.micro_batches,
                *case.options, "-o", plan_path)  # fmt: skip
        plan = Plan.load(plan_path)
        steps = max(3, 1 + math.ceil(RUN_SECONDS / plan.prediction.step_seconds))
        before = self.volume(plan)
        command("run", plan_path, "--data", self.data, "--steps", steps, "--volume", self.folder, "--out", out)
        behind = self.volume(plan)
        report = json.loads((out / "report.json").read_text())
        figures = {row["quantity"]: row for row in report["predictions"]}
        timeline = read_trace(out / "trace.json", build_schedule(plan.model, plan.decision))
        shutil.rmtree(out)
        step_seconds = figures["step_seconds"]["measured"]
        drives = [plan.machine.volumes, [before], [behind]]
        profiled, *around = (drive_seconds(timeline, volumes) for volumes in drives)
        limit_seconds, by = limit(timeline, plan.machine, step_seconds, statistics.mean(around))
        host = figures.get("peak_process_bytes", figures["peak_host_bytes"])
        ssd = [figures["ssd_read_bytes"], figures["ssd_write_bytes"]]
        return Row(
            case=" ".join((case.shape, f"n={case.micro_batches}", case.host, *case.options)),
            round=number,
            predicted_seconds=figures["step_seconds"]["predicted"],
            measured_seconds=step_seconds,
            traced_seconds=timeline.seconds,
            own_seconds=own_seconds(plan, timeline),
            limit_seconds=limit_seconds,
            limited_by=by,
            drive_seconds=(profiled, *around),
            host_predicted=host["predicted"],
            host_measured=host["measured"],
            ssd_predicted=sum(row["predicted"] for row in ssd),
            ssd_measured=sum(row["measured"] for row in ssd),
            tokens_per_second=figures["tokens_per_second"]["measured"],
            stolen_before=self.stolen,
            stolen_meanwhile=report["stolen_share"],
        )


def own_seconds(plan: Plan, timeline: Timeline) -> float:
    """What a step of the plan takes by the simulator with the figures that one measured step shows."""
    advisor = Replanner(plan)
    slower = slowdowns([timeline], advisor.expectation(timeline.graph))
    return advisor.step_seconds(timeline.graph, *corrected(plan.machine, plan.model, slower))


def drive_seconds(timeline: Timeline, volumes: Sequence[Volume]) -> float:
    """What the drive needs for the bytes of a step at its mixed bandwidth."""
    moved = {"read": 0, "write": 0}
    for op in timeline.graph.ops:
        if isinstance(op, Transfer) and op.kind in moved:
            moved[op.kind] += op.nbytes
    return max(a * moved["read"] + b * moved["write"] for a, b in hull_edges(combined_frontier(volumes)))


def limit(timeline: Timeline, machine: Machine, step_seconds: float, drive: float) -> tuple[float, str]:
    """The seconds that no overlap could hide of a step that takes `step_seconds`, and what takes them: those in which
    compute or updates run, which share the cores and slow each other, in the part of it that they take of the traced
    one; or those that the `drive` needs, which are the same of every step."""
    cores = loads(timeline, machine)[SHARED_CORES] * step_seconds / timeline.seconds
    return max((cores, "cores"), (drive, "ssd"))


def line(row: Row) -> str:
    gib = 1 << 30
    return (
        f"{row.round} {row.case:38}  predicted {row.predicted_seconds:6.2f} s  "
        f"measured {row.measured_seconds:6.2f} s ({row.error:+.1%})  "
        f"by its own figures {row.model_error:+.1%}  "
        f"limit {row.limit_seconds:6.2f} s ({row.over_limit:.2f}, {row.limited_by})  "
        f"drive {', '.join(f'{seconds:.2f}' for seconds in row.drive_seconds)} s  "
        f"host {row.host_predicted / gib:.3f} / {row.host_measured / gib:.3f} GiB  "
        f"ssd {row.ssd_measured / gib:.2f} GiB ({row.ssd_error:+.2%})  "
        f"{row.tokens_per_second:.0f} tokens/s  stolen {row.stolen_before:.1%}, {row.stolen_meanwhile:.1%}"
    )


if __name__ == "__main__":
    main()
