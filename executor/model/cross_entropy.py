"""The loss of logits on the CPU, whose gradient is made where the probabilities were.

Owns that function, with the bits of transformers' ForCausalLMLoss. That one makes four arrays of [tokens, vocabulary]
in fp32: the logits, their log-probabilities, the gradient of these, and that of the logits. Pages for them came anew
for each micro-batch, which was a third of a head's time (50 of 170 ms at 256 tokens and a vocabulary of 32,000). Here
one array serves for all four, a few rows at a time, by the same kernels of torch; where no gradient is wanted, the same
array for all micro-batches.
"""

from typing import Any

import torch
from torch import nn

from .template import IGNORED_LABEL

_SLICE_ELEMENTS = 1 << 20
"""Logits that go through all kernels before the next ones come: 4 MiB, which caches hold."""


class Room:
    """Memory for log-probabilities, which losses without a gradient use one after the other."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.float32)

    def array(self, shape: torch.Size) -> torch.Tensor:
        """fp32 of that shape, which holds anything; it is overwritten by what is asked for next."""
        if self._flat.numel() < shape.numel():
            self._flat = torch.empty(0, dtype=torch.float32)  # the smaller one is gone first
            self._flat = torch.empty(shape.numel(), dtype=torch.float32)
        return self._flat[: shape.numel()].view(shape)

    def clear(self) -> None:
        """Free it."""
        self._flat = torch.empty(0, dtype=torch.float32)


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, normaliser: torch.Tensor, room: Room | None = None
) -> torch.Tensor:
    """The sum of the losses of logits [..., vocabulary] of any floating dtype for labels int64 [tokens], over
    `normaliser`, int64 []; fp32 []. A token whose label is `IGNORED_LABEL` counts nothing. Its gradient can be taken
    once. `room`: where probabilities lie if no gradient is wanted."""
    if torch.is_grad_enabled() and logits.requires_grad:
        return _CrossEntropy.apply(logits, labels, normaliser)
    return _loss(_log_probabilities(logits, room), labels, normaliser)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
        ctx.array, ctx.labels, ctx.normaliser = _log_probabilities(logits), labels, normaliser
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return _loss(ctx.array, labels, normaliser)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        array: torch.Tensor = ctx.array
        del ctx.array
        given = array if ctx.dtype == torch.float32 else torch.empty_like(array, dtype=ctx.dtype)
        rows = _rows_at_once(array)
        of_slice = torch.zeros(min(rows, len(array)), array.shape[1], dtype=torch.float32)
        minus = -(gradient / ctx.normaliser)
        for labels, of_tokens, wanted in zip(ctx.labels.split(rows), array.split(rows), given.split(rows), strict=True):
            part = of_slice[: len(of_tokens)]
            counted = labels != IGNORED_LABEL
            places = labels.where(counted, 0)[:, None]
            part.scatter_(1, places, minus.where(counted, 0.0)[:, None])
            torch._log_softmax_backward_data(part, of_tokens, 1, torch.float32, out=of_tokens)
            part.scatter_(1, places, 0.0)
            if given is not array:
                wanted.copy_(of_tokens)
        return given.view(ctx.shape), None, None


def _log_probabilities(logits: torch.Tensor, room: Room | None = None) -> torch.Tensor:
    """fp32 [tokens, vocabulary], in `room` or an array of its own."""
    flat = logits.detach().reshape(-1, logits.shape[-1])
    array = room.array(flat.shape) if room else torch.empty(flat.shape, dtype=torch.float32)
    rows = _rows_at_once(array)
    for given, part in zip(flat.split(rows), array.split(rows), strict=True):
        part.copy_(given)
        torch.log_softmax(part, 1, out=part)
    return array


def _loss(array: torch.Tensor, labels: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.nll_loss(array, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return loss / normaliser


def _rows_at_once(array: torch.Tensor) -> int:
    return max(_SLICE_ELEMENTS // array.shape[1], 1)
