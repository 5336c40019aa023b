"""Recovery: finds a store's volumes by their superblocks, wherever they were moved to, and the generation to open.

Owns the choice after a crash. It reads and never writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ssdplan import native
from ssdplan.plans.errors import StoreError
from ssdplan.plans.units import PAGE

from .superblock import SLOTS, Superblock, is_ours
from .table import Table
from .volumes import Disk, Locks, Staging, Volume, candidates, open_volume, others_volumes, translated

_ANY_BYTES = 1 << 62
"""Where places are not used, they need not lie in the store."""


@dataclass(frozen=True)
class Found:
    """A store as it lies on its volumes."""

    volumes: tuple[Volume, ...]
    """In order of number."""
    superblock: Superblock
    """Of the generation to open, as one of the volumes has it."""
    table: Table | None
    """Of that generation; None for generation 0, which holds nothing."""
    previous: Table | None
    """Of the generation before, where the store keeps it and it is still whole."""
    complete: tuple[Volume, ...]
    """The volumes that have that generation's superblock and table, both whole."""

    def before(self) -> "Found":
        """The same store at the generation before, to be read. Raises StoreError where that is not there."""
        if self.previous is None:
            raise StoreError(f"{self.volumes[0].path}: has no generation before the last that is whole")
        return replace(self, table=self.previous, previous=None)


def find(disk: Disk, places: Sequence[Path], *, locks: Locks, read_only: bool = False) -> list[Volume]:
    """The open volumes of the one store that lies on `places` (files, devices, or directories that hold them), locked.

    Raises StoreError when there is no store, or more than one, or
    another run has it.
    """
    stores: dict[bytes, list[Path]] = {}
    strangers: list[Path] = []
    for path in candidates(places):
        volume = open_volume(disk, path, read_only=True)
        latest = volume.latest
        if latest and not latest.blank:
            stores.setdefault(latest.store, []).append(path)
        elif latest is None:
            strangers.append(path)
        disk.close_file(volume.file)
    names = " ".join(str(place) for place in places)
    if not stores:
        damaged = f"; {strangers[0]} has no superblock of ssdplan that is whole" if strangers else ""
        others = [path for place in places if place.is_dir() for path in others_volumes(place)]
        left = f"; {others[0]} is another user's, and is looked at only where it is named itself" if others else ""
        raise StoreError(f"{names}: no store lies there{damaged}{left}")
    if len(stores) > 1:
        listed = "; ".join(f"{identity.hex()[:8]} on {' '.join(map(str, paths))}" for identity, paths in stores.items())
        raise StoreError(f"{names}: {len(stores)} stores lie there, name the volumes of one: {listed}")
    (paths,) = stores.values()
    (identity,) = stores
    volumes = []
    for path in paths:
        volume = open_volume(disk, path, read_only=read_only, descriptor=locks.take(path))
        if not (volume.latest and volume.latest.store == identity):
            raise StoreError(f"{path}: became another volume while it was opened")
        volumes.append(volume)
    return volumes


def choose(disk: Disk, volumes: Sequence[Volume]) -> Found:
    """The last generation of which a superblock and a table are whole. Raises StoreError.

    One volume's superblock is enough: the first of them is written only after the data and the tables of that
    generation are durable on every volume.
    """
    ordered = _in_order(disk, volumes)
    whole = [superblock for volume in ordered for superblock in volume.superblocks if superblock]
    refused = ""
    for generation in sorted({superblock.generation for superblock in whole}, reverse=True):
        try:
            superblock, table, complete = _generation(disk, ordered, generation)
        except StoreError as error:
            refused = refused or str(error)
            continue
        previous = None
        if generation and superblock.keep > 1:
            try:
                _, previous, _ = _generation(disk, ordered, generation - 1)
            except StoreError:
                previous = None  # its table may have been overwritten by a commit that was cut off
        return Found(tuple(ordered), superblock, table, previous, complete)
    raise StoreError(f"{ordered[0].path}: no generation of this store is whole: {refused}")


def read_table(disk: Disk, volume: Volume, superblock: Superblock) -> Staging:
    """The bytes of the table that `superblock` speaks of. Raises StoreError when they are not those."""
    if superblock.table_start + superblock.table_length > volume.capacity_bytes:
        raise StoreError(f"{volume.path}: the table of generation {superblock.generation} lies beyond its end")
    staging = Staging(max(superblock.table_length, PAGE))
    with translated(volume.path):
        disk.read([(volume.file, superblock.table_start, staging.address, superblock.table_length)]).wait()
    if native.checksum(staging.address, superblock.table_length) != superblock.table_checksum:
        raise StoreError(
            f"{volume.path}: the table of generation {superblock.generation}, at byte {superblock.table_start}, "
            "is not what was written there: its checksum differs"
        )
    return staging


