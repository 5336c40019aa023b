"""Models out: a stream of tensors becomes a Hugging Face model directory.

Owns the safetensors files, their index and the files copied from the source model. It holds nothing but the piece of
a tensor that it is given, and it never leaves a half-written model where a whole one is expected: everything is written
into a temporary directory beside the destination, flushed, and renamed.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ssdplan.plans.errors import DiskFullError, IoFailure, UsageError
from ssdplan.plans.files import KEPT_LETTERS, PRIVATE_FOLDER, create_new, make_folder, open_regular
from ssdplan.plans.room import no_room

from ...data.reading.model_config import read_config
from ...data.tokens import VOCABULARY_FILES

MAX_SHARD_BYTES = 5_000_000_000

_COPIED = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    *VOCABULARY_FILES,
)
_TEMPLATES = "additional_chat_templates/*.jinja"

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_WRITE_BYTES = 1 << 26
_COPY_BYTES = 1 << 20
"""At once of a file that is copied: memory that no plan counts, behind the last step of a run."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor, as it will be written. A tied tensor is listed once, under the name that its model saves."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Shard:
    """A safetensors file: its name, and each tensor's place, in bytes from the start of the data."""

    name: str
    entries: tuple[TensorEntry, ...]
    offsets: Mapping[str, int]

    def header(self) -> bytes:
        """The little-endian length of the JSON header, then the header, padded with spaces to 8 bytes."""
        places: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for entry in sorted(self.entries, key=lambda entry: (self.offsets[entry.name], entry.nbytes)):
            start = self.offsets[entry.name]
            places[entry.name] = {
                "dtype": _DTYPE_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [start, start + entry.nbytes],
            }
        text = json.dumps(places, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def export_model(
    destination: Path,
    *,
    source: Path,
    entries: Sequence[TensorEntry],
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes the model directory `destination`: weights from `tensors`, configuration and tokenizer from `source`.

    `entries` lists every tensor; `tensors` yields exactly these in the same order, on any device: each whole, or under
    its name once for each of its pieces, flat and in order, so that none need be whole in memory. A shard holds
    consecutive entries of at most `max_shard_bytes` (a larger tensor gets a shard of its own); where `files`, by
    entry, names several, these are the shards.

    Raises UsageError when `destination` exists and is not an empty directory or `source` is not a model directory,
    DiskFullError when there is no space, IoFailure when writing fails otherwise. After these, and after whatever
    `tensors` raises, nothing is left behind.
    """
    config = _config(source, entries)
    shards = _shards_of(entries, files) if len(set(files.values())) > 1 else _shards(entries, max_shard_bytes)
    with _new_directory(destination, sum(entry.nbytes for entry in entries)) as partial:
        _write_weights(partial, entries, shards, tensors)
        with _write_errors(partial.parent):
            _write_json(partial / "config.json", config)
            for path in _copied(source):
                _copy(source, path, _place(partial, path.relative_to(source)))


def require_copyable(source: Path) -> None:
    """Raise UsageError where a file that an export copies of the model directory `source` is a link that leads out of
    it: to be known before days of training, not behind them."""
    for path in _copied(source):
        _within(source, path)


def _copied(source: Path) -> list[Path]:
    """The files of a model directory that an export takes as they are."""
    named = (*(source / name for name in _COPIED), *sorted(source.glob(_TEMPLATES)))
    return [path for path in named if path.is_file()]


def copy_model(destination: Path, source: Path) -> None:
    """Writes the model directory `destination` as a copy of another that was exported. Raises as `export_model`."""
    files = sorted(path for path in (*source.iterdir(), *source.glob(_TEMPLATES)) if path.is_file())
    with _new_directory(destination, sum(path.stat().st_size for path in files)) as partial:
        for path in files:
            with _write_errors(partial.parent):
                _copy(source, path, _place(partial, path.relative_to(source)))


def _copy(source: Path, path: Path, place: Path) -> None:
    """The file `path` of the model directory `source`, durably at `place`."""
    with open_regular(_within(source, path), "file of a model") as read, create_new(place) as written:
        while data := read.read(_COPY_BYTES):
            _write(written, memoryview(data))
        os.fsync(written.fileno())


def _within(source: Path, path: Path) -> Path:
    """Where the file `path` of the model directory `source` really lies. Raises UsageError for a link that leads out of
    the model: whoever publishes the copy would publish what it points at."""
    root, there = source.resolve(), path.resolve()
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent  # of the hub's cache: the files of a snapshot are links to blobs beside it
    if not there.is_relative_to(root):
        raise UsageError(
            f"{path}: is a link that leads out of the model's directory, to {there}; it is not copied into the new "
            "model: put the file itself in its place, or remove it"
        )
    return there


def _place(folder: Path, name: Path) -> Path:
    """Where the file `name` is to be written; the directory for it is made."""
    place = folder / name
    make_folder(place.parent)
    return place


@contextmanager
def _new_directory(destination: Path, nbytes: int) -> Iterator[Path]:
    """A directory under a temporary name, which becomes `destination`, durably, when all is written."""
    destination = Path(os.path.realpath(destination))
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UsageError(f"{destination}: exists already and is not an empty directory; name another, or remove it")
    with _write_errors(destination.parent):
        make_folder(destination.parent)
        _require_space(destination.parent, nbytes)
        partial = destination.parent / f".{destination.name[:KEPT_LETTERS]}.partial-{secrets.token_hex(6)}"
        partial.mkdir(mode=PRIVATE_FOLDER)
    try:
        yield partial
        with _write_errors(destination.parent):
            for folder in (partial, *(path for path in partial.iterdir() if path.is_dir())):
                _flush_directory(folder)
            partial.rename(destination)
            _flush_directory(destination.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _config(source: Path, entries: Sequence[TensorEntry]) -> dict[str, Any]:
    """The source's config.json, saying the dtype that most of the written elements have."""
    if not (source / "config.json").exists():
        raise UsageError(f"{source}: not a model directory (it has no config.json)")
    config = read_config(source / "config.json")
    elements: dict[torch.dtype, int] = {}
    for entry in entries:
        elements[entry.dtype] = elements.get(entry.dtype, 0) + prod(entry.shape)
    name = str(max(elements, key=lambda dtype: elements[dtype])).removeprefix("torch.")
    parts = [config, *(value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict))]
    for part in parts:
        for key in ("dtype", "torch_dtype"):  # the second is the first's name before transformers 4.56
            if key in part:
                part[key] = name
    if "torch_dtype" not in config:
        config["dtype"] = name
    return dict(config)


def _shards(entries: Sequence[TensorEntry], max_shard_bytes: int) -> list[_Shard]:
    names = [entry.name for entry in entries]
    assert names and len(set(names)) == len(names), "every tensor is listed once"
    groups: list[list[TensorEntry]] = [[]]
    used = 0
    for entry in entries:
        if groups[-1] and used + entry.nbytes > max_shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(entry)
        used += entry.nbytes
    if len(groups) == 1:
        return [_Shard("model.safetensors", tuple(groups[0]), _offsets(groups[0]))]
    return [
        _Shard(f"model-{i:05d}-of-{len(groups):05d}.safetensors", tuple(group), _offsets(group))
        for i, group in enumerate(groups, start=1)
    ]


def _shards_of(entries: Sequence[TensorEntry], files: Mapping[str, str]) -> list[_Shard]:
    """One for each file that has some of the entries."""
    groups: dict[str, list[TensorEntry]] = {name: [] for name in sorted(set(files.values()))}
    for entry in entries:
        groups[files[entry.name]].append(entry)
    return [_Shard(name, tuple(group), _offsets(group)) for name, group in groups.items() if group]


def _offsets(entries: Sequence[TensorEntry]) -> dict[str, int]:
    """Places without holes, wide types first, so that each tensor is aligned to its type (readers map the file)."""
    offsets: dict[str, int] = {}
    end = 0
    for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
        offsets[entry.name] = end
        end += entry.nbytes
    return offsets


def _write_weights(
    folder: Path, entries: Sequence[TensorEntry], shards: Sequence[_Shard], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    remaining = iter(tensors)
    where = {entry.name: shard for shard in shards for entry in shard.entries}
    left = {shard.name: len(shard.entries) for shard in shards}
    headers: dict[str, int] = {}
    streams: dict[str, FileIO] = {}
    with ExitStack() as stack:
        for entry in entries:
            shard = where[entry.name]
            with _write_errors(folder.parent):
                if shard.name not in streams:  # unbuffered, so that closing has nothing left to write, and to fail at
                    streams[shard.name] = stack.enter_context(create_new(folder / shard.name))
                    header = shard.header()
                    headers[shard.name] = len(header)
                    _write(streams[shard.name], memoryview(header))
                stream = streams[shard.name]
                stream.seek(headers[shard.name] + shard.offsets[entry.name])
            for piece in _pieces(remaining, entry):
                with _write_errors(folder.parent):
                    _write(stream, piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            left[shard.name] -= 1
            if not left[shard.name]:
                with _write_errors(folder.parent):
                    os.fsync(stream.fileno())
                    stream.close()
    extra = next(remaining, None)
    assert extra is None, f"more tensors than were listed, the first is {extra[0]}"
    if len(shards) > 1:
        listed = [entry for shard in shards for entry in shard.entries]
        index = {
            "metadata": {
                "total_parameters": sum(prod(entry.shape) for entry in listed),
                "total_size": sum(entry.nbytes for entry in listed),
            },
            "weight_map": {entry.name: shard.name for shard in shards for entry in shard.entries},
        }
        with _write_errors(folder.parent):
            _write_json(folder / "model.safetensors.index.json", index)


def _pieces(tensors: Iterator[tuple[str, torch.Tensor]], entry: TensorEntry) -> Iterator[torch.Tensor]:
    """The next tensor, in as many pieces as it comes in."""
    elements = prod(entry.shape)
    while True:
        name, piece = next(tensors, ("nothing", torch.empty(0)))
        assert name == entry.name, f"the next tensor is {entry.name}, got {name}"
        found = (tuple(piece.shape), piece.dtype)
        whole = found == (tuple(entry.shape), entry.dtype)
        flat = piece.dim() == 1 and piece.dtype == entry.dtype and 0 < len(piece) <= elements
        assert whole or flat, f"{name}: listed as {entry.shape} {entry.dtype}, got {found}"
        yield piece
        elements -= piece.numel()
        if not elements:
            return


def _write(stream: FileIO, data: memoryview) -> None:
    start = 0
    while start < len(data):
        start += stream.write(data[start : start + _WRITE_BYTES])


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    _write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _write_bytes(path: Path, data: bytes) -> None:
    with create_new(path) as stream:
        _write(stream, memoryview(data))
        os.fsync(stream.fileno())


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFullError(f"{folder}: the model takes {needed} bytes, {free} are free; free some or export elsewhere")


def _flush_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turns what the operating system says of writing below `path` into the error that a user can act on."""
    try:
        yield
    except OSError as error:
        if room := no_room(error):
            raise DiskFullError(f"{path}: the model cannot be written here: {room}") from error
        raise IoFailure(f"{error.filename or path}: {error.strerror} (while exporting)") from error
