"""Refusal: says why no plan fits, which budget would have to be how large, and what takes less.

Owns these words. What the least is, `fit/fit.py` finds.
"""

from collections.abc import Sequence

from ssdplan.plans.documents.state_layout import GRADIENT_BYTES, parameters_bytes
from ssdplan.plans.errors import InfeasibleError
from ssdplan.plans.units import format_enough, format_there

from .fit.budgets import Candidate, Constraint
from .fit.fit import Fitter
from .fit.lean import leanest_of


def refusal(fitter: Fitter, candidates: Sequence[Candidate], without_gradients: Fitter | None) -> InfeasibleError:
    """Why none of `candidates` fits: the one budget to raise, and how far; or all, when one is not enough.

    `without_gradients`: of the leanest plans of that kind; None where the user's wishes rule them out.
    """
    budget = fitter.budget
    constraints: tuple[Constraint, ...] = ("device memory", "ssd writes", "ssd space", "host memory")
    for constraint in constraints:
        enough = _least(fitter, candidates, constraint)
        if enough is None:
            continue
        more = ""
        if constraint == "device memory":
            there = fitter.machine.device_memory_bytes
            if enough > there and not fitter.machine.compute_shares_cpu:
                more = f", more than the {format_there(there)} that {fitter.machine.device_name} has for a plan"
            more += _lighter(fitter, candidates, without_gradients)
        return InfeasibleError(
            f"no plan fits: {constraint} of {format_there(budget.of(constraint))} is too little; "
            f"the least that would do is {format_enough(enough)}{more}"
        )
    needs = leanest_of([way for candidate in candidates for way in fitter.lean_ways.of(candidate)], "host memory")
    assert needs is not None, "no candidate, and still a refusal"
    each = ", ".join(
        f"{constraint} {format_enough(needs.of(constraint))} instead of {format_there(budget.of(constraint))}"
        for constraint in needs.over(budget)
    )
    return InfeasibleError(f"no plan fits: it would take at least {each}")


def _least(fitter: Fitter, candidates: Sequence[Candidate], constraint: Constraint) -> int | None:
    found = (fitter.least(candidate, constraint) for candidate in candidates)
    return min((nbytes for nbytes in found if nbytes is not None), default=None)


def _lighter(fitter: Fitter, candidates: Sequence[Candidate], without_gradients: Fitter | None) -> str:
    """What takes less of a device's memory, in sentences; gradients are of one layer at least."""
    said = _shorter(fitter, candidates)
    if without_gradients is not None:
        least = _least(without_gradients, candidates, "device memory")
        if least is not None:
            fits = "fits: it" if least <= fitter.budget.device else "does not fit either, and"
            said += f". --optimizer mezo, which has no gradients, {fits} takes {format_enough(least)} at least"
    return said


def _shorter(fitter: Fitter, candidates: Sequence[Candidate]) -> str:
    """What shorter rows could bring: nothing where one layer's own states are too much."""
    model, by_gradients = fitter.model, not fitter.fixed.zeroth_order
    nbytes, name = max(
        (
            parameters_bytes([model.states[state] for state in layer.states], model.precision)
            + GRADIENT_BYTES * by_gradients * sum(model.states[state].elements for state in model.trained(number)),
            layer.name,
        )
        for number, layer in enumerate(model.layers)
    )
    if nbytes <= fitter.budget.device:
        fewer = " or fewer of them in a micro-batch" if min(each.micro_batch_size for each in candidates) > 1 else ""
        return f". Shorter rows (--sequence-length){fewer} take less"
    if by_gradients:
        return f". The parameters and gradients of one layer alone, {name}, take {format_enough(nbytes)}"
    return ""
