"""Files where others can write: bounds, links, devices, FIFOs, names, permissions."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ssdplan.plans.errors import UsageError
from ssdplan.plans.files import (
    Folder,
    LinkError,
    read_bounded,
    require_name,
    require_replaceable,
    require_room_for_files,
    write_whole,
    writing,
)


def modes(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_read_up_to_its_bound(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bounded(tmp_path / "a", 5, "plan") == b"12345"
    with pytest.raises(UsageError, match="larger than 4 bytes, so not a plan"):
        read_bounded(tmp_path / "a", 4, "plan")


def test_what_has_no_end_or_would_block_is_refused_before_it_is_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero"):
        with pytest.raises(UsageError, match="not a regular file, so not a plan"):
            read_bounded(tmp_path / name, 10, "plan")
    with pytest.raises(UsageError, match="is a directory"):
        read_bounded(tmp_path, 10, "plan")


def test_a_written_file_is_its_owners(tmp_path):
    write_whole(tmp_path / "new" / "deep" / "file", b"x", durable=True)
    assert modes(tmp_path / "new") == 0o700 and modes(tmp_path / "new" / "deep" / "file") == 0o600
    (tmp_path / "shared").touch(0o666)
    write_whole(tmp_path / "shared", "new")
    assert (tmp_path / "shared").read_text() == "new" and modes(tmp_path / "shared") == 0o600


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_link(path: Path) -> None:
    (path.parent / "precious").write_text("mine")
    path.symlink_to("precious")


OTHERS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a socket": make_socket,
    "a directory": Path.mkdir,
    "a symbolic link": make_link,
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_regular_file_is_not_replaced_by_one(tmp_path, what):
    OTHERS[what](tmp_path / "plan.json")
    before, names = (tmp_path / "plan.json").lstat(), sorted(os.listdir(tmp_path))
    with Folder(tmp_path) as folder:
        for use in (
            lambda: require_replaceable(tmp_path / "plan.json"),
            lambda: write_whole(tmp_path / "plan.json", "new"),
            lambda: folder.write("plan.json", "new"),
        ):
            with pytest.raises(UsageError, match=rf"plan.json: .*is {what}"):
                use()
    after = (tmp_path / "plan.json").lstat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert sorted(os.listdir(tmp_path)) == names
    assert what != "a symbolic link" or (tmp_path / "precious").read_text() == "mine"


def test_nor_is_what_appears_while_a_file_is_written(tmp_path):
    with pytest.raises(UsageError, match="it is a FIFO"), writing(tmp_path / "plan.json"):
        os.mkfifo(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").is_fifo() and os.listdir(tmp_path) == ["plan.json"]


def test_what_is_not_there_or_lies_in_no_directory_can_be_replaced(tmp_path):
    require_replaceable(tmp_path / "plan.json")
    require_replaceable(tmp_path / "none" / "plan.json")
    assert not os.listdir(tmp_path)


def test_a_file_that_fails_midway_leaves_what_was_there_and_nothing_else(tmp_path):
    (tmp_path / "a").write_text("before")
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "a") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert (tmp_path / "a").read_text() == "before"
    assert os.listdir(tmp_path) == ["a"]


def test_a_write_that_fails_names_its_file(tmp_path):
    with pytest.raises(OSError) as caught, writing(tmp_path / "steps.csv"):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(tmp_path / "steps.csv")
    with pytest.raises(OSError) as caught, writing(tmp_path / "steps.csv"):
        raise OSError(28, "No space left on device", "/another")
    assert caught.value.filename == "/another"


def test_temporary_names_are_never_the_same(tmp_path):
    names = set()
    for _ in range(5):
        with writing(tmp_path / "a"):
            names |= set(os.listdir(tmp_path)) - {"a"}
    assert len(names) == 5


@pytest.mark.parametrize("name", ["n" * 233, "n" * 234, "n" * 255, "é" * 127, "😀" * 63], ids=len)
def test_a_name_as_long_as_a_name_may_be_is_written(tmp_path, name):
    require_name(tmp_path, name)
    write_whole(tmp_path / name, "content")
    assert (tmp_path / name).read_text() == "content" and os.listdir(tmp_path) == [name]


def test_a_longer_one_is_not(tmp_path):
    require_name(tmp_path, "is not there")
    for name in ("n" * 256, "é" * 128):
        with pytest.raises(OSError, match="File name too long"):
            require_name(tmp_path, name)


def test_a_partial_file_says_whose_it_is(tmp_path):
    """A run's directory is cleared of what a kill left of a document by that name."""
    with Folder(tmp_path) as folder, folder.writing("plan-123456789.json"):
        assert len(folder.names(".plan-*.json.*tmp")) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a while")
