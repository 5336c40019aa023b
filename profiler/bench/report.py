"""What a benchmark found: rows that each compare one thing of ours with a rival, as text, as JSON and as a table.

Owns the fields that docs/benchmarks.md explains, and their layout. It measures nothing, and a target that was missed is
told as plainly as one that was met.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from ssdplan.plans.units import format_bytes
from ssdplan.plans.views.quantities import number, rate
from ssdplan.plans.views.tables import facts, page, table, wrapped

from .turns import Ratio

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA = "ssdplan.bench/1"
HEADINGS = {
    "engine": "Engine: direct I/O to and from a file, against",
    "adam": "Adam: update of fp32 states and a bf16 copy of the weights, in elements a second, against",
    "overflow": "Overflow: whether an fp32 gradient is finite, in elements a second, against",
    "quantise": "Quantise: fp32 to int8 by groups of 64 and back, in elements a second, against",
    "zeroth-order": "Zeroth order: the last update and both perturbations of bf16 parameters, against",
    "checksum": "Checksum: of what lies on disk, against",
    "page-lock": "Page-lock: what an arena takes that nobody asked for",
}
"""What each group measures of ours; the rows then name rivals."""
FIELDS = (
    *("group", "name", "unit", "ours", "rival", "ratio", "ratio_low", "ratio_high"),
    *("target", "target_is", "met", "missing", "note"),
)
"""Of a row, in the document and as columns; `ours` and `rival` are in the row's `unit`."""
Unit = Literal["B/s", "elements/s", "B"]


@dataclass(frozen=True, slots=True)
class Target:
    """What a ratio should be: at least so much, or, where less is better, at most."""

    value: float
    at_most: bool = False

    def met(self, ratio: float) -> bool:
        return ratio <= self.value if self.at_most else ratio >= self.value

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. What was not measured is None, and `missing` says why and what would help."""

    group: str
    name: str
    """What is done, and against whom; with the group, the row's key."""
    unit: Unit
    ours: float | None = None
    """The median of our runs."""
    rival: float | None = None
    """The median of the rival's."""
    ratio: Ratio | None = None
    """How many times as fast ours is, pair by pair; of bytes, how many times as much it takes."""
    target: Target | None = None
    missing: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None without a target or a measurement."""
        return self.target.met(self.ratio.median) if self.target and self.ratio else None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a figure must not be quoted without."""

    processor: str
    cores: int
    isa: str
    host_memory_bytes: int
    kernel: str
    huge_pages: str
    """The kernel's setting for transparent huge pages."""
    python: str
    torch: str
    load: float
    """Processes that ran or waited to, over the minute before."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A whole run of the command."""

    created: str
    machine: Surroundings
    volumes: tuple[str, ...]
    size_bytes: int
    pairs: int
    rows: tuple[Row, ...]

    def json(self) -> str:
        """The document, with the fields of docs/benchmarks.md."""
        document = {
            "schema": SCHEMA,
            "created": self.created,
            "machine": asdict(self.machine),
            "volumes": list(self.volumes),
            "size_bytes": self.size_bytes,
            "pairs": self.pairs,
            "rows": [_fields(row) for row in self.rows],
        }
        return json.dumps(document, indent=1) + "\n"


def describe_bench(bench: Bench) -> str:
    """For a person, in at most 100 columns."""
    machine = bench.machine
    found = rows_frame(bench.rows)
    busy = "; something else was running, so measure again" if machine.load > 0.5 else ""
    opening = (
        f"{bench.pairs} {'pair' if bench.pairs == 1 else 'pairs'} of runs, in turns. A ratio is how many times as fast "
        "ours is: the median of the pairs' own ratios, with their quartiles."
    )
    return page(
        f"Bench: {machine.processor}, {machine.cores} cores",
        [*wrapped(opening), _targets(found)],
        (
            "Machine",
            facts(
                ("processor", f"{machine.processor}, {machine.cores} cores, {machine.isa}"),
                ("host memory", f"{format_bytes(machine.host_memory_bytes)}, huge pages: {machine.huge_pages}"),
                ("software", f"Linux {machine.kernel}, Python {machine.python}, torch {machine.torch}"),
                ("load before", f"{machine.load:.2f}{busy}"),
                ("size", f"{format_bytes(bench.size_bytes)} of memory, and of files where there are any"),
                *(("volume", volume) for volume in bench.volumes),
            ),
        ),
        *(
            (HEADINGS[group], _group([bench.rows[place] for place in mine.index]))
            for group, mine in found.groupby("group", sort=False)
        ),
    )


def rows_frame(rows: Sequence[Row]) -> "DataFrame":
    """A row for each of `rows`, in their order: the fields of the document."""
    from ssdplan.plans.analysis.frames import NUMBER, TEXT, TRUTH, frame_of  # when nothing is measured any more

    types = {name: TEXT for name in ("group", "name", "unit", "target_is", "missing", "note")} | {"met": TRUTH}
    return frame_of({name: types.get(name, NUMBER) for name in FIELDS}, map(_fields, rows))


def _targets(found: "DataFrame") -> str:
    held, missed = (int((found["met"] == met).sum()) for met in (True, False))
    untold = int((found["target"].notna() & found["met"].isna()).sum())
    return f"Targets: {held} met, {missed} missed, {untold} not measured."


def _group(rows: Sequence[Row]) -> list[str]:
    cells = [("", "ours", "rival", "ratio", "quartiles", "target", "")]
    remarks: list[str] = []
    for row in rows:
        ratio, low, high = (
            (_times(v) for v in (row.ratio.median, row.ratio.low, row.ratio.high)) if row.ratio else "---"
        )
        met = {True: "met", False: "MISSED", None: ""}[row.met]
        target = str(row.target) if row.target else ""
        between = f"{low} to {high}" if row.ratio else ""
        cells.append((row.name, _value(row.ours, row.unit), _value(row.rival, row.unit), ratio, between, target, met))
        for remark in (f"not measured: {row.missing}" if row.missing else "", row.note):
            if remark:
                remarks += [f"  {line}" for line in wrapped(f"{row.name}: {remark}")]
    return [*table(cells, [], left=(0, 6)), *remarks]


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _value(value: float | None, unit: Unit) -> str:
    if value is None:
        return "-"
    if unit == "B":
        return format_bytes(value)
    return rate(value) if unit == "B/s" else f"{number(value / 1e6)} M/s"


def _fields(row: Row) -> dict[str, object]:
    ratio, target = row.ratio, row.target
    of_ratio = (ratio.median, ratio.low, ratio.high) if ratio else (None, None, None)
    of_target = (target.value, "at most" if target.at_most else "at least") if target else (None, None)
    own = (row.group, row.name, row.unit, row.ours, row.rival)
    return dict(zip(FIELDS, (*own, *of_ratio, *of_target, row.met, row.missing, row.note), strict=True))
