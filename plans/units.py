"""Units as people write and read them: bytes, seconds; and the page, the unit of memory and of direct I/O."""

import re
from fractions import Fraction

from .errors import UsageError

PAGE = 4096
"""Bytes. Every host and device buffer, and every range on ssd, starts and ends at a multiple of this."""
MOST_BYTES = 1 << 60
"""No size is as large."""
_DIGITS = 40
"""Of a number; more than any size has."""
_SCALE = {"b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _SCALE |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power, _letter: 1024**_power}


def whole_pages(nbytes: int) -> int:
    """`nbytes`, up to a whole number of pages."""
    return -(-nbytes // PAGE) * PAGE


def parse_bytes(text: str, least: int = 1) -> int:
    """`8GiB` or `8G`, `2.5 GB`, `512MiB`, `4096B` -> bytes. K, M, G and T alone are binary, as memory is counted; KB,
    MB, GB and TB are powers of 1000, as drives are. A number without a unit is no size, but for 0 where `least` is 0.
    Raises UsageError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    number, unit = match.groups() if match else ("", "?")
    if least == 0 and not unit and not number.strip("0."):
        return 0
    if not unit:
        raise UsageError(f"{text!r} has no unit; write {number}GiB, {number}MB or, in bytes, {number}B")
    if unit.lower() not in _SCALE:
        raise UsageError(f"{text!r} is not a size; write a number and a unit: 8GiB (or 8G), 512MiB, 2.5GB, 4096B")
    value = round(Fraction(number) * _SCALE[unit.lower()]) if len(number) <= _DIGITS else MOST_BYTES
    if not least <= value < MOST_BYTES:
        raise UsageError(f"{text!r} is out of range for a size")
    return value


def format_bytes(nbytes: float) -> str:
    """The largest unit that leaves at least one: `1.86 GiB`, `512 MiB`, `0 B`."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= scale:
            value = nbytes / scale
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{nbytes:.0f} B"


def format_enough(nbytes: int) -> str:
    """Rounded up, so that the printed value is enough when it is used: `346 MiB`, `24.125 GiB`."""
    if nbytes < 16 << 20:
        return f"{-(-nbytes >> 10)} KiB"
    if nbytes < 10 << 30:
        return f"{-(-nbytes >> 20)} MiB"
    return f"{-(-nbytes * 1000 >> 30) / 1000:.3f} GiB"


def format_seconds(seconds: float) -> str:
    """`850 ms`, `12.3 s`, `4:05`, `1:02:03`."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
