"""Measures zeroth-order passes over parameters: how fast copies are made, and what each pending update costs; and what
host does for a table that comes by rows.

It measures with the executor's pass on the executor's device and knows nothing of models.
"""

from dataclasses import dataclass
from functools import partial

import torch

from ssdplan.plans.documents.state_layout import Precision

from .clock import REAL, Clock
from .measure import Limits, Progress, repeat
from .parts import Device, Perturb
from .products import FORMATS

PERTURBED_ELEMENTS = 12 << 20
"""Three arrays of them are several times most last-level caches."""
PENDING = 4
"""Updates of the pass that tells how much longer each makes one."""


ROW_ELEMENTS = 2048
"""Of a table whose rows are packed."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Rates of zeroth-order passes, in elements a second."""

    copies: float
    """Of a pass that makes both copies and no update."""
    pending: float
    """Of each pending update alone, by which a pass takes longer."""


def measure_passes(
    perturb: Perturb,
    device: Device,
    precision: Precision,
    threads: int,
    limits: Limits,
    progress: Progress,
    *,
    clock: Clock = REAL,
) -> tuple[Passes, Passes | None, list[str]]:
    """Passes over parameters in the profile's precision; in half precision, passes over their fp32 masters too; and
    notes for people."""
    dtype = FORMATS[precision]
    formats = [dtype] if dtype == torch.float32 else [dtype, torch.float32]
    kept = {form: device.allocate(PERTURBED_ELEMENTS * form.itemsize).view(form).fill_(0.01) for form in formats}
    plus, minus = (device.allocate(PERTURBED_ELEMENTS * dtype.itemsize).view(dtype).fill_(0.01) for _ in range(2))

    def seconds(form: torch.dtype, updates: int) -> float:
        pending = [(number, 0, 1e-6, 1.0) for number in range(updates)]
        started = clock()
        perturb(
            kept[form], plus, minus, seed=1, tensor=2, step=3, direction=0, eps=1e-3, pending=pending, threads=threads
        )
        device.synchronize()
        return (clock() - started) / PERTURBED_ELEMENTS

    for form in formats:
        seconds(form, 1)  # memory that was never touched is not there yet, nor kernels that never ran
    figures = repeat(
        {(form, updates): partial(seconds, form, updates) for form in formats for updates in (0, PENDING)},
        limits,
        progress,
        "zeroth-order passes",
        clock=clock,
    )
    notes = [f"zeroth-order passes: {trouble}" for figure in figures.values() if (trouble := figure.trouble())]
    rates = []
    for form in formats:
        copies, updates = figures[form, 0].mean, figures[form, PENDING].mean
        rates.append(Passes(1 / copies, 1 / max((updates - copies) / PENDING, copies / 100)))
    return rates[0], rates[1] if len(rates) > 1 else None, notes


def measure_rows(
    perturb: Perturb, precision: Precision, threads: int, limits: Limits, progress: Progress, *, clock: Clock = REAL
) -> tuple[float, float, list[str]]:
    """What host does for a table that comes by rows: elements a second of each pending update that it makes in its own
    memory, of the profile's precision or of fp32 masters, whichever is slower; bytes a second of rows that it packs in
    the order of their numbers; and notes for people."""
    dtype = FORMATS[precision]
    formats = list(dict.fromkeys((dtype, torch.float32)))
    tables = {form: torch.full((PERTURBED_ELEMENTS,), 0.01, dtype=form) for form in formats}
    matrix = tables[torch.float32].view(-1, ROW_ELEMENTS)
    numbers = torch.randperm(len(matrix), generator=torch.Generator().manual_seed(0))[: len(matrix) // 4].sort().values
    packed = torch.zeros(len(numbers), ROW_ELEMENTS)
    pending = [(number, 0, 1e-6, 1.0) for number in range(PENDING)]

    def update(form: torch.dtype) -> float:
        started = clock()
        perturb(
            tables[form], None, None, seed=1, tensor=2, step=3, direction=0, eps=1e-3, pending=pending, threads=threads
        )
        return (clock() - started) / (PERTURBED_ELEMENTS * PENDING)

    def pack() -> float:
        started = clock()
        torch.index_select(matrix, 0, numbers, out=packed)
        return (clock() - started) / (packed.numel() * packed.element_size())

    work = {str(form): partial(update, form) for form in formats} | {"rows": pack}
    figures = repeat(work, limits, progress, "rows of a table", clock=clock)
    notes = [f"rows of a table: {trouble}" for figure in figures.values() if (trouble := figure.trouble())]
    slowest = max(figures[str(form)].mean for form in formats)
    return 1 / slowest, 1 / figures["rows"].mean, notes
