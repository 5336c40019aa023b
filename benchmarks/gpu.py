"""Five minutes on a GPU: what a machine with one can tell of ssdplan, in six steps, a process and a time limit each.

`make gpu` calls it. Nothing needs a network or a package index. As each step ends, a line of JSON is added to
`results.jsonl` in `--out`, flushed: `step`, `status` (ok, failed, timeout or skipped), `seconds`, `figures`, and
`error`, the last lines of what it said. What a step finds it writes to `STEP.figures.jsonl` as it finds it, so that a
step which is cut off leaves what it had, and all that it said is in `STEP.log`. `--device cpu` is a dry run of the same
code at tiny sizes, without a GPU; its figures mean nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import begun, end_on_sigterm

ROOT = Path(__file__).resolve().parents[1]
LAST_LINES = 12
GRACE_SECONDS = 5.0
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Step:
    """One process: `benchmarks/gpu_steps.py NAME`."""

    name: str
    about: str
    seconds: float
    """The most that it may take."""
    without_ssdplan: bool = False
    without_gpu: bool = False
    beside: str = ""
    """A step that is begun at the same time: neither measures seconds."""


STEPS = (
    Step("build", "missing wheels, ssdplan itself, versions, doctor", 180, without_ssdplan=True, without_gpu=True),
    Step("probes", "copies, registration, libraries, attention, waits: torch alone", 60, without_ssdplan=True),
    Step("layers", "a block forward and backward: pipelined, and synchronised after each", 90),
    Step("train", "a profile, plans with and without recomputation, and one that needs the ssd", 300),
    Step("tests", "the tests marked gpu, several at once", 120, without_gpu=True),
    Step("sanitizer", "two tiny steps under torch's CUDA sanitizer, serial and overlapped", 120, beside="tests"),
)
NAMES = tuple(step.name for step in STEPS)


def main() -> int:
    """Exit code 0 where no step failed; 1 where one did or ran out of time; 2 where ssdplan lacks packages."""
    given = _options()
    end_on_sigterm()
    out: Path = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    statuses: dict[str, str] = {}
    facts: dict[str, Any] = {}
    with (out / "results.jsonl").open("a", encoding="utf-8") as results:
        for group in _groups(given.steps):
            left = given.limit - (time.monotonic() - began)
            ready = []
            for step in group:
                print(f"gpu: {step.name}: {step.about}", file=sys.stderr, flush=True)
                if why := _in_the_way(step, facts, left, given.device):
                    _told(results, statuses, _skipped(step, why))
                else:
                    ready.append(step)
            for line in _run(ready, out, left, given):
                if line["step"] == "build":
                    facts = line["figures"]
                _told(results, statuses, line)
                if line.get("error") == INTERRUPTED:
                    raise KeyboardInterrupt
    print(f"gpu: all of it is in {out}", file=sys.stderr)
    if facts.get("missing"):
        return 2
    return int(any(status in ("failed", "timeout") for status in statuses.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), metavar="DIR", help="[gpu-results]")
    parser.add_argument("--device", default="cuda", metavar="cuda|cuda:N|cpu", help="cpu: a dry run, tiny [cuda]")
    parser.add_argument("--steps", type=_steps, default=NAMES, metavar="NAME,...", help=f"of {','.join(NAMES)} [all]")
    parser.add_argument("--limit", type=float, default=480.0, metavar="SECONDS", help="for all steps together [480]")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="a folder with wheels of what this Python lacks")
    parser.add_argument("--target", type=Path, default=ROOT / ".gpu", metavar="DIR", help="where they go [.gpu]")
    parser.add_argument("--volume", type=Path, metavar="DIR", help="on the drive to train from [that of --out]")
    return parser.parse_args()


def _steps(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the steps are {', '.join(NAMES)}")
    return names


def _in_the_way(step: Step, facts: dict[str, Any], left: float, device: str) -> str:
    """Why a step cannot run; empty where nothing is known against it. `facts` are the step build's, if it ran."""
    if left <= 0:
        return "no time is left (--limit)"
    if facts and not facts.get("ssdplan") and not step.without_ssdplan:
        return "ssdplan is not there: see build"
    if facts.get("gpus") == [] and device != "cpu" and not step.without_gpu:
        return "torch sees no GPU here; --device cpu is a dry run"
    return ""


