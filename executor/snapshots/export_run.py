"""Exports a run's model: from its last snapshot, or as the run finished with it.

Owns the choice; of several ranks, the newest snapshot that all have. Weights stream, a home of them at a time; stores
are only read, and of the run nothing changes but run.json, which says what was exported.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ssdplan.plans.documents.run import MODEL, Exported
from ssdplan.plans.errors import DiskFullError, MismatchError, UsageError

from ..device.tensors import DTYPES
from ..memory.migration import tensors_of
from ..memory.states import saved_entries
from ..model.directory.export import copy_model, export_model
from ..model.directory.weight_files import weights_fingerprint
from ..model.model import open_model
from ..model.saved_form import SavedForm
from .replay import replayed, source_of
from .resume import Kept, reopened
from .run_directory import RunDirectory
from .shares import each_of, whole_of

Progress = Callable[[float, str], None]


def export_run(
    run: Path,
    to: Path,
    *,
    model: Path | None = None,
    volumes: Sequence[Path] = (),
    progress: Progress = lambda share, what: None,
) -> int | None:
    """Write the model of `run` to the new directory `to`, as a run writes its own when it ends. `model`: the directory
    of the one that was trained, if it moved; `volumes`: where else the run's store may be.

    Returns the step that it is the model of, None for the model of a run that keeps no snapshots, or of which the store
    was dropped. Raises as
    `resume.reopened` and `export.export_model`, UsageError when there is nothing to export or when the model of a run
    without snapshots is to be made otherwise, MismatchError when `model` is another model.
    """
    with RunDirectory.open(run) as directory:
        if not directory.run.snapshots or directory.run.dropped is not None:
            if not directory.folder.has_folder(MODEL):
                raise UsageError(f"{run}: has neither a snapshot nor a finished model")
            if model or volumes:
                raise UsageError(
                    f"{run}: kept no snapshots, so its finished model is copied as it is; leave out --model and "
                    "--volume"
                )
            copy_model(to, run / MODEL)
            return None
    with reopened(run, volumes, reading=True) as kept:
        if kept.snapshot is None:
            raise UsageError(f"{run}: was stopped before its first snapshot, so there is nothing to export")
        source = model or source_of(kept)
        if kept.plan.decision.zeroth_order:
            replayed(kept, to, None, source, kept.weights, progress)
            step = kept.snapshot.step
        else:
            step = _stream(kept, to, source, progress)
        with contextlib.suppress(UsageError, DiskFullError):  # on a full disk or one to read only, a drop asks again
            kept.directory.change(exported=Exported(step=step, to=str(to.absolute())))
        return step


def _stream(kept: Kept, to: Path, source: Path, progress: Progress) -> int:
    """The newest snapshot that all ranks have. Returns its step."""
    dtype = DTYPES[kept.plan.decision.precision]
    trained = kept.plan.model
    model = open_model(
        source,
        dtype,
        freeze=trained.freeze,
        allow_unused_weights=trained.allow_unused_weights,
        muon=trained.muon,
    )
    if model.fingerprint != kept.plan.model.fingerprint:
        raise MismatchError(f"{source}: is another model than {kept.plan.model.name}, which the run trained")
    assert kept.snapshot is not None
    if model.frozen_states and weights_fingerprint(source) != kept.snapshot.origin.weights:
        raise MismatchError(
            f"{source}: has other weights than the model that the run trained, whose frozen parameters are still its "
            "own; name that one by --model"
        )
    with each_of(kept) as each, whole_of(each) as whole:
        total = sum(state.elements for state in model.states)
        tensors = _told(tensors_of(whole.shares, model), total, progress)
        form = SavedForm(model)
        entries = form.entries(saved_entries(model))
        export_model(to, source=source, entries=entries, tensors=form.tensors(tensors), files=form.files)
        return whole.snapshot.step


def _told(
    tensors: Iterator[tuple[str, torch.Tensor]], total: int, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    done = 0
    for name, piece in tensors:
        yield name, piece
        done += piece.numel()
        progress(min(done / total, 1.0), f"writing {name}")
