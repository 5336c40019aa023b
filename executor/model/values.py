"""What a traced block computes: its ATen operations, and which of their results can be kept.

Owns how a kept value lies in memory, and what kinds of operations there are: those that compute nothing, and those that
draw at random. Which values are kept, and where, it does not know.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .packed import laid, packed_bytes

_VIEWS = frozenset(
    [
        "alias",
        "_unsafe_view",
        "as_strided",
        "detach",
        "expand",
        "lift_fresh",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
    ]
)
"""ATen operations that compute nothing: another look at the same bytes."""


@dataclass(frozen=True)
class Value:
    """Something that a block's forward computes and its backward can be given: kept, it is not computed again."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Dimensions from the one with the longest stride to the shortest: how its elements lie in a row."""
    dtype: torch.dtype
    packed: bool = False
    """Whether it is kept in int8 (`packed.py`)."""

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return packed_bytes(self.elements) if self.packed else self.elements * self.dtype.itemsize

    def laid(self, place: torch.Tensor) -> torch.Tensor:
        """The value in `place`, uint8 of its bytes; one in int8 is the place itself. It has the strides that it was
        computed with, for a product of matrices may round otherwise for others."""
        if self.packed:
            return place
        return laid(place.view(self.dtype)[: self.elements], self.shape, self.order)


def value_of(node: fx.Node) -> Value | None:
    """What a node computes, where it may be kept: bytes of its own that lie without gaps or overlaps."""
    held = node.meta.get("val")
    if node.op != "call_function" or is_view(node) or not isinstance(held, torch.Tensor) or not held.numel():
        return None
    strides = held.stride()
    order = tuple(sorted(range(held.dim()), key=lambda dimension: -strides[dimension]))
    return Value(node.name, tuple(held.shape), order, held.dtype) if _is_dense(held, order) else None


def _is_dense(held: torch.Tensor, order: Sequence[int]) -> bool:
    step = 1
    for dimension in reversed(order):
        if held.shape[dimension] != 1 and held.stride(dimension) != step:
            return False
        step *= held.shape[dimension]
    return True


def is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.partition("::")[2] in _VIEWS


def is_free(node: fx.Node) -> bool:
    return node.target is operator.getitem or is_view(node)


def draws(node: fx.Node) -> bool:
    """Whether an operation draws random numbers. Attention only does where it has a dropout."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    names = [argument.name for argument in schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)
