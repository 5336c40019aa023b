"""`ssdplan solve`: from a profile, or from names in the catalogue, to a plan or a sweep of plans."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ssdplan.plans.collector import no_collection
from ssdplan.plans.errors import UsageError
from ssdplan.plans.plan import Plan
from ssdplan.plans.profile import Profile
from ssdplan.plans.progress import ProgressLine
from ssdplan.plans.units import format_bytes

from . import options as of
from .replaced import require_replaceable, save_plan

if TYPE_CHECKING:
    from ssdplan.planner.request import SolveRequest
    from ssdplan.planner.whatif import WhatIf


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=call)
    parser.add_argument(
        "profile", type=of.path, nargs="?", metavar="PROFILE", help="what ssdplan profile wrote; not with --model"
    )
    budgets = parser.add_argument_group("budgets")
    budgets.add_argument(
        "--host-memory",
        type=of.nbytes,
        metavar="SIZE",
        help="most host memory beyond the process itself (process_bytes of the profile), such as 64GiB or 64G, which "
        "are the same; 64GB are a little less [a half of what was free; needed with --model]",
    )
    budgets.add_argument(
        "--device-memory",
        type=of.nbytes,
        metavar="SIZE",
        help="most that the device may take [what was free]; "
        "without a GPU: a device emulated in that much DRAM, with copies to and from it [compute on host memory]",
    )
    budgets.add_argument("--max-ssd-write-per-step", type=of.nbytes_or_none, metavar="SIZE", help="wear bound [none]")
    numbers = parser.add_argument_group("what is computed, and changes numbers")
    numbers.add_argument("--global-batch", type=of.count, metavar="N", help="rows a step, exactly [the best]")
    numbers.add_argument(
        "--optimizer-states",
        choices=["fp32", "bf16"],
        default="fp32",
        help="format of both moments",
    )
    numbers.add_argument(
        "--clip-grad-norm",
        type=of.positive,
        metavar="X",
        help="the most that the norm of all gradients may be; then alpha is 1 [none]",
    )
    fixed = parser.add_argument_group("each fixes one decision")
    fixed.add_argument(
        "--schedule",
        choices=["vertical", "horizontal", "single"],
        default="vertical",
        help="horizontal is ZeRO-Infinity's; single is one micro-batch",
    )
    fixed.add_argument("--micro-batch-size", type=of.count, metavar="B", help="rows a micro-batch [the best]")
    fixed.add_argument("--micro-batches", type=of.count, metavar="N", help="micro-batches a step [the best]")
    fixed.add_argument("--delay-ratio", type=of.fraction, metavar="A", help="alpha, 0 to 1 [the best]")
    fixed.add_argument(
        "--residency",
        type=of.residency,
        default={},
        metavar="WHAT=F,WHAT=F,...",
        help="parameters, optimizer, checkpoints: fractions on host; device, turn: fractions of states whose "
        "parameters the device keeps for the whole run, or from forward to backward; any of them [the best]",
    )
    guess = parser.add_argument_group("what-if: without a profile, from the catalogue")
    guess.add_argument("--model", metavar="NAME", help="a model's shape, such as llama-3.1-70b")
    guess.add_argument("--gpu", metavar="NAME", help="such as rtx-4090; none emulates a device in DRAM")
    guess.add_argument(
        "--ssd",
        action="append",
        metavar="NAME[:SIZE][*K]",
        help="K drives, at most 16 in all, such as 'samsung-990-pro:4TB*2' (in quotes, for shells); repeatable",
    )
    guess.add_argument("--cpu", metavar="NAME", help="processor and its DRAM [ryzen-9-7950x; alone, ryzen-7-7840u]")
    guess.add_argument("--link", metavar="NAME", help="between host and GPU, such as pcie-4.0-x16 [the GPU's own]")
    guess.add_argument(
        "--figure", type=of.figure, action="append", metavar="NAME=VALUE", help="instead of the catalogue's; repeatable"
    )
    guess.add_argument("--sequence-length", type=of.count, metavar="S", help="tokens a row [1024]")
    guess.add_argument("--micro-batch-sizes", type=of.counts, metavar="B,B,...", help="rows a micro-batch [1,2,4]")
    guess.add_argument("--precision", choices=["bf16", "fp16", "fp32"], help="of the parameters in compute [bf16]")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--sweep",
        metavar="NAME=FROM..TO[:STEP]",
        help="a table of plans instead of one; it doubles without STEP [one plan]",
    )
    output.add_argument("--plots", type=of.path, metavar="DIR", help="with --sweep, also draw it here (PNG) [none]")
    output.add_argument("--json", action="store_true", help="print the plan, or the sweep, as JSON")
    output.add_argument(
        "-o",
        "--output",
        type=of.path,
        metavar="FILE",
        help="where to; a plan that is there is kept, plan.json as plan-0.json, then plan-1.json and so on "
        "[plan.json; a what-if or a sweep writes none]",
    )


def call(options: argparse.Namespace) -> int:
    from ssdplan.planner.request import SolveRequest
    from ssdplan.planner.whatif import WhatIf, estimate

    if options.sweep is None and options.plots is not None:
        raise UsageError("--plots is of a --sweep; ssdplan show plan.json --plots DIR draws a plan")
    if options.sweep is not None and options.output is not None:
        raise UsageError("-o: a sweep writes no plan; leave it out")
    output: Path | None = options.output or (None if options.profile is None or options.sweep else Path("plan.json"))
    if output is not None:
        of.require_writable(output)
        require_replaceable(output)
    source = _what_if(options)
    measured = estimate(source) if isinstance(source, WhatIf) else source
    request = SolveRequest(
        host_memory_bytes=options.host_memory or measured.machine.host_available_bytes // 2,
        device_memory_bytes=options.device_memory,
        global_batch=options.global_batch,
        micro_batch_size=options.micro_batch_size,
        micro_batches=options.micro_batches,
        delay_ratio=options.delay_ratio,
        residency=options.residency,
        max_ssd_write_bytes=options.max_ssd_write_per_step,
        schedule=options.schedule,
        optimizer_states=options.optimizer_states,
        clip_grad_norm=options.clip_grad_norm,
        unified_memory=measured.machine.compute_shares_cpu and options.device_memory is None,
    )
    if options.sweep is not None:
        return _sweep(options, source, request)
    return _one_plan(options, output, measured, request, what_if=isinstance(source, WhatIf))


@no_collection()  # to the end: the first look for cycles would go through the whole schedule, half a second for a 175B
def _one_plan(
    options: argparse.Namespace, output: Path | None, measured: Profile, request: "SolveRequest", *, what_if: bool
) -> int:
    from ssdplan.planner.solve import solve_and_build
    from ssdplan.planner.whatif import describe_notes
    from ssdplan.plans.text import describe_plan

    plan, schedule = solve_and_build(measured, request)
    replaced = save_plan(plan, output) if output else ""
    text = describe_plan(plan, schedule)
    of.print_document(plan, text + describe_notes(measured) if what_if else text, options.json)
    line = ProgressLine("solve")
    too_large = "" if what_if else _beyond(plan)
    for note in (too_large, replaced):
        if note:
            line.note(note)
    if output is None:
        line.note("nothing was written: it is an estimate; -o FILE keeps it for ssdplan show")
    elif what_if:
        line.note(f"written to {output}: an estimate, which ssdplan show explains and no run takes")
    elif too_large:
        line.note(
            f"written to {output}; to run takes a machine with more memory, or a plan with a smaller --host-memory"
        )
    else:
        line.note(f"written to {output}; next: ssdplan run {output} --data FILE --steps N")
    return 0


def _beyond(plan: Plan) -> str:
    """What a plan takes that the machine of its profile did not have: no error, for memory can be bought."""
    there, prediction = plan.machine.host_memory_bytes, plan.prediction
    peak, what = prediction.peak_process_bytes, "the whole process"
    if peak is None:
        peak, what = prediction.peak_host_bytes, "host memory"
    if peak <= there:
        return ""
    return (
        f"{what} peaks at {format_bytes(peak)}, more than the {format_bytes(there)} of the profiled machine, which "
        "will not run this plan"
    )


def _what_if(options: argparse.Namespace) -> "WhatIf | Profile":
    """The profile that is named, or the machine and model that are."""
    from ssdplan.planner.whatif import WhatIf

    given = {
        "--gpu": options.gpu,
        "--ssd": options.ssd,
        "--cpu": options.cpu,
        "--link": options.link,
        "--figure": options.figure,
        "--sequence-length": options.sequence_length,
        "--micro-batch-sizes": options.micro_batch_sizes,
        "--precision": options.precision,
    }
    if options.profile is not None:
        without_profile = [name for name, value in {"--model": options.model, **given}.items() if value is not None]
        if without_profile:
            raise UsageError(f"{without_profile[0]} is for a what-if, without a profile: {options.profile} says it all")
        return Profile.load(options.profile)
    if options.model is None:
        raise UsageError("name a profile, or a what-if: --model NAME --gpu NAME --ssd NAME --host-memory SIZE")
    if Path(options.model).is_dir():
        raise UsageError(
            f"--model {options.model}: is a directory, and a what-if takes a name of the catalogue; measure it with "
            f"ssdplan profile {options.model}, and give solve the profile"
        )
    needed = {"--gpu": options.gpu, "--ssd": options.ssd, "--host-memory": options.host_memory}
    if missing := [name for name, value in needed.items() if value is None]:
        raise UsageError(f"--model {options.model}: a what-if also needs {', '.join(missing)}")
    return WhatIf(
        model=options.model,
        gpu=options.gpu,
        ssds=options.ssd,
        host_memory_bytes=options.host_memory,
        cpu=options.cpu,
        link=options.link,
        precision=options.precision or "bf16",
        sequence_length=options.sequence_length or 1024,
        micro_batch_sizes=options.micro_batch_sizes or (1, 2, 4),
        figures=_figures(options.figure or ()),
    )


def _figures(given: Sequence[tuple[str, float]]) -> dict[str, float]:
    figures = dict(given)
    if len(figures) < len(given):
        twice = next(name for name in figures if sum(name == each for each, _ in given) > 1)
        raise UsageError(f"--figure {twice}: is given twice")
    return figures


def _sweep(options: argparse.Namespace, source: "WhatIf | Profile", request: "SolveRequest") -> int:
    from ssdplan.planner.sweep import parse_range, sweep
    from ssdplan.plans.sweep import describe_sweep

    values = parse_range(options.sweep)
    line = ProgressLine("solve")
    try:
        found = sweep(source, request, values, line)
    finally:
        line.done()
    of.print_document(found, describe_sweep(found), options.json)
    if options.plots:
        from ssdplan.plans.sweep_plot import write_sweep_plot

        print(f"written to {write_sweep_plot(found, options.plots)}", file=sys.stderr)
    return 0
