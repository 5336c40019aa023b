"""A sweep as a table for a person, one row a point. Owns its columns."""

from textwrap import wrap

import pandas as pd

from ..analysis.frames import sweep_frame
from ..documents.sweep import Sweep
from ..units import format_bytes
from .quantities import bar, duration, number
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
    lines += ["", _line(width, sweep.name, "tokens/s", "", "step", "batch", "written", "device") + "bound by"]
    for point in points.itertuples():
        if pd.isna(point.tokens_per_second):
            lines += hanging(f"  {point.label:>{width}}  ", point.refusal)
            continue
        lines += hanging(
            _line(
                width,
                point.label,
                number(point.tokens_per_second),
                bar(point.tokens_per_second, most, BAR_COLUMNS),
                duration(point.step_seconds),
                f"{point.micro_batches} x {point.micro_batch_size}",
                format_bytes(point.ssd_write_bytes),
                format_bytes(point.peak_device_bytes),
            ),
            point.bound_by,
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _line(width: int, name: str, rate: str, gauge: str, step: str, batch: str, written: str, device: str) -> str:
    head = f"  {name:>{width}}  {rate:>8}  {gauge:<{BAR_COLUMNS + 2}}  {step:>8}  {batch:>7}"
    return f"{head}  {written:>8}  {device:>8}  "
