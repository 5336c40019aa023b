"""Saved activations: the verbs for what a block's forward keeps so that its backward recomputes less (PyAO section 5).

Owns which pairs of layer and micro-batch keep what, and where that lies: on the device or on host until the backward,
or on ssd, and then on host and on the device only on its way. Where memory is unified, a forward writes it, and a
backward reads it, where it lies on host. What else is kept of a block, its input, is in `activations.py`.
"""

from dataclasses import dataclass

from ..documents.plan import SavedTier
from ..documents.profile import Rung
from ..graph.contents import Content, Role
from ..graph.ops import Region, Resource
from ..units import whole_pages
from .emission import Emission
from .homes import spread


def saved_bytes(rung: Rung) -> int:
    """What a micro-batch's place takes, in whole pages as ssd has them."""
    return whole_pages(rung.kept_bytes)


@dataclass(frozen=True, slots=True)
class Kept:
    """What one block's forward keeps of one micro-batch."""

    rung: str
    tier: SavedTier
    nbytes: int


class SavedActivations:
    """What is kept of every pair of layer and micro-batch, and the transfers that this takes."""

    def __init__(self, emission: Emission, *, kept: int, training: bool) -> None:
        """`kept`: the number of micro-batches whose activations are kept at once; `training`: whether there will be a
        backward."""
        self._emission, self._micro_batches = emission, kept
        self._of: dict[tuple[int, int], Kept] = {}
        self._to_write: tuple[int, int] | None = None
        """The pair that has left the device last, if it is still to be written to ssd."""
        model, decision = emission.model, emission.decision
        for name, shares in decision.saved.items() if training else ():
            timing = model.timing(name, decision.micro_batch_size)
            layers = [layer for layer in model.trained_blocks if model.layers[layer].layer_class == name]
            pairs = [(layer, micro_batch) for layer in layers for micro_batch in range(kept)]
            left, total, taken = list(range(len(pairs))), 0.0, 0
            for each in shares:
                total += each.share  # rounded together, so that no pair is counted twice or lost
                count = min(round(total * len(pairs)), len(pairs)) - taken
                taken += count
                chosen = spread(left, count)
                what = Kept(each.rung, each.tier, saved_bytes(timing.rung(each.rung)))
                self._of |= {pairs[number]: what for number in chosen}
                left = [number for number in left if number not in chosen]

    def of(self, layer: int, micro_batch: int) -> Kept | None:
        """What is kept of a pair; None for nothing."""
        return self._of.get((layer, micro_batch % self._micro_batches))

    def rung(self, layer: int, micro_batch: int) -> str:
        kept = self.of(layer, micro_batch)
        return kept.rung if kept else ""

    def output(self, layer: int, micro_batch: int) -> Region | None:
        """Where a layer's forward leaves what it keeps."""
        kept = self.of(layer, micro_batch)
        if kept is None:
            return None
        if kept.tier == "ssd" and self._emission.unified:
            return self._passing("saving", "host", kept, layer, micro_batch)
        if kept.tier == "device" or self._emission.unified:
            return self._waiting(kept, layer, micro_batch)
        return self._passing("saving", "device", kept, layer, micro_batch)

    def leave(self, layer: int, micro_batch: int) -> None:
        """Move what a forward has left to where it waits. A pair that goes to ssd is written behind the copy of the
        next such pair, or before anything is read: so host has places for two, and the drive writes one while the
        other comes."""
        kept, source = self.of(layer, micro_batch), self.output(layer, micro_batch)
        if kept is None or source is None or kept.tier == "device":
            return
        target = self._on_host("saving", kept, layer, micro_batch)
        self._move("d2h", source, target, layer, micro_batch)
        if kept.tier == "ssd":
            self._write_last()
            self._to_write = layer, micro_batch
            if self._emission.unified:  # nothing is copied, and the next forward writes to a place of its own
                self._write_last()

    def _write_last(self) -> None:
        """Write the pair that is still to be written, if there is one."""
        if self._to_write is None:
            return
        (layer, micro_batch), self._to_write = self._to_write, None
        kept = self.of(layer, micro_batch)
        assert kept is not None
        source, target = self._on_host("saving", kept, layer, micro_batch), self._waiting(kept, layer, micro_batch)
        self._move("write", source, target, layer, micro_batch)

    def restore(self, layer: int, micro_batch: int) -> None:
        """Read what ssd holds of a pair. All that is to be written is written before."""
        self._write_last()
        kept = self.of(layer, micro_batch)
        if kept and kept.tier == "ssd":
            target = self._on_host("restored", kept, layer, micro_batch)
            self._move("read", self._waiting(kept, layer, micro_batch), target, layer, micro_batch)

    def bring(self, layer: int, micro_batch: int) -> Region | None:
        """Move to the device what a layer's backward takes; returns where it is."""
        kept = self.of(layer, micro_batch)
        if kept is None or kept.tier == "device":
            return self.output(layer, micro_batch)
        source = self._on_host("restored", kept, layer, micro_batch)
        if self._emission.unified:
            return source
        target = self._passing("brought", "device", kept, layer, micro_batch)
        self._move("h2d", source, target, layer, micro_batch)
        return target

    def _on_host(self, use: str, kept: Kept, layer: int, micro_batch: int) -> Region:
        """Where it lies on host: where it waits, or on its way from or to ssd."""
        if kept.tier == "host":
            return self._waiting(kept, layer, micro_batch)
        return self._passing(use, "host", kept, layer, micro_batch)

    def _waiting(self, kept: Kept, layer: int, micro_batch: int) -> Region:
        name = f"saved/{layer}/{micro_batch % self._micro_batches}"
        buffer = self._emission.buffers.get(name, kept.tier, kept.nbytes, Role.SAVED_ACTIVATIONS)
        return Region(buffer, 0, kept.nbytes)

    def _passing(self, use: str, tier: SavedTier, kept: Kept, layer: int, micro_batch: int) -> Region:
        name, pool = f"{use} on {tier}/{layer}/{micro_batch}", f"saved/{kept.nbytes}"
        return Region(self._emission.passing(name, tier, kept.nbytes, Role.SAVED_ACTIVATIONS, pool), 0, kept.nbytes)

    def _move(self, kind: Resource, source: Region, target: Region, layer: int, micro_batch: int) -> None:
        content = Content.SAVED_ACTIVATIONS
        self._emission.move_activation(kind, source, target, content, layer=layer, micro_batch=micro_batch)
