"""Agreement: which snapshot a run of several ranks goes on from, each of which has its own in its own store.

Owns that choice (docs/snapshots.md, "Several ranks"). A snapshot is complete when it is durable on all ranks, and only
then does a rank tell of it in its metrics.jsonl or begin another step. So of two ranks one has at most one snapshot
more than the other, and beside it that one's last: what is not complete is taken back before anybody goes on.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from ssdplan.plans.errors import StoreError
from ssdplan.plans.files import Folder

from ..optimizer.zeroth_order_log import cut_log
from ..ranks.group import WORDS_BYTES, Ranks
from ..store import SUFFIX, Lying, withdraw
from .resume import logged_steps, stores_of
from .run_directory import RunDirectory

NOTHING = 0
"""The step of a run before its first snapshot."""
_MOST_WORDS_BYTES = WORDS_BYTES - 8


def settle(path: Path, ranks: Ranks, note: Callable[[str], None], volumes: Sequence[Path] = ()) -> None:
    """Take back what is not complete of this rank's snapshots; `path`: of its own directory of the run; `volumes`:
    where else its store may be. All ranks call it at the same time. Raises StoreError where no snapshot is on all of
    them, and as `resume.stores_of`."""
    with RunDirectory.open(path) as directory:
        found, known = stores_of(directory, volumes, confirm="--adopt"), directory.run.stores
        places = list(volumes) or list(map(Path, directory.run.volumes)) or [path]
    lying = [each for each in found.stores if each.generation and not each.refused]
    last = max(lying, key=lambda each: (_step(each.metadata), known.index(each.store)), default=None)
    mine = _step(last.metadata) if last else NOTHING
    steps = [int(words) for words in ranks.tell(str(mine).encode())]
    wanted = min(steps)
    if mine == wanted:
        before = wanted
    else:
        assert last is not None
        before = _step(last.previous) if last.previous is not None else -1
    told = [int(words) for words in ranks.tell(str(before).encode())]
    whys = ranks.tell(_why_not(found.stores, places).encode()[:_MOST_WORDS_BYTES])
    if set(told) != {wanted}:
        rank = steps.index(wanted)
        newest = ", ".join(
            f"{step} on rank {number}" if step else f"none on rank {number}" for number, step in enumerate(steps)
        )
        raise StoreError(
            f"no snapshot is on all ranks; the last ones are of step {newest}; rank {rank}: "
            f"{whys[rank].decode(errors='replace')}; bring that volume back, or name where it is with --volume, and "
            "those of the other ranks too; without it the run cannot go on"
        )
    if mine != wanted and last in found.clearable:
        note(f"takes back the snapshot after {mine} steps, which was not complete on all ranks")
        withdraw(last)
    ranks.tell(b"")


def _why_not(stores: Sequence[Lying], places: Sequence[Path]) -> str:
    """What is wrong with this rank's volumes, in words, where it has no snapshot, or an old one."""
    if refused := [each.refused for each in stores if each.refused]:
        return refused[0]
    for place in places:
        if not place.exists():
            return f"{place} is not there"
        if place.is_dir() and not any(place.glob(f"*{SUFFIX}")):
            return f"{place} holds no volume"
    where = " ".join(map(str, places))
    return f"{where} holds an older snapshot" if stores else f"{where} is blank, or holds no store of this run"


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
