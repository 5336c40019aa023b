"""Blocks that keep some of their activations: the same bits as blocks that recompute everything, whatever is met."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import open_model
from ssdplan.executor.model.saved import Keeping, SavedBlocks, laid_bytes
from ssdplan.executor.model.traced import Traced
from tests.executor.model.test_layers import CPU, DROPOUT, Step, micro_batches, opened, run
from tests.extent import short_or_full
from tests.made.models import FAMILIES, OTHERS, make_model

PRICES = (3e-9, 1e-9, 0.0)
"""Seconds a byte at which a little, much and everything is kept, where each operation takes 10 microseconds."""
ORDERS = ["vertical", "horizontal"]
ROOM = 1 << 20
RECOMPUTED = {
    "mamba": "its code rounds otherwise where autograd does not look on, as in a forward",
    "gemma4": "its layers hand each other keys and values in an object of the library's",
}
"""Families whose blocks cannot run by their graphs, and why."""


class Saving(Step):
    """A step whose blocks' forwards keep what a rung says, each pair of layer and micro-batch by the next one."""

    rungs: tuple[str, ...] = ()
    room = ROOM

    def forward(self, layer: int, k: int) -> None:
        if not 0 < layer < self.head:
            super().forward(layer, k)
            return
        out = torch.empty(self.span(k), dtype=self.model.dtype)
        saved, rung = torch.full((self.room,), 255, dtype=torch.uint8), self.rungs[(layer + k) % len(self.rungs)]
        self.layers.forward(layer, k, self.of(layer), self.hidden[layer - 1, k], out, rung, saved)
        self.hidden[layer, k], self.places[layer, k] = out, saved

    def backward(self, layer: int, k: int) -> None:
        if not 0 < layer < self.head:
            super().backward(layer, k)
            return
        into = torch.empty(self.span(k), dtype=self.model.dtype)
        grads = [torch.zeros(flat.numel()) for flat in self.of(layer)]
        given = self.hidden[layer - 1, k], self.gradient[layer + 1, k], into, grads
        self.layers.backward(layer, k, self.of(layer), *given, saved=self.places.pop((layer, k)))
        self.gradients[layer, k], self.gradient[layer, k] = grads, into

    def __post_init__(self) -> None:
        super().__post_init__()
        self.places: dict[tuple[int, int], torch.Tensor] = {}


def traced_of(step: Step, batch: MicroBatch) -> Traced:
    step.batches = [batch]
    step.layers.begin_step(0, [batch])
    step.forward(0, 0)
    found = step.layers.trace_block(2, 0, step.of(2), step.hidden[0, 0])
    assert found is not None
    return found.traced


def values_at(step: Step, *prices: float) -> list[frozenset[str]]:
    """What the cheapest cuts of a block keep of rows without padding."""
    full = micro_batches(1)[0]
    traced = traced_of(step, MicroBatch(full.input_ids, full.input_ids, None))
    seconds = {node.name: 1e-5 for node in traced.forward.graph.nodes}
    found = [traced.cheapest(seconds, price) for price in prices]
    assert all(found)
    return found


def saving(step: Step, *kept: frozenset[str]) -> Saving:
    """The same model with a rung for each set of values."""
    classes = {layer.layer_class for layer in step.model.layers[1:-1]}
    rungs = {(name, f"r{number}"): Keeping(values) for name in classes for number, values in enumerate(kept)}
    made = Saving(step.model, Layers(step.model, CPU, rungs=rungs), step.weights, ())
    made.rungs = tuple(f"r{number}" for number in range(len(kept)))
    return made


def assert_same(one: Step, other: Step) -> None:
    assert one.gradients.keys() == other.gradients.keys() and one.gradients
    for key, gradients in one.gradients.items():
        assert all(torch.equal(a, b) for a, b in zip(gradients, other.gradients[key], strict=True)), key
    for key, gradient in one.gradient.items():
        assert torch.equal(gradient, other.gradient[key]), key


@pytest.mark.parametrize(
    "family", [*FAMILIES, *short_or_full([family for family in OTHERS if family in ("bloom", "gemma4")], OTHERS)]
)
def test_every_family_has_the_bits_of_recomputing_everything(tmp_path: Path, family: str) -> None:
    """Full rows and padded ones, in both orders, several rungs in one step."""
    layers = {} if family == "gpt_neo" else {"layers": short_or_full(2, 3)}  # whose kinds of layers are a list
    step = opened(make_model(family, tmp_path / family, **layers))
    padded = micro_batches(2)
    batches = [MicroBatch(padded[0].input_ids, padded[0].labels, None), padded[1]]
    loss = run(step, batches, "vertical")
    prices = short_or_full(PRICES[1:] if family in ("llama", "gpt2") else PRICES[2:], PRICES)
    kept = saving(step, *values_at(opened(tmp_path / family), *prices))
    assert run(kept, batches, "horizontal") == loss
    assert_same(step, kept)
    blocks = step.head - 1
    assert kept.layers.saved_blocks.by_graph + kept.layers.saved_blocks.whole == 2 * blocks
    assert kept.layers.saved_blocks.by_graph >= blocks * (family not in RECOMPUTED), "full rows at the least"


