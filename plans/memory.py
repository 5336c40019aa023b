"""Memory: gives every buffer of a schedule its place in its tier's arena, before the first step.

Owns offsets. Buffers that stay keep a place of their own; the others take turns in slots, in pools by size, so that
no slot is as large as a bigger neighbour needs (MemAscend, adaptive buffer pool). Within a pool the slot that has
been free for longest is taken, which leaves writers the most time before anyone waits for them.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

from .schedule import PAGE, Buffer, Op, Tier


def assign(buffers: Sequence[Buffer], programs: Sequence[Sequence[Op]]) -> tuple[tuple[Buffer, ...], dict[Tier, int]]:
    """Place `buffers`, which live in each of `programs` from the first op that names them to the last.

    Programs never run at the same time, so they share slots. Returns the placed buffers and each tier's arena in bytes.
    """
    placed = list(buffers)
    arenas: dict[Tier, int] = {"device": 0, "host": 0, "ssd": 0}

    def take(tier: Tier, nbytes: int) -> int:
        offset = arenas[tier]
        arenas[tier] += -(-nbytes // PAGE) * PAGE
        return offset

    for buffer in buffers:
        if not buffer.pool and buffer.turn < 0:
            offset = take(buffer.tier, buffer.nbytes)
            placed[buffer.index] = replace(buffer, offset=offset, slot=offset)
    for turn in sorted({buffer.turn for buffer in buffers if buffer.turn >= 0}):
        _overlay([buffer for buffer in buffers if buffer.turn == turn], placed, take)
    pools: dict[tuple[Tier, str], dict[int, Buffer]] = {}
    for buffer in buffers:
        if buffer.pool:
            pools.setdefault((buffer.tier, buffer.pool), {})[buffer.index] = buffer
    lifetimes = [_lifetimes(program) for program in programs]
    for (tier, _), members in pools.items():
        size = max(buffer.nbytes for buffer in members.values())
        slots: list[int] = []
        for lifetime in lifetimes:
            alive = sorted((*lifetime[index], index) for index in members if index in lifetime)
            for index, slot in _take_turns(alive).items():
                while slot >= len(slots):
                    slots.append(take(tier, size))
                placed[index] = replace(members[index], offset=slots[slot], slot=slots[slot])
    return tuple(placed), arenas


def _overlay(members: list[Buffer], placed: list[Buffer], take: Callable[[Tier, int], int]) -> None:
    """Checkpoints from one end, delayed gradients from the same: they are never alive together."""
    ends: dict[str, int] = {}
    starts: dict[int, int] = {}
    for buffer in members:
        starts[buffer.index] = ends.get(buffer.role, 0)
        ends[buffer.role] = starts[buffer.index] + buffer.nbytes
    base = take("host", max(ends.values()))
    for buffer in members:
        placed[buffer.index] = replace(buffer, offset=base + starts[buffer.index], slot=base)


def _lifetimes(program: Sequence[Op]) -> dict[int, tuple[int, int]]:
    spans: dict[int, tuple[int, int]] = {}
    for position, op in enumerate(program):
        for region in (*op.reads, *op.writes):
            spans[region.buffer] = (spans.get(region.buffer, (position, 0))[0], position)
    return spans


def _take_turns(alive: list[tuple[int, int, int]]) -> dict[int, int]:
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
