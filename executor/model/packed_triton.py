"""int8 by groups on a GPU: the native kernels' arithmetic as two Triton kernels, which give the same bits.

Owns these kernels. torch's CUDA builds bring Triton; nothing else imports this module.
"""

import torch
import triton
import triton.language as tl

GROUPS_AT_ONCE = 16
"""Of one program; a thousand elements of 64 in a group."""


@triton.jit
def _quantize(values, scales, source, elements, group: tl.constexpr, groups: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * groups
    rows = first + tl.arange(0, groups)
    places = rows[:, None] * group + tl.arange(0, group)[None, :]
    there = places < elements
    x = tl.load(source + places, mask=there, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # magnitudes are ordered as their bits are, NaN above all
    most = tl.max(bits, axis=1)
    finite = most < 0x7F800000
    scale = tl.maximum(tl.div_rn(most.to(tl.float32, bitcast=True), 127.0), 1.1754943508222875e-38)
    inverse = tl.div_rn(tl.full([groups], 1.0, tl.float32), scale)
    # Added to a number of magnitude below 2^22, 1.5 x 2^23 leaves it in the lowest bits, rounded to nearest even.
    moved = x * inverse[:, None] + 12582912.0
    number = ((moved.to(tl.int32, bitcast=True) & 0xFF) ^ 0x80) - 0x80
    number = tl.where(finite[:, None], number, 0)
    tl.store(values + places, number.to(tl.int8), mask=there)
    nan = tl.full([groups], float("nan"), tl.float32)
    tl.store(scales + rows, tl.where(finite, scale, nan), mask=rows * group < elements)


@triton.jit
def _dequantize(out, values, scales, elements, group: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = places < elements
    number = tl.load(values + places, mask=there, other=0).to(tl.float32)
    scale = tl.load(scales + places // group, mask=there, other=0.0)
    tl.store(out + places, (number * scale).to(out.dtype.element_ty), mask=there)


def quantize(values: torch.Tensor, scales: torch.Tensor, source: torch.Tensor, group: int) -> None:
    """int8 [elements] and fp32 [groups] from `source`, flat, of fp32, bf16 or fp16, on one device."""
    elements = source.numel()
    grid = (triton.cdiv(elements, group * GROUPS_AT_ONCE),)
    _quantize[grid](values, scales, source, elements, group, GROUPS_AT_ONCE, enable_fp_fusion=False)


def dequantize(out: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, group: int) -> None:
    """Undo `quantize` into `out`, flat."""
    block = group * GROUPS_AT_ONCE
    grid = (triton.cdiv(out.numel(), block),)
    _dequantize[grid](out, values, scales, out.numel(), group, block, enable_fp_fusion=False)
