"""A measured step over the predicted one: sums that must come out, and waits attributed to what caused them."""

import json
import random
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssdplan.planner.predict.simulator import simulate
from ssdplan.plans.analysis.overlay import Stall, lay_over, stalls
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import MismatchError
from ssdplan.plans.graph.ops import RESOURCES, Forward, Graph, Op, Region, Schedule, Transfer
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.overlay_text import describe_overlay
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import made_machine, made_model, made_volume
from tests.plans.hand_made import made_forward, made_transfer

NOWHERE = Region(0, 0, 4096)
IN_FLIGHT = {"read": 4, "write": 4}


def _move(index: int, kind: str, *waits: int) -> Transfer:
    return made_transfer(index, kind, NOWHERE, NOWHERE, waits=waits)


def _forward(index: int, *waits: int) -> Forward:
    return made_forward(index, waits=waits, layer=0)


def _timeline(*rows: tuple[Op, float, float]) -> Timeline:
    return Timeline(Graph("steady", tuple(r[0] for r in rows), 1), tuple(r[1] for r in rows), tuple(r[2] for r in rows))


def test_a_chain_is_walked_back_to_where_the_gap_begins() -> None:
    """Read 0 to 2 s, copied 2 to 3 s, computed 3 to 4 s; then an op waits for a copy whose lane was taken."""
    timeline = _timeline(
        (_move(0, "read"), 0.0, 2.0),
        (_move(1, "h2d", 0), 2.0, 3.0),
        (_forward(2, 1), 3.0, 4.0),
        (_move(3, "h2d"), 3.0, 5.0),  # in the way of op 4, which could have begun at 3.5 s
        (_move(4, "h2d", 5), 5.25, 6.0),
        (_move(5, "read"), 2.0, 3.5),
        (_forward(6, 2, 4), 6.5, 7.0),
        (_move(7, "write", 6), 7.0, 9.0),
    )
    assert stalls(timeline) == (
        Stall(0.0, 2.0, 2, 0),
        Stall(2.0, 3.0, 2, 1),
        Stall(4.0, 5.0, 6, 3),
        Stall(5.0, 5.25, 6, None),
        Stall(5.25, 6.0, 6, 4),
        Stall(6.0, 6.5, 6, None),
        Stall(7.0, 9.0, None, 7),
    )


def test_of_two_reads_at_once_the_one_that_ended_made_room() -> None:
    """Reads 0 and 1 run side by side; read 2 begins when 1 ends, though 0, the one before 1, goes on for longer."""
    timeline = _timeline(
        (_move(0, "read"), 0.0, 5.0),
        (_move(1, "read"), 0.0, 2.0),
        (_move(2, "read"), 2.0, 4.0),
        (_forward(3, 2), 4.0, 6.0),
    )
    assert stalls(timeline) == (Stall(0.0, 2.0, 3, 1), Stall(2.0, 4.0, 3, 2))


def test_clocks_that_disagree_end_the_walk() -> None:
    """Op 1 began before what it waited for: no order explains that, but time is still accounted for."""
    timeline = _timeline((_move(0, "read"), 3.0, 4.0), (_move(1, "read", 0), 1.0, 2.0), (_forward(2, 1), 5.0, 6.0))
    pieces = stalls(timeline)
    assert sum(piece.seconds for piece in pieces) == pytest.approx(5.0)


def _plan(**choices: object) -> tuple[Plan, Schedule]:
    shared = bool(choices.pop("shared", False))
    model = made_model(blocks=int(str(choices.pop("blocks", 3))))
    schedule = build_schedule(model, decision := decide(model, **choices))  # type: ignore[arg-type]
    return planned(model, made_machine(shared=shared), decision, schedule), schedule


