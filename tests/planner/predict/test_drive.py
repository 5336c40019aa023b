"""The drive's geometry, against taking turns between measured points by hand."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.executor.store.striping import Striping
from ssdplan.planner.predict.drive import combined_frontier, hull_edges, io_cores, shared_fraction
from ssdplan.plans.documents.stripe_shares import bandwidths, deal, shares
from tests.made.profiles import made_volume
from tests.planner.machines import volumes


def seconds_by_turns(points: list[tuple[float, float]], read: float, write: float) -> float:
    """The least seconds for `read` and `write` bytes when the drive may take turns between measured points."""
    best = float("inf")
    points = [*points, *((r, 0.0) for r, _ in points if r), *((0.0, w) for _, w in points if w)]
    for r, w in points:
        if (r > 0 or read == 0) and (w > 0 or write == 0):
            best = min(best, max(read / r if read else 0.0, write / w if write else 0.0))
    for (r0, w0), (r1, w1) in combinations(points, 2):
        determinant = r0 * w1 - r1 * w0
        if abs(determinant) > 1e-9 * max(r0, r1, w0, w1) ** 2:
            first = (read * w1 - r1 * write) / determinant
            second = (r0 * write - read * w0) / determinant
            if first >= 0 and second >= 0:
                best = min(best, first + second)
    return best


def test_two_ends_are_a_straight_line() -> None:
    assert hull_edges(((3e9, 0.0), (0.0, 2e9))) == (pytest.approx((1 / 3e9, 1 / 2e9)),)
    assert shared_fraction(((3e9, 0.0), (0.0, 2e9))) == pytest.approx(0.5)


def test_a_measured_point_in_between_makes_two_edges() -> None:
    frontier = ((3.0, 0.0), (2.0, 2.0), (0.0, 3.0))
    assert sorted(hull_edges(frontier)) == [pytest.approx((1 / 6, 1 / 3)), pytest.approx((1 / 3, 1 / 6))]
    assert shared_fraction(frontier) == pytest.approx(2 / 3)


def test_a_point_below_the_line_costs_a_mix_but_not_turns() -> None:
    frontier = ((4.0, 0.0), (1.0, 1.0), (0.0, 4.0))
    assert hull_edges(frontier) == (pytest.approx((1 / 4, 1 / 4)),)
    assert shared_fraction(frontier) == pytest.approx(1 / 4)


def test_equal_volumes_add_up() -> None:
    one = made_volume(read=3e9, write=2e9, mixed=((2e9, 1e9),))
    for count in (2, 3, 7, 16):
        both = combined_frontier((one,) * count)
        alone = combined_frontier((one,))
        for point, (read, write) in zip(both, alone, strict=True):
            assert point == pytest.approx((count * read, count * write))


def test_stripes_go_at_the_pace_of_the_slowest_for_its_share() -> None:
    """Volumes that are unlike each other, one better at reads and one at writes, against a store's own striping."""
    volumes = (
        made_volume(read=7e9, write=2e9, mixed=((3e9, 1e9),)),
        made_volume(read=3.5e9, write=3e9),
        made_volume(read=0.2e9, write=0.3e9),
    )
    striping = Striping(deal(bandwidths(volumes)))
    nbytes = 1 << 30
    moved = [0] * len(volumes)
    for volume, _, _, length in striping.locate(0, nbytes):
        moved[volume] += length
    frontier = combined_frontier(volumes)
    seconds = [part / volume.frontier[0].read for part, volume in zip(moved, volumes, strict=True)]
    assert nbytes / frontier[0][0] == pytest.approx(max(seconds), rel=0.02)
    seconds = [part / volume.frontier[-1].write for part, volume in zip(moved, volumes, strict=True)]
    assert nbytes / frontier[-1][1] == pytest.approx(max(seconds), rel=0.02)


def test_processor_time_of_volumes_is_of_the_pace_that_they_have_together() -> None:
    quick = made_volume(read=4e9, write=4e9).model_copy(update={"read_cores": 1.0, "write_cores": 1.0})
    slow = made_volume(read=4e9, write=1e9).model_copy(update={"read_cores": 1.0, "write_cores": 1.0})
    read, write = io_cores((quick, slow))
    frontier = combined_frontier((quick, slow))
    # A byte takes as much of a core as it does of each volume alone.
    assert read == pytest.approx(frontier[0][0] / 4e9)
    of_each = shares((quick, slow))
    assert write == pytest.approx(frontier[-1][1] * (of_each[0] / 4e9 + of_each[1] / 1e9))


@settings(deadline=None, print_blob=True)
@given(volumes(), st.floats(0, 1e9), st.floats(0, 1e9))
def test_edges_are_what_turns_can_reach(made: tuple, read: float, write: float) -> None:
    frontier = list(combined_frontier(made))
    by_edges = max(a * read + b * write for a, b in hull_edges(frontier))
    assert by_edges == pytest.approx(seconds_by_turns(frontier, read, write), rel=1e-6, abs=1e-9)
