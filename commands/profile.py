"""`ssdplan profile`: this machine and a model measured, into a profile."""

import io
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click

from ssdplan.executor.ranks.place import PATIENCE_SECONDS, Place, named_rank, place_of, settle_rank
from ssdplan.plans.errors import UsageError
from ssdplan.plans.units import format_bytes
from ssdplan.plans.views.progress_line import ProgressLine

from .parsing import kinds, outputs
from .parsing import options as of
from .parsing.command import Command, Section
from .parsing.types import COUNT, COUNTS, MODEL, PATH, POSITIVE, SIZE, Choice
from .ranks.of_run import dealt, once


@dataclass(frozen=True)
class Options:
    model: str
    sequence_length: int
    micro_batch_sizes: tuple[int, ...]
    precision: str
    optimizer: str
    freeze: Sequence[str]
    allow_unused_weights: bool
    compression_error: bool
    rows: str
    device: str
    volume: Sequence[Path]
    endurance: Sequence[int]
    seconds: float | None
    emulate: str | None
    rungs_of: Path | None
    ranks: int | None
    json: bool
    quiet: bool
    output: Path


def command() -> Command:
    what = (
        click.Option(
            ["--model"],
            type=MODEL,
            required=True,
            metavar="DIR|NAME",
            help="a Hugging Face model directory, or a name",
        ),
        click.Option(["--sequence-length"], type=COUNT, default=1024, metavar="S", help="tokens a row"),
        click.Option(
            ["--micro-batch-sizes"],
            type=COUNTS,
            default="1,2,4",
            metavar="B,B,...",
            help="the numbers of rows a micro-batch to measure",
        ),
        click.Option(
            ["--precision"],
            type=Choice(["bf16", "fp16", "fp32"]),
            default="bf16",
            help="format of the parameters in compute",
        ),
        click.Option(
            ["--optimizer"],
            type=Choice(["adamw", "muon"]),
            default="adamw",
            help="what plans are to train by; muon updates the matrices of blocks, which are states of their own then, "
            "and adamw the rest; plans for mezo are made of a profile for adamw",
        ),
        click.Option(
            ["--freeze"],
            multiple=True,
            metavar="PATTERN",
            help="do not train the parameters whose names match, such as 'model.layers.[0-3].*' or '*.mlp.*'; "
            "repeatable [all are trained]",
        ),
        click.Option(
            ["--allow-unused-weights"],
            is_flag=True,
            help="leave out the tensors of the model's files that the model has no place for, instead of refusing them",
        ),
        click.Option(
            ["--compression-error"],
            is_flag=True,
            help="measure saved activations in int8 too, for solve --activations int8, and how far off each block's "
            "gradients are then; this reads the whole model once",
        ),
        click.Option(
            ["--rows"],
            type=Choice(["any", "whole"]),
            default="any",
            help="whole: runs have rows of one sequence without padding alone, and plans no memory for masks, which "
            "grow with the square of the row",
        ),
    )
    machine = (
        click.Option(
            ["--device"],
            default="cpu",
            metavar="cpu|cuda|cuda:N",
            help="cpu emulates a device in DRAM, cuda is a GPU, cuda:1 the second of several",
        ),
        click.Option(
            ["--volume"],
            type=PATH,
            multiple=True,
            metavar="PATH",
            help="a directory on the ssd to use, or a blank volume that ssdplan volume init made; repeatable [.]",
        ),
        click.Option(
            ["--endurance"],
            type=SIZE,
            multiple=True,
            metavar="SIZE",
            help="the endurance that the drive's maker rates it for, such as 600TB written; one for each --volume, or "
            "one for all [unknown]",
        ),
        click.Option(
            ["--seconds"],
            type=POSITIVE,
            metavar="N",
            help="how long measurements are repeated, at most, in all; with fewer seconds they are less sure, and each "
            "is made once [82, and 38 for each further volume]",
        ),
        click.Option(
            ["--emulate"],
            metavar="like=MODEL,gpu=NAME,ssd=NAME,...",
            help="measure nothing: write a small stand-in for a model of the catalogue to --model DIR, unless it is "
            "there, and a profile by which each of its operations lasts as on that machine; --model NAME is then a "
            "directory of that name where you are, and none on the hub; besides link=NAME, cpu=NAME, slower=K, how "
            "many times as long [4], and smaller=S, what its widths are divided by [16]",
        ),
        click.Option(
            ["--rungs-of"],
            type=PATH,
            metavar="PROFILE",
            help="with --emulate: a profile of the stand-in itself, which says what its blocks could keep of their "
            "activations [everything is recomputed]",
        ),
        click.Option(
            ["--ranks"],
            type=COUNT,
            metavar="R",
            help="start so many ranks on this machine, which measure at once, and what they exchange; on several "
            "machines torchrun starts them [1]",
        ),
    )
    output = (
        click.Option(["--json"], is_flag=True, help="print the profile as JSON"),
        of.quiet_option(),
        click.Option(
            ["-o", "--output"],
            type=PATH,
            default=Path("profile.json"),
            metavar="FILE",
            help="where the profile is written",
        ),
    )
    return Command(
        Options,
        call,
        sections=[
            Section("What plans can then use", what),
            Section("Machine", machine),
            Section("Output", output),
        ],
    )


