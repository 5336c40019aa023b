"""`ssdplan compare`: the same training by ssdplan, plain PyTorch and DeepSpeed."""

import argparse
import sys
from pathlib import Path

from ssdplan.plans.errors import SsdplanError
from ssdplan.plans.progress import ProgressLine

from . import options as of


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=call)
    trained = parser.add_argument_group("what is trained")
    trained.add_argument("--model", type=of.path, metavar="DIR", help="a Hugging Face model directory, or --shape")
    trained.add_argument(
        "--shape",
        metavar="NAME|NAME=N,...",
        help="a random Llama: small, medium, or hidden=N,layers=N,heads=N and, if need be, vocab=N,intermediate=N",
    )
    trained.add_argument(
        "--data", type=of.path, metavar="FILE", help="text for --model, .txt or .jsonl [random tokens]"
    )
    trained.add_argument("--sequence-length", type=of.count, default=256, metavar="S", help="tokens a row")
    trained.add_argument("--micro-batch-size", type=of.count, default=1, metavar="B", help="rows a micro-batch")
    trained.add_argument("--micro-batches", type=of.count, default=1, metavar="N", help="micro-batches a step")
    trained.add_argument(
        "--precision",
        choices=("bf16", "fp32"),
        default="bf16",
        help="of weights and activations; fp32 where a processor multiplies bf16 slowly",
    )
    trained.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where all arms compute; on cuda without DeepSpeed"
    )
    ways = parser.add_argument_group("in which ways, and how often")
    ways.add_argument(
        "--arms",
        type=of.names,
        default="torch,torch-checkpointing,deepspeed-fast,deepspeed-lean,ssdplan",
        metavar="ARM,ARM,...",
        help="what to compare",
    )
    ways.add_argument(
        "--host-memory",
        type=of.sizes,
        default=(),
        metavar="SIZE,...",
        help="budgets of the arm ssdplan, which runs once for each [a half of what was free]",
    )
    ways.add_argument(
        "--device-memory",
        type=of.nbytes,
        metavar="SIZE",
        help="the most that the arm ssdplan may take of the device, as ssdplan solve [what it takes by itself]",
    )
    ways.add_argument("--steps", type=of.count, default=6, metavar="N", help="of a process; the first does not count")
    ways.add_argument("--rounds", type=of.count, default=3, metavar="N", help="processes of each arm, in turns")
    ways.add_argument("--timeout", type=of.positive, default=1800.0, metavar="SECONDS", help="of one process")
    places = parser.add_argument_group("places")
    places.add_argument(
        "--volume",
        type=of.path,
        default=Path(),
        metavar="DIR",
        help="a directory on the ssd to use, for all that is made",
    )
    places.add_argument(
        "--work", type=of.path, metavar="DIR", help="keep model, plans, logs and metrics here [removed with the rest]"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--plots", type=of.path, metavar="DIR", help="also draw it here (PNG) [none]")
    output.add_argument("--json", action="store_true", help="print the figures as JSON")


def call(options: argparse.Namespace) -> int:
    of.require_engine()
    from ssdplan.rivals.arms import Batch
    from ssdplan.rivals.compare import Request, compare
    from ssdplan.rivals.comparison import describe_comparison

    line = ProgressLine("compare")
    try:
        found = compare(
            Request(
                shape=options.shape,
                model=options.model,
                data=options.data,
                arms=options.arms,
                host_memory=options.host_memory,
                device_memory=options.device_memory,
                batch=Batch(
                    options.sequence_length,
                    options.micro_batch_size,
                    options.micro_batches,
                    options.precision,
                    options.device,
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
    of.print_document(found, describe_comparison(found), options.json)
    if options.plots:
        from ssdplan.rivals.picture import write_picture

        print(f"written to {write_picture(found, options.plots)}", file=sys.stderr)
    return SsdplanError.exit_code if found.failed else 0
