"""The token cache: a memory-mapped file of all tokens of a data set, keyed by what they were made of.

Owns the file's format, its atomic writing and its checks; no data set is ever whole in memory. Beside it lies what a
reader found out of data and tokenizer (`reader.Facts`). The checksums find damage, and no forgery: a cache, or a
directory of them, that others own or may write to is refused.
"""

import errno
import hashlib
import os
import re
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ssdplan.plans.errors import DiskFullError, IoFailure, UsageError
from ssdplan.plans.files import make_folder, open_regular, require_private, write_whole
from ssdplan.plans.room import no_room
from ssdplan.plans.units import format_bytes

from .reading.documents import Document, opened

_FOOTER = struct.Struct("<16sQQQQQ")
_CHECK = struct.Struct("<Q")
_END_BYTES = _FOOTER.size + _CHECK.size
_MAGIC = b"ssdplan tokens 4"
_SAMPLE = struct.Struct("<QQ")
_ID = np.uint32((1 << 31) - 1)
"""The bits of a token that are its id (`rendering.NOT_LEARNT`)."""
_READ_BYTES = 1 << 20
_LEFT_BYTES, _LEFT_SHARE = 1 << 30, 1 / 50
"""What stays free of a file system for others: so much, or so much of a small one."""
_BETWEEN_BYTES = 1 << 26
"""Written between two looks at what is free."""
_WAY_OUT = "name a directory of your own with --token-cache or SSDPLAN_CACHE"
_OWN = re.compile(r"[0-9a-f]{64}\.(tokens|facts)|\.[0-9a-f]{64}\.(tokens|facts)\..*")
_KEPT_SECONDS = 30 * 86400
"""A cache that nobody has opened for so long is removed when another is made beside it."""


@dataclass(frozen=True)
class Tokens:
    """A cache file: `tokens` uint32 [tokens], each an id with `rendering.NOT_LEARNT` set where it is not learnt; then
    for each sample, uint64, where it ends (`ends` [samples]) and a hash of its tokens (`hashes` [samples]); of all this
    is the `checksum` (CRC-32). Then comes what there is to tell of them (`notes`, as `Tally` keeps it), and a footer
    with that checksum, the `largest` id, and the CRC-32 of notes and footer.
    """

    tokens: npt.NDArray[np.uint32]
    ends: npt.NDArray[np.uint64]
    hashes: npt.NDArray[np.uint64]
    notes: bytes
    checksum: int
    largest: int


def default_directory() -> Path | None:
    """Where caches lie unless told: $SSDPLAN_CACHE, or a directory in the user's own cache; None where that cannot be.
    Raises UsageError where $SSDPLAN_CACHE is said and cannot be, and as `open_cache` for its directory."""
    if own := os.environ.get("SSDPLAN_CACHE"):
        try:
            make_folder(Path(own))
        except OSError as error:
            raise UsageError(
                f"SSDPLAN_CACHE: {own}: cannot be made: {error.strerror}; name another directory"
            ) from error
        if not os.access(own, os.W_OK | os.X_OK):
            raise UsageError(f"SSDPLAN_CACHE: {own}: no permission to write there; name another directory")
        require_private(Path(own), Path(own).stat(), _WAY_OUT)
        return Path(own)
    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "ssdplan"
    except RuntimeError:  # of a user without a home
        return None
    try:
        make_folder(directory)
        status = directory.stat()
    except OSError:
        return None
    if not os.access(directory, os.W_OK):
        return None
    require_private(directory, status, _WAY_OUT)
    return directory


