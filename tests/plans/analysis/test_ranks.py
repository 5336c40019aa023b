"""Several ranks side by side: one clock, who held the others up, and one trace of all."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ssdplan.plans.analysis.ranks import held_up, shifts
from ssdplan.plans.errors import MismatchError
from ssdplan.plans.graph.collectives import Collective
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.report_text import describe_held
from ssdplan.plans.views.trace import read_trace, trace_of, write_trace_of_ranks
from tests.made.decisions import decide
from tests.made.profiles import made_model

MODEL = made_model(blocks=2)
DECISION = decide(MODEL, micro_batches=2).model_copy(update={"ranks": 2})
SCHEDULES = [build_schedule(MODEL, DECISION, rank) for rank in range(2)]


def timelines(slow: str = "") -> list[Timeline]:
    """A step of both ranks in which each operation takes a second and begins when all that it waits for has ended.
    Those of rank 1 that begin with `slow` take two, and a collective ends a second after both have begun it."""
    graphs = [schedule.steady for schedule in SCHEDULES]
    times: list[list[tuple[float, float]]] = [[], []]
    left = [list(graph.ops) for graph in graphs]
    while any(left):
        for rank, ops in enumerate(left):
            while ops and not isinstance(ops[0], Collective):
                op = ops.pop(0)
                begin = max((times[rank][wait][1] for wait in op.waits), default=0.0)
                times[rank].append((begin, begin + (2.0 if rank and slow and str(op).startswith(slow) else 1.0)))
        if any(left):
            both = [ops.pop(0) for ops in left]
            begun = [max((times[r][w][1] for w in op.waits), default=0.0) for r, op in enumerate(both)]
            for rank, begin in enumerate(begun):
                times[rank].append((begin, max(begun) + 1.0))
    end = max(end for each in times for _, end in each)
    return [
        Timeline(graph, tuple(begin for begin, _ in each), tuple(end for _, end in each), met=end)
        for graph, each in zip(graphs, times, strict=True)
    ]


def timeline_of(rank: int) -> Timeline:
    return timelines()[rank]


def test_steps_are_laid_on_one_clock_by_the_moment_when_all_had_ended() -> None:
    early, late = timeline_of(0), timeline_of(1)
    assert shifts([early, replace(late, met=early.met - 3.0)]) == (0.0, 3.0)  # type: ignore[operator]
    with pytest.raises(MismatchError, match="does not say when"):
        shifts([early, replace(late, met=None)])


def test_who_begins_a_collective_last_has_held_the_others_up() -> None:
    """Backwards take longer on one rank: that is what it was at while the other waited, whatever their clocks say."""
    fast, late = timelines("backward")
    (held, other) = held_up([fast, late])
    assert held.rank == 1 and held.seconds > other.seconds == 0.0
    assert held.causes == (("compute", "backward", held.seconds),)
    assert fast.met is not None
    held_by_another_clock = held_up(
        [replace(fast, met=fast.met + 7.0, starts=tuple(t + 7.0 for t in fast.starts)), late]
    )
    assert held_by_another_clock[0].seconds == pytest.approx(held.seconds)
    text = describe_held([held, other], late.seconds)
    assert (
        "rank 1 was the slowest" in text
        and "compute (backward)" in text
        and all(len(line) <= 100 for line in text.splitlines())
    )


def test_ranks_that_are_alike_hold_nobody_up() -> None:
    assert [each.seconds for each in held_up([timeline_of(0), timeline_of(0)])] == [0.0]


def test_ranks_of_other_steps_are_refused() -> None:
    other = build_schedule(MODEL, DECISION.model_copy(update={"micro_batches": 1}), 1)
    graph = other.evaluate
    times = tuple(float(op.index) for op in graph.ops)
    with pytest.raises(MismatchError, match="the same collectives"):
        held_up([timeline_of(0), Timeline(graph, times, times, met=1.0)])


def test_one_trace_has_two_processes_for_each_rank_on_one_clock(tmp_path: Path) -> None:
    each = [timeline_of(0), replace(timeline_of(1), met=1.0)]
    assert each[0].met is not None
    late = each[0].met - 1.0
    write_trace_of_ranks(list(zip(each, SCHEDULES, strict=True)), tmp_path / "all.json", name="measured")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2, 3, 4}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] % 2} == {
        "rank 0: measured", "rank 1: measured",
    }  # fmt: skip
    for rank, timeline in enumerate(each):
        began = {e["args"]["op"]: e["ts"] for e in events if e["ph"] == "X" and e["pid"] == 2 * rank + 1}
        assert len(began) == len(timeline.graph.ops)
        assert began[0] == pytest.approx(1e6 * (timeline.starts[0] + rank * late), abs=1e-2)
    arrows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(arrows) == len(set(arrows)), "an arrow belongs to one rank"


def test_a_ranks_own_trace_keeps_the_moment(tmp_path: Path) -> None:
    path, timeline = tmp_path / "trace.json", timeline_of(1)
    path.write_text(trace_of(timeline, SCHEDULES[1], name="a step"))
    assert read_trace(path, SCHEDULES[1]).met == timeline.met
    path.write_text(trace_of(replace(timeline, met=None), SCHEDULES[1], name="a step"))
    assert read_trace(path, SCHEDULES[1]).met is None
