"""Attention over spans of tokens beside masks of pairs: the same numbers, in memory that grows with the row."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, masking_utils

from ssdplan.executor.model.attention import kernel
from ssdplan.executor.model.attention.by_spans import BY_SPANS, settle
from ssdplan.executor.model.attention.kernel import attend_spans, works_on
from ssdplan.executor.model.attention.spans import as_mask, first_visible, is_spans, sequences
from ssdplan.executor.model.layers import Layers, MicroBatch
from tests.executor.model.test_layers import CPU, Step, opened, run
from tests.made.models import make_model

ROWS = (
    ([[16]], None),
    ([[5, 1, 10], [16]], None),
    ([[1] * 7, [3, 4]], None),
    ([[5, 1, 10], [16]], 4),
    ([[40, 25], [65]], 7),
    ([[16]], 1),
)


def spans(rows: Sequence[Sequence[int]], window: int | None) -> torch.Tensor:
    """First tokens by what they mean, token by token."""
    found = []
    for lengths in rows:
        begin, row = 0, []
        for length in lengths:
            row += [max(begin, token - (window or length) + 1) for token in range(begin, begin + length)]
            begin += length
        found.append([[row]])
    return torch.tensor(found, dtype=torch.int32)


def pairs(first: torch.Tensor) -> torch.Tensor:
    tokens = first.shape[-1]
    seen = [
        [[[int(first[row, 0, 0, token]) <= other <= token for other in range(tokens)] for token in range(tokens)]]
        for row in range(first.shape[0])
    ]
    return torch.tensor(seen)


@pytest.mark.parametrize(("rows", "window"), ROWS)
def test_spans_are_found_from_pairs_and_stand_for_them(rows: list[list[int]], window: int | None) -> None:
    first = spans(rows, window)
    mask = pairs(first)
    assert torch.equal(as_mask(first, CPU), mask) and is_spans(first) and not is_spans(mask)
    found = first_visible(lambda row, head, token, other: mask[row, head, token, other], len(rows), mask.shape[2], CPU)
    assert found is not None and torch.equal(found, first)
    told = sequences(first)
    assert told is not None
    if window != 1:  # each token of which is a sequence
        assert told.begins == tuple((0, *torch.tensor(lengths).cumsum(0).tolist()) for lengths in rows)
    limited = window is not None and any(length > window > 1 for lengths in rows for length in lengths)
    assert told.window == (window if limited else None)


@pytest.mark.parametrize(
    "oddity", ["a token looks ahead", "a hole", "nobody sees itself", "two windows", "the first sees nothing"]
)
def test_what_is_no_span_stays_a_mask(oddity: str) -> None:
    mask = pairs(spans([[16]], 4))[:, :, :, :]
    if oddity == "a token looks ahead":
        mask[0, 0, 5, 6] = True
    elif oddity == "a hole":
        mask[0, 0, 9, 7] = False
        mask[0, 0, 9, 2:4] = True
    elif oddity == "nobody sees itself":
        mask[0, 0].fill_diagonal_(False)
    elif oddity == "two windows":
        mask[0, 0, 15, 10] = mask[0, 0, 15, 11] = True
    else:
        mask[0, 0, 0] = False
    assert first_visible(lambda row, head, token, other: mask[row, head, token, other], 1, 16, CPU) is None


def by_softmax(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: torch.Tensor, scale: float
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~pairs(first), -math.inf)
    return scores.softmax(-1) @ value


def given(rows: int, tokens: int, dtype: torch.dtype, value_width: int = 16) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(7)
    shapes = ((4, 24), (2, 24), (2, value_width))
    return [torch.randn(rows, heads, tokens, width, generator=numbers).to(dtype) for heads, width in shapes]


def results(attend: Any, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [each.clone().requires_grad_() for each in leaves]
    out = attend(*leaves)
    (out * torch.arange(out.numel()).view(out.shape).remainder(7)).sum().backward()
    return [out.detach(), *(each.grad for each in leaves if each.grad is not None)]


@pytest.mark.parametrize("value_width", [16, 24, 32])
@pytest.mark.parametrize(("rows", "window"), ROWS)
def test_attention_is_the_softmax_over_spans_forward_and_backward(
    rows: list[list[int]], window: int | None, value_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 8)
    first = spans(rows, window)
    inputs = given(len(rows), first.shape[-1], torch.float64, value_width)
    ours = results(lambda *each: attend_spans(*each, first, 0.2)[0], inputs)
    theirs = results(lambda *each: by_softmax(*each, first, 0.2), inputs)
    assert len(ours) == 4
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, *(e.numel() for e in tree_leaves(found) if isinstance(e, torch.Tensor)), 0)
        return found


@pytest.mark.parametrize("window", [None, 48])
def test_no_tensor_grows_with_the_square_of_a_row(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 32)
    tokens = 1024
    first = spans([[700, 324]], window)
    inputs = [each[:, :1, :, :8].clone().requires_grad_() for each in given(1, tokens, torch.float32)]
    with _Largest() as largest:
        out, _ = attend_spans(*inputs, first, 0.3)
        out.sum().backward()
    assert 8 * tokens <= largest.elements < 16 * tokens, "the window's masks are of a block and a window"


# What a GPU's kernels are told, by stand-ins that take what torch's documentation of them says


def _flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, begins: torch.Tensor, also: torch.Tensor,
    longest: int, also_longest: int, dropout: float, causal: bool, debug: bool, *, scale: float,
    window_size_left: int, window_size_right: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """[tokens, heads, width] of sequences one behind the other."""
    assert begins.dtype is torch.int32 and torch.equal(begins, also) and not dropout and not debug
    lengths = begins.diff()
    assert int(lengths.max()) == longest == also_longest and int(begins[-1]) == query.shape[0]
    assert causal == (window_size_left == -1) and window_size_right == 0 and query.shape[2] % 8 == 0
    first = spans([lengths.tolist()], None if window_size_left < 0 else window_size_left + 1)
    out = by_softmax(*(each.transpose(0, 1)[None] for each in (query, key, value)), first, scale)
    return out[0].transpose(0, 1), torch.zeros(query.shape[1], query.shape[0]), *([torch.zeros(2)] * 3)


def _flash_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    sums: torch.Tensor, begins: torch.Tensor, also: torch.Tensor, longest: int, also_longest: int, dropout: float,
    causal: bool, state: torch.Tensor, unused: torch.Tensor, **order: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    assert sums.shape == (query.shape[1], query.shape[0]) and out.shape == gradient.shape == query.shape
    leaves = [each.detach().clone().requires_grad_() for each in (query, key, value)]
    with torch.enable_grad():
        again = _flash_forward(*leaves, begins, also, longest, also_longest, dropout, causal, False, **order)[0]
    assert torch.equal(again, out)
    return torch.autograd.grad(again, leaves, gradient)


def _efficient_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: None, begins: torch.Tensor, also: torch.Tensor,
    longest: int, also_longest: int, dropout: float, kind: int, sums: bool, *, scale: float, window_size: int | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """[1, tokens, heads, width], as many heads of keys as of queries."""
    assert kind == 1 and sums and query.shape[0] == 1 and query.shape[2] == key.shape[2] == value.shape[2]
    window = -1 if window_size is None else window_size - 1
    out, *_ = _flash_forward(
        query[0], key[0], value[0], begins, also, longest, also_longest, dropout, window < 0, False,
        scale=scale, window_size_left=window, window_size_right=0,
    )  # fmt: skip
    return out[None], torch.ones(3), torch.zeros(1), torch.zeros(1)


def _efficient_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: None, out: torch.Tensor,
    begins: torch.Tensor, also: torch.Tensor, longest: int, also_longest: int, sums: torch.Tensor, dropout: float,
    seed: torch.Tensor, offset: torch.Tensor, kind: int, of_bias: bool, **order: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    assert sums.shape == (3,) and not of_bias
    leaves = [each.detach().clone().requires_grad_() for each in (query, key, value)]
    with torch.enable_grad():
        again = _efficient_forward(
            *leaves, None, begins, also, longest, also_longest, dropout, kind, True, **order
        )[0]  # fmt: skip
    assert torch.equal(again, out)
    return (*torch.autograd.grad(again, leaves, gradient), None)


class _Kernels:
    _flash_attention_forward = staticmethod(_flash_forward)
    _flash_attention_backward = staticmethod(_flash_backward)
    _efficient_attention_forward = staticmethod(_efficient_forward)
    _efficient_attention_backward = staticmethod(_efficient_backward)


@pytest.mark.parametrize("by_flash", [True, False])
@pytest.mark.parametrize(("rows", "window"), ROWS)
def test_a_gpus_kernels_are_given_what_spans_say(
    rows: list[list[int]], window: int | None, by_flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_aten", _Kernels)
    monkeypatch.setattr(kernel, "_by_flash", lambda query: by_flash)
    first = spans(rows, window)
    found = sequences(first)
    assert found is not None
    query, key, value = inputs = given(len(rows), first.shape[-1], torch.float64, 24)
    out, sums = kernel._gpu_forward((query, key, value), found, 0.2)
    backward = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    ours = [out, *kernel._gpu_backward(backward, (query, key, value), out, sums, found, 0.2)]
    leaves = [each.clone().requires_grad_() for each in inputs]
    expected = by_softmax(*leaves, first, 0.2)
    for one, other in zip(ours, [expected, *torch.autograd.grad(expected, leaves, backward)], strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-10, atol=1e-10)


def test_a_gpu_without_such_kernels_keeps_masks_of_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As does one whose kernels give other numbers."""
    elsewhere = torch.device("meta")
    monkeypatch.setattr(kernel, "_tried", lambda attend, given, first: [torch.ones(3)])
    assert works_on(elsewhere, torch.bfloat16)
    monkeypatch.setattr(kernel, "_tried", lambda attend, *_: [torch.ones(3) * (1 if attend is kernel._by_mask else 2)])
    assert not works_on(elsewhere, torch.bfloat16)

    def refuses(*_: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(kernel, "_tried", refuses)
    assert not works_on(elsewhere, torch.bfloat16)
    step = opened(make_model("llama", tmp_path / "llama"), alone=True)
    assert step.model.module.config._attn_implementation == BY_SPANS and not step.layers.lacks_spans
    assert settle(step.model.module, True, elsewhere, torch.bfloat16)
    assert step.model.module.config._attn_implementation == "sdpa"


# Models


def packed(*rows: Sequence[int]) -> MicroBatch:
    ids = torch.randint(3, 97, (len(rows), sum(rows[0])), generator=torch.Generator().manual_seed(3))
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])
    return MicroBatch(ids, ids.masked_fill(positions == 0, -100), None, positions)


