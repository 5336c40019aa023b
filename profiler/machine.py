"""Measures what this machine does: its link to the device and the rate of the optimizer.

It measures with the executor's device and the native kernels and knows nothing of models. What the machine is,
and how much of it may be used, `processor.py` and `native/process.py` say.
"""

import statistics
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, cycle
from typing import Any

import torch

from ssdplan.native import Arena, adamw_statistics, adamw_summed
from ssdplan.plans.documents.profile import Network
from ssdplan.plans.documents.rates import updated_bytes
from ssdplan.plans.documents.state_layout import (
    GRADIENT,
    OPTIMIZER_FORMATS,
    PARAMETERS,
    USUAL,
    OptimizerStates,
    Precision,
)
from ssdplan.plans.graph.ops import Resource

from .clock import REAL, Clock
from .contention import Work, measure_beside_collectives, measure_beside_updates
from .measure import Limits, Measurement, Progress, repeat
from .parts import Device, Ranks

MIB = 1 << 20
COPY_SIZES = (8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
UPDATE_ELEMENTS = 12 << 20
"""264 MiB moved at the least: several times most last-level caches."""
_MOMENTS: tuple[OptimizerStates, ...] = ("fp32", "bf16", "int8")
UPDATE_CHUNK = 1 << 20
"""Elements a call: 12 MiB of optimizer states, in the range of the requests that training makes of the ssd."""
PAUSE_SECONDS = 5e-4
"""Before each call, for in a step other work lies between two: the threads of the first have gone to sleep."""


LEAST_SHARE, MOST_SHARE = 4096, 64 * MIB
"""Bytes of a share: what tells a collective's fixed time, and the most that is taken of a model's largest."""
FEWEST_COLLECTIVES, MOST_COLLECTIVES = 5, 40


def measure_network(
    ranks: Ranks,
    device: Device,
    parameter_bytes: int,
    gradient_bytes: int,
    seconds: float,
    progress: Progress,
    *,
    work: Work | None = None,
    clock: Clock = REAL,
) -> Network:
    """What this rank receives a second of parameters and of gradients while all do, in shares of so many bytes at most;
    how fast it adds up gradients; and what collectives and `work`, which computes and may be None, and collectives and
    copies keep of their paces beside each other. All ranks measure at the same time, as often as each other."""
    parameters, gradients = (
        max(min(nbytes, MOST_SHARE) // LEAST_SHARE, 1) * LEAST_SHARE for nbytes in (parameter_bytes, gradient_bytes)
    )
    most, others = max(parameters, gradients) * ranks.size, ranks.size - 1
    sent, received = device.allocate(most).zero_(), device.allocate(most).zero_()

    def gather(share: int) -> None:
        ranks.gather(received[: share * ranks.size])

    def exchange(share: int) -> None:
        ranks.exchange(received[: share * ranks.size], sent[: share * ranks.size])

    def add(share: int) -> None:
        parts = received[: share * ranks.size].view(torch.float32).view(ranks.size, -1)
        for other in parts[1:]:
            parts[0].add_(other)

    def median(work: Callable[[int], None], share: int, least: int = FEWEST_COLLECTIVES) -> float:
        """Of the slowest rank each time; rank 0 says how often."""
        took: list[float] = []
        while True:
            ranks.tell(b"")  # so that all begin together
            begun = clock()
            work(share)
            device.synchronize()
            mine = struct.pack("<d?", clock() - begun, len(took) + 1 < least or sum(took) < seconds / 5)
            told = [struct.unpack("<d?", each) for each in ranks.tell(mine)]
            took.append(max(each for each, _ in told))
            progress(min(sum(took) / seconds, 1.0), "network")
            if not told[0][1] or len(took) == MOST_COLLECTIVES:
                return statistics.median(took)

    latency = min(median(gather, LEAST_SHARE), median(exchange, LEAST_SHARE))

    def bandwidth(work: Callable[[int], None], share: int) -> float:
        took = median(work, share)
        return others * share / max(took - latency, 0.1 * took)

    gathered, exchanged = bandwidth(gather, parameters), bandwidth(exchange, gradients)
    add_rate = ranks.size * gradients / median(add, gradients)
    # A message that takes a twentieth of a second at the most, so that a window has several.
    share = min(int(min(gathered, exchanged) / others / 20) // LEAST_SHARE * LEAST_SHARE, parameters, gradients)

    def both() -> None:
        gather(max(share, LEAST_SHARE))
        exchange(max(share, LEAST_SHARE))
        device.synchronize()

    beside_compute = measure_beside_collectives(ranks, both, work, clock=clock) if work else (None, None)
    arena = device.host_arena(COPY_SIZES[0])
    try:
        target = device.allocate(arena.bytes.numel())
        beside_copies = measure_beside_collectives(
            ranks, both, partial(_copies, device, clock, arena.bytes, target), clock=clock
        )
    finally:
        device.release(arena)
    return Network(
        ranks=ranks.size,
        gather_bandwidth=gathered,
        exchange_bandwidth=exchanged,
        latency_seconds=latency,
        add_rate=add_rate,
        compute_kept=beside_compute[0],
        kept_beside_compute=beside_compute[1],
        copies_kept=beside_copies[0],
        kept_beside_copies=beside_copies[1],
    )


def _copies(device: Device, clock: Clock, host: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds of a copy each way."""
    started = clock()
    with device.lane("h2d"):
        device.copy_h2d(target, host)
    with device.lane("d2h"):
        device.copy_d2h(host, target)
    return clock() - started


SLOWER = 0.9
"""Of rank 0's rate: what is worth a note."""


def slower_ranks(ranks: Ranks, rates: dict[str, float]) -> list[str]:
    """Notes on ranks that are slower at something than rank 0, whose profile is the plan's: they set the pace."""
    form = struct.Struct(f"<{len(rates)}d")
    told = [form.unpack(each) for each in ranks.tell(form.pack(*rates.values()))]
    return [
        f"rank {rank} is slower than rank 0: {name} at {each[number] / told[0][number]:.0%} of its rate"
        for number, name in enumerate(rates)
        for rank, each in enumerate(told)
        if each[number] < SLOWER * told[0][number]
    ]


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

    def of_a_byte(
        lane: Resource, copy: Callable[[torch.Tensor, torch.Tensor], None], to: torch.Tensor, source: torch.Tensor
    ) -> float:
        started = clock()
        with device.lane(lane):  # one behind the other, as in a run
            for nbytes in COPY_SIZES:
                copy(to[:nbytes], source[:nbytes])
        return (clock() - started) / sum(COPY_SIZES)

    copies = {
        "h2d": partial(of_a_byte, "h2d", device.copy_h2d, target, host),
        "d2h": partial(of_a_byte, "d2h", device.copy_d2h, host, target),
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
    int8: Measurement
    """The same."""
    summed: Measurement
    """As `fp32`, with the checksums of the states before and after."""

    @property
    def checksum_rate(self) -> float | None:
        """Bytes of states a second of which both checksums are taken in passing; None where that took no time."""
        seconds = self.summed.mean - self.fp32.mean
        return USUAL.mean_bytes / seconds if seconds > 0 else None


class UpdateBench:
    """States and gradients of several MiB, and the optimizer that updates them as steps do, chunk by chunk."""

    def __init__(self, precision: Precision, threads: int, available_bytes: int, *, clock: Clock = REAL) -> None:
        """The copy of the weights is in `precision`; of `available_bytes` it takes a quarter at most."""
        self.threads, self._precision, self.clock = threads, precision, clock
        moments = [OPTIMIZER_FORMATS["fp32", states].first_moment for states in _MOMENTS]
        arrays = (USUAL.master, GRADIENT, *(each for each in moments for _ in range(2)), PARAMETERS[precision])
        count = min(UPDATE_ELEMENTS, available_bytes // 4 // sum(array.bytes_of(1) for array in arrays))
        self.count = max(count // UPDATE_CHUNK, 1) * UPDATE_CHUNK
        ends = list(accumulate(array.bytes_of(self.count) for array in arrays))
        self._arena = Arena(ends[-1], lock=False)
        self._arrays = [(self._arena.address + start, array) for start, array in zip((0, *ends), arrays, strict=False)]
        # No denormal numbers, which are slow: two of bf16's 0.01 are about 0.01 in fp32 as well.
        torch.from_dlpack(self._arena)[: ends[-2]].view(torch.bfloat16).fill_(0.01)
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
        master, gradient, *moments, parameter = (start + first * array.element_bytes for start, array in self._arrays)
        number = 2 * _MOMENTS.index(states)
        exp_avg, exp_avg_sq = moments[number : number + 2]
        streams = (master, exp_avg, exp_avg_sq, gradient, parameter, self._precision, UPDATE_CHUNK)
        scales = [0, 0]
        for which, (start, array) in enumerate(self._arrays[2 + number : 4 + number]):
            if array.block_elements:
                behind = self.count * array.element_bytes + first // array.block_elements * array.side_bytes
                scales[which] = start + behind
        parts = USUAL.parts(UPDATE_CHUNK)
        positions, ends = tuple(part.offset for part in parts), [part.stop for part in parts]
        started = self.clock()
        if summed:
            adamw_summed(*streams, positions=positions, ends=ends, **self._settings)
        else:
            adamw_statistics(*streams, moment_dtype=states, scales=scales, **self._settings)
        return self.clock() - started


def measure_update(bench: UpdateBench, limits: Limits, progress: Progress) -> tuple[Updates, list[str]]:
    """The times of updates, and notes for people."""
    updates = {
        "states in fp32": partial(bench.seconds_of_an_element, "fp32"),
        "states in bf16": partial(bench.seconds_of_an_element, "bf16"),
        "states in int8": partial(bench.seconds_of_an_element, "int8"),
        "checksums of its states": partial(bench.seconds_of_an_element, "fp32", summed=True),
    }
    figures = repeat(updates, limits, progress, f"optimizer on {bench.threads} threads", clock=bench.clock)
    troubles = {what: figure.trouble() for what, figure in figures.items()}
    notes = [f"optimizer with {what}: {trouble}" for what, trouble in troubles.items() if trouble]
    return Updates(*figures.values()), notes


def measure_dram(
    bench: UpdateBench,
    device: Device,
    rates: tuple[float, float, float],
    limits: Limits,
    progress: Progress,
    *,
    clock: Clock = REAL,
) -> tuple[float, list[str]]:
    """Bytes a second that updates and copies to and from the device move through DRAM, the most that was seen; and
    notes for people. `rates`: of updates alone, elements a second, and of copies each way, bytes a second."""
    updates, h2d, d2h = rates
    chunks = cycle(range(0, bench.count, UPDATE_CHUNK))
    arena = device.host_arena(COPY_SIZES[-1])
    try:
        copies = partial(_copies, device, clock, arena.bytes, device.allocate(arena.bytes.numel()))
        (copied, updated), notes = measure_beside_updates(
            copies,
            lambda: bench.seconds_of_a_chunk(next(chunks), "fp32", summed=False),
            limits,
            progress,
            what="copies",
            clock=clock,
        )
    finally:
        device.release(arena)
    alone = updates * updated_bytes(USUAL)
    return max(alone, updated * alone + copied * 2 / (1 / h2d + 1 / d2h)), notes
