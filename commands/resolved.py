"""Options that were given, those that were not, and those that a file gives.

Owns how options are kept in files and read back, each value checked as if it were written on the command line: a run's
run.json, so that a run that goes on needs none repeated, and configurations (`configuration`). What they mean is the
command's business.
"""

import argparse
import glob
import os
import shlex
import textwrap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ssdplan.plans.errors import UsageError

from .options import Default
from .suggestions import hint, long_names

OptionValue = bool | str | tuple[str, ...]
AddOptions = Callable[[argparse.ArgumentParser], None]

LINE_COLUMNS = 100
_PATTERNS = ("data", "eval_data")
"""Options that take a pattern too."""


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


def over(above: Mapping[str, Any], below: Mapping[str, Any], add_options: AddOptions) -> dict[str, Any]:
    """What was given in two places, where `above` counts: an option also takes the place of those that it excludes."""
    left = dict(below)
    for group in _parser(add_options)._mutually_exclusive_groups:
        names = {action.dest for action in group._group_actions}
        if names & above.keys():
            left = {name: value for name, value in left.items() if name not in names}
    return left | dict(above)


def as_kept(options: argparse.Namespace, without: Collection[str]) -> dict[str, OptionValue]:
    """Resolved options as run.json has them: as one would write them, paths absolute, but those named `without`."""

    def text(name: str, value: object) -> str:
        if isinstance(value, Path):
            return str(seen_from(Path.cwd(), name, value))
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    kept: dict[str, OptionValue] = {}
    for name, value in vars(options).items():
        if name in without or value is None:
            continue
        if isinstance(value, bool):
            kept[name] = value
        else:
            kept[name] = tuple(text(name, each) for each in value) if isinstance(value, list) else text(name, value)
    return kept


def seen_from(directory: Path, name: str, path: Path) -> Path:
    """The path that an option `name` means which was given in `directory`. Of data it may be a pattern; then characters
    of the directory's own name stand for themselves."""
    found = directory / path
    if name not in _PATTERNS or path.is_absolute() or found.exists() or glob.escape(str(path)) == str(path):
        return found
    return Path(glob.escape(str(directory))) / path


def as_written(kept: Mapping[str, OptionValue]) -> str:
    """Kept options as one would write them after the command, in lines of at most 100 columns if possible."""
    words: list[str] = []
    for name, value in kept.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            words.append(flag if value else negated(flag))
        else:
            words += [f"{flag} {shlex.quote(each)}" for each in ((value,) if isinstance(value, str) else value)]
    # An option and its value stay on one line: their space is none for as long as lines are made.
    lines = textwrap.wrap(
        " ".join(word.replace(" ", "\0") for word in words),
        LINE_COLUMNS,
        expand_tabs=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")


def restored(add_options: AddOptions, kept: Mapping[str, OptionValue], source: Path) -> dict[str, Any]:
    """The options that run.json, which is `source`, has kept, by the names of `given`. Raises UsageError."""
    return checked(add_options, kept, lambda action: action.dest, lambda name: f"{source}: options.{name}")


def checked(
    add_options: AddOptions,
    values: Mapping[str, OptionValue],
    name_of: Callable[[argparse.Action], str],
    where: Callable[[str], str],
) -> dict[str, Any]:
    """What a file gives, checked as if it were written on the command line, by the names of `given`.

    `name_of` says what an option is called in the file, `where` how an error names what stands there under a name.
    Raises UsageError for an unknown name, with the nearest one, and for a value that the option does not take.
    """
    parser = _parser(add_options)
    actions = {name_of(action): action for action in parser._actions}
    arguments: list[str] = []
    positional: list[str] = []
    for name, value in values.items():
        if name not in actions:
            raise UsageError(f"{where(name)}: unknown key; {_meant(name, list(actions))}")
        action = actions[name]
        (arguments if action.option_strings else positional).extend(_arguments(action, value, where(name)))
    try:
        options = parser.parse_args([*arguments, *(["--", *positional] if positional else ())])
    except argparse.ArgumentError as error:
        blamed = next(
            (name for name, action in actions.items() if argparse._get_action_name(action) == error.argument_name), ""
        )
        raise UsageError(f"{where(blamed)}: {error.message}") from error
    for name, value in values.items():
        if value is False:  # said as clearly as true, though there may be no flag to say it
            setattr(options, actions[name].dest, False)
    return {name: value for name, value in given(options).items() if name in {actions[key].dest for key in values}}


def _meant(name: str, keys: Collection[str]) -> str:
    """What to say of a key of `ssdplan run`'s options that is not among `keys`."""
    from . import profile, solve

    written = {key.replace("_", "-"): key for key in keys}
    options = {"run": list(written)}
    for command, module in (("solve", solve), ("profile", profile)):
        options[command] = long_names(_parser(module.add_options))
    told = name.removeprefix("no-") if name.removeprefix("no-") in written else name
    return hint(told, "run", options, written.__getitem__) or "ssdplan run --help has all options"


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def negated(flag: str) -> str:
    return "--no-" + flag.removeprefix("--")


def _parser(add_options: AddOptions) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    add_options(parser)
    return parser


def _arguments(action: argparse.Action, value: OptionValue, where: str) -> list[str]:
    """The arguments that give an option this value. Raises UsageError, `where` naming the place."""
    flag = action.option_strings[0] if action.option_strings else ""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {value!r} is neither true nor false")
        without = negated(flag) if negated(flag) in action.option_strings else ""
        return [flag] if value else [without] if without else []
    if isinstance(value, bool) and action.nargs == "?":
        return [flag] if value else []
    if isinstance(value, bool):
        raise UsageError(f"{where}: takes a value, not {str(value).lower()}")
    if isinstance(value, tuple) and not isinstance(action, argparse._AppendAction):
        raise UsageError(f"{where}: takes one value, not a list of {len(value)}")
    each = (value,) if isinstance(value, str) else value
    for one in each:
        try:
            possible = b"\0" not in os.fsencode(one)
        except UnicodeEncodeError:
            possible = False
        if not possible:  # nor could it stand on a command line
            raise UsageError(f"{where}: {one!r} has characters that no option can have")
    return [f"{flag}={one}" if flag else one for one in each]
