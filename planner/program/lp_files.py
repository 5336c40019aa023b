"""The linear programs that decided a plan, as files that any solver reads.

Owns the names of the files and what stands at their head. Each is written whole or not at all, its owner's alone, and
never through a link.
"""

import tempfile
from pathlib import Path

from ssdplan.plans.files import Folder, make_folder

from .linear_program import LinearProgram, Objective
from .variables import CONSTANT

_HEAD = """\
{title}
One of the linear programs that decided a plan of ssdplan. Objective {number}: minimise {objective}.
{micro_batches} micro-batches of {rows} rows, {schedule} schedule.

alpha                          delay ratio: the fraction of each update that runs during the next step's forward
x_FORM_PART_TIER_CLASS         storage ratio: the fraction of a class of states that is this part and lives on this tier
x_activation_checkpoints_host  the fraction of activation checkpoints that stays on host
x_gradient_buffers             the fraction of the buffers for gradients of an embedding and a head that host needs
t_PHASE_CLASS_NUMBER           time of one kind of stage, at least that of each of its resources
best_NUMBER_OBJECTIVE          keeps what an objective before this one has reached

A step's seconds are counted in multiples of {seconds:.12g} s, a stage's in multiples of a unit of its own, and bytes in
multiples of all that there could be, for a solver's tolerances are absolute. Coefficients have twelve digits. The
constant term of the objective is left out: {constant:.12g}.
"""


class LpFiles:
    """A directory with one file for each objective in turn; a `lexicographic.Watch`."""

    def __init__(self, directory: Path, title: str) -> None:
        """`title`: whose programs these are."""
        self._directory, self._title = directory, title
        self.names: list[str] = []
        """Of the files written so far."""

    def __call__(self, number: int, objective: Objective, program: LinearProgram) -> None:
        """Write the program as it is now. Raises OSError."""
        name = f"{number}-{objective.name.replace('_', '-')}.lp"
        work = program.forms.work
        head = _HEAD.format(
            title="".join(letter if letter.isprintable() else "?" for letter in self._title),
            number=number,
            objective=objective.name,
            micro_batches=work.micro_batches,
            rows=work.micro_batch_size,
            schedule=work.schedule,
            seconds=program.forms.unit,
            constant=objective.form.get(CONSTANT, 0.0),
        )
        comment = "".join(f"\\ {line}".rstrip() + "\n" for line in head.splitlines())
        make_folder(self._directory)
        with Folder(self._directory) as folder:
            folder.write(name, comment + _text(program))
        self.names.append(name)


def _text(program: LinearProgram) -> str:
    """The program in CPLEX's LP format, as PuLP writes it to a path."""
    with tempfile.TemporaryDirectory(prefix="ssdplan-") as private:
        path = Path(private) / "program.lp"
        program.problem.writeLP(path)
        return path.read_text()
