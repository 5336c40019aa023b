"""Zeroth-order plans in words and beside first-order training: is it the right choice at all, and how often it writes.

Owns these rows and sentences (ZO-Offloading section 2). It decides nothing.
"""

from collections.abc import Sequence

from ssdplan.plans.documents.plan import Compared, Decision, Plan, Prediction
from ssdplan.plans.units import format_bytes

FIRST_ORDER = "first-order training (adamw)"
"""The row of training by gradients, by which the sentence on it is told too."""
LIKELY = 0.1
"""The share of the tokens a second above which training by gradients likely learns sooner: zeroth-order fine-tuning
takes many times as many steps (MeZO, arXiv 2305.17333: 20,000 for OPT, beside five epochs of 1,000 examples)."""


def rows(decision: Decision, prediction: Prediction, first_order: Prediction | None, why_not: str) -> list[Compared]:
    """The plan, and the best plan that trains by gradients within the same budgets: its prediction, or `why_not`."""
    own = _row(f"{decision.schedule} (this plan)", prediction, "two forwards a direction, no gradients")
    if first_order is None:
        return [own, Compared(kind="schedule", name=FIRST_ORDER, fits=False, note=why_not)]
    return [own, _row(FIRST_ORDER, first_order, "the best plan by gradients within the same budgets")]


def _row(name: str, prediction: Prediction, note: str) -> Compared:
    return Compared(
        kind="schedule",
        name=name,
        host_bytes=prediction.peak_host_bytes,
        device_bytes=prediction.peak_device_bytes,
        ssd_read_bytes=prediction.ssd_read_bytes,
        ssd_write_bytes=prediction.ssd_write_bytes,
        step_seconds=prediction.step_seconds,
        tokens_per_second=prediction.tokens_per_second,
        fits=True,
        note=note,
    )


def why_this_optimizer(plan: Plan) -> str:
    """Whether training by gradients would fit the budgets, and how fast it would be."""
    row = next(row for row in plan.comparison if row.name == FIRST_ORDER)
    if not row.fits:
        return f"First-order training does not fit these budgets ({row.note}); zeroth-order training is what is left."
    assert row.tokens_per_second is not None
    share = row.tokens_per_second / plan.prediction.tokens_per_second
    far = "and a step of it learns far more than a zeroth-order one, which estimates the gradient along a random line"
    if share >= 1:
        return (
            f"First-order training fits these budgets, makes {share:.2f} times the tokens a second, {far}: solve "
            "without --optimizer mezo, unless the memory or the writing matters more."
        )
    verdict = "it is likely the better choice" if share >= LIKELY else "which of them learns sooner, only a try tells"
    return f"First-order training fits these budgets too, makes {share:.2f} of the tokens a second, {far}: {verdict}."


def how_often_it_writes(plan: Plan, tried: Sequence[tuple[int, float]]) -> str:
    """`tried`: how many steps lie between two writes -> seconds of a step, on average."""
    zeroth_order = plan.decision.zeroth_order
    assert zeroth_order is not None
    every = zeroth_order.written_every
    waits = "each pass over a block first makes the updates that are pending, from their numbers in the log"
    if not plan.prediction.d2h_bytes and not plan.prediction.ssd_write_bytes:
        return "All parameters are updated where they live, so nothing is written."
    text = "Updated parameters go back to where they live in each step."
    if every > 1:
        text = f"Updated parameters go back to where they live every {every} steps; {waits}."
    others = [f"every {k}, {seconds:.3g} s a step" for k, seconds in tried if k != every]
    if others:
        text += f" Tried beside it: {'; '.join(others[:3])}."
    if plan.prediction.ssd_write_bytes:
        text += f" That writes {format_bytes(plan.prediction.ssd_write_bytes)} to ssd a step on average."
    return text
