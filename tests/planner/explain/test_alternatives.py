"""Other ways to train the same batch: on machines whose order is known, and against plans that are really made."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.explain.zero_infinity import Ways, tensors_of_model, zero_infinity_memory
from ssdplan.planner.predict.shortened import step_seconds
from ssdplan.planner.predict.simulator import simulate
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.plan import Compared, Plan, Saved
from ssdplan.plans.documents.profile import Machine, Profile
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import GIB, MIB, made_machine, made_model, made_profile, made_volume
from tests.planner.machines import machines

BATCH = 8
LINK = 1e12


def profile_of(*, blocks: int = 12, flops: float = 1e15, drive: float = 1e9, **machine: object) -> Profile:
    """By default bound by its drive alone."""
    return made_profile(
        machine=made_machine(
            volumes=(made_volume(read=drive, write=drive),), **{"link": LINK, "update_rate": 1e12, **machine}
        ),
        model=made_model(blocks=blocks, hidden=256, vocab=2048, flops=flops, micro_batch_sizes=(1, 2, 4, 8)),
    )


def rows_of(plan: Plan) -> dict[str, Compared]:
    return {row.name: row for row in plan.comparison}


def ideas_of(plan: Plan) -> list[Compared]:
    return [row for row in plan.comparison if row.kind == "idea"]


@pytest.mark.parametrize(("schedule", "n"), [("vertical", 1), ("vertical", 4), ("horizontal", 3), ("horizontal", 16)])
@pytest.mark.parametrize("slow", ["drive", "compute", "link", "cpu"])
def test_a_step_drawn_on_from_short_models_is_the_whole_ones(schedule: str, n: int, slow: str) -> None:
    """Behind each resource in turn; where several are as slow as each other a pipeline takes long to fill."""
    rates = {"drive": 1e9, "compute": 1e12, "link": 4e9, "cpu": 5e8}
    rates[slow] /= 8
    machine = made_machine(
        link=rates["link"],
        update_rate=rates["cpu"],
        volumes=(made_volume(read=rates["drive"], write=0.8 * rates["drive"]),),
    )
    model = made_model(blocks=48, hidden=128, vocab=4096, flops=rates["compute"])
    decision = decide(
        model,
        schedule=schedule,
        alpha=0.3 if schedule == "vertical" else 0.0,
        optimizer=0.4,
        parameters=0.4,
        checkpoints=0.4,
        micro_batches=n,
        chunk=1 << 18,
    )
    whole = simulate(build_schedule(model, decision).steady, model, machine, 1).seconds
    assert step_seconds(model, machine, decision) == pytest.approx(whole, rel=0.05)


def test_a_few_blocks_are_simulated_whole() -> None:
    model, machine = made_model(blocks=6, hidden=256), made_machine()
    decision = decide(model, micro_batches=3, optimizer=0.3)
    whole = simulate(build_schedule(model, decision).steady, model, machine, 1).seconds
    assert step_seconds(model, machine, decision) == whole


def test_few_pairs_of_what_never_leaves_the_device_are_simulated_whole() -> None:
    """Of 48 blocks a third send saved activations to host, which a model of 8 blocks cannot have exactly: its step says
    9% too much. Of more micro-batches the whole schedule would take long."""
    model = made_model(blocks=48, hidden=64, sequence=128, flops=1e10, rungs=((0.1, 0.25), (1.0, 0.0)))
    machine = made_machine(link=2e7, device_update_rate=1e12)
    saved = [Saved(rung="rung-1", tier="device", share=0.68), Saved(rung="rung-1", tier="host", share=0.32)]

    def both(n: int) -> tuple[float, float]:
        decision = decide(model, micro_batches=n, on_device=1.0, updated=1.0, inputs=1.0, saved=saved)
        whole = simulate(build_schedule(model, decision).steady, model, machine, 1).seconds
        return step_seconds(model, machine, decision), whole

    short, whole = both(1)
    assert short == whole
    short, whole = both(8)
    assert short == pytest.approx(whole, rel=0.01) and short != whole


@pytest.mark.parametrize("n", [2, 4, 8])
def test_behind_a_slow_drive_vertical_beats_horizontal_from_two_micro_batches_on(n: int) -> None:
    """GreedySnake 3: the horizontal schedule reads all parameters for each of them."""
    plan = solve(profile_of(), SolveRequest(96 * MIB, micro_batches=n, micro_batch_size=1))
    rows = rows_of(plan)
    own, horizontal = rows["vertical (this plan)"], rows["horizontal"]
    assert horizontal.fits and own.tokens_per_second > horizontal.tokens_per_second
    assert horizontal.ssd_read_bytes > own.ssd_read_bytes
    single = rows["single"]
    assert single.fits and single.tokens_per_second >= 0.99 * own.tokens_per_second


def test_a_row_is_about_the_plan_that_would_be_made() -> None:
    """Each schedule asked for by itself: budgets kept, and about the figures that the row promised."""
    profile, budget = profile_of(flops=2e13), 96 * MIB
    request = SolveRequest(budget, global_batch=BATCH, micro_batch_size=2)
    rows = rows_of(solve(profile, request))
    asked = {
        "horizontal": replace(request, schedule="horizontal"),
        "vertical, no delayed update": replace(request, delay_ratio=0.0),
        "single": replace(request, micro_batch_size=BATCH, schedule="single"),
    }
    for name, other in asked.items():
        made, row = solve(profile, other, told="step").prediction, rows[name]
        assert row.fits and row.host_bytes <= budget
        assert row.step_seconds == pytest.approx(made.step_seconds, rel=0.05), name
        assert row.ssd_write_bytes == pytest.approx(made.ssd_write_bytes, rel=0.05), name


def test_where_everything_fits_all_ways_are_alike() -> None:
    """Compute bound, with host memory for all: they differ by fill and drain, and by what crosses the link."""
    profile = profile_of(flops=2e11, host_memory=64 * GIB)
    plan = solve(profile, SolveRequest(8 * GIB, global_batch=BATCH, micro_batch_size=2))
    rows = rows_of(plan)
    best = rows["everything on device"]
    assert plan.prediction.ssd_bytes == 0
    for name in ("vertical (this plan)", "vertical, no delayed update", "horizontal", "single", "everything on host"):
        assert rows[name].fits and rows[name].ssd_read_bytes == rows[name].ssd_write_bytes == 0
        assert 0.95 * best.tokens_per_second < rows[name].tokens_per_second <= best.tokens_per_second * 1.0001
    assert best.fits and best.step_seconds == pytest.approx(_compute(plan))
    for idea in ideas_of(plan):
        assert idea.fits and idea.tokens_per_second == pytest.approx(best.tokens_per_second, rel=0.05)


def _compute(plan: Plan) -> float:
    model, size = plan.model, plan.decision.micro_batch_size
    timings = [model.timing(layer.layer_class, size) for layer in model.layers]
    forward = sum(timing.forward_seconds for timing in timings) - timings[-1].forward_seconds
    return plan.decision.micro_batches * (forward + sum(timing.backward_seconds for timing in timings))


def test_everything_in_memory_says_how_much_it_would_need() -> None:
    plan = solve(profile_of(), SolveRequest(96 * MIB, global_batch=BATCH))
    rows, elements = rows_of(plan), sum(state.elements for state in plan.model.states)
    host, device = rows["everything on host"], rows["everything on device"]
    assert host.host_bytes > 14 * elements and not host.fits and "of host memory" in host.note
    assert host.ssd_read_bytes == host.ssd_write_bytes == 0
    assert host.tokens_per_second > plan.prediction.tokens_per_second
    assert device.device_bytes > 18 * elements and device.tokens_per_second >= host.tokens_per_second
    enough = solve(
        profile_of(),
        SolveRequest(
            round(1.02 * host.host_bytes), global_batch=BATCH, micro_batch_size=plan.decision.micro_batch_size
        ),
    )
    assert enough.prediction.ssd_bytes == 0 and rows_of(enough)["everything on host"].fits


def test_each_idea_frees_memory_and_so_brings_tokens() -> None:
    plan = solve(profile_of(blocks=24), SolveRequest(360 * MIB, global_batch=BATCH, micro_batch_size=2))
    ideas = ideas_of(plan)
    assert [idea.name for idea in ideas] == [
        "ZeRO-Infinity's way",
        "+ buffers by class",
        "+ exact page-locked memory",
        "+ vertical schedule",
        "+ delayed update",
        "+ the program's placement",
    ]
    assert all(idea.fits and idea.host_bytes <= 360 * MIB for idea in ideas)
    tokens = [idea.tokens_per_second for idea in ideas]
    assert tokens == sorted(tokens) and tokens[2] > tokens[0] and tokens[3] > 1.2 * tokens[2]
    assert tokens[-1] == plan.prediction.tokens_per_second


def test_what_zero_infinity_needs_and_has_not_got() -> None:
    """MemAscend III: its buffers, all gradients in fp32 and one micro-batch's checkpoints, without any state."""
    plan = solve(profile_of(blocks=24), SolveRequest(64 * MIB, global_batch=BATCH, micro_batch_size=2))
    first, vertical = ideas_of(plan)[0], rows_of(plan)["+ vertical schedule"]
    tokens = plan.decision.micro_batch_size * plan.model.sequence_length
    needs = zero_infinity_memory(tensors_of_model(plan.model), Ways(overflow_copies=False), checkpoint_tokens=tokens)
    assert not first.fits and first.host_bytes == needs.total - needs.processes > 64 * MIB
    assert "needs" in first.note and "0% of parameters" in first.note
    assert vertical.fits and vertical.host_bytes <= 64 * MIB
    horizontal = rows_of(plan)["horizontal"]
    elements = sum(state.elements for state in plan.model.states)
    assert not horizontal.fits and horizontal.host_bytes > 4 * elements and "of host memory" in horizontal.note


