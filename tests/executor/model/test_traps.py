"""Traps that saved activations were caught in elsewhere (DESIGN's and PyAO's), each sprung on purpose.

Each test shows first that the trap bites where the guard is off, and then that it does not where it is on.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from ssdplan.executor.model import traced as module
from ssdplan.executor.model import values
from ssdplan.executor.model.traced import trace
from tests.made.models import make_model

from .test_traced import Called, same


def hidden_and_weight(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(2, 6, 8, generator=generator, requires_grad=True),
        torch.randn(8, 8, generator=generator, requires_grad=True),
    )


def both(block: Any, kept: frozenset[str] | None = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients by autograd, and by the graphs that keep these values: all that may be, if none is said."""
    hidden, weight = hidden_and_weight()
    gradient = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(9))
    out = block(hidden, weight)
    exact = [out.detach(), *torch.autograd.grad(out, (hidden, weight), gradient)]
    traced = trace(block, hidden, [weight])
    cut = traced.cut(traced.saved if kept is None else kept)
    places = [torch.zeros(value.nbytes, dtype=torch.uint8) for value in cut.kept]
    found: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        laid = [value.laid(place) for value, place in zip(cut.kept, places, strict=True)]
        result = cut.forward(hidden.detach(), weight.detach(), *laid)
        rest = [hidden.detach()] if cut.keeps_hidden else []
        first = cut.backward(*laid, *rest, weight.detach(), gradient, found.__setitem__)
    return exact, [result, first, found[0]]


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_view_is_kept_by_its_base_and_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 cuts one product into queries, keys and values, and looks at each in two ways: one storage."""
    called = Called(make_model("gpt2", tmp_path / "model"))
    storages: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        called(called.hidden, *called.others)
    known = {each.untyped_storage().data_ptr() for each in (called.hidden, *called.others)}
    truly = sum(nbytes for address, (nbytes, _) in storages.items() if address not in known)
    traced = trace(called, called.hidden, called.others)
    counted = sum(value.nbytes for value in traced.values if value.name in traced.saved)
    assert counted <= truly
    monkeypatch.setattr(module, "is_view", lambda node: False)
    monkeypatch.setattr(values, "is_view", lambda node: False)
    sprung = trace(called, called.hidden, called.others)
    assert sum(value.nbytes for value in sprung.values if value.name in sprung.saved) > truly, "the trap bites"


def test_what_is_changed_in_place_after_it_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product is kept for the tanh's own backward while the block goes on to write into a copy of it."""

    def block(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = hidden @ weight
        once = product.clone()
        once.mul_(3.0)
        return torch.tanh(product) + once.add_(1.0) + hidden

    exact, found = both(block)
    assert alike(exact, found)

    def spring(graph: Any) -> None:
        """Operations that write stay as they are: what is kept is written into."""
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target is torch.ops.aten.clone.default:
                node.replace_all_uses_with(node.args[0])

    monkeypatch.setattr(module, "_write_nowhere", spring)
    exact, found = both(block)
    assert not alike(exact, found), "the trap bites"


def test_an_address_is_no_identity(tmp_path: Path) -> None:
    """Kept values of two micro-batches lie at the same addresses, one after the other: each has its own gradients."""
    called = Called(make_model("llama", tmp_path / "model"))
    traced = trace(called, called.hidden, called.others)
    cut = traced.cut(traced.saved)
    memory = [torch.zeros(value.nbytes, dtype=torch.uint8) for value in cut.kept]
    places = [value.laid(place) for value, place in zip(cut.kept, memory, strict=True)]
    others = [other.detach() for other in called.others]
    seen = []
    for seed in (1, 2):
        called.hidden = torch.randn(
            called.hidden.shape, generator=torch.Generator().manual_seed(seed), requires_grad=True
        )
        expected = called.by_autograd()
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            out = cut.forward(called.hidden.detach(), *others, *places)
            rest = [called.hidden.detach()] if cut.keeps_hidden else []
            first = cut.backward(*places, *rest, *others, called.gradient, found.__setitem__)
        gradients = [first, *(found.get(number) for number in range(len(others)))]
        assert same(expected, (out, gradients))
        seen.append(out)
    assert not torch.equal(*seen)


def test_no_graph_of_autograd_is_alive_after_an_operation(tmp_path: Path) -> None:
    """What a forward returns has no history; one that autograd made has, and holds its inputs by it."""
    called = Called(make_model("llama", tmp_path / "model"))
    traced = trace(called, called.hidden, called.others)
    cut = traced.cut(traced.saved)
    places = [torch.zeros(value.nbytes, dtype=torch.uint8) for value in cut.kept]
    given = [called.hidden.detach().clone(), *(other.detach() for other in called.others)]
    held = weakref.ref(given[0])
    with torch.no_grad():
        out = cut.forward(*given, *(value.laid(place) for value, place in zip(cut.kept, places, strict=True)))
    assert out.grad_fn is None and not out.requires_grad
    del given
    gc.collect()
    assert held() is None, "a forward by graphs holds nothing"
    hidden = called.hidden.detach().clone().requires_grad_()
    inner = hidden * 1.0
    held = weakref.ref(inner)
    result = called(inner, *called.others)
    del inner
    gc.collect()
    assert result.grad_fn is not None and held() is not None, "the trap bites: autograd's forward holds its input"
