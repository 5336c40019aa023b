"""Saved activations in the program: what it counts, when they pay, where they go, and what may be asked for."""

from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.program.choices import FixedChoices, Limits
from ssdplan.planner.program.placement import ProgramResult, footprint
from ssdplan.planner.program.program import solve_program
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve, solve_and_build
from ssdplan.plans.documents.plan import Decision, Plan, Saved
from ssdplan.plans.documents.profile import Machine, Model, Profile
from ssdplan.plans.errors import InfeasibleError, UsageError
from ssdplan.plans.graph.contents import Role
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import whole_pages
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import GIB, MIB, made_machine, made_model, made_profile, made_volume
from tests.planner.machines import machines

RUNGS = ((0.1, 0.25), (1.0, 0.0))
"""A tenth of what autograd saves leaves a quarter of the recomputation; all of it leaves none."""


def with_rungs(**changes: Any) -> Model:
    usual: dict[str, Any] = {"blocks": 6, "hidden": 64, "sequence": 128, "rungs": RUNGS, "flops": 1e10}
    return made_model(**(usual | changes))


def found(model: Model, machine: Machine, n: int, host: float, **fixed: Any) -> ProgramResult:
    device = fixed.pop("device", None)
    result = solve_program(
        model,
        machine,
        micro_batch_size=1,
        micro_batches=n,
        limits=Limits(host, device_bytes=device),
        fixed=FixedChoices(**fixed),
    )
    assert result is not None
    return result


def pair_bytes(model: Model, rung: str) -> int:
    return whole_pages(model.timing("block", 1).rung(rung).kept_bytes)


def decision_of(model: Model, result: ProgramResult, n: int, schedule: Literal["vertical", "horizontal"]) -> Decision:
    made = decide(model, micro_batches=n, schedule=schedule, unified=result.question.fixed.unified_memory)
    return made.model_copy(
        update={
            "delay_ratio": result.delay_ratio,
            "placement": result.placement,
            "checkpoint_host": result.checkpoint_host,
            "recompute": "part" if result.saved else "all",
            "saved": result.saved,
        }
    )


@settings(max_examples=examples(60), deadline=None, print_blob=True)
@given(
    machine=machines(),
    n=st.integers(1, 4),
    blocks=st.integers(1, 6),
    host=st.floats(0.0, 1.0),
    recompute=st.sampled_from(["auto", "none"]),
    schedule=st.sampled_from(["vertical", "horizontal"]),
    unified=st.booleans(),
)
def test_counts_what_the_graph_moves_and_keeps(
    machine: Machine, n: int, blocks: int, host: float, recompute: str, schedule: Any, unified: bool
) -> None:
    """Bytes of both memories and of the store are the schedule's, up to whole pages, grains and pairs."""
    model = with_rungs(blocks=blocks)
    memory = 3 * MIB + host * 60 * MIB
    alpha = 0.0 if schedule == "horizontal" else None
    device = None if unified else 8.0 * MIB
    fixed = {"schedule": schedule, "unified_memory": unified, "delay_ratio": alpha, "kept": None if unified else {}}
    result = found(model, machine, n, memory, recompute=recompute, device=device, **fixed)
    decision = decision_of(model, result, n, schedule)
    built = build_schedule(model, decision)
    traffic = built.traffic("steady")
    most = max(pair_bytes(model, rung.name) for rung in model.timing("block", 1).rungs)
    entries = len(result.saved.get("block", ()))
    times = n if schedule == "horizontal" else 1
    slack = 4 * (blocks + 2) * (2048 * 18 + n * 4096) + 2 * entries * times * most
    assert traffic["read"] == pytest.approx(result.ssd_read_bytes, abs=slack)
    assert traffic["write"] == pytest.approx(result.ssd_write_bytes, abs=slack)
    assert built.arenas["ssd"] == pytest.approx(result.ssd_bytes, abs=slack)
    assert footprint(model, decision).host_bytes == pytest.approx(result.host_bytes, rel=1e-3, abs=8192)
    stays = {tier: sum(whole_pages(b.nbytes) for b in built.buffers if b.tier == tier and not b.pool)
             for tier in ("host", "device")}  # fmt: skip
    assert stays["host"] == pytest.approx(result.host_bytes, abs=slack)
    if not unified:
        assert stays["device"] == pytest.approx(footprint(model, decision).device_bytes, abs=slack)
        assert stays["device"] <= 8 * MIB + slack


