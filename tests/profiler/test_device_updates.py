"""Updates on a GPU are measured by the executor's own, with the norm before them; on the emulated device not at all."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.optimizer.adamw import Updated
from ssdplan.executor.optimizer.adamw_on_device import ready_update
from ssdplan.executor.optimizer.muon import ready_matrix_update
from ssdplan.plans.documents.matrices import Matrix
from ssdplan.plans.graph.ops import Resource
from ssdplan.profiler import device_updates
from ssdplan.profiler.device_updates import measure_device_updates, measure_matrix_updates
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


ON_HOST, THERE = 0.5, 0.0625
"""Seconds of made time of an update of a matrix, on host and on the device."""
SHAPES = {(64, 32), (32, 32)}


class CardOfMatrices(Card):
    """Knows whether a lane of its own is at work."""

    inside = False

    @contextlib.contextmanager
    def lane(self, resource: Resource) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False


def measured_matrices(device: EmulatedDevice, time: MadeTime) -> dict[tuple[int, int], tuple[float, float | None]]:
    """Shape -> seconds on host and on the device; each update really changes the parameters that were made for it."""

    def make_update(matrix: Matrix, *arrays: Any) -> Callable[[], Updated]:
        update, parameters = ready_matrix_update(matrix, *arrays), arrays[2]

        def work() -> Updated:
            before = parameters.clone()
            time.sleep(THERE if getattr(device, "inside", False) else ON_HOST)
            done = update()
            assert not torch.equal(parameters, before)
            return done

        return work

    made, notes = measure_matrix_updates(
        make_update, device, "fp32", SHAPES, Limits(20.0), lambda share, what: None, clock=time
    )
    assert not notes
    return {(each.rows, each.columns): (each.seconds, each.device_seconds) for each in made}


def test_updates_of_matrices_are_measured_where_they_may_be_made() -> None:
    """On a GPU in its lane; on the emulated device, which is DRAM, they are those of the host."""
    time = MadeTime()
    assert measured_matrices(CardOfMatrices(time, 1 << 30), time) == dict.fromkeys(SHAPES, (ON_HOST, THERE))
    assert measured_matrices(EmulatedDevice(), MadeTime()) == dict.fromkeys(SHAPES, (ON_HOST, ON_HOST))


def test_a_matrix_that_a_card_has_no_room_for_has_no_figure_there() -> None:
    """Twice what one takes is asked for: 128 KiB for 64 x 32, 112 KiB for 32 x 32."""
    time = MadeTime()
    found = measured_matrices(CardOfMatrices(time, 120 << 10), time)
    assert found == {(32, 32): (ON_HOST, THERE), (64, 32): (ON_HOST, None)}
