"""Planning is quick, by what depends on nobody else who uses the machine: how often its costly steps are taken, how
many operations they are given, and how many calls an operation costs them.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.fit import estimate as building
from ssdplan.planner.fit import transit as pipeline
from ssdplan.planner.predict.simulator import simulate
from ssdplan.planner.program import program
from ssdplan.planner.ranked import PARTS
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.errors import InfeasibleError
from ssdplan.plans.schedule.build import build_schedule
from tests.made.decisions import decide

GIB = 1 << 30
SIZES = (1, 2, 4)
BUILD_CALLS, SIMULATE_CALLS = 50, 6.5
"""Of Python functions for an operation of 96 layers: 39.8 and 4.9 (2026-11-28)."""
BUILT = 1_000_000
"""Operations of all schedules that a solve builds: 920,000 (2026-11-29)."""


def large(model: str, gpu: str, ssd: str, host_gib: int) -> Profile:
    return estimate(WhatIf(model, gpu, [ssd], host_gib * GIB, micro_batch_sizes=SIZES))


def calls_of(work: Callable[[], Any]) -> int:
    """How many Python functions `work` calls."""
    found = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often whole and shortened schedules are built and programs solved from now on, and the operations built."""
    found: Counter[str] = Counter()

    def build(model: Any, *others: Any) -> Any:
        schedule = build_schedule(model, *others)
        found["whole" if len(model.layers) > 80 else "shortened"] += 1
        found["operations"] += sum(len(schedule.emitted(name)) for name in ("first", "steady", "flush"))
        return schedule

    def minimise(*given: Any) -> Any:
        found["programs"] += 1
        return before(*given)

    before = program.minimise
    for module in (building, pipeline):
        monkeypatch.setattr(module, "build_schedule", build)
    monkeypatch.setattr(program, "minimise", minimise)
    return found


def test_a_solve_builds_and_programs_seldom(counts: Counter[str]) -> None:
    profile = large("llama-3.1-70b", "rtx-4090", "samsung-990-pro*2", 64)
    plan = solve(profile, SolveRequest(host_memory_bytes=64 * GIB))
    # A whole schedule of the plan alone, and at times one more when a rounding breaks a budget; two of shortened models
    # for each candidate that is ranked and each row that is compared, and one for each look at what a decision takes.
    simulated = sum(entry.simulated for entry in plan.alternatives)
    print(counts, simulated, len(plan.alternatives))
    assert counts["whole"] <= 2 and simulated <= 6
    assert counts["shortened"] <= 55
    assert counts["operations"] < BUILT
    # At most two branches a candidate and its bound without compute; besides, what is asked of a candidate when fitted,
    # and two branches of the batches of each size that may have more room to save activations: 357 (2026-11-29).
    assert counts["programs"] <= 3 * len(plan.alternatives) + 100 + 2 * len(SIZES) * len(PARTS)


def test_that_nothing_fits_is_known_before_anything_is_scanned(counts: Counter[str]) -> None:
    """By what the leanest plan of one row takes at least; the least that would do is read from one whole schedule."""
    profile = estimate(WhatIf("llama-3.1-70b", "rtx-4090", ["samsung-990-pro"], 2 * GIB))
    with pytest.raises(InfeasibleError, match="host memory of 2 GiB is too little"):
        solve(profile, SolveRequest(host_memory_bytes=2 * GIB), told="screen")
    assert counts["whole"] <= 2 and counts["shortened"] <= 16 and counts["programs"] <= 60


def test_96_layers_of_16_micro_batches_are_expanded_and_simulated_in_few_calls() -> None:
    profile = large("gpt-175b", "a100-40gb", "samsung-pm9a3", 400)
    model = profile.model
    decision = decide(model, alpha=0.25, optimizer=0.3, checkpoints=0.5, micro_batches=16, chunk=1 << 25)
    steady = build_schedule(model, decision).steady
    assert len(model.layers) >= 96 and len(steady.ops) > 20_000
    assert calls_of(lambda: build_schedule(model, decision)) < BUILD_CALLS * len(steady.ops)
    assert calls_of(lambda: simulate(steady, model, profile.machine, 1)) < SIMULATE_CALLS * len(steady.ops)
