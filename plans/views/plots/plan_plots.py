"""Plots of a plan: memory over a step, the step by resource, throughput against the number of micro-batches.

Owns the pictures; their colours are those of `analysis/work.py`. Needs matplotlib: import it when a plot is asked for.
It keeps no global state (no pyplot).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ...analysis.memory_usage import Usage, label, memories, memory_usage
from ...analysis.work import (
    OTHER_COLOUR,
    RESOURCE_LABELS,
    ROLE_COLOURS,
    SIZE_COLOURS,
    WORK_COLOURS,
    roles_in_order,
    work_of,
)
from ...documents.plan import Alternative, Plan
from ...files import writing
from ...graph.contents import Role
from ...graph.ops import Backward, Resource, Schedule
from ...graph.timeline import Timeline, lanes_of
from ...units import format_bytes
from ..quantities import duration, number

DPI = 100
SIZE_INCHES = (15.0, 8.0)
SHARE_COLUMNS = 500
COLUMNS = 2000
"""Memory is drawn as no more moments than this, more than there are pixels; shares of time need wider columns."""

MARKERS = "osD^vP*X"
_INK, _FAINT = "#222222", "#666666"
_PLAIN = 10


class Span(NamedTuple):
    """A time in which a lane does one kind of work."""

    start: float
    end: float
    work: str


def write_plots(plan: Plan, schedule: Schedule, timeline: Timeline, directory: Path) -> list[Path]:
    """Write memory.png, timeline.png and throughput.png into `directory`, which is made if need be; their paths.

    `timeline` is predicted, of `schedule`, which is `plan`'s. Raises OSError when a file cannot be written.
    """
    figures = {
        "memory.png": draw_memory(plan, schedule, timeline),
        "timeline.png": draw_timeline(plan, schedule, timeline),
        "throughput.png": draw_throughput(plan),
    }
    paths = []
    for name, figure in figures.items():
        path = directory / name
        with writing(path) as file:
            figure.savefig(file, format="png", dpi=DPI, metadata={"Software": "ssdplan"})
        paths.append(path)
    return paths


# Memory.


def draw_memory(plan: Plan, schedule: Schedule, timeline: Timeline) -> Figure:
    """Bytes alive on host, and on device if there is one, over the step, stacked by role, under what is reserved and
    what is allowed."""
    usage = memory_usage(schedule, timeline)
    figure = _figure(f"Memory over {_step_name(timeline)}, as predicted: {_name(plan)}")
    tiers = memories(plan)
    column = figure.subplots(len(tiers), 1, sharex=True, squeeze=False)[:, 0]
    turn = _turning_point(timeline)
    for axes, (tier, (peak, budget)) in zip(column, tiers.items(), strict=True):
        _draw_tier(axes, tier, usage[tier], budget, peak)
        axes.set_xlim(0, timeline.seconds or 1.0)
        _clock(axes, timeline.seconds)
        _mark_turn(axes, turn)
    for axes in column[:-1]:
        axes.set_xlabel("")
    figure.align_ylabels()
    return figure


def _draw_tier(axes: Axes, tier: str, usage: Usage, budget: int, peak: int) -> None:
    """One tier. `peak` is the arena and what lies outside of it, which compute takes as it runs."""
    times, alive = _columns(usage)
    top = max(peak, usage.arena_bytes, 1)
    scale, unit = _unit(top)
    floor = np.zeros(len(times))
    handles: list[Patch | Line2D] = []
    for role in roles_in_order(alive):
        values = np.append(alive[role], alive[role][-1]) / scale
        colour = ROLE_COLOURS[role]
        axes.fill_between(times, floor, floor + values, step="post", color=colour, linewidth=0)
        floor = floor + values
        handles.append(Patch(color=colour, label=label(role)))
    arena = usage.arena_bytes / scale
    axes.axhline(arena, color=_INK, linewidth=1.4)
    used = f"at most {format_bytes(usage.peak_bytes)}" if usage.peak_bytes else "none"
    reserved = f"{format_bytes(usage.arena_bytes)} reserved, {used} of it in use"
    lines: list[Patch | Line2D] = [Line2D([], [], color=_INK, linewidth=1.4, label="reserved for the whole run")]
    if peak > usage.arena_bytes:
        axes.axhspan(arena, peak / scale, facecolor="none", edgecolor=_FAINT, hatch="///", linewidth=0)
        lines.append(Patch(facecolor="none", edgecolor=_FAINT, hatch="///", label="compute's own workspace, at most"))
        reserved += f"; {format_bytes(peak - usage.arena_bytes)} for compute itself"
    inside = budget <= 1.6 * top
    if inside:
        axes.axhline(budget / scale, color="#BB0000", linewidth=1.4, linestyle=(0, (6, 3)))
        lines.append(Line2D([], [], color="#BB0000", linewidth=1.4, linestyle=(0, (6, 3)), label="budget"))
    beyond = "" if inside else ", far above"
    _subtitle(axes, f"{tier}: {reserved}; budget {format_bytes(budget)}{beyond}")
    axes.set_ylim(0, max(top, budget if inside else 0) / scale * 1.08)
    axes.set_ylabel(f"{unit} on {tier}")
    _finish(axes)
    _legend(axes, [*lines, *reversed(handles)])


def _columns(usage: Usage) -> tuple[np.ndarray, dict[Role, np.ndarray]]:
    """Times and bytes by role; where more happens than can be seen, each column shows its fullest moment."""
    times = np.asarray(usage.times)
    alive = {role: np.asarray(values, dtype=float) for role, values in usage.alive.items()}
    if len(times) < 2:
        return np.asarray([0.0, 1.0]), {role: np.zeros(1) for role in alive}
    if len(times) <= COLUMNS:
        return times, alive
    total = np.sum([*alive.values(), np.zeros(len(times) - 1)], axis=0)
    edges = np.linspace(times[0], times[-1], COLUMNS + 1)
    first = np.searchsorted(times, edges[:-1], side="right") - 1
    last = np.maximum(np.searchsorted(times, edges[1:], side="left"), first + 1)
    fullest = [start + int(np.argmax(total[start:stop])) for start, stop in zip(first, last, strict=True)]
    return edges, {role: values[fullest] for role, values in alive.items()}


# The step by resource.


def draw_timeline(plan: Plan, schedule: Schedule, timeline: Timeline) -> Figure:
    """What each resource does when: the whole step, and a few stages of it around the turn to backward. Resources that
    have no work in it are left out."""
    figure = _figure(f"{_capital(_step_name(timeline))} by resource, as predicted: {_name(plan)}")
    lanes = _lanes(schedule, timeline)
    busy, names = timeline.busy(), [name for name, spans in lanes.items() if spans] or list(lanes)
    seconds = timeline.seconds or 1.0
    turn = _turning_point(timeline)
    zoom = _zoom(timeline, turn)
    if zoom is None:
        panels = [(figure.subplots(1, 1), (0.0, seconds))]
    else:
        whole, part = figure.subplots(2, 1, height_ratios=(1, 1))
        panels = [(whole, (0.0, seconds)), (part, zoom)]
        whole.axvspan(*zoom, facecolor="#000000", alpha=0.08, linewidth=0, zorder=0)
        part.set_facecolor("#F5F5F5")
    for axes, (start, end) in panels:
        for row, resource in enumerate(reversed(names)):
            if zoom is not None and axes is panels[0][0]:
                _draw_shares(axes, row, lanes[resource], end)
            else:
                _draw_lane(axes, row, lanes[resource], start, end)
        axes.set_yticks(range(len(names))[::-1])
        axes.set_ylim(-0.55, len(names) - 0.45)
        axes.set_xlim(start, end)
        axes.tick_params(axis="y", length=0)
        _mark_turn(axes, turn)
        _finish(axes)
    first = panels[0][0]
    first.set_yticklabels([f"{RESOURCE_LABELS[name]}  {busy[name] / seconds:4.0%}" for name in names])
    height = "" if zoom is None else "; a lane is filled as high as the share of the time in which it works"
    _subtitle(first, f"all of it, {duration(seconds)}{height}")
    if zoom is not None:
        panels[1][0].set_yticklabels([RESOURCE_LABELS[name] for name in names])
        _subtitle(panels[1][0], f"the shaded {duration(zoom[1] - zoom[0])} of it, operation by operation")
        _clock(first, seconds)
        first.set_xlabel("")
    _clock(panels[-1][0], seconds)
    used = {span.work for spans in lanes.values() for span in spans}
    _legend(first, [Patch(color=colour, label=work) for work, colour in WORK_COLOURS.items() if work in used])
    return figure


def _lanes(schedule: Schedule, timeline: Timeline) -> dict[Resource, list[Span]]:
    """Resource -> its work in order of time; ops of one kind that follow at once are one span."""
    lanes: dict[Resource, list[Span]] = {resource: [] for resource in lanes_of(timeline.graph)}
    gap = timeline.seconds * 1e-6
    for start, end, index in sorted(zip(timeline.starts, timeline.ends, range(len(timeline.starts)), strict=True)):
        op = timeline.graph.ops[index]
        lane, work = lanes[op.resource], work_of(op)
        # Each forward and backward stays a span of its own: one sees the micro-batches.
        joins = lane and lane[-1].work == work and start - lane[-1].end <= gap and op.resource != "compute"
        if joins:
            lane[-1] = lane[-1]._replace(end=max(end, lane[-1].end))
        else:
            lane.append(Span(start, end, work))
    return lanes


def _draw_shares(axes: Axes, row: int, spans: Sequence[Span], seconds: float) -> None:
    """Of each moment of a step, the share that each kind of work has, stacked: what is too short to see counts."""
    edges = np.linspace(0.0, seconds, SHARE_COLUMNS + 1)
    floor = np.zeros(SHARE_COLUMNS + 1)
    for work, colour in WORK_COLOURS.items():
        starts = [span.start for span in spans if span.work == work]
        ends = [span.end for span in spans if span.work == work]
        if starts:
            share = np.diff(_elapsed(starts, edges) - _elapsed(ends, edges)) * SHARE_COLUMNS / seconds
            top = np.minimum(floor + np.append(share, share[-1]), 1.0)
            low, high = row - 0.4 + 0.8 * floor, row - 0.4 + 0.8 * top
            axes.fill_between(edges, low, high, step="post", color=colour, linewidth=0)
            floor = top
    axes.hlines(row - 0.4, 0.0, seconds, color=_FAINT, linewidth=0.6)


def _elapsed(moments: Sequence[float], at: np.ndarray) -> np.ndarray:
    """The seconds that have passed since each of `moments`, summed, at each time of `at`."""
    ordered = np.sort(moments)
    before = np.searchsorted(ordered, at)
    return before * at - np.concatenate(([0.0], np.cumsum(ordered)))[before]


def _draw_lane(axes: Axes, row: int, spans: Sequence[Span], start: float, end: float) -> None:
    """One collection a kind of work; every op at least a pixel wide, and parted by white edges where there is room."""
    boxes: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    edges: dict[str, list[float]] = defaultdict(list)
    low, high = row - 0.4, row + 0.4
    pixel = (end - start) / 1000
    for span in spans:
        if span.end <= start or span.start >= end:
            continue
        first, last = max(span.start, start), min(max(span.end, span.start + pixel), end)
        boxes[span.work].append([(first, low), (first, high), (last, high), (last, low)])
        edges[span.work].append(0.6 if last - first > 4 * pixel else 0.0)
    for work, mine in boxes.items():
        collection = PolyCollection(
            mine, facecolors=WORK_COLOURS.get(work, OTHER_COLOUR), edgecolors="white", linewidths=edges[work]
        )
        collection.set_snap(False)
        axes.add_collection(collection, autolim=False)


def _zoom(timeline: Timeline, turn: float | None) -> tuple[float, float] | None:
    """From two stages before the turn to two after it, for steps of more stages than one can see."""
    spans: dict[int, tuple[float, float]] = {}
    for op, start, end in zip(timeline.graph.ops, timeline.starts, timeline.ends, strict=True):
        if op.resource == "compute":
            first, last = spans.get(op.stage, (start, end))
            spans[op.stage] = (min(first, start), max(last, end))
    stages = sorted(spans)
    if turn is None or len(stages) < 12:
        return None
    middle = bisect_right([spans[stage][0] for stage in stages], turn) - 1
    return spans[stages[max(middle - 2, 0)]][0], spans[stages[min(middle + 2, len(stages) - 1)]][1]


# Throughput.


def draw_throughput(plan: Plan) -> Figure:
    """Tokens a second against micro-batches, for each micro-batch size, under the rooflines of compute and of I/O. Of
    one batch, a bar for each way to cut it."""
    decision, chosen = plan.decision, plan.prediction.tokens_per_second
    sizes = sorted({entry.micro_batch_size for entry in plan.alternatives})
    if len({entry.micro_batch_size * entry.micro_batches for entry in plan.alternatives}) == 1:
        return _draw_one_batch(plan)
    figure = _figure(f"Throughput against the number of micro-batches: {_name(plan)}")
    axes = figure.subplots(1, 1)
    handles: list[Patch | Line2D] = []
    for index, size in enumerate(sizes):
        colour = SIZE_COLOURS[index % len(SIZE_COLOURS)]
        marker = MARKERS[index % len(MARKERS)]
        entries = sorted((e for e in plan.alternatives if e.micro_batch_size == size), key=lambda e: e.micro_batches)
        _draw_size(axes, entries, colour, marker)
        words = f"micro-batches of {size} sequence{'s' if size > 1 else ''}"
        handles.append(Line2D([], [], color=colour, marker=marker, label=words))
    star = axes.scatter(
        [decision.micro_batches],
        [chosen],
        marker="*",
        s=420,
        facecolor="#FFD400",
        edgecolor=_INK,
        zorder=5,
        label="this plan",
    )
    sequences = f"{decision.micro_batch_size} sequence{'s' if decision.micro_batch_size > 1 else ''}"
    n = f"{decision.micro_batches} micro-batch{'es' if decision.micro_batches > 1 else ''}"
    _subtitle(axes, f"this plan: {n} of {sequences} of {decision.sequence_length:,} tokens, {number(chosen)} tokens/s")
    styles: list[Patch | Line2D] = [
        Line2D([], [], color=_INK, marker="o", linestyle="", label="simulated, as plans predict"),
        Line2D(
            [],
            [],
            color=_INK,
            marker="o",
            markerfacecolor="white",
            linestyle="",
            label="estimated by the linear program",
        ),
        Line2D([], [], color=_FAINT, linestyle="--", label="if only compute took time"),
        Line2D([], [], color=_FAINT, linestyle=":", label="if all but compute took time"),
    ]
    _throughput_limits(axes, plan)
    axes.set_xlabel("micro-batches a step")
    axes.set_ylabel("tokens/s")
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    _finish(axes)
    _legend(axes, [star, *handles, *(styles if sizes else [])])
    return figure


def _draw_one_batch(plan: Plan) -> Figure:
    """A bar for each way to cut the plan's batch into micro-batches."""
    decision = plan.decision
    batch = decision.micro_batch_size * decision.micro_batches
    figure = _figure(f"Throughput of a batch of {batch} row{'s' if batch > 1 else ''}, by how it is cut: {_name(plan)}")
    axes = figure.subplots(1, 1)
    entries = sorted(plan.alternatives, key=lambda entry: entry.micro_batch_size)
    for place, entry in enumerate(entries):
        colour = SIZE_COLOURS[place % len(SIZE_COLOURS)]
        face = colour if entry.simulated else "white"
        axes.bar(place, entry.tokens_per_second, 0.6, color=face, edgecolor=colour, linewidth=1.6)
        axes.text(place, entry.tokens_per_second, number(entry.tokens_per_second), ha="center", va="bottom")
        roof = entry.compute_tokens_per_second
        axes.plot([place - 0.4, place + 0.4], [roof, roof], color=_FAINT, linestyle="--", linewidth=1.2)
    axes.set_xticks(range(len(entries)), [f"{each.micro_batches} x {each.micro_batch_size}" for each in entries])
    axes.set_xlim(-0.8, len(entries) - 0.2)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("micro-batches x sequences in each")
    axes.set_ylabel("tokens/s")
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    own = f"{decision.micro_batches} x {decision.micro_batch_size} sequences of {decision.sequence_length:,} tokens"
    _subtitle(axes, f"this plan: {own}, {number(plan.prediction.tokens_per_second)} tokens/s")
    _finish(axes)
    styles: list[Patch | Line2D] = [
        Patch(facecolor=_INK, edgecolor=_INK, label="simulated, as plans predict"),
        Patch(facecolor="white", edgecolor=_INK, label="estimated by the linear program"),
        Line2D([], [], color=_FAINT, linestyle="--", label="if only compute took time"),
    ]
    _legend(axes, styles)
    return figure


