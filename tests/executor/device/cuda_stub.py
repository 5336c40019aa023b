"""A stub of torch.cuda: it runs the CUDA device on a processor, to see what that asks of CUDA and what it makes of the
answers.

Tensors that are asked for on a GPU are made in DRAM, and counted as torch's allocator would count them on one; streams
are names, and work on them is done when it is asked for. So it knows nothing of races, and an
event is when it was recorded.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 1 << 20
SEGMENT = 2 * MIB
"""What the allocator takes of the GPU at a time."""
NO_MEMORY = "CUDA out of memory. Tried to allocate {:.2f} MiB. GPU 0 has a total capacity of made up."
SUCCESS, LAUNCH = 0, "CUDA error: invalid argument"


@dataclass
class Stub:
    """What the GPUs are, and what became of them."""

    names: tuple[str, ...] = ("Made 100", "Made 200")
    total: int = 4 << 30
    others: int = 0
    """Bytes that other programs take."""
    registering: int = SUCCESS
    """What cudaHostRegister and cudaHostUnregister return from now on."""
    unregistering: int = SUCCESS
    has_last_error: bool = True
    """Whether this torch has cudaGetLastError."""
    fails: dict[str, RuntimeError] = field(default_factory=dict)
    """Name of an operator of torch -> what its next call raises."""
    fraction: float = 1.0
    device: int = -1
    stream: str = "default"
    launched: list[tuple[str, str]] = field(default_factory=list)
    """Every operator that worked on the GPU's tensors: its stream and name."""
    made: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Every tensor that was asked for on the GPU: its stream and shape."""
    settings: list[str] = field(default_factory=list)
    last_error: int = SUCCESS
    registered: set[int] = field(default_factory=set)
    live: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)
    peak: tuple[int, int] = (0, 0)
    waits: list[tuple[str, str]] = field(default_factory=list)
    """Every wait of a stream for what another had then."""
    slept: int = 0
    """Waits of the host for an event by sleep."""
    spun: int = 0
    """And by spinning, or for a stream."""
    counting: threading.Lock = field(default_factory=threading.Lock)

    def allocated(self) -> int:
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self.live.values())

    def reserved(self) -> int:
        return -(-self.allocated() // SEGMENT) * SEGMENT

    def take(self, storage: Any) -> None:
        after = self.allocated() + storage.nbytes()
        if after > min(self.fraction * self.total, self.total - self.others):
            raise torch.OutOfMemoryError(NO_MEMORY.format(storage.nbytes() / MIB))
        self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = (max(self.peak[0], self.allocated()), max(self.peak[1], self.reserved()))

    def launch(self, name: str) -> None:
        """What every kernel does: raise what a call before it left, and take it away."""
        self.launched.append((self.stream, name))
        if self.last_error:
            self.last_error = SUCCESS
            raise RuntimeError(LAUNCH)
        if error := self.fails.pop(name, None):
            raise error

    def register(self, address: int, nbytes: int, flags: int) -> int:
        self.last_error = self.last_error or self.registering
        if not self.registering:
            self.registered.add(address)
        return self.registering

    def unregister(self, address: int) -> int:
        self.registered.remove(address)
        self.last_error = self.last_error or self.unregistering
        return self.unregistering

    def forget(self) -> int:
        found, self.last_error = self.last_error, SUCCESS
        return found

    @contextlib.contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.stream = self.stream, stream.name
        try:
            yield
        finally:
            self.stream = before

    def functions(self) -> dict[str, Any]:
        """What stands in torch.cuda's place."""
        names = iter(["h2d", "d2h", "compute", "clock"] * 8)

        def spin() -> None:
            self.spun += 1

        def stream(name: str) -> SimpleNamespace:
            def wait_event(event: _Event) -> None:
                assert event.stream, "an event that nobody recorded holds nothing back"
                self.waits.append((name, event.stream))

            return SimpleNamespace(name=name, synchronize=spin, wait_event=wait_event)

        cudart = SimpleNamespace(
            cudaHostRegister=self.register,
            cudaHostUnregister=self.unregister,
            cudaGetErrorString=lambda status: f"made error {int(status)}",
            **({"cudaGetLastError": self.forget} if self.has_last_error else {}),
        )
        generators = tuple(torch.Generator() for _ in self.names)
        return {
            "is_available": lambda: bool(self.names),
            "device_count": lambda: len(self.names),
            "get_device_properties": lambda i: SimpleNamespace(
                name=self.names[i], total_memory=self.total, major=9, minor=0
            ),
            "init": lambda: None,
            "default_generators": generators,
            "set_device": lambda device: setattr(self, "device", device.index),
            "current_device": lambda: self.device,
            "Stream": lambda device: stream(next(names)),
            "stream": self.on,
            "Event": lambda **how: _Event(self, **how),
            "current_stream": lambda: stream(self.stream),
            "synchronize": lambda device: None,
            "cudart": lambda: cudart,
            "empty_cache": lambda: None,
            "mem_get_info": lambda device: (self.total - self.others - self.reserved(), self.total),
            "memory_allocated": lambda device: self.allocated(),
            "memory_reserved": lambda device: self.reserved(),
            "max_memory_allocated": lambda device: max(self.peak[0], self.allocated()),
            "max_memory_reserved": lambda device: max(self.peak[1], self.reserved()),
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", (self.allocated(), self.reserved())),
            "set_per_process_memory_fraction": lambda fraction, device: setattr(self, "fraction", fraction),
        }