def test_what_pays_most_a_byte_is_saved_first() -> None:
    """Compute is all that takes time: of 24 pairs the small rung for as many as fit, then the large one."""
    model, machine = with_rungs(), made_machine(shared=True, cores=4, update_rate=1e12)
    small, large = pair_bytes(model, "rung-1"), pair_bytes(model, "rung-2")
    fixed: dict[str, Any] = {"delay_ratio": 0.0, "optimizer": 1.0, "checkpoints": 1.0, "parameters": 1.0}
    fixed["unified_memory"] = True
    plain = found(model, machine, 4, float(GIB), recompute="all", **fixed)
    forward = model.timing("block", 1).forward_seconds
    cases = [
        (12 * small, {"rung-1": 0.5}),
        (24 * small, {"rung-1": 1.0}),
        (24 * small + 12 * (large - small), {"rung-1": 0.5, "rung-2": 0.5}),
        (100 * large, {"rung-2": 1.0}),
    ]
    for room, shares in cases:
        limit = plain.host_bytes + room
        result = found(model, machine, 4, limit, **fixed)
        assert {each.rung: each.share for each in result.saved["block"]} == pytest.approx(shares, abs=1e-4)
        gain = 24 * forward * sum(share * (0.75 if rung == "rung-1" else 1.0) for rung, share in shares.items())
        assert plain.seconds - result.seconds == pytest.approx(gain, rel=1e-3)


def test_where_the_drive_is_the_slowest_nothing_is_saved() -> None:
    """It would take memory, and gain nothing."""
    slow = made_machine(volumes=(made_volume(read=1e5, write=1e5),))
    result = found(with_rungs(flops=1e13), slow, 4, 30.0 * MIB)
    assert not result.saved


def on_ssd(result: ProgramResult) -> float:
    return sum(each.share for each in result.saved.get("block", ()) if each.tier == "ssd")


def test_activations_go_to_ssd_where_that_gains_what_its_wear_costs() -> None:
    """Too little host memory for any: what they gain of a step, against what they add to the bytes written."""
    model = with_rungs(rungs=RUNGS[:1])
    machine = made_machine(shared=True, cores=4, update_rate=1e12, volumes=(made_volume(read=1e12, write=1e12),))
    fixed: dict[str, Any] = {"unified_memory": True, "delay_ratio": 0.0, "optimizer": 0.0, "checkpoints": 0.0}
    fixed["kept"] = {}
    plain = found(model, machine, 4, float(GIB), recompute="all", **fixed)
    gained = 24 * 0.75 * model.timing("block", 1).forward_seconds / plain.seconds
    written = 24 * pair_bytes(model, "rung-1") / plain.ssd_write_bytes
    host = plain.host_bytes  # none of it is left for activations
    for factor, expected in ((0.5, 1.0), (0.98, 1.0), (1.02, 0.0), (2.0, 0.0)):
        result = found(model, machine, 4, host, wear_price=factor * gained / written, **fixed)
        assert on_ssd(result) == pytest.approx(expected, abs=1e-3), factor


def test_a_plan_that_writes_nothing_goes_on_writing_nothing() -> None:
    model = with_rungs()
    machine = made_machine(shared=True, cores=4, volumes=(made_volume(read=1e12, write=1e12),))
    everything = found(model, machine, 4, float(GIB), recompute="all", unified_memory=True)
    assert everything.ssd_write_bytes == 0
    result = found(model, machine, 4, everything.host_bytes, unified_memory=True)
    assert result.ssd_write_bytes == 0 and on_ssd(result) == 0


def plan_of(profile: Profile, host: int, **more: Any) -> Any:
    usual: dict[str, Any] = {"micro_batches": 4, "micro_batch_size": 1, "unified_memory": True}
    return solve(profile, SolveRequest(host, **(usual | more)), compared=False)


def profile() -> Profile:
    machine = made_machine(shared=True, cores=4, host_memory=GIB, volumes=(made_volume(read=2e9, write=1e9),))
    return made_profile(machine=machine, model=with_rungs())


