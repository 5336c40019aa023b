"""Waits: what each op of a program must wait for, from the memory that it reads and writes.

Owns the rule (read after write, write after read, write after write, and so the reuse of a slot), applied to bytes of
each tier. Nothing else orders operations: not sleeping, not luck, not the order of a queue.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from .schedule import Buffer, Op, Region

NOBODY = -1


def with_waits(program: Sequence[Op], buffers: Sequence[Buffer]) -> tuple[Op, ...]:
    """Number the ops of `program` in order and fill in their waits; `buffers` must be placed."""
    zones: dict[tuple[str, int], _Zone] = {}
    zone_of: dict[int, tuple[_Zone, int]] = {}

    def locate(region: Region) -> tuple[_Zone, int, int]:
        found = zone_of.get(region.buffer)
        if found is None:
            buffer = buffers[region.buffer]
            zone = zones.setdefault((buffer.tier, buffer.zone), _Zone())
            found = zone_of[region.buffer] = zone, buffer.offset - buffer.zone
        zone, shift = found
        assert 0 <= region.start < region.stop <= buffers[region.buffer].nbytes, (
            f"region [{region.start}, {region.stop}) outside {buffers[region.buffer]}"
        )
        return zone, region.start + shift, region.stop + shift

    placed: list[Op] = []
    for index, op in enumerate(program):
        waits: set[int] = set()
        for region in op.reads:
            zone, start, stop = locate(region)
            zone.read(start, stop, index, waits)
        for region in op.writes:
            zone, start, stop = locate(region)
            zone.write(start, stop, index, waits)
        waits.discard(index)
        waits.discard(NOBODY)
        placed.append(op.placed(index, tuple(sorted(waits))))
    return tuple(placed)


class _Zone:
    """The history of bytes that buffers share: segments in order, each with one last writer, and its readers since."""

    __slots__ = ("readers", "starts", "stops", "writers")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.writers: list[int] = []
        self.readers: list[list[int]] = []

    def read(self, start: int, stop: int, op: int, waits: set[int]) -> None:
        """`op` reads [start, stop): it waits for who wrote there."""
        for place in self._cut(start, stop):
            waits.add(self.writers[place])
            self.readers[place].append(op)

    def write(self, start: int, stop: int, op: int, waits: set[int]) -> None:
        """`op` writes [start, stop): it waits for who wrote there and who has read it since."""
        places = self._cut(start, stop)
        for place in places:
            waits.add(self.writers[place])
            waits.update(self.readers[place])
        self._replace(places, [(start, stop, op, [])])

    def _cut(self, start: int, stop: int) -> range:
        """The places of segments that make up [start, stop) exactly, after splitting those that straddle its ends and
        filling gaps with bytes of before."""
        starts, stops = self.starts, self.stops
        first = bisect_left(starts, start)
        if first < len(starts) and starts[first] == start and stops[first] == stop:
            return range(first, first + 1)
        if first and stops[first - 1] > start:
            first -= 1
        last = bisect_right(starts, stop - 1, first)
        made: list[tuple[int, int, int, list[int]]] = []
        position = start
        begin = end = 0
        for place in range(first, last):
            low, high, writer, readers = starts[place], stops[place], self.writers[place], self.readers[place]
            if low < start:
                made.append((low, start, writer, list(readers)))
                begin += 1
                low = start
            if position < low:
                made.append((position, low, NOBODY, []))
            made.append((low, min(high, stop), writer, readers))
            position = min(high, stop)
            if high > stop:
                made.append((stop, high, writer, list(readers)))
                end += 1
        if position < stop:
            made.append((position, stop, NOBODY, []))
        self._replace(range(first, last), made)
        return range(first + begin, first + len(made) - end)

    def _replace(self, places: range, segments: list[tuple[int, int, int, list[int]]]) -> None:
        here = slice(places.start, places.stop)
        self.starts[here] = [segment[0] for segment in segments]
        self.stops[here] = [segment[1] for segment in segments]
        self.writers[here] = [segment[2] for segment in segments]
        self.readers[here] = [segment[3] for segment in segments]
