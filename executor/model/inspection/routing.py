"""How a mixture's routers spread tokens over its experts.

Owns that as a figure: how many times the mean the busiest expert of a block takes, the worst block's. It is counted
where experts are called: a module with several matrices in one parameter, one an expert, that is given the experts of
each token. A block that runs by a graph, as one that saves activations does, is not counted. Nothing that is computed
depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...device.tensors import tensors_in

_Key = tuple[int, int]
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the block whose tokens are spread least evenly."""

    block: int
    times: float
    """Tokens of its busiest expert over those of a mean one: 1 if even, the number of experts if one has all."""
    experts: int


class Routing:
    """The experts of a model's blocks, which are counted between `begin` and `end`."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._counts: dict[_Key, torch.Tensor] | None = None
        for number, block in enumerate(blocks):
            for place, module in enumerate(block.modules()):
                own = [each for each in module.parameters(recurse=False) if each.dim() > 2 and min(each.shape) > 1]
                if own:
                    look = partial(self._look, (number, place), own[0].shape[0])
                    module.register_forward_pre_hook(look, with_kwargs=True)

    def begin(self) -> None:
        self._counts = {}

    def _look(self, key: _Key, experts: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._counts is None:
            return
        given = tensors_in((*args, *kwargs.values()))
        chosen = next((each for each in given if each.dtype in _INTEGERS and each.dim() == 2), None)
        if chosen is None or isinstance(chosen, FakeTensor) or chosen.is_meta:
            return
        numbers = chosen.detach().flatten().to(torch.int64).clamp(0, experts)  # behind all are experts that do nothing
        counts = self._counts.setdefault(key, torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device))
        counts.scatter_add_(0, numbers, torch.ones_like(numbers))

    def end(self) -> Spread | None:
        """What was found since `begin`; None where no expert was counted."""
        counts, self._counts = self._counts or {}, None
        found = None
        for (block, _), every in sorted(counts.items()):
            taken = every[:-1]
            if total := int(taken.sum()):
                spread = Spread(block, float(taken.max()) * len(taken) / total, len(taken))
                found = spread if found is None or spread.times > found.times else found
        return found
