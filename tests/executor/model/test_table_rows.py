"""A table of token embeddings by rows: which models have one, and that their own code makes the same of its rows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import StreamedModel, open_model
from ssdplan.executor.model.template import TableRows
from ssdplan.executor.zeroth_order import table_of
from tests.made.models import FAMILIES, OTHERS, make_model

WITHOUT = {"gpt2", "opt", "bloom", "gpt_neo"}
"""Families whose embedding has more than a table of tokens."""


@pytest.mark.parametrize("family", [name for name in (*FAMILIES, *OTHERS) if name != "mamba"])
def test_an_embedding_makes_the_same_of_the_rows_of_its_tokens(tmp_path: Path, family: str) -> None:
    """In training, with padding, in a dtype in which the models scale their embedding and round."""
    model = open_model(make_model(family, tmp_path / family, hidden=64), torch.bfloat16)
    found = table_of(model)
    if family in WITHOUT:
        assert found is None
        return
    assert found is not None
    state, table = found
    assert (state, table.row_elements, table.rows) == (0, 64, model.vocab_size)
    drawn = torch.randint(3, table.rows, (2, 3, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, 5:] = 0
    batches = [
        MicroBatch(ids, torch.where(padding == 1, ids, -100), None if bool(padding.all()) else padding)
        for ids, padding in zip(drawn[:, :2], (mask, torch.ones_like(mask)), strict=True)
    ]
    most = min(table.rows, 2 * 2 * 8)
    rows = TableRows(state, model.states[state].tensors[0].name, 64, most, torch.device("cpu"))
    layers = Layers(model, torch.device("cpu"), rows=rows)
    layers.begin_step(0, batches)
    whole = torch.randn(model.states[state].elements, generator=torch.Generator().manual_seed(2)).bfloat16()
    side_by_side = torch.empty(most * 64, dtype=torch.bfloat16)
    rows.take(whole, side_by_side)
    for number in range(2):
        out, by_rows = (torch.zeros(2 * 8 * 64, dtype=torch.bfloat16) for _ in range(2))
        layers.forward(0, number, [whole], None, out)
        layers.forward(0, number, [side_by_side], None, by_rows, by_rows=True)
        assert torch.equal(out, by_rows) and bool(out.count_nonzero())


@pytest.mark.parametrize(
    ("odd", "hidden"), [({"tied": True}, 64), ({}, 32)], ids=["tied", "rows that are no whole groups"]
)
def test_what_is_tied_or_has_odd_rows_has_no_table(tmp_path: Path, odd: dict[str, bool], hidden: int) -> None:
    assert table_of(open_model(make_model("llama", tmp_path / "llama", hidden=hidden, **odd), torch.float32)) is None


def _scaled_by_its_mean(table: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(ids, table.weight) * table.weight.mean()


def _normed(table: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(ids, table.weight, max_norm=1.0)


def _of_other_tokens(table: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(ids.roll(1, -1) // 2, table.weight)


def _by_its_length(table: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(ids, table.weight) / table.weight.shape[0]


def _by_index(table: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    return table.weight[ids]


def _in_training(table: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    found = nn.functional.embedding(ids, table.weight)
    return found + table.weight.std() if table.training else found


def _as_it_is(table: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(ids, table.weight).to(table.weight.device, table.weight.dtype)


@pytest.mark.parametrize(
    ("forward", "has"),
    [
        (_scaled_by_its_mean, False),
        (_normed, False),
        (_of_other_tokens, False),
        (_by_its_length, False),
        (_by_index, False),
        (_in_training, False),
        (_as_it_is, True),
    ],
)
def test_code_that_reads_more_of_its_table_has_none(
    tmp_path: Path, forward: Callable[[nn.Embedding, torch.Tensor], torch.Tensor], has: bool
) -> None:
    model: StreamedModel = open_model(make_model("llama", tmp_path / "llama", hidden=64), torch.float32)
    table = model.module.get_input_embeddings()
    assert isinstance(table, nn.Embedding) and table_of(model) is not None
    table.forward = lambda ids: forward(table, ids)  # type: ignore[method-assign]
    assert (table_of(model) is not None) == has
    assert not model.module.training, "as it was"


def test_another_use_of_the_rows_is_a_broken_invariant() -> None:
    rows = TableRows(0, "table", 4, 3, torch.device("cpu"))
    rows.begin_step([torch.tensor([[7, 2], [7, 9]])])
    assert rows.on_host.tolist() == [2, 7, 9]
    table = torch.arange(40.0)
    place = torch.empty(12)
    rows.take(table, place)
    parameter = rows.parameter(place)
    with rows.reading(parameter):
        found = nn.functional.embedding(torch.tensor([[9, 2]]), parameter)
        assert parameter.dtype == torch.float32
        with pytest.raises(AssertionError, match="the rows of tokens are there alone"):
            parameter.sum()
    assert torch.equal(found, table.view(10, 4)[[9, 2]][None])
