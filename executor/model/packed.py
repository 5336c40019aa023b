"""Values in int8: symmetric by groups of 64 elements with one fp32 scale each (PyAO section 5.3). It loses digits.

Owns how a value of floating point lies in bytes then, all its int8 first and its scales behind, and what writes and
reads that: the native kernels in DRAM, one Triton kernel on a GPU, which give the same bits. Which values are kept in
int8, and where, it does not know.
"""

import importlib.util
from collections.abc import Sequence

import torch

from ssdplan import native
from ssdplan.plans.errors import UsageError

from ..device.tensors import DTYPES

GROUP = 64
"""8.5 bits an element; one outlier spoils at most 63 others."""
SCALE_BYTES = 4
FORMATS = {dtype: name for name, dtype in DTYPES.items()}


def require_kernels(device: torch.device) -> None:
    """Raise UsageError where nothing here can write and read values in int8 on a device."""
    if device.type != "cpu" and importlib.util.find_spec("triton") is None:
        raise UsageError(
            "activations in int8 on a GPU need the package triton, which is not installed; install it, or profile and "
            "solve without --compression-error and --activations int8"
        )


def packed_bytes(elements: int) -> int:
    """What so many elements take."""
    return _scales_at(elements) + SCALE_BYTES * -(-elements // GROUP)


def pack(place: torch.Tensor, value: torch.Tensor, order: Sequence[int]) -> None:
    """Write `value`, of fp32, bf16 or fp16, into `place`: uint8 of `packed_bytes`, at a multiple of 4 bytes.

    `order`: the dimensions of `value` from the longest stride to the shortest; its elements lie without gaps. A group
    of which an element is not finite comes back as NaN.
    """
    source = value.detach().permute(list(order)).reshape(-1)
    values, scales = _parts(place, source.numel())
    if place.device.type == "cpu":
        addresses = values.data_ptr(), scales.data_ptr(), source.data_ptr()
        form, threads = FORMATS[source.dtype], torch.get_num_threads()
        native.quantize(*addresses, form, source.numel(), group=GROUP, threads=threads)
    else:
        from .packed_triton import quantize

        quantize(values, scales, source, GROUP)


def unpack(place: torch.Tensor, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The value of that shape, order of dimensions and dtype that `pack` wrote into `place`, in memory of its own."""
    flat = torch.empty(torch.Size(shape).numel(), dtype=dtype, device=place.device)
    values, scales = _parts(place, flat.numel())
    if place.device.type == "cpu":
        addresses = values.data_ptr(), scales.data_ptr()
        threads = torch.get_num_threads()
        native.dequantize(flat.data_ptr(), FORMATS[dtype], *addresses, flat.numel(), group=GROUP, threads=threads)
    else:
        from .packed_triton import dequantize

        dequantize(flat, values, scales, GROUP)
    return laid(flat, shape, order)


def laid(flat: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """The tensor of that shape in `flat`, 1-D, its dimensions in `order` from the longest stride to the shortest."""
    sizes = [shape[dimension] for dimension in order]
    return flat.view(sizes).permute([list(order).index(dimension) for dimension in range(len(sizes))])


def _scales_at(elements: int) -> int:
    return -(-elements // SCALE_BYTES) * SCALE_BYTES


def _parts(place: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [elements] and fp32 [groups], as they lie in `place`."""
    scales = place[_scales_at(elements) : packed_bytes(elements)]
    return place[:elements].view(torch.int8), scales.view(torch.float32)
