"""The page's table of what a step finds in time: predicted, and of a run as measured. Owns its heads and its order."""

from ...analysis.cache import Beside
from ..cache_text import NO_DEVICE, figure_rows, on_demand_in_words, on_ssd_in_words, without_device
from .html import Markup, element, section, table

LEAD = (
    "Hits are the uses of parameters for which compute did not wait, or of those from host memory the link; misses are "
    "the updates that wait for their optimizer states."
)


def found_in_time(beside: Beside) -> Markup:
    """The table; of a plan without what was measured."""
    measured = beside.measured is not None
    heads = ("", "predicted", "measured") if measured else ("", "predicted")
    rows = [row if measured else row[:2] for row in figure_rows(beside)]
    of = " Measured is the mean of all steps." if measured else ""
    return section(
        "What a steady step finds in time",
        table(heads, rows),
        element("p", NO_DEVICE) if without_device(beside) else "",
        element("p", f"States on ssd: {on_ssd_in_words(beside.on_ssd)}."),
        element("p", f"Fetched on demand: {on_demand_in_words(beside.on_demand)}.") if beside.on_demand else "",
        lead=LEAD + of,
        name="cache",
        wide=True,
    )
