"""ZeRO-Infinity as the baseline: the host memory, traffic and time of its way of training, and of each habit replaced.

Owns that model, from MemAscend (sections III to V, which take its host memory apart) and GreedySnake (sections 1 and 3,
which count what its schedule moves). It plans nothing and nothing runs it: it is what our plans are compared with.
docs/papers.md holds it to the papers' own figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import prod

from ssdplan.plans.analysis.allocators import Pool, by_class, one_size, page_lock_waste, powers_of_two
from ssdplan.plans.analysis.memory_usage import trained_elements
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.documents.state_layout import ELEMENT_BYTES, checkpoint_bytes
from ssdplan.plans.graph.contents import Role

from ..catalogue import MODELS, Shape
from ..predict.drive import combined_frontier, hull_edges
from ..program.stages import Work
from ..program.traffic import layer_groups, stages, total_bytes
from ..program.variables import CONSTANT, Linear

FP32 = 4
MOMENTS = 2
OPTIMIZER_BUFFERS = 5
"""Buffers of the largest tensor in fp32, through which optimizer states and gradients pass."""
SWAP_OUT_BUFFERS = 1
"""The same in the parameters' precision, for updated parameters on their way out. Both together are 22 bytes an element
of the largest tensor in fp16: the 11.17 GiB that MemAscend measures for Qwen2.5-7B (section V-A)."""
INFINITY_COPIES = 1.25
"""What the overflow check adds to the gradients: isinf copies them, then makes a byte an element (MemAscend III-C)."""
PROCESS_BYTES = round(1.63 * 2**30)
"""What is left of a process when every buffer has its exact size (MemAscend V-A, for Qwen2.5-7B)."""


@dataclass(frozen=True, slots=True)
class Ways:
    """ZeRO-Infinity's habits; each can be left off by itself. What then takes its place is in the field's text."""

    one_size_buffers: bool = True
    """Parameter buffers as large as the largest tensor; off: each as large as its tensor (MemAscend IV-B)."""
    powers_of_two: bool = True
    """Page-locked blocks rounded up to a power of two, each; off: to a page (MemAscend IV-C)."""
    full_gradient_buffer: bool = True
    """All gradients on host in fp32; off: those of two layers, one that arrives and one that is being updated, for
    gradients accumulate on the device (GreedySnake 3.4 and 4.3)."""
    overflow_copies: bool = True
    """The overflow check makes copies; off: it reads the gradients where they are (MemAscend IV-D). bf16 needs none."""


ZERO_INFINITY = Ways()
MEMASCEND = Ways(one_size_buffers=False, powers_of_two=False, overflow_copies=False)


@dataclass(frozen=True, slots=True)
class Tensors:
    """What of a model passes through host memory. Sizes are elements; vectors stay in place and are not here."""

    parameters: int
    hidden_size: int
    blocks: int
    element_bytes: int
    ends: tuple[int, ...]
    """The token table and the head's projection, which take a buffer each also where they are tied."""
    block: tuple[int, ...]
    """The matrices of one block."""
    frozen: int = 0
    """Of the parameters, those without a gradient."""

    @property
    def largest(self) -> int:
        return max(*self.ends, *self.block)

    @property
    def largest_layer(self) -> int:
        return max(*self.ends, sum(self.block))


def tensors_of_shape(shape: Shape, element_bytes: int = 2) -> Tensors:
    """The tensors of a shape of the catalogue."""
    return Tensors(
        parameters=shape.parameters,
        hidden_size=shape.hidden,
        blocks=shape.blocks,
        element_bytes=element_bytes,
        ends=(shape.vocab * shape.hidden,) * 2,
        block=tuple(prod(tensor) for tensor in shape.block() if len(tensor) > 1),
    )


