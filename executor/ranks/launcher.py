"""Starts the ranks of this machine, by torchrun's own launcher.

Owns their environment, and which of their errors the user is told: one, that of the rank at which it began. Ranks leave
word of their errors in a folder of the launcher's (`place.py`).
"""

import contextlib
import fcntl
import logging
import math
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

from torch.distributed.elastic.agent.server import api as agent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ssdplan.plans.errors import INTERRUPTED, RankError, SsdplanError, StoppedWithSnapshot, UsageError, error_of

from .place import FOLDER, LAUNCHED, THERE, Told, when_told

ENDING_SECONDS = 30.0
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""By which torchrun's agent is told; one of a version without it takes 30 seconds."""


@dataclass(frozen=True, slots=True)
class _End:
    """How a rank ended that did not end well."""

    rank: int
    code: int
    """Its exit code; below 0 the signal that ended it."""
    told: Told | None
    """What it told of its error."""
    when: int
    """What is smaller was first; of what a rank told, to the nanosecond, and else to the second."""
    killed: bool
    """Whether it did not end when it was asked to, and was killed."""

    @property
    def signalled(self) -> bool:
        """Whether a signal ended it that is not the launcher's."""
        return self.code < 0 and self.code != -signal.SIGTERM and not self.killed and self.told is None

    @property
    def error_code(self) -> int:
        """Of the error that it ended with, whatever ended it behind that."""
        return self.told.exit_code if self.told else self.code

    @property
    def failed(self) -> bool:
        """Whether it ended with an error of its own, and not since another did or since it was asked to."""
        return self.error_code > 0 and self.error_code not in (RankError.exit_code, INTERRUPTED)

    @property
    def lost(self) -> bool:
        """Whether it ended since another was not there any more, or not as it is."""
        return self.told is not None and self.told.exit_code == RankError.exit_code


def launch(ranks: int, arguments: Sequence[str], ending_seconds: float = ENDING_SECONDS, way_on: str = "") -> int:
    """Run `ssdplan` with these arguments in so many processes of this machine, on loopback. Returns 0, or raises the
    error of the rank that failed first, with its exit code; the others are ended then. `ending_seconds`: how long ranks
    that a signal to the launcher asks to end may take until they are killed. `way_on`: what the user may do where a
    rank was killed."""
    ending = _ending_seconds(ending_seconds)
    for name in ("torch.distributed.elastic", agent.__name__):  # which has a level of its own
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what is wrong, the ranks say
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // ranks, 1)))
    os.environ[_SHUTDOWN_TIMEOUT] = str(ending)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    clear_left()
    with tempfile.TemporaryDirectory(prefix=FOLDER) as name, _locked(Path(name)):
        os.environ[LAUNCHED] = name
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="ssdplan",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=0,
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=name),  # it writes none, and makes a folder for them
        )
        try:
            elastic_launch(config, sys.executable)("-m", "ssdplan", *arguments)
        except SignalException:
            failures: Mapping[int, ProcessFailure] = {}
        except ChildFailedError as error:
            failures = error.failures
        else:
            return 0
        ends = _ends(ranks, Path(name), failures, _patience())
    raise _outcome(ends, ranks, _patience(), way_on)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The file by which ranks and other launchers know that this one is there: locked before it has its name."""
    made = folder / f".{THERE}"
    with made.open("w") as there:
        fcntl.flock(there, fcntl.LOCK_EX)
        made.rename(folder / THERE)
        yield


def clear_left() -> None:
    """Remove the folders of this user's launchers that were killed, as soon as none of their ranks is there any more.
    One that has no lock yet is just being made."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):  # not ours to read, or gone, or in use
            status = folder.lstat()
            if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
                continue
            with (folder / THERE).open() as there:
                fcntl.flock(there, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


def _ending_seconds(default: float) -> int:
    said = os.environ.get(_SHUTDOWN_TIMEOUT)
    if said is None:
        return math.ceil(default)
    if not said.isdecimal() or len(said) > 6:
        raise UsageError(f"{_SHUTDOWN_TIMEOUT} in the environment is {said!r}; give a whole number of seconds")
    return int(said)


def _patience() -> float:
    """Seconds that torchrun gives the other ranks where one has ended; no setting changes them."""
    return float(signature(PContext.close).parameters["timeout"].default)


def _ends(ranks: int, folder: Path, failures: Mapping[int, ProcessFailure], patience: float) -> list[_End]:
    """Of all ranks that did not end well, or told something, the first of them first."""
    begun = min((failure.timestamp for failure in failures.values()), default=0)
    ends = []
    for rank in range(ranks):
        told, failure = Told.by(rank, folder), failures.get(rank)
        if told is None and failure is None:
            continue
        code = failure.exitcode if failure else told.exit_code if told else 0
        when = when_told(rank, folder) if told else failure.timestamp * 10**9 if failure else 0
        killed = failure is not None and code == -signal.SIGKILL and failure.timestamp - begun >= patience
        ends.append(_End(rank, code, told, when, killed))
    return sorted(ends, key=lambda end: end.when)


def _outcome(ends: Sequence[_End], ranks: int, patience: float, way_on: str) -> BaseException:
    """What the user is to be told."""
    slow = "".join(
        f"; rank {end.rank} had not ended {patience:g} s after it was asked to, and was killed"
        for end in ends
        if end.killed
    )
    lost = [end.told for end in ends if end.told and end.lost and end.told.message]
    if failed := [end for end in ends if end.failed]:
        return _of_failed(failed, ranks, slow)
    if signalled := [end for end in ends if end.signalled]:
        return _of_signalled(signalled[0], lost, slow + way_on)
    if lost or slow:
        return RankError((lost[0].message if lost else "the run was asked to end") + slow)
    stopped = any(end.told and not end.told.message for end in ends)
    return StoppedWithSnapshot() if stopped else KeyboardInterrupt()


def _of_failed(failed: Sequence[_End], ranks: int, more: str) -> SsdplanError:
    """The error of the first of them, or of the lowest rank that failed alike; of those that failed otherwise too."""
    first = min((end for end in failed if end.error_code == failed[0].error_code), key=lambda end: end.rank)
    said = [_said(end) for end in (first, *(end for end in failed if end.error_code != first.error_code))]
    alike = {_said(end).removeprefix(f"rank {end.rank}: ") for end in failed}
    if len(failed) == ranks and len(alike) == 1:
        said = list(alike)
    return error_of(first.error_code, "; ".join(said) + more)


def _said(end: _End) -> str:
    if end.told is None:
        return f"rank {end.rank} ended with exit code {end.code}, for the reason said above"
    named = end.told.message.startswith(f"rank {end.rank}")
    return end.told.message if named else f"rank {end.rank}: {end.told.message}"


def _of_signalled(end: _End, lost: Sequence[Told], more: str) -> RankError:
    number = -end.code
    name = signal.Signals(number).name if number in set(signal.Signals) else "no signal that has a name"
    why = ", as by the kernel where memory runs out" if number == signal.SIGKILL else ""
    met = f"; {lost[0].at} waited for it" if lost and lost[0].at else ""
    return RankError(f"rank {end.rank} was ended by signal {number} ({name}){why}{met}{more}")
