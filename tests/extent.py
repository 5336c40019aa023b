"""How much of a campaign the tests try: a part that meets everything once, or all of it.

Owns that choice. `SSDPLAN_TESTS=full` asks for all: every family in every shape, every placement of a grid, long
trainings and many random examples. CONTRIBUTING.md says what `make test` leaves out.
"""

import os
from typing import TypeVar

FULL = os.environ.get("SSDPLAN_TESTS") == "full"
T = TypeVar("T")


def short_or_full(short: T, full: T) -> T:
    """The first, or with `SSDPLAN_TESTS=full` the second."""
    return full if FULL else short


def examples(full: int) -> int:
    """How many random examples are tried of so many: a third."""
    return short_or_full(max(5, full // 3), full)
