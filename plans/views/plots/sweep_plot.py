"""The picture of a sweep: throughput against what was swept, as bars where that has names.

Needs matplotlib: import it when a plot is asked for.
"""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...analysis.frames import sweep_frame
from ...documents.sweep import Sweep
from ...files import writing

LABELS = 80
"""Characters of names that fit beside each other below the axis."""


def write_sweep_plot(sweep: Sweep, directory: Path) -> Path:
    """Write sweep.png into `directory`, which is made if need be; its path. Raises OSError when it cannot."""
    path = directory / "sweep.png"
    figure = draw_sweep(sweep)
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=100, metadata={"Software": "ssdplan"})
    return path


def draw_sweep(sweep: Sweep) -> Figure:
    """Tokens a second at each point, over its number, or as a bar over its name; crosses at 0 stand where there is no
    plan."""
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    points = sweep_frame(sweep)
    rates = points["tokens_per_second"]
    found, refused = rates.dropna(), rates.index[rates.isna()]
    named = bool(points["value"].isna().all())
    if named:
        axes.bar(found.index, found, width=0.6, color="#332288")
    else:
        axes.plot(found.index, found, marker="o", color="#332288")
    axes.plot(refused, [0.0] * len(refused), linestyle="", marker="x", color="#CC6677", label="no plan")
    axes.set_xticks(points.index, points["label"])
    if named and points["label"].str.len().sum() > LABELS:
        axes.tick_params("x", labelrotation=20)
    axes.set_xlabel(sweep.name)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(0.0, 1.1 * (found.max() if len(found) else 1.0))
    axes.grid(axis="y", alpha=0.3)
    axes.set_title(sweep.title + (", estimated" if sweep.estimated else ""), loc="left")
    if len(refused):
        axes.legend(frameon=False)
    return figure
