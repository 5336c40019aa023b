"""Signals behind the last step: the model is what the steps were for, so a run that keeps nothing else writes it."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ssdplan.executor.batches import Texts
from ssdplan.executor.runtime import interruption
from tests.executor.memory.test_migration import SPREAD
from tests.executor.runs import prepare
from tests.executor.snapshots.test_resume import plan_of, run

STEPS = 2
ENDS = "its steps are done: it ends with its model; a second signal stops it now"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"), layers=2)


@pytest.fixture(scope="module")
def weights(directory, tmp_path_factory) -> bytes:
    """Of a run that nothing interrupted."""
    return _model(directory, tmp_path_factory.mktemp("expected") / "run")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal leads to is told before the handler returns."""
    threads = SimpleNamespace(
        Thread=lambda *, target, daemon: SimpleNamespace(start=target),
        current_thread=threading.current_thread,
        main_thread=threading.main_thread,
    )
    monkeypatch.setattr(interruption, "threading", threads)


def _model(directory: Path, out: Path, **choices: object) -> bytes:
    run(directory, out, plan_of(directory, SPREAD), steps=STEPS, **choices)
    return (out / "model" / "model.safetensors").read_bytes()


def _signalled(times: int, number: signal.Signals) -> Callable[[int], None]:
    def at(step: int) -> None:
        if step == STEPS:
            for _ in range(times):
                os.kill(os.getpid(), number)

    return at


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("held_out", [None, "held-out.txt"])
def test_a_run_without_snapshots_that_is_interrupted_behind_its_last_step_writes_its_model(
    directory, tmp_path, weights, number, held_out
):
    notes: list[str] = []
    before = signal.getsignal(number)
    kept = _model(directory, tmp_path / "run", at=_signalled(1, number), notes=notes, held_out=held_out)
    assert kept == weights
    assert ENDS in notes and ("leaves out the last evaluation" in notes) == (held_out is not None)
    assert (tmp_path / "run" / "report.json").is_file() and signal.getsignal(number) is before


def test_the_last_evaluation_is_cut_short_and_not_the_run(directory, tmp_path, weights, monkeypatch):
    passes, evaluations = Texts.held_out, []

    def interrupted(texts):
        evaluations.append(texts)
        for batches in passes(texts):
            yield batches
            if len(evaluations) == 2:  # the first is before the first step
                os.kill(os.getpid(), signal.SIGINT)
            yield batches

    monkeypatch.setattr(Texts, "held_out", interrupted)
    notes: list[str] = []
    assert _model(directory, tmp_path / "run", notes=notes) == weights
    assert "leaves out the last evaluation" in notes


def test_a_second_signal_ends_such_a_run_and_says_what_that_costs(directory, tmp_path):
    notes: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        _model(directory, tmp_path / "run", at=_signalled(2, signal.SIGINT), notes=notes)
    assert notes.index(ENDS) < len(notes) - 1 and "nothing is kept" in notes[-1]
