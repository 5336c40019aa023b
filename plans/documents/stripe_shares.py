"""Stripe shares: how many of a store's stripes each of a machine's volumes gets, once and for all.

Owns that share and what follows from it for room. The store lays its stripes by it, the planner counts on it: a volume
that is slow at reads holds up those of all, however quickly it writes.
"""

from collections.abc import Sequence
from functools import lru_cache

from ..errors import UsageError
from .profile import Volume

STRIPE_BYTES = 1 << 20
CYCLE = 16
"""Stripes of a cycle, at most: a volume's share is a whole number of them."""


def alternately(read: float, write: float) -> float:
    """Bytes a second of what reads as much as it writes, one after the other, from those of each alone."""
    return 1 / (1 / read + 1 / write)


def bandwidths(volumes: Sequence[Volume]) -> list[float]:
    """Bytes a second of each volume that reads as much as it writes: stripes are dealt in proportion."""
    return [alternately(volume.frontier[0].read, volume.frontier[-1].write) for volume in volumes]


def deal(bandwidths: Sequence[float]) -> bytes:
    """A cycle of volume numbers, one a stripe: each as often as its share of bandwidth and at least once, in the length
    at which all together are the quickest; one entry when there is one volume. Raises UsageError for more volumes than
    a cycle has stripes."""
    if len(bandwidths) > CYCLE:
        raise UsageError(f"a store stripes over at most {CYCLE} volumes, not {len(bandwidths)}")
    return _quickest(tuple(bandwidths))


@lru_cache
def _quickest(bandwidths: tuple[float, ...]) -> bytes:
    """A search asks for the same thousands of times."""

    def pace(counts: Sequence[int]) -> float:
        """Of all volumes, at which the slowest for its share moves that share."""
        return min(each * sum(counts) / count for each, count in zip(bandwidths, counts, strict=True))

    if len(bandwidths) == 1:
        return b"\x00"
    return _interleaved(
        max((_counts(bandwidths, stripes) for stripes in range(CYCLE, len(bandwidths) - 1, -1)), key=pace)
    )


def _counts(bandwidths: Sequence[float], stripes: int) -> list[int]:
    """How many of so many stripes each volume gets where all together are the quickest: each gets one, and each of the
    others goes to the volume that is done with it first."""
    counts = [1] * len(bandwidths)
    for _ in range(stripes - len(counts)):
        counts[min(range(len(counts)), key=lambda i: (counts[i] + 1) / bandwidths[i])] += 1
    return counts


def _interleaved(counts: Sequence[int]) -> bytes:
    """A cycle that has each volume so often, the one furthest behind its share next."""
    stripes, left = sum(counts), list(counts)
    dealing = []
    for stripe in range(stripes):
        behind = [count * (stripe + 1) / stripes - (count - rest) for count, rest in zip(counts, left, strict=True)]
        dealing.append(max((number for number, rest in enumerate(left) if rest), key=lambda i: behind[i]))
        left[dealing[-1]] -= 1
    return bytes(dealing)


def shares(volumes: Sequence[Volume]) -> list[float]:
    """The share of a store's bytes that lies on each volume. Errors: as `deal`."""
    dealing = deal(bandwidths(volumes))
    return [dealing.count(number) / len(dealing) for number in range(len(volumes))]


def room(volumes: Sequence[Volume]) -> int:
    """Bytes of the largest store that finds room on all volumes at once, which hold it in whole cycles. Errors: as
    `deal`."""
    if len(volumes) == 1:
        return volumes[0].free_bytes
    dealing = deal(bandwidths(volumes))
    cycles = min(volume.free_bytes // (dealing.count(number) * STRIPE_BYTES) for number, volume in enumerate(volumes))
    return cycles * len(dealing) * STRIPE_BYTES
