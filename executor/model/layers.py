"""Runs one layer of one micro-batch with streamed weights: its forward, its backward, and the loss.

Owns everything that autograd sees; what it sees of the head is in `head.py`. Weights, hidden states and gradients come
and go as flat arrays that belong to someone else (views of an arena): no graph, gradient or reference to one outlives a
call. The code of a layer, and of what the model does around its layers, is the Hugging Face model's own, run as a
stateless template (`template.py`). It schedules nothing, moves nothing between tiers and calls no CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from ssdplan.native import process
from ssdplan.plans.errors import MismatchError, says_no_memory
from ssdplan.plans.graph.ops import Side

from ..device.device import generators
from ..device.seeds import seed_generators
from .accumulation import adder, take_from_leaf
from .attention.by_spans import settle
from .finiteness import Finiteness
from .head import Head
from .inspection.standins import LayerCall, split_call, stand_ins
from .model import StreamedModel
from .saved import Keeping, SavedBlocks, TracedCall, traced_call
from .template import IGNORED_LABEL, MicroBatch, TableRows, as_returned, failed, run_model

Along = tuple[int, Side]
"""A direction and a side of a zeroth-order step, or `HERE`: the model as it is."""
HERE: Along = (0, "")


class _StopForwardError(Exception):
    """Ends the model's own forward: all that was asked of it is known."""


