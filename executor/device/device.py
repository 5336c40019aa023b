"""A GPU: its memory and its streams, and which device a command means.

The only module of the project that touches CUDA. It owns how bytes cross the link, on which stream an op works, how a
GPU's libraries are set up so that they give the same bits twice, and what of its memory is left; it knows nothing of
layers, states or plans.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch

from ssdplan.plans.errors import MemoryBudgetError, MismatchError, SsdplanError, UsageError, first_line
from ssdplan.plans.graph.ops import Resource
from ssdplan.plans.units import format_bytes

from .emulated import EmulatedDevice
from .host_arena import HostArena
from .interface import Action, Begun, Device, Rest, Taken
from .squares import row_sums, summed

Result = TypeVar("Result")

RESERVE_BYTES, RESERVE_SHARE = 512 << 20, 0.02
"""Of a GPU's memory, whichever is more, no plan may have: for the code of kernels, which is loaded when they first run,
for what sums gradients beside the arena, for segments that the allocator cannot give back, and for what a desktop
draws. Half of it is for this process, half for others."""
_WORKSPACES = (":4096:8", ":16:8")
"""Of cuBLAS, with which it gives the same bits twice, as NVIDIA names them. The first is 32 MiB for each thread and
stream on every GPU, which is what torch would take on one of compute capability 9.0."""
_TF32 = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
_NO_MEMORY = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "when calling `cublasCreate",
    "when calling `cublasLtCreate",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""What CUDA and its libraries say where torch's allocator is not the one that finds no memory."""
_NO_SAME_BITS = re.compile(r"(\S+) does not have a deterministic implementation")
_WANTED = re.compile(r"Tried to allocate ([\d.]+ \w+)")


ANCHORED_SECONDS = 10.0
"""The longest for which one moment tells when a GPU's events were: they count milliseconds in 24 bits from there."""