@pytest.mark.parametrize(
    ("family", "order"),
    [(family, order) for number, family in enumerate(DROPOUT) for order in short_or_full([ORDERS[number % 2]], ORDERS)],
)
def test_dropout_is_that_of_the_forward(tmp_path: Path, family: str, order: str) -> None:
    path = make_model(family, tmp_path / family, **DROPOUT[family])
    step = opened(path)
    batches = micro_batches(2)
    loss = run(step, batches, order, number=3)
    assert run(opened(path), batches, order, number=4) != loss, "dropout is on"
    kept = saving(step, *values_at(opened(path), *PRICES))
    torch.manual_seed(1234)
    assert run(kept, batches, order, number=3) == loss
    assert_same(step, kept)


def test_bf16_has_the_same_bits(tmp_path: Path) -> None:
    step = opened(make_model("llama", tmp_path / "llama"), torch.bfloat16)
    batches = micro_batches(2)
    loss = run(step, batches, "vertical")
    kept = saving(step, *values_at(opened(tmp_path / "llama", torch.bfloat16), *PRICES))
    assert run(kept, batches, "vertical") == loss
    assert_same(step, kept)


def test_rows_that_sequences_share(tmp_path: Path) -> None:
    step = opened(make_model("llama", tmp_path / "llama"))
    ids = micro_batches(1)[0].input_ids
    positions = torch.cat([torch.arange(7), torch.arange(5)]).repeat(2, 1)
    batches = [MicroBatch(ids, ids.masked_fill(positions == 0, -100), None, positions)]
    loss = run(step, batches, "vertical")
    kept = saving(step, *values_at(opened(tmp_path / "llama"), 0.0))
    assert run(kept, batches, "vertical") == loss
    assert_same(step, kept)


