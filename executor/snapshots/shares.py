"""Shares: a snapshot of several ranks as one process has all of it, to export it or to share it out among others.

Owns how many ranks a run has, which directories are theirs, and which snapshot all of them have. It writes nothing:
what ranks agree upon when they go on themselves, `agreement.py` has.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.run import PLAN
from ssdplan.plans.errors import StoreError, UsageError
from ssdplan.plans.schedule.build import build_schedule

from ..memory.migration import Snapshotted
from ..memory.store_records import Records
from ..ranks.place import directory_of
from ..store import Store
from .resume import Kept, reopened
from .snapshots import Snapshot


@dataclass(frozen=True)
class Whole:
    """A snapshot that all ranks of a run have."""

    snapshot: Snapshot
    """As rank 0 has it."""
    shares: tuple[Snapshotted, ...]
    """Of each rank, in their order."""


def ranks_of(run: Path) -> int:
    """The number of ranks that the run in this directory goes on with: that of its plan, which is rank 0's. Raises
    UsageError."""
    return Plan.load(run / PLAN).decision.ranks


def require_whole(run: Path, ranks: int) -> None:
    """Raise UsageError where a directory of the run's ranks is not there."""
    lacking = [str(path) for rank in range(ranks) if not (path := directory_of(run, rank)).is_dir()]
    if lacking:
        raise UsageError(
            f"{run}: is a run of {ranks} ranks, and {' '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not "
            "there; bring what is missing back"
        )


@contextlib.contextmanager
def each_of(first: Kept) -> Iterator[tuple[Kept, ...]]:
    """Of all ranks of a stopped run, in their order, what is kept in their directories, locked; `first`: rank 0's.
    Raises as `resume.reopened` for reading, UsageError where a directory is not there."""
    run, ranks = first.directory.path, first.directory.current_plan().decision.ranks
    require_whole(run, ranks)
    with contextlib.ExitStack() as stack:
        others = (
            stack.enter_context(reopened(directory_of(run, rank), reading=True, ranks=ranks))
            for rank in range(1, ranks)
        )
        yield first, *others


@contextlib.contextmanager
def whole_of(kept: tuple[Kept, ...]) -> Iterator[Whole]:
    """The newest snapshot that all ranks have, open to be read. Raises StoreError where there is none, and as
    `Store.open`."""
    steps = [each.step for each in kept]
    wanted = min(steps)
    with contextlib.ExitStack() as stack:
        found: list[Snapshot] = []
        shares: list[Snapshotted] = []
        for rank, each in enumerate(kept):
            if not wanted or each.snapshot is None:
                raise _no_snapshot(kept, steps)
            schedule = build_schedule(each.plan.model, each.plan.decision, rank)
            records = Records.of(schedule, snapshots=True)
            store = Store.open(each.volumes, records.records, "last" if each.step == wanted else "before")
            stack.callback(store.close)
            found.append(Snapshot.read(store.metadata, str(each.volumes[0])))
            shares.append(Snapshotted(schedule, records.places(schedule), store))
        if {snapshot.step for snapshot in found} != {wanted}:
            raise _no_snapshot(kept, steps)
        yield Whole(found[0], tuple(shares))


def _no_snapshot(kept: tuple[Kept, ...], steps: list[int]) -> StoreError:
    newest = ", ".join(f"{step} on rank {rank}" if step else f"none on rank {rank}" for rank, step in enumerate(steps))
    return StoreError(
        f"{kept[0].directory.path}: no snapshot is on all ranks; the last ones are of step {newest}; the store in the "
        f"directory of rank {steps.index(min(steps))} is missing or damaged"
    )
