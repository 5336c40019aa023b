"""The head in chunks of tokens: the same loss and gradients, memory that a chunk bounds, heads that cannot be cut."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.inspection.inspection import inspect
from ssdplan.executor.model.layers import Layers, MicroBatch
from ssdplan.executor.model.model import StreamedModel, open_model
from ssdplan.executor.model.weights import Weights
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import train
from ssdplan.native import process
from ssdplan.plans.documents.profile import LEAST_CHUNK_TOKENS, LOGITS_CHUNK_BYTES, logits_chunk_tokens
from ssdplan.plans.errors import MismatchError
from tests import reference
from tests.bounds import HANG_SECONDS
from tests.executor.runs import LENGTH as LENGTH_OF_RUNS
from tests.executor.runs import prepare
from tests.extent import FULL, short_or_full
from tests.made.models import make_model
from tests.made.plans import make_plan

CPU = torch.device("cpu")
ROWS, LENGTH = 3, 11
CHUNKS = (1, 4, 10, 11, 22, 32)
"""Tokens of 33: one at a time, within rows and across their ends, whole rows, and all but one."""


def padded(seed: int = 0) -> MicroBatch:
    """Three rows: one padded, one without any label, one with labels that are not counted here and there."""
    ids = torch.randint(3, 97, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, 5:], labels[0, 5:] = 0, -100
    labels[1] = -100
    labels[2, [4, 10]] = -100  # its first is counted by no one: what precedes it ends a row
    return MicroBatch(ids, labels, mask)


class Head:
    """A model's head with real weights, on hidden states of unit scale."""

    def __init__(self, model: StreamedModel, batches: Sequence[MicroBatch]) -> None:
        self.model, self.batches = model, batches
        self.index = len(model.layers) - 1
        weights = Weights(model)
        states = [model.states[index] for index in model.layers[-1].states]
        self.weights = [torch.zeros(state.elements, dtype=model.dtype) for state in states]
        for index, flat in zip(model.layers[-1].states, self.weights, strict=True):
            weights.read(index, flat)
        weights.close()
        generator = torch.Generator().manual_seed(3)
        self.hidden = [
            torch.randn(batch.input_ids.numel() * model.hidden_size, generator=generator).to(model.dtype)
            for batch in batches
        ]

    def train(self, chunk: int | None) -> tuple[float, list[torch.Tensor], list[torch.Tensor]]:
        """The loss over all micro-batches, the gradients of the hidden states, and the head's."""
        layers = Layers(self.model, CPU, head_chunk_tokens=chunk)
        layers.begin_step(0, self.batches)
        gradients = [torch.zeros(flat.numel()) for flat in self.weights]
        of_hidden = [torch.full_like(hidden, float("nan")) for hidden in self.hidden]
        for k, (hidden, into) in enumerate(zip(self.hidden, of_hidden, strict=True)):
            layers.backward(self.index, k, self.weights, hidden, None, into, gradients)
        return layers.end_step(), of_hidden, gradients

    def evaluate(self, chunk: int | None) -> float:
        layers = Layers(self.model, CPU, head_chunk_tokens=chunk)
        layers.begin_step(0, self.batches, training=False)
        for k, hidden in enumerate(self.hidden):
            layers.loss(k, self.weights, hidden)
        return layers.end_step()


def by_hand(head: Head, path: Path) -> tuple[float, list[torch.Tensor], dict[str, torch.Tensor]]:
    """What `train` returns, in float64: the whole model in memory, its last block's output replaced."""
    plain = reference.load(path, torch.float64).train()
    leaves = [
        hidden.double().view(*batch.input_ids.shape, head.model.hidden_size).requires_grad_()
        for hidden, batch in zip(head.hidden, head.batches, strict=True)
    ]
    blocks = plain.get_submodule(head.model.anatomy.blocks_path)
    assert isinstance(blocks, nn.ModuleList)
    last, total = blocks[-1], 0.0
    tokens = torch.tensor(sum(batch.label_tokens() for batch in head.batches))
    for leaf, batch in zip(leaves, head.batches, strict=True):

        def replaced(module: nn.Module, args: object, out: object, leaf: torch.Tensor = leaf) -> object:
            return (leaf, *out[1:]) if isinstance(out, tuple) else leaf

        handle = last.register_forward_hook(replaced)
        out = plain(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels,
            num_items_in_batch=tokens,
        )  # fmt: skip
        handle.remove()
        out.loss.backward()
        total += float(out.loss.detach())
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return total, [leaf.grad.reshape(-1) for leaf in leaves if leaf.grad is not None], gradients


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> bool:
    return bool(torch.linalg.vector_norm(got.double() - want) <= bound * torch.linalg.vector_norm(want.double()))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma2", "bloom"])
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(tmp_path: Path, family: str) -> None:
    """Against float64 with the model whole: every chunk is as near to it as all logits at once are."""
    path = make_model(family, tmp_path / "model", tied=family != "llama")
    model = open_model(path, torch.float32)
    head = Head(model, [padded(), padded(1)])
    loss, of_hidden, gradients = by_hand(head, path)
    for chunk in (None, *CHUNKS):
        got_loss, got_hidden, got = head.train(chunk)
        assert got_loss == pytest.approx(loss, rel=1e-6), chunk
        assert all(close(a, b, 2e-6) for a, b in zip(got_hidden, of_hidden, strict=True)), chunk
        for index, flat in zip(model.layers[-1].states, got, strict=True):
            for tensor in model.states[index].tensors:
                part = flat[tensor.offset : tensor.offset + tensor.elements].view(tensor.shape)
                assert close(part, gradients[tensor.name], 2e-6), (chunk, tensor.name)
        assert head.evaluate(chunk) == pytest.approx(loss, rel=1e-6), chunk


