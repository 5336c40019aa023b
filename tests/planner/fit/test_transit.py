"""What passes through memory, by the estimate from small schedules, against the schedules of whole models."""

import gc
import weakref

import pytest

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.fit.budgets import Candidate
from ssdplan.planner.fit.fit import Fitter
from ssdplan.planner.program.placement import footprint
from ssdplan.planner.request import SolveRequest, budget_of, fixed_choices
from ssdplan.plans.gc_pause import no_collection
from tests.made.profiles import GIB

GIBS = 8


def fitter_of(model: str) -> Fitter:
    source = WhatIf(model, "rtx-5090", ["990 pro"], GIBS * GIB, micro_batch_sizes=(1, 4), sequence_length=512)
    profile, request = estimate(source), SolveRequest(GIBS * GIB)
    budget, fixed = budget_of(profile.machine, request), fixed_choices(profile.model, request)
    return Fitter(profile.model, profile.machine, budget, fixed)


@pytest.mark.parametrize("model", ["gemma-3-1b", "gemma-3-4b", "qwen3-4b"])
@pytest.mark.parametrize("candidate", [Candidate(1, 2), Candidate(4, 2), Candidate(1, 5)], ids=str)
def test_what_a_large_embedding_takes_on_its_way_is_what_schedules_say(model: str, candidate: Candidate) -> None:
    """By the whole model's schedules, with everything on ssd and with the embedding kept and updated on the device:
    host then spares the gradient's buffers and the embedding's parameters on their way, and the device what the update
    on host takes of it. The number and the size of micro-batches change neither."""
    fitter = fitter_of(model)
    pipeline = fitter.pipelines.at(candidate, mixed=False)
    buffers, large = pipeline.gradients, dict(pipeline.gradients.classes)
    largest = max(fitter.model.states, key=lambda state: state.elements)
    assert large[largest.state_class] == 1.0
    fitted = []
    for classes in ((), tuple(large)):
        decision = fitter.pipelines.decide(candidate.micro_batch_size, candidate.micro_batches, 0.0, classes)
        fitted.append(fitter.builder.build(candidate, decision))
    without, there = (each.needs for each in fitted)
    kept = footprint(fitter.model, fitted[1].decision).device_bytes
    in_transit = sum(nbytes for name, nbytes in pipeline.parameters if name in large)
    assert buffers.host > 0.05 * GIBS * GIB
    assert buffers.host + in_transit == pytest.approx(without.host - there.host, rel=0.005)
    assert pipeline.host == pytest.approx(without.host, rel=0.005)
    assert pipeline.device_peak == pytest.approx(without.device, rel=0.005)
    assert buffers.device == pytest.approx(without.device - (there.device - kept), rel=0.005)


def test_a_fitter_is_freed_with_its_schedules_as_soon_as_nobody_has_it() -> None:
    """While a plan is searched nobody looks for objects that refer to each other."""
    gc.collect()
    with no_collection():
        fitter = fitter_of("gemma-3-1b")
        sketch = fitter.sketch(Candidate(1, 2), fitter.branches(Candidate(1, 2)))
        assert sketch is not None
        schedule = weakref.ref(fitter.builder.in_short(sketch.decision))
        assert schedule() is not None
        del fitter, sketch
        assert schedule() is None
