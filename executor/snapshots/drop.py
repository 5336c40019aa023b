"""Removes a run's store and the snapshots in it, once nobody wants to go on with the run.

Owns what is refused, and the order: run.json says that the store is gone before it goes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssdplan.plans.documents.run import MODEL
from ssdplan.plans.errors import SsdplanError, UsageError
from ssdplan.plans.units import format_bytes

from ..model.directory.weight_files import weight_files
from ..ranks.place import directory_of
from ..store import Lying, inspect
from .resume import clear, files_of, stores_of
from .run_directory import RunDirectory


@dataclass(frozen=True)
class Dropped:
    """What was of a store."""

    step: int
    """That its last snapshot was of; 0: it had none."""
    removed: tuple[Path, ...]
    """Files that were deleted."""
    blank: tuple[Path, ...]
    """Volumes that hold nothing now."""
    nbytes: int
    """Of the files that were deleted."""


def drop_store(run: Path, *, sure: bool, without_model: bool, volumes: Sequence[Path] = ()) -> Dropped:
    """Delete the store of the run in directory `run`, and those of its other ranks; volumes that were not made for it
    become blank. The run cannot go on after that. `volumes`: where else it may lie.

    Raises StoreError when the run goes on; UsageError where there is no run or no store, unless `sure`, and, unless
    `without_model`, where the states would be lost because the run did not finish with a model, and their own was not
    exported, or is no longer where it was exported to.
    """
    with RunDirectory.open(run) as directory, contextlib.ExitStack() as stack:
        found = stores_of(directory, volumes, confirm="")
        stores = found.clearable
        shares = [(lying, other) for other in _others(directory, stack) for lying in _shares(other)]
        if not found.stores and not directory.run.snapshots:
            raise UsageError(f"{run}: kept no snapshots, so its store went when it ended; there is nothing to drop")
        if not (found.stores or shares) and directory.run.dropped is not None:
            raise UsageError(
                f"{run}: its store was dropped already, with the states after step {directory.run.dropped}"
            )
        if not found.stores and directory.run.dropped is None:
            raise UsageError(
                f"{run}: no store of this run is on {' '.join(map(str, found.places))}; name where it is with --volume"
            )
        if foreign := [str(path) for lying in found.stores if lying not in stores for path in lying.paths]:
            raise UsageError(
                f"{run}: was begun elsewhere or by somebody else, and {' '.join(foreign)} may be another run's; to "
                "lose what lies there, ssdplan volume init --force"
            )
        step = max((int(lying.metadata.get("step", 0)) for lying in stores), default=directory.run.dropped or 0)
        removed, blank = _parts([*((lying, directory) for lying in stores), *shares])
        nbytes = sum(info.capacity_bytes for info in inspect(removed)) if removed else 0
        where = " ".join(map(str, (*removed, *blank)))
        if step and not without_model and not (run / MODEL).is_dir() and not _is_exported(directory, step):
            raise UsageError(
                f"{run}: has no model yet, so the states after step {step} would be lost with the store in {where}; "
                f"ssdplan export {run} --to DIR writes their model first, or lose them with --without-model"
            )
        if not sure:
            raise UsageError(
                f"{run}: would drop {format_bytes(nbytes)} in {where}, the states after step {step}, without which the "
                "run cannot go on; give --yes to do so"
            )
        directory.change(dropped=step)
        for lying in stores:
            clear(lying, directory)
        for lying, other in shares:
            clear(lying, other)
        return Dropped(step, tuple(removed), tuple(blank), nbytes)


def _is_exported(directory: RunDirectory, step: int) -> bool:
    """Whether the model after `step` steps was exported, and its directory is there, weights and all."""
    exported = directory.run.exported
    if exported is None or exported.step != step or not directory.known:
        return False
    try:
        return bool(weight_files(Path(exported.to)))
    except (SsdplanError, OSError):  # whatever is in the way of loading it
        return False


def _others(directory: RunDirectory, stack: contextlib.ExitStack) -> Iterator[RunDirectory]:
    """Those of the other ranks that the run has here."""
    for rank in range(1, directory.current_plan().decision.ranks):
        if (path := directory_of(directory.path, rank)).is_dir():
            yield stack.enter_context(RunDirectory.open(path))


def _shares(directory: RunDirectory) -> Sequence[Lying]:
    return stores_of(directory, (), confirm="").clearable


def _parts(stores: Sequence[tuple[Lying, RunDirectory]]) -> tuple[list[Path], list[Path]]:
    """Files that go, and volumes that stay."""
    each = [pair for lying, of in stores for pair in zip(lying.paths, files_of(lying, of), strict=True)]
    return [path for path, made in each if made], [path for path, made in each if not made]