@pytest.mark.parametrize("host", [8, 12, 16, 24, 48])
def test_a_plan_is_never_slower_than_recomputing_everything(host: int) -> None:
    auto, everything = (plan_of(profile(), host * MIB, recompute=recompute) for recompute in ("auto", "all"))
    assert not everything.decision.saved and everything.decision.recompute == "all"
    assert everything.asked.recompute == "all" and auto.asked.recompute is None
    assert auto.prediction.step_seconds <= everything.prediction.step_seconds * (1 + 1e-9)
    if host == 48:
        assert auto.prediction.step_seconds < 0.85 * everything.prediction.step_seconds


@pytest.mark.parametrize("host", [10, 16, 32])
def test_a_plan_keeps_its_budget_exactly(host: int) -> None:
    for recompute in ("auto", "none"):
        request = SolveRequest(host * MIB, micro_batches=4, unified_memory=True, recompute=recompute)
        plan, built = solve_and_build(profile(), request, compared=False)
        assert plan.prediction.peak_host_bytes <= host * MIB
        held = sum(b.nbytes for b in built.buffers if b.role is Role.SAVED_ACTIVATIONS and not b.pool)
        assert bool(held) == bool(plan.decision.saved)


def test_recompute_none_saves_everything_of_every_pair() -> None:
    plan = plan_of(profile(), 16 * MIB, recompute="none")
    assert sum(each.share for each in plan.decision.saved["block"]) == pytest.approx(1.0)
    assert {each.rung for each in plan.decision.saved["block"]} == {"rung-2"}
    assert {each.tier for each in plan.decision.saved["block"]} == {"host", "ssd"}


def test_recompute_none_without_room_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(InfeasibleError, match=r"at least|needs|least") as refused:
        plan_of(profile(), 2 * MIB, recompute="none")
    assert refused.value.exit_code == 3


def test_what_was_not_measured_cannot_be_asked_for() -> None:
    old = made_profile(machine=profile().machine, model=with_rungs(rungs=()))
    with pytest.raises(UsageError, match="recompute none: the profile has no rung for it of block; profile again"):
        plan_of(old, 16 * MIB, recompute="none")
    with pytest.raises(UsageError, match="recompute paper: the profile has no rung"):
        plan_of(profile(), 16 * MIB, recompute="paper")
    with pytest.raises(UsageError, match="wear price = -1"):
        plan_of(profile(), 16 * MIB, wear_price=-1.0)
    assert plan_of(old, 16 * MIB).decision.recompute == "all"


def test_the_papers_rung_is_taken_where_it_is_asked_for() -> None:
    model = with_rungs()
    rungs = {(entry.name, timing.micro_batch_size): timing.rungs for entry in model.classes for timing in entry.timings}
    classes = tuple(
        entry.model_copy(update={"timings": tuple(
            timing.model_copy(update={"rungs": tuple(
                rung.model_copy(update={"name": "paper"}) if rung.name == "rung-2" else rung
                for rung in rungs[entry.name, timing.micro_batch_size])})
            for timing in entry.timings)})
        for entry in model.classes
    )  # fmt: skip
    made = made_profile(machine=profile().machine, model=model.model_copy(update={"classes": classes}))
    plan = plan_of(made, 32 * MIB, recompute="paper")
    assert {each.rung for each in plan.decision.saved["block"]} == {"paper"}


def with_int8(made: Profile) -> Profile:
    """The same with a twin of each rung, which keeps half the bytes and leaves a twentieth of a forward more."""
    classes = []
    for entry in made.model.classes:
        timings = []
        for timing in entry.timings:
            twins = [
                rung.model_copy(
                    update={
                        "name": f"{rung.name}-int8",
                        "format": "int8",
                        "kept_bytes": rung.kept_bytes // 2,
                        "backward_seconds": rung.backward_seconds + 0.05 * timing.forward_seconds,
                    }
                )
                for rung in timing.rungs
            ]
            rungs = tuple(sorted([*timing.rungs, *twins], key=lambda rung: rung.kept_bytes))
            timings.append(timing.model_copy(update={"rungs": rungs}))
        classes.append(entry.model_copy(update={"timings": tuple(timings)}))
    return made.model_copy(update={"model": made.model.model_copy(update={"classes": tuple(classes)})})


