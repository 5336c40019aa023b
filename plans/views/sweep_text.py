"""A sweep as a table for a person, one row a point. Owns its columns."""

from collections.abc import Callable
from textwrap import wrap

import pandas as pd

from ..analysis.frames import sweep_frame
from ..documents.sweep import Sweep
from ..units import format_bytes
from .quantities import bar, count, duration, money, number, percent
from .tables import COLUMNS, clean, hanging

BAR_COLUMNS = 12


def describe_sweep(sweep: Sweep) -> str:
    """A table, one row a point."""
    points = sweep_frame(sweep)
    most = points["tokens_per_second"].max()
    width = max(len(sweep.name), points["label"].str.len().max())
    title = f"{sweep.title}, by {sweep.name}"
    lines = [*wrap(clean(title), COLUMNS), "=" * min(len(title), COLUMNS)]
    if sweep.estimated:
        lines.append("Estimated from data sheets and the model's shape: a what-if; nothing was measured.")
    if sweep.tokens is not None:
        lines += wrap(_of_training(sweep), COLUMNS)
    paid = sweep.tokens is not None
    heads = ("hours", "cost", "worn") if paid else ("written", "device")
    gauge = 0 if paid else BAR_COLUMNS + 2
    lines += ["", _line(width, sweep.name, "tokens/s", " " * gauge, "step", "batch", *heads) + "bound by"]
    for point in points.itertuples():
        if pd.isna(point.tokens_per_second):
            lines += hanging(f"  {point.label:>{width}}  ", point.refusal)
            continue
        lines += hanging(
            _line(
                width,
                point.label,
                number(point.tokens_per_second),
                "" if paid else bar(point.tokens_per_second, most, BAR_COLUMNS),
                duration(point.step_seconds),
                f"{point.micro_batches} x {point.micro_batch_size}",
                *(
                    (number(point.hours), _figure(point.cost, money), _figure(point.worn, _share))
                    if paid
                    else (format_bytes(point.ssd_write_bytes), format_bytes(point.peak_device_bytes))
                ),
            ),
            point.bound_by,
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _line(width: int, name: str, rate: str, gauge: str, step: str, batch: str, *others: str) -> str:
    head = f"  {name:>{width}}  {rate:>8}  {gauge}{'  ' if gauge else ''}{step:>8}  {batch:>7}"
    return head + "".join(f"  {each:>8}" for each in others) + "  "


def _of_training(sweep: Sweep) -> str:
    """What the columns of a training are, as far as there are any."""
    results = [point.result for point in sweep.points if point.result]
    assert sweep.tokens is not None
    words = f"hours: for {count(sweep.tokens)} tokens, steps alone"
    if any(result.cost is not None for result in results):
        words += "; cost: in the currency of the prices"
    words += "; worn: of the bytes that the drive is rated for, what is written"
    worn_out = any(result.worn is not None and result.worn > 1 for result in results)
    return words + ("; at more than 100% it does not last so long." if worn_out else ".")


def _figure(value: float, written: Callable[[float], str]) -> str:
    return "-" if pd.isna(value) else written(value)


def _share(value: float) -> str:
    return f"{value:.0%}" if value > 1 else percent(value)
