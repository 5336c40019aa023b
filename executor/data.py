"""Samples: tokens become micro-batches.

Owns which samples a step sees; a step's micro-batches are a pure function of the step number, so a resumed run sees
what the killed one would have seen. It never runs a model and never reaches for a hub.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ssdplan.plans.errors import UsageError

from .documents import open_documents, text_files
from .token_cache import content_key, counted, open_cache, write_cache
from .tokens import end_of_sequence, token_pieces

NOT_COUNTED = -100
"""The label of a position that does not count towards the loss, as Hugging Face models have it."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """One micro-batch: `input_ids`, `labels` and `attention_mask`, each int64 [rows, s].

    `labels` are not shifted (the model's loss does that) and hold -100 where nothing counts. `attention_mask` is None
    when no row is padded.
    """

    input_ids: Ints
    labels: Ints
    attention_mask: Ints | None


@functools.lru_cache(maxsize=2)
def _shuffle(seed: int, epoch: int, samples: int) -> Ints:
    """The order of an epoch. Only raw Philox output is used, which numpy promises never to change."""
    raw = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64)).random_raw(samples)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)


class TextData:
    """The samples of a text, tokenised once.

    With `pack`, documents are laid end to end, each followed by the end-of-sequence token, and cut into rows of exactly
    `sequence_length` tokens; what is left over at the end is dropped. Attention is not isolated between the documents
    that share a row. Without it, each document is one row, cut at `sequence_length` and padded on the right only as far
    as its micro-batch needs.

    `samples` counts rows an epoch, `documents` and `tokens` what was read (end-of-sequence tokens included, before
    cutting). The tokens are kept in `cache`, or in an unnamed temporary file. `progress` is called with the bytes done
    and in all. Raises UsageError for text or a tokenizer that cannot be used, MismatchError when the tokenizer has ids
    that a model of `vocab_size` lacks, DiskFullError when the cache does not fit.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Any,
        *,
        sequence_length: int,
        pack: bool = True,
        cache: Path | None = None,
        vocab_size: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if sequence_length < 2:
            raise UsageError(f"a sequence length of {sequence_length} leaves no token to predict; it must be 2 or more")
        self.sequence_length = sequence_length
        self.pack = pack
        self._path = path
        eos = end_of_sequence(tokenizer, vocab_size)
        self._padding = eos if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        self._tokens, self._ends = self._tokenised(tokenizer, eos, cache, progress)
        self.documents = len(self._ends)
        self.tokens = len(self._tokens)
        if pack:
            self.samples = self.tokens // sequence_length
            if self.samples == 0:
                raise UsageError(
                    f"{path}: {self.tokens} tokens in all, fewer than one row of {sequence_length}; add text, "
                    f"plan for a --sequence-length of {self.tokens} or less, or train with --no-pack"
                )
        else:
            self.samples = self.documents
            self._refuse_rows_without_targets()

    def _tokenised(
        self, tokenizer: Any, eos: int, cache: Path | None, progress: Callable[[int, int], None] | None
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        if cache is None:
            with tempfile.TemporaryDirectory(prefix="ssdplan-") as folder:  # the mapping outlives the name
                return self._tokenised(tokenizer, eos, Path(folder), progress)
        files = text_files(self._path)
        file = cache / f"{content_key(files, tokenizer)}.tokens"
        found = open_cache(file)
        if found is None:
            total = sum(each.stat().st_size for each in files)
            documents = counted(open_documents(files), progress, total)
            write_cache(file, token_pieces(self._path, documents, tokenizer, eos))
            found = open_cache(file)
            assert found is not None, file
        return found.tokens, found.ends

    def _refuse_rows_without_targets(self) -> None:
        short = np.flatnonzero(np.diff(self._ends.astype(np.int64), prepend=0) < 2)
        if len(short):
            index = int(short[0])
            document = next(each for i, each in enumerate(open_documents(text_files(self._path))) if i == index)
            raise UsageError(
                f"{document.path}:{document.line}: the row has fewer than 2 tokens, so nothing to learn; take it away "
                f"or pack rows ({len(short)} such row(s))"
            )

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
            rows.append(self._row(int(_shuffle(seed, epoch, self.samples)[position])))
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
            rows = [self._row(index) for index in range(first, min(first + size, samples))]
            filled = rows + [rows[-1]] * (size - len(rows))
            yield [
                self._batch(filled[i : i + micro_batch_size], counted=max(0, len(rows) - i))
                for i in range(0, size, micro_batch_size)
            ]

    def _row(self, sample: int) -> npt.NDArray[np.uint32]:
        if self.pack:
            start = sample * self.sequence_length
            return self._tokens[start : start + self.sequence_length]
        start = int(self._ends[sample - 1]) if sample else 0
        return self._tokens[start : min(int(self._ends[sample]), start + self.sequence_length)]

    def _batch(self, rows: list[npt.NDArray[np.uint32]], counted: int | None = None) -> Batch:
        """Rows side by side; only the first `counted` have labels (all of them by default)."""
        lengths = np.array([len(row) for row in rows])
        shape = (len(rows), int(lengths.max()))
        input_ids = np.full(shape, self._padding, np.int64)
        for i, row in enumerate(rows):
            input_ids[i, : len(row)] = row
        mask = (np.arange(shape[1])[None, :] < lengths[:, None]).astype(np.int64)
        labels = np.where(mask == 1, input_ids, NOT_COUNTED)
        if counted is not None:
            labels[counted:] = NOT_COUNTED
        return Batch(input_ids, labels, None if mask.all() else mask)
