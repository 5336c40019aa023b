"""The vertical schedule: emits a step's operations, all micro-batches of a layer before the next layer.

Owns the order of operations (GreedySnake sections 4.2 to 4.4) and thereby how long every buffer lives. Stages are
numbered from 0: the forwards of embedding and blocks, then the backwards of head and blocks down to the lowest layer
that is trained, the embedding unless it is frozen. The awkward boundaries (the micro-batch that never leaves the
device, tied states, the first step) hide inside the verbs.
"""

from collections.abc import Iterator
from functools import partial

from ..documents.state_layout import GRADIENT_BYTES
from ..graph.contents import Content, Role
from ..graph.ops import Region
from ..units import PAGE
from .activations import Activations
from .compute import Compute
from .emission import Emission, cut, parts
from .order import Order
from .parameters import Parameters
from .saved import SavedActivations
from .updates import Piece, Updates

READ_BYTES, READ_PIECES = 16 << 20, 32
"""Parameters are read in transfers of so many bytes, so that what needs their beginning need not wait for their end; a
state that would take many more than so many of them in larger ones, for finer ones hide nothing more."""


def _train(emission: Emission) -> None:
    """Forward of embedding and blocks, backward of head, blocks and embedding as far down as anything is trained,
    updates behind them."""
    head, lowest = len(emission.model.layers) - 1, emission.model.first_trained
    _Vertical(emission, [*range(head), *range(head, lowest - 1, -1)], forwards=head).train()


def _evaluate(emission: Emission) -> None:
    """Forward of every layer, the head's included."""
    layers = len(emission.model.layers)
    _Vertical(emission, list(range(layers)), forwards=layers).evaluate()


VERTICAL = Order(train=_train, evaluate=_evaluate)


