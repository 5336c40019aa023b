"""A process of its own makes the same tokens and the same errors, and leaves neither memory nor half a cache behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssdplan.executor.data import apart as apart_module
from ssdplan.executor.data import reader
from ssdplan.executor.data.reader import Apart
from ssdplan.executor.data.reading.files import find_files
from ssdplan.executor.data.reading.places import unsaid
from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.plans.errors import IoFailure, MismatchError, SsdplanError, UsageError
from tests.bounds import HANG_SECONDS
from tests.made.models import make_tokenizer
from tests.watched import SUBPROCESS

MIB = 1 << 20
NOON = "2024-07-26T12:00:00"
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
def test_its_tokens_are_the_same(
    tmp_path: Path, tokenizer: Any, model_dir: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages by a process that is started, all others by one that is forked."""
    if format != "messages":
        monkeypatch.setattr(apart_module, "subprocess", SUBPROCESS)
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


def test_its_errors_are_the_same(
    tmp_path: Path, tokenizer: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart_module, "subprocess", SUBPROCESS)
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
        TextData(path, Apart(model_dir), sequence_length=4, cache=tmp_path / "cache", progress=kill)
    assert list((tmp_path / "cache").iterdir()) == []


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


def one_run(tmp_path: Path, model_dir: Path, nbytes: int = 3 * MIB) -> subprocess.Popen[str]:
    small, large = large_text(tmp_path / "small.txt", 4096), large_text(tmp_path / "large.txt", nbytes)
    command = [sys.executable, "-c", ONE_RUN, small, model_dir, tmp_path / "cache", large]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_leaves_no_memory_behind(tmp_path: Path, model_dir: Path) -> None:
    """Eight bytes a sample and a page here or there: the tokens themselves, twice as many bytes as are allowed here,
    are mapped, and nobody has read them."""
    with one_run(tmp_path, model_dir, MIB) as process:
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


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("a process was started")


