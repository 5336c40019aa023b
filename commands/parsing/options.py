"""What several commands share: options, what they do before the engine is loaded, and how they print.

Owns no command. `types.py` says what the values of options mean.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ssdplan.plans.errors import UsageError

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