def store_bytes(volumes: Sequence[Volume], superblock: Superblock) -> int:
    """What places of a store can lie in, by the volumes' sizes."""
    striping = superblock.striping
    room = []
    for number, volume in enumerate(volumes):
        share = striping.dealing.count(number) * striping.stripe_bytes
        room.append(max(volume.capacity_bytes - superblock.data_start, 0) // share)
    return min(room) * len(striping.dealing) * striping.stripe_bytes


def damaged_superblocks(disk: Disk, volume: Volume) -> list[int]:
    """The slots that hold something of ours that is no superblock any more, or not one of this store."""
    pages = Staging(SLOTS * PAGE)
    with translated(volume.path):
        disk.read([(volume.file, 0, pages.address, pages.nbytes)]).wait()
    damaged = []
    for slot in range(SLOTS):
        page = pages.get(slot * PAGE, (slot + 1) * PAGE)
        if volume.superblocks[slot] is None and (is_ours(page) or any(page)):
            damaged.append(slot)
    return damaged


def _generation(
    disk: Disk, volumes: Sequence[Volume], generation: int
) -> tuple[Superblock, Table | None, tuple[Volume, ...]]:
    """One generation's superblock and table, and the volumes that have both. Raises StoreError when none has."""
    complete: list[Volume] = []
    chosen: Superblock | None = None
    table: Table | None = None
    refused = f"no superblock of generation {generation}"
    for volume in volumes:
        superblock = volume.superblocks[generation % SLOTS]
        if superblock is None or superblock.generation != generation or superblock.store != _latest(volume).store:
            continue
        if chosen and _shared(chosen) != _shared(superblock):
            raise StoreError(f"{volume.path}: its generation {generation} is another than {complete[0].path}'s")
        try:
            if superblock.table_length:
                data = read_table(disk, volume, superblock).get(0, superblock.table_length)
                table = table or Table.decode(data, store_bytes(volumes, superblock))
        except StoreError as error:
            refused = str(error)
            continue
        complete.append(volume)
        chosen = chosen or superblock
    if chosen is None:
        raise StoreError(refused)
    return chosen, table, tuple(complete)


def _shared(superblock: Superblock) -> tuple[object, ...]:
    """What the volumes of one generation agree on."""
    return (
        superblock.striping,
        superblock.table_bytes,
        superblock.table_length,
        superblock.table_checksum,
        superblock.keep,
    )


def _in_order(disk: Disk, volumes: Sequence[Volume]) -> list[Volume]:
    """All volumes of the store by number. Raises StoreError, naming one that is missing, cut off or there twice."""
    by_number: dict[int, Volume] = {}
    for volume in volumes:
        latest = _latest(volume)
        if volume.capacity_bytes < latest.capacity_bytes:
            raise StoreError(
                f"{volume.path}: has {volume.capacity_bytes} bytes, but {latest.capacity_bytes} when it was made: "
                "it was cut off"
            )
        other = by_number.setdefault(latest.volume, volume)
        if other is not volume:
            raise StoreError(f"{other.path} and {volume.path} are copies of one volume; name one of them")
    first = _latest(volumes[0])
    missing = sorted(set(first.striping.dealing) - set(by_number))
    if missing:
        raise StoreError(
            f"volume {missing[0]} of the {first.striping.volumes} of store {first.store.hex()[:8]} is missing"
            f"{_last_seen(disk, volumes, missing[0])}; name the place where it is with --volume"
        )
    return [by_number[number] for number in sorted(by_number)]


def last_table(disk: Disk, volumes: Sequence[Volume]) -> Table | None:
    """The table of the last generation of any of these volumes of a store, not all of which may be there."""
    for volume in volumes:
        latest = _latest(volume)
        if latest.table_length:
            try:
                return Table.decode(read_table(disk, volume, latest).get(0, latest.table_length), _ANY_BYTES)
            except StoreError:
                continue
    return None


def _last_seen(disk: Disk, volumes: Sequence[Volume], number: int) -> str:
    """Where a volume was at the last commit, as far as another one's table tells."""
    table = last_table(disk, volumes)
    return f" (it was last at {table.volumes[number]})" if table and number < len(table.volumes) else ""


def _latest(volume: Volume) -> Superblock:
    latest = volume.latest
    assert latest is not None and not latest.blank, "only volumes of a store get here"
    return latest
