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
        master, of_gradient, of_parameters = states.data_ptr(), gradient.data_ptr(), parameters.data_ptr()
        exp_avg = 4 * elements
        exp_avg_sq = exp_avg + moment_bytes * elements
        parameter_dtype = DTYPE_NAMES[parameters.dtype]
        chosen = windows or (Window(0, elements, (Piece(0, elements, decays=True),)),)
        edges = (edge for window in chosen for part in window.pieces for edge in (part.start, part.stop))
        passing = bool(extents) and all(edge * moment_bytes % _SUMMED == 0 for edge in edges)
        before, after = [0] * len(extents), [0] * len(extents)
        lengths = [stop - start for start, stop in pairwise((0, *extents))]

        def checksums() -> list[int]:
            ends = zip(extents, lengths, strict=True)
            return [native.checksum(master + stop - nbytes, nbytes, threads) for stop, nbytes in ends]

        def piece(part: Piece, *, statistics: bool) -> tuple[bool, int]:
            nonlocal before, after
            places = (4 * part.start, exp_avg + moment_bytes * part.start, exp_avg_sq + moment_bytes * part.start)
            streams: tuple[Any, ...] = (
                *(master + place for place in places),
                of_gradient + 4 * part.start,
                of_parameters + parameters.element_size() * part.start,
                parameter_dtype,
                part.stop - part.start,
            )
            settings: dict[str, Any] = {
                "moment_dtype": optimizer_states,
                "lr": self.lr,
                "beta1": self.beta1,
                "beta2": self.beta2,
                "eps": self.eps,
                "weight_decay": self.weight_decay if part.decays else 0.0,
                "step": step,
                "gradient_scale": gradient_scale,
                "threads": threads,
            }
            if passing:
                finite, squares, *sums = native.adamw_summed(*streams, positions=places, ends=extents, **settings)
                before, after = (list(map(xor, *each)) for each in zip((before, after), sums, strict=True))
                return finite, squares if statistics else 0
            if statistics:
                return native.adamw_statistics(*streams, **settings)
            return native.adamw(*streams, **settings), 0

        if extents and not passing:
            before = checksums()
        finite, squares = True, 0
        for window in chosen:
            whole = len(window.pieces) == 1
            if statistics and not whole:
                count = window.stop - window.start
                squares += native.gradient_statistics(of_gradient + 4 * window.start, count, threads=threads)[1]
            for part in window.pieces:
                fine, of_part = piece(part, statistics=statistics and whole)
                finite, squares = finite and fine, squares + of_part
        if passing:
            before, after = (list(map(native.checksum_of, sums, lengths)) for sums in (before, after))
        elif extents:
            after = checksums()
        return Updated(finite, squares, tuple(before), tuple(after))
