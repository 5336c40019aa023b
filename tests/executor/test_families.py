"""Streamed training of every family equals plain PyTorch's, step by step and weight by weight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import StreamedModel, open_model
from ssdplan.executor.model.weights import Weights
from tests import reference
from tests.extent import short_or_full
from tests.made.models import FAMILIES, OTHERS, make_model
from tests.reference import AdamW

CPU = torch.device("cpu")
STEPS, ROWS, LENGTH, VOCAB = short_or_full(5, 20), 2, 14, 97
KEY_BIASES = (
    "self.key.bias",
    "self_attn.k_proj.bias",  # OPT
    "attn.c_attn.bias",  # GPT-2: queries, keys and values in one
    "attention.query_key_value.bias",  # BLOOM, likewise; GPT-NeoX, where rotation leaves a part of the key out
)


def make_steps(steps: int, micro_batches: int, *, padded: bool, seed: int = 0) -> list[list[MicroBatch]]:
    """Random micro-batches; padded: rows of different length, and micro-batches of different length too."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(steps):
        step = []
        for k in range(micro_batches):
            length = LENGTH - 3 * k if padded else LENGTH
            ids = torch.randint(3, VOCAB, (ROWS, length), generator=generator)
            labels, mask = ids.clone(), None
            if padded:
                mask = torch.ones_like(ids)
                short = 4 + k  # more padding than any family's window
                ids[0, short:], labels[0, short:], mask[0, short:] = 0, -100, 0
            labels[1, 2] = -100  # a token in the middle that is not counted
            step.append(MicroBatch(ids, labels, mask))
        result.append(step)
    return result


