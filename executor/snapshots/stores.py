"""Stores of a run: made for a plan, beside what there is.

Owns their identities and the names of their files: whatever is found after a crash is known by them.
"""

from collections.abc import Sequence
from pathlib import Path

from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.stripe_shares import bandwidths

from ..memory.store_records import Records
from ..store import SUFFIX, Store
from .run_directory import RunDirectory


def new_store(
    directory: RunDirectory,
    places: Sequence[Path],
    plan: Plan,
    records: Records,
    *,
    durable: bool,
    keep: int,
    first_volume: int = 0,
) -> Store:
    """A store for a plan at these places, of which run.json knows before it is there. Raises as `Store.create`."""
    return Store.create(
        places,
        records.records,
        plan.sha256(),
        # the shares of its volumes, when they are as many as the plan was made for
        bandwidths(plan.machine.volumes) if len(places) == len(plan.machine.volumes) else None,
        durable=durable,
        keep=keep,
        first_volume=first_volume,
        identity=directory.next_store(),
    )


def store_beside(
    directory: RunDirectory, places: Sequence[Path], plan: Plan, records: Records, *, durable: bool, keep: int
) -> Store:
    """A store for another plan, beside the one that there is. The plan is in the directory before. Raises as
    `Store.create`."""
    directory.plan_ahead(plan)
    try:
        number = free_number(places)
        return new_store(directory, places, plan, records, durable=durable, keep=keep, first_volume=number)
    except BaseException:
        directory.forget_ahead()
        raise


def free_number(places: Sequence[Path]) -> int:
    """Where the files of a store may be numbered from so that none of them is there."""
    taken = [
        int(path.stem.removeprefix("volume-"))
        for place in places
        for path in place.glob(f"volume-*{SUFFIX}")
        if path.stem.removeprefix("volume-").isdecimal()
    ]
    return max(taken, default=-1) + 1
