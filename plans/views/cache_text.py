"""10Cache's table and figures in words: the prefetch table (`plans/analysis/prefetch.py`), a line a row, and what a
step finds in time (`plans/analysis/cache.py`), as predicted and as measured.

Owns these lines, within the width of a page.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..analysis.cache import FIGURES, Beside, OnSsd
from ..analysis.prefetch import Entry, Stay
from ..documents.metrics import CacheFigures
from ..documents.plan import Plan
from ..units import format_bytes, format_seconds
from .quantities import duration, percent
from .tables import NAME_COLUMNS, Row, facts, page, short, table, wrapped

_HEADS: Sequence[Row] = (
    ("", "", "", "", "lives", "", "first", "last", "used", "passes", ""),
    ("", "state", "", "bytes", "on", "uses", "use", "use", "between", "through", "elsewhere"),
)


NAMES = {
    "device_hit_rate": "device hits",
    "host_hit_rate": "host hits",
    "optimizer_miss_rate": "optimizer misses",
    "waits_below_10us": "waits below 0.01 ms",
    "waits_below_30us": "waits below 0.03 ms",
    "waits_below_100us": "waits below 0.1 ms",
    "compute_wait_seconds": "compute waits for data",
    "device_memory_use": "device memory in use",
    "host_memory_use": "host memory in use",
    "ssd_use": "ssd in use",
}
"""What people call each figure, in the order of the table."""
_MOST = 1e15
NO_DEVICE = "Compute works on host memory itself, so there are no device hits."


def describe_cache(beside: Beside) -> str:
    """The table of a run that has no report yet, as a page."""
    title = "What its steps found in time: the mean of all steps so far"
    return page(title, cache_lines(beside))


def cache_lines(beside: Beside) -> list[str]:
    """Each figure as predicted and as measured; and how many states live on ssd."""
    lines = table([("", "predicted", "measured")], figure_rows(beside), left=(0,))
    return [
        *lines,
        *([f"  {NO_DEVICE}"] if without_device(beside) else []),
        f"  states on ssd: {on_ssd_in_words(beside.on_ssd)}",
    ]


def predicted_lines(beside: Beside) -> list[str]:
    """The figures of a plan alone. Its bars of memory have what is left out here."""
    if beside.predicted is None:
        return []
    found, told = beside.predicted, []
    below = [found.waits_below_10us, found.waits_below_30us, found.waits_below_100us]
    if found.device_hit_rate is not None:
        told.append(("device hits", f"{share(found.device_hit_rate)} of the uses of parameters: compute does not wait"))
    if without_device(beside) and found.host_hit_rate is not None:
        words = f"{share(found.host_hit_rate)} of the uses of parameters: compute, on host memory itself, does not wait"
        told.append(("host hits", words))
    elif found.host_hit_rate is not None:
        words = f"{share(found.host_hit_rate)} of the uses that come from host memory: the link does not wait"
        told.append(("host hits", words))
    if None not in below:
        shares = [share(each) for each in below if each is not None]
        told.append(("waits", f"{shares[0]} of the uses below 0.01 ms, {shares[1]} below 0.03, {shares[2]} below 0.1"))
    if found.optimizer_miss_rate is not None:
        words = f"{share(found.optimizer_miss_rate)} of the updates wait for their optimizer states"
        told.append(("optimizer misses", words))
    if found.compute_wait_seconds is not None:
        told.append(("compute waits", f"{_figure('compute_wait_seconds', found)} in all for data of any kind"))
    told.append(("states on ssd", on_ssd_in_words(beside.on_ssd)))
    if beside.on_demand:
        told.append(("fetched on demand", on_demand_in_words(beside.on_demand)))
    return facts(*told)


def on_demand_in_words(found: CacheFigures) -> str:
    """The shares of ZeRO-Infinity's habits, in a line."""
    hits = found.host_hit_rate if found.device_hit_rate is None else found.device_hit_rate
    told = [f"hits {share(hits)}"] if hits is not None else []
    if found.waits_below_30us is not None:
        told.append(f"waits below 0.03 ms {share(found.waits_below_30us)}")
    if found.optimizer_miss_rate is not None:
        told.append(f"misses {share(found.optimizer_miss_rate)}")
    return f"{', '.join(told)}, by ZeRO-Infinity's habits"


def figure_rows(beside: Beside) -> list[tuple[str, str, str]]:
    """(name, predicted, measured) of each figure that either has."""
    sides = [side or CacheFigures() for side in (beside.predicted, beside.measured)]
    return [
        (words, _figure(name, sides[0]), _figure(name, sides[1]))
        for name, words in NAMES.items()
        if any(getattr(side, name) is not None for side in sides)
    ]


def without_device(beside: Beside) -> bool:
    """Whether compute works on host memory itself: then there are host hits alone, of the same uses."""
    either = beside.predicted or beside.measured
    return either is not None and either.device_hit_rate is None and either.host_hit_rate is not None


def on_ssd_in_words(found: OnSsd) -> str:
    """How many states live there, wholly or in part."""
    words = f"parameters of {found.parameters:,} of {found.parameters_of:,} ({found.parameters_whole:,} whole)"
    if not found.optimizer_states_of:
        return words
    more = f"{found.optimizer_states:,} of {found.optimizer_states_of:,} ({found.optimizer_states_whole:,} whole)"
    return f"{words}, optimizer states of {more}"


def read_figures(told: Mapping[str, Any] | None) -> CacheFigures | None:
    """The figures as a document has them. Raises ValueError for what is no number."""
    if told is None:
        return None
    for name in FIGURES:
        value = told[name]
        if value is not None and (type(value) not in (int, float) or not 0 <= value <= _MOST):
            raise ValueError(f"cache.{name} is no number from 0 to {_MOST:g}")
    return CacheFigures(**{name: None if told[name] is None else float(told[name]) for name in FIGURES})


def share(value: float) -> str:
    """In percent; none is 0%, as what was not counted is `-`."""
    return percent(value) if value > 0 else "0%"


def _figure(name: str, figures: CacheFigures) -> str:
    value: float | None = getattr(figures, name)
    if value is None:
        return "-"
    if name == "compute_wait_seconds":
        return duration(value) if value else "0 s"
    return share(value)


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
