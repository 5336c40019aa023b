"""Budgets: the bytes that a candidate takes, or may take, of everything that has a budget.

Owns these records of the search, and limits that are reduced by what was too much; it computes none of the figures.
"""

from dataclasses import dataclass, replace
from typing import Literal

from ..program.choices import Limits

UNLIMITED = 1 << 60
"""Bytes; more than any machine has."""

Constraint = Literal["host memory", "device memory", "ssd space", "ssd writes"]
_FIELDS: dict[Constraint, str] = {
    "host memory": "host",
    "device memory": "device",
    "ssd space": "ssd",
    "ssd writes": "writes",
}
Room = Literal["host memory", "device memory", "ssd space"]
ROOMS: tuple[Room, ...] = ("host memory", "device memory", "ssd space")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One point of the outer search."""

    micro_batch_size: int
    micro_batches: int

    @property
    def global_batch(self) -> int:
        return self.micro_batch_size * self.micro_batches

    @property
    def order(self) -> tuple[int, int]:
        """Smaller batches first; of one batch, fewer micro-batches."""
        return self.global_batch, self.micro_batches


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a decision takes, or may take, of everything that has a budget."""

    host: int
    device: int
    ssd: int
    writes: int
    """Written to ssd a step."""

    def over(self, budget: "Needs") -> dict[Constraint, int]:
        """How far beyond `budget` each is; nothing for those within."""
        return {name: more for name in _FIELDS if (more := self.of(name) - budget.of(name)) > 0}

    def without(self, constraint: Constraint) -> "Needs":
        """These as budgets, one of them lifted."""
        return self.changed(constraint, UNLIMITED)

    def changed(self, constraint: Constraint, nbytes: int) -> "Needs":
        """These, one of them changed."""
        return replace(self, **{_FIELDS[constraint]: nbytes})

    def of(self, constraint: Constraint) -> int:
        return int(getattr(self, _FIELDS[constraint]))


def reduced(limits: Limits, over: dict[Constraint, int], push: float = 1.0, spare: float = 0.0) -> Limits:
    """Limits reduced by what was too much: host's by `spare` bytes more, for rounding may be against it again; the
    device's by `push` times that, for it keeps whole states and pairs, and gives none of them back for a few bytes."""

    def smaller(limit: float | None, excess: int) -> float | None:
        return limit if limit is None or not excess else max(limit - excess, 0.0)

    return replace(
        limits,
        host_bytes=limits.host_bytes - (over["host memory"] + spare if "host memory" in over else 0),
        ssd_bytes=smaller(limits.ssd_bytes, over.get("ssd space", 0)),
        ssd_write_bytes=smaller(limits.ssd_write_bytes, over.get("ssd writes", 0)),
        device_bytes=smaller(limits.device_bytes, round(push * over.get("device memory", 0))),
    )


def in_memory(over: dict[Constraint, int]) -> bool:
    """Whether what is too much is memory, which no other placement would change."""
    return "host memory" in over or "device memory" in over
