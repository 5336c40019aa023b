"""The command line: arguments in, calls out, nothing else.

Each command imports the parts it needs when it runs, so that planning starts without torch. Results go to standard
output, progress to standard error; an error is one line and the exit code of docs/architecture.md.
"""

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ssdplan import __version__
from ssdplan.plans.documents import Document
from ssdplan.plans.errors import (
    DiskFullError,
    IoFailure,
    MemoryBudgetError,
    SsdplanError,
    StallError,
    StoreError,
    UsageError,
)
from ssdplan.plans.plan import Plan
from ssdplan.plans.profile import NO_FP16, Profile
from ssdplan.plans.progress import ProgressLine
from ssdplan.plans.units import format_seconds, parse_bytes

if TYPE_CHECKING:
    from ssdplan.executor.metrics import StepMetrics
    from ssdplan.planner.solve import SolveRequest
    from ssdplan.planner.whatif import WhatIf
    from ssdplan.plans.overlay import Overlay
    from ssdplan.plans.schedule import Graph, Schedule
    from ssdplan.plans.timeline import Timeline

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code: int = options.command(options)
        return code
    except StallError as error:
        _fail(str(error), error.exit_code)
        sys.stdout.flush()
        os._exit(error.exit_code)  # an orderly end would wait for what hangs
    except SsdplanError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except (MemoryError, RuntimeError) as error:  # torch's allocator has no error of its own
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        return _fail(f"the process may take no more memory: {_first_line(error)}", MemoryBudgetError.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        code = DiskFullError.exit_code if error.errno in (errno.ENOSPC, errno.EDQUOT) else IoFailure.exit_code
        return _fail(str(error), code)


def _interrupt(number: int, frame: object) -> NoReturn:
    """A request to end is an interruption: what was made is closed and removed, as after Ctrl-C."""
    raise KeyboardInterrupt


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _fail(message: str, code: int) -> int:
    print(f"ssdplan: error: {message}", file=sys.stderr)
    return code


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults beside the options that have one; what an option without one means is in its own words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == {}:
            return action.help
        return super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Errors as the other commands' errors: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(UsageError.exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ssdplan", description="Train language models in SSD, DRAM and GPU memory, by a plan.")
    parser.add_argument("--version", action="version", version=f"ssdplan {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, about: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = commands.add_parser(
            name,
            help=about,
            description=about[0].upper() + about[1:] + ".",
            formatter_class=_Help,
            allow_abbrev=False,
        )
        return made

    _profile_options(command("profile", "measure this machine and a model -> profile.json"))
    _solve_options(
        command("solve", "find the best plan for a profile, or for a machine one does not have -> plan.json")
    )
    _show_options(command("show", "what a plan decides and predicts, what a profile measured"))
    _run_options(command("run", "train by a plan -> a Hugging Face model directory"))
    _volume_options(command("volume", "make, describe or verify the volumes that a store lies on"))
    _bench_options(command("bench", "compare the parts of ssdplan with their rivals on this machine"))
    _compare_options(command("compare", "train the same by ssdplan, plain PyTorch and DeepSpeed, side by side"))
    return parser


# profile


def _profile_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_profile)
    parser.add_argument("--model", required=True, metavar="DIR|NAME", help="a Hugging Face model directory, or a name")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cpu emulates a device in DRAM")
    parser.add_argument(
        "--volume", type=Path, action="append", metavar="PATH", help="a directory on the ssd to use; repeatable [.]"
    )
    parser.add_argument(
        "--endurance",
        type=_bytes,
        action="append",
        metavar="SIZE",
        help="what the drive's maker rates it to have written, such as 600TB; one for each --volume, or one for all "
        "[unknown]",
    )
    parser.add_argument("--sequence-length", type=_count, default=1024, metavar="S", help="tokens a row")
    parser.add_argument(
        "--micro-batch-sizes", type=_counts, default="1,2,4", metavar="B,B,...", help="rows a micro-batch, to measure"
    )
    parser.add_argument(
        "--precision",
        choices=["bf16", "fp16", "fp32"],
        default="bf16",
        help="of the parameters in compute; fp16 is for what-ifs only",
    )
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    parser.add_argument("-o", "--output", type=Path, default=Path("profile.json"), metavar="FILE", help="where to")


