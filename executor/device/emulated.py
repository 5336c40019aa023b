"""The emulated device: a memory and copies of its own, all in DRAM.

Owns what stands in a GPU's place where there is none, and what torch's tensors take there.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ssdplan import native
from ssdplan.plans.graph.ops import Resource

from .host_arena import HostArena
from .interface import Action, Begun
from .tensors import tensors_in

Result = TypeVar("Result")


class EmulatedDevice:
    """A device made of DRAM: an arena of its own and real copies over a link of one core."""

    kind = "cpu"
    index = 0
    name = "emulated device in DRAM"
    reserve_bytes = 0

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def memory_bytes(self) -> int:
        """Half of what DRAM is free now: the other half is the host's."""
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        return available // 2

    def keep_to(self, budget_bytes: int) -> None:
        """Nothing of torch's bounds what its tensors take of DRAM."""

    def taken(self) -> None:
        """Nobody counts it: `peak_bytes` does, op by op."""

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

    def submit(self, resource: Resource, action: Action, after: Sequence[Begun]) -> None:
        """What a lane does, the thread that calls does: it has ended when this returns."""
        rest = action()
        if rest is not None:
            rest()

    def copy_h2d(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """uint8 to uint8, equally long, contiguous; done when it returns. Lets other threads run."""
        native.copy(target.data_ptr(), source.data_ptr(), source.nbytes)

    copy_d2h = copy_h2d

    def copy_d2h_gradient(
        self, target: torch.Tensor, source: torch.Tensor, whole: torch.Tensor | None
    ) -> Callable[[], tuple[bool, int]]:
        """Copy a range of a gradient, fp32 to fp32; what it returns says, once the copy has ended, (finite, sum of
        squares), gathered as the bytes pass (MemAscend 4.4).

        A whole number of grains (`state_layout.GRAIN`). The sum is an integer in units of 2**-1074; the sums of all
        ranges add up to the gradient's, in any order. `whole`: the gradient, with the first of its ranges that a step
        copies; None with the others.
        """
        found = native.copy_statistics(target.data_ptr(), source.data_ptr(), source.numel())
        return lambda: found

    def squares(self, gradient: torch.Tensor, threads: int) -> Callable[[], tuple[bool, int]]:
        """(finite, sum of squares) of a gradient where it lies, as `copy_d2h_gradient` says them."""
        found = native.gradient_statistics(gradient.data_ptr(), gradient.numel(), threads=threads)
        return lambda: found

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
            if storage.device.type != "meta" and storage._cdata not in given:  # of a tracing's fakes too
                made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if made:  # else no more lives than before
            self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()} | made
            self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result
