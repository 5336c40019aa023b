"""The native core: asynchronous direct I/O, exact page-locked memory, and fused CPU kernels.

`Arena` is one exact, page-locked, huge-page-backed block of host memory. `Engine` moves bytes between such memory and
files or block devices past the page cache, and returns `Request`s; what fails is an `IoError`, of a type of its own
where a caller may act on it. The kernels work on addresses, with the interpreter lock released: `adamw` (bounded by
`stream_mix`), `zeroth_order` and `zeroth_order_update`; `gradient_statistics`, which `adamw_statistics` and
`copy_statistics` take in passing, and `is_finite`; `accumulate`, `convert`, `quantize` and `dequantize`; `copy` and
`checksum`, which `adamw_summed` takes in passing (`checksum_of`). `isa` names their instruction set.

This part knows bytes and addresses only. It never imports torch: tensors and memory meet through DLPack
(`torch.from_dlpack(arena)`) and `tensor.data_ptr()`, and keeping that memory alive is the caller's duty.
"""

from ._native import (
    Arena,
    Engine,
    Request,
    accumulate,
    adamw,
    adamw_statistics,
    adamw_summed,
    checksum,
    checksum_of,
    convert,
    copy,
    copy_statistics,
    dequantize,
    gradient_statistics,
    is_finite,
    isa,
    quantize,
    stream_mix,
    zeroth_order,
    zeroth_order_update,
)
from .errors import DriveError, InvalidRequestError, IoError, LostVolumeError, NoSpaceError

__all__ = [
    "Arena",
    "DriveError",
    "Engine",
    "InvalidRequestError",
    "IoError",
    "LostVolumeError",
    "NoSpaceError",
    "Request",
    "accumulate",
    "adamw",
    "adamw_statistics",
    "adamw_summed",
    "checksum",
    "checksum_of",
    "convert",
    "copy",
    "copy_statistics",
    "dequantize",
    "gradient_statistics",
    "is_finite",
    "isa",
    "quantize",
    "stream_mix",
    "zeroth_order",
    "zeroth_order_update",
]
