"""One layer of one micro-batch: dropout, order, accumulation, evaluation, and that nothing is left behind."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from ssdplan.executor.device.device import generators
from ssdplan.executor.model.attention.by_spans import settle
from ssdplan.executor.model.inspection.isolation import isolation
from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import StreamedModel, open_model
from ssdplan.executor.model.weights import Weights
from ssdplan.plans.errors import MismatchError
from tests import reference
from tests.made.models import make_model

CPU = torch.device("cpu")
DROPOUT = {
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
    "llama": {"attention_dropout": 0.3},
    "opt": {"dropout": 0.2, "attention_dropout": 0.2},
}


def micro_batches(count: int, seed: int = 0, rows: int = 2, length: int = 12) -> list[MicroBatch]:
    """Micro-batches of different length; the first row of each is padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for k in range(count):
        ids = torch.randint(3, 97, (rows, length - 2 * k), generator=generator)
        mask = torch.ones_like(ids)
        labels = ids.clone()
        mask[0, 3:], labels[0, 3:] = 0, -100
        result.append(MicroBatch(ids, labels, mask))
    return result


@dataclass
class Step:
    """A model with its weights in memory, and what one step over it left: activations and gradients by micro-batch."""

    model: StreamedModel
    layers: Layers
    weights: list[torch.Tensor]
    batches: Sequence[MicroBatch]

    @property
    def head(self) -> int:
        return len(self.model.layers) - 1

    def __post_init__(self) -> None:
        self.hidden: dict[tuple[int, int], torch.Tensor] = {}
        self.gradient: dict[tuple[int, int], torch.Tensor] = {}
        self.gradients: dict[tuple[int, int], list[torch.Tensor]] = {}

    def of(self, layer: int) -> list[torch.Tensor]:
        return [self.weights[index] for index in self.model.layers[layer].states]

    def span(self, k: int) -> int:
        return self.batches[k].input_ids.numel() * self.model.hidden_size

    def forward(self, layer: int, k: int) -> None:
        out = torch.empty(self.span(k), dtype=self.model.dtype)
        self.layers.forward(layer, k, self.of(layer), self.hidden.get((layer - 1, k)), out)
        self.hidden[layer, k] = out

    def backward(self, layer: int, k: int) -> None:
        into = torch.empty(self.span(k), dtype=self.model.dtype) if layer else None
        grads = [torch.zeros(flat.numel()) for flat in self.of(layer)]
        self.layers.backward(
            layer, k, self.of(layer), self.hidden.get((layer - 1, k)), self.gradient.get((layer + 1, k)), into, grads
        )
        self.gradients[layer, k] = grads
        if into is not None:
            self.gradient[layer, k] = into

    def vertical(self) -> None:
        for layer in range(self.head):
            for k in range(len(self.batches)):
                self.forward(layer, k)
        for layer in range(self.head, -1, -1):
            for k in range(len(self.batches)):
                self.backward(layer, k)

    def horizontal(self) -> None:
        for k in reversed(range(len(self.batches))):
            for layer in range(self.head):
                self.forward(layer, k)
            for layer in range(self.head, -1, -1):
                self.backward(layer, k)


def opened(path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, *, alone: bool = False) -> Step:
    """A model that is opened once for all steps of a test; `alone`, for one that changes it."""
    model = open_model(path, dtype) if alone else _model(path, dtype)
    reader = Weights(model)
    flats = [torch.empty(state.elements, dtype=dtype) for state in model.states]
    for index, flat in enumerate(flats):
        reader.read(index, flat)
    return Step(model, Layers(model, CPU, seed=seed), flats, ())


@functools.lru_cache(maxsize=2)
def _model(path: Path, dtype: torch.dtype) -> StreamedModel:
    return open_model(path, dtype)


def run(step: Step, batches: Sequence[MicroBatch], order: str, number: int = 0, **options: float) -> float:
    step.batches = batches
    step.layers.begin_step(number, batches, **options)
    getattr(step, order)()
    return step.layers.end_step()


# Memory


