"""Processes of a comparison, each forked from the one that compares, which has imported what they need. A profile
measures little (`brief.py`).

Owns `Forked`, which `rivals/processes.py` is given in the place of `subprocess.Popen`. A process that is forked is a
child of its own, with a memory and signals of its own, and counted and killed as any other.
"""

import gc
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence

from transformers.models.llama import modeling_llama  # noqa: F401

from ssdplan import cli
from ssdplan.executor import sessions  # noqa: F401
from ssdplan.executor.data import apart
from ssdplan.rivals import making, torch_arm  # noqa: F401
from tests import watched
from tests.brief import measure_little


class Forked:
    """What `processes.run` uses of `subprocess.Popen`, of `python -m MODULE ARGUMENTS`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        env: dict[str, str],
        start_new_session: bool,
        preexec_fn: Callable[[], None],
    ) -> None:
        assert command[:2] == [sys.executable, "-m"] and start_new_session
        self.returncode: int | None = None
        gc.freeze()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                os.setsid()
                preexec_fn()
                for place, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
                    os.dup2(descriptor, place)
                os.environ.clear()
                os.environ.update(env)
                code = _module(command[2], list(command[3:]))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _module(name: str, arguments: list[str]) -> int:
    """The exit code of `python -m` with these."""
    apart.subprocess = watched.SUBPROCESS  # type: ignore[attr-defined]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv = [name, *arguments]
    measure_little()
    try:
        if name == "ssdplan.cli":
            return cli.main(arguments)
        del sys.modules[name]
        runpy.run_module(name, run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
