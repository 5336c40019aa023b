"""Several ranks in the program: its forms against the bytes of rank 0's schedule, and what it makes of a network."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.program.forms import TRAFFIC
from ssdplan.planner.program.placement import _checkpoints, _values, footprint
from ssdplan.planner.program.traffic import layer_groups
from ssdplan.planner.program.variables import CONSTANT, DELAY_RATIO, value
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve, solve_and_build
from ssdplan.plans.documents.profile import Model, Network, Profile
from ssdplan.plans.errors import UsageError
from ssdplan.plans.graph.collectives import AddShares, Exchange, Gather
from ssdplan.plans.graph.verify import verify
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.plan_text import describe_plan
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import GIB, made_machine, made_model, made_profile
from tests.made.works import work_of
from tests.planner.machines import models

NETWORK = Network(ranks=2, gather_bandwidth=1e9, exchange_bandwidth=8e8, latency_seconds=1e-4, add_rate=1e10)


def profile_of(model: Model, network: Network | None = NETWORK) -> Profile:
    return made_profile(model=model, machine=made_machine().model_copy(update={"network": network}))


@settings(deadline=None, max_examples=examples(80), print_blob=True)
@given(
    model=models(), n=st.integers(1, 3), ranks=st.integers(2, 4), alpha=st.sampled_from([0.0, 1.0]),
    on_device=st.sampled_from([0.0, 1.0]), on_host=st.sampled_from([0.0, 1.0]), unified=st.booleans(),
    schedule=st.sampled_from(["vertical", "horizontal"]), behind=st.booleans(),
)  # fmt: skip
def test_forms_are_the_bytes_of_the_schedule(
    model, n, ranks, alpha, on_device, on_host, unified, schedule, behind
) -> None:
    """Where nothing is a fraction of a share, nothing is rounded."""
    alpha, behind = (alpha, behind) if schedule == "vertical" else (0.0, False)
    decision = decide(
        model, micro_batches=n, alpha=alpha, on_device=on_device, optimizer=on_host, checkpoints=on_host,
        parameters=0.0 if unified else on_host, unified=unified, ranks=ranks, schedule=schedule, behind=behind,
    )  # fmt: skip
    built = build_schedule(model, decision)
    work = replace(work_of(1, n), ranks=ranks, unified_memory=unified)
    at = {DELAY_RATIO: alpha} | _checkpoints(decision.checkpoint_host, 0.0)
    for name, placement in decision.placement.items():
        at |= _values(name, placement, 0.0)
    made = TRAFFIC[schedule].stages(model, layer_groups(model, ranks), work)

    def total(form: str) -> object:
        return pytest.approx(sum(stage.count * value({CONSTANT: 0.0, **getattr(stage, form)}, at) for stage in made))

    moved = built.traffic("steady")
    assert total("read_bytes") == moved["read"] and total("write_bytes") == moved["write"]
    if not unified:
        assert total("h2d_bytes") == moved["h2d"] and total("d2h_bytes") == moved["d2h"]
    ops = built.steady.ops
    assert total("gathered") == sum(op.nbytes for op in ops if isinstance(op, Gather))
    assert sum(each.count * each.exchanged for each in made) == sum(op.nbytes for op in ops if isinstance(op, Exchange))
    added = sum(op.received.nbytes for op in ops if isinstance(op, AddShares))
    assert sum(each.count * each.added for each in made) == added
    collectives = sum(isinstance(op, Gather | Exchange) for op in ops)
    assert sum(each.count * each.collectives for each in made) == collectives
    assert footprint(model, decision).ssd_bytes == built.arenas["ssd"]


@pytest.mark.parametrize("unified", [False, True])
def test_a_plan_is_of_each_rank_and_fits_them_all(unified: bool) -> None:
    model = made_model(blocks=6, hidden=250)  # whose shares are not all alike
    machine = made_machine(shared=unified).model_copy(update={"network": NETWORK.model_copy(update={"ranks": 3})})
    profile = made_profile(model=model, machine=machine)
    request = SolveRequest(host_memory_bytes=GIB, global_batch=12, ranks=3, unified_memory=unified)
    plan, schedule = solve_and_build(profile, request)
    decision, p = plan.decision, plan.prediction
    assert decision.ranks == 3 and decision.micro_batches * decision.micro_batch_size == 4
    assert p.tokens_per_second == pytest.approx(12 * model.sequence_length / p.step_seconds)
    each = [build_schedule(model, decision, rank) for rank in range(3)]
    assert len({made.arenas["host"] for made in each}) > 1
    for made in each:
        verify(made)
        assert made.arenas["host"] <= p.host_arena_bytes and made.arenas["ssd"] <= p.ssd_bytes
    assert 0.0 < p.busy["network"] <= 1.0 and "network" not in solve(profile, SolveRequest(GIB)).prediction.busy
    text = describe_plan(plan, schedule)
    assert "ranks" in text and "of all ranks" in text and "network" in text
    assert any(row.resource == "network" for row in plan.sensitivity)
    beside = {row.name: row for row in plan.comparison}["horizontal"]
    assert beside.step_seconds is not None and beside.step_seconds >= p.step_seconds


def test_the_network_bounds_a_step_where_it_is_slow_and_more_micro_batches_hide_it() -> None:
    model = made_model(blocks=6, hidden=256)
    slow = NETWORK.model_copy(update={"gather_bandwidth": 5e6, "exchange_bandwidth": 5e6})
    few, many = (
        solve(profile_of(model, slow), SolveRequest(4 * GIB, ranks=2, micro_batch_size=4, micro_batches=n))
        for n in (1, 8)
    )
    assert few.prediction.bound_by == "network"
    assert few.prediction.step_seconds == pytest.approx(many.prediction.step_seconds, rel=0.2)
    assert many.prediction.tokens_per_second > 6 * few.prediction.tokens_per_second
    faster = solve(profile_of(model), SolveRequest(4 * GIB, ranks=2, micro_batch_size=4, micro_batches=1))
    assert faster.prediction.step_seconds < 0.1 * few.prediction.step_seconds


def test_what_several_ranks_do_not_do_is_refused() -> None:
    model = made_model(blocks=4)
    for wrong, words in (
        ({"ranks": 3}, "of 2 ranks; make one with ssdplan profile --ranks 3"),
        ({"ranks": 2, "global_batch": 7}, "cannot share it evenly"),
        ({"ranks": 0}, "from 1 to"),
    ):
        with pytest.raises(UsageError, match=words):
            solve(profile_of(model), SolveRequest(GIB, **wrong))
    with pytest.raises(UsageError, match="the profile is of one rank"):
        solve(profile_of(model, None), SolveRequest(GIB, ranks=2))
