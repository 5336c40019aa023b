"""How close predictions are, and how close steps come to the machine's own limit: a table over configurations.

For each configuration it profiles, solves from that profile and runs at once, so that every prediction was made before
its run, on a profile of the same minutes: the drive of a shared machine does not keep its pace for longer. Profile and
run both take a minute or more, since what others do on such a machine comes and goes in tens of seconds. Afterwards it
profiles again, for the next configuration too, and lets the same plan be predicted from that: how far the two
predictions lie apart is the machine's doing, and what is wrong by more than that is ours. Where the host took more than
QUIET of the processors' time during profile or run, the configuration is tried again, up to --tries times. Each try is
told; the one counts during which the host took least, whatever its prediction was worth.

The simulator alone is judged by one traced step: what it gives the plan with the figures that this very step shows, as
a run's calibration finds them. The limit of a step is what cannot be hidden: compute and update seconds together (they
share the cores) as measured in that run, or the bytes of the ssd over its mixed bandwidth as profiled, whichever is
longer. Only the commands of ssdplan do the work; what it writes lies in one folder, which goes when it ends.

    python benchmarks/prediction.py --work DIR [--only small] [--precision fp32] [--tries 3] [--json FILE]
"""

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from commands import command, end_on_sigterm, python, write_text
from ssdplan.native import process
from ssdplan.planner.critical import SHARED_CORES, loads
from ssdplan.planner.drive import combined_frontier, hull_edges
from ssdplan.planner.replan import Replanner
from ssdplan.planner.simulator import simulate
from ssdplan.plans.build import build_schedule
from ssdplan.plans.calibration import corrected, slowdowns
from ssdplan.plans.plan import Plan
from ssdplan.plans.profile import Profile
from ssdplan.plans.schedule import Transfer
from ssdplan.plans.timeline import Timeline
from ssdplan.plans.trace import read_trace

SPACE = 24 << 30
"""Bytes that the largest of the models needs for weights, store and export together, with room to spare."""
PROFILE_SECONDS = 80
"""As `ssdplan profile --seconds`."""
RUN_SECONDS = 60
"""Of steps, at least, as they are predicted."""
QUIET = 0.02
"""The share of the processors' time that the host may take before a configuration is tried again."""


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
    """What came out. Seconds are of a steady step, the medians of the run."""

    case: str
    predicted_seconds: float
    measured_seconds: float
    afterwards_seconds: float
    """What a profile made after the run predicts of the same plan."""
    traced_seconds: float
    """Of the step that the run traced."""
    own_seconds: float
    """What the simulator gives the plan with the figures of that very step, as a run's calibration finds them."""
    limit_seconds: float
    limited_by: str
    host_predicted: float
    host_measured: float
    ssd_predicted: float
    ssd_measured: float
    tokens_per_second: float
    stolen_before: float
    stolen_meanwhile: float
    """Shares of the processors' time that the host gave to others: during the profile, and in the run's steps."""

    @property
    def stolen(self) -> float:
        """The larger of the shares."""
        return max(self.stolen_before, self.stolen_meanwhile)

    @property
    def error(self) -> float:
        return self.measured_seconds / self.predicted_seconds - 1

    @property
    def beyond(self) -> float:
        """How far the measurement lies outside of what both profiles predict, relative to the nearer."""
        low, high = sorted((self.predicted_seconds, self.afterwards_seconds))
        return max(low / self.measured_seconds - 1, self.measured_seconds / high - 1, 0.0)

    @property
    def model_error(self) -> float:
        """Of the simulator alone: what is left when the machine is exactly as its figures say."""
        return self.traced_seconds / self.own_seconds - 1

    @property
    def over_limit(self) -> float:
        return self.measured_seconds / self.limit_seconds