def _profile(options: argparse.Namespace) -> int:
    if options.precision == "fp16":
        raise UsageError(f"--precision fp16: {NO_FP16}")
    _settle_process()
    from ssdplan.executor.checks import DTYPES
    from ssdplan.executor.device import open_device
    from ssdplan.executor.hub import find_model
    from ssdplan.executor.layers import Layers, MicroBatch
    from ssdplan.executor.model import open_model
    from ssdplan.executor.weights import Weights
    from ssdplan.plans.profile_text import describe_profile
    from ssdplan.profiler.profile import profile

    _writable(options.output)
    device = open_device(options.device)
    model = open_model(find_model(options.model), DTYPES[options.precision])
    line = ProgressLine("profile")
    weights = Weights(model)
    try:
        measured = profile(
            model,
            lambda chunk: Layers(model, device.torch_device, head_chunk_tokens=chunk),
            MicroBatch,
            weights,
            device,
            options.volume or [Path()],
            sequence_length=options.sequence_length,
            micro_batch_sizes=options.micro_batch_sizes,
            progress=line,
            endurance=options.endurance or (),
        )
    finally:
        line.done()
        weights.close()
    measured.save(options.output)
    _print(measured, describe_profile(measured), options.json)
    line.note(f"written to {options.output}; next: ssdplan solve {options.output} --host-memory 8GiB")
    return 0


# solve


def _solve_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_solve)
    parser.add_argument(
        "profile", type=Path, nargs="?", metavar="PROFILE", help="what ssdplan profile wrote; not with --model"
    )
    parser.add_argument(
        "--host-memory",
        type=_bytes,
        metavar="SIZE",
        help="most host memory beyond the process itself (process_bytes of the profile) [a half of what was free; "
        "needed with --model]",
    )
    parser.add_argument(
        "--device-memory",
        type=_bytes,
        metavar="SIZE",
        help="most that the device may take [what was free]; "
        "without a GPU: a device emulated in that much DRAM, with copies to and from it [compute on host memory]",
    )
    parser.add_argument("--global-batch", type=_count, metavar="N", help="rows a step, exactly [the best]")
    parser.add_argument("--max-ssd-write-per-step", type=_bytes, metavar="SIZE", help="wear bound [none]")
    parser.add_argument(
        "--optimizer-states",
        choices=["fp32", "bf16"],
        default="fp32",
        help="format of both moments; it changes numbers",
    )
    parser.add_argument(
        "--clip-grad-norm",
        type=_positive,
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
    fixed.add_argument("--micro-batch-size", type=_count, metavar="B", help="rows a micro-batch [the best]")
    fixed.add_argument("--micro-batches", type=_count, metavar="N", help="micro-batches a step [the best]")
    fixed.add_argument("--delay-ratio", type=_fraction, metavar="A", help="alpha, 0 to 1 [the best]")
    fixed.add_argument(
        "--residency",
        type=_residency,
        default={},
        metavar="WHAT=F,WHAT=F,...",
        help="parameters, optimizer, checkpoints: fractions on host; device, turn: fractions of states whose "
        "parameters the device keeps for the whole run, or from forward to backward; any of them [the best]",
    )
    guess = parser.add_argument_group("what-if: without a profile, from the catalogue")
    guess.add_argument("--model", metavar="NAME", help="a model's shape, such as llama-3.1-70b")
    guess.add_argument("--gpu", metavar="NAME", help="such as rtx-4090; none emulates a device in DRAM")
    guess.add_argument(
        "--ssd", action="append", metavar="NAME[:SIZE][*K]", help="K drives, such as samsung-990-pro:4TB*2; repeatable"
    )
    guess.add_argument("--cpu", metavar="NAME", help="processor and its DRAM [ryzen-9-7950x; alone, ryzen-7-7840u]")
    guess.add_argument("--link", metavar="NAME", help="between host and GPU, such as pcie-4.0-x16 [the GPU's own]")
    guess.add_argument(
        "--figure", type=_figure, action="append", metavar="NAME=VALUE", help="instead of the catalogue's; repeatable"
    )
    guess.add_argument("--sequence-length", type=_count, metavar="S", help="tokens a row [1024]")
    guess.add_argument("--micro-batch-sizes", type=_counts, metavar="B,B,...", help="rows a micro-batch [1,2,4]")
    guess.add_argument("--precision", choices=["bf16", "fp16", "fp32"], help="of the parameters in compute [bf16]")
    parser.add_argument(
        "--sweep", metavar="NAME=FROM..TO[:STEP]", help="a table of plans instead of one; it doubles without STEP"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="with --sweep, also draw it here (PNG)")
    parser.add_argument("--json", action="store_true", help="print the plan, or the sweep, as JSON")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to [plan.json; a sweep writes none]")


def _solve(options: argparse.Namespace) -> int:
    from ssdplan.planner.solve import SolveRequest, solve_and_build
    from ssdplan.planner.whatif import WhatIf, describe_notes, estimate
    from ssdplan.plans.text import describe_plan

    if options.sweep is None and options.plots is not None:
        raise UsageError("--plots is of a --sweep; ssdplan show plan.json --plots DIR draws a plan")
    if options.sweep is not None and options.output is not None:
        raise UsageError("-o: a sweep writes no plan; leave it out")
    output = options.output or Path("plan.json")
    if options.sweep is None:
        _writable(output)
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
    plan, schedule = solve_and_build(measured, request)
    plan.save(output)
    text = describe_plan(plan, schedule)
    line = ProgressLine("solve")
    if isinstance(source, WhatIf):
        _print(plan, text + describe_notes(measured), options.json)
        line.note(f"written to {output}: an estimate, which ssdplan show explains and no run takes")
        return 0
    _print(plan, text, options.json)
    line.note(f"written to {output}; next: ssdplan run {output} --data FILE --steps N")
    return 0


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
        figures=dict(options.figure or ()),
    )


