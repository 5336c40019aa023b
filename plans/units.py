"""Units as people write and read them: bytes, seconds; and the page, the unit of memory and of direct I/O."""

import re
from collections.abc import Callable
from fractions import Fraction
from math import ceil, floor

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


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(nbytes: float) -> str:
    """The largest unit that leaves at least one, and three digits: `1.86 GiB`, `512 MiB`, `0 B`."""
    return _written(nbytes, round)


def format_enough(nbytes: int) -> str:
    """As `format_bytes`, rounded up: the printed value is enough when it is used. `346 MiB`, `24.2 GiB`."""
    return _written(nbytes, ceil)


def format_there(nbytes: int) -> str:
    """As `format_bytes`, rounded down: what is printed is there. Beside `format_enough` of more, it is always less."""
    return _written(nbytes, floor)


def _written(nbytes: float, whole: Callable[[Fraction], int]) -> str:
    """Three digits, `whole` in the last of them, and all four of a number from 1000 to 1023."""
    value = Fraction(nbytes)
    for unit in _BINARY:
        digits = 0 if unit == "B" or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
        rounded = Fraction(whole(value * 10**digits), 10**digits)
        if abs(rounded) < 1024:
            break
        value /= 1024
    return f"{float(rounded):.15g} {unit}"


def format_seconds(seconds: float) -> str:
    """`850 ms`, `12.3 s`, `4:05`, `1:02:03`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
