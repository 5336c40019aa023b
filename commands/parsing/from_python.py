"""Values from Python: which types of values an option takes, and how any other is refused.

Owns the words for each kind of option, and the check of a value's type. What a value of that type has to be, the
option's own type says (`types.py`).
"""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import click

from ssdplan.plans.errors import UsageError, WrongTypeError

from .command import Command
from .suggestions import aliases, long_names
from .types import (
    BELOW_ONE,
    COUNT,
    COUNTS,
    FIGURE,
    FRACTION,
    NONNEGATIVE,
    POSITIVE,
    RESIDENCY,
    SEED,
    SHARE,
    SIZE,
    SIZE_OR_ZERO,
    STEPS_OR_SHARE,
    Choice,
    PathValue,
    Value,
)
from .words import may_stand_alone


@dataclass(frozen=True)
class Kind:
    """What an option takes: in words, and as types of Python. Text is what one would write on the command line."""

    words: str
    types: tuple[type, ...]


_TRUTH = Kind("True or False", (bool,))
_PATH = Kind("a path: text or a pathlib.Path", (str, Path))
_NUMBER = Kind("a number", (Real, str))
_WHOLE = Kind("a whole number", (Integral, str))
_TEXT = Kind("text", (str, Path))
_TEXT_OR_NUMBER = Kind("a number, or text as the command's help has it", (Real, str))
_SIZE = Kind('a size: text such as "8GiB", or a whole number of bytes', (Integral, str))
_KINDS: Mapping[click.ParamType[Any], Kind] = {
    **dict.fromkeys((COUNT, SEED), _WHOLE),
    **dict.fromkeys((SIZE, SIZE_OR_ZERO), _SIZE),
    **dict.fromkeys((POSITIVE, NONNEGATIVE, FRACTION, BELOW_ONE, SHARE, STEPS_OR_SHARE), _NUMBER),
    COUNTS: Kind("whole numbers, such as [1, 2]", (Integral, str)),
    FIGURE: Kind('a pair of a name and a number, such as ("cpu.cores", 8)', (tuple, str)),
    RESIDENCY: Kind('fractions by name, such as {"optimizer": 0.5}', (dict, str)),
}


def kind_of(param: click.Parameter) -> Kind:
    """What an option or argument takes, once."""
    if isinstance(param, click.Option) and param.is_flag:
        return _TRUTH
    if isinstance(param.type, PathValue):
        alone = isinstance(param, click.Option) and may_stand_alone(param)
        return Kind(f"{_PATH.words}, or True", (*_PATH.types, bool)) if alone else _PATH
    if isinstance(param.type, Choice):
        return Kind(f"one of {', '.join(map(repr, param.type.choices))}", (str,))
    return _KINDS.get(param.type, _TEXT_OR_NUMBER if isinstance(param.type, Value) else _TEXT)


def own_names(command: Command, options: Mapping[str, Any], where: Callable[[str], str]) -> dict[str, Any]:
    """Options by the command's own names for them, where TRL's or transformers' were given; without those that are
    None. Raises UsageError for one that was given by two names."""
    others = {other.replace("-", "_"): own.replace("-", "_") for other, own in aliases(long_names(command)).items()}
    found: dict[str, Any] = {}
    for name, value in options.items():
        own = others.get(name, name)
        if value is None:
            continue
        if own in found:
            raise UsageError(f"{where(name)}: is another name of {own}, which is given too; leave one of them out")
        found[own] = value
    return found


def typed(param: click.Parameter, value: Any, where: str) -> Any:
    """A value for an option, a list for one that takes several. Raises WrongTypeError for what it cannot be of."""
    kind = kind_of(param)
    if param.multiple or param.nargs == -1:
        alone = isinstance(value, tuple) and tuple in kind.types
        several = value if isinstance(value, list | tuple) and not alone else [value]
        return [_one(kind, each, where, " (or a list of such)") for each in several]
    if param.type is COUNTS and isinstance(value, list | tuple):
        return tuple(_one(kind, each, where) for each in value)
    return _one(kind, value, where)


def require(kind_words: str, types: tuple[type, ...], value: object, where: str) -> None:
    """Raise WrongTypeError for a value that is of none of these types."""
    if not isinstance(value, types):
        raise WrongTypeError(f"{where}: takes {kind_words}, not {_shown(value)}")


def require_path(value: object, where: str) -> None:
    require(_PATH.words, _PATH.types, value, where)


def _one(kind: Kind, value: Any, where: str, more: str = "") -> Any:
    if isinstance(value, bool):  # which is a whole number of Python
        if bool not in kind.types:
            raise WrongTypeError(f"{where}: takes {kind.words}{more}, not {value}")
        return value
    require(kind.words + more, kind.types, value, where)
    return int(value) if isinstance(value, Integral) else value


def _shown(value: object) -> str:
    return "None" if value is None else f"{reprlib.repr(value)}, which is of type {type(value).__name__}"