def test_where_a_file_can_be_made_and_the_folder_not_be_opened_there_is_no_room_for_files(tmp_path):
    (tmp_path / "drop").mkdir()
    (tmp_path / "drop").chmod(0o733)
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o711)
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionError):
            require_room_for_files(tmp_path / "drop")
    finally:
        os.seteuid(0)


def test_a_folder_follows_no_link(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "precious")
    with Folder(tmp_path / "run") as folder:
        for use in (
            lambda: folder.read("metrics.jsonl", 10, "file of metrics"),
            lambda: folder.append("metrics.jsonl"),
            lambda: folder.has_file("metrics.jsonl"),
        ):
            with pytest.raises(LinkError, match=r"run/metrics.jsonl: is a symbolic link"):
                use()
        folder.remove("metrics.jsonl")
        assert (tmp_path / "precious").read_text() == "mine"
        with folder.append("metrics.jsonl") as file:
            file.write(b"line\n")
        assert folder.read("metrics.jsonl", 10, "file") == b"line\n"
        assert folder.names() == ["metrics.jsonl"] and modes(tmp_path / "run" / "metrics.jsonl") == 0o600


def test_nothing_is_appended_to_a_file_with_two_names(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "theirs").write_text("mine")
    os.link(tmp_path / "theirs", tmp_path / "run" / "metrics.jsonl")
    with Folder(tmp_path / "run") as folder:
        before = set(os.listdir("/proc/self/fd"))
        for use in (folder.append, folder.require_one_name):
            with pytest.raises(LinkError, match=r"run/metrics.jsonl: has 2 names \(hard links\).*cp --reflink=auto"):
                use("metrics.jsonl")
        assert set(os.listdir("/proc/self/fd")) == before
        folder.write("metrics.jsonl", "replaced whole")
        folder.append("metrics.jsonl").close()
        folder.require_one_name("metrics.jsonl")
        folder.require_one_name("none")
    assert (tmp_path / "theirs").read_text() == "mine"


def test_a_link_in_the_place_of_a_document_stays(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "report.json").symlink_to("precious")
    with Folder(tmp_path) as folder:
        with pytest.raises(LinkError, match=r"report.json: is a symbolic link"):
            folder.write("report.json", "{}")
        assert folder.names() == ["precious", "report.json"] and (tmp_path / "report.json").is_symlink()
        (tmp_path / "report.json").unlink()
        with pytest.raises(LinkError), folder.writing("report.json"):  # one that appears while it is written
            (tmp_path / "report.json").symlink_to("precious")
        assert (tmp_path / "report.json").is_symlink() and len(os.listdir(tmp_path)) == 2
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_folder_stays_what_was_opened_when_its_path_is_swapped(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    with Folder(tmp_path / "run") as folder:
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").symlink_to(tmp_path / "other")
        folder.write("report.json", "{}")
    assert (tmp_path / "moved" / "report.json").exists()
    assert not os.listdir(tmp_path / "other")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b"])
def test_a_name_is_one_entry(tmp_path, name):
    with Folder(tmp_path) as folder, pytest.raises(AssertionError):
        folder.write(name, "x")


def test_an_appended_fifo_is_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with Folder(tmp_path) as folder, pytest.raises((UsageError, OSError)):
        folder.append("metrics.jsonl")
