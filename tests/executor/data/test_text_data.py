"""Text becomes the tokenizer's own tokens, a sample comes once an epoch, and what cannot be text is refused by name."""

import codecs
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from ssdplan.executor.data import text_data, token_cache
from ssdplan.executor.data import tokens as tokenising
from ssdplan.executor.data.reading import documents
from ssdplan.executor.data.reading.files import find_files
from ssdplan.executor.data.samples.formats import recognise, samples
from ssdplan.executor.data.text_data import Batch, HoldOut, TextData
from ssdplan.executor.data.tokenising import tokenise
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.plans.errors import DiskFullError, MismatchError, UsageError
from tests import warm
from tests.extent import examples
from tests.made.models import EOS, make_tokenizer

DOCUMENTS = [
    "The quick brown fox jumps over the lazy dog.",
    "What is stored is read again.\n\nAnd what is read again is the same.",
    "Über naïve Schichten: 0123456789 中文字 🙂",
    "a",
    "  spaces   before, between and after  \n",
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(model_dir: Path) -> Any:
    return load_tokenizer(model_dir)


def read_documents(path: Path) -> list[str]:
    files = list(find_files(path).files)
    return [document.text() for document in samples(files, recognise(files), as_chat=False)]


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return path


def whole(tokenizer: Any, text: str) -> list[int]:
    """The oracle: what the tokenizer itself says, then the end-of-sequence token."""
    return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def packed(tokenizer: Any, texts: list[str], length: int) -> list[list[int]]:
    stream = list(itertools.chain.from_iterable(whole(tokenizer, text) for text in texts))
    return [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]


def rows_of(batches: list[Batch]) -> list[list[int]]:
    """The rows without their padding."""
    rows = []
    for batch in batches:
        mask = np.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
        rows += [ids[kept == 1].tolist() for ids, kept in zip(batch.input_ids, mask, strict=True)]
    return rows


def rows_in_order(samples: TextData) -> list[list[int]]:
    return rows_of([batch for batches in samples.eval_batches(1) for batch in batches])


# Reading


def test_a_directory_is_read_in_the_order_of_its_sorted_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("third")
    (tmp_path / "c.TXT").write_text("fourth\n")
    write_rows(tmp_path / "a.jsonl", ["first", "second"])
    (tmp_path / "notes.md").write_text("not text to train on")
    assert read_documents(tmp_path) == ["first", "second", "third", "fourth\n"]


def test_files_whose_names_begin_with_a_dot_are_left_out(tmp_path: Path) -> None:
    for name in ("a.txt", ".b.txt", ".ipynb_checkpoints/a-checkpoint.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_documents(tmp_path) == ["a.txt"]


def test_a_directory_behind_a_link_is_read_once(tmp_path: Path) -> None:
    for name in ("set/real/x.txt", "other/y.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "set" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "set" / "real" / "round").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "same").symlink_to(tmp_path / "set" / "real")
    assert read_documents(tmp_path / "set") == ["other/y.txt", "set/real/x.txt"]


def test_a_pattern_names_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.txt").write_text("once")
    assert read_documents(tmp_path / "**" / "**" / "*.txt") == ["once"]


def test_text_is_passed_on_as_it_is(tmp_path: Path) -> None:
    text = "\r\none\ttwo\r\n\u2028ünï 🙂\n\n"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_documents(tmp_path / "a.txt") == [text]
    rows = json.dumps({"text": text}, ensure_ascii=False)
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{rows}\n\n  \n{rows}".encode())
    assert read_documents(tmp_path / "b.jsonl") == [text, text]


def test_characters_may_straddle_what_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_READ_BYTES", 3)
    text = "aé中🙂" * 20
    (tmp_path / "a.txt").write_text(text)
    assert read_documents(tmp_path) == [text]


def bad_text(content: bytes, suffix: str = "jsonl") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / f"bad.{suffix}").write_bytes(content)
        return folder / f"bad.{suffix}"

    return make


GOOD_ROW = b'{"text": "good"}\n'
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("make", "where", "why"),
    [
        (lambda folder: folder / "absent.txt", "absent.txt: ", "no such file or directory"),
        (lambda folder: folder, "", "no .txt, .jsonl, .parquet or .arrow file"),
        (bad_text(b"a,b", "csv"), "bad.csv: ", "none of .txt, .jsonl, .parquet, .arrow"),
        (bad_text(b"", "txt"), "bad.txt: ", "empty"),
        (bad_text(b""), "bad.jsonl: ", "empty"),
        (bad_text(b"one\ntwo\nthr\xffee\n", "txt"), "bad.txt:3: ", "not valid UTF-8"),
        (bad_text(b"one\ncut off \xe4\xb8", "txt"), "bad.txt:2: ", "not valid UTF-8"),
        (bad_text(GOOD_ROW + b'{"text": "\xff"}\n'), "bad.jsonl:2: ", "not valid UTF-8"),
        (bad_text(GOOD_ROW + b"\n{text}\n"), "bad.jsonl:3: ", "not a JSON row"),
        (bad_text(b"[" * 100_000), "bad.jsonl:1: ", "not a JSON row"),
        (bad_text(b'["text"]'), "bad.jsonl:1: ", "the row is a list; it must be an object with a field `text`, or"),
        (bad_text(b"null"), "bad.jsonl:1: ", "the row is null"),
        (
            bad_text(GOOD_ROW + b'{"prompt": "p", "n": 1}'),
            "bad.jsonl:2: ",
            "no field `text` (its fields: `prompt`, `n`)",
        ),
        (bad_text(b"{}"), "bad.jsonl:1: ", "no field `text` (its fields: none)"),
        (bad_text(GOOD_ROW + b'{"text": "a", "text": "b"}'), "bad.jsonl:2: ", "has the key 'text' twice"),
        (
            bad_text(GOOD_ROW + b'{"text": "a", "n": [{"\\u0078": 1, "x": 1}]}'),
            "bad.jsonl:2: ",
            "has the key 'x' twice",
        ),
        (bad_text("one\ntwo".encode("utf-16-le"), "txt"), "bad.txt:1: ", "has a character NUL"),
        (bad_text(b"one\ntwo\n" + bytes(4096), "txt"), "bad.txt:3: ", "has a character NUL"),
        *(
            (bad_text(LFS, kind), f"bad.{kind}: ", "a pointer of git LFS")
            for kind in ("txt", "jsonl", "arrow", "parquet")
        ),
        *(
            (bad_text(pointer, kind), f"bad.{kind}: ", "a pointer of git LFS")
            for kind in ("txt", "jsonl")
            for pointer in (
                codecs.BOM_UTF8 + LFS,
                codecs.BOM_UTF8 + LFS.replace(b"\n", b"\r\n"),
                b"\r\n" + LFS.replace(b"\n", b"\r\n"),
                LFS.replace(b"git-lfs", b"hawser"),
            )
        ),
        (bad_text(b"# xet version 0\nfilesize = 9\nhash = '0'\n", "txt"), "bad.txt: ", "a pointer of git-xet"),
        *(
            (bad_text(pointer, "txt"), "bad.txt: ", "a pointer of git-annex")
            for pointer in (
                b"../.git/annex/objects/x/y/SHA256E-s9--0.txt/SHA256E-s9--0.txt",
                b".git/annex/objects/x/y/SHA256E-s9--0.txt",
                codecs.BOM_UTF8 + b"/annex/objects/SHA256E-s9--0.txt\r\n",
            )
        ),
        (bad_text(b"/annex/objects/SHA256E-s9--0.txt\n", "txt"), "bad.txt: ", "a pointer of git-annex"),
        (bad_text(b'{"text": 3}'), "bad.jsonl:1: ", "the field `text` is a number; it must be a string"),
        (bad_text(b'{"text": null}'), "bad.jsonl:1: ", "the field `text` is null"),
        (bad_text(b'{"text": "\\ud83d"}'), "bad.jsonl:1: ", "half of a surrogate pair"),
    ],
)
def test_what_is_not_text_is_refused_with_its_place(
    tmp_path: Path, tokenizer: Any, make: Callable[[Path], Path], where: str, why: str
) -> None:
    path = make(tmp_path)
    for attempt in (
        lambda: read_documents(path),
        lambda: TextData(path, tokenizer, sequence_length=4, cache=tmp_path / "cache"),
    ):
        with pytest.raises(UsageError) as refused:
            attempt()
        message = str(refused.value)
        assert message.startswith(f"{tmp_path}/{where}" if where else str(tmp_path))
        assert why in message
        assert "\n" not in message
    assert not list(tmp_path.glob("cache/*"))


@pytest.mark.parametrize(("name", "content"), [("a.txt", " \n\t\n"), ("a.jsonl", '\n\n{"text": ""}\n{"text": " "}\n')])
def test_white_space_alone_is_no_text(tmp_path: Path, tokenizer: Any, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    for pack in (True, False):
        with pytest.raises(UsageError, match="no text at all"):
            TextData(tmp_path, tokenizer, sequence_length=2, pack=pack)


# Tokens


@pytest.mark.parametrize("length", [2, 5, 16])
def test_packed_rows_are_the_tokens_of_all_documents_end_to_end(tmp_path: Path, tokenizer: Any, length: int) -> None:
    samples = TextData(write_rows(tmp_path / "a.jsonl", DOCUMENTS), tokenizer, sequence_length=length)
    expected = packed(tokenizer, DOCUMENTS, length)
    assert rows_in_order(samples) == expected
    assert (samples.samples, samples.documents) == (len(expected), len(DOCUMENTS))
    assert samples.tokens == sum(len(whole(tokenizer, text)) for text in DOCUMENTS)


def test_unpacked_rows_are_documents_cut_and_padded_to_their_micro_batch(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", DOCUMENTS)
    samples = TextData(path, tokenizer, sequence_length=20, pack=False)
    expected = [whole(tokenizer, text)[:20] for text in DOCUMENTS]
    assert samples.samples == len(DOCUMENTS)
    assert rows_in_order(samples) == expected
    [[first, second, _]] = samples.eval_batches(2, micro_batches=3)
    assert first.input_ids.shape == (2, 20)
    assert first.attention_mask is None  # both are longer than that
    lengths = [len(row) for row in expected]
    assert second.input_ids.shape == (2, max(lengths[2:4]))
    assert second.attention_mask is not None
    assert second.attention_mask.sum(axis=1).tolist() == lengths[2:4]
    padding = second.attention_mask == 0
    assert (second.labels[padding] == -100).all()
    assert (second.labels[~padding] == second.input_ids[~padding]).all()
    assert second.input_ids.dtype == second.labels.dtype == second.attention_mask.dtype == np.int64


def test_micro_batches_have_one_of_few_lengths(tmp_path: Path, tokenizer: Any) -> None:
    """Of rows of at most 200 tokens: 64, 112 or 200, the least that the longest row of a micro-batch fits into."""
    texts = ["ab " * count for count in range(1, 70, 7)]
    path = write_rows(tmp_path / "a.jsonl", texts)
    alone = TextData(path, tokenizer, sequence_length=200, pack=False)
    expected = [
        next(length for length in (64, 112, 200) if length >= min(len(whole(tokenizer, text)), 200)) for text in texts
    ]
    assert set(expected) == {64, 112, 200}
    assert [batch.input_ids.shape[1] for [batch] in alone.eval_batches(1)] == expected
    pairs = [batch.input_ids.shape[1] for [batch] in alone.eval_batches(2)]
    assert pairs == [max(pair) for pair in zip(expected[::2], expected[1::2], strict=True)]
    for [batch] in alone.eval_batches(1):
        if batch.attention_mask is not None:
            assert (batch.labels[batch.attention_mask == 0] == -100).all()


def test_only_packed_texts_are_sure_to_fill_their_rows(tmp_path: Path, tokenizer: Any) -> None:
    texts = ["ab " * count for count in range(1, 70, 7)]
    path = write_rows(tmp_path / "a.jsonl", texts)
    asked = [json.dumps({"prompt": f"a {number}", "completion": "a b"}) for number in range(8)]
    (tmp_path / "b.jsonl").write_text("\n".join(asked))
    for file, pack, full in ((path, True, True), (path, False, False), (tmp_path / "b.jsonl", True, False)):
        hold_out = HoldOut(samples=4)
        samples = TextData(file, tokenizer, sequence_length=200, pack=pack, hold_out=hold_out)
        assert samples.held_out is not None
        assert samples.full_rows == samples.held_out.full_rows == full
        lengths = {batch.input_ids.shape[1] for part in (samples, samples.held_out) for [batch] in part.eval_batches(1)}
        assert (lengths == {200}) == full, "these rows are of several lengths, or of one"


def test_a_padding_token_in_the_text_still_counts(tmp_path: Path, tokenizer: Any) -> None:
    """The end of a sequence is often the padding token too: what tells them apart is their place, not their id."""
    tokenizer.pad_token = tokenizer.eos_token
    samples = TextData(write_rows(tmp_path / "a.jsonl", ["a", "a b"]), tokenizer, sequence_length=20, pack=False)
    [[batch]] = samples.eval_batches(2)
    assert batch.attention_mask is not None
    assert (batch.labels[batch.attention_mask == 1] == tokenizer.eos_token_id).sum() == 2


@pytest.mark.parametrize("pack", [True, False])
def test_a_tokenizer_that_frames_texts_keeps_its_frame(tmp_path: Path, tokenizer: Any, pack: bool) -> None:
    start = (tokenizer.convert_ids_to_tokens(5), 5)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start[0]} $A", special_tokens=[start]
    )
    samples = TextData(
        write_rows(tmp_path / "a.jsonl", DOCUMENTS), tokenizer, sequence_length=3 if pack else 99, pack=pack
    )
    expected = packed(tokenizer, DOCUMENTS, 3) if pack else [whole(tokenizer, text) for text in DOCUMENTS]
    assert expected[0][0] == 5
    assert rows_in_order(samples) == expected


def test_a_tokenizer_that_ends_texts_by_itself_gets_no_second_end(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, tokenizer.eos_token_id)]
    )
    samples = TextData(write_rows(tmp_path / "a.jsonl", DOCUMENTS), tokenizer, sequence_length=99, pack=False)
    assert rows_in_order(samples) == [tokenizer(text)["input_ids"] for text in DOCUMENTS]


