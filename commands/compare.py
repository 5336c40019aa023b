"""`ssdplan compare`: the same training by ssdplan, plain PyTorch and DeepSpeed."""

import sys
from dataclasses import dataclass
from pathlib import Path

import click

from ssdplan.plans.errors import SsdplanError
from ssdplan.plans.views.progress_line import ProgressLine

from .parsing import kinds, outputs
from .parsing import options as of
from .parsing.command import Command, Section
from .parsing.types import COUNT, DIRECTORY, NAMES, PATH, POSITIVE, RESIDENCY, SIZE, SIZES, Choice
from .parsing.without_gradients import asked_zeroth_order


@dataclass(frozen=True)
class Options:
    model: Path | None
    shape: str | None
    data: Path | None
    sequence_length: int
    micro_batch_size: int
    micro_batches: int
    precision: str
    device: str
    optimizer: str
    directions: int
    arms: tuple[str, ...]
    host_memory: tuple[int, ...]
    recompute: tuple[str, ...]
    device_memory: int | None
    residency: dict[str, float]
    steps: int
    rounds: int
    timeout: float
    volume: Path
    work: Path | None
    plots: Path | None
    csv: Path | None
    json: bool
    given: frozenset[str] = frozenset()


def command() -> Command:
    trained = (
        click.Option(
            ["--model"], type=DIRECTORY, metavar="DIR", help="a Hugging Face model directory; or give --shape"
        ),
        click.Option(
            ["--shape"],
            metavar="NAME|NAME=N,...",
            help="a random Llama: small, medium, or hidden=N,layers=N,heads=N and, if need be, vocab=N,intermediate=N",
        ),
        click.Option(["--data"], type=PATH, metavar="FILE", help="text for --model, .txt or .jsonl [random tokens]"),
        click.Option(["--sequence-length"], type=COUNT, default=256, metavar="S", help="tokens a row"),
        click.Option(["--micro-batch-size"], type=COUNT, default=1, metavar="B", help="rows a micro-batch"),
        click.Option(["--micro-batches"], type=COUNT, default=1, metavar="N", help="micro-batches a step"),
        click.Option(
            ["--precision"],
            type=Choice(["bf16", "fp32"]),
            default="bf16",
            help="format of weights and activations; fp32 where a processor multiplies bf16 slowly",
        ),
        click.Option(
            ["--device"],
            type=Choice(["cpu", "cuda"]),
            default="cpu",
            help="where all arms compute; on cuda without DeepSpeed",
        ),
        click.Option(
            ["--optimizer"],
            type=Choice(["adamw", "mezo"]),
            default="adamw",
            help="mezo: without gradients; torch then has all parameters and copies in memory, and the others are left "
            "out",
        ),
        click.Option(
            ["--directions"], type=COUNT, default=1, metavar="K", help="with mezo, random directions of a step"
        ),
    )
    ways = (
        click.Option(
            ["--arms"],
            type=NAMES,
            default="torch,torch-checkpointing,deepspeed-fast,deepspeed-lean,ssdplan",
            metavar="ARM,ARM,...",
            help="the arms to compare",
        ),
        click.Option(
            ["--host-memory"],
            type=SIZES,
            default=(),
            metavar="SIZE,...",
            help="budgets of the arm ssdplan, which runs once for each [a half of what was free]",
        ),
        click.Option(
            ["--recompute"],
            type=NAMES,
            default="auto",
            metavar="HOW,HOW,...",
            help="what backward recomputes in the arm ssdplan, which runs once for each: auto, all, none, paper",
        ),
        click.Option(
            ["--device-memory"],
            type=SIZE,
            metavar="SIZE",
            help="the most device memory that the arm ssdplan may take, as in ssdplan solve [what it takes by itself]",
        ),
        click.Option(
            ["--residency"],
            type=RESIDENCY,
            default=dict,
            show_default=False,
            metavar="WHAT=F,WHAT=F,...",
            help="where states of the arm ssdplan live, as in ssdplan solve: optimizer=0 is all on the ssd [the best]",
        ),
        click.Option(
            ["--steps"], type=COUNT, default=6, metavar="N", help="steps of a process; the first does not count"
        ),
        click.Option(["--rounds"], type=COUNT, default=3, metavar="N", help="processes of each arm, in turns"),
        click.Option(
            ["--timeout"], type=POSITIVE, default=1800.0, metavar="SECONDS", help="how long one process may take"
        ),
    )
    places = (
        click.Option(
            ["--volume"],
            type=DIRECTORY,
            default=Path(),
            metavar="DIR",
            help="a directory on the ssd to use, for all that is made",
        ),
        click.Option(
            ["--work"],
            type=DIRECTORY,
            metavar="DIR",
            help="keep model, plans, logs and metrics here [removed with the rest]",
        ),
    )
    output = (
        click.Option(["--plots"], type=DIRECTORY, metavar="DIR", help="also draw it here (PNG) [none]"),
        of.csv_option("also write the figures of each arm here"),
        click.Option(["--json"], is_flag=True, help="print the figures as JSON"),
    )
    return Command(
        Options,
        call,
        tells_given=True,
        sections=[
            Section("What is trained", trained),
            Section("In which ways, and how often", ways),
            Section("Places", places),
            Section("Output", output),
        ],
    )


def call(options: Options) -> int:
    of.require_engine()
    outputs.require_writable(options.csv, "--csv", kinds.TABLE)
    outputs.require_folder(options.plots, "--plots", ".png")
    outputs.require_folder(options.work, "--work")
    outputs.require_apart({"--csv": options.csv, "--plots": options.plots, "--work": options.work})
    mezo = options.optimizer == "mezo"
    zeroth_order = asked_zeroth_order(options.given, mezo=mezo, directions=options.directions, masters="fp32")
    from ssdplan.rivals.arms import Batch
    from ssdplan.rivals.compare import Request, compare

    line = ProgressLine("compare")
    try:
        found = compare(
            Request(
                shape=options.shape,
                model=options.model,
                data=options.data,
                arms=options.arms,
                host_memory=options.host_memory,
                recompute=options.recompute,
                device_memory=options.device_memory,
                residency=options.residency,
                batch=Batch(
                    options.sequence_length,
                    options.micro_batch_size,
                    options.micro_batches,
                    options.precision,
                    options.device,
                    zeroth_order.directions if zeroth_order else 0,
                ),
                steps=options.steps,
                rounds=options.rounds,
                volume=options.volume,
                work=options.work,
                timeout=options.timeout,
            ),
            line,
        )
    finally:
        line.done()
    from ssdplan.rivals.comparison_text import arms_frame, describe_comparison

    of.print_document(found, describe_comparison(found), options.json)
    if options.csv:
        of.write_table(arms_frame(found), options.csv)
    if options.plots:
        from ssdplan.rivals.picture import write_picture

        print(f"written to {write_picture(found, options.plots)}", file=sys.stderr)
    return SsdplanError.exit_code if found.failed else 0
