"""Whole states: which of them the device keeps, where the program says so in fractions.

Owns that search. The program keeps fractions of states, and a device keeps whole ones: to round a large state down may
cost a part of the step, so what to round and which way is tried where it may matter (branch and bound). What is tried
is solved elsewhere.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import ceil, floor

from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.state_layout import ELEMENT_BYTES

from ..program.choices import KeptShares, KeptWithin
from ..program.placement import ProgramResult
from ..program.program import Bound
from .found import Branch
from .kept import WHOLE, whole_states

WORTH = 5e-3
"""Of a step: what the fractions gain at least over the best whole states, or nothing else is tried."""
TRIED = 4
"""Programs that are split in two at most."""

Solve = Callable[[Branch], ProgramResult | None]


def best_whole_states(model: Model, branch: Branch, solve: Solve) -> Branch:
    """`branch` with what the device keeps decided, as whole states: of those that were tried, the ones with which the
    program's step is the shortest. The program without that decided is the bound: where it is no more than `WORTH`
    faster nothing else is tried."""
    bound = solve(branch)
    if bound is None:
        return keeping_nothing(branch)
    best, program = _rounded(model, branch, bound, solve)
    nodes = [(bound, branch)]
    for _ in range(TRIED):
        nodes = [node for node in nodes if program is None or node[0].seconds < program.seconds * (1 - WORTH)]
        if not nodes:
            break
        node = min(nodes, key=lambda each: each[0].seconds)
        nodes.remove(node)
        for part in _parts(model, *node):
            found = solve(part)
            if found is None:
                continue
            nodes.append((found, part))
            other, again = _rounded(model, part, found, solve)
            if again is not None and (program is None or again.seconds < program.seconds):
                best, program = other, again
    return best


def keeping_nothing(branch: Branch) -> Branch:
    """`branch` where nothing stays on the device."""
    return _deciding(branch, {}, 0.0)


def bound_of(branch: Branch, bound: Callable[[Branch], Bound | None]) -> Bound | None:
    """The `bound` of a branch. Where there is none, and nobody has said what the device keeps, that with nothing kept,
    as a plan is found then."""
    found = bound(branch)
    return bound(keeping_nothing(branch)) if found is None and branch.fixed.kept is None else found


def _rounded(model: Model, branch: Branch, found: ProgramResult, solve: Solve) -> tuple[Branch, ProgramResult | None]:
    """As many whole states as the fractions of `found` are room for, and the program with these."""
    decided = _deciding(branch, *whole_states(model, found))
    return decided, solve(decided)


def _deciding(branch: Branch, kept: dict[str, KeptShares], inputs: float) -> Branch:
    return replace(branch, fixed=replace(branch.fixed, kept=kept, checkpoints_device=inputs, kept_within=()))


def _parts(model: Model, found: ProgramResult, branch: Branch) -> list[Branch]:
    """`branch` in two, of which neither has the fraction that `found` keeps of the class in which most bytes would be
    lost by rounding down; none where all are whole."""
    counts = Counter(state.state_class for state in model.states)
    elements: dict[str, int] = {}
    for state in model.states:
        elements[state.state_class] = max(elements.get(state.state_class, 0), state.elements)
    known = {each.state_class: each for each in branch.fixed.kept_within}
    lost: list[tuple[float, KeptWithin, KeptWithin]] = []
    for name, placement in found.placement.items():
        count, within = counts[name], known.get(name, KeptWithin(name))
        for updated, share in ((False, placement.parameters_device), (True, placement.optimizer_device)):
            below, above = floor(share * count + WHOLE), ceil(share * count - WHOLE)
            if below < above:
                each = branch.fixed.formats.mean_bytes if updated else ELEMENT_BYTES[model.precision]
                nbytes = (share * count - below) * elements[name] * each
                lost.append((nbytes, *within.split(below / count, above / count, updated=updated)))
    if not lost:
        return []
    _, *parts = max(lost, key=lambda each: each[0])
    return [
        replace(
            branch,
            fixed=replace(branch.fixed, kept_within=tuple((known | {part.state_class: part}).values())),
        )
        for part in parts
    ]
