"""The place of a process among the ranks that a launcher started.

Owns how torchrun's environment says it, which of the machine's cores are then this rank's own, a rank's name in errors,
and what a rank and our own launcher (`launcher.py`) tell each other. It knows nothing of torch, so that a command knows
all that at once.
"""

import contextlib
import fcntl
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from ssdplan.plans.errors import (
    INTERRUPTED,
    RankError,
    SaidInterruption,
    SsdplanError,
    StoppedWithSnapshot,
    UsageError,
    said_by_another,
)

PATIENCE_SECONDS = 60.0
"""How long a collective waits for the others, unless the user says otherwise."""
LAUNCHED = "SSDPLAN_LAUNCHED"
"""Set in the environment of ranks that `launcher.py` starts, to its folder."""
THERE = "launcher"
"""In the folder, a file that the launcher keeps locked as long as it is there."""
FOLDER = "ssdplan-ranks-"
"""What the name of the launcher's folder begins with."""
_gone = threading.Event()
"""Whether the launcher of this rank is no more, so that nobody hears what it tells."""
_MEETING, _TOLD = "meeting", "told"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a launcher put this process, as torchrun's environment says it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: Path | None = None
    """The folder of `launcher.py`, where that started it."""

    @property
    def meeting(self) -> str:
        """Where torch finds the other ranks."""
        return "env://" if self.launcher is None else f"file://{self.launcher / _MEETING}"

    def tell(self, told: "Told") -> bool:
        """Leave word for the launcher; whether that could be done."""
        assert self.launcher is not None
        if _gone.is_set():
            return False
        place = _word_of(self.launcher, self.rank)
        try:
            place.with_suffix(".part").write_text(json.dumps(asdict(told)))
            place.with_suffix(".part").rename(place)
        except OSError:  # the launcher is gone with its folder, or no room: the rank speaks for itself
            return False
        return True


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank tells its launcher of the error that it ends with, and does not print itself."""

    exit_code: int
    message: str
    """Empty where the user has been told."""
    at: str = ""
    """As `RankError.at`."""

    @classmethod
    def by(cls, rank: int, launcher: Path) -> Self | None:
        """What a rank that has ended told; None where it told nothing."""
        place = _word_of(launcher, rank)
        return cls(**json.loads(place.read_text())) if place.exists() else None


def _word_of(launcher: Path, rank: int) -> Path:
    return launcher / f"{_TOLD}-{rank}"


def when_told(rank: int, launcher: Path) -> int:
    """Nanoseconds, by which what ranks told is put in order."""
    return _word_of(launcher, rank).stat().st_mtime_ns


def place_of(environment: Mapping[str, str]) -> Place | None:
    """The place of this process among several of a launcher; None for one alone. Raises UsageError for what no launcher
    says."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    numbers = []
    for name, default in (("RANK", None), ("WORLD_SIZE", None), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        value = environment.get(name, default)
        if value is None or not value.isdecimal() or len(value) > 6:
            told = "is not set" if value is None else f"is {value!r}, no number that a launcher sets"
            raise UsageError(f"{name} in the environment {told}; start by torchrun")
        numbers.append(int(value))
    rank, size, local_rank, local_size = numbers
    port = environment.get("MASTER_PORT", "1")
    if not (port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16):
        raise UsageError(f"MASTER_PORT in the environment is {port!r}, no port that a launcher sets; start by torchrun")
    if not rank < size or not local_rank < local_size:
        raise UsageError(f"RANK={rank} and WORLD_SIZE={size} in the environment do not belong together; use torchrun")
    if size == 1:
        return None
    launcher = environment.get(LAUNCHED)
    return Place(rank, size, local_rank, local_size, Path(launcher) if launcher else None)


@contextlib.contextmanager
def named_rank(rank: int | None) -> Iterator[None]:
    """Name the rank in errors of ours, which all ranks print to one terminal."""
    try:
        yield
    except SsdplanError as error:
        if rank is None or str(error).startswith(f"rank {rank}"):
            raise
        error.args = (f"rank {rank}: {error}", *error.args[1:])
        raise


@contextlib.contextmanager
def told_to_launcher(place: Place) -> Iterator[None]:
    """Let our launcher tell the user of an error or an interruption: it says one of all ranks'."""
    try:
        yield
    except SsdplanError as error:
        _tell(error, place)
        raise
    except StoppedWithSnapshot:
        place.tell(Told(INTERRUPTED, ""))
        raise
    except KeyboardInterrupt as interruption:
        if broken_off := _broken_off(interruption):
            _tell(broken_off, place)
            raise broken_off from None
        if place.tell(Told(INTERRUPTED, "interrupted")):
            raise SaidInterruption from None
        raise


def launcher_speaks(environment: Mapping[str, str]) -> bool:
    """Whether our launcher started this process and is there, and so tells the user of an interruption. It asks a rank
    to end as soon as another has failed, which may be before the rank's command has begun."""
    return LAUNCHED in environment and not _gone.is_set()


def _broken_off(interruption: BaseException) -> SsdplanError | None:
    """The error that a rank was ending with when it was asked to end, as the launcher asks where another failed too."""
    before = interruption.__context__
    while before is not None:
        if isinstance(before, SsdplanError):
            return before
        before = before.__context__
    return None


def _tell(error: SsdplanError, place: Place) -> None:
    what = (RankError.exit_code, "") if error.said else (error.exit_code, str(error))
    if place.tell(Told(*what, error.at if isinstance(error, RankError) else "")):
        said_by_another(error)


def settle_rank(place: Place) -> None:
    """Take this rank's part of the machine's cores, before torch counts them, and end with the launcher if it is ours:
    should that be killed, the rank is asked to end as by SIGTERM, so that it does not stay at work unseen."""
    if place.launcher is not None:
        threading.Thread(target=_end_with, args=(place.launcher,), name="ssdplan-launcher", daemon=True).start()
    cores, of = sorted(os.sched_getaffinity(0)), place.local_size
    mine = cores[place.local_rank * len(cores) // of : (place.local_rank + 1) * len(cores) // of]
    if mine:
        os.sched_setaffinity(0, mine)
        if place.launcher is not None:
            os.environ["OMP_NUM_THREADS"] = str(len(mine))


def _end_with(launcher: Path) -> None:
    """Ask this process to end, once, when the launcher holds its lock no more. What Linux sends by PR_SET_PDEATHSIG
    comes again for each thread of the launcher, and a second signal means another thing.

    The lock stays shared by the ranks until they have ended: what they meet by is in the folder, which another launcher
    removes when nobody has the lock."""
    with contextlib.suppress(FileNotFoundError):
        fcntl.flock(os.open(launcher / THERE, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH)
    _gone.set()
    os.kill(os.getpid(), signal.SIGTERM)


def directory_of(run: Path, rank: int) -> Path:
    """Of a run's directory, the one of a rank."""
    return run / f"rank-{rank}" if rank else run
