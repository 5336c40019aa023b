"""Planning of models that are frozen, or kept in fp32, in part: what the program counts is what the graph moves, every
plan keeps its promises, and freezing more is never slower and never takes more memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.predict.peaks import predict_peaks
from ssdplan.planner.program import horizontal
from ssdplan.planner.program.choices import FixedChoices, KeptShares, Limits
from ssdplan.planner.program.placement import footprint
from ssdplan.planner.program.program import program_bound, solve_program
from ssdplan.planner.program.traffic import layer_groups, stages, total_bytes
from ssdplan.planner.program.variables import CHECKPOINTS_ON_HOST, CONSTANT, value, variables_of
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.planner.solve_again import request_of
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.documents.state_layout import parameters_bytes
from ssdplan.plans.errors import InfeasibleError
from ssdplan.plans.graph.ops import Backward
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.plan_text import describe_plan
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import GIB, MIB, made_machine, made_model, made_profile, made_volume, with_fp32, with_frozen
from tests.made.works import work_of
from tests.planner.machines import machines, models
from tests.planner.program.test_program import at, decision_of
from tests.planner.test_solve import check, least_named

RELAXED = settings(deadline=None, max_examples=examples(40), print_blob=True)
SHARE = st.sampled_from((0.0, 0.0, 0.4, 1.0, 1.0))


@st.composite
def frozen_models(draw: st.DrawFn) -> Model:
    """Any part of a model: so many layers from below, or any of them, whole or in part. Of some in bf16 a part is in
    fp32."""
    whole = draw(models())
    if whole.precision != "fp32" and draw(st.booleans()):
        whole = with_fp32(whole, [draw(st.sampled_from((0.0, 0.1, 1.0))) for _ in whole.states])
    below = draw(st.integers(0, len(whole.states)))
    shares = [1.0 if number < below else draw(SHARE) for number in range(len(whole.states))]
    if all(share == 1.0 for share in shares):
        shares[draw(st.integers(0, len(shares) - 1))] = 0.0
    return with_frozen(whole, shares)


def everything(model: Model, n: int) -> float:
    """Host bytes with all of it resident."""
    trained = sum(state.elements for state in model.states if not state.frozen)
    parameters = parameters_bytes(model.states, model.precision)
    checkpoint = 4 * model.sequence_length * model.hidden_size * 4
    return 16 * trained + parameters + n * len(model.layers) * checkpoint


def kept_of(model: Model, device: float, turn: float) -> dict[str, tuple[float, float]]:
    """About these fractions of each class, in whole states; across the turn only blocks that have one."""
    kept = {}
    lowest = max(model.first_trained, 1)
    for name in {state.state_class for state in model.states}:
        states = [index for index, state in enumerate(model.states) if state.state_class == name]
        whole = round(device * len(states))
        turns = all(set(model.uses(index)) <= set(range(lowest, len(model.layers) - 1)) for index in states)
        across = min(round(turn * len(states)), len(states) - whole) if turns else 0
        kept[name] = KeptShares(whole / len(states), across / len(states))
    return kept


SHARES = st.sampled_from((0.0, 0.3, 0.5, 1.0))


@RELAXED
@given(
    frozen_models(), machines(), st.integers(1, 4), st.floats(0, 1), SHARES, SHARES,
    st.sampled_from((None, 0.0, 0.4, 1.0)), st.booleans(),
)  # fmt: skip
def test_counts_what_the_graph_moves(
    model: Model,
    machine: Machine,
    n: int,
    memory: float,
    device: float,
    turn: float,
    alpha: float | None,
    unified: bool,
) -> None:
    """Bytes of every resource, of the store and of the host agree with the built schedule up to the grain."""
    kept = kept_of(model, device, turn)
    result = solve_program(
        model,
        machine,
        micro_batch_size=1,
        micro_batches=n,
        limits=Limits((1 + memory) * everything(model, n) if unified else memory * everything(model, n)),
        fixed=FixedChoices(delay_ratio=alpha, kept=kept, unified_memory=unified),
    )
    assert result is not None
    decision = decision_of(model, result, 1, n).model_copy(update={"unified_memory": unified})
    schedule = build_schedule(model, decision)
    traffic = schedule.traffic("steady")
    checkpoints = 4 * model.sequence_length * model.hidden_size * 4 if unified else 0
    grain = 2 * len(model.states) * (2048 * 18 + n * 4096) + checkpoints
    assert traffic["read"] == pytest.approx(result.ssd_read_bytes, abs=2 * grain)
    assert traffic["write"] == pytest.approx(result.ssd_write_bytes, abs=2 * grain)
    assert schedule.arenas["ssd"] == pytest.approx(result.ssd_bytes, abs=grain)
    kept_bytes = footprint(model, decision).host_bytes
    assert kept_bytes <= result.host_bytes * (1 + 1e-4) + 8192  # with room to spare less may be reclaimed
    residents = predict_peaks(schedule, model, decision).residents
    assert unified or residents == pytest.approx(kept_bytes, abs=2 * grain)
    trained = sum(state.elements for state in model.states if not state.frozen)
    if unified:
        assert traffic["h2d"] == 0
        assert traffic["d2h"] == pytest.approx(4 * result.delay_ratio * trained, abs=grain)
    else:
        forms = stages(model, layer_groups(model), work_of(1, n))
        for link in ("h2d", "d2h"):
            form = sum(stage.count * value(getattr(stage, f"{link}_bytes"), at_(decision, model)) for stage in forms)
            assert traffic[link] == pytest.approx(form, abs=2 * grain)
    backwards = sum(isinstance(op, Backward) for op in schedule.steady.ops)
    forms = stages(model, layer_groups(model), work_of(1, n))
    assert backwards == n * sum(stage.count for stage in forms if stage.phase == "backward")


def at_(decision, model: Model) -> dict[str, float]:
    """The variables that links depend on; of what is frozen no part is delayed."""
    frozen = {state.state_class for state in model.states if state.frozen}
    return at(decision) | {f"{name}: parameters device delayed": 0.0 for name in frozen}


@RELAXED
@given(frozen_models(), st.sampled_from((1, 4)), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_counts_what_the_horizontal_graph_moves_to_the_byte(
    model: Model, b: int, n: int, optimizer: bool, parameters: bool, checkpoints: bool
) -> None:
    decision = decide(
        model,
        schedule="horizontal",
        micro_batch_size=b,
        micro_batches=n,
        optimizer=float(optimizer),
        parameters=float(parameters),
        checkpoints=float(checkpoints),
    )
    schedule = build_schedule(model, decision)
    forms = horizontal.stages(model, layer_groups(model), work_of(b, n, "horizontal"))
    values = {CHECKPOINTS_ON_HOST: float(checkpoints)}
    frozen = {state.state_class for state in model.states if state.frozen}
    for name in decision.placement:
        names = variables_of(name)
        on_host = 0.0 if name in frozen else float(optimizer)
        on_ssd = 0.0 if name in frozen else float(not optimizer)
        values |= {names.optimizer.prompt_host: on_host, names.optimizer.prompt_ssd: on_ssd}
        values |= {names.parameters.prompt_host: float(parameters), names.parameters.prompt_ssd: float(not parameters)}
        values |= dict.fromkeys(
            (*names.optimizer.delayed, *names.parameters.delayed, *names.gradient, names.device, names.device_delayed),
            0.0,
        )
    assert schedule.traffic("steady") == {
        "read": value(total_bytes(forms, "read"), values),
        "write": value(total_bytes(forms, "write"), values),
        "h2d": sum(stage.count * stage.h2d_bytes[CONSTANT] for stage in forms),
        "d2h": sum(stage.count * stage.d2h_bytes[CONSTANT] for stage in forms),
    }
    trained = sum(state.elements for state in model.states if not state.frozen)
    assert sum(stage.count * value(stage.updates, values) for stage in forms) == trained
    found = footprint(model, decision)
    assert found.ssd_bytes == schedule.arenas["ssd"]
    assert found.host_bytes == predict_peaks(schedule, model, decision).residents


@settings(deadline=None, max_examples=examples(25), print_blob=True)
@given(
    frozen_models(), machines(), st.floats(0.02, 1.3), st.sampled_from((1, 4, 12)),
    st.sampled_from(("vertical", "horizontal", "clipped", "unified")),
)  # fmt: skip
def test_every_plan_keeps_its_promises(model: Model, machine: Machine, memory: float, batch: int, how: str) -> None:
    if how == "unified":
        machine = machine.model_copy(update={"compute_shares_cpu": True})
    profile = made_profile(machine=machine, model=model)
    states = sum(state.elements for state in model.states)
    request = SolveRequest(
        host_memory_bytes=int(memory * 20 * states) + MIB,
        global_batch=batch,
        schedule="horizontal" if how == "horizontal" else "vertical",
        clip_grad_norm=1.0 if how == "clipped" else None,
        unified_memory=how == "unified",
    )
    try:
        plan = solve(profile, request)
    except InfeasibleError as error:
        constraint, least = least_named(error)
        assert constraint == "host memory" and least > request.host_memory_bytes
        request = replace(request, host_memory_bytes=least)
        plan = solve(profile, request)
    check(profile, request, plan)
    schedule = build_schedule(plan.model, plan.decision)
    text = describe_plan(plan, schedule)
    assert ("frozen" in text) == any(state.frozen for state in model.states)
    again = request_of(plan)
    assert again.host_memory_bytes == request.host_memory_bytes


@RELAXED
@given(
    st.data(), models(), machines(), st.integers(1, 4), st.floats(0, 1),
    st.sampled_from(("vertical", "horizontal", "unified")),
)  # fmt: skip
def test_freezing_more_layers_is_never_slower_by_the_program(
    data, whole: Model, machine: Machine, n: int, memory: float, how: str
) -> None:
    """Layers in the order from below, from above, or any, each step one more of them whole."""
    order = data.draw(st.permutations(range(len(whole.states))) | st.just(list(range(len(whole.states)))))
    host = memory * everything(whole, n)
    fixed = FixedChoices(
        delay_ratio=0.0 if how == "horizontal" else None,
        schedule="horizontal" if how == "horizontal" else "vertical",
        unified_memory=how == "unified",
    )
    before = float("inf")
    for count in range(len(order)):
        model = with_frozen(whole, [float(index in order[:count]) for index in range(len(order))])
        bound = program_bound(model, machine, micro_batch_size=1, micro_batches=n, limits=Limits(host), fixed=fixed)
        if bound is None:  # the sums of the horizontal schedule's gradients may not fit, of fewer they may
            assert before == float("inf")
            continue
        assert bound.seconds <= before * (1 + 1e-5), (count, order)
        before = bound.seconds


@RELAXED
@given(
    st.data(), st.integers(6, 10), st.booleans(), st.integers(1, 4), SHARES, SHARES, SHARES,
    st.sampled_from((0.0, 0.4, 1.0)), st.sampled_from(("vertical", "horizontal", "unified")),
)  # fmt: skip
def test_freezing_more_takes_no_more_memory(
    data,
    blocks: int,
    tied: bool,
    n: int,
    optimizer: float,
    parameters: float,
    checkpoints: float,
    alpha: float,
    how: str,
) -> None:
    """Of the same fractions, on every tier, as long as the pipeline is longer than its buffers live: the uppermost
    layers are trained. The path from one micro-batch to the next is shorter where the lowest layers run no backward, so
    hidden states may wait for each other: at most two. Where frozen and trained layers alternate, the slots of a
    layer's parameters may find none of another stage to share their bytes with."""
    whole = made_model(blocks=blocks, tied=tied)
    hidden = -(-whole.sequence_length * whole.hidden_size * 2 // 4096) * 4096
    slot = 2 * max(state.elements for state in whole.states)
    shares = [0.0] * len(whole.states)
    before: dict[str, int] | None = None
    lower = list(range(len(whole.states) - 5))
    order = data.draw(st.permutations(lower) | st.just(lower))
    slack = 2 * hidden + (0 if order == lower else slot)
    for number in [None, *order]:
        if number is not None:
            shares[number] = 1.0
        model = with_frozen(whole, shares)
        decision = decide(
            model,
            alpha=0.0 if how == "horizontal" else alpha,
            optimizer=optimizer,
            parameters=0.0 if how == "unified" else parameters,
            checkpoints=checkpoints,
            micro_batches=n,
            schedule="horizontal" if how == "horizontal" else "vertical",
            unified=how == "unified",
        )
        arenas = build_schedule(model, decision).arenas
        if before is not None:
            for tier, nbytes in arenas.items():
                assert nbytes <= before[tier] + (0 if tier == "ssd" else slack), (tier, shares)
        before = dict(arenas)


def test_half_of_a_model_frozen_halves_what_is_written() -> None:
    """And its plan says where that shows: less than half of the writes, a faster step, and fewer bytes everywhere."""
    machine = made_machine(update_rate=2e8, volumes=(made_volume(read=1e9, write=8e8),))
    whole = made_model(blocks=12, hidden=128, vocab=1024, sequence=64, flops=2e12)
    half = with_frozen(whole, [1.0] * 7 + [0.0] * 7)
    request = SolveRequest(host_memory_bytes=24 * MIB, global_batch=8, residency={"optimizer": 0.0, "parameters": 0.0})
    before, after = (solve(made_profile(machine=machine, model=model), request) for model in (whole, half))
    one, other = before.prediction, after.prediction
    assert other.ssd_write_bytes < 0.55 * one.ssd_write_bytes and other.d2h_bytes < one.d2h_bytes
    assert other.step_seconds < 0.75 * one.step_seconds and other.peak_host_bytes <= one.peak_host_bytes
    assert other.ssd_bytes < 0.65 * one.ssd_bytes
    ours = {row.name: row for row in after.comparison}
    theirs = {row.name: row for row in before.comparison}
    assert ours.keys() == theirs.keys()
    for name, row in ours.items():
        if row.tokens_per_second and theirs[name].tokens_per_second and "plan" not in name:
            assert row.tokens_per_second >= theirs[name].tokens_per_second * 0.999, name
    assert "frozen" in describe_plan(after, build_schedule(after.model, after.decision))


def test_eighty_layers_of_which_most_are_frozen() -> None:
    """The pipeline's estimates know both kinds of blocks; a plan within the budget comes out, and soon."""
    whole = made_model(blocks=80, hidden=256, vocab=2048, sequence=64, flops=2e12)
    model = with_frozen(whole, [1.0] * 61 + [0.0] * 21)
    request = SolveRequest(host_memory_bytes=GIB // 8, global_batch=16)
    profile = made_profile(model=model)
    check(profile, request, solve(profile, request))


def test_what_runs_no_backward_is_not_kept_across_the_turn() -> None:
    """Whether that was asked for or left to the search; for the whole run it is, as all others."""
    machine = made_machine(device_memory=GIB, link=2e8)
    model = with_frozen(made_model(blocks=8, hidden=128, vocab=1024, sequence=64), [1.0] * 4 + [0.0, 1.0] + [0.0] * 4)
    profile = made_profile(machine=machine, model=model)
    asked = SolveRequest(host_memory_bytes=64 * MIB, global_batch=4, residency={"turn": 1.0})
    turn = {name: p.parameters_turn for name, p in solve(profile, asked).decision.placement.items()}
    assert turn == {
        "embedding.forward": 0, "block.forward": 0, "block": 1, "block.frozen": 1, "head": 0
    }  # fmt: skip
    device = replace(asked, residency={"device": 1.0})
    assert {p.parameters_device for p in solve(profile, device).decision.placement.values()} == {1.0}
    free = solve(profile, replace(asked, residency={}))
    assert any(p.parameters_device or p.parameters_turn for p in free.decision.placement.values()), "a slow link"
    check(profile, replace(asked, residency={}), free)