def test_tokens_that_predict_nothing_have_no_gradient(tmp_path: Path) -> None:
    """The second row, what is padding, the last of each row, and what precedes a label that is not counted."""
    head = Head(open_model(make_model("llama", tmp_path / "model"), torch.float32), [padded()])
    silent = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    silent[0, 4:] = silent[1] = silent[:, -1] = True
    silent[2, [3, 9]] = True
    for chunk in (None, *CHUNKS):
        (gradient,) = head.train(chunk)[1]
        reached = gradient.view(ROWS, LENGTH, -1).abs().amax(-1) > 0
        assert torch.equal(reached, ~silent), chunk


def test_a_chunking_gives_the_same_bits_again(tmp_path: Path) -> None:
    head = Head(open_model(make_model("llama", tmp_path / "model"), torch.bfloat16), [padded(), padded(1)])
    whole = head.train(None)
    for chunk in CHUNKS:
        one, other = head.train(chunk), head.train(chunk)
        assert one[0] == other[0]
        assert all(torch.equal(a, b) for i in (1, 2) for a, b in zip(one[i], other[i], strict=True))
        assert all(close(a, b.double(), 2e-2) for i in (1, 2) for a, b in zip(one[i], whole[i], strict=True))
    for chunk in (66, 33):  # all in one chunk is the whole, to the bit
        again = head.train(chunk)
        assert again[0] == whole[0]
        assert all(torch.equal(a, b) for i in (1, 2) for a, b in zip(again[i], whole[i], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_bounds_the_workspace(tmp_path: Path, dtype: torch.dtype) -> None:
    """Ten times the tokens take no byte more than two chunks of them; all at once they take ten times as many."""
    model = open_model(make_model("llama", tmp_path / "model", vocab=3000, max_position_embeddings=512), dtype)
    device, chunk = EmulatedDevice(), 24

    def peaks(tokens: int, chunk: int | None) -> tuple[int, int]:
        ids = torch.randint(3000, (2, tokens // 2), generator=torch.Generator().manual_seed(0))
        head = Head(model, [MicroBatch(ids, ids)])
        layers = Layers(model, CPU, head_chunk_tokens=chunk)
        layers.begin_step(0, head.batches)
        gradients, into = [torch.zeros(flat.numel()) for flat in head.weights], torch.empty_like(head.hidden[0])
        _, forward = device.peak_bytes(lambda: layers.loss(0, head.weights, head.hidden[0]))
        _, backward = device.peak_bytes(
            lambda: layers.backward(head.index, 0, head.weights, head.hidden[0], None, into, gradients)
        )
        return forward, backward

    few, many = peaks(2 * chunk, chunk), peaks(20 * chunk, chunk)
    assert few == many
    assert peaks(20 * chunk + 10, chunk) == many, "nor where the last chunk is a part"
    logits = 4 * chunk * 3000
    assert logits < many[0] < 3 * logits and 2 * logits < many[1] < 4 * logits
    for cut, whole in zip(many, peaks(20 * chunk, None), strict=True):
        assert whole > 12 * cut


def growth_beyond_workspace(path: Path, dtype: torch.dtype, tokens: int) -> int:
    """Bytes that a process takes beyond what a head's tensors take at once and what the library that multiplies
    matrices takes for itself, where large tensors of a block were before."""
    process.settle_heap()
    torch.set_num_threads(1)
    model = open_model(path, dtype)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    head = Head(model, [MicroBatch(ids, ids)])
    layers = Layers(model, CPU)
    layers.begin_step(0, head.batches)
    gradients, into = [torch.zeros(flat.numel()) for flat in head.weights], torch.empty_like(head.hidden[0])
    process.keep_large(True)
    pieces = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in (64 << 20, 1 << 10)]
    del pieces[0]  # a place in the heap, which even what would else be mapped by itself comes to

    def backward() -> None:
        layers.backward(head.index, 0, head.weights, head.hidden[0], None, into, gradients)

    _, workspace = EmulatedDevice().peak_bytes(backward)
    growth = process.growth_bytes(lambda: [backward() for _ in range(4)])
    assert growth is not None
    return growth - workspace - scratch_bytes(model, head, tokens)


def scratch_bytes(model: StreamedModel, head: Head, tokens: int) -> int:
    """What the library takes for a head's three products, its result given: an fp32 copy of a bf16 result, on
    processors without instructions for bf16; nothing in fp32."""
    weight = torch.randn(head.weights[-1].numel() // model.hidden_size, model.hidden_size).to(model.dtype)
    hidden = torch.randn(tokens, model.hidden_size).to(model.dtype)
    logits = torch.empty(tokens, weight.shape[0], dtype=model.dtype)
    into_weight, into_hidden = torch.empty_like(weight), torch.empty_like(hidden)

    def products() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits.t(), hidden, out=into_weight)
        torch.mm(logits, weight, out=into_hidden)

    products()
    for tensor in (into_weight, into_hidden, logits):
        tensor.zero_()
    growth = process.growth_bytes(products)
    assert growth is not None
    return growth


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [(torch.float32, 64), (torch.bfloat16, 64), *([(torch.bfloat16, 256)] if FULL else [])],
)
def test_the_process_takes_no_more_than_the_heads_tensors(tmp_path: Path, dtype: torch.dtype, tokens: int) -> None:
    """Logits, and what a loss makes of them, lie in malloc's heap; those that are gone when the gradient of the weights
    comes, 5 to 31 MB and the largest, or the loss's own gradients in fp32, are not there any more."""
    vocab, hidden = short_or_full((20000, 128), (30000, 256))
    path = make_model("llama", tmp_path / "model", vocab=vocab, hidden=hidden, layers=1, max_position_embeddings=256)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        assert fresh.submit(growth_beyond_workspace, path, dtype, tokens).result(timeout=HANG_SECONDS) < 2 << 20


class Neighbours(nn.Module):
    """A final norm that also looks at the position before."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before = nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return self.norm(hidden + 0.01 * before)


class Ramp(Neighbours):
    """One that scales by the position."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden) * (1 + torch.arange(hidden.shape[1])[:, None] / 100)


class Long(Neighbours):
    """One that takes no row of one token."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[1] < 2:
            raise ValueError("too short")
        return self.norm(hidden)


def odd_model(path: Path, kind: type[Neighbours]) -> PreTrainedModel:
    with init_empty_weights(include_buffers=False):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    module.config.use_cache = False
    module.model.norm = kind(module.model.norm)
    return module


@pytest.mark.parametrize("kind", [Neighbours, Ramp, Long])
def test_a_head_that_is_not_position_wise_is_found_out(tmp_path: Path, kind: type[Neighbours]) -> None:
    path = make_model("llama", tmp_path / "model")
    assert inspect(odd_model(path, Neighbours)).blocks_path == "model.layers", "it streams all the same"
    assert not inspect(odd_model(path, kind)).head_is_position_wise


def test_a_head_that_cannot_be_cut_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssdplan.executor.model.inspection.inspection.head_kind", lambda *args, **kwargs: "whole")
    model = open_model(make_model("llama", tmp_path / "model"), torch.float32)
    with pytest.raises(MismatchError, match="head_chunk_tokens = 8, but the head of LlamaForCausalLM cannot be cut"):
        Layers(model, CPU, head_chunk_tokens=8)
    Head(model, [padded()]).train(None)


def test_a_run_takes_the_chunk_of_its_plan(tmp_path: Path) -> None:
    """Serial and overlapped the same bits; losses and memory are those of the chunk that the plan has."""
    directory = prepare(tmp_path)
    model = open_model(directory / "llama", torch.float32)
    weights, losses, peaks = [], [], []
    for number, (chunk, serial) in enumerate([(None, False), (7, True), (7, False)]):
        plan = make_plan(model, sequence_length=LENGTH_OF_RUNS, alpha=0.3)
        plan = plan.model_copy(update={"model": plan.model.model_copy(update={"head_chunk_tokens": chunk})})
        out = tmp_path / f"run-{number}"
        result = train(
            plan, model, EmulatedDevice(), data=directory / "text.txt", out=out,
            recipe=Recipe(steps=2, optimizer=AdamW(lr=1e-3), serial=serial), eval_data=directory / "held-out.txt",
        )  # fmt: skip
        weights.append((out / "model" / "model.safetensors").read_bytes())
        losses.append([*result.losses, *result.eval_losses.values()])
        peaks.append(next(row.measured for row in result.compared if row.quantity == "peak_device_bytes"))
    assert weights[1] == weights[2] and losses[1] == losses[2]
    assert weights[0] != weights[1], "additions in another order"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert peaks[1] == peaks[2] < peaks[0]


def test_a_large_gpu_takes_longer_chunks() -> None:
    """A fortieth of its memory for logits, and at most four times the usual."""
    usual = logits_chunk_tokens(128256)
    assert [logits_chunk_tokens(128256, gib << 30) // usual for gib in (0, 12, 24, 48, 80, 180)] == [1, 1, 1, 2, 4, 4]


@pytest.mark.parametrize("vocab", [97, 32000, 50257, 65536, 128256, 256000, 262144, 10**7])
def test_the_rule_keeps_logits_small_and_chunks_long(vocab: int) -> None:
    chunk = logits_chunk_tokens(vocab)
    assert chunk.bit_count() == 1 and chunk >= LEAST_CHUNK_TOKENS
    if chunk > LEAST_CHUNK_TOKENS:
        assert 4 * vocab * chunk <= LOGITS_CHUNK_BYTES < 4 * vocab * 2 * chunk
