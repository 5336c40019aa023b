"""The drive: what the volumes of a machine sustain together when they read and write at once.

Owns the geometry of mixed-bandwidth frontiers: what stripes over several volumes make of them, the straight edges that
bound them from above (for the linear program) and the point where a read and a write that run side by side meet (for
the simulator).
"""

from collections.abc import Sequence
from itertools import pairwise

from ssdplan.plans.documents.profile import Volume
from ssdplan.plans.documents.stripe_shares import shares

Point = tuple[float, float]
"""(read, write) in bytes/s."""


def combined_frontier(volumes: Sequence[Volume]) -> tuple[Point, ...]:
    """The frontier of all volumes together, from reads only to writes only.

    Stripes were dealt once, so of any mix of reads and writes each volume moves its share, and all go at the pace of
    the one that is slowest at that mix for what it has to do.
    """
    frontiers = [sorted(((p.read, p.write) for p in volume.frontier), key=_mix) for volume in volumes]
    if len(frontiers) == 1:
        return tuple(frontiers[0])
    mixes = sorted({_mix(point) for frontier in frontiers for point in frontier})
    parts = list(zip(frontiers, shares(volumes), strict=True))
    points = []
    for mix in mixes:
        pace = min(sum(_at(frontier, mix)) / share for frontier, share in parts)
        points.append((pace * (1 - mix), pace * mix))
    return tuple(points)


def hull_edges(frontier: Sequence[Point]) -> tuple[Point, ...]:
    """Edges (a, b) in seconds a byte: reading R and writing W bytes takes at least a R + b W for each of them.

    They bound the frontier from above by a concave curve. Where a measured point lies below the line between its
    neighbours, mixing is worse than reading and writing one after the other, and the program counts on that.
    """
    most_read, most_write = max(r for r, _ in frontier), max(w for _, w in frontier)
    hull: list[Point] = []
    for point in sorted({(0.0, most_write), *frontier, (most_read, 0.0)}, key=lambda p: (p[0], -p[1])):
        while len(hull) > 1 and _cross(hull[-2], hull[-1], point) >= 0:
            hull.pop()
        hull.append(point)
    edges = []
    for (r0, w0), (r1, w1) in pairwise(hull):
        determinant = r1 * w0 - r0 * w1
        if determinant > 0:
            edges.append(((w0 - w1) / determinant, (r1 - r0) / determinant))
    return tuple(edges)


def shared_fraction(frontier: Sequence[Point]) -> float:
    """The fraction of its own full bandwidth that each of a read and a write keeps while both run.

    The point of the frontier where both are slowed alike; one half when only its two ends were measured.
    """
    full_read, full_write = frontier[0][0], frontier[-1][1]
    relative = [(read / full_read, write / full_write) for read, write in frontier]
    return min(_at(relative, 0.5)[0], 1.0)


def io_cores(volumes: Sequence[Volume]) -> tuple[float, float]:
    """Cores that are busy while all volumes read, and while all write, at full bandwidth, and all of it is summed."""
    return _cores(volumes, [(volume.read_cores, volume.write_cores) for volume in volumes])


def unsummed_io_cores(volumes: Sequence[Volume]) -> tuple[float, float]:
    """The same of what an update sums in passing."""
    each = [
        (
            volume.read_cores if volume.read_cores_unsummed is None else volume.read_cores_unsummed,
            volume.write_cores if volume.write_cores_unsummed is None else volume.write_cores_unsummed,
        )
        for volume in volumes
    ]
    return _cores(volumes, each)


def _cores(volumes: Sequence[Volume], each: Sequence[Point]) -> Point:
    """What `each` takes for reads and for writes at its own full bandwidth, summed at the pace of all together."""
    frontier = combined_frontier(volumes)
    read = write = 0.0
    for volume, share, cores in zip(volumes, shares(volumes), each, strict=True):
        read += cores[0] * frontier[0][0] * share / volume.frontier[0].read
        write += cores[1] * frontier[-1][1] * share / volume.frontier[-1].write
    return read, write


def bandwidth_kept(volumes: Sequence[Volume]) -> float:
    """The fraction of their bandwidth that all volumes together keep while compute runs: stripes go at one pace."""
    return min(volume.bandwidth_kept for volume in volumes)


def _mix(point: Point) -> float:
    return point[1] / (point[0] + point[1])


def _at(frontier: Sequence[Point], mix: float) -> Point:
    """Where the polyline `frontier`, sorted by mix, meets the ray on which writes are `mix` of all bytes."""
    for (r0, w0), (r1, w1) in pairwise(frontier):
        if _mix((r0, w0)) <= mix <= _mix((r1, w1)):
            across = (r1 - r0) * mix - (w1 - w0) * (1 - mix)
            if across == 0:
                return max((r0, w0), (r1, w1))
            along = min(max((w0 * (1 - mix) - r0 * mix) / across, 0.0), 1.0)
            return (r0 + along * (r1 - r0), w0 + along * (w1 - w0))
    raise AssertionError(f"a frontier without reads only or writes only: {frontier}")


def _cross(first: Point, second: Point, third: Point) -> float:
    """Positive when the way first, second, third bends to the left: `second` lies below the line of the others."""
    return (second[0] - first[0]) * (third[1] - first[1]) - (second[1] - first[1]) * (third[0] - first[0])
