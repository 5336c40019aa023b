"""Volumes: the files and block devices that a store lies on, each known by its superblocks.

Owns finding, making, claiming and locking them, and the promise not to write on what is not ours. What lies behind the
superblocks is the store's business.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ssdplan import native
from ssdplan.plans.errors import DiskFullError, IoFailure, SsdplanError, StoreError, UsageError
from ssdplan.plans.files import LinkError, make_folder, require_one_name
from ssdplan.plans.room import no_room
from ssdplan.plans.units import PAGE, format_bytes

from .superblock import SLOTS, Superblock, is_ours

SUFFIX = ".ssdplan"
_PROBED_BYTES = 1 << 20
"""At each end of a device or file: where partition tables, file systems and archives leave their marks."""


class Request(Protocol):
    def wait(self) -> int: ...
    def done(self) -> bool: ...


class Disk(Protocol):
    """What a store needs of an I/O engine; `native.Engine` is one, a simulated disk of the tests another."""

    @property
    def description(self) -> str: ...
    def register(self, address: int, nbytes: int) -> str: ...
    def unregister(self, address: int) -> None: ...
    def open(
        self, path: str, *, create_bytes: int | None = None, read_only: bool = False, descriptor: int | None = None
    ) -> int: ...
    def size(self, file: int) -> int: ...
    def read(self, segments: Sequence[tuple[int, int, int, int]]) -> Request: ...
    def write(self, segments: Sequence[tuple[int, int, int, int]]) -> Request: ...
    def read_summed(self, ranges: Sequence[Sequence[tuple[int, int, int, int]]]) -> list[int]: ...
    def write_summed(self, ranges: Sequence[Sequence[tuple[int, int, int, int]]]) -> list[int]: ...
    def flush(self, file: int) -> None: ...
    def close_file(self, file: int) -> None: ...
    def close(self) -> None: ...


class Staging:
    """Aligned memory for what is neither a state nor a plan's buffer: superblocks, tables, checks. It starts zeroed."""

    def __init__(self, nbytes: int) -> None:
        self._arena = native.Arena(nbytes, lock=False)
        self.address = self._arena.address
        self.nbytes = nbytes

    def put(self, data: bytes) -> None:
        """`data` at the beginning."""
        assert len(data) <= self.nbytes
        ctypes.memmove(self.address, data, len(data))

    def get(self, start: int, stop: int) -> bytes:
        """A copy of bytes [start, stop)."""
        assert 0 <= start <= stop <= self.nbytes
        return ctypes.string_at(self.address + start, stop - start)


@dataclass
class Volume:
    """One open volume."""

    path: Path
    file: int
    capacity_bytes: int
    made: bool = False
    """True for a file that this process created, which is deleted with its store; others become blank again."""
    superblocks: list[Superblock | None] = field(default_factory=lambda: [None] * SLOTS)

    @property
    def latest(self) -> Superblock | None:
        """Of the highest generation."""
        whole = [superblock for superblock in self.superblocks if superblock]
        return max(whole, key=lambda superblock: superblock.generation, default=None)


class Locks:
    """Locks on volumes and directories (flock), held until closed: a second run on one store is refused.

    What is locked is open, so whatever its path names later, it can be opened again by its descriptor.
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[int, ...], tuple[Path, int]] = {}

    def take(self, path: Path) -> int:
        """Its descriptor. Raises StoreError when another run holds it, when it is what another path of these locks
        names too, and for a file that a loop device lies on."""
        with translated(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            identity = _identity(os.fstat(descriptor))
            if identity in self._taken:
                raise StoreError(f"{path}: is the same as {self._taken[identity][0]}; name each volume once")
            if identity[0] == stat.S_IFREG and (device := _loop_device_on(path)):
                raise StoreError(
                    f"{path}: {device} lies on this file; use that device, or detach it first (losetup -d {device})"
                )
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreError(f"{path}: in use by another run") from error
            except OSError as error:
                raise IoFailure(
                    f"{path}: cannot be locked, so nobody would know that a run uses it: {error.strerror}; use a "
                    "directory on a file system that has locks (flock)"
                ) from error
        except BaseException:
            os.close(descriptor)
            raise
        self._taken[identity] = path, descriptor
        return descriptor

    def close(self) -> None:
        for _, descriptor in self._taken.values():
            os.close(descriptor)
        self._taken = {}


def is_locked(path: Path) -> bool | None:
    """Whether a run holds the lock of a directory or volume now; None where that cannot be seen."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look do not disturb each other
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """What is one file or one device under whatever names."""
    if stat.S_ISBLK(status.st_mode):
        return stat.S_IFBLK, status.st_rdev
    return stat.S_IFMT(status.st_mode), status.st_dev, status.st_ino


def _loop_device_on(path: Path) -> str:
    """The loop device that has the file at `path` for its medium; empty without one."""
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # detached meanwhile, or the file is deleted
            if os.path.samefile(backing.read_text(encoding="utf-8", errors="surrogateescape").rstrip("\n"), path):
                return f"/dev/{backing.parts[3]}"
    return ""


