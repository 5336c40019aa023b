"""Inputs, outputs and one layer's weights on the device, for whoever measures layers.

Owns on which inputs layers are measured: real weights, random tokens, hidden states and gradients of unit scale. No
more than one layer's states are in memory at any time. It never looks inside a layer.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ssdplan.native import process
from ssdplan.plans.documents.rows import row_lengths
from ssdplan.plans.documents.state_layout import GRADIENT_BYTES

from .clock import REAL, Clock
from .parts import Device, Layers, MakeMicroBatch, Model, TracedCall, Weights

Result = TypeVar("Result")

ELSEWHERE_BYTES = 256 << 20
"""Read and written before a cold run: more than caches hold."""
GROWING_ROUNDS, GROWING_RUNS, GROWING_SECONDS = 3, 8, 2.0
"""How often it is looked what the process grows by, and how often, and for how long at most, a layer runs for that:
most holes are there after four runs, and sixteen add a twentieth. Rounds differ as what ran before left the heap in
other pieces: by 170 to 233 MiB in a block of 79 million parameters that computes in 100."""
RUNG_GROWING_SECONDS = 0.5
"""The same for a block that saves, once: it takes less than one that recomputes everything, whose growth counts too."""
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class Figure:
    """The name of one measured time."""

    layer_class: str
    micro_batch_size: int
    backward: bool

    def __str__(self) -> str:
        return f"{'backward' if self.backward else 'forward'} of {self.layer_class} at {self.micro_batch_size}"


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes that one layer class takes at one micro-batch size."""

    forward_workspace: int
    backward_workspace: int
    saved_activations: int
    process_growth: int | None
    kernels: dict[int, int]
    """Tokens -> what the process keeps since the layer ran on so many."""


