"""Parts: which of the catalogue's go together in a what-if, and what a GPU has for a plan.

Owns the processor that stands beside a GPU, or alone, memory that a GPU shares with host, drives by their names, and
the link that some of them share.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ssdplan.plans.documents.state_layout import Precision
from ssdplan.plans.documents.stripe_shares import CYCLE, alternately, deal
from ssdplan.plans.errors import UsageError
from ssdplan.plans.units import format_bytes, parse_bytes

from .cpus import CPUS, Cpu
from .figure import Figure
from .gpus import GIB, GPUS, RESERVE, Gpu
from .links import LINKS, Link
from .names import find
from .ranks import Ranks
from .ssds import SSDS, TB, Size

NO_GPU = "none"
WORKSTATION_CPU, LAPTOP_CPU = "ryzen-9-7950x", "ryzen-7-7840u"
"""The processors that stand beside a GPU, and alone, when none is named."""


def processor(gpu: str, cpu: str | None) -> Cpu:
    """The one that is named, else the GPU's own, else what stands beside a GPU or alone. Raises UsageError, also for
    one that is of a chip with another GPU."""
    if gpu.lower() == NO_GPU:
        return find("processor", LAPTOP_CPU if cpu is None else cpu, CPUS)
    found = gpu_of(gpu)
    named = find("processor", found.cpu or WORKSTATION_CPU if cpu is None else cpu, CPUS)
    if found.unified and named.name != found.cpu:
        raise UsageError(f"--cpu {cpu}: {found.name} is of one chip with {found.cpu}; leave it out")
    chip = next((gpu.name for gpu in GPUS if gpu.unified and gpu.cpu == named.name), found.name)
    if chip != found.name:
        raise UsageError(
            f"--cpu {cpu}: it is of one chip with {chip}, a GPU, not beside {found.name}; name another, or leave it out"
        )
    return named


def gpu_of(name: str) -> Gpu:
    """The GPU of a name, behind which its memory may stand as shops write it, `RTX 4090 24GB`. Raises UsageError."""
    match = WITH_MEMORY.match(name)
    if match is None:
        return find(f"GPU (or {NO_GPU})", name, GPUS)
    try:
        return find("GPU", name, GPUS)
    except UsageError:
        found = find(f"GPU (or {NO_GPU})", match[1], GPUS)
    if int(match[2]) != round(found.memory.value / GIB):
        raise UsageError(f"--gpu {name}: {found.name} has {format_bytes(int(found.memory.value))}")
    return found


def link_of(gpu: Gpu, link: str | None) -> Link:
    """The one that is named, else the GPU's own. Raises UsageError for another than what a chip has within it."""
    found = find("link", gpu.link if link is None else link, LINKS)
    if gpu.unified and found.name != gpu.link:
        raise UsageError(f"--link {link}: {gpu.name} shares its memory with host, so there is no link; leave it out")
    if found.within and found.name != gpu.link:
        own = " and ".join(each.name for each in GPUS if each.link == found.name)
        raise UsageError(
            f"--link {link}: it is within {own}, and {gpu.name} has none such; leave it out (its own is {gpu.link}), "
            "or name a link over PCIe"
        )
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


WITH_MEMORY = re.compile(r"^(.*\S)\s+(\d{1,4})\s?Gi?B\s*$", re.IGNORECASE)
"""A card's name and its memory, `RTX 4090 24GB`."""
NUMBER_FIRST = re.compile(r"^\s*(\d{1,2})\s*x\s+(.*\S)\s*$", re.IGNORECASE)
"""A number of drives before their name, `2x 990 pro`."""
WITH_CAPACITY = re.compile(r"^(.*\S)\s+(\d+(?:\.\d+)?\s?[TG]B)\s*$", re.IGNORECASE)
"""A name and a capacity as shops write them, `Samsung 990 Pro 2TB`."""


def drives_of(text: str) -> list[Drive]:
    """`NAME[:SIZE][*COUNT]`, or `NAME SIZE`, or `COUNTx NAME`, -> that many drives. Raises UsageError."""
    if "*" not in text:
        text = NUMBER_FIRST.sub(r"\2*\1", text)
    named, star, count = (part.strip() for part in text.partition("*"))
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


@dataclass(frozen=True, slots=True)
class Lanes:
    """How drives reach the processor."""

    direct: int
    """So many by lanes of their own."""
    link: float
    """Bytes/s each way that the others share."""


def behind_chipset(
    reads: Sequence[float], writes: Sequence[float], lanes: Lanes | None
) -> tuple[list[float], list[float]]:
    """Bytes/s that each drive reads, and writes, where `lanes.direct` of them have lanes of their own: those that take
    most of a store's stripes. The others share the link each way, in proportion to the stripes that they take.
    None: each has lanes of its own."""
    if lanes is None:
        return list(reads), list(writes)
    stripes = [alternately(read, write) for read, write in zip(reads, writes, strict=True)]
    behind = sorted(range(len(stripes)), key=lambda number: -stripes[number])[lanes.direct :]
    found = []
    for rates in (reads, writes):
        parts = _parts(lanes.link, {number: rates[number] for number in behind}, stripes)
        found.append([parts.get(number, rate) for number, rate in enumerate(rates)])
    return found[0], found[1]


def _parts(link: float, most: Mapping[int, float], weights: Sequence[float]) -> dict[int, float]:
    """What each drive gets of a link: by its weight, and no more than it moves, which leaves more to the others."""
    left, found, wanting = link, dict[int, float](), dict(most)
    while wanting:
        each = left / sum(weights[number] for number in wanting)
        full = [number for number, rate in wanting.items() if rate <= each * weights[number]]
        if not full:
            return found | {number: each * weights[number] for number in wanting}
        for number in full:
            found[number] = wanting.pop(number)
            left -= found[number]
    return found


WORTH_TELLING = 1.05
"""How much faster fewer drives must be than all of them to be told of."""


def held_up(reads: Sequence[float], writes: Sequence[float], lanes: Lanes | None) -> str:
    """That some of the drives would be faster alone, by their own bytes/s; empty where all together are the fastest.
    Each has a share of a store's stripes, however slow it is."""
    order = sorted(range(len(reads)), key=lambda number: -alternately(reads[number], writes[number]))
    paces = []
    for count in range(1, len(order) + 1):
        own = [reads[number] for number in order[:count]], [writes[number] for number in order[:count]]
        paces.append(_pace(*behind_chipset(*own, lanes)))
    fewer = max(range(len(paces)), key=lambda number: paces[number])
    if paces[fewer] < WORTH_TELLING * paces[-1]:
        return ""
    return (
        f"drives: {len(paces)} read and write {paces[-1] / 1e9:.3g} GB/s each at once, and the fastest {fewer + 1} of "
        f"them alone {paces[fewer] / 1e9:.3g}: a store has at least one stripe in {CYCLE} on each drive"
    )


def _pace(reads: Sequence[float], writes: Sequence[float]) -> float:
    """Bytes/s that all read, and as many that they write, alternately, each its share of the stripes."""
    even = [alternately(read, write) for read, write in zip(reads, writes, strict=True)]
    stripes = deal(even)
    return min(each * len(stripes) / stripes.count(number) for number, each in enumerate(even))
