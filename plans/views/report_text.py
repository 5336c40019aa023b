"""A run's report, for people and for programs: each prediction beside what was measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from ..analysis.cache import Beside, OnSsd
from ..analysis.overlay import Overlay
from ..analysis.ranks import Held
from ..analysis.work import RESOURCE_LABELS
from ..documents.base import MAX_DOCUMENT_BYTES
from ..errors import UsageError
from ..files import read_bounded
from ..json_errors import json_reason
from ..units import format_bytes, format_seconds
from .cache_text import cache_lines, read_figures
from .quantities import decimal, percent

WORTH_TELLING = 0.01
MOST_CAUSES = 3
"""Of what held others up that are named."""
MOST_HELD_OUT = 4
"""Evaluations that fit on a line."""


def report_json(path: Path, overlay: Overlay | None) -> str:
    """A report.json as it is; with an overlay, that is one more field, `overlay`. Raises UsageError for no report."""
    report = _read(path)
    return json.dumps({**report, "overlay": overlay.document()} if overlay else report, indent=1)


def describe_report(path: Path) -> str:
    """The text of a report.json. Raises UsageError when it is not one."""
    report = _read(path)
    try:
        lines = [f"{report['steps']} steps of {report['model']}, {report['steady_steps']} of them measured"]
        if report["predictions"]:
            lines += ["", f"  {'':20} {'predicted':>12} {'measured':>12} {'error':>8}"]
            lines += [_row(row) for row in report["predictions"]]
            lines += ["", *_counted(report["steady_steps"], report.get("learnt_share"))]
        if ranks := report.get("ranks"):
            lines += ["", *_ranks(ranks)]
        if cache := report.get("cache"):
            lines += [
                "",
                "  what a steady step finds in time (measured: the mean of those steps)",
                *cache_lines(_cache(cache)),
            ]
        if (seconds := report.get("allocation_seconds")) is not None:
            lines += ["", f"  allocating memory took {format_seconds(float(seconds))}, once"]
        if (share := report.get("stolen_share", 0.0)) >= WORTH_TELLING:
            lines += [
                "",
                f"  the host gave {share:.0%} of the processors' time to others (steal), among them, it may be,",
                "  what it runs for this machine's own drive",
            ]
        lines += _written(report)
        if report["losses"]:
            lines += ["", f"  training loss  {_loss(report['losses'][0])} first, {_loss(report['losses'][-1])} last"]
        held_out = list(report["eval_losses"].items())
        if held_out:
            shown = held_out if len(held_out) <= MOST_HELD_OUT else [held_out[0], *held_out[1 - MOST_HELD_OUT :]]
            each = [f"{_loss(loss)} after {step}" for step, loss in shown]
            if len(shown) < len(held_out):
                each.insert(1, "...")
            lines += [f"  held-out loss  {', '.join(each)} steps"]
        return "\n".join(lines)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not a run's report: {error}") from error


def describe_held(held: Sequence[Held], seconds: float) -> str:
    """For whom the others waited in a step that took so long, in lines of at most 100 columns."""
    first = held[0]
    told = f"rank {first.rank} was the slowest: in the mean the others waited {format_seconds(first.seconds)} for it"
    if first.causes:
        parts = [
            f"{RESOURCE_LABELS.get(resource, resource)} ({work}), {format_seconds(took)}"
            for resource, work, took in first.causes[:MOST_CAUSES]
        ]
        told += f", while it was at {'; '.join(parts)}"
    rest = [f"{format_seconds(each.seconds)} for rank {each.rank}" for each in held[1:]]
    told += f". They waited {', '.join(rest)}" if rest else ""
    lines = wrap(f"The last step of all ranks took {format_seconds(seconds)}: {told}.", 100)
    return "\n".join(lines) + "\n"


def written_bytes(path: Path) -> int:
    """What the whole run wrote, by its report.json; 0 where it does not say. Raises UsageError for no report."""
    written = _read(path).get("ssd_written_bytes", 0)
    if type(written) is not int or written < 0:
        raise UsageError(f"{path}: not a run's report: ssd_written_bytes is no count")
    return written


def _written(report: dict[str, Any]) -> list[str]:
    """What the whole run wrote; nothing where the report is of an earlier version or of several ranks, which it tells
    one by one."""
    if "ssd_written_bytes" not in report or report.get("ranks"):
        return []
    model = f"; the model takes {decimal(report['model_bytes'])} more"
    if not (written := report["ssd_written_bytes"]):
        return ["", f"  written to ssd in all  nothing{model}"]
    words = f"  written to ssd in all  {decimal(written)}: loading, steps and snapshots"
    return ["", words + model]


def _ranks(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each rank, and one for all together."""
    heads = ("step", "ssd read", "ssd written", "by the whole run")
    names = ("step_seconds", "ssd_read_bytes", "ssd_write_bytes", "ssd_written_bytes")
    lines = [f"  {'a steady step of':20} " + " ".join(f"{head:>16}" for head in heads)]
    for number, rank in enumerate(ranks):
        cells = ["-" if rank[n] is None else _value(rank[n], "s" if n == names[0] else "B") for n in names]
        lines.append(f"  {f'rank {number}':20} " + " ".join(f"{cell:>16}" for cell in cells))
    whole = [max((rank[names[0]] or 0.0) for rank in ranks), *(sum(rank[n] or 0 for rank in ranks) for n in names[1:])]
    cells = [_value(value, "B" if number else "s") for number, value in enumerate(whole)]
    return [*lines, f"  {'all ranks':20} " + " ".join(f"{cell:>16}" for cell in cells)]


def _cache(told: dict[str, Any]) -> Beside:
    counts = told["states_on_ssd"]
    if any(type(count) is not int or not 0 <= count < 1 << 40 for count in counts.values()):
        raise ValueError("cache.states_on_ssd: what is no count")
    return Beside(read_figures(told["predicted"]), read_figures(told["measured"]), OnSsd(**counts))


def _counted(steady: int, learnt: float | None) -> list[str]:
    """What the measured column is of. `learnt`: the share of positions; None in reports of earlier versions."""
    which = "the one steady step" if steady == 1 else f"the median of {steady} steady steps, of peaks their most"
    share = "" if learnt is None else f", of which {percent(learnt)} are learnt"
    words = (
        f"measured is {which}: none comes right after loading, a snapshot or an evaluation. tokens per second counts"
    )
    return wrap(f"{words} all positions of the rows{share}", 98, initial_indent="  ", subsequent_indent="  ")


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(read_bounded(path, MAX_DOCUMENT_BYTES, "report"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a run's report: {json_reason(error)}") from error
    if not isinstance(report, dict):
        raise UsageError(f"{path}: not a run's report: no object of fields")
    return report


def _row(row: dict[str, Any]) -> str:
    name = row["quantity"].removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")
    predicted, measured = (_value(row[side], row["unit"]) for side in ("predicted", "measured"))
    error = row["relative_error"]
    return f"  {name:20} {predicted:>12} {measured:>12} {'-' if error is None else f'{error:+.1%}':>8}"


def _loss(value: float | None) -> str:
    """None stands for one that was not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def _value(value: float, unit: str) -> str:
    if unit == "B":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
