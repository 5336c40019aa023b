"""ssdplan from Python: `profile`, `solve`, `train` and `show`, for scripts and notebooks.

Owns how a call becomes a command, and what comes back: the documents' own classes, and a finished run. Every option of
a command is a keyword argument, by its long name with `_` for `-`, and means and is checked as there. Measuring and
planning are processes of their own; training happens in this one, so that a callback sees each step. Nothing here loads
torch before it trains.
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdplan.plans.documents.metrics import METRICS, REPORT, StepMetrics
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.documents.run import MODEL, PLAN
from ssdplan.plans.errors import UsageError, WrongTypeError
from ssdplan.plans.views.page.board import Board

if TYPE_CHECKING:
    from pandas import DataFrame

    from ssdplan.commands.parsing.command import Command

__all__ = ["Board", "Plan", "Profile", "Shown", "StepMetrics", "Trained", "profile", "show", "solve", "train"]

Value = bool | int | float | str | Path | Sequence[int] | Sequence[str] | Sequence[Path] | None
"""Of an option: sizes are text such as "8GiB", or bytes; None is as if it were not given."""
Draw = Callable[[Board], None]
_PRINTED = "it changes what the command prints, and from Python nothing is printed; leave it out"
_SWEEP = "a sweep is a table, not a plan: ssdplan solve --sweep on the command line makes it"
_NOT_FROM_PYTHON: Mapping[str, Mapping[str, str]] = {
    "profile": dict.fromkeys(("json", "quiet"), _PRINTED),
    "solve": {**dict.fromkeys(("json", "quiet", "full"), _PRINTED), **dict.fromkeys(("sweep", "plots", "csv"), _SWEEP)},
    "train": {
        "json": f"{_PRINTED}; the report is in `report`",
        "ranks": "ranks are processes: ssdplan train --ranks R on the command line starts them",
    },
    "show": {},
}
_HARMLESS = {"ranks": 1}
"""Of what is not from Python the values that say nothing."""


class Shown(str):
    """Text that a notebook shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Trained:
    """A run in its directory: finished, or stopped and able to go on."""

    directory: Path

    def __post_init__(self) -> None:
        from ssdplan.commands.parsing.from_python import require_path

        require_path(self.directory, "Trained(directory=...)")
        object.__setattr__(self, "directory", Path(self.directory))

    @cached_property
    def plan(self) -> Plan:
        """The plan that it trained by."""
        return Plan.load(self.directory / PLAN)

    @cached_property
    def report(self) -> Mapping[str, Any]:
        """report.json: each prediction beside its measurement. Raises UsageError for a run that has not ended."""
        from ssdplan.plans.views.report_text import report_json

        path = self.directory / REPORT
        if not path.is_file():
            raise UsageError(f"{path}: is not there; a run writes it when it ends")
        import json

        found: Mapping[str, Any] = json.loads(report_json(path, None))
        return found

    @property
    def metrics(self) -> "DataFrame":
        """A row a step, by the names of docs/metrics.md; read anew each time, also while the run goes on."""
        from ssdplan.plans.analysis.curves import EVERY, read_curves

        return read_curves(self.directory / METRICS, EVERY).table()

    @property
    def model(self) -> Path:
        """The trained model's directory, for `from_pretrained`."""
        return self.directory / MODEL


def profile(
    model: str | Path, *, output: str | Path | None = None, progress: Draw | None = None, **options: Value
) -> Profile:
    """Measure this machine and a model, as `ssdplan profile` does, in a process of its own.

    `output`: also keep the document there. `options`: `sequence_length=1024`, `micro_batch_sizes=[1, 2]`,
    `volume="nvme"`, ... `progress`: draws the board whenever it changes; by default in the notebook, else as lines on
    standard error. Raises the errors of `ssdplan.plans.errors`.
    """
    from ssdplan.commands import profile as command

    board = Board("profile")
    _require("profile", progress=progress, model=model, output=output)
    words = _words(command.command(), {"model": model, **options}, "profile")
    with _file(output, "profile.json") as path:
        _child(["profile", *words, f"--output={path}", "--quiet"], board, progress)
        return Profile.load(path)


def solve(
    profile: Profile | str | Path | None = None,
    *,
    output: str | Path | None = None,
    progress: Draw | None = None,
    **options: Value,
) -> Plan:
    """The best plan for a profile, or without one for a machine of the catalogue (`model=`, `gpu=`, `ssd=`,
    `host_memory=`), as `ssdplan solve` finds it, in a process of its own.

    Raises InfeasibleError where nothing fits the budgets, and the other errors of `ssdplan.plans.errors`.
    """
    from ssdplan.commands import solve as command

    board = Board("solve")
    _require("solve", progress=progress, output=output)
    with _file(output, "plan.json") as path, _file(None, "profile.json") as kept:
        if isinstance(profile, Profile):
            profile.save(kept)
            profile = kept
        words = _words(command.command(), {**options, "profile": profile}, "solve")
        _child(["solve", *words, f"--output={path}", "--quiet"], board, progress)
        return Plan.load(path)


