"""Plans by Muon: no matrix is cut, fractions are met over a class, bytes and seconds are those of whole matrices."""

from dataclasses import replace

import pytest

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.predict.simulator import simulate
from ssdplan.planner.program.stages import Work
from ssdplan.planner.program.traffic import layer_groups, stages
from ssdplan.planner.program.variables import CHECKPOINTS_ON_HOST, CONSTANT, DELAY_RATIO
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve, solve_and_build
from ssdplan.plans.documents.matrices import Matrix, longer, seconds_of
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.errors import UsageError
from ssdplan.plans.graph.ops import Schedule, Update
from ssdplan.plans.graph.verify import verify
from ssdplan.plans.views.plan_text import describe_plan
from tests.made.profiles import GIB
from tests.planner.test_agreement import check

SOURCE = WhatIf("smollm2-135m", "rtx-4090", ["samsung-990-pro"], 2 * GIB, sequence_length=256, micro_batch_sizes=(1,))
ON_SSD = SolveRequest(
    2 * GIB,
    micro_batches=4,
    delay_ratio=0.0,
    residency={"optimizer": 0.0, "parameters": 0.0, "checkpoints": 1.0, "device": 0.0},
)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return estimate(replace(SOURCE, muon=True))


def test_a_matrix_moves_eight_bytes_less_an_element_than_by_adamw(profile: Profile) -> None:
    by_muon, by_adamw = (solve(each, ON_SSD, told="step") for each in (profile, estimate(SOURCE)))
    assert by_muon.decision.optimizer == "muon" and by_adamw.decision.optimizer == "adamw"
    elements = sum(state.elements for state in profile.model.states if state.muon)
    moved = [plan.prediction.ssd_read_bytes + plan.prediction.ssd_write_bytes for plan in (by_adamw, by_muon)]
    assert moved[0] - moved[1] == pytest.approx(8 * elements, rel=2e-3)  # states of norms are padded to whole grains
    check(by_muon)


def test_fractions_are_met_over_a_class_and_no_matrix_is_cut(profile: Profile) -> None:
    residency = {"optimizer": 0.4, "parameters": 0.6}
    plan, schedule = solve_and_build(
        profile, SolveRequest(2 * GIB, micro_batches=4, delay_ratio=0.3, residency=residency), compared=False
    )
    verify(schedule)
    homes = [home for home in schedule.homes if home.matrices]
    largest = max(matrix.stop - matrix.start for home in homes for matrix in home.matrices)
    total = sum(home.elements for home in homes)
    assert total == sum(state.elements for state in profile.model.states if state.muon)
    late = sum(home.elements for home in homes if home.delayed)
    assert abs(late - 0.3 * total) <= largest
    on_host = sum(
        home.elements for home in homes if home.optimizer and schedule.buffers[home.optimizer.buffer].tier == "host"
    )
    assert abs(on_host - 0.4 * total) <= 2 * largest  # of the prompt and of the delayed part
    timeline = simulate(schedule.steady, plan.model, plan.machine, plan.decision.micro_batch_size)
    for op, start, end in zip(schedule.steady.ops, timeline.starts, timeline.ends, strict=True):
        if isinstance(op, Update) and op.matrices:
            alone = seconds_of(plan.model.matrix_updates, op.matrices, on_device=op.on_device)
            assert alone and end - start >= alone * (1 - 1e-9)
    assert "muon" in describe_plan(plan, schedule)
    assert Plan.model_validate_json(plan.text()) == plan