def train_streamed(
    model: StreamedModel,
    steps: Sequence[Sequence[MicroBatch]],
    optimizer: AdamW,
    device: torch.device = CPU,
    head_chunk_tokens: int | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains over `Layers` in the vertical order, all in memory; consecutive stages run their micro-batches in opposite
    order. Returns what tests.reference.train returns."""
    layers = Layers(model, device, head_chunk_tokens=head_chunk_tokens)
    weights = Weights(model)
    masters = [torch.zeros(state.elements, device=device) for state in model.states]
    for index, master in enumerate(masters):
        weights.read(index, master)
    weights.close()
    trained = [master for state, master in zip(model.states, masters, strict=True) if not state.frozen]
    update = torch.optim.AdamW(trained, optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay)
    losses = []
    for number, micro_batches in enumerate(steps):
        for master in trained:
            master.grad = torch.zeros_like(master)
        run_step(layers, model, number, micro_batches, masters)
        losses.append(layers.end_step())
        update.step()
    final = {}
    for state, master in zip(model.states, masters, strict=True):
        used = torch.zeros(state.elements, dtype=torch.bool, device=device)
        for tensor in state.tensors:
            place = slice(tensor.offset, tensor.offset + tensor.elements)
            used[place] = True
            final[tensor.name] = master[place].view(tensor.shape).cpu()
        assert not master[~used].any(), "gaps and padding stay zero"
    return losses, final


def run_step(
    layers: Layers,
    model: StreamedModel,
    number: int,
    micro_batches: Sequence[MicroBatch],
    masters: Sequence[torch.Tensor],
) -> None:
    """One step's forward and backward; gradients are added to the masters' `grad`."""
    layers.begin_step(number, micro_batches)
    order = list(range(len(micro_batches)))
    spans = [m.input_ids.numel() * model.hidden_size for m in micro_batches]
    hidden: dict[tuple[int, int], torch.Tensor] = {}
    gradient: dict[int, torch.Tensor] = {}
    head = len(model.layers) - 1

    def streamed(layer: int) -> list[torch.Tensor]:
        return [masters[index].to(model.dtype) for index in model.layers[layer].states]

    for layer in range(head):
        for k in order:
            hidden[layer, k] = torch.empty(spans[k] + 5, dtype=model.dtype, device=masters[0].device)
            layers.forward(layer, k, streamed(layer), hidden.get((layer - 1, k)), hidden[layer, k])
        order.reverse()
    for layer in range(head, -1, -1):
        grads = [masters[index].grad for index in model.trained(layer)]
        for k in order:
            into = torch.empty_like(hidden[0, k]) if layer else None
            layers.backward(layer, k, streamed(layer), hidden.get((layer - 1, k)), gradient.get(k), into, grads)
            gradient[k] = into
        order.reverse()


def vanishing(path: Path, micro_batches: Sequence[MicroBatch], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Which elements of the key biases have a gradient that is rounding noise, by parameter: softmax sees nothing of
    them, or, where positions rotate, next to nothing.

    Adam makes whole steps of that noise, in plain PyTorch as here; float64 tells such elements apart, as those of which
    plain PyTorch's own rounding to `dtype` changes more than a tenth. Nowhere but in KEY_BIASES may an exact gradient
    be zero but for rounding.
    """
    exact, rounded = (reference.step_gradients(path, micro_batches, each) for each in (torch.float64, dtype))
    bound = 1e-12 * max(float(gradient.abs().max()) for gradient in exact.values())
    result = {}
    for name, gradient in exact.items():
        tiny = gradient.abs() < bound
        if name.endswith(KEY_BIASES):
            result[name] = tiny | ((rounded[name] - gradient).abs() > gradient.abs() / 10)
        assert name in result or not (tiny & (gradient != 0)).any(), f"{name} has gradients that are rounding noise"
    return result


def compare(
    path: Path,
    steps: Sequence[Sequence[MicroBatch]],
    dtype: torch.dtype,
    loss_bound: float,
    weight_bound: float,
    device: torch.device = CPU,
    head_chunks: Sequence[int | None] = (None,),
) -> None:
    """Trains once for each size of the head's chunks, and once plainly."""
    expected_losses, expected_weights = reference.train(path, steps, AdamW(), dtype)
    ignored = vanishing(path, steps[0], dtype)
    model = open_model(path, dtype)
    for chunk in head_chunks:
        losses, weights = train_streamed(model, steps, AdamW(), device, chunk)
        for number, (got, want) in enumerate(zip(losses, expected_losses, strict=True)):
            assert got == pytest.approx(want, rel=loss_bound), f"step {number}, chunks of {chunk}"
        assert weights.keys() == expected_weights.keys() - model.anatomy.unused
        for name in weights:
            want = expected_weights[name]
            difference = weights[name] - want
            if name in ignored:
                difference = difference[~ignored[name]]
            far = torch.linalg.vector_norm(difference)
            assert far <= weight_bound * torch.linalg.vector_norm(want), f"{name}, chunks of {chunk}"


ALONE = (1, False, (None, 7))
SEVERAL = (3, True, (5,))


@pytest.mark.parametrize(
    ("family", "tied", "micro_batches", "padded", "chunks"),
    [
        (family, tied, *kind)
        for number, family in enumerate(FAMILIES)
        for kind, tied in short_or_full(
            [(ALONE, False), (SEVERAL, True)][number % 2 :][: 2 - bool(number)],
            [(ALONE, False), (SEVERAL, True), (ALONE, True), (SEVERAL, False)],
        )
    ],
)
def test_training_equals_plain_pytorch(
    tmp_path: Path, family: str, tied: bool, micro_batches: int, padded: bool, chunks: tuple[int | None, ...]
) -> None:
    path = make_model(family, tmp_path / "model", layers=4 if family == "gemma3" else 3, tied=tied)
    steps = make_steps(STEPS, micro_batches, padded=padded)
    compare(path, steps, torch.float32, 5e-6, 1e-3, head_chunks=chunks)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_found_by_the_same_means(tmp_path: Path, family: str) -> None:
    path = make_model(family, tmp_path / "model")
    compare(path, make_steps(short_or_full(3, 4), 2, padded=True), torch.float32, 5e-6, 1e-3, head_chunks=(5,))


@pytest.mark.parametrize("family", short_or_full(("llama", "mistral", "gpt2", "bloom"), (*FAMILIES, *OTHERS)))
def test_padding_behind_all_rows_changes_nothing(tmp_path: Path, family: str) -> None:
    """Of random tokens, which plain PyTorch is told by the mask that is left away here."""
    path = make_model(family, tmp_path / "model")
    steps = make_steps(short_or_full(2, 3), 2, padded=False)
    for step in steps:
        for k, batch in enumerate(step):
            mask = torch.ones_like(batch.input_ids)
            mask[:, LENGTH - 5 - k :] = 0
            step[k] = MicroBatch(batch.input_ids, batch.labels.masked_fill(mask == 0, -100), mask)
    compare(path, steps, torch.float32, 5e-6, 1e-3)


@pytest.mark.parametrize(("micro_batches", "padded"), [(1, True), (3, False)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padding_and_micro_batches_are_independent(
    tmp_path: Path, family: str, micro_batches: int, padded: bool
) -> None:
    path = make_model(family, tmp_path / "model")
    compare(path, make_steps(STEPS, micro_batches, padded=padded), torch.float32, 5e-6, 1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt2", *({"mamba"} & set(OTHERS))])
def test_bf16_training_follows_plain_pytorch(tmp_path: Path, family: str) -> None:
    """Both round alike except where a whole model's backward adds gradients in another order than a layer's does."""
    odd = {"residual_in_fp32": False} if family == "mamba" else {}  # else it is refused, in test_model.py
    path = make_model(family, tmp_path / "model", **odd)
    compare(path, make_steps(STEPS, 3, padded=True), torch.bfloat16, 2e-3, 2e-2, head_chunks=(None, 5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_training_on_a_gpu_equals_plain_pytorch_on_a_cpu(tmp_path: Path, family: str) -> None:
    path = make_model(family, tmp_path / "model", tied=True)
    compare(path, make_steps(5, 2, padded=True), torch.float32, 1e-4, 5e-3, torch.device("cuda"), (5,))
