"""What tests of several files need and take long to make, made once for all processes of pytest.

Owns the directories where it lies, below the base of pytest's temporary ones. Who uses one changes nothing in it.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The directory of that name, which `make` has filled here or in another process. Where it fails, it fails in each
    of them."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    path = base / name
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / f"{name}.made").exists():
            path.mkdir()
            make(path)
            (base / f"{name}.made").touch()
    return path
