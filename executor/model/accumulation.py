"""Accumulation: a parameter's gradient, in the model's dtype, added to its place in the fp32 sum of a state's.

Owns that one addition. Who finds a gradient, autograd or a block's explicit graph, hands it over as soon as it is
there.
"""

from collections.abc import Callable

import torch

from ssdplan import native

from ..device.tensors import DTYPE_NAMES


def take_from_leaf(take: Callable[[torch.Tensor], None], leaf: torch.Tensor) -> None:
    """A hook of autograd's: `take` a leaf's gradient, and drop it."""
    assert leaf.grad is not None
    take(leaf.grad)
    leaf.grad = None


def adder(place: torch.Tensor, pending: set[str], name: str, *, begins: bool) -> Callable[[torch.Tensor], None]:
    """Takes a gradient to its fp32 `place`: the first of a fresh one whatever is there, others on top of it."""

    def add(found: torch.Tensor) -> None:
        gradient = found.reshape(-1)
        begin = begins and name in pending
        if gradient.device.type == "cpu" and gradient.dtype in DTYPE_NAMES:
            assert gradient.numel() == place.numel() and place.is_contiguous() and gradient.is_contiguous()
            native.accumulate(
                place.data_ptr(),
                gradient.data_ptr(),
                DTYPE_NAMES[gradient.dtype],
                gradient.numel(),
                begin=begin,
                threads=torch.get_num_threads(),
            )
        elif begin:
            place.copy_(gradient)
        else:
            place.add_(gradient)
        pending.discard(name)

    return add
