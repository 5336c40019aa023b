"""A sweep: the same question asked of several machines or budgets, one plan each, as data.

Owns what is kept of each plan. The planner asks the questions (planner/sweep.py), `views/sweep_text.py` shows them.
"""

from typing import Literal

from pydantic import Field

from .base import Bytes, Count, Document, NonNegative, Part, Positive
from .plan import Plan


class SweepResult(Part):
    """What the best plan of one point decides and predicts."""

    tokens_per_second: Positive
    step_seconds: Positive
    micro_batch_size: Count
    micro_batches: Count
    delay_ratio: float
    peak_host_bytes: Bytes
    peak_device_bytes: Bytes
    ssd_read_bytes: Bytes
    ssd_write_bytes: Bytes
    bound_by: str
    hours: Positive | None = None
    """That the sweep's tokens take; None where nobody asked. So are the others."""
    cost: NonNegative | None = None
    """In the currency of the prices that were given."""
    worn: NonNegative | None = None
    """The share of its rating that this uses up of the drive that it wears most."""


class SweepPoint(Part):
    """One value of what was swept: a result, or the reason why there is none."""

    value: Positive | None
    """None of a name."""
    label: str
    """The value as a person writes it."""
    result: SweepResult | None
    refusal: str = ""


class Sweep(Document):
    """What `solve --sweep` found."""

    schema_: Literal["ssdplan.sweep/1"] = Field("ssdplan.sweep/1", alias="schema")
    name: str
    """Of what was swept."""
    title: str
    """The model and the machine in words."""
    estimated: bool
    tokens: int | None = Field(default=None, ge=1)
    """Of the training of which `hours`, `cost` and `worn` are; None where nobody asked."""
    points: tuple[SweepPoint, ...] = Field(min_length=1)


def result_of(
    plan: Plan, *, hours: float | None = None, cost: float | None = None, worn: float | None = None
) -> SweepResult:
    """What a sweep keeps of `plan`, and of a training by it."""
    decision, prediction = plan.decision, plan.prediction
    return SweepResult(
        tokens_per_second=prediction.tokens_per_second,
        step_seconds=prediction.step_seconds,
        micro_batch_size=decision.micro_batch_size,
        micro_batches=decision.micro_batches,
        delay_ratio=decision.delay_ratio,
        peak_host_bytes=prediction.peak_host_bytes,
        peak_device_bytes=prediction.peak_device_bytes,
        ssd_read_bytes=prediction.ssd_read_bytes,
        ssd_write_bytes=prediction.ssd_write_bytes,
        bound_by=prediction.bound_by,
        hours=hours,
        cost=cost,
        worn=worn,
    )
