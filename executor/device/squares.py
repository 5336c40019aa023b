"""The sum of squares of a gradient where it lies, exact however the gradient is cut.

Owns the arithmetic by which a device sums what `native.copy_statistics` sums on host.
"""

import torch

from ssdplan.plans.documents.state_layout import GRAIN

_ROWS_AT_ONCE = 4096
"""Rows folded at once, in 32 MiB beside them, or 64 where fp32 is not enough: well within what is kept for this process
of a GPU's reserve. On an H200, 512 at once took 2 ms of launches beside a copy of 0.3 ms."""
_UNIT = 1074
"""Sums of squares are integers in units of two to the minus this: every float64 is such an integer."""


def squares_of_rows(gradient: torch.Tensor) -> int | None:
    """The sum of squares of fp32 [rows * GRAIN] where it lies, in units of 2**-1074; None when an element is not
    finite.

    A row's sum is rounded to about 1e-7 of itself (squares that are none in fp32 count as zero) and depends on that row
    alone; rows add up exactly. So a state's sum is the same however it is cut into ranges, and so is what is clipped by
    it.
    """
    return summed(gradient, row_sums(gradient).cpu())


def row_sums(gradient: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The sum of squares of each row, computed in `dtype`, as float64 where the gradient lies.

    Rows are folded in halves, one operation an element: a GPU's own reductions add in an order that depends on how many
    rows they are given.
    """
    sums = []
    for part in gradient.view(-1, GRAIN).split(_ROWS_AT_ONCE):
        half = GRAIN // 2
        folded = part[:, :half].to(dtype, copy=True).square_()
        folded.add_(part[:, half:].to(dtype, copy=True).square_())
        while half > 1:
            half //= 2
            folded = folded[:, :half].add_(folded[:, half:])
        sums.append(folded[:, 0].to(torch.float64, copy=True))
    return torch.cat(sums)


def summed(gradient: torch.Tensor, sums: torch.Tensor) -> int | None:
    """What `squares_of_rows` says of a gradient whose rows have these sums in fp32, which are on host."""
    if not sums.isfinite().all():  # an element is not, or the square of one is none of fp32's numbers
        sums = torch.where(sums.isfinite(), sums, row_sums(gradient, torch.float64).cpu())
        if not sums.isfinite().all():
            return None
    # Each sum as an integer of 31 bits times a power of two; eight neighbouring powers share an integer of 64 bits.
    mantissas, exponents = torch.frexp(sums)
    powers = exponents.long() + (_UNIT - 31)
    shared = torch.zeros(256, dtype=torch.int64)
    shared.index_add_(0, powers // 8, (mantissas * (1 << 31)).long() << powers % 8)
    return sum(part << 8 * place for place, part in enumerate(shared.tolist()))
