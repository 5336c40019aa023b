"""The place of a process among the ranks that a launcher started.

Owns how torchrun's environment says it, which of the machine's cores are then this rank's own, and a rank's name in
errors. It knows nothing of torch, so that a command knows all that at once.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ssdplan.plans.errors import SsdplanError, UsageError

PATIENCE_SECONDS = 60.0
"""How long a collective waits for the others, unless the user says otherwise."""
OURS = "SSDPLAN_LAUNCHED"
"""Set in the environment of ranks that `launcher.py` starts, to its process."""
_LOOK_SECONDS = 0.5
"""Between two looks whether the launcher is still there."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a launcher put this process, as torchrun's environment says it."""

    rank: int
    size: int
    local_rank: int
    local_size: int


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
    return Place(rank, size, local_rank, local_size) if size > 1 else None


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


def settle_rank(place: Place) -> None:
    """Take this rank's part of the machine's cores, before torch counts them, and end with the launcher if it is ours:
    should that be killed, the rank is asked to end as by SIGTERM, so that it does not stay at work unseen."""
    if launcher := os.environ.get(OURS):
        threading.Thread(target=_end_with, args=(int(launcher),), name="ssdplan-launcher", daemon=True).start()
    cores, of = sorted(os.sched_getaffinity(0)), place.local_size
    mine = cores[place.local_rank * len(cores) // of : (place.local_rank + 1) * len(cores) // of]
    if mine:
        os.sched_setaffinity(0, mine)
        if os.environ.get(OURS):
            os.environ["OMP_NUM_THREADS"] = str(len(mine))


def _end_with(launcher: int) -> None:
    """Ask this process to end, once, when the launcher is its parent no more. What Linux sends by PR_SET_PDEATHSIG
    comes again for each thread of the launcher, and a second signal means another thing."""
    while os.getppid() == launcher:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def directory_of(run: Path, rank: int) -> Path:
    """Of a run's directory, the one of a rank."""
    return run / f"rank-{rank}" if rank else run
