"""Tokens: documents through the model's own tokenizer, piece by piece.

Owns the tokenizer and how plain text is tokenised; samples of which a part is learnt are in `rendering.py`. A long
document is cut only where that cannot change a token; where that is not known of a tokenizer, its documents are
tokenised whole.
"""

import contextlib
import hashlib
import json
import re
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ssdplan.plans.errors import UsageError, first_line

from .frame import Frame
from .reading.documents import Document, opened, require_itself
from .reading.model_config import blamed, read_config
from .reading.places import At, unsaid
from .samples.notes import Tally

VOCABULARY_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "bpe.codes", "byte_maps.json"),
    *("spiece.model", "spm.model", "spm_char.model", "sentencepiece.model", "sentencepiece.bpe.model"),
    *("source.spm", "target.spm", "target_vocab.json", "vocab-src.json", "vocab-tgt.json", "prophetnet.tokenizer"),
    *("dict.txt", "emoji.json", "entity_vocab.json", "normalizer.json", "word_pronunciation.json", "word_shape.json"),
)
"""What the tokenizers of transformers keep their vocabularies in (`vocab_files_names`)."""
_SETTINGS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json", "processor_config.json", "preprocessor_config.json"),
)
"""What else transformers reads for a tokenizer, and `_TEMPLATES`."""
_TEMPLATES = "additional_chat_templates"
_VOCABULARY_BYTES, _SETTINGS_BYTES = 1 << 29, 1 << 26
"""The largest vocabularies are 40 MB (a quarter of a million tokens), and settings with all added tokens a few MB."""
_PIECE_CHARACTERS = 1 << 13
BATCH_CHARACTERS = 1 << 15
"""Tokenised at once: a tokenizer takes up to 250 bytes for each on its way, and its threads keep a part of that."""
WHOLE_CHARACTERS = 100_000_000
_MADE, _MADE_A_CHARACTER = 1024, 64
"""A tokenizer makes no more than so many tokens, and so many for each character: the longest that Unicode's own forms
make of one is 33 bytes."""
_NAME_CHARACTERS = 1 << 10


def load_tokenizer(model_dir: Path) -> Any:
    """The tokenizer in a model's directory (a transformers tokenizer), never from a hub.

    Raises UsageError when there is none, when it cannot be read, when it needs code of its own, and as `require_files`.
    """
    if not model_dir.is_dir():
        raise UsageError(f"{model_dir}: no such model directory")
    if not any((model_dir / name).is_file() for name in VOCABULARY_FILES):
        raise UsageError(
            f"{model_dir}: no tokenizer here (tokenizer.json, or files of another kind); copy the model's own into it"
        )
    require_files(model_dir)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
    except BaseException as error:  # tokenizers raises bare Exception for a file that it cannot parse
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"{model_dir}: the tokenizer needs remote code, which is never run; take one of the transformers "
                "library, such as a tokenizer.json and a tokenizer_config.json without auto_map"
            ) from error
        raise UsageError(
            f"{model_dir}: the tokenizer cannot be read ({first_line(error)}); copy the model's own again"
        ) from error


def require_files(model_dir: Path) -> None:
    """Raise UsageError for what is neither a file nor a directory in a model's directory (a library that opens a FIFO
    waits for ever), and for files of a tokenizer that cannot be read, or are larger than any is."""
    templates = model_dir / _TEMPLATES
    for path in [*model_dir.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]:
        with contextlib.suppress(FileNotFoundError):  # a link that leads nowhere: who needs it says so
            if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
                raise UsageError(f"{path}: is not a regular file; take it away, or copy the model's own again")
    files = [path for name in (*VOCABULARY_FILES, *_SETTINGS) if (path := model_dir / name).is_file()]
    for path in [*files, *(templates.glob("*.jinja") if templates.is_dir() else ())]:
        require_itself(path)
        most = _VOCABULARY_BYTES if path.name in VOCABULARY_FILES else _SETTINGS_BYTES
        if path.stat().st_size > most:
            raise UsageError(
                f"{path}: larger than {most >> 20} MiB, as none of a tokenizer's files is; copy the model's own again"
            )


def fingerprint(model_dir: Path) -> str:
    """A digest that changes with the tokenizer in a directory: of the names and contents of its files, and of names,
    sizes and times of all that lies beside them. Nothing is parsed. Raises as `require_files`, OSError."""
    require_files(model_dir)
    templates = model_dir / _TEMPLATES
    found = hashlib.sha256()
    for path in sorted([*model_dir.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]):
        held: object = None
        with contextlib.suppress(FileNotFoundError):  # a link that leads nowhere
            if path.is_file() and (path.parent == templates or path.name in (*VOCABULARY_FILES, *_SETTINGS)):
                with opened(path) as stream:
                    held = hashlib.file_digest(stream, "sha256").hexdigest()
            else:
                status = path.stat()
                held = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        found.update(f"{str(path.relative_to(model_dir))!a} {held}\n".encode())
    return found.hexdigest()


