"""A process of its own makes the same tokens and the same errors, and leaves neither memory nor half a cache behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssdplan.executor.data.reader import Apart
from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.plans.errors import IoFailure, SsdplanError, UsageError
from tests.bounds import HANG_SECONDS
from tests.made.models import make_tokenizer

MIB = 1 << 20
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TALK = [{"role": "user", "content": "What is stored?"}, {"role": "assistant", "content": "What is read."}]
ROWS = {
    "text": [{"text": "The quick brown fox. " * 9}, {"text": "Über 中文字 🙂"}],
    "completion": [{"prompt": "What is", "completion": " stored"}],
    "messages": [{"messages": TALK}],
    "alpaca": [{"instruction": "Say what is stored.", "output": "What is read again."}],
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_tokenizer(tmp_path_factory.mktemp("model"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
def tokenizer(model_dir: Path) -> Any:
    return load_tokenizer(model_dir)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def large_text(path: Path, nbytes: int) -> Path:
    """Words that are all different, so that no tokenizer knows one from before."""
    words = (f"{number * 2654435761 % 2**32:x}" for number in range(nbytes // 8))
    path.write_text(" ".join(words))
    return path


@pytest.mark.parametrize("format", ROWS)
def test_its_tokens_are_the_same(tmp_path: Path, tokenizer: Any, model_dir: Path, format: str) -> None:
    path = write(tmp_path / "a.jsonl", ROWS[format] * 20)
    calls: list[tuple[int, int]] = []
    here = TextData(path, tokenizer, sequence_length=64, pack=False)
    apart = TextData(
        path,
        Apart(model_dir),
        sequence_length=64,
        pack=False,
        cache=tmp_path / "cache",
        progress=lambda done, total: calls.append((done, total)),
    )
    assert apart.content == here.content and apart.documents == here.documents > 0
    for index in range(here.documents):
        for ours, theirs in zip(apart.sample(index), here.sample(index), strict=True):
            assert np.array_equal(ours, theirs)
    assert calls and calls == sorted(calls) and all(0 < done <= total for done, total in calls)
    assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [".facts", ".tokens"]


def test_its_errors_are_the_same(tmp_path: Path, tokenizer: Any, model_dir: Path) -> None:
    blank = write(tmp_path / "blank.jsonl", [{"text": "  "}])
    lacks = write(tmp_path / "lacks.jsonl", [{"text": "a b"}, {"other": "a b"}])
    for path, cache, kind in (
        (blank, tmp_path / "cache", UsageError),
        (lacks, tmp_path / "cache", UsageError),
        (write(tmp_path / "good.jsonl", [{"text": "a b"}]), Path("/proc/none"), IoFailure),
    ):
        messages = set()
        for by in (tokenizer, Apart(model_dir)):
            with pytest.raises(kind) as error:
                TextData(path, by, sequence_length=4, cache=cache)
            assert type(error.value) is kind
            messages.add(str(error.value))
        assert len(messages) == 1 and messages != {""}
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_killed_one_is_an_error(tmp_path: Path, model_dir: Path) -> None:
    """As the kernel ends it where memory does."""

    def kill(done: int, total: int) -> None:
        [child] = children(os.getpid())
        os.kill(child, signal.SIGKILL)

    path = large_text(tmp_path / "a.txt", 4 * MIB)
    with pytest.raises(SsdplanError, match=r"ended with -9 while tokenising .*a\.txt:1; where memory ended"):
        TextData(path, Apart(model_dir), sequence_length=4, progress=kill)


ONE_RUN = """
import sys
from pathlib import Path
from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.reader import Apart
from ssdplan.native import process

data, model, cache = map(Path, sys.argv[1:4])
def told(done, total):
    print("told", flush=True)
TextData(data, Apart(model), sequence_length=4, cache=cache / "first")
before = process.resident_bytes()
TextData(Path(sys.argv[4]), Apart(model), sequence_length=4, cache=cache, progress=told)
print(process.resident_bytes() - before)
"""


def one_run(tmp_path: Path, model_dir: Path) -> subprocess.Popen[str]:
    small, large = large_text(tmp_path / "small.txt", 4096), large_text(tmp_path / "large.txt", 3 * MIB)
    command = [sys.executable, "-c", ONE_RUN, small, model_dir, tmp_path / "cache", large]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_leaves_no_memory_behind(tmp_path: Path, model_dir: Path) -> None:
    """Eight bytes a sample and a page here or there: the tokens themselves are mapped, and nobody has read them."""
    with one_run(tmp_path, model_dir) as process:
        said, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, errors
    assert int(said.split()[-1]) < MIB


def test_one_that_nobody_tells_what_to_do_says_nothing() -> None:
    """As one whose asker was killed while it wrote."""
    for said in ("", '{"asked": {'):
        command = [sys.executable, "-m", "ssdplan.executor.data.reader"]
        done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
        assert done.returncode == 128 + signal.SIGINT and not done.stdout and not done.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_one_that_asked(tmp_path: Path, model_dir: Path, how: signal.Signals) -> None:
    with one_run(tmp_path, model_dir) as process:
        guard = threading.Timer(HANG_SECONDS, process.kill)
        guard.start()
        assert process.stdout and process.stdout.readline() == "told\n"
        [child] = children(process.pid)
        process.send_signal(how)
        process.wait()
        guard.cancel()
    deadline = time.monotonic() + HANG_SECONDS
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(child)
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["first"]


def children(pid: int) -> list[int]:
    """Those of a process that read for it."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if b"data.reader" in Path(f"/proc/{child}/cmdline").read_bytes()]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
