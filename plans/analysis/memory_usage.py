"""Usage of memory: what it holds, by role: reserved for the whole run, and alive at each moment of a step; and what a
training on the device alone would take.

Owns the accounting that text and plots show. It follows bytes, not buffers, as the waits do: the head of a buffer may
belong to the next one while its tail is still being read. Plain data; it assigns nothing and draws nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..documents.plan import Plan
from ..documents.profile import Model
from ..documents.state_layout import (
    GRADIENT_BYTES,
    OptimizerFormats,
    checkpoint_bytes,
    optimizer_bytes,
    parameters_bytes,
)
from ..graph.contents import ROLES, Role
from ..graph.ops import Buffer, Schedule, Tier
from ..graph.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Usage:
    """The bytes of one tier that hold something which is still needed, over a step."""

    tier: Tier
    arena_bytes: int
    """What is reserved, whether it holds something or not."""
    times: tuple[float, ...]
    """Seconds from the start of the step at which something changes, with the step's start and end."""
    alive: dict[Role, tuple[int, ...]]
    """Role -> bytes alive from times[i] to times[i + 1]: one value fewer than times."""

    @property
    def total(self) -> tuple[int, ...]:
        """Bytes alive of all roles together."""
        return tuple(map(sum, zip(*self.alive.values(), strict=True))) if self.alive else (0,) * (len(self.times) - 1)

    @property
    def peak_bytes(self) -> int:
        return max(self.total, default=0)


@dataclass(frozen=True, slots=True)
class _Access:
    """An op (its position in the graph) that touches bytes [start, stop) of a buffer."""

    start: int
    stop: int
    op: int
    overwrites: bool
    """It writes without reading: what was there is gone."""


def label(*roles: Role) -> str:
    """What people call memory that holds something of one of `roles` at a time."""
    return " or ".join(ROLES[role].words for role in roles)


def reserved(schedule: Schedule) -> dict[Tier, dict[tuple[Role, ...], int]]:
    """Tier -> roles -> bytes of the arena that are set aside for them; they sum exactly to the tier's arena.

    Most bytes are of one role. Bytes that several roles use at different times (activation checkpoints, then delayed
    gradients; what the head needs, then the embedding) are of them all, in the order of the roles' names.
    """
    split: dict[Tier, dict[tuple[Role, ...], int]] = {}
    for tier, arena in schedule.arenas.items():
        zones: dict[int, dict[Role, set[tuple[int, int]]]] = {}
        for buffer in schedule.buffers:
            if buffer.tier == tier:
                spans = zones.setdefault(buffer.zone, {}).setdefault(buffer.role, set())
                spans.add((buffer.offset, buffer.offset + buffer.nbytes))
        total: dict[tuple[Role, ...], int] = defaultdict(int)
        for zone, stop in pairwise([*sorted(zones), arena]):
            for roles, nbytes in _by_roles(zones[zone], stop).items():
                total[roles] += nbytes
        assert sum(total.values()) == arena, f"the {tier} arena has bytes that belong to no buffer"
        split[tier] = dict(total)
    return split


def _by_roles(spans: dict[Role, set[tuple[int, int]]], stop: int) -> dict[tuple[Role, ...], int]:
    """Roles -> bytes of a zone that they share. What rounding to pages leaves belongs to what is before it."""
    if len(spans) == 1:
        ((role, mine),) = spans.items()
        return {(role,): stop - min(start for start, _ in mine)}
    cuts = sorted({cut for mine in spans.values() for span in mine for cut in span})
    total: dict[tuple[Role, ...], int] = defaultdict(int)
    roles: tuple[Role, ...] = ()
    for start, end in pairwise([*cuts, stop]):
        here = [role for role in sorted(spans) if any(a <= start and end <= b for a, b in spans[role])]
        roles = tuple(here) or roles
        total[roles] += end - start
    return {roles: nbytes for roles, nbytes in total.items() if nbytes}


def memories(plan: Plan) -> dict[Tier, tuple[int, int]]:
    """The memories that a plan uses, and of each the peak that it predicts and the budget, in bytes."""
    p, d = plan.prediction, plan.decision
    host: dict[Tier, tuple[int, int]] = {"host": (p.peak_host_bytes, d.host_budget_bytes)}
    return host if d.unified_memory else {**host, "device": (p.peak_device_bytes, d.device_budget_bytes)}


def memory_usage(schedule: Schedule, timeline: Timeline) -> dict[Tier, Usage]:
    """What is alive on host and on device while `timeline.graph`, one of `schedule`'s graphs, runs.

    Bytes of a pool are alive from the start of the first op that touches them to the end of the last. States that keep
    a place of their own are alive throughout. Activation checkpoints are alive from their writing to their last
    reading, delayed gradients from their writing, across the step's boundary, to the next step's update.
    """
    accesses = _accesses(timeline)
    changes: dict[Tier, dict[Role, dict[float, int]]] = {"host": {}, "device": {}}
    end = timeline.seconds
    for buffer in schedule.buffers:
        if buffer.tier in changes:
            change = changes[buffer.tier].setdefault(buffer.role, defaultdict(int))
            for nbytes, first, last in _lives(buffer, accesses.get(buffer.index, []), timeline, end):
                change[first] += nbytes
                change[last] -= nbytes
    return {tier: _usage(tier, schedule.arenas[tier], changes[tier], end) for tier in changes}


