"""The table: which extents a generation holds, where they lie, and the checksum of each.

Owns its bytes (docs/store-format.md) and distrusts them: lengths, places and names are checked before they are used.
"""

import json
import struct
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ssdplan.plans.errors import StoreError
from ssdplan.plans.units import PAGE, whole_pages

from .layout import LONGEST_EXTENT

MAGIC = b"SSDTABLE"
EXTENT = np.dtype(
    [
        ("tensor", "<u4"),
        ("nbytes", "<u4"),
        ("offset", "<u8"),
        ("place", "<u8"),
        ("checksum", "<u8"),
        ("generation", "<u8"),
    ]
)
"""tensor: its number in the table's names; offset: of the extent in the tensor; place: of its bytes in the store,
before striping; generation: the one that it was written for. nbytes, offset and place are multiples of a page."""
_HEADER = struct.Struct("<8sQQ")


@dataclass(frozen=True)
class Table:
    """What one generation holds."""

    tensors: tuple[str, ...]
    volumes: tuple[str, ...]
    """Where each volume was when the table was written, to name it when it is missing."""
    metadata: dict[str, Any]
    """The owner's own: whatever JSON can say."""
    extents: npt.NDArray[Any]
    """[extents] of EXTENT, those of one tensor in order of offset."""

    def encode(self) -> bytes:
        """Whole pages, the rest of the last one zero."""
        names = {"tensors": self.tensors, "volumes": self.volumes, "metadata": self.metadata}
        text = json.dumps(names, sort_keys=True, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        body = _HEADER.pack(MAGIC, len(text), len(self.extents)) + text + self.extents.tobytes()
        return body.ljust(whole_pages(len(body)), b"\x00")

    @classmethod
    def decode(cls, data: bytes, store_bytes: int) -> Self:
        """Raises StoreError, naming what cannot be. `store_bytes`: what places must lie in."""
        if len(data) < _HEADER.size:
            raise StoreError("the table is cut off")
        magic, text_bytes, count = _HEADER.unpack_from(data)
        begin = _HEADER.size + text_bytes
        if magic != MAGIC or begin > len(data) or count > (len(data) - begin) // EXTENT.itemsize:
            raise StoreError("the table's header is not one")
        try:
            names = json.loads(data[_HEADER.size : begin])
        except (ValueError, RecursionError) as error:
            raise StoreError(f"the table's names cannot be read: {error}") from error
        if not (
            isinstance(names, dict)
            and set(names) == {"tensors", "volumes", "metadata"}
            and _are_texts(names["tensors"])
            and _are_texts(names["volumes"])
            and isinstance(names["metadata"], dict)
        ):
            raise StoreError("the table's names are not what a table holds")
        extents = np.frombuffer(data, dtype=EXTENT, count=count, offset=begin).copy()
        _check(extents, len(names["tensors"]), store_bytes)
        return cls(tuple(names["tensors"]), tuple(names["volumes"]), names["metadata"], extents)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _check(extents: npt.NDArray[Any], tensors: int, store_bytes: int) -> None:
    if not len(extents):
        return
    numbers = {name: extents[name].astype(np.uint64) for name in ("nbytes", "offset", "place")}
    if any(int((value % PAGE).max()) for value in numbers.values()) or int(numbers["nbytes"].min()) == 0:
        raise StoreError("the table has an extent that is no whole number of pages")
    if int(numbers["nbytes"].max()) > LONGEST_EXTENT:
        raise StoreError("the table has an extent that is longer than any may be")
    if int(extents["tensor"].max()) >= tensors:
        raise StoreError("the table has an extent of a tensor that it does not name")
    if int(numbers["place"].max()) > store_bytes or int((numbers["place"] + numbers["nbytes"]).max()) > store_bytes:
        raise StoreError("the table has an extent outside the store")
    order = np.argsort(extents["place"])
    places, ends = numbers["place"][order], (numbers["place"] + numbers["nbytes"])[order]
    if (places[1:] < ends[:-1]).any():
        raise StoreError("the table has two extents in one place")