class _Event:
    """A moment of a stream."""

    def __init__(self, stub: Stub, *, enable_timing: bool, blocking: bool = False) -> None:
        assert enable_timing
        self.stub, self.blocking, self.stream, self.moment = stub, blocking, "", 0.0

    def record(self, stream: SimpleNamespace) -> None:
        self.stream, self.moment = stream.name, time.perf_counter()

    def synchronize(self) -> None:
        assert self.stream
        with self.stub.counting:
            if self.blocking:
                self.stub.slept += 1
            else:
                self.stub.spun += 1

    def elapsed_time(self, other: _Event) -> float:
        assert self.stream and other.stream
        return 1e3 * (other.moment - self.moment)


def _elsewhere(value: Any) -> Any:
    """The processor for a GPU."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class _InDram(TorchFunctionMode):
    """What is asked for on a GPU is made in DRAM, and counted."""

    def __init__(self, stub: Stub) -> None:
        super().__init__()
        self._stub = stub

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = any(isinstance(v, torch.device) and v.type == "cuda" for v in (*args, *kwargs.values()))
        given = {name: _elsewhere(value) for name, value in kwargs.items() if name != "pin_memory"}
        result = func(*map(_elsewhere, args), **given)
        if asked and isinstance(result, torch.Tensor):
            self._stub.made.append((self._stub.stream, tuple(result.shape)))
            self._stub.take(result.untyped_storage())
        return result


class _Launches(TorchDispatchMode):
    """Every operator is a kernel: what it makes of tensors that are on the GPU is on the GPU too."""

    def __init__(self, stub: Stub) -> None:
        super().__init__()
        self._stub = stub

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [value.untyped_storage()._cdata for value in args if isinstance(value, torch.Tensor)]
        on_gpu = any(key in self._stub.live for key in given)
        if on_gpu:
            self._stub.launch(func._opname)
        result = func(*args, **(kwargs or {}))
        if on_gpu and isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in self._stub.live:
            self._stub.take(result.untyped_storage())
        return result


@contextlib.contextmanager
def stubbed(patch: Callable[[object, str, object], None], stub: Stub) -> Iterator[Stub]:
    """torch.cuda is the stub within the block; `patch` sets attributes, and sets them back."""
    for name, function in stub.functions().items():
        patch(torch.cuda, name, function)
    patch(torch._C, "_accelerator_setAllocatorSettings", stub.settings.append)
    with _Launches(stub), _InDram(stub):
        yield stub
