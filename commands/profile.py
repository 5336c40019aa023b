"""`ssdplan profile`: this machine and a model measured, into a profile."""

import argparse
from contextlib import ExitStack
from pathlib import Path

from ssdplan.plans.progress import ProgressLine

from . import options as of


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=call)
    what = parser.add_argument_group("what plans can then use")
    what.add_argument(
        "--model", type=of.model, required=True, metavar="DIR|NAME", help="a Hugging Face model directory, or a name"
    )
    what.add_argument("--sequence-length", type=of.count, default=1024, metavar="S", help="tokens a row")
    what.add_argument(
        "--micro-batch-sizes", type=of.counts, default="1,2,4", metavar="B,B,...", help="rows a micro-batch, to measure"
    )
    what.add_argument(
        "--precision", choices=["bf16", "fp16", "fp32"], default="bf16", help="of the parameters in compute"
    )
    what.add_argument(
        "--freeze",
        action="append",
        default=[],
        metavar="PATTERN",
        help="do not train the parameters whose names match, such as 'model.layers.[0-3].*' or '*.mlp.*'; repeatable "
        "[all are trained]",
    )
    what.add_argument(
        "--allow-unused-weights",
        action="store_true",
        help="leave tensors of the model's files out that the model has no place for, instead of refusing them",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--device",
        default="cpu",
        metavar="cpu|cuda|cuda:N",
        help="cpu emulates a device in DRAM, cuda is a GPU, cuda:1 the second of several",
    )
    machine.add_argument(
        "--volume",
        type=of.path,
        action="append",
        metavar="PATH",
        help="a directory on the ssd to use, or a blank volume, as of ssdplan volume init; repeatable [.]",
    )
    machine.add_argument(
        "--endurance",
        type=of.nbytes,
        action="append",
        metavar="SIZE",
        help="what the drive's maker rates it to have written, such as 600TB; one for each --volume, or one for all "
        "[unknown]",
    )
    machine.add_argument(
        "--seconds",
        type=of.positive,
        metavar="N",
        help="how long measurements are repeated, at most, in all; fewer are less sure, and each is made once [68, and "
        "38 for each further volume]",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the profile as JSON")
    output.add_argument("-o", "--output", type=of.path, default=Path("profile.json"), metavar="FILE", help="where to")


def call(options: argparse.Namespace) -> int:
    of.require_engine()
    of.settle_process()
    from ssdplan.executor.checks import DTYPES
    from ssdplan.executor.device import open_device
    from ssdplan.executor.hub import find_model
    from ssdplan.executor.layers import Layers, MicroBatch
    from ssdplan.executor.model import open_model
    from ssdplan.executor.store.volumes import held_blank
    from ssdplan.executor.weights import Weights
    from ssdplan.plans.profile_text import describe_profile, suggested_host_memory
    from ssdplan.profiler.profile import ProfileLimits, profile
    from ssdplan.profiler.storage import SMALLEST_VOLUME

    of.require_writable(options.output)
    device = open_device(options.device)
    model = open_model(
        find_model(options.model),
        DTYPES[options.precision],
        freeze=options.freeze,
        allow_unused_weights=options.allow_unused_weights,
    )
    volumes = options.volume or [Path()]
    line = ProgressLine("profile")
    weights = Weights(model)
    with ExitStack() as held:
        held.callback(weights.close)
        held.callback(line.done)
        blanks = {volume: held.enter_context(held_blank(volume, SMALLEST_VOLUME)) for volume in dict.fromkeys(volumes)}
        measured = profile(
            model,
            lambda chunk: Layers(model, device.torch_device, head_chunk_tokens=chunk),
            MicroBatch,
            weights,
            device,
            volumes,
            sequence_length=options.sequence_length,
            micro_batch_sizes=options.micro_batch_sizes,
            progress=line,
            blanks=blanks,
            endurance=options.endurance or (),
            limits=ProfileLimits.within(options.seconds, volumes=len(volumes)) if options.seconds else ProfileLimits(),
        )
    measured.save(options.output)
    of.print_document(measured, describe_profile(measured), options.json)
    budget = suggested_host_memory(measured)
    line.note(f"written to {options.output}; next: ssdplan solve {options.output} --host-memory {budget}")
    return 0