def called(tokenizer: Any, id: int) -> str:
    """What the tokenizer calls a token, or would if it had it: no more than a note can show."""
    try:
        return str(tokenizer.convert_ids_to_tokens(id))[:_NAME_CHARACTERS]
    except Exception:  # each tokenizer has its own for an id that it lacks
        return f"id {id}"


def vocabulary_of(model_dir: Path) -> int | None:
    """How many ids the model in a directory has, by its configuration; None where it has none. A directory that is no
    model a run refuses by itself."""
    return _configured(model_dir, "vocab_size")


def positions_of(model_dir: Path) -> int | None:
    """For how many positions the model in a directory was made, by its configuration; None where it does not say."""
    found = _configured(model_dir, "max_position_embeddings")
    return None if found is None or found < 1 else found


def _configured(model_dir: Path, name: str) -> int | None:
    found = getattr(_configuration(model_dir), name, None)
    return None if found is None else int(found)


def _configuration(model_dir: Path) -> Any:
    """The configuration of the text model in a directory (a transformers configuration); None where it has none."""
    if not (model_dir / "config.json").is_file():
        return None
    raw = read_config(model_dir / "config.json")  # before a library builds lists of what it says
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many kinds here
        why = f"not a model configuration ({first_line(error)}); copy the model's own again"
        raise UsageError(f"{model_dir / 'config.json'}: {blamed(raw, error) or why}") from error
    return config.get_text_config()


def end_of_sequence(tokenizer: Any) -> int:
    name = tokenizer.name_or_path or "the tokenizer"
    if not tokenizer.get_vocab():
        raise UsageError(f"{name}: the tokenizer has no vocabulary; copy the model's own again")
    if tokenizer.eos_token_id is None:
        raise UsageError(f"{name}: the tokenizer has no end-of-sequence token; set eos_token in tokenizer_config.json")
    return int(tokenizer.eos_token_id)


def end_tokens(tokenizer: Any) -> tuple[int, ...]:
    """The tokens at which a model that is asked stops: the tokenizer's end-of-sequence token, and those that
    generation_config.json beside it names, or without that config.json, as transformers has it; in order.

    Raises UsageError for a file that cannot be read.
    """
    found = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    if not tokenizer.name_or_path:
        return tuple(sorted(found))
    named = (Path(tokenizer.name_or_path) / name for name in ("generation_config.json", "config.json"))
    file = next((file for file in named if file.is_file()), None)
    if file is None:
        return tuple(sorted(found))
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file}: cannot be read as JSON ({first_line(error)}); copy the model's own again") from error
    ids = config.get("eos_token_id") if isinstance(config, dict) else None
    for each in ids if isinstance(ids, list) else [] if ids is None else [ids]:
        if not isinstance(each, int) or isinstance(each, bool) or each < 0:
            raise UsageError(f"{file}: eos_token_id is {ids!r}; it must be a token's id or a list of them")
        found.add(each)
    return tuple(sorted(found))


def tokenizer_identity(tokenizer: Any) -> bytes:
    """Everything about a tokenizer that decides its tokens, as bytes for the cache's key; special tokens do so by
    their names too, which chat templates see."""
    settings = [tokenizer.eos_token_id, tokenizer.special_tokens_map, _splits_special_tokens(tokenizer)]
    named = json.dumps([*settings, _PIECE_CHARACTERS], sort_keys=True).encode()
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        del state["truncation"], state["padding"]  # set by whoever called it last; the calls here override both
        return named + json.dumps(state, sort_keys=True).encode()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        return named + b"".join(file.name.encode() + file.read_bytes() for file in files)


def _splits_special_tokens(tokenizer: Any) -> bool:
    """Whether the special tokens in a text are read as any other characters."""
    return bool(getattr(tokenizer, "split_special_tokens", False))


def is_panic(error: BaseException) -> bool:
    """Whether Rust gave up within `tokenizers`: such an error is none of Python's `Exception`."""
    return type(error).__name__ == "PanicException"


