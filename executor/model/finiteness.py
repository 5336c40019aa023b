"""Finiteness: finds the layer whose output first was not finite, in a step that went wrong.

Owns two numbers for each layer and micro-batch, the least and the largest of what its forward, or its backward, handed
on. They are taken on the device, which nobody waits for, and read when a gradient has turned out not to be finite.
"""

from typing import Literal

import torch

Pass = Literal["forward", "backward"]


class Finiteness:
    """What one step handed on from layer to layer."""

    def __init__(self, layers: int, micro_batches: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (layers, micro_batches, 2)
        self._ends: dict[Pass, torch.Tensor] = {
            "forward": torch.zeros(shape, dtype=dtype, device=device),
            "backward": torch.zeros(shape, dtype=dtype, device=device),
        }

    def look(self, which: Pass, layer: int, micro_batch: int, handed_on: torch.Tensor) -> None:
        """Note what a layer hands on for a micro-batch: hidden states, or the gradient of its input."""
        ends = self._ends[which][layer, micro_batch]
        torch.aminmax(handed_on, out=(ends[0], ends[1]))

    def first(self, which: Pass) -> tuple[int, int] | None:
        """The layer, and the first micro-batch, where something that is not finite came up; None where all is."""
        bad = (~self._ends[which].isfinite()).any(dim=2).nonzero().tolist()
        if not bad:
            return None
        layer = (min if which == "forward" else max)(layer for layer, _ in bad)
        return layer, min(micro_batch for at, micro_batch in bad if at == layer)
