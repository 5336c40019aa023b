"""Traces: a timeline as a Chrome trace (trace.json, opens in Perfetto), and a timeline read back from one.

Owns the format. A track a resource (two where two of its operations are under way at once), with an arrow to each
operation from the one that it waited for longest; and a counter for each role of memory on host and on device. The
trace says which graph ran, so that it can be read again.
"""

import json
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

from ..analysis.memory_usage import Usage, label, memory_usage
from ..analysis.ranks import shifts
from ..analysis.work import roles_in_order
from ..errors import MismatchError, UsageError
from ..files import read_bounded, write_whole
from ..graph.collectives import Collective
from ..graph.ops import RESOURCES, Op, Perturb, Resource, Schedule, SumSquares, TakeRows, Tier, Transfer, Update
from ..graph.timeline import CLOCK_SECONDS, Timeline, lanes_of
from ..json_errors import json_reason

FORMAT = "ssdplan.trace/1"
GRAPHS = ("first", "steady", "unwritten", "flush", "evaluate")
FORMAT_OF_RANKS = "ssdplan.trace.ranks/1"
_OPERATIONS, _MEMORY = 1, 2
"""Processes of the trace: one with a thread a resource, one with the counters."""
_PROCESSES = 2
"""Of each rank, where there are several."""
ALWAYS: tuple[Resource, ...] = tuple(resource for resource in RESOURCES if resource != "network")
"""The tracks that a trace has though nothing runs there."""
_TIERS: tuple[Tier, ...] = ("host", "device")

Event = dict[str, Any]
MOST_BYTES = 1 << 30
_SPARE_BYTES, _OPERATION_BYTES = 4 << 20, 4096
"""Of a trace that is read: an operation takes some 500 bytes, with its share of the counters."""
"""Of a trace that is read."""


def write_trace(timeline: Timeline, schedule: Schedule, path: Path, *, name: str) -> None:
    """Write `trace_of` these to `path`. Raises OSError when it cannot be written."""
    write_whole(path, trace_of(timeline, schedule, name=name))


def write_trace_of_ranks(ranks: Sequence[tuple[Timeline, Schedule]], path: Path, *, name: str) -> None:
    """Write one trace of a step as each rank measured it, on one clock: two processes for each, one with a thread a
    resource, one with the counters. Raises OSError when it cannot be written, and as `ranks.shifts`."""
    events: list[Event] = []
    late = shifts([timeline for timeline, _ in ranks])
    for rank, (timeline, schedule) in enumerate(ranks):
        for event in _events(timeline, schedule, f"rank {rank}: {name}", f"rank {rank}: memory in use, by role"):
            event["pid"] = event["pid"] + _PROCESSES * rank
            if "ts" in event:
                event["ts"] = round(event["ts"] + _us(late[rank]), 3)
            if "id" in event:
                event["id"] = f"{rank}/{event['id']}"
            events.append(event)
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"format": FORMAT_OF_RANKS, "graph": ranks[0][0].graph.name, "ranks": len(ranks)},
    }
    write_whole(path, json.dumps(document, separators=(",", ":")))


def trace_of(timeline: Timeline, schedule: Schedule, *, name: str) -> str:
    """`timeline`, of one of `schedule`'s graphs, as a Chrome trace in microseconds."""
    other: Event = {"format": FORMAT, "graph": timeline.graph.name, "operations": len(timeline.graph.ops)}
    if timeline.met is not None:
        other["met"] = timeline.met
    document = {
        "traceEvents": list(_events(timeline, schedule, name, "memory in use, by role")),
        "displayTimeUnit": "ms",
        "otherData": other,
    }
    return json.dumps(document, separators=(",", ":"))


def _events(timeline: Timeline, schedule: Schedule, name: str, memory: str) -> Iterator[Event]:
    tracks = _tracks(timeline)
    yield from _names(name, memory, tracks)
    yield from _operations(timeline, tracks)
    usage = memory_usage(schedule, timeline)
    for tier in _TIERS:
        yield from _counters(usage[tier])


