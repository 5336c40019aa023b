"""No file is left out of the data, or let in, without a word."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssdplan.executor.data.reading.documents import require_content
from ssdplan.executor.data.reading.files import find_files, splits_of
from ssdplan.plans.errors import UsageError


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a")
    return folder


def names(path: Path, below: Path) -> list[str]:
    return [str(file.relative_to(below)) for file in find_files(path).files]


# What cannot be reached


@pytest.mark.parametrize("what", ["", "*.txt", "*", "**", "**/*.txt", "b*/x.txt", "broken.txt"])
def test_a_link_that_leads_nowhere_is_refused_by_name(tmp_path: Path, what: str) -> None:
    make(tmp_path, "a.txt")
    link = tmp_path / ("broken" if what.startswith("b*") else "broken.txt")
    link.symlink_to("gone.txt")
    with pytest.raises(UsageError, match=r"broken(\.txt)?: a link to gone\.txt, which is not there"):
        find_files(tmp_path / what)
    assert names(tmp_path / "a*", tmp_path) == ["a.txt"], "what a pattern does not match is not looked at"
    link.unlink()
    (tmp_path / ".broken.txt").symlink_to("gone.txt")
    assert names(tmp_path, tmp_path) == ["a.txt"]


def test_a_link_to_itself_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, "a.txt")
    (tmp_path / "round.txt").symlink_to("round.txt")
    with pytest.raises(UsageError, match=r"round\.txt: a link that leads to itself"):
        find_files(tmp_path)


@pytest.fixture
def somebodys() -> Iterator[Path]:
    """A directory of another user's, whom this process then is, where it is root."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o777)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield path
        finally:
            if root:
                os.seteuid(0)
            for entry in path.rglob("*"):
                if not entry.is_symlink():
                    entry.chmod(0o700)


@pytest.mark.parametrize("what", ["", "**/*.txt", "**", "*/x.txt"])
@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_directory_that_may_not_be_read_is_refused_by_name(somebodys: Path, what: str, mode: int) -> None:
    make(somebodys, "a.txt", "b/c/x.txt", "d/x.txt")
    closed = somebodys / ("d" if what == "*/x.txt" else "b")
    closed.chmod(mode)
    if what == "*/x.txt":  # a name that is asked for is not searched for
        with pytest.raises(UsageError, match=r"d/x\.txt: no permission to read it"):
            find_files(somebodys / what)
        return
    with pytest.raises(UsageError, match=r"b(/c)?: no permission to read it"):
        find_files(somebodys / what)


def test_a_file_that_may_not_be_read_is_refused_by_name(somebodys: Path) -> None:
    for suffix in ("txt", "jsonl", "parquet", "arrow"):
        make(somebodys, f"a.{suffix}")
        (somebodys / f"a.{suffix}").chmod(0)
        [file] = find_files(somebodys / f"a.{suffix}").files
        with pytest.raises(UsageError, match=rf"a\.{suffix}: no permission to read it"):
            require_content(file)


def test_what_is_no_regular_file_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, "a.txt")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path, tmp_path / "pipe.jsonl", tmp_path / "*"):
        with pytest.raises(UsageError, match=r"pipe\.jsonl: no regular file"):
            find_files(path)


# Patterns


def test_a_pattern_matches_what_glob_matches(tmp_path: Path) -> None:
    import glob

    make(tmp_path, "a.txt", "b/c.txt", "b/.h.txt", ".h/d.txt", "b/e/f.txt", "b/e/f.jsonl", "[x]/g.txt", "b/e.txt/h.txt")
    (tmp_path / "b" / "same").symlink_to(tmp_path / "[x]")
    patterns = ("*", "**", "**/*.txt", "*/*", "b/**", "**/e/*", "b/?.txt", ".h/*", ".*/*.txt", "[[]x]/*", "a.tx[t]")
    for pattern in patterns:
        found = {
            os.path.realpath(name)
            for name in glob.glob(str(tmp_path / pattern), recursive=True)
            if os.path.isfile(name) and name.endswith((".txt", ".jsonl"))
        }
        ours = list(find_files(tmp_path / pattern).files)
        assert {os.path.realpath(file) for file in ours} == found, pattern
        assert len(ours) == len(found) and ours == sorted(ours, key=str), pattern


