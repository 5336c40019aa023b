"""What the executor and the profiler ask of a device, whichever it is.

Owns the words between them and nothing that does anything: `device.py` is a GPU, `emulated.py` is made of DRAM.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from ssdplan.plans.graph.ops import Resource

from .host_arena import HostArena

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Taken:
    """The most bytes of a device that a run has taken, beyond what its libraries keep in any case."""

    reserved: int
    """What torch's allocator held, with what it rounds up and the gaps that it leaves."""
    allocated: int
    """The tensors alone."""


class Device(Protocol):
    """What the executor and the profiler need of a device."""

    kind: str
    index: int
    """Which of several."""
    name: str
    torch_device: torch.device
    reserve_bytes: int
    """What no plan may have of its memory."""

    def memory_bytes(self) -> int: ...
    def keep_to(self, budget_bytes: int) -> None: ...
    def taken(self) -> Taken | None: ...
    def allocate(self, nbytes: int) -> torch.Tensor: ...
    def host_arena(self, nbytes: int) -> HostArena: ...
    def release(self, arena: HostArena) -> None: ...
    def lane(self, resource: Resource) -> contextlib.AbstractContextManager[None]: ...
    def copy_h2d(self, target: torch.Tensor, source: torch.Tensor) -> None: ...
    def copy_d2h(self, target: torch.Tensor, source: torch.Tensor) -> None: ...
    def copy_d2h_gradient(
        self, target: torch.Tensor, source: torch.Tensor, whole: torch.Tensor | None
    ) -> tuple[bool, int]: ...
    def synchronize(self) -> None: ...
    def peak_bytes(self, work: Callable[[], Result]) -> tuple[Result, int]: ...
