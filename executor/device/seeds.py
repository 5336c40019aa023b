"""Seeds of torch's generators.

Owns how the numbers that name an operation become the seed that its random numbers follow from.
"""

import hashlib
import struct
from collections.abc import Iterable

import torch


def seed_generators(found: Iterable[torch.Generator], *numbers: int) -> None:
    """Seed generators from some numbers of 64 bits, whose order counts."""
    key = struct.pack(f"<{len(numbers)}q", *numbers)
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
    for generator in found:
        generator.manual_seed(seed)