def open_volume(disk: Disk, path: Path, *, read_only: bool = False, descriptor: int | None = None) -> Volume:
    """Open what is there, or what `descriptor` has open, and read both superblocks; either may be missing.
    What is to be written is opened by its lock's descriptor (a simulated disk has none). Raises LinkError for such a
    file that has other names too (hard links), IoFailure.
    """
    with translated(path):
        if descriptor is not None and not read_only:
            require_one_name(path, os.fstat(descriptor))
        if descriptor is None:
            file = disk.open(str(path), read_only=read_only)
        else:
            file = disk.open(str(path), read_only=read_only, descriptor=descriptor)
        volume = Volume(path, file, disk.size(file))
        if volume.capacity_bytes >= SLOTS * PAGE:
            pages = Staging(SLOTS * PAGE)
            disk.read([(file, 0, pages.address, pages.nbytes)]).wait()
            slots = [pages.get(slot * PAGE, (slot + 1) * PAGE) for slot in range(SLOTS)]
            volume.superblocks = [Superblock.decode(page) for page in slots]
    return volume


def write_superblock(disk: Disk, volume: Volume, superblock: Superblock) -> None:
    """Write it to its slot; durable after a flush."""
    page = Staging(PAGE)
    page.put(superblock.encode())
    disk.write([(volume.file, superblock.slot * PAGE, page.address, PAGE)]).wait()
    volume.superblocks[superblock.slot] = superblock


def forget_superblock(disk: Disk, volume: Volume, slot: int) -> None:
    """Write zeros there. Durable when it returns."""
    page = Staging(PAGE)
    with translated(volume.path):
        disk.write([(volume.file, slot * PAGE, page.address, PAGE)]).wait()
        disk.flush(volume.file)
    volume.superblocks[slot] = None


def make_blank(disk: Disk, volume: Volume) -> None:
    """Mark a volume as ours and empty; whatever store was on it is gone. Durable when it returns."""
    pages = Staging(SLOTS * PAGE)
    with translated(volume.path):
        disk.write([(volume.file, 0, pages.address, pages.nbytes)]).wait()
        disk.flush(volume.file)
        volume.superblocks = [None] * SLOTS
        write_superblock(disk, volume, Superblock.of_blank(volume.capacity_bytes))
        disk.flush(volume.file)


def claim(disk: Disk, locks: Locks, place: Path, number: int, nbytes: int) -> Volume:
    """A volume of at least `nbytes` for a new store: a new file where `place` is a directory (or nothing yet), else the
    blank volume that `place` is or holds.

    Raises StoreError for what is not a blank volume of ours, DiskFullError where it does not fit, IoFailure.
    """
    blank = _find_blank(disk, locks, place, nbytes)
    if blank is not None:
        return blank
    path = place / f"volume-{number}{SUFFIX}"
    return create_file(disk, locks, path, nbytes)


def create_file(disk: Disk, locks: Locks, path: Path, nbytes: int) -> Volume:
    """A new file with its space allocated. Raises as `claim`; leaves nothing behind when it fails."""
    check_space(path, nbytes)
    with translated(path):
        file = disk.open(str(path), create_bytes=nbytes)
    try:
        locks.take(path)
        _flush_directory(path.parent)
        return Volume(path, file, nbytes, made=True)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def check_space(path: Path, nbytes: int) -> None:
    """Make the directory of `path`; raise DiskFullError when `nbytes` do not fit there, StoreError when it exists."""
    if path.exists():
        raise StoreError(
            f"{path}: exists already; it belongs to another run, so it is left alone; name another directory"
        )
    try:
        make_folder(path.parent)
        usage = shutil.disk_usage(path.parent)
    except OSError as error:
        raise IoFailure(f"{path.parent}: {error.strerror}") from error
    if usage.total and usage.free < nbytes:  # a total of nothing is a file system that does not count
        raise DiskFullError(
            f"{path.parent}: the store needs {format_bytes(nbytes)} here, {format_bytes(usage.free)} are free; "
            "free some space or name another directory with --volume"
        )


def candidates(places: Sequence[Path]) -> list[Path]:
    """The files and devices that may be volumes: a directory stands for the *.ssdplan files in it that are the user's
    own. What others put there, and links, are used only where they are named themselves.

    Raises UsageError for what is not there, LinkError for a link of the user's own in a directory.
    """
    found: dict[tuple[int, ...], Path] = {}
    for place in places:
        try:
            for path in own_volumes(place) if place.is_dir() else [place]:
                found.setdefault(_identity(path.stat()), path)
        except OSError as error:
            raise UsageError(f"{place}: {error.strerror}") from error
    return list(found.values())


def own_volumes(directory: Path) -> list[Path]:
    """The *.ssdplan files of a directory that belong to the user, sorted. Raises LinkError for a link, OSError."""
    found = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        status = path.lstat()
        if status.st_uid != os.geteuid():
            continue
        if stat.S_ISLNK(status.st_mode):
            raise LinkError(
                f"{path}: is a symbolic link, and a directory stands for files of its own only; remove the link, and "
                "name what it points at"
            )
        found.append(path)
    return found


