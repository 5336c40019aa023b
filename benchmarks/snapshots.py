"""What snapshots cost, and going on from one, at several shares of the optimizer states on host: a table.

For each share it profiles, solves a plan, trains with a snapshot every few steps, and goes on once more. A snapshot
costs what it wrote and committed, the delayed updates that it finished early, and what the step behind it took longer
than a steady one of the same run (less, where those updates are then done). What the drive takes of that by itself is
measured behind the run: the engine writes the same bytes in turns with snapshots, since a shared drive does not keep
the pace of any profile. Beside it the same states go to the same drive by plain torch.save and a flush of the file, and
come back by torch.load, in turns with the runs. Only the commands of ssdplan, its store and a process with torch do the
work; what they write lies in one folder, which goes when it ends.

    python benchmarks/snapshots.py --work DIR [--only small] [--steps 16] [--json FILE]
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from commands import command, end_on_sigterm, output, python, write_text
from ssdplan.executor.device.device import open_device
from ssdplan.executor.memory.arenas import Memory
from ssdplan.executor.memory.store_records import Records
from ssdplan.executor.store import Store
from ssdplan.native import Engine
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.profiler.storage import LARGEST_REQUEST

SHARES = (0.0, 0.5, 1.0)
EVERY = 4
ROUNDS = 12
STATE_BYTES = 12
"""Of a parameter: master and two moments in fp32."""


@dataclass(frozen=True)
class Shape:
    """A random Llama, how it is trained, and what is needed of memory and drive."""

    hidden: int
    layers: int
    sequence: int
    micro_batches: int
    host: str
    space_bytes: int


@dataclass(frozen=True)
class Row:
    """What came out; seconds are medians of the run."""

    share: float
    step_seconds: float
    snapshot_bytes: int
    snapshot_seconds: float
    flush_seconds: float
    after_seconds: float
    """What the step behind a snapshot took longer than a steady one."""
    drive_seconds: float
    """What the drive takes to write the snapshot's bytes, at the bandwidth that was profiled."""
    ratio: float
    """How many times as long as the engine with the same bytes a snapshot takes, in turns; 1 where there are none."""
    snapshots: int
    resume_seconds: float
    save_seconds: float
    """torch.save of all states, flushed."""
    load_seconds: float

    @property
    def cost_seconds(self) -> float:
        return self.snapshot_seconds + self.flush_seconds + self.after_seconds

    @property
    def besides(self) -> float:
        """Of a step: what a snapshot costs besides the drive's own time."""
        return (self.cost_seconds - self.snapshot_seconds / self.ratio) / self.step_seconds


SHAPES = {
    "small": Shape(768, 12, 256, 8, "4GiB", 16 << 30),
    "medium": Shape(1536, 16, 256, 8, "12GiB", 48 << 30),
    "tiny": Shape(128, 4, 64, 4, "1GiB", 2 << 30),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="on the drive to measure")
    parser.add_argument("--only", choices=sorted(SHAPES), default="small", help="the shape [small]")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help=f"a run; a snapshot every {EVERY} [16]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    given = parser.parse_args()
    end_on_sigterm()
    shape = SHAPES[given.only]
    if given.steps < 2 * EVERY:
        parser.error(f"--steps {given.steps}: at least {2 * EVERY}")
    if shutil.disk_usage(given.work).free < shape.space_bytes:
        parser.exit(5, f"error: {given.work}: fewer than {shape.space_bytes >> 30} GiB are free\n")
    with tempfile.TemporaryDirectory(prefix="ssdplan-snapshots-", dir=given.work) as folder:
        prepared(Path(folder), shape)
        rows = []
        for share in SHARES:
            rows.append(measured(Path(folder), shape, share, given.steps))
            print(line(rows[-1]), flush=True)
    if given.json:
        each = [asdict(row) | {"cost_seconds": row.cost_seconds, "besides": row.besides} for row in rows]
        given.json.write_text(json.dumps(each, indent=1) + "\n")


def prepared(folder: Path, shape: Shape) -> None:
    """A model and a text in `folder`."""
    python("ssdplan.executor.model.directory.random_model", "--hidden", shape.hidden, "--layers", shape.layers,
           "--untied", "--out", folder / "model")  # fmt: skip
    write_text(folder / "data.txt")


