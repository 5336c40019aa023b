"""Files in places where others can write: read within a bound, written whole or not at all, never through a link.

Owns how a file of ours is opened. It knows no format. A `Folder` is a directory that is open: what it names is relative
to that directory, whatever happens to the path meanwhile, and an entry that is a link is refused, not followed.
"""

import contextlib
import errno
import fnmatch
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from .errors import UsageError

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Permissions of what is made: its owner's alone. States, models and losses are nobody else's business."""

_READ_BYTES = 1 << 20
KEPT_LETTERS = 30
"""Of a name in the name of what is partly written, which then fits wherever the name does, and says whose it is."""


class LinkError(UsageError):
    """An entry of a directory is a link, symbolic or hard, where only a file of its own may be."""


def require_one_name(path: Path, status: os.stat_result) -> None:
    """Raise LinkError where the file at `path`, of this `status`, has other names (hard links): what is written to it
    would change what those names are, such as another run's store. Directories and devices pass."""
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        raise LinkError(
            f"{path}: has {status.st_nlink} names (hard links), and what is written here would change the file under "
            "each of them; put a copy in its place (cp --reflink=auto; for a whole run cp -r --reflink=auto), or "
            "remove the other names"
        )


def read_bounded(path: Path, most_bytes: int, kind: str) -> bytes:
    """The content of the regular file `path` (links are followed: the user named it), of at most `most_bytes`.

    `kind` is what the file should be, for errors. Raises UsageError for what is no regular file or is larger, OSError.
    """
    with open_regular(path, kind) as file:
        return _bounded(file, path, most_bytes, kind)


def open_regular(path: Path, kind: str, *, folder: int | None = None, follow: bool = True) -> BinaryIO:
    """`path`, open for reading, unbuffered until read. What is no regular file (a FIFO would block, a device has no
    end) raises UsageError before a byte of it is read. Raises OSError; ELOOP for a link where `follow` is False.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(f"{path}: is a directory, not a {kind}")
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path}: is not a regular file, so not a {kind}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def write_whole(path: Path, data: bytes | str, *, durable: bool = False) -> None:
    """Let the file `path` be `data`, whole or not at all: see `writing`."""
    with writing(path, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def writing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A file that becomes `path` when the block ends, and is gone when it raises.

    It is written under a random name beside `path`, made anew, and then renamed. Only a regular file is replaced: see
    `Folder.require_replaceable`. Directories above it are made. With `durable` the content and the name have reached
    the drive at the end. Raises UsageError, OSError.
    """
    require_replaceable(path)
    make_folder(path.parent)
    with Folder(path.parent) as folder, folder.writing(path.name, durable=durable) as file:
        yield file


def require_replaceable(path: Path) -> None:
    """Raise UsageError where `writing` would refuse `path` for what is there; nothing there passes. Raises OSError."""
    if path.is_symlink():
        raise LinkError(
            f"{path}: is a symbolic link, which is neither followed nor replaced; name its target, or another file"
        )
    if path.is_dir():
        raise _no_file(path, stat.S_IFDIR)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), Folder(path.parent) as folder:
        folder.require_replaceable(path.name)


def require_room_for_files(folder: Path) -> None:
    """Raise OSError where `writing` can make no file in the directory `folder`, whatever its permissions say: root may
    do all, and yet no file can be made in /proc. Nothing is left there."""
    with Folder(folder):
        tempfile.TemporaryFile(dir=folder).close()


def require_name(folder: Path, name: str) -> None:
    """Raise OSError where the file system of the directory `folder` takes no name as long as this."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(folder / name)


def create_new(path: Path) -> FileIO:
    """A new file to write, unbuffered, its owner's alone; what exists is never opened. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    return FileIO(os.open(path, flags, PRIVATE_FILE), "wb")


def make_folder(path: Path) -> None:
    """Make the directory `path` and those above it that are missing, each its owner's alone. Raises OSError."""
    for folder in reversed(path.parents):
        if not os.path.lexists(folder):
            folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    if not path.is_dir():
        path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def require_private(path: Path, status: os.stat_result, way_out: str) -> None:
    """Raise UsageError unless what is at `path`, of this `status`, is this user's, and nobody else may write to it.
    `way_out`: what else to do, for the error."""
    if status.st_uid != os.geteuid():
        raise UsageError(f"{path}: belongs to another user (uid {status.st_uid}), so it is not believed; {way_out}")
    if (mode := stat.S_IMODE(status.st_mode)) & 0o022:
        raise UsageError(
            f"{path}: others may write here, so what it says is not believed; make it your own alone "
            f"(chmod {mode & ~0o077:o} {path}), or {way_out}"
        )


