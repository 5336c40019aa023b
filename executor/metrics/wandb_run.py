"""Weights & Biases: a run's metrics as the history of one of its runs.

Owns the package `wandb`, an optional dependency. The package sends in threads and a process of its own, so a slow
network holds no step up; whether it sends at all, WANDB_MODE says.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ssdplan.plans.errors import UsageError, first_line

from .metrics import Line, tagged

_OUT = "of a run that goes on: --wandb ''"
_INSTALL = f"pip install wandb (or ssdplan[wandb]), or leave it out ({_OUT})"


def require_wandb() -> Any:
    """The package. Raises UsageError where it is not installed."""
    try:
        package = import_module("wandb")
    except ImportError as error:
        raise UsageError(f"--wandb needs the package wandb ({error}): {_INSTALL}") from error
    if not hasattr(package, "init"):  # a directory of that name is a package to Python
        raise UsageError(f"--wandb needs the package wandb: {_INSTALL}")
    return package


class WandbRun:
    """A run at Weights & Biases. One that goes on sends what is not there yet: the same steps have the same losses."""

    name = "Weights & Biases"

    def __init__(
        self, project: str, *, directory: Path, identity: str, resumed: bool, settings: Mapping[str, Any]
    ) -> None:
        """`project`: PROJECT or ENTITY/PROJECT. `directory`: the run's. `identity`: which run it is there. `settings`:
        what the run was started with, to be shown beside it.

        Raises UsageError where it cannot begin: nobody logged in, no such entity, no network.
        """
        package = require_wandb()
        entity, _, name = project.rpartition("/")
        try:
            self._run = package.init(
                project=name,
                entity=entity or None,
                id=identity,
                name=directory.absolute().name,
                dir=str(directory.absolute()),
                resume="allow" if resumed else None,
                config=dict(settings),
                settings=package.Settings(console="off"),
            )
        except Exception as error:  # whatever the package raises
            reason = first_line(error).rstrip(".")
            raise UsageError(
                f"--wandb {project}: {reason}; run wandb login, set WANDB_MODE=offline, or leave it out ({_OUT})"
            ) from error

    def write(self, line: Line) -> None:
        """All numbers of the line, at its step. Raises what the package raises."""
        step, values = tagged(line)
        if step >= self._run.step:
            self._run.log(values, step=step)

    def close(self, *, failed: bool) -> None:
        """Returns when all is sent."""
        self._run.finish(exit_code=1 if failed else 0)
