"""The token cache: a memory-mapped file of all tokens of a text, keyed by its content and tokenizer.

Owns the file's format and its atomic writing; no data set is ever whole in memory.
"""

import errno
import hashlib
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ssdplan.plans.errors import DiskFullError, IoFailure

from .documents import Document
from .tokens import tokenizer_identity

_FOOTER = struct.Struct("<16sQQ")
_MAGIC = b"ssdplan tokens 1"


@dataclass(frozen=True)
class Tokens:
    """A cache file: `tokens` uint32 [tokens], then each document's end, `ends` uint64 [documents], then a footer."""

    tokens: npt.NDArray[np.uint32]
    ends: npt.NDArray[np.uint64]


def open_cache(file: Path) -> Tokens | None:
    """The tokens in `file`, memory-mapped; None when it does not exist or is not whole."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            stream.seek(max(0, size - _FOOTER.size))
            magic, tokens, documents = _FOOTER.unpack(stream.read(_FOOTER.size))
    except (FileNotFoundError, struct.error):
        return None
    offset = (tokens * 4 + 7) // 8 * 8
    if magic != _MAGIC or size != offset + documents * 8 + _FOOTER.size:
        return None
    if not documents:
        return Tokens(np.empty(0, np.uint32), np.empty(0, np.uint64))
    return Tokens(
        np.memmap(file, np.uint32, "r", shape=(tokens,)),
        np.memmap(file, np.uint64, "r", offset=offset, shape=(documents,)),
    )


def write_cache(file: Path, pieces: Iterable[tuple[npt.NDArray[np.uint32], bool]]) -> None:
    """Writes a cache file under a temporary name and renames it, so that a file that exists is whole."""
    partial: Path | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        partial = Path(name)
        with os.fdopen(handle, "wb") as stream, tempfile.TemporaryFile(dir=file.parent) as ends:
            _write_tokens(stream, ends, pieces)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(file)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"{file.parent}: no space for the tokenised text; free some, 4 bytes a token"
            ) from error
        raise IoFailure(f"{error.filename or file}: {error.strerror} (while tokenising)") from error
    finally:
        if partial is not None:
            with suppress(FileNotFoundError):
                partial.unlink()


def _write_tokens(stream: BinaryIO, ends: Any, pieces: Iterable[tuple[npt.NDArray[np.uint32], bool]]) -> None:
    tokens = documents = 0
    for ids, last in pieces:
        stream.write(ids.tobytes())
        tokens += len(ids)
        if last:
            ends.write(struct.pack("<Q", tokens))
            documents += 1
    stream.write(b"\0" * (-4 * tokens % 8))
    ends.seek(0)
    shutil.copyfileobj(ends, stream)
    stream.write(_FOOTER.pack(_MAGIC, tokens, documents))


def content_key(files: list[Path], tokenizer: Any) -> str:
    digest = hashlib.sha256(_MAGIC)
    for data in (tokenizer_identity(tokenizer), *(file.suffix.lower().encode() for file in files)):
        digest.update(hashlib.sha256(data).digest())
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def counted(
    documents: Iterable[Document], progress: Callable[[int, int], None] | None, total: int
) -> Iterator[Document]:
    """The same documents, with `progress` told how many bytes of text lie behind (a row's other bytes are not text)."""
    done = 0

    def pieces(texts: Iterable[str]) -> Iterator[str]:
        nonlocal done
        for text in texts:
            yield text
            done += len(text) if text.isascii() else len(text.encode())
            if progress is not None:
                progress(min(done, total), total)

    return (Document(document.path, document.line, pieces(document.pieces)) for document in documents)
