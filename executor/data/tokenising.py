"""Tokenising: the files of a data set become a token cache.

Owns what is tokenised (`Work`), and the digests of all that decides the tokens. `reader.py` says in which process.
"""

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ssdplan.plans.errors import UsageError

from .reading.places import At, unsaid
from .rendering import sample_tokens
from .samples.clock import timed
from .samples.conversations import chat_template
from .samples.formats import CHATS, samples
from .samples.notes import Tally
from .token_cache import counted, write_cache
from .tokens import end_tokens, token_pieces, tokenizer_identity

Progress = Callable[[int, int], None]
"""Called with the bytes done and in all."""
_PROGRESS_SECONDS = 0.1
_LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "jinja2")
_OWN = (
    *("reading/columns.py", "reading/documents.py", "reading/files.py", "samples/clock.py", "samples/conversations.py"),
    *("samples/formats.py", "samples/notes.py", "frame.py", "rendering.py", "token_cache.py", "tokenising.py"),
    "tokens.py",
)
"""The modules here that decide which tokens are made. Their text is their version: a number could be forgotten."""


@dataclass(frozen=True)
class Work:
    """What is tokenised: the samples of `files`, which errors call `path`, each text with the token `eos` behind it.
    `instant` says, in ISO 8601, when it is for a template that writes the time; with `append_eos` every conversation
    learns an end token."""

    path: str
    files: tuple[str, ...]
    format: str
    eos: int
    instant: str
    append_eos: bool = False


Tokenise = Callable[[Work, Any, Path, Progress | None], None]


def is_chat(tokenizer: Any, format: str) -> bool:
    """Whether samples of this format go through the tokenizer's chat template."""
    return _template(tokenizer, format) is not None


def _template(tokenizer: Any, format: str) -> str | None:
    return chat_template(tokenizer) if format in CHATS else None


def digests_of(tokenizer: Any, format: str, append_eos: bool = False) -> dict[str, str]:
    """What decides the tokens that a tokenizer makes of samples of a format, as sha256: `tokenizer` is of all of it,
    the others of what it consists of, so that a change can be named."""
    template = _template(tokenizer, format)
    ends = json.dumps(end_tokens(tokenizer)) if append_eos and template else ""
    identity, written = tokenizer_identity(tokenizer), (template or "").encode()
    parts = {
        "tokenizer": identity + written + ends.encode(),
        "tokenizer_files": identity,
        "chat_template": written,
        "end_tokens": (ends or "[]").encode(),
    }
    return {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}


def times_of(tokenizer: Any, format: str, instant: datetime) -> str:
    """What of the instant decides these tokens: the times that the chat template may write. Empty when nothing."""
    template = _template(tokenizer, format)
    return timed(template, instant).times if template else ""


@functools.cache
def made_by() -> str:
    """The versions of all that makes tokens besides the tokenizer's own files: libraries, and our own code."""
    ours = hashlib.sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in _OWN)).hexdigest()
    found = []
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return ", ".join([*found, f"ssdplan's own code {ours[:12]}"])


def tokenise(work: Work, tokenizer: Any, file: Path, progress: Progress | None, at: At = unsaid) -> None:
    """Write the token cache `file`, in this process; `at` is told of each row and text before it is worked on.

    Raises UsageError for data that cannot be used, DiskFullError."""
    tally = Tally()
    write_cache(file, _pieces(work, tokenizer, progress, tally, at), tally.kept)


def _pieces(
    work: Work, tokenizer: Any, progress: Progress | None, tally: Tally, at: At
) -> Iterator[tuple[npt.NDArray[np.uint32], bool]]:
    path, files = Path(work.path), [Path(file) for file in work.files]
    found: Iterator[Any] = samples(files, work.format, as_chat=is_chat(tokenizer, work.format), at=at, tally=tally)
    total = sum(file.stat().st_size for file in files)
    ends = frozenset(end_tokens(tokenizer))
    if work.format == "text":
        return token_pieces(path, counted(found, progress, total), tokenizer, work.eos, tally, ends, at)
    instant = datetime.fromisoformat(work.instant)
    rendered = sample_tokens(found, tokenizer, work.eos, instant, tally, ends, work.append_eos, at)
    return _whole(path, rendered, progress, total)


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


class Paced:
    """Progress that is told at times, not always."""

    def __init__(self, told: Progress) -> None:
        self._told, self._next = told, 0.0

    def __call__(self, done: int, total: int) -> None:
        if (now := time.monotonic()) >= self._next or done == total:
            self._next = now + _PROGRESS_SECONDS
            self._told(done, total)
