"""Tables: what is known of a table of token embeddings of which only the rows of a batch's tokens need be moved.

Owns these fields of a profile's states (docs/plan-format.md), and how many rows a step's tokens name at most.
"""

from typing import Self

from pydantic import model_validator

from .base import Count, Part

ROW_GRAIN = 64
"""Elements of a zeroth-order direction that are drawn at once (`native/src/zeroth_order.hpp`)."""


class Table(Part):
    """A table of token embeddings of which a forward reads the rows that its tokens name, and nothing else."""

    rows: Count
    row_elements: Count
    """A multiple of `ROW_GRAIN`."""

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.row_elements % ROW_GRAIN:
            raise ValueError(f"row_elements = {self.row_elements} is not a multiple of {ROW_GRAIN}")
        return self

    @property
    def elements(self) -> int:
        return self.rows * self.row_elements

    def most_elements(self, tokens: int) -> int:
        """Of the rows that so many tokens name at most."""
        return min(self.rows, tokens) * self.row_elements