def test_in_fp16_the_overflow_checks_copies_are_a_rung() -> None:
    profile = profile_of(blocks=24)
    half = profile.model_copy(update={"model": profile.model.model_copy(update={"precision": "fp16"})})
    plan = solve(half, SolveRequest(480 * MIB, global_batch=BATCH, micro_batch_size=2))
    names = [idea.name for idea in ideas_of(plan)]
    assert names[3:5] == ["+ overflow check without copies", "+ vertical schedule, delayed update"]
    exact, fused = ideas_of(plan)[2:4]
    assert fused.tokens_per_second >= exact.tokens_per_second and fused.host_bytes <= exact.host_bytes
    horizontal = rows_of(plan)["horizontal"]
    assert not horizontal.fits and horizontal.tokens_per_second is None and "overflow" in horizontal.note


def test_what_was_not_profiled_is_said() -> None:
    plan = solve(profile_of(), SolveRequest(96 * MIB, micro_batch_size=4, micro_batches=3))
    single = rows_of(plan)["single"]
    assert not single.fits and single.step_seconds is None and "12 rows" in single.note


def test_of_a_horizontal_plan_the_vertical_schedule_is_a_row() -> None:
    request = SolveRequest(96 * MIB, global_batch=BATCH, micro_batch_size=2, schedule="horizontal")
    plan = solve(profile_of(), request)
    rows = rows_of(plan)
    assert rows["horizontal (this plan)"].step_seconds == plan.prediction.step_seconds
    assert rows["vertical"].tokens_per_second > plan.prediction.tokens_per_second
    assert not any("vertical" in idea.name for idea in ideas_of(plan))
    assert ideas_of(plan)[-1].tokens_per_second == plan.prediction.tokens_per_second


@settings(deadline=None, max_examples=examples(12), print_blob=True)
@given(machine=machines(), budget=st.integers(0, 120), batch=st.sampled_from((1, 4, 8)), clip=st.booleans())
def test_every_plan_has_rows(machine: Machine, budget: int, batch: int, clip: bool) -> None:
    """Whatever the machine and however tight: rows are there, name each way once, and honour the budgets they keep."""
    profile = made_profile(machine=machine, model=made_model(blocks=5, hidden=128, tied=True))
    host = 24 * MIB + budget * MIB // 4
    plan = solve(profile, SolveRequest(host, global_batch=batch, clip_grad_norm=1.0 if clip else None))
    names = [row.name for row in plan.comparison]
    assert len(set(names)) == len(names) >= 7
    for row in plan.comparison:
        if row.fits:
            assert row.host_bytes <= host and row.tokens_per_second > 0
        else:
            assert row.note
