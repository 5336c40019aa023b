"""Options: what their values mean, and what all commands do with them.

Owns the types of options and how their errors read; which options there are, each command says.
"""

import argparse
import os
from pathlib import Path
from typing import Literal

from ssdplan.plans.documents import Document
from ssdplan.plans.errors import UsageError
from ssdplan.plans.units import parse_bytes


class Default:
    """The value of an option that nobody gave; in help it reads as the value."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __str__(self) -> str:
        return str(self.value)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults beside the options that have one; what an option without one means is in its own words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default.value if isinstance(action.default, Default) else action.default
        if isinstance(action, argparse.BooleanOptionalAction) and isinstance(default, bool):
            return f"{action.help} [{action.option_strings[0 if default else -1]}]"
        if default is None or default is False or default in ({}, ()):
            return action.help
        return super()._get_help_string(action)


def settle_process() -> None:
    """Before torch is loaded: its threads spin for some microseconds and then wait asleep, for I/O and updates need the
    cores too; the heap keeps what it is given, so that it is as large in a run as in the profile; and of what oneDNN
    made for a shape of matrices, of which it has a cache, torch's own cache in front keeps what one layer needs."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "32")
    from ssdplan.native.process import settle_heap

    settle_heap()


def require_engine() -> None:
    """Refuse a choice of the I/O engine that is none, before anything is done. Raises UsageError."""
    from ssdplan.native.engines import ENGINE_VARIABLE, ENGINES

    asked = os.environ.get(ENGINE_VARIABLE, "")
    if asked and asked not in ENGINES:
        raise UsageError(f"{ENGINE_VARIABLE}={asked}: is no I/O engine; unset it, or choose of {', '.join(ENGINES)}")


def add_data_options(parser: argparse._ActionsContainer) -> None:
    """What all commands that read data are told about them; to a parser, or a group of its options."""
    from ssdplan.executor.data.formats import FORMATS

    parser.add_argument(
        "--data-format",
        choices=tuple(FORMATS),
        help="what the fields of the data mean, where they would do for several formats [as the fields say]",
    )
    parser.add_argument(
        "--append-eos",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="learn an end token behind the last answer of a conversation, where the chat template writes none that is",
    )
    parser.add_argument(
        "--token-cache",
        type=path,
        metavar="DIR",
        help="where tokens are kept for the next time [$SSDPLAN_CACHE, or ssdplan in your cache directory]",
    )


def token_cache(options: argparse.Namespace) -> Path | None:
    from ssdplan.executor.data.token_cache import default_directory

    directory: Path | None = options.token_cache
    return directory or default_directory()


def print_document(document: Document, text: str, as_json: bool) -> None:
    print(document.text() if as_json else text)


def require_writable(path: Path) -> None:
    """Refuse an output before the work, not after it."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: cannot be written; name a file in a directory that exists with -o")


def path(text: str) -> Path:
    """A path; what a variable that is not set leaves is none."""
    return Path(model(text))


def model(text: str) -> str:
    """A directory, or a name."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; name what is meant, or leave the option out")
    return text


def path_or_none(text: str) -> Path | Literal[""]:
    """A path; what is empty takes it back where it was given before."""
    return Path(text) if text else ""


def directory(text: str) -> Path:
    """One that is there, or that may be made."""
    found = path(text)
    if found.exists() and not found.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is a file, not a directory; what is not meant for it goes before it"
        )
    return found


def nbytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def nbytes_or_none(text: str) -> int:
    """A size, which may be 0."""
    try:
        return parse_bytes(text, 0)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def sizes(text: str) -> tuple[int, ...]:
    return tuple(nbytes(part) for part in text.split(","))


def count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not -(1 << 63) <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} has more than 64 bits")
    return value


def counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not abs(value) < 1e30:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range")
    return value


def nonnegative(text: str) -> float:
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative")
    return value


def positive(text: str) -> float:
    value = nonnegative(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def fraction(text: str) -> float:
    value = nonnegative(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction from 0 to 1")
    return value


def below_one(text: str) -> float:
    value = nonnegative(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to below 1")
    return value


def steps_or_share(text: str) -> float:
    """A whole number of steps, or below 1 a share of all steps."""
    value = nonnegative(text)
    if value >= 1 and value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number of steps nor a share of them below 1")
    return value


def share(text: str) -> float:
    value = fraction(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction between 0 and 1")
    return value


def figure(text: str) -> tuple[str, float]:
    from ssdplan.planner.whatif import parse_figure

    try:
        return parse_figure(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def residency(text: str) -> dict[str, float]:
    known = ("parameters", "optimizer", "checkpoints", "device", "turn")
    chosen: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known or not value or name in chosen:
            raise argparse.ArgumentTypeError(f"{part!r}: write {'=F,'.join(known)}=F, any of them, F from 0 to 1")
        chosen[name] = fraction(value)
    return chosen
