"""The standard streams of a command: progress that cannot be written ends no command, results that cannot are an error.

Owns what becomes of a command where its progress cannot be written: a full disk, a terminal that was closed, a reader
that is gone. It goes on. Results, on standard output, are another matter: what cannot be written of them is an error.
Owns too that no printed text steers the terminal, wherever the text came from.
"""

import io
import os
import sys
from typing import Any

from ssdplan.plans.printable import printable

_DESCRIPTORS = (0, 1, 2)


def settle_streams() -> None:
    """Let writing to standard error fail in silence from now on, and let no file that is opened later take the place of
    a standard stream that is closed: what a library prints would be written into that file."""
    for number in _DESCRIPTORS:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    if sys.stdout is sys.__stdout__:  # else a caller has it elsewhere, or it is done
        sys.stdout = _text(_Known(1, "w", closefd=False), sys.stdout, errors="strict")
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Enduring(2, "w", closefd=False), sys.stderr, errors="backslashreplace")


def is_of_results(error: OSError) -> bool:
    """Whether it was met while results were written to standard output. What is left of them is then dropped."""
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", None)
    if not isinstance(raw, _Known) or raw.failure is not error:
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), raw.fileno())  # else Python would try again as it ends
    return True


class _Known(io.FileIO):
    """A file that knows the error that it met last."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


class _Enduring(io.FileIO):
    """A file that takes all that it is given; what cannot be written of it is lost."""

    def write(self, data: Any, /) -> int:
        left = memoryview(data).cast("B")
        nbytes = len(left)
        try:
            while left:
                left = left[super().write(left) or 0 :]
        except OSError:  # the next line may find room again
            pass
        return nbytes


class Plain(io.TextIOWrapper):
    """A text stream that writes what would steer a terminal as an escape (`plans/printable.py`)."""

    def write(self, text: str, /) -> int:
        super().write(printable(text))
        return len(text)

    def steer(self, text: str) -> int:
        """Write `text` as it is: of our own making, but for parts that are printable."""
        return super().write(text)


def _text(raw: io.FileIO, before: io.TextIOBase | None, *, errors: str) -> Plain:
    """A text stream on `raw`, like the one before it; None: that was closed."""
    encoding = getattr(before, "encoding", "utf-8")
    buffering = bool(getattr(before, "line_buffering", False)) or isinstance(raw, _Enduring)
    return Plain(io.BufferedWriter(raw), encoding=encoding, errors=errors, line_buffering=buffering)
