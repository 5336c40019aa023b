"""The picture of a sweep: throughput against what was swept. Needs matplotlib: import it when a plot is asked for."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...analysis.frames import sweep_frame
from ...documents.sweep import Sweep
from ...files import writing


def write_sweep_plot(sweep: Sweep, directory: Path) -> Path:
    """Write sweep.png into `directory`, which is made if need be; its path. Raises OSError when it cannot."""
    path = directory / "sweep.png"
    figure = draw_sweep(sweep)
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=100, metadata={"Software": "ssdplan"})
    return path


def draw_sweep(sweep: Sweep) -> Figure:
    """Tokens a second at each point, over its number; crosses at 0 stand where no plan fits."""
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    points = sweep_frame(sweep)
    rates = points["tokens_per_second"]
    found, refused = rates.dropna(), rates.index[rates.isna()]
    axes.plot(found.index, found, marker="o", color="#332288")
    axes.plot(refused, [0.0] * len(refused), linestyle="", marker="x", color="#CC6677", label="no plan fits")
    axes.set_xticks(points.index, points["label"])
    axes.set_xlabel(sweep.name)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(0.0, 1.1 * (found.max() if len(found) else 1.0))
    axes.grid(axis="y", alpha=0.3)
    axes.set_title(sweep.title + (", estimated" if sweep.estimated else ""), loc="left")
    if len(refused):
        axes.legend(frameon=False)
    return figure
