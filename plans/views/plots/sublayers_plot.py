"""The picture of a profile's sub-layers: what autograd saves of each a second, under the fence and the link.

It is the paper's figure 2 (PyAO, section 3.4).
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...analysis.sublayers import blocks_with_backward, bound_of, fence, outliers, throughput
from ...documents.profile import Profile, Timing
from ...files import writing
from ..quantities import rate, times
from ..tables import NAME_COLUMNS, short

_KEPT, _OUTLIER, _FENCE, _LINK = "#88CCEE", "#CC6677", "#332288", "#117733"
NAMED = 64
"""The most sub-layers of a class whose names are written below their bars."""


def write_sublayers_plot(profile: Profile, directory: Path) -> Path:
    """Write sublayers.png into `directory`, which is made if need be; its path. Raises OSError when it cannot."""
    path = directory / "sublayers.png"
    figure = draw_sublayers(profile)
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=100, metadata={"Software": "ssdplan"})
    return path


def draw_sublayers(profile: Profile) -> Figure:
    """A row of bars for each class of blocks with sub-layers, in order, at the largest micro-batch size."""
    model, bandwidth = profile.model, bound_of(profile.machine)
    size = max(model.micro_batch_sizes)
    timings = {name: model.timing(name, size) for name in blocks_with_backward(model)}
    timings = {name: timing for name, timing in timings.items() if timing.sublayers}
    most = max((len(timing.sublayers) for timing in timings.values()), default=1)
    figure = Figure(figsize=(min(max(9.0, 0.45 * most), 30.0), 5.5 * max(len(timings), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(max(len(timings), 1), 1, squeeze=False)[:, 0]
    for axes, (name, timing) in zip(rows, timings.items(), strict=False):
        _draw_class(axes, timing, bandwidth)
        title = f"Activation throughput of {short(name, NAME_COLUMNS)}: {short(model.name, 34)}"
        axes.set_title(f"{title}, a micro-batch of {times(size, 'row')}", loc="left")
    return figure


def _draw_class(axes: Axes, timing: Timing, bandwidth: float) -> None:
    sublayers = timing.sublayers
    throughputs = [throughput(each) / 1e9 for each in sublayers]
    numbers = list(range(len(sublayers)))
    which = outliers(sublayers, bandwidth)
    for outlier, colour, words in ((False, _KEPT, "no outlier"), (True, _OUTLIER, "outlier: PyAO recomputes it")):
        chosen = [number for number in numbers if which[number] == outlier]
        if chosen:
            axes.bar(chosen, [throughputs[number] for number in chosen], color=colour, label=words)
    bound = fence(sublayers)
    axes.axhline(bound / 1e9, color=_FENCE, linestyle="--", label=f"fence, Q3 + 1.5 IQR: {rate(bound)}")
    axes.axhline(bandwidth / 1e9, color=_LINK, linestyle="-.", label=f"link, its slower way: {rate(bandwidth)}")
    axes.set_xlim(-0.6, len(sublayers) - 0.4)
    axes.set_ylim(0.0, 1.1 * max([*throughputs, bound / 1e9, bandwidth / 1e9]))
    if len(sublayers) <= NAMED:
        names = [short(each.name, NAME_COLUMNS).replace("$", r"\$") for each in sublayers]
        axes.set_xticks(numbers, names, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    else:
        axes.set_xlabel("sub-layer, in order of execution")
    axes.set_ylabel("saved a second of forward, GB/s")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9)
