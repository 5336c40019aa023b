"""Cost: what a training of so many tokens takes by a plan: hours, energy, money, and how much of the drives' life.

Owns the arithmetic. Prices are the user's, in a currency that nobody names here. A training is its steps alone, without
a pause: what evaluations, snapshots and the start take is not counted.
"""

from dataclasses import dataclass

from ..documents.plan import Plan
from ..errors import UsageError
from .wear import share_of_rating, wear

HOUR_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Price:
    """Of all that trains, all machines together: of an hour of it, or of the whole thing."""

    amount: float
    hourly: bool


@dataclass(frozen=True, slots=True)
class Training:
    """What is asked."""

    tokens: int
    """Padding included."""
    price: Price | None = None
    watts: float | None = None
    """Drawn by all that trains, while it trains."""
    kwh_price: float | None = None
    """Of a kilowatt-hour, in the currency of `price`."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a training takes. Money is None where no price of it is known."""

    steps: int
    """Whole ones: the last may train on more than was asked."""
    hours: float
    kwh: float | None
    for_machine: float | None
    for_energy: float | None
    written_bytes: int
    """To the drives of a rank."""
    worn: float | None
    """The share of its rating that this uses up of the drive that it wears most; None when no rating is known."""
    lasts_hours: float | None
    """Until that drive's rating is used up."""

    @property
    def money(self) -> float | None:
        """All that has a price."""
        parts = [part for part in (self.for_machine, self.for_energy) if part is not None]
        return sum(parts) if parts else None


def cost_of(plan: Plan, training: Training) -> Cost:
    """What `training` takes by `plan`. Raises UsageError for a plan of a stand-in, whose seconds are no machine's."""
    if plan.machine.emulation:
        raise UsageError("--tokens: this plan is of a stand-in, whose seconds are not the machine's; plan a what-if")
    prediction = plan.prediction
    steps = -(-training.tokens // plan.decision.tokens)
    hours = steps * prediction.step_seconds / HOUR_SECONDS
    kwh = None if training.watts is None else hours * training.watts / 1000
    written = steps * prediction.ssd_write_bytes
    days = wear(plan.machine, prediction.ssd_write_bytes, prediction.step_seconds).days
    price = training.price
    return Cost(
        steps=steps,
        hours=hours,
        kwh=kwh,
        for_machine=None if price is None else price.amount * (hours if price.hourly else 1),
        for_energy=None if kwh is None or training.kwh_price is None else kwh * training.kwh_price,
        written_bytes=written,
        worn=share_of_rating(plan.machine, written),
        lasts_hours=None if days is None else 24 * days,
    )