def test_large_pieces_are_kept_from_block_to_block_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    monkeypatch.setattr("ssdplan.executor.model.layers.process.keep_large", kept.append)
    step = opened(make_model("llama", tmp_path / "llama"))
    blocks = [True] * (step.head - 1)
    run(step, micro_batches(1), "vertical")
    assert kept == [False, *blocks, False, *blocks, False, False], "embedding and head, and behind the step"


# Dropout


@pytest.mark.parametrize("family", list(DROPOUT))
def test_dropout_does_not_depend_on_the_order_of_execution(tmp_path: Path, family: str) -> None:
    path = make_model(family, tmp_path / family, **DROPOUT[family])
    one, other = opened(path), opened(path)
    batches = micro_batches(3)
    torch.manual_seed(123)
    losses = [run(one, batches, "vertical", number=4)]
    torch.manual_seed(456)
    losses.append(run(other, batches, "horizontal", number=4))
    assert losses[0] == losses[1]
    assert one.gradients.keys() == other.gradients.keys()
    for key, gradients in one.gradients.items():
        assert all(torch.equal(a, b) for a, b in zip(gradients, other.gradients[key], strict=True)), key
    assert one.gradients and all(g.any() for gradients in one.gradients.values() for g in gradients)


@pytest.mark.parametrize("family", list(DROPOUT))
def test_dropout_differs_between_seeds_steps_layers_and_micro_batches(tmp_path: Path, family: str) -> None:
    path = make_model(family, tmp_path / family, **DROPOUT[family])
    batch = micro_batches(1)[0]

    def output(layer: int, micro_batch: int, step: int = 0, seed: int = 0, training: bool = True) -> torch.Tensor:
        it = opened(path, seed=seed)
        # Every block with the weights of the first, every micro-batch with the same tokens.
        it.weights[2] = it.weights[3] = it.weights[1]
        it.batches = [batch, batch]
        it.layers.begin_step(step, it.batches, training=training)
        it.forward(0, micro_batch)
        it.hidden[layer - 1, micro_batch] = torch.ones(it.span(0))
        it.forward(layer, micro_batch)
        return it.hidden[layer, micro_batch]

    base = output(1, 0)
    assert torch.equal(base, output(1, 0))
    variants = [output(1, 1), output(1, 0, step=1), output(1, 0, seed=1), output(1, 0, training=False)]
    if family != "gpt2":  # its blocks differ by themselves (attention is scaled by the layer's number)
        variants.append(output(2, 0))
        assert torch.equal(output(1, 0, training=False), output(2, 0, training=False))
    assert all(not torch.equal(base, variant) for variant in variants)


@pytest.mark.parametrize("family", list(DROPOUT))
def test_a_backward_sees_the_masks_of_its_forward(tmp_path: Path, family: str) -> None:
    """The gradient is that of the very function that forward computed: a difference quotient of it agrees.

    Float64, but for the norms that Llama computes in float32; with other masks it would be off by its own size.
    """
    it = opened(make_model(family, tmp_path / family, **DROPOUT[family]), torch.float64)
    it.batches = micro_batches(2)
    it.layers.begin_step(0, it.batches)
    it.vertical()
    for layer in (2, 1):
        hidden, nudge = it.hidden[layer - 1, 1], torch.randn(it.span(1), dtype=torch.float64)
        shifted = []
        for sign in (1, -1):
            it.hidden[layer - 1, 1] = hidden + sign * 1e-4 * nudge
            it.forward(layer, 1)
            shifted.append(it.hidden[layer, 1])
        quotient = torch.dot(shifted[0] - shifted[1], it.gradient[layer + 1, 1]) / 2e-4
        assert quotient == pytest.approx(float(torch.dot(it.gradient[layer, 1], nudge)), rel=5e-3)


# Evaluation and the loss


