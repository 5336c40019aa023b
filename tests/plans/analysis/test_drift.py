"""Calibration: the simulator's own steps show no drift; a figure that is wrong is found, by name and by how much."""

import random
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssdplan.planner.predict import simulator
from ssdplan.planner.predict.simulator import expectation, simulate
from ssdplan.planner.replan import Replanner
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.planner.solve_again import request_of
from ssdplan.plans.analysis.drift import Figure, find_drift, slowdowns
from ssdplan.plans.documents.plan import Asked, Plan, Saved
from ssdplan.plans.documents.profile import Machine, Model, Profile
from ssdplan.plans.errors import InfeasibleError, SsdplanError
from ssdplan.plans.graph.ops import Forward, Graph
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.drift_text import describe_change, describe_drift
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import MIB, made_machine, made_model, made_volume


def _machine(
    *,
    shared: bool = False,
    read: float = 1.0,
    write: float = 1.0,
    mixed_read: float | None = None,
    mixed_write: float | None = None,
    **other: float,
) -> Machine:
    """Every figure so many times as fast as a machine whose drive bounds the step about as its compute does; each
    direction of the drive beside the other as alone, unless given."""
    between = (1.6e9 * (mixed_read or read), 1.1e9 * (mixed_write or write))
    return made_machine(
        shared=shared,
        link=20e9 * other.get("h2d", 1.0),
        d2h=20e9 * other.get("d2h", 1.0),
        update_rate=1e9 * other.get("update", 1.0),
        volumes=(made_volume(read=3e9 * read, write=2e9 * write, mixed=(between,)),),
    )


def _model(speed: float = 1.0, **other: int) -> Model:
    return made_model(blocks=other.get("blocks", 6), hidden=256, vocab=2048, sequence=128, flops=2e11 * speed)


def _plan(model: Model, machine: Machine, **choices: object) -> tuple[Plan, Graph]:
    decision = decide(model, **{"alpha": 0.3, "optimizer": 0.2, "checkpoints": 0.5, "chunk": 1 << 16, **choices})
    schedule = build_schedule(model, decision)
    return planned(model, machine, decision, schedule), schedule.steady


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(
    alpha=st.sampled_from([0.0, 0.3, 1.0]),
    optimizer=st.sampled_from([0.0, 0.5]),
    parameters=st.sampled_from([0.0, 1.0]),
    checkpoints=st.sampled_from([0.0, 0.5]),
    micro_batches=st.integers(1, 4),
    shared=st.booleans(),
)
def test_a_simulated_step_is_as_expected_in_every_figure(shared: bool, **choices: object) -> None:
    """The two models of what shares what are one, whatever runs beside what."""
    plan, graph = _plan(_model(), _machine(shared=shared), **choices)
    timeline = simulate(graph, plan.model, plan.machine, 1)
    found = slowdowns([timeline] * 3, Replanner(plan).expectation(graph))
    assert {figure.kind for figure in found} >= {"forward", "backward", "update", "h2d", "d2h"}
    assert all(times == pytest.approx(1.0, abs=1e-6) for times in found.values()), found
    assert find_drift(plan, [timeline] * 3, Replanner(plan)) is None


@pytest.mark.parametrize("wild", [1.0, 1000.0])
def test_a_layer_and_the_drive_are_as_slow_as_the_means_of_their_operations(wild: float) -> None:
    """One operation after the other, every other one 1.4 times as long; no wild one counts more than one at the fence,
    three times the distance of the quartiles beyond them."""
    plan, graph = _plan(_model(), _machine(), micro_batches=4)
    expected = Replanner(plan).expectation(graph)
    seconds = list(expected.alone_seconds)
    forwards = [op.index for op in graph.ops if isinstance(op, Forward) and op.layer_class == "block"]
    reads = [op.index for op in graph.ops if op.resource == "read"]
    assert len(forwards) >= 8 and len(forwards) % 2 == 0 and len(reads) >= 8
    for each in (forwards, reads):
        for number, index in enumerate(each):
            seconds[index] *= 1.4 if number % 2 else 1.0
    for each in (forwards, reads):
        seconds[each[-1]] *= wild
    ends = tuple(accumulate(seconds))
    found = slowdowns([Timeline(graph, (0.0, *ends[:-1]), ends)], expected)
    for figure, each in ((Figure("forward", "block"), forwards), (Figure("read"), reads)):
        alone = [expected.alone_seconds[index] for index in each]
        counted = sum(min(seconds[index], 2.6 * expected.alone_seconds[index]) for index in each)
        assert found[figure] == pytest.approx(counted / sum(alone))