def _usage(tier: Tier, arena: int, changes: dict[Role, dict[float, int]], end: float) -> Usage:
    moments = {time for change in changes.values() for time, delta in change.items() if delta}
    times = sorted({0.0, end, *moments})
    alive = {}
    for role, change in changes.items():
        values = tuple(accumulate(change.get(time, 0) for time in times[:-1]))
        if any(values):
            alive[role] = values
    return Usage(tier, arena, tuple(times), alive)


def _accesses(timeline: Timeline) -> dict[int, list[_Access]]:
    """Buffer -> who touches what of it, in the graph's order."""
    found: dict[int, list[_Access]] = defaultdict(list)
    for position, op in enumerate(timeline.graph.ops):
        reads = set(op.reads)
        for region in reads:
            found[region.buffer].append(_Access(region.start, region.stop, position, False))
        for region in op.writes:
            if region not in reads:
                found[region.buffer].append(_Access(region.start, region.stop, position, True))
    return found


def _lives(
    buffer: Buffer, accesses: Sequence[_Access], timeline: Timeline, end: float
) -> list[tuple[int, float, float]]:
    """(bytes, from, to) of all that the buffer holds in the course of the step."""
    if not buffer.pool and buffer.shared_by < 0:
        return [(buffer.nbytes, 0.0, end)]
    lives = []
    cuts = sorted({cut for access in accesses for cut in (access.start, access.stop)})
    for start, stop in pairwise(cuts):
        mine = [access for access in accesses if access.start <= start and stop <= access.stop]
        if not mine:
            continue
        if buffer.pool:
            spans = [(min(timeline.starts[a.op] for a in mine), max(timeline.ends[a.op] for a in mine))]
        else:
            spans = _across_boundary(mine, timeline, end)
        lives += [(stop - start, first, last) for first, last in spans]
    return lives


def _across_boundary(accesses: Sequence[_Access], timeline: Timeline, end: float) -> list[tuple[float, float]]:
    """When bytes of a place that outlives the step hold something: from a writing to the last reading before the next.

    What is read before it is written was left by the step before; what is written and not read is for the step after.
    """
    spans: list[tuple[float, float]] = []
    was_read = True
    for access in accesses:
        first, last = timeline.starts[access.op], timeline.ends[access.op]
        if access.overwrites and was_read:
            spans.append((first, last))
        elif not spans:
            spans.append((0.0, last))
        else:
            spans[-1] = (spans[-1][0], max(spans[-1][1], last))
        was_read = not access.overwrites
    if spans and not was_read:
        spans[-1] = (spans[-1][0], end)
    return spans


def snapshot_store_bytes(schedule: Schedule, *, keep: int = 2) -> int:
    """What a store takes that holds `keep` snapshots, but for its tables, of some hundred KiB: what is durable has a
    place for each of them and one more, wherever it lives between its uses, and all else on ssd one."""
    durable = others = 0
    for buffer in schedule.buffers:
        if ROLES[buffer.role].durable:
            durable += buffer.nbytes
        elif buffer.tier == "ssd":
            others += buffer.nbytes
    return (keep + 1) * durable + others


def snapshot_bytes(schedule: Schedule) -> int:
    """What a snapshot writes: what is durable and does not live on ssd, where steps write it."""
    return sum(buffer.nbytes for buffer in schedule.buffers if ROLES[buffer.role].durable and buffer.tier != "ssd")


def device_alone_bytes(model: Model, micro_batch_size: int, formats: OptimizerFormats) -> int:
    """About the least device memory in which a model trains without any offloading: all states, fp32 gradients, and the
    activation checkpoints, context and workspace of one micro-batch at a time, each layer recomputed."""
    parameters = parameters_bytes(model.states, model.precision)
    updated = optimizer_bytes(model.states, model.precision, formats) + GRADIENT_BYTES * trained_elements(model)
    backwards = {layer.layer_class for layer in model.layers[model.first_trained :]}
    workspace = max(model.timing(name, micro_batch_size).backward_workspace_bytes for name in backwards)
    checkpoints = checkpoint_layers(model) * checkpoint_bytes(model, micro_batch_size)
    return parameters + updated + checkpoints + workspace + model.context_bytes[micro_batch_size]


def trained_elements(model: Model) -> int:
    """Elements that have optimizer states."""
    return sum(state.elements for state in model.states if not state.frozen)


def checkpoint_layers(model: Model) -> int:
    """How many layers' inputs are kept: those of the blocks that run backward."""
    return max(len(model.layers) - 1 - max(model.first_trained, 1), 0)
