"""Direct I/O, with both engines: data against ordinary files, concurrency, and errors that carry what one must know."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ssdplan.native as native
from tests.bounds import HANG_SECONDS
from tests.extent import examples

PAGE = 4096
TRIES = 50
Result = TypeVar("Result")


def io_uring_works() -> bool:
    try:
        native.Engine("io_uring", queue_depth=1).close()
    except native.IoError:
        return False
    return True


KINDS = [
    pytest.param("threads"),
    pytest.param("io_uring", marks=pytest.mark.skipif(not io_uring_works(), reason="io_uring is forbidden here")),
]


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[native.Engine]:
    engine = native.Engine(request.param, queue_depth=6, block_bytes=16 * PAGE)
    yield engine
    engine.close()


def random_bytes(arena: native.Arena, seed: int = 0) -> torch.Tensor:
    tensor = torch.from_dlpack(arena)
    tensor.copy_(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, arena.nbytes, dtype=np.uint8)))
    return tensor


def test_what_is_written_is_in_the_file(engine: native.Engine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = engine.open(path, create_bytes=100 * PAGE)
    assert engine.size(file) == 100 * PAGE
    arena = native.Arena(64 * PAGE)
    data = random_bytes(arena)
    # Three segments, out of order in memory and in the file; one of them longer than a block.
    a = arena.address
    request = engine.write(
        [(file, 90 * PAGE, a, PAGE), (file, 0, a + 40 * PAGE, 20 * PAGE), (file, 30 * PAGE, a + PAGE, 39 * PAGE)]
    )
    assert request.nbytes == 60 * PAGE
    assert request.wait() == 60 * PAGE
    assert request.done()
    engine.flush(file)
    expected = bytearray(100 * PAGE)
    raw = data.numpy().tobytes()
    expected[90 * PAGE : 91 * PAGE] = raw[:PAGE]
    expected[0 : 20 * PAGE] = raw[40 * PAGE : 60 * PAGE]
    expected[30 * PAGE : 69 * PAGE] = raw[PAGE : 40 * PAGE]
    assert path.read_bytes() == bytes(expected)


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_reads_agree_with_an_ordinary_file(engine: native.Engine, tmp_path: Path, data: st.DataObject) -> None:
    pages = 120
    path = tmp_path / "oracle"
    if not path.exists():
        path.write_bytes(np.random.default_rng(1).integers(0, 256, pages * PAGE, dtype=np.uint8).tobytes())
    oracle = path.read_bytes()
    file = engine.open(path, read_only=True)
    arena = native.Arena(pages * PAGE)
    target = torch.from_dlpack(arena).numpy()
    expected = np.zeros(pages * PAGE, dtype=np.uint8)
    segments, at = [], 0
    for _ in range(data.draw(st.integers(0, 6))):
        length = data.draw(st.integers(0, pages - at))
        offset = data.draw(st.integers(0, pages - length))
        segments.append((file, offset * PAGE, arena.address + at * PAGE, length * PAGE))
        expected[at * PAGE : (at + length) * PAGE] = np.frombuffer(oracle, np.uint8)[
            offset * PAGE : (offset + length) * PAGE
        ]
        at += length
    assert engine.read(segments).wait() == at * PAGE
    assert np.array_equal(target, expected)
    engine.close_file(file)


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_what_is_moved_summed_has_the_checksum_of_its_bytes(
    engine: native.Engine, tmp_path: Path, data: st.DataObject
) -> None:
    """Ranges of segments anywhere, of any number of blocks, some cut short; written, then read to other memory."""
    pages = 120
    path = tmp_path / "summed"
    file = engine.open(path, create_bytes=None if path.exists() else pages * PAGE)
    arena = native.Arena(2 * pages * PAGE)
    source, target = random_bytes(arena, seed=2).numpy().reshape(2, -1)
    ranges: list[list[tuple[int, int, int, int]]] = []
    expected: list[int] = []
    at = 0
    for _ in range(data.draw(st.integers(0, 4))):
        start, segments = at, []
        for _ in range(data.draw(st.integers(0, 3))):
            length = data.draw(st.integers(0, min(50, pages - at)))
            segments.append((file, (pages - at - length) * PAGE, arena.address + at * PAGE, length * PAGE))
            at += length
        ranges.append(segments)
        expected.append(native.checksum(arena.address + start * PAGE, (at - start) * PAGE))
    assert engine.write_summed(ranges) == expected
    shift = pages * PAGE
    elsewhere = [[(name, offset, a + shift, nbytes) for name, offset, a, nbytes in segments] for segments in ranges]
    assert engine.read_summed(elsewhere) == expected
    assert np.array_equal(source[: at * PAGE], target[: at * PAGE])
    engine.close_file(file)


def test_moving_summed_fails_as_a_request_does(engine: native.Engine, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(20 * PAGE))
    file = engine.open(path)
    arena = native.Arena(40 * PAGE)
    with pytest.raises(native.IoError) as failure:
        engine.read_summed([[(file, 0, arena.address, 20 * PAGE)], [(file, 0, arena.address, 40 * PAGE)]])
    assert failure.value.errno == errno.ENODATA and failure.value.filename == str(path)
    with pytest.raises(ValueError, match="multiples of 4096"):
        engine.write_summed([[(file, 0, arena.address + 1, PAGE)]])
    assert engine.read_summed([]) == []
    assert engine.read_summed([[(file, 0, arena.address, PAGE)]]) == [native.checksum(arena.address, PAGE)]


def test_many_requests_from_many_threads(engine: native.Engine, tmp_path: Path) -> None:
    region, rounds, threads = 48 * PAGE, 8, 5
    path = tmp_path / "shared"
    file = engine.open(path, create_bytes=threads * region)
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            arena = native.Arena(2 * region)
            memory = torch.from_dlpack(arena).numpy()
            for turn in range(rounds):
                memory[:region] = np.random.default_rng([thread, turn]).integers(0, 256, region, dtype=np.uint8)
                base = thread * region
                writes = [
                    engine.write([(file, base + at, arena.address + at, 4 * PAGE)]) for at in range(0, region, 4 * PAGE)
                ]
                assert sum(write.wait() for write in writes) == region
                reads = [
                    engine.read([(file, base + at, arena.address + region + at, 3 * PAGE)])
                    for at in range(0, region, 3 * PAGE)
                ]
                assert sum(read.wait() for read in reads) == region
                assert np.array_equal(memory[:region], memory[region:])
        except BaseException as failure:
            failures.append(failure)

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    expected = b"".join(
        np.random.default_rng([thread, rounds - 1]).integers(0, 256, region, dtype=np.uint8).tobytes()
        for thread in range(threads)
    )
    assert path.read_bytes() == expected


def test_a_dropped_request_still_ends(engine: native.Engine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    arena = native.Arena(512 * PAGE)
    data = random_bytes(arena)
    file = engine.open(path, create_bytes=512 * PAGE)
    engine.write([(file, 0, arena.address, 512 * PAGE)])
    engine.close_file(file)  # waits for what is in flight
    assert path.read_bytes() == data.numpy().tobytes()


def test_close_waits_for_what_is_in_flight(engine: native.Engine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    arena = native.Arena(512 * PAGE)
    data = random_bytes(arena)
    file = engine.open(path, create_bytes=512 * PAGE)
    request = engine.write([(file, 0, arena.address, 512 * PAGE)])
    engine.close()
    engine.close()
    assert request.done()
    assert request.wait() == 512 * PAGE
    assert path.read_bytes() == data.numpy().tobytes()
    with pytest.raises(RuntimeError, match="closed"):
        engine.open(path)


def test_reading_past_the_end_is_an_error_with_its_place(engine: native.Engine, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(3 * PAGE + 100))  # an odd length: direct I/O returns the odd rest once
    file = engine.open(path, read_only=True)
    arena = native.Arena(64 * PAGE)
    assert engine.read([(file, 0, arena.address, 3 * PAGE)]).wait() == 3 * PAGE
    for offset, nbytes in ((2 * PAGE, 2 * PAGE), (3 * PAGE, PAGE), (4 * PAGE, PAGE), (1000 * PAGE, 40 * PAGE)):
        request = engine.read([(file, offset, arena.address, nbytes)])
        for _ in range(2):  # and again
            with pytest.raises(native.IoError) as caught:
                request.wait()
            assert caught.value.errno == errno.ENODATA
            assert caught.value.filename == str(path)
            assert offset <= caught.value.offset < offset + nbytes
            assert caught.value.nbytes > 0
            for part in (str(path), f"offset {caught.value.offset}", str(errno.ENODATA)):
                assert part in str(caught.value)


def test_one_failing_request_leaves_the_others_alone(engine: native.Engine, tmp_path: Path) -> None:
    file = engine.open(tmp_path / "file", create_bytes=64 * PAGE)
    arena = native.Arena(128 * PAGE)
    good, bad = [], []
    for _ in range(10):
        good.append(engine.read([(file, 0, arena.address, 64 * PAGE)]))
        bad.append(engine.read([(file, 32 * PAGE, arena.address + 64 * PAGE, 64 * PAGE)]))
    for request in good:
        assert request.wait() == 64 * PAGE
    for request in bad:
        with pytest.raises(native.IoError):
            request.wait()


def test_misaligned_and_senseless_segments_are_refused(engine: native.Engine, tmp_path: Path) -> None:
    file = engine.open(tmp_path / "file", create_bytes=8 * PAGE)
    arena = native.Arena(8 * PAGE)
    a = arena.address
    for segment in (
        (file, 512, a, PAGE),
        (file, 0, a + 512, PAGE),
        (file, 0, a, 512),
        (file, -PAGE, a, PAGE),
        (file, 0, a, -PAGE),
        (file, 2**63 - PAGE, a, PAGE),
        (file, 0, 0, PAGE),
        (file + 1, 0, a, PAGE),
    ):
        for start in (engine.read, engine.write):
            with pytest.raises(ValueError, match=r"multiples of 4096|negative|null|no open file"):
                start([(file, 0, a, PAGE), segment])
    assert engine.read([]).wait() == 0
    assert engine.read([(file, 0, a, 0)]).wait() == 0


def test_a_file_opened_read_only_is_not_written(engine: native.Engine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE))
    arena = native.Arena(PAGE)
    file = engine.open(path, read_only=True)
    with pytest.raises(ValueError, match="read-only"):
        engine.write([(file, 0, arena.address, PAGE)])


def test_errors_of_open_carry_path_and_errno(engine: native.Engine, tmp_path: Path) -> None:
    existing = tmp_path / "existing"
    existing.write_bytes(b"kept")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    cases = [
        (tmp_path / "absent", None, errno.ENOENT),
        (tmp_path / "absent" / "deeper", PAGE, errno.ENOENT),
        (existing, PAGE, errno.EEXIST),
        (tmp_path, None, errno.EISDIR),
        (fifo, None, errno.EINVAL),
        (Path("/dev/full"), None, errno.EINVAL),
    ]
    for path, create_bytes, code in cases:
        with pytest.raises(native.IoError) as caught:
            engine.open(path, create_bytes=create_bytes)
        assert (caught.value.errno, caught.value.filename) == (code, str(path))
        assert isinstance(caught.value, OSError)
    assert existing.read_bytes() == b"kept"
    for create_bytes in (0, -1):
        with pytest.raises(ValueError, match="create_bytes"):
            engine.open(tmp_path / "new", create_bytes=create_bytes)
    for call in (engine.size, engine.flush, engine.close_file):
        with pytest.raises(ValueError, match="no open file has the id 99"):
            call(99)


def test_names_that_are_not_text_survive(engine: native.Engine, tmp_path: Path) -> None:
    name = os.fsdecode(bytes(tmp_path) + b"/\xff\xfe")
    with pytest.raises(native.IoError) as caught:
        engine.open(name)
    assert caught.value.filename == name
    engine.close_file(engine.open(name, create_bytes=PAGE))
    assert os.path.exists(name)


# A limit on the size of files stands in for a full disk, which needs root to make.
LIMITED = """
import errno, resource, sys
from pathlib import Path
import ssdplan.native as native
kind, folder = sys.argv[1], Path(sys.argv[2])
engine = native.Engine(kind)
small = engine.open(folder / "small", create_bytes=65536)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    engine.open(folder / "large", create_bytes=8 << 20)
except native.IoError as error:
    assert error.errno == errno.EFBIG and error.filename == str(folder / "large"), error
    assert str(8 << 20) in str(error), error
