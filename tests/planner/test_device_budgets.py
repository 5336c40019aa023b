"""What a budget of device memory is used for: states that the user has placed, saved activations beside them, and
everything, where there is room; and that more memory is never predicted to be slower."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from pydantic import ValidationError

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.fit.kept import everything
from ssdplan.planner.fit.pace import budget_below
from ssdplan.planner.program.choices import FixedChoices, Limits
from ssdplan.planner.program.program import solve_program
from ssdplan.planner.ranked import ENOUGH, WORTH
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.errors import InfeasibleError
from tests.extent import short_or_full

GIB = 1 << 30
SIZES = (4, 8, 16, 20, 28, 32, 48, 64)


def profile_of(**changes: Any) -> Profile:
    usual: dict[str, Any] = {
        "model": "llama-3.2-1b",
        "gpu": "rtx-4090",
        "ssds": ("samsung-990-pro",),
        "host_memory_bytes": 32 * GIB,
        "sequence_length": 1024,
        "micro_batch_sizes": (4,),
        "figures": {"gpu.efficiency": 0.8, "gpu.passes": 0.01},  # of kernels that are fused: to recompute is dear
    }
    return estimate(WhatIf(**(usual | changes)))


def planned(profile: Profile, gib: float, **asked: Any) -> Plan:
    return solve(profile, SolveRequest(int(gib * GIB), **asked), told="step")


@pytest.mark.parametrize("gpu", ["gb10", "rtx-pro-6000"])
def test_a_large_device_updates_what_little_host_memory_cannot(gpu: str) -> None:
    """No placement of the user's is faster; before, it was up to four times as fast."""
    changes: dict[str, Any] = {"model": "qwen3-8b", "gpu": gpu, "host_memory_bytes": 8 * GIB, "figures": {}}
    profile, asked = profile_of(**changes), {"micro_batches": 2}
    free = solve(profile, SolveRequest(8 * GIB, **asked), told="step")
    shares = [{"device": 1.0, "updates": updates} for updates in (0.0, 0.5, 0.72)]
    named = [solve(profile, SolveRequest(8 * GIB, residency=share, **asked), told="step") for share in shares]
    assert free.prediction.step_seconds <= 1.01 * min(plan.prediction.step_seconds for plan in named)


def on_device(plan: Plan) -> float:
    """Shares of pairs of block and micro-batch whose activations the device keeps."""
    return sum(each.share for shares in plan.decision.saved.values() for each in shares if each.tier == "device")


@pytest.mark.parametrize("residency", [{"device": 0.5}, {"device": 1.0, "updates": 1.0}, {"parameters": 1.0}])
def test_what_fixed_states_leave_of_the_device_holds_activations(residency: dict[str, float]) -> None:
    """Where they would otherwise be recomputed, for host memory has no room for all of them."""
    asked: dict[str, Any] = {"residency": residency, "micro_batches": 8}
    plan = planned(profile_of(), 32, **asked)
    without = planned(profile_of(), 32, **asked, recompute="all")
    assert on_device(plan) > 0.1
    assert plan.prediction.step_seconds < 0.99 * without.prediction.step_seconds
    assert plan.prediction.peak_device_bytes <= plan.decision.device_budget_bytes
    for name, placement in plan.decision.placement.items():
        other = without.decision.placement[name]
        assert placement.parameters_device == other.parameters_device == residency.get("device", 0.0) or name != "block"
        assert placement.optimizer_device == other.optimizer_device


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_fixed_states_that_just_fit_the_device_still_do(share: float) -> None:
    """The estimate of the pipeline is a little too careful, and rules out no placement that is fixed."""
    asked: dict[str, Any] = {"residency": {"device": share}, "micro_batches": 4}
    lean = planned(profile_of(), 32, **asked, recompute="all")
    just = planned(profile_of(), 32, **asked, device_memory_bytes=lean.prediction.peak_device_bytes)
    assert just.prediction.step_seconds <= lean.prediction.step_seconds * 1.001
    assert just.prediction.peak_device_bytes <= lean.prediction.peak_device_bytes


