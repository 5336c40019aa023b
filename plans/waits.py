"""Waits: what each op of a program must wait for, from the memory that it reads and writes.

Owns the rule (read after write, write after read, write after write, and so the reuse of a slot), applied to bytes of
each tier. Nothing else orders operations: not sleeping, not luck, not the order of a queue.
"""

from bisect import bisect_left
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
    """The history of bytes that buffers share: segments in order, each with one last writer, and its readers since.

    Each segment ends where the next begins; the last has no end, and the first begins at byte 0.
    """

    __slots__ = ("readers", "starts", "writers")

    def __init__(self) -> None:
        self.starts = [0]
        self.writers = [NOBODY]
        self.readers: list[list[int]] = [[]]

    def read(self, start: int, stop: int, op: int, waits: set[int]) -> None:
        """`op` reads [start, stop): it waits for who wrote there."""
        first, last = self._cut(start), self._cut(stop)
        waits.update(self.writers[first:last])
        for readers in self.readers[first:last]:
            readers.append(op)

    def write(self, start: int, stop: int, op: int, waits: set[int]) -> None:
        """`op` writes [start, stop): it waits for who wrote there and who has read it since."""
        first, last = self._cut(start), self._cut(stop)
        waits.update(self.writers[first:last], *self.readers[first:last])
        if last - first > 1:
            del self.starts[first + 1 : last], self.writers[first + 1 : last], self.readers[first + 1 : last]
        self.writers[first] = op
        self.readers[first] = []

    def _cut(self, at: int) -> int:
        """The place of the segment that begins at byte `at`, after splitting the one that straddles it."""
        place = bisect_left(self.starts, at)
        if place == len(self.starts) or self.starts[place] != at:
            self.starts.insert(place, at)
            self.writers.insert(place, self.writers[place - 1])
            self.readers.insert(place, list(self.readers[place - 1]))
        return place
