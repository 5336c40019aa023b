"""The picture of a comparison: speed against memory, and losses. Needs matplotlib: import it when it is asked for."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ssdplan.plans.files import writing

from .comparison import LETTERS, ArmResult, Comparison

COLOURS = ("#332288", "#88CCEE", "#CC6677", "#DDCC77", "#117733", "#882255", "#44AA99", "#AA4499")


def write_picture(found: Comparison, directory: Path) -> Path:
    """Write compare.png into `directory`, which is made if need be; its path. Raises OSError when it cannot."""
    path = directory / "compare.png"
    figure = draw(found)
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=100, metadata={"Software": "ssdplan"})
    return path


def draw(found: Comparison) -> Figure:
    """On the left tokens a second over peak memory, on the right the loss of each step; arms in the same colours."""
    figure = Figure(figsize=(12.0, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    speed, losses = figure.subplots(1, 2)
    arms = zip(LETTERS, found.arms, COLOURS, strict=False)
    measured = [(letter, arm, colour) for letter, arm, colour in arms if arm.step_seconds]
    _speed(speed, measured)
    for number, (letter, arm, colour) in enumerate(measured):
        # Lines that lie upon each other, as they should, are seen all the same: the first is the widest.
        width = 1.0 + 1.2 * (len(measured) - 1 - number)
        losses.plot(range(1, found.steps + 1), arm.losses, color=colour, linewidth=width, label=f"{letter} {arm.name}")
    losses.set_xlabel("step")
    losses.set_ylabel("loss")
    losses.grid(alpha=0.3)
    if measured:
        figure.legend(loc="outside right upper", frameon=False)
    rows = f"{found.micro_batches} x {found.micro_batch_size} rows of {found.sequence_length} tokens"
    figure.suptitle(f"{found.model}, {rows}, {found.machine.threads} threads", x=0.01, ha="left")
    return figure


def _speed(axes: Axes, measured: list[tuple[str, ArmResult, str]]) -> None:
    for letter, arm, colour in measured:
        assert arm.peak_memory_bytes and arm.tokens_per_second
        memory = arm.peak_memory_bytes / (1 << 30)
        axes.plot([memory], [arm.tokens_per_second], linestyle="", marker="o", markersize=9, color=colour)
        axes.annotate(letter, (memory, arm.tokens_per_second), xytext=(7, 5), textcoords="offset points")
    axes.set_xlabel("peak memory of the process, GiB")
    axes.set_ylabel("tokens/s")
    axes.set_xlim(0.0, 1.25 * max((arm.peak_memory_bytes or 0 for _, arm, _ in measured), default=1 << 30) / (1 << 30))
    axes.set_ylim(0.0, 1.2 * max((arm.tokens_per_second or 0.0 for _, arm, _ in measured), default=1.0))
    axes.grid(alpha=0.3)
