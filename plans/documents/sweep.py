"""A sweep: the same question asked of several machines or budgets, one plan each, as data and as a table for a person.

Owns what is kept of each plan and how it is shown; the planner asks the questions (planner/sweep.py).
"""

from textwrap import wrap
from typing import Literal

from pydantic import Field

from ..units import format_bytes
from ..views.quantities import bar, duration, number
from ..views.tables import COLUMNS, clean, hanging
from .base import Bytes, Count, Document, Part, Positive
from .plan import Plan

BAR_COLUMNS = 12


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


class SweepPoint(Part):
    """One value of what was swept: a result, or the reason why there is none."""

    value: Positive
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
    points: tuple[SweepPoint, ...] = Field(min_length=1)


def result_of(plan: Plan) -> SweepResult:
    """What a sweep keeps of `plan`."""
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
    )


def describe_sweep(sweep: Sweep) -> str:
    """A table, one row a point."""
    most = max((point.result.tokens_per_second for point in sweep.points if point.result), default=1.0)
    width = max(len(sweep.name), *(len(point.label) for point in sweep.points))
    title = f"{sweep.title}, by {sweep.name}"
    lines = [*wrap(clean(title), COLUMNS), "=" * min(len(title), COLUMNS)]
    if sweep.estimated:
        lines.append("Estimated from data sheets and the model's shape: a what-if; nothing was measured.")
    lines += ["", _line(width, sweep.name, "tokens/s", "", "step", "batch", "written", "device") + "bound by"]
    for point in sweep.points:
        found = point.result
        if found is None:
            lines += hanging(f"  {point.label:>{width}}  ", point.refusal)
            continue
        lines += hanging(
            _line(
                width,
                point.label,
                number(found.tokens_per_second),
                bar(found.tokens_per_second, most, BAR_COLUMNS),
                duration(found.step_seconds),
                f"{found.micro_batches} x {found.micro_batch_size}",
                format_bytes(found.ssd_write_bytes),
                format_bytes(found.peak_device_bytes),
            ),
            found.bound_by,
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _line(width: int, name: str, rate: str, gauge: str, step: str, batch: str, written: str, device: str) -> str:
    head = f"  {name:>{width}}  {rate:>8}  {gauge:<{BAR_COLUMNS + 2}}  {step:>8}  {batch:>7}"
    return f"{head}  {written:>8}  {device:>8}  "
