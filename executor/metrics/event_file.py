"""TensorBoard's event files: a run's metrics as scalars.

Owns the bytes: records of TFRecord, and in each an Event of TensorFlow's event.proto, of which a scalar needs few
fields. They are written here because the package that reads them brings tens of MiB and a thread into a process whose
memory is planned; whoever looks at them has it, where it suits.
"""

import ctypes
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ssdplan.plans.errors import UsageError
from ssdplan.plans.files import create_new, make_folder

from .metrics import Line, tagged

_VERSION = b"brain.Event:2"
_START = 1
"""SessionLog.SessionStatus: from this event's step on, what earlier files say is void."""
_POLYNOMIAL, _MASK = 0x82F63B78, 0xA282EAD8


class EventFile:
    """A new event file in a directory; it goes on where the others there end."""

    name = "TensorBoard"

    def __init__(self, directory: Path, *, step: int, resumed: bool) -> None:
        """`step`: how many steps the run has behind it. `resumed`: what other files in the directory say of later ones
        was done again, or will be; else the directory must hold none.

        Raises UsageError where the file cannot be, or would be another run's.
        """
        try:
            make_folder(directory)
            others = sorted(directory.glob("events.out.tfevents.*"))
            if others and not resumed:
                raise UsageError(f"{directory}: holds the events of another run; give each run a directory of its own")
            self.is_first = not others
            # Readers take files in the order of their names.
            second = max([int(time.time()), *(_second(path) + 1 for path in others)])
            self._path = directory / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}"
            self._file = create_new(self._path)
        except OSError as error:
            raise UsageError(f"{directory}: no event file can be made there: {error.strerror}") from error
        self._used = False
        self._put(_bytes_field(3, _VERSION))
        if resumed:
            self._put(_integer_field(2, step + 1 if step else 0), _bytes_field(7, _integer_field(1, _START)))

    def write(self, line: Line) -> None:
        """A point for each number of the line, at its step. Raises OSError."""
        self._used = True
        step, values = tagged(line)
        self._put(_integer_field(2, step), _bytes_field(5, b"".join(_scalars(values))))

    def close(self, *, failed: bool) -> None:
        self._file.close()
        if not self._used:  # the run has not begun, and may be tried again
            self._path.unlink(missing_ok=True)

    def _put(self, *fields: bytes) -> None:
        event = struct.pack("<Bd", 1 << 3 | 1, time.time()) + b"".join(fields)
        length = struct.pack("<Q", len(event))
        record = length + struct.pack("<I", _checksum(length)) + event + struct.pack("<I", _checksum(event))
        written = self._file.write(record)
        if written != len(record):
            raise OSError(f"{self._file.name}: only {written} of {len(record)} bytes were written")


def _second(path: Path) -> int:
    digits = path.name.split(".")[3]
    return int(digits) if digits.isdecimal() else 0


def _scalars(values: Mapping[str, float]) -> Iterator[bytes]:
    for name, value in values.items():
        single = ctypes.c_float(value).value  # infinite where it is too large, which struct would not have
        yield _bytes_field(1, _bytes_field(1, name.encode()) + struct.pack("<Bf", 2 << 3 | 5, single))


def _bytes_field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _integer_field(number: int, value: int) -> bytes:
    return bytes([number << 3]) + _varint(value)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def _table() -> tuple[int, ...]:
    rows = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        rows.append(value)
    return tuple(rows)


_CRC = _table()


def _checksum(data: bytes) -> int:
    """CRC-32C, masked as in TFRecord."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
