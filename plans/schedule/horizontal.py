"""The horizontal schedule: emits a step's operations, one micro-batch through all layers before the next micro-batch.

Owns the order of operations of ZeRO-Infinity's gradient accumulation (GreedySnake section 3.3): every micro-batch
brings all parameters to the device twice, and hidden states leave the device only as activation checkpoints. The sum of
a state's gradients waits on host, in fp32, from one micro-batch to the next. Stages are numbered from 0 through all
micro-batches: of each, the forwards of embedding and blocks, then the backwards of head and blocks down to the lowest
layer that is trained, the embedding unless it is frozen.
"""

from collections.abc import Iterator
from functools import partial

from ..documents.state_layout import GRADIENT_BYTES
from ..graph.contents import Content, Role
from ..graph.ops import Region, Resource
from ..units import PAGE
from .activations import Activations
from .compute import Compute
from .emission import Emission, cut, parts
from .order import Order
from .parameters import Parameters
from .saved import SavedActivations
from .updates import Piece, Updates

PIECES = 8
"""In so many a gradient crosses the link: enough for both directions to share one place, few enough to plan with."""


def _train(emission: Emission) -> None:
    """All micro-batches, each forward then backward, and the updates behind the last one's backward."""
    head, lowest = len(emission.model.layers) - 1, emission.model.first_trained
    _Horizontal(emission, [*range(head), *range(head, lowest - 1, -1)], forwards=head).train()


def _evaluate(emission: Emission) -> None:
    """Forward of every layer, the head's included."""
    layers = len(emission.model.layers)
    _Horizontal(emission, list(range(layers)), forwards=layers).evaluate()


HORIZONTAL = Order(train=_train, evaluate=_evaluate)