def test_a_device_too_small_for_two_layers_has_one_at_a_time() -> None:
    """Less and less of other layers, the less it has; and the refusal names what then is the least."""
    profile, asked = profile_of(micro_batch_sizes=(1,)), {"micro_batches": 2, "recompute": "all"}
    found, seconds = [], []
    for gib in (5.0, 3.4, 3.23):
        plan = planned(profile, 32, device_memory_bytes=int(gib * GIB), **asked)
        assert plan.prediction.peak_device_bytes <= gib * GIB
        found.append(plan.decision.overlap)
        seconds.append(plan.prediction.step_seconds)
    assert found == ["all", "parameters", "none"]
    assert seconds == sorted(seconds)
    with pytest.raises(InfeasibleError, match=r"least that would do is 3\.23 GiB"):
        planned(profile, 32, device_memory_bytes=3 * GIB, **asked)


def test_a_limit_rules_out_nothing_that_is_fixed() -> None:
    """Whether it has room, its schedule says exactly; beside it nothing is saved there."""
    profile = profile_of()
    found = solve_program(
        profile.model, profile.machine, micro_batch_size=4, micro_batches=4,
        limits=Limits(64.0 * GIB, device_bytes=0.0), fixed=FixedChoices(kept=everything(profile.model)),
    )  # fmt: skip
    assert found is not None and all(place.parameters_device == 1.0 for place in found.placement.values())
    assert not any(each.tier == "device" for shares in found.saved.values() for each in shares)


@pytest.mark.parametrize("rows", short_or_full([40], [12, 24, 40, 80]))
def test_more_host_memory_is_never_slower_for_a_batch(rows: int) -> None:
    """The program sees no difference between plans of which one waits 4% longer, and would take more memory for less
    than nothing."""
    reached = [planned(profile_of(), gib, global_batch=rows).prediction for gib in (8, 20, 28, 32, 48, 64)]
    for less, more in pairwise(reached):
        assert more.step_seconds <= less.step_seconds * (1 + WORTH)


def test_more_host_memory_is_never_slower_than_a_good_enough_batch() -> None:
    """A batch that nobody gave is the smallest that is good enough, so it may be that much slower."""
    reached = [planned(profile_of(), gib).prediction.tokens_per_second for gib in short_or_full((8, 64), SIZES)]
    assert all(more >= less * ENOUGH for less, more in pairwise(reached))


def test_a_batch_is_no_larger_than_what_the_device_keeps_wants() -> None:
    """Beside 8 GiB a step that streams needs 216 rows to reach two thirds of what 12 rows reach on the device alone."""
    plan = planned(profile_of(), 8)
    assert plan.decision.micro_batch_size * plan.decision.micro_batches <= 16
    assert plan.prediction.ssd_write_bytes == 0 and on_device(plan) > 0.3
    streams = planned(profile_of(), 8, global_batch=216)
    assert plan.prediction.tokens_per_second > streams.prediction.tokens_per_second


def test_the_smaller_budgets_of_a_row_are_the_same_ones_for_all() -> None:
    def below(host: int) -> list[int]:
        found = []
        while host > 1:
            host = budget_below(host)
            found.append(host)
        return found

    assert below(64)[:8] == [56, 48, 40, 32, 28, 24, 20, 16]
    assert below(33) == [32, *below(32)] and set(below(33)) < set(below(64))


def test_rows_are_of_plans_that_may_keep_everything_too() -> None:
    """Beside 8 GiB the program's own placement streams, and takes ten times as long."""
    request = SolveRequest(8 * GIB, global_batch=8)
    plan = solve(profile_of(), request)
    assert all(place.optimizer_device == 1.0 for place in plan.decision.placement.values())
    rows = {row.name: row for row in plan.comparison if row.kind == "schedule"}
    made = solve(profile_of(), replace(request, recompute="all"), told="step").prediction
    assert rows["recompute everything"].step_seconds == pytest.approx(made.step_seconds, rel=0.02)
    assert rows["recompute everything"].ssd_write_bytes == 0
    prompt = rows["vertical, no delayed update"]
    assert prompt.step_seconds is not None and prompt.step_seconds < 1.1 * plan.prediction.step_seconds
    single = rows["single"]
    assert not single.fits or (single.step_seconds or 0.0) < 2 * plan.prediction.step_seconds


