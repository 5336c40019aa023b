"""Activations: the verbs for hidden states and for the gradients that pass between layers.

Owns where they lie on device, host and ssd, one region after the other: of a block's input, the part that stays on
host as its checkpoint, then the rest, which is on host only on its way to ssd and back.
"""

from collections.abc import Iterable

from .emission import Emission, cut
from .schedule import PAGE, Region


class Activations:
    """A hidden state is a layer's output for one micro-batch; one that is kept for backward is a checkpoint."""

    def __init__(self, emission: Emission, *, kept: int, checkpoints: bool) -> None:
        """`kept`: the number of micro-batches whose checkpoints are kept at once, those of the last ones;
        `checkpoints`: whether there are any, that is, whether there will be a backward."""
        self._emission, self._kept = emission, kept
        model, decision = emission.model, emission.decision
        rows = decision.micro_batch_size * decision.sequence_length
        self._bytes = -(-rows * model.hidden_size * emission.parameter_bytes // PAGE) * PAGE
        self._host_bytes = min(round(decision.checkpoint_host * self._bytes / PAGE) * PAGE, self._bytes)
        self._blocks = range(1, len(model.layers) - 1) if checkpoints else range(0)

    def on_device(self, name: str) -> Region:
        """A place for one hidden state or inter-layer gradient."""
        return Region(self._emission.passing(name, "device", self._bytes, "hidden states", "hidden"), 0, self._bytes)

    def bring(self, sources: list[Region], what: str, stage: int, micro_batch: int) -> Region:
        """Move what lies on host in pieces to a place on the device."""
        target = self.on_device(f"{what}/{stage}/{micro_batch}")
        begin = 0
        for source in sources:
            self._emission.move("h2d", source, Region(target.buffer, begin, begin + source.nbytes), what)
            begin += source.nbytes
        return target

    def passing(self, stage: int, micro_batch: int, to_layer: int) -> list[Region]:
        """Where on host the output of a stage's forward lies for `to_layer`: the part to keep, then the rest."""
        regions = []
        keep = self._host_bytes if to_layer in self._blocks else 0
        if keep:
            regions.append(self._checkpoint(to_layer, micro_batch))
        if keep < self._bytes:
            rest = self._bytes - keep
            name, pool = f"passing/{stage}/{micro_batch}", f"passing/{rest}"
            regions.append(Region(self._emission.passing(name, "host", rest, "hidden states", pool), 0, rest))
        return regions

    def keep(self, source: Region, stage: int, micro_batch: int, to_layer: int) -> None:
        """Move a forward's output to host for `to_layer`, and what is not kept there of a checkpoint on to ssd."""
        begin = 0
        for target in self.passing(stage, micro_batch, to_layer):
            self._emission.move("d2h", cut(source, (begin, begin + target.nbytes)), target, "hidden state")
            begin += target.nbytes
        on_ssd = self._on_ssd(to_layer, micro_batch)
        if on_ssd:
            self._emission.move("write", self.passing(stage, micro_batch, to_layer)[-1], on_ssd, "checkpoint")

    def restore(self, layer: int, micro_batches: Iterable[int]) -> None:
        """Read what ssd holds of the layer's inputs, in this order."""
        for micro_batch in micro_batches:
            on_ssd = self._on_ssd(layer, micro_batch)
            if on_ssd:
                self._emission.move("read", on_ssd, self.restored(layer, micro_batch)[-1], "checkpoint")

    def restored(self, layer: int, micro_batch: int) -> list[Region]:
        """Where on host a layer's input lies for its backward."""
        regions = [self._checkpoint(layer, micro_batch)] if self._host_bytes else []
        rest = self._bytes - self._host_bytes
        if rest:
            name, pool = f"restored/{layer}/{micro_batch}", f"passing/{rest}"
            regions.append(Region(self._emission.passing(name, "host", rest, "hidden states", pool), 0, rest))
        return regions

    def passing_gradient(self, stage: int, micro_batch: int) -> Region:
        """Where on host the gradient that a stage's backward leaves for the next lies."""
        name, pool = f"passed/{stage}/{micro_batch}", f"passing/{self._bytes}"
        return Region(self._emission.passing(name, "host", self._bytes, "hidden states", pool), 0, self._bytes)

    def _checkpoint(self, layer: int, micro_batch: int) -> Region:
        name, nbytes = f"checkpoint/{layer}/{micro_batch % self._kept}", self._host_bytes
        return Region(self._emission.buffers.get(name, "host", nbytes, "checkpoints", turn=layer), 0, nbytes)

    def _on_ssd(self, layer: int, micro_batch: int) -> Region | None:
        rest = self._bytes - self._host_bytes
        if layer not in self._blocks or not rest:
            return None
        name = f"checkpoint/{layer}/{micro_batch % self._kept}/ssd"
        return Region(self._emission.buffers.get(name, "ssd", rest, "checkpoints"), 0, rest)
