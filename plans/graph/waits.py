"""Waits: what each op of a program must wait for, from the memory that it reads and writes.

Owns the rule (read after write, write after read, write after write, and so the reuse of a slot), applied to bytes of
each tier; and that collectives run in the graph's order. Nothing else orders operations: not sleeping, not luck, not
the order of a queue.
"""

from bisect import bisect_left
from collections.abc import Sequence

from .ops import Buffer, Op

NOBODY = -1


def with_waits(program: Sequence[Op], buffers: Sequence[Buffer]) -> tuple[Op, ...]:
    """Number the ops of `program` in order and fill in their waits; `buffers` must be placed."""
    zones: dict[tuple[str, int], _Zone] = {}
    located: dict[int, tuple[_Zone, int, int]] = {}

    def locate(index: int) -> tuple[_Zone, int, int]:
        """The zone of a buffer, its first byte there, and its length."""
        buffer = buffers[index]
        zone = zones.setdefault((buffer.tier, buffer.zone), _Zone())
        found = located[index] = zone, buffer.offset - buffer.zone, buffer.nbytes
        return found

    placed: list[Op] = []
    collective = NOBODY
    """The last one: all ranks run them in one order."""
    for index, op in enumerate(program):
        waits: set[int] = set()
        if op.resource == "network":
            waits.add(collective)
            collective = index
        for region in op.reads:
            zone, shift, nbytes = located.get(region.buffer) or locate(region.buffer)
            assert 0 <= region.start < region.stop <= nbytes, f"{region} outside {buffers[region.buffer]}"
            zone.read(region.start + shift, region.stop + shift, index, waits)
        for region in op.writes:
            zone, shift, nbytes = located.get(region.buffer) or locate(region.buffer)
            assert 0 <= region.start < region.stop <= nbytes, f"{region} outside {buffers[region.buffer]}"
            zone.write(region.start + shift, region.stop + shift, index, waits)
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
        first, last = self._cut(start, stop)
        for place in range(first, last):
            waits.add(self.writers[place])
            self.readers[place].append(op)

    def write(self, start: int, stop: int, op: int, waits: set[int]) -> None:
        """`op` writes [start, stop): it waits for who wrote there and who has read it since."""
        first, last = self._cut(start, stop)
        for place in range(first, last):
            waits.add(self.writers[place])
            waits.update(self.readers[place])
        if last - first > 1:
            others = slice(first + 1, last)
            del self.starts[others], self.writers[others], self.readers[others]
        self.writers[first], self.readers[first] = op, []

    def _cut(self, start: int, stop: int) -> tuple[int, int]:
        """The places, first and end, of the segments that make up [start, stop) exactly, after splitting those that
        straddle its ends."""
        starts = self.starts
        first = bisect_left(starts, start)
        if first == len(starts) or starts[first] != start:
            self._split(first, start)
        last = first + 1
        if last == len(starts) or starts[last] != stop:
            last = bisect_left(starts, stop, last)
            if last == len(starts) or starts[last] != stop:
                self._split(last, stop)
        return first, last

    def _split(self, place: int, at: int) -> None:
        """Let a segment begin at byte `at`, in place `place`, with the history of the one before."""
        self.starts.insert(place, at)
        self.writers.insert(place, self.writers[place - 1])
        self.readers.insert(place, list(self.readers[place - 1]))