def _groups(names: Sequence[str]) -> list[list[Step]]:
    """The steps, in order; with a step, those that run beside it."""
    groups: list[list[Step]] = []
    for step in (step for step in STEPS if step.name in names):
        if groups and step.beside == groups[-1][0].name:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def _most(step: Step, left: float, device: str) -> float:
    """Seconds that a step may take; a dry run is bounded by all steps' limit alone."""
    return left if device == "cpu" else min(step.seconds, left)


def _skipped(step: Step, why: str) -> dict[str, Any]:
    return {"step": step.name, "status": "skipped", "seconds": 0.0, "error": why}


def _told(results: Any, statuses: dict[str, str], line: dict[str, Any]) -> None:
    statuses[line["step"]] = line["status"]
    _add(results, line)
    print(f"gpu: {line['step']}: {_in_words(line)}", file=sys.stderr, flush=True)


def _run(steps: Sequence[Step], out: Path, left: float, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of steps that are begun together. Their processes, and all that these began, are gone at the end."""
    with ExitStack() as stack:
        started = time.monotonic()
        processes = []
        for step in steps:
            processes.append(stack.enter_context(_begun(step, out, left, given)))
            stack.callback(_end, processes[-1])
        for step, process in zip(steps, processes, strict=True):
            seconds = _most(step, left, given.device)
            try:
                code = process.wait(timeout=max(0.0, started + seconds - time.monotonic()))
                status = "ok" if code == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = "timeout"
            except KeyboardInterrupt:
                status = INTERRUPTED
            _end(process)
            line = {"step": step.name, "status": status, "seconds": round(time.monotonic() - started, 2)}
            line["figures"] = _merged(out / f"{step.name}.figures.jsonl")
            if status == INTERRUPTED:
                line |= {"status": "failed", "error": INTERRUPTED}
            elif status != "ok":
                said = (out / f"{step.name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
                line["error"] = f"not done after {seconds:.0f} s; " * (status == "timeout") + "\n".join(
                    said[-LAST_LINES:]
                )
            yield line


@contextmanager
def _begun(step: Step, out: Path, left: float, given: argparse.Namespace) -> Iterator["subprocess.Popen[bytes]"]:
    """The process of a step, which writes to `STEP.log` and `STEP.figures.jsonl`."""
    figures = out / f"{step.name}.figures.jsonl"
    figures.unlink(missing_ok=True)
    call = [sys.executable, str(ROOT / "benchmarks" / "gpu_steps.py"), step.name, "--out", str(out)]
    call += ["--device", given.device, "--figures", str(figures), "--target", str(given.target.absolute())]
    call += ["--seconds", str(_most(step, left, given.device)), "--volume", str((given.volume or out).absolute())]
    call += ["--wheels", str(given.wheels.absolute())] if given.wheels else []
    paths = [str(given.target.absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"OMP_NUM_THREADS": "1"} if given.device == "cpu" else {}
    with (
        (out / f"{step.name}.log").open("wb") as said,
        begun(
            call, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        ) as process,
    ):
        yield process


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The whole session of a process: first by a request, so that it removes what it made."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        time.sleep(0.1)  # for what it began


def _merged(path: Path) -> dict[str, Any]:
    """What a step has found so far; a line that was cut off is left."""
    found: dict[str, Any] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found |= json.loads(text)
        except ValueError:
            break
    return found


def _add(results: Any, line: dict[str, Any]) -> None:
    results.write(json.dumps(line) + "\n")
    results.flush()
    os.fsync(results.fileno())


def _in_words(line: dict[str, Any]) -> str:
    words = f"{line['status']}, {line['seconds']:.0f} s"
    return words + (f": {line['error'].splitlines()[-1]}" if line.get("error") else "")


if __name__ == "__main__":
    raise SystemExit(main())
