"""Lean ways: what they take at least, by a few layers, against the schedules of whole models."""

from dataclasses import astuple, replace

import pytest

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.fit.budgets import Candidate
from ssdplan.planner.fit.fit import Fitter
from ssdplan.planner.fit.found import Solved
from ssdplan.planner.request import SolveRequest, budget_of, fixed_choices
from tests.made.profiles import GIB

LARGE, EIGHT_ROWS = WhatIf("phi-4", "rtx-3090", ["980 pro"], GIB, micro_batch_sizes=(2,)), Candidate(2, 4)


def fitter_within(what_if: WhatIf, host: int) -> Fitter:
    profile = estimate(replace(what_if, host_memory_bytes=host))
    request = SolveRequest(host, recompute="all")
    budget, fixed = budget_of(profile.machine, request), fixed_choices(profile.model, request)
    return Fitter(profile.model, profile.machine, budget, fixed)


def test_no_way_takes_less_than_it_takes_at_least() -> None:
    """Of the blocks that a device keeps a share of, less passes through than of those that it keeps none of."""
    for way in fitter_within(LARGE, GIB).lean_ways.of(EIGHT_ROWS):
        assert all(least <= exact for least, exact in zip(astuple(way.at_least), astuple(way.needs), strict=True))


@pytest.mark.parametrize("more", [0, GIB // 8, GIB // 2])
def test_what_is_said_to_do_does(more: int) -> None:
    """The refusal named less than what it refused."""
    least = fitter_within(LARGE, GIB).least(EIGHT_ROWS, "host memory")
    assert least is not None and least < GIB
    fitter = fitter_within(LARGE, least + more)
    solved: Solved | None = None
    if not fitter.cannot_fit(EIGHT_ROWS):
        solved = fitter.solve(EIGHT_ROWS, fitter.branches(EIGHT_ROWS))
    assert solved is not None and not solved.fitted.needs.over(fitter.budget)
