"""Data and tokenizers that came from somebody else: what reading, rendering and tokenising them may cost is bounded."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from ssdplan.executor.data import previewing, tokens
from ssdplan.executor.data.apart import LIMITS, Board, Limits, Seen, Watch
from ssdplan.executor.data.previewing import look_apart  # itself: other tests have another in its place
from ssdplan.executor.data.reader import Apart, Asked
from ssdplan.executor.data.reading import columns, documents
from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.plans.errors import MemoryBudgetError, SsdplanError, UsageError
from tests.made.models import make_tokenizer

MIB = 1 << 20
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}"
)
GIGABYTES = (
    "{% set kept = namespace(all=[]) %}{% for a in range(9999) %}"
    "{% set kept.all = kept.all + ['a' * 99999999 ~ a] %}{% endfor %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "model")


def change(model: Path, **settings: object) -> None:
    """Replace parts of tokenizer.json."""
    file = model / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def rows(path: Path, *found: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def preview(model: Path, data: Path, limits: Limits = LIMITS) -> previewing.Preview:
    order = previewing.Order(
        str(model),
        str(data),
        sequence_length=16,
        usual_length=1024,
        pack=False,
        format=None,
        append_eos=False,
        cache=None,
        samples=1,
    )
    return look_apart(order, None, limits)


# --- limits of a process that is watched


def test_a_row_without_progress_is_ended_when_its_seconds_are_over():
    limits = Limits(seconds=10, seconds_a_character=0.1)
    watch = Watch(limits, 64 << 30, now=0.0)
    first = Seen(2, 0, "rendering", "a.jsonl:1")
    clock = [watch.excess(first, 0, now) for now in np.arange(0.5, 10.5, 0.5)]
    assert clock == [None] * 20
    second = Seen(3, 100, "tokenising", "a.jsonl:2")
    assert all(watch.excess(second, 0, now) is None for now in np.arange(10.5, 30.5, 0.5)), "20 s for 100 characters"
    error = watch.excess(second, 0, 31.0) or watch.excess(second, 0, 31.5)
    assert isinstance(error, UsageError)
    assert "a.jsonl:2: tokenising it took longer than 20 seconds" in str(error)


def test_a_machine_that_slept_is_not_slow():
    watch = Watch(Limits(seconds=10), 64 << 30, now=0.0)
    seen = Seen(2, 0, "rendering", "a.jsonl:1")
    assert watch.excess(seen, 0, 1.0) is None and watch.excess(seen, 0, 3600.0) is None


def test_memory_is_bounded_by_the_limit_and_by_what_the_machine_has():
    seen = Seen(1, 1000, "reading", "a.parquet: row 7")
    limits = Limits(memory_bytes=4 << 30, memory_bytes_a_character=MIB, share=0.5)
    assert Watch(limits, 64 << 30, 0.0).excess(seen, 4 << 30, 0.1) is None
    error = Watch(limits, 64 << 30, 0.0).excess(seen, 5 << 30, 0.1)
    assert isinstance(error, MemoryBudgetError) and "a.parquet: row 7: reading it took more than 4.98 GiB" in str(error)
    small = Watch(limits, 2 << 30, 0.0).excess(seen, (1 << 30) + 1, 0.1)
    assert "took more than 1 GiB of memory (50% of what was available)" in str(small)


def test_both_processes_see_one_page():
    with Board() as ours, Board(os.dup(ours.descriptor)) as theirs:
        theirs.at("rendering", "Datei \ud800ü:3" + "x" * 99999, 12)
        seen = ours.read()
        assert (seen.count, seen.characters, seen.doing) == (1, 12, "rendering")
        assert seen.place.startswith("Datei ?ü:3xx") and len(seen.place) < 5000
        theirs.at("tokenising", "b:4", 0)
        assert ours.read() == Seen(2, 0, "tokenising", "b:4")


# --- attacks


@pytest.mark.parametrize(
    ("template", "kind", "said"),
    [
        (ENDLESS, UsageError, "rendering it took longer than"),
        (GIGABYTES, MemoryBudgetError, "rendering it took more than"),
    ],
)
def test_a_template_that_never_ends_or_allocates_gigabytes(model, tmp_path, template, kind, said):
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].content == 'go' %}" + template + "{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    go = {"messages": [{"role": "user", "content": "go"}, TALK["messages"][1]]}
    path = rows(tmp_path / "a.jsonl", TALK, go, TALK)
    limits = replace(LIMITS, seconds=0.7 if kind is UsageError else 60, memory_bytes=600 * MIB)
    with pytest.raises(kind, match=rf"a\.jsonl:2: {said}.*look at the chat template"):
        TextData(
            path,
            Apart(model, limits),
            sequence_length=16,
            pack=False,
        )


def test_a_preview_is_bounded_too(model, tmp_path):
    (model / "chat_template.jinja").write_text(ENDLESS)
    path = rows(tmp_path / "a.jsonl", TALK)
    with pytest.raises(UsageError, match=r"a\.jsonl:1: rendering it took longer than"):
        preview(model, path, replace(LIMITS, seconds=0.7))
    assert not list(Path("/tmp").glob("ssdplan-*/ssdplan-*/*.tokens"))


def test_a_preview_in_a_process_of_its_own_is_the_same(model, tmp_path):
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    path = rows(tmp_path / "a.jsonl", *[TALK] * 9)
    order = previewing.Order(str(model), str(path), 16, 1024, True, None, True, str(tmp_path / "cache"), 5)
    told = []
    apart = look_apart(order, lambda done, total: told.append((done, total)))
    assert apart == previewing.look_here(order, None) and len(apart.shown) == 5 and told


def test_a_template_that_multiplies_is_refused(model, tmp_path):
    (model / "chat_template.jinja").write_text("{{ messages[0].content * 3000000 }}")
    with pytest.raises(UsageError, match=r"a\.jsonl:1: the chat template of .* makes 3,000,000 characters of the 15"):
        TextData(rows(tmp_path / "a.jsonl", TALK), load_tokenizer(model), sequence_length=16, pack=False)


def test_a_normalizer_that_multiplies_is_refused(model, tmp_path):
    change(model, normalizer={"type": "Replace", "pattern": {"String": "x"}, "content": "ab " * 9999})
    path = rows(tmp_path / "a.jsonl", {"text": "good"}, {"text": "x"})
    with pytest.raises(UsageError, match=r"model: the tokenizer makes [0-9,]+ tokens of the 1 char.* at .*a\.jsonl:2"):
        TextData(path, load_tokenizer(model), sequence_length=16, pack=False)


def test_a_normalizer_that_takes_gigabytes_is_ended(model, tmp_path):
    steps = [{"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 100}] * 5
    change(model, normalizer={"type": "Sequence", "normalizers": steps})
    path = rows(tmp_path / "a.jsonl", {"text": "good"}, {"text": "x"})
    limits = replace(LIMITS, memory_bytes=600 * MIB)
    with pytest.raises(SsdplanError, match=r"a\.jsonl:1 to .*a\.jsonl:2: tokenising it took more than"):
        TextData(
            path,
            Apart(model, limits),
            sequence_length=16,
            pack=False,
        )


def test_a_panic_of_a_regular_expression_is_an_error_with_its_row(model, tmp_path, capfd):
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+b"}, "behavior": "Isolated", "invert": False}
    change(
        model,
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                split,
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
    )
    path = rows(tmp_path / "a.jsonl", {"text": "good"}, {"text": "a" * 9999 + "c"}, {"text": "good"})
    with pytest.raises(UsageError, match=rf"model: the tokenizer cannot .* at {path}:2 \(.*retry-limit.*take the text"):
        preview(model, path)
    said = capfd.readouterr().err
    assert "Traceback" not in said and "stack backtrace" not in said


def test_a_row_of_very_many_values_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_ROW_VALUES", 1000)
    path = tmp_path / "a.jsonl"
    for many in ("{}", "[]", "1", '"a"', '{"a":0}'):
        path.write_text('{"text": "a", "b": [' + ",".join([many] * 2000) + "]}\n")
        with pytest.raises(UsageError, match=r"a\.jsonl:1: the row has more than 1,000 values"):
            documents.field_names(path)
    text = 'a, b, {[ \\"quoted\\", \\\\'  # none of these is a value
    path.write_text('{"text": "' + text * 2000 + '"}\n')
    [row] = documents.json_rows(path)
    assert row.fields == {"text": json.loads(f'"{text}"') * 2000}


def test_as_many_values_as_a_row_may_have_take_bounded_memory():
    assert documents._ROW_VALUES * 300 <= 2 << 30


def dictionary_file(path: Path, value: str, count: int) -> Path:
    parquet.write_table(pa.table({"text": [value] * count}), path, compression="zstd")
    return path


def test_references_that_are_gigabytes_together_are_refused_before_any_is_worked_on(tmp_path, model):
    """100,000 references to one text of 1 MiB: no row is too large, and all are 98 GiB in a file of some hundred
    bytes."""
    path, told = tmp_path / "a.parquet", []
    words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int32)), pa.array(["x" * MIB]))
    parquet.write_table(
        pa.table({"text": words}), path, compression="zstd", store_schema=False, write_statistics=False,
        dictionary_pagesize_limit=1 << 30,
    )  # fmt: skip
    assert path.stat().st_size < 1000
    says = r"a\.parquet: row 256: up to here the rows hold 256 MiB, and the file has [0-9]+ B; at most 10,000 times"
    with pytest.raises(UsageError, match=says):
        next(columns.rows(path, ["text"]))
    with pytest.raises(UsageError, match=says):
        preview(model, path)
    asked = Asked(str(path), (str(path),), None, False, "2026-01-01T00:00:00")
    with pytest.raises(UsageError, match=says):
        Apart(model).read(asked, tmp_path / "cache", lambda done, total: told.append(done))
    assert not told and not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_what_rows_may_hold_together_is_a_multiple_of_the_file_and_no_less_than_a_floor(tmp_path, monkeypatch, suffix):
    """One prompt of 3,000 characters that 4,000 rows share: 12 MB, in a file of some kilobytes."""
    path = tmp_path / f"a.{suffix}"
    table = pa.table({"text": pa.array(["a prompt  " * 300] * 4000).dictionary_encode(), "label": ["yes", "no"] * 2000})
    if suffix == "parquet":
        parquet.write_table(table, path, compression="zstd")
    else:
        with pa.OSFile(str(path), "wb") as sink, ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    size, held = path.stat().st_size, 4000 * 3000
    assert size < held / 100

    def read(times: float, floor: int) -> int:
        monkeypatch.setattr(columns, "_GROWTH", times)
        monkeypatch.setattr(columns, "_GROWN_BYTES", floor)
        return sum(len(fields["text"]) for _, fields in columns.rows(path, ["text"]))

    assert read(columns._GROWTH, 0) == read(0, 2 * held) == read(2 * held / size, 0) == held
    for times, floor in ((0.5 * held / size, 0), (0, held // 2)):
        with pytest.raises(UsageError, match=rf"a\.{suffix}: row 19[0-9]+: up to here"):
            read(times, floor)
    assert next(columns.rows(path, ["text"]))[0] == 1, "the first rows alone are not bounded"


def test_references_to_a_long_text_are_decoded_a_few_at_a_time(tmp_path, monkeypatch):
    """64 of them at once, as a file of some kilobytes may ask for, would be 64 times as long."""
    monkeypatch.setattr(columns, "_ROW_BYTES", 20 * MIB)
    path = dictionary_file(tmp_path / "a.parquet", "x" * (3 * MIB), 64)
    assert path.stat().st_size < MIB
    table = parquet.ParquetFile(path)
    assert columns._rows_at_once(path, table, ["text"]) == 6
    assert columns._rows_at_once(path, table, ["other"]) == columns._ROWS_AT_A_TIME
    ordinary = dictionary_file(tmp_path / "b.parquet", "ordinary", 64)
    assert columns._rows_at_once(ordinary, parquet.ParquetFile(ordinary), ["text"]) == columns._ROWS_AT_A_TIME


def nested(kind: str) -> pa.Array:
    """One row of 10,000 references to a text of 10,000 characters, in few bytes."""
    words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(10_000, np.int32)), pa.array(["x" * 10_000]))
    whole = pa.array([0, 10_000], pa.int32())
    if kind == "list":
        return pa.ListArray.from_arrays(whole, words)
    if kind == "struct":
        return pa.ListArray.from_arrays(whole, pa.StructArray.from_arrays([words], ["content"]))
    if kind == "map":
        return pa.MapArray.from_arrays(whole, pa.array(map(str, range(10_000))), words)
    if kind == "view":
        texts = pa.array(["x" * 10_000])
        one = pa.ListViewArray.from_arrays(
            pa.array(np.zeros(10_000, np.int32)), pa.array(np.ones(10_000, np.int32)), texts
        )
        return pa.ListArray.from_arrays(whole, one)
    if kind == "runs":
        runs = pa.RunEndEncodedArray.from_arrays(pa.array([10_000], pa.int32()), pa.array(["x" * 10_000]))
        return pa.ListArray.from_arrays(whole, runs)
    return pa.ListArray.from_arrays(pa.array([0, 3_000_000], pa.int32()), pa.nulls(3_000_000))


@pytest.mark.parametrize("kind", ["list", "struct", "map", "view", "runs", "nulls"])
def test_a_row_of_references_that_would_be_gigabytes_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(columns, "_BATCH_BYTES", 10 * MIB)
    monkeypatch.setattr(columns, "_ROW_BYTES", 90 * MIB)
    table = pa.table({"text": nested(kind)})
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as sink, ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert path.stat().st_size < MIB
    with pytest.raises(UsageError, match=r"a\.arrow: row 1 would take 0\.[0-9]+ GiB or more \([0-9]+ GiB at most\)"):
        list(columns.rows(path, ["text"]))


def test_only_types_without_references_are_plain():
    text, number = pa.string(), pa.int64()
    talk = pa.list_(pa.struct([("role", text), ("content", text)]))
    for kind in (text, number, pa.bool_(), talk, pa.map_(text, number), pa.large_list(pa.large_string())):
        assert columns._is_plain(kind), kind
    twice = [
        pa.dictionary(pa.int32(), text),
        pa.string_view(),
        pa.list_view(number),
        pa.run_end_encoded(pa.int32(), text),
    ]
    for kind in (*twice, pa.null(), pa.struct([]), pa.list_(text, 2), pa.binary(0)):
        for held in (kind, pa.list_(kind), pa.struct([("a", text), ("b", kind)]), pa.map_(text, kind)):
            assert not columns._is_plain(held), held


def test_rows_of_large_batches_are_the_same_one_by_one(tmp_path, monkeypatch):
    table = pa.table(
        {
            "text": ["a" * n for n in range(100)],
            "view": pa.array([None, *["ü" * n for n in range(99)]], pa.string_view()),
            "messages": [[{"role": "user", "content": str(n)}] * (n % 3) for n in range(100)],
            "map": pa.array([[("a", str(n))] * (n % 4) for n in range(100)], pa.map_(pa.string(), pa.string())),
            "dictionary": pa.array(["a", None, "c", "d"] * 25).dictionary_encode(),
            "numbers": pa.array([[n, n] for n in range(100)], pa.list_(pa.int64(), 2)),
        }
    )
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as sink, ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    expected = [(number, row) for number, row in enumerate(table.to_pylist(), start=1)]
    assert list(columns.rows(path, table.column_names)) == expected
    monkeypatch.setattr(columns, "_BATCH_BYTES", 1)
    assert list(columns.rows(path, table.column_names)) == expected


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/a.jinja", "anything"]
)
def test_a_fifo_or_device_in_a_models_directory_is_refused(model, name):
    path = model / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(UsageError, match=rf"{name}: is not a regular file"):
        load_tokenizer(model)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=rf"{name}: is not a regular file"):
        load_tokenizer(model)


def test_settings_larger_than_any_are_not_read(model):
    os.truncate(model / "tokenizer_config.json", 1 << 40)
    with pytest.raises(UsageError, match=r"tokenizer_config\.json: larger than 64 MiB"):
        load_tokenizer(model)


def test_a_fifo_as_a_data_sets_description_is_refused(tmp_path):
    os.mkfifo(tmp_path / "state.json")
    from ssdplan.executor.data.reading.files import find_files

    with pytest.raises(UsageError, match=r"state\.json: .*not a regular file|state\.json: no regular file"):
        find_files(tmp_path)


def test_a_text_that_a_tokenizer_needs_whole_is_not_read_beyond_its_bound(monkeypatch):
    monkeypatch.setattr(tokens, "WHOLE_CHARACTERS", 50)
    endless = iter(lambda: "x" * 20, None)
    with pytest.raises(UsageError, match=r"a\.txt:1: a document of 60 characters or more.*split it"):
        tokens._whole(documents.Document("a.txt:1", endless))


def test_a_word_without_an_end_is_not_read_beyond_its_bound(model, monkeypatch):
    monkeypatch.setattr(tokens, "WHOLE_CHARACTERS", 50)
    cutter = tokens._Cutter(load_tokenizer(model))
    assert cutter.possible
    with pytest.raises(UsageError, match=r"a\.txt:1: has a word of more than 50 characters"):
        list(cutter.pieces(iter(lambda: "x" * 9999, None), "a.txt:1"))
