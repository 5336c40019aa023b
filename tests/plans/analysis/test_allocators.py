"""Host memory by pool, and what it would be otherwise: by hand, by the paper's figures, and by another count."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssdplan.plans.analysis.allocators import (
    Blocks,
    Need,
    Needs,
    Pool,
    blocks,
    by_class,
    needs,
    one_size,
    page_lock_waste,
    powers_of_two,
    saved,
)
from ssdplan.plans.graph.contents import Role
from ssdplan.plans.graph.ops import Buffer, Graph, Schedule
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import PAGE
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import made_model
from tests.plans.hand_made import made_buffer

MIB, GIB = 1 << 20, 1 << 30


def _memascend_pools(vocab: int, hidden: int, intermediate: int, key_value: int, blocks: int = 1) -> list[Pool]:
    """MemAscend IV-B: pools of 2, 3N, 2N and 2N tensors in 16 bits, for N blocks in flight."""
    return [
        Pool("embedding and head", 2 * vocab * hidden, 2),
        Pool("gate, up and down", 2 * intermediate * hidden, 3 * blocks),
        Pool("key and value", 2 * key_value * hidden, 2 * blocks),
        Pool("query and output", 2 * hidden * hidden, 2 * blocks),
    ]


def test_the_papers_figures_for_qwen2_5_7b() -> None:
    """MemAscend V-A: 9.14 GiB with buffers of one size, 2.46 GiB by class, 73% less; from the model's own shapes."""
    pools = _memascend_pools(vocab=152064, hidden=3584, intermediate=18944, key_value=4 * 128)
    assert round(one_size(pools) / GIB, 2) == 9.14
    assert round(by_class(pools) / GIB, 2) == 2.46
    assert round(saved(by_class(pools), one_size(pools)), 2) == 0.73


def test_two_blocks_in_flight_are_seven_tensors_more() -> None:
    shape = {"vocab": 1000, "hidden": 64, "intermediate": 200, "key_value": 16}
    one, two = _memascend_pools(**shape), _memascend_pools(**shape, blocks=2)
    assert one_size(two) - one_size(one) == 7 * 2 * 1000 * 64
    assert by_class(two) - by_class(one) == 2 * 64 * (3 * 200 + 2 * 16 + 2 * 64)


def test_powers_of_two_by_hand() -> None:
    """Each slot alone: 1 byte stays, 4 KiB stay, a byte more doubles; 2.1 GiB become 4 (MemAscend III-B)."""
    assert powers_of_two([Pool("", 1, 3)]) == 3
    assert powers_of_two([Pool("", 4096, 2), Pool("", 4097, 2)]) == 2 * 4096 + 2 * 8192
    assert powers_of_two([Pool("", round(2.1 * GIB), 1)]) == 4 * GIB
    assert powers_of_two([]) == one_size([]) == by_class([]) == 0


def test_needs_by_hand() -> None:
    """A state of 5 MiB that stays; slots: 1 of 20 MiB and 3 of 6 for parameters, 2 of 9 for optimizer states."""
    found = Blocks(
        kept=(Pool((Role.PARAMETERS,), 5 * MIB, 1),),
        pools=(
            Pool((Role.PARAMETERS_IN_TRANSIT,), 20 * MIB, 1),
            Pool((Role.OPTIMIZER_IN_TRANSIT,), 9 * MIB, 2),
            Pool((Role.PARAMETERS_IN_TRANSIT,), 6 * MIB, 3),
        ),
        arena=52 * MIB,
    )
    assert needs(found) == Needs(
        planned=Need(5 * MIB, 47 * MIB),
        by_class=Need(5 * MIB, (20 + 2 * 9 + 3 * 6) * MIB),
        one_size_each_role=Need(5 * MIB, (4 * 20 + 2 * 9) * MIB),
        one_size=Need(5 * MIB, 6 * 20 * MIB),
        powers_of_two=Need(8 * MIB, (32 + 2 * 16 + 3 * 8) * MIB),
        both=Need(8 * MIB, 6 * 32 * MIB),
    )
    assert needs(found).planned.total == 52 * MIB
    assert saved(61, 125) == pytest.approx(0.512)


