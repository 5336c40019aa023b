"""A lean way: what a tight budget ends in, estimated at first, and built only where the estimate does not decide.

Owns that no schedule of a whole model is built to learn that it is far too large. `lean_ways.py` has the ways.
"""

from collections.abc import Sequence
from dataclasses import astuple
from functools import cached_property

from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.units import PAGE

from ..program.placement import ProgramResult
from .budgets import Candidate, Constraint, Needs
from .estimate import Builder
from .found import Branch, Solved

NOTHING = Needs(0, 0, 0, 0)


class Lean:
    """One way to take little memory."""

    def __init__(
        self, builder: Builder, candidate: Candidate, decision: Decision, program: ProgramResult, branch: Branch
    ) -> None:
        self._builder, self._candidate, self._decision = builder, candidate, decision
        self._program, self._branch = program, branch
        fixed = branch.fixed
        wishes = fixed.parameters, fixed.optimizer, fixed.checkpoints, fixed.checkpoints_device, fixed.delay_ratio
        self._whole = all(share in (None, 0.0, 1.0) for share in wishes)
        """Whether all states are in one place each; where the user wants other fractions, they are rounded to states
        and pages, up or down."""

    @property
    def seconds(self) -> float:
        """Of a step, by the program."""
        return self._program.seconds

    @cached_property
    def at_least(self) -> Needs:
        """What it takes at least, by a few of the layers; nothing where that is not known. A page is left for what the
        program's fractions lack of whole numbers."""
        if not self._whole:
            return NOTHING
        return Needs(*(max(nbytes - PAGE, 0) for nbytes in astuple(self._builder.at_least(self._decision))))

    @cached_property
    def solved(self) -> Solved:
        """The same built, with what it takes exactly."""
        return Solved(self._builder.build(self._candidate, self._decision), self._program, self._branch)

    @property
    def needs(self) -> Needs:
        """What it takes exactly."""
        return self.solved.fitted.needs


def fastest_within(ways: Sequence[Lean], budget: Needs) -> Solved | None:
    """The fastest of `ways` that fits, by the program."""
    possible = (way for way in sorted(ways, key=lambda way: way.seconds) if not way.at_least.over(budget))
    return next((way.solved for way in possible if not way.needs.over(budget)), None)


def leanest_of(ways: Sequence[Lean], constraint: Constraint, budget: Needs | None = None) -> Needs | None:
    """What the one takes exactly, of `ways` that fit `budget`, that takes least of a constraint; None where none fits.
    Those are not built that take more at least."""
    best: Needs | None = None
    for way in sorted(ways, key=lambda way: way.at_least.of(constraint)):
        if best is not None and way.at_least.of(constraint) >= best.of(constraint):
            break
        if budget is None or not (way.at_least.over(budget) or way.needs.over(budget)):
            best = way.needs if best is None else min(best, way.needs, key=lambda needs: needs.of(constraint))
    return best
