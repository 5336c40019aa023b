"""`ssdplan show`: describes and draws a plan, a profile or a run."""

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.errors import IoFailure, StoreError, UsageError
from ssdplan.plans.files import Folder, LinkError, open_regular
from ssdplan.plans.units import format_bytes

from .parsing import kinds, outputs
from .parsing import options as of
from .parsing.command import Argument, Command, Section
from .parsing.cost import Costed, cost_options, trainings_of
from .parsing.types import DIRECTORY, PATH

if TYPE_CHECKING:
    from ssdplan.plans.analysis.cache import Beside
    from ssdplan.plans.analysis.curves import Curves
    from ssdplan.plans.analysis.overlay import Overlay
    from ssdplan.plans.documents.run import Run
    from ssdplan.plans.graph.ops import Graph, Schedule
    from ssdplan.plans.graph.timeline import Timeline
    from ssdplan.plans.views.curves_text import Standing


@dataclass(frozen=True)
class Options(Costed):
    document: Path
    plots: Path | None
    html: Path | None
    trace: Path | None
    csv: Path | None
    prefetch_table: bool
    json: bool


def command() -> Command:
    document = Argument(
        ["document"], type=PATH, metavar="PLAN|PROFILE|RUN", help="a plan, a profile or a run's directory"
    )
    drawn = (
        click.Option(["--plots"], type=DIRECTORY, metavar="DIR", help="plots (PNG) of the plan, run or profile [none]"),
        click.Option(["--html"], type=PATH, metavar="FILE", help="one page to look at in a browser [none]"),
        click.Option(
            ["--trace"],
            type=PATH,
            metavar="FILE",
            help="the plan's step as a Chrome trace; of a run of several ranks its last, as each measured it [none]",
        ),
        of.csv_option("the run's steps, the profile's sub-layers or the prefetch table, as a table"),
    )
    output = (
        click.Option(
            ["--prefetch-table"],
            is_flag=True,
            help="instead: each state in order of use, where it lives, and where else it is over a step",
        ),
        click.Option(["--json"], is_flag=True, help="print the document as JSON"),
    )
    return Command(
        Options,
        call,
        [document],
        [Section("Files to write", drawn), Section("What a training takes", cost_options()), Section("Output", output)],
    )


_FILES_OF_A_RUN = ("plan.json", "run.json", "metrics.jsonl", "report.json", "trace.json")


def call(options: Options) -> int:
    from ssdplan.plans.schedule.build import build_schedule
    from ssdplan.plans.views.cache_text import describe_cache
    from ssdplan.plans.views.overlay_text import describe_overlay
    from ssdplan.plans.views.plan_text import describe_plan
    from ssdplan.plans.views.profile_text import describe_profile
    from ssdplan.plans.views.report_text import describe_report, report_json
    from ssdplan.plans.views.screen.cost_text import describe_cost

    path, trainings = options.document, trainings_of(options)
    _require_outputs(options)
    if path.is_dir():
        with Folder(path) as folder:
            for name in _FILES_OF_A_RUN:
                folder.has_file(name)  # a link is an error: what it points at is not the run's
    if path.is_dir() and not (path / "plan.json").exists():
        raise UsageError(f"{path}: holds no plan.json, so no run has begun here; name a run's directory or a document")
    document = _open_document(path / "plan.json" if path.is_dir() else path)
    if isinstance(document, Profile):
        _refuse_for_profile(options, document)
        of.print_document(document, describe_profile(document), options.json)
        _draw_profile(options, document)
        return 0
    if options.prefetch_table:
        return _prefetch_table(options, document)
    if trainings and options.json:
        raise UsageError("--tokens: with --json nothing is said of a training; leave one out")
    if options.csv and not (path / "run.json").exists():
        raise UsageError(
            f"{path}: --csv writes the steps of a run, and a plan has none; name a run's directory, or add "
            "--prefetch-table"
        )
    schedule = build_schedule(document.model, document.decision)
    report = path / "report.json" if path.is_dir() and (path / "report.json").exists() else None
    steady = _predicted(document, schedule.steady)
    overlay = _laid_over(path / "trace.json", document, schedule) if report else None
    each = _of_ranks(path, document) if report and document.decision.shares > 1 else None
    curves = _curves(path, document, every=options.csv is not None) if path.is_dir() else None
    if options.csv and not curves:
        raise UsageError(f"{path}: no step is done yet, so --csv has no table to write")
    cache = _found_in_time(document, schedule, steady, curves)
    if report and options.json:
        print(report_json(report, overlay))
    else:
        parts = [_of_training(path, curves, document)] if curves else []  # of a run first what was trained
        parts += [f"{describe_report(report)}\n"] if report else []
        parts += [_slowest(each)] if each else []
        parts += [describe_overlay(overlay)] if overlay else []
        parts += [describe_plan(document, schedule, cache)]
        parts += [describe_cost(document, trainings[0])] if trainings else []
        parts += [describe_cache(cache)] if cache.measured and not report else []
        of.print_document(document, "\n".join(parts), options.json)
    if options.plots or options.html or options.trace:
        _draw(options, document, schedule, steady, overlay, curves, cache, each)
    if options.csv and curves:
        of.write_table(curves.table(), options.csv)
    return 0


