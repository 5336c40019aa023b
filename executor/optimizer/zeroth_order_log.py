"""The log of a zeroth-order run: what each step moved the parameters by. With the first weights it is the state.

Owns the file's format, and that what is read from it is what was written: every record has a checksum that covers all
records before it, so one that is missing, changed or out of its place is found. A last record that a crash cut off is
dropped. Format, little-endian: 8 bytes MAGIC; a u32 and so many bytes of JSON, the header; 16 bytes of checksum; then
records of one length: u64 step, f64 keep, an f64 scale for each direction, 16 bytes of checksum.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, BinaryIO, Self

from ssdplan.plans.documents.zeroth_order import MOST_DIRECTIONS
from ssdplan.plans.errors import MismatchError
from ssdplan.plans.files import Folder

from .zeroth_order import Move

LOG = "zeroth-order.log"
MAGIC = b"ssdpzo\x00\x01"
CHECKSUM_BYTES = 16
MOST_HEADER_BYTES = 1 << 16
_COPIED_BYTES = 1 << 20
"""At once."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a log belongs to."""

    model: str
    """The fingerprint of the model."""
    weights: str
    """sha256 of the first weights, in the order in which an export writes them."""
    seed: int
    directions: int
    precision: str
    origin: dict[str, Any]
    """What decides the run's losses (`Origin` of `executor/snapshots/snapshots.py`), for whoever goes on with it. Its
    `batch` is that of the plan with which the run began; the one by which it goes on is in the run's plan.json."""
    masters: bool = False
    """Weights are fp32 where they are updated, and precision is what their copies are rounded to."""


class LogFile:
    """A log that is appended to, a record a step."""

    def __init__(self, file: BinaryIO, header: Header, steps: int, checksum: bytes) -> None:
        self._file, self._header, self._steps, self._checksum = file, header, steps, checksum

    @classmethod
    def create(cls, folder: Folder, header: Header) -> Self:
        """A new one, whatever lies there."""
        text = json.dumps(asdict(header), sort_keys=True).encode()
        begin = MAGIC + struct.pack("<I", len(text)) + text
        checksum = _digest(b"", begin)
        file = folder.append(LOG)
        file.truncate(0)
        _write(file, begin + checksum)
        return cls(file, header, 0, checksum)

    @classmethod
    def go_on(cls, folder: Folder, header: Header, steps: int) -> tuple[Self, list[tuple[Move, ...]]]:
        """The log of a run after its first `steps` steps, all behind them cut off; and their moves.

        Raises MismatchError for another run's log, and for one that has not all of these steps as they were written.
        """
        log = read_log(folder)
        require_own(folder, log.header, header)
        if len(log.moves) < steps:
            raise MismatchError(
                f"{folder.path / LOG}: has {len(log.moves)} steps, and {steps} are needed; the file was cut off: bring "
                "the run's own back"
            )
        file = folder.append(LOG)
        file.truncate(log.ends[steps])
        os.fsync(file.fileno())
        return cls(file, header, steps, log.checksums[steps]), log.moves[:steps]

    def append(self, moves: Sequence[Move]) -> None:
        """The moves of the next step, one for each direction."""
        assert [move.direction for move in moves] == list(range(self._header.directions))
        assert all(move.step == self._steps for move in moves) and all(move.keep == 1.0 for move in moves[1:])
        record = struct.pack(f"<Qd{len(moves)}d", self._steps, moves[0].keep, *(move.scale for move in moves))
        self._checksum = _digest(self._checksum, record)
        _write(self._file, record + self._checksum)
        self._steps += 1

    @property
    def checksum(self) -> bytes:
        """After its last step."""
        return self._checksum

    def sync(self) -> None:
        """Make all records durable."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Logged:
    """What a log says, of every step that it has whole."""

    header: Header
    moves: list[tuple[Move, ...]]
    """Of each step."""
    ends: list[int]
    """Where the file ends after 0, 1, 2 and so on steps, in bytes."""
    checksums: list[bytes]
    """And the checksum there."""


def read_log(folder: Folder) -> Logged:
    """What a run's log says. Raises MismatchError."""
    with folder.open(LOG, "the log of a zeroth-order run") as file:
        return _read(file, str(folder.path / LOG))


