"""Which part of a model is its decoder layers, and which its table of tokens.

Owns finding both, and layers that are alike, without running anything; and the one error of a model that cannot be
streamed exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ssdplan.plans.errors import MismatchError


class Refusal:
    """Raises the one error of a model that cannot be streamed exactly, with its name in front, and the way out behind
    it, if only that there is none here."""

    def __init__(self, module: nn.Module) -> None:
        self.name = type(module).__name__

    def __call__(self, why: str) -> None:
        way_out = "" if ";" in why else "; no option changes that: train another model, or this one elsewhere"
        raise MismatchError(f"{self.name} cannot be streamed exactly: {why}{way_out}")


def embedding_table(module: PreTrainedModel, refuse: Refusal) -> torch.Tensor:
    """The table of token embeddings."""
    try:
        table = getattr(module.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # how transformers says that it has none
        table = None
    if not isinstance(table, torch.Tensor) or table.dim() != 2:
        refuse("it has no table of token embeddings")
    assert isinstance(table, torch.Tensor)
    return table


def find_blocks(module: PreTrainedModel, refuse: Refusal) -> str:
    """The path of the ModuleList of decoder layers: as many as the configuration's num_hidden_layers, or, where that
    counts something else (LongCat Flash has two in each), the only list of what the model calls a layer."""
    layers = getattr(module.config.get_text_config(decoder=True), "num_hidden_layers", None)
    if layers is None:
        refuse("its configuration tells no number of layers (num_hidden_layers)")
    every: list[str] = []
    for path, child in module.named_modules():
        if not isinstance(child, nn.ModuleList) or any(path.startswith(f"{p}.") for p in every):
            continue
        if len(child) and all(any(True for _ in entry.parameters()) for entry in child):
            every.append(path)
    kinds = set(module._no_split_modules or ())
    named = [path for path in every if type(module.get_submodule(path)[0]).__name__ in kinds]  # type: ignore[index]
    paths = [path for path in every if len(module.get_submodule(path)) == layers] or named  # type: ignore[arg-type]
    text = module.config.get_text_config(decoder=True)
    of_text = [path for path in paths if _config_of(module, path) is text]
    for some in (of_text, [path for path in paths if path in named]):
        if len(paths) > 1:
            paths = [path for path in paths if path in some] or paths
    if len(paths) != 1:
        refuse(f"{len(paths)} lists of {layers} layers ({', '.join(paths) or 'none'}) where one is expected")
    return paths[0]


def _config_of(module: PreTrainedModel, path: str) -> PretrainedConfig:
    """The configuration of the innermost model that a part is of: one for images has another than one for text."""
    steps = path.split(".")
    around = (module.get_submodule(".".join(steps[:end])) for end in range(len(steps), -1, -1))
    return next(each.config for each in around if isinstance(each, PreTrainedModel))


def firsts_of_kinds(module: PreTrainedModel, blocks: nn.ModuleList) -> list[int]:
    """For each layer the first that is of its kind: by class, by what the configuration lists for it, by the shapes of
    its parameters, and by the plain values that its parts hold, but for its own index."""
    fields = vars(module.config.get_text_config(decoder=True)).values()
    lists = [value for value in fields if isinstance(value, (list, tuple)) and len(value) == len(blocks)]
    kinds: dict[Any, int] = {}
    firsts = []
    for index, block in enumerate(blocks):
        plain = tuple(
            (name, key, value)
            for name, part in block.named_modules()
            for key, value in vars(part).items()
            if isinstance(value, (bool, int, float, str)) and not (key.startswith("layer") and value == index)
        )
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
        listed = tuple(str(values[index]) for values in lists)
        firsts.append(kinds.setdefault((type(block).__name__, listed, shapes, plain), index))
    return firsts


def one_of_each_kind(module: PreTrainedModel, blocks: nn.ModuleList) -> list[int]:
    """The first layer of each kind."""
    return list(dict.fromkeys(firsts_of_kinds(module, blocks)))


def has_experts(blocks: nn.ModuleList) -> bool:
    """Whether layers have parameters of several matrices in one, which their code takes apart at a price."""
    return any(parameter.dim() > 2 and min(parameter.shape) > 1 for parameter in blocks.parameters())


def alike(module: PreTrainedModel, blocks: nn.ModuleList, path: str) -> dict[int, int]:
    """Of a mixture of experts, whose layers take long to run where they are looked into: each layer of a kind of which
    an earlier one is, which owns parameters of the same names, and that one. Empty for other models."""
    if not has_experts(blocks):
        return {}
    owned: dict[int, set[str]] = {index: set() for index in range(len(blocks))}
    for name, _ in module.named_parameters():
        if name.startswith(f"{path}."):
            index, _, own = name.removeprefix(f"{path}.").partition(".")
            owned[int(index)].add(own)
    firsts = firsts_of_kinds(module, blocks)
    return {index: first for index, first in enumerate(firsts) if index != first and owned[index] == owned[first]}
