"""Where a command is told to write: what is no regular file there stays, and is refused before any work."""

import os
import stat
from pathlib import Path

import pytest

from ssdplan import cli
from ssdplan.commands import bench, compare, profile, show, solve
from ssdplan.plans.errors import UsageError

WHAT_IF = ("solve", "--model", "smollm2-135m", "--gpu", "rtx-4090", "--ssd", "samsung-990-pro", "--host-memory", "8GiB",
           "--micro-batch-sizes", "1", "--micro-batches", "2", "--sequence-length", "256")  # fmt: skip
PROFILE = ("profile", "--model", "model")
EMULATED = (*PROFILE, "--emulate", "like=llama-3.1-8b,gpu=rtx-4090,ssd=samsung-990-pro")
FILES = (
    (*WHAT_IF, "-o"),
    (*WHAT_IF, "--sweep", "micro-batches=2,4", "--csv"),
    (*PROFILE, "-o"),
    (*EMULATED, "-o"),
    ("show", "plan.json", "--csv"),
    ("show", "plan.json", "--html"),
    ("show", "plan.json", "--trace"),
    ("bench", "--csv"),
    ("compare", "--shape", "small", "--csv"),
)
"""Commands that end with an option for a file that they write."""
DIRECTORIES = (
    (*WHAT_IF, "--write-lp"),
    (*WHAT_IF, "--sweep", "micro-batches=2,4", "--plots"),
    ("show", "plan.json", "--plots"),
    ("compare", "--shape", "small", "--plots"),
    ("train", "--model", "model", "--data", "text.txt", "--out"),
)
"""The same for a directory that they write to."""


def said(words: tuple[str, ...], to: Path | str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line of a refusal."""
    try:
        code = cli.main([*words, str(to)])
    except SystemExit as refused:
        code = int(refused.code or 0)
    printed, told = capsys.readouterr()
    assert code == UsageError.exit_code and not printed and told.count("\n") == 1
    return told


def shortly(words: tuple[str, ...]) -> str:
    return " ".join((words[0], *(word for word in words[1:] if word in ("--sweep", "--emulate")), words[-1]))


@pytest.mark.parametrize("words", FILES, ids=shortly)
def test_no_fifo_device_or_link_is_replaced(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("precious").write_text("mine")
    Path("link").symlink_to("precious")
    Path("out").symlink_to("/proc/self/fd/1")  # as /dev/stdout is
    assert "fifo: cannot be written: it is a FIFO; name a regular file" in said(words, "fifo", capsys)
    for name in ("link", "out"):
        assert f"{name}: is a symbolic link, which is neither followed nor replaced" in said(words, name, capsys)
        assert Path(name).is_symlink()
    assert stat.S_ISFIFO(os.lstat("fifo").st_mode) and Path("precious").read_text() == "mine"
    assert sorted(os.listdir()) == ["fifo", "link", "out", "precious"]


@pytest.mark.parametrize("words", (*FILES, *DIRECTORIES), ids=shortly)
def test_where_no_file_can_be_made_nothing_is_begun(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor for root, who is told that all may be written in /proc."""
    monkeypatch.chdir(tmp_path)
    assert "/proc/ssdplan: cannot be written: " in said(words, "/proc/ssdplan", capsys)
    Path("file").write_text("mine")
    said(words, "file/below", capsys)
    assert os.listdir() == ["file"] and Path("file").read_text() == "mine"


@pytest.mark.parametrize("words", DIRECTORIES, ids=shortly)
def test_what_is_no_directory_is_refused_as_one(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    assert "fifo" in said(words, "fifo", capsys)
    assert Path("fifo").is_fifo()


def test_every_option_for_an_output_is_here() -> None:
    outputs = {"output", "csv", "html", "trace", "plots", "write_lp"}
    flags = {word for words in (*FILES, *DIRECTORIES) for word in (f"{words[0]} {words[-1]}",)}
    for module in (bench, compare, profile, show, solve):
        name = module.__name__.rpartition(".")[2]
        for param in module.command().params:
            assert param.name not in outputs or flags & {f"{name} {flag}" for flag in param.opts}, (name, param.name)


@pytest.mark.parametrize("words", FILES, ids=shortly)
def test_no_document_is_replaced_but_by_one_of_its_kind(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be the very one that is read: `show plan.json --html plan.json` left no plan."""
    monkeypatch.chdir(tmp_path)
    own = {"solve -o": "plan", "profile -o": "profile"}.get(f"{words[0]} {words[-1]}")
    for schema in {"plan", "profile", "run"} - {own}:
        document = Path(f"{schema}.json")
        document.write_text(f'{{\n "schema": "ssdplan.{schema}/1"}}')
        before = document.read_text()
        told = said(words, document, capsys)
        assert f"{document}: {f'exists and is not a {own}' if own else f'is a {schema} of ssdplan'};" in told
        assert document.read_text() == before


def test_two_outputs_are_not_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the last would be left."""
    page = tmp_path / "page"
    told = said(("show", "plan.json", "--html", str(page), "--trace"), tmp_path / "." / "page", capsys)
    assert "is named by --html and by --trace" in told and not page.exists()
