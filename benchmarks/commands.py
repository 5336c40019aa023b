"""What the benchmark scripts share: modules of ssdplan run as processes, quietly unless they fail; and a text."""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

MOST_SECONDS = 4 * 3600.0
"""Seconds that one process may take. The longest trains for an hour or two on two cores; some machines are slower."""


def end_on_sigterm() -> None:
    """Let SIGTERM end the script as Ctrl-C does: with the process that it waits for, and what it wrote."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def command(*arguments: object) -> None:
    """Run a command of ssdplan."""
    python("ssdplan.cli", *arguments)


def python(module: str, *arguments: object) -> None:
    """Run a module, quietly; what it said is shown when it fails."""
    output([sys.executable, "-m", module, *map(str, arguments)])


def output(call: list[str]) -> str:
    """What a process wrote to its standard output; all that it said is shown when it fails."""
    with begun(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, err = process.communicate(timeout=MOST_SECONDS)
    if process.returncode:
        sys.exit(f"{' '.join(call)} ended with {process.returncode}:\n{out}{err}")
    return str(out)


@contextmanager
def begun(call: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process, as Popen takes it, that does not outlive a block which is interrupted or fails."""
    process = None
    try:
        with _told_later():
            process = subprocess.Popen(call, **options)
        yield process
    except BaseException:
        if process is not None:
            process.kill()
            process.wait()
        raise


@contextmanager
def _told_later() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the block, as KeyboardInterrupt.

    Within Popen they would leave a process that is begun and that nobody holds.
    """
    told: list[int] = []
    before = {number: signal.signal(number, lambda n, _: told.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:
        raise KeyboardInterrupt


def write_text(path: Path, lines: int = 2000) -> None:
    """Words of a letter, the same each time, of 400 tokens a line; by default enough rows for any of the scripts."""
    words = random.Random(1)
    path.write_text("\n".join(" ".join(words.choices("abcdefgh", k=200)) for _ in range(lines)))
