"""Wear: how long a machine's drives last under a plan that trains without a pause.

Owns the arithmetic from bytes written a step to years; ratings come from the profile, for no drive tells its own.
"""

from dataclasses import dataclass

from .profile import Machine, Volume

DAY_SECONDS, YEAR_DAYS, TB = 86_400, 365.25, 10**12


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
    of reading and writing by turns, so the drive that wears out first counts."""
    bytes_a_day = ssd_write_bytes / step_seconds * DAY_SECONDS
    speeds = [1 / (1 / volume.frontier[0].read + 1 / volume.frontier[-1].write) for volume in machine.volumes]
    first: Volume | None = None
    least: float | None = None
    for volume, speed in zip(machine.volumes, speeds, strict=True):
        written = bytes_a_day * speed / sum(speeds)
        if volume.endurance_bytes is not None and written > 0:
            days = volume.endurance_bytes / written
            if least is None or days < least:
                first, least = volume, days
    unrated = sum(volume.endurance_bytes is None for volume in machine.volumes)
    return Wear(bytes_a_day, least, first, unrated)


def lifetime(days: float) -> str:
    """`1.5 years`; days, when it is less than one."""
    return f"{days / YEAR_DAYS:.3g} years" if days >= YEAR_DAYS else f"{days:.3g} days"
