"""Which optimizer states pass from ssd through an update and back, so that the update sums them and no transfer."""

import pytest

from ssdplan.plans.build import build_schedule
from ssdplan.plans.schedule import Transfer, Update, passing_states
from tests.planner.made import made_model
from tests.plans.decided import decide


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("optimizer", [0.0, 0.4, 1.0])
def test_those_of_homes_on_ssd_and_no_others(schedule, unified, optimizer):
    model = made_model(blocks=3)
    alpha = 0.3 if schedule == "vertical" else 0.0
    made = build_schedule(
        model, decide(model, schedule=schedule, unified=unified, optimizer=optimizer, alpha=alpha, gradient=0.0)
    )
    on_ssd = {
        home.optimizer: home.delayed
        for home in made.homes
        if home.optimizer and made.buffers[home.optimizer.buffer].tier == "ssd"
    }
    assert bool(on_ssd) == (optimizer < 1.0)
    for graph, delayed in ((made.first, {False}), (made.steady, {False, True}), (made.flush, {True})):
        passing = passing_states(graph.ops)
        assert set(passing.values()) == {region for region, late in on_ssd.items() if late in delayed}
        updated = [op.optimizer for op in graph.ops if isinstance(op, Update)]
        assert set(passing) <= set(updated)
        # Each is brought once, by a transfer that nobody sums, and taken back once.
        for kind in ("read", "write"):
            ends = [
                op.target if kind == "read" else op.source
                for op in graph.ops
                if isinstance(op, Transfer) and op.kind == kind
            ]
            assert sorted(map(str, (end for end in ends if end in passing))) == sorted(map(str, passing))
    assert passing_states(made.evaluate.ops) == {}
