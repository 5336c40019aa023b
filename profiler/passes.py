"""Measures zeroth-order passes over parameters: how fast copies are made, and what each pending update costs.

It measures with the executor's pass on the executor's device and knows nothing of models.
"""

from functools import partial

from ssdplan.plans.documents.state_layout import Precision

from .clock import REAL, Clock
from .measure import Limits, Progress, repeat
from .parts import Device, Perturb
from .products import FORMATS

PERTURBED_ELEMENTS = 12 << 20
"""Three arrays of them are several times most last-level caches."""
PENDING = 4
"""Updates of the pass that tells how much longer each makes one."""


def measure_passes(
    perturb: Perturb,
    device: Device,
    precision: Precision,
    threads: int,
    limits: Limits,
    progress: Progress,
    *,
    clock: Clock = REAL,
) -> tuple[float, float, list[str]]:
    """Elements a second of a zeroth-order pass that makes both copies and no update, and by how much each pending
    update slows it: elements a second of that alone; and notes for people."""
    dtype = FORMATS[precision]
    parameters, plus, minus = (
        device.allocate(PERTURBED_ELEMENTS * dtype.itemsize).view(dtype).fill_(0.01) for _ in range(3)
    )

    def seconds(updates: int) -> float:
        pending = [(number, 0, 1e-6, 1.0) for number in range(updates)]
        started = clock()
        perturb(
            parameters, plus, minus, seed=1, tensor=2, step=3, direction=0, eps=1e-3, pending=pending, threads=threads
        )
        device.synchronize()
        return (clock() - started) / PERTURBED_ELEMENTS

    seconds(1)  # memory that was never touched is not there yet, nor kernels that never ran
    figures = repeat(
        {"copies": partial(seconds, 0), "updates": partial(seconds, PENDING)},
        limits,
        progress,
        "zeroth-order passes",
        clock=clock,
    )
    notes = [f"zeroth-order passes: {trouble}" for figure in figures.values() if (trouble := figure.trouble())]
    each = (figures["updates"].mean - figures["copies"].mean) / PENDING
    return 1 / figures["copies"].mean, 1 / max(each, figures["copies"].mean / 100), notes
