"""Reads a model directory's safetensors shards, in pieces of a few MiB.

Owns file names, shard headers and their errors. It holds one piece at a time, maps no file's data (mapped pages would
count as this process's memory) and never opens a pickle.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from ssdplan.plans.errors import MismatchError, UsageError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
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


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory; UsageError where there are none, MismatchError on a bad index."""
    index_file = path / INDEX_FILE
    if index_file.is_file():
        try:
            names = sorted(set(map(os.fspath, json.loads(index_file.read_text())["weight_map"].values())))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MismatchError(f"{index_file}: not an index of safetensors shards ({error})") from error
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise MismatchError(f"{index_file}: names a shard outside of its directory: {outside[0]}")
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise MismatchError(f"{index_file}: names shards that are not there: {', '.join(missing)}")
        return tuple(path / name for name in names)
    if (path / SINGLE_FILE).is_file():
        return (path / SINGLE_FILE,)
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickles:
        raise UsageError(
            f"{path}: {pickles[0]} is a pickle, which is never opened; convert to safetensors "
            f"(looked for {SINGLE_FILE} and {INDEX_FILE})"
        )
    raise UsageError(f"{path}: no weights; looked for {SINGLE_FILE} and {INDEX_FILE}")


class Checkpoint:
    """All tensors of a model directory, by the names that the model has for them. Opening reads the headers only.

    Some families' checkpoints have other names than the model (GPT-NeoX stores `embed_out` for `lm_head`): the
    library's own table of renamings is applied, as from_pretrained does. Tensors that it would merge or split keep
    their stored names, and so are missed by whoever looks for the result.
    """

    def __init__(self, path: Path, module: PreTrainedModel) -> None:
        self.entries: dict[str, Entry] = {}
        self._prefix = f"{module.base_model_prefix}." if module.base_model_prefix else ""
        renamings = [t for t in get_model_conversion_mapping(module) if isinstance(t, WeightRenaming)]
        for file in weight_files(path):
            for stored, (shape, dtype, start) in _header(file).items():
                name = stored
                for renaming in renamings:
                    name, _ = renaming.rename_source_key(name)
                self.entries[name] = Entry(file, stored, shape, dtype, start)

    def find(self, names: tuple[str, ...]) -> list[Entry]:
        """The entries under any of `names`, with or without the base model's prefix."""
        prefix = self._prefix
        found: dict[str, Entry] = {}
        for name in names:
            for candidate in (name, name.removeprefix(prefix), prefix + name):
                if candidate in self.entries:
                    found[candidate] = self.entries[candidate]
                    break
        return list(found.values())

    def read(self, entry: Entry, out: torch.Tensor, first: int = 0) -> None:
        """Copies elements [first, first + out.numel()) of an entry, in row-major order, into `out`, converting.

        `out`: contiguous, any shape and dtype. Errors: MismatchError if the file is not what it was or cannot be read.
        """
        place = out.view(-1)
        done = 0
        for piece in _pieces(entry, first, len(place)):
            place[done : done + len(piece)].copy_(piece)
            done += len(piece)

    def require_equal(self, one: Entry, other: Entry) -> None:
        """MismatchError unless two entries of one shape hold the same bits."""
        pieces = zip(_pieces(one, 0, one.elements), _pieces(other, 0, other.elements), strict=True)
        if one.dtype != other.dtype or not all(torch.equal(left, right) for left, right in pieces):
            raise MismatchError(
                f"{other.file}: {other.name} differs from {one.name}, to which the configuration ties it; "
                "set tie_word_embeddings to false in config.json"
            )


def _header(file: Path) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """Stored name -> shape, dtype and first byte of each tensor of a shard, sorted by name.

    The safetensors library says whether the file is whole; it tells no places, so these are read from the header: eight
    bytes of its length, little-endian, then as much JSON, then the data that the places are counted from.
    """
    try:
        with safe_open(file, framework="pt", device="cpu"):
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
    dtype = {**FLOAT_DTYPES, **_OTHER_DTYPES}.get(entry.dtype)
    if dtype is None:
        raise MismatchError(f"{entry.file}: tensor {entry.name} cannot be read (it is {entry.dtype})")
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
