"""States in and out: fills a schedule's homes from model files, and reads parameters back from them.

Owns what a home's bytes become at loading and at export: masters, zero moments and the low-precision copy beside, which
is all that a frozen home has. Where each lies within a home is `plans/documents/state_layout.py`'s. It moves one home
at a time, which is no longer than one update takes, and never holds a whole state.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ssdplan import native
from ssdplan.plans.documents.state_layout import FP32, RESIDUAL
from ssdplan.plans.graph.ops import Home, Region, Schedule
from ssdplan.plans.units import PAGE

from ..device.masters import split
from ..model.directory.export import TensorEntry
from ..model.layout import StateSpec
from ..model.model import StreamedModel
from ..ranks.group import ALONE, Ranks
from ..store import Store
from .arenas import Memory

Progress = Callable[[float, str], None]


class Readable(Protocol):
    """Where states are loaded from, in order: `Weights`, or what stands for them."""

    def read(self, state: int, out: torch.Tensor, first: int = 0) -> None: ...


@dataclass(frozen=True)
class Holding:
    """Where a run's states are."""

    schedule: Schedule
    memory: Memory
    store: Store | None

    def get(self, region: Region, scratch: torch.Tensor) -> torch.Tensor:
        """uint8: the bytes of a home's form on host: where they are, or else in `scratch`."""
        if self.memory.tier(region) != "ssd":
            return self.memory.on_host(region, scratch)
        assert self.store is not None
        self.store.read(self.memory.store_offset(region), region.nbytes, scratch.data_ptr())
        return scratch[: region.nbytes]

    def put(self, region: Region, values: torch.Tensor) -> None:
        """`values` uint8, at an address that suits direct I/O."""
        if self.memory.tier(region) != "ssd":
            self.memory.view(region).copy_(values)
            return
        assert self.store is not None
        self.store.write(self.memory.store_offset(region), region.nbytes, values.data_ptr())


class States:
    """The homes of a run's states, in its memory and its store."""

    def __init__(
        self,
        model: StreamedModel,
        schedule: Schedule,
        memory: Memory,
        store: Store | None,
        dtypes: Sequence[torch.dtype],
        ranks: Ranks = ALONE,
    ) -> None:
        """`dtypes`: of each state's parameters. `ranks`: who has the others of them."""
        self._ranks = ranks
        self._model, self._dtypes = model, dtypes
        self._holding = Holding(schedule, memory, store)
        self._homes: dict[int, list[Home]] = {}
        for home in schedule.homes:
            self._homes.setdefault(home.state, []).append(home)
        self._scratch_bytes = max(map(_loading_bytes, schedule.homes), default=PAGE)

    def load(self, weights: Readable, chosen: Collection[int], progress: Progress) -> None:
        """Write the states `chosen` to their homes: masters from the model files, moments zero, parameters the masters
        rounded, in the formats of the plan; of frozen ones the parameters alone, rounded from the model files."""
        done, total = 0, sum(home.elements for index in chosen for home in self._homes.get(index, ()))
        scratch = self._scratch()
        for index in chosen:
            for home in self._homes.get(index, ()):
                parameters = scratch[optimizer_bytes_of(home) :][: home.parameters.nbytes]
                if home.optimizer is None:
                    weights.read(index, parameters.view(self._dtypes[index]), home.start)
                else:
                    states = scratch[: home.optimizer.nbytes].zero_()  # so are moments, in every format
                    copies, behind = parameters.view(self._dtypes[index]), scratch[_kept_bytes(home) :]
                    if home.formats.masters == "none":
                        weights.read(index, copies, home.start)
                    else:
                        masters = behind[: FP32.bytes_of(home.elements)].view(torch.float32)
                        if home.formats.masters == "fp32":
                            masters = masters_of(home, states)
                        weights.read(index, masters, home.start)
                        if home.formats.masters == "fp32":
                            copies.copy_(masters)
                        else:
                            split(masters, copies, states[: RESIDUAL.bytes_of(home.elements)].view(torch.int16))
                    self._holding.put(home.optimizer, states)
                self._holding.put(home.parameters, parameters)
                done += home.elements
                progress(done / total, f"loading {self._model.states[index].name}")

    def tensors(self, *, rounded: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, piece) of all that the model saves, of all ranks, in `entries` order: a tensor's elements in order,
        flat, one home of them at a time, `rounded` to what compute takes or as they are. A piece is gone when the next
        is asked for."""
        scratch = self._scratch()
        for index, state in enumerate(self._model.states):
            mine = (self._holding.get(home.parameters, scratch) for home in self._homes.get(index, ()))
            start = 0
            for piece in self._ranks.from_each(mine):
                parameters, computed = piece.view(self._dtypes[index]), self._model.dtypes[index]
                stop = start + parameters.numel()
                yield from pieces(state, start, stop, parameters.to(computed) if rounded else parameters)
                start = stop
        yield from self._model.persistent_buffers.items()

    def entries(self, *, rounded: bool = True) -> list[TensorEntry]:
        """What `tensors` yields, for the exporter."""
        return saved_entries(self._model, None if rounded else self._dtypes)

    def _scratch(self) -> torch.Tensor:
        """Aligned memory for the longest home, optimizer states then parameters, then masters that are kept in no
        place; it goes when the tensor does."""
        return torch.from_dlpack(native.Arena(self._scratch_bytes, lock=False))


def optimizer_bytes_of(home: Home) -> int:
    """Of a home's optimizer states; a frozen one has none."""
    return home.optimizer.nbytes if home.optimizer else 0


def _kept_bytes(home: Home) -> int:
    return optimizer_bytes_of(home) + home.parameters.nbytes


def _loading_bytes(home: Home) -> int:
    between = home.optimizer is not None and home.formats.masters == "residual"
    return _kept_bytes(home) + (FP32.bytes_of(home.elements) if between else 0)


def masters_of(home: Home, states: torch.Tensor) -> torch.Tensor:
    """fp32 [elements], a view: the masters in `states`, uint8, the optimizer states of a home that
    has them there. They come first."""
    master = home.parts[0]
    assert (master.what, master.format, master.offset) == ("master", FP32, 0)
    return states[: master.nbytes].view(torch.float32)


def pieces(state: StateSpec, first: int, end: int, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, piece) of each tensor of which elements [first, end) of `state` have some; a piece is a view of `values`,
    which has one for each of these elements."""
    for tensor in state.tensors:
        start, stop = max(tensor.offset, first), min(tensor.offset + tensor.elements, end)
        if start < stop:
            yield tensor.name, values[start - first : stop - first]


def saved_entries(model: StreamedModel, dtypes: Sequence[torch.dtype] | None = None) -> list[TensorEntry]:
    """All that a model saves: parameters in the order of states, in the `dtypes` of these or else in those that compute
    takes, then its buffers."""
    of_states = dtypes or model.dtypes
    parameters = [
        TensorEntry(tensor.name, tensor.shape, dtype)
        for state, dtype in zip(model.states, of_states, strict=True)
        for tensor in state.tensors
    ]
    return parameters + [TensorEntry(name, tuple(b.shape), b.dtype) for name, b in model.persistent_buffers.items()]
