"""Samples: tokens become micro-batches.

Owns which samples a step sees; a step's micro-batches are a pure function of the step number, so a resumed run sees
what the killed one would have seen. It never runs a model and never reaches for a hub.
"""

import copy
import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ssdplan.plans.documents.rows import row_length
from ssdplan.plans.errors import MismatchError, UsageError

from .packing import EndToEnd, OneARow, Rows, Segment, WholeSamples
from .reader import Asked, Facts, Here, Reader
from .reading.files import find_files, named
from .rendering import NOT_LEARNT
from .samples.formats import ambiguous
from .samples.notes import AMBIGUOUS, Note, cut_before_end, cut_off, left_out, no_end, read_notes, words
from .token_cache import Tokens
from .tokenising import Progress, Tokenise

NOT_COUNTED = -100
"""The label of a position that does not count towards the loss, as Hugging Face models have it."""

Ints = npt.NDArray[np.int64]
Raw = npt.NDArray[np.uint32]
_COUNTED_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class Batch:
    """One micro-batch: `input_ids`, `labels`, `attention_mask` and `position_ids`, each int64 [rows, s].

    `labels` are not shifted (the model's loss does that) and hold -100 where nothing counts. `attention_mask` is None
    when no row is padded. `position_ids` are there when samples share a row and must not attend to each other: they
    begin at 0 again with each sample, and with padding; `attention_mask` is None then.
    """

    input_ids: Ints
    labels: Ints
    attention_mask: Ints | None
    position_ids: Ints | None = None


