"""The page's tables of a run beside its plan: an overlay's, readable without a script. Owns their words and order."""

from collections.abc import Sequence

from ...analysis.overlay import CauseRow, Overlay
from ...analysis.work import OTHER_COLOUR, RESOURCE_LABELS, WORK_COLOURS
from ..overlay_text import NEGLIGIBLE, difference_in_words
from ..quantities import duration, percent
from .charts import both_ways, swatch
from .html import Markup, element, joined, section, table


def comparison(overlay: Overlay) -> Markup:
    """The tables of an overlay."""
    return section(
        "Measured over predicted",
        element("h3", "Operations by kind"),
        _kinds(overlay),
        element("h3", "What compute waited for"),
        _causes(overlay),
        element("h3", "Its longest waits"),
        table(
            ("waiting", "for", "at", "seconds"),
            [
                (stall.waiting, stall.cause, duration(stall.start_seconds), duration(stall.seconds))
                for stall in overlay.longest
            ],
            words=(0, 1),
        )
        if overlay.longest
        else "",
        element("h3", "Resources"),
        _resources(overlay),
        lead=difference_in_words(overlay),
        name="comparison",
        wide=True,
    )


def _kinds(overlay: Overlay) -> Markup:
    most = max((max(row.predicted_seconds, row.measured_seconds) for row in overlay.kinds), default=1.0)
    rows = []
    for row in overlay.kinds:
        colour = WORK_COLOURS.get(row.work, OTHER_COLOUR)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        rows.append(
            (
                joined(swatch(colour), row.work, f" · {row.layer_class}" if row.layer_class else ""),
                RESOURCE_LABELS.get(row.resource, row.resource),
                f"{row.count:,}",
                duration(row.predicted_seconds),
                duration(row.measured_seconds),
                ratio,
                both_ways(row.predicted_seconds, row.measured_seconds, most, colour),
            )
        )
    heads = ("kind", "on", "count", "predicted", "measured", "ratio", "predicted over measured")
    return table(heads, rows, words=(0, 1, 6))


def _causes(overlay: Overlay) -> Markup:
    floor = NEGLIGIBLE * overlay.measured.seconds
    shown = [row for row in overlay.causes if max(row.measured_seconds, row.predicted_seconds) >= floor]
    rest = [row for row in overlay.causes if row not in shown]
    most = max((max(row.predicted_seconds, row.measured_seconds) for row in shown), default=1.0)
    rows: list[Sequence[str]] = [
        (
            row.words,
            duration(row.predicted_seconds),
            duration(row.measured_seconds),
            both_ways(row.predicted_seconds, row.measured_seconds, most, WORK_COLOURS.get(row.work, OTHER_COLOUR)),
        )
        for row in shown
    ]
    if rest:
        rows.append((f"{len(rest)} other causes", *_sums(rest), ""))
    rows.append(("all of it", *_sums(overlay.causes), ""))
    return table(("what ran meanwhile", "predicted", "measured", "predicted over measured"), rows, words=(0, 3))


def _sums(rows: Sequence[CauseRow]) -> tuple[str, str]:
    return duration(sum(row.predicted_seconds for row in rows)), duration(sum(row.measured_seconds for row in rows))


def _resources(overlay: Overlay) -> Markup:
    rows = []
    for row in overlay.resources:
        sides = [
            (row.predicted_busy_seconds, overlay.predicted.seconds),
            (row.measured_busy_seconds, overlay.measured.seconds),
        ]
        cells = [cell for busy, whole in sides for cell in (duration(busy), percent(busy / whole if whole else 0.0))]
        rows.append((RESOURCE_LABELS.get(row.resource, row.resource), *cells))
    return table(("works", "predicted", "of the step", "measured", "of the step"), rows)
