"""Layout: cuts a store's address space into extents and gives each the places that it may lie in.

Owns the arithmetic of copy-on-write: a durable extent has a place for each generation that is kept (the last two, or
the last) and one that is free to write. Everything else has one. Plain numbers: it opens nothing.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from ssdplan.plans.units import PAGE

LONGEST_EXTENT = 4 << 20
"""Bytes under one checksum: what must be read to believe any of it."""
MOST_KEPT = 2
"""Generations that a store can keep: as many as it has slots for superblocks and tables."""


@dataclass(frozen=True)
class Record:
    """Bytes [offset, offset + nbytes) of a store's address space that belong together, and where within them a read or
    a write may begin or end (`cuts`, from 0). All multiples of a page."""

    name: str
    offset: int
    nbytes: int
    durable: bool
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Extent:
    """What is written and read as one, under one checksum."""

    record: int
    within: int
    """Byte of the record at which it begins."""
    address: int
    """Byte of the store's address space at which it begins."""
    nbytes: int
    places: tuple[int, ...]
    """Bytes of the store, before striping, at which it may lie."""


@dataclass(frozen=True)
class Layout:
    """All extents of a store, in order of address."""

    records: tuple[Record, ...]
    extents: tuple[Extent, ...]
    addresses: tuple[int, ...]
    ends: dict[int, int]
    """End of an extent -> the number after its own."""
    nbytes: int
    """What the places take."""

    @classmethod
    def of(cls, records: Sequence[Record], *, durable: bool, keep: int = MOST_KEPT) -> Self:
        """`keep`: generations; a durable extent has one place more. Without `durable` nothing is kept beyond a crash,
        and every extent has one place."""
        assert 1 <= keep <= MOST_KEPT
        copies = keep + 1
        ordered = tuple(sorted(records, key=lambda record: record.offset))
        for left, right in itertools.pairwise(ordered):
            assert left.offset + left.nbytes <= right.offset, f"{left.name} and {right.name} overlap"
        assert len({record.name for record in records}) == len(records), "two records of one name"
        kept = sum(record.nbytes for record in ordered if record.durable and durable)
        ends = [0, copies * kept]
        extents: list[Extent] = []
        for number, record in enumerate(ordered):
            copied = record.durable and durable
            for start, stop in _cut(record):
                base = ends[0 if copied else 1] + start
                places = tuple(base + copy * kept for copy in range(copies)) if copied else (base,)
                extents.append(Extent(number, start, record.offset + start, stop - start, places))
            ends[0 if copied else 1] += record.nbytes
        addresses = tuple(extent.address for extent in extents)
        after = {extent.address + extent.nbytes: index + 1 for index, extent in enumerate(extents)}
        return cls(ordered, tuple(extents), addresses, after, ends[1])

    def range(self, offset: int, nbytes: int) -> range:
        """The extents of bytes [offset, offset + nbytes) of the address space, which must begin and end at cuts."""
        first = bisect_left(self.addresses, offset)
        last = self.ends.get(offset + nbytes, -1)
        assert first < last and self.addresses[first] == offset, f"{offset} + {nbytes}: not at cuts"
        return range(first, last)


def _cut(record: Record) -> Iterator[tuple[int, int]]:
    """The extents of a record: its cuts, and what is longer than an extent may be in equal parts."""
    assert record.nbytes > 0 and record.offset % PAGE == 0 and record.nbytes % PAGE == 0
    for start, stop in itertools.pairwise(sorted({0, *record.cuts, record.nbytes})):
        assert start % PAGE == 0 and 0 <= start < stop <= record.nbytes, f"{record.name} cannot be cut at {start}"
        pages, parts = (stop - start) // PAGE, -(-(stop - start) // LONGEST_EXTENT)
        marks = [start + pages * part // parts * PAGE for part in range(parts + 1)]
        yield from itertools.pairwise(marks)
