"""The head of a model: a micro-batch's loss, and the gradients that follow from it, a chunk of tokens at a time.

Owns how a micro-batch is cut into chunks, in which order their losses and gradients add up, and when the heap gets back
what a chunk's tensors left there. `layers.py` brings weights and hidden states, takes gradients and seeds generators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from ssdplan.native import process
from ssdplan.plans.errors import MismatchError

from .cross_entropy import Room, cross_entropy
from .inspection.standins import split_call, stand_ins
from .model import StreamedModel
from .template import IGNORED_LABEL, MicroBatch, as_returned, run_model

IN_PLACE = ("cpu",)
"""Devices on which a loss makes its gradient in place. On a GPU, whose memory costs nothing to get, transformers' own
loss runs."""


@dataclass(frozen=True)
class _Chunk:
    """Consecutive tokens of a micro-batch, row after row, `start` to `stop`, and what the model is called with."""

    start: int
    stop: int
    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None


class Head:
    """The head of an opened model on one device: final norm, language-model head and loss.

    It takes a micro-batch's tokens `chunk_tokens` at a time, first to last, so that no more logits than theirs are ever
    in memory; None: all at once. The number decides the order in which gradients and losses are added, and so their
    last bits. `hidden` and `in_gradient` are flat [b, s, hidden_size] arrays of the model's dtype; `parameters` are the
    head's, by name. Errors: MismatchError where the model's head cannot be cut into chunks.
    """

    def __init__(self, model: StreamedModel, device: torch.device, chunk_tokens: int | None) -> None:
        if chunk_tokens is not None and not model.head_is_position_wise:
            raise MismatchError(
                f"head_chunk_tokens = {chunk_tokens}, but the head of {model.architecture} cannot be cut into "
                f"chunks of tokens; profile {model.name} again"
            )
        self._model, self._device, self._chunk_tokens = model, device, chunk_tokens
        self._blocks = model.blocks
        self._room = Room()

    def clear(self) -> None:
        """Free what losses without gradients share, which the next one makes again."""
        self._room.clear()

    def loss(
        self,
        inputs: MicroBatch,
        parameters: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        *,
        normaliser: torch.Tensor,
    ) -> torch.Tensor:
        """The micro-batch's part of the step's loss, float64: its tokens' losses over `normaliser`."""
        return self._add_up(
            self._chunk_loss(inputs, chunk, parameters, self._tokens(hidden, chunk), normaliser)
            for chunk in self._chunks(inputs)
        )

    def backward(
        self,
        inputs: MicroBatch,
        parameters: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        in_gradient: torch.Tensor | None,
        *,
        normaliser: torch.Tensor,
        loss_scale: float,
    ) -> torch.Tensor:
        """As `loss`, and the gradients of the loss times `loss_scale`: of the parameters, which their hooks take, and
        of `hidden`, written to `in_gradient` unless nobody wants it."""
        return self._add_up(
            self._chunk_backward(inputs, chunk, parameters, hidden, in_gradient, normaliser, loss_scale)
            for chunk in self._chunks(inputs)
        )

    def _chunks(self, inputs: MicroBatch) -> Iterator[_Chunk]:
        """The head's chunks of a micro-batch. A single one has the micro-batch's own shape and mask; of several each
        goes to the model as rows of one token, since a head that acts on each position by itself knows no rows."""
        count, most = inputs.input_ids.numel(), self._chunk_tokens
        if most is None or count <= most:
            yield _Chunk(0, count, inputs.input_ids, inputs.attention_mask, inputs.position_ids)
            return
        ids = inputs.input_ids.reshape(-1, 1)
        for start in range(0, count, most):
            stop = min(start + most, count)
            yield _Chunk(start, stop, ids[start:stop], None, None)

    def _tokens(self, flat: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """A chunk's part of a flat [b, s, H] array, in the shape of the chunk's ids; a view."""
        width = self._model.hidden_size
        return flat.data[chunk.start * width : chunk.stop * width].view(*chunk.input_ids.shape, width)

    def _add_up(self, losses: Iterator[torch.Tensor]) -> torch.Tensor:
        """The sum of the chunks' losses, float64, in their order."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss
        return total

    def _chunk_backward(
        self,
        inputs: MicroBatch,
        chunk: _Chunk,
        parameters: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        in_gradient: torch.Tensor | None,
        normaliser: torch.Tensor,
        loss_scale: float,
    ) -> torch.Tensor:
        """Loss and gradients of a chunk: the parameters' are added where they belong, the hidden state's written."""
        self._give_back()  # of the chunk before
        leaf = self._tokens(hidden, chunk).requires_grad_(in_gradient is not None)
        loss = self._chunk_loss(inputs, chunk, parameters, leaf, normaliser)
        self._give_back()  # of logits as the model makes them
        (loss * loss_scale).backward()
        if in_gradient is not None:
            assert leaf.grad is not None
            self._tokens(in_gradient, chunk).copy_(leaf.grad)
        return loss.detach()

    def _chunk_loss(
        self,
        inputs: MicroBatch,
        chunk: _Chunk,
        parameters: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        normaliser: torch.Tensor,
    ) -> torch.Tensor:
        """Runs the model's own forward with `hidden` as the last block's output; the chunk's part of the step's loss.

        Parameters that this stage does not stream stand as zeros without memory: nothing of what they yield is used.
        """
        last = len(self._blocks) - 1
        zeros = {
            name: torch.zeros((), dtype=dtype, device=self._device).expand(shape)
            for name, (shape, dtype) in self._embedding_shapes().items()
            if name not in parameters
        }

        def answer(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return as_returned(self._model, hidden if index == last else split_call(args, kwargs)[0])

        with stand_ins(self._blocks, answer):
            logits = run_model(self._model, chunk, parameters | zeros).logits
        labels = _next_tokens(inputs.labels, chunk)
        if self._device.type in IN_PLACE:
            if logits.requires_grad:  # of probabilities in fp32, before the weights' gradients
                logits.register_hook(lambda gradient: process.give_back())
            return cross_entropy(logits, labels, normaliser, self._room)
        logits = logits.float()  # as the loss does, so that those of less precision are gone while it computes
        loss: torch.Tensor = ForCausalLMLoss(
            logits, None, logits.shape[-1], num_items_in_batch=normaliser, shift_labels=labels
        )
        return loss

    def _give_back(self) -> None:
        """Return to the system what freed tensors left in the heap, before the largest of the next ones come. Takes
        next to nothing where large ones were mapped by themselves."""
        if self._device.type == "cpu":
            process.give_back()

    def _embedding_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Of each of the embedding's parameters, and its dtype."""
        model = self._model
        states = [(model.states[index], model.dtypes[index]) for index in model.layers[0].states]
        return {tensor.name: (tensor.shape, dtype) for state, dtype in states for tensor in state.tensors}


def _next_tokens(labels: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    """int64 [stop - start]: what each of a chunk's tokens is to predict; nothing follows the last token of a row."""
    length = labels.shape[1]
    following = labels.reshape(-1)[chunk.start + 1 : chunk.stop + 1]
    result = torch.full((chunk.stop - chunk.start,), IGNORED_LABEL, dtype=labels.dtype, device=labels.device)
    result[: following.numel()] = following
    result[(length - 1 - chunk.start) % length :: length] = IGNORED_LABEL
    return result
