"""Kept weights: those of a zeroth-order run after some step, so that going on needs the log from there alone.

Owns their directory in the run's, `weights-STEP`, which is a model directory in the format in which the run updates its
parameters, and the document beside it, which binds it to the log and has a checksum of every tensor. Nothing is lost
without them: the first weights and the log are the state of the run.
"""

import contextlib
import hashlib
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field

from ssdplan.plans.documents.base import MAX_DOCUMENT_BYTES, Count, Document, Name
from ssdplan.plans.errors import MismatchError
from ssdplan.plans.files import Folder

from ..model.directory.export import TensorEntry, copy_model, export_model
from ..model.model import StreamedModel
from ..model.weights import Weights

_NAME = re.compile(r"weights-(\d{1,12})(\.json)?")
_SUM_BYTES = 16
_Hex = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class _Document(Document):
    """What lies beside kept weights."""

    schema_: Literal["ssdplan.weights/1"] = Field(alias="schema")
    step: Count
    """Steps that the weights have seen; none of their updates is pending."""
    log: _Hex
    """The log's checksum after this step."""
    tensors: dict[Name, _Hex]
    """blake2b, 16 bytes, of each tensor's elements as they are stored."""


@dataclass(frozen=True)
class KeptWeights:
    """Weights that lie in a run's directory."""

    path: Path
    step: int
    sums: Mapping[str, str]

    def open(self, model: StreamedModel) -> "KeptReader":
        return KeptReader(self, model)


class KeptReader:
    """Reads kept weights, each state once, from its first element to its last, and sums what is read."""

    def __init__(self, kept: KeptWeights, model: StreamedModel) -> None:
        """`model`: that of the first weights. Rows that loading sets to zero there have moved since. Raises
        MismatchError where the directory has not all of its tensors."""
        self._kept, self._states = kept, model.states
        self._weights = Weights(replace(model, path=kept.path, zeroed=(), allow_unused_weights=False))
        self._sums = _Sums()

    def read(self, state: int, out: torch.Tensor, first: int = 0) -> None:
        """As `Weights.read`; `out` is of the dtype in which they were kept."""
        self._weights.read(state, out, first)
        for tensor in self._states[state].tensors:
            start, stop = max(tensor.offset, first), min(tensor.offset + tensor.elements, first + len(out))
            if start < stop:
                self._sums.take(tensor.name, out[start - first : stop - first])

    def close(self) -> None:
        """Raise MismatchError unless all that was read is what was written."""
        self._weights.close()
        for name, found in self._sums.found().items():
            if found != self._kept.sums.get(name):
                raise MismatchError(
                    f"{self._kept.path}: {name} is not what was written there; remove this directory and "
                    f"{self._kept.path.name}.json to go on from the first weights and the log"
                )


class _Sums:
    """A checksum of each tensor that passes, in pieces and in order."""

    def __init__(self) -> None:
        self._digests: dict[str, hashlib.blake2b] = {}

    def take(self, name: str, piece: torch.Tensor) -> None:
        digest = self._digests.setdefault(name, hashlib.blake2b(digest_size=_SUM_BYTES))
        digest.update(piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def passing(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, piece in tensors:
            self.take(name, piece)
            yield name, piece

    def found(self) -> dict[str, str]:
        return {name: digest.hexdigest() for name, digest in self._digests.items()}


def keep(
    folder: Folder,
    source: Path,
    step: int,
    log: bytes,
    entries: Sequence[TensorEntry],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> int:
    """Make weights after `step` steps durable in the run's `folder`, then remove those of earlier steps. `source`: the
    directory of the first weights; `log`: the log's checksum after the step, which is durable.

    Returns the bytes that were written. Raises as `export.export_model`.
    """
    name, sums = f"weights-{step}", _Sums()
    _remove(folder, name)  # a crash may have come before its document
    export_model(folder.path / name, source=source, entries=entries, tensors=sums.passing(tensors))
    document = _Document.model_validate(
        {"schema": "ssdplan.weights/1", "step": step, "log": log.hex(), "tensors": sums.found()}
    )
    folder.write(f"{name}.json", document.model_dump_json(by_alias=True, indent=1) + "\n", durable=True)
    clear(folder, spared=name)
    return sum(entry.nbytes for entry in entries)


def latest(folder: Folder, log: Sequence[bytes]) -> KeptWeights | None:
    """The last weights that a run of `len(log) - 1` steps kept, None without. `log`: the log's checksums after 0, 1, 2
    and so on steps. Raises MismatchError for weights of another log, UsageError for a document that is none."""
    steps = {step for name in folder.names("weights-*.json") if (step := _step_of(name)) is not None}
    usable = [step for step in steps if step < len(log) and folder.has_folder(f"weights-{step}")]
    if not usable:
        return None
    name = f"weights-{max(usable)}"
    path = folder.path / f"{name}.json"
    document = _Document.parse(folder.read(path.name, MAX_DOCUMENT_BYTES, "document of kept weights"), path)
    if document.step != max(usable) or document.log != log[document.step].hex():
        raise MismatchError(
            f"{path}: is of another log than the one beside it; remove it to go on from the first weights and the log"
        )
    return KeptWeights(folder.path / name, document.step, document.tensors)


def carry(folder: Folder, weights: KeptWeights, to: Folder) -> None:
    """Let another directory of the run, which has the same log, have the weights that `folder` has, durably. Raises as
    `export.copy_model`."""
    copy_model(to.path / weights.path.name, weights.path)
    document = f"{weights.path.name}.json"
    to.write(document, folder.read(document, MAX_DOCUMENT_BYTES, "document of kept weights"), durable=True)


def clear(folder: Folder, *, spared: str = "") -> None:
    """Remove all kept weights but those of this name, and what a crash left of others."""
    for entry in folder.names("weights-*"):
        if _step_of(entry) is not None and entry.removesuffix(".json") != spared:
            _remove(folder, entry.removesuffix(".json"))
    for partial in folder.names(".weights-*.partial-*"):
        shutil.rmtree(folder.path / partial)
    for unfinished in folder.names(".weights-*.json.*tmp"):
        folder.remove(unfinished)


def _remove(folder: Folder, name: str) -> None:
    """The document first: weights without one are nobody's."""
    folder.remove(f"{name}.json")
    if folder.has_folder(name):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder.path / name)


def _step_of(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None
