"""Traced blocks: whatever is kept, the bits are those of autograd; what is kept is the cheapest there is."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import AutoModelForCausalLM

from ssdplan.executor.model.traced import Traced, trace
from tests.extent import short_or_full
from tests.made.models import make_model

LENGTH = 12
PRICES = (1e-3, 1e-8, 3e-9, 1e-9, 0.0)


class Called:
    """A block of a model, and all that its model calls it with."""

    def __init__(
        self, path: Path, *, index: int = 0, training: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        model.train(training)
        blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > index)
        self.block = blocks[index]
        seen: list[Any] = []
        handle = self.block.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
        )
        ids = torch.randint(model.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            model(ids, use_cache=False)
        handle.remove()
        leaves, self._spec = tree_flatten(seen[0])
        self._fixed = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        buffers = dict(self.block.named_buffers())
        self._names = [*buffers, *dict(self.block.named_parameters())]
        parameters = [parameter.detach().clone().requires_grad_() for parameter in self.block.parameters()]
        self.hidden = (
            torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        )
        self.others = [*(tensor.detach() for tensor in [*tensors[1:], *buffers.values()]), *parameters]
        self.gradient = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(2)).to(dtype)

    def __call__(self, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        tensors = [hidden, *others[: len(self._places) - 1]]
        leaves = list(self._fixed)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        parameters = dict(zip(self._names, others[len(self._places) - 1 :], strict=True))
        result = functional_call(self.block, parameters, args, kwargs)
        return result if isinstance(result, torch.Tensor) else result[0]

    def by_autograd(self, seed: int = 5) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        torch.manual_seed(seed)
        for tensor in (self.hidden, *self.others):
            tensor.grad = None
        out = self(self.hidden, *self.others)
        out.backward(self.gradient)
        return out.detach(), [tensor.grad for tensor in (self.hidden, *self.others)]

    def by_graphs(self, traced: Traced, kept: frozenset[str], seed: int = 5) -> tuple[torch.Tensor, list[Any]]:
        """As a run does it: what is kept goes through flat memory, and nothing else survives the forward."""
        cut = traced.cut(kept)
        inputs = [self.hidden.detach(), *(other.detach() for other in self.others)]
        flat = [torch.full((value.elements + 3,), 7.0).to(value.dtype) for value in cut.kept]
        found: list[Any] = [None] * len(inputs)
        with torch.no_grad():
            torch.manual_seed(seed)
            out = cut.forward(*inputs, *(value.laid(memory) for value, memory in zip(cut.kept, flat, strict=True)))
            torch.manual_seed(seed + 1)  # what is drawn again would be something else
            again = [value.laid(memory) for value, memory in zip(cut.kept, flat, strict=True)]
            given = [*again, *(inputs[:1] if cut.keeps_hidden else []), *inputs[1:], self.gradient]

            def take(number: int, gradient: torch.Tensor) -> None:
                assert found[number + 1] is None
                found[number + 1] = gradient

            found[0] = cut.backward(*given, take)
        return out, found


def same(one: tuple[torch.Tensor, list[Any]], other: tuple[torch.Tensor, list[Any]]) -> bool:
    return torch.equal(one[0], other[0]) and all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(one[1], other[1], strict=True)
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "gemma2"])  # all families: test_saved.py
def test_whatever_is_kept_the_bits_are_autograds(tmp_path: Path, family: str) -> None:
    called = Called(make_model(family, tmp_path / "model"))
    traced = trace(called, called.hidden, called.others)
    seconds = {node.name: 1e-5 for node in traced.forward.graph.nodes}
    expected = called.by_autograd()
    sizes = []
    for price in PRICES:
        kept = traced.cheapest(seconds, price)
        cut = traced.cut(kept)
        sizes.append((sum(value.nbytes for value in cut.kept), -len(cut.rebuilt)))
        assert same(expected, called.by_graphs(traced, kept))
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    assert not traced.cut(traced.cheapest(seconds, 0.0)).rebuilt, "what costs nothing is kept"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dropout_is_kept_and_never_drawn_again(tmp_path: Path, family: str) -> None:
    odd = (
        {"attention_dropout": 0.3} if family == "llama" else {"resid_pdrop": 0.2, "attn_pdrop": 0.1, "embd_pdrop": 0.0}
    )
    called = Called(make_model(family, tmp_path / "model", **odd), training=True)
    traced = trace(called, called.hidden, called.others)
    expected = called.by_autograd()
    assert not same(expected, called.by_autograd(seed=6)), "dropout is on"
    seconds = {node.name: 1e-5 for node in traced.forward.graph.nodes}
    for price in PRICES:
        assert same(expected, called.by_graphs(traced, traced.cheapest(seconds, price)))


def test_bf16_has_the_same_bits(tmp_path: Path) -> None:
    called = Called(make_model("llama", tmp_path / "model"), dtype=torch.bfloat16)
    traced = trace(called, called.hidden, called.others)
    seconds = {node.name: 1e-5 for node in traced.forward.graph.nodes}
    for price in PRICES:
        assert same(called.by_autograd(), called.by_graphs(traced, traced.cheapest(seconds, price)))


def test_the_cut_is_the_cheapest_of_all() -> None:
    """By trying all: what is kept, and whether the input is, of a small block."""

    def block(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(hidden @ weight)
        return (hidden + torch.sigmoid(inner) * inner.exp()).sin()

    hidden = torch.randn(4, 8, requires_grad=True)
    traced = trace(block, hidden, [torch.randn(8, 8, requires_grad=True)])
    names = [value.name for value in traced.values]
    sizes = {value.name: value.nbytes for value in traced.values}
    random = torch.Generator().manual_seed(3)
    for _ in range(short_or_full(1, 2)):
        drawn = torch.rand(len(traced.forward.graph.nodes), generator=random).tolist()
        seconds = dict(zip((node.name for node in traced.forward.graph.nodes), drawn, strict=True))

        def cost(kept: frozenset[str], price: float, seconds: dict[str, float] = seconds) -> float:
            cut = traced.cut(kept)
            nbytes = sum(sizes[value.name] for value in cut.kept) + cut.keeps_hidden * 4 * hidden.numel()
            return sum(seconds[name] for name in cut.rebuilt) + price * nbytes

        for price in (1e-4, 1e-3, 3e-3, 1e-2):
            every = (
                frozenset(each) for count in range(len(names) + 1) for each in itertools.combinations(names, count)
            )
            best = min(cost(kept, price) for kept in every)
            assert cost(traced.cheapest(seconds, price), price) == pytest.approx(best)
