"""The page's part on a run's training: its curves, as SVG that needs no script, and its figures."""

from collections.abc import Sequence

import numpy as np

from ...analysis.curves import Curves, Thinned, thinned
from ...documents.plan import Plan
from ..curves_text import figures
from ..quantities import number
from .charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Scale, ticks
from .colours import colour_class
from .html import Markup, element, facts, section

POINTS = 400
_COLOUR = "#332288"
_HELD_OUT = "#CC6677"


def training(curves: Curves, plan: Plan) -> Markup:
    """Loss and speed over the steps; nothing before the first step."""
    if not len(curves):
        return Markup()
    return section(
        "Training",
        element(
            "div",
            element("div", element("h3", "Loss"), _loss(curves)),
            element("div", element("h3", "Tokens a second"), _speed(curves, plan.prediction.tokens_per_second)),
            class_="pair",
        ),
        element("h3", "Figures"),
        facts(_named(figures(curves, plan))),
        lead=f"What metrics.jsonl says of {curves.last:,} steps, each once, as it was done last.",
        name="training",
        wide=True,
    )


def _named(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each name once, with all of its values."""
    made: list[tuple[str, str]] = []
    for name, value in pairs:
        if name:
            made.append((name, value))
        else:
            made[-1] = (made[-1][0], f"{made[-1][1]}; {value}")
    return made


def _loss(curves: Curves) -> Markup:
    thin = thinned(curves.steps, curves.of("loss"), POINTS)
    held_out = [(float(step), loss) for step, loss in curves.held_out.sort_index().items() if np.isfinite(loss)]
    values = [*thin.low, *thin.high, *(loss for _, loss in held_out)]
    if not values:
        return element("p", "No loss was finite.")
    x, y = _scales(curves.last, min(values), max(values))
    parts = [*_axes(x, y, curves.last, min(values), max(values)), *_band(thin, x, y), *_curve(thin, x, y)]
    if held_out:
        drawn = "M" + "L".join(f"{x(step):.1f} {y(loss):.1f}" for step, loss in held_out)
        parts.append(element("path", d=drawn, class_=f"line-{colour_class(_HELD_OUT)} curve"))
        for step, loss in held_out:
            told = element("title", f"held-out loss {loss:.4f} after {step:,.0f} steps")
            parts.append(element("circle", told, cx=x(step), cy=y(loss), r=3, class_=colour_class(_HELD_OUT)))
    keys = [_key(_COLOUR, "training")] + ([_key(_HELD_OUT, "held-out")] if held_out else [])
    return _figure(parts, f"Training loss over {curves.last:,} steps", keys)


def _speed(curves: Curves, predicted: float) -> Markup:
    thin = thinned(curves.steps, curves.of("tokens_per_second"), POINTS)
    most = max([predicted, *thin.high])
    x, y = _scales(curves.last, 0.0, most)
    level = element("line", x1=x(0), x2=x(curves.last), y1=y(predicted), y2=y(predicted), class_="roof dashed axis")
    parts = [*_axes(x, y, curves.last, 0.0, most), level, *_band(thin, x, y), *_curve(thin, x, y)]
    line = element("line", x1="0", x2="20", y1="5", y2="5", class_="roof dashed")
    dashed = element("svg", line, viewBox="0 0 20 10", class_="key", aria_hidden="true")
    keys = [_key(_COLOUR, "measured"), element("li", dashed, f"predicted: {number(predicted)}")]
    return _figure(parts, f"Tokens a second over {curves.last:,} steps", keys)


def _figure(parts: Sequence[Markup], words: str, keys: Sequence[Markup]) -> Markup:
    drawing = element("svg", *parts, viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", role="img", class_="chart", aria_label=words)
    return element("figure", drawing, element("ul", *keys, class_="legend"))


def _key(colour: str, words: str) -> Markup:
    line = element("line", x1="0", x2="20", y1="5", y2="5", class_=f"line-{colour_class(colour)} curve")
    return element("li", element("svg", line, viewBox="0 0 20 10", class_="key", aria_hidden="true"), words)


def _scales(last: int, low: float, high: float) -> tuple[Scale, Scale]:
    """Places of steps and of values; those from `low` to `high` fill the drawing but for a margin."""
    room = (high - low) or abs(high) or 1.0

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(last, 1)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (0.96 - 0.92 * (value - low) / room)

    return x, y


def _axes(x: Scale, y: Scale, last: int, low: float, high: float) -> list[Markup]:
    floor = HEIGHT - BOTTOM
    parts = []
    for value in ticks(low, high, 7) if high > low else [high]:
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), class_="grid"))
        parts.append(element("text", number(value), x=LEFT - 8, y=y(value) + 4, class_="end"))
    for step in ticks(0, max(last, 1), 8):
        if step == round(step):
            parts.append(element("line", x1=x(step), x2=x(step), y1=floor, y2=floor + 4, class_="axis"))
            parts.append(element("text", f"{abs(step):,.0f}", x=x(step), y=floor + 17, class_="middle"))
    parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=floor, y2=floor, class_="axis"))
    parts.append(element("text", "step", x=WIDTH - RIGHT, y=HEIGHT - 5, class_="end"))
    return parts


def _band(thin: Thinned, x: Scale, y: Scale) -> list[Markup]:
    """From the least to the largest of the steps that a point stands for."""
    if not len(thin.step) or not np.any(thin.high > thin.low):
        return []
    there = [f"{x(step):.1f} {y(value):.1f}" for step, value in zip(thin.step, thin.high, strict=True)]
    back = [f"{x(step):.1f} {y(value):.1f}" for step, value in zip(thin.step[::-1], thin.low[::-1], strict=True)]
    return [element("path", d="M" + "L".join([*there, *back]) + "Z", class_=f"{colour_class(_COLOUR)} band")]


def _curve(thin: Thinned, x: Scale, y: Scale) -> list[Markup]:
    places = [(x(step), y(value)) for step, value in zip(thin.step, thin.mean, strict=True)]
    if len(places) == 1:
        return [element("circle", cx=places[0][0], cy=places[0][1], r=3, class_=colour_class(_COLOUR))]
    drawn = "M" + "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
    return [element("path", d=drawn, class_=f"line-{colour_class(_COLOUR)} curve")] if places else []
