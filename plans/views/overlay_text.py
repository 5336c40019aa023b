"""A measured step over the predicted one, as text: kinds of work, resources, and what compute waited for.

Owns the tables and their words. The sums are `analysis/overlay.py`'s.
"""

from collections.abc import Sequence

from ..analysis.overlay import KindRow, Overlay
from ..analysis.work import RESOURCE_LABELS
from ..graph.ops import Resource
from .quantities import duration, percent
from .tables import hanging, page, table

NEGLIGIBLE = 0.001
"""Of a step: causes of stalls that together cost less are one row of the text; JSON has all."""
STEPS = {
    "first": "a step without delayed updates of the one before it",
    "steady": "a step that finishes the delayed updates of the one before it",
}


def describe_overlay(overlay: Overlay) -> str:
    """The comparison as text of at most 100 columns."""
    measured, predicted = overlay.measured.seconds, overlay.predicted.seconds
    name = overlay.measured.graph.name
    both = f"{duration(measured)} measured, {duration(predicted)} predicted ({measured / predicted - 1:+.1%})"
    opening = [f"{both}; {STEPS.get(name, name)}.", difference_in_words(overlay)]
    when = [(duration(stall.seconds), f"at {duration(stall.start_seconds)}") for stall in overlay.longest]
    heads = table([], when, left=()) if when else []
    longest = [
        line
        for head, stall in zip(heads, overlay.longest, strict=True)
        for line in hanging(f"{head}  ", f"{stall.waiting}: {stall.cause}")
    ]
    return page(
        "The last step as measured, laid over its prediction",
        opening,
        ("Operations by kind: seconds in all, and measured over predicted", _kinds_table(overlay.kinds)),
        ("Resources: how long each works, and of the step", _resources_table(overlay)),
        ("What compute waited for: what ran meanwhile, without which it could not go on", _causes_table(overlay)),
        ("The longest of these waits", longest),
    )


def difference_in_words(overlay: Overlay) -> str:
    """Where the difference of the two steps comes from: compute's own time and its waiting, which sum to it."""
    compute = next(row for row in overlay.resources if row.resource == "compute")
    own = compute.measured_busy_seconds - compute.predicted_busy_seconds
    waiting = compute.measured_idle_seconds - compute.predicted_idle_seconds
    sides = [f"{duration(abs(value))} {'longer' if value >= 0 else 'shorter'}" for value in (own, waiting)]
    return f"Compute itself took {sides[0]} than predicted, and it waited {sides[1]}."


def _duration(seconds: float) -> str:
    return duration(seconds) if seconds else "-"


def _kinds_table(rows: Sequence[KindRow]) -> list[str]:
    cells = []
    named: Resource | None = None
    for row in rows:
        resource = "" if row.resource == named else RESOURCE_LABELS.get(row.resource, row.resource)
        named = row.resource
        work = row.work.replace("hidden states, checkpoints, their gradients", "hidden states and such")
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        times = (_duration(row.predicted_seconds), _duration(row.measured_seconds))
        cells.append((resource, work, row.layer_class, f"{row.count:,}", *times, ratio))
    return table([("", "", "", "count", "predicted", "measured", "")], cells, left=(0, 1, 2))


def _resources_table(overlay: Overlay) -> list[str]:
    cells = []
    for row in overlay.resources:
        sides = (
            (row.predicted_busy_seconds, overlay.predicted.seconds),
            (row.measured_busy_seconds, overlay.measured.seconds),
        )
        shares = [(_duration(busy), percent(busy / whole if whole else 0.0)) for busy, whole in sides]
        cells.append((RESOURCE_LABELS.get(row.resource, row.resource), *shares[0], *shares[1]))
    return table([("", "predicted", "", "measured", "")], cells, left=(0,))


def _causes_table(overlay: Overlay) -> list[str]:
    floor = NEGLIGIBLE * overlay.measured.seconds
    shown = [row for row in overlay.causes if max(row.measured_seconds, row.predicted_seconds) >= floor]
    rest = [row for row in overlay.causes if row not in shown]
    sums = [(row.words, row.predicted_seconds, row.measured_seconds) for row in shown]
    for words, rows in ((f"{len(rest)} other causes", rest), ("all of it", overlay.causes)):
        if rows:
            sums.append((words, sum(row.predicted_seconds for row in rows), sum(row.measured_seconds for row in rows)))
    if not sums:
        return ["  nothing: it works from the first moment to the last"]
    whole = overlay.measured.seconds
    cells = [
        (words, _duration(predicted), _duration(measured), percent(measured / whole if whole else 0.0))
        for words, predicted, measured in sums
    ]
    return table([("", "predicted", "measured", "of the step")], cells, left=(0,))
