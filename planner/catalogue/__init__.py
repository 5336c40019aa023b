"""The catalogue: GPUs, processors, SSDs, links and models that a what-if can name, each figure with its source.

Owns finding a thing by its name. The data are in gpus.py, cpus.py, ssds.py, links.py and models.py, and nothing here
computes with them.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Protocol, TypeVar

from ssdplan.plans.errors import UsageError

from .cpus import COMPUTE_EFFICIENCY, CPUS, MEMORY_EFFICIENCY, Cpu
from .figure import Figure, assumed
from .gpus import ATTENTION_TOKENS, FRAGMENTATION, GPUS, LAUNCH, PASSES, RESERVE, TRAINING, Gpu
from .links import IN_DRAM, LINKS, Link
from .models import MODELS
from .shapes import Shape
from .ssds import SSDS, TB, Size, Ssd

__all__ = [
    "ATTENTION_TOKENS",
    "COMPUTE_EFFICIENCY",
    "CPUS",
    "FRAGMENTATION",
    "GPUS",
    "IN_DRAM",
    "LAUNCH",
    "LINKS",
    "MEMORY_EFFICIENCY",
    "MODELS",
    "PASSES",
    "RESERVE",
    "SSDS",
    "TB",
    "TRAINING",
    "Cpu",
    "Figure",
    "Gpu",
    "Link",
    "Shape",
    "Size",
    "Ssd",
    "assumed",
    "find",
    "nearest",
]


class Named(Protocol):
    """A thing of the catalogue."""

    @property
    def name(self) -> str: ...


Thing = TypeVar("Thing", bound=Named)


def find(kind: str, name: str, things: Iterable[Thing]) -> Thing:
    """The thing called `name`, upper and lower case alike. Raises UsageError with the nearest name and all others."""
    known = {thing.name: thing for thing in things}
    if name.lower() not in known:
        raise UsageError(nearest(f"no {kind} {name!r} in the catalogue", name, known))
    return known[name.lower()]


def nearest(problem: str, name: str, known: Iterable[str]) -> str:
    """`problem`, the known name nearest to `name` and all that there are, in one line."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, 1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{problem}{hint} (known: {', '.join(names)})"
