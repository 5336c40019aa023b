"""Timelines as traces: what Perfetto is told is what the schedule and its memory say, and it can be read back."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from ssdplan.planner.predict.simulator import simulate
from ssdplan.plans.analysis.memory_usage import label, memory_usage
from ssdplan.plans.errors import MismatchError, UsageError
from ssdplan.plans.graph.ops import Schedule, Transfer, Update
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.trace import ALWAYS, read_trace, write_trace
from tests.made.decisions import decide
from tests.made.profiles import made_machine, made_model

NANOSECOND = 1e-9


def _made(*, blocks: int = 3, alpha: float = 0.25) -> tuple[Schedule, Timeline]:
    model = made_model(blocks=blocks)
    schedule = build_schedule(model, decide(model, alpha=alpha, optimizer=0.3, checkpoints=0.5))
    return schedule, simulate(schedule.steady, model, made_machine(), 1)


def _written(path: Path, schedule: Schedule, timeline: Timeline) -> list[dict]:
    write_trace(timeline, schedule, path, name="a step")
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    return json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize("name", ["first", "steady", "flush", "evaluate"])
def test_a_trace_is_read_back(tmp_path: Path, name: str) -> None:
    schedule, _ = _made()
    model = made_model(blocks=3)
    timeline = simulate(getattr(schedule, name), model, made_machine(), 1)
    write_trace(timeline, schedule, tmp_path / "trace.json", name="a step")
    found = read_trace(tmp_path / "trace.json", schedule)
    assert found.graph is timeline.graph and found.graph.name == name
    assert found.starts == pytest.approx(timeline.starts, abs=NANOSECOND)
    assert found.ends == pytest.approx(timeline.ends, abs=2 * NANOSECOND)


def test_each_resource_is_a_track(tmp_path: Path) -> None:
    schedule, timeline = _made()
    events = _written(tmp_path / "trace.json", schedule, timeline)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert list(tracks.values()) == list(ALWAYS)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(timeline.graph.ops)
    for event, op in zip(spans, timeline.graph.ops, strict=True):
        assert (tracks[event["tid"]], event["name"]) == (op.resource, str(op))
        args = event["args"]
        assert (args["op"], tuple(args["waits"])) == (op.index, op.waits)
        assert args.get("bytes") == (op.nbytes if isinstance(op, Transfer) else None)
        assert args.get("elements") == (op.elements if isinstance(op, Update) else None)


def test_what_overlaps_on_a_resource_has_a_second_track(tmp_path: Path) -> None:
    """Spans of one track either follow each other or lie one within the other, or viewers drop them."""
    schedule, timeline = _made()
    reads = [op.index for op in timeline.graph.ops if op.resource == "read"]
    ends = list(timeline.ends)
    for index in reads[::4]:
        ends[index] += 0.4 * (timeline.ends[index] - timeline.starts[index])
    longer = Timeline(timeline.graph, timeline.starts, tuple(ends))
    events = _written(tmp_path / "trace.json", schedule, longer)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert sorted(tracks.values()) == sorted([*ALWAYS, "read (2)"])
    for tid in tracks:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == tid)
        assert all(one[1] <= other[0] + 0.01 for one, other in pairwise(spans))
    assert read_trace(tmp_path / "trace.json", schedule).ends == pytest.approx(longer.ends, abs=2 * NANOSECOND)


def test_an_arrow_comes_from_the_wait_that_ended_last(tmp_path: Path) -> None:
    schedule, timeline = _made()
    events = _written(tmp_path / "trace.json", schedule, timeline)
    tails = {event["id"]: event for event in events if event["ph"] == "s"}
    heads = {event["id"]: event for event in events if event["ph"] == "f"}
    spans = {event["args"]["op"]: event for event in events if event["ph"] == "X"}
    waiting = [op for op in timeline.graph.ops if op.waits]
    assert set(tails) == set(heads) == {op.index for op in waiting}

    def under(arrow: dict) -> set[int]:
        """The ops whose box holds this end of an arrow."""
        half = 0.001
        return {
            index
            for index, span in spans.items()
            if span["tid"] == arrow["tid"] and span["ts"] - half <= arrow["ts"] <= span["ts"] + span["dur"] + half
        }

    for op in waiting:
        latest = max(timeline.ends[wait] for wait in op.waits)
        assert op.index in under(heads[op.index])
        sources = under(tails[op.index]) & set(op.waits)
        assert any(timeline.ends[wait] == latest for wait in sources)


def test_counters_are_the_memory(tmp_path: Path) -> None:
    schedule, timeline = _made()
    events = _written(tmp_path / "trace.json", schedule, timeline)
    counters: dict[str, list[tuple[float, int]]] = {}
    for event in events:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append((event["ts"], event["args"]["bytes"]))
    usage = memory_usage(schedule, timeline)
    assert set(counters) == {f"{tier}: {label(role)}" for tier in usage for role in usage[tier].alive}
    for tier, used in usage.items():
        for role, values in used.alive.items():
            told = counters[f"{tier}: {label(role)}"]
            assert told == sorted(told)
            for start, end, value in zip(used.times, used.times[1:], values, strict=False):
                middle = (start + end) / 2 * 1e6
                if end - start < 2e-9:  # a trace counts in nanoseconds
                    continue
                assert [nbytes for time, nbytes in told if time <= middle][-1] == value
            assert told[-1] == (pytest.approx(timeline.seconds * 1e6, abs=0.001), values[-1])


def test_a_trace_of_something_else_is_refused(tmp_path: Path) -> None:
    schedule, timeline = _made()
    path = tmp_path / "trace.json"
    write_trace(timeline, schedule, path, name="a step")
    other, _ = _made(blocks=4)
    with pytest.raises(MismatchError, match=r"operations, the plan's steady step has"):
        read_trace(path, other)
    good = json.loads(path.read_text())

    def refused(change, error: type[Exception], says: str) -> None:
        document = json.loads(json.dumps(good))
        change(document)
        path.write_text(json.dumps(document))
        with pytest.raises(error, match=says):
            read_trace(path, schedule)

    def spans(document: dict) -> list[dict]:
        return [event for event in document["traceEvents"] if event["ph"] == "X"]

    refused(lambda d: d.pop("otherData"), UsageError, "which graph ran")
    refused(lambda d: d["otherData"].update(graph="make_graph"), UsageError, "which graph ran")
    refused(lambda d: d["traceEvents"].remove(spans(d)[3]), MismatchError, "another plan")
    refused(lambda d: spans(d)[3].update(name="read something"), MismatchError, "operation 3 is 'read something'")
    refused(lambda d: spans(d)[3].update(dur=float("inf")), UsageError, "not finite")
    refused(lambda d: spans(d)[3].update(ts=None), UsageError, "not a trace")
    refused(lambda d: d.update(traceEvents=7), UsageError, "not a trace")
    path.write_text("[]")
    with pytest.raises(UsageError, match="not a trace"):
        read_trace(path, schedule)
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(tmp_path / "none.json", schedule)
