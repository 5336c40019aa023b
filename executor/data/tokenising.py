"""Tokenising: the files of a data set become a token cache.

Owns that a run does so in a process of its own, `python -m ssdplan.executor.data.tokenising`: a tokenizer's threads
keep tens of MiB to the end of theirs, which a run's memory, predicted to a few, would carry through every step.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ssdplan.plans.errors import SsdplanError, UsageError, error_of

from .clock import timed
from .conversations import chat_template
from .formats import samples
from .notes import Tally
from .rendering import sample_tokens
from .token_cache import counted, write_cache
from .tokens import end_tokens, load_tokenizer, token_pieces, tokenizer_identity

Progress = Callable[[int, int], None]
"""Called with the bytes done and in all."""
_PROGRESS_SECONDS = 0.1
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for the end."""
_LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "jinja2")
_OWN = (
    *("clock", "columns", "conversations", "documents", "formats", "notes", "rendering", "token_cache", "tokenising"),
    "tokens",
)
"""The modules here that decide which tokens are made. Their text is their version: a number could be forgotten."""


@dataclass(frozen=True)
class Work:
    """What is tokenised: the samples of `files`, which errors call `path`, each text with the token `eos` behind it.
    `tokenizer` says by which (`digest_of`), and `instant`, in ISO 8601, when it is for a template that writes the time;
    with `append_eos` every conversation learns an end token."""

    path: str
    files: tuple[str, ...]
    format: str
    eos: int
    tokenizer: str
    instant: str
    append_eos: bool = False


Tokenise = Callable[[Work, Any, Path, Progress | None], None]


def is_chat(tokenizer: Any, format: str) -> bool:
    """Whether samples of this format go through the tokenizer's chat template."""
    return _template(tokenizer, format) is not None


def _template(tokenizer: Any, format: str) -> str | None:
    return chat_template(tokenizer) if format in ("messages", "alpaca") else None


def digest_of(tokenizer: Any, format: str, append_eos: bool = False) -> str:
    """What decides the tokens that a tokenizer makes of samples of a format."""
    template = _template(tokenizer, format)
    ends = json.dumps(end_tokens(tokenizer)) if append_eos and template else ""
    return hashlib.sha256(tokenizer_identity(tokenizer) + (template or "").encode() + ends.encode()).hexdigest()


def times_of(tokenizer: Any, format: str, instant: datetime) -> str:
    """What of the instant decides these tokens: the times that the chat template may write. Empty when nothing."""
    template = _template(tokenizer, format)
    return timed(template, instant).times if template else ""


@functools.cache
def made_by() -> str:
    """The versions of all that makes tokens besides the tokenizer's own files: libraries, and our own code."""
    ours = hashlib.sha256(b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in _OWN)).hexdigest()
    found = []
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return ", ".join([*found, f"ssdplan's own code {ours[:12]}"])


def tokenise(work: Work, tokenizer: Any, file: Path, progress: Progress | None) -> None:
    """Write the token cache `file`, in this process. Raises UsageError for data that cannot be used, DiskFullError."""
    tally = Tally()
    write_cache(file, _pieces(work, tokenizer, progress, tally), tally.kept)


def _pieces(
    work: Work, tokenizer: Any, progress: Progress | None, tally: Tally
) -> Iterator[tuple[npt.NDArray[np.uint32], bool]]:
    path, files = Path(work.path), [Path(file) for file in work.files]
    found: Iterator[Any] = samples(files, work.format, as_chat=is_chat(tokenizer, work.format))
    total = sum(file.stat().st_size for file in files)
    if work.format == "text":
        return token_pieces(path, counted(found, progress, total), tokenizer, work.eos, tally)
    ends = frozenset(end_tokens(tokenizer) if work.append_eos else ())
    instant = datetime.fromisoformat(work.instant)
    return _whole(path, sample_tokens(found, tokenizer, work.eos, instant, tally, ends), progress, total)


def _whole(
    path: Path, rendered: Iterator[npt.NDArray[np.uint32]], progress: Progress | None, total: int
) -> Iterator[tuple[npt.NDArray[np.uint32], bool]]:
    done = 0
    for ids in rendered:
        yield ids, True
        done += 4 * len(ids)
        if progress is not None:
            progress(min(done, total), total)
    if not done:
        raise UsageError(f"{path}: no row in it; give it data to train on")
    if progress is not None:
        progress(total, total)


def tokenise_apart(work: Work, tokenizer: Any, file: Path, progress: Progress | None) -> None:
    """The same in a process of its own, which reads `tokenizer` again from where it was read (`load_tokenizer`).

    Raises its errors, UsageError when the tokenizer there is another by now, and SsdplanError when the process ends in
    another way. It ends with this one, and whenever this function does.
    """
    request = json.dumps({"work": dataclasses.asdict(work), "model": tokenizer.name_or_path, "file": str(file)})
    command = [sys.executable, "-P", "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        try:
            with contextlib.suppress(BrokenPipeError):  # its end says more
                process.stdin.write(request)
                process.stdin.close()
            message = None
            for line in process.stdout:
                said = json.loads(line)
                if "message" in said:
                    message = str(said["message"])
                elif progress is not None:
                    progress(said["done"], said["total"])
            code = process.wait()
        finally:
            process.terminate()  # nothing to a process that has ended
    if message is not None:
        raise error_of(code, message)
    if code:
        raise SsdplanError(
            f"{work.path}: the process that tokenised it ended with {code}; where memory ended, `ssdplan data preview` "
            "first, without a limit, keeps the tokens for the run"
        )


def main() -> int:
    """Standard input is JSON: the work, the model's directory and the cache's file. Standard output is JSON lines:
    bytes `done` of `total`, and the `message` of an error, whose exit code is the process's."""
    for asked in _ENDS:
        if asked != signal.SIGHUP or signal.getsignal(asked) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(asked, _leave)
    try:
        with contextlib.suppress(OSError):  # where memory ends, it is this process that goes, and not the run
            Path("/proc/self/oom_score_adj").write_text("1000")
        try:
            request = json.load(sys.stdin)
        except json.JSONDecodeError:  # whoever wants the tokens was killed while it wrote
            return 128 + signal.SIGINT
        work = Work(**request["work"])
        tokenizer = load_tokenizer(Path(request["model"]))
        if digest_of(tokenizer, work.format, work.append_eos) != work.tokenizer:
            raise UsageError(f"{request['model']}: the tokenizer changed while it was read; start again")
        tokenise(work, tokenizer, Path(request["file"]), _Told())
    except SsdplanError as error:
        _tell(message=str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _leave(*_: object) -> NoReturn:
    """End, once, with nothing half made left behind."""
    for asked in _ENDS:
        signal.signal(asked, signal.SIG_IGN)
    raise KeyboardInterrupt


class _Told:
    """Progress as lines, at times."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        if (now := time.monotonic()) >= self._next or done == total:
            self._next = now + _PROGRESS_SECONDS
            _tell(done=done, total=total)


def _tell(**said: int | str) -> None:
    try:
        os.write(sys.stdout.fileno(), (json.dumps(said) + "\n").encode())
    except BrokenPipeError:  # whoever wanted the tokens is gone
        raise KeyboardInterrupt from None


if __name__ == "__main__":
    sys.exit(main())