def _draw_size(axes: Axes, entries: Sequence[Alternative], colour: str, marker: str) -> None:
    """Lines through the linear program's figures, which compare; the simulated ones, of a few finalists, lie below."""
    bounds = [entry for entry in entries if not entry.simulated]
    line = bounds if len(bounds) > 1 else entries
    n: list[float] = [entry.micro_batches for entry in line]
    if len(line) == 1:  # a dash instead of a line
        line, n = [*line, *line], [n[0] - 0.3, n[0] + 0.3]
    axes.plot(n, [entry.compute_tokens_per_second for entry in line], color=colour, linestyle="--", linewidth=1)
    axes.plot(n, [entry.io_tokens_per_second for entry in line], color=colour, linestyle=":", linewidth=1.4)
    axes.plot(n, [entry.tokens_per_second for entry in line], color=colour, linewidth=1.6)
    for simulated, face in ((False, "white"), (True, colour)):
        mine = [entry for entry in entries if entry.simulated == simulated]
        axes.scatter(
            [entry.micro_batches for entry in mine],
            [entry.tokens_per_second for entry in mine],
            marker=marker,
            s=36,
            facecolor=face,
            edgecolor=colour,
            zorder=3,
        )


def _throughput_limits(axes: Axes, plan: Plan) -> None:
    """From 0 to the compute roofline, unless that is so far away that the curves would lie flat on the floor."""
    reached = max([plan.prediction.tokens_per_second, *(entry.tokens_per_second for entry in plan.alternatives)])
    roof = max([reached, *(entry.compute_tokens_per_second for entry in plan.alternatives)])
    seen = roof <= 3 * reached
    axes.set_ylim(0, 1.08 * (roof if seen else 1.25 * reached))
    numbers = sorted({plan.decision.micro_batches, *(entry.micro_batches for entry in plan.alternatives)})
    axes.set_xlim(numbers[0] - 0.5 - 0.02 * numbers[-1], numbers[-1] * 1.03 + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if not seen:
        words = f"compute alone would reach {number(roof)} tokens/s, far above"
        axes.text(0.995, 0.985, words, transform=axes.transAxes, ha="right", va="top", color=_FAINT, fontsize=_PLAIN)


# What all of them share.


def _figure(title: str) -> Figure:
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=_PLAIN + 4, fontweight="bold", parse_math=False)
    return figure


