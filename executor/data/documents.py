"""Files: which ones are the data, and the documents and rows that they hold.

Owns what is read, in what order, and what is wrong with it: file, line or row, and reason. What the fields of a row
mean is in `formats`. It never holds a whole file in memory.
"""

import codecs
import glob
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdplan.plans.errors import UsageError

from . import columns

SUFFIXES = (".txt", ".jsonl", ".parquet", ".arrow")
_READ_BYTES = 1 << 18
_ROW_BYTES = 1 << 28
"""A line of so many is no row of a .jsonl file, and may be all of another file."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPLIT = re.compile(
    r"(?<![a-z])(train|test|val|valid|validation|dev|eval|held[-_]?out|hold[-_]?out)(?![a-z])", re.IGNORECASE
)


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


def data_files(path: Path) -> list[Path]:
    """The files that `path` names: itself, those under a directory, or those that a pattern matches.

    A directory that `datasets` saved has the files that it says; any other is searched recursively, in the order of its
    sorted paths, links followed, each directory once; files of other names in it are left alone, and so are names that
    begin with a dot. Raises UsageError where there is none, or where a directory holds training and other splits.
    """
    if not path.exists():
        found = [Path(name) for name in sorted(set(glob.glob(str(path), recursive=True)))]
        if not found:
            raise UsageError(
                f"{path}: no such file or directory; --data takes a file ({', '.join(SUFFIXES)}), a directory of them, "
                "or a pattern in quotes"
            )
        return _usable(path, found)
    if not path.is_dir():
        if path.suffix.lower() not in SUFFIXES:
            raise UsageError(
                f"{path}: none of {', '.join(SUFFIXES)}; rename it to what it is, or convert it to one of them"
            )
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = _json_object(path / "dataset_dict.json").get("splits")
        names = ", ".join(map(str, splits)) if isinstance(splits, list) else "several"
        raise UsageError(f"{path}: a data set of splits ({names}); give the directory of one of them")
    if (path / "state.json").exists():
        return _saved_files(path)
    files = _usable(path, list(_below(path, set())))
    sides = {frozenset(map(str.lower, _SPLIT.findall(str(file.relative_to(path))))) for file in files} - {frozenset()}
    if len(sides) > 1 and any("train" in side for side in sides):
        splits = ", ".join(sorted(frozenset.union(*sides)))
        raise UsageError(
            f"{path}: holds training data beside another split ({splits}); give the directory or a pattern of one of "
            "them, such as 'DIR/train-*.parquet'"
        )
    return files


def _below(directory: Path, entered: set[Path]) -> Iterator[Path]:
    """What lies below a directory, in the order of sorted paths. `entered` are directories that are not read again."""
    real = directory.resolve()
    if real in entered:
        return
    entered.add(real)
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _below(entry, entered)
        else:
            yield entry


def _usable(path: Path, found: list[Path]) -> list[Path]:
    files = [file for file in found if file.suffix.lower() in SUFFIXES and file.is_file()]
    if not files:
        raise UsageError(f"{path}: no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file in this directory or below it")
    return files


def _saved_files(path: Path) -> list[Path]:
    """The arrow files of a directory that `datasets.Dataset.save_to_disk` wrote."""
    state = _json_object(path / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise UsageError(f"{path}: the data set is a selection kept as indices; save it again with flatten_indices()")
    entries = state.get("_data_files")
    listed = entries if isinstance(entries, list) else []
    names = [str(entry.get("filename") or "") if isinstance(entry, dict) else "" for entry in listed]
    if not names or not all(Path(name).name for name in names):
        raise UsageError(f"{path / 'state.json'}: names no data files; save the data set again")
    files = [path / Path(name).name for name in names]
    for file in files:
        if not file.is_file():
            raise UsageError(f"{file}: is missing, but state.json names it; save the data set again")
    return files


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not valid JSON; save the data set again") from error
    if not isinstance(value, dict):
        raise UsageError(f"{file}: holds {json_name(value)}, not an object; save the data set again")
    return value


def refuse_empty(file: Path) -> None:
    if file.stat().st_size == 0:
        raise UsageError(f"{file}: the file is empty; put text into it or take it away")


def is_plain_text(file: Path) -> bool:
    return file.suffix.lower() == ".txt"


def plain_text(file: Path) -> Document:
    """A .txt file: UTF-8, passed on as it is, except that a byte order mark at its start is not text."""
    return Document(f"{file}:1", _decoded_pieces(file))


def _decoded_pieces(file: Path) -> Iterator[str]:
    """The text of a .txt file in pieces of bounded size; what is not UTF-8 is an error with its line."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, first = 1, True
    with file.open("rb") as stream:
        while True:
            data = stream.read(_READ_BYTES)
            kept = decoder.getstate()[0]
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line += (kept + data)[: error.start].count(b"\n")
                raise _not_utf8(f"{file}:{line}") from error
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


def rows(file: Path, wanted: Iterable[str]) -> Iterator[Row]:
    """The rows of a .jsonl, .parquet or .arrow file; of the last two only the `wanted` fields are read."""
    if file.suffix.lower() == ".jsonl":
        yield from json_rows(file)
        return
    for number, fields in columns.rows(file, wanted):
        yield Row(f"{file}: row {number}", fields)


def json_rows(file: Path) -> Iterator[Row]:
    """A row a line; empty lines are none. Raises UsageError for what is not a JSON object, or is endless."""
    with file.open("rb") as stream:
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
                yield Row(f"{file}:{line}", _fields(f"{file}:{line}", data))


def _fields(place: str, data: bytes) -> dict[str, Any]:
    try:
        row = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(place) from error
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UsageError(f"{place}: not a JSON row ({reason}); each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise UsageError(
            f"{place}: the row is {json_name(row)}; it must be an object with a field `text`, or with those of another "
            "format"
        )
    return row


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