@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("llama", False), ("gemma2", True), ("opt", False)])
def test_evaluation_equals_the_models_own(tmp_path: Path, family: str, tied: bool) -> None:
    path = make_model(family, tmp_path / family, tied=tied, **DROPOUT.get(family, {}))
    it = opened(path)
    it.batches = micro_batches(3)
    tokens = it.layers.begin_step(7, it.batches, training=False)
    assert tokens == sum(2 + m.input_ids.shape[1] - 1 for m in it.batches)
    for k in (2, 0, 1):
        for layer in range(it.head):
            it.forward(layer, k)
        it.layers.loss(k, it.of(it.head), it.hidden[it.head - 1, k])
    with torch.no_grad():
        expected = reference.step_loss(reference.load(path).eval(), it.batches, backward=False)
    assert it.layers.end_step() == pytest.approx(expected, rel=1e-6)


def test_training_after_evaluation_has_dropout_again(tmp_path: Path) -> None:
    it = opened(make_model("gpt2", tmp_path / "gpt2", **DROPOUT["gpt2"]))
    batches = micro_batches(1)
    first = run(it, batches, "vertical")
    assert run(it, batches, "vertical", training=False) != first
    assert run(it, batches, "vertical") == first


def test_a_given_normaliser_and_a_loss_scale(tmp_path: Path) -> None:
    it = opened(make_model("llama", tmp_path / "llama"))
    batches = micro_batches(2)
    loss = run(it, batches, "vertical")
    base = dict(it.gradients)
    tokens = it.layers.begin_step(0, batches)
    assert run(it, batches, "vertical", normaliser=2 * tokens) == pytest.approx(loss / 2, rel=1e-6)
    for key, gradients in it.gradients.items():
        for got, want in zip(gradients, base[key], strict=True):
            torch.testing.assert_close(got, want / 2, rtol=1e-4, atol=1e-7)
    assert run(it, batches, "vertical", loss_scale=1024.0) == loss, "losses are not scaled"
    for key, gradients in it.gradients.items():
        assert all(torch.equal(got, want * 1024) for got, want in zip(gradients, base[key], strict=True))


def test_a_micro_batch_without_labels_adds_nothing(tmp_path: Path) -> None:
    it = opened(make_model("llama", tmp_path / "llama"))
    one, other = micro_batches(2)
    silent = MicroBatch(other.input_ids, torch.full_like(other.labels, -100), other.attention_mask)
    loss = run(it, [one, silent], "vertical")
    assert loss == run(it, [one], "vertical")
    loss_and = run(it, [one, silent], "vertical")
    assert loss_and == loss
    assert all(not g.any() for layer in range(it.head + 1) for g in it.gradients[layer, 1])


# Gradients, arenas, and what is left behind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_added_in_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    it = opened(make_model("gpt2", tmp_path / "gpt2", tied=True), dtype)
    it.batches = micro_batches(2)
    it.layers.begin_step(0, it.batches)
    it.vertical()
    for layer in range(it.head + 1):
        total = [torch.full((flat.numel(),), 0.5) for flat in it.of(layer)]
        expected = [flat.clone() for flat in total]
        for k in range(2):
            into = torch.empty(it.span(k), dtype=dtype) if layer else None
            out_gradient = it.gradient.get((layer + 1, k))
            it.layers.backward(layer, k, it.of(layer), it.hidden.get((layer - 1, k)), out_gradient, into, total)
            expected = [a + b for a, b in zip(expected, it.gradients[layer, k], strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(total, expected, strict=True))


def test_work_in_one_part_of_an_arena_does_not_disturb_a_backward_in_another(tmp_path: Path) -> None:
    """Other workers copy into the arena that the layer's weights and hidden state lie in, while autograd runs."""
    plain = opened(make_model("llama", tmp_path / "llama"))
    batches = micro_batches(1)
    loss = run(plain, batches, "vertical")
    it = opened(tmp_path / "llama")
    arena = torch.zeros(200_000)
    place = 0

    def lay(flat: torch.Tensor) -> torch.Tensor:
        nonlocal place
        view = arena[place : place + flat.numel()]
        view.copy_(flat)
        place += flat.numel()
        return view

    it.weights = [lay(flat) for flat in it.weights]

    def copy_elsewhere(*_: object) -> None:
        arena[-5:].add_(1)

    for child in it.model.module.modules():
        child.register_forward_hook(copy_elsewhere)
    it.batches = batches
    it.layers.begin_step(0, batches)
    for layer in range(it.head):
        it.forward(layer, 0)
        it.hidden[layer, 0] = lay(it.hidden[layer, 0])
    for layer in range(it.head, -1, -1):
        it.backward(layer, 0)
    assert it.layers.end_step() == loss
    for key, gradients in plain.gradients.items():
        assert all(torch.equal(a, b) for a, b in zip(gradients, it.gradients[key], strict=True))
    assert not arena.requires_grad and arena.grad_fn is None and arena.grad is None
    assert all(not flat.requires_grad and flat.grad is None for flat in it.weights)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_generators_that_a_layer_seeds_are_those_that_are_drawn_from(where: str) -> None:
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    device = torch.device(where)
    torch.manual_seed(12345)
    expected = [torch.rand(7), torch.rand(7, device=device)]
    for generator in generators(device):
        generator.manual_seed(12345)
    assert all(map(torch.equal, expected, [torch.rand(7), torch.rand(7, device=device)]))


def test_nothing_of_autograd_outlives_a_call(tmp_path: Path) -> None:
    it = opened(make_model("gpt2", tmp_path / "gpt2", tied=True, **DROPOUT["gpt2"]))
    it.batches = micro_batches(2)
    gc.collect()
    gc.disable()
    try:
        it.layers.begin_step(0, it.batches)
        it.vertical()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and not o.is_meta]
        alive = [tensor for tensor in tensors if tensor.grad_fn or tensor.requires_grad or tensor.grad is not None]
    finally:
        gc.enable()
    assert not alive


