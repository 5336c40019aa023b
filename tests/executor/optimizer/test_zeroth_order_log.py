"""The log of a zeroth-order run: read back as written, cut off anywhere, changed anywhere, reordered, foreign."""

import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from ssdplan.executor.optimizer.zeroth_order import MeZO, Move
from ssdplan.executor.optimizer.zeroth_order_log import LOG, Header, LogFile, read_log
from ssdplan.plans.errors import MismatchError
from ssdplan.plans.files import Folder

HEADER = Header(model="a" * 64, weights="b" * 64, seed=2**63 + 5, directions=3, precision="bf16", origin={"data": {}})


def moves_of(steps: int, directions: int = 3) -> list[tuple[Move, ...]]:
    rng = random.Random(7)
    optimizer = MeZO(lr=1e-3, weight_decay=0.1)
    pairs = [[(rng.random(), rng.random()) for _ in range(directions)] for _ in range(steps)]
    return [optimizer.moves(step, losses) for step, losses in enumerate(pairs)]


def written(path: Path, steps: int, header: Header = HEADER) -> list[tuple[Move, ...]]:
    moves = moves_of(steps, header.directions)
    with Folder(path) as folder, LogFile.create(folder, header) as log:
        for each in moves:
            log.append(each)
        log.sync()
    return moves


def said(folder: Folder) -> tuple[Header, list[tuple[Move, ...]]]:
    log = read_log(folder)
    return log.header, log.moves


def test_what_is_written_is_read(tmp_path: Path) -> None:
    moves = written(tmp_path, 5)
    with Folder(tmp_path) as folder:
        assert said(folder) == (HEADER, moves)
        log, before = LogFile.go_on(folder, HEADER, 3)
        assert before == moves[:3]
        with log:
            for each in moves[3:]:
                log.append(each)
        assert said(folder) == (HEADER, moves)


def test_every_cut_leaves_the_whole_steps_before_it(tmp_path: Path) -> None:
    """As a crash cuts it: what is not whole is dropped, and asked for it is missed."""
    moves = written(tmp_path, 4)
    whole = (tmp_path / LOG).read_bytes()
    record = 16 + 8 * 3 + 16
    begin = len(whole) - 4 * record
    for length in range(len(whole)):
        (tmp_path / LOG).write_bytes(whole[:length])
        with Folder(tmp_path) as folder:
            if length < begin:
                with pytest.raises(MismatchError):
                    read_log(folder)
                continue
            steps = (length - begin) // record
            assert said(folder) == (HEADER, moves[:steps])
            with pytest.raises(MismatchError, match=f"has {steps} steps, and {steps + 1} are needed"):
                LogFile.go_on(folder, HEADER, steps + 1)


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    written(tmp_path, 3)
    whole = (tmp_path / LOG).read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 0x10
        (tmp_path / LOG).write_bytes(changed)
        with Folder(tmp_path) as folder, pytest.raises(MismatchError):
            read_log(folder)


def test_a_record_of_zeros_that_a_power_failure_left_ends_the_log(tmp_path: Path) -> None:
    moves = written(tmp_path, 3)
    with (tmp_path / LOG).open("ab") as file:
        file.write(bytes(5 * (16 + 8 * 3 + 16)))
    with Folder(tmp_path) as folder:
        assert said(folder) == (HEADER, moves)


def test_reordered_and_repeated_records_are_found(tmp_path: Path) -> None:
    written(tmp_path, 4)
    whole = (tmp_path / LOG).read_bytes()
    record = 16 + 8 * 3 + 16
    begin = len(whole) - 4 * record
    parts = [whole[begin + at * record :][:record] for at in range(4)]
    for order in ([1, 0, 2, 3], [0, 0, 1, 2], [0, 2, 3], [0, 1, 3]):
        (tmp_path / LOG).write_bytes(whole[:begin] + b"".join(parts[at] for at in order))
        with Folder(tmp_path) as folder, pytest.raises(MismatchError, match="not what was written there"):
            read_log(folder)


@pytest.mark.parametrize(
    ("field", "value"), [("weights", "c" * 64), ("seed", 4), ("directions", 2), ("precision", "fp32")]
)
def test_another_runs_log_is_refused(tmp_path: Path, field: str, value: object) -> None:
    other = replace(HEADER, **{field: value})
    written(tmp_path, 2, other)
    with Folder(tmp_path) as folder, pytest.raises(MismatchError, match=f"not this run's log: its {field} is"):
        LogFile.go_on(folder, HEADER, 2)


@pytest.mark.parametrize("content", [b"", b"hello", b"ssdpzo\x00\x01" + struct.pack("<I", 1 << 31), b"\x00" * 4096])
def test_what_is_no_log_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOG).write_bytes(content)
    with Folder(tmp_path) as folder, pytest.raises(MismatchError):
        read_log(folder)


def test_a_log_is_never_a_link(tmp_path: Path) -> None:
    target = tmp_path / "mine.txt"
    target.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOG).symlink_to(target)
    with Folder(tmp_path / "run") as folder, pytest.raises(Exception, match="link"):
        LogFile.create(folder, HEADER)
    assert target.read_text() == "mine"
