"""The words of a command line: which are options, which are values, which are arguments, and which are unknown.

Owns three rules that click does not have. A word that begins with a dash is the value of an option only if it is a
number, has a space or is joined to the option (`--data=-x`); for an option that takes no path, also if it begins like a
number (`-1GiB`). Every value is checked, also one that a later value replaces. All unknown words are told at once.
Everything else is click's work: what is known goes on to its parser.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import click

from .suggestions import aliases
from .types import Value

_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_NEGATIVE_FIGURE = re.compile(r"-\.?\d.*", re.DOTALL)
"""A negative number with a unit, an exponent or more numbers behind it."""


class UnknownWords(click.UsageError):
    """Words of a command line that mean nothing to its command."""

    def __init__(self, words: Sequence[str], ctx: click.Context) -> None:
        super().__init__(f"unrecognized arguments: {' '.join(words)}", ctx)
        self.words = tuple(words)


@dataclass(frozen=True)
class Words:
    """What a command was told: options in a form that click reads as they are meant, arguments and unknown options;
    the latter two with their positions."""

    options: tuple[str, ...]
    arguments: tuple[tuple[int, str], ...] = ()
    unknown: tuple[tuple[int, str], ...] = ()

    def for_click(self) -> list[str]:
        return [*self.options, "--", *(word for _, word in self.arguments)]

    def left(self, arguments: int) -> list[str]:
        """The words that nobody took, in their order: all unknown options, and the last `arguments` arguments."""
        taken = len(self.arguments) - arguments
        return [word for _, word in sorted([*self.unknown, *self.arguments[taken:]])]


def read_words(words: Sequence[str], ctx: click.Context, *, of_group: bool = False) -> Words:
    """Tell the words of a command apart; in a group's, everything from the first argument on is for a command below.

    Raises click.BadParameter for an option that lacks its value, has one that it cannot have, or a wrong one.
    """
    known = _options(ctx)
    options: list[str] = []
    arguments: list[tuple[int, str]] = []
    unknown: list[tuple[int, str]] = []
    ahead = deque(enumerate(words))
    while ahead:
        position, word = ahead.popleft()
        if word == "--":
            arguments += ahead
            break
        if _is_value(word, known):
            arguments.append((position, word))
            if of_group:
                arguments += ahead
                break
            continue
        flag, value = _split(word, known)
        option = known.get(flag)
        if option is None:
            unknown.append((position, word))
            continue
        if option.is_flag:
            if value is not None:
                _refuse(f"ignored explicit argument {value!r}", option, ctx)
            if option.is_eager:  # --help and --version: nothing behind them counts
                return Words((flag,))
            options.append(flag)
            continue
        if value is None and ahead and _is_value_of(option, ahead[0][1], known):
            value = ahead.popleft()[1]
        if value is not None:
            option.type(value, option, ctx)
            options.append(_joined(option, value))
        elif may_stand_alone(option):
            options.append(flag)
        else:
            _refuse("expected one argument", option, ctx)
    return Words(tuple(options), tuple(arguments), tuple(unknown))


def may_stand_alone(option: click.Option) -> bool:
    """Whether an option that takes a value may be given without one."""
    return not option.is_flag and option.flag_activation_value is not None


def spelled(param: click.Parameter) -> str:
    """A parameter as errors name it: an option by all its names, an argument by what its help calls it."""
    if isinstance(param, click.Option):
        return "/".join([*param.opts, *param.secondary_opts])
    return param.metavar or param.name


def _options(ctx: click.Context) -> dict[str, click.Option]:
    own = {
        flag: param
        for param in ctx.command.get_params(ctx)
        if isinstance(param, click.Option)
        for flag in (*param.opts, *param.secondary_opts)
    }
    others = aliases([flag.removeprefix("--") for flag in own if flag.startswith("--")])
    also: dict[str, click.Option] = {}
    for other, name in others.items():
        also |= dict.fromkeys((f"--{other}", f"--{other.replace('-', '_')}"), own[f"--{name}"])
    return also | own


def _is_value(word: str, known: Mapping[str, click.Option]) -> bool:
    """Whether a word is a value or an argument, wherever it stands."""
    if not word.startswith("-") or word == "-":
        return True
    if word == "--" or _split(word, known)[0] in known:
        return False
    return bool(_NEGATIVE_NUMBER.fullmatch(word)) or " " in word


def _is_value_of(option: click.Option, word: str, known: Mapping[str, click.Option]) -> bool:
    """Whether a word behind an option is its value. A negative size is one too, so that the size is refused, and not
    said to be missing."""
    if _is_value(word, known):
        return True
    return isinstance(option.type, Value) and bool(_NEGATIVE_FIGURE.fullmatch(word)) and word not in known


def _split(word: str, known: Mapping[str, click.Option]) -> tuple[str, str | None]:
    """An option and the value that is joined to it: `--data=x`, `-o=x` or `-ox`."""
    flag, joined, value = word.partition("=")
    if word in known or not joined:
        flag = word
    elif flag in known:
        return flag, value
    if flag not in known and not word.startswith("--") and word[:2] in known:
        return word[:2], word[2:]
    return flag, None


def _joined(option: click.Option, value: str) -> str:
    """An option with its value as one word, by its long name."""
    name = max(option.opts, key=len)
    if may_stand_alone(option) and value.startswith("-"):
        value = f"./{value}"  # the same path; click would take it for the next option
    return f"{name}={value}"


def _refuse(message: str, option: click.Option, ctx: click.Context) -> NoReturn:
    raise click.BadParameter(message, ctx, option)