def call(options: Options) -> int:
    of.require_engine()
    if options.emulate is not None:
        return _emulate(options, options.emulate)
    if options.rungs_of is not None:
        raise UsageError("--rungs-of: it says what a stand-in could keep; give --emulate too, or leave it out")
    of.settle_process()
    place = place_of(os.environ)
    if (options.ranks or 1) > 1 and not place:
        from ssdplan.executor.ranks.launcher import launch

        return launch(options.ranks or 1, of.said_words())
    if place:
        settle_rank(place)
    with named_rank(place.rank if place else None), once(place):
        return _measured(options, place)


def _measured(options: Options, place: Place | None) -> int:
    """`place`: of one of several ranks."""
    from ssdplan.executor.device.device import open_device
    from ssdplan.executor.device.tensors import DTYPES
    from ssdplan.executor.model.directory.hub import find_model
    from ssdplan.executor.model.layers import Layers, MicroBatch
    from ssdplan.executor.model.model import open_model
    from ssdplan.executor.model.packed import require_kernels
    from ssdplan.executor.model.weights import Weights
    from ssdplan.executor.optimizer.adamw_on_device import ready_update
    from ssdplan.executor.optimizer.muon import ready_matrix_update
    from ssdplan.executor.optimizer.passes import perturb
    from ssdplan.executor.ranks.group import joined
    from ssdplan.executor.store.volumes import held_blank
    from ssdplan.executor.zeroth_order import table_of
    from ssdplan.plans.views.profile_text import describe_profile, suggested_host_memory
    from ssdplan.profiler.profile import ProfileLimits, profile
    from ssdplan.profiler.storage import SMALLEST_VOLUME

    outputs.require_writable(options.output, "-o", kinds.PROFILE)
    name = f"cuda:{place.local_rank}" if place and options.device == "cuda" else options.device
    device = open_device(name)
    if options.compression_error:
        require_kernels(device.torch_device)
    model = open_model(
        find_model(options.model),
        DTYPES[options.precision],
        freeze=options.freeze,
        allow_unused_weights=options.allow_unused_weights,
        muon=options.optimizer == "muon",
    )
    named = options.volume or [Path()]
    mine = dealt(named, place)
    volumes = [named[number] for number in mine]
    rated = options.endurance
    endurance = [rated[number] for number in mine] if len(rated) == len(named) else rated
    line = ProgressLine("profile", io.StringIO() if place and place.rank else None)
    weights = Weights(model)
    with ExitStack() as held:
        ranks = held.enter_context(joined(place, device.kind, PATIENCE_SECONDS + (options.seconds or 300.0)))
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
            endurance=endurance,
            limits=ProfileLimits.within(options.seconds, volumes=len(volumes)) if options.seconds else ProfileLimits(),
            int8=options.compression_error,
            perturb=perturb,
            make_device_update=ready_update,
            make_matrix_update=ready_matrix_update,
            ranks=ranks,
            local_ranks=place.local_size if place else 1,
            table=table_of(model),
            whole_rows=options.rows == "whole",
        )
        if ranks.rank:
            return 0
    measured.save(options.output)
    if options.quiet:
        return 0
    of.print_document(measured, describe_profile(measured), options.json)
    budget = suggested_host_memory(measured)
    line.note(f"written to {options.output}; next: ssdplan solve {options.output} --host-memory {budget}")
    return 0