def _measured(timeline: Timeline, seed: int) -> Timeline:
    """Run again in the same order of starts, each op longer or shorter and begun a little late: never before its waits
    and its lane allow it. Reads and writes are two at a time, as the executor has them."""
    rng = random.Random(seed)
    starts, ends = [0.0] * len(timeline.starts), [0.0] * len(timeline.starts)
    slots = {resource: [0.0] * IN_FLIGHT.get(resource, 1) for resource in RESOURCES}
    for index in sorted(range(len(starts)), key=lambda index: (timeline.starts[index], timeline.ends[index], index)):
        op = timeline.graph.ops[index]
        mine = slots[op.resource]
        slot = mine.index(min(mine))
        ready = max([mine[slot], *(ends[wait] for wait in op.waits)])
        starts[index] = ready + rng.choice([0.0, 1e-6, 1e-5])
        ends[index] = starts[index] + (timeline.ends[index] - timeline.starts[index]) * rng.uniform(0.5, 3.0)
        mine[slot] = ends[index]
    return Timeline(timeline.graph, tuple(starts), tuple(ends))


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(
    blocks=st.integers(1, 4),
    alpha=st.sampled_from([0.0, 0.3, 1.0]),
    optimizer=st.sampled_from([0.0, 0.5, 1.0]),
    parameters=st.sampled_from([0.0, 1.0]),
    micro_batches=st.integers(1, 4),
    shared=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_time_is_accounted_for(seed: int, **choices: object) -> None:
    plan, schedule = _plan(**choices)
    predicted = simulate(schedule.steady, plan.model, plan.machine, 1)
    for timeline in (predicted, _measured(predicted, seed)):
        pieces = stalls(timeline)
        busy = timeline.busy()["compute"]
        assert sum(piece.seconds for piece in pieces) == pytest.approx(timeline.seconds - busy, abs=1e-9)
        assert all(one.end <= other.start + 1e-12 for one, other in pairwise(pieces))
        for piece in pieces:
            assert piece.start < piece.end
            if piece.cause is not None:
                assert timeline.starts[piece.cause] <= piece.start and piece.end <= timeline.ends[piece.cause]
                assert timeline.graph.ops[piece.cause].resource != "compute"
        _connected(timeline, pieces)
        if timeline is predicted:  # the simulator never hesitates
            assert all(piece.cause is not None for piece in pieces)
    overlay = lay_over(plan, schedule, predicted, _measured(predicted, seed))
    for side, timeline in (("predicted", predicted), ("measured", overlay.measured)):
        lengths = sum(end - start for start, end in zip(timeline.starts, timeline.ends, strict=True))
        assert sum(getattr(row, f"{side}_seconds") for row in overlay.kinds) == pytest.approx(lengths)
        waited = sum(getattr(row, f"{side}_seconds") for row in overlay.causes)
        assert waited == pytest.approx(timeline.seconds - timeline.busy()["compute"], abs=1e-9)
    assert sum(row.count for row in overlay.kinds) == len(schedule.steady.ops)


def _connected(timeline: Timeline, pieces: tuple[Stall, ...]) -> None:
    """Going back, each cause is something that the op after it waits for, or the op that made room on its lane."""
    ops = timeline.graph.ops
    lanes: dict[str, list[int]] = {}
    for index in sorted(range(len(timeline.starts)), key=lambda index: timeline.starts[index]):
        lanes.setdefault(ops[index].resource, []).append(index)
    after: int | None = None
    waiting: object = ()
    for piece in reversed(pieces):
        if piece.waiting != waiting:
            waiting = after = piece.waiting
        if piece.cause is None or piece.cause == after:
            continue
        if after is not None:
            mine = lanes[ops[after].resource]
            ended = [i for i in mine[: mine.index(after)] if timeline.ends[i] <= timeline.starts[after] + 1e-8]
            same_lane = sorted(ended, key=lambda index: timeline.ends[index])[-1:]
            ready = [*ops[after].waits, *same_lane]
            # What took no time is no piece: such an op may stand between.
            assert piece.cause in ready or any(timeline.ends[i] == timeline.starts[i] for i in ready)
            assert timeline.ends[piece.cause] == max(timeline.ends[index] for index in ready)
        after = piece.cause


def test_a_slower_drive_is_found() -> None:
    """The same step on a drive that is three times as slow: ops of it take three times as long, and are waited for."""
    plan, schedule = _plan(blocks=4, alpha=0.0)
    slow = made_machine(volumes=(made_volume(read=1e9, write=2e9 / 3),))
    predicted = simulate(schedule.steady, plan.model, plan.machine, 1)
    measured = simulate(schedule.steady, plan.model, slow, 1)
    overlay = lay_over(plan, schedule, predicted, measured)
    for row in overlay.kinds:
        if row.resource not in ("read", "write"):
            assert row.ratio == pytest.approx(1.0)
    reads = [row for row in overlay.kinds if row.resource == "read"]
    assert {row.layer_class for row in reads} >= {"block", "embedding", "head"}
    alone = {"read": 1e9, "write": 2e9 / 3}
    for row in overlay.kinds:
        if row.resource in alone:
            nbytes = sum(
                op.nbytes for op in schedule.steady.ops if isinstance(op, Transfer) and op.kind == row.resource
            )
            total = sum(other.measured_seconds for other in overlay.kinds if other.resource == row.resource)
            assert total >= nbytes / alone[row.resource] * (1 - 1e-9)
    assert overlay.causes[0].resource in ("read", "write")
    more = sum(row.measured_seconds - row.predicted_seconds for row in overlay.causes if row.resource)
    assert more == pytest.approx(measured.seconds - predicted.seconds)


def test_words_fit_and_json_has_the_figures() -> None:
    plan, schedule = _plan(blocks=3, alpha=0.25)
    plan = plan.model_copy(
        update={"model": plan.model.model_copy(update={"name": "x" * 300 + "\x1b[2J"})},
    )
    predicted = simulate(schedule.steady, plan.model, plan.machine, 1)
    overlay = lay_over(plan, schedule, predicted, _measured(predicted, 1))
    text = describe_overlay(overlay)
    assert all(len(line) <= 100 for line in text.splitlines()) and "\x1b" not in text
    assert "What compute waited for" in text and "ssd read" in text
    document = json.loads(json.dumps(overlay.document()))
    assert document["graph"] == "steady" and document["measured_seconds"] == overlay.measured.seconds
    assert [row["measured_seconds"] for row in document["compute_stalls"]] == [
        row.measured_seconds for row in overlay.causes
    ]
    assert set(document["kinds"][0]) == {
        "resource", "work", "layer_class", "count", "predicted_seconds", "measured_seconds", "ratio",
    }  # fmt: skip


def test_two_graphs_are_not_compared() -> None:
    plan, schedule = _plan(alpha=0.25)
    steps = [simulate(graph, plan.model, plan.machine, 1) for graph in (schedule.steady, schedule.first)]
    with pytest.raises(MismatchError, match="steady step cannot be laid over a first"):
        lay_over(plan, schedule, *steps)
