"""The device: a GPU's memory and streams, or an emulated one with a memory and copies of its own.

The only module of the project that touches CUDA. It owns where arenas live, how bytes cross the link, and on which
stream an op works; it knows nothing of layers, states or plans.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ssdplan import native
from ssdplan.executor.tensors import tensors_in
from ssdplan.plans.errors import MemoryBudgetError, UsageError
from ssdplan.plans.schedule import Resource

Result = TypeVar("Result")


class HostArena:
    """One block of page-locked host memory and its bytes as a torch tensor. Close it when no view is left."""

    def __init__(self, nbytes: int, *, lock: bool = True) -> None:
        try:
            self._arena = native.Arena(nbytes, lock=lock)
        except MemoryError as error:
            raise MemoryBudgetError(f"host memory: cannot allocate an arena of {nbytes} bytes: {error}") from error
        self.bytes: torch.Tensor = torch.from_dlpack(self._arena)
        self.address = self._arena.address
        self.nbytes = nbytes
        self.note = "" if self._arena.locked or not lock else self._arena.lock_error

    def close(self) -> None:
        """Give the memory back: now, or when the last view is dropped."""
        del self.bytes
        if not self._arena.exports:
            self._arena.close()


class Device(Protocol):
    """What the executor and the profiler need of a device."""

    kind: str
    name: str
    torch_device: torch.device

    def memory_bytes(self) -> int: ...
    def allocate(self, nbytes: int) -> torch.Tensor: ...
    def host_arena(self, nbytes: int) -> HostArena: ...
    def release(self, arena: HostArena) -> None: ...
    def lane(self, resource: Resource) -> contextlib.AbstractContextManager[None]: ...
    def copy_h2d(self, target: torch.Tensor, source: torch.Tensor) -> None: ...
    def copy_d2h(self, target: torch.Tensor, source: torch.Tensor) -> None: ...
    def copy_d2h_gradient(self, target: torch.Tensor, source: torch.Tensor) -> tuple[bool, int]: ...
    def synchronize(self) -> None: ...
    def peak_bytes(self, work: Callable[[], Result]) -> tuple[Result, int]: ...


_ROW = 2048
"""Elements: ranges of gradients begin and end at multiples of it."""
_ROWS_AT_ONCE = 512
"""Rows folded at once, in 4 MiB beside them, or 8 where fp32 is not enough."""
_UNIT = 1074
"""Sums of squares are integers in units of two to the minus this: every float64 is such an integer."""


class EmulatedDevice:
    """A device made of DRAM: an arena of its own and real copies over a link of one core."""

    kind = "cpu"
    name = "emulated device in DRAM"

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def memory_bytes(self) -> int:
        """Half of what DRAM is free now: the other half is the host's."""
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        return available // 2

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of the device's memory, kept until the process ends or the tensor is dropped."""
        return torch.from_dlpack(native.Arena(nbytes, lock=False))

    def host_arena(self, nbytes: int) -> HostArena:
        return HostArena(nbytes)

    def release(self, arena: HostArena) -> None:
        arena.close()

    @contextlib.contextmanager
    def lane(self, resource: Resource) -> Iterator[None]:
        yield

    def copy_h2d(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """uint8 to uint8, equally long, contiguous; done when it returns. Lets other threads run."""
        native.copy(target.data_ptr(), source.data_ptr(), source.nbytes)

    copy_d2h = copy_h2d

    def copy_d2h_gradient(self, target: torch.Tensor, source: torch.Tensor) -> tuple[bool, int]:
        """Copy fp32 to fp32; returns (finite, sum of squares), gathered as the bytes pass (MemAscend 4.4).

        A whole number of 2048 elements. The sum is an integer in units of 2**-1074; those of such ranges add up to the
        whole's, in any order.
        """
        return native.copy_statistics(target.data_ptr(), source.data_ptr(), source.numel())

    def synchronize(self) -> None:
        pass

    def peak_bytes(self, work: Callable[[], Result]) -> tuple[Result, int]:
        """Run `work`; returns its result and the most bytes that torch held during it beyond those of before."""
        with _LiveBytes() as live:
            result = work()
        return result, live.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that torch makes while it is active, for as long as the storage lives."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((*args, *(kwargs or {}).values()))}
        made = {}
        for tensor in tensors_in((result,)):
            storage = tensor.untyped_storage()
            if tensor.device.type != "meta" and storage._cdata not in given:
                made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if made:  # else no more lives than before
            self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()} | made
            self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


