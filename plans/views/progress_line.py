"""The line on standard error that says how far a command is. Results go to standard output, never through here."""

import math
import os
import sys
import time
from typing import TextIO

from ..printable import printable
from ..units import format_seconds

SELDOM_SECONDS = 5.0
"""Between lines where standard error is no terminal, to begin with."""
SELDOMEST_SECONDS = 60.0
"""And after more than an hour and a half: a log of a week has ten thousand lines."""


class ProgressLine:
    """One line, rewritten in place on a terminal, printed now and then elsewhere."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title, self._stream = title, stream or sys.stderr
        self._live = self._stream.isatty()
        self._start = time.monotonic()
        self._last = -math.inf
        self._width = 0
        self._steer = getattr(self._stream, "steer", self._stream.write)
        """Writes what moves a terminal's cursor, which the streams of a command let nothing else do."""
        self._ended = ""
        """What was said to be whole; a caller that reads ahead is there long before its last call."""

    def __call__(self, fraction: float, what: str) -> None:
        """`fraction` of all work is done, `what` is going on. Cheap enough to call often."""
        if fraction >= 1 and what == self._ended:
            return
        self._ended = what if fraction >= 1 else ""
        now = time.monotonic()
        if self._live and now - self._last < 0.1 and fraction < 1:
            return
        spent = now - self._start
        left = f", {format_seconds(spent / fraction - spent)} left" if 0.02 < fraction < 1 else ""
        self.say(f"{self._title}: {fraction:4.0%} {what}{left}", seldom=fraction < 1)

    def say(self, text: str, *, seldom: bool = False) -> None:
        """Show `text` as the line. With `seldom` it is left out where there is no terminal and a line was printed a
        moment ago."""
        now, text = time.monotonic(), printable(text)
        if self._live:
            text = text[: self._columns() - 1]  # a longer one could not be rewritten
            self._steer("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            pause = min(max(SELDOM_SECONDS, (now - self._start) / 100), SELDOMEST_SECONDS)
            if seldom and now - self._last < pause:
                return
            self._stream.write(text + "\n")
        self._last = now
        self._stream.flush()

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._live and self._width:
            self._steer("\r" + " " * self._width + "\r")
        self._stream.write(f"{self._title}: {printable(text)}\n")
        self._width = 0
        self._stream.flush()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def done(self) -> None:
        """End the line."""
        if self._live and self._width:
            self._stream.write("\n")
            self._width = 0
