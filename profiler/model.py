"""Measures what a model's layers cost on a device: seconds and bytes of each layer class at each micro-batch size.

Owns what is measured and on which inputs: real weights, random tokens, hidden states and gradients of unit scale. No
more than one layer's states are in memory at any time. It never looks inside a layer.
"""

import gc
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ssdplan.native import process
from ssdplan.plans.documents.profile import Kernels, LayerClass, Timing
from ssdplan.plans.documents.rows import row_lengths
from ssdplan.plans.documents.state_layout import GRADIENT_BYTES
from ssdplan.plans.errors import MemoryBudgetError

from .clock import REAL, Clock
from .measure import Limits, Measurement, Progress, mean_of, portion, repeat
from .parts import Device, Layers, MakeMicroBatch, Model, Weights

Result = TypeVar("Result")

SAMPLE_SECONDS = 0.01
"""What takes less runs several times for a sample, after one run that is cold."""
RUNS_A_SAMPLE = 16
ELSEWHERE_BYTES = 256 << 20
"""Read and written before a cold run: more than caches hold."""
GROWING_ROUNDS, GROWING_RUNS, GROWING_SECONDS = 3, 8, 2.0
"""How often it is looked what the process grows by, and how often, and for how long at most, a layer runs for that:
most holes are there after four runs, and sixteen add a twentieth. Rounds differ as what ran before left the heap in
other pieces: by 170 to 233 MiB in a block of 79 million parameters that computes in 100."""
IGNORED_LABEL = -100
FIRST_BLOCK = 1


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What `measure_model` found; every class has the micro-batch sizes that fit into the device, in rising order."""

    classes: tuple[LayerClass, ...]
    context_bytes: dict[int, int]
    notes: list[str]
    kernels: tuple[Kernels, ...]
    """By tokens, what libraries keep; not of the first tokens that ran, with which everything else began."""


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


def measure_model(
    model: Model,
    layers: Layers,
    make_micro_batch: MakeMicroBatch,
    weights: Weights,
    device: Device,
    *,
    sequence_length: int,
    micro_batch_sizes: Sequence[int],
    limits: Limits,
    progress: Progress,
    beside: Callable[[Callable[[], float]], None] | None = None,
    clock: Clock = REAL,
) -> ModelCosts:
    """Measure one layer of each class at each micro-batch size, and what a micro-batch keeps for a step. A class whose
    layers are below all that is trained runs no backward, and none is measured: it takes 0 seconds and bytes.

    Times are of rows of one sequence without padding, as long texts have them when they are packed; bytes are the most
    that rows with padding, and rows that two sequences share, take: both need a mask more, so they bound all. `limits`
    bound the repetition of times; each class runs a few times in any case. Sizes for which the device has too little
    memory are left out, with a note. All of it runs in the device's lane of compute, as a run's does. `beside` is
    called with something to compute, a block's forward and backward, for whoever measures what else that costs; it
    returns its seconds. Errors: MemoryBudgetError where no size is left.
    """
    sizes = sorted(micro_batch_sizes)
    classes = _representatives(model)
    begun = None
    for most in range(len(sizes), 0, -1):  # what all sizes share is as large as the largest
        begun = _begun(model, layers, make_micro_batch, weights, device, sequence_length, sizes[:most], clock)
        if begun:
            break
    fitting: list[int] = []
    if begun:
        bench, context = begun
        spaces = _measure_spaces(bench, classes, list(context), portion(progress, 0.0, 0.4))
        fitting = [size for size in context if all((name, size) in spaces for name in classes)]
    if not begun or not fitting:
        raise MemoryBudgetError(
            f"{device.name}: a layer of {model.name} at micro-batch size {sizes[0]} and sequence length "
            f"{sequence_length} does not fit into its memory; choose a smaller micro-batch size or shorter sequences"
        )
    while True:
        try:
            with device.lane("compute"):
                times, cold = _measure_times(bench, classes, fitting, limits, portion(progress, 0.4, 1.0))
            break
        except MemoryBudgetError:  # somebody else took what it had a moment ago
            if len(fitting) == 1:
                raise
            fitting.pop()
    if beside is not None:
        block = model.layers[FIRST_BLOCK].layer_class
        both = [Figure(block, fitting[len(fitting) // 2], backward) for backward in bench.directions(classes[block])]
        bench.load(classes[block])
        beside(lambda: sum(bench.seconds(classes[block], figure, 1) for figure in both))
    notes = [*weights.notes, *model.remarks(sequence_length)]
    notes += [f"micro-batch size {size} does not fit into {device.name}" for size in sizes if size not in fitting]
    if trouble := _trouble(times):
        notes.append(f"{model.name}: {trouble}")

    def timing(name: str, size: int) -> Timing:
        forward, backward = (Figure(name, size, direction) for direction in (False, True))
        return Timing(
            micro_batch_size=size,
            forward_seconds=times[forward].mean,
            backward_seconds=times[backward].mean if backward in times else 0.0,
            forward_cold_seconds=cold[forward],
            backward_cold_seconds=cold.get(backward, 0.0),
            forward_workspace_bytes=spaces[name, size].forward_workspace,
            backward_workspace_bytes=spaces[name, size].backward_workspace,
            saved_activation_bytes=spaces[name, size].saved_activations,
            process_growth_bytes=spaces[name, size].process_growth,
        )

    return ModelCosts(
        classes=tuple(LayerClass(name=name, timings=tuple(timing(name, size) for size in fitting)) for name in classes),
        context_bytes={size: context[size] for size in fitting},
        notes=notes,
        kernels=_kernels(list(spaces.values()), sizes[0] * sequence_length),
    )


def _begun(
    model: Model,
    layers: Layers,
    make_micro_batch: MakeMicroBatch,
    weights: Weights,
    device: Device,
    sequence_length: int,
    sizes: Sequence[int],
    clock: Clock,
) -> "tuple[_Bench, dict[int, int]] | None":
    """The inputs of all sizes, and what a micro-batch of each keeps for the step; None where the device's memory is too
    small for the largest."""
    try:
        with device.lane("compute"):
            bench = _Bench(model, layers, make_micro_batch, weights, device, sequence_length, sizes, clock)
            return bench, bench.begin()
    except (MemoryBudgetError, torch.OutOfMemoryError):
        return None


def _kernels(spaces: Sequence[Space], first: int) -> tuple[Kernels, ...]:
    """What all classes together keep for each number of tokens but the `first`."""
    kept: Counter[int] = Counter()
    for space in spaces:
        kept.update(space.kernels)
    return tuple(Kernels(tokens=tokens, kept_bytes=kept[tokens]) for tokens in sorted(kept) if tokens != first)


def _representatives(model: Model) -> dict[str, int]:
    """Of each layer class, in order, the layer that is measured: the first that hands a gradient down as it runs
    backward, else one that runs backward, else the first."""
    lowest = model.first_trained
    members: dict[str, list[int]] = {}
    for index, layer in enumerate(model.layers):
        members.setdefault(layer.layer_class, []).append(index)
    return {
        name: min(mine, key=lambda index: (index <= lowest, index < lowest, index)) for name, mine in members.items()
    }


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


def _measure_spaces(
    bench: "_Bench", classes: Mapping[str, int], sizes: Sequence[int], progress: Progress
) -> dict[tuple[str, int], Space]:
    """The space of every class and size, without those that the device's memory is too small for."""
    spaces: dict[tuple[str, int], Space] = {}
    for step, (name, layer) in enumerate(classes.items()):
        with bench.lane():
            bench.load(layer)
        for part, size in enumerate(sizes):
            progress((step + part / len(sizes)) / len(classes), f"memory of {name} at micro-batch size {size}")
            try:
                with bench.lane():
                    spaces[name, size] = bench.space(layer, size)
            except (MemoryBudgetError, torch.OutOfMemoryError):
                break
    return spaces


