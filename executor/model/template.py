"""The model's own code around its layers, run as a stateless template, and what it is run on.

Owns the call of a Hugging Face model with parameters that someone else brings, of a table of token embeddings perhaps
the rows of a step's tokens alone; and the form of a micro-batch. What the model's layers answer is not decided here
(`inspection/standins.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ssdplan.plans.errors import first_line

from ..device.tensors import tensors_in
from .inspection.isolation import arguments_apart
from .inspection.table import tells_only_of_itself
from .model import StreamedModel

IGNORED_LABEL = -100


@dataclass(frozen=True)
class MicroBatch:
    """input_ids, labels: int64 [b, s]; labels are unshifted (the loss shifts them), -100 is not counted.

    attention_mask: int64 or bool [b, s], rows padded on the right, with labels that are not counted there; None where
    nothing is padded. position_ids: int64 [b, s], for rows of several sequences that must not attend to each other:
    they begin at 0 again with each, and attention_mask is None; None where each row is one sequence.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None

    def label_tokens(self) -> int:
        """How many tokens the loss counts: the first of each row is predicted from nothing."""
        return int((self.labels[:, 1:] != IGNORED_LABEL).sum())


class Inputs(Protocol):
    """What a model is called with: a micro-batch, or some of its tokens."""

    @property
    def input_ids(self) -> torch.Tensor: ...
    @property
    def attention_mask(self) -> torch.Tensor | None: ...
    @property
    def position_ids(self) -> torch.Tensor | None: ...


def run_model(model: StreamedModel, inputs: Inputs, parameters: dict[str, torch.Tensor]) -> Any:
    """The model's own forward with `parameters`, by name; what it returns."""
    arguments: dict[str, Any] = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    if inputs.position_ids is not None:
        how = model.anatomy.isolation.keeps_apart
        assert how is not None
        arguments |= arguments_apart(how, inputs.position_ids, model.config, model.dtype)
    options = {"use_cache": False, "return_dict": True}
    return functional_call(model.module, parameters | _never_used(model, inputs), (), arguments | options)


def _never_used(model: StreamedModel, inputs: Inputs) -> dict[str, torch.Tensor]:
    """What stands for parameters outside the blocks that the model never uses, and takes no memory. A model may ask on
    which device they are. Whatever were made of them would be no number, and so be noticed."""
    if not model.anatomy.unused:
        return {}
    nothing = torch.full((), torch.nan, device=inputs.input_ids.device)
    inside = f"{model.anatomy.blocks_path}."
    return {
        name: nothing.to(parameter.dtype).expand(parameter.shape)
        for name, parameter in model.module.named_parameters()
        if name in model.anatomy.unused and not name.startswith(inside)
    }


def as_returned(model: StreamedModel, hidden: torch.Tensor) -> Any:
    """A block's result in the form that this model's blocks return it."""
    returned = model.anatomy.returned
    return hidden if returned is None else (hidden, *(None,) * (returned - 1))


def failed(model: StreamedModel, layer: int, inputs: Inputs, error: Exception) -> str:
    """In words, that the model's own code cannot do what is asked of it in a layer."""
    rows, length = inputs.input_ids.shape
    kind = "padded" if inputs.attention_mask is not None else "shared" if inputs.position_ids is not None else "full"
    return (
        f"{model.name}: the code of {model.architecture} fails in {model.layers[layer].name} on {rows} x {length} "
        f"tokens in {kind} rows: {type(error).__name__}: {first_line(error)}"
    )


class TableRows:
    """The rows of a table of token embeddings that a step's tokens name, for one step at a time.

    The model's own code runs on these alone: within `reading`, torch's `embedding` finds a token's row where it lies. A
    table of which it makes another use is none by rows (`inspection/table.py`), so another use is a broken invariant.
    """

    def __init__(self, state: int, name: str, row_elements: int, most: int, device: torch.device) -> None:
        """`state` has the table, the parameter `name`, alone. `most`: rows that a step's tokens name at most."""
        self.state, self.name, self.row_elements, self.most = state, name, row_elements, most
        self._device = device
        self.on_host = torch.zeros(most, dtype=torch.int64)
        """The rows' numbers in rising order, the last one again behind them; and the same where compute is."""
        self.on_device = self.on_host.to(device)

    def begin_step(self, input_ids: Iterable[torch.Tensor]) -> None:
        """`input_ids`: int64 of any shape, which may lie on any device."""
        named = torch.cat([ids.flatten().cpu() for ids in input_ids]).unique()
        assert named.numel() <= self.most, "a step has more tokens than the plan"
        self.on_host = torch.cat([named, named[-1:].expand(self.most - named.numel())])
        self.on_device = self.on_host.to(self._device)

    def take(self, table: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the rows of a flat `table` to `rows`, flat too, side by side; both on host and of one dtype."""
        whole = table[: table.numel() // self.row_elements * self.row_elements].view(-1, self.row_elements)
        torch.index_select(whole, 0, self.on_host, out=rows.view(self.most, self.row_elements))

    def parameter(self, flat: torch.Tensor) -> torch.Tensor:
        """What stands for the table in the embedding's forward: the rows as a matrix, a view of `flat`."""
        return flat.data[: self.most * self.row_elements].view(self.most, self.row_elements)

    def reading(self, parameter: torch.Tensor) -> TorchFunctionMode:
        """Within this context torch's `embedding` finds tokens in `parameter` by the rows' numbers."""
        return _Reading(parameter, self.on_device)


class _Reading(TorchFunctionMode):
    def __init__(self, parameter: torch.Tensor, numbers: torch.Tensor) -> None:
        super().__init__()
        self._parameter, self._numbers = parameter, numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.embedding and args[1] is self._parameter:
            return func(torch.searchsorted(self._numbers, args[0]), self._parameter)
        uses = any(tensor is self._parameter for tensor in tensors_in((*args, *kwargs.values())))
        assert not uses or tells_only_of_itself(func), f"{func} of a table of which the rows of tokens are there alone"
        return func(*args, **kwargs)
