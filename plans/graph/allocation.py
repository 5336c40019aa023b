"""Allocation: gives every buffer of a schedule its place in its tier's arena, before the first step.

Owns offsets. Buffers that stay keep a place of their own. The others follow each other in slots, in pools by size, so
that no slot is as large as a bigger neighbour needs (MemAscend, adaptive buffer pool). Within a pool the slot that has
been free for longest is taken, which leaves writers the most time before anyone waits for them. Slots share bytes with
slots that are used in other stages: what the head needs around the turn lies where the embedding will be.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..units import whole_pages
from .contents import Role
from .ops import TIERS, Buffer, Op, Tier

GRACE = 1
"""Stages for which a slot's bytes stay its own after its last use, so that who comes next seldom has to wait."""


def assign(
    buffers: Sequence[Buffer], programs: Sequence[Sequence[Op]], *, grace_on_device: int = GRACE
) -> tuple[tuple[Buffer, ...], dict[Tier, int]]:
    """Place `buffers`, which live in each of `programs` from the first op that names them to the last.

    Programs never run at the same time, so they share slots; a buffer of a pool is of one program. `grace_on_device`:
    the device's `GRACE`; with 0, who comes next in the next stage takes the bytes, and waits. Returns the placed
    buffers and each tier's arena in bytes. Raises AssertionError for a pooled buffer of two programs.
    """
    placed = list(buffers)
    arenas: dict[Tier, int] = dict.fromkeys(TIERS, 0)

    def take(tier: Tier, nbytes: int) -> int:
        offset = arenas[tier]
        arenas[tier] += whole_pages(nbytes)
        return offset

    for buffer in buffers:
        if not buffer.pool and buffer.shared_by < 0:
            offset = take(buffer.tier, buffer.nbytes)
            placed[buffer.index] = _put(buffer, offset, offset)
    sharing: dict[int, list[Buffer]] = {}
    for buffer in buffers:
        if buffer.shared_by >= 0:
            sharing.setdefault(buffer.shared_by, []).append(buffer)
    for layer in sorted(sharing):
        _overlay(sharing[layer], placed, take)
    slots = _slots(buffers, programs, dict.fromkeys(TIERS, GRACE) | {"device": grace_on_device})
    for tier in TIERS:
        mine = [slot for slot in slots if slot.tier == tier]
        offsets, end = _pack(mine, arenas[tier])
        zones = _zones(mine, offsets)
        for slot, offset, zone in zip(mine, offsets, zones, strict=True):
            for index in slot.members:
                placed[index] = _put(buffers[index], offset, zone)
        arenas[tier] = end
    return tuple(placed), arenas


def _put(buffer: Buffer, offset: int, zone: int) -> Buffer:
    return Buffer(
        buffer.index, buffer.name, buffer.tier, buffer.nbytes, buffer.role, buffer.pool, buffer.shared_by, offset, zone
    )


def _overlay(members: list[Buffer], placed: list[Buffer], take: Callable[[Tier, int], int]) -> None:
    """Place activation checkpoints and delayed gradients from the same byte on: they are never alive together."""
    ends: dict[Role, int] = {}
    starts: dict[int, int] = {}
    for buffer in members:
        starts[buffer.index] = ends.get(buffer.role, 0)
        ends[buffer.role] = starts[buffer.index] + buffer.nbytes
    base = take("host", max(ends.values()))
    for buffer in members:
        placed[buffer.index] = _put(buffer, base + starts[buffer.index], base)


# Slots: buffers of one pool follow each other in them.


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place for one buffer of a pool at a time."""

    tier: Tier
    nbytes: int
    """Whole pages, of the pool's largest buffer."""
    members: tuple[int, ...]
    """The buffers that follow each other here."""
    busy: int
    """Bit s is set when one of them is alive in stage s; programs one after the other."""