def _sweep(options: argparse.Namespace, source: "WhatIf | Profile", request: "SolveRequest") -> int:
    from ssdplan.planner.sweep import parse_range, sweep
    from ssdplan.plans.sweep import describe_sweep

    values = parse_range(options.sweep)
    line = ProgressLine("solve")
    try:
        found = sweep(source, request, values, line)
    finally:
        line.done()
    _print(found, describe_sweep(found), options.json)
    if options.plots:
        from ssdplan.plans.sweep_plot import write_sweep_plot

        print(f"written to {write_sweep_plot(found, options.plots)}", file=sys.stderr)
    return 0


# show


def _show_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_show)
    parser.add_argument(
        "document", type=Path, metavar="PLAN|PROFILE|RUN", help="a plan, a profile or a run's directory"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="also write plots (PNG) of the plan here")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one page to look at in a browser")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also write the plan's step as a Chrome trace")
    parser.add_argument("--json", action="store_true", help="print the document as JSON")


def _show(options: argparse.Namespace) -> int:
    from ssdplan.plans.build import build_schedule
    from ssdplan.plans.overlay import describe_overlay
    from ssdplan.plans.profile_text import describe_profile
    from ssdplan.plans.report import describe_report, report_json
    from ssdplan.plans.text import describe_plan

    path: Path = options.document
    document = _open_document(path / "plan.json" if path.is_dir() else path)
    if isinstance(document, Profile):
        if options.plots or options.trace or options.html:
            raise UsageError(f"{path}: a profile has no plots, page or trace; give them a plan")
        _print(document, describe_profile(document), options.json)
        return 0
    schedule = build_schedule(document.model, document.decision)
    report = path / "report.json" if path.is_dir() and (path / "report.json").exists() else None
    overlay = _laid_over(path / "trace.json", document, schedule) if report else None
    if report and options.json:
        print(report_json(report, overlay))
    else:
        text = describe_plan(document, schedule)
        text += f"\n{describe_report(report)}\n" if report else ""
        text += f"\n{describe_overlay(overlay)}" if overlay else ""
        _print(document, text, options.json)
    if options.plots or options.html or options.trace:
        _draw(options, document, schedule, overlay)
    return 0