DRIVE_BOUND, COMPUTE_BOUND = 4.0, 0.1
SLOWER = {
    "read": {"read", "read beside writes"},
    "write": {"write", "write beside reads"},
    "h2d": {"h2d"},
    "d2h": {"d2h"},
    "update": {"update"},
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("wrong", SLOWER)
def test_a_figure_that_is_wrong_by_a_factor_of_two_is_named(wrong: str, shared: bool) -> None:
    """One thing is twice as slow as the profile says, or twice as fast, on a machine that it bounds."""
    base = {"h2d": 0.02, "d2h": 0.02, "update": 0.02}.get(wrong, 1.0)
    model = _model(DRIVE_BOUND)
    slow, fast = (_machine(shared=shared, **{wrong: base * times}) for times in (0.5, 1.0))
    for there, real, times in ((fast, slow, 2.0), (slow, fast, 0.5)):
        plan, graph = _plan(model, there)
        timeline = simulate(graph, model, real, 1)
        drift = find_drift(plan, [timeline] * 3, Replanner(plan))
        assert drift is not None
        assert {figure.kind for figure in drift.slowdowns} <= SLOWER[wrong]
        assert list(drift.slowdowns.values()) == pytest.approx([times] * len(drift.slowdowns), rel=0.02)
        assert drift.step_seconds == pytest.approx(timeline.seconds, rel=0.02)


@pytest.mark.parametrize("shared", [False, True])
def test_slower_compute_is_named_by_layer_class(shared: bool) -> None:
    plan, graph = _plan(_model(2 * COMPUTE_BOUND), _machine(shared=shared))
    timeline = simulate(graph, _model(COMPUTE_BOUND), plan.machine, 1)
    drift = find_drift(plan, [timeline] * 3, Replanner(plan))
    assert drift is not None
    assert next(iter(drift.slowdowns)) == Figure("backward", "block")
    assert Figure("forward", "block") in drift.slowdowns and Figure("backward", "head") in drift.slowdowns
    assert list(drift.slowdowns.values()) == pytest.approx([2.0] * len(drift.slowdowns))
    measured, real = drift.model.timing("block", 1), _model(COMPUTE_BOUND).timing("block", 1)
    assert measured.backward_seconds == pytest.approx(real.backward_seconds)
    assert measured.forward_seconds == pytest.approx(real.forward_seconds)
    assert drift.step_seconds == pytest.approx(timeline.seconds)


def test_a_drive_that_mixes_badly_is_found() -> None:
    plan, graph = _plan(_model(DRIVE_BOUND), _machine())
    real = _machine(mixed_read=0.5, mixed_write=0.5)
    timeline = simulate(graph, plan.model, real, 1)
    found = slowdowns([timeline], Replanner(plan).expectation(graph))
    assert found[Figure("read beside writes")] == pytest.approx(2.0, rel=0.02)
    assert found[Figure("write beside reads")] == pytest.approx(2.0, rel=0.02)
    drift = find_drift(plan, [timeline] * 3, Replanner(plan))
    assert drift is not None and drift.step_seconds == pytest.approx(timeline.seconds, rel=0.05)
    assert {figure.kind for figure in drift.slowdowns} >= {"read beside writes", "write beside reads"}


def test_the_words_name_value_and_way() -> None:
    slow = _machine(read=0.5)
    plan, graph = _plan(_model(DRIVE_BOUND), _machine())
    drift = find_drift(plan, [simulate(graph, plan.model, slow, 1)] * 3, Replanner(plan))
    assert drift is not None
    text = describe_drift(plan, drift)
    assert text.startswith("the machine is not as its profile says: ") and "a step of this plan takes" in text
    assert "ssd read 1.5 GB/s instead of 3 GB/s" in text


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("few", [False, True])
def test_noise_is_no_drift(seed: int, few: bool, monkeypatch) -> None:
    """Every op up to 10% longer or shorter; with `few`, one in twenty five times as long."""
    plan, graph = _plan(_model(), _machine())
    rng = random.Random(seed)
    expected = Replanner(plan).expectation(graph)

    def noisy(*arguments: object) -> tuple[list[float], list[float]]:
        times = [rng.uniform(0.9, 1.1) * (5 if few and rng.random() < 0.05 else 1) for _ in graph.ops]
        made = [seconds * each for seconds, each in zip(expected.alone_seconds, times, strict=True)]
        return made, [0.0] * len(made)

    with monkeypatch.context() as patch:
        patch.setattr(simulator, "_seconds_alone", noisy)
        measured = [simulate(graph, plan.model, plan.machine, 1) for _ in range(3)]
    assert measured[0].seconds != measured[1].seconds
    assert find_drift(plan, measured, Replanner(plan)) is None


def test_one_odd_step_of_three_is_no_drift() -> None:
    plan, graph = _plan(_model(), _machine())
    timeline = simulate(graph, plan.model, plan.machine, 1)
    odd = simulate(graph, _model(0.2), _machine(read=0.3, write=0.3), 1)
    assert find_drift(plan, [timeline, odd, timeline], Replanner(plan)) is None
    assert find_drift(plan, [odd, odd, timeline], Replanner(plan)) is not None


def test_drift_that_changes_no_step_is_not_told() -> None:
    """Links of a hundredth of the step: half as fast, they matter to nobody."""
    plan, graph = _plan(_model(0.2), _machine())
    timeline = simulate(graph, plan.model, _machine(h2d=0.7, d2h=0.7), 1)
    found = slowdowns([timeline], expectation(graph, plan.model, plan.machine, 1))
    assert found[Figure("h2d")] == pytest.approx(1 / 0.7, rel=0.01)
    assert find_drift(plan, [timeline] * 3, Replanner(plan)) is None


def test_two_reads_at_once_share_the_drive() -> None:
    """What two threads of a lane do side by side is one read's bandwidth for both: no drift."""
    plan, graph = _plan(_model(), _machine())
    timeline = simulate(graph, plan.model, plan.machine, 1)
    reads = [op.index for op in graph.ops if op.resource == "read"]
    starts, ends = list(timeline.starts), list(timeline.ends)
    for one, other in zip(reads[::2], reads[1::2], strict=False):
        if graph.ops[one].nbytes == graph.ops[other].nbytes and starts[other] == ends[one]:
            starts[other], ends[one] = starts[one], ends[other]
    assert starts != list(timeline.starts)
    found = slowdowns([Timeline(graph, tuple(starts), tuple(ends))], Replanner(plan).expectation(graph))
    assert found[Figure("read")] == pytest.approx(1.0, rel=0.05)
    assert found[Figure("read beside writes")] == pytest.approx(1.0, rel=0.05)


def test_a_change_of_what_is_saved_is_told_by_rung_and_tier() -> None:
    """In shares of all pairs of block and micro-batch; what stays as it was is not told."""
    model, machine = made_model(blocks=4, hidden=64, rungs=((0.5, 0.5), (1.0, 0.0))), _machine()

    def plan_of(*saved: Saved) -> Plan:
        decision = decide(model, saved=saved)
        return planned(model, machine, decision, build_schedule(model, decision))

    nothing = plan_of()
    host = Saved(rung="rung-1", tier="host", share=0.25)
    half, all_of_it = Saved(rung="rung-2", tier="ssd", share=0.5), Saved(rung="rung-2", tier="ssd", share=0.75)
    assert describe_change(nothing, plan_of(host)) == "activations saved by rung-1 on host 0.0% -> 25.0%"
    assert describe_change(plan_of(host), nothing) == "activations saved by rung-1 on host 25.0% -> 0.0%"
    assert describe_change(plan_of(host, half), plan_of(host, all_of_it)) == (
        "activations saved by rung-2 on ssd 50.0% -> 75.0%"
    )
    other_rung = plan_of(half.model_copy(update={"rung": "rung-1"}))
    assert describe_change(plan_of(half), other_rung) == (
        "activations saved by rung-1 on ssd 0.0% -> 50.0%, activations saved by rung-2 on ssd 50.0% -> 0.0%"
    )
    assert describe_change(plan_of(host), plan_of(host)) == "the same"


BATCH = SolveRequest(host_memory_bytes=48 * MIB, micro_batches=4, micro_batch_size=2)


def test_what_solve_would_choose_now_keeps_batch_and_budgets() -> None:
    model, machine = _model(), _machine()
    profile = Profile(created="now", machine=machine, model=model)
    plan = solve(profile, BATCH, compared=False)
    request = request_of(plan)
    assert (request.micro_batches, request.micro_batch_size, request.host_memory_bytes) == (4, 2, 48 * MIB)
    again = Replanner(plan).replanned(machine, model)
    assert again.prediction.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-3)
    assert describe_change(plan, plan) == "the same"
    slow = _machine(read=0.3, write=0.3)
    advisor, steady = Replanner(plan), build_schedule(model, plan.decision).steady
    other = advisor.replanned(slow, model)
    assert other.prediction.step_seconds <= 1.02 * advisor.step_seconds(steady, slow, model)
    for name in ("micro_batches", "micro_batch_size", "sequence_length", "schedule", "host_budget_bytes"):
        assert getattr(other.decision, name) == getattr(plan.decision, name)
    assert advisor.step_seconds(steady, machine, model) == pytest.approx(plan.prediction.step_seconds)


