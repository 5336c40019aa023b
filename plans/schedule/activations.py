"""Activations: the verbs for hidden states and for the gradients that pass between layers.

Owns where they lie on device, host and ssd. A block's input for one micro-batch, kept for its backward, is its
activation checkpoint: first the part that stays on host, then the rest, which is on host only on its way to ssd and
back. Where it stays on the device, the backward that has consumed it leaves the input's gradient in its place. Where
memory is unified, a layer's output is written where the next layer reads it, and so each activation checkpoint is whole
on host or whole on ssd.
"""

from collections.abc import Callable

from ..documents.state_layout import checkpoint_bytes
from ..graph.contents import CONTENTS, Content, Role
from ..graph.ops import Region
from ..units import PAGE
from .emission import Emission, cut
from .homes import spread


class Activations:
    """A hidden state is a layer's output for one micro-batch; one that is kept for backward is an activation
    checkpoint."""

    def __init__(self, emission: Emission, *, kept: int, checkpoints: bool, whose: Callable[[int], int] = int) -> None:
        """`kept`: the number of micro-batches whose activation checkpoints are kept at once, those of the last ones;
        `checkpoints`: whether there are any, that is, whether there will be a backward. Layers below the lowest that
        is trained have no backward, so their inputs are not kept. `whose`: where a micro-batch runs forward several
        times, what counts as one here is one of these forwards, and this says of which micro-batch it is."""
        self._emission, self._kept, self._whose = emission, kept, whose
        model, decision = emission.model, emission.decision
        self._bytes = checkpoint_bytes(model, decision.micro_batch_size)
        self._host_bytes = min(round(decision.checkpoint_host * self._bytes / PAGE) * PAGE, self._bytes)
        head = len(model.layers) - 1
        self._blocks = range(min(max(model.first_trained, 1), head), head) if checkpoints else range(0)
        count = len(self._blocks) * kept
        self._resident = spread(list(range(count)), round(decision.checkpoint_host * count))
        """With unified memory, the numbers of the activation checkpoints on host, which are counted layer by layer."""
        blocks = list(model.trained_blocks)
        self._there = spread(blocks, round(decision.checkpoint_device * len(blocks)))
        """Layers whose inputs stay on the device; where all blocks' do, the head's does too."""
        if blocks and len(self._there) == len(blocks):
            self._there |= {head}

    def is_kept(self, layer: int) -> bool:
        """Whether the layer's input is kept as an activation checkpoint."""
        return layer in self._blocks

    def stays(self, layer: int) -> bool:
        """Whether the layer's input stays on the device from the forward below it to its backward, and the gradient of
        the input after it."""
        return layer in self._there

    def place(self, layer: int, micro_batch: int) -> Region:
        """Where that is."""
        name = f"checkpoint/{layer}/{micro_batch % self._kept}/device"
        return Region(self._emission.buffers.get(name, "device", self._bytes, Role.CHECKPOINTS), 0, self._bytes)

    def output(self, stage: int, micro_batch: int, to_layer: int) -> Region:
        """Where a stage's forward leaves its output for `to_layer`."""
        if self.stays(to_layer):
            return self.place(to_layer, micro_batch)
        if self._emission.unified:
            return self.passing(stage, micro_batch, to_layer)[0]
        return self._on_device(f"out/{stage}/{micro_batch}")

    def in_gradient(self, stage: int, layer: int, micro_batch: int) -> Region:
        """Where a stage's backward leaves the gradient of its input, which is that of `layer`."""
        if self.stays(layer):
            return self.place(layer, micro_batch)
        if self._emission.unified:
            return self.passing_gradient(stage, micro_batch)
        return self._on_device(f"in_gradient/{stage}/{micro_batch}")

    def _on_device(self, name: str) -> Region:
        return Region(self._emission.passing(name, "device", self._bytes, Role.HIDDEN_STATES, "hidden"), 0, self._bytes)

    def bring(self, sources: list[Region], content: Content, stage: int, layer: int, micro_batch: int) -> Region:
        """Move what lies on host in pieces to a place on the device, for a stage: the input of `layer`, or the gradient
        of that input. With unified memory it is one piece, and there."""
        if self._emission.unified:
            return sources[0]
        target = self._on_device(f"{CONTENTS[content].words}/{stage}/{micro_batch}")
        begin = 0
        for source in sources:
            piece = Region(target.buffer, begin, begin + source.nbytes)
            self._emission.move_activation(
                "h2d", source, piece, content, layer=layer, micro_batch=self._whose(micro_batch)
            )
            begin += source.nbytes
        return target

    def passing(self, stage: int, micro_batch: int, to_layer: int) -> list[Region]:
        """Where on host the output of a stage's forward lies for `to_layer`: the part to keep, then the rest."""
        regions = []
        keep = self._kept_bytes(to_layer, micro_batch)
        if keep:
            regions.append(self._checkpoint(to_layer, micro_batch))
        if keep < self._bytes:
            rest = self._bytes - keep
            name, pool = f"passing/{stage}/{micro_batch}", f"passing/{rest}"
            regions.append(Region(self._emission.passing(name, "host", rest, Role.HIDDEN_STATES, pool), 0, rest))
        return regions

    def keep(self, source: Region, stage: int, micro_batch: int, to_layer: int) -> None:
        """Move a forward's output to host for `to_layer`; what host does not keep of an activation checkpoint goes on
        to ssd."""
        if self.stays(to_layer):
            return
        move = self._emission.move_activation
        begin = 0
        for target in self.passing(stage, micro_batch, to_layer):
            piece = cut(source, (begin, begin + target.nbytes))
            move("d2h", piece, target, Content.HIDDEN_STATE, layer=to_layer, micro_batch=self._whose(micro_batch))
            begin += target.nbytes
        on_ssd = self._on_ssd(to_layer, micro_batch)
        if on_ssd:
            rest = self.passing(stage, micro_batch, to_layer)[-1]
            move(
                "write",
                rest,
                on_ssd,
                Content.ACTIVATION_CHECKPOINT,
                layer=to_layer,
                micro_batch=self._whose(micro_batch),
            )

    def restore(self, layer: int, micro_batch: int) -> None:
        """Read what ssd holds of a layer's input."""
        on_ssd = self._on_ssd(layer, micro_batch)
        if on_ssd:
            target, content = self.restored(layer, micro_batch)[-1], Content.ACTIVATION_CHECKPOINT
            self._emission.move_activation(
                "read", on_ssd, target, content, layer=layer, micro_batch=self._whose(micro_batch)
            )

    def restored(self, layer: int, micro_batch: int) -> list[Region]:
        """Where on host a layer's input lies for its backward."""
        keep = self._kept_bytes(layer, micro_batch)
        regions = [self._checkpoint(layer, micro_batch)] if keep else []
        rest = self._bytes - keep
        if rest:
            name, pool = f"restored/{layer}/{micro_batch}", f"passing/{rest}"
            regions.append(Region(self._emission.passing(name, "host", rest, Role.HIDDEN_STATES, pool), 0, rest))
        return regions

    def passing_gradient(self, stage: int, micro_batch: int) -> Region:
        """Where on host the gradient that a stage's backward leaves for the next lies."""
        name, pool = f"passed/{stage}/{micro_batch}", f"passing/{self._bytes}"
        return Region(self._emission.passing(name, "host", self._bytes, Role.HIDDEN_STATES, pool), 0, self._bytes)

    def _kept_bytes(self, layer: int, micro_batch: int) -> int:
        """How much of a layer's input stays on host as an activation checkpoint."""
        if layer not in self._blocks:
            return 0
        if self._emission.unified:
            number = (layer - self._blocks.start) * self._kept + micro_batch % self._kept
            return self._bytes if number in self._resident else 0
        return self._host_bytes

    def _checkpoint(self, layer: int, micro_batch: int) -> Region:
        name, nbytes = f"checkpoint/{layer}/{micro_batch % self._kept}", self._kept_bytes(layer, micro_batch)
        return Region(self._emission.buffers.get(name, "host", nbytes, Role.CHECKPOINTS, shared_by=layer), 0, nbytes)

    def _on_ssd(self, layer: int, micro_batch: int) -> Region | None:
        rest = self._bytes - self._kept_bytes(layer, micro_batch)
        if layer not in self._blocks or self.stays(layer) or not rest:
            return None
        name = f"checkpoint/{layer}/{micro_batch % self._kept}/ssd"
        return Region(self._emission.buffers.get(name, "ssd", rest, Role.CHECKPOINTS), 0, rest)
