"""The tensor store: training states as extents on volumes, each with its checksum, in generations that survive a crash.

Owns what is durable and when (docs/store-format.md): copy-on-write, the commit protocol, and the check of every byte
that is read, by checksums that it takes itself or that whoever took them in passing brings. It moves bytes between its
address space and memory; it does not know what they mean.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from ssdplan import native
from ssdplan.plans.documents.stripe_shares import deal
from ssdplan.plans.errors import IoFailure, StoreError, UsageError
from ssdplan.plans.units import PAGE

from .generations import NOWHERE, Generations, table_bytes_of
from .layout import MOST_KEPT, Layout, Record
from .recovery import Found, choose, find, read_table
from .striping import Striping
from .superblock import Superblock, data_start
from .table import Table
from .volumes import Disk, Locks, Request, Staging, Volume, claim, make_blank, translated, write_superblock

Reading = Literal["", "last", "before"]
Segment = tuple[int, int, int, int]
"""File, offset, address in memory, bytes."""
_FILL_BYTES = 16 << 20

Progress = Callable[[float], None]


class Store:
    """A store that is open. Any threads may read and write at once, as long as no range is written while it is read or
    written elsewhere: nothing is locked while bytes move, and each call returns when its own have.

    `commit` makes what was written until then a generation; after a crash the store opens at the last one committed
    (or, cut off within a commit, at the one that was being committed). Nothing that the last two generations hold is
    overwritten; one that keeps a single generation takes less space. A store made without `durable` has no generations
    and one place for every extent.
    """

    def __init__(
        self, disk: Disk, volumes: Sequence[Volume], layout: Layout, superblock: Superblock, *, durable: bool
    ) -> None:
        self._disk, self._volumes, self._layout, self._superblock = disk, tuple(volumes), layout, superblock
        self._durable = durable
        self._opened = False
        self._locks = Locks()
        self._failure = ""
        self._generations = Generations(layout, durable=durable)
        self.metadata: dict[str, Any] = {}
        """What the last commit was given."""
        self.bytes_read = self.bytes_written = 0
        """Of states, since the store was opened; tables and superblocks are not counted."""
        self._counting = threading.Lock()
        self._under_way: dict[tuple[int, int], list[int]] = {}
        """Offset and bytes of a read or write -> the place of each of its extents that it reads or writes."""

    @classmethod
    def create(
        cls,
        places: Sequence[Path],
        records: Sequence[Record],
        plan_sha256: str,
        bandwidths: Sequence[float] | None = None,
        *,
        durable: bool = False,
        keep: int = MOST_KEPT,
        stripe_bytes: int | None = None,
        first_volume: int = 0,
        identity: bytes | None = None,
    ) -> Self:
        """Make a store on one volume for each of `places` (a directory, or a blank volume made by `ssdplan volume
        init`), striped by `bandwidths` (equal if None). Files are numbered from `first_volume`. `keep`: how many
        generations a durable store holds, 1 or 2. `identity`: 16 bytes of its own by which it is known again (random if
        None).

        Raises DiskFullError before anything is written where there is no space, IoFailure where direct I/O is refused,
        StoreError where something else lies or another run works. What it made is removed when it fails.
        """
        if not places:
            raise UsageError("a store needs at least one volume")
        dealing = deal(bandwidths or [1.0] * len(places))
        striping = Striping(dealing, stripe_bytes) if stripe_bytes else Striping(dealing)
        layout = Layout.of(records, durable=durable, keep=keep)
        table_bytes = table_bytes_of(layout, len(places)) if durable else PAGE
        sizes = required_bytes(layout, striping, table_bytes)
        disk: Disk = native.Engine()
        locks = Locks()
        volumes: list[Volume] = []
        try:
            for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
                volumes.append(claim(disk, locks, place, first_volume + number, size))
            store = cls.format(
                disk, volumes, layout, striping, table_bytes, plan_sha256, durable=durable, keep=keep, identity=identity
            )
            store._locks = locks
            return store
        except BaseException:
            for volume in volumes:
                if not volume.made:
                    make_blank(disk, volume)
            disk.close()
            locks.close()
            for volume in volumes:
                if volume.made:
                    volume.path.unlink(missing_ok=True)
            raise

    @classmethod
    def required_bytes(cls, records: Sequence[Record], *, durable: bool, keep: int = MOST_KEPT) -> int:
        """What a store of these records takes on one volume, superblocks and tables included."""
        layout = Layout.of(records, durable=durable, keep=keep)
        (nbytes,) = required_bytes(layout, Striping(b"\x00"), table_bytes_of(layout, 1) if durable else PAGE)
        return nbytes

    @classmethod
    def format(
        cls,
        disk: Disk,
        volumes: Sequence[Volume],
        layout: Layout,
        striping: Striping,
        table_bytes: int,
        plan_sha256: str,
        *,
        durable: bool,
        keep: int = MOST_KEPT,
        identity: bytes | None = None,
    ) -> Self:
        """Write generation 0, which holds nothing, on open volumes whose contents may go."""
        first = Superblock(
            store=identity or secrets.token_bytes(16),
            volume=0,
            striping=striping,
            generation=0,
            capacity_bytes=0,
            table_bytes=table_bytes,
            table_length=0,
            table_checksum=0,
            plan_sha256=plan_sha256,
            keep=keep,
        )
        store = cls(disk, volumes, layout, first, durable=durable)
        with store._failing():
            for volume in volumes:
                if not volume.made:  # an older store's superblocks are gone before the new one's first is there
                    make_blank(disk, volume)
            store._write_generation(0, {})
        return store

    @classmethod
    def open(cls, places: Sequence[Path], records: Sequence[Record], reading: Reading = "") -> Self:
        """Open the store that lies on `places` (volumes, or directories that hold them) at its last generation, to go
        on writing it; or for `reading` that or the one before it, and then nothing on the volumes changes. `records`
        must be those that it was made for.

        Raises StoreError for a foreign, missing or damaged volume and for a store in use, IoFailure.
        """
        disk: Disk = native.Engine()
        locks = Locks()
        try:
            volumes = find(disk, places, locks=locks, read_only=bool(reading))
            store = cls.recover(disk, volumes, records, reading)
            store._locks = locks
            return store
        except BaseException:
            disk.close()
            locks.close()
            raise

    @classmethod
    def recover(cls, disk: Disk, volumes: Sequence[Volume], records: Sequence[Record], reading: Reading = "") -> Self:
        """Open a store on open volumes, and mend what a crash within a commit left unfinished unless for `reading`."""
        with translated():
            found = choose(disk, volumes).before() if reading == "before" else choose(disk, volumes)
            layout = Layout.of(records, durable=True, keep=found.superblock.keep)
            store = cls(disk, found.volumes, layout, found.superblock, durable=True)
            store._opened = True
            store._generations.adopt(found)
            store.metadata = found.table.metadata if found.table else {}
            store._failure = "it was opened to be read" if reading else ""
            if not reading:
                store._mend(found)
        return store

    @property
    def engine(self) -> str:
        """The engine that moves the bytes, in a line for people."""
        return self._disk.description

    def register(self, address: int, nbytes: int) -> str:
        """Let the engine map this memory once instead of at every transfer. Returns why it could not; that is slower,
        not wrong. `unregister` it before the memory goes."""
        return self._disk.register(address, nbytes)

    def unregister(self, address: int) -> None:
        self._disk.unregister(address)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Of its volumes, in order."""
        return tuple(volume.path for volume in self._volumes)

    @property
    def nbytes(self) -> int:
        """What its volumes take, on all drives together."""
        return sum(volume.capacity_bytes for volume in self._volumes)

    @property
    def generation(self) -> int:
        """The last durable one; 0 holds nothing."""
        return self._superblock.generation

    @property
    def keep(self) -> int:
        """How many generations it holds."""
        return self._superblock.keep

    @property
    def plan_sha256(self) -> str:
        """Of the plan that it was made for."""
        return self._superblock.plan_sha256

    @property
    def made(self) -> tuple[bool, ...]:
        """For each volume whether it is a file of the store's own, which goes with it; others become blank again."""
        return tuple(volume.made for volume in self._volumes)

    def own(self, made: Sequence[bool]) -> None:
        """Say what `made` said before the store was closed and opened again."""
        for volume, own in zip(self._volumes, made, strict=True):
            volume.made = own

    def read(self, offset: int, nbytes: int, address: int) -> None:
        """Bytes [offset, offset + nbytes) of the store to memory, every checksum verified.

        The range must begin and end at cuts of the records. Raises IoFailure, and StoreError for bytes that are not
        those that were written.
        """
        chosen = self._layout.range(offset, nbytes)
        with self._reading(chosen, offset, nbytes, address) as ranges:
            checksums = self._disk.read_summed(ranges)
        self._require(chosen, checksums)

    def read_unchecked(self, offset: int, nbytes: int, address: int) -> None:
        """As `read`, but whoever uses the bytes must take their checksums in passing and ask `require`. Raises
        IoFailure."""
        chosen = self._layout.range(offset, nbytes)
        with self._reading(chosen, offset, nbytes, address) as ranges, self._requests() as started:
            started.append(self._disk.read([segment for each in ranges for segment in each]))
            started[0].wait()

    def extents(self, offset: int, nbytes: int) -> tuple[int, ...]:
        """The bytes at which the extents of a range end, counted from its beginning: each has a checksum."""
        extents = (self._layout.extents[index] for index in self._layout.range(offset, nbytes))
        return tuple(extent.address + extent.nbytes - offset for extent in extents)

    def require(self, offset: int, nbytes: int, checksums: Sequence[int]) -> None:
        """Raise StoreError unless these are the checksums of the range's extents as they were last written."""
        self._require(self._layout.range(offset, nbytes), checksums)

    def write(self, offset: int, nbytes: int, address: int, checksums: Sequence[int] = ()) -> None:
        """Memory to bytes [offset, offset + nbytes) of the store, which must begin and end at cuts of the records.

        `checksums`: of the range's extents, from who knows them; else they are taken while the drive works. Raises
        IoFailure or DiskFullError; after one the store can be read but not committed.
        """
        chosen = self._layout.range(offset, nbytes)
        assert len(checksums) in (0, len(chosen)), "a checksum for each extent"
        copies = [self._generations.free_place(index) for index in chosen]
        with self._failing():
            ranges = [self._segments(index, copy, address - offset) for index, copy in zip(chosen, copies, strict=True)]
            with self._told(offset, nbytes, copies):
                if checksums:
                    with self._requests() as started:
                        started.append(self._disk.write([segment for each in ranges for segment in each]))
                        started[0].wait()
                else:
                    checksums = self._disk.write_summed(ranges)
        self._generations.written(chosen, copies, checksums, self.generation + 1)
        with self._counting:
            self.bytes_written += nbytes

    def outstanding(self, offset: int, nbytes: int) -> dict[Path, int]:
        """Of a read or write of these bytes that is under way: what it moves on each volume, if it is. From any thread,
        and for people: it is old news when it comes."""
        copies = self._under_way.get((offset, nbytes), [])
        moving: dict[Path, int] = {}
        for index, copy in zip(self._layout.range(offset, nbytes), copies, strict=False):
            extent = self._layout.extents[index]
            for volume, _, _, length in self._superblock.striping.locate(extent.places[copy], extent.nbytes):
                path = self._volumes[volume].path
                moving[path] = moving.get(path, 0) + length
        return moving

    def commit(self, metadata: dict[str, Any]) -> None:
        """Make all that was written a generation: data and tables, one flush on every volume, then the superblocks,
        flushed. No read or write may be under way. `metadata`: what JSON can say, for whoever opens the store.

        Raises IoFailure or DiskFullError; a failed flush is final, and the store cannot be committed any more.
        """
        assert self._durable, "a store that was not made durable has no generations"
        if self._failure:
            raise IoFailure(f"the store cannot be committed: {self._failure}")
        with self._failing():
            self._write_generation(self.generation + 1, metadata)
        self._generations.committed(keep=self.keep)
        self.metadata = metadata

    def fill(self, progress: Progress) -> None:
        """Write zeros wherever nothing has been written yet: drives overwrite written blocks faster than they fill
        reserved ones. `progress` gets the share that is done. A store that was opened had that when it was made, and
        what lies there now may be a generation's."""
        if self._opened:
            return
        empty = [
            (place, extent.nbytes)
            for extent, copy in zip(self._layout.extents, self._generations.place, strict=True)
            for number, place in enumerate(extent.places)
            if number != copy
        ]
        total, done = sum(nbytes for _, nbytes in empty), 0
        zeros = Staging(_FILL_BYTES) if empty else None
        for place, nbytes in _joined(empty, _FILL_BYTES):
            assert zeros is not None
            with self._failing(), self._requests() as started:
                started.append(self._disk.write(self._on_volumes(place, nbytes, zeros.address)))
                started[0].wait()
            done += nbytes
            progress(done / total)

    def close(self) -> None:
        self._disk.close()
        self._locks.close()

    def remove(self) -> None:
        """Close the store, delete the files that were made for it and leave other volumes blank: nothing of it is
        worth keeping."""
        try:
            for volume in self._volumes:
                if not volume.made:
                    make_blank(self._disk, volume)
        finally:
            self.close()
            for volume in self._volumes:
                if volume.made:
                    volume.path.unlink(missing_ok=True)

    # Generations.

    def _write_generation(self, generation: int, metadata: dict[str, Any]) -> None:
        """The commit protocol. Durable when it returns."""
        data = self._table(metadata).encode() if generation else b""
        if len(data) > self._superblock.table_bytes:
            raise UsageError(f"a table of {len(data)} bytes does not fit {self._superblock.table_bytes}")
        staging = Staging(max(len(data), PAGE))
        staging.put(data)
        checksum = native.checksum(staging.address, len(data)) if data else 0
        superblock = replace(self._superblock, generation=generation, table_length=len(data), table_checksum=checksum)
        if data:
            with self._requests() as started:
                for volume in self._volumes:
                    segment = (volume.file, superblock.table_start, staging.address, len(data))
                    started.append(self._disk.write([segment]))
                for request in started:
                    request.wait()
        for volume in self._volumes:
            self._disk.flush(volume.file)
        for number, volume in enumerate(self._volumes):
            own = replace(superblock, volume=number, capacity_bytes=volume.capacity_bytes)
            write_superblock(self._disk, volume, own)
        for volume in self._volumes:
            self._disk.flush(volume.file)
        self._superblock = superblock

    def _table(self, metadata: dict[str, Any]) -> Table:
        paths = tuple(os.fspath(volume.path.absolute()) for volume in self._volumes)
        return self._generations.table(metadata, paths)

    def _mend(self, found: Found) -> None:
        """Give the generation that was chosen to the volumes that a crash kept it from."""
        missing = [volume for volume in found.volumes if volume not in found.complete]
        if not missing:
            return
        if found.superblock.table_length:
            source = found.complete[0]
            staging = read_table(self._disk, source, found.superblock)
            for volume in missing:
                segment = (volume.file, found.superblock.table_start, staging.address, found.superblock.table_length)
                self._disk.write([segment]).wait()
                self._disk.flush(volume.file)
        for volume in missing:
            number = found.volumes.index(volume)
            own = replace(found.superblock, volume=number, capacity_bytes=volume.capacity_bytes)
            write_superblock(self._disk, volume, own)
            self._disk.flush(volume.file)

    # Transfers.

    @contextlib.contextmanager
    def _reading(self, chosen: range, offset: int, nbytes: int, address: int) -> Iterator[list[list[Segment]]]:
        """The segments of each extent, for who reads them inside."""
        copies = self._generations.place[chosen.start : chosen.stop]
        assert NOWHERE not in copies, f"{self._name(chosen[0])}: read before written"
        with translated():
            ranges = [self._segments(index, copy, address - offset) for index, copy in zip(chosen, copies, strict=True)]
            with self._told(offset, nbytes, copies):
                yield ranges
        with self._counting:
            self.bytes_read += nbytes

    def _require(self, chosen: range, checksums: Sequence[int]) -> None:
        for index, checksum in zip(chosen, checksums, strict=True):
            if checksum != self._generations.checksum[index]:
                raise StoreError(self._damage(index))

    def _segments(self, index: int, copy: int, shift: int) -> list[Segment]:
        extent = self._layout.extents[index]
        return self._on_volumes(extent.places[copy], extent.nbytes, shift + extent.address)

    def _on_volumes(self, place: int, nbytes: int, address: int) -> list[Segment]:
        start = self._superblock.data_start
        return [
            (self._volumes[volume].file, start + begin, address + within, length)
            for volume, begin, within, length in self._superblock.striping.locate(place, nbytes)
        ]

    @contextlib.contextmanager
    def _requests(self) -> Iterator[list[Request]]:
        """Requests whose memory must not be let go while one is under way, whatever happens."""
        started: list[Request] = []
        with translated():
            try:
                yield started
            except BaseException:
                for request in started:
                    with contextlib.suppress(OSError):
                        request.wait()
                raise

    @contextlib.contextmanager
    def _told(self, offset: int, nbytes: int, copies: list[int]) -> Iterator[None]:
        """What `outstanding` knows of."""
        self._under_way[offset, nbytes] = copies
        try:
            yield
        finally:
            self._under_way.pop((offset, nbytes), None)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """A write or flush that failed leaves what nobody may commit."""
        try:
            with translated():
                yield
        except BaseException as error:
            self._failure = self._failure or str(error) or type(error).__name__
            raise

    def _name(self, index: int) -> str:
        extent = self._layout.extents[index]
        return f"byte {extent.within} of {self._layout.records[extent.record].name}"

    def _damage(self, index: int) -> str:
        volume, begin, *_ = self._superblock.striping.locate(
            self._layout.extents[index].places[self._generations.place[index]], self._layout.extents[index].nbytes
        )[0]
        return (
            f"{self._volumes[volume].path}: {self._name(index)} (at byte {self._superblock.data_start + begin} of the "
            "volume) is not what was written there: its checksum differs; the drive may be failing"
        )


def required_bytes(layout: Layout, striping: Striping, table_bytes: int) -> list[int]:
    """What each volume must hold, superblocks and tables included."""
    start = data_start(table_bytes, striping.stripe_bytes)
    return [start + nbytes for nbytes in striping.volume_bytes(layout.nbytes)]


def _joined(ranges: list[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """Neighbouring (place, bytes) as one, in pieces of at most `most` bytes."""
    runs: list[list[int]] = []
    for place, nbytes in sorted(ranges):
        if runs and runs[-1][0] + runs[-1][1] == place:
            runs[-1][1] += nbytes
        else:
            runs.append([place, nbytes])
    for place, nbytes in runs:
        for start in range(0, nbytes, most):
            yield place + start, min(most, nbytes - start)
