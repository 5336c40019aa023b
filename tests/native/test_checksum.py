"""The checksum against a second implementation of its definition (native/src/checksum.hpp), and what it must detect."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ssdplan.native as native
from tests.extent import examples

WORD = (1 << 64) - 1
ORDER_PRIMES = (3, 5, 17, 257, 641, 65537, 6700417)  # of 2**64 - 1

Matrix = list[int]


def step(x: int) -> int:
    x ^= (x << 11) & WORD
    x ^= x >> 17
    return x ^ (x << 5) & WORD


def image(matrix: Matrix, word: int) -> int:
    total = 0
    while word:
        lowest = word & -word
        total ^= matrix[lowest.bit_length() - 1]
        word ^= lowest
    return total


def power(matrix: Matrix, exponent: int) -> Matrix:
    result = [1 << bit for bit in range(64)]
    while exponent:
        if exponent & 1:
            result = [image(matrix, column) for column in result]
        matrix = [image(matrix, column) for column in matrix]
        exponent >>= 1
    return result


T = [step(1 << bit) for bit in range(64)]


@cache
def root() -> tuple[int, ...]:
    return tuple(power(T, 1 << 59))


def finish(h: int, nbytes: int) -> int:
    h ^= nbytes * 0x9E3779B97F4A7C15 & WORD
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD & WORD
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 & WORD
    return h ^ h >> 33


def reference(data: bytes) -> int:
    s = list(root())
    h = 0
    for at in range(0, len(data), 8):
        h = image(s, h) ^ int.from_bytes(data[at : at + 8], "little")
    return finish(h, len(data))


def checksum(data: bytes, threads: int = 1, shift: int = 0) -> int:
    block = np.zeros(len(data) + 16, np.uint8)
    block[shift : shift + len(data)] = np.frombuffer(data, np.uint8)
    return native.checksum(block.ctypes.data + shift, len(data), threads)


def test_the_root_is_one_and_the_cycle_is_whole() -> None:
    assert power(list(root()), 32) == T
    unit = power(T, 0)
    assert power(T, WORD) == unit
    assert all(power(T, WORD // prime) != unit for prime in ORDER_PRIMES)


@settings(max_examples=examples(25), deadline=None)
@given(units=st.integers(0, 24), seed=st.integers(0, 1 << 32), shift=st.integers(0, 15))
def test_it_is_the_defined_one_at_any_address(units: int, seed: int, shift: int) -> None:
    data = np.random.default_rng(seed).bytes(256 * units)
    assert checksum(data, shift=shift) == reference(data)


def test_values_that_disks_hold_stay() -> None:
    assert checksum(b"") == 0
    assert checksum(bytes(4096)) == finish(0, 4096) == 0xA8551D372F3FFCEB
    assert checksum(bytes(range(256)) * 16) == 0x498505F180DBB93E


@pytest.mark.parametrize("nbytes", [(1 << 18) - 256, 1 << 18, (1 << 18) + 256, 3 * (1 << 18), (1 << 20) + 4096])
def test_threads_and_pieces_change_nothing(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert {checksum(data, threads) for threads in (1, 2, 3, 8)} == {reference(data)}


def test_every_flipped_bit_of_a_page_is_seen() -> None:
    page = np.frombuffer(np.random.default_rng(3).bytes(4096), np.uint8).copy()
    seen = {native.checksum(page.ctypes.data, 4096)}
    for byte in range(4096):
        for bit in range(8):
            page[byte] ^= 1 << bit
            seen.add(native.checksum(page.ctypes.data, 4096))
            page[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * 4096


@settings(max_examples=examples(300), deadline=None)
@given(start=st.integers(0, 32768 - 60), pattern=st.integers(1, (1 << 60) - 1))
def test_every_burst_of_up_to_60_bits_is_seen(start: int, pattern: int) -> None:
    assert checksum((pattern << start).to_bytes(4096, "little")) != checksum(bytes(4096))


def test_no_burst_of_up_to_60_bits_can_pass() -> None:
    """A burst in two words passes where S(first) = second: excluded where the possible ones are independent."""
    s = root()
    for start in range(5, 64):  # from there, 60 bits reach into the next word
        basis: dict[int, int] = {}
        for vector in [*s[start:], *(1 << bit for bit in range(60 - (64 - start)))]:
            while vector.bit_length() in basis:
                vector ^= basis[vector.bit_length()]
            assert vector
            basis[vector.bit_length()] = vector


def test_length_and_place_enter() -> None:
    data = np.random.default_rng(5).bytes(256)
    blocks = [
        bytes(256),
        bytes(512),
        data,
        data + bytes(256),
        bytes(256) + data,
        bytes(512) + data,
        data[8:] + data[:8],
        data[::-1],
    ]
    assert len({checksum(block) for block in blocks}) == len(blocks)


def test_wrong_arguments_are_refused() -> None:
    block = np.zeros(512, np.uint8)
    for arguments, message in [
        ((block.ctypes.data, 255), "multiple of 256"),
        ((block.ctypes.data, -256), "must not be negative"),
        ((0, 256), "null pointer"),
        ((block.ctypes.data, 256, 0), "threads"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.checksum(*arguments)
