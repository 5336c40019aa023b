"""The options of a what-if: a machine and a model by their names in the catalogue. Owns no value's meaning."""

import click

from .types import COUNT, COUNTS, FIGURE, Choice


def what_if_options() -> tuple[click.Option, ...]:
    """In the order in which help shows them."""
    return (
        click.Option(
            ["--model"],
            metavar="NAME|PATH",
            help="a model's shape, such as llama-3.1-70b; or a directory with config.json, or such a file, of which "
            "no weight is read",
        ),
        click.Option(["--gpu"], metavar="NAME", help="the GPU, such as rtx-4090; none emulates a device in DRAM"),
        click.Option(
            ["--ssd"],
            multiple=True,
            metavar="NAME[:SIZE][*K]",
            help="K drives, at most 16 in all, such as 'samsung-990-pro:4TB*2' (in quotes, for shells); repeatable",
        ),
        click.Option(
            ["--cpu"], metavar="NAME", help="the processor and its DRAM [ryzen-9-7950x; alone, ryzen-7-7840u]"
        ),
        click.Option(
            ["--link"], metavar="NAME", help="the link between host and GPU, such as pcie-4.0-x16 [the GPU's own]"
        ),
        click.Option(
            ["--nodes"],
            type=COUNT,
            metavar="N",
            help="machines, each with its part of --ranks, and with the processor and SSDs that are named; each rank "
            "has a GPU [1]",
        ),
        click.Option(
            ["--network"],
            multiple=True,
            metavar="NAME",
            help="what ranks exchange over: between machines, such as 10gbe, and between the GPUs of one, such as "
            "nvlink-a100; repeatable, once for each [between GPUs, their links]",
        ),
        click.Option(
            ["--figure"],
            type=FIGURE,
            multiple=True,
            metavar="NAME=VALUE",
            help="a figure instead of the catalogue's; repeatable",
        ),
        click.Option(["--sequence-length"], type=COUNT, metavar="S", help="tokens a row [1024]"),
        click.Option(["--micro-batch-sizes"], type=COUNTS, metavar="B,B,...", help="rows a micro-batch [1,2,4]"),
        click.Option(
            ["--precision"],
            type=Choice(["bf16", "fp16", "fp32"]),
            help="format of the parameters in compute [bf16]",
        ),
    )
