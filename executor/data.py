"""Text in: files become the model's own tokens, and tokens become micro-batches.

Owns which text is read, how it is tokenised, and which samples a step sees; a step's micro-batches are a pure function
of the step number, so a resumed run sees what the killed one would have seen. It never runs a model, never reaches for
a hub, and never holds a whole data set in memory: tokens go to a memory-mapped cache file that is keyed by content.
"""

import codecs
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ssdplan.plans.errors import DiskFullError, IoFailure, MismatchError, UsageError

NOT_COUNTED = -100
"""The label of a position that does not count towards the loss, as Hugging Face models have it."""

_SUFFIXES = (".txt", ".jsonl")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_READ_BYTES = 1 << 18
_PIECE_CHARACTERS = 1 << 18
_BATCH_CHARACTERS = 1 << 20
_WHOLE_CHARACTERS = 100_000_000

_SURROGATE = re.compile("[\ud800-\udfff]")

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


# Documents


@dataclass(frozen=True)
class _Document:
    """One document: where it begins, and its text in pieces that are to be read once, in order."""

    path: Path
    line: int
    pieces: Iterable[str]

    def text(self) -> str:
        return "".join(self.pieces)


def read_documents(path: Path) -> Iterator[str]:
    """Yields the documents under `path`: a .txt file is one, a .jsonl file has one a row, in its field `text`.

    A directory is searched recursively, in the order of its sorted paths; files of other names in it are left alone.
    Text is UTF-8 and is passed on as it is, except that a byte order mark at the start of a file is not text. Raises
    UsageError, naming file and line, for whatever is not such text.
    """
    return (document.text() for document in _documents(_text_files(path)))


def _text_files(path: Path) -> list[Path]:
    if not path.exists():
        raise UsageError(
            f"{path}: no such file or directory; --data takes a .txt or .jsonl file, or a directory of them"
        )
    if not path.is_dir():
        if path.suffix.lower() not in _SUFFIXES:
            raise UsageError(f"{path}: neither .txt nor .jsonl; rename it to what it is, or convert it to one of them")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
    if not files:
        raise UsageError(f"{path}: no .txt or .jsonl file in this directory or below it")
    return files


def _documents(files: list[Path]) -> Iterator[_Document]:
    for file in files:
        if file.stat().st_size == 0:
            raise UsageError(f"{file}: the file is empty; put text into it or take it away")
        if file.suffix.lower() == ".txt":
            yield _Document(file, 1, _decoded_pieces(file))
        else:
            yield from _rows(file)