def _emulate(options: Options, wanted: str) -> int:
    """The stand-in, unless it is there, and its profile."""
    from ssdplan.planner import emulation

    meaningless = {
        "--device": options.device != "cpu",
        "--freeze": options.freeze,
        "--compression-error": options.compression_error,
        "--seconds": options.seconds,
        "--endurance": options.endurance,
        "a second --volume": len(options.volume) > 1,
        "--ranks": options.ranks,
        "--rows": options.rows != "any",
    }
    for name, given in meaningless.items():
        if given:
            why = "an emulated machine is made of DRAM and of one volume, and nothing is measured"
            raise UsageError(f"{name}: --emulate has no use for it, as {why}; leave it out")
    if options.optimizer != "adamw":
        raise UsageError(f"--optimizer {options.optimizer}: --emulate makes stand-ins for adamw and mezo alone")
    if options.precision == "fp16":
        raise UsageError("--precision fp16: a random stand-in overflows in it; take bf16 or fp32")
    request = emulation.Request(
        **emulation.parse(wanted),
        precision="fp32" if options.precision == "fp32" else "bf16",
        sequence_length=options.sequence_length,
        micro_batch_sizes=options.micro_batch_sizes,
    )
    shape = emulation.shape_of(request)
    outputs.require_writable(options.output, "-o", kinds.PROFILE)
    outputs.require_apart({"--rungs-of": options.rungs_of, "-o": options.output})
    volume = (list(options.volume) or [Path()])[0]
    if not volume.is_dir():
        raise UsageError(f"{volume}: --emulate takes a directory to write states to")
    of.settle_process()
    from ssdplan.executor.device.tensors import DTYPES
    from ssdplan.executor.model.directory.random_model import Shape, write_random_model
    from ssdplan.executor.model.model import open_model
    from ssdplan.executor.zeroth_order import table_of
    from ssdplan.plans.documents.profile import Profile
    from ssdplan.plans.views.profile_text import describe_profile
    from ssdplan.profiler.here import this_machine

    directory = Path(options.model)
    if not directory.exists():
        made = Shape(
            hidden=shape.hidden,
            layers=shape.blocks,
            vocab=shape.vocab,
            intermediate=shape.intermediate,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            tied=shape.tied,
            longest=max(options.sequence_length // request.smaller, 2),
        )
        ProgressLine("profile").note(f"the stand-in for {request.like} is written to {directory.resolve()}")
        write_random_model(made, directory, dtype=DTYPES[request.precision])
    model = open_model(directory, DTYPES[request.precision])
    found = (model.hidden_size, model.vocab_size, len(model.layers) - 2)
    if found != (shape.hidden, shape.vocab, shape.blocks):
        raise UsageError(
            f"{directory}: has a hidden size of {found[0]}, {found[1]} tokens and {found[2]} blocks, and the stand-in "
            f"is to have {shape.hidden}, {shape.vocab} and {shape.blocks}; name a directory that is not there"
        )
    here, on = this_machine(volume)
    measured = None if options.rungs_of is None else Profile.load(options.rungs_of)
    profile = emulation.emulated(request, model, on, here, table_of(model), measured)
    profile.save(options.output)
    if options.quiet:
        return 0
    of.print_document(profile, describe_profile(profile), options.json)
    part = request.smaller**2
    line = ProgressLine("profile")
    line.note(
        f"written to {options.output}; a budget of 64 GiB there is {format_bytes((64 << 30) // part)} here; next: "
        f"ssdplan solve {options.output} --host-memory SIZE"
    )
    return 0