def test_all_states_may_stay() -> None:
    found = Blocks(kept=(Pool((Role.PARAMETERS,), 3 * PAGE, 2),), pools=(), arena=6 * PAGE)
    exact, rounded = Need(6 * PAGE, 0), Need(8 * PAGE, 0)
    assert needs(found) == Needs(exact, exact, exact, exact, rounded, rounded)
    assert needs(Blocks((), (), 0)) == Needs(*[Need(0, 0)] * 6)
    assert saved(0, 0) == 0.0


def _buffer(index: int, pages: int, role: Role, pool: str, shared_by: int, offset: int, zone: int) -> Buffer:
    place = {"offset": offset * PAGE, "zone": zone * PAGE}
    return made_buffer(index, pages * PAGE, role, pool=pool, shared_by=shared_by, **place)


def test_an_arena_taken_apart_by_hand() -> None:
    """A state, two slots of 3 pages of which one never holds more than 2, and a block of a layer."""
    buffers = (
        _buffer(0, 2, Role.PARAMETERS, "", -1, 0, 0),
        _buffer(1, 1, Role.GRADIENTS, "chunk", -1, 2, 2),
        _buffer(2, 3, Role.GRADIENTS, "chunk", -1, 2, 2),
        _buffer(3, 2, Role.GRADIENTS, "chunk", -1, 5, 5),
        _buffer(4, 1, Role.CHECKPOINTS, "", 7, 8, 8),
        _buffer(5, 1, Role.CHECKPOINTS, "", 7, 9, 8),
        _buffer(6, 5, Role.DELAYED_GRADIENT, "", 7, 8, 8),
        made_buffer(7, PAGE, Role.PARAMETERS, name="on ssd", tier="ssd", offset=0, zone=0),
    )
    empty = Graph("steady", (), 1)
    schedule = Schedule(buffers, {"device": 0, "host": 13 * PAGE, "ssd": PAGE}, (), lambda name: empty, lambda name: ())
    assert blocks(schedule) == Blocks(
        kept=(Pool((Role.CHECKPOINTS, Role.DELAYED_GRADIENT), 5 * PAGE, 1), Pool((Role.PARAMETERS,), 2 * PAGE, 1)),
        pools=(Pool((Role.GRADIENTS,), 3 * PAGE, 2),),
        arena=13 * PAGE,
    )
    assert blocks(schedule, "device") == Blocks((), (), 0)


def test_an_arena_locks_less_than_a_page_beyond_itself() -> None:
    assert [page_lock_waste(nbytes) for nbytes in (0, 1, PAGE - 1, PAGE, PAGE + 1)] == [0, PAGE - 1, 1, 0, PAGE - 1]


fractions = st.sampled_from([0.0, 0.1, 0.37, 0.5, 1.0])


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(
    blocks_=st.integers(1, 4),
    tied=st.booleans(),
    alpha=fractions,
    optimizer=fractions,
    parameters=fractions,
    checkpoints=fractions,
    micro_batches=st.integers(1, 4),
)
def test_any_plan_is_its_blocks(
    blocks_: int,
    tied: bool,
    alpha: float,
    optimizer: float,
    parameters: float,
    checkpoints: float,
    micro_batches: int,
) -> None:
    """Blocks sum to the arena; slots are those that buffers lie in; no other way takes less than the plan's."""
    model = made_model(blocks=blocks_, tied=tied)
    schedule = build_schedule(
        model,
        decide(
            model,
            alpha=alpha,
            optimizer=optimizer,
            parameters=parameters,
            checkpoints=checkpoints,
            micro_batches=micro_batches,
        ),
    )
    found = blocks(schedule)
    need = needs(found)
    assert need.planned.total == schedule.arenas["host"]
    pooled = [buffer for buffer in schedule.buffers if buffer.tier == "host" and buffer.pool]
    slots = {(buffer.pool, buffer.offset) for buffer in pooled}
    assert sum(pool.slots for pool in found.pools) == len(slots)
    assert need.one_size.slots == len(slots) * max((buffer.nbytes for buffer in pooled), default=0)
    ways = (need.planned, need.by_class, need.one_size_each_role, need.one_size, need.powers_of_two, need.both)
    planned, own, each_role, alike, rounded, both = (way.total for way in ways)
    assert planned <= own <= each_role <= alike <= both
    assert own <= rounded <= both
    assert rounded < 2 * own
    assert page_lock_waste(planned) == 0