class Layers:
    """The layers of an opened model on one device, for one step at a time.

    Layer numbers are the model's `layers`: 0 the embedding, then the blocks, then the head. `weights` are 1-D tensors
    of the states' dtypes, one for each of the layer's states, at least as long. `hidden` and the inter-layer gradients
    are 1-D tensors of the model's dtype whose first b * s * hidden_size elements are a [b, s, hidden_size] array.
    Every forward and backward seeds torch's generators from (seed, step, layer, micro-batch): dropout is the same in
    a forward and its recomputation, in any order of execution. One call at a time: a call swaps entries of the
    model's own list of layers while it runs.

    The head takes a micro-batch's tokens `head_chunk_tokens` at a time; None: all at once (`head.py`). Errors:
    MismatchError where the model's head cannot be cut into chunks.
    """

    def __init__(
        self,
        model: StreamedModel,
        device: torch.device,
        *,
        seed: int = 0,
        head_chunk_tokens: int | None = None,
        rungs: Mapping[tuple[str, str], Keeping] = MappingProxyType({}),
        rows: TableRows | None = None,
    ) -> None:
        """`rungs`: (class of blocks, name) -> what a forward by that rung keeps. `rows`: of the table that forwards
        `by_rows` have."""
        self.rows = rows
        self.head = Head(model, device, head_chunk_tokens)
        self.saved_blocks = SavedBlocks(rungs)
        self._model, self._device, self._seed = model, device, seed
        self._dtypes = model.dtypes
        self._generators = generators(device)
        self._last, self._lowest = len(model.layers) - 1, model.first_trained
        self._blocks = model.blocks
        self.lacks_spans = settle(model.module, model.anatomy.isolation.by_spans, device, model.dtype)
        """Whether rows that sequences share need masks of pairs of tokens, for want of kernels for them."""
        for child in model.module.modules():
            for name, buffer in child._buffers.items():
                child._buffers[name] = buffer if buffer is None else buffer.to(device)
        self._forget()

    def _forget(self) -> None:
        self._micro_batches: list[MicroBatch] = []
        self._calls: dict[int, tuple[LayerCall, ...]] = {}
        self._losses: dict[tuple[int, Along], torch.Tensor] = {}
        self._shared: dict[tuple[int, ...], tuple[LayerCall, ...]] = {}
        self.saved_blocks.begin_step()
        self.head.clear()

    def begin_step(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        *,
        training: bool = True,
        normaliser: int | None = None,
        loss_scale: float = 1.0,
        first: int = 0,
    ) -> int:
        """Takes the inputs of a step, which may lie on any device; returns its valid label tokens.

        `training` chooses train() or eval(), that is dropout. The loss is divided by `normaliser`: the tokens returned
        here unless given (several ranks give their sum). Gradients, not losses, are multiplied by `loss_scale`.
        Dropout is that of micro-batches `first` and on.
        Errors: MismatchError where token numbers or lengths are not the model's, or no label is valid.
        """
        self._forget()
        tokens = sum(micro_batch.label_tokens() for micro_batch in micro_batches)
        for index, micro_batch in enumerate(micro_batches):
            self._check(index, micro_batch)
        divisor = tokens if normaliser is None else normaliser
        if not divisor:
            raise MismatchError(f"step {step} has no token to predict: every label is {IGNORED_LABEL}")
        self._step, self._first = step, first
        self._finiteness = Finiteness(len(self._model.layers), len(micro_batches), self._model.dtype, self._device)
        self._normaliser = torch.tensor(divisor, device=self._device)
        self._loss_scale = loss_scale
        self._micro_batches = [
            MicroBatch(
                m.input_ids.to(self._device),
                m.labels.to(self._device),
                m.attention_mask.to(self._device) if m.attention_mask is not None and self._needs_mask(m) else None,
                None if m.position_ids is None else m.position_ids.to(self._device),
            )
            for m in micro_batches
        ]
        if self.rows:
            self.rows.begin_step(m.input_ids for m in micro_batches)
        if self._model.module.training != training:
            self._model.module.train(training)
        return tokens

    def _check(self, index: int, micro_batch: MicroBatch) -> None:
        ids = micro_batch.input_ids
        limit = self._model.max_sequence_length
        if limit is not None and ids.shape[1] > limit:
            raise MismatchError(
                f"micro-batch {index} has sequences of {ids.shape[1]} tokens, {self._model.name} takes {limit}"
            )
        if micro_batch.position_ids is not None:
            assert micro_batch.attention_mask is None, "rows are padded or shared, not both"
            self._model.require_apart(ids.shape[1])
        if micro_batch.attention_mask is not None:
            assert (micro_batch.labels[micro_batch.attention_mask == 0] == IGNORED_LABEL).all(), "padding is no target"
            if int(micro_batch.attention_mask.sum(-1).min()) < self._model.least_row(ids.shape[1]):
                self._model.require_alike(ids.shape[1])
        embedding: Any = self._model.module.get_input_embeddings()
        rows = embedding.weight.shape[0]
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= rows:
            wrong = low if low < 0 else high
            raise MismatchError(f"micro-batch {index} has token {wrong}, {self._model.name} has tokens 0 to {rows - 1}")

    def _needs_mask(self, micro_batch: MicroBatch) -> bool:
        """Not where what a row begins with is computed as if nothing, such as padding, came behind it."""
        return micro_batch.attention_mask is not None and not self._model.padding_needs_no_mask

    def end_step(self) -> float:
        """The mean loss over the step's valid tokens, summed in micro-batch order in float64; forgets the step."""
        [(_, losses)] = self.end_zeroth_order_step()
        return sum(losses)

    def end_zeroth_order_step(self) -> list[tuple[Along, list[float]]]:
        """As `end_step`, for each direction and side, in order; of each micro-batch its part."""
        every, numbers = sorted({along for _, along in self._losses}) or [HERE], range(len(self._micro_batches))
        losses = self._losses
        missing = [number for number in numbers if not all((number, along) in losses for along in every)]
        assert not missing, f"the head has not run for micro-batches {missing}"
        self._forget()
        process.keep_large(False)
        return [(along, [float(losses[each, along]) for each in numbers]) for along in every]

    @property
    def step(self) -> int:
        """The step that `begin_step` began, from 0."""
        return self._step

    def not_finite(self, above: int) -> str:
        """Where in this step something first was not finite that should be, in words: of the outputs of all layers, of
        the losses, then of what the backwards from the head down to layer `above` handed on. Empty when none was.
        """
        if found := self._finiteness.first("forward"):
            return f"the output of {self._model.layers[found[0]].name} for micro-batch {found[1]}"
        for micro_batch, along in sorted(self._losses):
            if not self._losses[micro_batch, along].isfinite():
                return f"the loss of micro-batch {micro_batch}"
        if (found := self._finiteness.first("backward")) and found[0] >= above:
            return f"the gradient that {self._model.layers[found[0]].name} hands down for micro-batch {found[1]}"
        return ""

    def context_bytes(self) -> int:
        """Bytes held for the step by the recorded arguments of the layers: masks, rotary tables and the like."""
        recorded = [(call.args, call.kwargs) for calls in self._calls.values() for call in calls]
        stored = (leaf.untyped_storage() for leaf in tree_leaves(recorded) if isinstance(leaf, torch.Tensor))
        return sum({each.data_ptr(): each.nbytes() for each in stored}.values())

    def forward(
        self,
        layer: int,
        micro_batch: int,
        weights: Sequence[torch.Tensor],
        hidden: torch.Tensor | None,
        out: torch.Tensor,
        rung: str = "",
        saved: torch.Tensor | None = None,
        by_rows: bool = False,
    ) -> None:
        """The embedding or a block: writes the layer's output for one micro-batch into `out`, and what `rung` keeps for
        its backward into `saved`, bytes.

        The embedding (hidden None) also records what the model calls each block with; it runs before the blocks.
        `by_rows`: of its table `weights` has the rows of the step's tokens, at least as many as there may be.
        """
        assert layer != self._last, "the head runs in backward or loss"
        with torch.no_grad():
            rows = self.rows if by_rows else None
            parameters = self._parameters(layer, weights, training=False, rows=rows)
            self._begin(layer, micro_batch)
            if layer == 0:
                assert hidden is None
                with rows.reading(parameters[rows.name]) if rows else nullcontext():
                    result = self._embed(micro_batch, parameters, record=True)
            else:
                assert hidden is not None
                given = self._view(hidden, micro_batch)
                if saved is None:
                    result = self._block(layer, micro_batch, parameters, given)
                else:
                    result = self._keeping_block(layer, micro_batch, weights, given, rung, saved)
            assert result.dtype == self._model.dtype, "inspection refuses what would be rounded here"
            handed_on = self._view(out, micro_batch).copy_(result)
            self._finiteness.look("forward", layer, micro_batch, handed_on)

    def backward(
        self,
        layer: int,
        micro_batch: int,
        weights: Sequence[torch.Tensor],
        hidden: torch.Tensor | None,
        out_gradient: torch.Tensor | None,
        in_gradient: torch.Tensor | None,
        gradients: Sequence[torch.Tensor],
        fresh: Sequence[bool] = (),
        saved: torch.Tensor | None = None,
    ) -> None:
        """Recomputes a layer for one micro-batch, or what of it the forward has not kept in `saved`, and runs its
        backward.

        hidden: the layer's input (None for the embedding). out_gradient: of the layer's output (None for the head,
        which computes the loss). in_gradient: where the gradient of the input goes; None where nobody wants it, and it
        is not computed. gradients: one fp32 1-D tensor for each of the layer's states that are trained, to which this
        micro-batch's is added, tensor by tensor, each in one addition (in one a chunk in the head); of frozen
        parameters none is computed. fresh: those of them that begin with this micro-batch, whatever is in them; none
        unless given. Errors: MismatchError where a tensor has no part in the loss.
        """
        assert gradients or in_gradient is not None, "a backward that nobody wants anything of"
        with torch.enable_grad():
            parameters = self._parameters(layer, weights, training=True)
            takers, pending = self._accumulate_into(layer, parameters, gradients, fresh or [False] * len(gradients))
            self._begin(layer, micro_batch)
            if layer == 0:
                assert hidden is None and in_gradient is None and out_gradient is not None
                result = self._embed(micro_batch, parameters, record=False)
                result.backward(self._view(out_gradient, micro_batch))
            elif layer == self._last:
                assert hidden is not None and out_gradient is None
                self._losses[micro_batch, HERE] = self.head.backward(
                    self._micro_batches[micro_batch],
                    parameters,
                    hidden,
                    in_gradient,
                    normaliser=self._normaliser,
                    loss_scale=self._loss_scale,
                )
                if in_gradient is not None:
                    self._finiteness.look("backward", layer, micro_batch, self._view(in_gradient, micro_batch))
            elif saved is not None and self.saved_blocks.runs_by_graph((layer, micro_batch)):
                assert hidden is not None and out_gradient is not None
                found = self._rebuilding_block(
                    layer, micro_batch, parameters, hidden, out_gradient, saved, takers, wanted=in_gradient is not None
                )
                if in_gradient is not None:
                    assert found is not None
                    handed_on = self._view(in_gradient, micro_batch).copy_(found)
                    self._finiteness.look("backward", layer, micro_batch, handed_on)
            else:
                assert hidden is not None and out_gradient is not None
                leaf = self._view(hidden, micro_batch).requires_grad_(in_gradient is not None)
                result = self._block(layer, micro_batch, parameters, leaf)
                result.backward(self._view(out_gradient, micro_batch))
                if in_gradient is not None:
                    assert leaf.grad is not None
                    handed_on = self._view(in_gradient, micro_batch).copy_(leaf.grad)
                    self._finiteness.look("backward", layer, micro_batch, handed_on)
        if pending:
            raise MismatchError(f"{self._model.architecture} gives {min(pending)} no gradient; --freeze it")

    def learn(self, layer_class: str, rung: str, values: Collection[str], packed: bool = False) -> None:
        """Let blocks of a class run by one more rung, which keeps these values, with `packed` in int8."""
        self.saved_blocks.learn(layer_class, rung, Keeping(frozenset(values), packed))

    def keeps(self, layer: int, micro_batch: int) -> bool:
        """Whether the pair's forward has left in its place what its rung keeps."""
        return self.saved_blocks.kept((layer, micro_batch))

    def loss(
        self, micro_batch: int, weights: Sequence[torch.Tensor], hidden: torch.Tensor, along: Along = HERE
    ) -> None:
        """The head's forward alone: keeps the micro-batch's loss for the step's end, computes no gradient."""
        with torch.no_grad():
            parameters = self._parameters(self._last, weights, training=False)
            self._begin(self._last, micro_batch)
            self._losses[micro_batch, along] = self.head.loss(
                self._micro_batches[micro_batch], parameters, hidden, normaliser=self._normaliser
            )

    def _begin(self, layer: int, micro_batch: int) -> None:
        """Seeds the generators. And large pieces of memory stay with malloc from block to block, which ask for the same
        ones; not those of an embedding or a head, which would leave holes."""
        if layer != self._last or torch.is_grad_enabled():
            self.head.clear()
        if self._device.type == "cpu":
            process.keep_large(0 < layer < self._last)
        seed_generators(self._generators, self._seed, self._step, layer, self._first + micro_batch)

    def _view(self, flat: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """The [b, s, H] array at the start of a flat tensor. `data` gives it a version counter of its own, so that
        writes elsewhere in the same arena are not taken for writes to what autograd has saved."""
        rows, length = self._micro_batches[micro_batch].input_ids.shape
        shape = (rows, length, self._model.hidden_size)
        assert flat.dtype == self._model.dtype and flat.dim() == 1
        return flat.data[: rows * length * self._model.hidden_size].view(shape)

    def _parameters(
        self, layer: int, weights: Sequence[torch.Tensor], *, training: bool, rows: TableRows | None = None
    ) -> dict[str, torch.Tensor]:
        """A layer's parameters by name: views of its flat weights; in `training` leaves of autograd, but the frozen."""
        states = self._model.layers[layer].states
        assert len(weights) == len(states), f"{self._model.layers[layer].name} has {len(states)} states"
        parameters = {}
        for index, flat in zip(states, weights, strict=True):
            if rows and index == rows.state:
                parameters[rows.name] = rows.parameter(flat)
                continue
            assert flat.dtype == self._dtypes[index] and flat.numel() >= self._model.states[index].elements
            for tensor in self._model.states[index].tensors:
                view = flat.data[tensor.offset : tensor.offset + tensor.elements].view(tensor.shape)
                parameters[tensor.name] = view.requires_grad_(training and not self._model.states[index].frozen)
        return parameters

    def _accumulate_into(
        self,
        layer: int,
        parameters: dict[str, torch.Tensor],
        gradients: Sequence[torch.Tensor],
        fresh: Sequence[bool],
    ) -> tuple[dict[str, Callable[[torch.Tensor], None]], set[str]]:
        """Adds each parameter's gradient to its fp32 place as soon as it is there, and drops it. The first of a fresh
        place is copied there instead, and what lies between its tensors is zeroed.

        Returns what takes each parameter's gradient, for whoever finds it without autograd, and the names that still
        wait for theirs; these become fewer during the backward.
        """
        states = self._model.trained(layer)
        assert len(gradients) == len(states)
        pending = {name for name, parameter in parameters.items() if parameter.requires_grad}
        takers = {}
        for index, flat, begins in zip(states, gradients, fresh, strict=True):
            assert flat.dtype == torch.float32
            end = 0
            for tensor in self._model.states[index].tensors:
                assert tensor.offset >= end, "a state's tensors lie in order"
                place = flat.data[tensor.offset : tensor.offset + tensor.elements]
                takers[tensor.name] = take = adder(place, pending, tensor.name, begins=begins)
                parameters[tensor.name].register_post_accumulate_grad_hook(partial(take_from_leaf, take))
                if begins:
                    flat[end : tensor.offset].zero_()
                end = tensor.offset + tensor.elements
            if begins:
                flat[end:].zero_()
        return takers, pending

    def _block(
        self, layer: int, micro_batch: int, parameters: dict[str, torch.Tensor], hidden: torch.Tensor
    ) -> torch.Tensor:
        assert micro_batch in self._calls, "the embedding of this micro-batch has not run in this step"
        index = layer - 1
        own = self._own(layer, parameters)
        args, kwargs = self._calls[micro_batch][index].arguments(hidden)
        try:
            result = functional_call(self._blocks[index], own, args, kwargs)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            if self._device.type != "cpu" or says_no_memory(error):  # the device says what a GPU's errors mean
                raise
            raise MismatchError(failed(self._model, layer, self._micro_batches[micro_batch], error)) from error
        return result if isinstance(result, torch.Tensor) else result[0]

    def _keeping_block(
        self,
        layer: int,
        micro_batch: int,
        weights: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        rung: str,
        saved: torch.Tensor,
    ) -> torch.Tensor:
        """A block's output, what the rung keeps left in `saved`. Backward will want the gradients of the same tensors
        that are wanted here: of all but the frozen ones, and of the input of all but the lowest trained layer."""
        parameters = self._parameters(layer, weights, training=True)
        plain = {name: parameter.detach() for name, parameter in parameters.items()}
        return self.saved_blocks.forward(
            (layer, micro_batch),
            self._model.layers[layer].layer_class,
            rung,
            self._blocks[layer - 1],
            self._calls[micro_batch][layer - 1],
            self._own(layer, parameters),
            hidden.requires_grad_(layer > self._lowest),
            saved,
            partial(self._begin, layer, micro_batch),
            lambda: self._block(layer, micro_batch, plain, hidden.detach()),
        )

    def _rebuilding_block(
        self,
        layer: int,
        micro_batch: int,
        parameters: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        out_gradient: torch.Tensor,
        saved: torch.Tensor,
        takers: Mapping[str, Callable[[torch.Tensor], None]],
        *,
        wanted: bool,
    ) -> torch.Tensor | None:
        """The gradient of a block's input, from what its forward has kept."""
        assert wanted == (layer > self._lowest)
        prefix = self._prefix(layer)
        with torch.no_grad():
            return self.saved_blocks.backward(
                (layer, micro_batch),
                self._blocks[layer - 1],
                self._calls[micro_batch][layer - 1],
                self._own(layer, parameters),
                self._view(hidden, micro_batch).requires_grad_(wanted),
                saved,
                self._view(out_gradient, micro_batch),
                lambda name, gradient: takers[prefix + name](gradient),
            )

    def _prefix(self, layer: int) -> str:
        return f"{self._model.anatomy.blocks_path}.{layer - 1}."

    def _own(self, layer: int, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A block's parameters by the names that it has for them."""
        prefix = self._prefix(layer)
        return {name.removeprefix(prefix): parameter for name, parameter in parameters.items()}

    def trace_block(
        self, layer: int, micro_batch: int, weights: Sequence[torch.Tensor], hidden: torch.Tensor
    ) -> TracedCall | None:
        """The explicit graph of a block, and what to run it on, for whoever measures it; None where its code cannot be
        traced. The embedding of the micro-batch has run."""
        parameters = self._own(layer, self._parameters(layer, weights, training=True))
        given = self._view(hidden, micro_batch).requires_grad_(layer > self._lowest)
        return traced_call(self._blocks[layer - 1], self._calls[micro_batch][layer - 1], parameters, given)

    def _embed(self, micro_batch: int, parameters: dict[str, torch.Tensor], *, record: bool) -> torch.Tensor:
        """Runs the model's own forward up to its first block; to record what each is called with, up to the last."""
        embedded: list[torch.Tensor] = []
        calls: list[LayerCall] = []
        last = len(self._blocks) - 1

        def answer(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, call = split_call(args, kwargs)
            calls.append(call)
            embedded.append(hidden)
            if index == last or not record:
                raise _StopForwardError
            return as_returned(self._model, hidden)

        inputs = self._micro_batches[micro_batch]
        with suppress(_StopForwardError), stand_ins(self._blocks, answer):
            run_model(self._model, inputs, parameters)
        if record:
            self._keep(micro_batch, tuple(calls))
        return embedded[0]

    def _keep(self, micro_batch: int, calls: tuple[LayerCall, ...]) -> None:
        """Keeps a micro-batch's calls; those of micro-batches of one shape, each row one sequence without padding, are
        the same, and kept once."""
        inputs = self._micro_batches[micro_batch]
        plain = inputs.attention_mask is None and inputs.position_ids is None
        if plain and not self._model.anatomy.calls_depend_on_ids:
            calls = self._shared.setdefault(tuple(inputs.input_ids.shape), calls)
        self._calls[micro_batch] = calls
