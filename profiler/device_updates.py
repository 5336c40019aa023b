"""Measures updates of states that stay on a GPU, the norm of the gradient before them; and Muon's updates of matrices,
on host and on the device.

It measures with the executor's updates on the executor's device and knows of a model the shapes of its matrices alone.
"""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial

import torch

from ssdplan import native
from ssdplan.plans.documents.matrices import Matrix, MatrixUpdate, workspace_bytes
from ssdplan.plans.documents.state_layout import GRADIENT_BYTES, MOMENTUM, USUAL, Precision

from .clock import REAL, Clock
from .measure import Limits, Progress, repeat
from .parts import Device, MakeDeviceUpdate, MakeMatrixUpdate
from .products import FORMATS

ELEMENTS, RANGES = 4 << 20, 8
"""Of each range that is updated at once, and how many: together several times a GPU's caches."""


def measure_device_updates(
    make_update: MakeDeviceUpdate,
    device: Device,
    precision: Precision,
    limits: Limits,
    progress: Progress,
    *,
    clock: Clock = REAL,
) -> tuple[float | None, list[str]]:
    """Elements a second, states in fp32, the norm of their gradient taken before; and notes for people. None for the
    emulated device, whose updates are those of the host, and for a GPU with too little memory."""
    each = USUAL.range_bytes(ELEMENTS), GRADIENT_BYTES * ELEMENTS, FORMATS[precision].itemsize * ELEMENTS
    if device.kind == "cpu" or device.memory_bytes() < 2 * RANGES * sum(each):
        return None, []
    states, gradients, parameters = (device.allocate(RANGES * nbytes) for nbytes in each)
    states.view(torch.float32).fill_(0.01)
    gradients.view(torch.float32).fill_(0.01)
    arrays = list(zip((states, gradients, parameters), each, strict=True))
    updates: list[Callable[[], None]] = []
    for number in range(RANGES):
        one, gradient, copy = (array[nbytes * number :][:nbytes] for array, nbytes in arrays)
        updates.append(make_update(one, gradient, copy, FORMATS[precision]))

    def seconds() -> float:
        started = clock()
        with device.lane("compute"):
            found = device.squares(gradients.view(torch.float32), 1)
            for update in updates:
                update()
        found()
        device.synchronize()
        return (clock() - started) / (RANGES * ELEMENTS)

    seconds()  # kernels that never ran are not there yet
    figure = repeat({"updates": seconds}, limits, progress, "updates on the device", clock=clock)["updates"]
    trouble = figure.trouble()
    return 1 / figure.mean, [f"updates on the device: {trouble}"] if trouble else []


def measure_matrix_updates(
    make_update: MakeMatrixUpdate,
    device: Device,
    precision: Precision,
    shapes: Collection[tuple[int, int]],
    limits: Limits,
    progress: Progress,
    *,
    clock: Clock = REAL,
) -> tuple[tuple[MatrixUpdate, ...], list[str]]:
    """Seconds of Muon's update of a matrix of each of `shapes`, masters in fp32, on host with torch's threads and on
    the device; and notes for people. On a GPU with too little memory for one there is no figure of it; the emulated
    device's are those of the host. Only the arrays of one matrix are there at once."""
    on_gpu = device.kind != "cpu"

    def host(nbytes: int) -> torch.Tensor:
        return torch.from_dlpack(native.Arena(nbytes, lock=False)).zero_()

    def seconds_of(shape: tuple[int, int], there: bool) -> float:
        matrix = Matrix(rows=shape[0], columns=shape[1], start=0)
        make = device.allocate if there else host
        states = make(MOMENTUM["fp32"].range_bytes(matrix.stop))
        gradient, parameters = make(GRADIENT_BYTES * matrix.stop), make(FORMATS[precision].itemsize * matrix.stop)
        for array in (states, gradient):
            array.view(torch.float32).fill_(0.01)
        gradient.view(torch.float32)[:: shape[1] + 1].fill_(0.1)
        workspace = make(workspace_bytes([matrix]))
        update = make_update(matrix, states, gradient, parameters, workspace, FORMATS[precision])
        update()  # kernels that never ran are not there yet
        device.synchronize()
        started = clock()
        with device.lane("compute") if there else nullcontext():
            update()
        device.synchronize()
        return clock() - started

    def nbytes(shape: tuple[int, int]) -> int:
        matrix = Matrix(rows=shape[0], columns=shape[1], start=0)
        states = MOMENTUM["fp32"].range_bytes(matrix.stop) + workspace_bytes([matrix])
        return states + (GRADIENT_BYTES + FORMATS[precision].itemsize) * matrix.stop

    work = {(shape, False): partial(seconds_of, shape, False) for shape in shapes}
    if on_gpu:
        fits = [shape for shape in shapes if 2 * nbytes(shape) < device.memory_bytes()]
        work |= {(shape, True): partial(seconds_of, shape, True) for shape in fits}
    figures = repeat(work, limits, progress, "updates of matrices", clock=clock)
    notes = [
        f"updates of matrices of {shape[0]} x {shape[1]}{' on the device' if there else ''}: {trouble}"
        for (shape, there), figure in figures.items()
        if (trouble := figure.trouble())
    ]
    made = []
    for shape in sorted(shapes):
        seconds = figures[shape, False].mean
        there = figures[shape, True].mean if (shape, True) in figures else None
        there = there if on_gpu else seconds
        made.append(MatrixUpdate(rows=shape[0], columns=shape[1], seconds=seconds, device_seconds=there))
    return tuple(made), notes
