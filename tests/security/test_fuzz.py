"""A short slice of the fuzzing in `fuzz.py`; SSDPLAN_FUZZ_CASES, of each reader, makes it longer."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security import fuzz

CASES = int(os.environ.get("SSDPLAN_FUZZ_CASES", "4"))
SEED = int(os.environ.get("SSDPLAN_FUZZ_SEED", "1"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("TOKENIZERS_PARALLELISM", "false")
        path = tmp_path_factory.mktemp("fuzz")
        fuzz.make_inputs(path)
        yield path


@pytest.mark.parametrize("reader", fuzz.READERS)
def test_what_is_changed_at_random_is_taken_or_refused(home: Path, reader: str) -> None:
    _, wrong = fuzz.fuzz(home, [reader], CASES, SEED)
    assert not wrong, "\n".join(wrong)


def test_a_reader_that_fails_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, name: str) -> None:
        raise KeyError(name)

    monkeypatch.setitem(fuzz.READERS, "documents", fuzz.Reader(("plan.json",), fails))
    assert "plan.json: KeyError" in fuzz.outcome("documents", home, SEED, 0)
    monkeypatch.setitem(fuzz.READERS, "documents", fuzz.Reader(("plan.json",), lambda *_: bytearray(2 << 30)))
    assert "plan.json: MemoryError" in fuzz.outcome("documents", home, SEED, 0)
    monkeypatch.setitem(
        fuzz.READERS, "documents", fuzz.Reader(("plan.json",), lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    )
    assert "died by signal 9" in fuzz.outcome("documents", home, SEED, 0)
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    monkeypatch.setitem(fuzz.READERS, "documents", fuzz.Reader(("plan.json",), lambda *_: signal.pause()))
    assert "longer than 1 seconds" in fuzz.outcome("documents", home, SEED, 0)
