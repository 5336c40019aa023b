"""Small linear programs with several objectives in order of importance, solved by PuLP.

Owns PuLP and the choice of its solver. With a generic last objective the optimum is unique, so that every solver finds
the same one; callers scale their rows to about 1, for the solvers' tolerances are absolute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pulp

Linear = Mapping[str, float]
"""Variable -> coefficient; the empty name is the constant term."""

OPTIMAL = 1
"""What `solve` returns for an optimum in PuLP 3, and the status of what it returns in PuLP 4."""
SLACK = 1e-7
"""The share of itself by which an objective may give way to the less important ones; an objective of 0 stays 0."""


@dataclass(frozen=True, slots=True)
class Row:
    """`terms` `sense` 0."""

    terms: Linear
    sense: Literal["<=", "=="]


def minimise(
    bounds: Mapping[str, tuple[float, float | None]],
    rows: Sequence[Row],
    objectives: Sequence[Linear],
    solver: Any = None,
) -> dict[str, float] | None:
    """Minimise the first objective, then the second among equals, and so on. None when no point satisfies the rows.

    `bounds` gives every variable its range. `solver` is a PuLP solver; the default is HiGHS in this process.
    """
    problem = pulp.LpProblem("ssdplan", pulp.LpMinimize)
    variables = {name: problem.add_variable(name, low, high) for name, (low, high) in bounds.items()}

    def expression(terms: Linear) -> Any:
        return pulp.lpSum([factor * variables[name] if name else factor for name, factor in terms.items()])

    for row in rows:
        total = expression(row.terms)
        problem += (total == 0) if row.sense == "==" else (total <= 0)
    solver = solver or pulp.HiGHS(msg=False)
    found: dict[str, float] | None = None
    for objective in objectives:
        total = expression(objective)
        problem.setObjective(total)
        outcome = problem.solve(solver)
        if getattr(outcome, "status", outcome) != OPTIMAL:
            break  # at the first objective: infeasible; later: within tolerance of the point found, which stands
        found = {name: _clip(variable.varValue, *bounds[name]) for name, variable in variables.items()}
        best = value(objective, found)
        problem += total <= best + SLACK * abs(best)
    return found


def value(terms: Linear, at: Mapping[str, float]) -> float:
    """The value of a linear form at a point."""
    return sum(factor * at[name] if name else factor for name, factor in terms.items())


def _clip(number: float | None, low: float, high: float | None) -> float:
    """Within bounds; what no row and no objective has named yet is at its least."""
    if number is None:
        return low
    return max(low, number) if high is None else min(max(low, number), high)
