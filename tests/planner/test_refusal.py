"""A refusal names the budget to raise, and what takes less: each of its figures does when it is tried."""

import re
from dataclasses import replace
from typing import Any

import pytest

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.errors import InfeasibleError
from ssdplan.plans.units import parse_bytes

MIB, GIB = 1 << 20, 1 << 30
SMALL = SolveRequest(host_memory_bytes=32 * GIB, device_memory_bytes=900 * MIB, micro_batches=2)


def profile_of(model: str, sizes: tuple[int, ...], sequence_length: int) -> Profile:
    asked = WhatIf(
        model=model,
        gpu="rtx-4090",
        ssds=["samsung-990-pro"],
        host_memory_bytes=64 * GIB,
        sequence_length=sequence_length,
        micro_batch_sizes=sizes,
    )
    return estimate(asked)


def refused(profile: Profile, request: SolveRequest) -> str:
    with pytest.raises(InfeasibleError) as raised:
        solve(profile, request, told="step")
    return str(raised.value)


def test_the_least_of_plans_without_gradients_does_and_a_little_less_does_not() -> None:
    profile = profile_of("llama-3.2-1b", (1,), 512)
    said = refused(profile, SMALL)
    found = re.search(r"--optimizer mezo, which has no gradients, does not fit either, and takes (.+?) at least", said)
    assert found, said
    least = parse_bytes(found[1])
    assert SMALL.device_memory_bytes is not None and least > SMALL.device_memory_bytes
    without = replace(SMALL, zeroth_order=ZerothOrder())
    solve(profile, replace(without, device_memory_bytes=least), told="step")
    assert f"the least that would do is {found[1]}" in refused(
        profile, replace(without, device_memory_bytes=least - 20 * MIB)
    )


def test_plans_without_gradients_that_fit_are_named_as_such() -> None:
    profile = profile_of("llama-3.2-1b", (1,), 512)
    said = refused(profile, replace(SMALL, device_memory_bytes=1500 * MIB))
    assert "--optimizer mezo, which has no gradients, fits: it takes" in said
    solve(profile, replace(SMALL, device_memory_bytes=1500 * MIB, zeroth_order=ZerothOrder()), told="step")


def test_no_plan_without_gradients_is_named_where_the_wishes_rule_it_out() -> None:
    assert "mezo" not in refused(profile_of("llama-3.2-1b", (1,), 512), replace(SMALL, delay_ratio=0.5))


@pytest.mark.parametrize(("size", "told"), [(1, False), (4, True)])
def test_fewer_rows_are_named_where_there_can_be_fewer(size: int, told: bool) -> None:
    request = replace(SMALL, device_memory_bytes=3 * GIB)
    said = refused(profile_of("llama-3.2-1b", (size,), 16384), request)
    assert "Shorter rows (--sequence-length)" in said
    assert ("or fewer of them in a micro-batch" in said) == told


def test_a_least_that_the_card_does_not_have_is_said_to_be_so() -> None:
    profile = profile_of("llama-3.1-70b", (4,), 16384)
    said = refused(profile, SolveRequest(host_memory_bytes=64 * GIB, micro_batches=1))
    assert re.search(r"the least that would do is [\d.]+ GiB, more than the 23 GiB that rtx-4090 has for a plan", said)


@pytest.mark.parametrize(
    "asked",
    [{}, {"schedule": "horizontal"}, {"zeroth_order": ZerothOrder()}, {"residency": {"checkpoints": 0.5}}],
    ids=["vertical", "horizontal", "without gradients", "checkpoints in two places"],
)
def test_the_least_of_host_memory_does_for_a_model_of_many_small_layers(asked: dict[str, Any]) -> None:
    """Of which rounding and bookkeeping are a large part: what is estimated without them is a bound."""
    profile = profile_of("smollm2-135m", (1,), 256)
    request = SolveRequest(host_memory_bytes=1 * MIB, device_memory_bytes=4 * GIB, micro_batches=16, **asked)
    found = re.search(
        r"host memory of 1 MiB is too little; the least that would do is ([\d.]+ \w+)", refused(profile, request)
    )
    assert found
    least = parse_bytes(found[1])
    plan = solve(profile, replace(request, host_memory_bytes=least), told="step")
    assert plan.prediction.peak_host_bytes <= least
    assert f"is {found[1]}" in refused(profile, replace(request, host_memory_bytes=least * 97 // 100))
