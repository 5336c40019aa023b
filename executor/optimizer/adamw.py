"""The optimizer's recipe and its arithmetic on a range: native AdamW on addresses, one fused pass.

Owns hyper-parameters and the count of steps. Which ranges, and when, is the schedule's business.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import xor
from typing import Any, NamedTuple

import torch

from ssdplan import native
from ssdplan.plans.documents.state_layout import GRADIENT_BYTES, SUMMED, OptimizerFormats, Part

from ..device.tensors import DTYPE_NAMES
from .weight_decay import Piece, Window


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


class RangeUpdate:
    """AdamW on one range in place, bound to its arrays once and called every step: what a call does besides the kernel
    costs a step as often as it updates.

    Keeps addresses alone; the arrays must outlive it. Without `windows`, the range's elements cut where decay begins or
    ends, all decay. With `statistics` the sum of squares of the gradient is taken in the same pass; and so are, where
    `extents` are given, the checksums of those parts of the states that end at these bytes, from the first to the last.
    """

    def __init__(
        self,
        states: torch.Tensor,
        formats: OptimizerFormats,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        *,
        threads: int,
        statistics: bool = False,
        windows: Sequence[Window] = (),
        extents: Sequence[int] = (),
    ) -> None:
        """`states` uint8: masters [n], then first and second moments [n], each where `formats` have it; `gradient`
        fp32 [n]; `parameters` [n] takes the copy in its dtype, and has the one before where `formats` say so."""
        elements = gradient.numel()
        assert states.dtype == torch.uint8 and gradient.dtype == torch.float32
        assert states.numel() == formats.range_bytes(elements) and parameters.numel() == elements
        assert not extents or extents[-1] == states.numel()
        parts = {part.what: part for part in formats.parts(elements)}
        windows = windows or (Window(0, elements, (Piece(0, elements, decays=True),)),)
        self._threads = threads
        self._passing = bool(extents) and all(
            _passes(part, piece) for window in windows for piece in window.pieces for part in parts.values()
        )
        self._spans = [(states.data_ptr() + start, stop - start) for start, stop in pairwise((0, *extents))]
        self._calls: list[_Call] = []
        self._counted_apart: list[tuple[int, int]] = []
        """Where the squares of a gradient are that no single call sees, and how many elements."""
        for window in windows:
            counted = statistics and len(window.pieces) == 1
            if statistics and not counted:
                self._counted_apart.append(
                    (gradient.data_ptr() + GRADIENT_BYTES * window.start, window.stop - window.start)
                )
            for piece in window.pieces:
                places = {what: part.places(piece.start, piece.stop) for what, part in parts.items()}
                moments = places["first moment"], places["second moment"]
                begins = [first for each in zip(*moments, strict=True) for first, _ in each]  # elements, then scales
                base, kept = states.data_ptr(), places["master"][0][0] if "master" in places else 0
                streams: tuple[Any, ...] = (
                    base + kept if formats.masters == "fp32" else None,
                    base + begins[0],
                    base + begins[1],
                    gradient.data_ptr() + GRADIENT_BYTES * piece.start,
                    parameters.data_ptr() + parameters.element_size() * piece.start,
                    DTYPE_NAMES[parameters.dtype],
                    piece.stop - piece.start,
                )
                kernel: Callable[..., Any] = native.adamw_statistics if counted else native.adamw
                if self._passing:
                    kernel = partial(native.adamw_summed, positions=(kept, *begins), ends=tuple(extents))
                if formats.masters == "residual":
                    kernel = partial(kernel, residual=base + kept)
                if scales := [base + begin for begin in begins[2:]]:
                    kernel = partial(kernel, scales=scales)
                bound = partial(kernel, *streams, moment_dtype=formats.moments, threads=threads)
                self._calls.append(_Call(bound, piece.decays, counted))

    def __call__(self, optimizer: AdamW, *, step: int, gradient_scale: float) -> Updated:
        """`step` counts from 1. Gradients count times `gradient_scale`, rounded to fp32. Moments in bf16 or int8 are
        rounded once the masters are updated."""
        settings: dict[str, Any] = {
            "lr": optimizer.lr,
            "beta1": optimizer.beta1,
            "beta2": optimizer.beta2,
            "eps": optimizer.eps,
            "step": step,
            "gradient_scale": gradient_scale,
        }
        finite, squares = True, 0
        before = [0] * len(self._spans) if self._passing else self._looked()
        after = list(before)
        for call in self._calls:
            found = call.kernel(weight_decay=optimizer.weight_decay if call.decays else 0.0, **settings)
            fine, of_part = (found, 0) if isinstance(found, bool) else found[:2]
            finite = finite and fine
            if call.counted:
                squares += of_part
            if self._passing:
                before, after = list(map(xor, before, found[2])), list(map(xor, after, found[3]))
        for start, elements in self._counted_apart:
            squares += native.gradient_statistics(start, elements, threads=self._threads)[1]
        if self._passing:
            before, after = self._finished(before), self._finished(after)
        else:
            after = self._looked()
        return Updated(finite, squares, tuple(before), tuple(after))

    def _finished(self, sums: Sequence[int]) -> list[int]:
        """The checksums of the extents, of what all calls of the kernel found together."""
        return [native.checksum_of(found, nbytes) for found, (_, nbytes) in zip(sums, self._spans, strict=True)]

    def _looked(self) -> list[int]:
        """The same by a pass of its own, where calls begin or end where sums in passing cannot."""
        return [native.checksum(address, nbytes, self._threads) for address, nbytes in self._spans]


def _passes(part: Part, piece: Piece) -> bool:
    """Whether checksums of a piece's bytes can be taken in passing: all begin and end at multiples of what is summed at
    once, or as the part's own last ones, behind which are zeros up to there."""
    return all(
        first % SUMMED == 0 and (end % SUMMED == 0 or end == part.stop)
        for first, end in part.places(piece.start, piece.stop)
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """Of the kernel; what changes from step to step is not bound."""

    kernel: Callable[..., Any]
    decays: bool
    counted: bool
    """Whether the squares that it finds are all of some window's."""
