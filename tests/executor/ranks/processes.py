"""Ranks of a test's run, each a process of its own on this machine, which end with the test."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bounds import HANG_SECONDS

REPOSITORY = Path(__file__).parents[3]


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
    **plan: Any,
) -> Iterator[list[subprocess.Popen[str]]]:
    """A process for each rank; what of them still runs at the end is killed. `of_ranks`: what the recipe of one rank
    has otherwise."""
    spec = {
        "directory": str(directory), "out": str(out), "name": name, "data": data, "plan": plan, "patience": patience,
        "resumes": resumes,
        "recipe": {"steps": 3} | (recipe or {}),
        "of_ranks": {str(rank): each for rank, each in (of_ranks or {}).items()},
    }  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.executor.ranks.worker", json.dumps(spec)],
            cwd=REPOSITORY,
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(exit code, what it said of errors) of each, once all have ended."""
    said = [process.communicate(timeout=HANG_SECONDS)[1] for process in processes]
    return [(process.returncode, words) for process, words in zip(processes, said, strict=True)]


def run(directory: Path, out: Path, ranks: int, **choices: Any) -> dict[str, Any]:
    """What rank 0 of a run without errors found."""
    with started(directory, out, ranks, **choices) as processes:
        for rank, (code, words) in enumerate(ended(processes)):
            assert code == 0, f"rank {rank}: {words}"
    found: dict[str, Any] = json.loads(out.with_name(f"{out.name}.json").read_text())
    return found