def others_volumes(directory: Path) -> list[Path]:
    """The *.ssdplan entries of a directory that belong to other users, sorted: `candidates` leaves them out."""
    return [path for path in sorted(directory.glob(f"*{SUFFIX}")) if path.lstat().st_uid != os.geteuid()]


@dataclass(frozen=True)
class Blank:
    """What of a blank volume is its user's: bytes [start, end) of a file or device."""

    path: Path
    start: int
    end: int


@contextlib.contextmanager
def held_blank(place: Path, least_bytes: int = 0) -> Iterator[Blank | None]:
    """The blank volume that `place` is, or that a run would find in it for `least_bytes`, locked for as long as the
    context lasts; None for a directory without. Only its lock is held, so another engine may open it.

    Raises StoreError for what is not a blank volume of ours, IoFailure.
    """
    disk: Disk = native.Engine()
    locks = Locks()
    try:
        with translated(place):
            volume = _find_blank(disk, locks, place, least_bytes if place.is_dir() else 0)
        disk.close()
        yield Blank(volume.path, SLOTS * PAGE, volume.capacity_bytes) if volume else None
    finally:
        disk.close()
        locks.close()


def is_device(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISBLK(path.stat().st_mode)
    return False


def refuse_foreign(disk: Disk, volume: Volume) -> None:
    """Raise StoreError when the volume holds something: a store, or bytes that are not ours."""
    latest = volume.latest
    if latest and latest.blank:
        return
    if latest:
        raise StoreError(f"{volume.path}: holds the store {latest.store.hex()[:8]} (generation {latest.generation})")
    with translated(volume.path):
        for start in (0, max(volume.capacity_bytes - _PROBED_BYTES, 0) // PAGE * PAGE):
            length = min(_PROBED_BYTES, volume.capacity_bytes - start) // PAGE * PAGE
            if not length:
                continue
            probe = Staging(length)
            disk.read([(volume.file, start, probe.address, length)]).wait()
            if is_ours(probe.get(0, PAGE)):
                raise StoreError(f"{volume.path}: holds a store of another version of ssdplan, or a damaged one")
            if any(probe.get(0, length)):
                raise StoreError(f"{volume.path}: holds data that is not ours")


def _find_blank(disk: Disk, locks: Locks, place: Path, nbytes: int) -> Volume | None:
    """The blank volume that `place` is, or the first that it holds and nobody uses; None for a directory without."""
    if not place.exists():
        return None
    if not place.is_dir():
        seen = open_volume(disk, place, read_only=True)
        if not (seen.latest and seen.latest.blank):
            try:
                refuse_foreign(disk, seen)
            except StoreError as error:
                raise StoreError(f"{error}; it is left alone; name a blank volume, or a directory") from None
            raise StoreError(f"{place}: is not a volume of ssdplan; `ssdplan volume init {place}` makes it one")
        disk.close_file(seen.file)
        volume = _open_locked(disk, locks, place)
        if volume.capacity_bytes < nbytes:
            raise DiskFullError(
                f"{place}: the store needs {format_bytes(nbytes)} here, this volume has "
                f"{format_bytes(volume.capacity_bytes)}; name a larger one"
            )
        return volume
    for path in candidates([place]):
        seen = open_volume(disk, path, read_only=True)
        disk.close_file(seen.file)
        if seen.latest and seen.latest.blank and seen.capacity_bytes >= nbytes:
            with contextlib.suppress(StoreError):  # another run was faster
                return _open_locked(disk, locks, path)
    return None


def _open_locked(disk: Disk, locks: Locks, path: Path) -> Volume:
    volume = open_volume(disk, path, descriptor=locks.take(path))
    if not (volume.latest and volume.latest.blank):
        raise StoreError(f"{path}: in use by another run")
    return volume


def _flush_directory(directory: Path) -> None:
    """A new name in a directory is durable only after this."""
    with translated(directory):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def translated(path: Path | None = None) -> Iterator[None]:
    """Errors of the engine and the system as ours, each with its exit code."""
    try:
        yield
    except SsdplanError:
        raise
    except OSError as error:
        name = error.filename or path
        if room := no_room(error):
            raise DiskFullError(f"{name}: {room} ({error})") from error
        if error.errno == errno.EEXIST:
            raise StoreError(f"{name}: exists already; it belongs to another run, so it is left alone") from error
        if error.errno == errno.EBUSY:
            raise StoreError(f"{name}: in use: mounted, or held by another program") from error
        if isinstance(error, native.LostVolumeError):
            raise IoFailure(
                f"{name}: this volume is gone ({error}); connect it again, nothing durable is lost"
            ) from error
        if error.errno == errno.EINVAL and path is not None:
            raise IoFailure(
                f"{name}: this file system refuses direct I/O (O_DIRECT); "
                "use a directory on ext4, xfs or btrfs on an ssd"
            ) from error
        raise IoFailure(str(error)) from error
