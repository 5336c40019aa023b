"""`ssdplan data`: a look at the samples that a run would train on."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ssdplan.plans.views.progress_line import ProgressLine

from .parsing import options as of
from .parsing.command import Command, Group, Member, Section
from .parsing.types import COUNT, MODEL, PATH

if TYPE_CHECKING:
    from ssdplan.executor.data.preview import Preview

_USUAL_LENGTH = 1024
"""Tokens a row where nothing else is said: as `ssdplan profile` has it."""


@dataclass(frozen=True)
class Options:
    model: str
    data: Path
    sequence_length: int | None
    pack: bool
    data_format: str | None
    append_eos: bool
    token_cache: Path | None
    samples: int
    color: bool | None
    json: bool


def command() -> Group:
    about = "render a few samples, show what of them is learnt, and count all"
    return Group({"preview": Member(about, _preview)}, "ACTION")


def _preview() -> Command:
    read = (
        click.Option(
            ["--model"], type=MODEL, required=True, metavar="DIR|NAME", help="the model that would be trained"
        ),
        click.Option(
            ["--data"],
            type=PATH,
            required=True,
            metavar="PATH",
            help="a .txt, .jsonl, .parquet or .arrow file, or a directory",
        ),
        click.Option(
            ["--sequence-length"],
            type=COUNT,
            metavar="S",
            help=f"tokens a row [{_USUAL_LENGTH}, or as many as the model has positions, if that are fewer]",
        ),
        click.Option(["--pack/--no-pack"], default=True, help="let samples share rows, or give each a row of its own"),
        *of.data_options(),
    )
    output = (
        click.Option(["--samples"], type=COUNT, default=3, metavar="N", help="how many samples to render"),
        click.Option(
            ["--color/--no-color"],
            default=None,
            help="colour what is learnt, or put it between marks [colour on a terminal]",
        ),
        click.Option(["--json"], is_flag=True, help="print samples and counts as JSON"),
    )
    return Command(Options, call, sections=[Section("What is read, and how", read), Section("Output", output)])


def call(options: Options) -> int:
    from ssdplan.executor.data import previewing
    from ssdplan.executor.data.preview import describe, note_line
    from ssdplan.executor.model.directory.hub import find_model
    from ssdplan.plans.errors import UsageError

    cache = of.token_cache(options.token_cache)
    model = find_model(options.model)
    order = previewing.Order(
        model=str(model),
        data=str(options.data),
        sequence_length=options.sequence_length,
        usual_length=_USUAL_LENGTH,
        pack=options.pack,
        format=options.data_format,
        append_eos=options.append_eos,
        cache=None if cache is None else str(cache),
        samples=options.samples,
    )
    line = ProgressLine("data")
    try:
        preview = previewing.look_apart(order, lambda done, total: line(done / total, f"tokenising {options.data}"))
    finally:
        line.done()
    if options.json:
        preview = dataclasses.replace(preview, notes=(*preview.notes, *_of_model(model, preview)))
        print(json.dumps(preview.as_json(), indent=2, ensure_ascii=False))
    else:
        text = describe(preview, colour=sys.stdout.isatty() if options.color is None else options.color)
        getattr(sys.stdout, "steer", sys.stdout.write)(text + "\n")
        sys.stdout.flush()  # to look into a large model takes a while
        for note in _of_model(model, preview):
            print(note_line(note))
    if preview.refusal:
        sys.stdout.flush()
        raise UsageError(preview.refusal)
    return 0


def _of_model(model: Path, preview: "Preview") -> tuple[str, ...]:
    """What a run says against the model, or against rows for it that are like those of the preview: a note, or none."""
    if preview.refusal or not (model / "config.json").is_file():
        return ()
    from ssdplan.executor.batches import why_refused

    line = ProgressLine("data")
    line(0.0, f"running the layers of {model.name} on a few tokens")
    try:
        why = why_refused(model, preview)
    finally:
        line.done()
    return (f"a run refuses this: {why}",) if why else ()
