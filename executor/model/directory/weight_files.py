"""Which of a model directory's files are its weights: those that transformers' from_pretrained would load.

Owns their names, the order of preference among several sets of weights, what is said of the sets that are left, and
the fingerprint by which a set is known. It loads no weights, and a pickle is never opened by anyone.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ssdplan.plans.errors import MismatchError, UsageError

from ...data.reading.model_config import document, parsed, read_config, require_regular

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_FOREIGN_PICKLES = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state.*)\.(bin|pt|pth)")
"""What transformers' Trainer leaves beside a model: no weights."""
_DISTRIBUTED = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_KINDS = (".safetensors", ".safetensors.index.json")
_OF_OTHERS = ("*.h5", "*.msgpack", "*.gguf", "original/*.safetensors", "original/*.pth")
"""Weights in formats that from_pretrained does not look for, or in the folder of a model's first publisher."""
_NAMED = 4
"""Files that a note lists."""
_SAMPLES = 256
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class _Chosen:
    """The weights that are loaded: `source` is the file itself, or the index of the shards `files`."""

    source: Path
    files: tuple[Path, ...]


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory that from_pretrained loads, in the order in which it reads them.

    That is the file or index that config.json names as `transformers_weights`, else model.safetensors, else the shards
    of model.safetensors.index.json. Errors: UsageError where there are none, MismatchError on a bad index and where
    from_pretrained would load something else: an adapter, or the shards of a distributed checkpoint.
    """
    return _chosen(path).files


def weights_fingerprint(path: Path) -> str:
    """Of a model directory's safetensors files; see `Origin.weights`."""
    digest = hashlib.sha256()
    for file in weight_files(path):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header, size)))
            begin = min(8 + header, size)
            for number in range(_SAMPLES):
                stream.seek(begin + (size - begin) * number // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def left_weights(path: Path) -> str:
    """What is said of the weights in a model directory that `weight_files` leaves; empty where it leaves none."""
    chosen = _chosen(path)
    found = {file.name for pattern in ("*.safetensors", "*.index.json") for file in path.glob(pattern)}
    left = found - {file.name for file in (chosen.source, *chosen.files)} | set(_pickles(path))
    left |= {str(file.relative_to(path)) for pattern in _OF_OTHERS for file in path.glob(pattern)}
    if not left:
        return ""
    return (
        f"{path.name} holds several sets of weights: those of {chosen.source.name} are taken, as from_pretrained takes "
        f"them, and left are {_list(sorted(left, key=lambda name: (not name.endswith('.json'), name)))}"
    )


def _chosen(path: Path) -> _Chosen:
    require_regular(path)
    if (path / "adapter_config.json").is_file():
        raise MismatchError(
            f"{path / 'adapter_config.json'}: transformers adds this adapter to the weights where peft is installed, "
            "and leaves it out elsewhere; merge it (merge_and_unload of peft) or move the adapter's files away"
        )
    others = sorted(file.name for file in path.glob("*.safetensors"))
    distributed = next(filter(_DISTRIBUTED.fullmatch, others), None)
    if distributed is not None:
        raise MismatchError(
            f"{path / distributed}: where training is distributed, transformers loads this checkpoint's shards and "
            "no other weights; move them away, or save the model whole, by "
            "from_pretrained and save_pretrained"
        )
    candidates = [_named_by_config(path), path / SINGLE_FILE, path / INDEX_FILE]
    source = next((file for file in candidates if file is not None and file.is_file()), None)
    if source is not None:
        return _Chosen(source, _shards(source) if source.suffix == ".json" else (source,))
    looked = f"looked for {SINGLE_FILE} and {INDEX_FILE}"
    if pickles := _pickles(path):
        raise UsageError(f"{path}: {pickles[0]} is a pickle, which is never opened; convert to safetensors ({looked})")
    if others:
        raise UsageError(f"{path}: from_pretrained loads no weights from here; {looked}, found {_list(others)}")
    raise UsageError(f"{path}: no weights; {looked}")


def _pickles(path: Path) -> list[str]:
    """Pickles that may hold weights."""
    found = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    return [name for name in found if not _FOREIGN_PICKLES.fullmatch(name)]


def _list(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _named_by_config(path: Path) -> Path | None:
    """The file that config.json names as `transformers_weights`, which from_pretrained takes before all others."""
    file = path / "config.json"
    if not file.is_file():
        return None
    name = read_config(file).get("transformers_weights")
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(_KINDS):
        raise MismatchError(
            f"{file}: transformers_weights is {name!r}, not the plain name of a safetensors file or index beside it"
        )
    if not (path / name).is_file():
        raise MismatchError(f"{file}: transformers_weights names {name}, which is not there")
    return path / name


def _shards(index: Path) -> tuple[Path, ...]:
    content = document(index, "index of safetensors shards")
    try:
        names = sorted(set(map(os.fspath, parsed(content)["weight_map"].values())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MismatchError(f"{index}: not an index of safetensors shards ({error})") from error
    if not names:
        raise MismatchError(f"{index}: not an index of safetensors shards (it names none)")
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise MismatchError(f"{index}: names a shard outside of its directory: {outside[0]}")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise MismatchError(f"{index}: names shards that are not there: {', '.join(missing)}")
    return tuple(index.parent / name for name in names)
