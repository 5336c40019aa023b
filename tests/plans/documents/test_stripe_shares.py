"""How stripes are dealt: at the best pace that whole turns allow, and never more than there is room for."""

from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ssdplan.executor.store.striping import Striping
from ssdplan.plans.documents.stripe_shares import CYCLE, STRIPE_BYTES, bandwidths, deal, room, shares
from ssdplan.plans.errors import UsageError
from tests.made.profiles import MIB, made_volume


def pace(counts: tuple[int, ...], each: list[float]) -> float:
    """Bytes a second of volumes that move so many stripes of each cycle."""
    return sum(counts) / max(count / one for count, one in zip(counts, each, strict=True))


@settings(deadline=None, print_blob=True)
@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=3))
@example([6.25, 0.78125, 0.4375])
def test_no_other_cycle_is_quicker(each: list[float]) -> None:
    dealing = deal(each)
    assert len(dealing) <= CYCLE and set(dealing) == set(range(len(each)))
    counts = tuple(dealing.count(number) for number in range(len(each)))
    best = max(pace(other, each) for other in product(range(1, CYCLE), repeat=len(each)) if sum(other) <= CYCLE)
    assert pace(counts, each) == pytest.approx(best)


@pytest.mark.parametrize("count", range(1, CYCLE + 1))
def test_equal_volumes_get_equal_shares(count: int) -> None:
    assert shares([made_volume()] * count) == [pytest.approx(1 / count)] * count


def test_more_volumes_than_turns_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 16 volumes, not 17"):
        deal([1.0] * 17)


def test_a_store_has_as_much_room_as_its_stripes_find() -> None:
    large, small = made_volume(free_bytes=1 << 40), made_volume(free_bytes=10 * MIB)
    assert room([large]) == 1 << 40
    volumes = [large, small]
    found = room(volumes)
    striping = Striping(deal(bandwidths(volumes)))
    assert all(held <= v.free_bytes for held, v in zip(striping.volume_bytes(found), volumes, strict=True))
    more = striping.volume_bytes(found + STRIPE_BYTES)
    assert any(held > volume.free_bytes for held, volume in zip(more, volumes, strict=True))
    assert 16 * MIB <= found <= 20 * MIB
