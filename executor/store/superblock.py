"""The superblock: one page that says what a volume is and which generation of its store is durable.

Owns its bytes (docs/store-format.md) and distrusts them: what does not carry its own checksum, or says what cannot be,
is no superblock.
"""

import struct
from dataclasses import dataclass
from typing import Self

import numpy as np

from ssdplan import native
from ssdplan.plans.documents.stripe_shares import CYCLE
from ssdplan.plans.units import PAGE

from .striping import Striping

MAGIC = b"SSDPLAN\x02"
SLOTS = 2
TABLES_START = SLOTS * PAGE
_FIELDS = struct.Struct("<8sII16sIIQQQQQ16s32sI")
_CHECKSUM_AT = PAGE - 8
_BLANK, _STORE = 0, 1
LARGEST_STRIPE = 1 << 30
LAST_GENERATION = 1 << 62
"""No store gets there, so one that says so was made up, and has room to go on from all the same."""


@dataclass(frozen=True)
class Superblock:
    """One slot of one volume. Numbers are bytes where the name says so."""

    store: bytes
    """16 random bytes, the same on all volumes of a store; zeros on a volume that holds none."""
    volume: int
    striping: Striping
    generation: int
    capacity_bytes: int
    """Of the file or device, the superblocks included."""
    table_bytes: int
    """Of each of the two places for a table."""
    table_length: int
    """What the table of this generation takes of its place, whole pages."""
    table_checksum: int
    plan_sha256: str
    blank: bool = False
    keep: int = 2
    """Generations whose extents are not overwritten, from the last one backwards."""

    @classmethod
    def of_blank(cls, capacity_bytes: int) -> Self:
        """A volume that is ours and holds nothing."""
        return cls(bytes(16), 0, Striping(b"\x00"), 0, capacity_bytes, 0, 0, 0, "00" * 32, blank=True)

    @property
    def slot(self) -> int:
        return self.generation % SLOTS

    @property
    def table_start(self) -> int:
        """Where on its volume the table of this generation begins."""
        return TABLES_START + self.slot * self.table_bytes

    @property
    def data_start(self) -> int:
        """Where on its volume the stripes begin."""
        return data_start(self.table_bytes, self.striping.stripe_bytes)

    def encode(self) -> bytes:
        """PAGE bytes."""
        body = _FIELDS.pack(
            MAGIC,
            _BLANK if self.blank else _STORE,
            self.volume,
            self.store,
            len(self.striping.dealing),
            self.striping.stripe_bytes,
            self.generation,
            self.capacity_bytes,
            self.table_bytes,
            self.table_length,
            self.table_checksum,
            self.striping.dealing.ljust(CYCLE, b"\xff"),
            bytes.fromhex(self.plan_sha256),
            self.keep,
        ).ljust(_CHECKSUM_AT, b"\x00")
        return body + struct.pack("<Q", _checksum(body))

    @classmethod
    def decode(cls, page: bytes) -> Self | None:
        """What `page` says, or None when it is no superblock of ours, whole and possible."""
        assert len(page) == PAGE
        body, (checksum,) = page[:_CHECKSUM_AT], struct.unpack("<Q", page[_CHECKSUM_AT:])
        if body[: len(MAGIC)] != MAGIC or checksum != _checksum(body):
            return None
        (
            _,
            kind,
            volume,
            store,
            dealt,
            stripe_bytes,
            generation,
            capacity,
            table,
            length,
            table_checksum,
            deal,
            plan,
            keep,
        ) = _FIELDS.unpack_from(body)
        if kind not in (_BLANK, _STORE) or not 1 <= dealt <= CYCLE:
            return None
        dealing = deal[:dealt]
        possible = (
            set(dealing) == set(range(max(dealing) + 1))
            and volume <= max(dealing)
            and stripe_bytes % PAGE == 0
            and PAGE <= stripe_bytes <= LARGEST_STRIPE
            and table % PAGE == 0
            and length % PAGE == 0
            and length <= table
            and keep <= SLOTS
            and generation < LAST_GENERATION
            and (kind == _BLANK or data_start(table, stripe_bytes) <= capacity)
        )
        if not possible:
            return None
        striping = Striping(dealing, stripe_bytes)
        blank = kind == _BLANK
        return cls(
            store,
            volume,
            striping,
            generation,
            capacity,
            table,
            length,
            table_checksum,
            plan.hex(),
            blank,
            keep or SLOTS,  # stores from before there was a choice have 0 here
        )


def data_start(table_bytes: int, stripe_bytes: int) -> int:
    """Where the stripes of a volume begin, behind two superblocks and two tables: at a whole stripe."""
    return -(-(TABLES_START + SLOTS * table_bytes) // stripe_bytes) * stripe_bytes


def is_ours(page: bytes) -> bool:
    """Whether `page` was written by ssdplan, in this version's format or an earlier one, whole or not."""
    return page[: len(MAGIC) - 1] == MAGIC[:-1]


def _checksum(body: bytes) -> int:
    """The store's checksum of the page without its last 8 bytes, which count as zeros."""
    page = np.zeros(PAGE, dtype=np.uint8)
    page[: len(body)] = np.frombuffer(body, dtype=np.uint8)
    return native.checksum(page.ctypes.data, PAGE)