def _finish(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=_PLAIN)
    axes.xaxis.label.set_fontsize(_PLAIN + 1)
    axes.yaxis.label.set_fontsize(_PLAIN + 1)


def _legend(axes: Axes, handles: Iterable[object]) -> None:
    """To the right of the axes, over no data."""
    axes.legend(handles=list(handles), loc="upper left", bbox_to_anchor=(1.005, 1.02), frameon=False, fontsize=_PLAIN)


def _clock(axes: Axes, seconds: float) -> None:
    """A time axis in the unit that a step of so many seconds is best read in."""
    scale, unit = (1.0, "seconds") if seconds >= 0.5 else (1e3, "milliseconds") if seconds >= 5e-4 else (1e6, "us")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value * scale:.6g}")
    axes.set_xlabel(f"{unit} from the start")


def _subtitle(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=_PLAIN + 1, pad=20)


def _mark_turn(axes: Axes, turn: float | None) -> None:
    """Where compute turns from forward to backward; the words stand between the title and the data."""
    if turn is None:
        return
    axes.axvline(turn, color=_INK, linewidth=1, linestyle=":")
    for text, side, shift in (("forward", "right", -5), ("backward", "left", 5)):
        axes.annotate(
            text,
            (turn, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(shift, 2),
            textcoords="offset points",
            ha=side,
            va="bottom",
            fontsize=_PLAIN,
            color=_FAINT,
        )


def _turning_point(timeline: Timeline) -> float | None:
    """When the first backward starts; None where there is none."""
    pairs = zip(timeline.graph.ops, timeline.starts, strict=True)
    return min((start for op, start in pairs if isinstance(op, Backward)), default=None)


def _unit(nbytes: int) -> tuple[int, str]:
    for scale, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= scale:
            return scale, unit
    return 1 << 10, "KiB"


def _step_name(timeline: Timeline) -> str:
    names = {
        "steady": "a steady step",
        "unwritten": "a step that writes no parameters",
        "first": "the first step",
        "flush": "the flush of delayed updates",
        "evaluate": "an evaluation",
    }
    return names.get(timeline.graph.name, timeline.graph.name)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _name(plan: Plan) -> str:
    """Model and machine, in characters that every font has."""
    names = [
        "".join(char if char.isascii() and char.isprintable() else "?" for char in name[:40])
        for name in (plan.model.name, plan.machine.name)
    ]
    return f"{names[0]} on {names[1]}"
