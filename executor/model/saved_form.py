"""How a model is saved: under the names, in the parts and in the files that the checkpoint has from which it came.

Owns what an export makes of the model's own tensors, so that it loads wherever the original did: experts that are one
tensor here are written one by one, and what the model never uses is copied as it is stored. It holds a piece of a
tensor, and trains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ssdplan.plans.errors import MismatchError

from .directory.export import TensorEntry
from .directory.shards import PIECE_ELEMENTS, Checkpoint, Entry, dtype_of
from .model import StreamedModel


@dataclass(frozen=True)
class _Range:
    """Elements [start, stop) of one of the model's tensors, and the name and shape under which they are saved."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


class SavedForm:
    """Of an opened model, whose checkpoint is still where it was. `files`: the file that has each saved tensor.

    Errors: MismatchError where the checkpoint lacks a tensor by now.
    """

    def __init__(self, model: StreamedModel) -> None:
        self._checkpoint = Checkpoint(model.path, model.module)
        self.files: dict[str, str] = {}
        aliases: dict[int, list[str]] = {}
        named = chain(model.module.named_parameters(remove_duplicate=False), model.persistent_buffers.items())
        for name, tensor in named:
            aliases.setdefault(id(tensor), []).append(name)
        self._ranges: dict[str, tuple[_Range, ...]] = {}
        self._carried: list[Entry] = []
        for names in aliases.values():
            if names[0] in model.anatomy.unused:
                parts = (self._checkpoint.stored[part.stored] for part in self._checkpoint.parts(names))
                self._carried += {each.name: each for each in chain(self._checkpoint.find(names), *parts)}.values()
            else:
                self._ranges[names[0]] = self._look_up(model, names)
        for entry in self._carried:
            self.files[entry.name] = entry.file.name

    def _look_up(self, model: StreamedModel, names: Sequence[str]) -> tuple[_Range, ...]:
        parts = self._checkpoint.parts(names)
        for part in parts:
            self.files[part.stored] = self._checkpoint.stored[part.stored][0].file.name
        if parts:
            return tuple(_Range(part.stored, part.start, part.stop, part.shape) for part in parts)
        entries = self._checkpoint.find(names)
        if not entries:
            raise MismatchError(f"{model.path}: the checkpoint has no tensor {names[0]} any more")
        first = entries[0]
        self.files[first.name] = first.file.name
        return (_Range(first.name, 0, first.elements, first.shape),)

    def entries(self, own: Sequence[TensorEntry]) -> list[TensorEntry]:
        """What `tensors` yields, for the exporter, of the model's `own` tensors."""
        saved = [TensorEntry(each.name, each.shape, one.dtype) for one in own for each in self._ranges[one.name]]
        return saved + [TensorEntry(each.name, each.shape, dtype_of(each)) for each in self._carried]

    def tensors(self, own: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, piece) as they are saved, from (name, piece) of the model's `own` tensors, each flat and in order or
        whole; then what is copied. A piece is gone when the next is asked for."""
        current, done = "", 0
        for name, piece in own:
            if name != current:
                current, done = name, 0
            flat = piece.reshape(-1)
            ranges = self._ranges[name]
            if len(ranges) == 1:
                yield ranges[0].name, piece
                continue
            for each in ranges:
                start, stop = max(each.start, done), min(each.stop, done + len(flat))
                if start < stop:
                    yield each.name, flat[start - done : stop - done]
            done += len(flat)
        for entry in self._carried:
            if not entry.elements:
                yield entry.name, torch.empty(entry.shape, dtype=dtype_of(entry))
            for first in range(0, entry.elements, PIECE_ELEMENTS):
                buffer = torch.empty(min(PIECE_ELEMENTS, entry.elements - first), dtype=dtype_of(entry))
                self._checkpoint.read(entry, buffer, first)
                yield entry.name, buffer
