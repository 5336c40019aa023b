"""The options of `ssdplan train`: those of `ssdplan profile`, `solve` and `run`, made by these commands themselves.

Owns which of them it leaves out, and why; and which command is told what. It has no copy of any option.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from .. import profile, run, solve
from ..parsing.command import Argument, Command, Section
from ..parsing.types import PATH

COMMANDS = ("profile", "solve", "run")
_MAKE = {"profile": profile.command, "solve": solve.command, "run": run.command}
_VERB = {"profile": "Measuring", "solve": "Planning", "run": "Training"}
_DEFAULT = re.compile(r" \[[^][]*\]$")
"""At the end of an option's help, what its own command takes."""
FIRST = ("model", "data", "out", "steps", "epochs")
"""What stands first in the help: what to train, on what, where, and for how long."""
_WHAT_IF = "a what-if plans for another machine, and this trains on the one that is here"
CHOSEN = {
    "epochs": "1, without --steps",
    "sequence_length": "by the data, 128 to 1024",
    "micro_batch_sizes": "those of 1, 2 and 4 of which the batch can be made",
    "device": "a GPU, where driver and torch have one; else cpu",
    "volume": "RUN",
    "host_memory": "a half of what is free",
    "optimizer": "adamw",
    "global_batch": "by the data: an eighth of an epoch, at most 32",
    "snapshot_minutes": "10, where the drive has room and --snapshot-every is not given",
    "ranks": "1",
}
"""What train takes where nobody says, in the help's words (docs/train.md); of other options, what their commands do."""
_ITS_OWN = "train keeps its profile and its plan in RUN"
LEFT_OUT: dict[str, dict[str, str]] = {
    "profile": {
        "emulate": "nothing is measured then, and the model is a stand-in: use the three commands",
        "json": _ITS_OWN,
        "rungs_of": "it goes with --emulate",
        "optimizer": "the --optimizer of solve says it, and train measures for that",
        "output": _ITS_OWN,
        "quiet": "train says what it has to say",
    },
    "solve": {
        "profile": "--from-profile names one",
        **dict.fromkeys(
            ("model", "gpu", "ssd", "cpu", "link", "nodes", "network", "figure", "sequence_length", "rows"), _WHAT_IF
        ),
        **dict.fromkeys(("micro_batch_sizes", "precision"), _WHAT_IF),
        **dict.fromkeys(("sweep", "plots", "csv"), "a sweep trains nothing"),
        **dict.fromkeys(("tokens", "price", "power", "power_price"), "train says how long its own steps take"),
        "json": _ITS_OWN,
        "output": _ITS_OWN,
        "full": "ssdplan show RUN prints all of the plan",
        "quiet": "train says what it has to say",
    },
    "run": {
        "plan": "--from-profile names what to plan by; a plan is for ssdplan run",
        "model": "--model names the one that is measured",
        "resume": "the same command again goes on with a run in RUN",
    },
}
"""For each command the parameters that train does not take from it, and why. All others it takes."""


@dataclass(frozen=True)
class Options:
    """All options by name, with defaults; `given` names those that the user gave on the command line."""

    values: Mapping[str, Any]
    given: frozenset[str]

    @classmethod
    def of(cls, given: frozenset[str], **values: Any) -> "Options":
        """What the command line makes of its words. The names are those of `sections`, which click has checked."""
        return cls(values, given)


def takes(command: str) -> dict[str, click.Parameter]:
    """The parameters that a command is told of what train is told, by name."""
    return {param.name: param for param in _MAKE[command]().params if param.name not in LEFT_OUT[command]}


def exclusive() -> tuple[tuple[str, ...], ...]:
    return tuple(names for make in _MAKE.values() for names in make().exclusive)


def argument() -> Argument:
    return Argument(
        ["configuration"],
        type=PATH,
        default=None,
        metavar="CONFIG",
        help="a file whose name ends in .yaml or .yml: lines of `option: value` with the long names of these options; "
        "options on the command line count over it",
    )


def sections() -> tuple[Section, ...]:
    """The sections of the three commands, after one of what stands first."""
    taken: dict[str, click.Option] = {}
    sections: list[Section] = []
    for name, make in _MAKE.items():
        command: Command = make()
        for section in command.sections:
            new = [
                option
                for option in section.options
                if option.name not in LEFT_OUT[name] and option.name not in taken and option.name not in FIRST
            ]
            taken |= {option.name: option for option in section.options if option.name not in LEFT_OUT[name]}
            if new:
                title = f"{section.title[0].lower()}{section.title[1:]}"
                sections.append(Section(f"{_VERB[name]}: {title}", tuple(new)))
    first = [_of(taken, name) for name in FIRST]
    source = click.Option(
        ["--from-profile"],
        type=PATH,
        metavar="FILE",
        help="take this profile of another run, and measure nothing; it has to be of this machine, model and drive "
        "[RUN/profile.json, where that is still valid]",
    )
    for option in (*first, *(each for section in sections for each in section.options)):
        if words := CHOSEN.get(option.name or ""):
            option.help, option.default = f"{_DEFAULT.sub('', option.help or '')} [{words}]", None
    return (Section("What to train, on what, and where", (*first, source)), *sections)


def _of(taken: Mapping[str, click.Option], name: str) -> click.Option:
    option = taken[name]
    option.required = False  # a configuration may have it
    return option