def padded(length: int, *ends: int) -> MicroBatch:
    ids = torch.randint(3, 97, (len(ends), length), generator=torch.Generator().manual_seed(4))
    mask = (torch.arange(length) < torch.tensor(ends)[:, None]).long()
    return MicroBatch(ids, ids.masked_fill(mask == 0, -100), mask)


def masks_of(step: Step) -> list[torch.Tensor]:
    """What blocks were called with that is a mask or stands for one."""
    calls = [(call.args, call.kwargs) for each in step.layers._calls.values() for call in each]
    return [
        each for each in tree_leaves(calls) if isinstance(each, torch.Tensor) and each.dim() == 4
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("gpt2", {}),
        ("gemma3", {"sliding_window": 5}),
        ("mistral", {"sliding_window": 5}),
    ],
)
@pytest.mark.parametrize("batch", [packed([9, 2, 5], [16]), padded(16, 16, 9)], ids=["packed", "padded"])
def test_rows_cost_what_masks_of_pairs_do_without_them(
    tmp_path: Path, family: str, fields: dict[str, Any], batch: MicroBatch
) -> None:
    path = make_model(family, tmp_path / family, **fields)
    ours, theirs = opened(path, alone=True), opened(path, alone=True)
    theirs.layers = Layers(theirs.model, CPU)
    settle(theirs.model.module, False, CPU, torch.float32)
    theirs.layers._needs_mask = lambda batch: batch.attention_mask is not None  # type: ignore[method-assign]
    losses, found = [], []
    for step in (ours, theirs):
        step.batches = [batch]
        step.layers.begin_step(0, step.batches)
        step.vertical()
        found.append(masks_of(step))
        losses.append(step.layers.end_step())
    assert all(is_spans(mask) for mask in found[0]), "no mask of pairs"
    assert {mask.dtype for mask in found[1]} == {torch.bool}
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert ours.gradients.keys() == theirs.gradients.keys()
    for key, gradients in ours.gradients.items():
        for one, other in zip(gradients, theirs.gradients[key], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_long_row_within_a_window_needs_no_mask_of_pairs(tmp_path: Path) -> None:
    step = opened(make_model("mistral", tmp_path / "mistral", sliding_window=5), alone=True)
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(3))
    run(step, [MicroBatch(ids, ids)], "vertical")
    step.layers.begin_step(1, [MicroBatch(ids, ids)])
    step.forward(0, 0)
    found = masks_of(step)
    assert found and all(is_spans(mask) for mask in found)


def test_transformers_masks_are_called_as_they_are_here() -> None:
    """By its own functions, for a configuration that attends by spans: several sequences, each with chunks."""
    config = LlamaConfig(num_hidden_layers=1, attention_chunk_size=4)
    positions = packed([9, 2, 5], [16]).position_ids
    hidden = torch.zeros(2, 16, 8)
    found = {}
    for name in (BY_SPANS, "sdpa"):
        config._attn_implementation = name
        found[name] = masking_utils.create_chunked_causal_mask(config, hidden, None, None, position_ids=positions)
    assert is_spans(found[BY_SPANS])
    assert torch.equal(as_mask(found[BY_SPANS], CPU), found["sdpa"])