def _slots(buffers: Sequence[Buffer], programs: Sequence[Sequence[Op]], grace: Mapping[Tier, int]) -> list[_Slot]:
    """As few slots for each pool as its buffers are ever alive at once, in the order in which the pools appear."""
    pools: dict[tuple[Tier, str], list[int]] = {}
    for buffer in buffers:
        if buffer.pool:
            pools.setdefault((buffer.tier, buffer.pool), []).append(buffer.index)
    lifetimes = [_lifetimes(program) for program in programs]
    made: list[_Slot] = []
    placed: set[int] = set()
    for (tier, _), members in pools.items():
        members_of: dict[int, list[int]] = {}
        busy: dict[int, int] = {}
        base = 0
        for program, lifetime in zip(programs, lifetimes, strict=True):
            alive = sorted((*lifetime[index], index) for index in members if index in lifetime)
            for index, slot in _share_slots(alive).items():
                assert index not in placed, f"{buffers[index].name} is in two programs"
                placed.add(index)
                members_of.setdefault(slot, []).append(index)
                first, last = lifetime[index]
                stages = range(program[first].stage, program[last].stage + 1 + grace[tier])
                busy[slot] = busy.get(slot, 0) | ((1 << len(stages)) - 1) << base + stages.start
            base += program[-1].stage + 1 + GRACE
        nbytes = whole_pages(max(buffers[index].nbytes for index in members))
        made += [_Slot(tier, nbytes, tuple(mine), busy[slot]) for slot, mine in sorted(members_of.items())]
    return made


def _lifetimes(program: Sequence[Op]) -> dict[int, tuple[int, int]]:
    """Buffer -> positions of the first and the last op that name it."""
    firsts: dict[int, int] = {}
    lasts: dict[int, int] = {}
    for position, op in enumerate(program):
        for region in op.reads + op.writes:
            buffer = region.buffer
            if buffer not in lasts:
                firsts[buffer] = position
            lasts[buffer] = position
    return {buffer: (first, lasts[buffer]) for buffer, first in firsts.items()}


def _share_slots(alive: list[tuple[int, int, int]]) -> dict[int, int]:
    """(first, last, buffer), sorted -> buffer -> slot; as few slots as buffers are ever alive at once."""
    slots: dict[int, int] = {}
    busy: list[tuple[int, int]] = []
    free: list[tuple[int, int]] = []
    count = 0
    for first, last, index in alive:
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy))
        if free:
            slot = heapq.heappop(free)[1]
        else:
            slot = count
            count += 1
        slots[index] = slot
        heapq.heappush(busy, (last, slot))
    return slots


# Bytes: slots of different stages share them.


def _pack(slots: Sequence[_Slot], start: int) -> tuple[list[int], int]:
    """An offset for each slot from `start` on, so that slots which are busy in one stage never overlap; and the end.

    The largest first, each at the lowest offset that is free: equal slots of equal stages are placed as one.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for number, slot in enumerate(slots):
        alike.setdefault((slot.nbytes, slot.busy), []).append(number)
    offsets = [0] * len(slots)
    taken: list[tuple[int, int, int]] = []
    """(first byte, end, busy), by first byte."""
    end = start
    for (nbytes, busy), members in sorted(alike.items(), key=lambda entry: (-entry[0][0], entry[1][0])):
        total = nbytes * len(members)
        offset = start
        for first, stop, other in taken:
            if busy & other:
                if first - offset >= total:
                    break
                offset = max(offset, stop)
        for position, number in enumerate(members):
            offsets[number] = offset + position * nbytes
        taken.append((offset, offset + total, busy))
        taken.sort()
        end = max(end, offset + total)
    return offsets, end


def _zones(slots: Sequence[_Slot], offsets: Iterable[int]) -> list[int]:
    """For each slot the first byte of its zone: of the slots that it shares bytes with, directly or by others."""
    spans = sorted(
        (offset, offset + slot.nbytes, number) for number, (slot, offset) in enumerate(zip(slots, offsets, strict=True))
    )
    zones = [0] * len(spans)
    zone = end = -1
    for first, stop, number in spans:
        if first >= end:
            zone = first
        zones[number] = zone
        end = max(end, stop)
    return zones