def _decoded_pieces(file: Path) -> Iterator[str]:
    """The text of a .txt file in pieces of bounded size; what is not UTF-8 is an error with its line."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, first = 1, True
    with file.open("rb") as stream:
        while True:
            data = stream.read(_READ_BYTES)
            kept = decoder.getstate()[0]
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line += (kept + data)[: error.start].count(b"\n")
                raise _not_utf8(file, line) from error
            line += text.count("\n")
            if first and text:
                text, first = text.removeprefix("\ufeff"), False
            if text:
                yield text
            if not data:
                return


def _rows(file: Path) -> Iterator[_Document]:
    with file.open("rb") as stream:
        for line, data in enumerate(stream, start=1):
            if line == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            if data.strip():
                yield _Document(file, line, (_text_of_row(file, line, data),))


def _text_of_row(file: Path, line: int, data: bytes) -> str:
    try:
        row = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(file, line) from error
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UsageError(f"{file}:{line}: not a JSON row ({reason}); each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise UsageError(f"{file}:{line}: the row is {_json_name(row)}; it must be an object with a field `text`")
    if "text" not in row:
        names = ", ".join(f"`{name}`" for name in row) or "none"
        raise UsageError(f"{file}:{line}: the row has no field `text` (its fields: {names}); put the text there")
    text = row["text"]
    if not isinstance(text, str):
        raise UsageError(f"{file}:{line}: the field `text` is {_json_name(text)}; it must be a string")
    if not text.isascii() and _SURROGATE.search(text):
        raise UsageError(
            f"{file}:{line}: the field `text` has half of a surrogate pair, which is no character; repair it"
        )
    return text


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]


def _not_utf8(file: Path, line: int) -> UsageError:
    return UsageError(f"{file}:{line}: not valid UTF-8; convert the file, for example with iconv -t UTF-8")


# Tokens


def load_tokenizer(model_dir: Path) -> Any:
    """The tokenizer in a model's directory (a transformers tokenizer), never from a hub.

    Raises UsageError when there is none, or when it cannot be read.
    """
    if not model_dir.is_dir():
        raise UsageError(f"{model_dir}: no such model directory")
    if not any((model_dir / name).is_file() for name in _TOKENIZER_FILES):
        raise UsageError(
            f"{model_dir}: no tokenizer here ({', '.join(_TOKENIZER_FILES)}); copy the model's own into it"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception for a file that it cannot parse
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"{model_dir}: the tokenizer cannot be read ({reason}); copy the model's own again") from error


def _end_of_sequence(tokenizer: Any, vocab_size: int | None) -> int:
    name = tokenizer.name_or_path or "the tokenizer"
    largest = max(tokenizer.get_vocab().values())
    if vocab_size is not None and largest >= vocab_size:
        raise MismatchError(
            f"{name}: the tokenizer has ids up to {largest}, the model's vocab_size is {vocab_size}; "
            "they do not belong together: use the model's own tokenizer, or resize the model's embedding"
        )
    if tokenizer.eos_token_id is None:
        raise UsageError(f"{name}: the tokenizer has no end-of-sequence token; set eos_token in tokenizer_config.json")
    return int(tokenizer.eos_token_id)


def _tokenizer_identity(tokenizer: Any) -> bytes:
    """Everything about a tokenizer that decides its tokens, as bytes for the cache's key."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        del state["truncation"], state["padding"]  # set by whoever called it last; the calls here override both
        return json.dumps([state, tokenizer.eos_token_id, _PIECE_CHARACTERS], sort_keys=True).encode()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        return b"".join(file.name.encode() + file.read_bytes() for file in files)


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_KNOWN_SPLITS = tuple(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for number in (r"\p{N}{1,3}", r"\p{N}")
)
"""The expressions of Llama 3 and of Qwen 2, which scan forward only and never look past the start of the next word."""


