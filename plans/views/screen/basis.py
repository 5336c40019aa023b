"""What an estimate rests on, in a few lines: its figures by kind, and the range in which its speed may well lie.

Owns these words. Who made the estimate says what the figures are (planner/basis.py).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...documents.plan import Plan
from ..quantities import number
from ..tables import spread

Facts = list[tuple[str, str]]
ASSUMED_ERROR = 0.1
"""By what share of their seconds drives, a link, updates or a network are taken to be off where they bound a step."""
_NOT_COMPARED = "no published training that it bounds was compared"
_PARTS = {
    "compute": "compute",
    "ssd": "drives",
    "link to device": "link",
    "link from device": "link",
    "cpu updates": "update rate",
    "network": "network",
}
"""`Prediction.bound_by` -> the `Sensitivity.resource` that has that part twice as fast. Cores that compute and updates
share are not here: nothing says how far off they are."""
_WORDS = {"given": "given", "measured": "measured", "data sheet": "by data sheets", "assumed": "assumed"}


@dataclass(frozen=True, slots=True)
class Basis:
    """Of a what-if."""

    kinds: Mapping[str, Sequence[str]]
    """given, measured, data sheet, assumed -> names of figures."""
    error: float | None
    """By how much of it compute may well be off; None where nothing says so."""
    evidence: str
    """What says so, or why nothing does."""


def likely(plan: Plan, basis: Basis | None) -> tuple[float, float] | None:
    """The least and the most tokens a second if what bounds the step is off by its error; None where no error is known.
    The most is no more than such a part twice as fast would bring."""
    p = plan.prediction
    if basis is None or plan.decision.zeroth_order:
        return None
    error, part = basis.error if p.bound_by == "compute" else ASSUMED_ERROR, _PARTS.get(p.bound_by)
    if error is None or part is None:
        return None
    gains = [row.throughput_gain for row in plan.sensitivity if row.resource == part]
    most = min([1 / (1 - error), *(1 + max(gain, 0.0) for gain in gains)])
    return p.tokens_per_second / (1 + error), p.tokens_per_second * most


def likely_facts(plan: Plan, basis: Basis) -> Facts:
    """The range in words, or that there is none."""
    found, bound_by = likely(plan, basis), plan.prediction.bound_by
    if found:
        rates = f"{number(found[0])} to {number(found[1])} tokens/s"
        if bound_by == "compute" and basis.error:
            words = f"{rates} with compute within {basis.error:.0%}, {basis.evidence}"
        else:
            words = f"{rates} with {bound_by} within {ASSUMED_ERROR:.0%}, assumed: {_NOT_COMPARED}"
    elif plan.decision.zeroth_order:
        words = "no range: no published training without gradients was compared"
    elif bound_by != "compute":
        words = f"no range: bound by {bound_by}, and {_NOT_COMPARED}"
    else:
        words = f"no range: {basis.evidence}"
    return spread("range", words)


def basis_facts(basis: Basis) -> Facts:
    """Each kind of figures with their names."""
    kinds = [(kind, names) for kind, names in basis.kinds.items() if names]
    return [fact for kind, names in kinds for fact in spread(_WORDS[kind], _together(names))]


def _together(names: Sequence[str]) -> str:
    """`gpu.memory`, `gpu.flops`, `ssd.read` as `gpu (memory, flops), ssd (read)`."""
    parts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        part, _, figure = name.partition(".")
        parts[part].append(figure)
    return ", ".join(f"{part} ({', '.join(figures)})" for part, figures in parts.items())
