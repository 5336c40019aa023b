"""Recomputation in words: what backward recomputes in a plan, what else it could, and what saving costs in wear.

Owns this one reason and its evidence. Its figures are the plan's and those of the rows of `alternatives.py`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ssdplan.plans.documents.plan import Compared, Plan, Recompute
from ssdplan.plans.graph.contents import Content, Role
from ssdplan.plans.graph.ops import Schedule, Tier, Transfer
from ssdplan.plans.units import format_bytes

from ..program.choices import WEAR_PRICE
from .alternatives import RECOMPUTATIONS, recomputes, rungs_by

NOTHING = 5e-4
"""A relative gain below this is none."""


@dataclass(frozen=True, slots=True)
class SavedEvidence:
    """What is known of saved activations and not in plan.json."""

    bytes_on: Mapping[Tier, int] = field(default_factory=dict)
    """Tier -> bytes of the places in which they wait for their backward."""
    write_bytes: int = 0
    """What a step writes to ssd of them."""
    wear_price: float = WEAR_PRICE
    """What they had to gain for that: in proportion to a step's seconds, for twice the bytes written."""


def gather_saved(schedule: Schedule, wear_price: float) -> SavedEvidence:
    """What a plan's schedule keeps and writes of saved activations."""
    kept: Counter[Tier] = Counter()
    for buffer in schedule.buffers:
        if buffer.role == Role.SAVED_ACTIVATIONS and not buffer.pool:
            kept[buffer.tier] += buffer.nbytes
    moves = (op for op in schedule.steady.ops if isinstance(op, Transfer) and op.kind == "write")
    written = sum(op.nbytes for op in moves if op.content == Content.SAVED_ACTIVATIONS)
    return SavedEvidence(kept, written, wear_price)


def why_it_recomputes(plan: Plan, evidence: SavedEvidence) -> str:
    """What backward recomputes and what else it could; empty where no rungs say what that would take."""
    model, decision = plan.model, plan.decision
    if rungs_by("all", model, decision.micro_batch_size) is None:
        return ""
    others = {kind: row for kind, name in RECOMPUTATIONS.items() for row in plan.comparison if row.name == name}
    asked = ", as was asked for" if plan.asked.recompute else ""
    if not decision.saved:
        text = f"Backward recomputes the whole forward of every block{asked}"
    else:
        by_rule = plan.asked.recompute != "none" and recomputes("paper", model, decision)
        rule = ", by PyAO's rule" if by_rule else ""
        text = (
            f"{_pairs_saved(plan)} of block and micro-batch save activations{rule}{asked}, so backward recomputes less"
        )
    if others:
        text += f". By estimates, {'; '.join(_otherwise(plan, *each) for each in others.items())}"
    if not plan.asked.recompute:
        text += _why_nothing_faster(plan, evidence, others)
    return f"{text}. {_written_for_it(plan, evidence, others.get('all'))}" if decision.saved else f"{text}."


def _why_nothing_faster(plan: Plan, evidence: SavedEvidence, others: Mapping[Recompute, Compared]) -> str:
    """What the search held against what would be faster; empty where these figures do not say it."""
    fitting = [row for row in others.values() if row.fits and row.ssd_write_bytes is not None]
    faster = [row for row in fitting if _longer(plan, row) <= -NOTHING]
    if not faster:
        return ": nothing of that is faster" if fitting and not plan.decision.saved else ""
    p, everything = plan.prediction, others.get("all")
    seconds, written = p.step_seconds, p.ssd_write_bytes
    if everything in fitting and everything is not None:
        seconds, written = everything.step_seconds or seconds, everything.ssd_write_bytes or 0
    for row in faster:
        gained, more = p.step_seconds - (row.step_seconds or 0.0), (row.ssd_write_bytes or 0) - p.ssd_write_bytes
        if gained * written >= evidence.wear_price * seconds * more:
            return ""
    return f": what is faster gains less than it must for what it writes, by a wear price of {evidence.wear_price:g}"


_SUBJECTS: dict[Recompute, str] = {
    "all": "recomputing everything",
    "paper": "PyAO's rule",
    "none": "recomputing nothing",
}
"""What backward could recompute, as the subject of a sentence."""


def _pairs_saved(plan: Plan) -> str:
    """How many pairs of layer and micro-batch save anything."""
    layers = Counter(plan.model.layers[block].layer_class for block in plan.model.trained_blocks)
    saved = sum(layers[name] * each.share for name, shares in plan.decision.saved.items() for each in shares)
    share = saved / layers.total()
    if share >= 0.9995:
        return "All pairs"
    return f"{share:.1%} of the pairs" if share >= 0.0005 else "Fewer than 0.1% of the pairs"


def _otherwise(plan: Plan, kind: Recompute, row: Compared) -> str:
    """What a step would take that recomputes something else, by that row's figures."""
    if not row.fits or row.step_seconds is None or row.ssd_write_bytes is None:
        return f"for {_SUBJECTS[kind]} no placement was found that keeps the budgets"
    longer = _longer(plan, row)
    words = f"{abs(longer):.1%}" if abs(longer) >= 0.01 else f"{abs(longer):.2%}"
    time = f"{words} longer" if longer >= NOTHING else f"{words} less time" if longer <= -NOTHING else "as long"
    text = f"{_SUBJECTS[kind]} would take {time}"
    if kind == "all" and plan.decision.saved:
        return text  # what it writes is told with what is written of saved activations
    more, least = row.ssd_write_bytes - plan.prediction.ssd_write_bytes, NOTHING * plan.prediction.ssd_write_bytes
    if more < -least and not row.ssd_write_bytes:
        text += " and write nothing to the ssd"
    elif abs(more) > least:
        text += f" and write {format_bytes(abs(more))} {'more' if more > 0 else 'less'} to the ssd"
    return text


def _longer(plan: Plan, row: Compared) -> float:
    return (row.step_seconds or 0.0) / plan.prediction.step_seconds - 1


def _written_for_it(plan: Plan, evidence: SavedEvidence, everything: Compared | None) -> str:
    """What saved activations cost in wear: what is written of them, and how much more a step writes in all."""
    of_them, written = evidence.write_bytes, plan.prediction.ssd_write_bytes
    text = "No saved activations go to the ssd"
    if of_them:
        text = f"{format_bytes(of_them)} of saved activations are written to the ssd a step"
    if everything is None or not everything.fits or everything.ssd_write_bytes is None:
        return f"{text}."
    more = written - everything.ssd_write_bytes
    if not everything.ssd_write_bytes:
        return f"{text}; a step that recomputes everything would write nothing." if written else f"{text}."
    if not written:
        would = format_bytes(everything.ssd_write_bytes)
        return f"A step writes nothing to the ssd; one that recomputes everything would write {would}."
    share = more / everything.ssd_write_bytes
    if abs(share) < NOTHING:
        return f"{text}; in all a step writes as much as one that recomputes everything."
    compared = f"{abs(share):.1%} {'more' if more > 0 else 'less'}"
    return f"{text}; in all a step writes {compared} than one that recomputes everything."
