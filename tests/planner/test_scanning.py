"""Which candidates are bounded before anything is simulated, and that those which are left out would not be chosen."""

from dataclasses import replace

import pytest

from ssdplan.planner import scanning
from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.fit.budgets import Candidate
from ssdplan.planner.request import SolveRequest, least_of, smallest_of
from ssdplan.planner.solve import Told, solve
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile

GIB = 1 << 30


@pytest.fixture(scope="module")
def profile() -> Profile:
    """A row alone takes a third longer than sixteen at once."""
    sizes = (1, 4, 16)
    source = WhatIf("llama-3.2-1b", "rtx-pro-6000", ["samsung-990-pro"], 8 * GIB, sequence_length=512)
    return estimate(replace(source, micro_batch_sizes=sizes, figures={"gpu.memory": 20.0 * GIB}))


def planned(profile: Profile, told: Told = "step", gib: int = 8) -> Plan:
    return solve(profile, SolveRequest(gib * GIB), told=told, compared=False)


def test_slow_sizes_are_left_out_and_change_no_plan(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded: list[int] = []
    bound = scanning.Scanner.bound

    def noted(self: scanning.Scanner, model: object, candidate: Candidate, branch: object) -> object:
        bounded.append(candidate.micro_batch_size)
        return bound(self, model, candidate, branch)  # type: ignore[arg-type]

    monkeypatch.setattr(scanning.Scanner, "bound", noted)
    plan = planned(profile)
    assert set(bounded) == {4, 16} or set(bounded) == {16}
    monkeypatch.setattr(scanning, "SLOW", 0.0)
    assert planned(profile).decision == plan.decision and 1 in bounded


def test_slow_sizes_are_among_the_alternatives(profile: Profile) -> None:
    plan = planned(profile, "all")
    assert {entry.micro_batch_size for entry in plan.alternatives} == {1, 4, 16}
    assert plan.decision == planned(profile).decision


def test_where_nothing_else_is_as_fast_slow_sizes_are_looked_at(profile: Profile) -> None:
    """A device that has room for one row at a time alone."""
    small = profile.machine.model_copy(update={"device_memory_bytes": 3 * GIB})
    plan = planned(profile.model_copy(update={"machine": small}))
    assert plan.decision.micro_batch_size == 1


def test_the_least_are_those_that_no_other_is_less_than() -> None:
    free = [Candidate(size, count) for size in (1, 2, 4) for count in (1, 2, 8)]
    assert least_of(free) == [Candidate(1, 1)]
    assert smallest_of(free) == [Candidate(1, 1), Candidate(2, 1), Candidate(4, 1)]
    batch = [Candidate(1, 8), Candidate(2, 4), Candidate(4, 2)]
    assert sorted(least_of(batch), key=lambda each: each.micro_batch_size) == batch
