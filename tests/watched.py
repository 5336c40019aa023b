"""Processes that are watched (`executor/data/apart.py`), each forked from one that has imported what they need: what
would take seconds to start takes milliseconds.

Owns that process, one for each process of pytest, started when it is first needed. It runs none of their work itself;
a process that is forked begins as it was after its imports, and is watched, bounded and ended as any other.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace, TracebackType
from typing import Self

ADDRESS = "SSDPLAN_TESTS_FORKED"
"""Where a command that a test starts finds `address`, in its environment."""
_REQUEST_BYTES = 1 << 20


class Forked:
    """What `apart.ask` uses of `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: int, stderr: int, pass_fds: list[int], env: dict[str, str]
    ) -> None:
        ours, theirs = zip(*(os.pipe() for _ in range(3)), strict=True)
        self.stdin = os.fdopen(theirs[0], "wb")
        self.stdout, self.stderr = os.fdopen(ours[1], "rb"), os.fdopen(ours[2], "rb")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(os.environ.get(ADDRESS) or address())
        request = {"module": command[-1], "env": dict(env), "cwd": os.getcwd(), "board": pass_fds[0]}
        handed = [ours[0], theirs[1], theirs[2], pass_fds[0]]
        socket.send_fds(self._server, [json.dumps(request).encode()], handed)
        for descriptor in handed[:3]:
            os.close(descriptor)
        self.pid = int(self._server.recv(64))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("forked", timeout or 0)
            self.returncode = int(self._server.recv(64))
        return self.returncode

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()
        self.wait()
        self._server.close()


SUBPROCESS = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
"""What `apart` is given in the place of the module `subprocess`."""


@cache
def address() -> str:
    """Where the process that is forked from listens."""
    folder = tempfile.mkdtemp(prefix="forked-")
    name = f"{folder}/socket"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(name)
    listening.listen()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.watched", str(listening.fileno())],
        pass_fds=[listening.fileno()],
        env={**os.environ, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"},
    )
    listening.close()

    def end() -> None:
        server.kill()
        server.wait()
        os.unlink(name)
        os.rmdir(folder)

    atexit.register(end)
    return name


def _serve(listening: socket.socket) -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # as `apart.answer` has it
    from pyarrow import ipc, parquet  # noqa: F401
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    from ssdplan.executor.data import previewing, reader  # noqa: F401

    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        asking, _ = listening.accept()
        if not os.fork():
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _attend(asking)
            os._exit(0)
        asking.close()


def _attend(asking: socket.socket) -> None:
    """Fork the process that is asked for, and say its pid, and its exit code once it has ended."""
    said, descriptors, _, _ = socket.recv_fds(asking, _REQUEST_BYTES, 4)
    request = json.loads(said)
    pid = os.fork()
    if not pid:
        asking.close()
        os._exit(_work(descriptors, **request))
    for descriptor in descriptors:
        os.close(descriptor)
    asking.send(str(pid).encode())
    asking.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _work(descriptors: list[int], module: str, env: dict[str, str], cwd: str, board: int) -> int:
    os.chdir(cwd)
    kept = os.dup(descriptors[3])
    for place, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, place)
    os.dup2(kept, board)
    for descriptor in {*descriptors, kept} - {0, 1, 2, board}:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    try:
        return int(importlib.import_module(module).main())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
