"""Interruptions of a run: the first signal asks it to end with what it has, the second stops it at once.

Owns the handlers of SIGINT, SIGTERM and SIGHUP: of a run that keeps snapshots while it trains, of any other once its
last step is done. What ending takes is the run's business.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for the end; the last one when a terminal or a connection closes."""


class Interruption:
    """From `begin` in the main thread to the end of the block, SIGINT, SIGTERM and SIGHUP set `asked` and tell so; once
    it is set they do what they did before. One that is ignored stays ignored, as SIGHUP is under nohup."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.asked = False
        self._tell = tell
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        """Take the signals."""
        if threading.current_thread() is threading.main_thread():
            for number in ENDS:
                before = signal.getsignal(number)
                if callable(before) or before == signal.SIG_DFL:
                    self._before[number] = before
                    signal.signal(number, self._noted)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def tell_from_now_on(self, tell: Callable[[], None]) -> None:
        """What the first signal tells, if none has come yet: what it leads to is not the same at all times."""
        self._tell = tell

    def _noted(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked = True
            # In a thread of its own: the signal may have come while this one was writing a line.
            threading.Thread(target=self._tell, daemon=True).start()
            return
        before = self._before[signal.Signals(number)]
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, before)
            signal.raise_signal(number)
