"""AdamW where the device keeps a state's optimizer states: as one Triton kernel on a GPU, or by torch where there is no
Triton; on the emulated device, whose memory is DRAM, by the native kernel.

Owns that all have the same bits: each line is one of the operations of `native/src/adamw.cpp` in fp32 on whole tensors,
so that nothing is fused and each rounds to nearest even.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ssdplan.plans.documents.state_layout import USUAL, OptimizerFormats

from ..device.masters import joined, split
from .adamw import AdamW, RangeUpdate
from .weight_decay import Piece, Window

PIECE = 1 << 22
"""Elements at once where torch makes an update: 16 bytes each beside them, within what is kept for this process of a
GPU's reserve."""
_MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MASTERS = {"fp32": torch.float32, "residual": torch.int16, "none": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Scalars:
    """What an update multiplies and adds: each computed in float64 and rounded once to fp32, as the native kernel's."""

    decay: float
    """Of what decays; 1 for what does not."""
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inverse_bias2_sqrt: float
    eps: float
    step_size: float
    gradient_scale: float

    @classmethod
    def of(cls, optimizer: AdamW, *, step: int, gradient_scale: float) -> "Scalars":
        """`step` counts from 1."""
        return cls(
            decay=1.0 - optimizer.lr * optimizer.weight_decay,
            one_minus_beta1=1.0 - optimizer.beta1,
            beta2=optimizer.beta2,
            one_minus_beta2=1.0 - optimizer.beta2,
            inverse_bias2_sqrt=1.0 / math.sqrt(1.0 - optimizer.beta2**step),
            eps=optimizer.eps,
            step_size=optimizer.lr / (1.0 - optimizer.beta1**step),
            gradient_scale=gradient_scale,
        )


@dataclass(frozen=True, slots=True)
class Streams:
    """The arrays of elements that are updated together, all flat and equally long: fp32 gradient, moments in fp32 or
    bf16, the copy that compute uses, and masters: in fp32, int16 as the residuals of bf16 copies, or these copies."""

    master: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    gradient: torch.Tensor
    parameters: torch.Tensor

    def part(self, start: int, stop: int) -> "Streams":
        every = (self.master, self.first, self.second, self.gradient, self.parameters)
        return Streams(*(stream[start:stop] for stream in every))


class Kernel(Protocol):
    """An update of some streams, in place."""

    def __call__(self, streams: Streams, scalars: Scalars, decay: float, /) -> None: ...


class DeviceUpdate:
    """AdamW on one range in place, on the device: bound to its arrays once and called every step."""

    def __init__(
        self,
        states: torch.Tensor,
        formats: OptimizerFormats,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        *,
        threads: int,
        windows: Sequence[Window] = (),
        kernel: Kernel | None = None,
    ) -> None:
        """As `RangeUpdate`, of tensors on any device. `threads`: of the native kernel. `kernel`: in place of the
        device's own."""
        elements = gradient.numel()
        assert states.dtype == torch.uint8 and gradient.dtype == torch.float32
        assert states.numel() == formats.range_bytes(elements) and parameters.numel() == elements
        self._native: RangeUpdate | None = None
        if gradient.device.type == "cpu" and kernel is None:
            self._native = RangeUpdate(states, formats, gradient, parameters, threads=threads, windows=windows)
            return
        self._kernel = kernel or kernel_of_gpu()
        assert formats.moments in _MOMENTS, f"no kernel of a device for moments in {formats.moments}"
        dtypes = {"master": _MASTERS[formats.masters], "first moment": _MOMENTS[formats.moments]}
        dtypes["second moment"] = dtypes["first moment"]
        parts = {part.what: states[part.offset : part.stop].view(dtypes[part.what]) for part in formats.parts(elements)}
        master = parts.get("master", parameters)
        streams = Streams(master, parts["first moment"], parts["second moment"], gradient, parameters)
        pieces = [piece for window in windows for piece in window.pieces] or [Piece(0, elements, decays=True)]
        self._pieces = [(streams.part(piece.start, piece.stop), piece.decays) for piece in _joined(pieces)]

    def __call__(self, optimizer: AdamW, *, step: int, gradient_scale: float) -> None:
        """`step` counts from 1. Whether the gradient is finite is `SumSquares`'s to say."""
        if self._native is not None:
            self._native(optimizer, step=step, gradient_scale=gradient_scale)
            return
        scalars = Scalars.of(optimizer, step=step, gradient_scale=gradient_scale)
        for streams, decays in self._pieces:
            self._kernel(streams, scalars, scalars.decay if decays else 1.0)


def ready_update(
    states: torch.Tensor, gradient: torch.Tensor, parameters: torch.Tensor, form: torch.dtype
) -> Callable[[], None]:
    """An update of a range, uint8 each, with usual settings: for whoever measures one. States are fp32, parameters
    `form`."""
    update = DeviceUpdate(states, USUAL, gradient.view(torch.float32), parameters.view(form), threads=1)
    return partial(update, AdamW(lr=1e-4), step=10, gradient_scale=1.0)


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours that decay alike as one: a launch for each of the others is what they cost."""
    made: list[Piece] = []
    for piece in pieces:
        if made and made[-1].stop == piece.start and made[-1].decays == piece.decays:
            made[-1] = Piece(made[-1].start, piece.stop, piece.decays)
        else:
            made.append(piece)
    return made


def kernel_of_gpu() -> Kernel:
    """Triton's, which torch's CUDA builds bring, or torch's own operations."""
    if importlib.util.find_spec("triton") is not None:
        from .adamw_triton import update

        return update
    return by_torch


def by_torch(streams: Streams, scalars: Scalars, decay: float) -> None:
    """One update by torch alone, on any device, piece by piece."""
    for start in range(0, streams.gradient.numel(), PIECE):
        _update(streams.part(start, start + PIECE), scalars, decay)


def _update(streams: Streams, scalars: Scalars, decay: float) -> None:
    gradient = streams.gradient * scalars.gradient_scale
    first, second = (moment.float() for moment in (streams.first, streams.second))  # themselves where they are fp32
    change = gradient.sub(first).mul_(scalars.one_minus_beta1)
    first.add_(change)
    second.mul_(scalars.beta2).add_(gradient.mul_(gradient).mul_(scalars.one_minus_beta2))
    # Not every build of torch rounds a root in fp32 correctly; one in float64 is close enough to be rounded so.
    denominator = gradient.copy_(second.double().sqrt_()).mul_(scalars.inverse_bias2_sqrt).add_(scalars.eps)
    step = torch.mul(first, scalars.step_size, out=change).div_(denominator)
    streams.first.copy_(first)
    streams.second.copy_(second)
    if streams.master.dtype == torch.float32:
        streams.parameters.copy_(streams.master.mul_(decay).sub_(step))
    elif streams.master.dtype == torch.int16:
        masters = joined(streams.parameters, streams.master).mul_(decay).sub_(step)
        split(masters, streams.parameters, streams.master)
    else:
        streams.parameters.copy_(streams.parameters.float().mul_(decay).sub_(step))
