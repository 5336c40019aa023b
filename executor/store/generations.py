"""Generations: what each place of each extent holds, now and in the last durable generations.

Owns the bookkeeping of copy-on-write (docs/store-format.md): which of an extent's places holds it, which ones a durable
generation holds, so that nothing overwrites them, and the checksum that belongs to it; and the table that says all that
on the volumes. It moves no bytes.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ssdplan.plans.errors import StoreError
from ssdplan.plans.units import whole_pages

from .layout import Layout
from .recovery import Found
from .table import EXTENT, Table

METADATA_BYTES = 64 << 10
"""Room in every table for the owner's own."""
NOWHERE = -1
"""The place of an extent that was never written."""


class Generations:
    """Of each extent of a layout, by its number: where it is, and where the durable generations have it."""

    def __init__(self, layout: Layout, *, durable: bool) -> None:
        self._layout, self._durable = layout, durable
        count = len(layout.extents)
        self.place = [NOWHERE] * count
        """Extent -> which of its places holds it now."""
        self.checksum = [0] * count
        """Extent -> the checksum of what is there."""
        self._held = ([NOWHERE] * count, [NOWHERE] * count)
        """As `place`, for the last durable generation and, where two are kept, for the one before."""
        self._born = [0] * count
        """Extent -> the generation in which it was written last."""

    def free_place(self, index: int) -> int:
        """Where to write an extent: where it is when no durable generation holds that place, else a free one."""
        if not self._durable:
            return 0
        place, held = self.place[index], (self._held[0][index], self._held[1][index])
        if place != NOWHERE and (place not in held or len(self._layout.extents[index].places) == 1):
            return place
        return next(number for number in range(len(self._layout.extents[index].places)) if number not in held)

    def written(self, chosen: range, places: Sequence[int], checksums: Sequence[int], generation: int) -> None:
        """The extents `chosen` are in these places now, with these checksums, for `generation`, which is to come."""
        span = slice(chosen.start, chosen.stop)
        self.place[span], self.checksum[span] = list(places), list(checksums)
        self._born[span] = [generation] * len(chosen)

    def committed(self, *, keep: int) -> None:
        """What is there now is a durable generation, the last of `keep`."""
        self._held = (list(self.place), self._held[0] if keep > 1 else self._held[1])

    def table(self, metadata: dict[str, Any], paths: tuple[str, ...]) -> Table:
        """What the next generation holds, for volumes at `paths`."""
        names = [record.name for record in self._layout.records if record.durable]
        numbers = {name: number for number, name in enumerate(names)}
        rows = [
            (
                numbers[self._layout.records[extent.record].name],
                extent.nbytes,
                extent.within,
                extent.places[self.place[index]],
                self.checksum[index],
                self._born[index],
            )
            for index, extent in enumerate(self._layout.extents)
            if self._layout.records[extent.record].durable and self.place[index] != NOWHERE
        ]
        return Table(tuple(names), paths, metadata, np.array(rows, dtype=EXTENT))

    def adopt(self, found: Found) -> None:
        """Take over what the last two generations hold. Raises StoreError where that is another plan's."""
        index_of = {
            (self._layout.records[extent.record].name, extent.within, extent.nbytes): index
            for index, extent in enumerate(self._layout.extents)
            if self._layout.records[extent.record].durable
        }
        for table, held in zip((found.table, found.previous), self._held, strict=True):
            if table is None:
                continue
            for row in table.extents:
                index = index_of.get((table.tensors[row["tensor"]], int(row["offset"]), int(row["nbytes"])))
                places = self._layout.extents[index].places if index is not None else ()
                if index is None or int(row["place"]) not in places:
                    raise StoreError(
                        f"{found.volumes[0].path}: this store was made for another plan: its extents lie elsewhere"
                    )
                held[index] = places.index(int(row["place"]))
                if table is found.table:
                    self.place[index] = held[index]
                    self.checksum[index], self._born[index] = int(row["checksum"]), int(row["generation"])


def table_bytes_of(layout: Layout, volumes: int) -> int:
    """Enough for any table of this layout."""
    names = tuple(record.name for record in layout.records if record.durable)
    durable = sum(1 for extent in layout.extents if layout.records[extent.record].durable)
    longest = Table(names, ("",) * volumes, {}, np.zeros(durable, dtype=EXTENT)).encode()
    room = len(longest) + METADATA_BYTES + volumes * 4 * os.pathconf("/", "PC_PATH_MAX")
    return whole_pages(room)
