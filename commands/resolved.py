"""Options in files: how they are written to run.json, and read back.

Owns the form of options in a run's run.json, so that a run that goes on needs none repeated, and the checks of files of
options, this one and configurations (`configuration.py`): each value is checked as if it were written on the command
line. What the options mean is the command's business.
"""

import glob
import os
import shlex
import textwrap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import click

from ssdplan.plans.documents.run import OptionValue
from ssdplan.plans.errors import UsageError

from .parsing.command import Command
from .parsing.suggestions import hint, long_names
from .parsing.types import FIGURE, SIZE, SIZE_OR_ZERO
from .parsing.words import may_stand_alone

LINE_COLUMNS = 100
_PATTERNS = ("data", "eval_data")
"""Options that take a pattern too."""


def over(above: Mapping[str, Any], below: Mapping[str, Any], command: Command) -> dict[str, Any]:
    """What was given in two places, where `above` counts: an option also takes the place of those that it excludes."""
    left = dict(below)
    for names in command.exclusive:
        if above.keys() & names:
            left = {name: value for name, value in left.items() if name not in names}
    return left | dict(above)


def as_kept(options: Mapping[str, Any], without: Collection[str]) -> dict[str, OptionValue]:
    """Options as run.json has them, all but those named `without`: as one would write them, with absolute paths."""

    def text(name: str, value: object) -> str:
        if isinstance(value, Path):
            return str(seen_from(Path.cwd(), name, value))
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    kept: dict[str, OptionValue] = {}
    for name, value in options.items():
        if name in without or value is None or value == []:
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


def words_of(command: Command, values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give a command's options, by name, these values; paths are absolute then."""
    params = {param.name: param for param in command.params}
    kept = as_told(command, values)
    return [word for name, value in kept.items() for word in _words(params[name], value, flag_of(name))]


def as_told(command: Command, values: Mapping[str, Any]) -> dict[str, OptionValue]:
    """The values of a command's options, by name, as one would write them, with absolute paths."""
    types = {param.name: param.type for param in command.params}

    def written(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [written(name, each) for each in value]
        if isinstance(value, dict):
            return ",".join(f"{key}={share!r}" for key, share in value.items())
        if types[name] is FIGURE and not isinstance(value, str):
            return "{}={!r}".format(*value)
        return f"{value}B" if types[name] in (SIZE, SIZE_OR_ZERO) and isinstance(value, int) else value

    return as_kept({name: written(name, value) for name, value in values.items()}, ())


def restored(command: Command, kept: Mapping[str, OptionValue], source: Path) -> dict[str, Any]:
    """The options that run.json, which is `source`, has kept, by name. Raises UsageError."""
    return checked(command, kept, lambda param: param.name, lambda name: f"{source}: options.{name}")


def checked(
    command: Command,
    values: Mapping[str, OptionValue],
    name_of: Callable[[click.Parameter], str],
    where: Callable[[str], str],
) -> dict[str, Any]:
    """The options that a file gives, by name, checked as if they were written on the command line.

    `name_of` says how the file calls an option, `where` how an error names what stands there under a name. Raises
    UsageError for an unknown name, with the nearest one, and for a value that the option does not take.
    """
    params = {name_of(param): param for param in command.params}
    options: list[str] = []
    arguments: list[str] = []
    for name, value in values.items():
        if name not in params:
            raise UsageError(f"{where(name)}: unknown key; {_meant(name, list(params), command.name or 'run')}")
        param = params[name]
        (options if isinstance(param, click.Option) else arguments).extend(_words(param, value, where(name)))
    try:
        context = command.parse([*options, *(["--", *arguments] if arguments else ())])
    except click.BadParameter as error:
        blamed = next((name for name, param in params.items() if param is error.param), "")
        raise UsageError(f"{where(blamed)}: {error.message}") from error
    # False is said as clearly as true, though there may be no flag to say it.
    return command.given(context) | {params[name].name: False for name, value in values.items() if value is False}


def _meant(name: str, keys: Collection[str], called: str) -> str:
    """What to say of a key that is not among `keys`, which are the options of the command of that name."""
    from . import profile, solve

    written = {key.replace("_", "-"): key for key in keys}
    options = {called: list(written), "solve": long_names(solve.command()), "profile": long_names(profile.command())}
    told = name.removeprefix("no-") if name.removeprefix("no-") in written else name
    return hint(told, called, options, written.__getitem__) or f"ssdplan {called} --help has all options"


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def negated(flag: str) -> str:
    return "--no-" + flag.removeprefix("--")


def _words(param: click.Parameter, value: OptionValue, where: str) -> list[str]:
    """The words that give an option this value. Raises UsageError, `where` naming the place."""
    option = param if isinstance(param, click.Option) else None
    flag = option.opts[0] if option else ""
    if option and option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {value!r} is neither true nor false")
        return [flag] if value else option.secondary_opts
    if isinstance(value, bool) and option and may_stand_alone(option):
        return [flag] if value else []
    if isinstance(value, bool):
        raise UsageError(f"{where}: takes a value, not {str(value).lower()}")
    if isinstance(value, tuple) and not param.multiple:
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
