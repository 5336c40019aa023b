"""`ssdplan data`: a look at the samples that a run would train on."""

import argparse
import json
import sys

from ssdplan.plans.progress import ProgressLine

from . import options as of

_USUAL_LENGTH = 1024
"""Tokens a row where nothing else is said: as `ssdplan profile` has it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    about = "render a few samples, show what of them is learnt, and count all"
    words = f"{about[0].upper()}{about[1:]}."
    preview = actions.add_parser(
        "preview",
        help=about,
        description=words,
        formatter_class=of.Help,
        allow_abbrev=False,
    )
    preview.set_defaults(command=call)
    read = preview.add_argument_group("what is read, and how")
    read.add_argument(
        "--model", type=of.model, required=True, metavar="DIR|NAME", help="the model that would be trained"
    )
    read.add_argument(
        "--data",
        type=of.path,
        required=True,
        metavar="PATH",
        help="a .txt, .jsonl, .parquet or .arrow file, or a directory",
    )
    read.add_argument(
        "--sequence-length",
        type=of.count,
        metavar="S",
        help=f"tokens a row [{_USUAL_LENGTH}, or as many as the model has positions, if that are fewer]",
    )
    read.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let samples share rows, or give each a row of its own",
    )
    of.add_data_options(read)
    output = preview.add_argument_group("output")
    output.add_argument("--samples", type=of.count, default=3, metavar="N", help="to render")
    output.add_argument(
        "--color",
        action=argparse.BooleanOptionalAction,
        help="colour what is learnt, or put it between marks [colour on a terminal]",
    )
    output.add_argument("--json", action="store_true", help="print samples and counts as JSON")


def call(options: argparse.Namespace) -> int:
    from ssdplan.executor.data import previewing
    from ssdplan.executor.data.preview import describe
    from ssdplan.executor.hub import find_model

    cache = of.token_cache(options)
    order = previewing.Order(
        model=str(find_model(options.model)),
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
        print(json.dumps(preview.as_json(), indent=2, ensure_ascii=False))
    else:
        text = describe(preview, colour=sys.stdout.isatty() if options.color is None else options.color)
        getattr(sys.stdout, "steer", sys.stdout.write)(text + "\n")
    return 0