def test_a_device_whose_updates_nobody_measured_makes_none() -> None:
    """An edited plan that contradicts itself is refused by the field."""
    plan = planned(profile_of(), 8, global_batch=4)
    content = plan.model_dump(mode="json", by_alias=True)
    content["machine"]["device_update_rate"] = None
    with pytest.raises(
        ValidationError, match=r"placement\.\w+\.optimizer_device = [\d.]+: the machine has no device_update"
    ):
        Plan.model_validate_json(json.dumps(content))


def test_a_few_bytes_too_much_cost_a_pair_and_not_the_device() -> None:
    """The device keeps whole pairs of block and micro-batch: a plan that is over its budget by less than one of them
    keeps one fewer there, and does not send all of them to ssd."""
    profile = profile_of(gpu="rtx-4070", micro_batch_sizes=(2,), figures={}, host_memory_bytes=64 * GIB)
    asked: dict[str, Any] = {"micro_batches": 1, "recompute": "paper", "residency": {"optimizer": 1, "parameters": 1}}
    steps = []
    for tenths in (44, 48, 50, 56, 68):
        plan = planned(profile, 60, **asked, device_memory_bytes=tenths * GIB // 10)
        assert plan.prediction.peak_device_bytes <= tenths * GIB // 10
        assert all(each.tier != "ssd" for shares in plan.decision.saved.values() for each in shares), tenths
        steps.append(plan.prediction.step_seconds)
    assert all(more <= 1.01 * less for less, more in pairwise(steps))


def test_smaller_batches_are_weighed_beside_the_one_that_was_found() -> None:
    """One micro-batch of 32 rows writes a little to ssd where it saves activations, and nothing where it recomputes
    all: beside that it was never light enough. The batch that was found, of twice as many rows, writes far more."""
    source = WhatIf("llama-3.2-3b", "rtx-4090", ["samsung-990-pro*2"], 32 * GIB, sequence_length=512)
    profile = estimate(source)
    free = planned(profile, 32)
    for rows in (32, 64):
        alone = planned(profile, 32, global_batch=rows)
        assert free.prediction.tokens_per_second > 0.99 * alone.prediction.tokens_per_second


def test_more_micro_batches_are_tried_beside_one_that_waits() -> None:
    """A micro-batch of eight rows is enough where all is recomputed. Where activations are saved, two are no faster
    than one, and three 12%."""
    source = WhatIf("mistral-7b", "rtx-5090", ["micron-9550-pro*2"], 32 * GIB, sequence_length=4096)
    profile = estimate(source)
    free = planned(profile, 32, wear_price=0.0)
    three = planned(profile, 32, wear_price=0.0, micro_batch_size=8, micro_batches=3)
    assert free.prediction.tokens_per_second > 0.99 * three.prediction.tokens_per_second


@pytest.mark.parametrize(
    ("model", "gpu", "ssd", "gib", "size", "n"),
    [
        ("gemma-3-12b", "rtx-4070", "samsung-980-pro*2", 64, 1, 4),
        ("gpt-oss-20b", "rtx-4090", "crucial-t705", 96, 4, 22),
    ],
)
def test_what_fits_at_a_pace_that_hides_less_is_looked_at_too(
    model: str, gpu: str, ssd: str, gib: int, size: int, n: int
) -> None:
    """At the usual pace one device has room for three rows at most, and the other for no micro-batches of four. More
    rows hide more of what moves."""
    profile = estimate(WhatIf(model, gpu, [ssd], gib * GIB, sequence_length=8192))
    free, alone = (planned(profile, gib, **asked) for asked in ({}, {"micro_batch_size": size, "micro_batches": n}))
    assert free.prediction.tokens_per_second > 0.98 * alone.prediction.tokens_per_second
