"""Migration: moves a run's states from the places of one plan to those of another, without changing a bit of them.

Owns the way: all of them go through the other plan's store, made beside the first, so that the host arena of the one is
gone before the other's is made. Only masters and moments travel. Parameters are the masters rounded, which is how every
update leaves them; where no master has all of their bits, they travel too. No update may be pending. What is frozen
stays in the model's own files, and is read from there again (`States.load`). A snapshot goes the same way, to the plan
that goes on with it, and out of the run as a model. Of several ranks each has a source of its own shares, and all of
them together are one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from ssdplan import native
from ssdplan.plans.graph.ops import Home, Region, Schedule
from ssdplan.plans.units import PAGE

from ..model.model import StreamedModel
from ..model.weights import Weights
from ..store import Store
from .states import Holding, masters_of, optimizer_bytes_of, pieces
from .store_records import Records

Progress = Callable[[float, str], None]


class Source(Protocol):
    """Where the durable states of a run are."""

    @property
    def schedule(self) -> Schedule: ...
    def get(self, region: Region, scratch: torch.Tensor) -> torch.Tensor: ...


S = TypeVar("S", bound=Source)


@dataclass(frozen=True)
class Snapshotted:
    """The states of a store's last generation, wherever the plan that it was made for keeps them while it runs."""

    schedule: Schedule
    places: Mapping[Region, int]
    """As `Records.places`."""
    store: Store

    def get(self, region: Region, scratch: torch.Tensor) -> torch.Tensor:
        """uint8: the bytes of a durable form of a home, read to `scratch`."""
        self.store.read(self.places[region], region.nbytes, scratch.data_ptr())
        return scratch[: region.nbytes]


def tensors_of(shares: Sequence[Snapshotted], model: StreamedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """As `States.tensors` of the run: (name, piece) of all that the model saves, one home of them at a time. Masters
    are rounded to what compute takes, and so is what is frozen, from the model's own files. `shares`: of all ranks, in
    order. A piece is gone when the next is asked for."""
    weights = Weights(model) if model.frozen_states else None
    homes = [home for share in shares for home in share.schedule.homes]
    scratch = _scratch(max(max(optimizer_bytes_of(home), home.parameters.nbytes) for home in homes))
    for share, home in _in_order(shares):
        dtype = model.dtypes[home.state]
        if home.optimizer is None:
            assert weights is not None
            values = scratch[: home.parameters.nbytes].view(dtype)
            weights.read(home.state, values, home.start)
        elif home.formats.takes_copy:
            values = share.get(home.parameters, scratch).view(dtype)
        else:
            values = masters_of(home, share.get(home.optimizer, scratch)).to(dtype)
        yield from pieces(model.states[home.state], home.start, home.stop, values)
    yield from model.persistent_buffers.items()


def carry_over(
    sources: Sequence[Source], schedule: Schedule, records: Records, store: Store, progress: Progress
) -> None:
    """Write what is durable of all homes of `schedule` to the places that it has in `store`, which was made of its
    `records`, with snapshots: what is to live on host goes where a snapshot has it. `sources` hold them: one, or
    one of each rank in their order.

    Takes the longest home of each schedule in host memory, once. Reads what `schedule` has, and nothing else.
    """
    places = records.places(schedule)
    theirs = [home for source in sources for home in source.schedule.homes]
    scratch = _scratch(max(map(_durable_bytes, theirs)))
    carried = _scratch(max(map(_durable_bytes, schedule.homes), default=PAGE))
    total = sum(home.elements for home in schedule.homes if home.optimizer)
    done = 0
    held = ((source, home) for source, home in _in_order(sources) if home.optimizer)
    source, home_of, states = *next(held), None
    for home in schedule.homes:
        if home.optimizer is None:
            continue
        target = carried[: _durable_bytes(home)].zero_()  # between parts too
        at = home.start
        while at < home.stop:
            while not (home_of.state == home.state and home_of.start <= at < home_of.stop):
                source, home_of, states = *next(held), None
            if states is None:
                states = _durable_of(source, home_of, scratch)
            until = min(home.stop, home_of.stop)
            for into, out in zip(_places(home, at, until), _places(home_of, at, until), strict=True):
                target[into] = states[out]
            at = until
        address = target.data_ptr()
        for region in home.durable:
            store.write(places[region], region.nbytes, address)
            address += region.nbytes
        done += home.elements
        progress(done / total / 2, "moving states to another plan's store")


def settle(target: Holding, records: Records, dtypes: Sequence[torch.dtype], progress: Callable[[float], None]) -> None:
    """Bring home what `carry_over` wrote to `target`'s store, or its last snapshot: what is durable to where it lives
    in memory, and parameters that are not, in `dtypes` by state, from their masters; nothing of what is frozen. Takes
    the longest home in host memory."""
    places = records.places(target.schedule)
    homes = [home for home in target.schedule.homes if home.optimizer]
    scratch = _scratch(max((optimizer_bytes_of(home) + home.parameters.nbytes for home in homes), default=PAGE))
    total, done = sum(home.elements for home in homes), 0
    for home in homes:
        assert target.store is not None and home.optimizer is not None
        for region in home.durable:
            if home.formats.takes_copy and target.memory.tier(region) == "ssd":
                continue  # it is there, and nothing is made of it
            target.store.read(places[region], region.nbytes, scratch.data_ptr())
            if target.memory.tier(region) != "ssd":
                target.put(region, scratch[: region.nbytes])
        if not home.formats.takes_copy:
            states, rest = scratch[: home.optimizer.nbytes], scratch[home.optimizer.nbytes :]
            parameters = rest[: home.parameters.nbytes]
            parameters.view(dtypes[home.state]).copy_(masters_of(home, states))
            target.put(home.parameters, parameters)
        done += home.elements
        progress(done / total)


def _in_order(sources: Sequence[S]) -> Iterator[tuple[S, Home]]:
    """Each home of all sources, in the order of states and elements, which all schedules share."""
    homes = [iter(source.schedule.homes) for source in sources]
    ahead = [next(each, None) for each in homes]
    while any(ahead):
        state = min(home.state for home in ahead if home)
        for number, source in enumerate(sources):
            while (home := ahead[number]) and home.state == state:
                yield source, home
                ahead[number] = next(homes[number], None)


def _places(home: Home, start: int, stop: int) -> Iterator[slice]:
    """Where elements [start, stop) of a state lie in what is durable of a home that has them: the bytes of the masters,
    then those of each moment, then of the parameters if they are."""
    for part in home.parts:
        for first, end in part.places(start - home.start, stop - home.start):
            yield slice(first, end)
    if home.formats.takes_copy:
        each = home.parameters.nbytes // home.elements
        behind = optimizer_bytes_of(home) - home.start * each
        yield slice(behind + start * each, behind + stop * each)


def _durable_bytes(home: Home) -> int:
    return sum(region.nbytes for region in home.durable)


def _durable_of(source: Source, home: Home, scratch: torch.Tensor) -> torch.Tensor:
    """uint8: what is durable of a home, one region after the other: where it is, or else in `scratch`."""
    assert home.optimizer is not None
    if len(home.durable) == 1:
        return source.get(home.optimizer, scratch)
    begin = 0
    for region in home.durable:
        there = scratch[begin : begin + region.nbytes]
        if (found := source.get(region, there)).data_ptr() != there.data_ptr():
            there.copy_(found)
        begin += region.nbytes
    return scratch[:begin]


def _scratch(nbytes: int) -> torch.Tensor:
    return torch.from_dlpack(native.Arena(nbytes, lock=False))