def _laid_over(trace: Path, plan: Plan, schedule: "Schedule") -> "Overlay | None":
    """A run's last step over its prediction; None, and a word of it, where the run left no trace."""
    from ssdplan.plans.overlay import lay_over
    from ssdplan.plans.trace import read_trace

    if not trace.exists():
        print(f"{trace}: is not there, so no measured step is laid over the predicted one", file=sys.stderr)
        return None
    measured = read_trace(trace, schedule)
    return lay_over(plan, schedule, _predicted(plan, measured.graph), measured)


def _predicted(plan: Plan, graph: "Graph") -> "Timeline":
    from ssdplan.planner.simulator import simulate

    return simulate(graph, plan.model, plan.machine, plan.decision.micro_batch_size)


def _draw(options: argparse.Namespace, plan: Plan, schedule: "Schedule", overlay: "Overlay | None") -> None:
    """The files that `show` writes besides what it prints."""
    timeline = _predicted(plan, schedule.steady)
    if options.plots:
        from ssdplan.plans.plots import write_plots

        for plot in write_plots(plan, schedule, timeline, options.plots):
            print(f"written to {plot}", file=sys.stderr)
    if options.html:
        from ssdplan.plans.page import write_page

        write_page(plan, schedule, timeline, options.html, overlay=overlay)
        print(f"written to {options.html}; open it in a browser", file=sys.stderr)
    if options.trace:
        from ssdplan.plans.trace import write_trace

        name = f"ssdplan plan for {plan.model.name}, a step as predicted"
        write_trace(timeline, schedule, options.trace, name=name)
        print(f"written to {options.trace}; open it in Perfetto", file=sys.stderr)


