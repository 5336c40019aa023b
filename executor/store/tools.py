"""What `ssdplan volume` does: makes a volume, tells what lies on volumes, verifies every checksum of a store.

Owns no format. It writes in `initialise` alone, and there only on what is new, ours, or twice told.
"""

import contextlib
import errno
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssdplan import native
from ssdplan.plans.errors import StoreError, UsageError
from ssdplan.plans.units import PAGE, format_bytes

from .layout import LONGEST_EXTENT
from .recovery import Found, choose, damaged_superblocks, find, read_table, store_bytes
from .superblock import Superblock
from .table import Table
from .volumes import (
    SUFFIX,
    Disk,
    Locks,
    Request,
    Staging,
    Volume,
    candidates,
    create_file,
    is_device,
    make_blank,
    open_volume,
    refuse_foreign,
    translated,
)

LEAST_VOLUME_BYTES = 4 << 20
_AHEAD = 8
"""Extents on their way while one is verified."""

Progress = Callable[[float], None]


@dataclass(frozen=True)
class VolumeInfo:
    """What one file or device is."""

    path: Path
    capacity_bytes: int
    superblock: Superblock | None
    """The latest whole one; None for what is no volume of ours."""


@dataclass(frozen=True)
class Damage:
    """Bytes that are not what was written there."""

    path: Path
    offset: int
    """Byte of the volume at which it begins."""
    what: str
    generation: int | None
    mendable: bool = False
    """What a commit that was cut off may leave, and the next one makes good; no state is lost."""

    def __str__(self) -> str:
        generation = "" if self.generation is None else f", generation {self.generation}"
        return f"{self.path}, byte {self.offset}: {self.what}{generation}"


@dataclass(frozen=True)
class Checked:
    """What a check of a store found."""

    store: str
    volumes: tuple[Path, ...]
    generations: tuple[int, ...]
    """Those whose extents were read, the one that the store opens at first."""
    extents: int
    nbytes: int
    damages: tuple[Damage, ...]

    @property
    def damaged(self) -> bool:
        """Whether there is more than what a commit that was cut off may leave."""
        return any(not damage.mendable for damage in self.damages)