else:
    raise SystemExit("the limit was not met")
assert not (folder / "large").exists()
arena = native.Arena(1 << 20)
request = engine.write([(small, 1 << 20, arena.address, 1 << 20)])
try:
    request.wait()
except native.IoError as error:
    assert error.errno == errno.EFBIG and error.offset == 1 << 20 and error.nbytes == 1 << 20, error
    assert error.filename == str(folder / "small"), error
else:
    raise SystemExit("the limit was not met")
"""


def test_no_room_is_an_error_at_once_and_leaves_nothing(engine: native.Engine, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LIMITED, engine.kind, str(tmp_path)], check=True, timeout=HANG_SECONDS)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_enospc(engine: native.Engine, tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting is forbidden here")
    try:
        with pytest.raises(native.IoError) as caught:
            engine.open(tmp_path / "large", create_bytes=8 << 20)
        assert caught.value.errno == errno.ENOSPC
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_kinds_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSDPLAN_IO_ENGINE", raising=False)
    assert native.Engine().kind == ("io_uring" if io_uring_works() else "threads")
    assert native.Engine("threads").kind == "threads"
    monkeypatch.setenv("SSDPLAN_IO_ENGINE", "threads")
    assert native.Engine("auto").kind == "threads"
    monkeypatch.setenv("SSDPLAN_IO_ENGINE", "aio")
    with pytest.raises(ValueError, match=r"SSDPLAN_IO_ENGINE.*'aio'"):
        native.Engine()
    assert native.Engine("threads").kind == "threads"  # only "auto" asks the environment
    with pytest.raises(ValueError, match="'aio'"):
        native.Engine("aio")
    for wrong in ({"queue_depth": 0}, {"block_bytes": 1000}, {"block_bytes": 4097}, {"threads": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            native.Engine("threads", **wrong)


# A system call that fails, by a seccomp filter on this process: what a container's rules, or a failing drive, would do.
REFUSE = """
import ctypes, struct, sys
import ssdplan.native as native

