"""Trainings here are as those of the executor's tests: one thread, and no process of their own to read. Processes that
are watched are real ones, and are forked from one that has imported what they need."""

import pytest

from ssdplan.executor.data import apart
from tests.executor.conftest import one_thread, tokenised_here
from tests.watched import SUBPROCESS, address

__all__ = ["one_thread", "tokenised_here"]


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    address()  # before a test has temporary files elsewhere
    monkeypatch.setattr(apart, "subprocess", SUBPROCESS)
