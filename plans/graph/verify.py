"""Verification: refuses a schedule that could read the wrong bytes, in any order that its waits allow.

Owns an independent check of what `schedule/build.py` and all that it calls made; it shares no code with them. A
failure is a defect of ours, never of the user's, so it is an AssertionError that names the op.
"""

from collections.abc import Iterator

from ..documents.matrices import workspace_bytes
from .contents import Role
from .ops import Graph, Op, Region, Schedule, Tier, Transfer, Update


def verify(schedule: Schedule, budgets: dict[Tier, int] | None = None) -> None:
    """Check places, budgets and every graph. Raises AssertionError naming the op or buffer at fault.

    For each graph: waits point backwards; whatever overlaps in memory and is written by one of two ops is ordered by
    waits; every op reads bytes that were last written as the buffer it names; nothing writes, or has an update of, what
    is frozen; no update cuts a matrix.
    """
    frozen = {home.parameters.buffer for home in schedule.homes if not home.trained}
    trained = {(home.state, home.start, home.stop) for home in schedule.homes if home.optimizer is not None}
    for buffer in schedule.buffers:
        end = buffer.offset + buffer.nbytes
        assert 0 <= buffer.zone <= buffer.offset and end <= schedule.arenas[buffer.tier], f"{buffer.name} has no place"
    for tier, most in (budgets or {}).items():
        assert schedule.arenas[tier] <= most, f"the {tier} arena of {schedule.arenas[tier]} bytes exceeds {most}"
    for graph in (schedule.first, schedule.steady, schedule.flush, schedule.evaluate):
        _verify_order(schedule, graph)
        for op in graph.ops:
            written = next((region.buffer for region in op.writes if region.buffer in frozen), None)
            assert written is None, f"{graph.name}: {op} writes {schedule.buffers[written or 0].name}, which is frozen"
            if isinstance(op, Update) and op.matrices:
                edges = [op.start, *(matrix.stop for matrix in op.matrices)]
                assert [matrix.start for matrix in op.matrices] == edges[:-1] and edges[-1] == op.stop, (
                    f"{graph.name}: {op} begins or ends inside a matrix"
                )
                assert op.workspace is not None and op.workspace.nbytes >= workspace_bytes(op.matrices), (
                    f"{graph.name}: {op} has too little to work in"
                )
            if isinstance(op, Update):
                assert (op.state, op.start, op.stop) in trained, f"{graph.name}: {op} is of no home that is trained"
        _verify_contents(schedule, graph)


def _verify_order(schedule: Schedule, graph: Graph) -> None:
    """Ops that touch the same bytes, one of them writing, must be ordered by a path of waits."""
    accesses: dict[tuple[Tier, int], list[tuple[int, int, int, bool]]] = {}
    for (position, op), before in zip(enumerate(graph.ops), _reaches(graph), strict=True):
        for region, writes in [(r, False) for r in op.reads] + [(r, True) for r in op.writes]:
            tier, start, stop = _bytes_of(schedule, region)
            for page in range(start >> 20, ((stop - 1) >> 20) + 1):
                history = accesses.setdefault((tier, page), [])
                for other_start, other_stop, other, other_writes in history:
                    if (writes or other_writes) and other_start < stop and start < other_stop and other != position:
                        assert before >> other & 1, (
                            f"{graph.name}: {op} (op {position}) may run together with {graph.ops[other]} (op {other})"
                        )
                if writes:  # whoever comes after this write comes after all that it came after
                    history[:] = [old for old in history if old[0] < start or stop < old[1]]
                history.append((start, stop, position, writes))


def _reaches(graph: Graph) -> Iterator[int]:
    """For each op those that a path of waits leads to, one bit each; kept for as long as someone is still to ask for
    it, since all of them would take the square of the graph."""
    last_asked = {wait: position for position, op in enumerate(graph.ops) for wait in op.waits}
    done: dict[int, list[int]] = {}
    for wait, position in last_asked.items():
        done.setdefault(position, []).append(wait)
    known: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        assert op.index == position, f"{graph.name}: {op} is out of place"
        reach = 0
        for wait in op.waits:
            assert 0 <= wait < position, f"{graph.name}: {op} waits for an op that is not before it"
            reach |= known[wait] | (1 << wait)
        for wait in done.get(position, ()):
            del known[wait]
        if position in last_asked:
            known[position] = reach
        yield reach


def _verify_contents(schedule: Schedule, graph: Graph) -> None:
    """Replay in order: what an op reads must still be what was last written under that buffer's name."""
    owners: dict[Tier, list[tuple[int, int, int]]] = {"device": [], "host": [], "ssd": []}
    stays = {
        buffer.index
        for buffer in schedule.buffers
        if not buffer.pool and buffer.shared_by < 0 and buffer.role is not Role.SAVED_ACTIVATIONS
    }
    delayed = {home.gradient.buffer for home in schedule.homes if home.gradient}
    stays |= delayed if graph.name in ("steady", "flush") else set()
    for index in stays:
        buffer = schedule.buffers[index]
        owners[buffer.tier].append((buffer.offset, buffer.offset + buffer.nbytes, index))
    device: Tier = "device" if any(buffer.tier == "device" for buffer in schedule.buffers) else "host"
    tiers: dict[str, tuple[Tier, Tier]] = {
        "read": ("ssd", "host"),
        "write": ("host", "ssd"),
        "h2d": ("host", device),
        "d2h": (device, "host"),
    }
    for op in graph.ops:
        for region in op.reads:
            tier, start, stop = _bytes_of(schedule, region)
            held = sorted(
                (max(a, start), min(b, stop))
                for a, b, owner in owners[tier]
                if owner == region.buffer and a < stop and start < b
            )
            position = start
            for a, b in held:
                assert a <= position, _wrong(schedule, graph, op, region)
                position = max(position, b)
            assert position == stop, _wrong(schedule, graph, op, region)
        for region in op.writes:
            tier, start, stop = _bytes_of(schedule, region)
            rest = []
            for a, b, owner in owners[tier]:
                if b <= start or stop <= a:
                    rest.append((a, b, owner))
                    continue
                if a < start:
                    rest.append((a, start, owner))
                if stop < b:
                    rest.append((stop, b, owner))
            rest.append((start, stop, region.buffer))
            owners[tier] = rest
        if isinstance(op, Transfer):
            ends = (schedule.buffers[op.source.buffer].tier, schedule.buffers[op.target.buffer].tier)
            assert ends == tiers[op.kind], f"{graph.name}: {op} moves from {ends[0]} to {ends[1]}"
            assert op.source.nbytes == op.target.nbytes, f"{graph.name}: {op} moves unequal ranges"


def _bytes_of(schedule: Schedule, region: Region) -> tuple[Tier, int, int]:
    buffer = schedule.buffers[region.buffer]
    assert 0 <= region.start < region.stop <= buffer.nbytes, f"a region outside {buffer.name}"
    return buffer.tier, buffer.offset + region.start, buffer.offset + region.stop


def _wrong(schedule: Schedule, graph: Graph, op: Op, region: Region) -> str:
    return (
        f"{graph.name}: {op} (op {op.index}) reads {schedule.buffers[region.buffer].name}, which is not there any more"
    )
