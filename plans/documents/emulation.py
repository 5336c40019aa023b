"""Emulation: what a small stand-in, whose operations are made to last so long, stands for.

Owns that part of a machine's description. How its figures follow is `planner/emulation.py`'s.
"""

from typing import Annotated

from pydantic import Field

from .base import Name, Part

MOST_SLOWER = 1_000_000


class Emulation(Part):
    """What a small stand-in, which runs for real, stands for (DESIGN 11)."""

    like: Name
    """A model of the catalogue."""
    gpu: Name
    ssd: Name
    smaller: Annotated[int, Field(ge=2, le=256)]
    """What every width, the vocabulary and the rows of the stand-in are divided by; bytes are by its square."""
    slower: Annotated[float, Field(gt=0.0, lt=MOST_SLOWER, allow_inf_nan=False)]
    """How many times as long as the catalogue says each operation lasts."""
