"""Agreement: which snapshot a run of several ranks goes on from, each of which has its own in its own store.

Owns that choice (docs/snapshots.md, "Several ranks"). A snapshot is complete when it is durable on all ranks, and only
then does a rank tell of it in its metrics.jsonl or begin another step. So of two ranks one has at most one snapshot
more than the other, and beside it that one's last: what is not complete is taken back before anybody goes on.
"""

from collections.abc import Callable
from pathlib import Path

from ssdplan.plans.documents.run import RUN, Run
from ssdplan.plans.errors import StoreError
from ssdplan.plans.files import Folder

from ..optimizer.zeroth_order_log import cut_log
from ..ranks.group import Ranks
from ..store import survey, withdraw
from .resume import logged_steps

NOTHING = 0
"""The step of a run before its first snapshot."""


def settle(path: Path, ranks: Ranks, note: Callable[[str], None]) -> None:
    """Take back what is not complete of this rank's snapshots; `path`: of its own directory of the run. All ranks call
    it at the same time. Raises StoreError where no snapshot is on all of them."""
    run = Run.load(path / RUN)
    lying = [each for each in survey([path]) if each.store in run.stores and each.generation and not each.refused]
    last = max(lying, key=lambda each: (_step(each.metadata), run.stores.index(each.store)), default=None)
    mine = _step(last.metadata) if last else NOTHING
    steps = [int(words) for words in ranks.tell(str(mine).encode())]
    wanted = min(steps)
    if mine == wanted:
        before = wanted
    else:
        assert last is not None
        before = _step(last.previous) if last.previous is not None else -1
    told = [int(words) for words in ranks.tell(str(before).encode())]
    if set(told) != {wanted}:
        newest = ", ".join(
            f"{step} on rank {rank}" if step else f"none on rank {rank}" for rank, step in enumerate(steps)
        )
        raise StoreError(
            f"{path}: no snapshot is on all ranks; the last ones are of step {newest}; the store in the directory of "
            f"rank {steps.index(wanted)} is missing or damaged"
        )
    if mine != wanted and last is not None:
        note(f"takes back the snapshot after {mine} steps, which was not complete on all ranks")
        withdraw(last)
    ranks.tell(b"")


def settle_log(path: Path, ranks: Ranks, note: Callable[[str], None]) -> None:
    """The same without gradients: of this rank's log keep the steps that all ranks' logs have. What it tells more of is
    made again, to the same bits."""
    with Folder(path) as folder:
        mine = logged_steps(folder)
        wanted = min(int(words) for words in ranks.tell(str(mine).encode()))
        if mine > wanted:
            note(f"takes back {mine - wanted} step(s) of its log, which not all ranks have")
            cut_log(folder, wanted)
    ranks.tell(b"")


def _step(metadata: dict[str, object]) -> int:
    step = metadata.get("step", NOTHING)
    if type(step) is not int or not 0 <= step < 1 << 40:
        raise StoreError(f"a snapshot that says it is of step {step!r}")
    return step
