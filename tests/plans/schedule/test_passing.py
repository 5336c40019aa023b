"""Which optimizer states pass from ssd through an update and back, so that the update sums them and no transfer."""

import pytest

from ssdplan.plans.graph.ops import Transfer, Update
from ssdplan.plans.schedule.build import build_schedule
from tests.made.decisions import decide
from tests.made.profiles import made_model


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
        updates = [op for op in graph.ops if isinstance(op, Update)]
        passing = {op.optimizer: op.stored for op in updates if op.stored}
        assert len(passing) == sum(op.optimizer in passing for op in updates), "each is updated once"
        assert set(passing.values()) == {region for region, late in on_ssd.items() if late in delayed}
        # Each is brought once, by a transfer that nobody sums, and taken back once.
        transfers = [op for op in graph.ops if isinstance(op, Transfer)]
        for kind in ("read", "write"):
            ends = [
                (op.target, op.source) if kind == "read" else (op.source, op.target)
                for op in transfers
                if op.kind == kind
            ]
            assert sorted(map(str, (end for end in ends if end[0] in passing))) == sorted(map(str, passing.items()))
        summed = [op for op in transfers if op.summed_by_update]
        assert summed == [op for op in transfers if {op.source, op.target} & set(passing)]
    assert not any(isinstance(op, Transfer) and op.summed_by_update for op in made.evaluate.ops)
