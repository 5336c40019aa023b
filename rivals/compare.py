"""The same training by ssdplan and by its rivals, in turns: made once, run round by round, and taken away again.

Owns the order of a comparison and its directories. Each arm runs in a process of its own (`processes.py`), so that the
kernel counts its memory alone; a rival that is not there, or that does not fit, is a row that says so.
"""

import contextlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ssdplan.plans.errors import DiskFullError, SsdplanError, UsageError
from ssdplan.plans.units import format_bytes, format_seconds
from ssdplan.plans.views.progress_line import ProgressLine

from . import arms as known
from .arms import Arm, Batch, arms_of
from .comparison import MEMORY_COUNTED, ArmResult, Comparison, Round, Surroundings, arm_result, held_together, ratios
from .job import SEED, Job
from .making import Order
from .processes import Ended, IoBytes, environment, run
from .shapes import ModelFacts, Shape

PREFIX = "ssdplan-compare-"
PREPARATION_SECONDS = 3600.0
"""For what is done once: making the model, compiling DeepSpeed's extensions, a profile, a plan."""


@dataclass(frozen=True)
class Request:
    """What is to be compared: one of `shape` and `model`."""

    shape: str | None
    model: Path | None
    data: Path | None
    arms: tuple[str, ...]
    host_memory: tuple[int, ...]
    recompute: tuple[str, ...]
    device_memory: int | None
    """The budget of all our arms; None for what solve takes."""
    residency: Mapping[str, float]
    """Where their states live, as in `ssdplan solve`."""
    batch: Batch
    steps: int
    rounds: int
    volume: Path
    work: Path | None
    timeout: float
    """Seconds for one arm's process."""