def formats(plan: Plan) -> set[str]:
    return {each.rung.partition("-int8")[1] for each in plan.decision.saved.get("block", ())}


def test_int8_is_for_those_alone_who_allow_it() -> None:
    made = with_int8(profile())
    for host in (12, 20):
        exact = plan_of(made, host * MIB)
        assert exact == plan_of(profile(), host * MIB).model_copy(update={"profile_sha256": exact.profile_sha256})
        allowed = plan_of(made, host * MIB, activations="int8")
        assert exact.exact and exact.asked.activations is None and allowed.asked.activations == "int8"
        assert allowed.exact == ("-int8" not in formats(allowed))
        assert allowed.prediction.step_seconds <= exact.prediction.step_seconds * (1 + 1e-9)
        if host == 12:
            assert not allowed.exact
            assert allowed.prediction.step_seconds < 0.99 * exact.prediction.step_seconds
        assert Plan.model_validate_json(allowed.model_dump_json(by_alias=True)) == allowed
    ample = plan_of(made, 200 * MIB, activations="int8")
    assert ample.exact and ample.decision.saved, "what has room is kept as it is"


def test_recompute_none_may_be_in_int8_where_that_is_allowed() -> None:
    """Where the drive is slow and there is too little room for all as it is: some is, and the rest in int8."""
    slow = made_machine(shared=True, cores=4, host_memory=GIB, volumes=(made_volume(read=6e7, write=3e7),))
    made = with_int8(made_profile(machine=slow, model=with_rungs()))
    plan = plan_of(made, 12 * MIB, recompute="none", activations="int8")
    assert sum(each.share for each in plan.decision.saved["block"]) == pytest.approx(1.0, abs=1e-4)
    assert {each.rung for each in plan.decision.saved["block"]} <= {"rung-2", "rung-2-int8"}
    assert "-int8" in formats(plan)


def test_int8_that_nobody_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="no rungs in int8; make one with ssdplan profile --compression-error"):
        plan_of(profile(), 16 * MIB, activations="int8")


def test_a_step_that_saves_is_simulated_by_its_rungs() -> None:
    """Compute of a simulated step is the sum of what each pair's rung takes."""
    plan, built = solve_and_build(
        profile(), SolveRequest(200 * MIB, micro_batches=4, micro_batch_size=1, unified_memory=True), compared=False
    )
    assert plan.decision.saved["block"] == (Saved(rung="rung-2", tier="host", share=1.0),)
    model = profile().model
    seconds = [model.timing(layer.layer_class, 1) for layer in model.layers]
    everything = sum(4 * t.forward_seconds for t in seconds[:-1]) + sum(4 * t.backward_seconds for t in seconds)
    less = 6 * 4 * model.timing("block", 1).forward_seconds
    assert plan.prediction.step_seconds >= everything - less
    rows = [row for row in plan.alternatives if row.simulated]
    assert all(row.tokens_per_second <= row.compute_tokens_per_second * (1 + 1e-9) for row in rows)
    slower = replace(SolveRequest(200 * MIB, micro_batches=4, micro_batch_size=1, unified_memory=True), recompute="all")
    assert solve(profile(), slower, told="step").prediction.step_seconds >= everything
    assert built.arenas["host"] <= 200 * MIB


def test_rungs_of_another_micro_batch_size_do_not_count() -> None:
    made = profile()
    other = max(made.model.micro_batch_sizes)
    assert other > 1
    classes = tuple(
        entry.model_copy(
            update={
                "timings": tuple(
                    timing if timing.micro_batch_size == 1 else timing.model_copy(update={"rungs": ()})
                    for timing in entry.timings
                )
            }
        )
        for entry in made.model.classes
    )
    some = made.model_copy(update={"model": made.model.model_copy(update={"classes": classes})})
    assert plan_of(some, 16 * MIB, recompute="none").decision.saved
    with pytest.raises(UsageError, match="recompute none: the profile has no rung for it of block"):
        plan_of(some, 16 * MIB, recompute="none", micro_batch_size=other)
