"""Finds out whether a model keeps sequences apart that share a row: none sees another, and positions begin again; and
whether what a row begins with is untouched by what follows, as by padding.

Owns these two questions, and answers them by running the model's own forward and each of its layers on sequences side
by side and alone, with matrices that stand for trained ones and take no memory. It allocates nothing of the size of a
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from ssdplan.executor.standins import split_call, stand_ins
from ssdplan.executor.tensors import tensors_in

_SHORT, _LONG = 4, 6
_VOCABULARY = 90
_LARGEST_MADE = 1 << 22
"""Elements of a parameter that is made as it is; of a larger one only its products are."""


class _NotMadeError(Exception):
    """A parameter is used in a way that would need memory for it, or that is not known here."""


class _SparseWeights(TorchFunctionMode):
    """Runs a forward whose parameters are on the meta device with numbers of its own, in fp32.

    A matrix that multiplies has two numbers in each row, at places that its own generator draws; an embedding's rows
    are waves of the token; smaller parameters are random numbers. So each is one that training could have made.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._turned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

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
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) and id(args[1]) in self._turned:
            _, weight = self._turned[id(args[1])]
            return self._product(args[0], weight, weight.shape[0], None)
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

    def _product(self, x: torch.Tensor, weight: torch.Tensor, width: int, bias: torch.Tensor | None) -> torch.Tensor:
        generator = self._generator(weight)
        total = torch.zeros(())
        for _ in range(2):
            places = torch.randint(x.shape[-1], (width,), generator=generator)
            total = total + x[..., places] * torch.randn(width, generator=generator)
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


How = Literal["positions", "mask"]
"""How a model is told which tokens of a row belong together: by positions that begin again, from which its own masks
follow, or by positions and a mask."""


def arguments_apart(how: How, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a model is called with, beside its tokens, so that sequences that share a row are apart. `position_ids`
    [b, s] begin at 0 again with each; a mask is bool [b, 1, s, s]."""
    if how == "positions":
        return {"position_ids": position_ids}
    sequence = (position_ids == 0).cumsum(-1, dtype=torch.int32)
    mask = (sequence[:, None, :, None] == sequence[:, None, None, :]).tril_()
    return {"position_ids": position_ids, "attention_mask": mask}


@dataclass(frozen=True, slots=True)
class Isolation:
    """What sequences that share a row get from the embedding, and from every layer."""

    causal: bool
    """The first of a row gets what it gets alone: padding on the right needs no mask."""
    keeps_apart: How | None
    """How a model can be told so that each gets what it gets alone; None where it cannot."""


def isolation(module: PreTrainedModel, blocks: nn.ModuleList, *, returned: int | None, hidden_size: int) -> Isolation:
    """What a model does with sequences that share a row; neither where it cannot be run here.

    `returned` is as in `inspection.Anatomy`; the module is in eval mode, its parameters are on meta. Layers are run on
    hidden states of unit scale, so that no layer's rounding grows in the next.
    """
    generator = torch.Generator().manual_seed(5)
    short = torch.randint(_VOCABULARY, (2, _SHORT), generator=generator)
    long = torch.randint(_VOCABULARY, (2, _LONG), generator=generator)

    def side_by_side(short: torch.Tensor, long: torch.Tensor) -> torch.Tensor:
        """One row begins with a short sequence, the other with a long one."""
        return torch.stack([torch.cat([short[0], long[0]]), torch.cat([long[1], short[1]])])

    def hidden_of(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.Generator().manual_seed(1000 + layer)
        first, second = (torch.randn(2, length, hidden_size, generator=numbers) for length in (_SHORT, _LONG))
        return first, second

    def run(ids: torch.Tensor, more: dict[str, torch.Tensor], hidden: Callable[[int], torch.Tensor]) -> Any:
        return _outputs(module, blocks, {"input_ids": ids, **more}, hidden, returned)

    def shared(more: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = run(side_by_side(short, long), more, lambda layer: side_by_side(*hidden_of(layer)))
        return found

    def are_exact(found: list[torch.Tensor], alone: list[torch.Tensor], row: int, tokens: slice) -> bool:
        return all(
            torch.allclose(one[row, tokens], other[row, tokens], rtol=1e-4, atol=1e-4 * float(other.abs().max()))
            for one, other in zip(found, alone, strict=True)
        )

    def is_causal(alone: list[torch.Tensor]) -> bool:
        found = shared({})
        return are_exact(found, alone, 0, slice(_SHORT)) and are_exact(found, alone, 1, slice(_LONG))

    def is_apart(how: How, alone: list[torch.Tensor]) -> bool:
        found = shared(arguments_apart(how, side_by_side(*(torch.arange(n).expand(2, -1) for n in (_SHORT, _LONG)))))
        return all(are_exact(found, alone, row, slice(None)) for row in (0, 1))

    ways: tuple[How, ...] = ("positions",) if _attends_locally(module) else ("positions", "mask")
    with torch.no_grad():
        try:
            shorts = run(short, {}, lambda layer: hidden_of(layer)[0])
            longs = run(long, {}, lambda layer: hidden_of(layer)[1])
            alone = [side_by_side(*pair) for pair in zip(shorts, longs, strict=True)]
            causal = is_causal(alone)
        except Exception:  # any code of any model may be in there
            return Isolation(causal=False, keeps_apart=None)
        for how in ways:
            with suppress(Exception):
                if is_apart(how, alone):
                    return Isolation(causal, how)
    return Isolation(causal, None)


def _attends_locally(module: PreTrainedModel) -> bool:
    """Whether a window or chunks may limit attention, for which a mask of ours would stand instead."""
    config = module.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    fields = ("sliding_window", "attention_chunk_size", "window_size")
    return bool(kinds - {"full_attention"}) or any(getattr(config, field, None) for field in fields)


def _outputs(
    module: PreTrainedModel,
    blocks: nn.ModuleList,
    arguments: dict[str, torch.Tensor],
    hidden_of: Callable[[int], torch.Tensor],
    returned: int | None,
) -> list[torch.Tensor]:
    """What the embedding yields, and what each layer makes of a hidden state of its own, [b, s, hidden_size] each."""
    layers = list(blocks)
    found: list[torch.Tensor] = []

    class _Done(Exception):  # noqa: N818
        pass

    def answer(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, call = split_call(args, kwargs)
        if index == 0:
            found.append(hidden.float())
        given, options = call.arguments(hidden_of(index))
        result = layers[index](*given, **options)
        found.append((result if isinstance(result, torch.Tensor) else result[0]).float())
        if index == len(layers) - 1:
            raise _Done
        return hidden if returned is None else (hidden, *(None,) * (returned - 1))

    weights = _SparseWeights(list(module.parameters()))  # before the layers are behind stand-ins
    with suppress(_Done), stand_ins(blocks, answer), weights:
        module(**arguments, use_cache=False, return_dict=True)
    assert len(found) == len(layers) + 1
    return found
