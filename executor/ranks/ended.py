"""What each rank tells the others when a step has ended: its part of the loss and of the gradient's norm.

Owns the bytes. Losses add up in rank order; squares are integers, which add up alike in any. Without gradients the
losses of all micro-batches add up one by one, in the order in which one rank alone would have them.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ssdplan.plans.errors import RankError

from .group import WORDS_BYTES, Ranks

_SQUARES_BYTES = 512
"""Of an integer in units of 2**-1074: squares of fp32 are below 2**256, and so many elements below 2**64 more."""
_HEAD = struct.Struct(f"<d{_SQUARES_BYTES}s")
_WORDS_BYTES = 400


@dataclass(frozen=True, slots=True)
class Ended:
    """A step as one rank found it, or all ranks."""

    loss: float
    """Over the tokens of all ranks, this rank's part of it."""
    squares: int
    """Of the gradients of its share, in units of 2**-1074."""
    overflow: str
    """What was not finite, in words; empty where all was."""

    def words(self) -> bytes:
        words = self.overflow.encode()[:_WORDS_BYTES]
        return _HEAD.pack(self.loss, self.squares.to_bytes(_SQUARES_BYTES, "little")) + words

    @classmethod
    def read(cls, words: bytes) -> Self:
        """Raises RankError for what no rank of this version says."""
        if not _HEAD.size <= len(words) <= _HEAD.size + _WORDS_BYTES:
            raise RankError(f"another rank says {len(words)} bytes of how its step ended; are all of one version?")
        loss, squares = _HEAD.unpack_from(words)
        return cls(loss, int.from_bytes(squares, "little"), words[_HEAD.size :].decode(errors="replace"))

    @classmethod
    def of_all(cls, each: list[Self]) -> Self:
        """Of all ranks together; of several overflows the lowest rank's, which it is named with."""
        loss = 0.0
        for one in each:
            loss += one.loss
        named = [f"{one.overflow} (rank {rank})" for rank, one in enumerate(each) if one.overflow]
        return cls(loss, sum(one.squares for one in each), named[0] if named else "")


_NUMBER = struct.Struct("<d")
_NUMBERS_AT_ONCE = (WORDS_BYTES - 8) // _NUMBER.size


def sums_of_all(ranks: Ranks, parts: Sequence[Sequence[float]]) -> list[float]:
    """The sum of each of `parts` over all ranks' micro-batches, rank after rank, one after the other: the bits of one
    rank that has all of them. `parts`: of each sum this rank's, as many on every rank. Raises RankError."""
    mine = [number for part in parts for number in part]
    every: list[list[float]] = [[] for _ in range(ranks.size)]
    for start in range(0, len(mine), _NUMBERS_AT_ONCE):
        told = mine[start : start + _NUMBERS_AT_ONCE]
        for rank, words in enumerate(ranks.tell(b"".join(map(_NUMBER.pack, told)))):
            if len(words) != len(told) * _NUMBER.size:
                raise RankError(f"rank {rank} says {len(words)} bytes of its losses; are all of one version?")
            every[rank] += [number for (number,) in _NUMBER.iter_unpack(words)]
    sums, first = [], 0
    for part in parts:
        end = first + len(part)
        sums.append(sum(number for numbers in every for number in numbers[first:end]))
        first = end
    return sums
