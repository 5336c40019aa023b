"""States in and out: fills a schedule's homes from a checkpoint, and reads parameters back from them.

Owns the layout of a home (master, first moment, second moment; the low-precision copy beside). It moves one state at
a time and never holds the whole model.
"""

import math
from collections.abc import Callable, Iterator

import torch

from ssdplan import native
from ssdplan.plans.schedule import Home, Region, Schedule

from .export import TensorEntry
from .model import StreamedModel
from .operations import Memory
from .store import Store
from .weights import Weights

Progress = Callable[[float, str], None]


class States:
    """The homes of a run's states, in its memory and its store."""

    def __init__(
        self, model: StreamedModel, schedule: Schedule, memory: Memory, store: Store | None, dtype: torch.dtype
    ) -> None:
        self._model, self._schedule, self._memory, self._store, self._dtype = model, schedule, memory, store, dtype
        self._homes: dict[int, list[Home]] = {}
        for home in schedule.homes:
            self._homes.setdefault(home.state, []).append(home)
        self._scratch_bytes = max(max(home.optimizer.nbytes, home.parameters.nbytes) for home in schedule.homes)

    def load(self, weights: Weights, progress: Progress) -> None:
        """Write every state to its homes: masters from the checkpoint, moments zero, parameters the masters rounded."""
        done, total = 0, sum(state.elements for state in self._model.states)
        scratch = self._scratch()
        for index, state in enumerate(self._model.states):
            master = torch.zeros(state.elements, dtype=torch.float32)
            weights.read(index, master)
            for home in self._homes[index]:
                values = master[home.start : home.stop]
                states = scratch[: home.optimizer.nbytes].view(torch.float32)
                states[: len(values)].copy_(values)
                states[len(values) :].zero_()  # moments: zero in every format
                self._put(home.optimizer, scratch)
                scratch[: home.parameters.nbytes].view(self._dtype).copy_(values)
                self._put(home.parameters, scratch)
                done += len(values)
                progress(done / total, f"loading {state.name}")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of all that the model saves, in `entries` order, one state in memory at a time."""
        for index, state in enumerate(self._model.states):
            flat = torch.empty(state.elements, dtype=self._dtype)
            scratch = self._scratch()
            for home in self._homes[index]:
                flat[home.start : home.stop].copy_(self._get(home.parameters, scratch).view(self._dtype))
            for tensor in state.tensors:
                values = flat[tensor.offset : tensor.offset + math.prod(tensor.shape)]
                yield tensor.name, values.view(tensor.shape)
        yield from self._model.persistent_buffers.items()

    def entries(self) -> list[TensorEntry]:
        """What `tensors` yields, for the exporter: parameters, then the buffers that the model saves."""
        parameters = [
            TensorEntry(tensor.name, tensor.shape, self._dtype)
            for state in self._model.states
            for tensor in state.tensors
        ]
        buffers = self._model.persistent_buffers
        return parameters + [TensorEntry(name, tuple(b.shape), b.dtype) for name, b in buffers.items()]

    def _scratch(self) -> torch.Tensor:
        """Aligned memory for any form of the longest home; it goes when the tensor does."""
        return torch.from_dlpack(native.Arena(self._scratch_bytes, lock=False))

    def _put(self, region: Region, scratch: torch.Tensor) -> None:
        if self._memory.tier(region) == "ssd":
            assert self._store is not None
            self._store.write(self._memory.store_offset(region), region.nbytes, scratch.data_ptr())
        else:
            self._memory.view(region).copy_(scratch[: region.nbytes])

    def _get(self, region: Region, scratch: torch.Tensor) -> torch.Tensor:
        if self._memory.tier(region) != "ssd":
            return self._memory.view(region)
        assert self._store is not None
        self._store.read(self._memory.store_offset(region), region.nbytes, scratch.data_ptr())
        return scratch[: region.nbytes]
