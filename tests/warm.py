"""Commands of ssdplan, each in a process of its own, but forked from one that has imported what they need: what would
take seconds to start takes milliseconds.

Owns that process, one for each process of pytest, started when it is first needed. It runs no command itself; a
command's process begins as it was after its imports.
"""

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path

from ssdplan import cli
from tests.bounds import HANG_SECONDS

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`ssdplan` with these arguments, in `cwd`. Errors: AssertionError where it does not end within `HANG_SECONDS`."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    asked = [str(argument) for argument in arguments]
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        request = {"arguments": asked, "cwd": str(cwd), "stdout": out.name, "stderr": err.name}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], HANG_SECONDS)[0]:
            _end()
            raise AssertionError(f"{asked}: not done after {HANG_SECONDS} seconds\n{err.read()}")
        answer = server.stdout.readline()
        assert answer, f"{asked}: the process that commands are forked from is gone\n{err.read()}"
        return subprocess.CompletedProcess(["ssdplan", *asked], int(answer), out.read(), err.read())


@cache
def _server() -> subprocess.Popen[str]:
    atexit.register(_end)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.warm"],
        env=ENVIRONMENT,
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
    """Fork a process for each line of standard input, and answer with its exit code."""
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    from ssdplan.executor import sessions as session  # noqa: F401
    from ssdplan.profiler import profile  # noqa: F401

    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # a collection would copy all that a command's process shares with this one
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os._exit(_command(**json.loads(line)))  # an orderly end would copy it too
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _command(arguments: list[str], cwd: str, stdout: str, stderr: str) -> int:
    """What a process that was forked does, to its exit code."""
    os.chdir(cwd)
    for descriptor, name in enumerate((os.devnull, stdout, stderr)):
        os.dup2(os.open(name, os.O_RDWR), descriptor)
    try:
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
