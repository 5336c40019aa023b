"""What the page's script draws: a graph, its timelines and their memory, as compact arrays.

Owns the encoding, which data.js decodes. A step of thirty thousand operations takes a megabyte or two. Nothing is left
out or rounded, but times, which are whole ticks of the step's 2^32nd part.
"""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence

import numpy as np

from ...analysis.memory_usage import Usage, label, memories, memory_usage
from ...analysis.overlay import STARTING, stalls
from ...analysis.work import OTHER_COLOUR, RESOURCE_LABELS, ROLE_COLOURS, WORK_COLOURS, roles_in_order, work_of
from ...documents.plan import Plan
from ...graph.ops import RESOURCES, Graph, Schedule, Tier
from ...graph.timeline import Timeline
from ..trace import amount
from .colours import colour_class

TICKS = (1 << 32) - 2
TIERS: tuple[Tier, ...] = ("host", "device")
_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")

Packed = dict[str, str | int]


def page_data(plan: Plan, schedule: Schedule, timelines: Mapping[str, Timeline]) -> dict[str, object]:
    """All that data.js reads. `timelines` are of one graph of `schedule`: what each is called, and when its ops ran.
    Resources without work have no lane."""
    graph = next(iter(timelines.values())).graph
    works = sorted({work_of(op) for op in graph.ops}, key=_work_order)
    used = {op.resource for op in graph.ops} | {"compute"}
    lanes = [name for name in RESOURCES if name in used]
    return {
        "lanes": [RESOURCE_LABELS.get(name, name) for name in lanes],
        "compute": lanes.index("compute"),
        "works": [{"name": work, "colour": colour_class(WORK_COLOURS.get(work, OTHER_COLOUR))} for work in works],
        "starting": STARTING,
        "graph": _graph(schedule, graph, works, lanes),
        "timelines": [{"name": name, **_timeline(schedule, timeline)} for name, timeline in timelines.items()],
        "tiers": {tier: {"budget": budget, "peak": peak} for tier, (peak, budget) in memories(plan).items()},
    }


def pack(values: Sequence[int] | np.ndarray) -> Packed:
    """Whole numbers from 0, below 2^63, as base64 of `type`, each to be multiplied by `unit`.

    u1, u2 and u4 are little-endian integers of so many bytes; v is LEB128, seven bits a byte, the lowest first, and all
    bytes of a number but its last have the eighth bit. Whichever is shortest.
    """
    array = np.asarray(values, dtype=np.uint64)
    unit = max(int(np.gcd.reduce(array)), 1) if array.size else 1
    array = array // np.uint64(unit)
    most = int(array.max(initial=0))
    kind = "u1" if most < 1 << 8 else "u2" if most < 1 << 16 else "u4"
    written = array.astype(f"<{kind}").tobytes()
    lengths = _lengths(array)
    if most >= 1 << 32 or int(lengths.sum()) < len(written):
        kind, written = "v", _leb128(array, lengths)
    return {"type": kind, "unit": unit, "data": b64encode(written).decode()}


def _lengths(array: np.ndarray) -> np.ndarray:
    lengths = np.ones(array.shape, dtype=np.int64)
    for byte in range(1, 9):
        lengths += array >> np.uint64(7 * byte) != 0
    return lengths


def _leb128(array: np.ndarray, lengths: np.ndarray) -> bytes:
    written = np.empty(int(lengths.sum()), dtype=np.uint8)
    first = np.cumsum(lengths) - lengths
    for byte in range(int(lengths.max(initial=0))):
        mine = lengths > byte
        bits = array[mine] >> np.uint64(7 * byte) & np.uint64(127)
        written[first[mine] + byte] = bits + np.where(lengths[mine] > byte + 1, np.uint64(128), np.uint64(0))
    return written.tobytes()


def _work_order(work: str) -> tuple[int, str]:
    known = list(WORK_COLOURS)
    return (known.index(work) if work in known else len(known), work)


def _graph(schedule: Schedule, graph: Graph, works: Sequence[str], lanes: Sequence[str]) -> dict[str, object]:
    ops = graph.ops
    templates: dict[tuple[str, ...], int] = {}
    template, numbers = [], []
    for op in ops:
        pieces = _NUMBER.split(str(op))
        template.append(templates.setdefault(tuple(pieces[::2]), len(templates)))
        numbers += [int(piece) for piece in pieces[1::2]]
    amounts: dict[tuple[int, str], int] = {}
    return {
        "lane": pack([lanes.index(op.resource) for op in ops]),
        "work": pack([works.index(work_of(op)) for op in ops]),
        "stage": pack([op.stage for op in ops]),
        "templates": list(templates),
        "template": pack(template),
        "numbers": pack(numbers),
        "amount": pack([amounts.setdefault(amount(op), len(amounts)) for op in ops]),
        "amounts": list(amounts),
        "waits": pack([len(op.waits) for op in ops]),
        "back": pack([op.index - wait for op in ops for wait in op.waits]),
    }


def _timeline(schedule: Schedule, timeline: Timeline) -> dict[str, object]:
    seconds = timeline.seconds
    pieces = stalls(timeline)
    nobody = len(timeline.graph.ops)
    usage = memory_usage(schedule, timeline)
    return {
        "seconds": seconds,
        "ticks": TICKS,
        **_spans(timeline.starts, timeline.ends, seconds),
        "stalls": {
            **_spans([stall.start for stall in pieces], [stall.end for stall in pieces], seconds),
            "waiting": pack([nobody if stall.waiting is None else stall.waiting for stall in pieces]),
            "cause": pack([nobody if stall.cause is None else stall.cause for stall in pieces]),
        },
        "memory": {tier: _usage(usage[tier], seconds) for tier in TIERS},
    }


def _spans(starts: Sequence[float], ends: Sequence[float], seconds: float) -> dict[str, object]:
    """What ends when another starts does so in ticks too."""
    first, last = _ticks(starts, seconds), _ticks(ends, seconds)
    return {"start": pack(first), "length": pack(last - first)}


def _ticks(times: Sequence[float], seconds: float) -> np.ndarray:
    return np.rint(np.asarray(times, dtype=float) * (TICKS / seconds if seconds else 0.0)).astype(np.uint64)


def _usage(usage: Usage, seconds: float) -> dict[str, object]:
    """Each role's bytes where they change: `at` are distances between indices into `time`."""
    roles = []
    for role in roles_in_order(usage.alive):
        values = np.asarray(usage.alive[role], dtype=np.int64)
        at = np.flatnonzero(np.diff(values, prepend=-1))
        roles.append(
            {
                "name": label(role),
                "colour": colour_class(ROLE_COLOURS[role]),
                "at": pack(np.diff(at, prepend=0)),
                "bytes": pack(values[at]),
            }
        )
    return {"arena": usage.arena_bytes, "time": pack(np.diff(_ticks(usage.times, seconds), prepend=0)), "roles": roles}
