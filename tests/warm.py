"""Commands of ssdplan, each in a process of its own, but forked from one that has imported what they need: what would
take seconds to start takes milliseconds. The processes that read their data are forked too (`watched.py`).

Owns that process, one for each process of pytest, started when it is first needed. It runs no command itself; a
command's process begins as it was after its imports, and knows what earlier commands found in models that are alike
(`inspected.py`). What is run as code knows nothing of that, nor does a command whose memory is limited.
"""

import atexit
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TextIO

from ssdplan import cli
from ssdplan.executor.data import apart
from ssdplan.executor.model import model as opening
from tests import inspected, watched
from tests.bounds import HANG_SECONDS
from tests.brief import measure_little

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
FOUND = "SSDPLAN_TESTS_FOUND"
"""The folder of what commands found in models, in the environment of the process that they are forked from."""
IMPORTED = (
    *(f"ssdplan.commands.{name}" for name in ("data", "export", "profile", "run", "show", "solve", "volume")),
    *("ssdplan.executor.sessions", "ssdplan.executor.train", "ssdplan.planner.replan", "ssdplan.planner.solve"),
    *("highspy", "networkx", "pulp", "rich.cells"),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"),
)
"""What commands load when they first need it, and would each load anew."""


class Started:
    """A command under way: what `subprocess.Popen` of one with `stderr=PIPE` has. Standard output goes nowhere."""

    stderr: TextIO

    def __init__(self, *arguments: object, cwd: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="started-"))
        os.mkfifo(self._folder / "stderr")
        reading = os.open(self._folder / "stderr", os.O_RDONLY | os.O_NONBLOCK)  # nobody writes yet
        self.pid = _ask("command", arguments, cwd, os.devnull, str(self._folder / "stderr"))
        os.set_blocking(reading, True)
        self.stderr = os.fdopen(reading)
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[None, str]:
        """Nothing, and the rest of standard error. Errors: AssertionError after `HANG_SECONDS`."""
        guard = threading.Timer(HANG_SECONDS, self.kill)
        guard.start()
        rest = self.stderr.read()
        guard.cancel()
        assert self.wait() != -signal.SIGKILL, f"killed, or not done after {HANG_SECONDS} seconds: {rest}"
        return None, rest

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = _answer({"wait": self.pid})
            self.stderr.close()
            shutil.rmtree(self._folder)
        return self.returncode


def run(
    *arguments: object,
    cwd: Path,
    stderr: str | None = None,
    data_bytes: int | None = None,
    activations: bool = True,
) -> subprocess.CompletedProcess[str]:
    """`ssdplan` with these arguments, in `cwd`; with standard error in the file `stderr`, and no more than `data_bytes`
    of memory that it may write to (`ulimit -d`). Without `activations` a profile measures little (`brief.py`).
    Errors: AssertionError where it does not end within `HANG_SECONDS`."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        pid = _ask("command", arguments, cwd, out.name, stderr or err.name, data_bytes, activations)
        code = _answer({"wait": pid})
        return subprocess.CompletedProcess(["ssdplan", *map(str, arguments)], code, out.read(), err.read())


def python(code: str, cwd: Path, seconds: float = HANG_SECONDS) -> subprocess.CompletedProcess[str]:
    """`python -c` with this code, in `cwd`. Errors: AssertionError where it does not end within `seconds`."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        ended = _answer({"wait": _ask("code", (code,), cwd, out.name, err.name)}, seconds)
        return subprocess.CompletedProcess([code], ended, out.read(), err.read())


def at_once(code: str, count: int, cwd: Path) -> list[subprocess.CompletedProcess[str]]:
    """So many of `python` beside each other."""
    with ExitStack() as files:
        streams = [[files.enter_context(tempfile.NamedTemporaryFile("r")) for _ in range(2)] for _ in range(count)]
        pids = [_ask("code", (code,), cwd, out.name, err.name) for out, err in streams]
        codes = [_answer({"wait": pid}) for pid in pids]
        return [
            subprocess.CompletedProcess([code], ended, out.read(), err.read())
            for ended, (out, err) in zip(codes, streams, strict=True)
        ]


def _ask(
    what: str,
    arguments: tuple[object, ...],
    cwd: Path,
    stdout: str,
    stderr: str,
    data_bytes: int | None = None,
    activations: bool = True,
) -> int:
    request = {"arguments": [*map(str, arguments)], "cwd": str(cwd), "stdout": stdout, "stderr": stderr}
    return _answer({"what": what, **request, "data_bytes": data_bytes, "activations": activations})


def _answer(request: dict[str, object], seconds: float = HANG_SECONDS) -> int:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    if not select.select([server.stdout], [], [], seconds)[0]:
        _end()
        raise AssertionError(f"{request}: not done after {seconds} seconds")
    answer = server.stdout.readline()
    assert answer, f"{request}: the process that commands are forked from is gone"
    return int(answer)


@cache
def _server() -> subprocess.Popen[str]:
    atexit.register(_end)
    found = tempfile.mkdtemp(prefix="inspected-")
    atexit.register(shutil.rmtree, found, ignore_errors=True)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.warm"],
        env={**ENVIRONMENT, watched.ADDRESS: watched.address(), FOUND: found},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _end() -> None:
    """End the process, and a command that it may have under way."""
    server = _server()
    _server.cache_clear()
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _serve() -> None:
    """For each line of standard input fork a process, and answer with its pid, or wait for one, and answer with its
    exit code."""
    for name in IMPORTED:
        importlib.import_module(name)
    apart.subprocess = watched.SUBPROCESS  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # a collection would copy all that a command's process shares with this one
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
            continue
        opened = [os.open(name, os.O_RDWR) for name in (os.devnull, request.pop("stdout"), request.pop("stderr"))]
        child = os.fork()
        if not child:
            os._exit(_command(opened, **request))  # an orderly end would copy it too
        for descriptor in opened:
            os.close(descriptor)
        print(child, flush=True)


def _command(
    opened: list[int], what: str, arguments: list[str], cwd: str, data_bytes: int | None, activations: bool
) -> int:
    """What a process that was forked does, to its exit code."""
    os.chdir(cwd)
    for place, descriptor in enumerate(opened):
        os.dup2(descriptor, place)
        os.close(descriptor)
    if data_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    if not activations:
        measure_little()
    if what == "command" and data_bytes is None:
        opening.inspect = partial(inspected.inspect_once, folder=Path(os.environ[FOUND]))  # type: ignore[attr-defined]
    try:
        if what == "code":
            exec(arguments[0], {})
            code = 0
        else:
            code = cli.main(arguments)
    except SystemExit as ended:  # of wrong usage
        assert isinstance(ended.code, int)
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve()
