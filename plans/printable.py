"""Makes text that came from somebody else safe to print: nothing in it steers a terminal or turns its reading order.

Owns which characters do. Names of files and tensors, keys, templates' errors and samples may hold any.
"""

import re

_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but for the tab and the line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # what turns the reading order
    "\u2028\u2029"  # line ends that are none to most readers
    "\ud800-\udfff]"  # halves of characters, which no terminal can be given
)


def printable(text: str) -> str:
    """`text` with what would steer a terminal written as `\\x1b` or `\\u202e`; lines and tabs stay. Within a text of
    JSON, which has no control characters below 0x20, the result is JSON of the same content."""
    return _STEERING.sub(_written, text)


def _written(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"
