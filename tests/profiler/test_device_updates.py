"""Updates on a GPU are measured by the executor's own, with the norm before them; on the emulated device not at all."""

from collections.abc import Callable

import pytest
import torch

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.optimizer.adamw_on_device import ready_update
from ssdplan.profiler import device_updates
from ssdplan.profiler.device_updates import measure_device_updates
from ssdplan.profiler.measure import Limits
from tests.profiler.made_time import MadeTime

ELEMENTS = 4096
NORM, UPDATE = 0.25, 0.125
"""Seconds of made time: of all ranges' norm, and of each range's update."""


class Card(EmulatedDevice):
    """DRAM that says it is a GPU, with `free` bytes."""

    kind = "cuda"

    def __init__(self, time: MadeTime, free: int) -> None:
        super().__init__()
        self.time, self.free = time, free

    def memory_bytes(self) -> int:
        return self.free

    def squares(self, gradient: torch.Tensor, threads: int) -> Callable[[], tuple[bool, int]]:
        assert gradient.numel() == device_updates.RANGES * ELEMENTS
        self.time.sleep(NORM)
        return super().squares(gradient, threads)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_norm_counts_and_every_range_is_updated(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setattr(device_updates, "ELEMENTS", ELEMENTS)
    time, begun = MadeTime(), []

    def make_update(*arrays: torch.Tensor) -> Callable[[], None]:
        update = ready_update(*arrays)

        def work() -> None:
            begun.append(arrays[0].data_ptr())
            time.sleep(UPDATE)
            update()

        return work

    rate, notes = measure_device_updates(
        make_update, Card(time, 1 << 30), precision, Limits(20.0), lambda share, what: None, clock=time
    )
    ranges = device_updates.RANGES
    assert rate == pytest.approx(ranges * ELEMENTS / (NORM + ranges * UPDATE)) and not notes
    assert len(set(begun)) == ranges and len(begun) >= 2 * ranges


def test_a_device_in_dram_or_without_room_is_not_measured() -> None:
    time = MadeTime()
    for device in (EmulatedDevice(), Card(time, 1 << 20)):
        found = measure_device_updates(ready_update, device, "bf16", Limits(1.0), lambda share, what: None, clock=time)
        assert found == (None, [])
