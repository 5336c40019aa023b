"""AdamW on a GPU as one Triton kernel, which gives the native kernel's bits.

Owns this kernel. Each line is an operation of `native/src/adamw.cpp` in fp32; nothing is fused, roots and quotients are
correctly rounded. torch's CUDA builds bring Triton; only `adamw_on_device.py` imports this module.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from .adamw_on_device import Scalars, Streams

ELEMENTS = 1024
"""Of one program."""


@triton.jit(do_not_specialize=["elements", "decay", "of_first", "beta2", "of_second", "bias", "eps", "size", "scale"])
def _adamw(  # type: ignore[no-untyped-def]
    masters, firsts, seconds, gradients, parameters, elements, decay, of_first, beta2, of_second, bias, eps, size,
    scale, block: tl.constexpr, kept: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < elements
    g = tl.load(gradients + at, mask=there, other=0.0) * scale
    m = tl.load(firsts + at, mask=there, other=0.0).to(tl.float32)
    v = tl.load(seconds + at, mask=there, other=0.0).to(tl.float32)
    if kept == "fp32":
        p = tl.load(masters + at, mask=there, other=0.0)
    else:
        p = tl.load(parameters + at, mask=there, other=0.0).to(tl.float32)
        if kept == "residual":
            lacking = tl.load(masters + at, mask=there, other=0).to(tl.int32)
            p = (p.to(tl.int32, bitcast=True) + lacking).to(tl.float32, bitcast=True)
    m = m + (g - m) * of_first
    v = v * beta2 + (g * g) * of_second
    denominator = tl.sqrt_rn(v) * bias + eps
    p = p * decay - tl.div_rn(m * size, denominator)
    tl.store(firsts + at, m.to(firsts.dtype.element_ty), mask=there)
    tl.store(seconds + at, v.to(seconds.dtype.element_ty), mask=there)
    if kept == "residual":
        bits = p.to(tl.int32, bitcast=True)
        bits = tl.where(p != p, (bits & -65536) | 4194304, bits)
        upper = ((bits + 32768) >> 16) << 16
        tl.store(masters + at, bits.to(tl.int16), mask=there)
        tl.store(parameters + at, upper.to(tl.float32, bitcast=True).to(parameters.dtype.element_ty), mask=there)
    else:
        if kept == "fp32":
            tl.store(masters + at, p, mask=there)
        tl.store(parameters + at, p.to(parameters.dtype.element_ty), mask=there)


def update(streams: "Streams", scalars: "Scalars", decay: float) -> None:
    """As `adamw_on_device.by_torch`, on one GPU, or in Triton's interpreter on the CPU."""
    elements = streams.gradient.numel()
    kept = {torch.float32: "fp32", torch.int16: "residual", torch.bfloat16: "none"}[streams.master.dtype]
    _adamw[(triton.cdiv(elements, ELEMENTS),)](
        streams.master, streams.first, streams.second, streams.gradient, streams.parameters, elements, decay,
        scalars.one_minus_beta1, scalars.beta2, scalars.one_minus_beta2, scalars.inverse_bias2_sqrt, scalars.eps,
        scalars.step_size, scalars.gradient_scale, ELEMENTS, kept, enable_fp_fusion=False,
    )  # fmt: skip