def test_what_is_left_alone_is_told(tmp_path: Path) -> None:
    make(tmp_path, "a.txt", "b.json", "c.csv", "d.csv", "e.csv", "f.csv", "g.gz", ".h.csv", "sub/i.txt")
    found = find_files(tmp_path)
    assert names(tmp_path, tmp_path) == ["a.txt", "sub/i.txt"]
    [note] = found.notes
    assert note.endswith(
        "left alone are 6 file(s) of other kinds (b.json, c.csv, d.csv, e.csv, 1 more of .csv, 1 more of .gz)"
    )
    assert "1 directory(s), which the pattern matches but does not enter (" in find_files(tmp_path / "*").notes[-1]
    assert not find_files(tmp_path / "**").notes[1:] and names(tmp_path / "**", tmp_path) == ["a.txt", "sub/i.txt"]


def test_a_file_that_has_two_names_is_told(tmp_path: Path) -> None:
    make(tmp_path, "a.txt", "b.txt")
    (tmp_path / "c.txt").symlink_to("a.txt")
    os.link(tmp_path / "b.txt", tmp_path / "d.txt")
    told = [note.split(": ", 1)[1] for note in find_files(tmp_path).notes]
    assert told == [
        f"{tmp_path / 'c.txt'} is {tmp_path / 'a.txt'} by another name; it is read twice",
        f"{tmp_path / 'd.txt'} is {tmp_path / 'b.txt'} by another name; it is read twice",
    ]


def test_a_saved_data_set_below_a_directory_has_the_files_that_it_says(tmp_path: Path) -> None:
    make(tmp_path, "set/data-0.arrow", "set/cache-1.arrow", "more.txt")
    (tmp_path / "set" / "dataset_info.json").write_text("{}")
    (tmp_path / "set" / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    assert names(tmp_path, tmp_path) == ["more.txt", "set/data-0.arrow"]
    (tmp_path / "set" / "state.json").write_text('{"_data_files": [{"filename": "a"}, {"filename": "x/a"}]}')
    with pytest.raises(UsageError, match="names a data file twice"):
        find_files(tmp_path / "set")


# Splits

# What `datasets` takes for a split's files (SPLIT_KEYWORDS), between any of - . _, a space or a digit.
KEYWORDS = {
    "train": ["train", "training"],
    "validation": ["validation", "valid", "dev", "val"],
    "test": ["test", "testing"],
    "eval": ["eval", "evaluation"],
}


@pytest.mark.parametrize(("split", "word"), [(split, word) for split, words in KEYWORDS.items() for word in words])
def test_the_words_that_datasets_knows_are_known(split: str, word: str) -> None:
    for name in (f"{word}.jsonl", f"my_{word}-0.txt", f"{word}/a.txt", f"a {word}1.txt", f"{word.upper()}.txt"):
        assert splits_of(Path(name)) == {split}, name


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("trainset.jsonl", "train"),
        ("train_data.jsonl", "train"),
        ("myTestSet.jsonl", "test"),
        ("evalsets/a.txt", "eval"),
        ("evaluate.jsonl", "eval"),
        ("validate.jsonl", "validation"),
        ("valdata.jsonl", "validation"),
        ("devset.txt", "validation"),
        ("holdout-3.txt", "held-out"),
        ("heldOut.txt", "held-out"),
        ("hold_out_set.txt", "held-out"),
        ("heldback.txt", "held-out"),
        ("held_back/a.txt", "held-out"),
        ("hold-back-set.txt", "held-out"),
        ("gold.txt", None),
        ("feedback.txt", None),
        ("learn/a.txt", "train"),
        ("learnset.txt", "train"),
        ("trainA/a.txt", "train"),
        ("dev_set/a.txt", "validation"),
        ("train_data/a.txt", "train"),
        ("subtrain.txt", "train"),
        ("minival.json", "validation"),
        ("newsdev2015.txt", "validation"),
        ("cross-validation.txt", "validation"),
        ("eng.testb.txt", "test"),
        ("devtest/a.txt", "test"),
        ("newstest2014.txt", "test"),
        ("unseen.txt", "held-out"),
        ("unseen_rows/a.txt", "held-out"),
        ("never-seen.txt", "held-out"),
        ("withheld.txt", "held-out"),
        ("left_out.txt", "held-out"),
        ("out-of-domain.txt", "held-out"),
        ("ood.txt", "held-out"),
        ("learning.txt", None),
        ("learned.txt", None),
        ("seen.txt", None),
        ("benchmark.txt", None),
        ("wood.txt", None),
        ("unforeseen.txt", None),
        ("attest.txt", None),
        ("submit.txt", None),
        ("retrained.txt", None),
        ("values.txt", None),
        ("testament.txt", None),
        ("device.txt", None),
        ("contest.txt", None),
        ("validity.txt", None),
    ],
)
def test_their_kin_are_known_and_words_by_chance_are_not(name: str, split: str | None) -> None:
    assert splits_of(Path(name)) == ({split} if split else set())


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (("training.jsonl", "testing.jsonl"), r"training data beside another split \(test, train\)"),
        (("trainset/a.txt", "evaluation/a.txt"), r"training data beside another split \(eval, train\)"),
        (("test.jsonl", "validation.jsonl"), r"several splits \(test, validation\)"),
        (("trainval.jsonl", "test.jsonl"), r"training data beside another split \(test, train\)"),
        (("train_val/a.txt", "dev/a.txt"), r"training data beside another split \(train, validation\)"),
        (("pretrain.jsonl", "test.jsonl"), r"training data beside another split \(test, train\)"),
        (("sft_train.jsonl", "sft_eval.jsonl"), r"training data beside another split \(eval, train\)"),
        (("a_tr.jsonl", "a_te.jsonl"), r"training data beside another split \(test, train\)"),
        (("data_tr.jsonl", "data_ts.jsonl"), r"another split \(test, train\), as in .*_tr\.jsonl and .*_ts\."),
        (("x_tr_0.jsonl", "x_ts_0.jsonl"), r"training data beside another split \(test, train\)"),
        (("tr/a.txt", "ts/b.txt"), r"training data beside another split \(test, train\)"),
        (("tr.jsonl", "test.jsonl"), r"training data beside another split \(test, train\)"),
        (("learn/a.txt", "dev_set/a.txt"), r"training data beside another split \(train, validation\)"),
        (("train_data/a.txt", "unseen/a.txt"), r"training data beside another split \(held-out, train\)"),
        (("seen.txt", "unseen.txt"), r"training data beside another split \(held-out, train\)"),
        (("learning_set/a.txt", "test_set/a.txt"), r"training data beside another split \(test, train\)"),
        (("finetune.jsonl", "eval.jsonl"), r"training data beside another split \(eval, train\)"),
        (("fit/a.txt", "holdout/a.txt"), r"training data beside another split \(held-out, train\)"),
        (("train.txt", "benchmark.txt"), r"training data beside another split \(held-out, train\)"),
        (("train/a.txt", "blind_set/a.txt"), r"training data beside another split \(held-out, train\)"),
        (("train.txt", "gold.txt"), r"another split \(held-out, train\), as in .*/gold\.txt and .*/train\.txt"),
        (("train/a.txt", "qa-gold_set-01.txt"), r"training data beside another split \(held-out, train\)"),
        (("train.txt", "myGoldStandard.txt"), r"training data beside another split \(held-out, train\)"),
        (("dev.txt", "heldout.txt"), r"several splits \(held-out, validation\)"),
    ],
)
def test_splits_side_by_side_are_refused(tmp_path: Path, files: tuple[str, ...], why: str) -> None:
    make(tmp_path, *files, "more.txt")
    with pytest.raises(UsageError, match=why):
        find_files(tmp_path)
    found = find_files(tmp_path / "**")  # as it was written
    assert len(found.files) == 3 and any("takes several splits together" in note for note in found.notes)