def facts_of(path: Path, by: Any, cache: Path, **asked: Any) -> Any:
    files = tuple(map(str, find_files(path).files))
    named = {"format": None, "append_eos": False, "instant": NOON} | asked
    return by.read(reader.Asked(str(path), files, **named), cache, None)[0]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `Apart` has asked, each answered here as its process would answer it, by way of JSON."""
    asked: list[str] = []

    def answer(work: Any) -> int:
        work(request, unsaid, lambda **said: told(json.loads(json.dumps(said))))
        return 0

    def ask(module: str, wanted: dict[str, Any], hears: Any, path: str, limits: Any, cache: Any) -> None:
        nonlocal request, told
        asked.append(wanted["what"])
        request, told = json.loads(json.dumps(wanted)), hears
        reader.main()

    request: dict[str, Any] = {}
    told: Any = None
    monkeypatch.setattr(reader, "ask", ask)
    monkeypatch.setattr(reader, "answer", answer)
    return asked


def test_a_second_run_starts_no_process_and_loads_no_tokenizer(
    tmp_path: Path, tokenizer: Any, model_dir: Path, in_this_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write(tmp_path / "a.jsonl", ROWS["text"] * 20), tmp_path / "cache"
    first = TextData(path, Apart(model_dir), sequence_length=16, cache=cache)
    assert in_this_process == ["read"]
    monkeypatch.setattr(reader, "load_tokenizer", refuse)
    again = TextData(path, Apart(model_dir), sequence_length=16, cache=cache)
    here = TextData(path, tokenizer, sequence_length=16)
    assert in_this_process == ["read"]
    assert first.content == again.content == here.content and first.remarks() == again.remarks() == here.remarks()
    assert np.array_equal(
        again.micro_batches(0, micro_batches=1, micro_batch_size=4, seed=1)[0].input_ids,
        here.micro_batches(0, micro_batches=1, micro_batch_size=4, seed=1)[0].input_ids,
    )


@pytest.mark.parametrize(
    "what", ["data", "data of the same size", "tokenizer.json", "generation_config.json", "template", "unknown", "cut"]
)
def test_facts_are_kept_of_what_they_were_found_in(
    tmp_path: Path, in_this_process: list[str], what: str, model_dir: Path
) -> None:
    """Whatever changes, the facts are those that a tokenizer, loaded anew, has."""
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    path, cache = write(tmp_path / "a.jsonl", ROWS["messages"] * 3), tmp_path / "cache"
    before = facts_of(path, Apart(model), cache)
    assert facts_of(path, Apart(model), cache) == before and in_this_process == ["read"]
    [kept] = cache.glob("*.facts")
    if what == "data":
        write(path, ROWS["completion"])
    elif what == "data of the same size":
        state = path.stat()
        path.write_text(path.read_text().replace("What", "Thus"))
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    elif what == "tokenizer.json":
        settings = json.loads((model / what).read_text())
        settings["normalizer"] = {"type": "Lowercase"}
        (model / what).write_text(json.dumps(settings))
    elif what == "generation_config.json":
        (model / what).write_text('{"eos_token_id": 3}')
    elif what == "template":
        (model / "chat_template.jinja").write_text(TEMPLATE.replace(": ", " says "))
    elif what == "unknown":
        (model / "something.bin").write_text("of a tokenizer that is not known")
    else:
        kept.write_bytes(kept.read_bytes()[:-1])
    now = facts_of(path, Apart(model), cache)
    assert in_this_process == ["read"] * 2
    assert now == facts_of(path, reader.Here(load_tokenizer(model)), tmp_path / "other")
    assert (now == before) == (what in ("unknown", "cut"))


def test_the_time_that_a_template_writes_is_never_kept(tmp_path: Path, in_this_process: list[str]) -> None:
    model = make_tokenizer(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}" + TEMPLATE)
    path = write(tmp_path / "a.jsonl", ROWS["messages"])
    for year in ("2024", "2031"):
        facts = facts_of(path, Apart(model), tmp_path / "cache", instant=f"{year}-07-26T12:00:00")
        assert json.loads(facts.content["times"]) == {"%Y": year}
    assert in_this_process == ["read"] * 2 and not list((tmp_path / "cache").glob("*.facts"))


def test_its_notes_name_the_same_places(
    tmp_path: Path, tokenizer: Any, model_dir: Path, in_this_process: list[str]
) -> None:
    talk = {"messages": TALK}
    long = {"messages": [TALK[0], {"role": "assistant", "content": "What is read. " * 30}]}
    rows = [talk, {**talk, "system": "Be brief."}, long, {**talk, "id": 3}]
    path = write(tmp_path / "a.jsonl", rows)
    options = {"sequence_length": 64, "pack": False, "append_eos": True}
    here = TextData(path, tokenizer, **options)
    apart = TextData(path, Apart(model_dir), **options)
    assert apart.remarks() == here.remarks() and apart.places(9) == here.places(9)
    assert apart.places(2, 1) == [f"{path}:2", f"{path}:3"]
    said = "\n".join(apart.remarks())
    assert f"first {path}:2" in said and f"first {path}:3" in said, said
    assert in_this_process == ["read", "places", "places", "places", "places"], "once for all remarks"
    for by in (tokenizer, Apart(model_dir)):
        with pytest.raises(MismatchError, match=rf"{path}:1: becomes the id 85 \('u'\)"):
            TextData(path, by, **options, vocab_size=20)


def test_kept_facts_of_others_are_refused(tmp_path: Path, model_dir: Path, in_this_process: list[str]) -> None:
    path, cache = write(tmp_path / "a.jsonl", ROWS["text"]), tmp_path / "cache"
    facts_of(path, Apart(model_dir), cache)
    [kept] = cache.glob("*.facts")
    kept.chmod(0o666)
    with pytest.raises(UsageError, match=r"\.facts: others may write here, so what it says is not believed"):
        facts_of(path, Apart(model_dir), cache)
    kept.unlink()
    kept.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"\.facts: is a symbolic link"):
        facts_of(path, Apart(model_dir), cache)
