"""Order: one order of a step's operations, as a value.

Owns the type. `vertical.py`, `horizontal.py` and `zeroth_order.py` make one value each; `build.py` has the table of
them by name. What an order moves, the planner states as linear forms, in a table of its own with the same names.
"""

from dataclasses import dataclass
from typing import Protocol

from .emission import Emission


class Emit(Protocol):
    """Adds the operations of one program to an emission that is empty."""

    def __call__(self, emission: Emission) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a schedule emits. `build.py` picks the operations of each graph from the two programs."""

    train: Emit
    """A step: forwards, backwards and updates, those of the step before included."""
    evaluate: Emit
    """The forwards of all layers, the head's loss included."""
    flush: Emit | None = None
    """The updates that wait when a step has ended, where they are no operations of `train`."""
