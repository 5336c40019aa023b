"""Runs a model's own forward up to its last layer, and each of its layers, with numbers that stand for trained weights.

Owns those numbers, which take no memory of the size of a weight, and what the embedding and the layers make of them.
What is asked of the results is asked elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from ...device.tensors import tensors_in
from .experts import plain_index
from .standins import split_call, stand_ins

_LARGEST_MADE = 1 << 22
"""Elements of a parameter that is made as it is; of a larger one only its products are."""


class CannotRunError(Exception):
    """The model's own code failed on what it was given, or needs what is not made here."""


class _NotMadeError(Exception):
    """A parameter is used in a way that would need memory for it, or that is not known here."""


class SparseWeights(TorchFunctionMode):
    """Runs a forward whose parameters are on the meta device with numbers of its own, in fp32.

    A matrix that multiplies has two numbers in each row, at places that its own generator draws; an embedding's rows
    are waves of the token; smaller parameters are random numbers. So each is one that training could have made.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._turned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._parts: dict[int, tuple[torch.Tensor, int, float]] = {}
        self._drawn: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(tensor.is_meta for tensor in tensors_in((*args, *kwargs.values()))):
            return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:
            return torch.device("cpu")
        if func == torch.Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return torch.float32
        if func == torch.Tensor.T.__get__ and id(args[0]) in self._numbers:  # type: ignore[attr-defined]
            turned = func(*args, **kwargs)
            self._turned[id(turned)] = (turned, args[0])
            return turned
        if getattr(func, "__name__", "") in ("__get__", "size", "dim", "numel", "is_floating_point"):
            return func(*args, **kwargs)
        if func is nn.functional.linear and args[1].is_meta and args[1].dim() == 2:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return self._product(args[0], args[1], args[1].shape[0], bias)
        if func is torch.Tensor.__getitem__ and args[0].is_meta and args[0].numel() > _LARGEST_MADE:
            return self._part(args[0], plain_index(args[1]))
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) and args[1].is_meta:
            if id(args[1]) in self._turned:
                _, weight = self._turned[id(args[1])]
                return self._product(args[0], weight, weight.shape[0], None)
            if args[1].numel() > _LARGEST_MADE and args[1].dim() == 2:
                return self._product(args[0], args[1], args[1].shape[1], None)
        if func in (torch.bmm, torch.Tensor.bmm) and args[1].is_meta and args[1].numel() > _LARGEST_MADE:
            parts = (self._part(args[1], each) for each in range(args[1].shape[0]))
            return torch.stack(
                [self._product(x, part, part.shape[1], None) for x, part in zip(args[0], parts, strict=True)]
            )
        if func is torch.addmm and args[2].is_meta:
            return self._product(args[1], args[2], args[2].shape[1], args[0])
        if func is nn.functional.embedding and args[1].is_meta:
            return self._rows(args[0], args[1])
        made_args, made_kwargs = tree_map_only(torch.Tensor, self._made, (args, kwargs))
        return func(*made_args, **made_kwargs)

    def _generator(self, parameter: torch.Tensor) -> torch.Generator:
        if id(parameter) not in self._numbers:
            raise _NotMadeError
        return torch.Generator().manual_seed(100 + self._numbers[id(parameter)])

    def _part(self, parameter: torch.Tensor, index: Any) -> torch.Tensor:
        """One matrix of several in one parameter: that of an expert. All have numbers at the same places, and each its
        own size of them."""
        if id(parameter) not in self._numbers or not isinstance(index, int):
            raise _NotMadeError
        part = parameter[index]
        self._parts[id(part)] = (part, self._numbers[id(parameter)], 1 + 0.07 * (1 + index))
        return part

    def _product(self, x: torch.Tensor, weight: torch.Tensor, width: int, bias: torch.Tensor | None) -> torch.Tensor:
        if id(weight) in self._parts:
            _, number, size = self._parts[id(weight)]
        elif id(weight) in self._numbers:
            number, size = self._numbers[id(weight)], 1.0
        else:
            raise _NotMadeError
        if number not in self._drawn:
            generator = torch.Generator().manual_seed(100 + number)
            self._drawn[number] = [
                (torch.randint(x.shape[-1], (width,), generator=generator), torch.randn(width, generator=generator))
                for _ in range(2)
            ]
        (places, numbers), (others, more) = self._drawn[number]
        total = (x[..., places] * numbers + x[..., others] * more) * size
        return total if bias is None else total + self._made(bias)

    def _rows(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        waves = torch.rand(table.shape[1], generator=self._generator(table)) * 3
        return torch.sin((ids[..., None] + 1) * waves)

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if tensor.numel() > _LARGEST_MADE:
            raise _NotMadeError
        numbers = torch.randn(tensor.shape, generator=self._generator(tensor))
        return 1 + 0.3 * numbers if tensor.dim() == 1 else numbers / max(1, tensor.shape[-1]) ** 0.5


def outputs(
    module: PreTrainedModel,
    blocks: nn.ModuleList,
    arguments: dict[str, Any],
    hidden_of: Callable[[int], torch.Tensor],
    returned: int | None,
    only: Collection[int] | None = None,
    weights: SparseWeights | None = None,
) -> list[torch.Tensor]:
    """What the embedding yields, and what each layer (of `only`, if given) makes of a hidden state of its own,
    [b, s, hidden_size] each in fp32.

    `arguments` are the model's, `returned` is as in `inspection.Anatomy`; the module is in eval mode, its parameters
    are on meta. `weights`: of all of them, made before the call. Errors: CannotRunError.
    """
    layers = list(blocks)
    found: list[torch.Tensor] = []

    class _Done(Exception):  # noqa: N818
        pass

    def answer(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, call = split_call(args, kwargs)
        if index == 0:
            found.append(hidden.float())
        if only is None or index in only:
            given, options = call.arguments(hidden_of(index))
            result = layers[index](*given, **options)
            found.append((result if isinstance(result, torch.Tensor) else result[0]).float())
        if index == len(layers) - 1:
            raise _Done
        return hidden if returned is None else (hidden, *(None,) * (returned - 1))

    weights = weights or SparseWeights(list(module.parameters()))  # before the layers are behind stand-ins
    with torch.no_grad(), suppress(_Done), stand_ins(blocks, answer), weights:
        try:
            module(**arguments, use_cache=False, return_dict=True)
        except _Done:
            raise
        except Exception as error:  # any code of any model may be in there
            raise CannotRunError from error
    if len(found) != 1 + (len(layers) if only is None else len(set(only))):
        raise CannotRunError("its forward does not run all of its layers")
    return found
