"""Striping: which bytes of a store lie where on which volume.

Owns the arithmetic from a store's places to its volumes' bytes. Plain numbers: it opens nothing.
"""

from dataclasses import dataclass
from functools import cached_property

from ssdplan.plans.documents.stripe_shares import STRIPE_BYTES


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
