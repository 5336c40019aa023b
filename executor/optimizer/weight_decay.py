"""Weight decay's exclusions: which elements of a flat state do not decay, and how the update of a range is cut there.

Owns where that is (`model/kinds.py` has the rule, which is that of transformers.Trainer: no bias decays, and no weight
of a norm). The cuts change no bit of
what an update makes or of the norm that it takes, wherever the range lies in its state.
"""

from dataclasses import dataclass
from itertools import pairwise

from ssdplan.plans.documents.state_layout import GRAIN, TENSOR_ALIGNMENT

from ..model.kinds import spared_parameters
from ..model.layout import StateSpec
from ..model.model import StreamedModel

Span = tuple[int, int]
"""Elements [start, stop)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a range that one call of the kernel updates."""

    start: int
    stop: int
    decays: bool


@dataclass(frozen=True, slots=True)
class Window:
    """Elements of a range whose squares are summed together: whole grains of one piece, or a grain of several. A
    grain's squares are summed in one order, so a norm taken of whole grains is the same however they are cut."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


def spared_spans(model: StreamedModel) -> tuple[tuple[Span, ...], ...]:
    """For each state its elements that do not decay, in order, padding included."""
    spared = spared_parameters(model.module)
    return tuple(_spans(state, spared) for state in model.states)


def _spans(state: StateSpec, spared: frozenset[str]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for tensor in state.tensors:
        if tensor.name not in spared:
            continue
        stop = tensor.offset + -(-tensor.elements // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        if spans and spans[-1][1] == tensor.offset:
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((tensor.offset, stop))
    return tuple(spans)


def windows(start: int, stop: int, spared: tuple[Span, ...]) -> tuple[Window, ...]:
    """Elements [start, stop) of a state, multiples of `GRAIN`, cut where decay begins or ends. The windows are numbered
    from `start`."""
    assert start % GRAIN == 0 and stop % GRAIN == 0
    inside = [(max(a, start) - start, min(b, stop) - start) for a, b in spared if a < stop and b > start]
    count = stop - start
    edges = sorted({0, count, *(edge for span in inside for edge in span)})
    pieces = [Piece(a, b, not any(c <= a < d for c, d in inside)) for a, b in pairwise(edges)]
    grains = sorted({edge // GRAIN * GRAIN for edge in edges} | {-(-edge // GRAIN) * GRAIN for edge in edges})
    return tuple(
        Window(
            a, b, tuple(Piece(max(a, p.start), min(b, p.stop), p.decays) for p in pieces if p.start < b and p.stop > a)
        )
        for a, b in pairwise(grains)
    )
