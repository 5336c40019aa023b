"""Zeroth-order passes measured: the two rates, in a time that only the passes move."""

from typing import Any

import pytest
import torch

from ssdplan.executor.device.device import EmulatedDevice
from ssdplan.profiler.measure import Limits
from ssdplan.profiler.passes import PERTURBED_ELEMENTS, measure_passes
from tests.profiler.made_time import MadeTime

COPIES, UPDATE = 2e-9, 5e-10
"""Seconds an element, of both copies and of each pending update."""


def test_a_pass_and_each_pending_update_have_rates_of_their_own() -> None:
    clock, seen = MadeTime(), set[tuple[int, torch.dtype]]()

    def perturb(parameters: torch.Tensor, plus: torch.Tensor, minus: torch.Tensor, **how: Any) -> None:
        assert parameters.numel() == plus.numel() == minus.numel() == PERTURBED_ELEMENTS
        seen.add((len(how["pending"]), parameters.dtype))
        clock.sleep(PERTURBED_ELEMENTS * (COPIES + UPDATE * len(how["pending"])))

    copies, pending, notes = measure_passes(
        perturb, EmulatedDevice(), "bf16", 2, Limits(0.5), lambda share, what: None, clock=clock
    )
    assert copies == pytest.approx(1 / COPIES) and pending == pytest.approx(1 / UPDATE)
    assert {dtype for _, dtype in seen} == {torch.bfloat16} and {0, 4} <= {count for count, _ in seen}
    assert not notes
