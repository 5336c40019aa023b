"""Survey: finds the stores that lie on some volumes (after a crash, several), and clears away those of no use.

Owns no format. Looking changes nothing, and what it tells is enough to choose a store.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdplan import native
from ssdplan.plans.errors import StoreError
from ssdplan.plans.units import PAGE

from .recovery import choose, damaged_superblocks, last_table
from .superblock import SLOTS
from .volumes import SUFFIX, Disk, Locks, Volume, candidates, forget_superblock, make_blank, open_volume


@dataclass(frozen=True)
class Lying:
    """A store, or what is left of one."""

    store: str
    """Its identity, in hex."""
    paths: tuple[Path, ...]
    """Of its volumes that were found, in order of number."""
    numbers: tuple[int, ...]
    """Of these volumes in the store."""
    generation: int
    """The one that it would open at; 0 holds nothing."""
    plan_sha256: str
    metadata: dict[str, Any]
    """Of that generation. Of a store that cannot be opened, of any generation whose table is whole."""
    refused: str
    """Why it cannot be opened; empty when it can."""
    fell_back: bool
    """Whether there was a later generation, which is damaged."""
    previous: dict[str, Any] | None = None
    """The metadata of the generation before, if it is whole; generation 0 has none."""


def survey(places: Sequence[Path]) -> list[Lying]:
    """Every store on `places` (volumes, or directories that hold them); places that are not there hold none.

    Raises StoreError for a device in use, IoFailure.
    """
    disk: Disk = native.Engine()
    try:
        stores: dict[bytes, list[Volume]] = {}
        for path in candidates([place for place in places if place.exists()]):
            volume = open_volume(disk, path, read_only=True)
            latest = volume.latest
            if latest and not latest.blank:
                stores.setdefault(latest.store, []).append(volume)
            else:
                disk.close_file(volume.file)
        return [_described(disk, store, volumes) for store, volumes in stores.items()]
    finally:
        disk.close()


def _described(disk: Disk, store: bytes, volumes: list[Volume]) -> Lying:
    superblocks = {volume.path: volume.latest for volume in volumes if volume.latest}
    paths = tuple(sorted(superblocks, key=lambda path: superblocks[path].volume))
    numbers = tuple(superblocks[path].volume for path in paths)
    try:
        found = choose(disk, volumes)
    except StoreError as error:
        latest = max(superblocks.values(), key=lambda superblock: superblock.generation)
        table = last_table(disk, volumes)
        metadata = table.metadata if table else {}
        return Lying(
            store.hex(), paths, numbers, latest.generation, latest.plan_sha256, metadata, str(error), fell_back=False
        )
    generation = found.superblock.generation
    fell_back = any(latest.generation > generation for latest in superblocks.values()) or any(
        damaged_superblocks(disk, volume) for volume in volumes
    )
    metadata = found.table.metadata if found.table else {}
    return Lying(
        store.hex(),
        paths,
        numbers,
        generation,
        found.superblock.plan_sha256,
        metadata,
        "",
        fell_back=fell_back,
        previous=found.previous.metadata if found.previous else {} if generation == 1 else None,
    )


def discard(lying: Lying, made: Sequence[bool]) -> None:
    """Clear a store away: delete the files that were `made` for it, of its `paths` in order, and leave other volumes
    blank. What is no volume of it any more is left alone. Raises StoreError when a run has it, IoFailure."""
    disk: Disk = native.Engine()
    locks = Locks()
    try:
        descriptors = [locks.take(path) for path in lying.paths]
        delete: list[Path] = []
        for path, descriptor, own in zip(lying.paths, descriptors, made, strict=True):
            volume = open_volume(disk, path, descriptor=descriptor)
            if volume.latest is None or volume.latest.store.hex() != lying.store:
                continue
            if own and _is_plain(path):
                delete.append(path)
            else:
                make_blank(disk, volume)
        for path in delete:
            path.unlink(missing_ok=True)
    finally:
        disk.close()
        locks.close()


def withdraw(lying: Lying) -> None:
    """Take a store's last generation back: from now on it opens at the one before, which must be whole. Durable when it
    returns; a crash within leaves one or the other. Raises StoreError when a run has it, IoFailure."""
    assert lying.previous is not None and lying.generation, "there is no generation before"
    disk: Disk = native.Engine()
    locks = Locks()
    try:
        volumes = [open_volume(disk, path, descriptor=locks.take(path)) for path in lying.paths]
        for volume in volumes:
            slot = lying.generation % SLOTS
            superblock = volume.superblocks[slot]
            if superblock and superblock.generation == lying.generation and superblock.store.hex() == lying.store:
                forget_superblock(disk, volume, slot)
    finally:
        disk.close()
        locks.close()


def sweep(directory: Path) -> None:
    """Delete the files of a directory that were to become volumes when a crash came: those that nobody has, without a
    whole superblock, and nothing where that of a first generation would be. Raises IoFailure."""
    disk: Disk = native.Engine()
    locks = Locks()
    try:
        for path in filter(_is_plain, sorted(directory.glob(f"volume-*{SUFFIX}"))):
            with contextlib.suppress(StoreError):  # another run is making it
                volume = open_volume(disk, path, read_only=True, descriptor=locks.take(path))
                short = volume.capacity_bytes < SLOTS * PAGE
                if volume.latest is None and (short or 1 not in damaged_superblocks(disk, volume)):
                    path.unlink()
    finally:
        disk.close()
        locks.close()


def _is_plain(path: Path) -> bool:
    """Whether it is a file itself, as a run makes them, and no link or device."""
    return path.is_file() and not path.is_symlink()