@dataclass
class _Bench:
    """What is the same for all arms, once it is made."""

    request: Request
    facts: ModelFacts
    work: Path
    swap: Path
    """A directory of our own on the volume."""
    line: ProgressLine
    threads: int
    device_name: str = ""
    plans: dict[str, Path] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Arm to why it cannot be measured."""
    failed: set[str] = field(default_factory=set)
    rounds: dict[str, list[Round]] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        return self.work / "model"


def compare(request: Request, line: ProgressLine) -> Comparison:
    """Make, run and compare. What it made is removed again, whatever ends it, but for a `work` directory that is named.

    Raises UsageError for what cannot be meant, DiskFullError before anything is written where space is short, and the
    error of `ssdplan profile`, without which there is nothing to compare. An arm that is missing or fails is a row.
    """
    arms = arms_of(request.arms, request.host_memory, request.recompute)
    facts = _checked(request)
    missing = {arm.name: reason for arm in arms if (reason := known.missing(arm, request.batch))}
    _check_memory(arms, facts, request.batch, missing)
    _check_space(request, facts, [arm for arm in arms if arm.name not in missing])
    load = os.getloadavg()[0]
    with _directories(request) as (work, swap):
        bench = _Bench(request, facts, work, swap, line, len(os.sched_getaffinity(0)), missing=missing)
        if len(bench.missing) < len(arms):
            _prepare(bench, arms)
        order = [arm for arm in arms if arm.name not in bench.missing]
        for number in range(1, request.rounds + 1):
            for place, arm in enumerate(order):
                if arm.name not in bench.missing:
                    done = (number - 1 + place / len(order)) / request.rounds
                    _measure(bench, arm, number, portion=(done, 1 / len(order) / request.rounds))
            order.reverse()
        reference, results = held_together([_result(bench, arm) for arm in arms])
    return Comparison(
        schema="ssdplan.compare/1",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=facts.name,
        parameters=facts.parameters,
        sequence_length=request.batch.sequence_length,
        micro_batch_size=request.batch.micro_batch_size,
        micro_batches=request.batch.micro_batches,
        precision=request.batch.precision,
        device=request.batch.device,
        directions=request.batch.directions,
        steps=request.steps,
        rounds=request.rounds,
        volume=str(request.volume.resolve()),
        machine=_surroundings(bench, load),
        memory_counted=MEMORY_COUNTED,
        reference=reference,
        arms=results,
        ratios=ratios(results, {arm.name for arm in arms if arm.ours}),
    )


# before anything is written


def _checked(request: Request) -> ModelFacts:
    if (request.shape is None) == (request.model is None):
        raise UsageError("name a model directory with --model, or a random model with --shape small; one of them")
    if request.data is not None and request.model is None:
        raise UsageError("--data needs --model, whose tokenizer reads it; a --shape trains on random tokens")
    if request.data is not None and not (request.data.is_file() and request.data.suffix in (".txt", ".jsonl")):
        raise UsageError(f"{request.data}: --data takes one .txt or .jsonl file")
    if request.steps < 2:
        raise UsageError("--steps 1: the first step of a process does not count; train at least 2")
    if request.batch.sequence_length < 2:
        raise UsageError("--sequence-length 1 leaves no token to predict; it must be 2 or more")
    if request.residency and known.OURS not in request.arms:
        raise UsageError(f"--residency is for the arm {known.OURS}, which --arms leaves out")
    if request.device_memory is not None and known.OURS not in request.arms:
        raise UsageError(f"--device-memory is the budget of the arm {known.OURS}, which --arms leaves out")
    if not request.volume.is_dir() or not os.access(request.volume, os.W_OK):
        raise UsageError(f"{request.volume}: --volume must be a directory that can be written to")
    if (
        request.work is not None
        and request.work.exists()
        and (not request.work.is_dir() or any(request.work.iterdir()))
    ):
        raise UsageError(f"{request.work}: exists already and is not an empty directory; choose another --work")
    if request.model is not None:
        return ModelFacts.of_directory(request.model)
    assert request.shape is not None
    return ModelFacts.of_shape(Shape.parse(request.shape))


def _check_memory(arms: tuple[Arm, ...], facts: ModelFacts, batch: Batch, missing: dict[str, str]) -> None:
    """What would drive the machine into swapping is not run; that it does not fit is a result too."""
    available = _memory("MemAvailable")
    for arm in arms:
        needed = known.memory_bytes(arm, facts, batch)
        if arm.name not in missing and needed > available:
            missing[arm.name] = f"it needs about {format_bytes(needed)}, and {format_bytes(available)} are available"


def _check_space(request: Request, facts: ModelFacts, arms: list[Arm]) -> None:
    made = 2 * facts.parameters + 8 * (request.steps + 1) * request.batch.tokens + (64 << 20)
    needs: dict[int, int] = {}
    places: dict[int, Path] = {}
    work = request.work if request.work is not None else request.volume
    most = max((known.drive_bytes(arm, facts, request.batch) for arm in arms), default=0)
    for place, nbytes in ((_existing(work), made), (request.volume, most)):
        device = place.stat().st_dev
        needs[device] = needs.get(device, 0) + nbytes
        places[device] = place
    for device, nbytes in needs.items():
        free = shutil.disk_usage(places[device]).free
        if free < nbytes:
            raise DiskFullError(
                f"{places[device]}: the comparison needs about {format_bytes(nbytes)} here, {format_bytes(free)} are "
                "free; free some space, name another --volume, or compare a smaller --shape"
            )


def _existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


@contextlib.contextmanager
def _directories(request: Request) -> Iterator[tuple[Path, Path]]:
    """Where things are made, and a directory of our own on the volume; both gone at the end, but a named `work`."""
    swap = Path(tempfile.mkdtemp(prefix=PREFIX, dir=request.volume)).resolve()
    try:
        if request.work is None:
            work = swap / "work"
            work.mkdir()
        else:
            work = request.work
            try:
                work.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"{work}: cannot make this directory: {error.strerror}") from error
        yield work.resolve(), swap
    finally:
        shutil.rmtree(swap, ignore_errors=True)


# once


def _prepare(bench: _Bench, arms: tuple[Arm, ...]) -> None:
    request = bench.request
    bench.line.say(f"compare: making {bench.facts.name} and its batches")
    order = Order(
        directory=str(bench.work),
        shape=request.shape or "",
        model=str(request.model.resolve()) if request.model else "",
        data=str(request.data.resolve()) if request.data else "",
        vocab=bench.facts.vocab,
        rows=request.steps * request.batch.rows,
        row_tokens=request.batch.sequence_length,
        seed=SEED,
        precision=request.batch.precision,
    )
    order.save(bench.work / "order.json")
    log = bench.work / "making.log"
    made = _once(bench, _module("ssdplan.rivals.making", bench.work / "order.json"), log)
    if made.code:
        raise _error(made, log)
    if any(arm.kind.startswith("deepspeed") and arm.name not in bench.missing for arm in arms):
        bench.line.say("compare: building DeepSpeed's extensions, if that was not done before")
        log = bench.work / "deepspeed-build.log"
        built = _once(bench, _module("ssdplan.rivals.deepspeed_arm", "--build"), log)
        if built.code:
            for arm in arms:
                if arm.kind.startswith("deepspeed"):
                    bench.missing.setdefault(arm.name, f"its extensions cannot be built: {_last_words(built, log)}")
    if ours := [arm for arm in arms if arm.ours and arm.name not in bench.missing]:
        _plan(bench, ours)


def _plan(bench: _Bench, ours: list[Arm]) -> None:
    """One profile; a plan for each budget, and how many threads they all run on."""
    profile, log = bench.work / "profile.json", bench.work / "profile.log"
    batch = bench.request.batch
    bench.line.say("compare: profiling")
    done = _once(bench, known.profile_command(bench.model, bench.swap, batch, profile), log)
    if done.code:
        raise _error(done, log)
    machine = _json(profile)["machine"]
    bench.threads = int(machine["compute_threads"])
    if batch.device != "cpu":
        bench.device_name = str(machine["device_name"])
    for arm in ours:
        plan, log = bench.work / f"{arm.file_name}-plan.json", bench.work / f"{arm.file_name}-solve.log"
        bench.line.say(f"compare: solving for {arm.name}")
        asked = bench.request
        command = known.solve_command(profile, arm, batch, asked.device_memory, plan, asked.residency)
        done = _once(bench, command, log)
        if done.code:
            bench.missing[arm.name] = _last_words(done, log)
            bench.failed.add(arm.name)
        bench.plans[arm.name] = plan


def _module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]


def _once(bench: _Bench, command: list[str], log: Path) -> Ended:
    return run(
        command,
        log=log,
        environment=environment(device=bench.request.batch.device),
        timeout=max(PREPARATION_SECONDS, bench.request.timeout),
    )


def _error(ended: Ended, log: Path) -> SsdplanError:
    """What a command that all arms need has said, with the meaning of its exit code."""
    kinds = {kind.exit_code: kind for kind in SsdplanError.__subclasses__() if kind.exit_code != SsdplanError.exit_code}
    return kinds.get(ended.code, SsdplanError)(_last_words(ended, log))


def _last_words(ended: Ended, log: Path) -> str:
    """The last line that says something of why a process ended."""
    if ended.timed_out:
        return f"it had not ended after {format_seconds(ended.seconds)} and was killed; allow more with --timeout"
    if ended.code == -9:
        return "it was killed, perhaps for want of memory"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("ssdplan: error: ")]
    return (errors or lines or [f"exit code {ended.code}, and no word"])[-1]


# round by round


def _measure(bench: _Bench, arm: Arm, number: int, portion: tuple[float, float]) -> None:
    """One process of an arm. Its files are named by arm and round; what it put on the drive is removed. `portion` is
    where its progress begins and how much of the whole it is."""
    request = bench.request
    folder = bench.work / f"{arm.file_name}-round-{number}"
    folder.mkdir()
    swap = bench.swap / "states"
    swap.mkdir()
    if arm.ours:
        metrics = folder / "run" / "metrics.jsonl"
        plan, text = bench.plans[arm.name], bench.work / "text.txt"
        command = known.run_command(plan, text, swap, request.batch, request.steps, folder / "run")
        variables = environment(device=request.batch.device)
    else:
        metrics = folder / "metrics.jsonl"
        _job(bench, arm, metrics, swap).save(folder / "job.json")
        command = _module(arm.module(request.batch), folder / "job.json")
        variables = environment(bench.threads, device=request.batch.device)

    def tell(steps: int) -> None:
        what = f"round {number}/{request.rounds}, {arm.name}, step {steps}/{request.steps}"
        bench.line(portion[0] + portion[1] * steps / (request.steps + 1), what)

    tell(0)
    try:
        ended = run(
            command,
            log=folder / "log.txt",
            environment=variables,
            timeout=request.timeout,
            lines=metrics,
            on_line=tell,
        )
        rows = _rows(metrics)
        if ended.code or len(rows) < request.steps:
            bench.missing[arm.name] = f"round {number}: {_last_words(ended, folder / 'log.txt')}"
            bench.failed.add(arm.name)
            return
        bench.rounds.setdefault(arm.name, []).append(_round(number, ended, rows, request.batch.device))
    finally:
        shutil.rmtree(swap, ignore_errors=True)
        shutil.rmtree(folder / "run" / "model", ignore_errors=True)


def _job(bench: _Bench, arm: Arm, metrics: Path, swap: Path) -> Job:
    batch = bench.request.batch
    return Job(
        model=str(bench.model),
        rows=str(bench.work / "rows.npy"),
        metrics=str(metrics),
        swap=str(swap),
        micro_batch_size=batch.micro_batch_size,
        micro_batches=batch.micro_batches,
        steps=bench.request.steps,
        threads=bench.threads,
        settings=arm.settings,
        precision=batch.precision,
        device=batch.device,
        directions=batch.directions,
    )


def _round(number: int, ended: Ended, rows: list[dict[str, Any]], device: str) -> Round:
    counted = rows[1:]
    on_device = [int(row["device_peak_bytes"]) for row in rows] if device != "cpu" else []

    def own(field: str) -> int | None:
        values = [int(row[field]) for row in counted if field in row]
        return sum(values) // len(values) if values else None

    first, last = (ended.io[0], ended.io[-1]) if len(ended.io) == len(rows) else (None, None)
    read, written = _between(first, last, len(counted))
    return Round(
        round=number,
        process_seconds=ended.seconds,
        peak_memory_bytes=ended.peak_memory_bytes,
        peak_device_bytes=max(on_device, default=None),
        others_cores=ended.others_cores,
        step_seconds=tuple(float(row["step_seconds"]) for row in rows),
        losses=tuple(float(row["loss"]) for row in rows),
        kernel_read_bytes=read,
        kernel_write_bytes=written,
        ssd_read_bytes=own("ssd_read_bytes"),
        ssd_write_bytes=own("ssd_write_bytes"),
    )


def _between(first: IoBytes | None, last: IoBytes | None, steps: int) -> tuple[int | None, int | None]:
    if first is None or last is None:
        return None, None
    return (last.read - first.read) // steps, (last.written - first.written) // steps


def _rows(metrics: Path) -> list[dict[str, Any]]:
    """The steps that a process has told of."""
    try:
        return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def _result(bench: _Bench, arm: Arm) -> ArmResult:
    predicted = None
    if arm.name in bench.plans and arm.name not in bench.missing:
        predicted = float(_json(bench.plans[arm.name])["prediction"]["step_seconds"])
    return arm_result(
        arm.name,
        arm.words,
        bench.rounds.get(arm.name, []),
        tokens=bench.request.batch.tokens,
        predicted_step_seconds=predicted,
        missing=bench.missing.get(arm.name, ""),
        failed=arm.name in bench.failed,
    )


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# the machine


def _memory(field: str) -> int:
    """A field of /proc/meminfo, in bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _surroundings(bench: _Bench, load: float) -> Surroundings:
    versions = {}
    for package in ("torch", "transformers", "deepspeed", "ssdplan"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    names = (line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    processor = next((value.strip() for name, _, value in names if name.strip() == "model name"), platform.machine())
    return Surroundings(
        processor=processor,
        cores=len(os.sched_getaffinity(0)),
        threads=bench.threads,
        device_name=bench.device_name,
        host_memory_bytes=_memory("MemTotal"),
        kernel=platform.release(),
        python=platform.python_version(),
        versions=versions,
        load=load,
    )
