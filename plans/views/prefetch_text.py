"""The prefetch table in words (`plans/analysis/prefetch.py`): a line a row, within the width of a page.

Owns these lines.
"""

from collections.abc import Sequence

from ..analysis.prefetch import Entry, Stay
from ..documents.plan import Plan
from ..units import format_bytes, format_seconds
from .tables import NAME_COLUMNS, Row, page, short, table, wrapped

_HEADS: Sequence[Row] = (
    ("", "", "", "", "lives", "", "first", "last", "used", "passes", ""),
    ("", "state", "", "bytes", "on", "uses", "use", "use", "between", "through", "elsewhere"),
)


def describe_prefetch(plan: Plan, entries: Sequence[Entry], seconds: float) -> str:
    """The table of a step that takes so long."""
    rows = [_row(entry) for entry in entries]
    meanings = (
        "By first use in a steady step, as predicted; times in seconds. uses: operations that compute with the state "
        "or update it. used between: the most bytes of other rows that are used between two uses of this one. passes "
        "through: the largest place that it has elsewhere. elsewhere: on which tier besides, from when to when first; "
        "+N: and N times more.",
        f"The step takes {format_seconds(seconds)}. --csv FILE has all of it, in seconds and bytes.",
    )
    title = f"Prefetch table: {plan.model.name}, {len(entries)} rows"
    body = table(_HEADS, rows, left=(1, 2, 4, 10))
    return page(title, [*(line for each in meanings for line in wrapped(each)), "", *body])


def _row(entry: Entry) -> Row:
    return (
        str(entry.order),
        short(entry.state, NAME_COLUMNS // 2),
        "opt" if entry.what == "optimizer states" else "par",
        _brief(entry.nbytes),
        "+".join(entry.home),
        str(entry.uses),
        _moment(entry.first),
        _moment(entry.last),
        "-" if entry.between is None else _brief(entry.between),
        "-" if entry.size_class is None else _brief(entry.size_class),
        _elsewhere(entry.stays),
    )


def _elsewhere(stays: Sequence[Stay]) -> str:
    """The first of its stays; more are counted."""
    if not stays:
        return ""
    more = f" +{len(stays) - 1}" if len(stays) > 1 else ""
    return f"{stays[0].tier} {stays[0].start:.3g}-{stays[0].end:.3g}{more}"


def _moment(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g}"


def _brief(nbytes: int) -> str:
    return format_bytes(nbytes).replace("iB", "")
