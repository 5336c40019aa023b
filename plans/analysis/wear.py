"""Wear: how long a machine's drives last under a plan that trains without a pause.

Owns the arithmetic from bytes written to years and to shares of a rating. Ratings come from the profile, for no drive
tells its own.
"""

from dataclasses import dataclass

from ..documents.profile import Machine, Volume
from ..documents.stripe_shares import shares

DAY_SECONDS, YEAR_DAYS, TB = 86_400, 365.25, 10**12
ORDINALS = ("the first", "the second", "the third", "the fourth")


@dataclass(frozen=True, slots=True)
class Wear:
    """What training writes, and when a rating is used up. All drives together, unless it says so."""

    bytes_a_day: float
    days: float | None
    """Until the first drive of known rating has been written as much as that; None when no rating is known."""
    volume: Volume | None
    """That drive."""
    unrated: int
    """Volumes whose rating is not known."""


def wear(machine: Machine, ssd_write_bytes: int, step_seconds: float) -> Wear:
    """The wear of steps that write `ssd_write_bytes` each. A store's stripes are dealt in proportion to the bandwidth
    of reading and writing alternately, so the drive that wears out first counts."""
    bytes_a_day = ssd_write_bytes / step_seconds * DAY_SECONDS
    first: Volume | None = None
    least: float | None = None
    for volume, share in zip(machine.volumes, shares(machine.volumes), strict=True):
        written = bytes_a_day * share
        if volume.endurance_bytes is not None and written > 0:
            days = volume.endurance_bytes / written
            if least is None or days < least:
                first, least = volume, days
    unrated = sum(volume.endurance_bytes is None for volume in machine.volumes)
    return Wear(bytes_a_day, least, first, unrated)


def share_of_rating(machine: Machine, written_bytes: float) -> float | None:
    """How much of its rating `written_bytes` to all drives together use up, of the drive that they wear most; None when
    no rating is known."""
    used = [
        written_bytes * share / volume.endurance_bytes
        for volume, share in zip(machine.volumes, shares(machine.volumes), strict=True)
        if volume.endurance_bytes
    ]
    return max(used, default=None)


def drive_name(machine: Machine, volume: Volume) -> str:
    """A volume's directory; of a what-if, which numbers its volumes, the name of the drive."""
    return volume.path.rpartition(" (")[0] or volume.path if machine.figures == "estimated" else volume.path


def drive_words(machine: Machine, volume: Volume) -> str:
    """The same, and which it is of several drives of one name: `samsung-990-pro:2TB (the first of 2)`."""
    name = drive_name(machine, volume)
    alike = [each.path for each in machine.volumes if drive_name(machine, each) == name]
    if len(alike) == 1:
        return name
    place = alike.index(volume.path)
    return f"{name} ({ORDINALS[place] if place < len(ORDINALS) else f'number {place + 1}'} of {len(alike)})"


def lifetime(days: float) -> str:
    """`1.5 years`; days, when it is less than one."""
    return f"{days / YEAR_DAYS:.3g} years" if days >= YEAR_DAYS else f"{days:.3g} days"