class Folder:
    """A directory, open. Every name is that of an entry, without a slash. Raises LinkError for entries that are links,
    OSError; the error names the whole path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def require_own(self) -> None:
        """Raise UsageError where the directory is another user's: who owns it may change what is in it at any time."""
        if (owner := os.fstat(self._descriptor).st_uid) != os.geteuid():
            raise UsageError(
                f"{self.path}: belongs to another user (uid {owner}); copy it to a directory of your own (cp -r) and "
                "use the copy"
            )

    def make_private(self) -> None:
        """Let the directory be its owner's alone. Raises OSError."""
        os.fchmod(self._descriptor, PRIVATE_FOLDER)

    def names(self, pattern: str = "*") -> list[str]:
        """Of the entries that match, sorted; a leading dot is matched by a dot alone."""
        return [
            name
            for name in sorted(os.listdir(self._descriptor))
            if fnmatch.fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))
        ]

    def mode(self, name: str) -> int | None:
        """The entry's `st_mode`, a link's own; None where there is none."""
        try:
            return os.stat(_entry(name), dir_fd=self._descriptor, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return None

    def has_file(self, name: str) -> bool:
        """Whether the entry is a regular file. Raises LinkError."""
        self.require_no_link(name)
        mode = self.mode(name)
        return mode is not None and stat.S_ISREG(mode)

    def require_no_link(self, name: str) -> None:
        """Raise LinkError where the entry is a link."""
        mode = self.mode(name)
        if mode is not None and stat.S_ISLNK(mode):
            raise self._link(name)

    def require_replaceable(self, name: str) -> None:
        """Raise UsageError where the entry is there and no regular file: a file in the place of a device, a FIFO, a
        socket or a directory would take it away from whoever uses it. LinkError for a link, /dev/stdout among them."""
        self.require_no_link(name)
        mode = self.mode(name)
        if mode is not None and not stat.S_ISREG(mode):
            raise _no_file(self.path / name, mode)

    def has_folder(self, name: str) -> bool:
        """Whether the entry is a directory. Raises LinkError."""
        mode = self.mode(name)
        if mode is not None and stat.S_ISLNK(mode):
            raise self._link(name)
        return mode is not None and stat.S_ISDIR(mode)

    def read(self, name: str, most_bytes: int, kind: str) -> bytes:
        """The content of an entry, as `read_bounded`."""
        with self.open(name, kind) as file:
            return _bounded(file, self.path / name, most_bytes, kind)

    def open(self, name: str, kind: str) -> BinaryIO:
        """An entry for reading, as `open_regular`."""
        with self._named(name):
            return open_regular(Path(_entry(name)), kind, folder=self._descriptor, follow=False)

    def require_one_name(self, name: str) -> None:
        """Raise LinkError where the entry is a file that has other names too: see the function of this name."""
        with contextlib.suppress(FileNotFoundError):
            require_one_name(self.path / name, os.stat(_entry(name), dir_fd=self._descriptor, follow_symlinks=False))

    def append(self, name: str) -> BinaryIO:
        """An entry to write behind its end, unbuffered; made where there is none. Raises LinkError for a file that has
        other names too."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._named(name):
            descriptor = os.open(_entry(name), flags, PRIVATE_FILE, dir_fd=self._descriptor)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{self.path / name}: is not a regular file")
            require_one_name(self.path / name, status)
            return os.fdopen(descriptor, "ab", buffering=0)
        except BaseException:
            os.close(descriptor)
            raise

    @contextlib.contextmanager
    def writing(self, name: str, *, durable: bool = False) -> Iterator[BinaryIO]:
        """A file that becomes the entry when the block ends: see the function of this name."""
        self.require_replaceable(name)
        partial = f".{_entry(name)[:KEPT_LETTERS]}.{secrets.token_hex(8)}.tmp"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with self._named(name):
            descriptor = os.open(partial, flags, PRIVATE_FILE, dir_fd=self._descriptor)
        try:
            with os.fdopen(descriptor, "w+b") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            self.require_replaceable(name)
            with self._named(name):
                os.rename(partial, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial, dir_fd=self._descriptor)
            if isinstance(error, OSError) and error.filename is None:  # a write that fails names no file
                error.filename = os.fspath(self.path / name)
            raise
        if durable:
            self.flush()

    def write(self, name: str, data: bytes | str, *, durable: bool = False) -> None:
        """Let the entry be `data`, whole or not at all."""
        with self.writing(name, durable=durable) as file:
            file.write(data.encode() if isinstance(data, str) else data)

    def remove(self, name: str) -> None:
        """Remove the entry, a link itself and not what it points at; nothing where there is none."""
        with contextlib.suppress(FileNotFoundError), self._named(name):
            os.unlink(_entry(name), dir_fd=self._descriptor)

    def flush(self) -> None:
        """New names in a directory are durable only after this."""
        os.fsync(self._descriptor)

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._link(name) from None
            error.filename = os.fspath(self.path / name)
            raise

    def _link(self, name: str) -> LinkError:
        return LinkError(
            f"{self.path / name}: is a symbolic link, and a file of this directory's own is needed here; look at what "
            "it points at, then remove the link"
        )


def _no_file(path: Path, mode: int) -> UsageError:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(mode), "a device")
    return UsageError(f"{path}: cannot be written: it is {kind}; name a regular file, or one that is not there yet")


def _entry(name: str) -> str:
    assert name not in ("", ".", "..") and "/" not in name and "\0" not in name, f"{name!r} is no name of an entry"
    return name


def _bounded(file: BinaryIO, path: Path, most_bytes: int, kind: str) -> bytes:
    pieces, left = [], most_bytes + 1
    while left and (piece := file.read(min(left, _READ_BYTES))):  # a read of all would take all of the bound at once
        pieces.append(piece)
        left -= len(piece)
    if not left:
        units = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
        size = next(f"{most_bytes // unit} {name}" for unit, name in units if most_bytes >= unit)
        raise UsageError(f"{path}: larger than {size}, so not a {kind}")
    return b"".join(pieces)
