"""Waits: what each op of a program must wait for, from the memory that it reads and writes.

Owns the rule (read after write, write after read, write after write, and so the reuse of a slot), applied to bytes of
each tier. Nothing else orders operations: not sleeping, not luck, not the order of a queue.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .schedule import Buffer, Op


@dataclass(slots=True)
class _Segment:
    """Bytes of a slot with one history: who wrote them last, and who has read them since."""

    start: int
    stop: int
    writer: int
    readers: list[int] = field(default_factory=list)


def with_waits(program: Sequence[Op], buffers: Sequence[Buffer]) -> tuple[Op, ...]:
    """Number the ops of `program` in order and fill in their waits; `buffers` must be placed."""
    slots: dict[tuple[str, int], list[_Segment]] = {}
    placed: list[Op] = []
    for index, op in enumerate(program):
        waits: set[int] = set()
        for region in op.reads:
            waits |= _read(*_locate(buffers, region.buffer, region.start, region.stop, slots), index)
        for region in op.writes:
            waits |= _write(*_locate(buffers, region.buffer, region.start, region.stop, slots), index)
        waits.discard(index)
        waits.discard(-1)
        placed.append(op.placed(index, tuple(sorted(waits))))
    return tuple(placed)


def _locate(
    buffers: Sequence[Buffer], index: int, start: int, stop: int, slots: dict[tuple[str, int], list[_Segment]]
) -> tuple[list[_Segment], int, int]:
    buffer = buffers[index]
    assert 0 <= start < stop <= buffer.nbytes, (
        f"region [{start}, {stop}) outside {buffer.name} of {buffer.nbytes} bytes"
    )
    shift = buffer.offset - buffer.slot
    return slots.setdefault((buffer.tier, buffer.slot), []), start + shift, stop + shift


def _read(segments: list[_Segment], start: int, stop: int, op: int) -> set[int]:
    waits = set()
    for segment in _cut(segments, start, stop):
        waits.add(segment.writer)
        segment.readers.append(op)
    return waits


def _write(segments: list[_Segment], start: int, stop: int, op: int) -> set[int]:
    waits = set()
    for segment in _cut(segments, start, stop):
        waits.add(segment.writer)
        waits.update(segment.readers)
        segments.remove(segment)
    segments.append(_Segment(start, stop, op))
    return waits


def _cut(segments: list[_Segment], start: int, stop: int) -> list[_Segment]:
    """The segments within [start, stop), after splitting those that straddle its ends; gaps are bytes of before."""
    inside: list[_Segment] = []
    covered: list[tuple[int, int]] = []
    for segment in list(segments):
        if segment.stop <= start or segment.start >= stop:
            continue
        for cut in (start, stop):
            if segment.start < cut < segment.stop:
                rest = _Segment(cut, segment.stop, segment.writer, list(segment.readers))
                segment.stop = cut
                segments.append(rest)
                if segment.start < start:
                    segment = rest
        inside.append(segment)
        covered.append((segment.start, segment.stop))
    position = start
    for first, last in sorted(covered):
        if position < first:
            gap = _Segment(position, first, -1)
            segments.append(gap)
            inside.append(gap)
        position = max(position, last)
    if position < stop:
        gap = _Segment(position, stop, -1)
        segments.append(gap)
        inside.append(gap)
    return inside
