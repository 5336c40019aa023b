"""One pass of the zeroth-order optimizer over a range of a tensor: on host by the native kernel, on a GPU by a Triton
kernel, or by torch where there is no Triton.

Owns that all have the same bits: `native/src/zeroth_order.hpp` defines a direction, and each line here is one of its
operations in fp32 on whole tensors, so that nothing is fused and each rounds to nearest even. The caller says what is
pending.
"""

import importlib.util
from collections.abc import Iterator, Sequence

import torch

from ssdplan import native

from ..device.tensors import DTYPE_NAMES
from .rows import Rows

Pending = tuple[int, int, float, float]
"""Of one update: its step, the number of its direction, scale and keep: p = keep p - scale z."""
GROUP, LANES = 64, 16
"""Elements whose directions are made at once, and those of them that one word of each counter serves."""
PIECE = 1 << 22
"""Elements at once where torch makes directions: about 40 bytes each beside them."""
_WORD = 0xFFFFFFFF
_SEED = 0xFFFFFFFFFFFFFFFF
"""A seed below zero is its 64 bits."""
_ROUNDS = 10


def perturb(
    parameters: torch.Tensor,
    plus: torch.Tensor | None,
    minus: torch.Tensor | None,
    *,
    seed: int,
    tensor: int,
    step: int,
    direction: int,
    eps: float,
    pending: Sequence[Pending] = (),
    threads: int = 1,
    first: int = 0,
    rows: Rows | None = None,
) -> None:
    """Make the updates that are pending, one after the other, in `parameters`; then `plus` and `minus`, as far as they
    are wanted, from these: p + eps z and p - eps z along a direction of the step.

    All are flat, contiguous, of one dtype (fp32, bf16 or fp16), equally long, and begin at element `first` of the
    tensor (elsewhere than on host a multiple of 64), or are `rows` of it. Parameters may also be fp32 masters: what is
    perturbed is each rounded to the dtype of `plus` and `minus`. `seed`: 64 bits, with or without a sign. `tensor`: 32
    bits that tell it from others. Each update is rounded to the dtype (MeZO; ZO-Offloading section 2.3).
    """
    if parameters.device.type != "cpu":
        seed &= _SEED
        if importlib.util.find_spec("triton") is not None:
            from .passes_triton import perturb as by_triton

            by_triton(parameters, plus, minus, seed, tensor, step, direction, eps, pending, first, rows)
            return
        _perturb(parameters, plus, minus, seed, tensor, step, direction, eps, pending, first, rows)
        return
    if rows is not None:
        for part, first in _ranges(rows):
            above, below = (None if side is None else side[part] for side in (plus, minus))
            perturb(
                parameters[part],
                above,
                below,
                seed=seed,
                tensor=tensor,
                step=step,
                direction=direction,
                eps=eps,
                pending=pending,
                threads=threads,
                first=first,
            )
        return
    form, elements = DTYPE_NAMES[parameters.dtype], parameters.numel()
    made = minus if plus is None else plus
    if made is None:
        if pending:
            native.zeroth_order_update(
                parameters.data_ptr(),
                form,
                elements,
                seed=seed & _SEED,
                tensor=tensor,
                pending=list(pending),
                first=first,
                threads=threads,
            )
        return
    native.zeroth_order(
        parameters.data_ptr(),
        0 if plus is None else plus.data_ptr(),
        0 if minus is None else minus.data_ptr(),
        DTYPE_NAMES[made.dtype],
        elements,
        seed=seed & _SEED,
        tensor=tensor,
        step=step,
        eps=eps,
        direction=direction,
        pending=list(pending),
        masters=None if made.dtype == parameters.dtype else form,
        first=first,
        threads=threads,
    )


def _ranges(rows: Rows) -> Iterator[tuple[slice, int]]:
    """Rows that follow each other in the tensor too, as few ranges of what lies side by side; and where each begins in
    the tensor."""
    numbers, each, start = rows.numbers.tolist(), rows.elements, 0
    for stop in range(1, len(numbers) + 1):
        if stop == len(numbers) or numbers[stop] != numbers[stop - 1] + 1:
            yield slice(start * each, stop * each), numbers[start] * each
            start = stop


