"""Numbers in the place of what parameters on the meta device would yield: fixed functions of all that is real.

Owns those numbers, and the note of which parameters were used for them. It takes no memory of the size of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ...device.tensors import tensors_in
from .experts import plain_index


class MadeNumbers(TorchFunctionMode):
    """Lets a forward run on real inputs while its parameters are on the meta device.

    A function that sees only parameters (or what came from them alone) stays on meta. One that mixes them with real
    tensors runs on meta for its shapes, and yields real numbers that depend on `salt` and on the real inputs: whatever
    depends on a parameter, or on another layer's output through one, can be seen to do so by running twice. The numbers
    lie between -`scale` and `scale`. What parameters yield that the model itself freezes does not depend on `salt`.
    Where autograd records, so does it across what is real and what is not.
    """

    def __init__(self, names: Mapping[int, str], salt: float, position_rows: Callable[[torch.Tensor, int], None]):
        super().__init__()
        self.names = names
        self.salt = salt
        self.scale = 1.0
        self.used: set[str] = set()
        self.position_rows = position_rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((*args, *kwargs.values()))
        meta = [tensor for tensor in tensors if tensor.is_meta]
        if not meta:
            return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:  # what a model makes there is real
            return torch.device("cpu")
        real = [tensor for tensor in tensors if not tensor.is_meta]
        if func is nn.functional.embedding:
            self.position_rows(args[0], args[1].shape[0])
        if func is torch.Tensor.__getitem__ and args[0].is_meta:
            args = (args[0], plain_index(args[1]))
            real = [tensor for tensor in tensors_in(args) if not tensor.is_meta]
        meta_args, meta_kwargs = tree_map_only(torch.Tensor, self._on_meta, (args, kwargs))
        meta_args, meta_kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), (meta_args, meta_kwargs))
        result = func(*meta_args, **meta_kwargs)
        in_place = _writes_first_argument(func.__name__)
        if in_place or tensors_in((result,)):
            self.used.update(self.names[id(tensor)] for tensor in meta if id(tensor) in self.names)
        if not real:
            return result
        still = all(id(tensor) in self.names and not tensor.requires_grad for tensor in meta)
        digest = (0.0 if still else self.salt) + sum(_digest(tensor) for tensor in real)
        if in_place and not args[0].is_meta:
            args[0].copy_(self._real(meta_args[0], args[0], digest))
            return None if result is None else args[0]
        return tree_map_only(torch.Tensor, lambda tensor: self._real(tensor, tensor, digest), result)

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else _linked(tensor, lambda: _without_memory(tensor))

    def _real(self, found: torch.Tensor, like: torch.Tensor, digest: float) -> torch.Tensor:
        """The numbers that stand for what is `found` on meta."""
        return _linked(found, lambda: _numbers(like, digest, self.scale))


class _Link(torch.autograd.Function):
    """Stands in a graph of autograd where numbers were made from others that are not real. None runs backward."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()


def _linked(found: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    if not (torch.is_grad_enabled() and found.requires_grad):
        return make()
    linked: torch.Tensor = _Link.apply(found, make)
    return linked


def leaves_behind(tensor: torch.Tensor) -> set[int]:
    """The ids of the leaves to which a backward from here would bring gradients, none of which it computes."""
    left: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    found: set[int] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        left += [following for following, _ in node.next_functions]
    return found


def _writes_first_argument(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_")


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _digest(tensor: torch.Tensor) -> float:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return float(torch.nan_to_num(tensor.detach().double(), posinf=3.0, neginf=-3.0).clamp(-1e3, 1e3).sum())


def _numbers(like: torch.Tensor, digest: float, scale: float) -> torch.Tensor:
    """Real numbers of `like`'s shape and dtype between -`scale` and `scale`, a fixed function of `digest`."""
    if not like.dtype.is_floating_point:
        return torch.zeros(like.shape, dtype=like.dtype)
    ramp = torch.arange(like.numel(), dtype=torch.float64) * 0.37
    return (scale * torch.sin(ramp + math.sin(digest) * 100)).to(like.dtype).view(like.shape)
