"""A preview of the samples that a run would train on: their text, the part of it that is learnt, their lengths.

Owns the counts and their words. It trains nothing and needs no torch.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ssdplan.plans.printable import printable

from .samples.notes import cut_off, left_out
from .text_data import TextData

_SHOWN_TOKENS = 400
_LEARNT, _GIVEN, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_OPEN, _CLOSE = "⟦", "⟧"
_CUT = "⟨cut⟩"


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a sample that are learnt, or that are not; none is of those that no row has (`cut`)."""

    text: str
    learnt: bool
    cut: bool


@dataclass(frozen=True)
class Shown:
    """A sample: where it is, its tokens before it is cut, how many of them lie in rows, on how many of those a run
    trains, and the text of the first `shown_tokens`."""

    place: str
    tokens: int
    row_tokens: int
    learnt_tokens: int
    parts: tuple[Part, ...]
    shown_tokens: int


@dataclass(frozen=True)
class Preview:
    """What `look` found; `lengths` are tokens a sample before it is cut, by name of the statistic.

    `tokens` are all that were read, and `learnt_before_cut` those of them that would be learnt if no row ended.
    `row_tokens` lie in rows, and a run trains on `learnt_tokens` of those. The others are `cut_off_tokens` of samples
    longer than a row, `left_out_tokens` of samples that are left out, and `left_over_tokens` of texts behind the last
    full row. `sequence_length_from` says where the length of a row comes from, and `refusal` why a run refuses the data
    (empty where it does not).
    """

    data: str
    files: int
    format: str
    rendered_by: str
    sequence_length: int
    sequence_length_from: str
    packed: bool
    samples: int
    tokens: int
    learnt_before_cut: int
    row_tokens: int
    learnt_tokens: int
    rows: int
    row_tokens_used: float
    cut: int
    cut_off_tokens: int
    left_out: int
    left_out_tokens: int
    left_over_tokens: int
    lengths: dict[str, float]
    notes: tuple[str, ...]
    refusal: str
    shown: tuple[Shown, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def look(
    path: Path,
    data: TextData,
    tokenizer: Any,
    samples: int,
    length_from: str = "as given",
) -> Preview:
    """Counts all samples of `data` and renders the first `samples` of them; `length_from` says why rows are so long."""
    lengths, (in_rows, learnt) = data.lengths(), data.in_rows()
    places = data.places(samples)
    shown = tuple(
        _shown(data, tokenizer, index, place, int(in_rows[index]), int(learnt[index]))
        for index, place in enumerate(places)
    )
    if data.format == "text":
        by = "the end-of-sequence token after each text"
    elif data.as_chat:
        by = "the model's chat template"
    else:
        by = "headings" if data.format == "alpaca" else "the completion behind the prompt"
    return Preview(
        data=str(path),
        files=len(data.files),
        format=data.format,
        rendered_by=by,
        sequence_length=data.sequence_length,
        sequence_length_from=length_from,
        packed=data.pack,
        samples=len(lengths),
        tokens=int(lengths.sum()),
        learnt_before_cut=int(data.learnt().sum()),
        row_tokens=int(in_rows.sum()),
        learnt_tokens=int(learnt.sum()),
        rows=data.samples,
        row_tokens_used=data.row_tokens_used,
        cut=data.cut,
        cut_off_tokens=data.cut_off,
        left_out=data.left_out,
        left_out_tokens=data.left_out_tokens,
        left_over_tokens=int(lengths.sum() - in_rows.sum()) - data.cut_off - data.left_out_tokens,
        lengths={
            "shortest": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": float(lengths.mean()),
            "90%": float(np.percentile(lengths, 90)),
            "99%": float(np.percentile(lengths, 99)),
            "longest": int(lengths.max()),
        },
        notes=tuple(data.notes()),
        refusal=data.refusal,
        shown=shown,
    )


def _shown(data: TextData, tokenizer: Any, index: int, place: str, in_rows: int, trained_on: int) -> Shown:
    ids, learnt = data.sample(index)
    learnt[in_rows:] = False
    few = min(len(ids), _SHOWN_TOKENS)
    borders = sorted({0, *(np.flatnonzero(np.diff(learnt[:few])) + 1).tolist(), min(in_rows, few), few})
    parts = tuple(
        Part(
            tokenizer.decode(ids[start:stop].tolist(), clean_up_tokenization_spaces=False),
            learnt=bool(learnt[start]),
            cut=start >= in_rows,
        )
        for start, stop in pairwise(borders)
    )
    return Shown(place, len(ids), in_rows, trained_on, parts, few)


def describe(preview: Preview, *, colour: bool) -> str:
    """The preview as text. What is learnt is green, or between ⟦ and ⟧ without `colour`, and ⟨cut⟩ stands before what
    no row has; nothing else in it steers a terminal."""
    lines = []
    for number, sample in enumerate(preview.shown, start=1):
        lines.append(
            f"Sample {number}, {printable(sample.place)}: {sample.tokens} tokens, {sample.learnt_tokens} of them learnt"
        )
        lines.append("".join(_parts(sample, colour)))
        if sample.shown_tokens < sample.tokens:
            lines.append(f"... and {sample.tokens - sample.shown_tokens} tokens more")
        if sample.row_tokens < sample.tokens:
            lines.append(_not_in_rows(preview, sample))
        lines.append("")
    rows = "samples share rows" if preview.packed else "one sample a row"
    figures = [
        ("format", f"{preview.format}, rendered by {preview.rendered_by}"),
        ("samples", f"{preview.samples:,} in {preview.files:,} file(s)"),
        ("tokens read", _share(preview.tokens, preview.learnt_before_cut, "would be learnt in rows of any length")),
        ("tokens in rows", _share(preview.row_tokens, preview.learnt_tokens, "are learnt")),
        ("tokens a sample", ", ".join(f"{name} {value:,.0f}" for name, value in preview.lengths.items())),
        ("row length", f"{preview.sequence_length} tokens, {preview.sequence_length_from}"),
        ("rows", f"{preview.rows:,}, {preview.row_tokens_used:.1%} full ({rows})"),
        ("cut", cut_off(preview.cut, preview.cut_off_tokens, preview.sequence_length)),
        ("left out", left_out(preview.left_out, preview.left_out_tokens)),
        *([("left over", _left_over(preview))] if preview.left_over_tokens else []),
    ]
    return "\n".join([*lines, *(_line(name, value) for name, value in figures), *map(note_line, preview.notes)])


def note_line(note: str) -> str:
    """A note as `describe` has it."""
    return _line("note", printable(note))


def _line(name: str, value: str) -> str:
    return f"{name:<16}{value}"


def _share(tokens: int, learnt: int, what: str) -> str:
    return f"{tokens:,}, of which {learnt:,} {what} ({learnt / tokens if tokens else 0.0:.1%})"


def _left_over(preview: Preview) -> str:
    where = "behind the last full row" if preview.rows else f"in all, fewer than a row of {preview.sequence_length}"
    return f"{preview.left_over_tokens:,} token(s) {where}"


def _not_in_rows(preview: Preview, sample: Shown) -> str:
    many = f"{sample.tokens - sample.row_tokens} of its {sample.tokens} tokens"
    if preview.packed and preview.format == "text":
        where = "they lie behind the last full row" if preview.rows else "the data fill no row"
        return f"{many} are not trained on: {where}"
    if sample.row_tokens == 0:
        return f"It is left out, since nothing of it is learnt within a row: {many} are not trained on"
    return f"{many} are cut off and not trained on: a row ends at {preview.sequence_length}"


def _parts(sample: Shown, colour: bool) -> Iterator[str]:
    cut = False
    for part in sample.parts:
        if part.cut and not cut:
            yield _CUT
        cut = part.cut
        yield _part(part, colour)


def _part(part: Part, colour: bool) -> str:
    text = printable(part.text)
    if colour:
        return f"{_LEARNT if part.learnt else _GIVEN}{text}{_RESET}"
    return f"{_OPEN}{text}{_CLOSE}" if part.learnt else text