def test_what_is_frozen_has_no_gradient_and_the_lowest_layer_hands_none_down(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "llama")
    model = open_model(path, torch.float32, freeze=("model.embed_tokens.*", "model.layers.0.*", "*mlp*"))
    step = opened(path)
    weights = {tensor.name: step.weights[index][tensor.offset : tensor.offset + tensor.elements]
               for index, state in enumerate(step.model.states) for tensor in state.tensors}  # fmt: skip
    flats = []
    for state in model.states:
        flat = torch.zeros(state.elements)
        for tensor in state.tensors:
            flat[tensor.offset : tensor.offset + tensor.elements] = weights[tensor.name]
        flats.append(flat)
    lowest = model.first_trained
    assert lowest == 2
    batch = micro_batches(1)[0]
    batch = MicroBatch(batch.input_ids, batch.input_ids, None)
    found = []
    [values] = values_at(opened(path), 0.0)
    for saves in (False, True):
        layers = Layers(model, CPU, rungs={(layer.layer_class, "r0"): Keeping(values) for layer in model.layers})
        layers.begin_step(0, [batch])
        hidden: list[torch.Tensor | None] = [None]
        places: list[torch.Tensor | None] = []
        head = len(model.layers) - 1
        for layer in range(head):
            out = torch.empty(24 * model.hidden_size)
            places.append(torch.empty(ROOM, dtype=torch.uint8) if saves and layer >= lowest else None)
            given = [flats[index] for index in model.layers[layer].states]
            layers.forward(layer, 0, given, hidden[-1], out, "r0" if places[-1] is not None else "", places[-1])
            hidden.append(out)
        gradient: torch.Tensor | None = None
        grads: list[torch.Tensor] = []
        for layer in range(head, lowest - 1, -1):
            into = torch.empty(24 * model.hidden_size) if layer > lowest else None
            mine = [torch.zeros(flats[index].numel()) for index in model.trained(layer)]
            given = [flats[index] for index in model.layers[layer].states]
            place = places[layer] if layer < head else None
            layers.backward(layer, 0, given, hidden[layer], gradient, into, mine, saved=place)
            gradient, grads = into, grads + mine
        found.append(grads)
        assert layers.saved_blocks.by_graph == (head - lowest if saves else 0)
    assert found[0] and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_where_there_is_room_for_a_part_only_a_part_is_kept(tmp_path: Path) -> None:
    """Rows of another kind may keep more than there is room for: whatever fits is kept, or nothing."""
    step = opened(make_model("llama", tmp_path / "llama"))
    batches = micro_batches(1)
    loss = run(step, batches, "vertical")
    [values] = values_at(opened(tmp_path / "llama"), 0.0)
    every = laid_bytes(traced_of(opened(tmp_path / "llama"), batches[0]).cut(values).kept)
    for room in (1, every // 3, every - 1, every):
        kept = saving(step, values)
        kept.room = room
        assert run(kept, batches, "vertical") == loss
        assert_same(step, kept)
        assert (kept.layers.saved_blocks.whole > 0) == (room == 1)


def test_code_that_cannot_be_traced_is_recomputed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = opened(make_model("llama", tmp_path / "llama"))
    batches = micro_batches(1)
    [values] = values_at(opened(tmp_path / "llama"), 0.0)
    block = type(step.model.blocks[0])
    forward = block.forward

    def looks(self: Any, hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        scale = 1.0 if float(hidden_states.detach().sum()) > 1e9 else 0.5  # a graph cannot know
        return forward(self, hidden_states * scale, *rest, **named)

    monkeypatch.setattr(block, "forward", looks)
    loss = run(step, batches, "vertical")
    kept = saving(step, values)
    assert run(kept, batches, "vertical") == loss
    assert_same(step, kept)
    assert kept.layers.saved_blocks.by_graph == 0


def test_a_layer_that_does_other_things_than_the_traced_one_has_a_graph_of_its_own(tmp_path: Path) -> None:
    """Layers of one class that scale by their numbers."""
    step = opened(make_model("llama", tmp_path / "llama"), alone=True)
    blocks = list(step.model.blocks)
    for number, block in enumerate(blocks):
        attention: Any = block.self_attn
        attention.scaling = attention.scaling * (number + 1)
    ids = micro_batches(1)[0].input_ids
    batches = [MicroBatch(ids, ids, None)]
    kept = saving(step, *values_at(opened(tmp_path / "llama"), 0.0))
    for number in (0, 1):
        loss = run(step, batches, "vertical", number=number)
        assert run(kept, batches, "vertical", number=number) == loss
        assert_same(step, kept)
    assert (kept.layers.saved_blocks.by_graph, kept.layers.saved_blocks.whole) == (2 * len(blocks), 0)


def test_a_graph_that_never_computes_what_the_code_does_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that a tracing sees otherwise than a run: what the graph says is proven wrong at its first use."""
    step = opened(make_model("llama", tmp_path / "llama"))
    [values] = values_at(opened(tmp_path / "llama"), 0.0)
    block = type(step.model.blocks[0])
    forward = block.forward

    def knows(self: Any, hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        fake = type(hidden_states).__name__ != "Tensor"
        return forward(self, hidden_states * (0.5 if fake else 1.0), *rest, **named)

    monkeypatch.setattr(block, "forward", knows)
    ids = micro_batches(1)[0].input_ids
    batches = [MicroBatch(ids, ids, None)]
    kept = saving(step, values)
    for number in (0, 1):
        loss = run(step, batches, "vertical", number=number)
        assert run(kept, batches, "vertical", number=number) == loss
        assert_same(step, kept)
    assert kept.layers.saved_blocks.by_graph == 0


def test_numbers_that_are_none_prove_no_graph_wrong(tmp_path: Path) -> None:
    """Overflows of fp16: the outputs are NaN by the graph as by the layer's own code."""
    step = opened(make_model("llama", tmp_path / "llama"))
    kept = saving(step, *values_at(opened(tmp_path / "llama"), 0.0))
    ids = micro_batches(1)[0].input_ids
    kept.batches = [MicroBatch(ids, ids, None)]
    kept.layers.begin_step(0, kept.batches)
    kept.forward(0, 0)
    kept.hidden[0, 0].fill_(float("inf"))
    kept.forward(1, 0)
    assert kept.hidden[1, 0].isnan().all() and kept.layers.keeps(1, 0)


def test_nothing_outlives_a_step(tmp_path: Path) -> None:
    step = opened(make_model("llama", tmp_path / "llama"))
    kept = saving(step, *values_at(opened(tmp_path / "llama"), 1e-9))
    batches = micro_batches(2)
    run(kept, batches, "vertical")
    sizes = []
    for number in range(3):
        run(kept, batches, "vertical", number=number)
        assert not kept.places
        kept.gradients.clear()
        kept.gradient.clear()
        kept.hidden.clear()
        gc.collect()
        sizes.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    assert sizes[0] == sizes[1] == sizes[2]


def test_a_pair_whose_forward_did_not_run_is_noticed() -> None:
    with pytest.raises(AssertionError, match="has not run in this step"):
        SavedBlocks({}).runs_by_graph((1, 0))


def test_a_freed_place_is_held_by_nobody(tmp_path: Path) -> None:
    """Addresses are used again: the graphs keep no view of a place."""
    step = opened(make_model("llama", tmp_path / "llama"))
    kept = saving(step, *values_at(opened(tmp_path / "llama"), 0.0))
    run(kept, micro_batches(1), "vertical")
    place = torch.empty(ROOM, dtype=torch.uint8)
    held = weakref.ref(place.untyped_storage())
    kept.layers.begin_step(1, kept.batches)
    kept.forward(0, 0)
    out = torch.empty(kept.span(0))
    kept.layers.forward(1, 0, kept.of(1), kept.hidden[0, 0], out, "r0", place)
    del place
    gc.collect()
    assert held() is None
