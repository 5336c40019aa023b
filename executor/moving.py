"""Moving: a run's states from where one plan keeps them to where another does, without changing a bit of them.

Owns the way: all of them go through the other plan's store, made beside the first, so that the host arena of the one is
gone before the other's is made. Only masters and moments travel. Parameters are the masters rounded, which is how every
update leaves them; no update may be pending.
"""

from collections.abc import Callable, Iterator

import torch

from ssdplan import native
from ssdplan.plans.schedule import Home, Region, Schedule

from .records import Records
from .states import Holding
from .store import Store

Progress = Callable[[float, str], None]


def stage(source: Holding, schedule: Schedule, records: Records, store: Store, progress: Progress) -> None:
    """Write all optimizer states that `source` holds to the places that they have in `store`, which was made of
    `records` of `schedule`, with snapshots: what is to live on host goes where a snapshot has it.

    Takes the longest home of each schedule in host memory, once.
    """
    places = _places(schedule, records)
    scratch = _scratch(max(home.optimizer.nbytes for home in source.schedule.homes))
    staged = _scratch(max(home.optimizer.nbytes for home in schedule.homes))
    total = sum(home.stop - home.start for home in schedule.homes)
    done = 0
    held = _held(source, scratch)
    home_of, states = next(held)
    for home in schedule.homes:
        target = staged[: home.optimizer.nbytes]
        at = home.start
        while at < home.stop:
            while not (home_of.state == home.state and home_of.start <= at < home_of.stop):
                home_of, states = next(held)
            until = min(home.stop, home_of.stop)
            for into, out in zip(_forms(home, target), _forms(home_of, states), strict=True):
                into[at - home.start : until - home.start] = out[at - home_of.start : until - home_of.start]
            at = until
        store.write(places[home.optimizer], home.optimizer.nbytes, target.data_ptr())
        done += home.stop - home.start
        progress(done / total / 2, "moving states to another plan's store")


def settle(target: Holding, records: Records, dtype: torch.dtype, progress: Progress) -> None:
    """Bring what was staged in `target`'s store home: optimizer states to host where they live there, and parameters,
    in `dtype`, from their masters. Takes the longest home in host memory."""
    places = _places(target.schedule, records)
    homes = target.schedule.homes
    scratch = _scratch(max(home.optimizer.nbytes + home.parameters.nbytes for home in homes))
    total, done = sum(home.stop - home.start for home in homes), 0
    for home in homes:
        assert target.store is not None
        states, rest = scratch[: home.optimizer.nbytes], scratch[home.optimizer.nbytes :]
        target.store.read(places[home.optimizer], home.optimizer.nbytes, states.data_ptr())
        if target.memory.tier(home.optimizer) == "host":
            target.put(home.optimizer, states)
        parameters = rest[: home.parameters.nbytes]
        parameters.view(dtype).copy_(states[: 4 * (home.stop - home.start)].view(torch.float32))
        target.put(home.parameters, parameters)
        done += home.stop - home.start
        progress(0.5 + done / total / 2, "moving states to where the other plan keeps them")


def _held(source: Holding, scratch: torch.Tensor) -> Iterator[tuple[Home, torch.Tensor]]:
    """Each home with its optimizer states, in the order of states and elements, which all schedules share."""
    for home in source.schedule.homes:
        yield home, source.get(home.optimizer, scratch)


def _forms(home: Home, states: torch.Tensor) -> Iterator[torch.Tensor]:
    """The masters and both moments of a home's optimizer states, an element a row of bytes."""
    count = home.stop - home.start
    moment = (states.numel() // count - 4) // 2
    begin = 0
    for each in (4, moment, moment):
        yield states[begin : begin + each * count].view(count, each)
        begin += each * count


def _places(schedule: Schedule, records: Records) -> dict[Region, int]:
    """The store's address of each home's optimizer states, those that live on host included."""
    places = dict(records.on_host)
    for home in schedule.homes:
        buffer = schedule.buffers[home.optimizer.buffer]
        if buffer.tier == "ssd":
            places[home.optimizer] = buffer.offset + home.optimizer.start
    return places


def _scratch(nbytes: int) -> torch.Tensor:
    return torch.from_dlpack(native.Arena(nbytes, lock=False))