def _require_outputs(options: Options) -> None:
    outputs.require_apart(
        {"--csv": options.csv, "--plots": options.plots, "--html": options.html, "--trace": options.trace}
    )
    outputs.require_writable(options.csv, "--csv", kinds.TABLE)
    outputs.require_folder(options.plots, "--plots", ".png")
    outputs.require_place(options.html, "--html", kinds.PAGE)
    outputs.require_place(options.trace, "--trace", kinds.TRACE)


def _refuse_for_profile(options: Options, profile: Profile) -> None:
    """Raises UsageError where a profile has not what is to be written."""
    from ssdplan.plans.analysis.sublayers import has_sublayers

    if options.trace or options.html:
        raise UsageError(f"{options.document}: a profile has no page and no trace; give them a plan")
    if options.tokens is not None:
        raise UsageError(f"{options.document}: --tokens is of a plan; a profile has no speed")
    if options.prefetch_table:
        raise UsageError(f"{options.document}: --prefetch-table is of a plan's states, and a profile places none")
    asked = "--plots" if options.plots else "--csv"
    if (options.plots or options.csv) and not has_sublayers(profile.model):
        raise UsageError(f"{options.document}: {asked} is of sub-layers, and this profile has none; profile again")


def _prefetch_table(options: Options, plan: Plan) -> int:
    """Print the table instead of the plan, and write it where --csv says."""
    from ssdplan.plans.analysis.prefetch import prefetch_table
    from ssdplan.plans.schedule.build import build_schedule
    from ssdplan.plans.views.cache_text import describe_prefetch

    others = {
        "--json": options.json,
        "--tokens": options.tokens is not None,
        "--plots": options.plots,
        "--html": options.html,
        "--trace": options.trace,
    }
    if refused := [name for name, asked in others.items() if asked]:
        raise UsageError(f"--prefetch-table: prints or writes a table alone; leave out {' '.join(refused)}")
    schedule = build_schedule(plan.model, plan.decision)
    timeline = _predicted(plan, schedule.steady)
    entries = prefetch_table(plan.model, schedule, timeline)
    print(describe_prefetch(plan, entries, timeline.seconds), end="")
    if options.csv:
        from ssdplan.plans.analysis.frames import prefetch_frame

        of.write_table(prefetch_frame(entries), options.csv)
    return 0


def _draw_profile(options: Options, profile: Profile) -> None:
    if options.plots:
        from ssdplan.plans.views.plots.sublayers_plot import write_sublayers_plot

        print(f"written to {write_sublayers_plot(profile, options.plots)}", file=sys.stderr)
    if options.csv:
        from ssdplan.plans.analysis.frames import sublayers_frame

        of.write_table(sublayers_frame(profile), options.csv)