class _Horizontal:
    """One pass of every micro-batch through the layers."""

    def __init__(self, emission: Emission, layer_of: list[int], *, forwards: int) -> None:
        """`layer_of`: the layer of each stage of a micro-batch; its first `forwards` are forwards, the others
        backwards."""
        self.emission, self.layer_of, self.forwards = emission, layer_of, forwards
        self.head = len(emission.model.layers) - 1
        self.n = emission.decision.micro_batches
        self.stages = self.n * len(layer_of)
        self.parameters = Parameters(emission, pieces=_whole)
        self.activations = Activations(emission, kept=1, checkpoints=forwards < len(layer_of))
        self.saved = SavedActivations(emission, kept=1, training=forwards < len(layer_of))
        self.updates = Updates(emission, self.parameters)
        self.compute = Compute(emission, self.parameters, self.updates)
        self.hidden: Region | None = None
        """The last forward's output, on device."""
        self.checkpoint: Region | None = None
        """A block's input, on device, for its backward to come."""
        self.brought: Region | None = None
        """A block's saved activations, on device, for its backward to come."""
        self.gradient: Region | None = None
        """The last backward's input gradient, on device."""

    # The two programs.

    def train(self) -> None:
        for stage in (0, 1):
            self._fetch(stage)
        self._upload(0)
        behind: list[Piece] = []
        for stage in range(self.stages):
            self.emission.stage = stage
            self._fetch(stage + 2)
            self._restore_checkpoint(stage + 1)
            self._upload(stage + 1)
            checkpoint, brought = self._bring_checkpoint(stage + 1), self._bring_saved(stage + 1)
            if self._is_forward(stage):
                self._forward(stage)
                self._keep_checkpoint(stage)
                self.saved.leave(self._layer(stage), self._micro_batch(stage))
            else:
                self._backward(stage)
            self.checkpoint, self.brought = checkpoint, brought
            for piece in behind:
                piece()
            self._bring_gradients(stage + 1)
            self._exchange(stage)
            behind = list(self._after_backward(stage))
        for piece in behind:
            piece()

    def evaluate(self) -> None:
        for stage in (0, 1):
            self._fetch(stage)
        self._upload(0)
        for stage in range(self.stages):
            self.emission.stage = stage
            self._fetch(stage + 2)
            self._upload(stage + 1)
            self._forward(stage)

    # Where a stage is.

    def _layer(self, stage: int) -> int:
        return self.layer_of[stage % len(self.layer_of)]

    def _micro_batch(self, stage: int) -> int:
        return stage // len(self.layer_of)

    def _is_forward(self, stage: int) -> bool:
        return stage % len(self.layer_of) < self.forwards

    def _is_block_backward(self, stage: int) -> bool:
        return stage < self.stages and not self._is_forward(stage) and 0 < self._layer(stage) < self.head

    # Parameters: ssd to host two stages ahead, host to device one stage ahead, for every stage anew.

    def _fetch(self, stage: int) -> None:
        if stage < self.stages:
            self.parameters.fetch(stage, self._layer(stage), first_use=False)

    def _upload(self, stage: int) -> None:
        if stage < self.stages:
            self.parameters.upload(stage, self._layer(stage), range(1), 1)

    # Compute: what a stage leaves on the device is what the next one takes. Activation checkpoints are kept of one
    # micro-batch at a time.

    def _forward(self, stage: int) -> None:
        layer, micro_batch = self._layer(stage), self._micro_batch(stage)
        out = None if layer == self.head else self.activations.output(stage, micro_batch, layer + 1)
        rung, saved = self.saved.rung(layer, micro_batch), self.saved.output(layer, micro_batch)
        self.compute.forward(stage, layer, micro_batch, self.hidden, out, rung, saved)
        self.hidden = out

    def _backward(self, stage: int) -> None:
        layer, micro_batch = self._layer(stage), self._micro_batch(stage)
        hidden, self.hidden = self.checkpoint or self.hidden, None
        into = None if layer == self.layer_of[-1] else self.activations.in_gradient(stage, layer, micro_batch)
        rung = self.saved.rung(layer, micro_batch)
        self.compute.backward(
            stage, layer, micro_batch, hidden, self.gradient, into, rung, self.brought, first=micro_batch == 0
        )
        self.gradient = into

    def _keep_checkpoint(self, stage: int) -> None:
        if self.activations.is_kept(self._layer(stage) + 1):
            assert self.hidden is not None
            self.activations.keep(self.hidden, stage, self._micro_batch(stage), self._layer(stage) + 1)

    def _restore_checkpoint(self, stage: int) -> None:
        """Read what ssd holds of a block's input."""
        if self._is_block_backward(stage):
            self.activations.restore(self._layer(stage), self._micro_batch(stage))
            self.saved.restore(self._layer(stage), self._micro_batch(stage))

    def _bring_checkpoint(self, stage: int) -> Region | None:
        """Bring a block's input to the device."""
        if not self._is_block_backward(stage):
            return None
        layer, micro_batch = self._layer(stage), self._micro_batch(stage)
        source = self.activations.restored(layer, micro_batch)
        return self.activations.bring(source, Content.ACTIVATION_CHECKPOINT, stage, layer, micro_batch)

    def _bring_saved(self, stage: int) -> Region | None:
        """Bring what a block's forward has kept to the device."""
        if not self._is_block_backward(stage):
            return None
        return self.saved.bring(self._layer(stage), self._micro_batch(stage))

    # Gradients: a sum on host that comes to the device to be added to, and leaves it again behind the next stage.

    def _accumulated(self, state: int) -> Region:
        """Where on host a state's gradients add up over the micro-batches and over the layers that share it: with
        unified memory, where they are made."""
        if self.emission.unified:
            return self.updates.gradient(0, state)
        nbytes = self.emission.model.states[state].elements * GRADIENT_BYTES
        name = f"accumulated gradient/{self.emission.name(state)}"
        return Region(self.emission.buffers.get(name, "host", nbytes, Role.ACCUMULATED_GRADIENTS), 0, nbytes)

    def _bring_gradients(self, stage: int) -> None:
        """Bring to the device what a backward adds to, unless it begins the sum."""
        if stage < self.stages and not self._is_forward(stage):
            layer = self._layer(stage)
            for state in self.emission.model.trained(layer):
                if self._micro_batch(stage) > 0 or self.emission.model.uses(state)[-1] != layer:
                    for piece in self._moves(
                        "h2d", state, self._accumulated(state), self.updates.gradient(stage, state)
                    ):
                        piece()

    def _exchange(self, stage: int) -> None:
        """Of several ranks, behind the backward that completes a state's gradient."""
        for state in [] if self._is_forward(stage) else self.emission.model.trained(self._layer(stage)):
            if self._completes(stage, state):
                self.updates.exchange(stage, state)

    def _completes(self, stage: int, state: int) -> bool:
        """Whether a backward is the last that adds to a state's gradient."""
        return self._micro_batch(stage) == self.n - 1 and self.emission.model.uses(state)[0] == self._layer(stage)

    def _after_backward(self, stage: int) -> Iterator[Piece]:
        """What follows a layer's backward, in pieces: the sum of a gradient leaves the device, for the next backward to
        add to or, when it is whole, for the updates."""
        if self._is_forward(stage):
            return
        layer = self._layer(stage)
        for state in self.emission.model.trained(layer):
            if self._completes(stage, state):
                yield from self.updates.finish(stage, state)
            else:
                yield from self._moves("d2h", state, self.updates.gradient(stage, state), self._accumulated(state))

    def _moves(self, kind: Resource, state: int, source: Region, target: Region) -> Iterator[Piece]:
        """A gradient from place to place, in pieces: what comes may take the memory of what leaves at the same time."""
        move = self.emission.move_state
        for part in parts(source.nbytes, -(-source.nbytes // (PIECES * PAGE)) * PAGE):
            yield partial(move, kind, cut(source, part), cut(target, part), Content.GRADIENT, state)


def _whole(nbytes: int) -> list[tuple[int, int]]:
    """Parameters are read in one transfer: nothing needs their beginning before their end."""
    return [(0, nbytes)]