def squares_of_rows(gradient: torch.Tensor) -> int | None:
    """The sum of squares of fp32 [rows * 2048] where it lies, in units of 2**-1074; None when an element is not finite.

    A row's sum is rounded to about 1e-7 of itself (squares that are none in fp32 count as zero) and depends on that row
    alone; rows add up exactly. So a state's sum is the same however it is cut into ranges, and so is what is clipped by
    it.
    """
    rows = gradient.view(-1, _ROW)
    sums = _row_sums(rows, torch.float32)
    if not sums.isfinite().all():  # an element is not, or the square of one is none of fp32's numbers
        sums = torch.where(sums.isfinite(), sums, _row_sums(rows, torch.float64))
        if not sums.isfinite().all():
            return None
    # Each sum as an integer of 31 bits times a power of two; eight neighbouring powers share an integer of 64 bits.
    mantissas, exponents = torch.frexp(sums)
    powers = exponents.long() + (_UNIT - 31)
    shared = torch.zeros(256, dtype=torch.int64)
    shared.index_add_(0, powers // 8, (mantissas * (1 << 31)).long() << powers % 8)
    return sum(part << 8 * place for place, part in enumerate(shared.tolist()))


def _row_sums(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of squares of each row, computed in `dtype`, as float64 on host.

    Rows are folded in halves, one operation an element: a GPU's own reductions add in an order that depends on how many
    rows they are given.
    """
    sums = []
    for part in rows.split(_ROWS_AT_ONCE):
        half = _ROW // 2
        folded = part[:, :half].to(dtype, copy=True).square_()
        folded.add_(part[:, half:].to(dtype, copy=True).square_())
        while half > 1:
            half //= 2
            folded = folded[:, :half].add_(folded[:, half:])
        sums.append(folded[:, 0].to(torch.float64, copy=True))
    return torch.cat(sums).cpu()


class CudaDevice:
    """A GPU: one stream for each of compute and the two link directions, host memory registered for them."""

    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no GPU here; use --device cpu, or a CUDA build of torch")
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.name = torch.cuda.get_device_name(index)
        self._streams = {name: torch.cuda.Stream(self.torch_device) for name in ("h2d", "d2h", "compute")}

    def memory_bytes(self) -> int:
        torch.cuda.empty_cache()  # what the allocator keeps for later is free too
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryBudgetError(
                f"device memory: cannot allocate an arena of {nbytes} bytes on {self.name}"
            ) from error

    def host_arena(self, nbytes: int) -> HostArena:
        """Page-locked by registering it, which costs no byte more than asked for (MemAscend 4.3)."""
        arena = HostArena(nbytes, lock=False)
        status = torch.cuda.cudart().cudaHostRegister(arena.address, nbytes, 0)
        if int(status) != 0:
            arena.note = f"cudaHostRegister failed with {status}; copies go through pageable memory"
        return arena

    def release(self, arena: HostArena) -> None:
        self.synchronize()
        if not arena.note:
            torch.cuda.cudart().cudaHostUnregister(arena.address)
        arena.close()

    @contextlib.contextmanager
    def lane(self, resource: Resource) -> Iterator[None]:
        """Work of `resource` in the calling thread goes to its stream."""
        torch.cuda.set_device(self.torch_device)
        stream = self._streams.get(resource)
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()

    def copy_h2d(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    copy_d2h = copy_h2d

    def copy_d2h_gradient(self, target: torch.Tensor, source: torch.Tensor) -> tuple[bool, int]:
        """As the emulated device's. The GPU sums before the bytes leave it, so that the host reads them no second time:
        in a precision of its own, good to about 1e-6.
        """
        squares = squares_of_rows(source)
        self.copy_d2h(target, source)
        return squares is not None, squares or 0

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def peak_bytes(self, work: Callable[[], Result]) -> tuple[Result, int]:
        """As the emulated device's, but what the caching allocator takes of the GPU for it from an empty cache: live
        tensors, and with them what it rounds up and what lies broken between them."""
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        allocated = torch.cuda.memory_allocated(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        result = work()
        torch.cuda.synchronize(self.torch_device)
        # A part of a block that was there already is taken without more being reserved: then more is allocated.
        reserved = torch.cuda.max_memory_reserved(self.torch_device) - reserved
        allocated = torch.cuda.max_memory_allocated(self.torch_device) - allocated
        return result, max(reserved, allocated, 0)


def open_device(kind: str) -> Device:
    """`cpu` or `cuda`. Raises UsageError for another word, or where there is no GPU."""
    if kind == "cpu":
        return EmulatedDevice()
    if kind == "cuda":
        return CudaDevice()
    raise UsageError(f"--device {kind}: must be cpu or cuda")


def generators(device: torch.device) -> list[torch.Generator]:
    """What operations on a device draw random numbers from where no generator is named: the processor's, and the GPU's.

    Seeding them is torch.manual_seed without the kinds of devices that are not here: for each of those it keeps a
    formatted stack, 0.7 ms a call.
    """
    found = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # the list is filled by that
        index = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[index])
    return found


def cuda_of_torch() -> str:
    """The version of CUDA that torch was built for; empty: none."""
    return torch.version.cuda or ""


def visible_gpus() -> list[tuple[str, int, tuple[int, int]]]:
    """The GPUs that torch can use: name, bytes of memory, compute capability."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(each.name, each.total_memory, (each.major, each.minor)) for each in found]
