"""How a model's parameters are laid out: which layers it has, of which states, and where each tensor lies in its state.

Owns that layout, which the store, the planner and the executor share, and which blocks are of one class. It reads no
weights and decides nothing about a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, treespec_dumps
from transformers import PreTrainedModel

from ssdplan.plans.documents.matrices import Matrix
from ssdplan.plans.documents.state_layout import GRAIN, TENSOR_ALIGNMENT

from .inspection.inspection import Anatomy

MATRICES = ".matrices"
"""How the name of a state of matrices ends, which Muon updates."""
FROZEN = ".frozen"
"""How the name of a frozen state ends, and that of a class of frozen blocks."""
FP32 = ".fp32"
"""What follows a state's name where it is kept in fp32 and others are not."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: `name` as in the model's own state dict, `offset` in elements within its state."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class StateSpec:
    """Tensors that are stored and moved as one flat array of `elements`, as `plans/documents/state_layout.py` has it.

    `frozen`: they are not trained. `precision`: fp32 where the model keeps them so and others not, else None. `muon`:
    they are matrices, which Muon updates. The name says all of it too.
    """

    name: str
    elements: int
    tensors: tuple[TensorSpec, ...]
    frozen: bool = False
    precision: Literal["fp32"] | None = None
    muon: bool = False

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """What the state consists of, if Muon updates it."""
        if not self.muon:
            return ()
        return tuple(Matrix(rows=t.shape[0], columns=t.shape[1], start=t.offset) for t in self.tensors)


@dataclass(frozen=True)
class LayerSpec:
    """A unit of streaming; `states` index the model's states, its own first, then the tied one; each is frozen
    whole, or trained whole by one optimizer, and of one precision, so there may be six of a kind."""

    name: str
    layer_class: str
    states: tuple[int, ...]


def lay_out(
    module: PreTrainedModel,
    anatomy: Anatomy,
    frozen: frozenset[str],
    dtype: torch.dtype,
    by_muon: frozenset[str] = frozenset(),
) -> tuple[tuple[LayerSpec, ...], tuple[StateSpec, ...]]:
    """The layers of a model of `dtype`, and the states of their parameters: one a layer, or more where some of them are
    `frozen`, or in fp32, or trained `by_muon` (parameters of blocks of two dimensions), and some are not. Parameters
    that the model never uses are in none."""
    used = [(name, each) for name, each in module.named_parameters() if name not in anatomy.unused]
    shapes = {name: tuple(parameter.shape) for name, parameter in used}
    wide = {name for name, parameter in used if parameter.dtype != dtype}
    tied = anatomy.before & anatomy.after
    states: list[StateSpec] = []

    def state(name: str, members: Iterable[str]) -> tuple[int, ...]:
        mine = set(members)
        first = len(states)
        matrices = (mine & by_muon) - frozen
        parts = ((mine - frozen - matrices, ""), (matrices, MATRICES), (mine & frozen, FROZEN))
        for (part, suffix), is_wide in product(parts, (False, True)):
            some = part & (wide if is_wide else shapes.keys() - wide)
            named = [(member, shapes[member]) for member in shapes if member in some]
            if named:
                whole = f"{name}{FP32 if is_wide else ''}{suffix}"
                precision: Literal["fp32"] | None = "fp32" if is_wide else None
                states.append(_state(whole, named, suffix == FROZEN, precision, muon=suffix == MATRICES))
        return tuple(range(first, len(states)))

    embedding = state("embedding", anatomy.before - tied)
    blocks = []
    for index in range(len(anatomy.calls)):
        prefix = f"{anatomy.blocks_path}.{index}."
        blocks.append(state(f"block.{index}", [name for name in shapes if name.startswith(prefix)]))
    head = state("head", anatomy.after - tied)
    shared = state("tied", tied)
    classes = _block_classes(module, anatomy, frozen)
    layers = [LayerSpec("embedding", "embedding", embedding + shared)]
    layers += [LayerSpec(f"block.{i}", classes[i], own) for i, own in enumerate(blocks)]
    layers.append(LayerSpec("head", "head", head + shared))
    return tuple(layers), tuple(states)


def _state(
    name: str,
    members: list[tuple[str, tuple[int, ...]]],
    frozen: bool,
    precision: Literal["fp32"] | None,
    *,
    muon: bool,
) -> StateSpec:
    tensors: list[TensorSpec] = []
    offset = 0
    for member, shape in members:
        tensors.append(TensorSpec(member, shape, offset))
        offset = _round_up(offset + tensors[-1].elements, GRAIN if muon else TENSOR_ALIGNMENT)
    return StateSpec(name, _round_up(offset, GRAIN), tuple(tensors), frozen, precision, muon)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _block_classes(module: PreTrainedModel, anatomy: Anatomy, frozen: frozenset[str]) -> list[str]:
    """One name a block; blocks of one class have the same tensors, the same kind and the same kind of arguments, and
    the same of their tensors are frozen."""
    config = module.config.get_text_config(decoder=True)
    blocks: Any = module.get_submodule(anatomy.blocks_path)
    kinds: list[Any] = [None] * len(blocks)
    for field in ("layer_types", "attention_layers"):
        value = getattr(config, field, None)
        if isinstance(value, (list, tuple)) and len(value) == len(blocks):
            kinds = list(value)
            break
    keys = []
    for block, kind, call in zip(blocks, kinds, anatomy.calls, strict=True):
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())
        leaves, structure = tree_flatten(
            tree_map_only(torch.Tensor, lambda t: f"{t.dtype}{list(t.shape)}", (call.args, call.kwargs))
        )
        keys.append((type(block).__name__, kind, shapes, tuple(map(str, leaves)), treespec_dumps(structure)))
    distinct = list(dict.fromkeys(keys))
    names = ["block" if len(distinct) == 1 else f"block.{distinct.index(key)}" for key in keys]
    prefixes = [f"{anatomy.blocks_path}.{index}." for index in range(len(blocks))]
    members = [{name for name, _ in block.named_parameters()} for block in blocks]
    without = [
        frozenset(name for name in mine if prefix + name in frozen)
        for prefix, mine in zip(prefixes, members, strict=True)
    ]
    partly = list(dict.fromkeys(some for some, mine in zip(without, members, strict=True) if some and some != mine))

    def suffix(some: frozenset[str], mine: set[str]) -> str:
        if not some or some == mine:
            return FROZEN if some else ""
        return ".partly" if len(partly) == 1 else f".partly.{partly.index(some)}"

    return [name + suffix(some, mine) for name, some, mine in zip(names, without, members, strict=True)]
