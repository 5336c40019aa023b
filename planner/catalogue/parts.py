"""Parts: which of the catalogue's go together in a what-if, and what a GPU has for a plan.

Owns the processor that stands beside a GPU, or alone, memory that a GPU shares with host, and drives by their names.
"""

import re
from dataclasses import dataclass

from ssdplan.plans.documents.state_layout import Precision
from ssdplan.plans.documents.stripe_shares import CYCLE
from ssdplan.plans.errors import UsageError
from ssdplan.plans.units import format_bytes, parse_bytes

from .cpus import CPUS, Cpu
from .figure import Figure
from .gpus import GPUS, RESERVE, Gpu
from .links import LINKS, Link
from .names import find
from .ranks import Ranks
from .ssds import SSDS, TB, Size

NO_GPU = "none"
WORKSTATION_CPU, LAPTOP_CPU = "ryzen-9-7950x", "ryzen-7-7840u"
"""The processors that stand beside a GPU, and alone, when none is named."""


def processor(gpu: str, cpu: str | None) -> Cpu:
    """The one that is named, else the GPU's own, else what stands beside a GPU or alone. Raises UsageError."""
    if gpu.lower() == NO_GPU:
        return find("processor", cpu or LAPTOP_CPU, CPUS)
    found = find(f"GPU (or {NO_GPU})", gpu, GPUS)
    named = find("processor", cpu or found.cpu or WORKSTATION_CPU, CPUS)
    if found.unified and named.name != found.cpu:
        raise UsageError(f"--cpu {cpu}: {found.name} is of one chip with {found.cpu}; leave it out")
    return named


def link_of(gpu: Gpu, link: str | None) -> Link:
    """The one that is named, else the GPU's own. Raises UsageError for another than what a chip has within it."""
    found = find("link", link or gpu.link, LINKS)
    if gpu.unified and found.name != gpu.link:
        raise UsageError(f"--link {link}: {gpu.name} shares its memory with host, so there is no link; leave it out")
    return found


def memory_of(gpu: Gpu, precision: Precision, host_memory_bytes: int, several: Ranks) -> Figure:
    """Bytes of a GPU's memory; of one that it shares, what host leaves of it. Raises UsageError where nothing is left,
    and for a precision that the GPU does not multiply in."""
    if precision == "bf16" and not gpu.bf16:
        raise UsageError(f"--gpu {gpu.name}: it has no fast products in bf16; take --precision fp16")
    if not gpu.unified:
        return gpu.memory
    if several.each > 1:
        raise UsageError(f"--gpu {gpu.name}: there is one to a machine; name machines with --nodes")
    left = gpu.memory.value - host_memory_bytes
    if left <= RESERVE.value:
        asked, there = format_bytes(host_memory_bytes), format_bytes(int(gpu.memory.value))
        raise UsageError(
            f"--host-memory {asked}: {gpu.name} shares {there} with host, so nothing is left for it; ask for less"
        )
    return Figure(left, gpu.memory.unit, f"what --host-memory leaves: {gpu.memory.source}", gpu.memory.assumed)


@dataclass(frozen=True, slots=True)
class Drive:
    """One drive of a machine."""

    name: str
    size: Size


WITH_CAPACITY = re.compile(r"^(.*\S)\s+(\d+(?:\.\d+)?\s?[TG]B)\s*$", re.IGNORECASE)
"""A name and a capacity as shops write them, `Samsung 990 Pro 2TB`."""


def drives_of(text: str) -> list[Drive]:
    """`NAME[:SIZE][*COUNT]`, or `NAME SIZE`, -> that many drives. Raises UsageError."""
    named, star, count = text.partition("*")
    if star and not (count.isdecimal() and len(count) < 3 and 0 < int(count) <= CYCLE):
        raise UsageError(f"--ssd {text}: after * comes a number of drives, 1 to {CYCLE}")
    name, colon, capacity = (WITH_CAPACITY.sub(r"\1:\2", named) if ":" not in named else named).partition(":")
    ssd = find("SSD", name.strip(), SSDS)
    size = ssd.sizes[0]
    if colon:
        if not capacity.strip():
            raise UsageError(f"--ssd {text}: after : comes a capacity, such as {ssd.name}:{size.capacity / TB:g}TB")
        by_capacity = {each.capacity: each for each in ssd.sizes}
        if parse_bytes(capacity) not in by_capacity:
            there = ", ".join(f"{each / TB:g}TB" for each in sorted(by_capacity))
            raise UsageError(f"--ssd {text}: {ssd.name} comes with {there}")
        size = by_capacity[parse_bytes(capacity)]
    return [Drive(f"{ssd.name}:{size.capacity / TB:g}TB", size)] * (int(count) if star else 1)
