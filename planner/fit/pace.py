"""Pace: how the pipeline of updates is cut, from a budget of host memory.

Owns the lengths of chunks and how many are on their way. Which of them is the fastest, whoever fits them can tell.
"""

from dataclasses import dataclass, replace

from ssdplan.plans.documents.overlap import Overlap
from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.state_layout import (
    ELEMENT_BYTES,
    GRADIENT_BYTES,
    GRAIN,
)

from ..program.choices import FixedChoices
from .budgets import Needs

CHUNKS_SHARE, CHUNKS_AT_ONCE = 0.3, 8
"""Update chunks are cut so that those on their way take about this share of the host budget."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How the pipeline of updates is cut."""

    chunk_elements: int
    lookahead: int
    behind: bool = False
    """Of several ranks: gradients are exchanged beside the next layer's backward, for the memory of two more."""
    overlap: Overlap = "all"
    """What the device has of other layers while one runs."""

    def of(self, decision: Decision) -> Decision:
        """`decision` with its updates cut so; what the device has of other layers stays as it is."""
        chunks = {"update_chunk_elements": self.chunk_elements, "update_lookahead": self.lookahead}
        return decision.model_copy(update=chunks)


class Paces:
    """The paces of one model in one budget."""

    def __init__(self, model: Model, budget: Needs, fixed: FixedChoices) -> None:
        largest = max(state.elements for state in model.states if not state.frozen)
        each = fixed.formats.mean_bytes + GRADIENT_BYTES + ELEMENT_BYTES[model.precision]
        affordable = CHUNKS_SHARE * budget.host / (CHUNKS_AT_ONCE * each)
        smallest, most = max(1 << 16, largest / 128), max(1 << 20, largest / 64)
        usual = Pace(_grains(min(max(affordable, smallest), most)), 3, behind=fixed.shares > 1)
        self.usual = usual
        self.usuals = tuple(dict.fromkeys((usual, replace(usual, behind=False))))
        """The usual pace, of several ranks in both ways, the better first."""
        self.tight = Pace(_grains(smallest), 1)
        """The one that takes least memory."""
        self.others = tuple(
            replace(usual, chunk_elements=_grains(max(usual.chunk_elements / shorter, 1 << 16)), lookahead=lookahead)
            for shorter, lookahead in ((2, 8), (2, 12), (4, 8), (4, 16), (8, 16))
        )
        """Those that may hide more where a drive is the slowest: shorter chunks and more of them on their way."""
        self.hastier = self.others[1]
        """Of these the fastest in three of three what-ifs that waited for chunks (2026-11-29)."""
        self.usual_in_less = with_less_on_device(self.usuals[-1], fixed)
        """The usual one for less of the device."""
        self.tight_in_less = with_less_on_device(self.tight, fixed)
        """The tight one for less of the device: host has to have more of what the device lacks, so neither is always
        the leanest."""

    def where(self, *, roomy: bool) -> tuple[tuple[Pace, ...], tuple[Pace, ...]]:
        """The usual paces and the tight ones of a device that has room for the pipeline, or may have none."""
        if roomy:
            return self.usuals, (self.tight,)
        return (*self.usuals, *self.usual_in_less), (self.tight, *self.tight_in_less)


def with_less_on_device(pace: Pace, fixed: FixedChoices) -> tuple[Pace, ...]:
    """`pace` where the device has less of other layers, and least; none where there is no device, or the order cannot
    do with less."""
    possible = fixed.schedule == "vertical" and not fixed.unified_memory and not fixed.matrices_on_device
    return tuple(replace(pace, behind=False, overlap=overlap) for overlap in LESS if possible)


LESS: tuple[Overlap, ...] = ("parameters", "none")
ROOM = 0.95
"""Of the device's budget: where what the pipeline takes by its estimate is no more, it is sure to fit."""


def budget_below(host: int) -> int:
    """The next smaller host budget of a row of which four double: the same ones whatever the budget."""
    step = 1 << max((host - 1).bit_length() - 3, 0)
    return (host - 1) // step * step


def _grains(elements: float) -> int:
    return -(-int(elements) // GRAIN) * GRAIN
