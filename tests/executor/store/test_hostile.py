"""Superblocks and tables that somebody made to harm: refused by name, never followed."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdplan.executor.store.layout import LONGEST_EXTENT
from ssdplan.executor.store.striping import Striping
from ssdplan.executor.store.superblock import MAGIC, Superblock, _checksum
from ssdplan.executor.store.table import EXTENT, Table
from ssdplan.plans.errors import StoreError

PAGE = 4096
STORE_BYTES = 1 << 20
GOOD = Superblock(bytes(range(16)), 1, Striping(b"\x00\x01", PAGE), 7, 1 << 30, 2 * PAGE, PAGE, 3, "5c" * 32)


def table(*rows: tuple[int, int, int, int, int, int]) -> Table:
    return Table(("a", "b"), ("/x",), {"step": 3}, np.array(list(rows), dtype=EXTENT))


def sealed(page: bytes) -> bytes:
    """With the checksum that it should have: a page that somebody made, not one that broke."""
    return page[:-8] + struct.pack("<Q", _checksum(page[:-8]))


def test_what_is_written_is_read_again():
    assert Superblock.decode(GOOD.encode()) == GOOD
    whole = table((0, PAGE, 0, 0, 5, 1), (1, 2 * PAGE, PAGE, 8 * PAGE, 6, 2))
    again = Table.decode(whole.encode(), STORE_BYTES)
    assert (again.tensors, again.volumes, again.metadata) == (whole.tensors, whole.volumes, whole.metadata)
    assert (again.extents == whole.extents).all()


@given(st.integers(0, PAGE * 8 - 1))
def test_any_flipped_bit_of_a_superblock_is_noticed(bit):
    page = bytearray(GOOD.encode())
    page[bit // 8] ^= 1 << bit % 8
    assert Superblock.decode(bytes(page)) is None


@given(st.integers(8, 127), st.binary(min_size=1, max_size=8))
def test_a_sealed_superblock_says_what_is_possible_or_nothing(offset, value):
    page = bytearray(GOOD.encode())
    page[offset : offset + len(value)] = value
    read = Superblock.decode(sealed(bytes(page)))
    if read:
        assert read.striping.volumes <= 16 and read.volume < read.striping.volumes
        assert PAGE <= read.striping.stripe_bytes <= 1 << 30 and read.table_length <= read.table_bytes
        assert read.data_start <= read.capacity_bytes


@pytest.mark.parametrize("generation", [2**62, 2**64 - 2, 2**64 - 1])
def test_a_generation_behind_which_there_is_no_room_is_none(generation):
    """Two commits behind it a superblock could not be written any more."""
    assert Superblock.decode(replace(GOOD, generation=generation).encode()) is None
    last = replace(GOOD, generation=2**62 - 1)
    assert Superblock.decode(last.encode()) == last


def test_a_superblock_of_the_first_format_is_none():
    assert Superblock.decode(sealed(MAGIC[:-1] + b"\x01" + GOOD.encode()[8:])) is None


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ((0, PAGE, 0, STORE_BYTES, 0, 1), "outside the store"),
        ((0, PAGE, 0, 2**64 - PAGE, 0, 1), "outside the store"),
        ((0, PAGE + 1, 0, 0, 0, 1), "whole number of pages"),
        ((0, 0, 0, 0, 0, 1), "whole number of pages"),
        ((2, PAGE, 0, 0, 0, 1), "does not name"),
        ((1, PAGE, 0, 8 * PAGE, 0, 1), "in one place"),
    ],
)
def test_an_extent_that_cannot_be_is_refused(row, why):
    with pytest.raises(StoreError, match=why):
        Table.decode(table((0, 2 * PAGE, 0, 7 * PAGE, 0, 1), row).encode(), STORE_BYTES)


def test_an_extent_that_is_longer_than_any_is_refused():
    """Whoever reads one has room for the longest."""
    longest = table((0, LONGEST_EXTENT, 0, 0, 0, 1)).encode()
    assert len(Table.decode(longest, 2 * LONGEST_EXTENT).extents) == 1
    with pytest.raises(StoreError, match="longer than any"):
        Table.decode(table((0, LONGEST_EXTENT + PAGE, 0, 0, 0, 1)).encode(), 2 * LONGEST_EXTENT)


@pytest.mark.parametrize(
    "names",
    [
        b"[" * 3000,
        b"{}",
        b"\xff\xfe",
        json.dumps({"tensors": [1], "volumes": [], "metadata": {}}).encode(),
        json.dumps({"tensors": [], "volumes": [], "metadata": []}).encode(),
        json.dumps({"tensors": [], "volumes": [], "metadata": {}, "more": 1}).encode(),
    ],
)
def test_names_that_cannot_be_are_refused(names):
    with pytest.raises(StoreError, match="names"):
        Table.decode(struct.pack("<8sQQ", b"SSDTABLE", len(names), 0) + names, STORE_BYTES)


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_any_bytes_are_a_table_or_an_error(rest, text_bytes, count):
    for data in (rest, struct.pack("<8sQQ", b"SSDTABLE", text_bytes, count) + rest):
        with pytest.raises(StoreError):
            Table.decode(data, STORE_BYTES)