def initialise(place: Path, nbytes: int | None, *, force: bool) -> VolumeInfo:
    """Make a blank volume: of a block device or an existing volume file as large as it is, of a new file (or one in a
    directory) with `nbytes`.

    Refuses (StoreError) what holds a store or foreign data unless `force`, and what is mounted or in use always.
    Raises UsageError, DiskFullError, IoFailure.
    """
    disk: Disk = native.Engine()
    locks = Locks()
    try:
        path = place / f"volume-0{SUFFIX}" if place.is_dir() else place
        if not path.exists():
            if nbytes is None:
                raise UsageError(f"{path}: a new file needs a size; name it with --size")
            if nbytes < LEAST_VOLUME_BYTES:
                raise UsageError(f"--size {nbytes}: a volume has at least {format_bytes(LEAST_VOLUME_BYTES)}")
            if path.parent == Path("/dev"):
                raise UsageError(f"{path}: no such device")
            volume = create_file(disk, locks, path, nbytes // PAGE * PAGE)
        else:
            if nbytes is not None:
                raise UsageError(f"{path}: exists, so it has its size; leave out --size")
            if not path.is_file() and not is_device(path):
                raise UsageError(f"{path}: neither a file nor a block device")
            volume = _claimed(disk, path, locks.take(path), force=force)
        with _removed_on_error(volume):
            make_blank(disk, volume)
        return VolumeInfo(path, volume.capacity_bytes, volume.latest)
    finally:
        disk.close()
        locks.close()


def inspect(places: Sequence[Path]) -> list[VolumeInfo]:
    """What each file or device of `places` is; a directory stands for its volumes. A run may go on meanwhile."""
    disk: Disk = native.Engine()
    try:
        found = []
        for path in candidates(places):
            volume = open_volume(disk, path, read_only=True)
            found.append(VolumeInfo(path, volume.capacity_bytes, volume.latest))
            disk.close_file(volume.file)
        return found
    finally:
        disk.close()


def check(places: Sequence[Path], progress: Progress) -> Checked:
    """Read every extent of the last two generations and verify every checksum. The store is locked meanwhile.

    Raises StoreError when there is no store, it is not whole, no generation of it can be opened or a run uses it.
    """
    disk: Disk = native.Engine()
    locks = Locks()
    try:
        return check_volumes(disk, find(disk, places, locks=locks, read_only=True), progress)
    finally:
        disk.close()
        locks.close()


def check_volumes(disk: Disk, volumes: Sequence[Volume], progress: Progress) -> Checked:
    """`check` of open volumes."""
    found = choose(disk, volumes)
    damages = list(_structure(disk, found))
    tables = [(found.superblock.generation, found.table), (found.superblock.generation - 1, found.previous)]
    extents: dict[tuple[int, int], _Extent] = {}
    for generation, table in tables:
        for row in table.extents if table else ():
            name = f"byte {int(row['offset'])} of {table.tensors[row['tensor']]}" if table else ""
            extents.setdefault(
                (int(row["place"]), int(row["checksum"])),
                _Extent(int(row["place"]), int(row["nbytes"]), int(row["checksum"]), name, generation),
            )
    total = sum(extent.nbytes for extent in extents.values())
    done = 0
    for extent, whole in _verified(disk, found, sorted(extents.values(), key=lambda extent: extent.place)):
        if not whole:
            volume, offset = _where(found, extent)
            what = f"{extent.name} ({extent.nbytes} bytes) is not what was written, its checksum differs"
            damages.append(Damage(volume.path, offset, what, extent.generation))
        done += extent.nbytes
        progress(done / total)
    generations = tuple(generation for generation, table in tables if table)
    paths = tuple(volume.path for volume in found.volumes)
    return Checked(found.superblock.store.hex(), paths, generations, len(extents), total, tuple(damages))


@dataclass(frozen=True)
class _Extent:
    place: int
    nbytes: int
    checksum: int
    name: str
    generation: int


def _structure(disk: Disk, found: Found) -> Iterator[Damage]:
    """Superblocks and tables that are not whole."""
    for volume in found.volumes:
        for slot in damaged_superblocks(disk, volume):
            yield Damage(volume.path, slot * PAGE, f"superblock {slot} is not whole", None)
        for superblock in volume.superblocks:
            if superblock is None or superblock.store != found.superblock.store or not superblock.table_length:
                continue
            try:
                data = read_table(disk, volume, superblock).get(0, superblock.table_length)
                Table.decode(data, store_bytes(found.volumes, superblock))
            except StoreError:
                older = superblock.generation < found.superblock.generation and found.previous is None
                why = " (a commit that was cut off has begun to overwrite it)" if older else ""
                what = f"the table is not whole{why}"
                yield Damage(volume.path, superblock.table_start, what, superblock.generation, mendable=older)
        generations = {superblock.generation for superblock in volume.superblocks if superblock}
        if found.superblock.generation not in generations:
            what = "the superblock of the last generation is missing (a commit was cut off here; the next run mends it)"
            yield Damage(
                volume.path,
                found.superblock.slot * PAGE,
                what,
                found.superblock.generation,
                mendable=not damaged_superblocks(disk, volume),
            )


def _verified(disk: Disk, found: Found, extents: Sequence[_Extent]) -> Iterator[tuple[_Extent, bool]]:
    """Each extent, and whether it has its checksum; reading goes on ahead."""
    free = [Staging(LONGEST_EXTENT) for _ in range(min(_AHEAD, len(extents)))]
    under_way: deque[tuple[_Extent, Staging, Request]] = deque()
    try:
        for extent in [*extents, *[None] * len(free)]:
            if under_way and (extent is None or not free):
                first, memory, request = under_way.popleft()
                whole = True
                with translated():
                    try:
                        request.wait()
                    except OSError as error:
                        if error.errno != errno.EIO:
                            raise
                        whole = False  # a sector that the drive itself knows to be lost
                yield first, whole and native.checksum(memory.address, first.nbytes) == first.checksum
                free.append(memory)
            if extent is not None:
                memory = free.pop()
                under_way.append((extent, memory, disk.read(_segments(found, extent, memory.address))))
    finally:
        for _, _, request in under_way:
            with contextlib.suppress(OSError):
                request.wait()


def _segments(found: Found, extent: _Extent, address: int) -> list[tuple[int, int, int, int]]:
    start = found.superblock.data_start
    return [
        (found.volumes[volume].file, start + begin, address + within, length)
        for volume, begin, within, length in found.superblock.striping.locate(extent.place, extent.nbytes)
    ]


def _where(found: Found, extent: _Extent) -> tuple[Volume, int]:
    volume, begin, *_ = found.superblock.striping.locate(extent.place, extent.nbytes)[0]
    return found.volumes[volume], found.superblock.data_start + begin


def _claimed(disk: Disk, path: Path, descriptor: int, *, force: bool) -> Volume:
    """An existing file or device that `descriptor` has open, open for writing, after a look at what it holds. It is
    opened once: what was looked at is what will be written, whatever the path names meanwhile."""
    volume = open_volume(disk, path, descriptor=descriptor)
    if volume.capacity_bytes < LEAST_VOLUME_BYTES:
        raise UsageError(f"{path}: has {volume.capacity_bytes} bytes, a volume at least {LEAST_VOLUME_BYTES}")
    if not force:
        try:
            refuse_foreign(disk, volume)
        except StoreError as error:
            raise StoreError(f"{error}; it is left alone; to lose what it holds, repeat with --force") from None
    return volume


@contextlib.contextmanager
def _removed_on_error(volume: Volume) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if volume.made:
            volume.path.unlink(missing_ok=True)
        raise
