"""Survey: which stores lie on some volumes, after a crash, or several; and clearing away those of no use.

Owns no format. Looking changes nothing, and what it tells is enough to choose a store.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdplan import native
from ssdplan.plans.errors import StoreError

from .recovery import choose, last_table
from .volumes import Disk, Locks, Volume, candidates, make_blank, open_volume


@dataclass(frozen=True)
class Lying:
    """A store, or what is left of one."""

    store: str
    """Its identity, in hex."""
    paths: tuple[Path, ...]
    """Of its volumes that were found."""
    generation: int
    """The one that it would open at; 0 holds nothing."""
    plan_sha256: str
    metadata: dict[str, Any]
    """Of that generation. Of a store that cannot be opened, of any generation whose table is whole."""
    refused: str
    """Why it cannot be opened; empty when it can."""


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
    paths = tuple(volume.path for volume in volumes)
    try:
        found = choose(disk, volumes)
    except StoreError as error:
        latest = volumes[0].latest
        assert latest is not None
        table = last_table(disk, volumes)
        return Lying(
            store.hex(), paths, latest.generation, latest.plan_sha256, table.metadata if table else {}, str(error)
        )
    metadata = found.table.metadata if found.table else {}
    return Lying(store.hex(), paths, found.superblock.generation, found.superblock.plan_sha256, metadata, "")


def discard(lying: Lying, made: Sequence[bool]) -> None:
    """Clear a store away: delete the volumes that were `made` for it and leave the others blank. Raises StoreError when
    a run has it, IoFailure."""
    disk: Disk = native.Engine()
    locks = Locks()
    try:
        for path, own in zip(lying.paths, made, strict=True):
            locks.take(path)
            if not own:
                make_blank(disk, open_volume(disk, path))
        for path, own in zip(lying.paths, made, strict=True):
            if own:
                path.unlink(missing_ok=True)
    finally:
        disk.close()
        locks.close()
