"""What a budget of device memory is used for: states that the user has placed, saved activations beside them, and
everything, where there is room; and that more memory is never predicted to be slower."""

from typing import Any

import pytest

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.fit.kept import everything
from ssdplan.planner.program.choices import FixedChoices, Limits
from ssdplan.planner.program.program import solve_program
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile

GIB = 1 << 30


def profile_of(**changes: Any) -> Profile:
    usual: dict[str, Any] = {
        "model": "llama-3.2-1b",
        "gpu": "rtx-4090",
        "ssds": ("samsung-990-pro",),
        "host_memory_bytes": 32 * GIB,
        "sequence_length": 1024,
        "micro_batch_sizes": (4,),
    }
    return estimate(WhatIf(**(usual | changes)))


def planned(profile: Profile, gib: float, **asked: Any) -> Plan:
    return solve(profile, SolveRequest(int(gib * GIB), **asked), compared=False)


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


def test_a_limit_rules_out_nothing_that_is_fixed() -> None:
    """Whether it has room, its schedule says exactly; beside it nothing is saved there."""
    profile = profile_of()
    found = solve_program(
        profile.model, profile.machine, micro_batch_size=4, micro_batches=4,
        limits=Limits(64.0 * GIB, device_bytes=0.0), fixed=FixedChoices(kept=everything(profile.model)),
    )  # fmt: skip
    assert found is not None and all(place.parameters_device == 1.0 for place in found.placement.values())
    assert not any(each.tier == "device" for shares in found.saved.values() for each in shares)
