"""Operations: what each op of a schedule does with this run's memory, store, layers and optimizer.

Owns the arenas and the binding of a graph's regions to tensors, made once before the first step, so that a step
allocates and computes no addresses. It decides no order; the runners do not know what it does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from ssdplan.native import process
from ssdplan.plans.errors import NumericalError
from ssdplan.plans.profile import Machine, OptimizerStates
from ssdplan.plans.schedule import Backward, Forward, Graph, Op, Region, Schedule, Tier, Transfer, Update

from .device import Device
from .layers import Layers
from .optimizer import AdamW
from .runner import Action
from .store import Store


class Memory:
    """The arenas of a run. `view` gives a region as a tensor; nothing else hands out memory."""

    def __init__(self, schedule: Schedule, device: Device) -> None:
        self._schedule, self._device = schedule, device
        self.host = device.host_arena(max(schedule.arenas["host"], 1))
        self._device_bytes = device.allocate(max(schedule.arenas["device"], 1))
        self.touched: dict[Tier, int] = {"host": 0, "device": 0, "ssd": 0}
        """The highest byte of each arena that was bound; arenas are as large as planned, so it says what is used."""

    def view(self, region: Region, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """The bytes of a host or device region as a 1-D tensor."""
        buffer = self._schedule.buffers[region.buffer]
        start, stop = buffer.offset + region.start, buffer.offset + region.stop
        arena = self.host.bytes if buffer.tier == "host" else self._device_bytes
        self.touched[buffer.tier] = max(self.touched[buffer.tier], stop)
        return arena[start:stop].view(dtype)

    def tier(self, region: Region) -> Tier:
        return self._schedule.buffers[region.buffer].tier

    def store_offset(self, region: Region) -> int:
        """Where an ssd region begins in the store."""
        stop = self._schedule.buffers[region.buffer].offset + region.stop
        self.touched["ssd"] = max(self.touched["ssd"], stop)
        return self._schedule.buffers[region.buffer].offset + region.start

    def close(self) -> None:
        """Give the arenas back; views must be gone."""
        del self._device_bytes
        self._device.release(self.host)


_GIVE_BACK_EVERY = 16
"""Compute ops: often enough that the heap hardly grows, and seldom enough that it costs a few thousandths of them."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the updates of one step use. `step` counts from 1."""

    optimizer: AdamW
    step: int
    gradient_scale: float = 1.0
    """Of delayed updates only: the norm of all gradients is known once none is left to come."""


