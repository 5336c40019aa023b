"""Mixtures of experts: how their layers are run where they are looked into.

Owns that experts run one after another there, by the plain loop of the model's own code: grouped products of all of
them know no parameters without memory. What is found holds for either way, as both compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

_FIELD = "_experts_implementation_internal"
"""Of a configuration: how experts run; None where the library chooses."""


@contextmanager
def experts_one_by_one(module: nn.Module) -> Iterator[None]:
    """Within the context experts run one after another; after it as before, errors or not."""
    found = [vars(each["config"]) for each in map(vars, module.modules()) if hasattr(each.get("config"), "__dict__")]
    places = list({id(place): place for place in found if _FIELD in place}.values())
    before = [place[_FIELD] for place in places]
    try:
        for place in places:
            place[_FIELD] = "eager"
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place[_FIELD] = value


def plain_index(index: Any) -> Any:
    """The index by which a part of a parameter is taken, with the number itself for a tensor of one: which expert."""
    return tree_map_only(torch.Tensor, lambda each: int(each) if _is_number(each) else each, index)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and not tensor.is_meta and tensor.dtype in (torch.int64, torch.int32)
