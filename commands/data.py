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
    from ssdplan.executor.data.preview import describe, look
    from ssdplan.executor.data.text_data import TextData
    from ssdplan.executor.data.tokens import load_tokenizer, positions_of, vocabulary_of
    from ssdplan.executor.hub import find_model

    model = find_model(options.model)
    tokenizer = load_tokenizer(model)
    length, length_from = options.sequence_length, "as given"
    if length is None:
        length, length_from = _USUAL_LENGTH, "since --sequence-length is not given"
        if (most := positions_of(model)) is not None and most < length:
            length, length_from = most, f"the model's max_position_embeddings, {length_from}"
    line = ProgressLine("data")
    try:
        data = TextData(
            options.data,
            tokenizer,
            sequence_length=length,
            pack=options.pack,
            format=options.data_format,
            append_eos=options.append_eos,
            cache=of.token_cache(options),
            vocab_size=vocabulary_of(model),
            progress=lambda done, total: line(done / total, f"tokenising {options.data}"),
        )
    finally:
        line.done()
    preview = look(options.data, data, tokenizer, options.samples, length_from)
    if options.json:
        print(json.dumps(preview.as_json(), indent=2, ensure_ascii=False))
    else:
        text = describe(preview, colour=sys.stdout.isatty() if options.color is None else options.color)
        getattr(sys.stdout, "steer", sys.stdout.write)(text + "\n")
    return 0
