"""Places and waits against brute force: byte by byte, on random programs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.plans.graph.allocation import assign
from ssdplan.plans.graph.contents import Role
from ssdplan.plans.graph.ops import Buffer, Op, Region
from ssdplan.plans.graph.waits import with_waits
from ssdplan.plans.units import PAGE
from tests.extent import examples
from tests.plans.hand_made import made_buffer, made_transfer

TIERS = ("host", "device")


def op(stage: int, source: Region, target: Region) -> Op:
    return made_transfer(-1, "h2d", source, target, stage=stage)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Buffer], list[list[Op]]]:
    """Buffers of a few pools and one that stays, and programs whose stages only grow."""
    buffers = [made_buffer(0, 3 * PAGE, Role.PARAMETERS, name="stays")]
    for index in range(1, draw(st.integers(3, 14))):
        pool = draw(st.integers(0, 4))
        pages = draw(st.integers(1, 3)) + pool
        tier = draw(st.sampled_from(TIERS))
        buffers.append(made_buffer(index, pages * PAGE, Role.GRADIENTS, tier=tier, pool=f"pool {pool}"))
    made = []
    count = draw(st.integers(1, 2))
    for number in range(count):
        mine = [0, *range(1 + number, len(buffers), count)]
        stage, program = 0, []
        for _ in range(draw(st.integers(1, 30))):
            stage += draw(st.integers(0, 2))
            ends = []
            for _ in range(2):
                buffer = buffers[draw(st.sampled_from(mine))]
                start = draw(st.integers(0, buffer.nbytes // PAGE - 1))
                stop = draw(st.integers(start + 1, buffer.nbytes // PAGE))
                ends.append(Region(buffer.index, start * PAGE, stop * PAGE))
            program.append(op(stage, *ends))
        made.append(program)
    return buffers, made


def pages_of(buffers: tuple[Buffer, ...], region: Region) -> set[tuple[str, int]]:
    buffer = buffers[region.buffer]
    first = (buffer.offset + region.start) // PAGE
    return {(buffer.tier, page) for page in range(first, first + region.nbytes // PAGE)}


@settings(max_examples=examples(150), deadline=None, print_blob=True)
@given(programs())
def test_no_bytes_are_shared_by_what_is_alive_at_once(made: tuple[list[Buffer], list[list[Op]]]) -> None:
    buffers, each = made
    placed, arenas = assign(buffers, each)
    for program in each:
        alive: dict[int, list[int]] = {}
        for position, done in enumerate(program):
            for region in (*done.reads, *done.writes):
                alive.setdefault(region.buffer, []).append(position)
        for a, mine in alive.items():
            for b, other in alive.items():
                if a < b and min(mine) <= max(other) and min(other) <= max(mine):
                    assert not pages_of(placed, Region(a, 0, placed[a].nbytes)) & pages_of(
                        placed, Region(b, 0, placed[b].nbytes)
                    )
    for tier in TIERS:
        used = [b for b in placed if b.tier == tier and b.offset >= 0]
        assert all(b.offset + b.nbytes <= arenas[tier] for b in used)
        largest = {b.pool: max(o.nbytes for o in placed if (o.tier, o.pool) == (tier, b.pool)) for b in used}
        own = {(b.pool, b.offset): largest[b.pool] for b in used}
        assert max([0, *(b.nbytes for b in used)]) <= arenas[tier] <= sum(own.values())
        for a in used:
            for b in used:
                if a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes:
                    assert a.zone == b.zone <= min(a.offset, b.offset)


def test_what_the_head_needs_lies_where_the_embedding_will_be() -> None:
    """Two large buffers, apart in time, and a small one that lives throughout."""
    buffers = [
        made_buffer(index, pages * PAGE, Role.GRADIENTS, tier="device", pool=pool)
        for index, (pool, pages) in enumerate((("head", 8), ("embedding", 6), ("block", 1)))
    ]
    whole = [Region(b.index, 0, b.nbytes) for b in buffers]

    def program(gap: int) -> list[Op]:
        return [op(0, whole[0], whole[2]), op(gap, whole[1], whole[2])]

    placed, arenas = assign(buffers, [program(2)])
    assert arenas["device"] == 9 * PAGE and placed[0].zone == placed[1].zone != placed[2].zone
    # One stage later the head's bytes are still its own: nobody shall wait for what has hardly ended.
    assert assign(buffers, [program(1)])[1]["device"] == 15 * PAGE
    # Programs never run at the same time.
    apart = [[op(0, whole[0], whole[2])], [op(0, whole[1], whole[1])]]
    assert assign(buffers, apart)[1]["device"] == 9 * PAGE


@settings(max_examples=examples(150), deadline=None, print_blob=True)
@given(programs())
def test_waits_are_those_of_every_page(made: tuple[list[Buffer], list[list[Op]]]) -> None:
    """Read after write, write after read, write after write, page by page."""
    buffers, each = made
    placed, _ = assign(buffers, each)
    for program in each:
        writer: dict[tuple[str, int], int] = {}
        readers: dict[tuple[str, int], set[int]] = {}
        for number, done in enumerate(with_waits(program, placed)):
            waits: set[int] = set()
            for page in set().union(*(pages_of(placed, region) for region in done.reads)):
                waits |= {writer[page]} if page in writer else set()
                readers.setdefault(page, set()).add(number)
            for page in set().union(*(pages_of(placed, region) for region in done.writes)):
                waits |= readers.pop(page, set()) | ({writer[page]} if page in writer else set())
                writer[page] = number
            assert done.index == number and set(done.waits) == waits - {number}