@dataclass(frozen=True)
class HoldOut:
    """How much of the data is held out of training: a `fraction` of all samples, or so many `samples`.

    Which ones, a hash of each sample's tokens says. A fraction's samples stay held out when data are added; of a number
    of samples some then give their place to added ones. Samples that are the same are on the same side.
    """

    fraction: float | None = None
    samples: int | None = None

    def of(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Whether each sample is held out."""
        if self.fraction is not None:
            return hashes < min(int(self.fraction * 2**64), 2**64 - 1)
        assert self.samples is not None
        if self.samples >= len(hashes):
            return np.ones(len(hashes), np.bool_)
        return hashes <= np.partition(hashes, self.samples - 1)[self.samples - 1]


def _padding(facts: Facts, vocab_size: int | None) -> int:
    """What rows are padded with, which nothing sees: the tokenizer's own token for it, if the model has that."""
    own = [] if facts.padding is None else [facts.padding]
    return next(id for id in (*own, facts.eos, 0) if vocab_size is None or id < vocab_size)


def _state(file: Path) -> tuple[int, int, int]:
    """What changes of a file when somebody writes to it or puts another in its place."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@functools.lru_cache(maxsize=2)
def _shuffle(seed: int, epoch: int, samples: int) -> Ints:
    """The order of an epoch. Only raw Philox output is used, which numpy promises never to change."""
    raw = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64)).random_raw(samples)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)


class TextData:
    """The samples of a data set, tokenised once. `tokenizer` is the one that they are read by, or a reader by one.

    Without `pack` each sample is one row, cut at `sequence_length` and padded on the right to the least of a few
    lengths (`plans/documents/rows.py`) that its micro-batch needs. With it samples share rows: texts are laid end to
    end, each followed by the end-of-sequence token, and cut into rows of exactly `sequence_length` tokens, and what is
    left over at the end is dropped; samples of which only a part is learnt (`format` other than `text`) are laid into
    rows whole, which are padded as those without `pack`. Those that share a row do not attend to each other, and none's
    first token is predicted, unless `attend_across`.

    `samples` counts rows an epoch; `documents` and `tokens` what was read (end-of-sequence tokens included, before
    cutting); `cut` samples that are longer than a row (no text, when packed), and `cut_off` the tokens that those lose;
    `left_out` samples of which no token is to be learnt within a row, of `left_out_tokens`; `row_tokens_used` is the
    share of rows of full length that samples fill. `held_out` is the same of what `hold_out` keeps from training, None
    without. `has_borders` says whether a row may hold several samples, `full_rows` whether none is ever shorter than
    `sequence_length`, `has_uneven_rows` whether samples of fewer tokens are computed beside longer ones. With
    `append_eos` every conversation learns an end token, whatever the chat template writes. `instant` is when it is for
    a template that writes the time (now, by default). Data that fill no row, or of which nothing is learnt within one,
    are refused; with `refuse=False` they have no rows, and `refusal` says why. The tokens are kept in the directory
    `cache`, or in an unnamed temporary file; `tokenise` makes them where no reader is given.

    Raises UsageError for data or a tokenizer that cannot be used, MismatchError when the data have ids that a model of
    `vocab_size` lacks, DiskFullError when the cache does not fit.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Any,
        *,
        sequence_length: int,
        pack: bool = True,
        attend_across: bool = False,
        format: str | None = None,
        append_eos: bool = False,
        hold_out: HoldOut | None = None,
        cache: Path | None = None,
        vocab_size: int | None = None,
        progress: Progress | None = None,
        tokenise: Tokenise | None = None,
        instant: datetime | None = None,
        refuse: bool = True,
    ) -> None:
        if sequence_length < 2:
            raise UsageError(f"a sequence length of {sequence_length} leaves no token to predict; it must be 2 or more")
        self.sequence_length = sequence_length
        self.pack = pack
        self.attend_across = attend_across
        self.hold_out = hold_out
        self.path = path
        self.refusal = ""
        self._refuse = refuse
        self._reader = tokenizer if isinstance(tokenizer, Reader) else Here(tokenizer, tokenise)
        chosen = find_files(path)
        self.files = list(chosen.files)
        when = (instant or datetime.now()).isoformat()
        self._asked = Asked(str(path), tuple(map(str, self.files)), format, append_eos, when)
        before = [_state(file) for file in self.files]
        self._facts, found = self._read(cache, progress)
        self.format, self.as_chat = self._facts.format, self._facts.as_chat
        self._padding = _padding(self._facts, vocab_size)
        self._read_notes = (*chosen.notes, *self._facts.notes)
        for file, state in zip(self.files, before, strict=True):
            if _state(file) != state:
                raise UsageError(f"{file}: changed while it was read; start again when nothing writes to it")
        self._content = {**self._facts.content, "tokens": f"{found.checksum:08x}"}
        if vocab_size is not None and found.largest >= vocab_size:
            raise self._beyond(found, vocab_size)
        self._tokens, self._hashes = found.tokens, found.hashes
        ends = found.ends.astype(np.int64)
        self._bounds = (np.concatenate([np.zeros(1, np.int64), ends[:-1]]), ends) if len(ends) else (ends, ends)
        self._notes = self._told(read_notes(found.notes), format)
        self._no_end = self._without_end() if self.as_chat else None
        self.held_out: TextData | None = None
        if hold_out is None:
            self._choose(None)
            return
        apart = hold_out.of(found.hashes)
        if apart.all() or not apart.any():
            side = "nothing is left to train on" if apart.all() else "none of them is held out"
            raise UsageError(
                f"{path}: of {len(apart)} sample(s) {side}; hold out another share, or give held-out data of their own "
                "with --eval-data"
            )
        self.held_out = copy.copy(self)
        self.held_out._choose(np.flatnonzero(apart))
        self._choose(np.flatnonzero(~apart))

    def _read(self, cache: Path | None, progress: Progress | None) -> tuple[Facts, Tokens]:
        if cache is None:
            with tempfile.TemporaryDirectory(prefix="ssdplan-") as folder:  # the mapping outlives the name
                return self._read(Path(folder), progress)
        return self._reader.read(self._asked, cache, progress)

    def _told(self, notes: tuple[Note, ...], asked: str | None) -> tuple[Note, ...]:
        """The notes on the samples. Raises UsageError where one of them would do as several formats, and none is
        `asked` for."""
        for note in notes:
            if note.kind == AMBIGUOUS and asked is None:
                raise ambiguous(f"{self._place(note.first)}: the row's fields", note.detail)
        return tuple(note for note in notes if note.kind != AMBIGUOUS)

    def _beyond(self, found: Tokens, vocab_size: int) -> MismatchError:
        """What to say of the first token that is none of the model's."""
        for start in range(0, len(found.tokens), _COUNTED_AT_A_TIME):
            ids = found.tokens[start : start + _COUNTED_AT_A_TIME] & ~NOT_LEARNT
            if len(beyond := np.flatnonzero(ids >= vocab_size)):
                break
        id = int(ids[beyond[0]])
        [where] = self.places(1, int(np.searchsorted(found.ends, start + beyond[0], side="right")))
        return MismatchError(
            f"{where}: becomes the id {id} ({self._reader.called(id)!r}) among others, and the model's "
            f"vocab_size is {vocab_size}; use the model's own tokenizer, take that token out of the data, or resize "
            "the model's embedding"
        )

    def what_was_read(self) -> str:
        """Files, samples, tokens and rows, on a line."""
        below = self.path if self.path.is_dir() else self.path.parent
        return (
            f"{self.path}: {len(self.files)} file(s) of `{self.format}` ({named(self.files, below)}), "
            f"{self.documents:,} sample(s), {self.tokens:,} tokens, {self.samples:,} row(s) of {self.sequence_length}"
        )

    def shared(self, other: "TextData") -> int:
        """How many of these samples are among those of `other` too, to the token."""
        ours, theirs = (each._hashes if each._chosen is None else each._hashes[each._chosen] for each in (self, other))
        return int(np.isin(ours, theirs).sum())

    def _choose(self, chosen: Ints | None) -> None:
        """Take the samples `chosen` (all of them: None), and lay them into rows."""
        starts, stops = self._bounds if chosen is None else (bound[chosen] for bound in self._bounds)
        self.documents = len(starts)
        self.tokens = int((stops - starts).sum())
        self.full_rows = self.pack and self.format == "text"
        self._cut_before_end: Note | None = None
        if self.full_rows:
            self.cut = self.cut_off = self.left_out = self.left_out_tokens = 0
            self.row_tokens_used = 1.0
            self._rows: Rows = EndToEnd(starts, stops, self.sequence_length)
            if self._rows.count == 0:
                self.row_tokens_used = 0.0
                self._has_no_rows(
                    f"{self.tokens} tokens in all, fewer than one row of {self.sequence_length}; add text, plan for a "
                    f"--sequence-length of {self.tokens} or less, or train with --no-pack"
                )
        else:
            learnt = self._learnt(starts, np.minimum(stops, starts + self.sequence_length)) > 0
            self.left_out = int(len(learnt) - learnt.sum())
            self.left_out_tokens = int((stops - starts)[~learnt].sum())
            kept = np.flatnonzero(learnt)
            starts, stops = starts[learnt], stops[learnt]
            if not len(starts):
                self._has_no_rows(
                    f"no sample has a token to learn within {self.sequence_length} tokens; plan for a longer "
                    "--sequence-length"
                )
            longer = np.flatnonzero(stops - starts > self.sequence_length)
            self.cut = len(longer)
            if self.cut:
                lacking = kept[longer[self._end_is_cut(starts[longer], stops[longer], self._facts.ends)]]
                if len(lacking):
                    first = int(lacking[0] if chosen is None else chosen[lacking[0]])
                    self._cut_before_end = Note("", len(lacking), first, "")
            self._rows = (WholeSamples if self.pack else OneARow)(starts, stops, self.sequence_length)
            used = int(np.minimum(stops - starts, self.sequence_length).sum())
            self.cut_off = int((stops - starts).sum()) - used
            self.row_tokens_used = used / (self._rows.count * self.sequence_length) if self._rows.count else 0.0
        self.samples = self._rows.count
        self.has_borders = self.pack and self.documents > 1
        self._chosen = chosen

    def _has_no_rows(self, why: str) -> None:
        error = UsageError(f"{self.path}: {why}")
        if self._refuse:
            raise error
        self.refusal = str(error)

    @property
    def has_uneven_rows(self) -> bool:
        return not self.full_rows or (self.has_borders and not self.attend_across)

    def places(self, count: int, first: int = 0) -> list[str]:
        """Where the samples from `first` on are: file and line or row. It reads the files up to there."""
        return self._reader.places(self._asked, self._facts, range(first, first + count))

    def _learnt(self, starts: Ints, stops: Ints) -> Ints:
        """How many tokens of each range are learnt; its first is predicted from nothing."""
        return self._counts(np.minimum(starts + 1, stops), stops, lambda raw: raw < NOT_LEARNT)

    def _counts(self, starts: Ints, stops: Ints, which: Callable[[Raw], npt.NDArray[np.bool_]]) -> Ints:
        """Of how many tokens of each range `which` is true."""
        found = np.zeros(len(starts), np.int64)
        first = 0
        while first < len(starts):
            last = max(first + 1, int(np.searchsorted(stops, starts[first] + _COUNTED_AT_A_TIME, side="right")))
            base = starts[first]
            counts = np.zeros(stops[last - 1] - base + 1, np.int64)
            np.cumsum(which(self._tokens[base : stops[last - 1]]), out=counts[1:])
            found[first:last] = counts[stops[first:last] - base] - counts[starts[first:last] - base]
            first = last
        return found

    def _without_end(self) -> Note | None:
        """The samples that learn no token at which a model stops."""
        starts, stops = self._bounds
        lacking = np.flatnonzero(self._ends_learnt(starts, stops, self._facts.ends) == 0)
        return Note("", len(lacking), int(lacking[0]), "") if len(lacking) else None

    def _ends_learnt(self, starts: Ints, stops: Ints, ends: tuple[int, ...]) -> Ints:
        """How many of the tokens `ends` are learnt in each range; the mark of one that is not makes it none of them."""
        return self._counts(np.minimum(starts + 1, stops), stops, lambda raw: np.isin(raw, ends))

    def _end_is_cut(self, starts: Ints, stops: Ints, ends: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """Of samples that are longer than a row: whether each has a token of `ends` to learn, but none within it."""
        within = self._ends_learnt(starts, starts + self.sequence_length, ends)
        return (within == 0) & (self._ends_learnt(starts, stops, ends) > 0)

    def sample(self, index: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """The tokens of the `index`-th of these samples, and which of them are learnt; before it is cut."""
        sample = index if self._chosen is None else int(self._chosen[index])
        raw = self._tokens[self._bounds[0][sample] : self._bounds[1][sample]]
        return (raw & ~NOT_LEARNT).astype(np.int64), raw < NOT_LEARNT

    def lengths(self) -> Ints:
        """How many tokens each of these samples has, before it is cut."""
        starts, stops = self._bounds if self._chosen is None else (bound[self._chosen] for bound in self._bounds)
        return stops - starts

    def notes(self) -> list[str]:
        """What a user should know of which files and fields were read, when it is for the chat template, and how
        samples, those that are held out too, are rendered. It reads the files up to the first sample of which there is
        something to tell."""
        total, ends = len(self._bounds[0]), self._facts.ends_called
        told = [note for note in (*self._notes, self._no_end, self._cut_before_end) if note]
        firsts = sorted({note.first for note in told})
        places = dict(zip(firsts, self._reader.places(self._asked, self._facts, firsts), strict=True))
        found = [*self._read_notes, *words(self._notes, self.path, total, places.__getitem__)]
        if note := self._no_end:
            found.append(no_end(self.path, note, total, places[note.first], ends))
        if note := self._cut_before_end:
            found.append(cut_before_end(self.path, note, self.documents, places[note.first], ends))
        return found

    def _place(self, index: int) -> str:
        return self.places(1, index)[0]

    def remarks(self) -> list[str]:
        """What a user should know of samples that are not learnt as they are."""
        found = self.notes()
        if self.left_out:
            found.append(f"{self.path}: {left_out(self.left_out, self.left_out_tokens)}")
        if self.cut:
            found.append(f"{self.path}: {cut_off(self.cut, self.cut_off, self.sequence_length)}")
        return found

    def learnt(self) -> Ints:
        """How many tokens of each of these samples are learnt, before it is cut."""
        starts, stops = self._bounds if self._chosen is None else (bound[self._chosen] for bound in self._bounds)
        return self._learnt(starts, stops)

    def in_rows(self) -> tuple[Ints, Ints]:
        """How many tokens of each of these samples lie in rows, and how many of those a run trains on: the tokens whose
        labels count, but for the first of each row, which is predicted from nothing."""
        starts, stops = self._bounds if self._chosen is None else (bound[self._chosen] for bound in self._bounds)
        length = self.sequence_length
        if self.full_rows:  # of texts, all is learnt
            ends = np.minimum(np.cumsum(stops - starts), self.samples * length)
            begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
            openings = -(-ends // length) + (-begins // length)  # rows that begin within it
            apart = (begins % length > 0) & (ends > begins) & (not self.attend_across)
            return ends - begins, ends - begins - openings - apart
        stops = np.minimum(stops, starts + length)
        learnt = self._learnt(starts, stops)
        kept = learnt > 0
        if self.attend_across:
            opening = np.array([self._rows.segments(row)[0][0] for row in range(self.samples)], np.int64)
            learnt[kept] += (self._tokens[starts[kept]] < NOT_LEARNT) & ~np.isin(starts[kept], opening)
        return np.where(kept, stops - starts, 0), learnt

    @property
    def content(self) -> dict[str, str]:
        """What was read, and by which tokenizer, as names and digests: the same content gives the same samples."""
        return dict(self._content)

    def micro_batches(self, step: int, *, micro_batches: int, micro_batch_size: int, seed: int) -> list[Batch]:
        """The `micro_batches` batches of `micro_batch_size` rows of one step (steps count from 0).

        Every epoch has its own shuffle, keyed by (seed, epoch); a step may span two epochs. The same arguments always
        give the same batches.
        """
        assert step >= 0 and micro_batches > 0 and micro_batch_size > 0
        first = step * micro_batches * micro_batch_size
        rows = []
        for index in range(first, first + micro_batches * micro_batch_size):
            epoch, position = divmod(index, self.samples)
            rows.append(self._rows.segments(int(_shuffle(seed, epoch, self.samples)[position])))
        return [self._batch(rows[i : i + micro_batch_size]) for i in range(0, len(rows), micro_batch_size)]

    def eval_batches(
        self, micro_batch_size: int, limit: int | None = None, *, micro_batches: int = 1
    ) -> Iterator[list[Batch]]:
        """Every sample once (the first `limit` of them), in order: lists of `micro_batches` batches.

        A planned pass has one size, so the last list is filled up to `micro_batches` batches of `micro_batch_size` rows
        by repeating its last row with labels of -100, which count for nothing.
        """
        assert micro_batches > 0 and micro_batch_size > 0
        samples = self.samples if limit is None else min(limit, self.samples)
        size = micro_batches * micro_batch_size
        for first in range(0, samples, size):
            rows = [self._rows.segments(index) for index in range(first, min(first + size, samples))]
            filled = rows + [rows[-1]] * (size - len(rows))
            yield [
                self._batch(filled[i : i + micro_batch_size], counted=max(0, len(rows) - i))
                for i in range(0, size, micro_batch_size)
            ]

    def _batch(self, rows: list[list[Segment]], counted: int | None = None) -> Batch:
        """Rows side by side; only the first `counted` have labels (all of them by default)."""
        lengths = np.array([sum(stop - start for start, stop in row) for row in rows])
        shape = (len(rows), row_length(int(lengths.max()), self.sequence_length))
        input_ids = np.full(shape, self._padding, np.int64)
        labels = np.full(shape, NOT_COUNTED, np.int64)
        positions = np.zeros(shape, np.int64)
        apart = not self.attend_across and any(len(row) > 1 for row in rows)
        for i, row in enumerate(rows):
            place = 0
            for start, stop in row:
                raw = self._tokens[start:stop]
                here = slice(place, place + stop - start)
                input_ids[i, here] = raw & ~NOT_LEARNT
                labels[i, here] = np.where(raw < NOT_LEARNT, input_ids[i, here], NOT_COUNTED)
                positions[i, here] = np.arange(stop - start)
                if place and apart:
                    labels[i, place] = NOT_COUNTED  # what comes before it is another's
                place = here.stop
            positions[i, place:] = np.arange(shape[1] - place)
        if counted is not None:
            labels[counted:] = NOT_COUNTED
        if apart:
            return Batch(input_ids, labels, None, positions)
        mask = (np.arange(shape[1])[None, :] < lengths[:, None]).astype(np.int64)
        return Batch(input_ids, labels, None if mask.all() else mask)
