"""Reporting: sends a run's metrics to TensorBoard and Weights & Biases too.

Owns which of them were asked for, and that none of them ends a run or changes it. Each gets every line of
metrics.jsonl; one that fails is reported and left. metrics.jsonl itself is not optional.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from ssdplan.plans.documents.metrics import METRICS
from ssdplan.plans.documents.run import OptionValue
from ssdplan.plans.errors import first_line
from ssdplan.plans.files import Folder

from .event_file import EventFile
from .metrics import Line, lines
from .wandb_run import WandbRun, require_wandb


class Sink(Protocol):
    """A place that gets the lines of metrics.jsonl in their order. Both verbs may raise anything."""

    name: str

    def write(self, line: Line) -> None: ...

    def close(self, *, failed: bool) -> None:
        """The last verb. `failed`: the run did not come to its end."""
        ...


@dataclass(frozen=True)
class Reports:
    """What was asked for."""

    tensorboard: Path | None = None
    """A directory for event files; a relative one lies in the run's own directory."""
    wandb: str | None = None
    """PROJECT or ENTITY/PROJECT."""

    def require_packages(self) -> None:
        """Raise UsageError where one that is needed is not installed."""
        if self.wandb:
            require_wandb()

    def open(
        self,
        folder: Folder,
        step: int,
        *,
        resumed: bool,
        identity: Callable[[], str],
        settings: Mapping[str, OptionValue],
        note: Callable[[str], None],
    ) -> "Reporting":
        """Begin, for the run whose directory is `folder`, with `step` steps behind it, whose lines are in its
        metrics.jsonl. `identity` gives the run's name at Weights & Biases, `settings` are its options. Raises
        UsageError where one cannot begin."""
        sinks: list[Sink] = []
        try:
            if self.tensorboard:
                if len(self.tensorboard.parts) == 1 and not self.tensorboard.is_absolute():
                    folder.require_no_link(self.tensorboard.name)
                events = EventFile(folder.path / self.tensorboard, step=step, resumed=resumed)
                sinks.append(events)
                if step and events.is_first:
                    for line in lines(folder):
                        events.write(line)
            if self.wandb:
                folder.require_no_link("wandb")  # where the package writes
                sinks.append(
                    WandbRun(
                        self.wandb,
                        directory=folder.path,
                        identity=identity(),
                        resumed=resumed,
                        settings=settings,
                    )
                )
        except BaseException:
            for sink in sinks:
                sink.close(failed=True)
            raise
        return Reporting(sinks, note)


class Reporting:
    """Sinks, each for as long as it works."""

    def __init__(self, sinks: Sequence[Sink], note: Callable[[str], None]) -> None:
        self._sinks, self._note = list(sinks), note
        self._left: list[str] = []

    def write(self, line: Line) -> None:
        for sink in tuple(self._sinks):
            try:
                sink.write(line)
            except Exception as error:  # whatever a package raises: training goes on without it
                self._sinks.remove(sink)
                where = f"{sink.name} got no more than the lines before step {line['step']}"
                self._left.append(f"{where} ({first_line(error)}); {METRICS} has all")
                self._note(f"{where} and is left: {first_line(error)}; the run goes on")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for sink in self._sinks:
            try:
                sink.close(failed=kind is not None)
            except Exception as broken:
                self._left.append(f"{sink.name} may lack the last lines: {first_line(broken)}; {METRICS} has all")
        for words in self._left:  # once more: the first time may be days ago
            self._note(words)