def refuse(call, error):
    def instruction(code, jump_true, jump_false, value):
        return struct.pack("HBBI", code, jump_true, jump_false, value)
    program = b"".join([instruction(0x20, 0, 0, 0), instruction(0x15, 0, 1, call),
                        instruction(0x06, 0, 0, 0x00050000 | error), instruction(0x06, 0, 0, 0x7FFF0000)])
    buffer = ctypes.create_string_buffer(program, len(program))
    libc = ctypes.CDLL(None, use_errno=True)
    filter = struct.pack("HxxxxxxP", 4, ctypes.addressof(buffer))
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, filter, 0, 0) != 0:
        sys.exit(77)
"""

FORBIDDEN_RING = """
refuse(425, 1)  # io_uring_setup, EPERM
assert native.Engine().kind == "threads"
try:
    native.Engine("io_uring")
except native.IoError as error:
    assert error.errno == 1, error
else:
    raise SystemExit("io_uring was not forbidden")
"""

FAILING_FLUSH = """
engine = native.Engine(sys.argv[1])
file = engine.open(sys.argv[2], create_bytes=4096)
engine.flush(file)
refuse({"x86_64": 75, "aarch64": 83}[__import__("platform").machine()], 5)  # fdatasync, EIO
for _ in range(2):
    try:
        engine.flush(file)
    except native.IoError as error:
        assert (error.errno, error.filename) == (5, sys.argv[2]), error
    else:
        raise SystemExit("the flush was reported as done")
