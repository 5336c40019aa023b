"""The first screen of a plan: what decides whether to train by it, or to buy for it, in at most 25 lines.

Owns which figures those are, and their words. `views/plan_text.py` has everything else.
"""

from ...analysis.cost import Training
from ...analysis.memory_usage import snapshot_store_bytes
from ...analysis.wear import lifetime, wear
from ...documents.plan import Plan
from ...graph.ops import Schedule
from ...units import format_bytes, format_enough
from ..plan_text import change_of
from ..quantities import count, decimal, duration, estimated, number, times, without_ssd
from ..tables import clean, facts, page, short, spread, wrapped
from .basis import Basis, basis_facts, likely, likely_facts
from .cost_text import cost_facts

MOST_CHANGES = 3
"""Of those that would make a plan faster."""
WORTH = 5e-3
"""The share of tokens a second that a change has to bring to be named."""


def describe_briefly(
    plan: Plan, schedule: Schedule, more: str, training: Training | None = None, basis: Basis | None = None
) -> str:
    """What `plan` takes and gives. `schedule` is its own; `more` says where the rest is; `training`: of which it says
    what that takes; `basis`: of a what-if, what it rests on. Raises UsageError as `cost_of` does."""
    p, d, model = plan.prediction, plan.decision, plan.model
    title = f"Plan: {short(model.name, 34)}, {count(model.parameters)} parameters, on {short(plan.machine.name, 34)}"
    opening = [
        without_ssd(plan) + f"{duration(p.step_seconds)} a step, {number(p.tokens_per_second)} tokens/s.",
        *estimated(plan.machine, model),
    ]
    ranks = f" on each of {d.ranks} ranks" if d.ranks > 1 else ""
    least = min((row.least_bytes for row in plan.least if row.budget == "host memory"), default=None)
    below = "memory and ssd below are" if p.ssd_bytes else "memory below is"
    counted = " with bookkeeping" if least and least > p.peak_host_bytes else ""
    figures = [
        *(likely_facts(plan, basis) if basis else []),
        ("bound by", short(p.bound_by, 70)),
        *_faster(plan),
        (
            "batch",
            f"{times(d.rows, 'row')} of {d.sequence_length} tokens: "
            f"{times(d.micro_batches, 'micro-batch', 'micro-batches')} of {d.micro_batch_size}{ranks}",
        ),
        *([("ranks", f"{d.ranks}; {below} of each of them")] if d.ranks > 1 else []),
        (
            "host memory",
            f"{format_enough(p.peak_host_bytes)} of {format_bytes(d.host_budget_bytes)}"
            + (f"; the least for this batch{counted} is {format_enough(least)}" if least else ""),
        ),
        *(
            []
            if d.unified_memory
            else [
                ("device memory", f"{format_enough(p.peak_device_bytes)} of {format_bytes(d.device_budget_bytes)}"),
            ]
        ),
        *([("whole process", format_enough(p.peak_process_bytes))] if p.peak_process_bytes is not None else []),
    ]
    if p.ssd_bytes:
        moved = f"reads {format_bytes(p.ssd_read_bytes)} of ssd and writes {format_bytes(p.ssd_write_bytes)}"
        figures += [
            ("store on ssd", format_bytes(p.ssd_bytes) + _with_snapshots(plan, schedule)),
            ("a step", moved),
            *([] if training else [("drive wear", _worn(plan))]),
        ]
    if training:
        figures += cost_facts(plan, training, likely(plan, basis))
    if basis:
        figures += basis_facts(basis)
    figures.append(("more", clean(more)))
    return page(title, [*(line for words in opening for line in wrapped(words)), *facts(*figures)])


def _faster(plan: Plan) -> list[tuple[str, str]]:
    """What of the things that one could buy brings most, at this batch, as many as fit a line; or that nothing does."""
    worth = [row for row in plan.sensitivity if row.throughput_gain >= WORTH]
    if not worth:
        return [("to be faster", "nothing: no change of one thing alone that was tried brings half a percent")]
    gains = sorted(worth, key=lambda row: -row.throughput_gain)
    told = [f"{change_of(row)}: {_gain(row.throughput_gain)}" for row in gains[:MOST_CHANGES]]
    fitting = [told[: len(told) - less] for less in range(len(told))]
    lines = (spread("to be faster", "; ".join(words)) for words in fitting)
    return next((line for line in lines if len(line) == 1), spread("to be faster", told[0]))


def _gain(share: float) -> str:
    """`+6.2%`, `+50%`."""
    return f"+{100 * share:.{0 if share >= 0.0995 else 1}f}%"


def _with_snapshots(plan: Plan, schedule: Schedule) -> str:
    if plan.decision.zeroth_order:
        return ""
    return f", with snapshots {format_bytes(snapshot_store_bytes(schedule))}"


def _worn(plan: Plan) -> str:
    p = plan.prediction
    if not p.ssd_write_bytes:
        return "none: a step writes nothing"
    worn = wear(plan.machine, p.ssd_write_bytes, p.step_seconds)
    lasts = "profile --endurance SIZE says how long it lasts" if worn.days is None else f"lasts {lifetime(worn.days)}"
    return f"{decimal(worn.bytes_a_day)} a day without a pause; {lasts}"
