"""Parameters: the verbs that bring a layer's parameters from where they live to the device.

Owns where parameters lie on their way, and that those which stay on the device are not moved again: a layer's weights
are asked for stage by stage, and what is there already costs nothing. Where memory is unified the way ends on host.
"""

from collections.abc import Callable, Iterator, Sequence

from ..documents.state_layout import GRAIN
from ..graph.collectives import Gather
from ..graph.contents import Content, Role
from ..graph.ops import Home, Region
from .emission import NOWHERE, Emission, When, cut
from .homes import Span, kept_on_device, parameter_spans


class Parameters:
    """Parameters in transit: ssd to host, host to device."""

    def __init__(
        self,
        emission: Emission,
        *,
        pieces: Callable[[int], Sequence[tuple[int, int]]],
        spared: Callable[[int], bool] = lambda state: False,
    ) -> None:
        """`pieces`: the ranges in which so many bytes are read; `spared`: whether a state comes in another way."""
        self._emission, self._pieces, self._spared = emission, pieces, spared
        self._spans = parameter_spans(emission.homes, emission.buffers)
        self._kept_across_turn = kept_on_device(emission.model, emission.decision).turn
        self._copies_elsewhere = not (emission.unified and emission.shards.alone)
        """Whether compute has a copy of parameters on host."""
        self._weights: dict[tuple[int, int], Region] = {}
        """(stage, state) -> where its parameters lie, once asked for."""
        self._brought: dict[int, int] = {}
        """State that is kept across the turn -> the stage that it was brought to the device for."""

    def fetch(self, stage: int, layer: int, *, first_use: bool) -> None:
        """Read what ssd holds of the layer's parameters into host buffers of the stage.

        At a state's first use in a step with pending updates, the delayed part is not read: the update makes it.
        """
        emission = self._emission
        for state in emission.model.layers[layer].states:
            if self._spared(state) or not self._comes(stage, state):
                continue
            made_by_update = first_use and emission.model.uses(state)[0] == layer
            for span in self._spans.get(state, ()):
                if span.tier == "ssd":
                    when = When.NOT_PENDING if made_by_update and span.delayed else When.ALWAYS
                    target = self._in_transit(stage, state, span)
                    for part in self._pieces(span.region.nbytes):
                        source, piece = cut(span.region, part), cut(target, part)
                        emission.move_state("read", source, piece, Content.PARAMETERS, state, when)

    def upload(self, stage: int, layer: int, pieces: range, of: int) -> None:
        """Move these pieces, of so many, of the layer's parameters to the device. Unified memory has them already. Of
        several ranks each moves its share, and behind its last piece all shares are gathered."""
        for state in self._emission.model.layers[layer].states:
            if self._spared(state) or self._brought_for(stage, state) != stage:
                continue
            if not self._emission.unified:
                self._move_up(stage, state, pieces, of)
            if pieces.stop == of and not self._emission.shards.alone:
                self._gather(stage, state)

    def _move_up(self, stage: int, state: int, pieces: range, of: int) -> None:
        emission = self._emission
        target = self.weight(stage, state)
        each = emission.parameter_bytes[state]
        begin, end = emission.shards.own(emission.model.states[state].elements)
        start, stop = (begin + _grain(end - begin, piece, of) for piece in (pieces.start, pieces.stop))
        for span in self._spans.get(state, ()):
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last and span.tier != "device":
                source = self._in_transit(stage, state, span) if span.tier == "ssd" else span.region
                emission.move_state(
                    "h2d",
                    cut(source, self._bytes(state, span, first, last)),
                    cut(target, (first * each, last * each)),
                    Content.PARAMETERS,
                    state,
                )

    def _gather(self, stage: int, state: int) -> None:
        """All ranks' shares of a state, side by side where compute finds it."""
        emission, shards = self._emission, self._emission.shards
        elements, each = emission.model.states[state].elements, emission.parameter_bytes[state]
        there = self.weight(stage, state)
        start, stop = shards.own(elements)
        emission.emit(
            Gather(
                index=NOWHERE,
                stage=emission.stage,
                waits=(),
                state=state,
                state_name=emission.name(state),
                shares=tuple(self._arrived(stage, state, span, there) for span in self._spans.get(state, ())),
                whole=Region(there.buffer, 0, shards.whole(elements) * each),
                own=(start * each, stop * each),
                ranks=shards.ranks,
            )
        )

    def _arrived(self, stage: int, state: int, span: Span, there: Region) -> Region:
        """Where a span of this rank's share lies when compute's tier has it: where it is to be gathered, if it was
        moved up there."""
        emission = self._emission
        if span.tier == emission.device:
            return span.region
        if emission.unified:
            return self._in_transit(stage, state, span)
        each = emission.parameter_bytes[state]
        return Region(there.buffer, span.start * each, span.stop * each)

    def weights(self, stage: int, layer: int) -> tuple[Region, ...]:
        """Where on the device the layer's parameters lie in this stage, one region for each of its states."""
        return tuple(self.weight(stage, state) for state in self._emission.model.layers[layer].states)

    def weight(self, stage: int, state: int) -> Region:
        """Where on the device a state's parameters lie in this stage."""
        found = self._weights.get((stage, state))
        if found is None:
            found = self._weights[stage, state] = self._place(stage, state)
        return found

    def _place(self, stage: int, state: int) -> Region:
        emission = self._emission
        nbytes = emission.model.states[state].elements * emission.parameter_bytes[state]
        if not emission.shards.alone:
            role = Role.PARAMETERS_IN_TRANSIT if emission.unified else Role.PARAMETERS
            every = emission.shards.whole(emission.model.states[state].elements) * emission.parameter_bytes[state]
            name = f"weights/{self._brought_for(stage, state)}/{state}"
            return Region(emission.passing(name, emission.device, every, role, f"weights/{every}"), 0, nbytes)
        span = self._spans[state][0]
        if span.tier == emission.device:
            buffer = span.region.buffer
        elif emission.unified:
            buffer = self._in_transit(self._brought_for(stage, state), state, span).buffer
        else:
            name, pool = f"weights/{self._brought_for(stage, state)}/{state}", f"weights/{nbytes}"
            buffer = emission.passing(name, "device", nbytes, Role.PARAMETERS, pool)
        return Region(buffer, 0, nbytes)

    def in_transit(self, stage: int, home: Home) -> Region:
        """Where a home whose parameters live on ssd lies on host on its way to the stage."""
        span = next(span for span in self._spans[home.state] if span.start <= home.start and home.stop <= span.stop)
        return cut(self._in_transit(stage, home.state, span), self._bytes(home.state, span, home.start, home.stop))

    def copy_in_transit(self, stage: int, home: Home) -> Region:
        """The same of the parameters that an update behind the stage's backward takes, and changes there."""
        return self.in_transit(stage if self._comes(stage, home.state) else self._brought_for(stage, home.state), home)

    def _comes(self, stage: int, state: int) -> bool:
        """Whether a stage has a state's parameters come from ssd: all that are not there since an earlier stage, and of
        these too those that an update will take on host."""
        if self._brought_for(stage, state) == stage:
            return True
        one = self._emission.model.states[state]
        return self._copies_elsewhere and not one.frozen and self._emission.decision.formats_of(one).takes_copy

    def ways_back(self, stage: int, state: int, weights: Region) -> Iterator[tuple[Region, Region, Region | None]]:
        """For parameters that were changed at `weights` in a stage: (there, where they live, where they lie on host on
        their way, if they pass it). Nothing for those that were changed where they live."""
        emission = self._emission
        each = emission.parameter_bytes[state]
        for span in self._spans[state]:
            source = cut(weights, (span.start * each, span.stop * each))
            if span.tier == "host" and not emission.unified:
                yield source, span.region, None
            elif span.tier == "ssd":
                yield source, span.region, None if emission.unified else self._in_transit(stage, state, span)

    def _brought_for(self, stage: int, state: int) -> int:
        """The stage that a state is moved to the device for: this one, or an earlier one since which it is there."""
        return self._brought.setdefault(state, stage) if state in self._kept_across_turn else stage

    def _in_transit(self, stage: int, state: int, span: Span) -> Region:
        """Where a span of a state that lives on ssd lies on host for one stage."""
        before = 0
        total = 0
        for other in self._spans[state]:
            if other.tier == "ssd":
                before += other.region.nbytes if other.start < span.start else 0
                total += other.region.nbytes
        name, pool = f"staging/{stage}/{state}", f"staging/{total}"
        staging = self._emission.passing(name, "host", total, Role.PARAMETERS_IN_TRANSIT, pool)
        return Region(staging, before, before + span.region.nbytes)

    def _bytes(self, state: int, span: Span, start: int, stop: int) -> tuple[int, int]:
        """Where elements [start, stop) of a state lie in a region that holds one of its spans."""
        each = self._emission.parameter_bytes[state]
        return (start - span.start) * each, (stop - span.start) * each


def _grain(elements: int, part: int, parts: int) -> int:
    """The element at which piece `part` of `parts` begins, a multiple of the grain."""
    return elements // GRAIN * part // parts * GRAIN
