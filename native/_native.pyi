"""Types of the extension module; the docstrings are in its source, and `help()` shows them."""

import os
from collections.abc import Sequence

class Arena:
    def __init__(self, nbytes: int, *, lock: bool = True) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def locked(self) -> bool: ...
    @property
    def lock_error(self) -> str: ...
    @property
    def huge_bytes(self) -> int: ...
    @property
    def exports(self) -> int: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def close(self) -> None: ...

class Request:
    def wait(self) -> int: ...
    def done(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...

class Engine:
    def __init__(
        self,
        kind: str = "auto",
        *,
        queue_depth: int = 16,
        block_bytes: int = 1048576,
        threads: int = 4,
        polling: str = "auto",
        faults: Sequence[tuple[int, str]] = (),
    ) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def transfers(self) -> int: ...
    def register(self, address: int, nbytes: int) -> str: ...
    def unregister(self, address: int) -> None: ...
    def open(
        self,
        path: str | os.PathLike[str],
        *,
        create_bytes: int | None = None,
        read_only: bool = False,
        descriptor: int | None = None,
    ) -> int: ...
    def size(self, file: int) -> int: ...
    def read(self, segments: Sequence[tuple[int, int, int, int]], *, urgent: bool = True) -> Request: ...
    def write(self, segments: Sequence[tuple[int, int, int, int]], *, urgent: bool = False) -> Request: ...
    def read_summed(
        self, ranges: Sequence[Sequence[tuple[int, int, int, int]]], *, urgent: bool = True
    ) -> list[int]: ...
    def write_summed(
        self, ranges: Sequence[Sequence[tuple[int, int, int, int]]], *, urgent: bool = False
    ) -> list[int]: ...
    def flush(self, file: int) -> None: ...
    def close_file(self, file: int) -> None: ...
    def close(self) -> None: ...

def adamw(
    master: int | None,
    exp_avg: int,
    exp_avg_sq: int,
    gradient: int,
    parameter: int,
    parameter_dtype: str,
    elements: int,
    *,
    residual: int | None = None,
    moment_dtype: str = "fp32",
    scales: Sequence[int] = ...,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    gradient_scale: float = 1.0,
    threads: int = 2,
) -> bool: ...
def adamw_statistics(
    master: int | None,
    exp_avg: int,
    exp_avg_sq: int,
    gradient: int,
    parameter: int,
    parameter_dtype: str,
    elements: int,
    *,
    residual: int | None = None,
    moment_dtype: str = "fp32",
    scales: Sequence[int] = ...,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    gradient_scale: float = 1.0,
    threads: int = 2,
) -> tuple[bool, int]: ...
def adamw_summed(
    master: int | None,
    exp_avg: int,
    exp_avg_sq: int,
    gradient: int,
    parameter: int,
    parameter_dtype: str,
    elements: int,
    *,
    positions: Sequence[int],
    ends: Sequence[int],
    residual: int | None = None,
    moment_dtype: str = "fp32",
    scales: Sequence[int] = ...,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    gradient_scale: float = 1.0,
    threads: int = 2,
) -> tuple[bool, int, list[int], list[int]]: ...
def checksum_of(sum: int, nbytes: int) -> int: ...
def stream_mix(
    master: int,
    exp_avg: int,
    exp_avg_sq: int,
    gradient: int,
    parameter: int,
    elements: int,
    *,
    moment_dtype: str = "fp32",
    threads: int = 2,
) -> None: ...
def gradient_statistics(gradient: int, elements: int, *, threads: int = 1) -> tuple[bool, int]: ...
def copy_statistics(destination: int, source: int, elements: int, *, threads: int = 1) -> tuple[bool, int]: ...
def copy(destination: int, source: int, nbytes: int, *, threads: int = 1) -> None: ...
def accumulate(
    target: int, source: int, source_dtype: str, elements: int, *, begin: bool, threads: int = 1
) -> None: ...
def convert(
    destination: int, destination_dtype: str, source: int, source_dtype: str, elements: int, *, threads: int = 1
) -> None: ...
def is_finite(address: int, elements: int, dtype: str, threads: int = 1) -> bool: ...
def quantize(
    values: int, scales: int, source: int, source_dtype: str, elements: int, *, group: int = 64, threads: int = 1
) -> bool: ...
def dequantize(
    destination: int,
    destination_dtype: str,
    values: int,
    scales: int,
    elements: int,
    *,
    group: int = 64,
    threads: int = 1,
) -> None: ...
def zeroth_order(
    parameters: int,
    plus: int,
    minus: int,
    dtype: str,
    elements: int,
    *,
    seed: int,
    tensor: int,
    step: int,
    eps: float,
    direction: int = 0,
    pending: Sequence[tuple[int, int, float, float]] = (),
    masters: str | None = None,
    first: int = 0,
    threads: int = 1,
) -> None: ...
def zeroth_order_update(
    parameters: int,
    dtype: str,
    elements: int,
    *,
    seed: int,
    tensor: int,
    pending: Sequence[tuple[int, int, float, float]],
    first: int = 0,
    threads: int = 1,
) -> None: ...
def checksum(address: int, nbytes: int, threads: int = 1) -> int: ...
def isa() -> str: ...