def _measure_times(
    bench: "_Bench", classes: Mapping[str, int], sizes: Sequence[int], limits: Limits, progress: Progress
) -> tuple[dict[Figure, Measurement], dict[Figure, float]]:
    """Seconds of every class, size and direction, and how many more the first of a layer's runs takes."""
    longer: dict[Figure, list[float]] = {}

    def seconds(figure: Figure) -> float:
        layer = classes[figure.layer_class]
        bench.load(layer)
        bench.forget(layer)
        first = bench.seconds(layer, figure, 1)
        warm = bench.seconds(layer, figure, max(1, min(RUNS_A_SAMPLE, math.ceil(SAMPLE_SECONDS / first))))
        longer.setdefault(figure, []).append(first - warm)
        return warm

    figures = [
        Figure(name, size, backward)
        for name, layer in classes.items()
        for size in sizes
        for backward in bench.directions(layer)
    ]
    times = repeat(
        {f: partial(seconds, f) for f in figures}, limits, progress, "seconds of the layers", clock=bench.clock
    )
    return times, {figure: max(mean_of(each), 0.0) for figure, each in longer.items()}


def _trouble(times: Mapping[Figure, Measurement]) -> str | None:
    """All unstable times in one line, the worst by name."""
    unstable = {figure: trouble for figure, measured in times.items() if (trouble := measured.trouble())}
    if not unstable:
        return None
    worst = max(unstable, key=lambda figure: times[figure].spread)
    return f"{len(unstable)} of {len(times)} times are unstable, most the {worst}: {unstable[worst]}"


