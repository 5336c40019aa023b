"""Measures updates of states that stay on a GPU: the optimizer there, and the norm of the gradient before it.

It measures with the executor's update on the executor's device and knows nothing of models.
"""

from collections.abc import Callable

import torch

from ssdplan.plans.documents.state_layout import GRADIENT_BYTES, USUAL, Precision

from .clock import REAL, Clock
from .measure import Limits, Progress, repeat
from .parts import Device, MakeDeviceUpdate
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
