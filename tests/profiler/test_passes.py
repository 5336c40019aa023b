"""Zeroth-order passes measured: the two rates, in a time that only the passes move."""

from typing import Any

import pytest
import torch

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.plans.documents.state_layout import Precision
from ssdplan.profiler.measure import Limits
from ssdplan.profiler.passes import PENDING, PERTURBED_ELEMENTS, ROW_ELEMENTS, measure_passes, measure_rows
from ssdplan.profiler.products import FORMATS
from tests.profiler.made_time import MadeTime

COPIES, UPDATE, MASTERS = 2e-9, 5e-10, 1.25
"""Seconds an element, of both copies and of each pending update; and how many times that over masters."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_pass_and_each_pending_update_have_rates_of_their_own(precision: Precision) -> None:
    clock, seen = MadeTime(), set[tuple[int, torch.dtype]]()
    dtype = FORMATS[precision]

    def perturb(parameters: torch.Tensor, plus: torch.Tensor, minus: torch.Tensor, **how: Any) -> None:
        assert parameters.numel() == plus.numel() == minus.numel() == PERTURBED_ELEMENTS
        assert plus.dtype == minus.dtype == dtype
        seen.add((len(how["pending"]), parameters.dtype))
        slower = MASTERS if parameters.dtype != dtype else 1
        clock.sleep(PERTURBED_ELEMENTS * slower * (COPIES + UPDATE * len(how["pending"])))

    passes, over_masters, notes = measure_passes(
        perturb, EmulatedDevice(), precision, 2, Limits(2.0), lambda share, what: None, clock=clock
    )
    assert passes.copies == pytest.approx(1 / COPIES) and passes.pending == pytest.approx(1 / UPDATE)
    assert {(0, dtype), (4, dtype)} <= seen and {form for _, form in seen} == {dtype, torch.float32}
    assert (over_masters is None) == (precision == "fp32")
    if over_masters:
        assert over_masters.copies == pytest.approx(1 / COPIES / MASTERS)
        assert over_masters.pending == pytest.approx(1 / UPDATE / MASTERS)
    assert not notes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_host_does_for_a_table_by_rows_has_rates_too(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates alone, over masters too, of which the slower rate counts; and rows in rising order."""
    clock, packed = MadeTime(), torch.index_select

    def perturb(parameters: torch.Tensor, plus: None, minus: None, **how: Any) -> None:
        assert plus is minus is None and parameters.device.type == "cpu" and len(how["pending"]) == PENDING
        slower = MASTERS if parameters.dtype != FORMATS[precision] else 1
        clock.sleep(parameters.numel() * slower * UPDATE * PENDING)

    def pack(table: torch.Tensor, axis: int, numbers: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert table.shape[1] == ROW_ELEMENTS and bool((numbers.diff() > 0).all())
        clock.sleep(out.nbytes * 1e-10)
        return packed(table, axis, numbers, out=out)

    monkeypatch.setattr(torch, "index_select", pack)
    rate, bandwidth, notes = measure_rows(perturb, precision, 2, Limits(2.0), lambda share, what: None, clock=clock)
    assert rate == pytest.approx(1 / UPDATE / (1 if precision == "fp32" else MASTERS))
    assert bandwidth == pytest.approx(1e10) and not notes
