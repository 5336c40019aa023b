"""The optimizer's recipe and its arithmetic on a range: native AdamW on addresses, one fused pass.

Owns hyper-parameters and the count of steps. Which ranges, and when, is the schedule's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import xor
from typing import Any, NamedTuple

import torch

from ssdplan import native
from ssdplan.plans.homes import OPTIMIZER_BYTES
from ssdplan.plans.profile import OptimizerStates

from .weight_decay import Piece, Window

DTYPE_NAMES: dict[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_SUMMED = 256
"""Bytes: what is summed in passing begins and ends at multiples of it."""


class Updated(NamedTuple):
    """What the update of a range found."""

    finite: bool
    """Whether all scaled gradients were; the update is made in any case."""
    squares: int
    """The sum of squares of the gradient before it is scaled, if asked for: an integer in units of 2**-1074 that adds
    up over ranges as that of `Device.copy_d2h_gradient` does."""
    before: tuple[int, ...]
    """Checksums of the extents of the states as they were, if asked for."""
    after: tuple[int, ...]
    """And as the update left them."""


@dataclass(frozen=True)
class AdamW:
    """AdamW as torch.optim.AdamW defines it (decoupled weight decay, bias correction, no amsgrad)."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay_all: bool = True
    """Whether biases and the weights of norms decay too; transformers.Trainer spares them (`weight_decay`)."""

    def update(
        self,
        states: torch.Tensor,
        optimizer_states: OptimizerStates,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        *,
        step: int,
        gradient_scale: float,
        threads: int,
        statistics: bool = False,
        windows: Sequence[Window] = (),
        extents: Sequence[int] = (),
    ) -> "Updated":
        """Update one range in place. `states` uint8: fp32 masters [n], then first and second moments [n] each in the
        format `optimizer_states`; `gradient` fp32 [n]; `parameters` [n] takes the copy in its dtype.

        `step` counts from 1. Gradients count times `gradient_scale`, rounded to fp32. Moments in bf16 are rounded once
        the masters are updated, to the nearest, ties to even. `windows` are the range's elements, cut where decay
        begins or ends; without them all decay. With `statistics` the sum of squares of the gradient is taken in the
        same pass; and so are, where `extents` are given, the checksums of those parts of `states` that end at these
        bytes, from the first to the last.
        """
        elements = gradient.numel()
        assert states.dtype == torch.uint8 and gradient.dtype == torch.float32
        assert states.numel() == OPTIMIZER_BYTES[optimizer_states] * elements and parameters.numel() == elements
        assert not extents or extents[-1] == states.numel()
        moment_bytes = (OPTIMIZER_BYTES[optimizer_states] - 4) // 2
        starts = ((0, 4), (4 * elements, moment_bytes), ((4 + moment_bytes) * elements, moment_bytes))
        settings: dict[str, Any] = {
            "moment_dtype": optimizer_states,
            "lr": self.lr,
            "beta1": self.beta1,
            "beta2": self.beta2,
            "eps": self.eps,
            "step": step,
            "gradient_scale": gradient_scale,
            "threads": threads,
        }
        windows = windows or (Window(0, elements, (Piece(0, elements, decays=True),)),)
        passing = bool(extents) and all(
            edge * moment_bytes % _SUMMED == 0
            for window in windows
            for part in window.pieces
            for edge in (part.start, part.stop)
        )
        sums = _Sums(states, extents, threads)
        if not passing:
            sums.look_before()
        finite, squares = True, 0
        for window in windows:
            whole = len(window.pieces) == 1
            if statistics and not whole:
                start = gradient.data_ptr() + 4 * window.start
                squares += native.gradient_statistics(start, window.stop - window.start, threads=threads)[1]
            for part in window.pieces:
                places = [start + each * part.start for start, each in starts]
                streams: tuple[Any, ...] = (
                    *(states.data_ptr() + place for place in places),
                    gradient.data_ptr() + 4 * part.start,
                    parameters.data_ptr() + parameters.element_size() * part.start,
                    DTYPE_NAMES[parameters.dtype],
                    part.stop - part.start,
                )
                settings["weight_decay"] = self.weight_decay if part.decays else 0.0
                fine, of_part = True, 0
                if passing:
                    fine, of_part, *found = native.adamw_summed(*streams, positions=places, ends=extents, **settings)
                    sums.add(*found)
                elif statistics and whole:
                    fine, of_part = native.adamw_statistics(*streams, **settings)
                else:
                    fine = native.adamw(*streams, **settings)
                finite = finite and fine
                squares += of_part if statistics and whole else 0
        if passing:
            sums.finish()
        else:
            sums.look_after()
        return Updated(finite, squares, tuple(sums.before), tuple(sums.after))


class _Sums:
    """The checksums of the extents of some states, before and after their update: found by the kernel in passing, where
    what each call updates begins and ends where sums can, else by passes of their own."""

    def __init__(self, states: torch.Tensor, extents: Sequence[int], threads: int) -> None:
        self._address, self._threads = states.data_ptr(), threads
        self._spans = list(pairwise((0, *extents))) if extents else []
        self.before = [0] * len(extents)
        self.after = [0] * len(extents)

    def add(self, before: Sequence[int], after: Sequence[int]) -> None:
        """What one call of the kernel found, which are parts of sums."""
        self.before = list(map(xor, self.before, before))
        self.after = list(map(xor, self.after, after))

    def finish(self) -> None:
        """All parts are there."""
        lengths = [stop - start for start, stop in self._spans]
        self.before = list(map(native.checksum_of, self.before, lengths))
        self.after = list(map(native.checksum_of, self.after, lengths))

    def look_before(self) -> None:
        self.before = self._look()

    def look_after(self) -> None:
        self.after = self._look()

    def _look(self) -> list[int]:
        return [native.checksum(self._address + start, stop - start, self._threads) for start, stop in self._spans]
