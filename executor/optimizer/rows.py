"""Rows of a tensor that lie side by side, as a zeroth-order pass over them sees them.

Owns what the pass has to know to draw for each row what it would draw for it in the whole tensor.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows they are."""

    numbers: torch.Tensor
    """int64, where the parameters are: of each row its number in the tensor."""
    elements: int
    """Of a row, a multiple of 64."""
