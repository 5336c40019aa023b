"""Muon's settings and its arithmetic on whole matrices, in place: that of torch.optim.Muon, in memory that was planned.

Owns momentum, orthogonalisation and the step of a matrix, on any device. The products are torch's, in bf16, and each
number is rounded where torch.optim.Muon rounds it, so that results are its own. Which matrices, and when, is the
schedule's business; everything that is no matrix of a block is AdamW's (`adamw.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch

from ssdplan import native
from ssdplan.plans.documents.matrices import PIECE, Matrix, workspace_bytes, workspace_of
from ssdplan.plans.documents.state_layout import MOMENTUM, OptimizerFormats

from ..device.masters import joined, split
from .adamw import AdamW, Updated

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration (Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024), as torch
has them."""
STEPS = 5
EPS = 1e-7
AdjustRate = Literal["match_rms_adamw", "original"]


@dataclass(frozen=True)
class Muon(AdamW):
    """Of matrices of blocks Muon as torch.optim.Muon defines it, with Nesterov's momentum and its usual iteration; of
    the rest AdamW, whose learning rate and weight decay are theirs too."""

    lr_of_matrices: float = 1.0
    """Their learning rate, before it is adjusted, in proportion to `lr`, with which it rises and falls."""
    momentum: float = 0.95
    adjust_lr: AdjustRate = "match_rms_adamw"
    """How the rate of a matrix follows from its shape (`adjust_lr_fn`). match_rms_adamw: its step is as large as
    AdamW's at the same rate (Liu et al. 2025, "Muon is Scalable for LLM Training"). original: Keller Jordan's."""

    @property
    def matrix_lr(self) -> float:
        return self.lr * self.lr_of_matrices

    def rate(self, rows: int, columns: int) -> float:
        """Of a matrix, adjusted."""
        if self.adjust_lr == "original":
            return self.matrix_lr * math.sqrt(max(1, rows / columns))
        return self.matrix_lr * (0.2 * math.sqrt(max(rows, columns)))


class MatrixUpdate:
    """Muon on one range of whole matrices in place, bound to its arrays once and called every step, on any device.

    With `extents` checksums of those parts of the states that end at these bytes are taken, before and after; with
    `statistics` the sum of squares of the gradient, and whether it is finite: of arrays in DRAM alone.
    """

    def __init__(
        self,
        states: torch.Tensor,
        formats: OptimizerFormats,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        matrices: Sequence[Matrix],
        workspace: torch.Tensor,
        *,
        start: int = 0,
        decays: Sequence[bool] = (),
        threads: int = 1,
        looks: bool = False,
        extents: Sequence[int] = (),
    ) -> None:
        """`states` uint8: masters [n], then the momentum [n] in fp32, as `formats` have it; `gradient` fp32 [n];
        `parameters` [n] takes the copy in its dtype, and has the one before where `formats` say so; `matrices` are all
        of it, counted from element `start` of their state; `workspace` uint8, of at least `workspace_bytes`. `decays`:
        of each matrix, whether it decays; all do without. `looks`: at the gradient, which lies in DRAM, for what
        `Updated` says of it. `threads` are those of the native kernels."""
        elements = gradient.numel()
        assert states.dtype == torch.uint8 and gradient.dtype == torch.float32
        assert states.numel() == formats.range_bytes(elements) and parameters.numel() == elements
        assert workspace.dtype == torch.uint8 and workspace.numel() >= workspace_bytes(matrices)
        parts = {part.what: states[part.offset : part.stop] for part in formats.parts(elements)}
        assert "second moment" not in parts, "Muon has one moment"
        momentum, kept = parts["first moment"].view(torch.float32), parts.get("master")
        dtype = {"fp32": torch.float32, "residual": torch.int16}.get(formats.masters)
        self._formats, self._gradient, self._looks, self._threads = formats, gradient, looks, threads
        self._spans = [(states.data_ptr() + begin, end - begin) for begin, end in pairwise((0, *extents))]
        self._matrices: list[_Bound] = []
        for matrix, decaying in zip(matrices, decays or [True] * len(matrices), strict=True):
            mine = slice(matrix.start - start, matrix.start - start + matrix.elements)
            places = workspace_of(matrix)
            halves = [workspace[a:b].view(torch.bfloat16) for a, b in places[:4]]
            pieces = [workspace[a:b].view(torch.float32) for a, b in places[4:]]
            self._matrices.append(
                _Bound(
                    matrix.rows,
                    matrix.columns,
                    decaying,
                    None if kept is None else kept.view(dtype or torch.uint8)[mine],
                    momentum[mine],
                    gradient[mine],
                    parameters[mine],
                    *halves,
                    *pieces,
                )
            )

    def __call__(self, optimizer: AdamW, *, step: int, gradient_scale: float) -> Updated:
        """`optimizer` is Muon's; it makes every `step` alike. Gradients count times `gradient_scale`, rounded to fp32.
        Without `looks` nothing is said of the gradient."""
        assert isinstance(optimizer, Muon), "matrices in a run by another optimizer"
        finite, squares = True, 0
        if self._looks:
            finite, squares = native.gradient_statistics(
                self._gradient.data_ptr(), self._gradient.numel(), threads=self._threads
            )
        before = self._sums()
        with torch.no_grad():
            for bound in self._matrices:
                _update(bound, optimizer, gradient_scale)
        return Updated(finite, squares, before, self._sums())

    def _sums(self) -> tuple[int, ...]:
        return tuple(native.checksum(address, nbytes, self._threads) for address, nbytes in self._spans)


