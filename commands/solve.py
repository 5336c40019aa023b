"""`ssdplan solve`: from a profile, or from names in the catalogue, to a plan or a sweep of plans."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ssdplan.planner.program.choices import WEAR_PRICE
from ssdplan.plans.documents.plan import Plan, Recompute
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.documents.state_layout import Masters, OptimizerStates
from ssdplan.plans.errors import UsageError
from ssdplan.plans.gc_pause import no_collection
from ssdplan.plans.units import format_bytes, format_enough, format_there
from ssdplan.plans.views.progress_line import ProgressLine

from .parsing import kinds, outputs
from .parsing import options as of
from .parsing.command import Argument, Command, Section
from .parsing.cost import Costed, cost_options, trainings_of
from .parsing.replaced import require_name_to_keep, save_plan
from .parsing.types import (
    COUNT,
    DIRECTORY,
    FRACTION,
    NEW_DIRECTORY,
    NONNEGATIVE,
    PATH,
    POSITIVE,
    RESIDENCY,
    SIZE,
    SIZE_OR_ZERO,
    Choice,
)
from .parsing.what_if import Source, source_of, what_if_options, with_swept
from .parsing.without_gradients import asked_zeroth_order

if TYPE_CHECKING:
    from ssdplan.planner.catalogue.whatif import WhatIf
    from ssdplan.planner.request import SolveRequest
    from ssdplan.planner.sweep import Values
    from ssdplan.plans.analysis.cost import Training


@dataclass(frozen=True)
class Options(Source, Costed):
    device_memory: int | None
    max_ssd_write_per_step: int | None
    global_batch: int | None
    optimizer: Literal["adamw", "muon", "mezo"] | None
    masters: Masters
    directions: int
    optimizer_states: OptimizerStates
    clip_grad_norm: float | None
    schedule: Literal["vertical", "horizontal", "single"]
    micro_batch_size: int | None
    micro_batches: int | None
    delay_ratio: float | None
    residency: dict[str, float]
    recompute: Recompute
    wear_price: float
    activations: Literal["exact", "int8"]
    solver: str | None
    write_lp: Path | None
    sweep: str | None
    plots: Path | None
    csv: Path | None
    json: bool
    full: bool
    quiet: bool
    output: Path | None
    given: frozenset[str] = frozenset()


def command() -> Command:
    profile = Argument(
        ["profile"],
        type=PATH,
        default=None,
        metavar="PROFILE",
        help="the profile that ssdplan profile wrote; not with --model",
    )
    return Command(
        Options,
        call,
        [profile],
        [
            Section("Budgets", _budgets()),
            Section("What changes the numbers that are computed", _numbers()),
            Section("Decisions, each fixed by an option", _decisions()),
            Section("What-if: without a profile, from the catalogue", what_if_options()),
            Section("What a training takes", cost_options()),
            Section("The linear program", _linear_program()),
            Section("Output", _output()),
        ],
        tells_given=True,
    )


def _budgets() -> tuple[click.Option, ...]:
    return (
        click.Option(
            ["--host-memory"],
            type=SIZE,
            metavar="SIZE",
            help="the most host memory beyond the process itself (process_bytes of the profile), such as 64GiB or 64G, "
            "which are the same; 64GB are a little less; no more than the profiled machine has [a half of what was "
            "free; needed with --model]",
        ),
        click.Option(
            ["--device-memory"],
            type=SIZE,
            metavar="SIZE",
            help="the most that the device may take [what was free]; without a GPU: a device emulated in that much "
            "DRAM, with copies to and from it; it and --host-memory are no more than the profiled machine has [compute "
            "on host memory]",
        ),
        click.Option(
            ["--max-ssd-write-per-step"],
            type=SIZE_OR_ZERO,
            metavar="SIZE",
            help="the most that a step may write to the drives, a bound on wear [none]",
        ),
    )


def _numbers() -> tuple[click.Option, ...]:
    return (
        click.Option(["--global-batch"], type=COUNT, metavar="N", help="rows a step, exactly [the best]"),
        click.Option(
            ["--optimizer"],
            type=Choice(["adamw", "muon", "mezo"]),
            help="muon updates matrices of blocks, and adamw the rest, by a profile for it (profile --optimizer muon); "
            "mezo trains without gradients: it estimates one along random directions from two forwards each, in a "
            "few blocks' memory [the profile's, adamw or muon; of a what-if adamw]",
        ),
        click.Option(
            ["--masters"],
            type=Choice(["fp32", "residual", "none"]),
            default="fp32",
            help="in half precision: keep and update weights in fp32, and compute with rounded copies. none: update "
            "what is computed with; updates smaller than a weight's last digit are lost. residual (adamw in bf16): "
            "keep only the 16 bits that the copies lack, which are rounded with ties away from zero; nothing is lost",
        ),
        click.Option(
            ["--directions"], type=COUNT, default=1, metavar="K", help="with mezo, random directions of a step"
        ),
        click.Option(
            ["--optimizer-states"],
            type=Choice(["fp32", "bf16", "int8"]),
            default="fp32",
            help="format of both moments; int8 has a scale for each 64 elements and the code of 8-bit optimizers",
        ),
        click.Option(
            ["--ranks"],
            type=COUNT,
            metavar="R",
            help="processes that train together; budgets, micro-batches and figures are of each, the global batch is "
            "of all [as many as were profiled; of a what-if, one a machine]",
        ),
        click.Option(
            ["--clip-grad-norm"],
            type=POSITIVE,
            metavar="X",
            help="the most that the norm of all gradients may be; alpha is then 1 [none]",
        ),
    )


def _decisions() -> tuple[click.Option, ...]:
    return (
        click.Option(
            ["--schedule"],
            type=Choice(["vertical", "horizontal", "single"]),
            default="vertical",
            help="horizontal is ZeRO-Infinity's; single is one micro-batch",
        ),
        click.Option(["--micro-batch-size"], type=COUNT, metavar="B", help="rows a micro-batch [the best]"),
        click.Option(["--micro-batches"], type=COUNT, metavar="N", help="micro-batches a step [the best]"),
        click.Option(["--delay-ratio"], type=FRACTION, metavar="A", help="the delay ratio alpha, 0 to 1 [the best]"),
        click.Option(
            ["--residency"],
            type=RESIDENCY,
            default=dict,
            show_default=False,
            metavar="WHAT=F,WHAT=F,...",
            help="parameters, optimizer, checkpoints: fractions on host; device, turn: fractions of states whose "
            "parameters the device keeps for the whole run, or from forward to backward; updates: of states that it "
            "updates, as it keeps their optimizer states too; inputs: of blocks whose activation checkpoints it keeps; "
            "any of them [the best]",
        ),
        click.Option(
            ["--recompute"],
            type=Choice(["auto", "all", "none", "paper"]),
            default="auto",
            help="what backward recomputes of the blocks' forwards: what is best, everything, nothing, or what PyAO's "
            "rule says; the rest is saved",
        ),
        click.Option(
            ["--wear-price"],
            type=NONNEGATIVE,
            default=WEAR_PRICE,
            metavar="X",
            help="what activations on ssd must gain: a share X of tokens/s for each doubling of the bytes written",
        ),
        click.Option(
            ["--activations"],
            type=Choice(["exact", "int8"]),
            default="exact",
            help="the format of saved activations: their own, or int8 too where that is faster, with which training is "
            "not exact; the profile has to know it (profile --compression-error)",
        ),
    )


def _linear_program() -> tuple[click.Option, ...]:
    return (
        click.Option(
            ["--solver"],
            metavar="NAME",
            help="have another of PuLP's solvers, such as PULP_CBC_CMD, confirm the programs that decide the plan; it "
            "stays the same [HiGHS alone]",
        ),
        click.Option(
            ["--write-lp"],
            type=NEW_DIRECTORY,
            metavar="DIR",
            help="write the programs that decide the plan here, a .lp file for each objective in turn [none]",
        ),
    )


def _output() -> tuple[click.Option, ...]:
    return (
        click.Option(
            ["--sweep"],
            metavar="NAME=FROM..TO[:STEP]|NAME=VALUE,VALUE,...",
            help="print a table of plans instead of one plan, such as gpu=rtx-3090,rtx-4090; without STEP the value "
            "doubles [one plan]",
        ),
        click.Option(["--plots"], type=DIRECTORY, metavar="DIR", help="with --sweep, also draw it here (PNG) [none]"),
        of.csv_option("with --sweep, also write the table here"),
        click.Option(["--json"], is_flag=True, help="print the plan, or the sweep, as JSON"),
        click.Option(
            ["--full"],
            is_flag=True,
            help="print all of the plan, as ssdplan show does, and what an estimate rests on [the lines that decide]",
        ),
        of.quiet_option(),
        click.Option(
            ["-o", "--output"],
            type=PATH,
            metavar="FILE",
            help="where the plan is written; a plan that lies there is kept, plan.json as plan-0.json, then "
            "plan-1.json and so on [plan.json; a what-if or a sweep writes none]",
        ),
    )


def call(options: Options) -> int:
    from ssdplan.planner.catalogue.whatif import WhatIf, estimate
    from ssdplan.planner.request import SolveRequest
    from ssdplan.planner.sweep import first_meant, parse_values

    if options.sweep is None and options.plots is not None:
        raise UsageError("--plots is of a --sweep; ssdplan show plan.json --plots DIR draws a plan")
    if options.sweep is None and options.csv is not None:
        raise UsageError("--csv is of a --sweep: one plan is no table; --json prints it as data")
    if options.sweep is not None and options.output is not None:
        raise UsageError("-o: a sweep writes no plan; leave it out")
    if options.sweep is not None and options.write_lp is not None:
        raise UsageError(
            "--write-lp: a sweep has the programs of many plans; solve for the one whose programs you want"
        )
    output = options.output or (None if options.profile is None or options.sweep else Path("plan.json"))
    _require_outputs(options, output)
    zeroth_order = asked_zeroth_order(
        options.given, mezo=options.optimizer == "mezo", directions=options.directions, masters=options.masters
    )
    if "wear_price" in options.given and options.recompute != "auto":
        raise UsageError(f"--wear-price: with --recompute {options.recompute} nothing is weighed by it; leave it out")
    if options.sweep is None and options.tokens is not None and (options.json or options.quiet):
        raise UsageError(
            f"--tokens: with {'--json' if options.json else '--quiet'} nothing is said of a training; leave one out"
        )
    swept = parse_values(options.sweep) if options.sweep is not None else None
    trainings = trainings_of(options, len(swept.values) if swept else 1)
    by_muon = options.optimizer == "muon"
    source = source_of(with_swept(options, swept) if swept else options, muon=by_muon)
    measured = first_meant(source, swept) if swept else estimate(source) if isinstance(source, WhatIf) else source
    if zeroth_order and measured.model.precision == "fp32":
        if "masters" in options.given:
            raise UsageError("--masters: this profile is of fp32, in which weights are their own masters; leave it out")
        zeroth_order = zeroth_order.model_copy(update={"masters": False})
    request = SolveRequest(
        host_memory_bytes=options.host_memory or measured.machine.host_available_bytes // 2,
        device_memory_bytes=options.device_memory,
        global_batch=options.global_batch,
        micro_batch_size=options.micro_batch_size,
        micro_batches=options.micro_batches,
        delay_ratio=options.delay_ratio,
        residency=options.residency,
        recompute=options.recompute,
        wear_price=options.wear_price,
        activations=None if options.activations == "exact" else options.activations,
        max_ssd_write_bytes=options.max_ssd_write_per_step,
        schedule=options.schedule,
        optimizer_states=options.optimizer_states,
        masters="fp32" if zeroth_order else options.masters,
        clip_grad_norm=options.clip_grad_norm,
        unified_memory=measured.machine.compute_shares_cpu and options.device_memory is None,
        ranks=options.ranks or (measured.machine.network.ranks if measured.machine.network else 1),
        optimizer=None if options.optimizer == "mezo" else options.optimizer,
        zeroth_order=zeroth_order,
        solver=options.solver,
    )
    if swept:
        return _sweep(options, source, request, swept, trainings)
    training = trainings[0] if trainings else None
    return _one_plan(options, output, measured, request, training, source if isinstance(source, WhatIf) else None)


def _require_outputs(options: Options, output: Path | None) -> None:
    """`output`: where the plan is written, which may lie in the directory of --write-lp where nobody named it."""
    named = output if options.output or output == options.write_lp else None
    outputs.require_apart({"--csv": options.csv, "--plots": options.plots, "--write-lp": options.write_lp, "-o": named})
    outputs.require_writable(options.csv, "--csv", kinds.TABLE)
    outputs.require_folder(options.plots, "--plots", ".png")
    outputs.require_folder(options.write_lp, "--write-lp", ".lp")
    outputs.require_writable(output, "-o", kinds.PLAN)
    if output is not None:
        require_name_to_keep(output)


@no_collection()  # to the end: the first look for cycles would go through the whole schedule, half a second for a 175B
def _one_plan(
    options: Options,
    output: Path | None,
    measured: Profile,
    request: "SolveRequest",
    training: "Training | None",
    what_if: "WhatIf | None",
) -> int:
    from ssdplan.planner.basis import describe_notes, error_of, kinds_of
    from ssdplan.planner.program.lp_files import LpFiles
    from ssdplan.planner.solve import solve_and_build
    from ssdplan.plans.views.plan_text import describe_plan
    from ssdplan.plans.views.screen import describe_briefly
    from ssdplan.plans.views.screen.basis import Basis
    from ssdplan.plans.views.screen.cost_text import describe_cost

    title = f"{measured.model.name} on {measured.machine.name}"
    programs = LpFiles(options.write_lp, title) if options.write_lp is not None else None
    kept = output is not None or options.full or options.json
    plan, schedule = solve_and_build(measured, request, watch=programs, told="all" if kept else "screen")
    replaced = save_plan(plan, output) if output else ""
    if not options.quiet:
        more = f"ssdplan show {output}" if output else "--full"
        basis = Basis(kinds_of(what_if), *error_of(what_if)) if what_if else None
        text = describe_briefly(plan, schedule, more, training, basis)
        if options.full:
            text = describe_plan(plan, schedule) + (f"\n{describe_cost(plan, training)}" if training else "")
            text += describe_notes(measured) if what_if else ""
        of.print_document(plan, text, options.json)
    line = ProgressLine("solve")
    too_large = "" if what_if else _beyond(plan)
    for note in (too_large or _not_available(plan, measured, request), replaced):
        if note:
            line.note(note)
    if programs is not None:
        line.note(f"wrote the {len(programs.names)} linear programs that decided the plan to {options.write_lp}")
    if options.quiet:
        return 0
    if output is None and programs is not None:
        line.note("no plan was written: it is an estimate; -o FILE keeps it for ssdplan show")
    elif output is None:
        line.note("nothing was written: it is an estimate; -o FILE keeps it for ssdplan show")
    elif what_if:
        line.note(f"written to {output}: an estimate, which ssdplan show explains and no run takes")
    elif too_large:
        line.note(
            f"written to {output}; to run takes a machine with more memory, or a plan with a smaller --host-memory"
        )
    else:
        several = f" --ranks {plan.decision.ranks}" if plan.decision.ranks > 1 else ""
        line.note(f"written to {output}; next: ssdplan run{several} {output} --data FILE --steps N --out DIR")
    return 0


def _peak(plan: Plan) -> tuple[int, str]:
    """The most bytes of DRAM that a plan takes, and what of: of the whole process, where a profile knows that."""
    prediction = plan.prediction
    if prediction.peak_process_bytes is None:
        return prediction.peak_host_bytes, "host memory"
    return prediction.peak_process_bytes, "the whole process"


def _beyond(plan: Plan) -> str:
    """What a plan takes that the machine of its profile does not have, within a budget that it has: a process is more
    than a budget. No error, for memory can be bought."""
    there = plan.machine.host_memory_bytes
    peak, what = _peak(plan)
    if peak <= there:
        return ""
    return (
        f"{what} peaks at {format_enough(peak)}, more than the {format_there(there)} of the profiled machine, which "
        "will not run this plan"
    )


def _not_available(plan: Plan, measured: Profile, request: "SolveRequest") -> str:
    """That the budgets are more than was available, though the machine has it, and whether that matters."""
    from ssdplan.planner.request import beyond_available

    words = beyond_available(measured.machine, request)
    if not words:
        return ""
    peak, what = _peak(plan)
    enough = peak <= measured.machine.host_available_bytes
    matters = "which is enough for this plan" if enough else "so end other programs before it runs"
    return f"{words}; {what} peaks at {format_bytes(peak)}, {matters}"


def _sweep(
    options: Options,
    source: "WhatIf | Profile",
    request: "SolveRequest",
    values: "Values",
    trainings: "tuple[Training, ...]",
) -> int:
    from ssdplan.planner.sweep import first_beyond_available, sweep

    line = ProgressLine("solve")
    try:
        found = sweep(source, request, values, line, trainings)
    finally:
        line.done()
    from ssdplan.plans.analysis.frames import sweep_frame
    from ssdplan.plans.views.sweep_text import describe_sweep

    of.print_document(found, describe_sweep(found), options.json)
    if isinstance(source, Profile) and (note := first_beyond_available(source, request, values)):
        line.note(note)
    if options.csv:
        of.write_table(sweep_frame(found), options.csv)
    if options.plots:
        from ssdplan.plans.views.plots.sweep_plot import write_sweep_plot

        print(f"written to {write_sweep_plot(found, options.plots)}", file=sys.stderr)
    return 0
