"""One of PuLP's solvers by itself: objective after objective on the program as it is stated, without our own HiGHS."""

from typing import Any

import pulp

from ssdplan.planner.program.choices import FREE, FixedChoices, Limits, Question
from ssdplan.planner.program.linear_program import LinearProgram
from ssdplan.planner.program.placement import ProgramResult, result_of
from ssdplan.planner.program.program import state
from ssdplan.planner.program.variables import Variable, value
from ssdplan.plans.documents.profile import Machine, Model

SLACK = 1e-7
"""The share of itself by which an objective gives way to the next."""


def solve_by(
    solver: Any,
    model: Model,
    machine: Machine,
    *,
    micro_batch_size: int,
    micro_batches: int,
    limits: Limits,
    fixed: FixedChoices = FREE,
) -> ProgramResult | None:
    """What `solve_program` should find."""
    question = Question(micro_batch_size, micro_batches, limits, fixed)
    program = state(model, machine, question)
    found: dict[Variable, float] | None = None
    for objective in program.objectives():
        program.problem.setObjective(program.expression(objective.form))
        point = optimum(program, solver)
        if point is None:
            break
        found = point
        best = value(objective.form, found)
        program.problem += program.expression(objective.form) <= best + SLACK * abs(best)
    return result_of(question, program, found) if found else None


def optimum(program: LinearProgram, solver: Any) -> dict[Variable, float] | None:
    """The point that a solver finds; None when it finds none."""
    program.problem.solve(solver)
    if program.problem.status != pulp.LpStatusOptimal:
        return None
    # What no row and no objective has named is not in PuLP's problem.
    return {
        variable: of_pulp.lowBound if of_pulp.varValue is None else of_pulp.varValue
        for variable, of_pulp in program.variables.items()
    }