def cut_log(folder: Folder, steps: int) -> None:
    """Leave of a run's log its first `steps` steps, durably. Raises MismatchError."""
    ends = read_log(folder).ends
    with folder.append(LOG) as file:
        file.truncate(ends[steps])
        os.fsync(file.fileno())


def copy_log(folder: Folder, steps: int, to: Folder) -> None:
    """Let another directory of the run have the first `steps` steps of its log, durably, whole or not at all. Raises
    MismatchError."""
    left = read_log(folder).ends[steps]
    with folder.open(LOG, "the log of a zeroth-order run") as file, to.writing(LOG, durable=True) as copy:
        while data := file.read(min(left, _COPIED_BYTES)):
            copy.write(data)
            left -= len(data)


def require_own(folder: Folder, there: Header, header: Header) -> None:
    """Raise MismatchError where a log is not of the run that `header` is of. What else decides the losses, `origin`, is
    compared by whoever knows what of it may change."""
    if replace(there, origin={}) != replace(header, origin={}):
        raise MismatchError(f"{folder.path / LOG}: is not this run's log: {_difference(there, header)}")


def _read(file: BinaryIO, name: str) -> Logged:
    begin = file.read(len(MAGIC) + 4)
    if len(begin) < len(MAGIC) + 4 or not begin.startswith(MAGIC):
        raise MismatchError(f"{name}: is not the log of a zeroth-order run")
    (length,) = struct.unpack("<I", begin[len(MAGIC) :])
    if length > MOST_HEADER_BYTES:
        raise MismatchError(f"{name}: its header says that it takes {length:,} bytes; the file was changed")
    text = file.read(length)
    checksum = _digest(b"", begin + text)
    if file.read(CHECKSUM_BYTES) != checksum:
        raise MismatchError(f"{name}: its header is not what was written; the file was changed or cut off")
    header = _header(text, name)
    moves: list[tuple[Move, ...]] = []
    ends, checksums = [len(begin) + length + CHECKSUM_BYTES], [checksum]
    for record in _records(file, 16 + 8 * header.directions + CHECKSUM_BYTES):
        content, written = record[:-CHECKSUM_BYTES], record[-CHECKSUM_BYTES:]
        checksum = _digest(checksum, content)
        step, keep, *scales = struct.unpack(f"<Qd{header.directions}d", content)
        if written != checksum or step != len(moves):
            raise MismatchError(
                f"{name}: the record of step {len(moves) + 1} is not what was written there: the file was changed, or "
                "its records are out of order"
            )
        if not all(map(math.isfinite, (keep, *scales))):
            raise MismatchError(f"{name}: step {step + 1} moves the parameters by a number that is not finite")
        moves.append(tuple(Move(step, at, scale, keep if at == 0 else 1.0) for at, scale in enumerate(scales)))
        ends.append(ends[-1] + len(record))
        checksums.append(checksum)
    return Logged(header, moves, ends, checksums)


def _records(file: BinaryIO, length: int) -> Iterator[bytes]:
    """Whole records. One that is cut off ends them, and so does one of zeros: where power fails, a file may have been
    made longer without its bytes."""
    while len(record := file.read(length)) == length and any(record):
        yield record


def _header(text: bytes, name: str) -> Header:
    try:
        content: dict[str, Any] = json.loads(text)
        header = Header(**content)
    except (ValueError, TypeError, RecursionError) as error:
        raise MismatchError(f"{name}: its header is not one of ours") from error
    kinds = {field: _KINDS.get(field, str) for field in content}
    whole = all(type(content[field]) is kind for field, kind in kinds.items())
    if not whole or not 0 < header.directions <= MOST_DIRECTIONS:
        raise MismatchError(f"{name}: its header is not one of ours")
    return header


_KINDS: dict[str, type] = {"seed": int, "directions": int, "origin": dict, "masters": bool}


def _difference(there: Header, wanted: Header) -> str:
    """The first field that differs, in words."""
    ours, theirs = asdict(wanted), asdict(there)
    field = next(field for field in ours if field != "origin" and ours[field] != theirs[field])
    return f"its {field} is {theirs[field]!s:.40}, and the run's is {ours[field]!s:.40}"


def _digest(before: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(before + content, digest_size=CHECKSUM_BYTES).digest()


def _write(file: BinaryIO, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) or 0 :]
