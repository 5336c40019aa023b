"""Options that were given, those that were not, and those that a run was started with.

Owns how `ssdplan run` keeps its options in run.json and reads them back, so that a run that goes on needs none
repeated. What they mean is the command's business.
"""

import argparse
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ssdplan.plans.errors import UsageError

from .options import Default

OptionValue = bool | str | tuple[str, ...]


def mark_defaults(parser: argparse.ArgumentParser) -> None:
    """Let `given` tell the defaults of the options so far from what a user gives."""
    for action in parser._actions:
        if action.default is not None and action.default != argparse.SUPPRESS:
            action.default = Default(action.default)


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The options that the user gave."""
    return {
        name: value for name, value in vars(options).items() if value is not None and not isinstance(value, Default)
    }


def resolved(options: argparse.Namespace) -> argparse.Namespace:
    """All options, those that were not given with their defaults."""
    return argparse.Namespace(
        **{name: value.value if isinstance(value, Default) else value for name, value in vars(options).items()}
    )


def as_kept(options: argparse.Namespace, without: Collection[str]) -> dict[str, OptionValue]:
    """Resolved options as run.json has them: as one would write them, paths absolute, but those named `without`."""

    def text(value: object) -> str:
        if isinstance(value, Path):
            return str(value.absolute())
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    kept: dict[str, OptionValue] = {}
    for name, value in vars(options).items():
        if name in without or value is None:
            continue
        if isinstance(value, bool):
            kept[name] = value
        else:
            kept[name] = tuple(map(text, value)) if isinstance(value, list) else text(value)
    return kept


def restored(
    add_options: Callable[[argparse.ArgumentParser], None], kept: Mapping[str, OptionValue], source: Path
) -> argparse.Namespace:
    """The options that run.json, which is `source`, has kept, checked as if they were given. Raises UsageError."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    add_options(parser)
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    arguments: list[str] = []
    for name, value in kept.items():
        if name not in actions:
            near = get_close_matches(name, actions, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{source}: options.{name}: unknown key{hint}")
        flag = actions[name].option_strings[0]
        if isinstance(value, bool):
            negated = "--no-" + flag.removeprefix("--")
            if value or negated in actions[name].option_strings:
                arguments.append(flag if value else negated)
        else:
            for each in (value,) if isinstance(value, str) else value:
                arguments.append(f"{flag}={each}")
    try:
        return resolved(parser.parse_args(arguments))
    except argparse.ArgumentError as error:
        raise UsageError(f"{source}: options: {error}") from error
