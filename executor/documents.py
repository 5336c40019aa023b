"""Documents: the text of .txt and .jsonl files, and of directories of them.

Owns which files are read, in what order, and what is wrong with one: its name, line and reason. It never holds a whole
file in memory.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdplan.plans.errors import UsageError

_SUFFIXES = (".txt", ".jsonl")
_READ_BYTES = 1 << 18
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """One document: where it begins, and its text in pieces that are to be read once, in order."""

    path: Path
    line: int
    pieces: Iterable[str]

    def text(self) -> str:
        return "".join(self.pieces)


def read_documents(path: Path) -> Iterator[str]:
    """Yields the documents under `path`: a .txt file is one, a .jsonl file has one a row, in its field `text`.

    A directory is searched recursively, in the order of its sorted paths; files of other names in it are left alone.
    Text is UTF-8 and is passed on as it is, except that a byte order mark at the start of a file is not text. Raises
    UsageError, naming file and line, for whatever is not such text.
    """
    return (document.text() for document in open_documents(text_files(path)))


def text_files(path: Path) -> list[Path]:
    if not path.exists():
        raise UsageError(
            f"{path}: no such file or directory; --data takes a .txt or .jsonl file, or a directory of them"
        )
    if not path.is_dir():
        if path.suffix.lower() not in _SUFFIXES:
            raise UsageError(f"{path}: neither .txt nor .jsonl; rename it to what it is, or convert it to one of them")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
    if not files:
        raise UsageError(f"{path}: no .txt or .jsonl file in this directory or below it")
    return files


def open_documents(files: list[Path]) -> Iterator[Document]:
    for file in files:
        if file.stat().st_size == 0:
            raise UsageError(f"{file}: the file is empty; put text into it or take it away")
        if file.suffix.lower() == ".txt":
            yield Document(file, 1, _decoded_pieces(file))
        else:
            yield from _rows(file)


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
                raise _not_utf8(file, line) from error
            line += text.count("\n")
            if first and text:
                text, first = text.removeprefix("\ufeff"), False
            if text:
                yield text
            if not data:
                return


def _rows(file: Path) -> Iterator[Document]:
    with file.open("rb") as stream:
        for line, data in enumerate(stream, start=1):
            if line == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            if data.strip():
                yield Document(file, line, (_text_of_row(file, line, data),))


def _text_of_row(file: Path, line: int, data: bytes) -> str:
    try:
        row = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(file, line) from error
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UsageError(f"{file}:{line}: not a JSON row ({reason}); each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise UsageError(f"{file}:{line}: the row is {_json_name(row)}; it must be an object with a field `text`")
    if "text" not in row:
        names = ", ".join(f"`{name}`" for name in row) or "none"
        raise UsageError(f"{file}:{line}: the row has no field `text` (its fields: {names}); put the text there")
    text = row["text"]
    if not isinstance(text, str):
        raise UsageError(f"{file}:{line}: the field `text` is {_json_name(text)}; it must be a string")
    if not text.isascii() and _SURROGATE.search(text):
        raise UsageError(
            f"{file}:{line}: the field `text` has half of a surrogate pair, which is no character; repair it"
        )
    return text


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]


def _not_utf8(file: Path, line: int) -> UsageError:
    return UsageError(f"{file}:{line}: not valid UTF-8; convert the file, for example with iconv -t UTF-8")
