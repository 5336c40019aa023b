"""The horizontal schedule's program: it counts what the graph moves, and a stage takes what it says."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.predict.drive import combined_frontier
from ssdplan.planner.predict.peaks import predict_peaks
from ssdplan.planner.predict.simulator import simulate
from ssdplan.planner.program import horizontal
from ssdplan.planner.program.choices import FixedChoices, Limits
from ssdplan.planner.program.forms import TRAFFIC
from ssdplan.planner.program.placement import footprint
from ssdplan.planner.program.program import program_bound, solve_program
from ssdplan.planner.program.traffic import layer_groups, total_bytes
from ssdplan.planner.program.variables import CHECKPOINTS_ON_HOST, CONSTANT, value, variables_of
from ssdplan.planner.request import SolveRequest
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.errors import UsageError
from ssdplan.plans.schedule.build import ORDERS, build_schedule
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import GIB, MIB, made_machine, made_model, made_profile, made_volume, planned
from tests.made.works import work_of
from tests.planner.machines import machines, models
from tests.planner.predict.test_drive import seconds_by_turns

RELAXED = settings(deadline=None, max_examples=examples(40), print_blob=True)
HORIZONTAL = FixedChoices(delay_ratio=0.0, schedule="horizontal")


@RELAXED
@given(models(), st.sampled_from((1, 4)), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_counts_what_the_graph_moves_to_the_byte(
    model: Model, b: int, n: int, optimizer: bool, parameters: bool, checkpoints: bool
) -> None:
    """With each kind of data whole on one side, nothing is rounded: bytes of all four resources, store and host."""
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
    groups = layer_groups(model)
    stages = horizontal.stages(model, groups, work_of(b, n, "horizontal"))
    at = {CHECKPOINTS_ON_HOST: float(checkpoints)}
    for name in decision.placement:
        names = variables_of(name)
        at |= {names.optimizer.prompt_host: float(optimizer), names.optimizer.prompt_ssd: float(not optimizer)}
        at |= {names.parameters.prompt_host: float(parameters), names.parameters.prompt_ssd: float(not parameters)}
        at |= dict.fromkeys((*names.optimizer.delayed, *names.parameters.delayed, *names.gradient), 0.0)
    assert schedule.traffic("steady") == {
        "read": value(total_bytes(stages, "read"), at),
        "write": value(total_bytes(stages, "write"), at),
        "h2d": sum(stage.count * stage.h2d_bytes[CONSTANT] for stage in stages),
        "d2h": sum(stage.count * stage.d2h_bytes[CONSTANT] for stage in stages),
    }
    assert sum(stage.count * value(stage.updates, at) for stage in stages) == sum(s.elements for s in model.states)
    found = footprint(model, decision)
    assert found.ssd_bytes == schedule.arenas["ssd"]
    assert found.host_bytes == predict_peaks(schedule, model, decision).residents
    assert found.ssd_write_bytes == schedule.traffic("steady")["write"]


def test_every_order_of_operations_has_its_traffic() -> None:
    assert set(TRAFFIC) == set(ORDERS)


@RELAXED
@given(models(), machines(), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2))
def test_a_fixed_placement_takes_what_its_stages_take(
    model: Model, machine: Machine, n: int, optimizer: int, parameters: int, checkpoints: int
) -> None:
    """Stage by stage, micro-batch by micro-batch, by the rules of GreedySnake 3.3 written down a second time."""
    shares = (optimizer / 2, parameters / 2, checkpoints / 2)
    fixed = FixedChoices(0.0, parameters=shares[1], optimizer=shares[0], checkpoints=shares[2], schedule="horizontal")
    result = solve_program(model, machine, micro_batch_size=2, micro_batches=n, limits=Limits(1e15), fixed=fixed)
    assert result is not None
    assert result.seconds == pytest.approx(_seconds(model, machine, 2, n, *shares), rel=1e-5)


def _seconds(model: Model, machine: Machine, b: int, n: int, optimizer: float, parameters: float, kept: float) -> float:
    frontier = list(combined_frontier(machine.volumes))
    element = {"bf16": 2, "fp32": 4}[model.precision]
    c = -(-b * model.sequence_length * model.hidden_size * element // 4096) * 4096
    last = len(model.layers) - 1
    total = 0.0
    for micro_batch, (number, layer) in itertools.product(range(n), enumerate(model.layers)):
        timing = model.timing(layer.layer_class, b)
        every = sum(model.states[i].elements for i in layer.states)
        own = sum(model.states[i].elements for i in layer.states if model.uses(i)[0] == number)
        begun = sum(model.states[i].elements for i in layer.states if micro_batch or model.uses(i)[-1] != number)
        weights = element * every
        read = weights * (1 - parameters)

        def stage(compute: float, read: float, write: float, h2d: float, d2h: float, updates: float = 0.0) -> float:
            to, back, cpu = h2d / machine.h2d_bandwidth, d2h / machine.d2h_bandwidth, updates / machine.update_rate
            drive = seconds_by_turns(frontier, read, write) if read or write else 0.0
            if machine.compute_shares_cpu:
                return max(compute + cpu + (to + back) / machine.cores, to, back, drive)
            return max(compute, cpu, to, back, drive)

        if number < last:
            out = c if number < last - 1 else 0
            total += stage(timing.forward_seconds, read, out * (1 - kept), weights, out)
        block = c if 0 < number < last else 0
        update = own if micro_batch == n - 1 else 0
        total += stage(
            timing.backward_seconds,
            read + block * (1 - kept) + 12 * update * (1 - optimizer),
            update * (12 * (1 - optimizer) + element * (1 - parameters)),
            weights + block + 4 * begun,
            4 * every,
            update,
        )
    return total


@RELAXED
@given(models(), machines(), st.integers(2, 6), st.floats(0, 1))
def test_one_micro_batch_is_the_vertical_program_without_delays(
    model: Model, machine: Machine, n: int, memory: float
) -> None:
    """And with more of them the two differ by what each moves again: parameters and gradients, or hidden states."""
    limit = memory * 16 * sum(state.elements for state in model.states)

    def seconds(n: int, fixed: FixedChoices) -> float | None:
        found = program_bound(model, machine, micro_batch_size=1, micro_batches=n, limits=Limits(limit), fixed=fixed)
        return found.seconds if found else None

    shared = 4 * sum(s.elements for i, s in enumerate(model.states) if len(model.uses(i)) > 1)
    one = seconds(1, HORIZONTAL)
    if not shared:
        assert one == pytest.approx(seconds(1, FixedChoices(delay_ratio=0.0)), rel=1e-5)
    elif limit < shared:
        assert one is None
    more = seconds(n, HORIZONTAL)
    assert more is None or one is None or more >= one * (1 - 1e-6)


def small(**machine: object):
    return made_profile(machine=made_machine(**machine), model=made_model(blocks=6, hidden=256, vocab=2048, flops=1e13))


@pytest.mark.parametrize("budget", [32 * MIB, 48 * MIB, GIB])
def test_a_plan_of_it_keeps_its_budgets_and_predicts_its_own_graph(budget: int) -> None:
    profile = small()
    plan = planned(profile, SolveRequest(budget, global_batch=8, micro_batch_size=2, schedule="horizontal"))
    decision, prediction = plan.decision, plan.prediction
    assert (decision.schedule, decision.delay_ratio, decision.micro_batches) == ("horizontal", 0.0, 4)
    schedule = build_schedule(plan.model, decision)
    assert prediction.peak_host_bytes == schedule.arenas["host"] <= budget
    assert prediction.ssd_bytes == schedule.arenas["ssd"]
    traffic = schedule.traffic("steady")
    assert (prediction.ssd_read_bytes, prediction.ssd_write_bytes) == (traffic["read"], traffic["write"])
    timeline = simulate(schedule.steady, plan.model, plan.machine, 2)
    assert prediction.step_seconds == timeline.seconds == pytest.approx(prediction.program_seconds, rel=0.2)
    assert not prediction.ssd_bytes if budget == GIB else prediction.ssd_bytes
    told = {reason.topic: reason.text for reason in plan.reasons}
    assert "horizontal" in told["delay ratio"]


def test_more_micro_batches_take_no_more_host_memory() -> None:
    """But for what the run keeps of each operation."""
    arenas = []
    for n in (2, 32):
        request = SolveRequest(64 * MIB, micro_batch_size=1, micro_batches=n, schedule="horizontal")
        least = planned(small(), request).least[0]
        assert least.budget == "host memory"
        arenas.append(
            planned(small(), replace(request, host_memory_bytes=least.least_bytes)).prediction.host_arena_bytes
        )
    assert arenas[1] == pytest.approx(arenas[0], rel=0.005)


@pytest.mark.parametrize(
    ("more", "words"),
    [({"delay_ratio": 0.5}, "can only be 0"), ({"clip_grad_norm": 1.0}, "delays no update")],
)
def test_what_it_cannot_do_is_refused(more: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        planned(small(), SolveRequest(GIB, global_batch=4, schedule="horizontal", **more))


def test_behind_a_slow_drive_a_micro_batch_costs_what_it_reads_again() -> None:
    """Twice all parameters but the head's, which turn around, and its checkpoints, written and read."""
    model = made_model(blocks=6)
    machine = made_machine(volumes=(made_volume(read=1e6, write=1e6),), link=1e12, update_rate=1e12)

    def seconds(n: int) -> float:
        found = program_bound(
            model,
            machine,
            micro_batch_size=1,
            micro_batches=n,
            limits=Limits(1e12),
            fixed=FixedChoices(0.0, 0.0, 0.0, 0.0, schedule="horizontal"),
        )
        assert found is not None
        return found.seconds

    elements = [state.elements for state in model.states]
    weights = 2 * (2 * sum(elements) - elements[-1])
    assert seconds(5) - seconds(4) == pytest.approx((weights + 2 * 6 * 4096) / 1e6, rel=1e-4)
