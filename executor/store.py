"""The tensor store: one address space of bytes on ssd, striped over one or more volumes, reached by direct I/O.

Owns the volumes' files, their superblocks and the striping (docs/store-format.md). It moves bytes between addresses
of the store and addresses of memory; it does not know what they mean.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import torch

from ssdplan import native
from ssdplan.plans.errors import DiskFullError, IoFailure, SsdplanError, StoreError, UsageError
from ssdplan.plans.schedule import PAGE
from ssdplan.plans.units import format_bytes

MAGIC = b"SSDPLAN\x01"
HEADER_BYTES = 1 << 20
"""What precedes the data in a volume: the superblock in its first page, the rest reserved."""
STRIPE_BYTES = 1 << 20
CYCLE = 16
"""Stripes dealt out in turn by bandwidth; a volume's share is a multiple of one sixteenth."""
_SUPERBLOCK = struct.Struct("<8s16sIIQ32s16s")
"""magic, store id, volume number, volume count, data bytes of this volume, plan sha256, dealing of stripes."""


class Store:
    """A store that is open. One thread may read while another writes; each call returns when its bytes have moved."""

    def __init__(self, engine: native.Engine, paths: Sequence[Path], files: Sequence[int], deal: bytes) -> None:
        self._engine, self._paths, self._files, self._deal = engine, tuple(paths), tuple(files), deal
        self._locks = [_lock(path) for path in paths]
        self._ranks = _ranks(deal)
        self.bytes_read = self.bytes_written = 0

    @classmethod
    def create(
        cls, directories: Sequence[Path], nbytes: int, plan_sha256: str, bandwidths: Sequence[float] | None = None
    ) -> Self:
        """Make a store of `nbytes` in a new file in each of `directories`, striped by `bandwidths` (equal if None).

        Raises DiskFullError before anything is written when a directory has no space, IoFailure where direct I/O is
        refused, StoreError when one of the files is there already. What it made is removed when it fails.
        """
        if not directories:
            raise UsageError("a store needs at least one volume")
        deal = _deal(bandwidths or [1.0] * len(directories))
        cycles = -(-max(nbytes, 1) // (STRIPE_BYTES * len(deal)))
        identity = secrets.token_bytes(16)
        paths = [directory / f"volume-{number}.ssdplan" for number, directory in enumerate(directories)]
        sizes = [cycles * deal.count(number) * STRIPE_BYTES for number in range(len(paths))]
        for path, size in zip(paths, sizes, strict=True):
            _check_space(path, size + HEADER_BYTES)
        engine = native.Engine()
        files: list[int] = []
        made: list[Path] = []
        try:
            for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
                with _translated(path):
                    files.append(engine.open(str(path), create_bytes=size + HEADER_BYTES))
                made.append(path)
                block = _SUPERBLOCK.pack(
                    MAGIC, identity, number, len(paths), size, bytes.fromhex(plan_sha256), deal.ljust(16, b"\xff")
                )
                _write_superblock(engine, files[-1], block)
            return cls(engine, paths, files, deal)
        except BaseException:
            engine.close()
            for path in made:
                path.unlink(missing_ok=True)
            raise

    @property
    def engine_kind(self) -> str:
        return self._engine.kind

    def read(self, offset: int, nbytes: int, address: int) -> None:
        """Bytes [offset, offset + nbytes) of the store to memory; multiples of a page. Raises IoFailure."""
        with _translated():
            self.bytes_read += self._engine.read(self._segments(offset, nbytes, address)).wait()

    def write(self, offset: int, nbytes: int, address: int) -> None:
        """Memory to bytes [offset, offset + nbytes) of the store; multiples of a page. Raises IoFailure."""
        with _translated():
            self.bytes_written += self._engine.write(self._segments(offset, nbytes, address)).wait()

    def close(self) -> None:
        self._engine.close()
        for lock in self._locks:
            os.close(lock)
        self._locks = []

    def remove(self) -> None:
        """Close the store and delete its volumes' files: nothing of it is worth keeping."""
        self.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _segments(self, offset: int, nbytes: int, address: int) -> list[tuple[int, int, int, int]]:
        """(file, offset in it, address, bytes) of a range, neighbours joined."""
        assert offset % PAGE == 0 and nbytes % PAGE == 0 and address % PAGE == 0 and nbytes > 0
        segments: list[tuple[int, int, int, int]] = []
        per_cycle = STRIPE_BYTES * len(self._deal)
        end = offset + nbytes
        while offset < end:
            cycle, within = divmod(offset, per_cycle)
            stripe, inside = divmod(within, STRIPE_BYTES)
            length = min(STRIPE_BYTES - inside, end - offset)
            volume = self._deal[stripe]
            place = HEADER_BYTES + (cycle * self._deal.count(volume) + self._ranks[stripe]) * STRIPE_BYTES + inside
            last = segments[-1] if segments else None
            if last and last[0] == self._files[volume] and last[1] + last[3] == place:
                segments[-1] = (last[0], last[1], last[2], last[3] + length)
            else:
                segments.append((self._files[volume], place, address, length))
            offset += length
            address += length
        return segments


def _deal(bandwidths: Sequence[float]) -> bytes:
    """Volume numbers in turn, each as often as its share of bandwidth; one entry when there is one volume."""
    if len(bandwidths) == 1:
        return b"\x00"
    if len(bandwidths) > CYCLE:
        raise UsageError(f"a store stripes over at most {CYCLE} volumes, not {len(bandwidths)}")
    total = sum(bandwidths)
    given = [0] * len(bandwidths)
    turns = []
    for turn in range(CYCLE):
        behind = [share * (turn + 1) / total - got for share, got in zip(bandwidths, given, strict=True)]
        unserved = [number for number, got in enumerate(given) if not got]
        chosen = max(unserved if len(unserved) >= CYCLE - turn else range(len(given)), key=lambda i: behind[i])
        given[chosen] += 1
        turns.append(chosen)
    return bytes(turns)


def _ranks(deal: bytes) -> tuple[int, ...]:
    """How many earlier stripes of the cycle each stripe's volume has."""
    return tuple(deal[:position].count(volume) for position, volume in enumerate(deal))


def _write_superblock(engine: native.Engine, file: int, block: bytes) -> None:
    arena = native.Arena(PAGE, lock=False)
    page = torch.from_dlpack(arena)
    checked = block + struct.pack("<I", zlib.crc32(block))
    page[: len(checked)] = torch.frombuffer(bytearray(checked), dtype=torch.uint8)
    with _translated():
        engine.write([(file, 0, arena.address, PAGE)]).wait()
        engine.flush(file)


def _check_space(path: Path, nbytes: int) -> None:
    if path.exists():
        raise StoreError(
            f"{path}: exists already; it belongs to another run, so it is left alone; name another directory"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        usage = shutil.disk_usage(path.parent)
    except OSError as error:
        raise IoFailure(f"{path.parent}: {error.strerror}") from error
    if usage.total and usage.free < nbytes:  # a total of nothing is a file system that does not count
        raise DiskFullError(
            f"{path.parent}: the store needs {format_bytes(nbytes)} here, {format_bytes(usage.free)} are free; "
            "free some space or name another directory with --volume"
        )


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StoreError(f"{path}: in use by another run") from error
    return descriptor


@contextlib.contextmanager
def _translated(path: Path | None = None) -> Iterator[None]:
    """Errors of the engine as ours, each with its exit code."""
    try:
        yield
    except SsdplanError:
        raise
    except OSError as error:
        name = error.filename or path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"{name}: no space left on this volume ({error})") from error
        if error.errno == errno.EEXIST:
            raise StoreError(f"{name}: exists already; it belongs to another run, so it is left alone") from error
        if error.errno == errno.EINVAL and path is not None:
            raise IoFailure(
                f"{name}: this file system refuses direct I/O (O_DIRECT); "
                "use a directory on ext4, xfs or btrfs on an ssd"
            ) from error
        raise IoFailure(str(error)) from error
