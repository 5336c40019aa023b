"""Commands in processes of their own: how one is started, heard and ended, and how its error becomes ours."""

import subprocess
import sys
from collections.abc import Callable, Sequence

from ssdplan.plans.errors import error_of, said_by_another

Tell = Callable[[str], None]
"""Gets a line that a command prints on standard error."""
_INTERRUPTED = (130, -2)


def command_line(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "ssdplan", *words]


def do(words: Sequence[str], tell: Tell | None = None) -> None:
    """Run a command to its end. Without `tell` it speaks to standard error itself. Raises the error that it ended with,
    and KeyboardInterrupt where it was interrupted."""
    pipe = None if tell is None else subprocess.PIPE
    process = subprocess.Popen(command_line(words), stdout=subprocess.DEVNULL, stderr=pipe, text=True)
    last = ""
    try:
        for line in process.stderr or ():
            last = line.rstrip("\n")
            if tell and " error: " not in last:
                tell(last)
        code = process.wait()
    except BaseException:
        process.terminate()  # Ctrl-C has reached it too, where it came from a terminal
        process.wait()
        raise
    finally:
        if process.stderr:
            process.stderr.close()
    if code in _INTERRUPTED:
        raise KeyboardInterrupt
    if code and tell is None:
        raise said_by_another(error_of(code, f"ssdplan {words[0]} ended with {code}"))
    if code:
        raise error_of(code, last.partition(" error: ")[2] or f"ssdplan {words[0]} ended with {code}: {last}")
