"""Processes that a comparison starts: bounded in time, counted by the kernel, and gone when the comparison is.

Owns starting, watching and killing. A process leads a group of its own, which is killed whole when the command ends for
any reason; should the command itself be killed outright, the kernel kills the process.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.02
"""Between two looks at a process: the error of what is counted between two of its steps."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class IoBytes:
    """What the kernel counted of a process: bytes that it had the drives read and write (/proc/PID/io)."""

    read: int
    written: int


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    """Its exit code; minus the signal's number where one ended it."""
    seconds: float
    peak_memory_bytes: int
    """The high-water mark of its resident set, and no less than that of any child that it waited for."""
    timed_out: bool
    others_cores: float
    """Cores that anything else kept busy meanwhile, other machines on the same processor included."""
    io: tuple[IoBytes, ...]
    """As of each line of the watched file, in order; of lines that were not seen before it ended, as of its end. Empty
    where the kernel does not tell."""


def run(
    command: Sequence[str],
    *,
    log: Path,
    environment: dict[str, str],
    timeout: float,
    lines: Path | None = None,
    on_line: Callable[[int], None] = lambda count: None,
    clock: Callable[[], float] = time.monotonic,
) -> Ended:
    """Run `command` to its end, its output into `log`. `lines` is a file that it writes a line a step to: with each new
    line the bytes that the kernel counts are read, and `on_line` is called with the number of lines. `timeout`: seconds
    of `clock`."""
    with log.open("ab") as output, _started(command, output.fileno(), environment) as process:
        started, busy = clock(), _busy_seconds()
        seen, counted, timed_out, peak = 0, list[IoBytes](), False, 0
        there = True
        while there:  # and one look more once it has ended: until it is waited for, the kernel tells what it counted
            there = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            if there and not timed_out and clock() - started > timeout:
                timed_out = True
                os.killpg(process.pid, signal.SIGKILL)
            new = _count_lines(lines) if lines else 0
            if new > seen:
                counted += [counts for counts in [_io_bytes(process.pid)] * (new - seen) if counts]
                seen = new
                on_line(new)
            peak = max(peak, _peak_bytes(process.pid))
            if there:
                time.sleep(POLL_SECONDS)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = clock() - started
        others = _busy_seconds() - busy - usage.ru_utime - usage.ru_stime
        return Ended(
            code=process.returncode,
            seconds=seconds,
            others_cores=max(0.0, others / seconds),
            peak_memory_bytes=_own_peak(usage.ru_maxrss << 10, peak),
            timed_out=timed_out,
            io=tuple(counted) if len(counted) == seen else (),
        )


@contextlib.contextmanager
def _started(command: Sequence[str], output: int, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The process; on leaving, whatever is left of its group is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def follow_the_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was gone before the kernel knew
            os._exit(1)

    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
        preexec_fn=follow_the_parent,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.returncode is None:
            process.wait()


def environment(threads: int | None = None, *, device: str = "cpu") -> dict[str, str]:
    """That of this command, offline; programs beside the interpreter are found. `threads` for OpenMP, if given. On the
    CPU no GPU is seen."""
    beside = str(Path(sys.executable).parent)
    found = {
        **os.environ,
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if device == "cpu":
        found |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return found | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


def _count_lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def _peak_bytes(pid: int) -> int:
    """The most that a process ever had in memory (VmHWM); 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def _own_peak(at_end: int, seen: int) -> int:
    """A process's peak from what the kernel says at its end and what was last seen of it while it ran.

    The former is exact, but it counts what this process had when it made the other, and so only tells where it is more.
    """
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return at_end if at_end > mine else seen


def _busy_seconds() -> float:
    """Seconds that all cores together were not idle, and those that a virtual machine wanted and did not get."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _io_bytes(pid: int) -> IoBytes | None:
    try:
        fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return IoBytes(int(fields["read_bytes"]), int(fields["write_bytes"]))
    except (OSError, ValueError, KeyError):
        return None
