"""What the benchmark scripts share: modules of ssdplan run as processes, quietly unless they fail; and a text."""

import random
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

HOUR = 3600.0
"""Seconds that one process may take."""


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
    call = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=HOUR)
    if done.returncode:
        sys.exit(f"{' '.join(call)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def write_text(path: Path) -> None:
    """Words of a letter, the same each time: enough rows for any of the scripts."""
    words = random.Random(1)
    path.write_text("\n".join(" ".join(words.choices("abcdefgh", k=200)) for _ in range(2000)))