"""


def run_refused(script: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-c", REFUSE + script, *arguments], check=False, timeout=HANG_SECONDS)
    if done.returncode == 77:
        pytest.skip("seccomp is not to be had here")
    assert done.returncode == 0


def test_auto_falls_back_where_io_uring_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSDPLAN_IO_ENGINE", raising=False)
    run_refused(FORBIDDEN_RING)


def test_a_failed_flush_is_an_error_and_stays_one(engine: native.Engine, tmp_path: Path) -> None:
    run_refused(FAILING_FLUSH, engine.kind, str(tmp_path / "file"))


def test_descriptors_are_given_back(engine: native.Engine, tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(min(limit, 50)):
        engine.close_file(engine.open(tmp_path / f"file{turn}", create_bytes=PAGE))
    assert len(os.listdir("/proc/self/fd")) == before
    engine.close()
    assert len(os.listdir("/proc/self/fd")) <= before


FORKED = """
import mmap, os, sys
import ssdplan.native as native
engine = native.Engine(sys.argv[1])
file = engine.open(sys.argv[2], create_bytes=1 << 20)
arena, other = native.Arena(4 << 20), native.Arena(1 << 20)
native.copy(arena.address, arena.address + (2 << 20), 2 << 20, threads=4)  # starts the kernels' own threads
engine.write([(file, 0, other.address, 1 << 20)]).wait()
child = os.fork()
if child == 0:
    # What a child maps may lie where the arena, which it has no part of, was.
    mapped = [mmap.mmap(-1, 4 << 20) for _ in range(4)]
    for each in mapped:
        each[:] = bytes([7]) * len(each)
    del engine, arena, other
    for each in mapped:
        assert each[:] == bytes([7]) * len(each)
    sys.exit(0)  # runs every destructor
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert engine.read([(file, 0, other.address, 1 << 20)]).wait() == 1 << 20
native.copy(arena.address, arena.address + (2 << 20), 2 << 20, threads=4)
"""


def test_a_forked_child_ends_and_leaves_its_parent_working(engine: native.Engine, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED, engine.kind, str(tmp_path / "file")]
    subprocess.run(command, check=True, timeout=HANG_SECONDS)


def wait_for_start(engine: native.Engine) -> None:
    """Until the engine's first transfer, which a fault delays, has been taken from the queue."""
    deadline = time.monotonic() + HANG_SECONDS
    while engine.transfers == 0:
        assert time.monotonic() < deadline


