"""Measures what a model's layers cost on a device: seconds and bytes of each layer class at each micro-batch size.

Owns what is measured and on which inputs: real weights, random tokens, hidden states and gradients of unit scale. No
more than one layer's states are in memory at any time. It never looks inside a layer.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from ssdplan.plans.documents.profile import CompressionError, Kernels, LayerClass, Timing
from ssdplan.plans.errors import MemoryBudgetError

from .activations import measure_activations
from .clock import REAL, Clock
from .compression import measure_compression
from .layer_bench import Bench, Figure, Space
from .measure import Limits, Measurement, Progress, mean_of, portion, repeat
from .parts import Device, Layers, MakeMicroBatch, Model, Weights

Result = TypeVar("Result")

SAMPLE_SECONDS = 0.01
"""What takes less runs several times for a sample, after one run that is cold."""
RUNS_A_SAMPLE = 16
FIRST_BLOCK = 1


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What `measure_model` found; every class has the micro-batch sizes that fit into the device, in rising order."""

    classes: tuple[LayerClass, ...]
    context_bytes: dict[int, int]
    notes: list[str]
    kernels: tuple[Kernels, ...]
    """By tokens, what libraries keep; not of the first tokens that ran, with which everything else began."""
    choosing_bytes: int = 0
    """What the process keeps besides, which no run does."""
    compression: tuple[CompressionError, ...] = ()
    busiest_expert: float | None = None
    """Tokens of a block's busiest expert over those of a mean one, in the block that has most."""


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
    bandwidth: float = math.inf,
    activations: Limits | None = None,
    int8: bool = False,
    clock: Clock = REAL,
    whole_rows: bool = False,
) -> ModelCosts:
    """Measure one layer of each class at each micro-batch size, and what a micro-batch keeps for a step. A class whose
    layers are below all that is trained runs no backward, and none is measured: it takes 0 seconds and bytes.

    Times are of rows of one sequence without padding, as long texts have them when they are packed; bytes are the most
    that rows with padding, and rows that two sequences share, take: both need a mask more, so they bound all. With
    `whole_rows` no row is such, and bytes are without masks. `limits` bound the repetition of times; each class runs a
    few times in any case. Sizes for which the device has too little memory are left out, with a note. All of it runs in
    the device's lane of compute, as a run's does. `beside` is called with something to compute, a block's forward and
    backward, for whoever measures what else that costs; it returns its seconds. What blocks can keep of their
    activations is measured within `activations`, not at all without, and with `int8` in int8 too, and how far off that
    puts gradients; `bandwidth` is that of the slower way by which they can leave the device. Errors: MemoryBudgetError
    where no size is left.
    """
    sizes = sorted(micro_batch_sizes)
    classes = _representatives(model)
    begun = None
    for most in range(len(sizes), 0, -1):  # what all sizes share is as large as the largest
        begun = _begun(
            model, layers, make_micro_batch, weights, device, sequence_length, sizes[:most], clock, whole_rows
        )
        if begun:
            break
    fitting: list[int] = []
    if begun:
        bench, context = begun
        model.routing.begin()
        spaces = _measure_spaces(bench, classes, list(context), portion(progress, 0.0, 0.4))
        spread = model.routing.end()
        busiest_expert = spread.times if spread else None
        fitting = [size for size in context if all((name, size) in spaces for name in classes)]
    if not begun or not fitting:
        raise MemoryBudgetError(
            f"{device.name}: a layer of {model.name} at micro-batch size {sizes[0]} and sequence length "
            f"{sequence_length} does not fit into its memory; choose a smaller micro-batch size or shorter sequences"
        )
    while True:
        try:
            with device.lane("compute"):
                times, cold = _measure_times(
                    bench, classes, fitting, limits, portion(progress, 0.4, 1.0 if activations is None else 0.8)
                )
            break
        except MemoryBudgetError:  # somebody else took what it had a moment ago
            if len(fitting) == 1:
                raise
            fitting.pop()
    notes = [*weights.notes, *model.remarks(sequence_length)]
    if bench.lacks_spans:
        notes.append(
            f"{device.name}: torch has no kernels here for sequences that share a row; such rows take a mask of a byte "
            "for each pair of their tokens"
        )
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

    timings = {(name, size): timing(name, size) for name in classes for size in fitting}
    blocks = {
        name: layer
        for name, layer in classes.items()
        if 0 < layer < len(model.layers) - 1 and True in bench.directions(layer)
    }
    choosing_bytes = 0
    if activations is not None and blocks:
        of_blocks = {key: each for key, each in timings.items() if key[0] in blocks}
        part = portion(progress, 0.8, 0.9 if int8 else 1.0)
        found = measure_activations(
            bench, blocks, of_blocks, bandwidth=bandwidth, limits=activations, progress=part, int8=int8
        )
        notes += found.notes
        choosing_bytes = found.choosing_bytes
        for key, each in found.of.items():
            timings[key] = timings[key].model_copy(update={"sublayers": each.sublayers, "rungs": each.rungs})
    compression: tuple[CompressionError, ...] = ()
    if int8:
        rungs = {name: timings[name, fitting[0]].rungs for name in blocks}
        compression, remarks = measure_compression(
            bench, model, rungs, micro_batch=0, progress=portion(progress, 0.9, 1.0)
        )
        notes += remarks
    if beside is not None:
        block = model.layers[FIRST_BLOCK].layer_class
        both = [Figure(block, fitting[len(fitting) // 2], backward) for backward in bench.directions(classes[block])]
        bench.load(classes[block])
        beside(lambda: sum(bench.seconds(classes[block], figure, 1) for figure in both))
    return ModelCosts(
        classes=tuple(
            LayerClass(name=name, timings=tuple(timings[name, size] for size in fitting)) for name in classes
        ),
        context_bytes={size: context[size] for size in fitting},
        notes=notes,
        kernels=_kernels(list(spaces.values()), sizes[0] * sequence_length),
        choosing_bytes=choosing_bytes,
        compression=compression,
        busiest_expert=busiest_expert,
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
    whole_rows: bool,
) -> tuple[Bench, dict[int, int]] | None:
    """The inputs of all sizes, and what a micro-batch of each keeps for the step; None where the device's memory is too
    small for the largest."""
    try:
        with device.lane("compute"):
            bench = Bench(
                model, layers, make_micro_batch, weights, device, sequence_length, sizes, clock, whole_rows=whole_rows
            )
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


def _measure_spaces(
    bench: Bench, classes: Mapping[str, int], sizes: Sequence[int], progress: Progress
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
    bench: Bench, classes: Mapping[str, int], sizes: Sequence[int], limits: Limits, progress: Progress
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
