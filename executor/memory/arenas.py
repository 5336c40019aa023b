"""Arenas: a run's memory on host and device, as large as its plan says, and regions of it as tensors.

Owns which buffer lies where in an arena, and how much of each arena was used. Who reads or writes a region is the
graph's business.
"""

import time

import torch

from ssdplan.plans.graph.ops import Region, Schedule, Tier

from ..device.interface import Device


class Memory:
    """The arenas of a run. `view` gives a region as a tensor; nothing else hands out memory."""

    def __init__(self, schedule: Schedule, device: Device) -> None:
        self._schedule, self._device = schedule, device
        began = time.perf_counter()
        self.host = device.host_arena(max(schedule.arenas["host"], 1))
        self._device_bytes = device.allocate(max(schedule.arenas["device"], 1))
        self.seconds = time.perf_counter() - began
        """What allocating took, page-locking included (10Cache, table 8)."""
        self.touched: dict[Tier, int] = {"host": 0, "device": 0, "ssd": 0}
        """The highest byte of each arena that was bound; arenas are as large as planned, so it says what is used."""

    def view(self, region: Region, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """The bytes of a host or device region as a 1-D tensor."""
        buffer = self._schedule.buffers[region.buffer]
        start, stop = buffer.offset + region.start, buffer.offset + region.stop
        arena = self.host.bytes if buffer.tier == "host" else self._device_bytes
        self.touched[buffer.tier] = max(self.touched[buffer.tier], stop)
        return arena[start:stop].view(dtype)

    def on_host(self, region: Region, scratch: torch.Tensor) -> torch.Tensor:
        """uint8: the bytes of a host or device region where the processor reads them: where they are, or of a device
        with a memory of its own in `scratch`."""
        there = self.view(region)
        return there if there.device.type == "cpu" else scratch[: region.nbytes].copy_(there)

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
