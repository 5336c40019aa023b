"""What the executor and the profiler ask of a device, whichever it is.

Owns the words between them and nothing that does anything: `device.py` is a GPU, `emulated.py` is made of DRAM.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from ssdplan.plans.graph.ops import Resource

from .host_arena import HostArena

Result = TypeVar("Result")
Rest = Callable[[], None]
"""What is left to do on host of work whose part on the device has ended."""
Action = Callable[[], Rest | None]
"""Begins work in the lane that it is called in."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The most bytes of a device that a run has taken, beyond what its libraries keep in any case."""

    reserved: int
    """What torch's allocator held, with what it rounds up and the gaps that it leaves."""
    allocated: int
    """The tensors alone."""


class Begun(Protocol):
    """Work that a device has taken and may not have ended."""

    @property
    def holds(self) -> bool:
        """It has a rest on host, and what waits for it waits for that too."""

    def wait(self) -> tuple[float, float]:
        """Sleep until it has ended, then do its rest; called once. Returns when it began and ended on the device, as
        time.perf_counter has it. Raises what it failed with."""


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
    def submit(self, resource: Resource, action: Action, after: Sequence[Begun]) -> Begun | None:
        """Have `action` begin its work in the lane of `resource`, behind what that has already and behind `after`, of
        whichever lanes. None: it has ended, its rest too, as it has in every lane that is none of the device's."""

    def copy_h2d(self, target: torch.Tensor, source: torch.Tensor) -> None: ...
    def copy_d2h(self, target: torch.Tensor, source: torch.Tensor) -> None: ...
    def copy_d2h_gradient(
        self, target: torch.Tensor, source: torch.Tensor, whole: torch.Tensor | None
    ) -> Callable[[], tuple[bool, int]]: ...
    def squares(self, gradient: torch.Tensor, threads: int) -> Callable[[], tuple[bool, int]]:
        """Look at a gradient, fp32, in the device's memory; what it returns says, once the lane's work has ended,
        (finite, sum of squares) as `copy_d2h_gradient` does. `threads`: where it is the processor that looks."""

    def synchronize(self) -> None: ...
    def peak_bytes(self, work: Callable[[], Result]) -> tuple[Result, int]: ...