class _Cutter:
    """Cuts a long document where that cannot change its tokens, so that no document is tokenised whole in memory.

    A byte-level tokenizer without a normalizer first splits text at its added tokens, then splits what lies between
    into pre-tokens with a regular expression that scans from left to right, and then turns each pre-token into tokens
    by itself. The expressions known here never look behind and never look ahead past the start of the next word. So a
    scan that starts at a pre-token's boundary does not depend on what came before, and a cut there changes nothing.
    `possible` says whether a tokenizer is of this kind; for any other, documents are tokenised whole.
    """

    LOOK_AHEAD = 1024
    """Characters left uncut at the end of a buffer; longer than any added token."""

    _WORD_BEFORE_LAST = re.compile(r"\w[ \n]+\w")

    def __init__(self, tokenizer: Any) -> None:
        state = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else None
        added = state["added_tokens"] if state else []
        self.possible = (
            state is not None
            and state["normalizer"] is None
            and state["model"].get("type") == "BPE"
            and not state["model"].get("dropout")
            and self._scans_forward(state["pre_tokenizer"])
            and not any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
            and len({token["normalized"] for token in added}) <= 1  # else they are matched in two passes
            and all(len(token["content"]) < self.LOOK_AHEAD for token in added)
        )
        self._pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer if self.possible else None
        contents = sorted((token["content"] for token in added), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, contents)) or r"(?!)")

    @staticmethod
    def _scans_forward(pre_tokenizer: dict[str, Any] | None) -> bool:
        """Whether it is runs of digits, then one known expression, in the order in which nesting keeps cuts safe."""
        parts = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer]
        expressions = 0
        for part in parts:
            match part:
                case {"type": "Digits"} if expressions == 0:
                    pass
                case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(splits)}:
                    expressions += splits
                case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                    expressions += 1 if pattern in _KNOWN_SPLITS else 2
                case _:
                    return False
        return expressions == 1

    def pieces(self, texts: Iterable[str]) -> Iterator[str]:
        """The same text, in pieces whose tokens, one after the other, are the tokens of the whole."""
        buffer, reach = "", _PIECE_CHARACTERS
        for text in texts:
            buffer += text
            while len(buffer) > reach + _PIECE_CHARACTERS:
                cut = self._cut(buffer[:reach])
                if cut == 0:  # one word as long as that: look further
                    reach *= 2
                else:
                    yield buffer[:cut]
                    buffer, reach = buffer[cut:], _PIECE_CHARACTERS
        yield buffer

    def _cut(self, text: str) -> int:
        """The last place in `text` where a cut changes nothing; 0 when there is none."""
        assert self._pre_tokenizer is not None
        start, end = 0, len(text)
        for match in self._added.finditer(text):
            if match.end() > len(text) - self.LOOK_AHEAD:
                end = match.start()
                break
            start = match.end()
        if start > 0:
            return start
        text = text[:end]
        word = self._WORD_BEFORE_LAST.search(text[::-1])  # its own end is in sight, and so is the start of the next
        if word is None:
            return 0
        end = min(len(text) - self.LOOK_AHEAD, len(text) - word.end())
        stops = (stop for _, (_, stop) in reversed(self._pre_tokenizer.pre_tokenize_str(text)))
        # Not after white space: how a run of it splits depends on whether a word follows.
        return next((int(stop) for stop in stops if stop <= end and not text[stop - 1].isspace()), 0)


def _special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text by itself."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    return full, []


@dataclass(frozen=True)
class _Unit:
    """A piece of a document as it is given to the tokenizer."""

    text: str
    first: bool
    last: bool


def _units(documents: Iterable[_Document], cutter: _Cutter) -> Iterator[_Unit]:
    for document in documents:
        if not cutter.possible:
            text = document.text()
            if len(text) > _WHOLE_CHARACTERS:
                raise UsageError(
                    f"{document.path}:{document.line}: a document of {len(text)} characters, and this tokenizer needs "
                    f"documents whole ({_WHOLE_CHARACTERS} at most); split it into several files or rows"
                )
            yield _Unit(text, True, True)
            continue
        first, held = True, ""
        for piece in cutter.pieces(document.pieces):
            if held:
                yield _Unit(held, first, False)
                first = False
            held = piece
        yield _Unit(held, first, True)


