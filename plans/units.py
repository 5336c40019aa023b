"""Units as people write and read them: bytes, seconds."""

import re

from .errors import UsageError

_SCALE = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


def parse_bytes(text: str) -> int:
    """`8GiB`, `2.5 GB`, `512MiB` or plain bytes -> bytes. Raises UsageError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    scale = _SCALE.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        raise UsageError(f"{text!r} is not a size; write bytes, MB, GB, MiB or GiB, such as 8GiB")
    value = round(float(match.group(1)) * scale)
    if not 0 < value < 1 << 60:
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
