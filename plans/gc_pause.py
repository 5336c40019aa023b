"""Pauses Python's cycle collector while many objects that form no cycle are made.

A schedule is hundreds of thousands of small objects; looking through all of them each time that their number has grown
by a quarter would take as long as a third of making them.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside, or in the function that it decorates, no cycle is looked for; objects without one are freed as ever."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
