"""Rows of a table of token embeddings: which of them a step's tokens name, and the embedding's forward on these alone.

Owns their order, and how the model's own code reads a table that has no other rows: a call of torch's `embedding` with
it finds each token's row where it lies. Another use of the table is a broken invariant: `table_of` finds no table where
`inspection/table.py` has seen one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ssdplan.plans.documents.table import ROW_GRAIN, Table

from ..device.tensors import tensors_in
from .inspection.table import reads_rows, tells_only_of_itself
from .model import StreamedModel


class TableRows:
    """The rows of one table, for one step at a time."""

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


def table_of(model: StreamedModel) -> tuple[int, Table] | None:
    """The state that is a table of token embeddings and nothing else, of which forwards read their tokens' rows alone,
    and its form; None where no state is.

    Tied models have none: their head needs the whole table. Nor have models whose rows are not whole groups of 64
    elements.
    """
    weight = getattr(model.module.get_input_embeddings(), "weight", None)
    name = next((name for name, each in model.module.named_parameters() if each is weight), None)
    index = next((i for i in model.layers[0].states if [t.name for t in model.states[i].tensors] == [name]), None)
    if index is None or any(index in layer.states for layer in model.layers[1:]):
        return None
    assert isinstance(weight, nn.Parameter)
    rows, row_elements = model.states[index].tensors[0].shape
    plain = reads_rows(model.module, model.blocks, weight, returned=model.anatomy.returned)
    return (index, Table(rows=rows, row_elements=row_elements)) if plain and row_elements % ROW_GRAIN == 0 else None
