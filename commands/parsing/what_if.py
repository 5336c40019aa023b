"""What is planned for: a profile, or a what-if, whose machine and model are named. Owns its options, what they mean
together, and which of them a sweep names already. What a name stands for is the catalogue's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.documents.state_layout import Precision
from ssdplan.plans.errors import UsageError

from .types import COUNT, COUNTS, FIGURE, NAME, Choice

if TYPE_CHECKING:
    from ssdplan.planner.catalogue.whatif import Rows, WhatIf
    from ssdplan.planner.sweep import Values


@dataclass(frozen=True)
class Source:
    """The options that name it."""

    profile: Path | None
    host_memory: int | None
    ranks: int | None
    model: str | None
    gpu: str | None
    ssd: Sequence[str]
    cpu: str | None
    link: str | None
    nodes: int | None
    network: Sequence[str]
    figure: Sequence[tuple[str, float]]
    sequence_length: int | None
    micro_batch_sizes: tuple[int, ...] | None
    precision: Precision | None
    rows: "Rows | None"


def what_if_options() -> tuple[click.Option, ...]:
    """In the order in which help shows them."""
    return (
        click.Option(
            ["--model"],
            type=NAME,
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
        click.Option(
            ["--micro-batch-sizes"],
            type=COUNTS,
            metavar="B,B,...",
            help="rows a micro-batch [1,2,4, and more where quicker]",
        ),
        click.Option(
            ["--precision"],
            type=Choice(["bf16", "fp16", "fp32"]),
            help="format of the parameters in compute [bf16]",
        ),
        click.Option(
            ["--rows"],
            type=Choice(["whole", "any"]),
            help="whole: each row is one sequence without padding; any: the memory of masks for rows that sequences "
            "share, or that are padded [whole]",
        ),
    )


def with_swept(options: Source, swept: "Values") -> Source:
    """`options`, where what a sweep names need not be named again: they have its first value then, of models the first
    that is a name or whose file can be read."""
    from ssdplan.planner.sweep import NAMED

    first = next(filter(_may_be_meant, swept.values), swept.values[0]) if swept.name == "model" else swept.values[0]
    name = swept.name.replace("-", "_")
    if options.profile is not None or name not in (*NAMED, "host_memory") or getattr(options, name) not in _NOT_GIVEN:
        return options
    value = first if isinstance(first, str) else round(first)
    changed: dict[str, Any] = {name: [value] if name in ("ssd", "network") else value}
    return replace(options, **changed)


def _may_be_meant(model: float | str) -> bool:
    """Whether a model is a name, or a path to one. The sweep looks names up, and says why a value is refused."""
    from ssdplan.planner.catalogue.configs import is_path, shape_of_path

    try:
        if is_path(str(model)):
            shape_of_path(Path(str(model)))
    except UsageError:
        return False
    return True


_NOT_GIVEN: tuple[object, ...] = (None, [])
"""The value of an option that nobody gave; several values are a list."""


def source_of(options: Source, *, muon: bool = False) -> "WhatIf | Profile":
    """The profile that is named, or the machine and model that are, of a what-if to be trained by Muon or not. Raises
    UsageError."""
    from ssdplan.planner.catalogue.configs import is_path, shape_of_path
    from ssdplan.planner.catalogue.ranks import ranks_of
    from ssdplan.planner.catalogue.whatif import WhatIf

    given = {
        "--gpu": options.gpu,
        "--ssd": options.ssd,
        "--cpu": options.cpu,
        "--link": options.link,
        "--nodes": options.nodes,
        "--network": options.network,
        "--figure": options.figure,
        "--sequence-length": options.sequence_length,
        "--micro-batch-sizes": options.micro_batch_sizes,
        "--precision": options.precision,
        "--rows": options.rows,
    }
    if options.profile is not None:
        without_profile = [
            name for name, value in {"--model": options.model, **given}.items() if value not in _NOT_GIVEN
        ]
        if without_profile:
            raise UsageError(f"{without_profile[0]} is for a what-if, without a profile: {options.profile} says it all")
        return Profile.load(options.profile)
    if not options.model:
        raise UsageError("name a profile, or a what-if: --model NAME --gpu NAME --ssd NAME --host-memory SIZE")
    needed = {"--gpu": options.gpu, "--ssd": options.ssd, "--host-memory": options.host_memory}
    if missing := [name for name, value in needed.items() if value in _NOT_GIVEN]:
        there = is_path(options.model)
        measured = f"; or measure it with ssdplan profile {options.model}, and give solve the profile" if there else ""
        raise UsageError(f"--model {options.model}: a what-if also needs {', '.join(missing)}{measured}")
    assert options.gpu is not None and options.host_memory is not None, "neither is missing"
    return WhatIf(
        model=shape_of_path(Path(options.model)) if is_path(options.model) else options.model,
        gpu=options.gpu,
        ssds=options.ssd,
        host_memory_bytes=options.host_memory,
        cpu=options.cpu,
        link=options.link,
        precision=options.precision or "bf16",
        sequence_length=options.sequence_length or 1024,
        micro_batch_sizes=options.micro_batch_sizes,
        rows=options.rows or "whole",
        several=ranks_of(options.ranks, options.nodes),
        networks=options.network,
        muon=muon,
        figures=_figures(options.figure),
    )


def _figures(given: Sequence[tuple[str, float]]) -> dict[str, float]:
    figures = dict(given)
    if len(figures) < len(given):
        twice = next(name for name in figures if sum(name == each for each, _ in given) > 1)
        raise UsageError(f"--figure {twice}: is given twice")
    return figures
