"""Works on untrusted data in a process of its own, and watches that process: it bounds the seconds and memory that a
row, a chat template or a tokenizer may cost, whatever library works on it.

Owns the bounds (`Limits`), how both processes speak, and the error about one that was ended. Before it begins with a
row, the watched process writes what it does and to which row (`At`) on a page of memory that both share. Once it is
ended, that page names the row.
"""

import contextlib
import json
import mmap
import os
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from ssdplan.native.process import host_memory
from ssdplan.plans.errors import MemoryBudgetError, SsdplanError, UsageError, error_of

from .reading.places import At

Told = Callable[[dict[str, Any]], None]
"""Called with what the process that is watched says."""

_POLL_SECONDS = 0.05
_PACE_SECONDS = 1.0
"""The most that counts between two looks: a machine that slept, or a process that was stopped, is not slow."""
_GRACE_SECONDS = 2.0
"""For a process that is asked to end; in the middle of a regular expression none hears that."""
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for the end."""
_PAGE = 1 << 13
_HEAD = struct.Struct("<QQH")
_READ_BYTES = 1 << 16
_SAID_BYTES = 1 << 26
"""Of one thing that is said; plain facts are short."""
_ENVIRONMENT = {"RUST_BACKTRACE": "0", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
"""For the process that is watched; the second, so that transformers does not advise to install PyTorch."""


@dataclass(frozen=True)
class Limits:
    """What one row, or one text that a tokenizer is given, may cost, and what it may cost more for each character.

    They are not for data as they are: a row takes milliseconds and a few MiB. The slowest tokenizers, those of Python,
    do more than 20,000 characters a second; one that needs a text whole takes up to 250 bytes for each of its
    characters.
    """

    first_seconds: float = 300.0
    """For the first thing that is begun, which is to read the tokenizer, and for libraries before that."""
    seconds: float = 300.0
    seconds_a_character: float = 1 / 20_000
    memory_bytes: int = 8 << 30
    memory_bytes_a_character: int = 512
    share: float = 0.75
    """Of the memory that is available, the most that is taken in any case."""


LIMITS = Limits()


@dataclass(frozen=True)
class Seen:
    """What the page says: the `count` of things begun, and of the last its characters, what is done, and to what."""

    count: int
    characters: int
    doing: str
    place: str


class Board:
    """A page of memory that two processes have, on which one writes what it begins and the other reads it."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("ssdplan") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, _PAGE)
        self._mapped = mmap.mmap(self.descriptor, _PAGE)
        self._page = memoryview(self._mapped)
        self._count = 0

    def close(self) -> None:
        self._page.release()
        self._mapped.close()
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def at(self, doing: str, place: str, characters: int = 0) -> None:
        """Say what is begun (`At`)."""
        text = f"{doing}\0{place}".encode(errors="replace")[: _PAGE // 2]
        self._count += 1
        self._page[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._page, 0, self._count, characters, len(text))

    def read(self) -> Seen:
        count, characters, length = _HEAD.unpack_from(self._page)
        text = bytes(self._page[_HEAD.size : _HEAD.size + length]).decode(errors="replace")
        doing, _, place = text.partition("\0")
        return Seen(count, characters, doing, place)


class Watch:
    """Whether a process is beyond its limits; `available_bytes` are those of the machine when it began."""

    def __init__(self, limits: Limits, available_bytes: int, now: float) -> None:
        self._limits, self._most = limits, int(limits.share * available_bytes)
        self._count, self._waited, self._last = 0, 0.0, now

    def excess(self, seen: Seen, used_bytes: int, now: float) -> SsdplanError | None:
        """What to say of it, at the time `now` (seconds), where it has `used_bytes` of memory; None while all is
        well."""
        self._waited += min(now - self._last, _PACE_SECONDS)
        self._last = now
        if seen.count != self._count:
            self._count, self._waited = seen.count, 0.0
        limits = self._limits
        memory = min(limits.memory_bytes + limits.memory_bytes_a_character * seen.characters, self._most)
        if used_bytes > memory:
            of = "" if memory < self._most else f" ({limits.share:.0%} of what was available)"
            return MemoryBudgetError(
                f"{_where(seen)} took more than {memory / (1 << 30):.3g} GiB of memory{of}; take that out of the "
                "data, look at the chat template and the tokenizer, or split long texts (limits: docs/data.md)"
            )
        seconds = limits.first_seconds if seen.count < 2 else limits.seconds
        seconds += limits.seconds_a_character * seen.characters
        if self._waited > seconds:
            return UsageError(
                f"{_where(seen)} took longer than {seconds:.3g} seconds; take that out of the data, look at the chat "
                "template and the tokenizer, or split long texts (limits: docs/data.md)"
            )
        return None


def _where(seen: Seen) -> str:
    return f"{seen.place}: {seen.doing} it" if seen.count else "the process that reads the data"


def ask(
    module: str, request: dict[str, Any], told: Told, path: str, limits: Limits = LIMITS, cache: Path | None = None
) -> None:
    """Run `module` as a process of its own (`answer`) on `request`, and hand each thing it says to `told`. What it
    began to write in the directory `cache` (`token_cache.write_cache`) is gone once it has ended, in whatever way.

    Raises the error that it ends with, MemoryBudgetError and UsageError where it goes beyond its `limits`, and
    SsdplanError, which names the data `path`, where it ends in another way. It ends with this process, and whenever
    this function does.
    """
    with Board() as board, tempfile.TemporaryDirectory(prefix="ssdplan-") as scratch, _swept(cache, scratch):
        written = json.dumps({**request, "board": board.descriptor}).encode()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[board.descriptor],
            env={**os.environ, **_ENVIRONMENT, "TMPDIR": scratch},
        )
        message = None
        try:
            with process:
                assert process.stdin
                with contextlib.suppress(BrokenPipeError):  # its end says more
                    process.stdin.write(written)
                    process.stdin.close()
                try:
                    for said in _said(process, board, Watch(limits, host_memory().available, time.monotonic())):
                        if "message" in said:
                            message = str(said["message"])
                        else:
                            told(said)
                    code = process.wait()
                finally:
                    _end(process)
        except MemoryError as error:
            raise MemoryBudgetError(f"{path}: no memory for what is said of it") from error
        seen = board.read()
    if message is not None:
        raise error_of(code, message)
    if code:
        at = f" while {seen.doing} {seen.place}" if seen.count else ""
        raise SsdplanError(
            f"{path}: the process that tokenised it ended with {code}{at}; where memory ended, `ssdplan data preview` "
            "first, without a limit, keeps the tokens for the run"
        )