def _open_document(path: Path) -> Plan | Profile:
    """A plan or a profile, by what its `schema` says."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            start = file.read(4096)
    except OSError as error:
        raise UsageError(f"{path}: cannot read: {error.strerror}") from error
    kind: type[Plan] | type[Profile] = Profile if '"ssdplan.profile/' in start else Plan
    return kind.load(path)


# run


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_run)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="what ssdplan solve wrote")
    parser.add_argument("--data", type=Path, required=True, metavar="PATH", help="text: .txt, .jsonl, or a directory")
    parser.add_argument("--steps", type=_count, required=True, metavar="N", help="optimizer updates")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="a new directory for the run")
    parser.add_argument("--model", metavar="DIR|NAME", help="the model, if it moved since it was profiled")
    parser.add_argument(
        "--volume", type=Path, action="append", metavar="PATH", help="where the store lies; repeatable [RUN]"
    )
    parser.add_argument("--lr", type=_positive, default=1e-5, metavar="X", help="learning rate")
    parser.add_argument("--weight-decay", type=_nonnegative, default=0.01, metavar="X", help="decoupled weight decay")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of samples, and of dropout")
    parser.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="lay texts end to end in full rows, or one text a row",
    )
    parser.add_argument("--eval-data", type=Path, metavar="PATH", help="held-out text, evaluated first and last")
    parser.add_argument("--eval-every", type=_count, metavar="N", help="and after every N steps")
    parser.add_argument("--serial", action="store_true", help="one operation at a time: slow, and easy to believe")
    parser.add_argument(
        "--replan",
        action="store_true",
        help="when the first steps show another machine than the profile's, move to the plan that solve would choose",
    )
    parser.add_argument(
        "--stall-after",
        type=_positive,
        metavar="SECONDS",
        help="tell what a step waits for in which no operation ends for so long [60, or 5 predicted steps]",
    )
    parser.add_argument(
        "--stall-abort", type=_positive, metavar="SECONDS", help="end the run when none ends for so long [never]"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _run(options: argparse.Namespace) -> int:
    if options.eval_every and not options.eval_data:
        raise UsageError("--eval-every needs --eval-data")
    plan = Plan.load(options.plan)
    plan.refuse_fp16()
    plan.refuse_estimates()
    _settle_process()
    from ssdplan.executor.checks import DTYPES
    from ssdplan.executor.device import open_device
    from ssdplan.executor.hub import find_model
    from ssdplan.executor.model import open_model
    from ssdplan.executor.optimizer import AdamW
    from ssdplan.executor.recipe import Recipe, Watch
    from ssdplan.executor.train import train
    from ssdplan.planner.replan import Replanner
    from ssdplan.plans.report import describe_report

    if not (options.model or plan.model.path):
        raise UsageError(f"{options.plan}: the plan names no model directory; give --model")
    line = ProgressLine("run")
    recipe = Recipe(
        steps=options.steps,
        optimizer=AdamW(lr=options.lr, weight_decay=options.weight_decay),
        seed=options.seed,
        pack=options.pack,
        eval_every=options.eval_every or 0,
        serial=options.serial,
        replan=options.replan,
        stall_after_seconds=options.stall_after,
        stall_abort_seconds=options.stall_abort,
    )

    def step(metrics: "StepMetrics") -> None:
        left = (options.steps - metrics.step) * metrics.step_seconds
        eta = f"  {format_seconds(left)} left" if left else ""
        line.say(
            f"run: step {metrics.step}/{options.steps}  loss {metrics.loss:.4f}"
            f"  {metrics.tokens_per_second:.0f} tokens/s{eta}"
        )

    def evaluation(number: int, loss: float) -> None:
        line.note(f"held-out loss after {number} steps: {loss:.4f}")

    try:
        result = train(
            plan,
            open_model(find_model(options.model or plan.model.path), DTYPES[plan.decision.precision]),
            open_device(plan.machine.device),
            data=options.data,
            out=options.out,
            recipe=recipe,
            eval_data=options.eval_data,
            volumes=options.volume or (),
            watch=Watch(loading=line, step=step, evaluation=evaluation, note=line.note),
            advisor=Replanner(plan),
        )
    finally:
        line.done()
    report = options.out / "report.json"
    print(report.read_text(encoding="utf-8") if options.json else describe_report(report))
    line.note(f"the model is in {result.model_directory}")
    return 0


# volume


def _volume_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")

    def action(name: str, about: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(
            name, help=about, description=about[0].upper() + about[1:] + ".", formatter_class=_Help, allow_abbrev=False
        )
        made.set_defaults(command=_volume, action=name)
        made.add_argument("--json", action="store_true", help="print the result as JSON")
        return made

    init = action("init", "make a blank volume of a block device, or of a new file, for a store to lie on")
    init.add_argument("place", type=Path, metavar="PATH", help="a block device, a file, or a directory for a file")
    init.add_argument("--size", type=_bytes, metavar="SIZE", help="of a new file")
    init.add_argument("--force", action="store_true", help="even over a store, or data that is not ssdplan's")
    for name, about in (
        ("info", "tell what files and devices are: blank, a volume of which store, or not ssdplan's"),
        ("check", "read every extent of a store's last two generations and verify its checksum"),
    ):
        action(name, about).add_argument(
            "places", type=Path, nargs="+", metavar="PATH", help="volumes, or directories that hold them"
        )


def _volume(options: argparse.Namespace) -> int:
    from ssdplan.executor.store import check, describe, initialise, inspect

    if options.action == "init":
        found = [initialise(options.place, options.size, force=options.force)]
        print(describe.volumes_json(found) if options.json else describe.volumes(found))
        return 0
    if options.action == "info":
        found = inspect(options.places)
        print(describe.volumes_json(found) if options.json else describe.volumes(found))
        return 0
    line = ProgressLine("check")
    try:
        checked = check(options.places, lambda fraction: line(fraction, "of the store's bytes"))
    finally:
        line.done()
    print(describe.checked_json(checked) if options.json else describe.checked(checked))
    return StoreError.exit_code if checked.damaged else 0


# bench


def _bench_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_bench)
    parser.add_argument(
        "--volume", type=Path, action="append", metavar="PATH", help="a directory on the ssd to measure; repeatable [.]"
    )
    parser.add_argument("--pairs", type=_count, default=10, metavar="N", help="runs of each side, in turns")
    parser.add_argument("--size", type=_bytes, default="1GiB", metavar="SIZE", help="of the files, and of memory")
    parser.add_argument(
        "--only",
        type=_names,
        metavar="GROUP,GROUP,...",
        help="engine, adam, overflow, quantise, zeroth-order, checksum, page-lock [all]",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _bench(options: argparse.Namespace) -> int:
    from ssdplan.profiler.bench import GROUPS, bench
    from ssdplan.profiler.bench_report import describe_bench

    if options.volume and options.only and "engine" not in options.only:
        raise UsageError("--volume is for the engine, which --only leaves out")
    line = ProgressLine("bench")
    try:
        found = bench(
            options.volume or [Path()],
            nbytes=options.size,
            pairs=options.pairs,
            groups=options.only or GROUPS,
            progress=line,
        )
    finally:
        line.done()
    print(found.json() if options.json else describe_bench(found), end="")
    return 0


# compare


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_compare)
    parser.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face model directory, or --shape")
    parser.add_argument(
        "--shape",
        metavar="NAME|NAME=N,...",
        help="a random Llama: small, medium, or hidden=N,layers=N,heads=N and, if need be, vocab=N,intermediate=N",
    )
    parser.add_argument("--data", type=Path, metavar="FILE", help="text for --model, .txt or .jsonl [random tokens]")
    parser.add_argument(
        "--arms",
        type=_names,
        default="torch,torch-checkpointing,deepspeed-fast,deepspeed-lean,ssdplan",
        metavar="ARM,ARM,...",
        help="what to compare",
    )
    parser.add_argument(
        "--host-memory",
        type=_sizes,
        default=(),
        metavar="SIZE,...",
        help="budgets of the arm ssdplan, which runs once for each [a half of what was free]",
    )
    parser.add_argument("--sequence-length", type=_count, default=256, metavar="S", help="tokens a row")
    parser.add_argument("--micro-batch-size", type=_count, default=1, metavar="B", help="rows a micro-batch")
    parser.add_argument("--micro-batches", type=_count, default=1, metavar="N", help="micro-batches a step")
    parser.add_argument("--steps", type=_count, default=6, metavar="N", help="of a process; the first does not count")
    parser.add_argument("--rounds", type=_count, default=3, metavar="N", help="processes of each arm, in turns")
    parser.add_argument(
        "--volume", type=Path, default=Path(), metavar="DIR", help="a directory on the ssd to use, for all that is made"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep model, plans, logs and metrics here [removed with the rest]"
    )
    parser.add_argument("--timeout", type=_positive, default=1800.0, metavar="SECONDS", help="of one process")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="also draw it here (PNG)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _compare(options: argparse.Namespace) -> int:
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
                batch=Batch(options.sequence_length, options.micro_batch_size, options.micro_batches),
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
    _print(found, describe_comparison(found), options.json)
    if options.plots:
        from ssdplan.rivals.picture import write_picture

        print(f"written to {write_picture(found, options.plots)}", file=sys.stderr)
    return SsdplanError.exit_code if found.failed else 0


# what options mean


def _settle_process() -> None:
    """Before torch is loaded: its threads spin for some microseconds and then wait asleep, for I/O and updates need the
    cores too, and the heap keeps what it is given, so that it is as large in a run as in the profile."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from ssdplan.native.process import settle_heap

    settle_heap()


def _print(document: Document, text: str, as_json: bool) -> None:
    print(document.text() if as_json else text)


def _writable(path: Path) -> None:
    """Refuse an output before the work, not after it."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: cannot be written; name a file in a directory that exists with -o")


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_bytes(part) for part in text.split(","))


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not abs(value) < 1e30:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range")
    return value


def _nonnegative(text: str) -> float:
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative")
    return value


def _positive(text: str) -> float:
    value = _nonnegative(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _fraction(text: str) -> float:
    value = _nonnegative(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction from 0 to 1")
    return value


def _figure(text: str) -> tuple[str, float]:
    from ssdplan.planner.whatif import parse_figure

    try:
        return parse_figure(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _residency(text: str) -> dict[str, float]:
    known = ("parameters", "optimizer", "checkpoints", "device", "turn")
    chosen: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known or not value or name in chosen:
            raise argparse.ArgumentTypeError(f"{part!r}: write {'=F,'.join(known)}=F, any of them, F from 0 to 1")
        chosen[name] = _fraction(value)
    return chosen


if __name__ == "__main__":
    raise SystemExit(main())
