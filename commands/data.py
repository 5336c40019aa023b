"""`ssdplan data`: a look at the samples that a run would train on."""

import argparse
import json
import sys

from ssdplan.plans.progress import ProgressLine

from . import options as of


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
    read.add_argument("--sequence-length", type=of.count, default=1024, metavar="S", help="tokens a row")
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
    from ssdplan.executor.data.tokens import load_tokenizer, vocabulary_of
    from ssdplan.executor.hub import find_model

    model = find_model(options.model)
    tokenizer = load_tokenizer(model)
    line = ProgressLine("data")
    try:
        data = TextData(
            options.data,
            tokenizer,
            sequence_length=options.sequence_length,
            pack=options.pack,
            format=options.data_format,
            append_eos=options.append_eos,
            cache=of.token_cache(options),
            vocab_size=vocabulary_of(model),
            progress=lambda done, total: line(done / total, f"tokenising {options.data}"),
        )
    finally:
        line.done()
    preview = look(options.data, data, tokenizer, options.samples)
    if options.json:
        print(json.dumps(preview.as_json(), indent=2, ensure_ascii=False))
    else:
        text = describe(preview, colour=sys.stdout.isatty() if options.color is None else options.color)
        getattr(sys.stdout, "steer", sys.stdout.write)(text + "\n")
    return 0
