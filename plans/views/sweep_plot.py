"""The picture of a sweep: throughput against what was swept. Needs matplotlib: import it when a plot is asked for."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..documents.sweep import Sweep
from ..files import writing


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
    places = range(len(sweep.points))
    found = [(place, point.result) for place, point in zip(places, sweep.points, strict=True) if point.result]
    axes.plot([place for place, _ in found], [r.tokens_per_second for _, r in found], marker="o", color="#332288")
    refused = [place for place, point in zip(places, sweep.points, strict=True) if not point.result]
    axes.plot(refused, [0.0] * len(refused), linestyle="", marker="x", color="#CC6677", label="no plan fits")
    axes.set_xticks(list(places), [point.label for point in sweep.points])
    axes.set_xlabel(sweep.name)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(0.0, 1.1 * max((r.tokens_per_second for _, r in found), default=1.0))
    axes.grid(axis="y", alpha=0.3)
    axes.set_title(sweep.title + (", estimated" if sweep.estimated else ""), loc="left")
    if refused:
        axes.legend(frameon=False)
    return figure