def open_cache(file: Path) -> Tokens | None:
    """The tokens in `file`, memory-mapped; None when it does not exist, is not whole, or is damaged.

    Raises UsageError where the file or its directory is another user's, or others may write to it, and for a link.
    """
    try:
        require_private(file.parent, file.parent.stat(), _WAY_OUT)
        with _opened(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, size - _END_BYTES))
            footer, check = stream.read(_FOOTER.size), stream.read(_CHECK.size)
            magic, tokens, samples, told, checksum, largest = _FOOTER.unpack(footer)
            offset, end = _aligned(tokens), size - _END_BYTES - told
            if magic != _MAGIC or end != offset + samples * _SAMPLE.size:
                return None
            stream.seek(end)
            notes = stream.read(told)
            if check != _check(notes + footer) or _checksum(stream, end) != checksum:
                return None
            with suppress(OSError):
                os.utime(stream.fileno())  # one that is used is not old
            if not samples:
                none = np.empty(0, np.uint64)
                return Tokens(np.empty(0, np.uint32), none, none, notes, checksum, 0)
            table = np.memmap(stream, np.uint64, "r", offset=offset, shape=(samples, 2))
            mapped = np.memmap(stream, np.uint32, "r", shape=(tokens,))
    except (FileNotFoundError, NotADirectoryError, struct.error):
        return None
    return Tokens(mapped, table[:, 0], table[:, 1], notes, checksum, largest)


def _opened(file: Path) -> BinaryIO:
    """A cache file, to be read. Raises UsageError, as `open_cache`, and OSError."""
    try:
        stream = open_regular(file, "token cache", follow=False)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(f"{file}: is a symbolic link, and no token cache; remove it") from None
        raise
    try:
        require_private(file, os.fstat(stream.fileno()), f"remove it, or {_WAY_OUT}")
    except BaseException:
        stream.close()
        raise
    return stream


