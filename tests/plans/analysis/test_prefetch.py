"""The prefetch table, against what can be seen by walking a graph by hand."""

from collections import Counter
from typing import Any

import pytest

from ssdplan.planner.predict.simulator import simulate
from ssdplan.plans.analysis.prefetch import Entry, prefetch_table
from ssdplan.plans.analysis.work import work_of
from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.graph.ops import Backward, Forward, Schedule, TakeRows, Transfer, Update
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.trace import amount
from tests.made.decisions import decide
from tests.made.profiles import made_machine, made_model


def table(**choices: Any) -> tuple[Model, Schedule, Timeline, dict[tuple[str, str], Entry]]:
    model = made_model(blocks=3)
    schedule = build_schedule(model, decide(model, **{"micro_batches": 2, **choices}))
    rates = dict.fromkeys(("perturb_rate", "pending_rate", "pending_rate_host", "rows_bandwidth"), 1e9)
    machine = made_machine().model_copy(update=rates)
    timeline = simulate(schedule.steady, model, machine, 1)
    entries = prefetch_table(model, schedule, timeline)
    assert [entry.order for entry in entries] == list(range(1, len(entries) + 1))
    firsts = [entry.first for entry in entries if entry.first is not None]
    assert firsts == sorted(firsts) and [entry.first for entry in entries[: len(firsts)]] == firsts
    return model, schedule, timeline, {(entry.state, entry.what): entry for entry in entries}


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"alpha": 0.5, "optimizer": 0.5, "parameters": 0.5},
        {"on_device": 1.0, "optimizer": 1.0},
        {"across_turn": 1.0},
    ],
)
def test_every_state_has_its_bytes_uses_and_times(choices: dict[str, Any]) -> None:
    model, schedule, timeline, entries = table(**choices)
    homes: Counter[tuple[str, str, str]] = Counter()
    for home in schedule.homes:
        name = model.states[home.state].name
        homes[name, "parameters", schedule.buffers[home.parameters.buffer].tier] += home.parameters.nbytes
        assert home.optimizer is not None
        homes[name, "optimizer states", schedule.buffers[home.optimizer.buffer].tier] += home.optimizer.nbytes
    for (name, what), entry in entries.items():
        assert entry.home == {
            tier: homes[name, what, tier] for tier in ("device", "host", "ssd") if homes[name, what, tier]
        }
        index = [state.name for state in model.states].index(name)
        used = [
            op.index
            for op in timeline.graph.ops
            if (what == "parameters" and isinstance(op, Forward | Backward) and index in model.layers[op.layer].states)
            or (what == "optimizer states" and isinstance(op, Update) and op.state == index)
        ]
        assert entry.uses == len(used) > 0
        assert entry.first == min(timeline.starts[index] for index in used)
        assert entry.last == max(timeline.ends[index] for index in used)
        assert all(0 <= stay.start < stay.end <= timeline.seconds for stay in entry.stays)


def test_what_is_on_the_device_comes_there_before_its_use_and_stays_until_it() -> None:
    model, schedule, timeline, entries = table(parameters=1.0)
    for index in range(len(model.states)):
        entry = entries[model.states[index].name, "parameters"]
        uses = [
            op for op in timeline.graph.ops
            if isinstance(op, Forward | Backward) and index in model.layers[op.layer].states
        ]  # fmt: skip
        on_device = [stay for stay in entry.stays if stay.tier == "device"]
        for op in uses:
            start, end = timeline.starts[op.index], timeline.ends[op.index]
            assert any(stay.start < start and end <= stay.end for stay in on_device), str(op)
        arrivals = [
            op for op in timeline.graph.ops if isinstance(op, Transfer) and op.kind == "h2d" and op.state == index
        ]
        assert {stay.start for stay in on_device} <= {timeline.starts[op.index] for op in arrivals}
        assert entry.size_class == max(schedule.buffers[op.target.buffer].nbytes for op in arrivals)


def test_the_reuse_distance_is_what_others_use_in_between() -> None:
    """Of untied blocks without delay: forward and backward of the ones above, and their updates."""
    model, _, _, entries = table(parameters=1.0, optimizer=1.0)
    first, second = (model.states[model.layers[number].states[0]].name for number in (1, 2))
    above = entries[first, "parameters"].between
    assert above is not None
    assert above >= entries[second, "parameters"].nbytes + entries[second, "optimizer states"].nbytes
    assert entries[first, "parameters"].between > (entries[second, "parameters"].between or 0)


def test_without_gradients_there_are_no_optimizer_states() -> None:
    _, _, _, entries = table(zeroth_order=ZerothOrder())
    assert {what for _, what in entries} == {"parameters"} and all(entry.uses for entry in entries.values())


def test_a_table_by_rows_lives_on_host_and_its_rows_pass() -> None:
    """Each operation on it is a use: rows taken, updated and perturbed, two forwards, and the update on host."""
    zeroth_order = ZerothOrder(by_rows=True)
    model, _, timeline, entries = table(parameters=1.0, micro_batches=1, zeroth_order=zeroth_order)
    entry, rows = entries["embedding", "parameters"], 32 * 64 * 2
    assert entry.order == 1 and entry.home == {"host": model.states[0].elements * 2}
    assert entry.uses == 5 and entry.size_class == rows
    assert {stay.tier for stay in entry.stays} == {"host", "device"}
    taken = [op for op in timeline.graph.ops if isinstance(op, TakeRows)]
    assert [(str(op), work_of(op), amount(op)) for op in taken] == [
        ("take rows of embedding", "take rows", (rows, "bytes"))
    ]
