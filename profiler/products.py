"""Measures what formats cost the processor in products of matrices, beside fp32: without instructions for a format a
library takes many times as long, and tells nobody.

Owns the shapes and the turns. A model's own layers `model` measures.
"""

from collections.abc import Callable

import torch

from ssdplan.plans.documents.state_layout import Precision

from .clock import REAL

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