def test_the_step_keeps_no_view_of_weights_or_activations(tmp_path: Path) -> None:
    it = opened(make_model("gpt2", tmp_path / "gpt2", tied=True))
    run(it, micro_batches(2), "vertical")
    results = {key: [g.clone() for g in gradients] for key, gradients in it.gradients.items()}
    for flat in it.weights:
        flat.fill_(float("nan"))
    for flat in [*it.hidden.values(), *it.gradient.values()]:
        flat.fill_(float("nan"))
    assert all(torch.equal(a, b) for key, g in results.items() for a, b in zip(g, it.gradients[key], strict=True))
    again = opened(tmp_path / "gpt2")
    it.weights = again.weights
    run(it, micro_batches(2), "vertical")
    assert all(torch.equal(a, b) for key, g in results.items() for a, b in zip(g, it.gradients[key], strict=True))


def test_the_models_own_layers_are_back_after_an_error(tmp_path: Path) -> None:
    it = opened(make_model("llama", tmp_path / "llama"))
    blocks = list(it.model.blocks)
    it.batches = micro_batches(1)
    it.layers.begin_step(0, it.batches)
    broken = [torch.zeros(7)]
    with pytest.raises(AssertionError):
        it.layers.forward(0, 0, broken, None, torch.empty(it.span(0)))
    with pytest.raises(RuntimeError):
        it.layers.forward(0, 0, it.of(0), None, torch.empty(3))
    assert list(it.model.blocks) == blocks


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("The size of tensor a (4) must match the size of tensor b (8)\nmore"), MismatchError),
        (TypeError("no such argument"), MismatchError),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_models_own_code_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, told: type[BaseException]
) -> None:
    """As that of MiniCPM3 with fewer heads of keys, which attention with a mask cannot take."""
    it = opened(make_model("llama", tmp_path / "llama"))
    it.batches = micro_batches(1)
    it.layers.begin_step(0, it.batches)
    it.forward(0, 0)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(type(it.model.blocks[0]), "forward", fail)
    with pytest.raises(told) as found:
        it.forward(1, 0)
    assert type(found.value) is told
    if told is MismatchError:
        assert str(found.value).startswith("llama: the code of LlamaForCausalLM fails in block.0 on 2 x ")
        assert str(found.value).endswith(f"rows: {type(error).__name__}: {str(error).splitlines()[0]}")


# The step's inputs and what is recorded


