"""Packing: which tokens of which samples share a row.

Owns the three ways to lay samples into rows of a sequence length. It knows where samples begin and end, and no token.
"""

from bisect import bisect_left, insort
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Segment = tuple[int, int]
"""Where tokens that belong to one sample, and to one row, begin and end in the cache."""


class Rows(Protocol):
    """`count` rows, each of one segment or more."""

    count: int

    def segments(self, row: int) -> list[Segment]: ...


class EndToEnd:
    """Samples laid end to end and cut into rows of exactly `length` tokens; what is left over at the end is dropped."""

    def __init__(self, starts: Ints, stops: Ints, length: int) -> None:
        self._starts, self._length = starts, length
        self._ends = np.cumsum(stops - starts)
        self.count = int(self._ends[-1]) // length if len(self._ends) else 0

    def segments(self, row: int) -> list[Segment]:
        begin, end = row * self._length, (row + 1) * self._length
        sample = int(np.searchsorted(self._ends, begin, side="right"))
        found = []
        while begin < end:
            stop = min(end, int(self._ends[sample]))
            before = int(self._ends[sample - 1]) if sample else 0
            start = int(self._starts[sample]) + begin - before
            found.append((start, start + stop - begin))
            begin, sample = stop, sample + 1
        return found


class OneARow:
    """One sample a row, cut at `length`."""

    def __init__(self, starts: Ints, stops: Ints, length: int) -> None:
        self._starts, self._stops = starts, np.minimum(stops, starts + length)
        self.count = len(starts)

    def segments(self, row: int) -> list[Segment]:
        return [(int(self._starts[row]), int(self._stops[row]))]


class WholeSamples:
    """Samples laid into rows of at most `length` tokens so that none is cut but those that are longer, at `length`.

    The longest come first, each into the fullest row that still has room for it (best fit decreasing: Johnson, Demers,
    Ullman, Garey, Graham, Worst-case performance bounds for simple one-dimensional packing algorithms, 1974); those of
    one length in their own order. Rows are then in the order of their first samples.
    """

    def __init__(self, starts: Ints, stops: Ints, length: int) -> None:
        self._starts, self._stops = starts, np.minimum(stops, starts + length)
        lengths = self._stops - starts
        rows: list[list[int]] = []
        with_room: dict[int, list[int]] = {}  # the rows that have so much room left, the last one on top
        rooms: list[int] = []  # the keys of `with_room`, in rising order
        for sample in np.argsort(-lengths, kind="stable").tolist():
            need = int(lengths[sample])
            place = bisect_left(rooms, need)
            if place < len(rooms):
                room = rooms[place]
                row = with_room[room].pop()
                if not with_room[room]:
                    del with_room[room], rooms[place]
            else:
                room, row = length, len(rows)
                rows.append([])
            rows[row].append(sample)
            left = room - need
            if left:
                if left not in with_room:
                    with_room[left] = []
                    insort(rooms, left)
                with_room[left].append(row)
        members = sorted(sorted(row) for row in rows)
        self._samples = np.array([sample for row in members for sample in row], np.int64)
        self._ends = np.cumsum([len(row) for row in members], dtype=np.int64)
        self.count = len(members)

    def segments(self, row: int) -> list[Segment]:
        first = int(self._ends[row - 1]) if row else 0
        samples = self._samples[first : int(self._ends[row])]
        return [(int(self._starts[sample]), int(self._stops[sample])) for sample in samples]
