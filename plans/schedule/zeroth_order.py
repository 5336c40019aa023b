"""The zeroth-order schedule: emits two forwards a direction, all micro-batches of a layer before the next layer.

Owns the order of operations of ZO-Offloading (sections 2.2 and 2.3): a layer's parameters are read two stages ahead and
uploaded one stage ahead; when they are there, the updates that are pending are made and both perturbed copies, in one
pass; behind the first pass they go back to where they live, in those steps that write. So each block crosses the link
once to the device a step, and at most once back. A step's own result, a number for each direction, is known at its end,
and is pending then: the next step applies it, or the flush. Stages are numbered from 0, one for each layer.

Where memory is short parameters come in pieces (`ZerothOrder.piece_elements`): the first few of a layer while the one
before it computes, each of the others when a piece before it has been perturbed and its place is free. A layer is then
nowhere whole but in its copies, so its pieces come once for each direction, and once for each copy where copies take
turns: a round. The first round of a state makes its updates.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ..graph.contents import Content, Role
from ..graph.ops import Perturb, Region, Resource, Side
from .activations import Activations
from .compute import Compute
from .emission import NOWHERE, Emission, When, cut
from .order import Order
from .parameters import Parameters
from .rows import Rows
from .streamed import AHEAD, Part, Round, Streamed
from .updates import Piece
from .vertical import nothing, transfers

SIDES: tuple[Side, ...] = ("plus", "minus")


def _train(emission: Emission) -> None:
    decision = emission.decision
    assert decision.zeroth_order is not None
    sides = [(direction, side) for direction in range(decision.zeroth_order.directions) for side in SIDES]
    made = [(*side, micro_batch) for side in sides for micro_batch in range(decision.micro_batches)]
    _ZerothOrder(emission, [_Pass(number, *each) for number, each in enumerate(made)]).run()


def _evaluate(emission: Emission) -> None:
    """Each micro-batch once, with the parameters as they are."""
    _ZerothOrder(emission, [_Pass(number, 0, "", number) for number in range(emission.decision.micro_batches)]).run()


def _flush(emission: Emission) -> None:
    _ZerothOrder(emission, []).flush()


ZEROTH_ORDER = Order(train=_train, evaluate=_evaluate, flush=_flush)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One of the forwards of a layer: which direction, side (none in evaluation) and micro-batch, and its number among
    all."""

    number: int
    direction: int
    side: Side
    micro_batch: int