def test_recorded_arguments_are_kept_once_and_forgotten(tmp_path: Path) -> None:
    it = opened(make_model("gemma2", tmp_path / "gemma2"))  # eager: it has masks even without padding
    whole = [MicroBatch(m.input_ids, m.input_ids) for m in (micro_batches(1)[0], *micro_batches(3, seed=1))]
    it.batches = whole
    it.layers.begin_step(0, whole)
    assert it.layers.context_bytes() == 0
    it.forward(0, 0)
    one = it.layers.context_bytes()
    rotary, positions, masks = 2 * 12 * 12 * 4, 12 * 8, 2 * 2 * 12 * 12 * 4
    assert rotary < one <= rotary + positions + masks
    it.forward(0, 1)
    assert it.layers.context_bytes() == one, "the same shape without padding"
    it.forward(0, 2)
    assert it.layers.context_bytes() > one
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], list(range(12))])
    shared = MicroBatch(whole[0].input_ids, whole[0].input_ids, None, positions)
    it.batches = [shared, replace(shared, position_ids=positions.clone())]
    it.layers.begin_step(1, it.batches)
    assert it.layers.context_bytes() == 0
    it.forward(0, 0)
    first = it.layers.context_bytes()
    it.forward(0, 1)
    assert it.layers.context_bytes() == 2 * first


def ending_together(length: int, tokens: int) -> MicroBatch:
    """Two rows of which only the first `tokens` are not padding."""
    ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[:, tokens:] = 0
    return MicroBatch(ids, ids.masked_fill(mask == 0, -100), mask)


@pytest.mark.parametrize(("causal", "more"), [(True, 0), (False, 2 * 12 * 12)])
def test_padding_needs_no_mask(tmp_path: Path, causal: bool, more: int) -> None:
    """Unless what comes later in a row changes what came before: a model that attends in both directions is told."""
    it = opened(make_model("llama", tmp_path / "llama"), alone=True)
    settle(it.model.module, False, CPU, torch.float32)
    found = isolation(it.model.module, it.model.blocks, returned=None, hidden_size=it.model.hidden_size)
    assert found == it.model.anatomy.isolation and found.causal
    if not causal:
        for block in it.model.blocks:
            block.self_attn.is_causal = False
        found = isolation(it.model.module, it.model.blocks, returned=None, hidden_size=it.model.hidden_size)
        assert not found.causal
        it.model = replace(it.model, anatomy=replace(it.model.anatomy, isolation=found))
        it.layers = Layers(it.model, CPU)
    kept = []
    apart = ending_together(12, 9)
    apart.attention_mask[0] = 1
    for batch in (MicroBatch(*[ending_together(12, 12).input_ids] * 2), ending_together(12, 9), apart):
        it.batches = [batch]
        it.layers.begin_step(0, it.batches)
        it.forward(0, 0)
        kept.append(it.layers.context_bytes())
    assert [each - kept[0] for each in kept[1:]] == [more, more]


def test_tokens_and_lengths_that_are_not_the_models(tmp_path: Path) -> None:
    it = opened(make_model("gpt2", tmp_path / "gpt2"))
    good = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(MismatchError, match="micro-batch 1 has token 97, gpt2 has tokens 0 to 96"):
        it.layers.begin_step(0, [MicroBatch(good, good), MicroBatch(good + 96, good)])
    with pytest.raises(MismatchError, match="has token -1"):
        it.layers.begin_step(0, [MicroBatch(good - 2, good)])
    long = torch.ones(1, 65, dtype=torch.int64)
    with pytest.raises(MismatchError, match="sequences of 65 tokens, gpt2 takes 64"):
        it.layers.begin_step(0, [MicroBatch(long, long)])
    with pytest.raises(MismatchError, match="step 3 has no token to predict"):
        it.layers.begin_step(3, [MicroBatch(good, torch.full_like(good, -100))])
    assert it.layers.begin_step(0, [MicroBatch(good, good)]) == 3


def test_a_step_ends_only_when_every_micro_batch_has_its_loss(tmp_path: Path) -> None:
    it = opened(make_model("llama", tmp_path / "llama"))
    it.layers.begin_step(0, micro_batches(2))
    with pytest.raises(AssertionError, match=r"\[0, 1\]"):
        it.layers.end_step()