def first_of(seen: Callable[[Path], Result | None], directory: Path) -> Result:
    """What is seen, on a file of its own, the first time that it is: a fault delays the first transfer by 20 ms, and a
    busy machine may wake only after them who submits the others."""
    for number in range(TRIES):
        if (found := seen(directory / f"file-{number}")) is not None:
            return found
    raise AssertionError(f"in none of {TRIES} tries was the first transfer under way for long enough")


def pages(arena: native.Arena) -> np.ndarray:
    return torch.from_dlpack(arena).numpy().reshape(-1, PAGE)


@pytest.mark.parametrize("kind", KINDS)
def test_urgent_requests_overtake_those_that_wait(kind: str, tmp_path: Path) -> None:
    # One block at a time, and the first holds up the others until all have been submitted: the order is then certain.
    def seen(path: Path) -> np.ndarray | None:
        engine = native.Engine(kind, queue_depth=1, block_bytes=PAGE, threads=1, faults=[(0, "delay")])
        file = engine.open(path, create_bytes=4 * PAGE)
        arena = native.Arena(8 * PAGE)
        memory = pages(arena)
        memory[:] = np.arange(8, dtype=np.uint8)[:, None]

        def place(page: int) -> int:
            return arena.address + page * PAGE

        first = engine.write([(file, 3 * PAGE, place(0), PAGE)])
        wait_for_start(engine)
        background = engine.write([(file, 0, place(1), PAGE)])
        later = engine.write([(file, 0, place(2), PAGE)])
        slow_read = engine.read([(file, 0, place(5), PAGE)], urgent=False)
        read = engine.read([(file, 0, place(6), PAGE)])
        urgent = engine.write([(file, 0, place(3), PAGE)], urgent=True)
        urgent_read = engine.read([(file, 0, place(7), PAGE)])
        held = not first.done()
        for request in (first, background, later, slow_read, read, urgent, urgent_read):
            request.wait()
        assert path.read_bytes()[:PAGE] == bytes([2]) * PAGE
        return memory[:, 0].copy() if held else None

    found = first_of(seen, tmp_path)
    assert found[6] == 0  # before every other write
    assert found[7] == 3  # after the urgent write, before the others
    assert found[5] == 2  # after all writes, in the order of the calls