def ready_matrix_update(
    matrix: Matrix,
    states: torch.Tensor,
    gradient: torch.Tensor,
    parameters: torch.Tensor,
    workspace: torch.Tensor,
    form: torch.dtype,
) -> Callable[[], Updated]:
    """An update of a matrix that begins at 0, of uint8 arrays, with usual settings: for whoever measures one. States
    and gradient are fp32, parameters `form`."""
    copies, formats = parameters.view(form), MOMENTUM["fp32"]
    update = MatrixUpdate(states, formats, gradient.view(torch.float32), copies, [matrix], workspace)
    return partial(update, Muon(lr=1e-4), step=1, gradient_scale=1.0)


@dataclass(frozen=True, slots=True)
class _Bound:
    """The arrays of one matrix, flat."""

    rows: int
    columns: int
    decays: bool
    master: torch.Tensor | None
    """fp32; int16 where they are residuals; None where the bf16 parameters are the masters."""
    momentum: torch.Tensor
    gradient: torch.Tensor
    parameters: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    gram: torch.Tensor
    square: torch.Tensor
    piece: torch.Tensor
    masters: torch.Tensor

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Rows [first, end) that are in fp32 at once."""
        most = max(PIECE // self.columns, 1)
        return ((row, min(row + most, self.rows)) for row in range(0, self.rows, most))


def _update(bound: _Bound, optimizer: Muon, gradient_scale: float) -> None:
    for first, end in bound.ranges():
        part = slice(first * bound.columns, end * bound.columns)
        change = bound.piece[: part.stop - part.start]
        torch.mul(bound.gradient[part], gradient_scale, out=change)
        bound.momentum[part].lerp_(change, 1 - optimizer.momentum)
        bound.first[part].copy_(change.lerp_(bound.momentum[part], optimizer.momentum))
    direction = _orthogonalised(bound)
    rate, decay = optimizer.rate(bound.rows, bound.columns), 1 - optimizer.matrix_lr * optimizer.weight_decay
    for first, end in bound.ranges():
        part = slice(first * bound.columns, end * bound.columns)
        change = bound.piece[: part.stop - part.start]
        change.view(-1, bound.columns).copy_(direction[first:end])
        _step(bound, part, change, rate, decay if bound.decays else 1.0)


def _step(bound: _Bound, part: slice, change: torch.Tensor, rate: float, decay: float) -> None:
    """Change some rows of the masters, and round the parameters."""
    kept, parameters = bound.master, bound.parameters[part]
    if kept is None:
        masters = bound.masters[: change.numel()].copy_(parameters)
    else:
        masters = joined(parameters, kept[part]) if kept.dtype == torch.int16 else kept[part]
    masters.mul_(decay).add_(change, alpha=-rate)
    if kept is not None and kept.dtype == torch.int16:
        split(masters, parameters, kept[part])
    else:
        parameters.copy_(masters)


def _orthogonalised(bound: _Bound) -> torch.Tensor:
    """bf16 [rows, columns], a view of the workspace: what Newton and Schulz's iteration makes of the matrix in `first`.
    Shapes and strides are those of torch's own, and so are the bits."""
    a, b, c = COEFFICIENTS
    short, long = sorted((bound.rows, bound.columns))
    tall = bound.rows > bound.columns
    here = bound.first.view(bound.rows, bound.columns)
    here = here.T if tall else here
    here.div_(here.norm().clamp(min=EPS))
    gram, square = bound.gram.view(short, short), bound.square.view(short, short)
    places = (bound.second.view(short, long), bound.first.view(short, long))
    for step in range(STEPS):
        there = places[step % 2]
        torch.mm(here, here.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=square)
        torch.addmm(here, square, here, beta=a, out=there)
        here = there
    return here.T if tall else here
