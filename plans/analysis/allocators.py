"""Allocators: what host memory is made of, block by block, and what the same plan would take of other allocators.

Owns the comparison with the two habits that MemAscend finds: buffers of one size (its sections III-A and IV-B) and
page-locked memory in powers of two (III-B and IV-C). It counts the places that `graph/allocation.py` gave.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..graph.contents import Role
from ..graph.ops import Schedule, Tier
from ..units import PAGE, whole_pages
from .memory_usage import label


@dataclass(frozen=True, slots=True)
class Pool:
    """Blocks of one size that hold the same: slots in which buffers follow each other, or blocks with one holder."""

    roles: tuple[Role, ...]
    """What they hold, one at a time, in the order of the roles' names."""
    slot_bytes: int
    slots: int

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * self.slots


@dataclass(frozen=True, slots=True)
class Blocks:
    """One tier's arena, taken apart: the blocks that stay what they are, and the slots that buffers share."""

    kept: tuple[Pool, ...]
    """What stays: a state's parameters, its optimizer states, or the activation checkpoints of a layer with the
    delayed gradients that share their memory. Each is one block."""
    pools: tuple[Pool, ...]
    """Slots, by size and role; the largest first, as in `kept`."""
    arena: int
    """Bytes of all: less than the sum of blocks and slots where slots of different stages share bytes."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one tier that the same blocks take in one way of allocating them."""

    kept: int
    slots: int

    @property
    def total(self) -> int:
        return self.kept + self.slots


@dataclass(frozen=True, slots=True)
class Needs:
    """What the same blocks take as planned, and as others would allocate them."""

    planned: Need
    """Slots by size class, sharing bytes where they are used in different stages, in one arena of whole pages."""
    by_class: Need
    """Slots by size class, each with bytes of its own (MemAscend's pool)."""
    one_size_each_role: Need
    """Slots as large as the largest of their role: a pool for parameters, one for optimizer states, and so on."""
    one_size: Need
    """Slots all as large as the largest (ZeRO-Infinity's swap buffers)."""
    powers_of_two: Need
    """As `by_class`; each block is page-locked on its own, rounded up to a power of two (torch's allocator)."""
    both: Need
    """Slots all as large as the largest, and each block rounded up to a power of two."""


def blocks(schedule: Schedule, tier: Tier = "host") -> Blocks:
    """What the arena of `tier` is made of. Sizes are whole pages and sum to the arena exactly."""
    kept: dict[int, tuple[int, set[Role]]] = {}
    slots: dict[tuple[str, int], tuple[int, set[Role]]] = {}
    for buffer in schedule.buffers:
        if buffer.tier == tier:
            end = whole_pages(buffer.offset + buffer.nbytes)
            if buffer.pool:
                nbytes, roles = slots.setdefault((buffer.pool, buffer.offset), (0, set()))
                slots[buffer.pool, buffer.offset] = max(nbytes, end - buffer.offset), roles | {buffer.role}
            else:
                nbytes, roles = kept.setdefault(buffer.zone, (0, set()))
                kept[buffer.zone] = max(nbytes, end - buffer.zone), roles | {buffer.role}
    largest: dict[str, int] = {}
    for (pool, _), (nbytes, _) in slots.items():
        largest[pool] = max(largest.get(pool, 0), nbytes)
    return Blocks(
        kept=_pools((nbytes, roles) for nbytes, roles in kept.values()),
        pools=_pools((largest[pool], roles) for (pool, _), (_, roles) in slots.items()),
        arena=schedule.arenas[tier],
    )


def _pools(each: Iterable[tuple[int, set[Role]]]) -> tuple[Pool, ...]:
    """Equal blocks together, the largest first."""
    counts = Counter((nbytes, tuple(sorted(roles))) for nbytes, roles in each)
    largest_first = sorted(counts, key=lambda entry: (-entry[0], label(*entry[1])))
    return tuple(Pool(roles, nbytes, counts[nbytes, roles]) for nbytes, roles in largest_first)


def needs(found: Blocks) -> Needs:
    """What `found` takes as planned and otherwise. What stays in one place has its own size in any case."""
    kept, doubled = by_class(found.kept), powers_of_two(found.kept)
    held = {pool.roles for pool in found.pools}
    largest = max((pool.slot_bytes for pool in found.pools), default=0)
    alike = [Pool((), largest, sum(pool.slots for pool in found.pools))] if found.pools else []
    each_role = sum(one_size(pool for pool in found.pools if pool.roles == roles) for roles in held)
    return Needs(
        planned=Need(kept, found.arena - kept),
        by_class=Need(kept, by_class(found.pools)),
        one_size_each_role=Need(kept, each_role),
        one_size=Need(kept, by_class(alike)),
        powers_of_two=Need(doubled, powers_of_two(found.pools)),
        both=Need(doubled, powers_of_two(alike)),
    )


def by_class(pools: Iterable[Pool]) -> int:
    """Bytes of pools whose slots each have their own class's size (MemAscend's adaptive buffer pool)."""
    return sum(pool.nbytes for pool in pools)


def one_size(pools: Iterable[Pool]) -> int:
    """Bytes of as many slots in one pool, all as large as the largest (ZeRO-Infinity's pool, MemAscend III-A)."""
    pools = tuple(pools)
    return max((pool.slot_bytes for pool in pools), default=0) * sum(pool.slots for pool in pools)


def powers_of_two(pools: Iterable[Pool]) -> int:
    """Bytes of slots that are page-locked one by one, each rounded up to the next power of two (MemAscend III-B)."""
    return sum((1 << (pool.slot_bytes - 1).bit_length()) * pool.slots for pool in pools)


def saved(planned: int, otherwise: int) -> float:
    """The fraction of `otherwise` bytes that `planned` does without."""
    return 1 - planned / otherwise if otherwise else 0.0


def page_lock_waste(nbytes: int) -> int:
    """Bytes that an arena of `nbytes` locks beyond them: it is rounded up to one page, once."""
    return -nbytes % PAGE