class Operations:
    """Binds graphs to a run. What the updates of a step use is set by `begin`."""

    def __init__(
        self,
        memory: Memory,
        device: Device,
        store: Store | None,
        layers: Layers,
        machine: Machine,
        dtype: torch.dtype,
        *,
        clip_grad_norm: float | None,
    ) -> None:
        """`clip_grad_norm`: the most that the norm of a step's gradients may be; a plan delays every update then."""
        self._memory, self._device, self._store, self._layers = memory, device, store, layers
        self._threads = machine.update_threads
        self._dtype = dtype
        self._clip_grad_norm = clip_grad_norm
        self._prompt: _Settings | None = None
        self._pending: _Settings | None = None
        self._squares: list[int] = []
        """Of the ranges of the step's gradients, in units of 2**-1074: integers add up alike in any order. A list, as
        two lanes may add to it at once."""
        self._sampled: set[tuple[str, str]] = set()
        self._last, self._since = ("", ""), 0
        self.workspace_bytes = 0
        """The most device memory that the compute of an op has been seen to take."""

    def begin(self, optimizer: AdamW, step: int) -> None:
        """What the prompt updates from here on use (`step` counts from 1); delayed ones use what was set before."""
        self.finish()
        self._prompt = _Settings(optimizer, step)
        self._squares = []

    def finish(self) -> None:
        """From here on delayed updates are those of the step that has just ended, its gradients clipped."""
        self._pending = self._prompt and replace(self._prompt, gradient_scale=self._clipping())

    def _clipping(self) -> float:
        """The factor that clips the step's gradients, as torch.nn.utils.clip_grad_norm_ defines it."""
        if self._clip_grad_norm is None:
            return 1.0
        return min(1.0, self._clip_grad_norm / (self.gradient_norm() + 1e-6))

    def gradient_norm(self) -> float:
        """Of all gradients of the step that has just ended, over all parameters, before any clipping.

        On one device the same bits whatever the residencies, delay and runner.
        """
        return math.sqrt(sum(self._squares) / (1 << 1074))

    def bind(self, graph: Graph) -> list[Action]:
        """One action an op, ready to run any number of times."""
        return [self._bind(op) for op in graph.ops]

    def _bind(self, op: Op) -> Action:
        match op:
            case Transfer(kind="read"):
                return partial(self._storage().read, *self._store_arguments(op.source, op.target))
            case Transfer(kind="write"):
                return partial(self._storage().write, *self._store_arguments(op.target, op.source))
            case Transfer(kind="h2d"):
                return partial(self._device.copy_h2d, self._memory.view(op.target), self._memory.view(op.source))
            case Transfer(kind="d2h"):
                if op.final_gradient:
                    gradient = (self._memory.view(region, torch.float32) for region in (op.target, op.source))
                    return partial(self._take_gradient, *gradient)
                return partial(self._device.copy_d2h, self._memory.view(op.target), self._memory.view(op.source))
            case Forward():
                return self._bind_forward(op)
            case Backward():
                return self._bind_backward(op)
            case Update():
                return partial(
                    self._update,
                    op.delayed,
                    op.final_gradient,
                    self._memory.view(op.optimizer),
                    op.optimizer_states,
                    self._memory.view(op.gradient, torch.float32),
                    self._memory.view(op.parameters, self._dtype),
                )
            case _:
                raise AssertionError(f"unknown op {op}")

    def _storage(self) -> Store:
        assert self._store is not None, "the plan uses ssd but the run has no store"
        return self._store

    def _store_arguments(self, on_ssd: Region, on_host: Region) -> tuple[int, int, int]:
        return self._memory.store_offset(on_ssd), on_ssd.nbytes, self._memory.view(on_host).data_ptr()

    def _take_gradient(self, target: torch.Tensor, source: torch.Tensor) -> None:
        finite, squares = self._device.copy_d2h_gradient(target, source)
        if not finite:
            step = self._prompt.step if self._prompt else 0
            raise NumericalError(f"step {step}: a gradient is not finite; lower --lr, or train with --precision fp32")
        self._squares.append(squares)

    def _update(
        self,
        delayed: bool,
        final_gradient: bool,
        states: torch.Tensor,
        optimizer_states: OptimizerStates,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
    ) -> None:
        settings = self._pending if delayed else self._prompt
        assert settings is not None, "an update before the first step"
        assert delayed or self._clip_grad_norm is None, "an update before the norm of all gradients is known"
        squares = settings.optimizer.update(
            states,
            optimizer_states,
            gradient,
            parameters,
            step=settings.step,
            gradient_scale=settings.gradient_scale,
            threads=self._threads,
            statistics=final_gradient,
        )
        if final_gradient:
            self._squares.append(squares)

    def _bind_forward(self, op: Forward) -> Action:
        weights = [self._memory.view(region, self._dtype) for region in op.weights]
        hidden = self._optional(op.hidden)
        out = self._optional(op.out)
        if out is None:
            assert hidden is not None
            work = partial(self._layers.loss, op.micro_batch, weights, hidden)
        else:
            work = partial(self._layers.forward, op.layer, op.micro_batch, weights, hidden, out)
        return partial(self._compute, ("forward", op.layer_class), work)

    def _bind_backward(self, op: Backward) -> Action:
        weights = [self._memory.view(region, self._dtype) for region in op.weights]
        gradients = [self._memory.view(region, torch.float32) for region in op.gradients]
        hidden, out_gradient = self._optional(op.hidden), self._optional(op.out_gradient)
        in_gradient = self._optional(op.in_gradient)

        work = partial(
            self._layers.backward,
            op.layer,
            op.micro_batch,
            weights,
            hidden,
            out_gradient,
            in_gradient,
            gradients,
            op.fresh,
        )
        return partial(self._compute, ("backward", op.layer_class), work)

    def _optional(self, region: Region | None) -> torch.Tensor | None:
        return None if region is None else self._memory.view(region, self._dtype)

    def _compute(self, kind: tuple[str, str], work: Callable[[], None]) -> None:
        """Run a compute op; the first of each kind is measured for the device memory that it takes.

        In DRAM, what the last kind of layer left in the heap is given back first: the next one's tensors are of other
        sizes, so both would be there at once. The heap also breaks up slowly under ops of one kind.
        """
        self._since += 1
        if kind != self._last or self._since >= _GIVE_BACK_EVERY:
            self._last, self._since = kind, 0
            if self._device.kind == "cpu":
                process.give_back()
        if kind in self._sampled:
            work()
            return
        self._sampled.add(kind)
        _, peak = self._device.peak_bytes(work)
        self.workspace_bytes = max(self.workspace_bytes, peak)
