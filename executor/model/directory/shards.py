"""Reads a model directory's safetensors shards, in pieces of a few MiB.

Owns shard headers, tensors' names and their errors. It holds one piece at a time and maps no file's data, as mapped
pages would count as this process's memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from ssdplan.plans.errors import MismatchError

from ...data.reading.documents import require_itself
from .conversions import Conversions, Part
from .weight_files import weight_files

PIECE_ELEMENTS = 1 << 20
"""Of a tensor that are read at a time: all that reading holds, twice where two tensors are compared."""
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: its file, its name in it, shape, safetensors dtype, and the file's byte at which its
    elements begin."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Checkpoint:
    """All tensors of a model directory, by the names that the model has for them. Opening reads the headers only.

    Some families' checkpoints have other names than the model (GPT-NeoX stores `embed_out` for `lm_head`), or store a
    tensor in parts, as experts: `conversions.py` has the library's own description of that. Errors: those of
    `weight_files`; UsageError where a file cannot be read, MismatchError where it is no whole safetensors file, or
    lacks parts of a tensor of which it has others.
    """

    def __init__(self, path: Path, module: PreTrainedModel) -> None:
        self.entries: dict[str, list[Entry]] = {}
        """By name; of one name there are several where shards hold the tensor twice, or two stored names mean it."""
        self._prefix = f"{module.base_model_prefix}." if module.base_model_prefix else ""
        self._own = frozenset(module.state_dict(keep_vars=True))
        conversions = Conversions(module, {spelled: own for own in self._own for spelled in self._spellings(own)})
        self.stored: dict[str, list[Entry]] = {}
        """By the name that the files have for a tensor; several where more shards than one hold it."""
        for file in weight_files(path):
            for stored, (shape, dtype, start) in _header(file).items():
                self.stored.setdefault(stored, []).append(Entry(file, stored, shape, dtype, start))
        for stored in sorted(self.stored, key=dot_natural_key):  # the order in which from_pretrained renames
            if (name := conversions.renamed(stored)) is not None:
                self.entries.setdefault(name, []).extend(self.stored[stored])
        self.split = conversions.split
        """Stored tensors that are several of the model's, and what these are called."""
        try:
            self._parts = conversions.parts()
        except MismatchError as error:
            raise MismatchError(f"{path}: {error}") from error

    def parts(self, names: Iterable[str]) -> tuple[Part, ...]:
        """The parts in which the tensor of one of `names` is stored, in the order of its elements; empty where it is
        not stored in parts."""
        return next((self._parts[each] for each in names if each in self._parts), ())

    def find(self, names: Iterable[str]) -> list[Entry]:
        """The entries under any of `names`, with or without the base model's prefix."""
        found: dict[Entry, None] = {}
        for name in names:
            for spelled in self._spellings(name):
                found |= dict.fromkeys(self.entries.get(spelled, ()))
        return list(found)

    def _spellings(self, name: str) -> tuple[str, ...]:
        """The name of one of the model's tensors, and those with which a checkpoint may have it instead."""
        others = (name.removeprefix(self._prefix), self._prefix + name)
        return (name, *(other for other in others if other not in self._own))

    def without_place(self, module: PreTrainedModel) -> tuple[str, ...]:
        """Names of tensors that the model has no place for, sorted; but for those that transformers leaves out without
        a warning, as the model's class names them, those of buffers that the model computes itself, and causal masks,
        which old versions of transformers saved."""
        owned = {name for own in self._own for name in self._spellings(own)}
        computed = {name for name, _ in module.named_buffers()} - self._own
        owned |= {name for own in computed for name in self._spellings(own)}
        ignored = {r"\.masked_bias$", *(module._keys_to_ignore_on_load_unexpected or ())}
        # Buffers that were of each layer, and of the checkpoint; these two patterns are from_pretrained's own.
        if any(name.endswith("rotary_emb.inv_freq") for name in computed):
            ignored.add(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in computed):
            ignored.add(r"(^|\.)position_ids$")
        return tuple(
            sorted(
                entry.name
                for name, entries in self.entries.items()
                if name not in owned and not any(re.search(pattern, name) for pattern in ignored)
                for entry in entries
                if not _is_causal_mask(entry)
            )
        )

    def read(self, entry: Entry, out: torch.Tensor, first: int = 0) -> None:
        """Copies elements [first, first + out.numel()) of an entry, in row-major order, into `out`, converting.

        `out`: contiguous, any shape and dtype. Errors: MismatchError if the file is not what it was or cannot be read.
        """
        place = out.view(-1)
        done = 0
        for piece in _pieces(entry, first, len(place)):
            place[done : done + len(piece)].copy_(piece)
            done += len(piece)

    def require_equal(self, one: Entry, other: Entry, *, tied: bool) -> None:
        """MismatchError unless two entries of one shape hold the same bits. `tied`: the configuration ties them."""
        pieces = zip(_pieces(one, 0, one.elements), _pieces(other, 0, other.elements), strict=True)
        if one.dtype == other.dtype and all(torch.equal(left, right) for left, right in pieces):
            return
        if tied:
            raise MismatchError(
                f"{other.file}: {other.name} differs from {one.name}, to which the configuration ties it; "
                "set tie_word_embeddings to false in config.json"
            )
        raise MismatchError(
            f"{other.file}: {other.name} differs from {one.name} of {one.file.name}, and both are one tensor of the "
            "model; remove the one that is not meant"
        )


def dtype_of(entry: Entry) -> torch.dtype:
    """Of an entry's elements. Errors: MismatchError for one that is not read here."""
    dtype = {**FLOAT_DTYPES, **_OTHER_DTYPES}.get(entry.dtype)
    if dtype is None:
        raise MismatchError(f"{entry.file}: tensor {entry.name} cannot be read (it is {entry.dtype})")
    return dtype


def _is_causal_mask(entry: Entry) -> bool:
    return entry.dtype in ("BOOL", "U8") and len(entry.shape) == 4 and entry.shape[:2] == (1, 1)


def _header(file: Path) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """Stored name -> shape, dtype and first byte of each tensor of a shard, sorted by name.

    The safetensors library says whether the file is whole; it tells no places, so these are read from the header: eight
    bytes of its length, little-endian, then as much JSON, then the data that the places are counted from.
    """
    require_itself(file)
    try:
        with safe_open(file, framework="np"):  # by torch it maps the whole file to write to, which a limit counts
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise MismatchError(f"{file}: not a whole safetensors file ({error})") from error
    return {
        name: (tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
        for name, entry in sorted(header.items())
        if name != "__metadata__"
    }


def _pieces(entry: Entry, first: int, count: int) -> Iterator[torch.Tensor]:
    """Elements [first, first + count) of an entry's flat tensor; a piece is gone when the next is asked for."""
    dtype = dtype_of(entry)
    buffer = torch.empty(min(count, PIECE_ELEMENTS), dtype=dtype)
    data = buffer.view(torch.uint8).numpy().data
    try:
        with entry.file.open("rb", buffering=0) as stream:
            stream.seek(entry.start + first * dtype.itemsize)
            for start in range(0, count, PIECE_ELEMENTS):
                elements = min(count - start, PIECE_ELEMENTS)
                wanted = data[: elements * dtype.itemsize]
                while wanted:
                    got = stream.readinto(wanted)
                    if not got:
                        raise OSError("the file ends before it")
                    wanted = wanted[got:]
                yield buffer[:elements]
    except OSError as error:
        raise MismatchError(f"{entry.file}: tensor {entry.name} cannot be read ({error})") from error
