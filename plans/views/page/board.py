"""The board: how far a call from Python is, as an object that a notebook draws.

Owns what it holds and looks like. Who fills it and when it is drawn again is the caller's business.
"""

import math
from dataclasses import dataclass, field

from ...printable import printable
from .html import Markup, element

MOST_LINES = 200
SHOWN_LINES = 6
WIDTH, HEIGHT, EDGE = 560.0, 120.0, 4.0


@dataclass
class Board:
    """How far a call is: lines as the command line prints them, and of a run its losses so far."""

    title: str
    lines: list[str] = field(default_factory=list)
    """The last `MOST_LINES`, the newest last."""
    steps: int = 0
    """Of the whole run; 0 until that is known."""
    losses: list[float] = field(default_factory=list)
    """Of the steps that this call has made."""
    step: int = 0
    """The last step that ended, counted from the run's first; 0 before."""

    @property
    def text(self) -> str:
        """The newest line."""
        return self.lines[-1] if self.lines else ""

    @property
    def fraction(self) -> float | None:
        """The share of the run's steps that are done; None until their number is known."""
        return self.step / self.steps if self.steps else None

    def tell(self, line: str) -> None:
        """A line more. Nothing in it steers a terminal."""
        self.lines.append(printable(line))
        del self.lines[:-MOST_LINES]

    def _repr_html_(self) -> str:
        shown = "\n".join(self.lines[-SHOWN_LINES:])
        parts = [element("b", self.title if not self.steps else f"{self.title}: step {self.step} of {self.steps}")]
        if self.fraction is not None:
            parts.append(element("progress", value=self.fraction, max="1", style="width:100%"))
        if curve := self._curve():
            parts.append(curve)
        parts.append(element("pre", shown, style="white-space:pre-wrap;margin:0"))
        return element("div", *parts)

    def _curve(self) -> Markup | None:
        """The losses as a line, with the first and the last in words; nothing of fewer than two."""
        points = [(index, loss) for index, loss in enumerate(self.losses) if math.isfinite(loss)]
        if len(points) < 2:
            return None
        least, most = min(loss for _, loss in points), max(loss for _, loss in points)
        last, span = max(points[-1][0], 1), most - least or 1.0
        drawn = " ".join(
            f"{EDGE + index / last * (WIDTH - 2 * EDGE):.1f},{EDGE + (most - loss) / span * (HEIGHT - 2 * EDGE):.1f}"
            for index, loss in points
        )
        line = element("polyline", points=drawn, fill="none", stroke="currentColor", stroke_width=1.5)
        words = f"training loss: {points[0][1]:.4f} first, {points[-1][1]:.4f} last"
        picture = element("svg", line, viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", width=WIDTH, height=HEIGHT, role="img")
        return element("figure", picture, element("figcaption", words), style="margin:0")
