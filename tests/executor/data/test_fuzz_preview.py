"""Whatever is in a file of data, `ssdplan data preview` shows it or refuses it, naming the file, in bounded memory.

`test_formats` feeds the loader rows and bytes of any kind; here files that were good are damaged as drives, editors and
transfers damage them, and the whole command has to cope.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from ssdplan import cli
from ssdplan.executor.data.reading import documents
from ssdplan.native import process
from tests.extent import examples
from tests.made.models import make_tokenizer

MOST_GROWTH_BYTES = 256 << 20
TALK = [{"role": "user", "content": "What is stored?"}, {"role": "assistant", "content": "What is read again."}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": f"row {i}: the quick brown fox"} for i in range(12)],
    "completion": [{"prompt": f"fox {i}", "completion": " over the dog"} for i in range(12)],
    "messages": [{"messages": TALK, "tools": None} for _ in range(12)],
    "alpaca": [{"instruction": "Say it.", "input": "fox", "output": "dog"} for _ in range(12)],
}


def _jsonl(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _parquet(rows: list[dict[str, Any]], path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)


def _arrow_file(rows: list[dict[str, Any]], path: Path) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as sink, ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def _arrow_stream(rows: list[dict[str, Any]], path: Path) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as sink, ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def _text(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_text("\n".join(str(row) for row in rows))


KINDS: dict[str, tuple[str, Callable[[list[dict[str, Any]], Path], None]]] = {
    "jsonl": ("a.jsonl", _jsonl),
    "parquet": ("a.parquet", _parquet),
    "arrow file": ("a.arrow", _arrow_file),
    "arrow stream": ("a.arrow", _arrow_stream),
    "text": ("a.txt", _text),
}
PLACES = st.floats(0, 1, exclude_max=True)
DAMAGES = st.one_of(
    st.tuples(st.just("flip"), PLACES, st.integers(1, 255)),
    st.tuples(st.just("cut"), PLACES, st.just(0)),
    st.tuples(st.just("insert"), PLACES, st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("take out"), PLACES, st.integers(1, 64)),
    st.tuples(st.just("double"), PLACES, st.integers(1, 64)),
    st.tuples(st.just("fill"), PLACES, st.sampled_from([b"\0", b"\xff", b"\x7f", b"[", b'"'])),
)


def damaged(data: bytes, damages: list[tuple[str, float, Any]]) -> bytes:
    for how, where, what in damages:
        at = int(where * len(data))
        if how == "flip" and data:
            data = data[:at] + bytes([data[at] ^ what]) + data[at + 1 :]
        elif how == "cut":
            data = data[:at]
        elif how == "insert":
            data = data[:at] + what + data[at:]
        elif how == "take out":
            data = data[:at] + data[at + what :]
        elif how == "double":
            data = data[: at + what] + data[at:]
        elif how == "fill":
            data = data[:at] + what * len(data[at : at + 8]) + data[at + 8 :]
    return data


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("home")
    make_tokenizer(path / "model")
    return path


@pytest.fixture(scope="module", autouse=True)
def _bounded(home: Path) -> Iterator[None]:
    (home / "warm.txt").write_text("the quick brown fox " * 99)
    assert preview(home, home / "warm.txt") == 0
    process.forget_peak()
    before = process.peak_resident_bytes()
    yield
    assert process.peak_resident_bytes() - before < MOST_GROWTH_BYTES


def preview(home: Path, data: Path) -> int:
    model, cache = str(home / "model"), str(home / "cache")
    return cli.main(
        ["data", "preview", "--model", model, "--data", str(data), "--sequence-length", "16", "--token-cache", cache]
    )


FUZZ = settings(
    max_examples=examples(120),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(
    kind=st.sampled_from(sorted(KINDS)),
    format=st.sampled_from(sorted(ROWS)),
    damages=st.lists(DAMAGES, min_size=1, max_size=3),
)
def test_damaged_files_are_shown_or_refused_by_name(home, capsys, kind, format, damages) -> None:
    name, write = KINDS[kind]
    path = home / name
    write(ROWS[format], path)
    path.write_bytes(damaged(path.read_bytes(), damages))
    code = preview(home, path)
    said = capsys.readouterr()
    if code == 0:
        assert "samples" in said.out
        return
    (error,) = [line for line in said.err.splitlines() if "error:" in line]
    fills_no_row = "no sample has a token" in error or "fewer than one row" in error  # samples are shown before it
    assert code == 2 and error.startswith("ssdplan: error: ") and (not said.out or fills_no_row)
    assert str(path) in error or "chat template" in error or "tokens" in error, error


@FUZZ
@given(name=st.sampled_from(["a.jsonl", "a.parquet", "a.arrow", "a.txt"]), content=st.binary(max_size=400))
def test_any_bytes_are_shown_or_refused_by_name(home, capsys, name, content) -> None:
    (home / name).write_bytes(content)
    code = preview(home, home / name)
    said = capsys.readouterr()
    fills_no_row = "no sample has a token" in said.err or "fewer than one row" in said.err
    assert code in (0, 2) and (code == 0 or fills_no_row) == bool(said.out)
    assert code == 0 or str(home / name) in said.err, said.err


def test_a_line_without_an_end_is_not_read_whole(home, capsys, monkeypatch) -> None:
    monkeypatch.setattr(documents, "_ROW_BYTES", 1 << 20)
    path = home / "endless.jsonl"
    path.write_text('{"text": "good"}\n' + '{"text": "' + "x" * (1 << 20))
    assert preview(home, path) == 2
    assert f"{path}:2: the row has 1 MiB or more" in capsys.readouterr().err
