"""Striping: which bytes of a store lie where on which volume.

Owns the dealing of stripes in proportion to bandwidth and the arithmetic from a store's places to its volumes' bytes.
Plain numbers: it opens nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ssdplan.plans.errors import UsageError

STRIPE_BYTES = 1 << 20
CYCLE = 16
"""Stripes dealt out in turn by bandwidth; a volume's share is a multiple of one sixteenth."""


@dataclass(frozen=True)
class Striping:
    """How a store's bytes are dealt to its volumes: `dealing` names a volume for each stripe of a cycle."""

    dealing: bytes
    stripe_bytes: int = STRIPE_BYTES

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """How many earlier stripes of the cycle each stripe's volume has."""
        return tuple(self.dealing[:position].count(volume) for position, volume in enumerate(self.dealing))

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        return tuple(self.dealing.count(volume) for volume in range(self.volumes))

    @property
    def volumes(self) -> int:
        return max(self.dealing) + 1

    def volume_bytes(self, nbytes: int) -> list[int]:
        """What each volume must hold of a store of `nbytes`, in whole cycles."""
        cycles = -(-nbytes // (self.stripe_bytes * len(self.dealing)))
        return [cycles * count * self.stripe_bytes for count in self._counts]

    def locate(self, place: int, nbytes: int) -> list[tuple[int, int, int, int]]:
        """(volume, byte within its data, byte within the range, bytes) of a range of the store, neighbours joined."""
        if len(self.dealing) == 1:
            return [(0, place, 0, nbytes)]
        pieces: list[tuple[int, int, int, int]] = []
        per_cycle = self.stripe_bytes * len(self.dealing)
        done = 0
        while done < nbytes:
            cycle, within = divmod(place + done, per_cycle)
            stripe, inside = divmod(within, self.stripe_bytes)
            length = min(self.stripe_bytes - inside, nbytes - done)
            volume = self.dealing[stripe]
            begin = (cycle * self._counts[volume] + self._ranks[stripe]) * self.stripe_bytes + inside
            last = pieces[-1] if pieces else None
            if last and last[0] == volume and last[1] + last[3] == begin and last[2] + last[3] == done:
                pieces[-1] = (volume, last[1], last[2], last[3] + length)
            else:
                pieces.append((volume, begin, done, length))
            done += length
        return pieces


def deal(bandwidths: Sequence[float]) -> bytes:
    """Volume numbers in turn, each as often as its share of bandwidth; one entry when there is one volume."""
    if len(bandwidths) == 1:
        return b"\x00"
    if len(bandwidths) > CYCLE:
        raise UsageError(f"a store stripes over at most {CYCLE} volumes, not {len(bandwidths)}")
    total = sum(bandwidths)
    given = [0] * len(bandwidths)
    turns = []
    for turn in range(CYCLE):
        behind = [share * (turn + 1) / total - got for share, got in zip(bandwidths, given, strict=True)]
        unserved = [number for number, got in enumerate(given) if not got]
        chosen = max(unserved if len(unserved) >= CYCLE - turn else range(len(given)), key=lambda i: behind[i])
        given[chosen] += 1
        turns.append(chosen)
    return bytes(turns)
