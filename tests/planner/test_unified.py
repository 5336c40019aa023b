"""Plans for unified memory: the program's forms are the graph's own bytes, and every promise holds."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.predict.peaks import HOLES_DIFFER, predict_peaks
from ssdplan.planner.program.placement import footprint
from ssdplan.planner.request import SolveRequest
from ssdplan.plans.documents.profile import Kernels, Machine, Model, Timing
from ssdplan.plans.documents.rows import row_lengths
from ssdplan.plans.errors import InfeasibleError, UsageError
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import examples
from tests.made.profiles import MIB, made_machine, made_model, made_profile, made_volume, planned
from tests.planner.machines import machines, models
from tests.planner.program.test_program import RELAXED, SHARES, decision_of, kept_of, scale_of, solved
from tests.planner.test_solve import QUICK, check, least_named


@settings(RELAXED, max_examples=examples(25))
@given(models(), machines(), st.integers(1, 4), st.floats(0, 1), SHARES, SHARES, st.sampled_from((None, 0.0, 0.4, 1.0)))
def test_counts_what_the_graph_moves_and_keeps(
    model: Model, machine: Machine, n: int, memory: float, device: float, turn: float, alpha: float | None
) -> None:
    kept = kept_of(model, device, turn)
    host = (1 + memory) * scale_of(model, machine, 1, n)  # across the turn parameters are kept a second time
    result = solved(model, machine, 1, n, host, kept=kept, delay_ratio=alpha, unified_memory=True)
    assert result is not None
    decision = decision_of(model, result, 1, n).model_copy(update={"unified_memory": True})
    schedule = build_schedule(model, decision)
    traffic = schedule.traffic("steady")
    # Of checkpoints whole ones are kept, so of each kind of bytes one may be on the other side.
    grain = 2 * len(model.layers) * (2048 * 18 + n * 4096) + 4 * model.sequence_length * model.hidden_size * 4
    assert traffic["read"] == pytest.approx(result.ssd_read_bytes, abs=2 * grain)
    assert traffic["write"] == pytest.approx(result.ssd_write_bytes, abs=2 * grain)
    assert schedule.arenas["ssd"] == pytest.approx(result.ssd_bytes, abs=grain)
    assert footprint(model, decision).host_bytes == pytest.approx(result.host_bytes, rel=1e-4, abs=8192)
    assert traffic["h2d"] == 0
    waiting = 4 * result.delay_ratio * sum(state.elements for state in model.states)
    assert traffic["d2h"] == pytest.approx(waiting, abs=grain)
    stays = sum(b.nbytes for b in schedule.buffers if b.tier == "host" and not b.pool and b.shared_by < 0)
    assert stays <= footprint(model, decision).host_bytes + grain


def test_what_can_be_reclaimed_is() -> None:
    """Also where no memory is wanting: a schedule puts delayed gradients where checkpoints were, always."""
    model = made_model(blocks=2, hidden=128, vocab=64, sequence=16, precision="fp32", tied=False)
    volume = made_volume(read=5e7, write=2e8, mixed=((3.125e7, 1.25e8),))
    machine = made_machine(cores=1, link=1e9, d2h=1e9, update_rate=1e8, volumes=(volume,))
    host = 2 * scale_of(model, machine, 1, 2)
    result = solved(model, machine, 1, 2, host, kept=kept_of(model, 0.3, 0.3), unified_memory=True)
    assert result is not None and result.delay_ratio > 0.0
    decision = decision_of(model, result, 1, 2).model_copy(update={"unified_memory": True})
    assert footprint(model, decision).host_bytes == pytest.approx(result.host_bytes, rel=1e-4)


@QUICK
@given(models(), machines(), st.floats(0.02, 1.3), st.sampled_from((1, 4, 12)), st.sampled_from((None, 1.0)))
def test_every_plan_keeps_its_promises(model, machine, memory: float, batch: int | None, clip: float | None) -> None:
    profile = made_profile(machine=machine.model_copy(update={"compute_shares_cpu": True}), model=model)
    states = sum(state.elements for state in model.states)
    request = SolveRequest(
        host_memory_bytes=int(memory * 20 * states) + MIB, global_batch=batch, unified_memory=True, clip_grad_norm=clip
    )
    try:
        plan = planned(profile, request)
    except InfeasibleError as error:
        constraint, least = least_named(error)
        assert constraint == "host memory" and least > request.host_memory_bytes
        request = replace(request, host_memory_bytes=least)
        plan = planned(profile, request)
    check(profile, request, plan)
    assert plan.decision.unified_memory and plan.prediction.peak_device_bytes == 0
    peaks = predict_peaks(build_schedule(model, plan.decision), model, plan.decision)
    timings = [model.timing(entry.name, plan.decision.micro_batch_size) for entry in model.classes]
    workspace = max(max(t.forward_workspace_bytes, t.backward_workspace_bytes) for t in timings)
    context = plan.decision.micro_batches * model.context_bytes[plan.decision.micro_batch_size]
    assert peaks.host - peaks.host_arena == workspace + context


@pytest.mark.parametrize("holes", [0, 9 * MIB, 50 * MIB])
def test_a_process_grows_by_what_its_profile_saw(holes: int) -> None:
    """What the class that takes most grew by beyond the workspace is promised, and a part of it more, as runs differ,
    in place of an allowance for any model; what others leave is used again."""
    profile = small()
    classes = profile.model.classes

    def growing(timing: Timing, beyond: int | None) -> Timing:
        growth = None if beyond is None else timing.backward_workspace_bytes + beyond
        return timing.model_copy(update={"process_growth_bytes": growth})

    def predicted(*beyond: int | None) -> tuple[int, int]:
        grown = tuple(
            entry.model_copy(update={"timings": tuple(growing(timing, more) for timing in entry.timings)})
            for entry, more in zip(classes, beyond, strict=True)
        )
        seen = profile.model_copy(update={"model": profile.model.model_copy(update={"classes": grown})})
        request = SolveRequest(16 * MIB, micro_batch_size=1, micro_batches=4, unified_memory=True)
        found = planned(seen, request).prediction
        assert found.peak_process_bytes is not None
        return found.peak_process_bytes, found.peak_host_bytes

    unknown = predicted(*(None for _ in classes))
    assert predicted(holes, *(None for _ in classes[1:])) == unknown, "one class without a figure leaves all unknown"
    process, host = predicted(*(holes for _ in classes))
    without, _ = predicted(*(0 for _ in classes))
    assert host == unknown[1], "the plan is the same"
    promised = holes + holes // HOLES_DIFFER
    assert process - without == promised and without < unknown[0]
    workspaces = [max(timing.backward_workspace_bytes for timing in entry.timings) for entry in classes]
    for place, workspace in enumerate(workspaces):
        alone, _ = predicted(*(holes * (place == other) for other in range(len(classes))))
        assert alone - without == max(promised + workspace - max(workspaces), 0)


def small(**figures: float):
    return made_profile(
        machine=made_machine(shared=True, update_rate=2e8, volumes=(made_volume(read=1e9, write=8e8),), **figures),
        model=made_model(blocks=12, hidden=128, vocab=1024, sequence=64, flops=2e12, tied=True),
    )


@pytest.mark.parametrize("memory", [14, 20, 30, 60])
def test_what_is_not_copied_is_faster_than_what_is(memory: int) -> None:
    """Within the DRAM that an emulated device and its host take together."""
    copied = SolveRequest(memory * MIB, micro_batch_size=2, micro_batches=4, device_memory_bytes=memory * MIB)
    separate = planned(small(), copied).prediction
    host = memory * MIB + separate.peak_device_bytes
    unified = planned(small(), replace(copied, host_memory_bytes=host, device_memory_bytes=None, unified_memory=True))
    assert unified.prediction.h2d_bytes == 0 < separate.h2d_bytes
    assert unified.prediction.step_seconds < separate.step_seconds


def test_more_memory_is_not_slower() -> None:
    seconds = [
        planned(
            small(), SolveRequest(memory * MIB, micro_batch_size=2, micro_batches=4, unified_memory=True)
        ).prediction
        for memory in (12, 16, 24, 32, 48)
    ]
    for less, more in pairwise(seconds):
        assert more.program_seconds <= less.program_seconds * (1 + 1e-6)
        assert more.step_seconds <= less.step_seconds * 1.01


def test_fixed_residencies_are_of_whole_states() -> None:
    request = SolveRequest(
        60 * MIB,
        micro_batches=4,
        micro_batch_size=2,
        unified_memory=True,
        residency={"parameters": 0.5, "optimizer": 0.25, "checkpoints": 0.5},
    )
    plan = planned(small(), request)
    block = plan.decision.placement["block"]
    assert block.parameters_device == 0.5 and block.parameters_prompt_host == block.parameters_delayed_host == 0
    assert block.optimizer_prompt_host + block.optimizer_delayed_host == pytest.approx(0.25)
    assert plan.decision.checkpoint_host == 0.5


@pytest.mark.parametrize(
    ("request_", "shared", "words"),
    [
        (SolveRequest(MIB, unified_memory=True), False, "has a memory of its own"),
        (SolveRequest(MIB, device_memory_bytes=MIB, unified_memory=True), True, "no device memory to limit"),
        (SolveRequest(MIB, unified_memory=True, residency={"device": 1.0}), True, "say parameters"),
    ],
)
def test_requests_that_cannot_be_meant(request_: SolveRequest, shared: bool, words: str) -> None:
    profile = made_profile(machine=made_machine(shared=shared), model=made_model())
    with pytest.raises(UsageError, match=words):
        planned(profile, request_)


@settings(deadline=None, max_examples=examples(20), print_blob=True)
@given(models(), machines(), st.integers(1, 6), st.floats(0.3, 1))
def test_the_program_is_a_lower_bound_of_what_is_simulated(
    model: Model, machine: Machine, n: int, memory: float
) -> None:
    profile = made_profile(machine=machine.model_copy(update={"compute_shares_cpu": True}), model=model)
    states = sum(state.elements for state in model.states)
    request = SolveRequest(
        int(memory * 20 * states) + 32 * MIB, micro_batch_size=2, micro_batches=n, unified_memory=True
    )
    prediction = planned(profile, request).prediction
    # A step that waits for the drive in one stage may hide behind neighbours that compute: a percent.
    assert prediction.step_seconds >= 0.99 * prediction.program_seconds


def test_a_process_keeps_kernels_for_the_lengths_that_its_rows_may_have() -> None:
    """For a quarter, a half and the whole of the sequence length, at its own micro-batch size and no other's."""
    profile = small()
    length = profile.model.sequence_length
    assert row_lengths(length) == (length // 4, length // 2, length)

    def predicted(size: int, *kernels: tuple[int, int]) -> tuple[int, Model]:
        kept = tuple(Kernels(tokens=tokens, kept_bytes=nbytes) for tokens, nbytes in kernels)
        seen = profile.model_copy(update={"model": profile.model.model_copy(update={"kernels": kept})})
        request = SolveRequest(16 * MIB, micro_batch_size=size, micro_batches=2, unified_memory=True)
        plan = planned(seen, request)
        assert plan.prediction.peak_process_bytes is not None
        return plan.prediction.peak_process_bytes, plan.model

    kernels = ((length // 4, 1), (length // 2, 10), (length, 100), (2 * length, 1000), (length + 1, 10_000))
    for size, all_rows, full_rows in ((1, 111, 100), (2, 1110, 1000)):
        without, _ = predicted(size)
        process, model = predicted(size, *kernels)
        assert process - without == all_rows == model.kernel_bytes(size)
        assert model.kernel_bytes(size, full_rows=True) == full_rows
