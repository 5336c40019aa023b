"""Configurations: the options of `ssdplan run` in a YAML file.

Owns what such a file looks like, read and written: one mapping from the long names of options, and `plan`, to values.
Values are text until the command line's own checks have seen them, so 1e-5 is a number here as it is there; YAML's
tags, anchors and nested collections have no meaning here and are refused. What is parsed is hostile until checked.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import click
import yaml

from ssdplan.plans.documents.run import OptionValue
from ssdplan.plans.errors import UsageError
from ssdplan.plans.files import read_bounded

from .parsing.command import Command
from .parsing.suggestions import aliases
from .resolved import checked, flag_of, seen_from

SUFFIXES = (".yaml", ".yml")
MOST_BYTES = 1 << 16
MOST_SHOWN = 60
"""Characters of a key; no option's name is as long."""
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NOTHING = ("", "~", "null", "Null", "NULL")


def is_configuration(path: Path) -> bool:
    """By its name: a plan is JSON."""
    return path.suffix.lower() in SUFFIXES


def key_of(param: click.Parameter) -> str:
    """How a configuration calls an option: by its long name without the dashes."""
    long = [flag for flag in param.opts if flag.startswith("--")]
    return long[0].removeprefix("--") if long else param.name


def read_configuration(path: Path, command: Command) -> dict[str, Any]:
    """The options of a command that a configuration gives, by name; checked as if they stood on the command line.

    Paths are relative to the file, and `~` is the user's home. Raises UsageError, one line: the file, the line, the key
    and what is wrong."""
    entries, lines = _entries(path, command)
    options = checked(
        command,
        entries,
        key_of,
        lambda key: f"{path}:{lines[key]}: {key}" if key in lines else str(path),
    )
    return {name: _anchored(name, value, path) for name, value in options.items()}


def configuration(kept: Mapping[str, OptionValue], plan: str, volumes: Sequence[str]) -> str:
    """What `read_configuration` reads back: options as run.json has them, the plan's name beside the file, volumes."""
    entries: dict[str, object] = {"plan": plan, **({"volume": list(volumes)} if volumes else {})}
    for name, value in kept.items():
        entries[flag_of(name).removeprefix("--")] = list(value) if isinstance(value, tuple) else value
    text: str = yaml.dump(entries, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=2**20)
    return f"# ssdplan run THIS-FILE --out NEW-RUN trains the same again.\n{text}"


class _PlainDumper(yaml.SafeDumper):
    """Numbers are text here, and need no quotes."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":bool", ":null"))]
        for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


def _anchored(name: str, value: Any, source: Path) -> Any:
    """The value of an option with its paths seen from the file that gives it."""
    if isinstance(value, list):
        return [_anchored(name, each, source) for each in value]
    if isinstance(value, Path):
        return seen_from(source.parent, name, _at_home(value, source))
    if name == "model" and (value.startswith((".", "~")) or (source.parent / value).exists()):
        return str(source.parent / _at_home(Path(value), source))  # else a name, as on the hub
    return value


def _at_home(path: Path, source: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UsageError(f"{source}: {path}: no home of this user is known") from error


def _entries(path: Path, command: Command) -> tuple[dict[str, OptionValue], dict[str, int]]:
    """What the file says under each key, by the command's own name for it, and in which line. Raises UsageError."""
    own = [key_of(param) for param in command.params]
    others = aliases(own)
    entries: dict[str, OptionValue] = {}
    lines: dict[str, int] = {}
    events = _Events(path)
    if not events.begin():
        return entries, lines
    while (event := events.take()) and not isinstance(event, yaml.MappingEndEvent):
        if not isinstance(event, yaml.ScalarEvent):
            raise UsageError(f"{events.here}: a key is the name of an option, not a list or a mapping")
        key = _one_line(event.value)[:MOST_SHOWN]
        key = others.get(key.replace("_", "-"), key)
        if key in entries:
            raise UsageError(f"{events.here}: {key}: was given in line {lines[key]} already")
        lines[key] = events.line
        entries[key] = _value(events, key)
    events.end()
    return entries, lines


def _value(events: "_Events", key: str) -> OptionValue:
    event, where = events.take(), f"{events.here}: {key}"
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event, where)
    if not isinstance(event, yaml.SequenceStartEvent):
        raise UsageError(f"{where}: has keys below it; all keys stand on the left, each with its value")
    several: list[str] = []
    while not isinstance(event := events.take(), yaml.SequenceEndEvent):
        where = f"{events.here}: {key}"
        value = _scalar(event, where) if isinstance(event, yaml.ScalarEvent) else True
        if isinstance(value, bool):
            raise UsageError(f"{where}: a list has one value behind each dash")
        several.append(value)
    return tuple(several)


def _scalar(event: yaml.ScalarEvent, where: str) -> bool | str:
    """Text as it stands there, but for true and false; in quotes all is text."""
    plain = event.implicit[0]
    if plain and event.value in _NOTHING:
        raise UsageError(f"{where}: has no value; give it one, or leave the key out")
    return _TRUTH.get(event.value, event.value) if plain else event.value


class _Events:
    """What YAML's parser finds in a file, one after the other, and where."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events = yaml.parse(_text(path), Loader=yaml.SafeLoader)
        self.line = 1

    @property
    def here(self) -> str:
        return f"{self._path}:{self.line}"

    def begin(self) -> bool:
        """Go to the first key; False where the file says nothing."""
        self.take()
        if isinstance(self.take(), yaml.StreamEndEvent):
            return False
        first = self.take()
        if isinstance(first, yaml.ScalarEvent) and first.implicit[0] and not first.value:
            return False
        if not isinstance(first, yaml.MappingStartEvent):
            raise UsageError(f"{self.here}: a configuration has lines of `key: value`, with the options of ssdplan run")
        return True

    def end(self) -> None:
        """Make sure that nothing follows."""
        self.take()
        if not isinstance(self.take(), yaml.StreamEndEvent):
            raise UsageError(f"{self.here}: a configuration is one document; a second begins here")

    def take(self) -> yaml.Event:
        try:
            event = next(self._events)
        except yaml.MarkedYAMLError as error:
            self.line = error.problem_mark.line + 1 if error.problem_mark else self.line
            raise UsageError(f"{self.here}: not YAML: {_one_line(error.problem or error.context or '')}") from error
        except yaml.YAMLError as error:
            raise UsageError(f"{self._path}: not YAML: {_one_line(str(error))}") from error
        self.line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise UsageError(
                f"{self.here}: anchors and aliases (& and *) have no meaning here; in quotes they are text"
            )
        if getattr(event, "tag", None):
            raise UsageError(f"{self.here}: tags (!) have no meaning here; in quotes they are text")
        return event


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _text(path: Path) -> str:
    try:
        content = read_bounded(path, MOST_BYTES, "configuration")
    except UsageError:  # which is a ValueError too
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot read this configuration: {getattr(error, 'strerror', error)}") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a configuration: not UTF-8 text") from error
