"""What a candidate takes, or may take, of everything that has a budget.

Owns these words of the search; it computes none of the figures.
"""

from dataclasses import dataclass, replace
from typing import Literal

UNLIMITED = 1 << 60
"""Bytes; more than any machine has."""

Constraint = Literal["host memory", "device memory", "ssd space", "ssd writes"]
Room = Literal["host memory", "device memory", "ssd space"]


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
        excess: dict[Constraint, int] = {
            "host memory": self.host - budget.host,
            "device memory": self.device - budget.device,
            "ssd space": self.ssd - budget.ssd,
            "ssd writes": self.writes - budget.writes,
        }
        return {name: nbytes for name, nbytes in excess.items() if nbytes > 0}

    def without(self, constraint: Constraint) -> "Needs":
        """These as budgets, one of them lifted."""
        return self.changed(constraint, UNLIMITED)

    def changed(self, constraint: Constraint, nbytes: int) -> "Needs":
        """These, one of them changed."""
        names = {"host memory": "host", "device memory": "device", "ssd space": "ssd", "ssd writes": "writes"}
        return replace(self, **{names[constraint]: nbytes})

    def of(self, constraint: Constraint) -> int:
        return {
            "host memory": self.host,
            "device memory": self.device,
            "ssd space": self.ssd,
            "ssd writes": self.writes,
        }[constraint]
