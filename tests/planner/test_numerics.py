"""What changes numbers is the user's choice, and a plan counts what it costs: the format of optimizer states, clipping,
and precision. What needs all gradients before any update delays every update."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan import cli
from ssdplan.planner.predict.simulator import simulate
from ssdplan.planner.program.choices import FixedChoices, Limits
from ssdplan.planner.program.placement import ProgramResult
from ssdplan.planner.program.program import program_bound, solve_program
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.documents.state_layout import OPTIMIZER_FORMATS, Masters, OptimizerStates
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.errors import UsageError
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.profile_text import describe_profile
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import GIB, MIB, made_machine, made_model, made_profile, made_volume, planned
from tests.planner.catalogue.test_whatif import COMMAND
from tests.planner.machines import machines, models
from tests.planner.test_solve import check

FORMATS: tuple[OptimizerStates, OptimizerStates] = ("fp32", "bf16")


def elements_of(model: Model) -> int:
    return sum(state.elements for state in model.states)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_states_with_moments_in_bf16_are_four_bytes_an_element_smaller(alpha: float) -> None:
    """In the program and in the schedule, on ssd and on host: read once a step, written once."""
    model = made_model(blocks=5, tied=True)
    fewer = 4 * elements_of(model)

    def program(states: OptimizerStates, optimizer: float) -> ProgramResult:
        fixed = FixedChoices(
            alpha, parameters=0.0, optimizer=optimizer, checkpoints=1.0, formats=OPTIMIZER_FORMATS["fp32", states]
        )
        limits = Limits(100 * GIB)
        found = solve_program(model, made_machine(), micro_batch_size=1, micro_batches=2, limits=limits, fixed=fixed)
        assert found is not None
        return found

    whole, half = (program(states, 0.0) for states in FORMATS)
    for name in ("ssd_bytes", "ssd_read_bytes", "ssd_write_bytes"):
        assert getattr(whole, name) - getattr(half, name) == pytest.approx(fewer), name
    assert program("fp32", 1.0).host_bytes - program("bf16", 1.0).host_bytes == pytest.approx(fewer)

    schedules = [build_schedule(model, decide(model, alpha=alpha, optimizer_states=states)) for states in FORMATS]
    assert schedules[0].arenas["ssd"] - schedules[1].arenas["ssd"] == fewer
    moved = [schedule.traffic("steady") for schedule in schedules]
    for resource in ("read", "write"):
        assert moved[0][resource] - moved[1][resource] == fewer
    on_host = [build_schedule(model, decide(model, alpha=alpha, optimizer=1, optimizer_states=s)) for s in FORMATS]
    assert on_host[0].arenas["host"] - on_host[1].arenas["host"] == fewer


@pytest.mark.parametrize(("measured", "rate"), [(1.5e6, 1.5e6), (None, 1e6)])
def test_updates_take_as_long_as_their_format_does(measured: float | None, rate: float) -> None:
    model = made_model(blocks=5, flops=1e14)
    machine = made_machine(update_rate=1e6).model_copy(update={"update_rate_bf16": measured})
    shown = describe_profile(made_profile(machine=machine, model=model))
    assert ("1,500,000 with states in bf16" in shown) == (measured is not None)
    rates: dict[OptimizerStates, float] = {"fp32": 1e6, "bf16": rate}
    for states, expected in rates.items():
        decision = decide(model, alpha=0.3, optimizer=1, parameters=1, optimizer_states=states)
        busy = simulate(build_schedule(model, decision).steady, model, machine, 1).busy()
        assert busy["cpu"] == pytest.approx(elements_of(model) / expected)
        found = program_bound(
            model,
            machine,
            micro_batch_size=1,
            micro_batches=2,
            limits=Limits(100 * GIB),
            fixed=FixedChoices(delay_ratio=0.0, formats=OPTIMIZER_FORMATS["fp32", states]),
        )
        assert found is not None and found.seconds == pytest.approx(elements_of(model) / expected, rel=1e-3)


@settings(deadline=None, max_examples=examples(8), print_blob=True)
@given(
    models(),
    machines(),
    st.floats(0.5, 1.3),
    st.sampled_from(("fp32", "residual", "none")),
    st.sampled_from(FORMATS),
    st.none() | st.floats(0.1, 10),
)
def test_every_plan_keeps_its_promises_and_clips_only_what_is_delayed(
    model: Model, machine: Machine, memory: float, masters: Masters, states: OptimizerStates, clip: float | None
) -> None:
    masters = masters if model.precision == "bf16" else "fp32"
    profile = made_profile(machine=machine, model=model)
    request = SolveRequest(
        host_memory_bytes=int(memory * 20 * elements_of(model)) + 16 * MIB,
        global_batch=4,
        optimizer_states=states,
        masters=masters,
        clip_grad_norm=clip,
    )
    plan = planned(profile, request)
    check(profile, request, plan)
    assert plan.decision.formats == OPTIMIZER_FORMATS[masters, states] and plan.decision.clip_grad_norm == clip
    if clip is not None:
        assert plan.decision.delay_ratio == 1.0 and all(row.delay_ratio == 1.0 for row in plan.alternatives)


def test_what_fewer_bytes_of_states_would_bring() -> None:
    """A drive alone sets the pace: a step takes the time of its bytes."""
    machine = made_machine(link=1e13, update_rate=1e13, volumes=(made_volume(read=1e7, write=1e7),))
    profile = made_profile(machine=machine, model=made_model(blocks=12, flops=1e16))
    everything = {"parameters": 0.0, "optimizer": 0.0, "checkpoints": 0.0}
    request = SolveRequest(GIB, micro_batch_size=1, micro_batches=2, delay_ratio=0.0, residency=everything)
    plan = planned(profile, request)
    moved = plan.prediction.ssd_read_bytes + plan.prediction.ssd_write_bytes
    (row,) = [row for row in plan.sensitivity if row.resource == "optimizer states in bf16"]
    assert row.unit == "instead of fp32"
    assert row.throughput_gain == pytest.approx(moved / (moved - 8 * elements_of(plan.model)) - 1, rel=1e-3)
    half = planned(profile, replace(request, optimizer_states="bf16"))
    assert half.prediction.program_seconds == pytest.approx(plan.prediction.program_seconds + row.seconds_per_unit)
    assert not [row for row in half.sensitivity if "bf16" in row.resource]


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.999])
def test_what_needs_all_gradients_refuses_another_delay_ratio(ratio: float) -> None:
    request = SolveRequest(GIB, delay_ratio=ratio, clip_grad_norm=1.0)
    with pytest.raises(UsageError, match="can only be 1, for clipping by the global norm needs all gradients"):
        planned(made_profile(), request)
    with pytest.raises(UsageError, match="can only be 1, for skipping steps that overflow in fp16"):
        planned(made_profile(precision="fp16"), SolveRequest(GIB, delay_ratio=ratio))


def test_clipping_and_fp16_delay_every_update() -> None:
    for profile, clip in ((made_profile(), 1.0), (made_profile(precision="fp16"), None)):
        for ratio in (None, 1.0):
            plan = planned(profile, SolveRequest(GIB, global_batch=2, delay_ratio=ratio, clip_grad_norm=clip))
            assert (plan.decision.delay_ratio, plan.decision.clip_grad_norm) == (1.0, clip)
    assert planned(made_profile(), SolveRequest(GIB, global_batch=2)).decision.delay_ratio < 1.0


@pytest.mark.parametrize("norm", [0.0, -1.0, float("inf"), float("nan")])
def test_a_norm_to_clip_to_is_a_positive_number(norm: float) -> None:
    with pytest.raises(UsageError, match="clip grad norm"):
        planned(made_profile(), SolveRequest(GIB, clip_grad_norm=norm))


def test_a_plan_that_clips_what_it_does_not_delay_is_refused(tmp_path: Path) -> None:
    plan = planned(made_profile(), SolveRequest(GIB, global_batch=2, delay_ratio=0.5))
    raw = json.loads(plan.text())
    raw["decision"]["clip_grad_norm"] = 1.0
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    with pytest.raises(UsageError, match="delay_ratio must be 1: clipping"):
        Plan.load(tmp_path / "plan.json")
    del raw["decision"]["clip_grad_norm"]
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    assert Plan.load(tmp_path / "plan.json") == plan, "a plan from before there was clipping"


def test_fp16_delays_every_update_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*COMMAND, "--precision", "fp16", "-o", "plan.json", "--full"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1: 100% of each layer's update" in shown and "overflow in fp16 needs all gradients" in shown
    plan = Plan.load(Path("plan.json"))
    assert (plan.decision.precision, plan.decision.delay_ratio) == ("fp16", 1.0)


def test_the_command_line_takes_both_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main([*COMMAND, "--optimizer-states", "bf16", "--clip-grad-norm", "0.75", "-o", "plan.json", "--full"]) == 0
    )
    shown = capsys.readouterr().out
    assert "adamw, states in bf16" in shown and "the gradients' norm to 0.75" in shown
    assert "clipping by the global norm needs all gradients" in shown
    decision = Plan.load(Path("plan.json")).decision
    assert (decision.optimizer_states, decision.clip_grad_norm, decision.delay_ratio) == ("bf16", 0.75, 1.0)
    assert cli.main([*COMMAND, "--clip-grad-norm", "1", "--delay-ratio", "0.5"]) == UsageError.exit_code
    assert "clipping" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*COMMAND, "--clip-grad-norm", "0"])


EVERYTHING_ON_SSD = {"parameters": 0.0, "optimizer": 0.0, "checkpoints": 0.0}


@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize("shared", [False, True])
def test_updates_take_time_for_the_checksums_of_what_passes(states: OptimizerStates, shared: bool) -> None:
    """Where nothing else takes any: the bytes of optimizer states on ssd at the rate that was measured; of states on
    host nobody takes checksums."""
    fast = made_volume(read=1e13, write=1e13)
    machine = made_machine(shared=shared, link=1e13, update_rate=1e13, volumes=(fast,))
    machine = machine.model_copy(update={"checksum_rate": 1e6})
    profile = made_profile(machine=machine, model=made_model(blocks=6, flops=1e17))
    request = SolveRequest(GIB, micro_batch_size=1, micro_batches=1, delay_ratio=0.0, optimizer_states=states)
    plan = planned(profile, replace(request, residency=EVERYTHING_ON_SSD))
    passing = elements_of(plan.model) * (12 if states == "fp32" else 8)
    for seconds in (plan.prediction.program_seconds, plan.prediction.step_seconds):
        assert seconds == pytest.approx(passing / 1e6, rel=1e-3)
    stays = planned(profile, replace(request, residency=EVERYTHING_ON_SSD | {"optimizer": 1.0}))
    assert stays.prediction.step_seconds < 1e-3 * plan.prediction.step_seconds


def test_the_program_counts_the_cores_of_transfers_by_who_sums_them() -> None:
    """A drive that would take more cores than there are bounds the step by these; of what an update sums, half."""
    cores = {"read_cores": 40.0, "write_cores": 80.0, "read_cores_unsummed": 20.0, "write_cores_unsummed": 40.0}
    volume = made_volume(read=1e12, write=1e12).model_copy(update=cores)
    machine = made_machine(shared=True, cores=8, link=1e15, update_rate=1e15, volumes=(volume,))
    model = made_model(blocks=6, flops=1e17)
    fixed = FixedChoices(delay_ratio=0.0, parameters=0.0, optimizer=0.0, checkpoints=0.0)
    found = solve_program(model, machine, micro_batch_size=1, micro_batches=1, limits=Limits(float(GIB)), fixed=fixed)
    assert found is not None
    passing = 12 * elements_of(model)
    read, write = found.ssd_read_bytes - passing, found.ssd_write_bytes - passing
    taken = (40 * read + 80 * write + 20 * passing + 40 * passing) / 8 / 1e12
    assert found.seconds == pytest.approx(taken, rel=1e-3)
    nobody_measured = volume.model_copy(update={"read_cores_unsummed": None, "write_cores_unsummed": None})
    older = solve_program(
        model,
        machine.model_copy(update={"volumes": (nobody_measured,)}),
        micro_batch_size=1,
        micro_batches=1,
        limits=Limits(float(GIB)),
        fixed=fixed,
    )
    assert older is not None
    assert older.seconds == pytest.approx((40 * (read + passing) + 80 * (write + passing)) / 8 / 1e12, rel=1e-3)


@pytest.mark.parametrize(
    ("precision", "asked", "says"),
    [
        ("fp32", {"masters": "none"}, "masters none are for bf16, and this is fp32"),
        ("fp16", {"masters": "residual"}, "masters residual are for bf16, and this is fp16"),
        ("bf16", {"optimizer_states": "int8"}, "make a new one with ssdplan profile"),
        ("bf16", {"optimizer_states": "int8", "residency": {"updates": 0.5}}, "a GPU updates no moments in int8"),
        ("bf16", {"masters": "none", "zeroth_order": ZerothOrder()}, "masters: optimizer mezo has no gradients"),
    ],
)
def test_formats_that_cannot_be_are_refused_with_a_way_out(precision: Any, asked: dict[str, Any], says: str) -> None:
    profile = made_profile(machine=made_machine(), model=made_model(precision=precision))
    with pytest.raises(UsageError, match=says):
        solve(profile, SolveRequest(GIB, **asked))
