"""Readers: find out what a run must know of its data and its tokenizer, and make the tokens.

Owns what is asked of a reader (`Asked`), what it answers (`Facts`), and two readers. `Here` reads in this process, by a
tokenizer that is loaded. `Apart` has a process of its own read, `python -m ssdplan.executor.data.reader`, which is
watched (`apart.py`): a run opens neither tokenizer nor row in its own process, so no file of somebody else's can hang
or fill it. A tokenizer's threads also keep tens of MiB to the end of their process, which a run's memory, predicted to
a few, would carry through every step. `Apart` keeps the facts beside the tokens: a run that finds both loads no
tokenizer and starts no process.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from .apart import LIMITS, Limits, answer, ask
from .reading.files import copies
from .reading.places import At, unsaid
from .samples.formats import listed, recognise, samples, unread_fields
from .token_cache import (
    Tokens,
    cache_key,
    digest_of_files,
    digests_of_files,
    keep_facts,
    kept_facts,
    open_cache,
)
from .tokenising import Paced, Progress, Tokenise, Work, digests_of, is_chat, made_by, times_of, tokenise
from .tokens import called, end_of_sequence, end_tokens, fingerprint, load_tokenizer

_KEY = ("files", "format", "tokenizer", "times", "ends", "made_by")
"""What of the content names the token cache."""


@dataclass(frozen=True)
class Asked:
    """The data that errors call `path`: its `files`, their `format` where the user said it, and when it is, in ISO
    8601, for a chat template that writes the time. With `append_eos` every conversation learns an end token."""

    path: str
    files: tuple[str, ...]
    format: str | None
    append_eos: bool
    instant: str


@dataclass(frozen=True)
class Facts:
    """What a run must know of data and tokenizer. All of it is plain, and none of it is long.

    `eos` and `padding` are ids of the tokenizer. `ends` are the tokens at which a model stops, and `ends_called` what
    they are called. `notes` are for the user. `content` says by digests what was read, and by which tokenizer
    (`text_data.TextData.content`).
    """

    format: str
    as_chat: bool
    eos: int
    padding: int | None
    ends: tuple[int, ...]
    ends_called: tuple[str, ...]
    notes: tuple[str, ...]
    content: dict[str, str]

    @classmethod
    def of(cls, said: dict[str, Any]) -> "Facts":
        """The facts from their JSON."""
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in said.items()
        }
        return cls(**plain)

    def tokens_in(self, cache: Path) -> Path:
        """Their token cache, in a directory."""
        return cache / f"{cache_key(*(self.content[name] for name in _KEY))}.tokens"


class Reader(ABC):
    """Reads data by one tokenizer."""

    @abstractmethod
    def read(self, asked: Asked, cache: Path, progress: Progress | None) -> tuple[Facts, Tokens]:
        """The facts, and the tokens, which are made in the directory `cache` unless they are there.

        Raises UsageError for data or a tokenizer that cannot be used, DiskFullError when the tokens do not fit.
        """

    @abstractmethod
    def places(self, asked: Asked, facts: Facts, indices: Sequence[int]) -> list[str]:
        """Where the samples of these indices are (from 0; fewer where there are fewer): file and line or row. It reads
        the files up to there."""

    @abstractmethod
    def called(self, id: int) -> str:
        """What the tokenizer calls a token."""


class Here(Reader):
    """Reads in this process. `at` is told of what is worked on."""

    def __init__(self, tokenizer: Any, tokenise: Tokenise | None = None, at: At = unsaid) -> None:
        self._tokenizer, self._at = tokenizer, at
        self._tokenise = tokenise or functools.partial(_tokenise, at=at)

    def read(self, asked: Asked, cache: Path, progress: Progress | None) -> tuple[Facts, Tokens]:
        facts = self._facts(asked)
        file = facts.tokens_in(cache)
        found = open_cache(file)
        if found is None:
            work = Work(asked.path, asked.files, facts.format, facts.eos, asked.instant, asked.append_eos)
            self._tokenise(work, self._tokenizer, file, progress)
            found = open_cache(file)
            assert found is not None, file
        self._at("looking at", asked.path, sum(Path(each).stat().st_size for each in asked.files))
        return facts, found

    def _facts(self, asked: Asked) -> Facts:
        tokenizer, path = self._tokenizer, Path(asked.path)
        name = str(tokenizer.name_or_path or "the tokenizer")
        files = [Path(file) for file in asked.files]
        eos = end_of_sequence(tokenizer)
        padding = None if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        format = recognise(files, asked.format, self._at)
        self._at("reading", name, 0)
        digests = digests_of(tokenizer, format, asked.append_eos)
        instant = datetime.fromisoformat(asked.instant)
        times = times_of(tokenizer, format, instant)
        ends = end_tokens(tokenizer)
        names = tuple(called(tokenizer, end) for end in ends)
        unread = unread_fields(files, format, self._at)
        held = []
        for file in files:
            self._at("reading", str(file), file.stat().st_size)
            held += digests_of_files([file])
        notes = [*copies(path, files, held)]
        if unread:
            notes.append(f"{path}: fields that are not read: {listed(unread)}")
        if times:
            notes.append(
                f"{path}: the chat template asks for the time, and gets that of {instant:%Y-%m-%d %H:%M:%S} for every "
                f"sample: {times}"
            )
        content = {
            "files": digest_of_files(files, held),
            "format": format,
            "tokenizer": digests["tokenizer"],
            "times": times,
            "ends": ",".join(map(str, ends)),
            "made_by": made_by(),
            **digests,
        }
        as_chat = is_chat(tokenizer, format)
        return Facts(format, as_chat, eos, padding, ends, names, tuple(notes), content)

    def places(self, asked: Asked, facts: Facts, indices: Sequence[int]) -> list[str]:
        files = [Path(file) for file in asked.files]
        found = samples(files, facts.format, as_chat=facts.as_chat, at=self._at)
        wanted = set(indices)
        ahead = itertools.islice(found, max(wanted, default=-1) + 1)
        places = {index: sample.place for index, sample in enumerate(ahead) if index in wanted}
        return [places[index] for index in indices if index in places]

    def called(self, id: int) -> str:
        return called(self._tokenizer, id)


def _tokenise(work: Work, tokenizer: Any, file: Path, progress: Progress | None, at: At) -> None:
    tokenise(work, tokenizer, file, progress, at)


class Apart(Reader):
    """Has a process of its own read, by the tokenizer in a model's directory; one process for each answer.

    Raises its errors, and those of `apart.ask`. The process ends with this one, and whenever the method does.
    """

    def __init__(self, model: Path, limits: Limits = LIMITS) -> None:
        self._model, self._limits = model, limits

    def read(self, asked: Asked, cache: Path, progress: Progress | None) -> tuple[Facts, Tokens]:
        made = fingerprint(self._model)
        file = cache / f"{_facts_key(made, asked)}.facts"
        if (facts := self._kept(file, asked)) and (found := open_cache(facts.tokens_in(cache))):
            return facts, found

        def told(said: dict[str, Any]) -> None:
            if "facts" in said:
                answered.append(Facts.of(said["facts"]))
            elif progress is not None:
                progress(said["done"], said["total"])

        answered: list[Facts] = []
        self._ask("read", asked, told, cache)
        [facts] = answered
        found = open_cache(facts.tokens_in(cache))
        assert found is not None, facts
        if not facts.content["times"] and fingerprint(self._model) == made:
            keep_facts(file, json.dumps(dataclasses.asdict(facts)).encode())
        return facts, found

    def _kept(self, file: Path, asked: Asked) -> Facts | None:
        """The facts in `file`, where they are of what the data's files hold now."""
        kept = kept_facts(file)
        if kept is None:
            return None
        facts = Facts.of(json.loads(kept))
        files = [Path(each) for each in asked.files]
        return facts if digest_of_files(files, digests_of_files(files)) == facts.content["files"] else None

    def places(self, asked: Asked, facts: Facts, indices: Sequence[int]) -> list[str]:
        if not indices:
            return []
        answered: list[str] = []
        told: Callable[[dict[str, Any]], None] = lambda said: answered.extend(said["places"])  # noqa: E731
        self._ask("places", asked, told, facts=dataclasses.asdict(facts), indices=list(map(int, indices)))
        return answered

    def called(self, id: int) -> str:
        answered: list[str] = []
        asked = Asked(str(self._model), (), None, False, "")
        self._ask("called", asked, lambda said: answered.append(said["called"]), id=int(id))
        return answered[0]

    def _ask(
        self,
        what: str,
        asked: Asked,
        told: Callable[[dict[str, Any]], None],
        cache: Path | None = None,
        **more: Any,
    ) -> None:
        named = {"what": what, "model": str(self._model), "asked": dataclasses.asdict(asked), "cache": str(cache or "")}
        ask(__name__, {**named, **more}, told, asked.path, self._limits, cache)


def _facts_key(model: str, asked: Asked) -> str:
    """The name of kept facts: all that decides them but what the data's files hold."""
    of_data = json.dumps([asked.path, asked.files, asked.format, asked.append_eos])
    ours = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return cache_key("facts", model, of_data, made_by(), ours)


def main() -> int:
    """Be the process that reads: answer one question of `Apart`."""

    def answered(request: dict[str, Any], at: At, tell: Callable[..., None]) -> None:
        said, what = request["asked"], request["what"]
        asked = Asked(**{**said, "files": tuple(said["files"])})
        if what == "places":
            places = Here(None, at=at).places(asked, Facts.of(request["facts"]), request["indices"])
            tell(places=places)
            return
        at("reading", request["model"], 0)
        reader = Here(load_tokenizer(Path(request["model"])), at=at)
        if what == "called":
            tell(called=reader.called(request["id"]))
            return
        facts, _ = reader.read(asked, Path(request["cache"]), Paced(lambda done, total: tell(done=done, total=total)))
        tell(facts=dataclasses.asdict(facts))

    return answer(answered)


if __name__ == "__main__":
    sys.exit(main())
