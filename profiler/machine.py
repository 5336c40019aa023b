"""Finds out what this machine is: its cores, its memory, its link to the device and the rate of the optimizer.

Owns the reading of /proc and of control groups: in a container the limits count, not the hardware. It measures with the
executor's device and the native kernels and knows nothing of models.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ssdplan.native import Arena, adamw
from ssdplan.plans.profile import ELEMENT_BYTES, OptimizerStates, Precision
from ssdplan.profiler.measure import Limits, Measurement, Progress, repeat
from ssdplan.profiler.parts import Device

MIB = 1 << 20
COPY_SIZES = (8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
UPDATE_ELEMENTS = 12 << 20
"""264 MiB moved at the least: several times most last-level caches."""
UPDATE_CHUNK = 1 << 20
"""Elements a call: 12 MiB of optimizer states, in the range of the requests that training makes of the ssd."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of host memory: of the machine, and what may be taken now."""

    total: int
    available: int


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name, or at least its architecture."""
    fields = ("model name", "Model", "cpu model", "Processor")
    values = dict(_fields(root / "proc/cpuinfo"))
    return next((values[field] for field in fields if values.get(field)), platform.machine() or "unknown processor")


def cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, bounded by the quotas of its control groups."""
    count = len(os.sched_getaffinity(0))
    for group in _control_groups("cpu", root):
        words = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(words) == 2 and words[0] not in ("max", "-1"):
            count = min(count, int(words[0]) // int(words[1]))
    return max(count, 1)


def host_memory(root: Path = Path("/")) -> Memory:
    """Memory of the machine, bounded by the limits of this process's control groups. Page cache counts as available."""
    values = dict(_fields(root / "proc/meminfo"))
    total, available = (int(values[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    for group in _control_groups("memory", root):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
        if not limit or limit[0] == "max" or not used:
            continue
        statistics = dict(line.split() for line in _lines(group / "memory.stat"))
        cache = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
        total = min(total, int(limit[0]))
        available = min(available, max(int(limit[0]) - int(used[0]) + cache, 0))
    return Memory(total, available)


def measure_link(device: Device, limits: Limits, progress: Progress) -> tuple[Measurement, Measurement, list[str]]:
    """Bandwidths to the device and from it, bytes/s, over copies of 8 to 64 MiB; and notes for people."""
    arena = device.host_arena(COPY_SIZES[-1])
    try:
        notes = [f"host memory: {arena.note}"] if arena.note else []
        h2d, d2h = _measure_copies(device, arena.bytes, limits, progress)
    finally:
        device.release(arena)
    for name, figure in (("host to device", h2d), ("device to host", d2h)):
        if trouble := figure.trouble():
            notes.append(f"copies {name}: {trouble}")
    return h2d, d2h, notes


def _measure_copies(
    device: Device, host: torch.Tensor, limits: Limits, progress: Progress
) -> tuple[Measurement, Measurement]:
    target = device.allocate(host.numel())
    host.fill_(1)
    target.fill_(2)  # memory that was never touched is not there yet
    device.synchronize()

    def bandwidth(copy: Callable[[torch.Tensor, torch.Tensor], None], to: torch.Tensor, source: torch.Tensor) -> float:
        started = time.perf_counter()
        for nbytes in COPY_SIZES:
            copy(to[:nbytes], source[:nbytes])
        return sum(COPY_SIZES) / (time.perf_counter() - started)

    copies = {
        "h2d": partial(bandwidth, device.copy_h2d, target, host),
        "d2h": partial(bandwidth, device.copy_d2h, host, target),
    }
    figures = repeat(copies, limits, progress, f"copies to and from {device.name}")
    return figures["h2d"], figures["d2h"]


def measure_update(
    precision: Precision, threads: int, available_bytes: int, limits: Limits, progress: Progress
) -> tuple[dict[OptimizerStates, Measurement], list[str]]:
    """Elements a second of the fused optimizer, by the format of its states, with a copy of the weights in `precision`;
    and notes for people."""
    element = ELEMENT_BYTES[precision]
    count = min(UPDATE_ELEMENTS, available_bytes // 4 // (20 + element))
    count = max(count // UPDATE_CHUNK, 1) * UPDATE_CHUNK
    arena = Arena(count * (20 + element), lock=False)
    # No denormal numbers, which are slow: two of bf16's 0.01 are about 0.01 in fp32 as well.
    torch.from_dlpack(arena)[: 20 * count].view(torch.bfloat16).fill_(0.01)
    master, gradient, exp_avg, exp_avg_sq, exp_avg_bf16, parameter = (
        arena.address + 4 * count * part for part in range(6)
    )
    moments: dict[OptimizerStates, tuple[int, int]] = {
        "fp32": (exp_avg, exp_avg_sq),
        "bf16": (exp_avg_bf16, exp_avg_bf16 + 2 * count),
    }

    def rate(states: OptimizerStates) -> float:
        each, (exp_avg, exp_avg_sq) = ELEMENT_BYTES[states], moments[states]
        started = time.perf_counter()
        for first in range(0, count, UPDATE_CHUNK):
            adamw(
                master + 4 * first,
                exp_avg + each * first,
                exp_avg_sq + each * first,
                gradient + 4 * first,
                parameter + element * first,
                precision,
                UPDATE_CHUNK,
                moment_dtype=states,
                lr=1e-4,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                weight_decay=0.1,
                step=10,
                threads=threads,
            )
        return count / (time.perf_counter() - started)

    rates: dict[OptimizerStates, Callable[[], float]] = {"fp32": partial(rate, "fp32"), "bf16": partial(rate, "bf16")}
    figures = repeat(rates, limits, progress, f"optimizer on {threads} threads")
    troubles = {states: figure.trouble() for states, figure in figures.items()}
    notes = [f"optimizer with states in {states}: {trouble}" for states, trouble in troubles.items() if trouble]
    return figures, notes


def _lines(path: Path) -> list[str]:
    """The lines of a small file, none where it cannot be read: kernels differ in what they offer."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _words(path: Path) -> tuple[str, ...]:
    return tuple(word for line in _lines(path) for word in line.split())


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    """The `name: value` lines of a file, the last first, so that in a dict the first of a name counts."""
    for line in reversed(_lines(path)):
        name, found, value = line.partition(":")
        if found:
            yield name.strip(), value.strip()


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """The directories, version 1 or 2, of the control groups that bound this process: its own and all above."""
    own: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))  # version 2 has no controllers here: ""
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        shown, mount = left.split()[3:5]
        kind, _, options = right.split()[:3]
        name = {"cgroup": controller, "cgroup2": ""}.get(kind)
        if name not in own or (kind == "cgroup" and controller not in options.split(",")):
            continue
        top = root / mount.lstrip("/")
        # A container may see its own group as the top of the mount, under the path that it has outside.
        inside = Path(own[name]).relative_to(shown) if Path(own[name]).is_relative_to(shown) else Path()
        for group in (top / inside, *(top / inside).parents):
            yield group
            if group == top:
                break
