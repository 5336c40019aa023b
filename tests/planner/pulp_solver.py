"""A linear program in PuLP: the same problems by another solver. Tests skip where PuLP is not installed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ssdplan.planner.lexicographic import Linear, Problem, Ranges, Row

OPTIMAL = 1
"""What `solve` returns for an optimum in PuLP 3, and the status of what it returns in PuLP 4."""


class PulpProblem:
    """A problem for any of PuLP's solvers."""

    def __init__(self, bounds: Ranges, rows: Sequence[Row], solver: Any) -> None:
        self._pulp = pulp = pytest.importorskip("pulp")
        self._solver = solver
        self._problem = pulp.LpProblem("ssdplan", pulp.LpMinimize)
        self._variables = {name: self._problem.add_variable(name, low, high) for name, (low, high) in bounds.items()}
        self._lows = {name: low for name, (low, _) in bounds.items()}
        for row in rows:
            self.require(row)

    def minimise(self, objective: Linear) -> dict[str, float] | None:
        self._problem.setObjective(self._expression(objective))
        outcome = self._problem.solve(self._solver)
        if getattr(outcome, "status", outcome) != OPTIMAL:
            return None
        # What no row and no objective has named is not in PuLP's problem.
        values = ((name, variable.varValue) for name, variable in self._variables.items())
        return {name: self._lows[name] if found is None else found for name, found in values}

    def require(self, row: Row) -> None:
        total = self._expression(row.terms)
        self._problem += (total == 0) if row.sense == "==" else (total <= 0)

    def _expression(self, terms: Linear) -> Any:
        return self._pulp.lpSum([factor * self._variables[name] if name else factor for name, factor in terms.items()])


def by(solver: Any) -> Callable[[Ranges, Sequence[Row]], Problem]:
    """Problems for one of PuLP's solvers."""
    return lambda bounds, rows: PulpProblem(bounds, rows, solver)
