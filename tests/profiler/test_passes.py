"""Zeroth-order passes measured: the two rates, in a time that only the passes move."""

from typing import Any

import pytest
import torch

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.plans.documents.state_layout import Precision
from ssdplan.profiler.measure import Limits
from ssdplan.profiler.passes import PERTURBED_ELEMENTS, measure_passes
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