def saved_activation_bytes(work: Callable[[], Result]) -> tuple[Result, int]:
    """Run `work`, a forward and its backward; returns its result and the bytes that autograd kept between the two.

    Each storage counts once, whole, and only if `work` made it: weights, inputs and masks outlive it. Weak references
    tell which do: addresses are used again, and references would keep the bytes.
    """
    kept: dict[StorageWeakRef, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(StorageWeakRef(storage), storage.nbytes())
        return tensor

    gc.freeze()  # the collector then looks only at what `work` leaves behind, not at all of the process each time
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            result = work()
        gc.collect()
    finally:
        gc.unfreeze()
    return result, sum(nbytes for storage, nbytes in kept.items() if storage.expired())


class Bench:
    """Inputs, outputs and one layer's weights and gradients on the device, in buffers that the layers use in turn.

    The step's micro-batches are those of all sizes with one whole sequence a row, then those with padding, then, of a
    model that keeps them apart, those of two sequences a row, then those of shorter rows.
    """

    def __init__(
        self,
        model: Model,
        layers: Layers,
        make_micro_batch: MakeMicroBatch,
        weights: Weights,
        device: Device,
        sequence_length: int,
        sizes: Sequence[int],
        clock: Clock = REAL,
        *,
        whole_rows: bool = False,
    ) -> None:
        """`whole_rows`: no row is padded or shared, so nothing is measured of such."""
        self.clock, self._whole_rows = clock, whole_rows
        self.lacks_spans = layers.lacks_spans and not whole_rows
        self._model = model
        self._layers = layers
        self._weights = weights
        self._device = device
        self._sizes = list(sizes)
        self._length = sequence_length
        tokens = [torch.Generator().manual_seed(size) for size in sizes]
        self._ids = [
            torch.randint(model.vocab_size, (size, sequence_length), generator=generator)
            for size, generator in zip(sizes, tokens, strict=True)
        ]
        self._make_micro_batch = make_micro_batch
        self._shares = not whole_rows and sequence_length > 1 and model.keeps_apart(sequence_length)
        self._kinds = range(1) if whole_rows else range(1, 3 if self._shares else 2)
        """Of micro-batches, those that take most: by this times the number of sizes they are counted."""
        self._head = len(model.layers) - 1
        self._largest = max(sizes) * sequence_length * model.hidden_size
        self._weight_bytes = [
            state.elements * dtype.itemsize for state, dtype in zip(model.states, model.dtypes, strict=True)
        ]
        most = max(sum(self._weight_bytes[state] for state in layer.states) for layer in model.layers)
        self._flat_weights = device.allocate(most)
        trained = [model.trained(layer) for layer in range(len(model.layers))]
        elements = max(sum(model.states[state].elements for state in states) for states in trained)
        self._flat_gradients = device.allocate(elements * GRADIENT_BYTES).view(torch.float32).zero_()
        self._hidden, self._out, self._out_gradient, self._in_gradient = (self._array(seed) for seed in range(4))
        self._elsewhere = torch.zeros(ELSEWHERE_BYTES // 4, device=self._flat_weights.device)
        self._saved: torch.Tensor | None = None
        self._loaded: int | None = None
        self._layer_weights: list[torch.Tensor] = []
        self._layer_gradients: list[torch.Tensor] = []
        self._shorter: dict[int, range] = {}

    def _array(self, seed: int) -> torch.Tensor:
        """An inter-layer array for the largest size: normal numbers, in the model's dtype."""
        array = self._device.allocate(self._largest * self._model.dtype.itemsize).view(self._model.dtype)
        return array.normal_(generator=torch.Generator(array.device).manual_seed(seed))

    def begin(self) -> dict[int, int]:
        """Begin a step with all micro-batches and run its embedding, which every other layer needs to have run.

        Returns the most bytes that a micro-batch of each size keeps on the device for the whole step.
        """
        self.load(0)
        context = dict.fromkeys(self._sizes, 0)
        micro_batches = [self._whole(ids) for ids in self._ids]
        kinds = (self._whole, self._padded, self._shared)
        for kind in self._kinds:
            for size, ids in zip(self._sizes, self._ids, strict=True):
                micro_batch = kinds[kind](ids)
                micro_batches += [micro_batch] if kind else []
                self._layers.begin_step(0, [micro_batch])
                self._layers.forward(0, 0, self._layer_weights, None, self._out)
                held = self._layers.context_bytes() + (3 if kind else 2) * ids.nbytes
                context[size] = max(context[size], held)
        self._shorter = {}
        for size, ids in zip(self._sizes, self._ids, strict=True):
            begin = len(micro_batches)
            micro_batches += [self._masked(ids[:, :length]) for length in row_lengths(ids.shape[1])[:-1]]
            self._shorter[size] = range(begin, len(micro_batches))
        self._layers.begin_step(1, micro_batches)
        for micro_batch in range(len(micro_batches)):
            self._layers.forward(0, micro_batch, self._layer_weights, None, self._out)
        return context

    def _whole(self, ids: torch.Tensor) -> Any:
        """A micro-batch of rows of one sequence, without padding."""
        return self._make_micro_batch(ids, ids, None, None)

    def _padded(self, ids: torch.Tensor) -> Any:
        """A micro-batch of which the last row is half padding, or as much as the model allows; its three inputs are of
        one size."""
        mask = torch.ones_like(ids)
        mask[-1, max(ids.shape[1] - ids.shape[1] // 2, self._model.least_row(ids.shape[1])) :] = 0
        return self._make_micro_batch(ids, ids.masked_fill(mask == 0, IGNORED_LABEL), mask, None)

    def _shared(self, ids: torch.Tensor) -> Any:
        """A micro-batch of which two sequences share each row, the first of one token: attention, which may take one
        sequence after another, needs most for a long one. Its three inputs are of one size."""
        positions = torch.arange(ids.shape[1]).repeat(ids.shape[0], 1)
        positions[:, 1:] -= 1
        return self._make_micro_batch(ids, ids.masked_fill(positions == 0, IGNORED_LABEL), None, positions)

    @property
    def _masked(self) -> Callable[[torch.Tensor], Any]:
        """What makes the micro-batches that take most: where sequences share rows, there is a mask in any case."""
        return self._whole if self._whole_rows else self._shared if self._shares else self._padded

    def lane(self) -> AbstractContextManager[None]:
        """Where the device computes: to be entered around all that runs a layer or loads one."""
        return self._device.lane("compute")

    def load(self, layer: int) -> None:
        """Read a layer's states into the one place for weights; what was there is gone."""
        if self._loaded == layer:
            return
        self._loaded = None  # should reading fail
        self._layer_weights, self._layer_gradients = [], []
        start = 0
        for state in self._model.layers[layer].states:
            stop = start + self._weight_bytes[state]
            place = self._flat_weights[start:stop].view(self._model.dtypes[state])
            if self._device.kind == "cpu":
                self._weights.read(state, place)
            else:
                staged = torch.empty_like(place, device="cpu")
                self._weights.read(state, staged)
                self._device.copy_h2d(place.view(torch.uint8), staged.view(torch.uint8))
            self._layer_weights.append(place)
            start = stop
        start = 0
        for state in self._model.trained(layer):
            stop = start + self._model.states[state].elements
            self._layer_gradients.append(self._flat_gradients[start:stop])
            start = stop
        self._loaded = layer

    def directions(self, layer: int) -> tuple[bool, ...]:
        """Whether backward, for each direction in which a layer runs."""
        return (False, True) if layer >= self._model.first_trained else (False,)

    def forget(self, layer: int) -> None:
        """Let caches hold other things than the layer; and the heap nothing, if no other layer is of its class: what is
        free goes back where compute turns to another class."""
        self._elsewhere.add_(1.0)
        name = self._model.layers[layer].layer_class
        if sum(other.layer_class == name for other in self._model.layers) == 1:
            process.give_back()

    def forward(self, layer: int, micro_batch: int, rung: str = "") -> None:
        """A layer's forward; the head's yields the loss. What a block keeps by `rung` goes to the one place for it."""
        if layer == self._head:
            self._layers.loss(micro_batch, self._layer_weights, self._hidden)
        else:
            hidden = self._hidden if layer else None
            saved = self._saved if rung else None
            self._layers.forward(layer, micro_batch, self._layer_weights, hidden, self._out, rung, saved)

    def backward(self, layer: int, micro_batch: int, rung: str = "") -> None:
        """A layer's backward, which recomputes what its forward has not kept."""
        self._layers.backward(
            layer,
            micro_batch,
            self._layer_weights,
            self._hidden if layer else None,
            self._out_gradient if layer != self._head else None,
            self._in_gradient if layer > self._model.first_trained else None,
            self._layer_gradients,
            (),
            self._saved if rung else None,
        )

    def space(self, layer: int, size: int) -> Space:
        """The most that the loaded layer takes for a micro-batch with a mask, beyond weights, gradients and inter-layer
        arrays."""
        found = []
        kept = [process.kept_bytes()]
        for kind in self._kinds:
            micro_batch = kind * len(self._sizes) + self._sizes.index(size)
            self._layers.head.clear()  # so that both figures hold what they share
            _, forward = self._device.peak_bytes(partial(self.forward, layer, micro_batch))
            backward = saved = 0
            self._layers.head.clear()
            if True in self.directions(layer):
                (_, saved), backward = self._device.peak_bytes(
                    partial(saved_activation_bytes, partial(self.backward, layer, micro_batch))
                )
            found.append((forward, backward, saved))
        kept.append(process.kept_bytes())
        for micro_batch in self._shorter[size]:  # what kernels keep for each length is there before growth begins
            (self.backward if True in self.directions(layer) else self.forward)(layer, micro_batch)
            kept.append(process.kept_bytes())
        lengths = [self._length, *row_lengths(self._length)[:-1]]
        grown = [max(after - before, 0) for before, after in pairwise(kept)]
        own = self._device.kind == "cpu"
        kernels = {size * length: nbytes for length, nbytes in zip(lengths, grown, strict=True)} if own else {}
        growth = self._process_growth(layer, size)
        forward, backward, saved = (max(figures) for figures in zip(*found, strict=True))
        return Space(forward, backward, saved, growth, kernels)

    def _process_growth(self, layer: int, size: int, rung: str = "") -> int | None:
        """What the process grows by at most while micro-batches follow each other through the layer; only where they
        compute in the process's own memory. Those of shorter rows come between, as they may in a run."""
        if self._device.kind != "cpu":
            return None
        run = self.backward if True in self.directions(layer) else self.forward
        masked = self._kinds[0] * len(self._sizes) + self._sizes.index(size)

        def one() -> None:
            if rung:
                self.forward(layer, masked, rung)
                self.backward(layer, masked, rung)
            else:
                run(layer, masked)

        def several() -> None:
            started = self.clock()
            for done in range(GROWING_RUNS):
                if done and self.clock() - started > (RUNG_GROWING_SECONDS if rung else GROWING_SECONDS):
                    break
                one()

        grown = []
        for _ in range(1 if rung else GROWING_ROUNDS):
            for micro_batch in self._shorter[size]:
                run(layer, micro_batch)
            self._layers.head.clear()
            grown.append(process.growth_bytes(several))
        return max((growth for growth in grown if growth is not None), default=None)

    # Blocks that keep some of their activations.

    def trace(self, layer: int, size: int) -> TracedCall | None:
        """The loaded block's graph on rows without padding; None where its code cannot be traced."""
        return self._layers.trace_block(layer, self._sizes.index(size), self._layer_weights, self._hidden)

    def learn(self, layer_class: str, rung: str, values: Sequence[str], nbytes: int, *, packed: bool = False) -> None:
        """Let blocks of a class run by a rung, which keeps at most so many bytes; with `packed` in int8."""
        self._layers.learn(layer_class, rung, values, packed)
        if self._saved is None or self._saved.numel() < nbytes:
            self._saved = None
            self._saved = self._device.allocate(nbytes)

    def settled_clock(self) -> float:
        """The time when the device has done all that it was given."""
        self._device.synchronize()
        return self.clock()

    def pair_seconds(self, layer: int, size: int, rung: str) -> tuple[float, float, bool]:
        """Seconds of a forward and of its backward by a rung, and whether its graph was used."""
        micro_batch = self._sizes.index(size)
        began = self.settled_clock()
        self.forward(layer, micro_batch, rung)
        between = self.settled_clock()
        kept = bool(rung) and self._layers.keeps(layer, micro_batch)
        self.backward(layer, micro_batch, rung)
        return between - began, self.settled_clock() - between, kept

    def rung_space(self, layer: int, size: int, rung: str) -> Space:
        """The most that the loaded block takes by a rung for a micro-batch with a mask."""
        found = []
        for kind in self._kinds:
            micro_batch = kind * len(self._sizes) + self._sizes.index(size)
            self.forward(layer, micro_batch, rung)  # the first of a kind is traced, and proven
            self.backward(layer, micro_batch, rung)
            _, forward = self._device.peak_bytes(partial(self.forward, layer, micro_batch, rung))
            _, backward = self._device.peak_bytes(partial(self.backward, layer, micro_batch, rung))
            found.append((forward, backward))
        forward, backward = (max(each) for each in zip(*found, strict=True))
        return Space(forward, backward, 0, self._process_growth(layer, size, rung), {})

    def enter(self, micro_batch: int) -> None:
        """Run the embedding: the hidden state is that of the micro-batch's own tokens then."""
        self.load(0)
        self._layers.forward(0, micro_batch, self._layer_weights, None, self._out)
        self._hidden.copy_(self._out)

    def go_on(self, layer: int, micro_batch: int) -> None:
        """Run the loaded block: the hidden state is its output then."""
        self.forward(layer, micro_batch)
        self._hidden.copy_(self._out)

    def gradients(self, layer: int, micro_batch: int, rung: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        """The loaded block's gradients by a rung: of its parameters, fp32 in one row, and of its input. They lie where
        the next call puts its own. `micro_batch` is one of whole rows."""
        trained = sum(gradient.numel() for gradient in self._layer_gradients)
        self._flat_gradients.zero_()
        if rung:
            self.forward(layer, micro_batch, rung)
        self.backward(layer, micro_batch, rung)
        handed_on = self._sizes[micro_batch] * self._length * self._model.hidden_size
        return self._flat_gradients[:trained], self._in_gradient[:handed_on]

    def seconds(self, layer: int, figure: Figure, runs: int) -> float:
        """Seconds that one run on an unpadded micro-batch takes, on average over `runs` in a row."""
        run = self.backward if figure.backward else self.forward
        micro_batch = self._sizes.index(figure.micro_batch_size)
        self._device.synchronize()
        started = self.clock()
        for _ in range(runs):
            run(layer, micro_batch)
        self._device.synchronize()
        return (self.clock() - started) / runs
