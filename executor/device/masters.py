"""Masters as bf16 copies and residuals: the way there and back, by torch.

Owns that 32 bits are the copy's 16 and the residual's 16, as `native/src/adamw.cpp` has it: the bits of a master are
those of the copy, as fp32, plus the residual as a signed number, so the copy is the master rounded to nearest with ties
away from zero. A NaN stays one, without its payload.
"""

import torch


def split(masters: torch.Tensor, copies: torch.Tensor, residuals: torch.Tensor) -> None:
    """fp32 `masters` into bf16 `copies` and int16 `residuals`, all of one shape. It takes several times their bytes."""
    bits = masters.view(torch.int32)
    kept = torch.where(masters.isnan(), (bits & -0x10000) | 0x00400000, bits)
    copies.view(torch.int16).copy_((kept + 0x8000) >> 16)
    residuals.copy_(kept)


def joined(copies: torch.Tensor, residuals: torch.Tensor) -> torch.Tensor:
    """fp32, new: the masters of bf16 `copies` and int16 `residuals`."""
    return (copies.view(torch.int16).to(torch.int32) << 16).add_(residuals).view(torch.float32)
