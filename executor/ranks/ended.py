"""What each rank tells the others when a step has ended: its part of the loss and of the gradient's norm.

Owns the bytes. Losses add up in rank order; squares are integers, which add up alike in any.
"""

import struct
from dataclasses import dataclass
from typing import Self

from ssdplan.plans.errors import RankError

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