def _perturb(
    parameters: torch.Tensor,
    plus: torch.Tensor | None,
    minus: torch.Tensor | None,
    seed: int,
    tensor: int,
    step: int,
    direction: int,
    eps: float,
    pending: Sequence[Pending],
    begin: int = 0,
    rows: Rows | None = None,
) -> None:
    """`perturb` by torch alone, on any device, piece by piece."""
    for start in range(0, parameters.numel(), PIECE):
        piece, first = slice(start, start + PIECE), begin + start
        p = parameters[piece]
        count = p.numel()
        for of_step, number, scale, keep in pending:
            moved = normals(count, first, seed, tensor, of_step, number, p.device, rows).mul_(_fp32(scale))
            p.copy_((p.float() * _fp32(keep)).sub_(moved))
        made = minus if plus is None else plus
        if made is None:
            continue
        rounded = p.to(made.dtype).float()
        difference = normals(count, first, seed, tensor, step, direction, p.device, rows).mul_(_fp32(eps))
        if plus is not None:
            plus[piece].copy_(rounded + difference)
        if minus is not None:
            minus[piece].copy_(rounded - difference)


def normals(
    count: int,
    first: int,
    seed: int,
    tensor: int,
    step: int,
    direction: int,
    device: torch.device,
    rows: Rows | None = None,
) -> torch.Tensor:
    """fp32 [count]: elements `first` (a multiple of 64) and on of a direction, by Philox4x32-10 and Box and Muller; of
    `rows` those of them side by side."""
    assert first % GROUP == 0
    groups = -(-count // GROUP)
    counter = torch.arange(groups * LANES, dtype=torch.int64, device=device).add_(first // GROUP * LANES)
    if rows is not None:
        of_row = rows.elements // GROUP * LANES
        counter = rows.numbers[counter // of_row] * of_row + counter % of_row
    words = [
        counter & _WORD,
        (counter >> 32) | (direction << 16),
        torch.full_like(counter, tensor),
        torch.full_like(counter, step),
    ]
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(_ROUNDS):
        first_product, second_product = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (second_product >> 32 & _WORD) ^ words[1] ^ key[0],
            second_product & _WORD,
            (first_product >> 32 & _WORD) ^ words[3] ^ key[1],
            first_product & _WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    each = [number.view(groups, 1, LANES) for pair in (0, 2) for number in _box_muller(words[pair], words[pair + 1])]
    return torch.cat(each, dim=1).view(-1)[:count]


def _box_muller(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two normals of two words, as `box_muller` of native/src/zeroth_order.cpp."""
    u = (a >> 1).float().add_(0.5).mul_(2.0**-31)
    r = _logarithm(u).mul_(-2.0).double().sqrt_().float()  # as fp32's exact root: torch's own in fp32 is not everywhere
    quarter = ((b + 0x20000000) & _WORD) >> 30
    turned = (b - (quarter << 30)) & _WORD
    x = torch.where(turned >= 1 << 31, turned - (1 << 32), turned).float().mul_(_fp32(1.4629180793e-9))
    square = x * x
    sine = _polynomial(square, (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))
    sine = sine.mul_(square).mul_(x).add_(x)
    cosine = _polynomial(square, (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2))
    cosine = cosine.mul_(square).mul_(square).sub_(square * 0.5).add_(1.0)
    swapped = quarter & 1 != 0
    first, second = torch.where(swapped, sine, cosine), torch.where(swapped, cosine, sine)
    first = torch.where((quarter + 1) & 2 != 0, -first, first)
    second = torch.where(quarter & 2 != 0, -second, second)
    return first.mul_(r), second.mul_(r)


def _logarithm(u: torch.Tensor) -> torch.Tensor:
    """`logarithm` of native/src/zeroth_order.cpp."""
    offset = u.view(torch.int32) - 0x3F3504F3
    exponent = (offset >> 23).float()
    x = ((offset & 0x007FFFFF) + 0x3F3504F3).view(torch.float32) - 1.0
    square = x * x
    factors = (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
    y = _polynomial(x, factors).mul_(x).mul_(square)
    y.sub_(exponent * _fp32(2.12194440e-4)).sub_(square * 0.5)
    return y.add_(x).add_(exponent.mul_(0.693359375))


def _polynomial(x: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    """By Horner's rule, the highest power's factor first, each product and sum rounded to fp32."""
    y = torch.full_like(x, _fp32(factors[0]))
    for factor in factors[1:]:
        y.mul_(x).add_(_fp32(factor))
    return y


def _fp32(value: float) -> float:
    """The number of fp32 that is nearest, which torch then takes as it is."""
    return float(torch.tensor(value, dtype=torch.float32))
