"""Attention over spans of tokens, forward and backward, with memory that grows with the row and not with its square.

Owns an operator of torch's, so that a block's graph holds it as one operation of a fixed shape whatever sequences a row
has, and which of torch's own kernels does the work: on a CPU its flash attention, one sequence after another, and where
a window is shorter than a sequence one block of tokens after another, each with a small mask; on a GPU its kernels for
sequences of several lengths, in one launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from .spans import Sequences, as_mask, sequences

_aten: Any = torch.ops.aten
BLOCK = 512
"""Tokens that are computed at once on a CPU, of a sequence longer than its window."""
_FLASH_WIDTH, _FLASH_MULTIPLE = 256, 8
"""Elements of a head at most, for flash attention on a GPU, and of what they are a multiple."""
_CAUSAL = 1
"""The mask of torch's other kernel on a GPU by which a token sees itself and those before it."""

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("ssdplan::attend_spans", mutates_args=())
def attend_spans(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's attention over the tokens of its span.

    query: [b, h, s, d]; key: [b, g, s, d]; value: [b, g, s, e]; all of one dtype, h a multiple of g. first: int32
    [b, 1, 1, s] on the CPU, spans of sequences (`spans.sequences`). scale: of the scores.
    Returns the result [b, h, s, e], whose heads lie side by side for each token, and the logarithms of the sums of the
    scores' exponentials [b, h, s], of fp32 or wider, which backward takes.
    """
    found = sequences(first)
    assert found is not None, "spans are of sequences with one window"
    width = value.shape[-1]
    given = _one_width(query, key, value)
    out, sums = (_cpu_forward if query.device.type == "cpu" else _gpu_forward)(given, found, scale)
    return _token_by_token(out[..., :width]), sums


@attend_spans.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _made_like(query, value.shape[-1]), _sums(query)


@torch.library.custom_op("ssdplan::attend_spans_backward", mutates_args=())
def attend_spans_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    first: torch.Tensor,
    scale: float,
) -> Three:
    """The gradients of query, key and value, of their shapes; `gradient` is that of `out`."""
    found = sequences(first)
    assert found is not None, "spans are of sequences with one window"
    given = _one_width(query, key, value)
    gradient, out = (_widened(each, given[0].shape[-1]) for each in (gradient, out))
    backward = _cpu_backward if query.device.type == "cpu" else _gpu_backward
    made = backward(gradient, given, out, sums, found, scale)
    one, two, three = (
        each[..., : like.shape[-1]].contiguous() for each, like in zip(made, (query, key, value), strict=True)
    )
    return one, two, three


@attend_spans_backward.register_fake
def _(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    first: torch.Tensor,
    scale: float,
) -> Three:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, first, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, first)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, key, value, out, sums, first = ctx.saved_tensors
    made = attend_spans_backward(gradient.contiguous(), query, key, value, out, sums, first, ctx.scale)
    return (*made, None, None)


attend_spans.register_autograd(_backward, setup_context=_setup)


def works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device's kernels give what a mask of pairs does, forward and backward, with a window and without.

    A CPU's are tested where ssdplan is; a GPU's are asked here, since which of them there are depends on the GPU, the
    dtype and torch's build.
    """
    if device.type == "cpu":
        return True
    for width, window in ((64, 1 << 30), (64, 24), (96, 1 << 30)):
        token = torch.arange(64, dtype=torch.int32)
        start = torch.where(token >= 40, 40, 0)
        first = torch.maximum(start, token - (window - 1)).to(torch.int32)[None, None, None]
        numbers = torch.Generator().manual_seed(3)
        given = [torch.randn(1, heads, 64, width, generator=numbers).to(device, dtype) for heads in (4, 2, 2)]
        try:
            ours, theirs = (_tried(each, given, first) for each in (_by_spans, _by_mask))
        except RuntimeError:  # torch's own, where a kernel does not take what it was given
            return False
        if not all(torch.allclose(one, other, rtol=0.05, atol=0.05) for one, other in zip(ours, theirs, strict=True)):
            return False
    return True


def _tried(attend: Any, given: list[torch.Tensor], first: torch.Tensor) -> list[torch.Tensor]:
    leaves = [each.clone().requires_grad_() for each in given]
    out = attend(*leaves, first)
    out.backward(torch.ones_like(out))
    return [out.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)]


