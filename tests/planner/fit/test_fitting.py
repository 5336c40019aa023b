"""Fitting where room is scarce: on a device beside much host memory, and on host beside a device that has room for all.

Each of these cases was found by trying: its plan was slow, or there was none.
"""

from typing import Any

import pytest

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.plan import Plan

GIB, MIB = 1 << 30, 1 << 20


def planned(model: str, gpu: str, ssd: str, host_bytes: int, batch: tuple[int, int], told: Any, **figures: int) -> Plan:
    """The plan of `batch`: micro-batches, and rows of each."""
    micro_batches, rows = batch
    profile = estimate(
        WhatIf(model=model, gpu=gpu, ssds=(ssd,), host_memory_bytes=host_bytes, micro_batch_sizes=(rows,), **figures)
    )
    return solve(profile, SolveRequest(host_bytes, micro_batches=micro_batches, wear_price=0.0), told=told)


def saved_shares(plan: Plan) -> dict[str, float]:
    """Rung -> the share of pairs that save by it."""
    return {each.rung: each.share for shares in plan.decision.saved.values() for each in shares}


def test_host_room_that_was_found_with_more_of_the_device_is_looked_for_again() -> None:
    """With less of the device more is on host. Else the same host limit is tried to the last attempt, and the leanest
    plan is taken, of 1,258 tokens/s."""
    plan = planned("llama-2-13b", "rtx-5090", "micron-9550-pro", 48 * GIB, (3, 64), "step", sequence_length=512)
    assert plan.prediction.tokens_per_second > 1900
    assert plan.prediction.peak_host_bytes > 47 * GIB


def test_smaller_activations_are_saved_where_larger_ones_are_too_much_on_their_way() -> None:
    """The largest rung takes 2.6 GiB of a device that has 0.9 left, whatever it keeps: nothing was saved, which
    made 394 tokens/s."""
    plan = planned("phi-4", "rtx-4070", "samsung-pm9a3", 256 * GIB, (2, 16), "step", sequence_length=512)
    assert plan.prediction.tokens_per_second > 430
    largest = max(plan.model.timing("block", 16).rungs, key=lambda rung: rung.kept_bytes)
    assert saved_shares(plan) and largest.name not in saved_shares(plan)


def test_a_device_that_keeps_and_updates_all_needs_next_to_no_host_memory() -> None:
    """It was refused: 1.16 GiB was said to be the least."""
    plan = planned("llama-3.2-1b", "h100-80gb", "samsung-990-pro", 64 * MIB, (1, 32), "step")
    assert plan.prediction.peak_host_bytes == 0


def test_the_least_is_exact_where_the_estimate_is_more_than_the_plan_takes() -> None:
    """It was said to be all of the budget."""
    plan = planned("opt-13b", "rtx-4090", "intel-p5800x*2", 2 * GIB, (2, 1), "screen", sequence_length=2048)
    (least,) = [row.least_bytes for row in plan.least if row.budget == "host memory"]
    assert least == pytest.approx(1.74 * GIB, rel=0.01)


def test_between_much_of_the_device_and_much_of_host_a_batch_has_a_plan() -> None:
    """All that may overlap takes 15.4 of the device's 15 GiB, nothing 16.04 of 16 GiB on host, and parameters alone
    neither: this batch was refused, with 15.5 GiB of the device as the least."""
    plan = planned("opt-30b", "rtx-4080", "samsung-pm9a3*4", 16 * GIB, (18, 16), "screen", sequence_length=1024)
    assert plan.decision.overlap == "parameters" and plan.prediction.tokens_per_second > 350
    (least,) = [row.least_bytes for row in plan.least if row.budget == "host memory"]
    assert least < 14.6 * GIB


def test_a_bound_of_no_writes_at_all_is_kept_by_a_plan_that_writes_nothing() -> None:
    """The estimate took what has no place on ssd to be rounded to it, so a bound of nothing was refused, with nothing
    as the least that would do."""
    host, ssds = 192 * GIB, ("samsung-990-pro",)
    profile = estimate(
        WhatIf("llama-3.1-8b", gpu="rtx-4090", ssds=ssds, host_memory_bytes=host, micro_batch_sizes=(4,))
    )
    free, bounded = (
        solve(profile, SolveRequest(host, micro_batches=8, max_ssd_write_bytes=bound), told="screen")
        for bound in (None, 0)
    )
    assert bounded.prediction.ssd_write_bytes == free.prediction.ssd_write_bytes == 0
    assert bounded.prediction.step_seconds == free.prediction.step_seconds
    (least,) = [row.least_bytes for row in bounded.least if row.budget == "host memory"]
    assert least < 110 * GIB, "no lean way writes so little: all of the budget was said to be the least"
    within = solve(profile, SolveRequest(least, micro_batches=8, max_ssd_write_bytes=0), told="step")
    assert within.prediction.ssd_write_bytes == 0


def test_of_the_lean_ways_that_fit_the_fastest_is_taken() -> None:
    """The first was, whose device keeps nothing: 8.45 GiB made 390 tokens/s, and 8.9 GiB 376."""

    def tokens_per_second(host: int) -> float:
        what_if = WhatIf(
            "qwen2.5-32b",
            gpu="rtx-5090",
            ssds=("wd-sn850x",),
            host_memory_bytes=host,
            micro_batch_sizes=(2,),
            muon=True,
        )
        request = SolveRequest(host, optimizer="muon", micro_batches=64, wear_price=0.0)
        return solve(estimate(what_if), request, told="step").prediction.tokens_per_second

    assert tokens_per_second(9114 * MIB) >= 0.999 * tokens_per_second(8653 * MIB)