@contextlib.contextmanager
def _swept(cache: Path | None, scratch: str) -> Iterator[None]:
    """Remove what a process whose own temporary directory is `scratch` began in `cache` and did not end."""
    try:
        yield
    finally:
        if cache is not None:
            for begun in cache.glob(f".*.{Path(scratch).name}.*"):
                begun.unlink(missing_ok=True)


def _said(process: subprocess.Popen[bytes], board: Board, watch: Watch) -> Iterator[dict[str, Any]]:
    """What the process says, until it ends. Raises when it goes beyond its limits."""
    assert process.stdout and process.stderr
    kept = {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as selector:
        for stream in kept:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            ready = [key.fileobj for key, _ in selector.select(_POLL_SECONDS)]
            for stream in kept:
                if stream not in ready:
                    continue
                data = os.read(stream.fileno(), _READ_BYTES)
                *lines, kept[stream] = (kept[stream] + data).split(b"\n")
                if not data:
                    selector.unregister(stream)
                if len(kept[stream]) > _SAID_BYTES:
                    process.kill()
                    raise UsageError(
                        f"{_where(board.read())} says more than {_SAID_BYTES >> 20} MiB of it; look at the files there"
                    )
                if stream is process.stdout:
                    yield from map(json.loads, lines)
                else:  # ours writes what of it steers a terminal as an escape
                    sys.stderr.write("".join(f"{line.decode(errors='replace')}\n" for line in lines))
            if error := watch.excess(board.read(), _own_bytes(process.pid), time.monotonic()):
                process.kill() if isinstance(error, MemoryBudgetError) else _end(process)
                raise error


def _own_bytes(pid: int) -> int:
    """Memory of a process that no file is behind, swapped out or not; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it; nothing to a process that has ended."""
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def answer(work: Callable[[dict[str, Any], At, Callable[..., None]], None]) -> int:
    """Be the process that is watched: `work` is given the request of `ask`, an `At`, and what says something to
    `told`, by keywords. Returns the exit code: standard output is JSON lines of what is said, and the `message` of an
    error, whose exit code it is."""
    for asked in _ENDS:
        if asked != signal.SIGHUP or signal.getsignal(asked) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(asked, _leave)
    sys.modules["torch"] = None  # type: ignore[assignment] # tokenizers need none, and begin in a third of the time
    board: Board | None = None
    try:
        with contextlib.suppress(OSError):  # where memory ends, it is this process that goes, and not the run
            Path("/proc/self/oom_score_adj").write_text("1000")
        try:
            request = json.load(sys.stdin)
        except json.JSONDecodeError:  # whoever asks was killed while it wrote
            return 128 + signal.SIGINT
        board = Board(request.pop("board"))
        work(request, board.at, _tell)
    except SsdplanError as error:
        _tell(message=str(error))
        return error.exit_code
    except MemoryError:
        assert board is not None
        seen = board.read()
        _tell(message=f"{_where(seen)} took more memory than there is; take it out of the data, or split it")
        return MemoryBudgetError.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _leave(*_: object) -> NoReturn:
    """End, once, with nothing half made left behind."""
    for asked in _ENDS:
        signal.signal(asked, signal.SIG_IGN)
    raise KeyboardInterrupt


def _tell(**said: Any) -> None:
    data = (json.dumps(said) + "\n").encode()
    try:
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]
    except BrokenPipeError:  # whoever asked is gone
        raise KeyboardInterrupt from None
