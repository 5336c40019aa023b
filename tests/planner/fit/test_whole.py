"""Whole states: a better part never makes the step longer by what rounding to whole states loses."""

from dataclasses import replace

import pytest

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.fit.budgets import Candidate
from ssdplan.planner.fit.fit import Fitter
from ssdplan.planner.fit.found import Branch
from ssdplan.planner.program.choices import KeptWithin
from ssdplan.planner.request import SolveRequest, budget_of, fixed_choices
from tests.made.profiles import GIB

CANDIDATE = Candidate(4, 36)


def fitter_of(**figures: float) -> Fitter:
    """8B on an RTX 4090 whose compute is as fast as its drive: the device has room for an embedding or for blocks."""
    figures = {f"gpu.{name.replace('_', '-')}": value for name, value in figures.items()} | {"gpu.flops": 357e12}
    profile = estimate(
        WhatIf("llama-3.1-8b", "rtx-4090", ["990 pro"], 64 * GIB, micro_batch_sizes=(4,), figures=figures)
    )
    request = SolveRequest(64 * GIB, micro_batch_size=4, micro_batches=36)
    return Fitter(
        profile.model, profile.machine, budget_of(profile.machine, request), fixed_choices(profile.model, request)
    )


def anywhere(fitter: Fitter) -> Branch:
    """The branch whose activation checkpoints may lie anywhere."""
    return fitter.branches(CANDIDATE)[-1]


def test_more_memory_bandwidth_is_not_slower_by_what_rounding_loses() -> None:
    """An embedding of 2 GB of which the program keeps 99% is kept whole, and not given up."""
    slower, faster = fitter_of(), fitter_of(memory_bandwidth=2016e9)
    seconds = [fitter.seconds(CANDIDATE, anywhere(fitter)) for fitter in (slower, faster)]
    assert seconds[1] < seconds[0]
    for fitter, found in zip((slower, faster), seconds, strict=True):
        bound = fitter.answers.program(CANDIDATE, anywhere(fitter), "seconds")
        assert bound is not None and bound.seconds <= found * (1 + 5e-3) and found < 1.04 * bound.seconds
        whole = fitter.answers.whole_states(CANDIDATE, anywhere(fitter), "seconds").fixed.kept
        assert whole is not None
        for name, shares in whole.items():
            states = sum(state.state_class == name for state in fitter.model.states)
            assert all(share * states == pytest.approx(round(share * states)) for share in shares)


def test_the_program_keeps_no_more_and_no_less_than_it_may() -> None:
    fitter = fitter_of(memory_bandwidth=2016e9)
    branch = anywhere(fitter)
    for within in (KeptWithin("block", (0.0, 0.25)), KeptWithin("block", (0.5, 1.0)), KeptWithin("head", (0.0, 0.0))):
        part = replace(branch, fixed=replace(branch.fixed, kept_within=(within,)))
        found = fitter.answers.program(CANDIDATE, part, "seconds")
        assert found is not None
        share = found.placement[within.state_class].parameters_device
        assert within.device[0] - 1e-6 <= share <= within.device[1] + 1e-6
    part = replace(branch, fixed=replace(branch.fixed, kept_within=(KeptWithin("block", (0.97, 1.0), (0.97, 1.0)),)))
    found = fitter.answers.program(CANDIDATE, part, "seconds")
    assert found is None, "124 GB of blocks and their optimizer states in 23 GiB"
    assert KeptWithin("embedding", (1.0, 1.0), (1.0, 1.0)).split(0.25, 0.5, updated=True) == (
        KeptWithin("embedding", (1.0, 1.0), (1.0, 0.25)),
        KeptWithin("embedding", (1.0, 1.0), (0.5, 1.0)),
    )
