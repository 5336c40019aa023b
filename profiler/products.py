"""Measures how long matrix products in bf16 and fp16 take on the processor, beside fp32: without instructions for a
format a library takes many times as long, and tells nobody.

Owns the shapes and the turns. `model.py` measures a model's own layers.
"""

from collections.abc import Callable, Mapping

import torch

from ssdplan.plans.documents.state_layout import Precision

from .clock import REAL

SLOW_PRODUCTS = 2.0
"""Times fp32's. A format of half the bytes is meant to be the quicker one."""
DEFAULT_PRECISION: Precision = "bf16"
"""What `ssdplan profile` computes in unless told otherwise."""

TOKENS, FEATURES = 64, 768
ROUNDS = 2
"""Each after one that is not timed: libraries make kernels for a shape and format when they first meet it."""
FORMATS: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def product_costs(
    precisions: tuple[Precision, ...] = ("bf16", "fp16"), *, clock: Callable[[], float] = REAL
) -> dict[Precision, float]:
    """Of each of `precisions` what a linear layer's products, forward and backward, take on the processor, as a
    multiple of what they take in fp32: the least of a few rounds in turns. A second, where a format is slow.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that share a busy core wait for each other, whatever the format
    try:
        return _product_costs(precisions, clock)
    finally:
        torch.set_num_threads(threads)


def _product_costs(precisions: tuple[Precision, ...], clock: Callable[[], float]) -> dict[Precision, float]:
    layers = {precision: _Linear(FORMATS[precision]) for precision in ("fp32", *precisions)}
    rounds = [{precision: layer.seconds(clock) for precision, layer in layers.items()} for _ in range(1 + ROUNDS)]
    least = {precision: min(each[precision] for each in rounds[1:]) for precision in layers}
    return {precision: least[precision] / least["fp32"] for precision in precisions}


class _Linear:
    """The three products of one layer; gradients of unit scale are fine in any format."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(TOKENS, FEATURES, generator=generator).to(dtype).requires_grad_()
        self.weight = torch.randn(FEATURES, FEATURES, generator=generator).to(dtype).requires_grad_()
        self.grad = torch.randn(TOKENS, FEATURES, generator=generator).to(dtype)

    def seconds(self, clock: Callable[[], float]) -> float:
        started = clock()
        torch.autograd.grad(torch.nn.functional.linear(self.x, self.weight), (self.x, self.weight), self.grad)
        return clock() - started


def faster_precision(precision: Precision, costs: Mapping[Precision, float]) -> Precision | None:
    """What to compute in instead of `precision`, whose products of matrices are slow on this processor: the faster one
    of bf16 and fp32. None where `precision` is not slow, or no cost of it is known. `costs` are multiples of fp32's."""
    if costs.get(precision, 0.0) < SLOW_PRODUCTS:
        return None
    return "bf16" if precision != "bf16" and costs.get("bf16", SLOW_PRODUCTS) <= 1.0 else "fp32"


def slow_precision(precision: Precision, costs: Mapping[Precision, float]) -> list[str]:
    """What a profile in `precision` says of it: a note where it is slow on this processor, and what is faster."""
    better = faster_precision(precision, costs)
    if better is None:
        return []
    note = f"{precision} is slow on this processor: products of matrices take {times_of_fp32(costs[precision])} as long"
    return [f"{note} as in fp32; --precision {better} is faster here"]


def times_of_fp32(cost: float) -> str:
    """What a format's products take, beside fp32's."""
    return f"{cost:.0f} times" if cost >= 10 else f"{cost:.2g} times"
