"""Reads a model directory's safetensors shards, tensor by tensor.

Owns file names, shard headers and their errors. It never holds more than one tensor, keeps no file mapped between calls
(mapped pages would count as this process's memory) and never opens a pickle.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
PIECE_ELEMENTS = 1 << 22  # of a tensor at a time, where two are compared
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: its file, its name in it, shape and safetensors dtype."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


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
            with _opened(file) as shard:
                for stored in sorted(shard.keys()):
                    name = stored
                    for renaming in renamings:
                        name, _ = renaming.rename_source_key(name)
                    tensor = shard.get_slice(stored)
                    self.entries[name] = Entry(file, stored, tuple(tensor.get_shape()), tensor.get_dtype())

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

    def read(self, entry: Entry, out: torch.Tensor) -> None:
        """Copies an entry into `out` (same shape, any float dtype), converting.

        Errors: MismatchError if the file is corrupt.
        """
        with _opened(entry.file) as shard:
            try:
                tensor = shard.get_tensor(entry.name)
            except (SafetensorError, OSError, RuntimeError) as error:
                raise MismatchError(f"{entry.file}: tensor {entry.name} cannot be read ({error})") from error
            out.copy_(tensor)
            del tensor

    def require_equal(self, one: Entry, other: Entry) -> None:
        """MismatchError unless two entries of one shape hold the same bits; compared in pieces."""
        with _opened(one.file) as first, _opened(other.file) as second:
            left, right = first.get_slice(one.name), second.get_slice(other.name)
            rows = one.shape[0] if one.shape else 1
            piece = max(1, PIECE_ELEMENTS * rows // max(1, math.prod(one.shape)))
            for start in range(0, rows, piece):
                if not torch.equal(left[start : start + piece], right[start : start + piece]):
                    raise MismatchError(
                        f"{other.file}: {other.name} differs from {one.name}, to which the configuration ties it; "
                        "set tie_word_embeddings to false in config.json"
                    )


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        shard = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise MismatchError(f"{file}: not a whole safetensors file ({error})") from error
    with shard:
        yield shard
