"""Notes: what a user should know of samples that are not rendered as one might think.

Owns which kinds there are, how they are counted while samples are tokenised and kept beside the tokens, and how they
read. It decides nothing: a note tells, and an error refuses.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

OWN_TOKENS, DROPPED, CHANGED, UNREAD, MORE_UNREAD = "own tokens", "dropped", "changed", "unread", "unread besides"
BLANKS, OTHER_END, AGAIN, SPECIAL = "blanks around own tokens", "other end", "begins again", "special in message"
SEVERAL, MIDST, AT_START = "several of one", "in the midst", "at the start"
UNLEARNT, HELD_OUT, AMBIGUOUS = "unlearnt", "held out", "ambiguous"
"""The last: of a row that would do as several formats: an error where nobody said which is meant, and no note."""
_FIELDS = 12
"""So many fields that are not read are told of by name."""


@dataclass(frozen=True)
class Note:
    """Something that is so of `samples` samples, of which `first` is the first (from 0), and what it is of that one."""

    kind: str
    samples: int
    first: int
    detail: str


class Tally:
    """Counts as samples go by, in order."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Note] = {}
        self._unread = 0
        self._last_more = -1

    def add(self, kind: str, sample: int, detail: str) -> None:
        """`sample` is of that kind; fields that are not read are counted each for itself, the first few."""
        key = (kind, detail if kind == UNREAD else "")
        so_far = self._found.get(key)
        if kind == UNREAD and so_far is None:
            if self._unread == _FIELDS:
                if sample == self._last_more:
                    return  # it has several
                self._last_more = sample
                self.add(MORE_UNREAD, sample, detail)
                return
            self._unread += 1
        if so_far is None:
            self._found[key] = Note(kind, 1, sample, detail)
        else:
            self._found[key] = Note(kind, so_far.samples + 1, so_far.first, so_far.detail)

    def kept(self) -> bytes:
        """What `read_notes` reads."""
        ordered = sorted(self._found.values(), key=lambda note: (note.first, note.kind, note.detail))
        return json.dumps([astuple(note) for note in ordered]).encode()


def read_notes(kept: bytes) -> tuple[Note, ...]:
    return tuple(Note(*each) for each in json.loads(kept))


def words(notes: Iterable[Note], path: Path, total: int, place_of: Callable[[int], str]) -> list[str]:
    """The notes on data `path`, which have `total` samples; `place_of` says where a sample is."""
    return [
        f"{path}: {_about(note, f'{note.samples:,} of {total:,} sample(s)', place_of(note.first))}" for note in notes
    ]


def _about(note: Note, many: str, place: str) -> str:
    match note.kind:
        case "own tokens":
            return (
                f"{many} bring {note.detail} of their own where the tokenizer puts it too, first {place}; it is there "
                "once"
            )
        case "several of one":
            return (
                f"{many} bring {note.detail} of their own several times at their start or end, first {place}; it is "
                "there once"
            )
        case "in the midst":
            return (
                f"{many} have tokens in their midst that begin or end texts, first {note.detail} of {place}; they are "
                "trained on as they are: take them away, or split the samples there, unless a chat template wrote them"
            )
        case "at the start":
            return (
                f"{many} have tokens at their start that begin or end texts, first {note.detail} of {place}; they are "
                "trained on as they are: take them away"
            )
        case "blanks around own tokens":
            return (
                f"{many} have white space outside special tokens of their own, before the first token or behind the "
                f"end, first {place}; it is taken away"
            )
        case "other end":
            return (
                f"{many} bring {note.detail} of their own at the end, at which the model stops, first {place}; no "
                "other end is put behind it"
            )
        case "begins again":
            return (
                f"{many} bring {note.detail} of their own between prompt and completion, first {place}; it is learnt "
                "there, and a model that is asked sees none there: take it away"
            )
        case "special in message":
            return (
                f"{many} have special tokens in the text of messages, beside those that the chat template writes, "
                f"first {note.detail} of {place}; they are trained on as they are: take them away, or write them "
                "otherwise"
            )
        case "held out":
            return (
                f"{many} say that they are held-out data ({note.detail}), first {place}; they are read like the "
                "others: take them away, or give them by --eval-data"
            )
        case "dropped":
            return (
                f"the chat template leaves messages out in {many}, first {note.detail} of {place}; nothing of them is "
                "trained on: put what they say into messages that it writes, or change the template"
            )
        case "changed":
            return (
                f"the chat template does not write all of a message, or not as it is, in {many}, first {note.detail} "
                f"of {place}; what it writes is trained on: `ssdplan data preview` shows it"
            )
        case "unread":
            return (
                f"the field `{note.detail}` of {many} is not read, first {place}; put what it says into the fields "
                "that are, or take it away"
            )
        case "unread besides":
            return (
                f"other fields of {many} are not read either, first `{note.detail}` of {place}; put what they say into "
                "the fields that are, or take them away"
            )
        case "unlearnt":
            return (
                f"{many} have messages of a role that is not `assistant`, and nothing of those is learnt, first "
                f"{note.detail} of {place}; where the model is to say them, call the role `assistant`"
            )
    raise AssertionError(note.kind)


def no_end(path: Path, note: Note, total: int, place: str, ends: Iterable[str]) -> str:
    """That `note.samples` learn no token at which a model stops; `ends` are those."""
    return (
        f"{path}: {note.samples:,} of {total:,} sample(s) learn no end token ({', '.join(ends)}), first {place}; a "
        "model that is trained so does not learn to stop: let the chat template write one behind what the assistant "
        "says, within its {% generation %} marks if it has any, or give --append-eos"
    )


def cut_before_end(path: Path, note: Note, total: int, place: str, ends: Iterable[str]) -> str:
    """That `note.samples` would learn one of `ends`, but for their row, which ends before it."""
    return (
        f"{path}: {note.samples:,} of {total:,} sample(s) are cut before an end token ({', '.join(ends)}) is learnt, "
        f"first {place}; a model that is trained so does not learn to stop behind texts that are as long: take a "
        "longer --sequence-length, or split the samples"
    )


def cut_off(samples: int, tokens: int, row: int) -> str:
    """That `samples` are longer than a row of `row` tokens, which cuts off `tokens` of them in all."""
    if samples == 0:
        return f"no sample is cut at the end of a row of {row:,} tokens"
    many, theirs = ("1 sample is", "its") if samples == 1 else (f"{samples:,} samples are", "their")
    verb = "is" if tokens == 1 else "are"
    return f"{many} longer than a row of {row:,} tokens: {tokens:,} of {theirs} tokens {verb} cut off"


def left_out(samples: int, tokens: int) -> str:
    """That no row has `samples`, which have `tokens` in all."""
    if samples == 0:
        return "no sample is left out"
    many, them = ("1 sample is", "it") if samples == 1 else (f"{samples:,} samples are", "them")
    what = "token" if tokens == 1 else "tokens"
    return f"{many} left out, since nothing of {them} is learnt within a row ({tokens:,} {what})"