def test_a_tokenizer_that_cannot_be_cut_gets_documents_whole(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert not tokenising._Cutter(tokenizer).possible
    samples = TextData(write_rows(tmp_path / "a.jsonl", DOCUMENTS), tokenizer, sequence_length=99, pack=False)
    assert rows_in_order(samples) == [whole(tokenizer, text) for text in DOCUMENTS]


def test_a_tokenizer_that_splits_its_special_tokens_is_not_cut_behind_them(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.add_tokens([AddedToken("<b", special=True, normalized=False)])
    tokenizer.split_special_tokens = True
    text = "The quick" * 700 + "<brown" + " fox" * 3000
    (tmp_path / "a.txt").write_text(text)
    found = list(TextData(tmp_path / "a.txt", tokenizer, sequence_length=64, pack=True).sample(0)[0])
    assert found == whole(tokenizer, text)


def test_a_tokenizer_without_a_fast_form_serves_too(tmp_path: Path) -> None:
    bytes_only = ByT5Tokenizer()  # pure Python, and ends every text by itself
    assert not bytes_only.is_fast
    path, cache = write_rows(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "cache"
    for _ in range(2):
        samples = TextData(path, bytes_only, sequence_length=99, pack=False, cache=cache)
        expected = [[*(byte + 3 for byte in text.encode()), bytes_only.eos_token_id] for text in DOCUMENTS]
        assert rows_in_order(samples) == expected
    assert len(list(cache.iterdir())) == 1


def test_a_document_too_long_to_be_given_whole_is_refused(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "WHOLE_CHARACTERS", 50)
    path = write_rows(tmp_path / "a.jsonl", ["short", "long " * 20])
    assert TextData(path, tokenizer, sequence_length=4).samples > 0  # this one can be cut
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    with pytest.raises(UsageError, match=r"a\.jsonl:2: a document of 100 characters.*split it"):
        TextData(path, tokenizer, sequence_length=4)


PRE_TOKENIZERS = {
    "GPT-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "SmolLM": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "Llama 3": lambda: split_by(tokenising._KNOWN_SPLITS[0]),
    "Qwen 2": lambda: split_by(tokenising._KNOWN_SPLITS[1]),
}


def split_by(expression: str) -> Any:
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
@pytest.mark.parametrize("seed", range(3))
def test_cutting_a_long_document_changes_no_token(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    monkeypatch.setattr(tokenising, "_PIECE_CHARACTERS", 200)
    monkeypatch.setattr(tokenising._Cutter, "LOOK_AHEAD", 40)
    tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]()
    cutter = tokenising._Cutter(tokenizer)
    assert cutter.possible
    parts = ["\n", " ", "  ", "\n\n", "\t", "\r\n", "a", "word", "It's", "'s", "is read", "123", "4567890", ".", "!!"]
    parts += ["é", "中文", "\u00a0", "\x1c", "🙂", "_", EOS, EOS[:5], "x" * 300, " " * 90]
    generator = random.Random(f"{kind} {seed}")
    cuts = 0
    for _ in range(20):
        weights = [generator.random() ** 3 for _ in parts]
        text = "".join(generator.choices(parts, weights, k=400))
        step = generator.randint(1, 500)
        pieces = list(cutter.pieces(text[i : i + step] for i in range(0, len(text), step)))
        cuts += len(pieces) - 1
        assert "".join(pieces) == text
        tokens = [token for piece in pieces for token in tokenizer(piece)["input_ids"]]
        assert tokens == tokenizer(text)["input_ids"], repr(text)
    assert cuts > 20


def test_a_long_document_with_a_framing_tokenizer_is_framed_once(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "_PIECE_CHARACTERS", 2000)
    start = (tokenizer.convert_ids_to_tokens(5), 5)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start[0]} $A", special_tokens=[start]
    )
    texts = ["\n".join(DOCUMENTS * 200), "short"]
    samples = TextData(write_rows(tmp_path / "a.jsonl", texts), tokenizer, sequence_length=10**6, pack=False)
    assert rows_in_order(samples) == [whole(tokenizer, text) for text in texts]


# What cannot be trained on


def test_too_little_text_for_one_row_says_what_would_do(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", ["a", "b"])
    with pytest.raises(
        UsageError, match=r"4 tokens in all, fewer than one row of 64; .*--sequence-length of 4 or less"
    ):
        TextData(path, tokenizer, sequence_length=64)
    assert TextData(path, tokenizer, sequence_length=4).samples == 1


def test_a_text_with_nothing_to_predict_is_left_out_unless_packed(tmp_path: Path, tokenizer: Any) -> None:
    texts = ["good", "x", "", "good"]
    path = write_rows(tmp_path / "a.jsonl", texts)
    alone = TextData(path, tokenizer, sequence_length=8, pack=False)
    assert rows_in_order(alone) == [whole(tokenizer, text) for text in texts if text]
    assert (alone.documents, alone.samples, alone.left_out) == (4, 3, 1)
    assert alone.remarks() == [
        *alone.notes(),
        f"{path}: 1 sample is left out, since nothing of it is learnt within a row (1 token)",
    ]
    assert rows_in_order(TextData(path, tokenizer, sequence_length=2)) == packed(tokenizer, texts, 2)


def test_texts_that_are_cut_say_how_many_tokens_are_lost(tmp_path: Path, tokenizer: Any) -> None:
    texts = ["good", "The quick brown fox jumps " * 40]
    path = write_rows(tmp_path / "a.jsonl", texts)
    shared = TextData(path, tokenizer, sequence_length=16)
    assert shared.remarks() == shared.notes()
    lost = len(whole(tokenizer, texts[1])) - 16
    alone = TextData(path, tokenizer, sequence_length=16, pack=False)
    *others, end = alone.notes()
    assert others == shared.notes()
    assert end.startswith(f"{path}: 1 of 2 sample(s) are cut before an end token ({EOS}) is learnt, first {path}:2; ")
    assert alone.remarks() == [
        *shared.notes(),
        end,
        f"{path}: 1 sample is longer than a row of 16 tokens: {lost} of its tokens are cut off",
    ]


def test_a_sequence_of_one_token_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="2 or more"):
        TextData(write_rows(tmp_path / "a.jsonl", DOCUMENTS), tokenizer, sequence_length=1)


def test_an_id_that_the_model_does_not_have_is_refused_where_the_data_have_it(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gemma-3-1b-it, whose tokenizer has a token of the id vocab_size that only pictures use."""
    monkeypatch.setattr(text_data, "_COUNTED_AT_A_TIME", 7)
    size, cache = len(tokenizer), tmp_path / "cache"
    path = write_rows(tmp_path / "a.jsonl", DOCUMENTS)
    before = rows_in_order(TextData(path, tokenizer, sequence_length=4, vocab_size=size))
    tokenizer.add_tokens([AddedToken("<picture>", special=True, normalized=False)])
    assert rows_in_order(TextData(path, tokenizer, sequence_length=4, vocab_size=size, cache=cache)) == before
    place = len(DOCUMENTS) // 2
    write_rows(path, [*DOCUMENTS[:place], f"{DOCUMENTS[place]} <picture>", *DOCUMENTS[place:]])
    for _ in range(2):  # made, and found again
        with pytest.raises(MismatchError) as refused:
            TextData(path, tokenizer, sequence_length=4, vocab_size=size, cache=cache)
        assert str(refused.value).startswith(f"{path}:{place + 1}: becomes the id {size} ('<picture>') among others")
        assert f"the model's vocab_size is {size};" in str(refused.value)
    assert TextData(path, tokenizer, sequence_length=4, vocab_size=size + 1, cache=cache).samples > 0


def test_rows_are_padded_with_an_id_that_the_model_has(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", ["a", "the quick brown fox jumps"])
    size = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    data = TextData(path, tokenizer, sequence_length=32, pack=False, vocab_size=size)
    ids = np.concatenate([batch.input_ids.ravel() for batches in data.eval_batches(2) for batch in batches])
    assert ids.max() < size and (ids == tokenizer.eos_token_id).sum() > 2
    wide = TextData(path, tokenizer, sequence_length=32, pack=False, vocab_size=size + 1)
    assert max(int(batch.input_ids.max()) for batches in wide.eval_batches(2) for batch in batches) == size


def test_a_file_that_is_written_to_while_it_is_read_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", DOCUMENTS)

    def meanwhile(*work: Any) -> None:
        tokenise(*work)
        with path.open("a") as stream:
            stream.write('{"text": "one more"}\n')

    with pytest.raises(UsageError, match=r"a\.jsonl: changed while it was read"):
        TextData(path, tokenizer, sequence_length=4, tokenise=meanwhile)


def test_what_was_read_is_said_with_its_numbers(tmp_path: Path, tokenizer: Any) -> None:
    for name in ("a", "b"):
        write_rows(tmp_path / f"{name}.jsonl", DOCUMENTS)
    data = TextData(tmp_path, tokenizer, sequence_length=4)
    assert data.what_was_read() == (
        f"{tmp_path}: 2 file(s) of `text` (a.jsonl, b.jsonl), {2 * len(DOCUMENTS)} sample(s), {data.tokens} tokens, "
        f"{data.samples} row(s) of 4"
    )
    half = TextData(write_rows(tmp_path / "c.jsonl", [*DOCUMENTS[:2], "new"]), tokenizer, sequence_length=4)
    assert half.shared(data) == 2 and data.shared(half) == 4 and half.shared(half) == 3


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(UsageError, match="no end-of-sequence token"):
        TextData(write_rows(tmp_path / "a.jsonl", DOCUMENTS), endless, sequence_length=4)


def test_a_model_without_a_readable_tokenizer_is_refused(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(UsageError, match="no such model directory"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match=r"no tokenizer here.*tokenizer\.json"):
        load_tokenizer(tmp_path)
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="the tokenizer cannot be read") as refused:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_tokenizer_that_needs_code_of_its_own_is_refused_and_the_code_not_run(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(UsageError, match="the tokenizer needs remote code, which is never run"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_cannot_tokenise_a_text_says_so(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"hello": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    path = write_rows(tmp_path / "a.jsonl", ["hello hello", "hello world"])
    with pytest.raises(UsageError, match=r"cannot tokenise the text at .*a\.jsonl:2 \(WordLevel error: .*; copy"):
        TextData(path, tokenizer, sequence_length=4)


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(UsageError, match="the tokenizer has no vocabulary"):
        TextData(write_rows(tmp_path / "a.jsonl", ["hello"]), tokenizer, sequence_length=4)


# The cache


def test_the_second_time_nothing_is_tokenised(tmp_path: Path, tokenizer: Any, model_dir: Path) -> None:
    def again_made(*_: object) -> None:
        raise AssertionError("tokenised again")

    path, cache = write_rows(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "cache"
    first = TextData(path, tokenizer, sequence_length=4, cache=cache)
    [file] = cache.iterdir()
    again = TextData(path, load_tokenizer(model_dir), sequence_length=6, cache=cache, tokenise=again_made)
    assert again.tokens == first.tokens
    assert rows_in_order(again) == packed(tokenizer, DOCUMENTS, 6)
    assert list(cache.iterdir()) == [file]


def test_other_text_or_another_tokenizer_is_another_cache(tmp_path: Path, tokenizer: Any) -> None:
    cache = tmp_path / "cache"
    path = write_rows(tmp_path / "a.jsonl", DOCUMENTS)
    TextData(path, tokenizer, sequence_length=4, cache=cache)
    changed = [*DOCUMENTS[:-1], "changed"]
    write_rows(path, changed)
    assert rows_in_order(TextData(path, tokenizer, sequence_length=4, cache=cache)) == packed(tokenizer, changed, 4)
    tokenizer.add_tokens(["read again"])
    assert rows_in_order(TextData(path, tokenizer, sequence_length=4, cache=cache)) == packed(tokenizer, changed, 4)
    assert len(list(cache.iterdir())) == 3


def test_what_a_tokenizer_does_with_special_tokens_is_another_cache(
    tmp_path: Path, tokenizer: Any, model_dir: Path
) -> None:
    rows = [{"messages": [{"role": "user", "content": "What is"}, {"role": "assistant", "content": "<s> stored"}]}]
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, begun, split = (load_tokenizer(model_dir) for _ in range(3))
    begun.bos_token = "quick"
    split.split_special_tokens = True
    for each in (plain, begun, split):
        each.add_tokens([AddedToken("<s>", special=True, normalized=False), "quick"])
        each.chat_template = (
            "{{ bos_token }}{% for m in messages %}{{ m.content }} {% endfor %}"
            "{% if add_generation_prompt %}{% endif %}"
        )

    def ids(tokenizer: Any, cache: Path | None) -> list[int]:
        return list(TextData(path, tokenizer, sequence_length=64, cache=cache).sample(0)[0])

    alone = [ids(each, None) for each in (plain, begun, split)]
    assert alone[0] != alone[1] and alone[0] != alone[2]
    assert [ids(each, cache) for each in (plain, begun, split)] == alone


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-8],
        lambda whole: whole[:5],
        lambda _: b"",
        lambda _: b"x" * 99,
        lambda whole: bytes([whole[0] ^ 1]) + whole[1:],
        lambda whole: whole[:-50] + bytes([whole[-50] ^ 64]) + whole[-49:],
        lambda whole: whole[:-1] + b"x",
    ],
)
def test_a_damaged_cache_is_made_again(tmp_path: Path, tokenizer: Any, damage: Callable[[bytes], bytes]) -> None:
    path, cache = write_rows(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "cache"
    TextData(path, tokenizer, sequence_length=4, cache=cache)
    [file] = cache.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert rows_in_order(TextData(path, tokenizer, sequence_length=4, cache=cache)) == packed(tokenizer, DOCUMENTS, 4)


def test_processes_that_make_one_cache_at_once_all_have_it(tmp_path: Path, model_dir: Path) -> None:
    path, cache = write_rows(tmp_path / "a.jsonl", DOCUMENTS * 50), tmp_path / "cache"
    code = (
        "import pathlib\nfrom ssdplan.executor.data.text_data import TextData\n"
        "from ssdplan.executor.data.tokens import load_tokenizer\n"
        f"data, model, cache = map(pathlib.Path, {[*map(str, (path, model_dir, cache))]})\n"
        "print(TextData(data, load_tokenizer(model), sequence_length=4, cache=cache).content)"
    )
    ended = warm.at_once(code, 2, cwd=tmp_path)
    assert [process.returncode for process in ended] == [0, 0], ended
    said = {process.stdout for process in ended}
    assert len(said) == 1 and len(list(cache.iterdir())) == 1


def test_a_cache_that_nobody_uses_goes(tmp_path: Path, tokenizer: Any) -> None:
    path, cache = write_rows(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "cache"
    cache.mkdir()
    old, new = "a" * 64, "b" * 64
    for name, days in {
        f"{old}.tokens": 31,
        f"{new}.tokens": 29,
        f".{old}.tokens.x1": 31,
        f".{new}.tokens.x2": 0,
        "anyone.tokens": 99,
        "a.txt": 99,
    }.items():
        (cache / name).write_text("x")
        os.utime(cache / name, (time.time() - days * 86400,) * 2)
    TextData(path, tokenizer, sequence_length=4, cache=cache)
    left = {file.name for file in cache.iterdir()}
    assert {f"{new}.tokens", f".{new}.tokens.x2", "anyone.tokens", "a.txt"} < left and len(left) == 5


def test_the_default_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("SSDPLAN_CACHE", raising=False)
    assert token_cache.default_directory() == tmp_path / "user" / "ssdplan"
    monkeypatch.setenv("SSDPLAN_CACHE", str(tmp_path / "own"))
    assert token_cache.default_directory() == tmp_path / "own"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SSDPLAN_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UsageError, match=r"SSDPLAN_CACHE: .*/file/below: cannot be made: Not a directory"):
        token_cache.default_directory()
    monkeypatch.delenv("SSDPLAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert token_cache.default_directory() is None, "nobody asked for that one"


def test_without_a_home_there_is_no_default_cache_but_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    for name in ("XDG_CACHE_HOME", "SSDPLAN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert token_cache.default_directory() is None
    monkeypatch.setenv("SSDPLAN_CACHE", str(tmp_path / "own"))
    assert token_cache.default_directory() == tmp_path / "own"


def test_a_full_disk_leaves_no_cache_behind(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path, cache = write_rows(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "cache"
    monkeypatch.setattr(token_cache, "_write_tokens", full)
    with pytest.raises(DiskFullError, match=r"tokenised text cannot be kept here.*no space left"):
        TextData(path, tokenizer, sequence_length=4, cache=cache)
    assert list(cache.iterdir()) == []


def test_a_large_cache_ends_before_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of 100 GiB, of which 1 GiB stays free for others; pieces of 1,000 tokens, looked at each 10,000 bytes."""
    before, written = 10_000 + (1 << 30), 0

    def usage(path: Path) -> SimpleNamespace:
        assert path == tmp_path
        return SimpleNamespace(total=100 << 30, free=before - written)

    def pieces(count: int) -> Iterator[tuple[Any, bool]]:
        nonlocal written
        for _ in range(count):
            written += 4000
            yield np.zeros(1000, np.uint32), True

    monkeypatch.setattr(token_cache.shutil, "disk_usage", usage)
    monkeypatch.setattr(token_cache, "_BETWEEN_BYTES", 10_000)
    with pytest.raises(DiskFullError, match=r"1 GiB are free, and 1 GiB stay free for others; .*--token-cache"):
        token_cache.write_cache(tmp_path / "a.tokens", pieces(1000))
    assert list(tmp_path.iterdir()) == [] and written < 30_000
    before, written = 1, 0
    token_cache.write_cache(tmp_path / "a.tokens", pieces(2))
    found = token_cache.open_cache(tmp_path / "a.tokens")
    assert found is not None and len(found.tokens) == 2000, "a small one is written as long as it can be"


def test_progress_ends_at_all_of_the_bytes(tmp_path: Path, tokenizer: Any) -> None:
    text = "".join(DOCUMENTS)
    (tmp_path / "a.txt").write_text(text)
    calls: list[tuple[int, int]] = []
    TextData(tmp_path, tokenizer, sequence_length=4, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len(text.encode()), len(text.encode()))


# Samples


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> TextData:
    """Thirteen samples, each of other tokens."""
    folder = tmp_path_factory.mktemp("numbered")
    texts = ["abcdefghijklm"[i] * (i + 1) for i in range(13)]
    return TextData(write_rows(folder / "a.jsonl", texts), load_tokenizer(model_dir), sequence_length=32, pack=False)


@settings(max_examples=examples(50), deadline=None)
@given(
    micro_batches=st.integers(1, 5), size=st.integers(1, 4), seed=st.integers(0, 2**64 - 1), epochs=st.integers(1, 4)
)
def test_every_epoch_has_every_sample_once_in_an_order_of_its_own(
    numbered: TextData, micro_batches: int, size: int, seed: int, epochs: int
) -> None:
    needed = epochs * numbered.samples
    rows: list[list[int]] = []
    step = 0
    while len(rows) < needed:
        batches = numbered.micro_batches(step, micro_batches=micro_batches, micro_batch_size=size, seed=seed)
        assert [len(batch.input_ids) for batch in batches] == [size] * micro_batches
        rows += rows_of(batches)
        step += 1
    everything = sorted(rows_in_order(numbered))
    orders = [rows[i : i + numbered.samples] for i in range(0, needed, numbered.samples)]
    assert all(sorted(order) == everything for order in orders)
    assert all(a != b for a, b in itertools.combinations(orders, 2))  # by chance once in 13! times


@settings(max_examples=examples(50), deadline=None)
@given(step=st.integers(0, 10**6), split=st.sampled_from([(1, 6), (2, 3), (3, 2), (6, 1)]), seed=st.integers(0, 99))
def test_a_step_depends_on_nothing_but_its_arguments(
    numbered: TextData, step: int, split: tuple[int, int], seed: int
) -> None:
    def rows(micro_batches: int, size: int) -> list[list[int]]:
        return rows_of(numbered.micro_batches(step, micro_batches=micro_batches, micro_batch_size=size, seed=seed))

    expected = rows(1, 6)
    numbered.micro_batches(step + 1, micro_batches=2, micro_batch_size=2, seed=seed + 1)
    text_data._shuffle.cache_clear()
    assert rows(*split) == expected  # however the same batch is cut into micro-batches


def test_seeds_give_orders_that_are_evenly_spread() -> None:
    samples, seeds = 5, 4000
    counts = np.zeros((samples, samples), int)
    for seed in range(seeds):
        counts[np.arange(samples), text_data._shuffle(seed, 0, samples)] += 1
    assert np.abs(counts / seeds - 1 / samples).max() < 0.03  # 4.7 standard deviations


def test_the_order_of_a_run_never_changes() -> None:
    """A run of one version resumes with the same samples in another: the order is Philox 4x64-10's, as published."""
    for seed, epoch, count in ((0, 0, 8), (7, 2, 37), (2**64 - 1, 5, 100)):
        numbers = [number for block in range(1, count // 4 + 2) for number in philox(block, seed, epoch)]
        expected = sorted(range(count), key=numbers.__getitem__)
        assert text_data._shuffle(seed, epoch, count).tolist() == expected


def philox(counter: int, *key: int) -> list[int]:
    """Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), section 5.1."""
    words, keys, mask = [counter, 0, 0, 0], list(key), 2**64 - 1
    for _ in range(10):
        first, second = words[0] * 0xD2E7470EE14C6C93, words[2] * 0xCA5A826395121157
        words = [(second >> 64) ^ words[1] ^ keys[0], second & mask, (first >> 64) ^ words[3] ^ keys[1], first & mask]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return words


@pytest.mark.parametrize(
    ("micro_batches", "size", "limit"), [(1, 1, None), (2, 3, None), (2, 3, 7), (4, 4, 99), (2, 2, 4)]
)
def test_evaluation_sees_every_sample_once_and_in_order(
    numbered: TextData, micro_batches: int, size: int, limit: int | None
) -> None:
    passes = list(numbered.eval_batches(size, limit, micro_batches=micro_batches))
    assert all([len(batch.input_ids) for batch in batches] == [size] * micro_batches for batches in passes)
    counted = []
    for batch in itertools.chain.from_iterable(passes):
        for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
            if (labels != -100).any():
                counted.append(ids[labels != -100].tolist())
    assert counted == rows_in_order(numbered)[:limit]


# What is held out


def texts_of(data: TextData, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(data.sample(i)[0]).removesuffix(EOS) for i in range(data.documents)]


def split(path: Path, tokenizer: Any, hold_out: HoldOut) -> tuple[list[str], list[str]]:
    data = TextData(path, tokenizer, sequence_length=8, pack=False, hold_out=hold_out)
    assert data.held_out is not None and data.held_out.held_out is None
    assert data.samples == data.documents and data.held_out.samples == data.held_out.documents
    return texts_of(data, tokenizer), texts_of(data.held_out, tokenizer)


@pytest.mark.parametrize("hold_out", [HoldOut(fraction=0.25), HoldOut(samples=50)])
def test_what_is_held_out_is_not_trained_on_and_nothing_is_lost(
    tmp_path: Path, tokenizer: Any, hold_out: HoldOut
) -> None:
    texts = [f"text {i}" for i in range(200)]
    training, held_out = split(write_rows(tmp_path / "a.jsonl", texts), tokenizer, hold_out)
    assert sorted(training + held_out) == sorted(texts) and not set(training) & set(held_out)
    assert [text for text in texts if text in training] == training  # in their own order
    assert len(held_out) == 50 if hold_out.samples else 30 <= len(held_out) <= 70  # 50, four standard deviations


def test_a_fraction_stays_held_out_when_data_are_added_or_moved(tmp_path: Path, tokenizer: Any) -> None:
    texts = [f"text {i}" for i in range(120)]
    few = split(write_rows(tmp_path / "a.jsonl", texts[:60]), tokenizer, HoldOut(fraction=0.3))
    random.Random(0).shuffle(texts)
    many = split(write_rows(tmp_path / "a.jsonl", texts), tokenizer, HoldOut(fraction=0.3))
    assert set(few[0]) <= set(many[0]) and set(few[1]) <= set(many[1])


def test_samples_that_are_the_same_are_on_the_same_side(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", [f"text {i}" for i in range(20)] * 3)
    for hold_out in (HoldOut(fraction=0.3), HoldOut(samples=7)):
        training, held_out = split(path, tokenizer, hold_out)
        assert not set(training) & set(held_out)
        assert all(held_out.count(text) == 3 for text in held_out)
    assert len(held_out) == 9  # the three that hold the seventh


def test_a_part_of_packed_texts_is_packed_by_itself(tmp_path: Path, tokenizer: Any) -> None:
    texts = [f"text {i}" for i in range(60)]
    path = write_rows(tmp_path / "a.jsonl", texts)
    _, held_out = split(path, tokenizer, HoldOut(fraction=0.3))
    data = TextData(path, tokenizer, sequence_length=7, hold_out=HoldOut(fraction=0.3))
    assert data.held_out is not None
    assert rows_in_order(data.held_out) == packed(tokenizer, held_out, 7)
    assert rows_in_order(data) == packed(tokenizer, [text for text in texts if text not in held_out], 7)


@pytest.mark.parametrize(
    ("texts", "hold_out", "why"),
    [
        (["one"], HoldOut(fraction=0.5), "of 1 sample"),
        (["one"] * 5, HoldOut(samples=2), "of 5 sample.*nothing is left to train on"),
        (["one", "two"], HoldOut(samples=2), "nothing is left to train on"),
        (["one", "two"], HoldOut(fraction=1e-9), "none of them is held out"),
    ],
)
def test_a_part_that_would_be_empty_is_refused(
    tmp_path: Path, tokenizer: Any, texts: list[str], hold_out: HoldOut, why: str
) -> None:
    with pytest.raises(UsageError, match=f"{why}.*--eval-data"):
        TextData(write_rows(tmp_path / "a.jsonl", texts), tokenizer, sequence_length=4, pack=False, hold_out=hold_out)


# Where a run stands


def test_a_run_that_goes_on_takes_the_very_rows_that_come_next(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", DOCUMENTS * 4)

    def rows(data: TextData, steps: range, micro_batches: int) -> list[list[int]]:
        size = 6 // micro_batches
        return [
            row
            for step in steps
            for row in rows_of(data.micro_batches(step, micro_batches=micro_batches, micro_batch_size=size, seed=3))
        ]

    data = TextData(path, tokenizer, sequence_length=16, pack=False)
    whole = rows(data, range(9), 2)
    moved = shutil.copy(path, tmp_path / "b.jsonl")
    again = TextData(Path(moved), load_tokenizer(Path(tokenizer.name_or_path)), sequence_length=16, pack=False)
    assert again.content == data.content
    assert rows(data, range(4), 2) + rows(again, range(4, 9), 3) == whole


def test_other_data_are_known_by_what_changed(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", DOCUMENTS)
    content = TextData(path, tokenizer, sequence_length=16).content

    def changed(path: Path) -> set[str]:
        now = TextData(path, tokenizer, sequence_length=16).content
        return {name for name in content if content[name] != now[name]}

    assert changed(path) == set()
    assert changed(write_rows(tmp_path / "b.jsonl", [*DOCUMENTS[:-1], "other"])) == {"files", "tokens"}
    tokenizer.add_tokens(["fox jumps"])
    assert changed(path) == {"tokenizer", "tokenizer_files", "tokens"}
