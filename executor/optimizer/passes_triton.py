"""A pass of the zeroth-order optimizer on a GPU as one Triton kernel, which gives the native kernel's bits.

Owns this kernel. Each line is an operation of `native/src/zeroth_order.cpp` in fp32; nothing is fused, each rounds to
nearest even. torch's CUDA builds bring Triton; nothing else imports this module.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .rows import Rows

COUNTERS = 256
"""Of one program; each serves four elements, 16 apart."""


@triton.jit
def _logarithm(u):  # type: ignore[no-untyped-def]
    offset = u.to(tl.int32, bitcast=True) - 0x3F3504F3
    exponent = (offset >> 23).to(tl.float32)
    x = ((offset & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    square = x * x
    y = x * 0.0 + 7.0376836292e-2
    y = y * x + -1.1514610310e-1
    y = y * x + 1.1676998740e-1
    y = y * x + -1.2420140846e-1
    y = y * x + 1.4249322787e-1
    y = y * x + -1.6668057665e-1
    y = y * x + 2.0000714765e-1
    y = y * x + -2.4999993993e-1
    y = y * x + 3.3333331174e-1
    y = y * x * square
    y = y - exponent * 2.12194440e-4 - square * 0.5
    return y + x + exponent * 0.693359375


@triton.jit
def _box_muller(a, b):  # type: ignore[no-untyped-def]
    u = ((a >> 1).to(tl.float32) + 0.5) * 4.656612873077393e-10
    r = tl.sqrt_rn(_logarithm(u) * -2.0)
    quarter = (b + 0x20000000) >> 30
    x = (b - (quarter << 30)).to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180793e-9
    square = x * x
    sine = (x * 0.0 + -1.9515295891e-4) * square + 8.3321608736e-3
    sine = sine * square + -1.6666654611e-1
    sine = sine * square * x + x
    cosine = (x * 0.0 + 2.443315711809948e-5) * square + -1.388731625493765e-3
    cosine = cosine * square + 4.166664568298827e-2
    cosine = cosine * square * square - square * 0.5 + 1.0
    swapped = (quarter & 1) != 0
    first = tl.where(swapped, sine, cosine)
    second = tl.where(swapped, cosine, sine)
    first = tl.where(((quarter + 1) & 2) != 0, -first, first)
    second = tl.where((quarter & 2) != 0, -second, second)
    return first * r, second * r


@triton.jit
def _normals(counter, seed_low, seed_high, tensor, step, direction):  # type: ignore[no-untyped-def]
    """Four normals of each counter, by Philox4x32-10."""
    zero = counter.to(tl.uint32) & 0
    a = counter.to(tl.uint32)
    b = (counter >> 32).to(tl.uint32) | (zero + direction.to(tl.uint32) << 16)
    c = zero + tensor.to(tl.uint32)
    d = zero + step.to(tl.uint32)
    first_key = zero + seed_low.to(tl.uint32)
    second_key = zero + seed_high.to(tl.uint32)
    for _ in tl.static_range(10):
        first = a.to(tl.uint64) * 0xD2511F53
        second = c.to(tl.uint64) * 0xCD9E8D57
        a = (second >> 32).to(tl.uint32) ^ b ^ first_key
        b = second.to(tl.uint32)
        c = (first >> 32).to(tl.uint32) ^ d ^ second_key
        d = first.to(tl.uint32)
        first_key += 0x9E3779B9
        second_key += 0xBB67AE85
    one, two = _box_muller(a, b)
    three, four = _box_muller(c, d)
    return one, two, three, four


@triton.jit
def _updated(p, z, scale, keep, like):  # type: ignore[no-untyped-def]
    return (p * keep - z * scale).to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _perturbed(p, z, eps, plus, minus, places, there, with_plus: tl.constexpr, with_minus: tl.constexpr):  # type: ignore[no-untyped-def]
    moved = z * eps
    if with_plus:
        rounded = p.to(plus.dtype.element_ty).to(tl.float32)
        tl.store(plus + places, (rounded + moved).to(plus.dtype.element_ty), mask=there)
    if with_minus:
        rounded = p.to(minus.dtype.element_ty).to(tl.float32)
        tl.store(minus + places, (rounded - moved).to(minus.dtype.element_ty), mask=there)


@triton.jit(
    do_not_specialize=["elements", "first", "groups", "seed_low", "seed_high", "tensor", "step", "direction", "updates"]
)
def _pass(  # type: ignore[no-untyped-def]
    parameters, plus, minus, numbers, factors, rows, elements, first, groups, seed_low, seed_high, tensor, step,
    direction, eps, updates, with_plus: tl.constexpr, with_minus: tl.constexpr, by_rows: tl.constexpr,
    counters: tl.constexpr,
):  # fmt: skip
    of_range = tl.program_id(0).to(tl.int64) * counters + tl.arange(0, counters)
    zero = of_range // 16 * 64 + of_range % 16
    if by_rows:  # of `groups` groups of 64 elements each, numbered in `rows`
        group = of_range // 16
        row = tl.load(rows + group // groups, mask=zero < elements, other=0)
        counter = (row * groups + group % groups) * 16 + of_range % 16
    else:
        counter = first + of_range
    one, two, three = zero + 16, zero + 32, zero + 48
    p0 = tl.load(parameters + zero, mask=zero < elements, other=0.0).to(tl.float32)
    p1 = tl.load(parameters + one, mask=one < elements, other=0.0).to(tl.float32)
    p2 = tl.load(parameters + two, mask=two < elements, other=0.0).to(tl.float32)
    p3 = tl.load(parameters + three, mask=three < elements, other=0.0).to(tl.float32)
    for update in range(updates):
        of_step, number = tl.load(numbers + 2 * update), tl.load(numbers + 2 * update + 1)
        scale, keep = tl.load(factors + 2 * update), tl.load(factors + 2 * update + 1)
        z0, z1, z2, z3 = _normals(counter, seed_low, seed_high, tensor, of_step, number)
        p0 = _updated(p0, z0, scale, keep, parameters)
        p1 = _updated(p1, z1, scale, keep, parameters)
        p2 = _updated(p2, z2, scale, keep, parameters)
        p3 = _updated(p3, z3, scale, keep, parameters)
    if updates > 0:
        tl.store(parameters + zero, p0.to(parameters.dtype.element_ty), mask=zero < elements)
        tl.store(parameters + one, p1.to(parameters.dtype.element_ty), mask=one < elements)
        tl.store(parameters + two, p2.to(parameters.dtype.element_ty), mask=two < elements)
        tl.store(parameters + three, p3.to(parameters.dtype.element_ty), mask=three < elements)
    if with_plus or with_minus:
        z0, z1, z2, z3 = _normals(counter, seed_low, seed_high, tensor, step, direction)
        _perturbed(p0, z0, eps, plus, minus, zero, zero < elements, with_plus, with_minus)
        _perturbed(p1, z1, eps, plus, minus, one, one < elements, with_plus, with_minus)
        _perturbed(p2, z2, eps, plus, minus, two, two < elements, with_plus, with_minus)
        _perturbed(p3, z3, eps, plus, minus, three, three < elements, with_plus, with_minus)


def perturb(
    parameters: torch.Tensor,
    plus: torch.Tensor | None,
    minus: torch.Tensor | None,
    seed: int,
    tensor: int,
    step: int,
    direction: int,
    eps: float,
    pending: Sequence[tuple[int, int, float, float]],
    first: int,
    rows: Rows | None = None,
) -> None:
    """As `passes.perturb`, on one GPU, or in Triton's interpreter on the CPU."""
    made = minus if plus is None else plus
    if made is None and not pending:
        return
    on = parameters.device
    numbers = torch.tensor(
        [*(number for of_step, along, _, _ in pending for number in (of_step, along)), 0], dtype=torch.int64, device=on
    )
    factors = torch.tensor(
        [*(factor for _, _, scale, keep in pending for factor in (scale, keep)), 0.0], dtype=torch.float32, device=on
    )
    elements = parameters.numel()
    grid = (triton.cdiv(triton.cdiv(elements, 64) * 16, COUNTERS),)
    _pass[grid](
        parameters, parameters if plus is None else plus, parameters if minus is None else minus, numbers, factors,
        numbers if rows is None else rows.numbers, elements, first // 4, 1 if rows is None else rows.elements // 64,
        seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, tensor, step, direction, eps, len(pending),
        plus is not None, minus is not None, rows is not None, COUNTERS, enable_fp_fusion=False,
    )  # fmt: skip
