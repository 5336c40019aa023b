"""Epochs: the length of a run by how often it takes every row of its data. Owns how many steps that are."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Epochs:
    """The length of a run before its data are read: how many times every row is taken. With it, what of the learning
    rate is a share of that length."""

    count: float
    """Above 0; 0.5 is one half of the rows."""
    warmup: float = 0.0
    """Steps of warm-up, or below 1 their share of all steps."""
    decay: float = 0.0
    """The same of the decay."""

    def steps(self, rows: int, rows_a_step: int) -> int:
        """The fewest steps of `rows_a_step` that take every one of `rows` so often. The last may reach into the next
        epoch."""
        return max(math.ceil(round(self.count * rows, 6) / rows_a_step), 1)
