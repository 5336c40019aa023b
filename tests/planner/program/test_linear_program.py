"""The linear program as PuLP states it: what other solvers make of it, what its variables are called, its files."""

import random
import stat
from pathlib import Path
from typing import Any

import highspy
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.program import solvers
from ssdplan.planner.program.choices import FREE, FixedChoices, Limits, Question
from ssdplan.planner.program.lexicographic import minimise
from ssdplan.planner.program.linear_program import LinearProgram, Objective
from ssdplan.planner.program.lp_files import LpFiles
from ssdplan.planner.program.program import answer, state
from ssdplan.planner.program.solvers import TOLERANCE, solver_of
from ssdplan.planner.program.variables import (
    CHECKPOINTS_ON_DEVICE,
    CHECKPOINTS_ON_HOST,
    CONSTANT,
    DELAY_RATIO,
    seconds_of_stage,
    value,
    variables_of,
)
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve, solve_and_build
from ssdplan.plans.documents.profile import Machine, Model, Profile
from ssdplan.plans.errors import UsageError
from tests.extent import examples
from tests.made.profiles import MIB, made_machine, made_model, made_profile, made_volume
from tests.planner.machines import machines, models
from tests.planner.program.pulp_solver import optimum
from tests.planner.program.test_program import scale_of

FILES = (
    "1-step-seconds.lp",
    "2-ssd-writes.lp",
    "3-delay-ratio.lp",
    "4-ssd-reads.lp",
    "5-tie-breaking-weights.lp",
)


def question(model: Model, machine: Machine, n: int, memory: float, fixed: FixedChoices = FREE) -> Question:
    return Question(2, n, Limits(memory * scale_of(model, machine, 2, n)), fixed)


def profile() -> Profile:
    machine = made_machine(cores=4, update_rate=1e8, volumes=(made_volume(read=2e8, write=2e8),))
    return made_profile(machine=machine, model=made_model(blocks=6, hidden=128, vocab=512, sequence=64, flops=1e11))


@settings(deadline=None, max_examples=examples(40), print_blob=True)
@given(
    models(),
    machines(),
    st.integers(1, 4),
    st.floats(0, 1),
    st.sampled_from((FREE, FixedChoices(kept={}), FixedChoices(unified_memory=True), FixedChoices(delay_ratio=0.3))),
    st.integers(0, 2**32),
)
def test_rows_that_go_to_highs_directly_are_those_that_pulp_states(
    model: Model, machine: Machine, n: int, memory: float, fixed: FixedChoices, seed: int
) -> None:
    """PuLP's own HiGHS, which reads the program row by row and begins afresh each time, finds the same optimum for each
    objective in turn; and the same point for a last one that has no ties, with random weights.

    Both keep to the rows ten times as closely as plans do. A row that an objective left has factors of a thousandth and
    less, so what a solver may be out of it by moves a fraction a thousand times as far."""
    closely = TOLERANCE / 10
    program = state(model, machine, question(model, machine, n, memory, fixed))
    independent = pulp.HiGHS(msg=False, primal_feasibility_tolerance=closely)
    draw = random.Random(seed)
    fractions = [variable for variable in program.variables if variable.form != "stage seconds"]
    weights = Objective("random_weights", {variable: draw.uniform(1, 2) for variable in fractions})
    found = []

    def watch(_: int, objective: Objective, program: LinearProgram) -> None:
        found.append((objective, optimum(program, independent)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solvers, "TOLERANCE", closely)
        point = minimise(program, [*program.objectives(), weights], watch=watch)
    assert point is not None and len(found) == 6
    for objective, other in found:
        assert other is not None
        assert value(objective.form, point) == pytest.approx(value(objective.form, other), rel=1e-6, abs=1e-6)
    _, last = found[-1]
    assert last is not None
    assert [point[each] for each in fractions] == pytest.approx([last[each] for each in fractions], abs=1e-6)


def test_variables_are_called_by_their_fields() -> None:
    of = variables_of("block")
    words = (
        DELAY_RATIO, CHECKPOINTS_ON_HOST, of.optimizer.delayed_ssd, of.gradient_reclaimed, of.device, of.turn_ssd,
        of.updated_delayed, CHECKPOINTS_ON_DEVICE,
    )  # fmt: skip
    assert [str(variable) for variable in words] == [
        "delay ratio",
        "activation checkpoints, on host",
        "block: optimizer states, delayed, on ssd",
        "block: gradients, delayed, in reclaimed memory",
        "block: parameters, on device",
        "block: turn copies, on ssd",
        "block: optimizer states, delayed, on device",
        "activation checkpoints, on device",
    ]
    assert str(seconds_of_stage(3)) == "seconds of stage 3"
    every = {*of.all(), *variables_of("head").all(), DELAY_RATIO, CHECKPOINTS_ON_HOST, CONSTANT, seconds_of_stage(0)}
    assert len(every) == 2 * 17 + 4


def test_names_in_files_are_plain_and_no_two_are_alike(tmp_path: Path) -> None:
    """Whatever a profile calls its classes: here with a line break, a comment, and names that only these tell apart."""
    model = made_model(blocks=4, hidden=64)
    names = ["a b", "a-b", "a_b_1", "\nEnd \\", "x" * 200, "x" * 201]
    states = tuple(
        state.model_copy(update={"state_class": names[number % len(names)]})
        for number, state in enumerate(model.states)
    )
    asked = Question(1, 2, Limits(1e9, device_bytes=1e6))
    program = state(model.model_copy(update={"states": states}), made_machine(), asked)
    used = [variable.name for variable in program.variables.values()]
    assert len(set(used)) == len(used) and all(name.replace("_", "").isalnum() and name.isascii() for name in used)
    program.problem.setObjective(program.expression(program.forms.seconds))
    program.problem.writeLP(tmp_path / "program.lp")  # it refuses names that are long, or given twice


# Other solvers.


def test_another_solver_leads_to_the_same_plan() -> None:
    if not pulp.PULP_CBC_CMD(msg=False).available():
        pytest.skip("no CBC here")
    for memory in (8, 11, 200):
        request = SolveRequest(memory * MIB, micro_batches=3)
        by_highs = solve(profile(), request, compared=False)
        request = SolveRequest(memory * MIB, micro_batches=3, solver="pulp_cbc_cmd")
        assert solve(profile(), request, compared=False).text() == by_highs.text()


def test_a_solver_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"--solver best: PuLP finds no such solver here; it finds HiGHS, "):
        solver_of("best")
    with pytest.raises(UsageError, match="--solver CHOCO"):
        solve(profile(), SolveRequest(8 * MIB, solver="CHOCO"))
    assert solver_of("highs") is None, "it solves every program as it is"


