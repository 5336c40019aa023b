"""Memory by role: what is reserved adds up to the arena, and what is alive fits in it at every moment."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssdplan.planner.predict.simulator import simulate
from ssdplan.plans.analysis.memory_usage import Usage, label, memory_usage, reserved
from ssdplan.plans.graph.contents import Role
from ssdplan.plans.graph.ops import Buffer, Graph, Region, Schedule, Tier, Transfer
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import made_machine, made_model
from tests.plans.hand_made import made_buffer, made_transfer

PAGE = 4096
GRAPHS = ("first", "steady", "flush", "evaluate")


def _schedule(*buffers: Buffer, host: int) -> Schedule:
    empty = Graph("steady", (), 1)
    return Schedule(buffers, {"device": 0, "host": host, "ssd": 0}, (), lambda name: empty, lambda name: ())


def _buffer(index: int, pages: int, role: Role, pool: str, shared_by: int, offset: int, slot: int) -> Buffer:
    place = {"offset": offset * PAGE, "zone": slot * PAGE}
    return made_buffer(index, pages * PAGE, role, pool=pool, shared_by=shared_by, **place)


def _copy(index: int, source: Region, target: Region) -> Transfer:
    return made_transfer(index, "read", source, target)


def _in_turn(schedule: Schedule, *ops: Transfer) -> Timeline:
    """Each op takes a second, one after the other."""
    ends = tuple(float(index + 1) for index in range(len(ops)))
    return Timeline(Graph("steady", ops, 1), tuple(end - 1.0 for end in ends), ends)


def _pages(usage: Usage) -> dict[Role, list[tuple[float, int]]]:
    """Role -> (moment, pages from then on), changes only."""
    found: dict[Role, list[tuple[float, int]]] = {}
    for role, values in usage.alive.items():
        steps: list[tuple[float, int]] = []
        for time, value in zip(usage.times, values, strict=False):
            if not steps or steps[-1][1] != value // PAGE:
                steps.append((time, value // PAGE))
        found[role] = steps
    return found


def test_a_hand_made_step() -> None:
    """One state that stays (2 pages), one buffer of a pool (3 pages), a checkpoint and a delayed gradient in turns."""
    schedule = _schedule(
        _buffer(0, 2, Role.PARAMETERS, "", -1, 0, 0),
        _buffer(1, 3, Role.HIDDEN_STATES, "hidden", -1, 2, 2),
        _buffer(2, 1, Role.CHECKPOINTS, "", 7, 5, 5),
        _buffer(3, 2, Role.DELAYED_GRADIENT, "", 7, 5, 5),
        host=7 * PAGE,
    )
    state, gradient = Region(0, 0, PAGE), [Region(3, 0, PAGE), Region(3, PAGE, 2 * PAGE)]
    timeline = _in_turn(
        schedule,
        _copy(0, gradient[0], Region(1, 0, PAGE)),  # the first half of the gradient is used: 0 s to 1 s
        _copy(1, gradient[1], Region(1, PAGE, 2 * PAGE)),
        _copy(2, state, Region(2, 0, PAGE)),  # a checkpoint is made: 2 s to 3 s
        _copy(3, Region(1, 0, PAGE), Region(1, 2 * PAGE, 3 * PAGE)),
        _copy(4, Region(2, 0, PAGE), Region(1, 0, PAGE)),  # and used for the last time: 4 s to 5 s
        _copy(5, state, gradient[0]),  # the next gradient arrives, and stays
    )
    host = memory_usage(schedule, timeline)["host"]
    assert _pages(host) == {
        Role.PARAMETERS: [(0.0, 2)],
        Role.HIDDEN_STATES: [(0.0, 1), (1.0, 2), (2.0, 1), (3.0, 2), (4.0, 1), (5.0, 0)],
        Role.CHECKPOINTS: [(0.0, 0), (2.0, 1), (5.0, 0)],
        Role.DELAYED_GRADIENT: [(0.0, 2), (1.0, 1), (2.0, 0), (5.0, 1)],
    }
    assert host.times[-1] == 6.0
    assert host.peak_bytes == 5 * PAGE
    assert host.arena_bytes == 7 * PAGE


def test_a_hand_made_arena() -> None:
    """Slots as large as a pool's largest buffer, and a block whose smaller role shares all of its bytes."""
    schedule = _schedule(
        _buffer(0, 2, Role.PARAMETERS, "", -1, 0, 0),
        _buffer(1, 1, Role.GRADIENTS, "chunk", -1, 2, 2),
        _buffer(2, 3, Role.GRADIENTS, "chunk", -1, 2, 2),
        _buffer(3, 2, Role.GRADIENTS, "chunk", -1, 5, 5),
        _buffer(4, 1, Role.CHECKPOINTS, "", 7, 8, 8),
        _buffer(5, 1, Role.CHECKPOINTS, "", 7, 9, 8),
        _buffer(6, 5, Role.DELAYED_GRADIENT, "", 7, 8, 8),
        host=13 * PAGE,
    )
    assert reserved(schedule)["host"] == {
        (Role.PARAMETERS,): 2 * PAGE,
        (Role.GRADIENTS,): 6 * PAGE,
        (Role.CHECKPOINTS, Role.DELAYED_GRADIENT): 2 * PAGE,
        (Role.DELAYED_GRADIENT,): 3 * PAGE,
    }


