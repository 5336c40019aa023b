"""Small linear programs with several objectives in order of importance, solved by HiGHS.

Owns HiGHS. With a generic last objective the optimum is unique, so that every solver finds the same one; callers scale
their rows to about 1, for a solver's tolerances are absolute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import highspy
import numpy as np

Linear = Mapping[str, float]
"""Variable -> coefficient; the empty name is the constant term."""
Ranges = Mapping[str, tuple[float, float | None]]
"""Variable -> the least and the most that it may be; None is no bound."""

SLACK = 1e-7
"""The share of itself by which an objective may give way to the less important ones; an objective of 0 stays 0."""

TOLERANCE = SLACK / 100
"""By which a point may be out of a row: less than what an objective gives way by, or the next finds no point at all."""


@dataclass(frozen=True, slots=True)
class Row:
    """`terms` `sense` 0."""

    terms: Linear
    sense: Literal["<=", "=="]


class Problem(Protocol):
    """Variables and rows, as a solver holds them."""

    def minimise(self, objective: Linear) -> dict[str, float] | None:
        """A point at which `objective` is least; None when no point satisfies the rows, or the solver gives up."""
        ...

    def require(self, row: Row) -> None:
        """Add a row."""
        ...


class Highs:
    """A problem in HiGHS, which begins each search where the one before ended."""

    def __init__(self, bounds: Ranges, rows: Sequence[Row]) -> None:
        self._columns = {name: number for number, name in enumerate(bounds)}
        self._highs = highspy.Highs()
        self._highs.silent()
        self._highs.setOptionValue("primal_feasibility_tolerance", TOLERANCE)
        self._infinity = self._highs.getInfinity()
        self._least = np.array([low for low, _ in bounds.values()])
        self._most = np.array([self._infinity if high is None else high for _, high in bounds.values()])
        self._highs.passModel(self._program(rows))

    def minimise(self, objective: Linear) -> dict[str, float] | None:
        costs = np.zeros(len(self._columns))
        for name, factor in objective.items():
            if name:
                costs[self._columns[name]] = factor
        self._highs.changeColsCost(len(costs), np.arange(len(costs), dtype=np.int32), costs)
        self._highs.run()
        if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        # Within bounds, which a solver keeps within its tolerance.
        found = np.clip(self._highs.getSolution().col_value, self._least, self._most)
        return dict(zip(self._columns, found.tolist(), strict=True))

    def require(self, row: Row) -> None:
        lower, upper, places, factors = self._row(row)
        self._highs.addRow(
            lower, upper, len(places), np.array(places, dtype=np.int32), np.array(factors, dtype=np.float64)
        )

    def _program(self, rows: Sequence[Row]) -> highspy.HighsLp:
        made = [self._row(row) for row in rows]
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self._columns), len(made)
        program.col_cost_ = np.zeros(len(self._columns))
        program.col_lower_, program.col_upper_ = self._least, self._most
        program.row_lower_ = np.array([lower for lower, _, _, _ in made])
        program.row_upper_ = np.array([upper for _, upper, _, _ in made])
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *(len(places) for _, _, places, _ in made)], dtype=np.int32)
        matrix.index_ = np.array([place for _, _, places, _ in made for place in places], dtype=np.int32)
        matrix.value_ = np.array([factor for _, _, _, factors in made for factor in factors], dtype=np.float64)
        return program

    def _row(self, row: Row) -> tuple[float, float, list[int], list[float]]:
        """Least, most, the columns and their factors; the constant goes to the other side."""
        terms = [(self._columns[name], factor) for name, factor in row.terms.items() if name and factor]
        most = -row.terms.get("", 0.0)
        least = most if row.sense == "==" else -self._infinity
        return least, most, [place for place, _ in terms], [factor for _, factor in terms]


def minimise(
    bounds: Ranges,
    rows: Sequence[Row],
    objectives: Sequence[Linear],
    solver: Callable[[Ranges, Sequence[Row]], Problem] = Highs,
) -> dict[str, float] | None:
    """Minimise the first objective, then the second among equals, and so on. None when no point satisfies the rows.

    `bounds` gives every variable its range.
    """
    problem = solver(bounds, rows)
    found: dict[str, float] | None = None
    for number, objective in enumerate(objectives):
        point = problem.minimise(objective)
        if point is None:
            break  # at the first objective: infeasible; later: within tolerance of the point found, which stands
        found = point
        if number + 1 < len(objectives):
            best = value(objective, found)
            problem.require(Row({**objective, "": objective.get("", 0.0) - best - SLACK * abs(best)}, "<="))
    return found


def value(terms: Linear, at: Mapping[str, float]) -> float:
    """The value of a linear form at a point."""
    return sum(factor * at[name] if name else factor for name, factor in terms.items())
