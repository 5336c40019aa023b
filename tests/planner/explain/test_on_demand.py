"""What ZeRO-Infinity's habits would find in time: fetches come when they are asked for, one operation at a time."""

import pytest

from ssdplan.planner.explain.on_demand import on_demand_figures, one_by_one
from ssdplan.planner.predict.simulator import simulate
from ssdplan.plans.analysis.cache import Beside, predicted_figures, states_on_ssd
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.graph.ops import Transfer
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.cache_text import predicted_lines
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import made_machine, made_model


def made(**choices: object) -> Plan:
    model = made_model(blocks=4, hidden=64)
    decision = decide(model, **choices)  # type: ignore[arg-type]
    return planned(model, made_machine(), decision, build_schedule(model, decision))


def test_operations_run_alone_and_fetches_come_last() -> None:
    """Nothing overlaps, nothing runs before what it waits for, and a fetch is followed by what wanted it, or by another
    fetch for that."""
    plan = made(micro_batches=2)
    graph = build_schedule(plan.model, plan.decision).steady
    timeline = one_by_one(graph, [1.0] * len(graph.ops))
    order = sorted(range(len(graph.ops)), key=timeline.starts.__getitem__)
    assert [timeline.starts[index] for index in order] == [float(number) for number in range(len(order))]
    position = {index: number for number, index in enumerate(order)}
    assert all(position[wait] < position[op.index] for op in graph.ops for wait in op.waits)
    wanted_by: dict[int, set[int]] = {index: set() for index in order}
    for op in graph.ops:
        for wait in op.waits:
            wanted_by[wait].add(op.index)
    fetches = [op.index for op in graph.ops if isinstance(op, Transfer) and op.kind in ("read", "h2d")]
    for index in fetches:
        following = order[position[index] + 1 :]
        others = [each for each in following if each not in fetches]
        first = others[0] if others else None
        assert first is None or first in wanted_by[index] or any(
            each in wanted_by[index] and first in wanted_by[each] for each in fetches
        )  # fmt: skip


@pytest.mark.parametrize("choices", [{"alpha": 0.4, "optimizer": 0.5}, {"on_device": 1.0}, {"unified": True}])
def test_every_use_and_every_update_waits(choices: dict[str, object]) -> None:
    """But the uses of parameters that nobody fetches, where compute works on host memory itself."""
    plan = made(micro_batches=3, **choices)
    found = on_demand_figures(plan)
    assert found is not None and found.optimizer_miss_rate == 1.0 and found.compute_wait_seconds is None
    hits = found.host_hit_rate if plan.decision.unified_memory else found.device_hit_rate
    assert hits == 0.0 and found.waits_below_30us is not None
    schedule = build_schedule(plan.model, plan.decision)
    predicted = predicted_figures(plan, schedule, lambda graph: simulate(graph, plan.model, plan.machine, 1))
    lines = predicted_lines(Beside(predicted, None, states_on_ssd(schedule), found))
    assert lines[-1].startswith("  fetched on demand ") and "hits 0%" in lines[-1] and "misses 100%" in lines[-1]
    assert all(len(line) <= 100 for line in lines)


def test_steps_that_order_does_not_know_have_no_figures() -> None:
    plan = made(clip_grad_norm=1.0, alpha=1.0)
    assert on_demand_figures(plan) is None
    zeroth = decide(plan.model, zeroth_order=ZerothOrder(), parameters=1.0)
    assert on_demand_figures(plan.model_copy(update={"decision": zeroth})) is None
