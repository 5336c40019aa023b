"""What each token of a row attends to, where that is a span: from one first token up to itself.

Owns the form of it that a layer is called with in place of a mask: the first token of each span, int32 [b, 1, 1, s] on
the CPU, 4 bytes a token where a mask has a byte a pair. Owns how that form is found from the functions by which
transformers describes a mask, and which sequences and what window it stands for. Nothing here computes attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

Visible = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(row, head, token, other token), int64 tensors that broadcast -> whether the token attends to the other one."""


def first_visible(visible: Visible, rows: int, tokens: int, device: torch.device | str) -> torch.Tensor | None:
    """The first token that each one attends to; None where `visible` does not make spans of sequences side by side.

    `visible` is asked for few pairs: each span's first token is searched by halving, then the tokens around both ends
    of each span are looked at. Tensors without numbers have spans without numbers.
    """
    row = torch.arange(rows, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    token = torch.arange(tokens, device=device)[None, None, :, None]

    def sees(other: torch.Tensor) -> torch.Tensor:
        return visible(row, head, token, other).expand(rows, 1, tokens, 1)

    low = torch.zeros(rows, 1, tokens, 1, dtype=torch.int64, device=device)
    high = token.expand_as(low)
    for _ in range(tokens.bit_length()):
        middle = (low + high) // 2
        seen = sees(middle)
        low, high = torch.where(seen, low, torch.minimum(middle + 1, high)), torch.where(seen, middle, high)
    if isinstance(high, FakeTensor):
        return torch.zeros(rows, 1, 1, tokens, dtype=torch.int32)
    begins = sees(high) & ((high == 0) | ~sees((high - 1).clamp(min=0)))
    ends = sees(token) & ((token == tokens - 1) | ~sees((token + 1).clamp(max=tokens - 1)))
    if not bool((begins & ends).all()):
        return None
    first = high.view(rows, 1, 1, tokens).to("cpu", torch.int32)
    return None if sequences(first) is None else first


def is_spans(mask: torch.Tensor | None) -> bool:
    """Whether an attention's mask is first tokens of spans; masks of pairs are bool or of a floating type."""
    return mask is not None and mask.dtype is torch.int32 and mask.dim() == 4


def as_mask(first: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The mask of pairs that spans stand for: bool [b, 1, s, s], true where a token attends to another."""
    first = first.to(device).transpose(2, 3)
    token = torch.arange(first.shape[2], device=device)
    return (token >= first) & (token <= token[:, None])


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of some rows, and the window that limits what their tokens see."""

    begins: tuple[tuple[int, ...], ...]
    """Of each row the first token of each sequence, then the number of all tokens."""
    window: int | None
    """Tokens that each one sees at most, itself included; None where no sequence is longer than that."""


def sequences(first: torch.Tensor) -> Sequences | None:
    """What `first`, int32 [b, 1, 1, s], stands for; None where that is no sequences with one window."""
    tokens = first.shape[-1]
    token = torch.arange(tokens, dtype=torch.int32).expand(first.shape)
    alone = first == token
    start = torch.where(alone, token, -1).cummax(-1).values
    limited = (first > start).nonzero()
    window = None
    if limited.numel():
        at = tuple(limited[0].tolist())
        window = at[-1] - int(first[at]) + 1
        start = torch.maximum(start, token - (window - 1))
    if not torch.equal(start, first):
        return None
    return Sequences(tuple((*row.nonzero().flatten().tolist(), tokens) for row in alone[:, 0, 0]), window)
