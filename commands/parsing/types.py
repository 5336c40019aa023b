"""The types of options and arguments: what a value means, and how a wrong one is refused.

Owns a click type for each kind of value: it makes the value of text, or refuses the text in one line. A type looks at
one value alone; what values mean together is the command's business.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ssdplan.plans.errors import UsageError
from ssdplan.plans.units import parse_bytes

if TYPE_CHECKING:
    _Path = click.Path[Any]
else:
    _Path = click.Path  # not every click has it as a generic class

T = TypeVar("T")
EMPTY = "is empty; name what is meant, or leave the option out"


class Value(click.ParamType[T]):
    """A type whose values `read` makes of text. Where it raises UsageError, that says what is wrong."""

    def __init__(self, name: str, read: Callable[[str], T]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        except ValueError:
            self.fail(f"invalid {self.name} value: {value!r}", param, ctx)


class Choice(click.Choice[str]):
    """One of some names; help and errors list all of them."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"{{{','.join(self.choices)}}}"

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"invalid choice: {value!r} (choose from {', '.join(map(repr, self.choices))})"


class PathValue(_Path):
    """A path, which need not exist; a shell completes it. `read` makes the value of text that is not empty. Empty text,
    as a variable that is not set leaves it, is no path."""

    def __init__(self, read: Callable[[str], Any] = Path, *, directory: bool = False, empty: Any = None) -> None:
        super().__init__(file_okay=not directory, path_type=Path)
        self._value = Value("path", read)
        self._empty = empty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            return self._empty if self._empty is not None else self.fail(EMPTY, param, ctx)
        return self._value.convert(value, param, ctx)


def directory(text: str) -> Path:
    """A directory that is there, or that may be made."""
    found = Path(text)
    if os.path.exists(found) and not found.is_dir():  # which Path.exists would say of a name too long by an error
        raise UsageError(f"{text!r} is a file, not a directory; what is not meant for it goes before it")
    return found


def name(text: str) -> str:
    """A name, which empty text is not."""
    if not text:
        raise UsageError(EMPTY)
    return text


def nbytes(text: str) -> int:
    return parse_bytes(text)


def nbytes_or_none(text: str) -> int:
    """A size, which may be 0."""
    return parse_bytes(text, 0)


def sizes(text: str) -> tuple[int, ...]:
    return tuple(nbytes(part) for part in text.split(","))


MOST_COUNT = (1 << 31) - 1


def count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not text.strip("0"):
        raise UsageError(f"{text!r} is not a whole number of at least 1")
    if len(text.lstrip("0")) > len(str(MOST_COUNT)) or int(text) > MOST_COUNT:
        raise UsageError(f"{text[:40]!r} is more than {MOST_COUNT:,}, the most that can be counted here")
    return int(text)


def seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a whole number") from None
    if not -(1 << 63) <= value < 1 << 63:
        raise UsageError(f"{text!r} is not from {-(1 << 63)} to {(1 << 63) - 1}, which 64 bits with a sign hold")
    return value


def counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number") from None
    if not abs(value) < 1e30:
        raise UsageError(f"{text!r} is out of range")
    return value


def nonnegative(text: str) -> float:
    value = number(text)
    if value < 0:
        raise UsageError(f"{text!r} is negative")
    return value


def positive(text: str) -> float:
    value = nonnegative(text)
    if value == 0:
        raise UsageError("must be above 0")
    return value


def fraction(text: str) -> float:
    value = nonnegative(text)
    if value > 1:
        raise UsageError(f"{text!r} is not a fraction from 0 to 1")
    return value


def below_one(text: str) -> float:
    value = nonnegative(text)
    if value >= 1:
        raise UsageError(f"{text!r} is not from 0 to below 1")
    return value


def steps_or_share(text: str) -> float:
    """A whole number of steps, or below 1 a share of all steps."""
    value = nonnegative(text)
    if value >= 1 and value != int(value):
        raise UsageError(f"{text!r} is neither a whole number of steps nor a share of them below 1")
    return value


def share(text: str) -> float:
    value = fraction(text)
    if not 0 < value < 1:
        raise UsageError(f"{text!r} is not a fraction between 0 and 1")
    return value


def figure(text: str) -> tuple[str, float]:
    from ssdplan.planner.catalogue.whatif import parse_figure

    return parse_figure(text)


def residency(text: str) -> dict[str, float]:
    known = ("parameters", "optimizer", "checkpoints", "device", "turn", "updates", "inputs")
    chosen: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known or not value or name in chosen:
            raise UsageError(f"{part!r}: write {'=F,'.join(known)}=F, any of them, F from 0 to 1")
        chosen[name] = fraction(value)
    return chosen


PATH = PathValue()
PATH_OR_NONE = PathValue(empty="")
"""A path; empty text takes back the one that was given before."""
DIRECTORY = PathValue(directory=True)
"""A path that a shell completes with directories."""
NEW_DIRECTORY = PathValue(directory, directory=True)
"""A directory that is there, or that may be made."""
MODEL = PathValue(str, directory=True)
"""A directory, or a name."""
SIZE = Value("size", nbytes)
SIZE_OR_ZERO = Value("size", nbytes_or_none)
SIZES = Value("sizes", sizes)
COUNT = Value("count", count)
COUNTS = Value("counts", counts)
SEED = Value("seed", seed)
NAMES = Value("names", names)
POSITIVE = Value("positive", positive)
NONNEGATIVE = Value("nonnegative", nonnegative)
FRACTION = Value("fraction", fraction)
BELOW_ONE = Value("number", below_one)
SHARE = Value("share", share)
STEPS_OR_SHARE = Value("steps or share", steps_or_share)
NAME = Value("name", name)
FIGURE = Value("figure", figure)
RESIDENCY = Value("residency", residency)
