"""Ranks of a test's run, each a process of its own on this machine, which end with the test.

They are forked from the test's own process, which has torch loaded already: many runs of ranks are to take seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bounds import HANG_SECONDS
from tests.executor.ranks import worker


class Rank:
    """A rank that works: as much of `subprocess.Popen` as tests need."""

    def __init__(self, spec: dict[str, Any], environment: dict[str, str]) -> None:
        self.returncode: int | None = None
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writing)
            self._said = os.fdopen(reading, errors="replace")
            return
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(writing, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.environ.update(environment)
            code = worker.main(spec)
        except BaseException:  # whatever it is, it must not go on as the test
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def said(self) -> str:
        """What it said of errors, once it has ended."""
        words = "" if self._said.closed else self._said.read()
        self._said.close()
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return words


@contextlib.contextmanager
def started(
    directory: Path,
    out: Path,
    ranks: int,
    *,
    name: str = "llama",
    data: str = "text.txt",
    recipe: dict[str, Any] | None = None,
    of_ranks: dict[int, dict[str, Any]] | None = None,
    patience: float = HANG_SECONDS,
    resumes: bool = False,
    faults: dict[int, list[Any]] | None = None,
    eps: float = 1e-8,
    **plan: Any,
) -> Iterator[list[Rank]]:
    """A process for each rank; what of them still runs at the end is killed. `of_ranks`: what the recipe of one rank
    has otherwise. `faults`: rank -> the number of one transfer of its store, and how it fails."""
    spec = {
        "directory": str(directory), "out": str(out), "name": name, "data": data, "plan": plan, "patience": patience,
        "resumes": resumes, "eps": eps, "faults": {str(rank): each for rank, each in (faults or {}).items()},
        "recipe": {"steps": 3} | (recipe or {}),
        "of_ranks": {str(rank): each for rank, each in (of_ranks or {}).items()},
    }  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [Rank(spec, environment | {"RANK": str(rank)}) for rank in range(ranks)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.said()


def ended(processes: list[Rank]) -> list[tuple[int, str]]:
    """(exit code, what it said of errors) of each, once all have ended."""
    said = [process.said() for process in processes]
    return [(process.poll() or 0, words) for process, words in zip(processes, said, strict=True)]


def run(directory: Path, out: Path, ranks: int, **choices: Any) -> dict[str, Any]:
    """What rank 0 of a run without errors found."""
    with started(directory, out, ranks, **choices) as processes:
        every = ended(processes)
        said = "\n".join(f"rank {rank}: {words}" for rank, (_, words) in enumerate(every))
        assert all(code == 0 for code, _ in every), said
    found: dict[str, Any] = json.loads(out.with_name(f"{out.name}.json").read_text())
    return found