class _Vertical:
    """One pass through stages, each of all micro-batches."""

    def __init__(self, emission: Emission, layer_of: list[int], *, forwards: int) -> None:
        """`layer_of`: the layer of each stage; the first `forwards` stages are forwards, the others backwards."""
        self.emission, self.layer_of, self.forwards = emission, layer_of, forwards
        self.stages = len(layer_of)
        self.head = len(emission.model.layers) - 1
        self.n = emission.decision.micro_batches
        self.ahead = emission.decision.overlap != "none"
        """Whether what a compute op takes comes to the device while the op before it runs."""
        self.parameters = Parameters(emission, pieces=transfers)
        self.activations = Activations(emission, kept=self.n, checkpoints=forwards < self.stages)
        self.saved = SavedActivations(emission, kept=self.n, training=forwards < self.stages)
        self.updates = Updates(emission, self.parameters)
        self.compute = Compute(emission, self.parameters, self.updates)
        self.out: dict[tuple[int, int], Region] = {}
        """(stage, micro-batch) -> a forward's output, on device."""
        self.passed: dict[tuple[int, int], Region] = {}
        """(stage, micro-batch) -> a backward's input gradient, on device."""
        self.inputs: dict[tuple[int, int], tuple[Region | None, Region | None]] = {}
        """(stage, micro-batch) -> hidden and output gradient, on device, of the compute op to come."""
        self.brought: dict[tuple[int, int], Region | None] = {}
        """(stage, micro-batch) -> the saved activations, on device, that the backward to come takes."""

    # The two programs.

    def train(self) -> None:
        for stage in (0, 1):
            self._fetch(stage)
        for use in (0, 1):
            self.updates.finish_delayed(use)
        if self.ahead:
            self._upload(0, range(self.n))
        updates: list[Piece] = []
        behind, at_once = self.emission.decision.exchange_behind, self.emission.leaves_at_once
        exchange, behind_that = nothing, list[Piece]()
        """Of the layer before, with `exchange_behind`: to come with this one's backward, and updates to come after it.
        Meanwhile its gradient has its place for itself, and no copy of a hidden state stands behind the network."""
        leave: Piece = nothing
        computes = self._computes()
        for number, (stage, position) in enumerate(computes):
            self.emission.stage = stage
            if position == 0:
                self._fetch(stage + 2)
                if stage + 2 <= self.head:
                    self.updates.finish_delayed(stage + 2)
                if at_once and stage + 1 == self.stages:
                    self._restore_partial_gradients(stage)
            self._restore(stage + 1, position)
            self._bring(computes, number)
            leave = self._compute(stage, position, leave)
            exchange()
            exchange = nothing
            for update in updates[len(updates) * position // self.n : len(updates) * (position + 1) // self.n]:
                update()
            if position == self.n - 1 and stage + 2 == self.stages and not at_once:
                self._restore_partial_gradients(stage + 1)
            if position == self.n - 1 and stage >= self.forwards and at_once:
                self._exchange(stage)
                updates = self._leave_at_once(stage)
            elif position == self.n - 1 and stage >= self.forwards:
                leaving, after = list(self._leave_partial_gradients(stage)), list(self._finish(stage))
                if behind:
                    exchange = partial(self._exchange, stage)
                    updates, behind_that = [*behind_that, *leaving], after
                else:
                    self._exchange(stage)
                    updates = [*leaving, *after]
        leave()
        exchange()
        for update in (*updates, *behind_that):
            update()

    def evaluate(self) -> None:
        for stage in (0, 1):
            self._fetch(stage)
        if self.ahead:
            self._upload(0, range(self.n))
        leave: Piece = nothing
        computes = self._computes()
        for number, (stage, position) in enumerate(computes):
            self.emission.stage = stage
            if position == 0:
                self._fetch(stage + 2)
            self._bring(computes, number)
            leave = self._compute(stage, position, leave)
        leave()

    def _bring(self, computes: list[tuple[int, int]], number: int) -> None:
        """What a compute op to come takes, to the device: of the next stage a piece of its parameters, and the inputs
        of the next op; or where the device has room for nothing ahead, those of this op, which waits for them."""
        stage, position = computes[number]
        if self.ahead:
            self._upload(stage + 1, range(position, position + 1))
            if number + 1 < len(computes):
                self._load_inputs(*computes[number + 1])
            return
        if position == 0:
            self._upload(stage, range(self.n))
        self._load_inputs(stage, position)

    def _compute(self, stage: int, position: int, leave: Piece) -> Piece:
        """One compute op, then `leave`: what the op before it has made goes to host. Returns the same of this one. So
        the next op finds a free place for what it makes, and need not wait for a copy; where the device has room for
        nothing ahead, what this op has made leaves before the next."""
        if stage < self.forwards:
            self._forward(stage, position)
            leaves = self._leave_forward(stage, position)
        else:
            self._backward(stage, position)
            leaves = self._keep_in_gradient(stage, position)
        leave()
        if not self.ahead:
            leaves()
            return nothing
        return leaves

    def _computes(self) -> list[tuple[int, int]]:
        return [(stage, position) for stage in range(self.stages) for position in range(self.n)]

    def _micro_batch(self, stage: int, position: int) -> int:
        """Opposite orders from stage to stage, so that the micro-batch at the boundary stays on the device."""
        return position if stage % 2 == 0 else self.n - 1 - position

    # Parameters: ssd to host two stages ahead, host to device one stage ahead.

    def _fetch(self, stage: int) -> None:
        if stage < self.stages:
            training = self.forwards < self.stages
            self.parameters.fetch(stage, self.layer_of[stage], first_use=training and stage <= self.head)

    def _upload(self, stage: int, pieces: range) -> None:
        if stage < self.stages:
            self.parameters.upload(stage, self.layer_of[stage], pieces, self.n)

    # Compute, and the hidden states and gradients that pass between layers.

    def _load_inputs(self, stage: int, position: int) -> None:
        """Bring to the device what the compute op to come takes; at a boundary it is there already."""
        micro_batch, layer, acts = self._micro_batch(stage, position), self.layer_of[stage], self.activations
        hidden: Region | None = None
        out_gradient: Region | None = None
        if stage <= self.head:
            if stage > 0 and acts.stays(stage):
                self.out.pop((stage - 1, micro_batch), None)
                hidden = acts.place(stage, micro_batch)
            elif stage > 0 and position > 0:
                source = acts.passing(stage - 1, micro_batch, stage)
                hidden = acts.bring(source, Content.HIDDEN_STATE, stage, layer, micro_batch)
            elif stage > 0:
                hidden = self.out.pop((stage - 1, micro_batch), None)
        else:
            if acts.stays(layer):
                hidden = acts.place(layer, micro_batch)
            elif layer > 0:
                source = acts.restored(layer, micro_batch)
                hidden = acts.bring(source, Content.ACTIVATION_CHECKPOINT, stage, layer, micro_batch)
            above = self.layer_of[stage - 1]
            if acts.stays(above):
                self.passed.pop((stage - 1, micro_batch), None)
                out_gradient = acts.place(above, micro_batch)
            elif position > 0:
                source = [acts.passing_gradient(stage - 1, micro_batch)]
                out_gradient = acts.bring(source, Content.ACTIVATION_GRADIENT, stage, above, micro_batch)
            else:
                out_gradient = self.passed.pop((stage - 1, micro_batch), None)
            self.brought[stage, micro_batch] = self.saved.bring(layer, micro_batch)
        self.inputs[stage, micro_batch] = (hidden, out_gradient)

    def _inputs(self, stage: int, micro_batch: int) -> tuple[Region | None, Region | None]:
        """The inputs of a compute op. A boundary's may have been made by the very op before it."""
        hidden, out_gradient = self.inputs.pop((stage, micro_batch), (None, None))
        hidden = hidden or self.out.pop((stage - 1, micro_batch), None)
        out_gradient = out_gradient or self.passed.pop((stage - 1, micro_batch), None)
        return hidden, out_gradient

    def _forward(self, stage: int, position: int) -> None:
        micro_batch, layer = self._micro_batch(stage, position), self.layer_of[stage]
        hidden, _ = self._inputs(stage, micro_batch)
        out = None if layer == self.head else self.activations.output(stage, micro_batch, stage + 1)
        if out:
            self.out[stage, micro_batch] = out
        rung, saved = self.saved.rung(layer, micro_batch), self.saved.output(layer, micro_batch)
        self.compute.forward(stage, layer, micro_batch, hidden, out, rung, saved)

    def _backward(self, stage: int, position: int) -> None:
        micro_batch, layer = self._micro_batch(stage, position), self.layer_of[stage]
        hidden, out_gradient = self._inputs(stage, micro_batch)
        last = stage + 1 == self.stages
        in_gradient = None if last else self.activations.in_gradient(stage, layer, micro_batch)
        if in_gradient:
            self.passed[stage, micro_batch] = in_gradient
        rung, saved = self.saved.rung(layer, micro_batch), self.brought.pop((stage, micro_batch), None)
        self.compute.backward(
            stage, layer, micro_batch, hidden, out_gradient, in_gradient, rung, saved, first=position == 0
        )

    def _leave_forward(self, stage: int, position: int) -> Piece:
        """Moves what a forward has made to where it waits: its output, and what of its activations is kept. The last
        block's are soon brought back, so they leave at once."""
        layer, micro_batch = self.layer_of[stage], self._micro_batch(stage, position)
        output, saved = self._keep_output(stage, position), self.saved.of(layer, micro_batch)
        if saved is None:
            return output
        if stage + 1 == self.forwards:
            self.saved.leave(layer, micro_batch)
            return output

        def leave() -> None:
            output()
            self.saved.leave(layer, micro_batch)

        return leave

    def _keep_output(self, stage: int, position: int) -> Piece:
        """Moves a forward's output to host: for the next stage unless it is the boundary's, and as an activation
        checkpoint."""
        checkpoint = self.activations.is_kept(stage + 1)
        if stage == self.head or (not checkpoint and position == self.n - 1):
            return nothing
        micro_batch = self._micro_batch(stage, position)
        source = self.out[stage, micro_batch]
        if position < self.n - 1:
            del self.out[stage, micro_batch]
        return partial(self.activations.keep, source, stage, micro_batch, stage + 1)

    def _restore(self, stage: int, position: int) -> None:
        """Read what ssd holds of an input and of saved activations of the layer whose backward is the stage to come.
        Each is read a stage ahead, so host has places for those of one stage."""
        if self.forwards <= stage < self.stages and 0 < self.layer_of[stage] < self.head:
            layer, micro_batch = self.layer_of[stage], self._micro_batch(stage, position)
            self.activations.restore(layer, micro_batch)
            self.saved.restore(layer, micro_batch)

    def _keep_in_gradient(self, stage: int, position: int) -> Piece:
        """Moves the gradient of a layer's input to host, unless it is the boundary's."""
        if stage + 1 == self.stages or position == self.n - 1 or self.activations.stays(self.layer_of[stage]):
            return nothing
        micro_batch = self._micro_batch(stage, position)
        source = self.passed.pop((stage, micro_batch))
        target = self.activations.passing_gradient(stage, micro_batch)
        return partial(
            self.emission.move_activation,
            "d2h",
            source,
            target,
            Content.ACTIVATION_GRADIENT,
            layer=self.layer_of[stage],
            micro_batch=micro_batch,
        )

    # Gradients: they leave the device once, after a layer's last micro-batch.

    def _leave_at_once(self, stage: int) -> list[Piece]:
        """All gradients of a layer leave the device before the next layer's backward; returns what follows on host, and
        nothing of states that the device updates, which is done."""
        emission, after = self.emission, list[Piece]()
        for piece in self._leave_partial_gradients(stage):
            piece()
        for state in emission.model.trained(self.layer_of[stage]):
            if emission.model.uses(state)[0] != self.layer_of[stage]:
                continue
            self.updates.leave(stage, state)
            pieces = list(self.updates.finish(stage, state))
            for piece in pieces if self.updates.stays(state) else ():
                piece()
            after += [] if self.updates.stays(state) else pieces
        return after

    def _exchange(self, stage: int) -> None:
        """Before all else that follows a layer's last backward, so that every rank does it at the same place."""
        for state in self.emission.model.trained(self.layer_of[stage]):
            if self.emission.model.uses(state)[0] == self.layer_of[stage]:
                self.updates.exchange(stage, state)

    def _finish(self, stage: int) -> Iterator[Piece]:
        """What follows a layer's last backward, and of several ranks its exchange, in pieces."""
        for state in self.emission.model.trained(self.layer_of[stage]):
            if self.emission.model.uses(state)[0] == self.layer_of[stage]:
                yield from self.updates.finish(stage, state)

    def _leave_partial_gradients(self, stage: int) -> Iterator[Piece]:
        """Bring the head's share of tied gradients to host, in pieces; it is exchanged with the embedding's."""
        for state in self.emission.model.trained(self.layer_of[stage]):
            if self.emission.model.uses(state)[0] != self.layer_of[stage] and not self.updates.stays(state):
                gradient, target = self.updates.gradient(stage, state), self._partial_gradient(state)
                move, content = self.emission.move_state, Content.GRADIENT
                for part in transfers(gradient.nbytes):
                    yield partial(move, "d2h", cut(gradient, part), cut(target, part), content, state)

    def _partial_gradient(self, state: int) -> Region:
        """Where the head's share of a tied state's gradient waits on host for the embedding's backward: with unified
        memory, where it was made."""
        if self.emission.unified:
            return self.updates.gradient(self.forwards, state)
        nbytes = self.emission.model.states[state].elements * GRADIENT_BYTES
        buffer = self.emission.passing(f"partial/{state}", "host", nbytes, Role.GRADIENTS, f"partial/{nbytes}")
        return Region(buffer, 0, nbytes)

    def _restore_partial_gradients(self, stage: int) -> None:
        """Bring back to the device what the head has left of tied gradients, for the embedding to add to."""
        for state in self.emission.model.trained(0):
            if self.emission.model.uses(state)[-1] != 0 and not self.updates.stays(state):
                source, target = self._partial_gradient(state), self.updates.gradient(stage, state)
                move, content = self.emission.move_state, Content.GRADIENT
                for part in transfers(source.nbytes):
                    move("h2d", cut(source, part), cut(target, part), content, state)


def nothing() -> None:
    """What a compute op leaves when the next one takes it from the device."""


def transfers(nbytes: int) -> list[tuple[int, int]]:
    """The ranges in which so many bytes of parameters, or of a gradient, are moved."""
    return parts(nbytes, max(READ_BYTES, -(-nbytes // (READ_PIECES * PAGE)) * PAGE))