def read_trace(path: Path, schedule: Schedule) -> Timeline:
    """The timeline in a trace of one of `schedule`'s graphs; only operations count, other events are another's.

    Raises UsageError when the file is no such trace, and MismatchError when its operations are not the schedule's.
    """
    try:
        operations = max(len(getattr(schedule, name).ops) for name in GRAPHS)
        most = min(MOST_BYTES, _SPARE_BYTES + _OPERATION_BYTES * operations)
        document = json.loads(read_bounded(path, most, "trace of this plan"))
        other = document.get("otherData", {})
        graph_name = other.get("graph")
        spans = {
            event["args"]["op"]: (str(event["name"]), float(event["ts"]), float(event["dur"]))
            for event in document["traceEvents"]
            if event["ph"] == "X" and event["pid"] == _OPERATIONS
        }
        if not all(0 <= start < inf and 0 <= length < inf for _, start, length in spans.values()):
            raise ValueError("a time that is negative or not finite")
        met = None if other.get("met") is None else float(other["met"])
        if met is not None and not 0 <= met < inf:
            raise ValueError("a moment that is negative or not finite")
    except OSError as error:
        raise UsageError(f"{path}: cannot read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not a trace of ssdplan's: {json_reason(error)}") from error
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: not a trace of ssdplan's: {error!r}") from error
    if other.get("format") != FORMAT or graph_name not in GRAPHS:
        raise UsageError(f"{path}: does not say which graph ran, as a trace of this version does; run again")
    graph = getattr(schedule, graph_name)
    if sorted(spans, key=str) != sorted(range(len(graph.ops)), key=str):
        raise MismatchError(
            f"{path}: has {len(spans)} operations, the plan's {graph_name} step has {len(graph.ops)}: it is of another "
            "plan, or another version made it"
        )
    for op in graph.ops:
        if spans[op.index][0] != str(op):
            raise MismatchError(f"{path}: operation {op.index} is {spans[op.index][0]!r}, the plan's is {str(op)!r}")
    starts = tuple(spans[index][1] * 1e-6 for index in range(len(graph.ops)))
    ends = tuple((spans[index][1] + spans[index][2]) * 1e-6 for index in range(len(graph.ops)))
    return Timeline(graph, starts, ends, met=met)


def amount(op: Op) -> tuple[int, str]:
    """How much `op` moves or updates, and of what: bytes, elements, or nothing for compute."""
    if isinstance(op, Transfer | TakeRows):
        return op.nbytes, "bytes"
    if isinstance(op, Update):
        return op.elements, "elements"
    if isinstance(op, Perturb):
        return op.copies, "copies"
    if isinstance(op, SumSquares):
        return op.gradient.nbytes, "bytes"
    if isinstance(op, Collective):
        return op.nbytes, "bytes"
    return 0, ""


def _tracks(timeline: Timeline) -> list[tuple[Resource, int]]:
    """Op -> resource and the first of its tracks, from 0, on which nothing else runs: there, spans that overlap must
    lie one within the other."""
    tracks: list[tuple[Resource, int]] = [(op.resource, 0) for op in timeline.graph.ops]
    ends: dict[Resource, list[float]] = {resource: [] for resource in lanes_of(timeline.graph)}
    for index in sorted(range(len(tracks)), key=lambda index: timeline.starts[index]):
        resource = tracks[index][0]
        mine, start = ends[resource], timeline.starts[index]
        number = next((n for n, end in enumerate(mine) if end <= start + CLOCK_SECONDS), len(mine))
        mine[number : number + 1] = [timeline.ends[index]]
        tracks[index] = (resource, number)
    return tracks


def _names(name: str, memory: str, tracks: list[tuple[Resource, int]]) -> Iterator[Event]:
    yield {"ph": "M", "pid": _OPERATIONS, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": _MEMORY, "name": "process_name", "args": {"name": memory}}
    for track in sorted({*tracks, *((resource, 0) for resource in ALWAYS)}, key=_thread):
        resource, number = track
        tid, place = _thread(track), {"ph": "M", "pid": _OPERATIONS, "tid": _thread(track)}
        yield {**place, "name": "thread_name", "args": {"name": f"{resource} ({number + 1})" if number else resource}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _thread(track: tuple[Resource, int]) -> int:
    resource, number = track
    return 100 * (RESOURCES.index(resource) + 1) + number


def _operations(timeline: Timeline, tracks: list[tuple[Resource, int]]) -> Iterator[Event]:
    ops = timeline.graph.ops
    for op, start, end in zip(ops, timeline.starts, timeline.ends, strict=True):
        args: dict[str, object] = {"op": op.index, "stage": op.stage, "waits": op.waits}
        size, unit = amount(op)
        if unit:
            args[unit] = size
        last = timeline.last_wait(op.index)
        if last is not None:
            args["last wait"] = f"{ops[last]} ({ops[last].resource}, op {last})"
        place = {"pid": _OPERATIONS, "tid": _thread(tracks[op.index])}
        yield {"ph": "X", **place, "name": str(op), "ts": _us(start), "dur": _us(end - start), "args": args}
        if last is not None:
            # At the middle of both: an arrow belongs to the operation that encloses its end.
            arrow: Event = {"name": "wait", "cat": "wait", "id": op.index}
            there = {"pid": _OPERATIONS, "tid": _thread(tracks[last])}
            yield {"ph": "s", **arrow, **there, "ts": _us((timeline.starts[last] + timeline.ends[last]) / 2)}
            yield {"ph": "f", "bp": "e", **arrow, **place, "ts": _us((start + end) / 2)}


def _counters(usage: Usage) -> Iterator[Event]:
    """One counter a role: its bytes wherever they change, from the start of the step to its end."""
    for role in roles_in_order(usage.alive):
        name = f"{usage.tier}: {label(role)}"
        before = None
        values = usage.alive[role]
        for time, value in zip(usage.times, (*values, values[-1]), strict=True):
            if value != before or time == usage.times[-1]:
                yield {"ph": "C", "pid": _MEMORY, "name": name, "ts": _us(time), "args": {"bytes": value}}
                before = value


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