def test_bytes_without_an_owner_are_a_defect() -> None:
    with pytest.raises(AssertionError, match="belong to no buffer"):
        reserved(_schedule(host=PAGE))


fractions = st.sampled_from([0.0, 0.1, 0.37, 0.5, 0.9, 1.0])


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(
    blocks=st.integers(1, 5),
    tied=st.booleans(),
    alpha=fractions,
    optimizer=fractions,
    parameters=fractions,
    checkpoints=fractions,
    gradient=fractions,
    micro_batches=st.integers(1, 5),
    lookahead=st.integers(1, 4),
    shared=st.booleans(),
)
def test_any_decision(
    blocks: int,
    tied: bool,
    alpha: float,
    optimizer: float,
    parameters: float,
    checkpoints: float,
    gradient: float,
    micro_batches: int,
    lookahead: int,
    shared: bool,
) -> None:
    """Roles sum to the arenas exactly; in every graph, whatever runs beside what, no more is alive than is reserved."""
    model = made_model(blocks=blocks, tied=tied)
    decision = decide(
        model,
        alpha=alpha,
        optimizer=optimizer,
        parameters=parameters,
        checkpoints=checkpoints,
        gradient=gradient,
        micro_batches=micro_batches,
        lookahead=lookahead,
    )
    schedule = build_schedule(model, decision)
    split = reserved(schedule)
    assert {tier: sum(roles.values()) for tier, roles in split.items()} == schedule.arenas
    assert all(nbytes > 0 for roles in split.values() for nbytes in roles.values())
    assert split == {tier: _page_by_page(schedule, tier) for tier in split}
    for tier, roles in split.items():
        assert roles.get((Role.PARAMETERS,), 0) >= sum(b.nbytes for b in _staying(schedule) if b.tier == tier)
    machine = made_machine(shared=shared)
    for name in GRAPHS:
        graph = getattr(schedule, name)
        usage = memory_usage(schedule, simulate(graph, model, machine, decision.micro_batch_size))
        for tier, used in usage.items():
            assert used.peak_bytes <= used.arena_bytes == schedule.arenas[tier], (name, tier)
            assert all(value >= 0 for values in used.alive.values() for value in values)
            assert list(used.times) == sorted(set(used.times))
    steady = memory_usage(schedule, simulate(schedule.steady, model, machine, 1))["host"]
    waiting = steady.alive.get(Role.DELAYED_GRADIENT, (0,))
    on_host = {home.gradient for home in schedule.homes if home.gradient}
    on_host = {region for region in on_host if schedule.buffers[region.buffer].tier == "host"}
    assert waiting[0] == waiting[-1] == sum(region.nbytes for region in on_host)  # all wait at the step's boundary
    first = memory_usage(schedule, simulate(schedule.first, model, machine, 1))["host"].alive.get(Role.DELAYED_GRADIENT)
    assert first is None or first[0] == sum(b.nbytes for b in _kept_gradients(schedule))


def _staying(schedule: Schedule) -> list[Buffer]:
    return [b for b in schedule.buffers if b.role == Role.PARAMETERS and not b.pool]


def _kept_gradients(schedule: Schedule) -> list[Buffer]:
    """Delayed gradients of layers without a checkpoint, which keep a place of their own."""
    return [b for b in schedule.buffers if b.role == Role.DELAYED_GRADIENT and b.tier == "host" and b.shared_by < 0]


def _page_by_page(schedule: Schedule, tier: Tier) -> dict[tuple[Role, ...], int]:
    """Whose each page of an arena is, by asking every buffer; a page of none belongs to the one before it."""
    roles: dict[int, set[Role]] = {}
    for buffer in schedule.buffers:
        if buffer.tier == tier:
            assert buffer.offset % PAGE == 0 == buffer.nbytes % PAGE
            for page in range(buffer.offset // PAGE, (buffer.offset + buffer.nbytes) // PAGE):
                roles.setdefault(page, set()).add(buffer.role)
    total: Counter[tuple[Role, ...]] = Counter()
    held: tuple[Role, ...] = ()
    for page in range(schedule.arenas[tier] // PAGE):
        held = tuple(sorted(roles.get(page, ()))) or held  # the end of a slot that was not filled
        total[held] += PAGE
    return dict(total)


def test_labels() -> None:
    assert label(Role.OPTIMIZER) == "optimizer states"
    assert label(Role.CHECKPOINTS, Role.DELAYED_GRADIENT) == "checkpoints or delayed gradients"
    assert label(Role.HIDDEN_STATES) == "hidden states"


def test_a_step_without_operations() -> None:
    schedule = _schedule(_buffer(0, 1, Role.PARAMETERS, "", -1, 0, 0), host=PAGE)
    usage = memory_usage(schedule, Timeline(schedule.flush, (), ()))
    assert usage["host"].times == (0.0,)
    assert usage["host"].total == () and usage["device"].peak_bytes == 0
