"""Records: a schedule's states as the records of a tensor store.

Owns which states a crash must not lose: the optimizer states, from which everything else follows, and parameters that
no master has all bits of; except what is frozen, which is durable in the model's own files. Owns too where states that
stay in memory, on host or on the device, go in a snapshot, and where reads and writes begin and end, which is where the
store may cut.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ssdplan import native
from ssdplan.plans.graph.contents import ROLES
from ssdplan.plans.graph.ops import Graph, Region, Schedule

from ..store import Record, Store
from .arenas import Memory

_AT_ONCE = 2


@dataclass(frozen=True)
class Records:
    """What a run's store is made for."""

    records: tuple[Record, ...]
    in_memory: tuple[tuple[Region, int], ...]
    """What of `Home.durable` lives on host or on the device, and the store's address of each in a snapshot."""

    @classmethod
    def of(cls, schedule: Schedule, *, snapshots: bool) -> "Records":
        """One record for each buffer on ssd; with `snapshots`, one for each durable buffer in memory behind them."""
        cuts: dict[int, set[int]] = {buffer.index: set() for buffer in schedule.buffers}

        def cut(region: Region | None) -> None:
            if region is not None:
                cuts[region.buffer] |= {region.start, region.stop}

        for home in schedule.homes:
            for region in (home.optimizer, home.parameters, home.gradient):
                cut(region)
        graphs: tuple[Graph, ...] = (schedule.first, schedule.steady, schedule.flush, schedule.evaluate)
        for graph in graphs:
            for op in graph.ops:
                for region in (*op.reads, *op.writes):
                    cut(region)
        records: list[Record] = []
        places: dict[int, int] = {}
        end = schedule.arenas["ssd"]
        for buffer in schedule.buffers:
            durable = ROLES[buffer.role].durable
            if buffer.tier == "ssd":
                records.append(Record(buffer.name, buffer.offset, buffer.nbytes, durable, tuple(cuts[buffer.index])))
            elif snapshots and durable:
                records.append(Record(buffer.name, end, buffer.nbytes, durable, tuple(cuts[buffer.index])))
                places[buffer.index] = end
                end += buffer.nbytes
        in_memory = tuple(
            (region, places[region.buffer] + region.start)
            for home in schedule.homes
            for region in home.durable
            if region.buffer in places
        )
        return cls(tuple(records), in_memory)

    def snapshot(self, store: Store, memory: Memory, metadata: dict[str, Any]) -> None:
        """Make the states as they are a generation of the store: those in memory are written, those on ssd are there.
        No op of a graph may be running, and no update may be pending. Raises as `Store.commit`.

        What a device with a memory of its own keeps passes through host memory, a home at a time in each of two
        places.
        """
        longest = max((region.nbytes for region, _ in self.in_memory if memory.tier(region) == "device"), default=0)
        passing = threading.local()

        def write(region: Region, offset: int) -> None:
            if longest and not hasattr(passing, "scratch"):
                passing.scratch = torch.from_dlpack(native.Arena(longest, lock=False))
            states = memory.on_host(region, passing.scratch) if longest else memory.view(region)
            store.write(offset, region.nbytes, states.data_ptr())

        # Two at once: while the bytes of one are summed, the drive works on the other.
        with ThreadPoolExecutor(_AT_ONCE, "ssdplan-snapshot") as pool:
            writes = [pool.submit(write, region, offset) for region, offset in self.in_memory]
            try:
                for written in writes:
                    written.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        store.commit(metadata)

    def places(self, schedule: Schedule) -> dict[Region, int]:
        """The store's address of what is durable of each home in a snapshot, what lives in memory included."""
        places = dict(self.in_memory)
        for home in schedule.homes:
            for region in home.durable:
                buffer = schedule.buffers[region.buffer]
                if buffer.tier == "ssd":
                    places[region] = buffer.offset + region.start
        return places
