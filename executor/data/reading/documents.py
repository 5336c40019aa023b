"""Documents and rows: what the files of a data set hold.

Owns how each kind of file is read, and what is wrong with it: file, line or row, and reason. Which files are read is in
`files.py`, what the fields of a row mean in `data/samples/formats.py`. It never holds a whole file in memory.
"""

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from ssdplan.plans.errors import UsageError
from ssdplan.plans.files import open_regular
from ssdplan.plans.json_errors import json_reason

from . import columns
from .files import unreadable
from .places import At, unsaid

_READ_BYTES = 1 << 18
_ROW_BYTES = 1 << 28
"""A line of so many is no row of a .jsonl file, and may be all of another file."""
_ROW_VALUES = 1 << 22
"""Values of a row, each an object in memory of up to some 250 bytes, however short it is written."""
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BEGINS = (b",", b"{", b"[")
"""What a value stands behind."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_POINTERS = {
    rb"version https://(?:git-lfs|hawser)\.github\.com/spec/": "git LFS, not the file; fetch that with `git lfs pull`",
    rb"# xet version \d": "git-xet, not the file; fetch that with `git xet checkout`",
    rb"(?:(?:\.\.?[/\\])*\.git)?[/\\]annex[/\\]objects[/\\]": (
        "git-annex, not the file; fetch that with `git annex get`"
    ),
}
"""How what stands in the place of a large file begins, and whose pointer it is. The last is a link too, which is a file
where the file system has no links."""
_POINTER_BYTES = 1 << 10
"""So many are looked at for one."""


@dataclass(frozen=True)
class Document:
    """One text: where it begins (`file:line`), and what it says, in pieces that are to be read once, in order."""

    place: str
    pieces: Iterable[str]

    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class Row:
    """One row of a table or of a .jsonl file: where it is, and its fields."""

    place: str
    fields: dict[str, Any]


def require_content(file: Path) -> None:
    """Raise UsageError for a file that is empty, and as `require_itself`."""
    require_itself(file)
    if file.stat().st_size == 0:
        raise UsageError(f"{file}: the file is empty; put text into it or take it away")


def require_itself(file: Path) -> None:
    """Raise UsageError for a file that may not be read, or only stands for the one that is meant; IoFailure where a
    drive does not answer."""
    with opened(file) as stream:
        try:
            begin = stream.read(_POINTER_BYTES)
        except OSError as error:
            raise unreadable(file, error) from error
    begin = begin.removeprefix(codecs.BOM_UTF8).lstrip()  # as editors and shells write it
    for mark, whose in _POINTERS.items():
        if re.match(mark, begin):
            raise UsageError(f"{file}: a pointer of {whose}")


def opened(file: Path) -> BufferedReader:
    """The file, to be read. Raises UsageError where that is not allowed, IoFailure where it fails."""
    try:
        return cast(BufferedReader, open_regular(file, "file of data or of a model"))
    except OSError as error:
        raise unreadable(file, error) from error


def is_plain_text(file: Path) -> bool:
    return file.suffix.lower() == ".txt"


def plain_text(file: Path) -> Document:
    """A .txt file: UTF-8, passed on as it is, except that a byte order mark at its start is not text. One with a
    character NUL is refused: UTF-16 without a mark reads so, a binary file, and the end of one that a crash cut."""
    return Document(f"{file}:1", _decoded_pieces(file))


def _decoded_pieces(file: Path) -> Iterator[str]:
    """The text of a .txt file in pieces of bounded size; what is not UTF-8 is an error with its line."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, first = 1, True
    with opened(file) as stream:
        while True:
            data = stream.read(_READ_BYTES)
            kept = decoder.getstate()[0]
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line += (kept + data)[: error.start].count(b"\n")
                raise _not_utf8(f"{file}:{line}") from error
            if "\0" in text:
                line += text[: text.index("\0")].count("\n")
                raise UsageError(
                    f"{file}:{line}: has a character NUL, so it is not UTF-8 text as it was written (UTF-16, a binary "
                    "file, or one that a crash cut); convert it, for example with iconv -t UTF-8, or take it away"
                )
            line += text.count("\n")
            if first and text:
                text, first = text.removeprefix("\ufeff"), False
            if text:
                yield text
            if not data:
                return


def field_names(file: Path) -> tuple[str, list[str]] | None:
    """Where a file first says which fields it has, and which; None when it has no row."""
    if file.suffix.lower() == ".jsonl":
        row = next(iter(json_rows(file)), None)
        return None if row is None else (row.place, list(row.fields))
    return str(file), columns.names(file)


def rows(file: Path, wanted: Iterable[str], at: At = unsaid) -> Iterator[Row]:
    """The rows of a .jsonl, .parquet or .arrow file; of the last two only the `wanted` fields are read. `at` is told of
    each before it is parsed."""
    if file.suffix.lower() == ".jsonl":
        yield from json_rows(file, at)
        return
    for number, fields in columns.rows(file, wanted, at):
        yield Row(f"{file}: row {number}", fields)


def json_rows(file: Path, at: At = unsaid) -> Iterator[Row]:
    """A row a line; empty lines are none. Raises UsageError for what is not a JSON object, or is endless."""
    with opened(file) as stream:
        line = 0
        while data := stream.readline(_ROW_BYTES):
            line += 1
            if len(data) == _ROW_BYTES:
                raise UsageError(
                    f"{file}:{line}: the row has {_ROW_BYTES >> 20} MiB or more; each line must be one JSON object"
                )
            if line == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            if data.strip():
                place = f"{file}:{line}"
                at("reading", place, 0)
                _require_few(place, data)
                yield Row(place, _fields(place, data))


def _require_few(place: str, data: bytes) -> None:
    """Raise UsageError for a row of more values than memory is for. Commas in texts are none: they are looked for where
    they would matter."""
    if len(data) <= _ROW_VALUES or _count(data) <= _ROW_VALUES:
        return
    if _count(_STRINGS.sub(b"", data)) > _ROW_VALUES:
        raise UsageError(
            f"{place}: the row has more than {_ROW_VALUES:,} values; split it into several rows, or leave out the "
            "field that has them"
        )


def _count(data: bytes) -> int:
    return sum(map(data.count, _BEGINS))


def _fields(place: str, data: bytes) -> dict[str, Any]:
    try:
        row = json.loads(data.decode("utf-8"), object_pairs_hook=_distinct)
    except UnicodeDecodeError as error:
        raise _not_utf8(place) from error
    except _Twice as error:
        raise UsageError(
            f"{place}: the row has the key {error.key[:40]!a} twice, so it could mean either; keep one of them"
        ) from error
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else json_reason(error)
        raise UsageError(f"{place}: not a JSON row ({reason}); each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise UsageError(
            f"{place}: the row is {json_name(row)}; it must be an object with a field `text`, or with those of another "
            "format"
        )
    return row


class _Twice(Exception):  # noqa: N818 - said as a UsageError by who knows the place
    """A JSON object has a key twice."""

    def __init__(self, key: str) -> None:
        self.key = key


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, if no two of its keys are the same."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Twice(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return found


def string(place: str, what: str, value: Any) -> str:
    """`value` if it is a string of characters; UsageError, by `what` it is called, if not."""
    if not isinstance(value, str):
        raise UsageError(f"{place}: {what} is {json_name(value)}; it must be a string")
    if not value.isascii() and _SURROGATE.search(value):
        raise UsageError(f"{place}: {what} has half of a surrogate pair, which is no character; repair it")
    return value


def json_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def _not_utf8(place: str) -> UsageError:
    return UsageError(f"{place}: not valid UTF-8; convert the file, for example with iconv -t UTF-8")