class Wrong(pulp.LpSolver):
    """A solver that is wrong in one way or another."""

    name = "WRONG"

    def __init__(self, status: int, found: float = 0.0) -> None:
        super().__init__(msg=False)
        self._status, self._found = status, found

    def actualSolve(self, lp: Any) -> int:  # noqa: N802 - PuLP's name
        for variable in lp.variables():
            variable.varValue = self._found
        lp.assignStatus(self._status)
        return self._status


@pytest.mark.parametrize(
    ("solver", "words"),
    [
        (Wrong(pulp.LpStatusOptimal, found=0.5), r"it finds [\d.]+ as the least step_seconds, and HiGHS finds [\d.]+;"),
        (Wrong(pulp.LpStatusInfeasible), r"it finds no point as the least step_seconds, and HiGHS finds [\d.]+;"),
    ],
)
def test_a_solver_that_finds_another_optimum_is_told_so(solver: Wrong, words: str) -> None:
    model, machine = made_model(), made_machine(volumes=(made_volume(read=1e6, write=1e6),))
    with pytest.raises(UsageError, match=f"--solver WRONG: {words}"):
        answer(model, machine, question(model, machine, 2, 0.3), solver)


def test_a_solver_that_finds_a_point_where_there_is_none_is_told_so() -> None:
    impossible = Question(1, 1, Limits(1000.0), FixedChoices(optimizer=1.0))
    with pytest.raises(UsageError, match=r"it finds [\d.]+ as the least step_seconds, and HiGHS finds no point"):
        answer(made_model(), made_machine(), impossible, Wrong(pulp.LpStatusOptimal))
    assert answer(made_model(), made_machine(), impossible, Wrong(pulp.LpStatusInfeasible)) is None


@pytest.mark.parametrize("failure", [pulp.PulpSolverError("no licence\nat all"), OSError("no licence"), None])
def test_a_solver_that_fails_is_named(failure: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        if failure is not None:
            raise failure
        return pulp.LpStatusNotSolved

    solver = solver_of("PULP_CBC_CMD") if "PULP_CBC_CMD" in pulp.listSolvers(onlyAvailable=True) else None
    if solver is None:
        pytest.skip("no CBC here")
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", fail)
    with pytest.raises(
        UsageError, match=r"--solver PULP_CBC_CMD: (no licence|gave up on a linear program \(Not Solved\))$"
    ):
        answer(made_model(), made_machine(), Question(1, 2, Limits(1e9)), solver)


# Files.


def read(path: Path) -> float:
    """The optimum of a file, by a solver that knows the file alone."""
    highs = highspy.Highs()
    highs.silent()
    highs.setOptionValue("primal_feasibility_tolerance", TOLERANCE)
    assert highs.readModel(str(path)) == highspy.HighsStatus.kOk
    highs.run()
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(highs.getInfo().objective_function_value)


def test_files_are_the_programs_that_decided_the_plan(tmp_path: Path) -> None:
    files = LpFiles(tmp_path / "new" / "programs", "a model\nMinimize: on a machine")
    request = SolveRequest(8 * MIB, micro_batches=3)
    plan, _ = solve_and_build(profile(), request, compared=False, watch=files)
    assert plan == solve(profile(), request, compared=False)
    directory = tmp_path / "new" / "programs"
    assert tuple(files.names) == FILES == tuple(sorted(path.name for path in directory.iterdir()))
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    texts = [(directory / name).read_text() for name in FILES]
    assert all(text.startswith("\\ a model?Minimize: on a machine\n") and "\nEnd\n" in text for text in texts)
    # Each has a row more than the one before: what the objective before has reached.
    assert ["best_4" in text for text in texts] == [False, False, False, False, True]
    (unit,) = {
        line.split("multiples of ")[1].split(" s,")[0] for line in texts[0].splitlines() if " s, a stage" in line
    }
    assert read(directory / FILES[0]) * float(unit) == pytest.approx(plan.prediction.program_seconds, rel=1e-6)
    assert read(directory / FILES[2]) == pytest.approx(plan.decision.delay_ratio, abs=2e-6)
    for name in FILES:
        read(directory / name)


def test_a_link_in_a_files_place_is_neither_followed_nor_replaced(tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("mine")
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / FILES[0]).symlink_to(other)
    model, machine = made_model(), made_machine()
    with pytest.raises(UsageError, match=rf"{FILES[0]}: is a symbolic link"):
        answer(model, machine, question(model, machine, 2, 0.3), watch=LpFiles(tmp_path / "programs", "title"))
    assert other.read_text() == "mine"
    assert (tmp_path / "programs" / FILES[0]).is_symlink()