def encode(
    tokenizer: Any, texts: list[str], *, special_tokens: bool = False, places: Sequence[str] = ()
) -> list[list[int]]:
    """The tokens of each text, whole, with or without the special tokens that the tokenizer puts around it. Raises
    UsageError where it cannot make them, or makes many of little; `places` say where each text is."""
    name = tokenizer.name_or_path or "the tokenizer"
    try:
        found: list[list[int]] = tokenizer(
            texts,
            add_special_tokens=special_tokens,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
    except BaseException as error:  # tokenizers raises bare Exception, as for a word without a token and no unknown one
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if len(texts) > 1:  # which one?
            for index, text in enumerate(texts):
                encode(tokenizer, [text], special_tokens=special_tokens, places=places[index : index + 1])
        at = f" at {places[0]}" if places else ""
        raise UsageError(
            f"{name}: the tokenizer cannot tokenise the text{at} ({first_line(error)}); copy the model's own again, or "
            "take the text away"
        ) from error
    for index, (text, ids) in enumerate(zip(texts, found, strict=True)):
        if len(ids) > _MADE + _MADE_A_CHARACTER * len(text):
            at = f" at {places[index]}" if places else ""
            raise UsageError(
                f"{name}: the tokenizer makes {len(ids):,} tokens of the {len(text):,} characters of the text{at}; "
                "copy the model's own again"
            )
    return found


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
            and not _splits_special_tokens(tokenizer)  # added tokens are no borders then
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

    def pieces(self, texts: Iterable[str], place: str = "the text") -> Iterator[str]:
        """The same text, in pieces whose tokens, one after the other, are the tokens of the whole. Raises UsageError,
        with the `place`, for a word without an end."""
        buffer, reach = "", _PIECE_CHARACTERS
        for text in texts:
            buffer += text
            while len(buffer) > reach + _PIECE_CHARACTERS:
                cut = self._cut(buffer[:reach])
                if cut == 0:  # one word as long as that: look further
                    if reach > WHOLE_CHARACTERS:
                        raise UsageError(
                            f"{place}: has a word of more than {WHOLE_CHARACTERS} characters; put white space into it, "
                            "or take it away"
                        )
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


def one_of(places: Sequence[str]) -> str:
    """The place of one of several texts."""
    first, last = places[0], places[-1]
    return first if first == last else f"one of {first} to {last}"


def special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text by itself."""
    (plain,) = encode(tokenizer, ["a"])
    (full,) = encode(tokenizer, ["a"], special_tokens=True)
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
    place: str


def _whole(document: Document) -> str:
    pieces, characters = [], 0
    for piece in document.pieces:
        pieces.append(piece)
        characters += len(piece)
        if characters > WHOLE_CHARACTERS:
            more = " or more" if characters - len(piece) else ""
            raise UsageError(
                f"{document.place}: a document of {characters} characters{more}, and this tokenizer needs "
                f"documents whole ({WHOLE_CHARACTERS} at most); split it into several files or rows"
            )
    return "".join(pieces)


def _units(documents: Iterable[Document], cutter: _Cutter) -> Iterator[_Unit]:
    for document in documents:
        if not cutter.possible:
            yield _Unit(_whole(document), True, True, document.place)
            continue
        first, held = True, ""
        for piece in cutter.pieces(document.pieces, document.place):
            if held and piece.strip():
                yield _Unit(held, first, False, document.place)
                first, held = False, ""
            held += piece  # white space stays with what is before it, which may be the text's own end
        yield _Unit(held, first, True, document.place)


def _batched(units: Iterable[_Unit]) -> Iterator[list[_Unit]]:
    batch: list[_Unit] = []
    characters = 0
    for unit in units:
        batch.append(unit)
        characters += len(unit.text) + 64
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def token_pieces(
    path: Path,
    documents: Iterable[Document],
    tokenizer: Any,
    eos: int,
    tally: Tally,
    ends: Collection[int] = (),
    at: At = unsaid,
) -> Iterator[tuple[npt.NDArray[np.uint32], bool]]:
    """Yields tokens in order, and with each piece whether a document ends with it; `ends` are tokens at which a model
    stops, and `at` is told of what is tokenised next."""
    cutter = _Cutter(tokenizer)
    frame = Frame(tokenizer, special_tokens_around(tokenizer), eos, ends)
    blank = True
    number = 0
    head: list[int] = []
    midst = frame.midst()
    for batch in _batched(_units(documents, cutter)):
        texts, places = [unit.text for unit in batch], [unit.place for unit in batch]
        at("tokenising", one_of(places), sum(map(len, texts)))
        encoded = encode(tokenizer, texts, special_tokens=not cutter.possible, places=places)
        blank = blank and not any(unit.text.strip() for unit in batch)
        for unit, ids in zip(batch, encoded, strict=True):
            text = ids if cutter.possible else frame.unframed(ids)
            if text is None:
                found = frame.ended(ids)
            else:
                if unit.first:
                    start = frame.start(text)
                    head, text = text[:start], text[start:]
                    midst = frame.midst()
                midst.see(text[: frame.body(text)] if unit.last else text)
                found = [*(frame.opening if unit.first else []), *text]
                if unit.last:
                    stop, closing = frame.stop(text)
                    frame.tell(tally, number, head, text[stop:], text[:stop])
                    midst.tell(tally, number)
                    found = [*found[: len(found) - len(text) + stop], *closing]
            number += unit.last
            yield np.asarray(found, dtype=np.uint32), unit.last
    if blank:
        raise UsageError(f"{path}: no text at all in it, only white space or nothing; give it text to train on")
