"""Trainings here are as those of the executor's tests: one thread, and no process of their own to tokenise."""

from tests.executor.conftest import one_thread, tokenised_here

__all__ = ["one_thread", "tokenised_here"]
