"""Finds out what transformers' from_pretrained does to a model besides reading tensors: buffers, precision, zeros.

Owns these three questions, and answers them by the library's own means: its rule of which tensors stay in fp32, and its
own initialisation of whatever was not read, watched for what it writes into parameters that were. It reads no weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from ssdplan.plans.errors import MismatchError


@dataclass(frozen=True)
class Zeroed:
    """Elements [start, stop) of the parameter `name`, in row-major order, which are zero whatever is stored."""

    name: str
    start: int
    stop: int


def in_fp32(module: PreTrainedModel, names: Iterable[str], dtype: torch.dtype) -> frozenset[str]:
    """Those of the tensors `names` that a model keeps in fp32 although it is loaded in `dtype`."""
    kept = [pattern for pattern, kind in module._get_dtype_plan(dtype).items() if kind == torch.float32 != dtype]
    if not kept:
        return frozenset()
    matcher = build_glob_alternation(kept)[0]
    return frozenset(name for name in names if matcher.search(name))


def initialise(module: PreTrainedModel) -> tuple[Zeroed, ...]:
    """Initialises a model as from_pretrained does once all parameters are read, and ties what is tied; returns what it
    zeroes of those.

    Parameters are on the meta device, and said to have their values; buffers get theirs. Errors: MismatchError where it
    writes anything but zeros into a parameter.
    """
    module.tie_weights()  # so that a tied parameter is known by one name
    parameters: Iterable[Any] = module.parameters()
    for parameter in parameters:
        parameter._is_hf_initialized = True
    children: Iterable[Any] = module.modules()
    for child in children:
        child._is_hf_initialized = False
    with _Watched(module) as watched:
        module.initialize_weights()
    module.tie_weights()
    return tuple(dict.fromkeys(watched.zeroed))


class _Watched(TorchDispatchMode):
    """Notes what is written into parameters on the meta device, through views and `data` too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.zeroed: list[Zeroed] = []
        self._module = module
        self._names = {_storage(parameter): name for name, parameter in module.named_parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, torch.Tensor) and value.is_meta and _storage(value) in self._names:
                self._note(func, value, args)
        return func(*args, **kwargs)

    def _note(self, func: Any, value: torch.Tensor, args: Any) -> None:
        name = self._names[_storage(value)]
        zeroes = func is torch.ops.aten.zero_.default or (func is torch.ops.aten.fill_.Scalar and args[1] == 0)
        if not (zeroes and value.is_contiguous()):
            raise MismatchError(
                f"{type(self._module).__name__} cannot be streamed exactly: from_pretrained changes {name} after it "
                "has read it"
            )
        start = int(value.storage_offset())
        self.zeroed.append(Zeroed(name, start, start + int(value.numel())))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
