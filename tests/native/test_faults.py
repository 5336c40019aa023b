"""Faults under the engine: at every transfer of a small workload, each kind; data is right or an error has its type."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import ssdplan.native as native
from tests.native.test_engine import KINDS, PAGE, first_of, io_uring_works, wait_for_start

BLOCK = 4 * PAGE
FILE = 10 * BLOCK
SECONDS = 30
"""Nothing here takes a second; a wait that lasts so long is a hang."""


def bounded(action: Callable[[], object]) -> BaseException | None:
    """What `action` raises, if anything; fails when it does not end."""
    outcome: list[BaseException | None] = []

    def work() -> None:
        try:
            action()
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert outcome, "hangs"
    return outcome[0]


class Workload:
    """Two files of known bytes; parts of both are read and others overwritten at the same time, then all is flushed."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(7)
        self.paths = [folder / "a", folder / "b"]
        self.before = [rng.integers(0, 256, FILE, dtype=np.uint8) for _ in self.paths]
        self.arena = native.Arena(2 * FILE)
        self.memory = torch.from_dlpack(self.arena).numpy()
        self.new = rng.integers(0, 256, FILE, dtype=np.uint8)

    def run(
        self, kind: str, faults: list[tuple[int, str]], *, register: bool, polling: str = "auto"
    ) -> tuple[list[BaseException], int]:
        """Checks what each request promises; returns the errors, and how many transfers were started."""
        for path, data in zip(self.paths, self.before, strict=True):
            path.write_bytes(data.tobytes())
        self.memory[:FILE] = self.new
        self.memory[FILE:] = 0
        source, target = self.arena.address, self.arena.address + FILE
        engine = native.Engine(kind, queue_depth=3, block_bytes=BLOCK, threads=3, polling=polling, faults=faults)
        if register:
            assert engine.register(self.arena.address, self.arena.nbytes) == ""
        a, b = (engine.open(path) for path in self.paths)
        half = FILE // 2
        write = engine.write([(a, 0, source, half), (b, 0, source + half, PAGE)])
        reads = [
            engine.read([(a, half, target, half)]),
            engine.read([(b, half, target + half, half - BLOCK), (b, half - PAGE, target + FILE - BLOCK, PAGE)]),
        ]
        errors = [bounded(request.wait) for request in (write, *reads)]
        assert write.done() and all(read.done() for read in reads)
        errors += [bounded(lambda file=file: engine.flush(file)) for file in (a, b)]
        transfers = engine.transfers
        assert bounded(engine.close) is None

        after = [np.frombuffer(path.read_bytes(), np.uint8) for path in self.paths]
        expected = [self.before[0].copy(), self.before[1].copy()]
        expected[0][:half] = self.new[:half]
        expected[1][:PAGE] = self.new[half : half + PAGE]
        for old, new, now in zip(self.before, expected, after, strict=True):
            # Whatever failed, a byte is the old one or the new one; and the new one where no error says otherwise.
            assert np.all((now == old) | (now == new))
            if errors[0] is None:
                assert np.array_equal(now, new)
        if errors[1] is None:
            assert np.array_equal(self.memory[FILE : FILE + half], self.before[0][half:])
        if errors[2] is None:
            got = self.memory[FILE + half :]
            assert np.array_equal(got[: half - BLOCK], self.before[1][half : FILE - BLOCK])
            assert np.array_equal(got[half - BLOCK : half - BLOCK + PAGE], self.before[1][half - PAGE : half])
        assert np.array_equal(self.memory[:FILE], self.new)
        return [error for error in errors if error is not None], transfers


BLOCKS = 5 + 1 + 5 + 4 + 1
ERRORS = {
    "EIO": native.DriveError,
    "ENOSPC": native.NoSpaceError,
    "EINVAL": native.InvalidRequestError,
    "ENODEV": native.LostVolumeError,
}


