"""A run reads data and tokenizer of somebody else by a process that is watched: whatever they cost, the run ends with
an error that names them, and nothing is left behind."""

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import transformers
from pyarrow import parquet

from ssdplan import cli
from ssdplan.executor import train
from ssdplan.executor.data import apart, reader
from ssdplan.executor.data.apart import LIMITS, Limits
from ssdplan.executor.data.reader import Apart
from ssdplan.executor.model.model import open_model
from tests import watched
from tests.executor.runs import LENGTH, prepare
from tests.made.plans import make_plan

MIB = 1 << 20
SHORT = replace(LIMITS, first_seconds=1.0, seconds=1.0, seconds_a_character=0.0)
SMALL = replace(LIMITS, memory_bytes=700 * MIB, memory_bytes_a_character=0)
NEVER = "a*a*a*a*c"
"""A regular expression that tries a run of n letters a in some n to the fourth ways, from each of them on: never so
many at one place that Oniguruma gives up."""
MUCH = "a" * 60


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its plan, and data."""
    path = prepare(tmp_path_factory.mktemp("home"), layers=2)
    model = open_model(path / "llama", torch.float32)
    make_plan(model, sequence_length=LENGTH, micro_batches=1, micro_batch_size=1).save(path / "plan.json")
    return path


@pytest.fixture
def model(home: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be changed."""
    return shutil.copytree(home / "llama", tmp_path / "llama")


class Kept(watched.Forked):
    """Processes that are remembered."""

    began: list["Kept"]

    def __init__(self, *command: Any, **options: Any) -> None:
        super().__init__(*command, **options)
        self.began.append(self)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go. In the end none is left, and no process."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setattr(Kept, "began", [], raising=False)
    monkeypatch.setattr(apart.subprocess, "Popen", Kept)
    yield path
    assert list(path.iterdir()) == []
    assert Kept.began, "no process was started"
    for process in Kept.began:
        assert process.returncode is not None and not Path(f"/proc/{process.pid}").exists()


def change(directory: Path, **settings: object) -> None:
    """Replace parts of tokenizer.json."""
    file = directory / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def ended(
    home: Path, model: Path, data: Path, limits: Limits, monkeypatch: pytest.MonkeyPatch, capsys: Any, *options: object
) -> tuple[int, str]:
    """The exit code of a run, and what it says. In its own process it neither loads a tokenizer nor opens a row."""

    def here(*_: object, **__: object) -> None:
        pytest.fail("it was read in the process of the run")

    monkeypatch.setattr(train, "Apart", functools.partial(Apart, limits=limits))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", here)
    for opened in ("recognise", "samples", "unread_fields"):
        monkeypatch.setattr(reader, opened, here)
    out = data.parent / "out"
    code = cli.main(
        list(map(str, ["run", home / "plan.json", "--model", model, "--data", data, "--out", out, "--steps", 1,
                       "--token-cache", data.parent / "tokens", *options]))
    )  # fmt: skip
    left = sorted(file.suffix for file in (data.parent / "tokens").glob("*"))
    assert left == ([".facts", ".tokens"] if code == 0 else []) and out.exists() == (code == 0)
    return code, capsys.readouterr().err


def test_a_run_reads_in_a_process_of_its_own(home, scratch, tmp_path, monkeypatch, capsys):
    data = shutil.copy(home / "rows.jsonl", tmp_path)
    code, said = ended(home, home / "llama", Path(data), LIMITS, monkeypatch, capsys)
    assert code == 0, said


def test_an_expression_that_backtracks_for_ever_ends_the_run(home, model, scratch, tmp_path, monkeypatch, capsys):
    split = {"type": "Split", "pattern": {"Regex": NEVER}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    change(model, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]})
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"text": f"{MUCH} " * 9999 + "c"}) + "\n")
    code, said = ended(home, model, data, SHORT, monkeypatch, capsys)
    assert code == 2 and f"{data}:1: tokenising it took longer than 1 seconds" in said, said


@pytest.fixture(scope="module")
def huge(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a vocabulary of some MB, which become hundreds of MB of tables."""
    directory = shutil.copytree(home / "llama", tmp_path_factory.mktemp("huge") / "llama")
    settings = json.loads((directory / "tokenizer.json").read_text())
    more = {f"{number:x}": 300 + number for number in range(800_000)}
    change(directory, model={**settings["model"], "vocab": {**settings["model"]["vocab"], **more}})
    return directory


@pytest.mark.parametrize(
    ("limits", "code", "words"),
    [
        (replace(SHORT, first_seconds=0.2), 2, "longer than 0.2 seconds"),
        (replace(SMALL, memory_bytes=300 * MIB), 4, "more than 0.293 GiB of memory"),
    ],
)
def test_a_vocabulary_that_is_huge_ends_the_run(
    home, huge, scratch, tmp_path, monkeypatch, capsys, limits, code, words
):
    data = Path(shutil.copy(home / "rows.jsonl", tmp_path))
    ended_with, said = ended(home, huge, data, limits, monkeypatch, capsys)
    assert ended_with == code and f"{huge}: reading it took {words}" in said, said


@pytest.mark.parametrize(
    ("references", "code", "words"),
    [
        (True, 2, "row 1 would take 97.7 GiB or more"),
        (False, 4, "row 1 or one after it: reading it took more than 0.684 GiB of memory"),
    ],
)
def test_a_row_group_of_a_hundred_gigabytes_ends_the_run(
    home, model, scratch, tmp_path, monkeypatch, capsys, references, code, words
):
    """All of it in the first row, in some kilobytes: each of its messages refers to one text of a MiB. Where the file
    does not say that they are references, pyarrow writes each text out."""
    count = 100_000
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * MIB]))
    roles = pa.DictionaryArray.from_arrays(pa.array([0, 1] * (count // 2), pa.int32()), pa.array(["user", "assistant"]))
    messages = pa.StructArray.from_arrays([roles, texts], ["role", "content"])
    data = tmp_path / "a.parquet"
    table = pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), messages)})
    parquet.write_table(table, data, compression="zstd", store_schema=references)
    assert data.stat().st_size < MIB
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    ended_with, said = ended(home, model, data, SMALL, monkeypatch, capsys)
    assert ended_with == code and f"{data}: {words}" in said, said