FIGURES = ("error", "beyond", "model_error", "over_limit")
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
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="a run, at least; one is not steady [6]")
    parser.add_argument("--tries", type=int, default=3, metavar="N", help="of a configuration, at most [3]")
    parser.add_argument("--precision", default="bf16", metavar="P", help="as ssdplan profile [bf16]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    given = parser.parse_args()
    end_on_sigterm()
    if shutil.disk_usage(given.work).free < SPACE:
        parser.exit(5, f"error: {given.work}: fewer than {SPACE >> 30} GiB are free\n")
    wanted = {given.only} if given.only else {"small", "medium"}
    rows, tries = [], []
    with tempfile.TemporaryDirectory(prefix="ssdplan-prediction-", dir=given.work) as folder:
        for name in sorted(wanted, reverse=True):
            bench = Bench(name, Path(folder), given.precision)
            for case in (case for case in CASES if case.shape == name):
                each = bench.tried(case, given.steps, given.tries)
                rows.append(min(each, key=lambda row: row.stolen))
                tries += each
    for what, those in (("", rows), (" in all tries", tries)):
        errors = [abs(row.error) for row in those]
        print(f"error of step seconds{what}: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    beyond = [row.beyond for row in rows]
    print(f"beyond both predictions: median {statistics.median(beyond):.1%}, worst {max(beyond):.1%}")
    alone = [abs(row.model_error) for row in rows]
    print(f"error by a step's own figures: median {statistics.median(alone):.1%}, worst {max(alone):.1%}")
    print(f"over the limit: worst {max(row.over_limit for row in rows):.2f}")
    spare = [row.host_predicted / row.host_measured - 1 for row in tries]
    print(f"process predicted larger than measured, in all tries: {min(spare):.2%} to {max(spare):.2%}")
    if given.json:
        told = [asdict(r) | {name: getattr(r, name) for name in FIGURES} | {"counts": r in rows} for r in tries]
        given.json.write_text(json.dumps(told, indent=1) + "\n")


@dataclass(frozen=True)
class Profiled:
    """A profile, where it lies, and the share of the processors' time that the host took meanwhile."""

    path: Path
    document: Profile
    stolen: float


class Bench:
    """One shape: its model and data, and the last profile of them."""

    def __init__(self, name: str, folder: Path, precision: str) -> None:
        self.shape, self.folder, self.precision = SHAPES[name], folder / name, precision
        self.folder.mkdir()
        self.model, self.data = self.folder / "model", self.folder / "data.txt"
        shape = self.shape
        python("ssdplan.executor.random_model", "--hidden", shape.hidden, "--layers", shape.layers, "--untied",
               "--out", self.model)  # fmt: skip
        write_text(self.data)
        self.profiles = 0
        self.profiled = self._profile()

    def _profile(self) -> Profiled:
        self.profiles += 1
        path = self.folder / f"profile-{self.profiles}.json"
        begun, stolen = time.perf_counter(), process.stolen_seconds()
        command("profile", "--model", self.model, "--volume", self.folder, "--sequence-length", self.shape.sequence,
                "--micro-batch-sizes", 1, "--precision", self.precision, "--seconds", PROFILE_SECONDS,
                "-o", path)  # fmt: skip
        document = Profile.load(path)
        cores_seconds = (time.perf_counter() - begun) * document.machine.cores
        return Profiled(path, document, (process.stolen_seconds() - stolen) / cores_seconds)

    def tried(self, case: Case, steps: int, tries: int) -> list[Row]:
        """Until the host takes little meanwhile, `tries` times at most; each is printed."""
        rows: list[Row] = []
        while not rows or (rows[-1].stolen > QUIET and len(rows) < tries):
            rows.append(self.run(case, steps))
            print(line(rows[-1]), flush=True)
        return rows

    def run(self, case: Case, steps: int) -> Row:
        """One run of at least so many steps, on a plan of the last profile."""
        plan_path, out = self.folder / "plan.json", self.folder / "run"
        before = self.profiled
        command("solve", before.path, "--host-memory", case.host, "--micro-batches", case.micro_batches,
                *case.options, "-o", plan_path)  # fmt: skip
        plan = Plan.load(plan_path)
        steps = max(steps, math.ceil(RUN_SECONDS / plan.prediction.step_seconds))
        command("run", plan_path, "--data", self.data, "--steps", steps, "--volume", self.folder, "--out", out)
        report = json.loads((out / "report.json").read_text())
        figures = {row["quantity"]: row for row in report["predictions"]}
        timeline = read_trace(out / "trace.json", build_schedule(plan.model, plan.decision))
        shutil.rmtree(out)
        self.profiled = self._profile()
        after = self.profiled.document
        afterwards = simulate(timeline.graph, after.model, after.machine, plan.decision.micro_batch_size)
        seconds, by = limit(plan, timeline)
        host = figures.get("peak_process_bytes", figures["peak_host_bytes"])
        ssd = [figures["ssd_read_bytes"], figures["ssd_write_bytes"]]
        return Row(
            case=" ".join((case.shape, f"n={case.micro_batches}", case.host, *case.options)),
            predicted_seconds=figures["step_seconds"]["predicted"],
            measured_seconds=figures["step_seconds"]["measured"],
            afterwards_seconds=afterwards.seconds,
            traced_seconds=timeline.seconds,
            own_seconds=own_seconds(plan, timeline),
            limit_seconds=seconds * figures["step_seconds"]["measured"] / timeline.seconds,
            limited_by=by,
            host_predicted=host["predicted"],
            host_measured=host["measured"],
            ssd_predicted=sum(row["predicted"] for row in ssd),
            ssd_measured=sum(row["measured"] for row in ssd),
            tokens_per_second=figures["tokens_per_second"]["measured"],
            stolen_before=before.stolen,
            stolen_meanwhile=report["stolen_share"],
        )


def own_seconds(plan: Plan, timeline: Timeline) -> float:
    """What a step of the plan takes by the simulator with the figures that one measured step shows."""
    advisor = Replanner(plan)
    slower = slowdowns([timeline], advisor.expectation(timeline.graph))
    return advisor.step_seconds(timeline.graph, *corrected(plan.machine, plan.model, slower))


def limit(plan: Plan, timeline: Timeline) -> tuple[float, str]:
    """The seconds that no overlap could hide of a measured step, and what takes them: those in which compute or updates
    run, which share the cores and slow each other, or those of the drive at its profiled bandwidth."""
    moved = {"read": 0, "write": 0}
    for op in timeline.graph.ops:
        if isinstance(op, Transfer) and op.kind in moved:
            moved[op.kind] += op.nbytes
    edges = hull_edges(combined_frontier(plan.machine.volumes))
    ssd = max(a * moved["read"] + b * moved["write"] for a, b in edges)
    return max((loads(timeline, plan.machine)[SHARED_CORES], "cores"), (ssd, "ssd"))


def line(row: Row) -> str:
    gib = 1 << 30
    return (
        f"{row.case:38}  predicted {row.predicted_seconds:6.2f} s, afterwards {row.afterwards_seconds:6.2f} s  "
        f"measured {row.measured_seconds:6.2f} s ({row.error:+.1%}, {row.beyond:.1%} beyond both)  "
        f"by its own figures {row.model_error:+.1%}  "
        f"limit {row.limit_seconds:6.2f} s ({row.over_limit:.2f}, {row.limited_by})  "
        f"host {row.host_predicted / gib:.3f} / {row.host_measured / gib:.3f} GiB  "
        f"ssd {row.ssd_measured / gib:.2f} GiB ({row.ssd_measured / max(row.ssd_predicted, 1) - 1:+.2%})  "
        f"{row.tokens_per_second:.0f} tokens/s  stolen {row.stolen_before:.1%}, {row.stolen_meanwhile:.1%}"
    )


if __name__ == "__main__":
    main()