def _aligned(tokens: int) -> int:
    return int((tokens * 4 + 7) // 8 * 8)


def _check(footer: bytes) -> bytes:
    return _CHECK.pack(zlib.crc32(footer))


def _checksum(stream: BinaryIO, nbytes: int) -> int:
    """Of the first `nbytes`: read, not mapped, so that they do not count as the process's memory."""
    stream.seek(0)
    checksum = 0
    while nbytes > 0 and (data := stream.read(min(nbytes, _READ_BYTES))):
        checksum, nbytes = zlib.crc32(data, checksum), nbytes - len(data)
    return checksum


def write_cache(
    file: Path, pieces: Iterable[tuple[npt.NDArray[np.uint32], bool]], notes: Callable[[], bytes] = lambda: b"[]"
) -> None:
    """Writes a cache file under a temporary name and renames it, so that a file that exists is whole, however many
    processes make it at once. `pieces` are tokens in order, and with each whether a sample ends with it; `notes` says
    what there is to tell of them once they are all there. A large one leaves room for others (`_with_room`). The name
    of the process's directory of temporary files is in the temporary name: whoever ends a process that has one of its
    own removes what it began (`apart.ask`)."""
    partial: Path | None = None
    try:
        make_folder(file.parent)
        require_private(file.parent, file.parent.stat(), _WAY_OUT)
        _remove_old(file.parent)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.{Path(tempfile.gettempdir()).name}.")
        partial = Path(name)
        with os.fdopen(handle, "w+b") as stream, tempfile.TemporaryFile(dir=file.parent) as table:
            _write_tokens(stream, table, _with_room(file.parent, pieces), notes)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(file)
    except OSError as error:
        if room := no_room(error):
            raise DiskFullError(
                f"{file.parent}: the tokenised text cannot be kept here, 4 bytes a token: {room}"
            ) from error
        raise IoFailure(f"{error.filename or file}: {error.strerror} (while tokenising)") from error
    finally:
        if partial is not None:
            with suppress(FileNotFoundError):
                partial.unlink()


def _with_room(
    directory: Path, pieces: Iterable[tuple[npt.NDArray[np.uint32], bool]]
) -> Iterator[tuple[npt.NDArray[np.uint32], bool]]:
    """The same pieces, as long as there is room for them. Raises DiskFullError before the file system is full, since
    others write there too; not for a small cache, which makes no difference to them."""
    ahead = _BETWEEN_BYTES
    for ids, last in pieces:
        ahead -= ids.nbytes + _SAMPLE.size
        if ahead < 0:
            ahead = _BETWEEN_BYTES
            usage = shutil.disk_usage(directory)
            left = min(_LEFT_BYTES, int(usage.total * _LEFT_SHARE))
            if usage.total and usage.free < left + ids.nbytes:
                raise DiskFullError(
                    f"{directory}: the tokenised text cannot be kept here, 4 bytes a token: {format_bytes(usage.free)} "
                    f"are free, and {format_bytes(left)} stay free for others; free some, or name another directory "
                    "with --token-cache or SSDPLAN_CACHE"
                )
        yield ids, last


def _remove_old(directory: Path) -> None:
    """Takes away caches, and what a killed process left of one, that are older than anyone's use. Other files, whatever
    they are called, may be somebody else's."""
    for file in directory.iterdir():
        with suppress(OSError):
            if _OWN.fullmatch(file.name) and time.time() - file.stat().st_mtime > _KEPT_SECONDS:
                file.unlink()


def _write_tokens(
    stream: BinaryIO,
    table: Any,
    pieces: Iterable[tuple[npt.NDArray[np.uint32], bool]],
    notes: Callable[[], bytes],
) -> None:
    tokens = samples = largest = 0
    digest = hashlib.blake2b(digest_size=8)
    for ids, last in pieces:
        data = ids.tobytes()
        stream.write(data)
        digest.update(data)
        tokens += len(ids)
        largest = max(largest, int((ids & _ID).max(initial=0)))
        if last:
            table.write(_SAMPLE.pack(tokens, int.from_bytes(digest.digest(), "little")))
            digest = hashlib.blake2b(digest_size=8)
            samples += 1
    stream.write(b"\0" * (_aligned(tokens) - tokens * 4))
    table.seek(0)
    shutil.copyfileobj(table, stream)
    told = notes()
    stream.flush()
    nbytes = stream.tell()
    checksum = _checksum(stream, nbytes)
    stream.seek(nbytes)
    footer = _FOOTER.pack(_MAGIC, tokens, samples, len(told), checksum, largest)
    stream.write(told + footer + _check(told + footer))


_FACTS_BYTES = 1 << 24
"""Facts are short; what is longer was not kept here."""


def keep_facts(file: Path, facts: bytes) -> None:
    """Keep what a reader found out (`reader.Facts`) beside the tokens, with its CRC-32. Where that cannot be, as on a
    full drive, nothing is kept: the facts are found out again."""
    if len(facts) <= _FACTS_BYTES:
        with suppress(OSError):
            write_whole(file, _check(facts) + facts)


def kept_facts(file: Path) -> bytes | None:
    """What `keep_facts` kept; None where there is nothing, or it is damaged. Raises as `open_cache`."""
    try:
        require_private(file.parent, file.parent.stat(), _WAY_OUT)
        with _opened(file) as stream:
            check, facts = stream.read(_CHECK.size), stream.read(_FACTS_BYTES + 1)
            with suppress(OSError):
                os.utime(stream.fileno())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return facts if check == _check(facts) else None


def digests_of_files(files: Sequence[Path]) -> list[bytes]:
    """sha256 of what each file holds."""
    found = []
    for file in files:
        with opened(file) as stream:
            found.append(hashlib.file_digest(stream, "sha256").digest())
    return found


def digest_of_files(files: Sequence[Path], digests: Sequence[bytes]) -> str:
    """sha256 of what the files hold (`digests_of_files`) and what kind they are; not of their names."""
    digest = hashlib.sha256()
    for file, held in zip(files, digests, strict=True):
        digest.update(file.suffix.lower().encode() + b"\0" + held)
    return digest.hexdigest()


def cache_key(*parts: str) -> str:
    """The name of the cache that is made of `parts`."""
    digest = hashlib.sha256(_MAGIC)
    for part in parts:
        digest.update(hashlib.sha256(part.encode()).digest())
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

    return (Document(document.place, pieces(document.pieces)) for document in documents)
