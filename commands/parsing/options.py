"""What several commands share: options, what they do before the engine is loaded, and how they print.

Owns no command. `types.py` says what the values of options mean.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ssdplan.plans.errors import UsageError
from ssdplan.plans.files import require_replaceable, require_room_for_files
from ssdplan.plans.room import no_room

from .types import DIRECTORY, PATH, Choice

if TYPE_CHECKING:
    from pandas import DataFrame

    from ssdplan.plans.documents.base import Document


def settle_process() -> None:
    """Set up this process before torch is loaded.

    Threads of torch spin for some microseconds and then sleep, because I/O and updates need the cores too. The heap
    keeps the memory that it has, so that it is as large in a run as in the profile. torch's cache of oneDNN's kernels
    keeps what one layer needs."""
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


def said_words() -> tuple[str, ...]:
    """The words of this command line, for another process that is to do the same."""
    words: tuple[str, ...] = click.get_current_context().find_root().obj
    return words


def data_options() -> tuple[click.Option, ...]:
    """The options of all commands that read data."""
    from ssdplan.executor.data.samples.formats import FORMATS

    return (
        click.Option(
            ["--data-format"],
            type=Choice(FORMATS),
            help="what the fields of the data mean, where they fit several formats [as the fields say]",
        ),
        click.Option(
            ["--append-eos/--no-append-eos"],
            default=False,
            help="learn an end token after the last answer of a conversation, where the chat template writes none "
            "that is learnt",
        ),
        click.Option(
            ["--token-cache"],
            type=DIRECTORY,
            metavar="DIR",
            help="where tokens are kept for the next run [$SSDPLAN_CACHE, or ssdplan in your cache directory]",
        ),
    )


def token_cache(directory: Path | None) -> Path | None:
    """The directory of tokens: the one that was given, or the default."""
    from ssdplan.executor.data.token_cache import default_directory

    return directory or default_directory()


def print_document(document: "Document", text: str, as_json: bool) -> None:
    print(document.text() if as_json else text)


def quiet_option() -> click.Option:
    """`--quiet`, of the commands whose result is a file."""
    return click.Option(
        ["--quiet"], is_flag=True, help="print nothing of the result; progress, warnings and errors are told"
    )


def csv_option(what: str) -> click.Option:
    """`--csv FILE`, of the commands that make a table: of `what`, in the words of the help."""
    return click.Option(["--csv"], type=PATH, metavar="FILE", help=f"{what} (CSV) [none]")


def write_table(table: "DataFrame", path: Path) -> None:
    """Write what `--csv` asks for, and say so. Raises OSError when it cannot be written."""
    from ssdplan.plans.analysis.csv_file import write_csv

    write_csv(table, path)
    print(f"written to {path}", file=sys.stderr)


def require_writable(path: Path | None, option: str = "-o", replacing: str = "") -> None:
    """Refuse an output before the work, not after it; None is none. Of ssdplan's documents it may replace those of the
    kind `replacing` alone: another may be the very one that is read. Raises UsageError."""
    if path is None:
        return
    _require_replaceable(path, option, replacing)
    if path.parent.is_dir():
        _require_files_in(path.parent, path, option)
    else:
        raise UsageError(f"{path}: cannot be written; name a file in a directory that exists with {option}")


def require_place(path: Path | None, option: str) -> None:
    """The same of an output whose directories are made where they are missing. Raises UsageError."""
    if path is not None:
        _require_replaceable(path, option)
        _require_folder(path.parent, path, option)


def require_folder(path: Path | None, option: str) -> None:
    """Refuse a directory of outputs that is none, and where none can be made, before the work; None is none. Raises
    UsageError."""
    if path is not None:
        _require_folder(path, path, option)


def require_apart(outputs: Mapping[str, Path | None]) -> None:
    """Refuse two options that name one file, of which only the last would be left. Raises UsageError."""
    known: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is not None and (other := known.setdefault(path.resolve(), option)) != option:
            raise UsageError(f"{path}: is named by {other} and by {option}; name another file with one of them")


def document_at(path: Path) -> str:
    """The kind of ssdplan's document at a path, as `plan` or `profile`; empty where there is none. By how the file
    begins: one of another version, or that was edited wrongly, is one too. Raises UsageError."""
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            found = _SCHEMA.search(file.read(4096))
    except OSError as error:
        raise UsageError(f"{path}: exists and cannot be read: {error.strerror}") from error
    return found[1].decode() if found else ""


_SCHEMA = re.compile(rb'"ssdplan\.(\w+)/')


def _require_replaceable(path: Path, option: str, replacing: str = "") -> None:
    require_replaceable(path)
    found = document_at(path)
    if found not in ("", replacing):
        what = f"exists and is not a {replacing}" if replacing else f"is a {found} of ssdplan"
        raise UsageError(f"{path}: {what}; name another file with {option}")


def _require_folder(folder: Path, output: Path, option: str) -> None:
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        raise UsageError(f"{output}: cannot be written: {there} is not a directory; name another place with {option}")
    _require_files_in(there, output, option)


def _require_files_in(folder: Path, output: Path, option: str) -> None:
    try:
        require_room_for_files(folder)
    except OSError as error:
        if no_room(error):
            raise
        raise UsageError(f"{output}: cannot be written: {error.strerror}; name another place with {option}") from error