class _ZerothOrder:
    """One pass through the layers."""

    def __init__(self, emission: Emission, passes: list[_Pass]) -> None:
        """`passes`: through each layer."""
        decision = emission.decision
        assert decision.zeroth_order is not None
        self.emission, self.zeroth_order = emission, decision.zeroth_order
        self.layers = len(emission.model.layers)
        self.passes = passes
        self.evaluates = any(not each.side for each in passes)
        self.as_they_are = self.evaluates and not decision.zeroth_order.masters
        """Whether compute takes parameters as they live."""
        elements = decision.zeroth_order.piece_elements
        self.streamed = Streamed(emission, elements, moves=transfers) if elements else None
        self.rows = Rows(emission)
        self.parameters = Parameters(
            emission, pieces=transfers, spared=lambda state: self._streams(state) or self.rows.has(state)
        )
        self.activations = Activations(
            emission,
            kept=len(self.passes),
            checkpoints=False,
            whose=lambda number: self.passes[number].micro_batch,
        )
        self.compute = Compute(emission, self.parameters, None)
        self.out: dict[tuple[int, int], Region] = {}
        """(stage, number of a pass) -> a forward's output, on device."""
        self.inputs: dict[tuple[int, int], Region] = {}
        self.perturbed: set[tuple[int, int, Side]] = set()
        """(stage, direction, side) whose copies are there."""

    def run(self) -> None:
        for stage in (0, 1):
            self._fetch(stage)
        self.rows.bring()
        if not self.evaluates:
            self.rows.update_home()  # behind what takes rows of it: their own updates are made there
        self._upload(0, range(1), 1)
        self._begin_pieces((0, 0))
        leave: Piece = nothing
        steps = [(stage, position) for stage in range(self.layers) for position in range(len(self.passes))]
        for number, (stage, position) in enumerate(steps):
            self.emission.stage = stage
            if position == 0:
                self._fetch(stage + 2)
            self._upload(stage + 1, range(position, position + 1), len(self.passes))
            if number + 1 < len(steps):
                self._load_input(*steps[number + 1])
            self._copies(stage, self._pass(stage, position))
            leave = self._forward(stage, position, leave)
        leave()

    def flush(self) -> None:
        """Each trained state once, at its first use."""
        for stage in (0, 1):
            self._fetch(stage)
        self.rows.update_home()
        self._upload(0, range(1), 1)
        self._begin_pieces((0, 0))
        for stage in range(self.layers):
            self.emission.stage = stage
            self._fetch(stage + 2)
            self._upload(stage + 1, range(1), 1)
            for state, weights in self._updated(stage):
                self._emit(state, weights, 0, None, None, updates=True)
                self._send_back(stage, state, weights)
            for part in self._pieces((stage, 0)):
                if self._first_use(part.state, stage):
                    self._emit(part.state, self._at((stage, 0), part), 0, None, None, updates=True, part=part)

    def _pass(self, stage: int, position: int) -> _Pass:
        """Opposite orders from stage to stage, so that the pass at the boundary stays on the device."""
        return self.passes[position if stage % 2 == 0 else len(self.passes) - 1 - position]

    def _fetch(self, stage: int) -> None:
        if stage < self.layers:
            self.parameters.fetch(stage, stage, first_use=False)

    def _upload(self, stage: int, pieces: range, of: int) -> None:
        if stage < self.layers:
            self.parameters.upload(stage, stage, pieces, of)

    # Parameters: updated, perturbed, sent back.

    def _whole(self, stage: int) -> Iterator[tuple[int, Region]]:
        """The states of a layer that are there whole, or by rows, and where they lie; a flush brings no rows."""
        for state in self.emission.model.layers[stage].states:
            if not self._streams(state) and (self.passes or not self.rows.has(state)):
                yield state, self._there(stage, state)

    def _updated(self, stage: int) -> Iterator[tuple[int, Region]]:
        """Those of them that are updated in a stage: trained ones of which it is the first use."""
        for state, weights in self._whole(stage):
            if not self.emission.model.states[state].frozen and self._first_use(state, stage):
                yield state, weights

    def _there(self, stage: int, state: int) -> Region:
        """Where compute finds a state's parameters, or the rows of a table, as they are."""
        return self.rows.there if self.rows.has(state) else self.parameters.weight(stage, state)

    def _elements(self, state: int) -> int:
        """That compute finds there."""
        return self.rows.elements if self.rows.has(state) else self.emission.model.states[state].elements

    def _first_use(self, state: int, stage: int) -> bool:
        return self.emission.model.uses(state)[0] == stage

    def _copies(self, stage: int, now: _Pass) -> None:
        """Make the copies that a pass takes, unless they are there."""
        if (stage, now.direction, now.side) in self.perturbed:
            return
        if now.side:
            self._perturb(stage, now)
            return
        self.perturbed.add((stage, now.direction, now.side))
        for state, weights in self._whole(stage):
            if self._copied(state, now):
                rounded = self._copy(stage, state, now.direction, now.side)
                self._emit(state, weights, now.direction, None, None, updates=False, rounded=rounded)
        if self.as_they_are:
            self._begin_pieces((stage + 1, 0))
            return
        for part in self._pieces((stage, 0)):
            rounded, there = self._copy_of(stage, part, 0, ""), self._at((stage, 0), part)
            self._emit(part.state, there, 0, None, None, updates=False, rounded=rounded, part=part)

    def _perturb(self, stage: int, now: _Pass) -> None:
        """Make perturbed copies; the first time in a stage with the pending updates."""
        sides = (now.side,) if self.zeroth_order.in_turns else SIDES
        number = sum(done == stage for done, _, _ in self.perturbed) // len(sides)
        first = number == 0
        self.perturbed |= {(stage, now.direction, side) for side in sides}
        model = self.emission.model
        updated = dict(self._updated(stage))
        for state, weights in self._whole(stage):
            if model.states[state].frozen:
                continue
            plus, minus = (self._copy(stage, state, now.direction, side) if side in sides else None for side in SIDES)
            emit = partial(self._emit, state, weights, now.direction, plus, minus)
            if not first or state in updated or not self._lags(state, weights):
                emit(updates=first and state in updated)
            else:
                self._emit_again(emit)
        if first:
            for state, weights in updated.items():
                self._send_back(stage, state, weights)
        for part in self._pieces((stage, number)):
            plus, minus = (self._copy_of(stage, part, now.direction, side) if side in sides else None for side in SIDES)
            there = self._at((stage, number), part)
            emit = partial(self._emit, part.state, there, now.direction, plus, minus, part=part)
            if first and self._first_use(part.state, stage):
                emit(updates=True)
            else:
                self._emit_again(emit)

    def _emit_again(self, emit: Callable[..., None]) -> None:
        """A pass over parameters that an earlier layer or an earlier round has updated: where they live they are so in
        steps that write."""
        emit(updates=False, when=When.WRITTEN)
        if self.zeroth_order.written_every > 1:
            emit(updates=True, when=When.UNWRITTEN)

    def _emit(
        self,
        state: int,
        weights: Region,
        direction: int,
        plus: Region | None,
        minus: Region | None,
        *,
        updates: bool,
        when: When = When.ALWAYS,
        rounded: Region | None = None,
        part: Part | None = None,
    ) -> None:
        """`part`: the piece of the state that is at `weights`, unless all of it is."""
        emission = self.emission
        lags = part is not None or self._lags(state, weights)
        emission.emit(
            Perturb(
                index=NOWHERE,
                stage=emission.stage,
                waits=(),
                state=state,
                state_name=emission.name(state),
                direction=direction,
                updates=updates,
                lags=lags,
                waiting=self.zeroth_order.waiting(lags=lags) if updates else 0.0,
                start=part.start if part else 0,
                stop=part.stop if part else self._elements(state),
                parameters=weights,
                plus=plus,
                minus=minus,
                masters=self.zeroth_order.masters,
                rounded=rounded,
                by_rows=self.rows.has(state),
            ),
            when,
        )

    def _lags(self, state: int, weights: Region) -> bool:
        """Whether updated parameters go back to another place, as they do in steps that write. Of a table by rows none
        do: host updates it where it lives."""
        return not self.rows.has(state) and any(
            True for _ in self.parameters.ways_back(self.emission.stage, state, weights)
        )

    def _copy(self, stage: int, state: int, direction: int, side: Side) -> Region:
        emission = self.emission
        nbytes = self._elements(state) * emission.copy_bytes[state]
        name, pool = f"{side or 'rounded'}/{stage}/{state}/{direction}", f"perturbed/{nbytes}"
        buffer = emission.passing(name, emission.device, nbytes, Role.PERTURBED_PARAMETERS, pool)
        return Region(buffer, 0, nbytes)

    def _copied(self, state: int, now: _Pass) -> bool:
        """Whether a pass computes with a copy of a state: one that comes in pieces is nowhere else whole."""
        if self._streams(state):
            return True
        return not self.emission.model.states[state].frozen and bool(now.side or self.zeroth_order.masters)

    def _weights(self, stage: int, now: _Pass) -> tuple[Region, ...]:
        """What a pass computes with: its side's copies, and what needs none as it is."""
        return tuple(
            self._copy(stage, state, now.direction, now.side) if self._copied(state, now) else self._there(stage, state)
            for state in self.emission.model.layers[stage].states
        )

    # Parameters in pieces.

    def _streams(self, state: int) -> bool:
        return self.streamed is not None and self.streamed.passes(state) and not self.rows.has(state)

    def _at(self, turn: Round, part: Part) -> Region:
        assert self.streamed is not None
        return self.streamed.at(turn, part)

    def _copy_of(self, stage: int, part: Part, direction: int, side: Side) -> Region:
        """A piece's place in a copy of its state."""
        each = self.emission.copy_bytes[part.state]
        return cut(self._copy(stage, part.state, direction, side), (part.start * each, part.stop * each))

    def _parts(self, stage: int) -> list[Part]:
        """The pieces of a layer, of the states that come so."""
        if self.streamed is None or stage >= self.layers:
            return []
        states = self.emission.model.layers[stage].states
        return [part for state in states if self._streams(state) for part in self.streamed.parts(state)]

    def _begin_pieces(self, turn: Round) -> None:
        """Bring a layer's first pieces; in evaluation without masters all of them, to where compute takes them."""
        stage, _ = turn
        streamed, parts = self.streamed, self._parts(stage)
        if streamed is None:
            return
        if not self.as_they_are:
            for part in parts[:AHEAD]:
                streamed.read(turn, part)
                streamed.upload(turn, part)
            return
        places = [self._copy_of(stage, part, 0, "") for part in parts]
        for part, place in zip(parts[:AHEAD], places, strict=False):
            streamed.read(turn, part, place)
        for number, (part, place) in enumerate(zip(parts, places, strict=True)):
            if number + AHEAD < len(parts):
                streamed.read(turn, parts[number + AHEAD], places[number + AHEAD])
            streamed.upload(turn, part, place)

    def _pieces(self, turn: Round) -> Iterator[Part]:
        """Each piece of a layer, when it is there; when the caller is done with it, it goes back to where it lives, if
        the round updates it, and the next one comes to its place. Behind the last the next round's first ones come."""
        stage, number = turn
        parts, streamed = self._parts(stage), self.streamed
        for position, part in enumerate(parts):
            yield part
            assert streamed is not None
            if not self.evaluates and number == 0 and self._first_use(part.state, stage):
                streamed.send_back(turn, part, self._when_written)
            for following in parts[position + AHEAD : position + AHEAD + 1]:
                streamed.read(turn, following)
                streamed.upload(turn, following)
        again = bool(self.passes) and not self.evaluates and number + 1 < self.zeroth_order.rounds
        self._begin_pieces((stage, number + 1) if again else (stage + 1, 0))

    def _send_back(self, stage: int, state: int, weights: Region) -> None:
        """Move updated parameters to where they live, as far as they were not updated there."""
        if self.rows.has(state):
            return
        for source, target, on_host in self.parameters.ways_back(stage, state, weights):
            for part in transfers(source.nbytes):
                if on_host is None:
                    kind: Resource = "write" if self.emission.tier(target) == "ssd" else "d2h"
                    self._move(kind, cut(source, part), cut(target, part), state)
                else:
                    self._move("d2h", cut(source, part), cut(on_host, part), state)
                    self._move("write", cut(on_host, part), cut(target, part), state)

    def _move(self, kind: Resource, source: Region, target: Region, state: int) -> None:
        self.emission.move_state(kind, source, target, Content.PARAMETERS, state, self._when_written)

    @property
    def _when_written(self) -> When:
        return When.WRITTEN if self.zeroth_order.written_every > 1 else When.ALWAYS

    # Forwards, and the hidden states that pass between layers.

    def _load_input(self, stage: int, position: int) -> None:
        number = self._pass(stage, position).number
        if stage == 0:
            return
        if position > 0:
            source, content = self.activations.passing(stage - 1, number, stage), Content.HIDDEN_STATE
            self.inputs[stage, number] = self.activations.bring(source, content, stage, stage, number)
        elif (stage - 1, number) in self.out:
            self.inputs[stage, number] = self.out.pop((stage - 1, number))

    def _forward(self, stage: int, position: int, leave: Piece) -> Piece:
        """One forward, then `leave`: what the one before it has made goes to host. Returns the same of this one."""
        now = self._pass(stage, position)
        hidden = self.inputs.pop((stage, now.number), None) or self.out.pop((stage - 1, now.number), None)
        head = stage == self.layers - 1
        out = None if head else self.activations.output(stage, now.number, stage + 1)
        if out:
            self.out[stage, now.number] = out
        self.compute.forward(
            stage,
            stage,
            now.micro_batch,
            hidden,
            out,
            weights=self._weights(stage, now),
            direction=now.direction,
            side=now.side,
            by_rows=stage == 0 and self.rows.state is not None,
        )
        leave()
        if out is None or position == len(self.passes) - 1:
            return nothing
        del self.out[stage, now.number]
        return partial(self.activations.keep, out, stage, now.number, stage + 1)