@pytest.mark.parametrize("kind", KINDS)
def test_urgent_requests_do_not_stop_the_others(kind: str, tmp_path: Path) -> None:
    def seen(path: Path) -> np.ndarray | None:
        engine = native.Engine(kind, queue_depth=1, block_bytes=PAGE, threads=1, faults=[(0, "delay")])
        file = engine.open(path, create_bytes=4 * PAGE)
        arena = native.Arena(42 * PAGE)
        memory = pages(arena)
        memory[0], memory[1] = 9, 8
        requests = [engine.write([(file, PAGE, arena.address, PAGE)])]
        wait_for_start(engine)
        requests += [engine.write([(file, 0, arena.address + page * PAGE, PAGE)]) for page in (0, 1)]
        requests += [engine.read([(file, 0, arena.address + (2 + i) * PAGE, PAGE)]) for i in range(40)]
        held = not requests[0].done()
        for request in requests:
            request.wait()
        return memory[2:, 0].copy() if held else None

    found = first_of(seen, tmp_path)
    assert list(found) == [0] * 16 + [9] * 16 + [8] * 8  # each writer goes after 16 readers


def test_registered_memory_moves_the_same_bytes(engine: native.Engine, tmp_path: Path) -> None:
    size = 256 * PAGE
    path = tmp_path / "file"
    file = engine.open(path, create_bytes=size)
    arena = native.Arena(3 * size)
    plain = native.Arena(size)
    data = random_bytes(arena)[: 3 * size].numpy()
    reason = engine.register(arena.address, 2 * size)
    if engine.kind == "threads":
        assert "threads" in reason
    else:
        assert reason == ""
        assert "registered buffers" in engine.description
        assert "already" in engine.register(arena.address + size, size)
    for start in (0, size, 2 * size, 3 * size // 2):  # within, to the end, beyond, and across the end
        engine.write([(file, 0, arena.address + start, size)]).wait()
        engine.read([(file, 0, plain.address, size)]).wait()
        assert np.array_equal(torch.from_dlpack(plain).numpy(), data[start : start + size])
        data[start : start + size] = 0
        engine.read([(file, 0, arena.address + start, size)]).wait()
        assert path.read_bytes() == data[start : start + size].tobytes()
    engine.unregister(arena.address)
    engine.unregister(arena.address)
    assert "buffers" not in engine.description
    engine.read([(file, 0, arena.address, size)]).wait()
    assert path.read_bytes() == data[:size].tobytes()
    assert engine.register(arena.address, size) == ("" if engine.kind == "io_uring" else reason)
    for wrong in ((0, PAGE), (arena.address, 0), (arena.address, -1)):
        with pytest.raises(ValueError, match=r"null|nbytes"):
            engine.register(*wrong)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.register(arena.address, size)
    engine.unregister(arena.address)


def test_memory_and_files_may_be_registered_while_others_move(engine: native.Engine, tmp_path: Path) -> None:
    size = 64 * PAGE
    stop = threading.Event()
    failures: list[BaseException] = []

    def churn() -> None:
        try:
            other = native.Arena(4 * size)
            while not stop.is_set():
                engine.register(other.address, other.nbytes)
                engine.close_file(engine.open(tmp_path / "a"))
                engine.unregister(other.address)
        except BaseException as failure:
            failures.append(failure)

    arena = native.Arena(2 * size)
    data = random_bytes(arena).numpy()
    file = engine.open(tmp_path / "a", create_bytes=size)
    thread = threading.Thread(target=churn)
    thread.start()
    for _ in range(100):
        engine.register(arena.address, arena.nbytes)
        write = engine.write([(file, 0, arena.address, size)])
        engine.unregister(arena.address)
        write.wait()
        read = engine.read([(file, 0, arena.address + size, size)])
        engine.register(arena.address, arena.nbytes)
        read.wait()
        assert np.array_equal(data[:size], data[size:])
        data[size:] = 0
        engine.unregister(arena.address)
    stop.set()
    thread.join()
    assert not failures


LOCK_LIMIT = """
import os, resource
if os.getuid() == 0:  # root may lock without limit
    os.setgid(65534); os.setuid(65534)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
engine = native.Engine("io_uring")
arena = native.Arena(64 << 20)
reason = engine.register(arena.address, arena.nbytes)
assert "RLIMIT_MEMLOCK is 65536" in reason, reason
assert "buffers" not in engine.description
file = engine.open(sys.argv[1], read_only=True)
assert engine.read([(file, 0, arena.address, 4096)]).wait() == 4096
"""


@pytest.mark.skipif(not io_uring_works(), reason="io_uring is forbidden here")
def test_a_lock_limit_leaves_memory_unregistered_and_usable() -> None:
    script = "import sys\nimport ssdplan.native as native" + LOCK_LIMIT
    with tempfile.TemporaryDirectory() as folder:  # pytest's own cannot be entered by an unprivileged user
        Path(folder).chmod(0o755)
        (Path(folder) / "file").write_bytes(bytes(PAGE))
        (Path(folder) / "file").chmod(0o644)
        subprocess.run([sys.executable, "-c", script, f"{folder}/file"], check=True, timeout=HANG_SECONDS)


FORBIDDEN_TABLES = """
refuse(427, 1)  # io_uring_register, EPERM
engine = native.Engine("io_uring")
arena = native.Arena(65536)
assert "not permitted" in engine.register(arena.address, 65536)
assert engine.description == "io_uring, queue depth 16", engine.description
file = engine.open(sys.argv[1], create_bytes=65536)
engine.write([(file, 0, arena.address, 65536)]).wait()
engine.close()
"""


@pytest.mark.skipif(not io_uring_works(), reason="io_uring is forbidden here")
def test_an_old_kernel_registers_nothing_and_works(tmp_path: Path) -> None:
    run_refused(FORBIDDEN_TABLES, str(tmp_path / "file"))


DESCRIBED = """
refuse(425, 1)
assert native.Engine(threads=3).description == "3 threads (io_uring: Operation not permitted)"
assert native.Engine("threads", threads=1).description == "1 thread"
"""


def test_an_engine_describes_itself(engine: native.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSDPLAN_IO_ENGINE", raising=False)
    start = "io_uring, queue depth 6" if engine.kind == "io_uring" else "4 threads"
    assert engine.description == start
    engine.open(tmp_path / "file", create_bytes=PAGE)
    assert engine.description.startswith(start)
    run_refused(DESCRIBED)
    engine.close()
    assert "closed" in engine.description


def test_a_file_is_free_when_it_is_closed(engine: native.Engine, tmp_path: Path) -> None:
    # A registered file that the kernel still held would keep its space after its name is gone.
    def in_use() -> int:
        status = os.statvfs(tmp_path)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    size = 64 << 20
    before = in_use()
    file = engine.open(tmp_path / "file", create_bytes=size)
    arena = native.Arena(PAGE)
    engine.register(arena.address, PAGE)
    engine.read([(file, 0, arena.address, PAGE)]).wait()
    (tmp_path / "file").unlink()
    assert in_use() - before > size // 2
    engine.close_file(file)
    assert in_use() - before < size // 2


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A block device of 16 MiB."""
    backing = tmp_path / "backing"
    backing.write_bytes(bytes(16 << 20))
    made = subprocess.run(["losetup", "--find", "--show", str(backing)], check=False, capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip("a loop device is not to be had here")
    path = Path(made.stdout.strip())
    yield path
    subprocess.run(["losetup", "--detach", str(path)], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="loop devices need root")
def test_a_block_device_is_claimed_by_who_writes_it(engine: native.Engine, device: Path) -> None:
    arena = native.Arena(4 << 20)
    data = random_bytes(arena)
    file = engine.open(device)
    assert engine.size(file) == 16 << 20
    engine.write([(file, 1 << 20, arena.address, 4 << 20)]).wait()
    engine.flush(file)
    with pytest.raises(native.IoError, match="in use by another program") as caught:
        native.Engine("threads").open(device)
    assert (caught.value.errno, caught.value.filename) == (errno.EBUSY, str(device))
    reader = native.Engine("threads")
    copy = native.Arena(4 << 20)
    assert reader.read([(reader.open(device, read_only=True), 1 << 20, copy.address, 4 << 20)]).wait() == 4 << 20
    assert torch.equal(torch.from_dlpack(copy), data)
    with pytest.raises(native.IoError):
        engine.read([(file, 16 << 20, arena.address, PAGE)]).wait()
    engine.close_file(file)
    engine.close_file(engine.open(device))  # free again at once


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_mounted_device_is_refused(engine: native.Engine, device: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(device)], check=True)
    if subprocess.run(["mount", str(device), str(folder)], check=False).returncode != 0:
        pytest.skip("mounting is forbidden here")
    try:
        with pytest.raises(native.IoError, match="mounted"):
            engine.open(device)
        engine.close_file(engine.open(device, read_only=True))
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_calls_on_a_file_that_is_being_closed(engine: native.Engine, tmp_path: Path) -> None:
    """Others may close a file under a caller: what comes of it is an error, and never another file's bytes."""
    arena = native.Arena(PAGE)
    own = tmp_path / "own"
    own.write_bytes(bytes(PAGE))
    stop = threading.Event()
    failures: list[BaseException] = []
    current = [engine.open(own)]

    def use() -> None:
        memory = native.Arena(PAGE)
        pages(memory)[:] = 1
        while not stop.is_set():
            for call in (
                lambda file: engine.write([(file, 0, memory.address, PAGE)]).wait(),
                engine.flush,
                engine.size,
            ):
                try:
                    call(current[0])
                except ValueError:
                    pass  # closed meanwhile
                except BaseException as failure:
                    failures.append(failure)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    other = tmp_path / "other"
    other.write_bytes(bytes(PAGE))
    for _ in range(100):
        engine.close_file(current[0])
        stranger = engine.open(other)  # likely under the same descriptor
        engine.read([(stranger, 0, arena.address, PAGE)]).wait()
        engine.close_file(stranger)
        current[0] = engine.open(own)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert other.read_bytes() == bytes(PAGE)


@pytest.mark.skipif(not io_uring_works(), reason="io_uring is forbidden here")
def test_a_drive_that_refuses_to_be_polled_is_used_as_others(tmp_path: Path) -> None:
    # A file in memory refuses everywhere; the drive below tmp_path may or may not.
    for folder, refuses in ((tmp_path, False), (Path("/dev/shm"), True)):
        path = folder / f"ssdplan-test-{os.getpid()}"
        path.write_bytes(np.random.default_rng(3).integers(0, 256, 64 * PAGE, dtype=np.uint8).tobytes())
        try:
            engine = native.Engine("io_uring", polling="try")
            arena = native.Arena(64 * PAGE)
            engine.register(arena.address, arena.nbytes)
            try:
                file = engine.open(path)
            except native.InvalidRequestError:
                continue  # a kernel before 6.6 has no direct I/O on files in memory
            assert engine.read([(file, 0, arena.address, 64 * PAGE)]).wait() == 64 * PAGE
            assert torch.from_dlpack(arena).numpy().tobytes() == path.read_bytes()
            if refuses:
                assert "polling" not in engine.description
        finally:
            path.unlink()
    with pytest.raises(ValueError, match="polling"):
        native.Engine(polling="always")


@pytest.mark.skipif(not io_uring_works(), reason="io_uring is forbidden here")
def test_polling_stops_while_nothing_is_in_flight(tmp_path: Path) -> None:
    engine = native.Engine("io_uring", polling="pretend")
    file = engine.open(tmp_path / "file", create_bytes=PAGE)
    assert "polling pretended" in engine.description
    arena = native.Arena(PAGE)
    engine.write([(file, 0, arena.address, PAGE)]).wait()
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    engine.read([(file, 0, arena.address, PAGE)]).wait()