def _curves(run: Path, plan: Plan, *, every: bool) -> "Curves | None":
    """What the run's metrics say so far, with `every` number of a step; None where it has none, or is none that is
    known by its run.json."""
    from ssdplan.plans.analysis.curves import DRAWN, EVERY, Curves, read_curves
    from ssdplan.plans.documents.metrics import METRICS, REPORT
    from ssdplan.plans.documents.run import RUN, Run
    from ssdplan.plans.views.report_text import written_bytes

    if not (run / RUN).exists():
        return None
    from ssdplan.executor.snapshots.run_directory import on_planned_drives

    metrics = run / METRICS
    curves = read_curves(metrics, EVERY if every else DRAWN) if metrics.exists() else Curves()
    if (run / REPORT).exists():
        curves.reported_bytes = written_bytes(run / REPORT)
    curves.rated = on_planned_drives(plan, [Path(place) for place in Run.load(run / RUN).volumes] or [run])
    return curves


def _of_training(run: Path, curves: "Curves", plan: Plan) -> str:
    from ssdplan.plans.views.curves_text import describe_curves

    return describe_curves(curves, plan, _standing(run, curves, plan))


def _standing(run: Path, curves: "Curves", plan: Plan) -> "Standing":
    from ssdplan.executor.store import is_locked
    from ssdplan.plans.documents.run import MODEL, RUN, Run
    from ssdplan.plans.views.curves_text import Standing

    kept = Run.load(run / RUN)
    steps = kept.options.get("steps")  # of a version that kept no number
    told = int(steps) if isinstance(steps, str) and steps.isdecimal() and len(steps) < 20 else curves.last
    asked = kept.steps or told
    done = curves.last >= asked > 0 and (run / MODEL).is_dir()
    goes_on = is_locked(run)
    return Standing(
        str(run),
        max(asked, curves.last),
        done,
        kept.snapshots,
        time.time(),
        _store(run, kept, plan),
        kept.dropped,
        goes_on=goes_on,
        newest=None if done or goes_on else _newest(run, kept, curves, plan),
    )


def _newest(run: Path, kept: "Run", curves: "Curves", plan: Plan) -> int | None:
    """After which step a stopped run goes on, by its store or else by its metrics; None where it needs no snapshot."""
    from ssdplan.executor.store import survey

    if plan.decision.zeroth_order:
        return None
    told = int(curves.snapshots.index.max()) if len(curves.snapshots) else 0
    with contextlib.suppress(IoFailure, LinkError, StoreError):  # `_store` says so
        lying = [each for each in survey(_places(run, kept)) if each.store in kept.stores and not each.refused]
        told = max([told, *(int(each.metadata.get("step", 0)) for each in lying)])
    return told


def _store(run: Path, kept: "Run", plan: Plan) -> tuple[str, ...]:
    """Lines on what there is of a run's store; none where there is nothing. Of a run that was begun elsewhere, its own
    directory alone is looked at."""
    from ssdplan.executor.store import inspect

    try:
        volumes = [
            info
            for info in inspect(_places(run, kept))
            if info.superblock and info.superblock.store.hex() in kept.stores
        ]
    except (IoFailure, LinkError, StoreError) as error:
        return (f"Its store cannot be looked at: {error}",)
    if not volumes:
        return ()
    nbytes = sum(info.capacity_bytes for info in volumes)
    held = kept.snapshots and not plan.decision.zeroth_order  # whose log is its state
    words = "the states of its last snapshots" if held else "of use only while it runs"
    files = [f"  {info.path}" for info in volumes]
    if len(volumes) > 1:
        files = [f"{file}: {format_bytes(info.capacity_bytes)}" for file, info in zip(files, volumes, strict=True)]
    return (f"Its store takes {format_bytes(nbytes)}, {words}:", *files)


def _places(run: Path, kept: "Run") -> list[Path]:
    """Where a run's store may be looked for."""
    from ssdplan.executor.snapshots.run_directory import is_known, lies_in

    places = [place for place in map(Path, kept.volumes or (run,)) if place.exists()]
    return places if is_known(kept, run) else [place for place in places if lies_in(run, place)]


def _laid_over(trace: Path, plan: Plan, schedule: "Schedule") -> "Overlay | None":
    """A run's last step over its prediction; None, and a word of it, where the run left no trace."""
    from ssdplan.plans.analysis.overlay import lay_over
    from ssdplan.plans.views.trace import read_trace

    if not trace.exists():
        print(f"{trace}: is not there, so no measured step is laid over the predicted one", file=sys.stderr)
        return None
    measured = read_trace(trace, schedule)
    return lay_over(plan, schedule, _predicted(plan, measured.graph), measured)