def _by_spans(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = attend_spans(query, key, value, first, query.shape[-1] ** -0.5)[0]
    return out


def _by_mask(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    mask = as_mask(first, query.device)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def _sums(query: torch.Tensor) -> torch.Tensor:
    return query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))


def _made_like(query: torch.Tensor, width: int) -> torch.Tensor:
    """[b, h, s, width], as layers take the result: without a copy as [b, s, h width]."""
    rows, heads, tokens, _ = query.shape
    return query.new_empty(rows, tokens, heads, width).transpose(1, 2)


def _token_by_token(each: torch.Tensor) -> torch.Tensor:
    return each.transpose(1, 2).contiguous().transpose(1, 2)


def _widened(each: torch.Tensor, width: int) -> torch.Tensor:
    return each if each.shape[-1] == width else functional.pad(each, (0, width - each.shape[-1]))


def _one_width(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Three:
    """All with heads of one width, as kernels take them: with zeros behind, which change nothing."""
    width = max(query.shape[-1], value.shape[-1])
    if query.device.type != "cpu":
        width += -width % _FLASH_MULTIPLE
    return _widened(query, width), _widened(key, width), _widened(value, width)


# ---------------------------------------------------------------------------------------------------------------- CPU


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of one row that are computed at once: `queries` attend to `keys`."""

    row: slice
    queries: slice
    keys: slice
    window: int | None
    """None: each token sees all of `keys` up to itself."""

    def of(self, each: torch.Tensor, tokens: slice) -> torch.Tensor:
        return each[self.row, :, tokens]

    def mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What is added to scores, [queries, keys]; None where causal order is all."""
        if self.window is None:
            return None
        query = torch.arange(self.queries.start, self.queries.stop)[:, None]
        key = torch.arange(self.keys.start, self.keys.stop)
        hidden = (key > query) | (key <= query - self.window)
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _pieces(found: Sequences) -> Iterator[_Piece]:
    for row, begins in enumerate(found.begins):
        here = slice(row, row + 1)
        for begin, end in pairwise(begins):
            if found.window is None or end - begin <= found.window:
                yield _Piece(here, slice(begin, end), slice(begin, end), None)
                continue
            for start in range(begin, end, BLOCK):
                stop = min(start + BLOCK, end)
                keys = slice(max(begin, start - found.window + 1), stop)
                yield _Piece(here, slice(start, stop), keys, found.window)


def _cpu_forward(given: Three, found: Sequences, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = given
    out, sums = _made_like(query, query.shape[-1]), _sums(query)
    for piece in _pieces(found):
        one, two = _aten._scaled_dot_product_flash_attention_for_cpu(
            piece.of(query, piece.queries),
            piece.of(key, piece.keys),
            piece.of(value, piece.keys),
            0.0,
            piece.window is None,
            attn_mask=piece.mask(query.dtype),
            scale=scale,
        )
        piece.of(out, piece.queries).copy_(one)
        piece.of(sums, piece.queries).copy_(two)
    return out, sums


def _cpu_backward(
    gradient: torch.Tensor, given: Three, out: torch.Tensor, sums: torch.Tensor, found: Sequences, scale: float
) -> Three:
    """Keys of a window are taken by several pieces: their gradients are added in fp32, in the order of the tokens."""
    query, key, value = given
    wide = query.dtype if found.window is None else sums.dtype
    made = (
        query.new_empty(query.shape),
        *(each.new_zeros(each.shape, dtype=wide) for each in (key, value)),
    )
    for piece in _pieces(found):
        parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            piece.of(gradient, piece.queries),
            piece.of(query, piece.queries),
            piece.of(key, piece.keys),
            piece.of(value, piece.keys),
            piece.of(out, piece.queries),
            piece.of(sums, piece.queries),
            0.0,
            piece.window is None,
            attn_mask=piece.mask(query.dtype),
            scale=scale,
        )
        piece.of(made[0], piece.queries).copy_(parts[0])
        for whole, part in zip(made[1:], parts[1:], strict=True):
            piece.of(whole, piece.keys).add_(part)
    return made[0], made[1].to(key.dtype), made[2].to(value.dtype)


# ---------------------------------------------------------------------------------------------------------------- GPU


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Sequences of all rows, one behind the other, as kernels on a GPU are told of them."""

    begins: torch.Tensor
    longest: int
    window: int | None

    @classmethod
    def of(cls, found: Sequences, device: torch.device) -> _Lengths:
        tokens = found.begins[0][-1]
        begins = [row * tokens + begin for row, each in enumerate(found.begins) for begin in each[:-1]]
        begins.append(len(found.begins) * tokens)
        longest = max(end - begin for each in found.begins for begin, end in pairwise(each))
        return cls(torch.tensor(begins, dtype=torch.int32).to(device, non_blocking=True), longest, found.window)

    @property
    def order(self) -> dict[str, int]:
        """The window of flash attention: tokens before each one, and behind it."""
        return {"window_size_left": -1 if self.window is None else self.window - 1, "window_size_right": 0}


def _by_flash(query: torch.Tensor) -> bool:
    return query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= _FLASH_WIDTH


def _flat(each: torch.Tensor) -> torch.Tensor:
    """[b, h, s, d] as [b s, h, d]."""
    return each.transpose(1, 2).reshape(-1, each.shape[1], each.shape[3])


def _back(each: torch.Tensor, rows: int) -> torch.Tensor:
    """[b s, h, d] as [b, h, s, d]."""
    return each.view(rows, -1, *each.shape[1:]).transpose(1, 2)


def _gpu_forward(given: Three, found: Sequences, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows, lengths = given[0].shape[0], _Lengths.of(found, given[0].device)
    if not _by_flash(given[0]):
        (out, *_), _ = _efficient(given, lengths, scale)
        return _back(out[0], rows), _sums(given[0]).zero_()  # its sums have another form; backward makes them again
    out, sums, *_ = _aten._flash_attention_forward(
        *(_flat(each) for each in given),
        lengths.begins,
        lengths.begins,
        lengths.longest,
        lengths.longest,
        0.0,
        lengths.window is None,
        False,
        scale=scale,
        **lengths.order,
    )
    return _back(out, rows), sums.view(-1, rows, given[0].shape[2]).transpose(0, 1).contiguous()


def _efficient(given: Three, lengths: _Lengths, scale: float) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """What torch's memory-efficient kernel returns, and what it was given: as many heads of keys as of queries."""
    heads = given[0].shape[1]
    laid = tuple(_flat(each.repeat_interleave(heads // each.shape[1], 1))[None] for each in given)
    found = _aten._efficient_attention_forward(
        *laid,
        None,
        lengths.begins,
        lengths.begins,
        lengths.longest,
        lengths.longest,
        0.0,
        _CAUSAL,
        True,
        scale=scale,
        window_size=lengths.window,
    )
    return found, laid


def _gpu_backward(
    gradient: torch.Tensor, given: Three, out: torch.Tensor, sums: torch.Tensor, found: Sequences, scale: float
) -> Three:
    rows, lengths = given[0].shape[0], _Lengths.of(found, given[0].device)
    if _by_flash(given[0]):
        made = _aten._flash_attention_backward(
            _flat(gradient),
            *(_flat(each) for each in given),
            _flat(out),
            sums.transpose(0, 1).reshape(sums.shape[1], -1),
            lengths.begins,
            lengths.begins,
            lengths.longest,
            lengths.longest,
            0.0,
            lengths.window is None,
            torch.zeros(2, dtype=torch.uint64, device=gradient.device),
            torch.empty(0, device=gradient.device),
            scale=scale,
            **lengths.order,
        )
        one, two, three = (_back(each, rows) for each in made)
        return one, two, three
    (again, scores, seed, offset, *_), laid = _efficient(given, lengths, scale)
    parts = _aten._efficient_attention_backward(
        _flat(gradient)[None],
        *laid,
        None,
        again,
        lengths.begins,
        lengths.begins,
        lengths.longest,
        lengths.longest,
        scores,
        0.0,
        seed,
        offset,
        _CAUSAL,
        False,
        scale=scale,
        window_size=lengths.window,
    )
    one, two, three = (_grouped(_back(part[0], rows), like) for part, like in zip(parts[:3], given, strict=True))
    return one, two, three


def _grouped(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient of heads that several queries share, from that of each of these."""
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)
