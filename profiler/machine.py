"""Measures what this machine does: its link to the device and the rate of the optimizer.

It measures with the executor's device and the native kernels and knows nothing of models. What the machine is, and may
be used of it, `processor` and the memory of `native.process` say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ssdplan.native import Arena, adamw_statistics, adamw_summed
from ssdplan.plans.homes import OPTIMIZER_BYTES
from ssdplan.plans.profile import ELEMENT_BYTES, OptimizerStates, Precision
from ssdplan.profiler.clock import REAL, Clock
from ssdplan.profiler.measure import Limits, Measurement, Progress, repeat
from ssdplan.profiler.parts import Device

MIB = 1 << 20
COPY_SIZES = (8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
UPDATE_ELEMENTS = 12 << 20
"""264 MiB moved at the least: several times most last-level caches."""
UPDATE_CHUNK = 1 << 20
"""Elements a call: 12 MiB of optimizer states, in the range of the requests that training makes of the ssd."""
PAUSE_SECONDS = 5e-4
"""Before each call, for in a step other work lies between two: the threads of the first have gone to sleep."""


def measure_link(
    device: Device, limits: Limits, progress: Progress, *, clock: Clock = REAL
) -> tuple[Measurement, Measurement, list[str]]:
    """Seconds of a byte to the device and from it, over copies of 8 to 64 MiB; and notes for people."""
    arena = device.host_arena(COPY_SIZES[-1])
    try:
        notes = [f"host memory: {arena.note}"] if arena.note else []
        h2d, d2h = _measure_copies(device, arena.bytes, limits, progress, clock)
    finally:
        device.release(arena)
    for name, figure in (("host to device", h2d), ("device to host", d2h)):
        if trouble := figure.trouble():
            notes.append(f"copies {name}: {trouble}")
    return h2d, d2h, notes


def _measure_copies(
    device: Device, host: torch.Tensor, limits: Limits, progress: Progress, clock: Clock
) -> tuple[Measurement, Measurement]:
    target = device.allocate(host.numel())
    host.fill_(1)
    target.fill_(2)  # memory that was never touched is not there yet
    device.synchronize()

    def of_a_byte(copy: Callable[[torch.Tensor, torch.Tensor], None], to: torch.Tensor, source: torch.Tensor) -> float:
        started = clock()
        for nbytes in COPY_SIZES:
            copy(to[:nbytes], source[:nbytes])
        return (clock() - started) / sum(COPY_SIZES)

    copies = {
        "h2d": partial(of_a_byte, device.copy_h2d, target, host),
        "d2h": partial(of_a_byte, device.copy_d2h, host, target),
    }
    figures = repeat(copies, limits, progress, f"copies to and from {device.name}", clock=clock)
    return figures["h2d"], figures["d2h"]


@dataclass(frozen=True, slots=True)
class Updates:
    """Seconds of an element of the fused optimizer, as steps call it, with a copy of the weights and the sum of the
    gradient's squares."""

    fp32: Measurement
    bf16: Measurement
    """Of the moments."""
    summed: Measurement
    """As `fp32`, with the checksums of the states before and after."""

    @property
    def checksum_rate(self) -> float | None:
        """Bytes of states a second of which both checksums are taken in passing; None where that took no time."""
        seconds = self.summed.mean - self.fp32.mean
        return OPTIMIZER_BYTES["fp32"] / seconds if seconds > 0 else None


class UpdateBench:
    """States and gradients of several MiB, and the optimizer that updates them as steps do, chunk by chunk."""

    def __init__(self, precision: Precision, threads: int, available_bytes: int, *, clock: Clock = REAL) -> None:
        """The copy of the weights is in `precision`; of `available_bytes` it takes a quarter at most."""
        self.threads, self._precision, self._element = threads, precision, ELEMENT_BYTES[precision]
        self.clock = clock
        count = min(UPDATE_ELEMENTS, available_bytes // 4 // (20 + self._element))
        self.count = max(count // UPDATE_CHUNK, 1) * UPDATE_CHUNK
        self._arena = Arena(self.count * (20 + self._element), lock=False)
        # No denormal numbers, which are slow: two of bf16's 0.01 are about 0.01 in fp32 as well.
        torch.from_dlpack(self._arena)[: 20 * self.count].view(torch.bfloat16).fill_(0.01)
        self._settings: dict[str, Any] = {
            "lr": 1e-4,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "step": 10,
            "threads": threads,
        }

    def seconds_of_an_element(self, states: OptimizerStates, *, summed: bool = False) -> float:
        """On average over all of them."""
        seconds = 0.0
        for first in range(0, self.count, UPDATE_CHUNK):
            self.clock.sleep(PAUSE_SECONDS)
            seconds += self.seconds_of_a_chunk(first, states, summed=summed)
        return seconds / self.count

    def seconds_of_a_chunk(self, first: int, states: OptimizerStates, *, summed: bool) -> float:
        """Of UPDATE_CHUNK elements from `first` on; `summed`: with the checksums of their states before and after, of
        which those are in fp32."""
        assert states == "fp32" or not summed
        master, gradient, exp_avg, exp_avg_sq, exp_avg_bf16, parameter = (
            self._arena.address + 4 * self.count * part for part in range(6)
        )
        if states == "bf16":
            exp_avg, exp_avg_sq = exp_avg_bf16, exp_avg_bf16 + 2 * self.count
        each = ELEMENT_BYTES[states]
        streams = (
            master + 4 * first,
            exp_avg + each * first,
            exp_avg_sq + each * first,
            gradient + 4 * first,
            parameter + self._element * first,
            self._precision,
            UPDATE_CHUNK,
        )
        started = self.clock()
        if summed:
            ends = [4 * UPDATE_CHUNK, 8 * UPDATE_CHUNK, 12 * UPDATE_CHUNK]
            adamw_summed(*streams, positions=(0, *ends[:2]), ends=ends, **self._settings)
        else:
            adamw_statistics(*streams, moment_dtype=states, **self._settings)
        return self.clock() - started


def measure_update(bench: UpdateBench, limits: Limits, progress: Progress) -> tuple[Updates, list[str]]:
    """The times of updates, and notes for people."""
    updates = {
        "states in fp32": partial(bench.seconds_of_an_element, "fp32"),
        "states in bf16": partial(bench.seconds_of_an_element, "bf16"),
        "checksums of its states": partial(bench.seconds_of_an_element, "fp32", summed=True),
    }
    figures = repeat(updates, limits, progress, f"optimizer on {bench.threads} threads", clock=bench.clock)
    troubles = {what: figure.trouble() for what, figure in figures.items()}
    notes = [f"optimizer with {what}: {trouble}" for what, trouble in troubles.items() if trouble]
    return Updates(*figures.values()), notes
