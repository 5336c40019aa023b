"""Answers: what the linear program says of a candidate, and what that is estimated to take.

Owns that each question is solved once and each answer estimated once, for paces, attempts and lean ways begin alike.
"""

from collections.abc import Hashable
from copy import copy
from dataclasses import replace

from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Machine, Model

from ..program.choices import Aim, FixedChoices
from ..program.placement import ProgramResult
from ..program.program import solve_program
from .budgets import Candidate, Needs
from .decided import decision_of
from .estimate import Builder
from .found import Branch, Sketch
from .pace import Pace
from .whole import best_whole_states


class Answers:
    """The program's answers for one model on one machine."""

    def __init__(self, model: Model, machine: Machine, budget: Needs, fixed: FixedChoices, builder: Builder) -> None:
        self.model, self.machine, self.budget, self.fixed, self.builder = model, machine, budget, fixed, builder
        self.in_dram = machine.device == "cpu" and not machine.emulation
        """Whether the device is made of DRAM for want of another."""
        self._programs: dict[Hashable, ProgramResult | None] = {}
        self._sketches: dict[tuple[int, Pace], Sketch] = {}

    def by(self, fixed: FixedChoices) -> "Answers":
        """The same by other choices. The two share what they solve and estimate."""
        other = copy(self)
        other.fixed = fixed
        return other

    def spare_on_device(self, used: float) -> float | None:
        """What the device may keep between uses: states, unless `kept` says which, and activations. None where that is
        nothing: a device made of DRAM would only have what is on host by another name."""
        return None if self.in_dram else max(self.budget.device - used, 0.0)

    def program(self, candidate: Candidate, branch: Branch, aim: Aim) -> ProgramResult | None:
        """What solves the program, or None."""
        kept = branch.fixed.kept
        shares = None if kept is None else tuple(kept.items())
        key = candidate, branch.limits, replace(branch.fixed, kept=None), shares, aim
        if key not in self._programs:
            self._programs[key] = solve_program(
                self.model,
                self.machine,
                micro_batch_size=candidate.micro_batch_size,
                micro_batches=candidate.micro_batches,
                limits=branch.limits,
                fixed=branch.fixed,
                aim=aim,
            )
        return self._programs[key]

    def whole_states(self, candidate: Candidate, branch: Branch, aim: Aim) -> Branch:
        """`branch` with what the device keeps decided, as whole states."""
        if branch.fixed.kept is not None or not (self.fixed.unified_memory or branch.limits.device_bytes is not None):
            return branch
        return best_whole_states(self.model, branch, lambda branch: self.program(candidate, branch, aim))

    def decision(self, candidate: Candidate, program: ProgramResult, pace: Pace) -> Decision:
        """What is to be done by an answer."""
        return decision_of(self.model, self.budget, self.fixed, candidate, program, pace)

    def sketched(self, candidate: Candidate, program: ProgramResult, pace: Pace) -> Sketch:
        """The estimate of an answer that is kept here, which is what tells it from others."""
        key = id(program), pace
        if key not in self._sketches:
            decision = self.decision(candidate, program, pace)
            self._sketches[key] = Sketch(program, decision, self.builder.estimate(decision))
        return self._sketches[key]
