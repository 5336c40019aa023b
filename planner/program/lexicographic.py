"""Minimises several objectives in order of importance: each among the points that are best by those before it.

Owns that order, how far an objective gives way to the next, and what it means that two solvers agree. It does not know
what is minimised.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pulp

from ssdplan.plans.errors import UsageError

from .linear_program import LinearProgram, Objective
from .solvers import Highs
from .variables import Variable, value

SLACK = 1e-7
"""The share of itself by which an objective may give way to the less important ones; an objective of 0 stays 0."""
SAME_OPTIMUM = 1e-5
"""The most by which two solvers may differ in what they say is the least of an objective: relative, and absolute where
that is below 1, since all is counted in multiples of about 1."""

Point = dict[Variable, float]
Watch = Callable[[int, Objective, LinearProgram], None]
"""Told of each program before it is solved: the number of its objective, from 1, the objective itself, and the program
with the rows that the objectives before have left."""


def minimise(
    program: LinearProgram, objectives: Sequence[Objective], referee: Any = None, watch: Watch | None = None
) -> Point | None:
    """Minimise the first objective, then the second among equals, and so on. None when no point satisfies the rows.

    Each objective but the last leaves the program a row more. `referee`, another of PuLP's solvers, solves each of the
    programs too, and must find the same optima. The point is that of HiGHS, so every solver leads to the same plan: the
    last objective leaves a little open, and solvers that write files give eight digits of a point, of which the eighth,
    in the row that an objective leaves, may move a small class of states from one tier to another.
    Raises UsageError where the two do not agree on an optimum.
    """
    problem = program.problem
    highs = Highs(list(program.variables.values()))
    found: Point | None = None
    for number, objective in enumerate(objectives, 1):
        expression = program.expression(objective.form)
        problem.setObjective(expression)
        expression.name = objective.name
        if watch is not None:
            watch(number, objective, program)
        point = _solved(program, highs)
        if referee is not None and (point is not None or found is None):
            _require_same_optimum(objective, point, _solved(program, referee), referee.name)
        if point is None:
            break  # at the first objective: infeasible; later: within tolerance of the point found, which stands
        found = point
        if number < len(objectives):
            best = value(objective.form, point)
            problem += expression - best <= SLACK * abs(best), f"best_{number}_{objective.name}"
    return found


def _solved(program: LinearProgram, solver: Any) -> Point | None:
    """The optimum that a solver finds, within the variables' ranges, which it keeps within its tolerance."""
    variables = program.variables.values()
    program.problem.solve(solver)
    if program.problem.status != pulp.LpStatusOptimal:
        return None
    least = np.array([variable.lowBound for variable in variables])
    most = np.array([np.inf if variable.upBound is None else variable.upBound for variable in variables])
    # What no row and no objective has is not in PuLP's problem, so it may have no value.
    at = [variable.lowBound if variable.varValue is None else variable.varValue for variable in variables]
    return dict(zip(program.variables, np.clip(at, least, most).tolist(), strict=True))


def _require_same_optimum(objective: Objective, point: Point | None, theirs: Point | None, name: str) -> None:
    if point is None and theirs is None:
        return
    if point is not None and theirs is not None:
        ours = value(objective.form, point)
        if abs(value(objective.form, theirs) - ours) <= SAME_OPTIMUM * max(abs(ours), 1.0):
            return
    found, by_highs = ("no point" if each is None else f"{value(objective.form, each):.9g}" for each in (theirs, point))
    raise UsageError(
        f"--solver {name}: it finds {found} as the least {objective.name}, and HiGHS finds {by_highs}; plan without it"
    )