def measured(folder: Path, shape: Shape, share: float, steps: int) -> Row:
    command("profile", "--model", folder / "model", "--volume", folder, "--sequence-length", shape.sequence,
            "--micro-batch-sizes", 1, "-o", folder / "profile.json")  # fmt: skip
    command("solve", folder / "profile.json", "--host-memory", shape.host, "--micro-batches", shape.micro_batches,
            "--residency", f"optimizer={share}", "-o", folder / "plan.json")  # fmt: skip
    plan = Plan.load(folder / "plan.json")
    states = STATE_BYTES * sum(state.elements for state in plan.model.states)
    plain = [saved_and_loaded(folder, states)]
    out = folder / "run"
    command("run", folder / "plan.json", "--data", folder / "data.txt", "--steps", steps, "--snapshot-every", EVERY,
            "--out", out)  # fmt: skip
    plain.append(saved_and_loaded(folder, states))
    command("run", "--resume", out, "--steps", steps + 1)
    plain.append(saved_and_loaded(folder, states))
    lines = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(out)
    seconds = {each["step"]: each["step_seconds"] for each in lines if "loss" in each and each["step"] <= steps}
    # The run's last snapshot has no step of the run behind it.
    snapshots = [each for each in lines if "snapshot_seconds" in each and each["step"] < steps]
    behind = {1, *(each["step"] + 1 for each in snapshots)}
    steady = statistics.median(seconds[step] for step in seconds if step not in behind)
    bandwidth = sum(volume.frontier[-1].write for volume in plan.machine.volumes)
    nbytes = snapshots[0]["snapshot_bytes"]
    return Row(
        share=share,
        step_seconds=steady,
        snapshot_bytes=nbytes,
        snapshot_seconds=statistics.median(each["snapshot_seconds"] for each in snapshots),
        flush_seconds=statistics.median(each["flush_seconds"] for each in snapshots),
        after_seconds=statistics.median(seconds[each["step"] + 1] - steady for each in snapshots),
        drive_seconds=nbytes / bandwidth,
        ratio=beside_the_engine(folder, plan),
        snapshots=len(snapshots),
        resume_seconds=next(each["resume_seconds"] for each in lines if "resume_seconds" in each),
        save_seconds=statistics.median(save for save, _ in plain),
        load_seconds=statistics.median(load for _, load in plain),
    )


def beside_the_engine(folder: Path, plan: Plan) -> float:
    """How many times as long a snapshot takes as the engine with the same bytes, in requests as a profile makes them;
    the median of rounds in turns. 1 where a snapshot writes none."""
    schedule = build_schedule(plan.model, plan.decision)
    records = Records.of(schedule, snapshots=True)
    nbytes = sum(region.nbytes for region, _ in records.on_host)
    if not nbytes:
        return 1.0
    memory = Memory(schedule, open_device(plan.machine.device))
    store = Store.create([folder], records.records, plan.sha256(), durable=True)
    engine, path = Engine(), folder / "beside"
    memory.host.bytes.fill_(1)  # real pages, as in a run
    try:
        store.register(memory.host.address, memory.host.nbytes)
        file = engine.open(path, create_bytes=nbytes)

        def alone() -> None:
            for start in range(0, nbytes, LARGEST_REQUEST):
                length = min(LARGEST_REQUEST, nbytes - start)
                engine.write([(file, start, memory.host.address + start, length)]).wait()

        def snapshot() -> None:
            records.snapshot(store, memory, {})

        for warm in (alone, *[snapshot] * (store.keep + 1)):  # a first write of a place is slower
            warm()
        ratios = []
        for number in range(ROUNDS):
            turn = (alone, snapshot) if number % 2 else (snapshot, alone)
            seconds = {work: timed(work) for work in turn}
            ratios.append(seconds[snapshot] / seconds[alone])
        return statistics.median(ratios)
    finally:
        engine.close()
        path.unlink(missing_ok=True)
        store.remove()
        memory.close()


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def saved_and_loaded(folder: Path, nbytes: int) -> tuple[float, float]:
    """Seconds to save `nbytes` of tensors and flush them, and to load them again."""
    path = folder / "states.pt"
    code = (
        "import sys, time, os, torch\n"
        "path, count = sys.argv[1], int(sys.argv[2]) // 4\n"
        "states = {str(i): torch.rand(count // 16) for i in range(16)}\n"
        "start = time.perf_counter()\n"
        "torch.save(states, path)\n"
        "file = os.open(path, os.O_RDONLY); os.fsync(file)\n"
        "print(time.perf_counter() - start)\n"
        "os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "states = None\n"
        "start = time.perf_counter()\n"
        "torch.load(path)\n"
        "print(time.perf_counter() - start)\n"
    )
    call = [sys.executable, "-c", code, str(path), str(nbytes)]
    save, load = map(float, output(call).split())
    path.unlink()
    return save, load


def line(row: Row) -> str:
    gib = 1 << 30
    return (
        f"optimizer states on host {row.share:4.0%}  step {row.step_seconds:6.2f} s  snapshot "
        f"{row.snapshot_bytes / gib:5.2f} GiB in {row.snapshot_seconds:5.2f} s (drive alone {row.drive_seconds:5.2f} s)"
        f", {row.ratio:.2f} times the engine's, + flush {row.flush_seconds:5.2f} s, step behind it "
        f"{row.after_seconds:+.2f} s: {row.besides:+.1%} of a step "
        f"besides the drive  resume {row.resume_seconds:5.2f} s  torch.save {row.save_seconds:5.2f} s, load "
        f"{row.load_seconds:5.2f} s  ({row.snapshots} snapshots)"
    )


if __name__ == "__main__":
    main()