def test_what_solve_would_choose_now_keeps_to_what_the_user_fixed() -> None:
    model, machine = _model(), _machine()
    profile = Profile(created="now", machine=machine, model=model)
    asked = SolveRequest(
        host_memory_bytes=48 * MIB,
        micro_batches=4,
        micro_batch_size=2,
        delay_ratio=0.25,
        residency={"optimizer": 0.125},
        max_ssd_write_bytes=4 * solve(profile, BATCH, compared=False).prediction.ssd_write_bytes,
    )
    plan = Plan.model_validate_json(solve(profile, asked, compared=False).text())
    kept = Asked(delay_ratio=0.25, residency={"optimizer": 0.125}, max_ssd_write_bytes=asked.max_ssd_write_bytes)
    assert plan.asked == kept
    again = Replanner(plan).replanned(_machine(read=0.3, write=0.3), model)
    assert again.asked == plan.asked and again.decision.delay_ratio == 0.25
    for placement in again.decision.placement.values():
        assert placement.optimizer_prompt_host + placement.optimizer_delayed_host == pytest.approx(0.125)


def test_what_solve_cannot_find_any_more_is_said() -> None:
    model, machine = _model(), _machine()
    profile = Profile(created="now", machine=machine, model=model)
    plan = solve(profile, BATCH, compared=False)
    full = machine.model_copy(
        update={"volumes": tuple(volume.model_copy(update={"free_bytes": MIB}) for volume in machine.volumes)}
    )
    with pytest.raises(InfeasibleError, match="ssd"):
        Replanner(plan).replanned(full, model)


@pytest.mark.parametrize(
    ("solver", "seconds", "said"), [("no.such.module", 60.0, "ended with 1"), ("timeit", 0.01, "timed out")]
)
def test_a_solver_that_fails_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, solver: str, seconds: float, said: str
) -> None:
    """So that the run that asked it notes it, and goes on."""
    model, machine = _model(), _machine()
    plan = solve(Profile(created="now", machine=machine, model=model), BATCH, compared=False)
    monkeypatch.setattr("ssdplan.planner.replan.SOLVER", solver)
    monkeypatch.setattr("ssdplan.planner.replan.SECONDS", seconds)
    with pytest.raises(SsdplanError, match=f"solving again.*{said}"):
        Replanner(plan).replanned(machine, model)
