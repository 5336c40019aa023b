"""Streamed parameters: states that pass through a few small places, a piece after the other, and are never there whole.

Owns the pieces of a state, where each lies on its way to compute and back, and how many are on their way at once
(ZO-Offloading section 2.2, where memory is short). What is done with a piece once it is there, the schedule says. A
state whose parameters live where compute finds them has pieces too, which move nowhere.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..graph.contents import Content, Role
from ..graph.ops import Region, Resource
from .emission import Emission, When, cut
from .homes import Span, parameter_spans

AHEAD = 3
"""Pieces that are on their way while one is worked on."""
Round = tuple[int, int]
"""A stage, and the number of a time that its pieces come in it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) of a state, whose parameters live together."""

    state: int
    start: int
    stop: int
    span: Span

    @property
    def in_span(self) -> tuple[int, int]:
        return self.start - self.span.start, self.stop - self.span.start


class Streamed:
    """Parameters in pieces: from where they live to where compute finds them, and back."""

    def __init__(self, emission: Emission, elements: int, *, moves: Callable[[int], Sequence[tuple[int, int]]]) -> None:
        """`elements`: of a piece at most; `moves`: the ranges in which so many bytes are moved."""
        self._emission, self._elements, self._moves = emission, elements, moves
        self._spans = parameter_spans(emission.homes, emission.buffers)

    def passes(self, state: int) -> bool:
        """Whether a state comes and goes in pieces: it is trained, and does not live where compute finds it."""
        emission = self._emission
        return not emission.model.states[state].frozen and self._spans[state][0].tier != emission.device

    def parts(self, state: int) -> Iterator[Part]:
        """Of a state, in order."""
        for span in self._spans[state]:
            for start in range(span.start, span.stop, self._elements):
                yield Part(state, start, min(start + self._elements, span.stop), span)

    def at(self, turn: Round, part: Part) -> Region:
        """Where compute finds a piece in a round."""
        if part.span.tier == self._emission.device:
            return self._lives(part)
        return self._place(turn, part, on_host=self._emission.unified)

    def read(self, turn: Round, part: Part, into: Region | None = None) -> None:
        """Read a piece to host if it lives on ssd; with unified memory `into` where it is to be."""
        if part.span.tier == "ssd":
            there = into if into and self._emission.unified else self._place(turn, part, on_host=True)
            self._move("read", self._lives(part), there, part)

    def upload(self, turn: Round, part: Part, into: Region | None = None) -> None:
        """Copy a piece that is on host to the device, `into` where it is to be. Unified memory has it there."""
        if self._emission.unified or part.span.tier == "device":
            return
        source = self._place(turn, part, on_host=True) if part.span.tier == "ssd" else self._lives(part)
        self._move("h2d", source, into or self._place(turn, part, on_host=False), part)

    def send_back(self, turn: Round, part: Part, when: When) -> None:
        """Move a piece that was changed to where it lives."""
        if part.span.tier == self._emission.device:
            return
        here = self.at(turn, part)
        if part.span.tier == "host":
            self._move("d2h", here, self._lives(part), part, when)
            return
        on_host = self._place(turn, part, on_host=True)
        if not self._emission.unified:
            self._move("d2h", here, on_host, part, when)
        self._move("write", on_host, self._lives(part), part, when)

    def _lives(self, part: Part) -> Region:
        start, stop = part.in_span
        each = self._emission.parameter_bytes[part.state]
        return cut(part.span.region, (start * each, stop * each))

    def _place(self, turn: Round, part: Part, *, on_host: bool) -> Region:
        """The place that a piece has for a round on one of the tiers that it passes."""
        emission = self._emission
        each = emission.parameter_bytes[part.state]
        nbytes, most = (part.stop - part.start) * each, self._elements * each
        role = Role.PARAMETERS_IN_TRANSIT if on_host else Role.PARAMETERS
        name = f"piece/{turn[0]}/{turn[1]}/{part.state}/{part.start}" + ("/host" if on_host else "")
        buffer = emission.passing(name, "host" if on_host else "device", nbytes, role, f"pieces/{most}")
        return Region(buffer, 0, nbytes)

    def _move(self, kind: Resource, source: Region, target: Region, part: Part, when: When = When.ALWAYS) -> None:
        for each in self._moves(source.nbytes):
            self._emission.move_state(kind, cut(source, each), cut(target, each), Content.PARAMETERS, part.state, when)
