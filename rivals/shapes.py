"""Shapes of random models that a comparison can make for itself, and what a model directory holds.

Owns the numbers of parameters. It makes nothing and imports nothing heavy: the weights are made by `making.py`.
"""

import json
import struct
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Self

from ssdplan.plans.errors import UsageError

NAMED = {"small": "hidden=768,layers=12,heads=12", "medium": "hidden=1536,layers=16,heads=16,intermediate=4608"}
"""134 and 589 million parameters, 25 and 49 million of them an embedding and a head of their own each."""


@dataclass(frozen=True)
class Shape:
    """A Llama. Embedding and head are not tied: both are trained."""

    hidden: int
    layers: int
    heads: int
    vocab: int = 32000
    intermediate: int = 0
    """8/3 of `hidden`, rounded up to a multiple of 64, unless given."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """`small`, `medium`, or `hidden=768,layers=12,heads=12` with `vocab` and `intermediate` if need be."""
        known = [field.name for field in fields(cls)]
        found: dict[str, int] = {}
        for part in NAMED.get(text, text).split(","):
            name, _, value = part.partition("=")
            if name not in known or name in found or not value.isdecimal() or not 0 < int(value) < 1 << 24:
                raise UsageError(
                    f"{part!r} is no part of a shape; write {', '.join(NAMED)}, or {'=N,'.join(known)}=N, of which "
                    "vocab and intermediate may be left out"
                )
            found[name] = int(value)
        if missing := [name for name in ("hidden", "layers", "heads") if name not in found]:
            raise UsageError(f"{text!r}: the shape needs {', '.join(missing)} too")
        found.setdefault("intermediate", -(-found["hidden"] * 8 // 3 // 64) * 64)
        shape = cls(**found)
        if shape.hidden % (2 * shape.heads):
            raise UsageError(f"{text!r}: hidden must be a multiple of twice the heads: rotary embeddings take pairs")
        if shape.vocab < 2:
            raise UsageError(f"{text!r}: a vocabulary of one token leaves nothing to learn")
        return shape

    @property
    def parameters(self) -> int:
        block = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * block + (2 * self.vocab + 1) * self.hidden


@dataclass(frozen=True)
class ModelFacts:
    """What the command must know of a model before it trains it."""

    name: str
    parameters: int
    layers: int
    hidden: int
    vocab: int

    @classmethod
    def of_shape(cls, shape: Shape) -> Self:
        name = f"llama {shape.hidden} x {shape.layers}"
        return cls(name, shape.parameters, shape.layers, shape.hidden, shape.vocab)

    @classmethod
    def of_directory(cls, directory: Path) -> Self:
        """From config.json and the headers of the safetensors files. Raises UsageError when they do not tell."""
        try:
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            files = sorted(directory.glob("*.safetensors"))
            parameters = sum(_elements(file) for file in files)
            layers = config.get("num_hidden_layers", config.get("n_layer"))
            hidden = config.get("hidden_size", config.get("n_embd"))
            facts = cls(directory.resolve().name, parameters, int(layers), int(hidden), int(config["vocab_size"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise UsageError(f"{directory}: not a model directory with config.json and safetensors: {error}") from error
        if not parameters:
            raise UsageError(f"{directory}: no weights in safetensors files")
        return facts


def _elements(file: Path) -> int:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > 100 << 20:
            raise ValueError(f"{file.name} has no safetensors header")
        header = json.loads(stream.read(length))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