class CudaDevice:
    """A GPU: one stream for each of compute and the two link directions, host memory registered for them.

    Opening one settles how this process computes on GPUs (`_settle`), and lets the libraries take what they keep for
    the thread that opens it, which is to be the thread of compute: so nothing that is measured later has it in it.
    """

    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        """Raises UsageError where torch does not see that GPU, MemoryBudgetError where no memory is left on it."""
        if torch.cuda.is_available():
            _settle()
        gpus = visible_gpus()
        if index >= len(gpus):
            raise UsageError(f"--device cuda:{index}: {_what_there_is(gpus)}")
        self.index = index
        self.torch_device = torch.device("cuda", index)
        self.name, self._total, _ = gpus[index]
        self.reserve_bytes = max(RESERVE_BYTES, int(self._total * RESERVE_SHARE))
        self._budget = 0
        self._libraries = Taken(0, 0)
        self._peak = Taken(0, 0)
        self._registered: set[int] = set()
        torch.cuda.set_device(self.torch_device)
        self._streams = {name: torch.cuda.Stream(self.torch_device) for name in ("h2d", "d2h", "compute")}
        self._clock = torch.cuda.Stream(self.torch_device)
        self._anchor = self._anchored()
        with self.lane("compute"):
            self._warm()
        self.keep_to(self.memory_bytes())

    def _warm(self) -> None:
        """A product of matrices forward and backward: cuBLAS keeps a workspace for each thread and stream that it ever
        works on, and the backward runs in a thread of autograd's own."""
        for dtype in (torch.float32, torch.bfloat16):
            inputs, weights = (torch.zeros(64, 64, dtype=dtype, device=self.torch_device) for _ in range(2))
            bias = torch.zeros(64, dtype=dtype, device=self.torch_device)
            with torch.enable_grad():
                leaves = [tensor.requires_grad_() for tensor in (inputs, weights, bias)]
                torch.nn.functional.linear(*leaves).sum().backward()

    def memory_bytes(self) -> int:
        """What a plan may have by default: what is free now, without the reserve."""
        torch.cuda.empty_cache()  # what the allocator keeps for later is free too
        return max(int(torch.cuda.mem_get_info(self.torch_device)[0]) - self.reserve_bytes, 0)

    def keep_to(self, budget_bytes: int) -> None:
        """From here on torch takes no more than that and half of the reserve, beyond what libraries keep and what this
        process has already, and what is taken is counted anew. What does not fit is a MemoryBudgetError, and nothing of
        others' memory is taken for it."""
        torch.cuda.empty_cache()
        self._budget = budget_bytes
        self._libraries = Taken(
            torch.cuda.memory_reserved(self.torch_device), torch.cuda.memory_allocated(self.torch_device)
        )
        self._peak = Taken(0, 0)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        most = self._libraries.reserved + budget_bytes + self.reserve_bytes // 2
        torch.cuda.set_per_process_memory_fraction(min(most / self._total, 1.0), self.torch_device)

    def taken(self) -> Taken:
        """Since `keep_to`, beyond what there was then."""
        now = Taken(
            torch.cuda.max_memory_reserved(self.torch_device) - self._libraries.reserved,
            torch.cuda.max_memory_allocated(self.torch_device) - self._libraries.allocated,
        )
        self._peak = Taken(max(self._peak.reserved, now.reserved), max(self._peak.allocated, now.allocated))
        return self._peak

    def allocate(self, nbytes: int) -> torch.Tensor:
        with self._told(f"an arena of {format_bytes(nbytes)}"):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def host_arena(self, nbytes: int) -> HostArena:
        """Page-locked by registering it, which costs no byte more than asked for (MemAscend 4.3)."""
        arena = HostArena(nbytes, lock=False)
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostRegister(arena.address, nbytes, 0)
        if int(status) == 0:
            self._registered.add(arena.address)
        else:
            self._forget_failure()
            arena.note = (
                f"cudaHostRegister failed: {cudart.cudaGetErrorString(status)}; copies go through pageable memory"
            )
        return arena

    def _forget_failure(self) -> None:
        """The runtime keeps the status of a call that failed, for the thread, and torch would raise it when that next
        launches a kernel."""
        forget = getattr(torch.cuda.cudart(), "cudaGetLastError", None)
        if forget is not None:
            forget()
        else:  # older versions of torch have no name for it, but the launch that raises it also takes it away
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device=self.torch_device).fill_(0.0)
        torch.empty(1, device=self.torch_device).fill_(0.0)  # what is raised now is no registration's

    def release(self, arena: HostArena) -> None:
        """Raises SsdplanError where the driver does not let go of the memory, unless another error is on its way."""
        self.synchronize()
        failure = ""
        if arena.address in self._registered:
            self._registered.remove(arena.address)
            cudart = torch.cuda.cudart()
            status = cudart.cudaHostUnregister(arena.address)
            if int(status) != 0:
                failure = f"{self.name}: cudaHostUnregister failed: {cudart.cudaGetErrorString(status)}"
        if failure:  # the driver still knows these pages: they must not become another's
            if (error := sys.exception()) is None:
                raise SsdplanError(failure)
            error.add_note(failure)
            return
        arena.close()

    @contextlib.contextmanager
    def lane(self, resource: Resource) -> Iterator[None]:
        """Work of `resource` in the calling thread goes to its stream, and has ended when the block ends. Where the GPU
        has too little memory for it, MemoryBudgetError; where it knows no way to the same bits twice, MismatchError."""
        torch.cuda.set_device(self.torch_device)
        stream = self._streams.get(resource)
        if stream is None:
            yield
            return
        with self._told(resource), torch.cuda.stream(stream):
            yield
            stream.synchronize()

    def submit(self, resource: Resource, action: Action, after: Sequence[Begun]) -> "_Work | None":
        """Launch what `action` launches in the stream of `resource`, behind `after`, and wait for none of it. What it
        raises is said as `lane` says it, here and in the wait for its end."""
        torch.cuda.set_device(self.torch_device)
        stream = self._streams.get(resource)
        if stream is None:
            rest = action()
            if rest is not None:
                rest()
            return None
        if time.perf_counter() - self._anchor[1] > ANCHORED_SECONDS:
            self._anchor = self._anchored()
        with self._told(resource), torch.cuda.stream(stream):
            for work in after:
                assert isinstance(work, _Work)
                stream.wait_event(work.ended)
            began = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True, blocking=True)
            began.record(stream)
            rest = action()
            ended.record(stream)
        return _Work(began, ended, rest, self._anchor, partial(self._told, resource))

    def _anchored(self) -> "tuple[torch.cuda.Event, float]":
        """An event that has just been, and when: in a stream of its own, so that it waits for nobody's work."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._clock)
        event.synchronize()
        return event, time.perf_counter()

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Say what CUDA raises in our words, where a user can act on it."""
        try:
            yield
        except RuntimeError as error:
            words = str(error)
            if isinstance(error, torch.OutOfMemoryError) or any(known in words for known in _NO_MEMORY):
                raise MemoryBudgetError(self._out_of_memory(what, error)) from error
            if found := _NO_SAME_BITS.search(words):
                raise MismatchError(
                    f"{found[1]} gives other bits each time on {self.name}, and this torch has no other way of it "
                    "there; train this model with --device cpu"
                ) from error
            raise

    def _out_of_memory(self, what: str, error: RuntimeError) -> str:
        wanted = _WANTED.search(str(error))
        detail = f"{wanted[1]} more were wanted" if wanted else first_line(error)
        budget, reserve = format_bytes(self._budget), format_bytes(self.reserve_bytes)
        return (
            f"device memory: {self.name} has too little for {what}: {detail}; the budget is {budget}, with a reserve "
            f"of {reserve} beyond it; solve again with a smaller --device-memory, or free what other programs take of "
            "the GPU"
        )

    def copy_h2d(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Has ended when the lane's work has."""
        target.copy_(source, non_blocking=True)

    copy_d2h = copy_h2d

    def copy_d2h_gradient(
        self, target: torch.Tensor, source: torch.Tensor, whole: torch.Tensor | None
    ) -> Callable[[], tuple[bool, int]]:
        """As the emulated device's, but the sum of `whole` comes with its first range, and (True, 0) with the others:
        sums take some thirty launches, which cost twenty times what a range's copy takes. The GPU sums where the
        gradient lies, so that the host reads no byte a second time: in a precision of its own, good to about 1e-6. The
        copy goes first, and what launches the sums runs beside it.
        """
        target.copy_(source, non_blocking=True)
        return (lambda: (True, 0)) if whole is None else self.squares(whole, 1)

    def squares(self, gradient: torch.Tensor, threads: int) -> Callable[[], tuple[bool, int]]:
        sums = self._to_host(row_sums(gradient))

        def found() -> tuple[bool, int]:
            squares = summed(gradient, sums)
            return squares is not None, squares or 0

        return found

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that is there when the lane's work has ended."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def peak_bytes(self, work: Callable[[], Result]) -> tuple[Result, int]:
        """As the emulated device's, but what the caching allocator holds for it beyond the tensors of before: live
        tensors, what it rounds up and what lies broken between them. Gaps that were there already count too, for a run
        has gaps of its own; so the figure does not depend on which there happen to be."""
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        self.taken()
        allocated = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        result = work()
        torch.cuda.synchronize(self.torch_device)
        return result, torch.cuda.max_memory_reserved(self.torch_device) - allocated


class _Work:
    """What a stream of a GPU was given."""

    __slots__ = ("_anchor", "_began", "_rest", "_told", "ended")

    def __init__(
        self,
        began: torch.cuda.Event,
        ended: torch.cuda.Event,
        rest: Rest | None,
        anchor: tuple[torch.cuda.Event, float],
        told: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._began, self.ended, self._rest, self._anchor, self._told = began, ended, rest, anchor, told

    @property
    def holds(self) -> bool:
        return self._rest is not None

    def wait(self) -> tuple[float, float]:
        with self._told():
            self.ended.synchronize()
            if self._rest is not None:
                self._rest()
        event, moment = self._anchor
        began, ended = (moment + event.elapsed_time(each) / 1e3 for each in (self._began, self.ended))
        return began, ended


def _settle() -> None:
    """How this process computes on GPUs, before the first thing that it does on one: the same bits each time, fp32 as
    fp32, new memory as it is (every byte that is read was written before), in segments that grow in place. Raises
    UsageError where the environment holds against it."""
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _WORKSPACES:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = _WORKSPACES[0]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    os.environ[_TF32] = "0"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if torch.backends.cuda.matmul.allow_tf32:
        raise UsageError(f"{_TF32} has torch multiply fp32 matrices in TF32, which cannot be undone here; unset it")
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (settings or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def open_device(kind: str, index: int = 0) -> Device:
    """`cpu`, `cuda`, or a GPU by its number, `cuda:1`; without one it is `index`. Raises UsageError for another word,
    or where there is no such GPU, and names what there is; MemoryBudgetError where no memory is left on it."""
    word, colon, number = kind.partition(":")
    if word == "cpu" and not colon:
        return EmulatedDevice()
    if word == "cuda" and (not colon or (number.isascii() and number.isdecimal())):
        return CudaDevice(int(number) if colon else index)
    there = _what_there_is(visible_gpus())
    raise UsageError(f"--device {kind}: must be cpu, cuda or, of several GPUs, cuda:N; {there}")


def _what_there_is(gpus: list[tuple[str, int, tuple[int, int]]]) -> str:
    if not gpus:
        return "torch sees no GPU here; use --device cpu, or a CUDA build of torch"
    return "there is " + ", ".join(f"cuda:{index} ({name})" for index, (name, _, _) in enumerate(gpus))


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