def _of_ranks(run: Path, plan: Plan) -> "list[tuple[Timeline, Schedule]] | None":
    """The last step as each rank measured it; None, and a word of it, where one left no trace here."""
    from ssdplan.executor.ranks.place import directory_of
    from ssdplan.plans.documents.metrics import TRACE
    from ssdplan.plans.schedule.build import build_schedule
    from ssdplan.plans.views.trace import read_trace

    traces = [directory_of(run, rank) / TRACE for rank in range(plan.decision.ranks)]
    if lacking := [str(trace) for trace in traces if not trace.is_file()]:
        print(f"{' '.join(lacking)}: not there, so ranks are not laid side by side", file=sys.stderr)
        return None
    each = []
    for rank, trace in enumerate(traces):
        with Folder(trace.parent) as folder:
            folder.require_no_link(TRACE)
        schedule = build_schedule(plan.model, plan.decision, rank)
        each.append((read_trace(trace, schedule), schedule))
    if any(timeline.met is None for timeline, _ in each):
        print(f"{run}: its traces are of an earlier version, which kept no common moment of ranks", file=sys.stderr)
        return None
    return each


def _slowest(each: "list[tuple[Timeline, Schedule]]") -> str:
    from ssdplan.plans.analysis.ranks import held_up
    from ssdplan.plans.views.report_text import describe_held

    timelines = [timeline for timeline, _ in each]
    return describe_held(held_up(timelines), max(timeline.seconds for timeline in timelines))


def _found_in_time(plan: Plan, schedule: "Schedule", steady: "Timeline", curves: "Curves | None") -> "Beside":
    """The cache's figures: of the `steady` step as predicted, and of all steps of a run as measured."""
    from ssdplan.planner.explain.on_demand import on_demand_figures
    from ssdplan.plans.analysis.cache import Beside, predicted_figures, states_on_ssd

    def predict(graph: "Graph") -> "Timeline":
        return steady if graph is steady.graph else _predicted(plan, graph)

    predicted = predicted_figures(plan, schedule, predict)
    return Beside(predicted, curves.cache if curves else None, states_on_ssd(schedule), on_demand_figures(plan))


def _predicted(plan: Plan, graph: "Graph") -> "Timeline":
    from ssdplan.planner.predict.simulator import simulate

    return simulate(graph, plan.model, plan.machine, plan.decision.micro_batch_size)


def _draw(
    options: Options,
    plan: Plan,
    schedule: "Schedule",
    timeline: "Timeline",
    overlay: "Overlay | None",
    curves: "Curves | None",
    cache: "Beside",
    each: "list[tuple[Timeline, Schedule]] | None",
) -> None:
    """The files that `show` writes besides what it prints. `timeline`: the steady step as predicted; `each`: the last
    step as each of several ranks measured it."""
    if options.plots:
        from ssdplan.plans.views.plots.plan_plots import write_plots

        written = write_plots(plan, schedule, timeline, options.plots)
        if curves:
            from ssdplan.plans.views.plots.curves_plot import write_curves_plot

            written.append(write_curves_plot(curves, plan, options.plots))
        for plot in written:
            print(f"written to {plot}", file=sys.stderr)
    if options.html:
        from ssdplan.plans.views.page import write_page

        write_page(plan, schedule, timeline, options.html, overlay=overlay, curves=curves, cache=cache)
        print(f"written to {options.html}; open it in a browser", file=sys.stderr)
    if options.trace:
        from ssdplan.plans.views.trace import write_trace, write_trace_of_ranks

        if each:
            write_trace_of_ranks(each, options.trace, name="the last step as measured")
        else:
            name = f"ssdplan plan for {plan.model.name}, a step as predicted"
            write_trace(timeline, schedule, options.trace, name=name)
        print(f"written to {options.trace}; open it in Perfetto", file=sys.stderr)


def _open_document(path: Path) -> Plan | Profile:
    """A plan or a profile, by what its `schema` says."""
    try:
        with open_regular(path, "plan or profile") as file:
            start = file.read(4096)
    except OSError as error:
        raise UsageError(f"{path}: cannot read: {error.strerror}") from error
    kind: type[Plan] | type[Profile] = Profile if b'"ssdplan.profile/' in start else Plan
    return kind.load(path)