@pytest.mark.parametrize(
    "files",
    [
        ("learning.txt", "benchmark.txt"),
        ("seen.txt", "hidden.txt"),
        ("gold.txt", "silver.txt"),
        ("train.txt", "gold_prices.txt", "golden.txt", "marigold.txt", "gold/prices.txt"),
        ("finetune.txt", "train.txt"),
        ("trainval.txt", "more.txt"),
        ("pretrain.txt", "train.txt"),
        ("tr.txt", "te.txt", "en.txt"),
        ("te.txt", "a.txt"),
        ("tr.txt", "ts.txt", "en.txt"),
        ("data_tr.txt", "log_ts.txt"),
        ("code_ts.txt", "code_js.txt"),
        ("finetune.txt", "log_ts.txt"),
        ("data_tr.txt", "data_tstamps.txt", "data_rows.txt"),
    ],
)
def test_words_that_are_of_a_split_only_beside_another_are_none_alone(tmp_path: Path, files: tuple[str, ...]) -> None:
    assert not find_files(make(tmp_path, *files)).notes


def test_machines_that_learn_are_no_training_data(tmp_path: Path) -> None:
    [note] = find_files(make(tmp_path, "machine_learning.txt", "test.txt")).notes
    assert "is called test, and is read like the files beside it" in note


def test_held_out_data_among_others_are_told(tmp_path: Path) -> None:
    make(tmp_path, "data.txt", "test.txt")
    [note] = find_files(tmp_path).notes
    assert f"{tmp_path / 'test.txt'} is called test, and is read like the files beside it" in note
    assert not find_files(make(tmp_path / "b", "data.txt", "train.txt")).notes
    assert not find_files(make(tmp_path / "c", "test-0.txt", "testing-1.txt")).notes