def _batched(units: Iterable[_Unit]) -> Iterator[list[_Unit]]:
    batch: list[_Unit] = []
    characters = 0
    for unit in units:
        batch.append(unit)
        characters += len(unit.text) + 64
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _token_pieces(
    path: Path, documents: Iterable[_Document], tokenizer: Any, eos: int
) -> Iterator[tuple[npt.NDArray[np.uint32], bool]]:
    """Yields tokens in order, and with each piece whether a document ends with it."""
    cutter = _Cutter(tokenizer)
    before, after = _special_tokens_around(tokenizer)
    closing = [] if after and after[-1] == eos else [eos]  # a tokenizer that ends texts by itself needs no second one
    if cutter.possible:
        closing = after + closing
    blank = True
    for batch in _batched(_units(documents, cutter)):
        encoded = tokenizer(
            [unit.text for unit in batch],
            add_special_tokens=not cutter.possible,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        blank = blank and not any(unit.text.strip() for unit in batch)
        for unit, ids in zip(batch, encoded, strict=True):
            if cutter.possible and unit.first:
                ids = before + ids
            yield np.asarray(ids + closing if unit.last else ids, dtype=np.uint32), unit.last
    if blank:
        raise UsageError(f"{path}: no text at all in it, only white space or nothing; give it text to train on")


# The cache file


_FOOTER = struct.Struct("<16sQQ")
_MAGIC = b"ssdplan tokens 1"


@dataclass(frozen=True)
class _Tokens:
    """A cache file: `tokens` uint32 [tokens], then each document's end, `ends` uint64 [documents], then a footer."""

    tokens: npt.NDArray[np.uint32]
    ends: npt.NDArray[np.uint64]


def _open_cache(file: Path) -> _Tokens | None:
    """The tokens in `file`, memory-mapped; None when it does not exist or is not whole."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            stream.seek(max(0, size - _FOOTER.size))
            magic, tokens, documents = _FOOTER.unpack(stream.read(_FOOTER.size))
    except (FileNotFoundError, struct.error):
        return None
    offset = (tokens * 4 + 7) // 8 * 8
    if magic != _MAGIC or size != offset + documents * 8 + _FOOTER.size:
        return None
    if not documents:
        return _Tokens(np.empty(0, np.uint32), np.empty(0, np.uint64))
    return _Tokens(
        np.memmap(file, np.uint32, "r", shape=(tokens,)),
        np.memmap(file, np.uint64, "r", offset=offset, shape=(documents,)),
    )


def _write_cache(file: Path, pieces: Iterable[tuple[npt.NDArray[np.uint32], bool]]) -> None:
    """Writes a cache file under a temporary name and renames it, so that a file that exists is whole."""
    partial: Path | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        partial = Path(name)
        with os.fdopen(handle, "wb") as stream, tempfile.TemporaryFile(dir=file.parent) as ends:
            _write_tokens(stream, ends, pieces)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(file)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"{file.parent}: no space for the tokenised text; free some, 4 bytes a token"
            ) from error
        raise IoFailure(f"{error.filename or file}: {error.strerror} (while tokenising)") from error
    finally:
        if partial is not None:
            with suppress(FileNotFoundError):
                partial.unlink()


def _write_tokens(stream: BinaryIO, ends: Any, pieces: Iterable[tuple[npt.NDArray[np.uint32], bool]]) -> None:
    tokens = documents = 0
    for ids, last in pieces:
        stream.write(ids.tobytes())
        tokens += len(ids)
        if last:
            ends.write(struct.pack("<Q", tokens))
            documents += 1
    stream.write(b"\0" * (-4 * tokens % 8))
    ends.seek(0)
    shutil.copyfileobj(ends, stream)
    stream.write(_FOOTER.pack(_MAGIC, tokens, documents))


def _content_key(files: list[Path], tokenizer: Any) -> str:
    digest = hashlib.sha256(_MAGIC)
    for data in (_tokenizer_identity(tokenizer), *(file.suffix.lower().encode() for file in files)):
        digest.update(hashlib.sha256(data).digest())
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _counted(
    documents: Iterable[_Document], progress: Callable[[int, int], None] | None, total: int
) -> Iterator[_Document]:
    """The same documents, with `progress` told how many bytes of text lie behind (a row's other bytes are not text)."""
    done = 0

    def pieces(texts: Iterable[str]) -> Iterator[str]:
        nonlocal done
        for text in texts:
            yield text
            done += len(text) if text.isascii() else len(text.encode())
            if progress is not None:
                progress(min(done, total), total)

    return (_Document(document.path, document.line, pieces(document.pieces)) for document in documents)


# Samples


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
        eos = _end_of_sequence(tokenizer, vocab_size)
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
        files = _text_files(self._path)
        file = cache / f"{_content_key(files, tokenizer)}.tokens"
        found = _open_cache(file)
        if found is None:
            total = sum(each.stat().st_size for each in files)
            documents = _counted(_documents(files), progress, total)
            _write_cache(file, _token_pieces(self._path, documents, tokenizer, eos))
            found = _open_cache(file)
            assert found is not None, file
        return found.tokens, found.ends

    def _refuse_rows_without_targets(self) -> None:
        short = np.flatnonzero(np.diff(self._ends.astype(np.int64), prepend=0) < 2)
        if len(short):
            index = int(short[0])
            document = next(each for i, each in enumerate(_documents(_text_files(self._path))) if i == index)
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
