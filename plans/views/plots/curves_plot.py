"""The picture of a run's curves. Needs matplotlib: import it when a plot is asked for."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...analysis.curves import Curves, Thinned, thinned
from ...documents.plan import Plan
from ...files import writing
from ..quantities import number

POINTS = 600
MOST = 1e150
"""What is larger is drawn there: matplotlib has no ticks for a range that is no number of its own."""
_TRAINING, _HELD_OUT, _FAINT = "#332288", "#CC6677", "#666666"


def write_curves_plot(curves: Curves, plan: Plan, directory: Path) -> Path:
    """Write training.png into `directory`, which is made if need be; its path. Raises OSError when it cannot."""
    path = directory / "training.png"
    figure = draw_curves(curves, plan)
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=100, metadata={"Software": "ssdplan"})
    return path


def draw_curves(curves: Curves, plan: Plan) -> Figure:
    """Loss, tokens a second, gradient norm and learning rate over the steps. Where a point stands for several steps,
    the line is their mean and the band reaches from the least to the largest."""
    figure = Figure(figsize=(12.0, 10.0), layout="constrained")
    FigureCanvasAgg(figure)
    loss, speed, norm, rate = figure.subplots(4, 1, sharex=True, height_ratios=(3, 2, 1.4, 1))
    name = "".join(char if char.isascii() and char.isprintable() else "?" for char in plan.model.name[:40])
    figure.suptitle(
        f"{curves.last:,} step{'' if curves.last == 1 else 's'} of {name}",
        x=0.01,
        ha="left",
        fontweight="bold",
        parse_math=False,
    )
    _line(loss, thinned(curves.steps, curves.of("loss"), POINTS), "training")
    if len(held_out := curves.held_out.sort_index()):
        loss.plot(
            held_out.index,
            np.clip(held_out, -MOST, MOST),
            marker="o",
            markersize=5,
            color=_HELD_OUT,
            linewidth=1.2,
            label="held-out",
        )
    loss.set_ylabel("loss")
    _line(speed, thinned(curves.steps, curves.of("tokens_per_second"), POINTS), "measured")
    predicted = plan.prediction.tokens_per_second
    words = f"predicted, {number(predicted)}"
    speed.axhline(predicted, color=_HELD_OUT, linewidth=1.2, linestyle="--", label=words)
    speed.set_ylabel("tokens/s, of all positions")
    speed.set_ylim(bottom=0.0)
    _line(norm, thinned(curves.steps, curves.of("grad_norm"), POINTS), "gradient norm")
    norm.set_ylabel("gradient norm")
    _line(rate, thinned(curves.steps, curves.of("lr"), POINTS), "learning rate")
    rate.set_ylabel("learning rate")
    rate.set_ylim(bottom=0.0)
    rate.set_xlabel("step")
    rate.xaxis.set_major_locator(MaxNLocator(integer=True))
    rate.set_xlim(0, 1.01 * max(curves.last, 1))  # so that the last point is whole
    for axes in (loss, speed, norm, rate):
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for after_step in curves.resumed:
            axes.axvline(after_step, color=_FAINT, linewidth=0.8, linestyle=":")
    if len(curves.resumed):
        loss.plot([], [], color=_FAINT, linewidth=0.8, linestyle=":", label="went on after a stop")
    for axes in (loss, speed):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, loc="upper right" if axes is loss else "lower right")
    return figure


def _line(axes: Axes, curve: Thinned, words: str) -> None:
    low, mean, high = (np.clip(values, -MOST, MOST) for values in (curve.low, curve.mean, curve.high))
    if np.any(high > low):
        axes.fill_between(curve.step, low, high, color=_TRAINING, alpha=0.18, linewidth=0)
    marker = "o" if len(curve.step) == 1 else None
    axes.plot(curve.step, mean, color=_TRAINING, linewidth=1.2, marker=marker, markersize=4, label=words)
