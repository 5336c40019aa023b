"""A look at the samples that a run would train on: how they are rendered, what of them is learnt, how long they are.

Owns what is counted and how it reads. It trains nothing and needs no torch.
"""

from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ssdplan.plans.printable import printable

from .text_data import TextData

_SHOWN_TOKENS = 400
_LEARNT, _GIVEN, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_OPEN, _CLOSE = "⟦", "⟧"


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a sample that are learnt, or that are not."""

    text: str
    learnt: bool


@dataclass(frozen=True)
class Shown:
    """A sample: where it is, its tokens before it is cut, how many are learnt, and the text of the first of them."""

    place: str
    tokens: int
    learnt_tokens: int
    parts: tuple[Part, ...]
    shown_tokens: int


@dataclass(frozen=True)
class Preview:
    """What `look` found; `lengths` are tokens a sample, by name of the statistic."""

    data: str
    files: int
    format: str
    rendered_by: str
    sequence_length: int
    packed: bool
    samples: int
    tokens: int
    learnt_tokens: int
    rows: int
    row_tokens_used: float
    cut: int
    left_out: int
    lengths: dict[str, float]
    notes: tuple[str, ...]
    shown: tuple[Shown, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def look(path: Path, data: TextData, tokenizer: Any, samples: int) -> Preview:
    """Counts all samples of `data` and renders the first `samples` of them."""
    lengths, learnt = data.lengths(), data.learnt()
    places = data.places(samples)
    shown = tuple(_shown(data, tokenizer, index, place) for index, place in enumerate(places))
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
        packed=data.pack,
        samples=len(lengths),
        tokens=int(lengths.sum()),
        learnt_tokens=int(learnt.sum()),
        rows=data.samples,
        row_tokens_used=data.row_tokens_used,
        cut=data.cut,
        left_out=data.left_out,
        lengths={
            "shortest": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": float(lengths.mean()),
            "90%": float(np.percentile(lengths, 90)),
            "99%": float(np.percentile(lengths, 99)),
            "longest": int(lengths.max()),
        },
        notes=tuple(data.notes()),
        shown=shown,
    )


def _shown(data: TextData, tokenizer: Any, index: int, place: str) -> Shown:
    ids, learnt = data.sample(index)
    few = min(len(ids), _SHOWN_TOKENS)
    borders = [0, *(np.flatnonzero(np.diff(learnt[:few])) + 1).tolist(), few]
    parts = tuple(
        Part(tokenizer.decode(ids[start:stop].tolist(), clean_up_tokenization_spaces=False), bool(learnt[start]))
        for start, stop in pairwise(borders)
        if start < stop
    )
    return Shown(place, len(ids), int(learnt[1:].sum()), parts, few)


def describe(preview: Preview, *, colour: bool) -> str:
    """The preview as text. What is learnt is green, or between ⟦ and ⟧ without `colour`; nothing else in it steers a
    terminal."""
    lines = []
    for number, sample in enumerate(preview.shown, start=1):
        lines.append(
            f"Sample {number}, {printable(sample.place)}: {sample.tokens} tokens, {sample.learnt_tokens} of them learnt"
            + (f", cut at {preview.sequence_length}" if _is_cut(preview, sample) else "")
        )
        lines.append("".join(_part(part, colour) for part in sample.parts))
        if sample.shown_tokens < sample.tokens:
            lines.append(f"... and {sample.tokens - sample.shown_tokens} tokens more")
        lines.append("")
    share = preview.learnt_tokens / preview.tokens if preview.tokens else 0.0
    rows = "samples share rows" if preview.packed else "one sample a row"
    figures = [
        ("format", f"{preview.format}, rendered by {preview.rendered_by}"),
        ("samples", f"{preview.samples:,} in {preview.files:,} file(s)"),
        ("tokens", f"{preview.tokens:,}, of which {preview.learnt_tokens:,} are learnt ({share:.1%})"),
        ("tokens a sample", ", ".join(f"{name} {value:,.0f}" for name, value in preview.lengths.items())),
        ("rows", f"{preview.rows:,} of {preview.sequence_length} tokens, {preview.row_tokens_used:.1%} full ({rows})"),
        ("cut", f"{preview.cut:,} sample(s) longer than a row"),
        ("left out", f"{preview.left_out:,} sample(s) of which nothing is learnt within a row"),
        *(("note", printable(note)) for note in preview.notes),
    ]
    return "\n".join([*lines, *(f"{name:<16}{value}" for name, value in figures)])


def _is_cut(preview: Preview, sample: Shown) -> bool:
    whole = preview.packed and preview.format == "text"
    return sample.tokens > preview.sequence_length and not whole


def _part(part: Part, colour: bool) -> str:
    text = printable(part.text)
    if colour:
        return f"{_LEARNT if part.learnt else _GIVEN}{text}{_RESET}"
    return f"{_OPEN}{text}{_CLOSE}" if part.learnt else text
