"""Solvers of linear programs: HiGHS, and any other that PuLP finds.

Owns HiGHS as a solver of PuLP's, and how a solver is asked for by name. It knows no program.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import highspy
import numpy as np
import pulp

from ssdplan.plans.errors import UsageError, first_line

TOLERANCE = 1e-9
"""By which a point may be out of a row: far less than what an objective gives way by (`lexicographic.SLACK`), or the
next objective finds no point at all."""
USUAL = "HiGHS"

CBC_OPTIONS = [f"primalTolerance {TOLERANCE:g}", f"dualTolerance {TOLERANCE:g}"]
OPTIONS: Mapping[str, list[str]] = {"PULP_CBC_CMD": CBC_OPTIONS, "COIN_CMD": CBC_OPTIONS}
"""The options of a solver that keep it to `TOLERANCE`. Others keep to a tolerance of their own."""


class Highs(pulp.LpSolver):
    """HiGHS for one problem, fed from the problem's own rows.

    PuLP's solver of this name adds one row at a time and begins every search afresh. This one passes all rows at once,
    adds those that came since, and begins each search where the one before ended.
    """

    name = USUAL

    def __init__(self, variables: Sequence[Any]) -> None:
        """`variables`: the problem's, in the order in which they become columns. Each has a lower bound."""
        super().__init__(mip=False, msg=False)
        self._variables = variables
        self._columns = {variable: number for number, variable in enumerate(variables)}
        self._rows = 0
        self._highs = highspy.Highs()
        self._highs.silent()
        self._highs.setOptionValue("primal_feasibility_tolerance", TOLERANCE)
        self._infinity = self._highs.getInfinity()

    def available(self) -> bool:
        return True

    def actualSolve(self, lp: Any) -> int:  # noqa: N802 - PuLP's name
        """Solve `lp`, and give its variables their values where there is an optimum."""
        constraints = lp.constraints()
        if not self._rows:
            self._highs.passModel(self._model(constraints))
        for constraint in constraints[self._rows :] if self._rows else ():
            least, most, places, factors = self._row(constraint)
            self._highs.addRow(
                least, most, len(places), np.array(places, dtype=np.int32), np.array(factors, dtype=np.float64)
            )
        self._rows = len(constraints)
        costs = np.zeros(len(self._columns))
        for variable, factor in lp.objective.items():
            costs[self._columns[variable]] = factor
        self._highs.changeColsCost(len(costs), np.arange(len(costs), dtype=np.int32), costs)
        for presolve in ("off", "choose"):  # of a small program, simplifying it takes half of the time
            self._highs.setOptionValue("presolve", presolve)
            self._highs.run()
            status = _STATUS.get(self._highs.getModelStatus(), pulp.LpStatusNotSolved)
            if status != pulp.LpStatusNotSolved:
                break
            self._highs.clearSolver()  # undecided, for its factors are far apart: simplified it may be decided
        if status == pulp.LpStatusOptimal:
            for variable, number in zip(self._variables, self._highs.getSolution().col_value, strict=True):
                variable.varValue = number
        lp.assignStatus(status)
        return status

    def _model(self, constraints: Sequence[Any]) -> highspy.HighsLp:
        rows = [self._row(constraint) for constraint in constraints]
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self._columns), len(rows)
        model.col_cost_ = np.zeros(len(self._columns))
        model.col_lower_ = np.array([variable.lowBound for variable in self._variables])
        most = [variable.upBound for variable in self._variables]
        model.col_upper_ = np.array([self._infinity if each is None else each for each in most])
        model.row_lower_ = np.array([least for least, _, _, _ in rows])
        model.row_upper_ = np.array([most for _, most, _, _ in rows])
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *(len(places) for _, _, places, _ in rows)], dtype=np.int32)
        matrix.index_ = np.array([place for _, _, places, _ in rows for place in places], dtype=np.int32)
        matrix.value_ = np.array([factor for _, _, _, factors in rows for factor in factors], dtype=np.float64)
        return model

    def _row(self, constraint: Any) -> tuple[float, float, list[int], list[float]]:
        """Least, most, the columns and their factors."""
        terms = [(self._columns[variable], factor) for variable, factor in constraint.items() if factor]
        least, most = constraint.getLb(), constraint.getUb()
        return (
            -self._infinity if least is None else least,
            self._infinity if most is None else most,
            [place for place, _ in terms],
            [factor for _, factor in terms],
        )


_STATUS = {
    highspy.HighsModelStatus.kOptimal: pulp.LpStatusOptimal,
    highspy.HighsModelStatus.kInfeasible: pulp.LpStatusInfeasible,
}


def solver_of(name: str) -> Any:
    """The solver of a name, as PuLP lists it; None for HiGHS, which solves every program as it is.

    Raises UsageError where there is none of that name here, naming those that are.
    """
    there = {each.lower(): each for each in (USUAL, *pulp.listSolvers(onlyAvailable=True))}
    if name.lower() not in there:
        raise UsageError(f"--solver {name}: PuLP finds no such solver here; it finds {', '.join(there.values())}")
    found = there[name.lower()]
    return None if found == USUAL else _Named(found)


class _Named(pulp.LpSolver):
    """A solver of PuLP's that ends in an optimum, in no point at all, or in an error that a person can read."""

    def __init__(self, name: str) -> None:
        super().__init__(mip=False, msg=False)
        self.name = name
        self._solver = (
            pulp.getSolver(name, msg=False, options=OPTIONS[name])
            if name in OPTIONS
            else pulp.getSolver(name, msg=False)
        )

    def available(self) -> bool:
        return bool(self._solver.available())

    def actualSolve(self, lp: Any) -> int:  # noqa: N802 - PuLP's name
        try:
            status = self._solver.actualSolve(lp)
        except (pulp.PulpSolverError, OSError) as error:
            raise UsageError(f"--solver {self.name}: {first_line(error)}") from error
        if status not in (pulp.LpStatusOptimal, pulp.LpStatusInfeasible):
            raise UsageError(f"--solver {self.name}: gave up on a linear program ({pulp.LpStatus[status]})")
        return int(status)