def tensors_of_model(model: Model) -> Tensors:
    """The tensors of a profiled model: its shape's if the catalogue knows it, else in equal parts.

    A profile has a block's elements and not its tensors. Equal parts have the least largest tensor that there can be,
    and an unknown architecture has the fewest of all that are known; so the baseline comes out small, not large.
    """
    element = ELEMENT_BYTES[model.precision]
    frozen = max(model.parameters - trained_elements(model), 0)
    for shape in MODELS:
        if (shape.architecture, shape.parameters) == (model.architecture, model.parameters):
            return replace(tensors_of_shape(shape, element), frozen=frozen)
    matrices = {shape.architecture: len(tensors_of_shape(shape).block) for shape in MODELS}
    count = matrices.get(model.architecture, min(matrices.values()))
    blocks = model.layers[1:-1]
    elements = max(sum(model.states[index].elements for index in layer.states) for layer in blocks)
    return Tensors(
        parameters=model.parameters,
        hidden_size=model.hidden_size,
        blocks=len(blocks),
        element_bytes=element,
        ends=(model.vocab_size * model.hidden_size,) * 2,
        block=(elements // count,) * count,
        frozen=frozen,
    )


# Host memory.


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """Bytes of host memory at the peak, by what they hold; all processes together."""

    parameter_buffers: int
    gradient_buffer: int
    overflow_check: int
    optimizer_buffers: int
    """With the swap-out buffer."""
    checkpoints: int
    page_locking: int
    """What rounding adds to the page-locked blocks, all but the overflow check's."""
    processes: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def zero_infinity_memory(
    tensors: Tensors,
    ways: Ways = ZERO_INFINITY,
    *,
    checkpoint_tokens: int = 0,
    processes: int = 1,
    blocks_in_flight: int = 1,
) -> HostNeeds:
    """The peak of host memory when parameters and optimizer states live on ssd (MemAscend III, IV-B to IV-D, V-A).

    `checkpoint_tokens` are those of each process's micro-batch whose checkpoints are kept on host, a block's for itself
    (equation 1, V-B); 0 keeps them on the device. States are dealt evenly to `processes`, one a GPU. `blocks_in_flight`
    is N of section IV-B: the blocks whose parameters are on their way at once.
    """
    element = tensors.element_bytes

    def pool(role: Role, elements: int, nbytes: int, slots: int = 1) -> Pool:
        return Pool((role,), -(-elements // processes) * nbytes, slots * processes)

    streamed = [pool(Role.PARAMETERS, elements, element) for elements in tensors.ends]
    streamed += [pool(Role.PARAMETERS, elements, element, blocks_in_flight) for elements in tensors.block]
    if ways.one_size_buffers:
        slots = sum(each.slots for each in streamed)
        streamed = [Pool((Role.PARAMETERS,), one_size(streamed) // slots, slots)]
    held = tensors.parameters - tensors.frozen if ways.full_gradient_buffer else 2 * tensors.largest_layer
    gradients = [pool(Role.GRADIENTS, held, FP32)]
    optimizer = [
        pool(Role.OPTIMIZER_IN_TRANSIT, tensors.largest, FP32, OPTIMIZER_BUFFERS),
        pool(Role.PARAMETERS_IN_TRANSIT, tensors.largest, element, SWAP_OUT_BUFFERS),
    ]
    row = checkpoint_tokens * tensors.hidden_size * element
    checkpoints = [Pool((Role.CHECKPOINTS,), row, tensors.blocks * processes)] if row else []
    locked = [*streamed, *gradients, *optimizer, *checkpoints]
    return HostNeeds(
        parameter_buffers=by_class(streamed),
        gradient_buffer=by_class(gradients),
        overflow_check=round(INFINITY_COPIES * by_class(gradients)) if ways.overflow_copies else 0,
        optimizer_buffers=by_class(optimizer),
        checkpoints=by_class(checkpoints),
        page_locking=_rounding(locked, ways.powers_of_two),
        processes=PROCESS_BYTES * processes,
    )


def _rounding(locked: Sequence[Pool], to_powers_of_two: bool) -> int:
    if to_powers_of_two:
        return powers_of_two(locked) - by_class(locked)
    return sum(page_lock_waste(pool.slot_bytes) * pool.slots for pool in locked)


# Traffic.


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes moved in a step."""

    h2d: float = 0.0
    d2h: float = 0.0
    ssd_read: float = 0.0
    ssd_write: float = 0.0

    @property
    def link(self) -> float:
        return self.h2d + self.d2h

    @property
    def ssd(self) -> float:
        return self.ssd_read + self.ssd_write


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """What a step of the horizontal schedule moves, by what it is."""

    parameters: Moved
    gradients: Moved
    checkpoints: Moved
    optimizer: Moved

    @property
    def total(self) -> Moved:
        parts = (self.parameters, self.gradients, self.checkpoints, self.optimizer)
        return Moved(*(sum(getattr(part, field.name) for part in parts) for field in fields(Moved)))


def horizontal_traffic(
    model: Model,
    *,
    micro_batch_size: int,
    micro_batches: int,
    parameters_on_host: bool = False,
    optimizer_bytes: int = FP32,
) -> StepTraffic:
    """What ZeRO-Infinity moves in a step of `micro_batches` that trains all (GreedySnake 1, 3.3, MemAscend III-D).

    Each micro-batch takes all parameters to the device twice, and back and forth the fp32 sum of all gradients, which
    the first only brings. Optimizer states live on ssd, parameters too unless they stay on host; checkpoints on host.
    With fp32 optimizer states (`optimizer_bytes` 4) the update reads and writes master weights and moments, reads
    gradients that were written before it, and writes parameters. With bf16 ones (2) weights and moments are all there
    is: parameters have no other copy, and gradients stay on host (MemAscend VI-B3).
    """
    assert optimizer_bytes in (FP32, 2)
    n, elements = micro_batches, model.parameters
    weights = ELEMENT_BYTES[model.precision] * elements
    sums = FP32 * elements
    checkpoints = n * len(model.layers[1:-1]) * checkpoint_bytes(model, micro_batch_size)
    master = optimizer_bytes == FP32
    states = (MOMENTS + (1 if master else 0)) * optimizer_bytes * elements
    return StepTraffic(
        parameters=Moved(
            h2d=2 * n * weights,
            ssd_read=0 if parameters_on_host else 2 * n * weights + (0 if master else weights),
            ssd_write=0 if parameters_on_host else weights,
        ),
        gradients=Moved(
            h2d=(n - 1) * sums,
            d2h=n * sums,
            ssd_read=sums if master else 0,
            ssd_write=sums if master else 0,
        ),
        checkpoints=Moved(h2d=checkpoints, d2h=checkpoints),
        optimizer=Moved(ssd_read=states, ssd_write=states),
    )


def vertical_traffic(model: Model, *, micro_batch_size: int, micro_batches: int) -> Moved:
    """What our own schedule moves when all states and checkpoints live on ssd and no update is delayed."""
    work = Work(micro_batch_size=micro_batch_size, micro_batches=micro_batches, schedule="vertical")
    found = stages(model, layer_groups(model), work)
    return Moved(
        h2d=sum(stage.count * stage.h2d_bytes[CONSTANT] for stage in found),
        d2h=sum(stage.count * stage.d2h_bytes[CONSTANT] for stage in found),
        ssd_read=_all_on_ssd(total_bytes(found, "read")),
        ssd_write=_all_on_ssd(total_bytes(found, "write")),
    )


def _all_on_ssd(form: Linear) -> float:
    """The form's value where everything is on ssd and prompt."""
    return sum(
        factor
        for variable, factor in form.items()
        if variable is CONSTANT or (variable.part == "prompt" and variable.tier == "ssd")
    )


# Time.


def horizontal_seconds(
    model: Model, machine: Machine, *, micro_batch_size: int, micro_batches: int, parameters_on_host: bool = False
) -> float:
    """The least seconds of a step of ZeRO-Infinity's schedule that trains the whole model, whatever overlaps.

    A pass takes at least the time of each resource. The update can only begin with the last micro-batch's backward, and
    the next step waits for it (GreedySnake 3.3). Without fill and drain, as the linear program's optimum.
    """
    n = micro_batches
    traffic = horizontal_traffic(
        model,
        micro_batch_size=micro_batch_size,
        micro_batches=n,
        parameters_on_host=parameters_on_host,
    )
    edges = hull_edges(combined_frontier(machine.volumes))
    timings = [model.timing(layer.layer_class, micro_batch_size) for layer in model.layers]
    forward = sum(timing.forward_stage_seconds(1) for timing in timings[:-1])
    backward = sum(timing.backward_stage_seconds(1) for timing in timings)
    weights = traffic.parameters.h2d / (2 * n)
    gradients = traffic.gradients.d2h / n
    checkpoints = traffic.checkpoints.h2d / n
    weights_read = 0.0 if parameters_on_host else weights

    def least(compute: float, moved: Moved, updates: float = 0.0) -> float:
        to, back = moved.h2d / machine.h2d_bandwidth, moved.d2h / machine.d2h_bandwidth
        cpu = updates / machine.update_rate
        drive = max(a * moved.ssd_read + b * moved.ssd_write for a, b in edges)
        if machine.compute_shares_cpu:
            return max(compute + cpu + (to + back) / machine.cores, to, back, drive)
        return max(compute, cpu, to, back, drive)

    def backward_of(number: int) -> Moved:
        returning = gradients if number else 0.0
        return Moved(weights + checkpoints + returning, gradients, weights_read)

    forwards = n * least(forward, Moved(weights, checkpoints, weights_read))
    backwards = sum(least(backward, backward_of(number)) for number in range(n - 1))
    last, whole = backward_of(n - 1), traffic.total
    update = Moved(
        last.h2d,
        last.d2h,
        whole.ssd_read - (2 * n - 1) * weights_read,
        whole.ssd_write,
    )
    return forwards + backwards + least(backward, update, model.parameters)