@pytest.mark.parametrize("kind", [*KINDS, "registered", "polled"])
@pytest.mark.parametrize("fault", [*ERRORS, "short", "delay", "EAGAIN", "EINTR"])
def test_every_transfer_may_suffer(kind: str, fault: str, tmp_path: Path) -> None:
    register, polling = kind in ("registered", "polled"), "pretend" if kind == "polled" else "auto"
    if register:
        if not io_uring_works():
            pytest.skip("io_uring is forbidden here")
        kind = "io_uring"
    workload = Workload(tmp_path)
    assert workload.run(kind, [], register=register, polling=polling) == ([], BLOCKS)
    for index in range(BLOCKS):
        errors, transfers = workload.run(kind, [(index, fault)], register=register, polling=polling)
        if fault in ERRORS:
            (error,) = errors
            assert type(error) is ERRORS[fault]
            assert isinstance(error, native.IoError)
            assert error.errno == getattr(errno, fault)
            assert Path(error.filename) in workload.paths
            assert error.nbytes in (BLOCK, PAGE)
            assert error.offset % PAGE == 0
            assert transfers <= BLOCKS
        else:
            assert errors == []
            assert transfers == BLOCKS + (fault != "delay")  # the rest, or the second try, is one more


@pytest.mark.parametrize("kind", KINDS)
def test_many_faults_at_once(kind: str, tmp_path: Path) -> None:
    workload = Workload(tmp_path)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        kinds = [*ERRORS, "short", "short", "short", "delay", "EAGAIN"]
        indices = rng.choice(2 * BLOCKS, size=rng.integers(1, 9), replace=False)
        faults = [(int(index), str(rng.choice(kinds))) for index in indices]
        errors, _ = workload.run(kind, faults, register=bool(seed % 2) and kind == "io_uring")
        assert all(type(error) in ERRORS.values() for error in errors), (seed, faults, errors)
        if not any(fault in ERRORS for _, fault in faults):
            assert errors == [], (seed, faults)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flush_that_fails_stays_failed(kind: str, tmp_path: Path) -> None:
    engine = native.Engine(kind, faults=[(1, "flush")])
    files = [engine.open(tmp_path / name, create_bytes=PAGE) for name in "ab"]
    engine.flush(files[0])
    for _ in range(2):
        with pytest.raises(native.DriveError) as caught:
            engine.flush(files[1])
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "b"))
    engine.flush(files[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_delayed_transfer_is_overtaken(kind: str, tmp_path: Path) -> None:
    def overtaken(path: Path) -> bool | None:
        engine = native.Engine(kind, queue_depth=2, block_bytes=BLOCK, faults=[(0, "delay")])
        file = engine.open(path, create_bytes=FILE)
        arena = native.Arena(FILE)
        late = engine.read([(file, 0, arena.address, BLOCK)])
        wait_for_start(engine)
        early = engine.read([(file, BLOCK, arena.address + BLOCK, BLOCK)])
        early.wait()
        first = not late.done()
        assert late.wait() == BLOCK
        return first or None

    assert first_of(overtaken, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_short_transfer_may_fail_too(kind: str, tmp_path: Path) -> None:
    engine = native.Engine(kind, queue_depth=1, block_bytes=BLOCK, faults=[(0, "short"), (1, "EIO")])
    file = engine.open(tmp_path / "file", create_bytes=FILE)
    arena = native.Arena(BLOCK)
    with pytest.raises(native.DriveError) as caught:
        engine.read([(file, BLOCK, arena.address, BLOCK)]).wait()
    assert (caught.value.offset, caught.value.nbytes) == (BLOCK + BLOCK // 2, BLOCK // 2)
    assert engine.transfers == 2


def test_senseless_faults_are_refused() -> None:
    for faults, match in (
        ([(0, "EPERM")], "'EPERM'"),
        ([(-1, "EIO")], "-1"),
        ([(3, "EIO"), (3, "short")], "index 3"),
    ):
        with pytest.raises(ValueError, match=match):
            native.Engine("threads", faults=faults)
    native.Engine("threads", faults=[(3, "EIO"), (3, "flush")])  # two things are counted


def test_the_errors_of_a_lost_or_full_or_refusing_volume_have_types() -> None:
    from ssdplan.native.errors import io_error

    for code, kind in (
        (errno.EIO, native.DriveError),
        (errno.EDQUOT, native.NoSpaceError),
        (errno.ESTALE, native.LostVolumeError),
        (errno.ENXIO, native.LostVolumeError),
        (errno.EOPNOTSUPP, native.InvalidRequestError),
        (errno.ENOENT, native.IoError),
    ):
        error = io_error(code, "read", "/somewhere", 4096, 8192)
        assert type(error) is kind
        assert (error.errno, error.filename, error.offset, error.nbytes) == (code, "/somewhere", 4096, 8192)