def train(
    model: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    on_step: Callable[[StepMetrics], bool | None] | None = None,
    progress: Draw | None = None,
    **options: Value,
) -> Trained:
    """Measure, plan and train, as `ssdplan train` does, with everything chosen that is not given: `epochs=3`,
    `host_memory="8GiB"`, `lr=2e-5`, ... Where `out` has a run that can go on, it goes on.

    `on_step` is called after each step with its line of metrics. When it returns True the run ends there as if that
    step had been its last, with its model. An exception that it raises ends the run too; what a run with snapshots has
    then is what its last snapshot had. An interrupt (the notebook's stop button) takes a snapshot first, and raises
    KeyboardInterrupt.
    """
    from ssdplan.commands import run
    from ssdplan.commands.parsing import options as of
    from ssdplan.commands.train import command as train_command
    from ssdplan.commands.train.entry import prepare, with_configuration
    from ssdplan.plans.views.progress_line import ProgressLine

    _require("train", progress=progress, on_step=on_step, model=model, data=data, out=out)
    of.require_engine()
    board = Board("train")
    given = with_configuration(_given(train_command(), {"model": model, "data": data, "out": out, **options}, "train"))
    lines = _Lines(board, _drawing(progress))
    made = run.command()

    def length(steps: int) -> None:
        board.steps = steps

    def step(metrics: StepMetrics) -> bool | None:
        board.step = metrics.step
        board.losses.append(metrics.loss)
        lines.draw(board)
        return on_step(metrics) if on_step else None

    ready = prepare(given, ProgressLine("train", lines), lines.take)
    context = made.parse(_words(made, dict(ready.run), "train"))
    asked = run.Options(**made.values(context), given=frozenset(made.given(context)))
    run.call(asked, run.Listener(lines, length, step))
    return Trained(ready.out)


def show(
    what: Profile | Plan | Trained | str | Path,
    *,
    plots: str | Path | None = None,
    html: str | Path | None = None,
    **options: Value,
) -> Shown:
    """What `ssdplan show` prints of a profile, a plan or a run; `plots` and `html` also write its pictures and page."""
    from ssdplan.commands import show as command

    if not isinstance(what, Profile | Plan | Trained | str | Path):
        raise WrongTypeError(f"show(what=...): takes a Profile, a Plan, a Trained or a path, not {what!r:.80}")
    made, said = command.command(), io.StringIO()
    with _file(None, "document.json") as kept:
        if isinstance(what, Profile | Plan):
            what.save(kept)
        there = kept if isinstance(what, Profile | Plan) else what.directory if isinstance(what, Trained) else what
        asked = {"document": Path(there), **options, "plots": plots, "html": html}
        context = made.parse(_words(made, asked, "show"))
        with contextlib.redirect_stdout(said):
            command.call(command.Options(**made.values(context)))
    return Shown(said.getvalue())


def _words(command: "Command", options: Mapping[str, Any], called: str) -> list[str]:
    """The words of a command line that say the same. Raises UsageError for what a command does not take."""
    from ssdplan.commands.resolved import words_of

    return words_of(command, _given(command, options, called))


def _given(command: "Command", options: Mapping[str, Any], called: str) -> dict[str, Any]:
    """The options that were given, by name, each as the command line has it. Raises UsageError, WrongTypeError for a
    value whose type an option does not take."""
    from ssdplan.commands.parsing.from_python import own_names, typed
    from ssdplan.commands.resolved import as_told, checked

    def where(name: str) -> str:
        return f"{called}({name}=...)"

    said = own_names(command, options, where)
    for name, why in _NOT_FROM_PYTHON[called].items():
        if said.get(name, False) is not False and said[name] != _HARMLESS.get(name):
            raise UsageError(f"{where(name)}: {why}")
    command.name = called
    params = {param.name: param for param in command.params}
    known = {name: typed(params[name], value, where(name)) for name, value in said.items() if name in params}
    unknown = {name: str(value) for name, value in said.items() if name not in params}
    told = {**as_told(command, known), **unknown}
    return checked(command, told, lambda param: param.name, where)


def _require(called: str, **arguments: Any) -> None:
    """Raise WrongTypeError for an argument of a function that is none: a place that has to be known, and what is
    called back."""
    from ssdplan.commands.parsing.from_python import require_path

    for name, value in arguments.items():
        where = f"{called}({name}=...)"
        if name in ("progress", "on_step"):
            if value is not None and not callable(value):
                raise WrongTypeError(f"{where}: takes a function, not {value!r:.80}")
        elif name != "output" or value is not None:
            require_path(value, where)


@contextlib.contextmanager
def _file(output: str | Path | None, name: str) -> Iterator[Path]:
    """Where a document is written: `output`, or a place that is gone afterwards."""
    if output is not None:
        yield Path(output)
        return
    with tempfile.TemporaryDirectory(prefix="ssdplan-") as folder:
        yield Path(folder) / name


def _child(words: Sequence[str], board: Board, progress: Draw | None) -> None:
    from ssdplan.commands.train.children import do

    do(words, _Lines(board, _drawing(progress)).take)


class _Lines(io.StringIO):
    """A stream whose lines go to a board, which is drawn again with each."""

    def __init__(self, board: Board, draw: Draw) -> None:
        super().__init__()
        self.board, self.draw = board, draw

    def write(self, text: str) -> int:
        for line in text.splitlines():
            self.take(line)
        return len(text)

    def take(self, line: str) -> None:
        self.board.tell(line)
        self.draw(self.board)


def _drawing(progress: Draw | None) -> Draw:
    """What the user gave; else in a notebook one output that changes, and elsewhere lines on standard error."""
    if progress is not None:
        return progress
    notebook = sys.modules.get("IPython")
    shell = notebook.get_ipython() if notebook else None
    if notebook is None or getattr(shell, "kernel", None) is None:
        return _Printed()
    handle = notebook.display.display(Board(""), display_id=True)
    draw: Draw = handle.update
    return draw


class _Printed:
    """Prints a board's newest line, once."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, board: Board) -> None:
        if board.text != self._last:
            self._last = board.text
            print(board.text, file=sys.stderr, flush=True)