def test_a_cut_inside_a_matrix_is_refused(profile: Profile) -> None:
    plan, schedule = solve_and_build(profile, ON_SSD, compared=False)

    def hostile(name: str) -> object:
        graph = schedule.make_graph(name)  # type: ignore[arg-type]
        ops = (replace(op, stop=op.stop - 2048) if isinstance(op, Update) and op.matrices else op for op in graph.ops)
        return replace(graph, ops=tuple(ops))

    with pytest.raises(AssertionError, match="inside a matrix"):
        verify(Schedule(schedule.buffers, schedule.arenas, schedule.homes, hostile, schedule.emitted))  # type: ignore[arg-type]
    index = next(index for index, state in enumerate(plan.model.states) if state.muon)
    state = plan.model.states[index]
    for start in (state.matrices[1].start + 2048, 0):
        second = Matrix(rows=state.matrices[1].rows, columns=state.matrices[1].columns, start=start)
        text = state.model_copy(update={"matrices": (state.matrices[0], second, *state.matrices[2:])}).model_dump_json()
        with pytest.raises(ValueError, match="begins at element"):
            type(state).model_validate_json(text)
    for changed in ({"ranks": 2}, {"optimizer": "adamw"}):
        edited = plan.model_copy(update={"decision": plan.decision.model_copy(update=changed)})
        with pytest.raises(ValueError, match=r"whole matrices|states of matrices"):
            Plan.model_validate_json(edited.text())


def test_what_a_profile_is_not_for_is_refused_with_the_way_out(profile: Profile) -> None:
    with pytest.raises(UsageError, match=r"made for muon.*--optimizer adamw"):
        solve(profile, replace(ON_SSD, optimizer="adamw"))
    with pytest.raises(UsageError, match=r"made for adamw.*--optimizer muon"):
        solve(estimate(SOURCE), replace(ON_SSD, optimizer="muon"))
    assert profile.model.figures == "estimated"
    measured = profile.model_copy(update={"model": profile.model.model_copy(update={"figures": "measured"})})
    for source, instead in ((profile, "or leave --optimizer out"), (measured, "or make a profile for adamw")):
        with pytest.raises(UsageError, match=f"momentum in fp32; take fp32, {instead}"):
            solve(source, replace(ON_SSD, optimizer_states="bf16"))
        with pytest.raises(UsageError, match=f"shares of several ranks cut; take 1 rank, {instead}"):
            solve(source, replace(ON_SSD, ranks=2))


def test_slower_matrices_make_a_slower_step(profile: Profile) -> None:
    on_host = [each.model_copy(update={"device_seconds": None}) for each in profile.model.matrix_updates]
    models = [profile.model.model_copy(update={"matrix_updates": longer(on_host, factor)}) for factor in (1.0, 50.0)]
    steps = [solve(profile.model_copy(update={"model": model}), ON_SSD, told="step").prediction for model in models]
    assert steps[1].step_seconds > 2 * steps[0].step_seconds and steps[1].bound_by == "cpu updates"


def test_a_gpu_that_is_faster_updates_all_matrices(profile: Profile) -> None:
    """Their states come there and go back; the program counts the bytes that the graph moves."""
    for request in (
        ON_SSD,
        replace(ON_SSD, delay_ratio=1.0, residency={"optimizer": 0.0, "parameters": 1.0, "device": 0.0}),
    ):
        plan, schedule = solve_and_build(profile, request, compared=False)
        assert plan.decision.matrices_on_device
        verify(schedule)
        updates = [op for op in schedule.steady.ops if isinstance(op, Update) and op.matrices]
        assert updates and all(op.resource == "compute" for op in updates)
        moved = {kind: schedule.traffic("steady")[kind] for kind in ("h2d", "d2h")}
        work = Work(
            micro_batch_size=1, micro_batches=4, schedule="vertical", matrices_on_device=True
        )  # nothing stays on the device
        every = stages(plan.model, layer_groups(plan.model), work)
        at = {CONSTANT: 1.0, DELAY_RATIO: plan.decision.delay_ratio, CHECKPOINTS_ON_HOST: 1.0}
        for kind in moved:
            found = sum(
                stage.count * factor * at.get(variable, 0.0)
                for stage in every
                for variable, factor in getattr(stage, f"{kind}_bytes").items()
            )
            assert found == pytest.approx(moved[kind], rel=1e-3), kind
    slow = profile.model.model_copy(update={"matrix_updates": longer(profile.model.matrix_updates, 1e-3)})
    plan = solve(profile.model_copy(update={"model": slow}), ON_SSD, compared=False)
    assert not plan.decision.matrices_on_device