class _Bench:
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
    ) -> None:
        self.clock = clock
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
        self._shares = sequence_length > 1 and model.keeps_apart(sequence_length)
        self._head = len(model.layers) - 1
        self._largest = max(sizes) * sequence_length * model.hidden_size
        elements = max(sum(model.states[state].elements for state in layer.states) for layer in model.layers)
        self._flat_weights = device.allocate(elements * model.dtype.itemsize).view(model.dtype)
        trained = [model.trained(layer) for layer in range(len(model.layers))]
        elements = max(sum(model.states[state].elements for state in states) for states in trained)
        self._flat_gradients = device.allocate(elements * GRADIENT_BYTES).view(torch.float32).zero_()
        self._hidden, self._out, self._out_gradient, self._in_gradient = (self._array(seed) for seed in range(4))
        self._elsewhere = torch.zeros(ELSEWHERE_BYTES // 4, device=self._flat_weights.device)
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
        micro_batches = [self._make_micro_batch(ids, ids, None, None) for ids in self._ids]
        for masked in (self._padded, *([self._shared] if self._shares else [])):
            for size, ids in zip(self._sizes, self._ids, strict=True):
                micro_batch = masked(ids)
                micro_batches.append(micro_batch)
                self._layers.begin_step(0, [micro_batch])
                self._layers.forward(0, 0, self._layer_weights, None, self._out)
                context[size] = max(context[size], self._layers.context_bytes() + 3 * ids.nbytes)
        self._shorter = {}
        for size, ids in zip(self._sizes, self._ids, strict=True):
            begin = len(micro_batches)
            micro_batches += [self._masked(ids[:, :length]) for length in row_lengths(ids.shape[1])[:-1]]
            self._shorter[size] = range(begin, len(micro_batches))
        self._layers.begin_step(1, micro_batches)
        for micro_batch in range(len(micro_batches)):
            self._layers.forward(0, micro_batch, self._layer_weights, None, self._out)
        return context

    def _padded(self, ids: torch.Tensor) -> Any:
        """A micro-batch of which the last row is half padding, or as much as the model allows; its three inputs are of
        one size."""
        mask = torch.ones_like(ids)
        mask[-1, max(ids.shape[1] - ids.shape[1] // 2, self._model.least_row(ids.shape[1])) :] = 0
        return self._make_micro_batch(ids, ids.masked_fill(mask == 0, IGNORED_LABEL), mask, None)

    def _shared(self, ids: torch.Tensor) -> Any:
        """A micro-batch of which two sequences share each row; its three inputs are of one size."""
        positions = torch.arange(ids.shape[1]).repeat(ids.shape[0], 1)
        half = ids.shape[1] // 2
        positions[:, half:] -= half
        return self._make_micro_batch(ids, ids.masked_fill(positions == 0, IGNORED_LABEL), None, positions)

    @property
    def _masked(self) -> Callable[[torch.Tensor], Any]:
        """What makes the micro-batches that take most: where sequences share rows, there is a mask in any case."""
        return self._shared if self._shares else self._padded

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
            stop = start + self._model.states[state].elements
            place = self._flat_weights[start:stop]
            if self._device.kind == "cpu":
                self._weights.read(state, place)
            else:
                staged = torch.empty(stop - start, dtype=self._model.dtype)
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

    def forward(self, layer: int, micro_batch: int) -> None:
        """A layer's forward; the head's yields the loss."""
        if layer == self._head:
            self._layers.loss(micro_batch, self._layer_weights, self._hidden)
        else:
            hidden = self._hidden if layer else None
            self._layers.forward(layer, micro_batch, self._layer_weights, hidden, self._out)

    def backward(self, layer: int, micro_batch: int) -> None:
        """A layer's backward, which recomputes its forward first."""
        self._layers.backward(
            layer,
            micro_batch,
            self._layer_weights,
            self._hidden if layer else None,
            self._out_gradient if layer != self._head else None,
            self._in_gradient if layer > self._model.first_trained else None,
            self._layer_gradients,
        )

    def space(self, layer: int, size: int) -> Space:
        """The most that the loaded layer takes for a micro-batch with a mask, beyond weights, gradients and inter-layer
        arrays."""
        found = []
        kept = [process.kept_bytes()]
        for kind in range(1, 3 if self._shares else 2):
            micro_batch = kind * len(self._sizes) + self._sizes.index(size)
            _, forward = self._device.peak_bytes(partial(self.forward, layer, micro_batch))
            backward = saved = 0
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

    def _process_growth(self, layer: int, size: int) -> int | None:
        """What the process grows by at most while micro-batches follow each other through the layer; only where they
        compute in the process's own memory. Those of shorter rows come between, as they may in a run."""
        if self._device.kind != "cpu":
            return None
        run = self.backward if True in self.directions(layer) else self.forward

        def several() -> None:
            started = self.clock()
            for done in range(GROWING_RUNS):
                if done and self.clock() - started > GROWING_SECONDS:
                    break
                run(layer, len(self._sizes) + self._sizes.index(size))

        grown = []
        for _ in range(GROWING_ROUNDS):
            for micro_batch in self._shorter[size]:
                run(layer, micro_batch)
            grown.append(process.growth_bytes(several))
        return max((growth for growth in grown if growth is not None), default=None)

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
