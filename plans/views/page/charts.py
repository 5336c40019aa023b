"""Charts that need no script: bars, and throughput against the batch, as SVG. Owns their geometry."""

from collections.abc import Callable, Sequence
from math import cos, pi, sin

from ...analysis.work import SIZE_COLOURS
from ...documents.plan import Alternative, Plan
from ..quantities import number
from .colours import colour_class
from .html import Markup, element

WIDTH, HEIGHT = 640.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 14.0, 12.0, 40.0

Scale = Callable[[float], float]


def bar(value: float, most: float) -> Markup:
    """`value` of `most`, as a bar."""
    share = min(value / most, 1.0) if most > 0 else 1.0
    return element(
        "svg",
        element("rect", width="100", height="8", class_="track"),
        element("rect", width=max(100 * share, 0.6) if value else 0, height="8", class_="fill"),
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        class_="meter",
        aria_hidden="true",
    )


def both_ways(predicted: float, measured: float, most: float, colour: str) -> Markup:
    """Two bars, one above the other: predicted in outline, measured filled."""
    widths = [100 * value / most if most else 0.0 for value in (predicted, measured)]
    return element(
        "svg",
        element("rect", width=widths[0], height="4", y="0.5", class_="predicted"),
        element("rect", width=widths[1], height="5", y="6", class_=colour_class(colour)),
        viewBox="0 0 100 12",
        preserveAspectRatio="none",
        class_="meter both",
        aria_hidden="true",
    )


def swatch(colour: str) -> Markup:
    """A square of a colour, before the words that it stands for."""
    square = element("rect", width="10", height="10", rx="2", class_=colour_class(colour))
    return element("svg", square, viewBox="0 0 10 10", class_="swatch", aria_hidden="true")


def throughput_chart(plan: Plan) -> Markup:
    """Tokens a second against micro-batches, a line a micro-batch size, under compute's and I/O's rooflines."""
    entries, chosen = plan.alternatives, plan.prediction.tokens_per_second
    numbers = [entry.micro_batches for entry in entries] + [plan.decision.micro_batches]
    reached = max([chosen, *(entry.tokens_per_second for entry in entries)])
    roof = max([reached, *(entry.compute_tokens_per_second for entry in entries)])
    # A roofline far above would press the curves to the floor: then it is told, not drawn.
    seen = roof <= 3 * reached
    top = 1.08 * roof if seen else 1.3 * reached
    low, high = min(numbers), max(max(numbers), min(numbers) + 1)

    def x(n: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (0.02 + 0.96 * (n - low) / (high - low))

    def y(speed: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(speed, 1.5 * top) / top)

    parts = _axes(x, y, low, high, top)
    sizes = sorted({entry.micro_batch_size for entry in entries})
    keys = []
    for index, size in enumerate(sizes):
        colour = SIZE_COLOURS[index % len(SIZE_COLOURS)]
        mine = sorted((e for e in entries if e.micro_batch_size == size), key=lambda e: e.micro_batches)
        parts += _lines(mine, x, y, colour)
        keys.append((colour, f"micro-batches of {size} sequence{'s' if size > 1 else ''}"))
    star = _star(x(plan.decision.micro_batches), y(chosen))
    told = f"this plan: {plan.decision.micro_batches} micro-batches, {number(chosen)} tokens/s"
    parts.append(element("path", element("title", told), d=star, class_="star"))
    if not seen:
        words = f"compute alone would reach {number(roof)} tokens/s, far above"
        parts.append(element("text", words, x=WIDTH - RIGHT, y=TOP + 12, class_="note end"))
    clip = element("clipPath", element("rect", x=LEFT, y=0, width=WIDTH - LEFT, height=HEIGHT - BOTTOM + 1), id="plot")
    drawing = element("svg", clip, *parts, viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", role="img", class_="chart",
                      aria_label=f"Throughput against the number of micro-batches; {told}")  # fmt: skip
    legend = [element("li", _key("star"), "this plan")]
    legend += [element("li", _key(f"line-{colour_class(colour)} curve"), words) for colour, words in keys]
    legend += [
        element("li", _key("roof dashed"), "if only compute took time"),
        element("li", _key("roof dotted"), "if all but compute took time"),
        element("li", _key("hollow"), "estimated by the linear program"),
        element("li", _key("solid"), "simulated, as plans predict"),
    ]
    return element("figure", drawing, element("ul", *legend, class_="legend"))


def _key(kind: str) -> Markup:
    if kind == "star":
        shape = element("path", d=_star(10, 5, 5.0), class_="star")
    elif kind in ("hollow", "solid"):
        shape = element("circle", cx="10", cy="5", r="3", class_=f"point {kind}")
    else:
        shape = element("line", x1="0", x2="20", y1="5", y2="5", class_=kind)
    return element("svg", shape, viewBox="0 0 20 10", class_="key", aria_hidden="true")


def _axes(x: Scale, y: Scale, low: int, high: int, top: float) -> list[Markup]:
    parts = []
    for speed in ticks(0.0, top, 5):
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(speed), y2=y(speed), class_="grid"))
        parts.append(element("text", number(speed), x=LEFT - 8, y=y(speed) + 4, class_="end"))
    for n in ticks(low, high, 8):
        if n == round(n):
            parts.append(element("line", x1=x(n), x2=x(n), y1=y(0), y2=y(0) + 4, class_="axis"))
            parts.append(element("text", f"{n:,.0f}", x=x(n), y=y(0) + 17, class_="middle"))
    parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(0), y2=y(0), class_="axis"))
    parts.append(element("text", "micro-batches a step", x=WIDTH - RIGHT, y=HEIGHT - 5, class_="end"))
    parts.append(element("text", "tokens/s", x=4, y=HEIGHT - 5))
    return parts


def _lines(entries: Sequence[Alternative], x: Scale, y: Scale, colour: str) -> list[Markup]:
    """A line through the linear program's figures, which compare; those simulated, of a few finalists, are points."""
    bounds = [entry for entry in entries if not entry.simulated]
    line = bounds if len(bounds) > 1 else entries

    def path(values: Sequence[float], kind: str) -> Markup:
        places = [(x(entry.micro_batches), y(value)) for entry, value in zip(line, values, strict=True)]
        if len(places) == 1:
            places = [(places[0][0] - 8, places[0][1]), (places[0][0] + 8, places[0][1])]
        drawn = "M" + "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
        return element("path", d=drawn, class_=f"line-{colour_class(colour)} {kind}", clip_path="url(#plot)")

    parts = [
        path([entry.compute_tokens_per_second for entry in line], "roof dashed"),
        path([entry.io_tokens_per_second for entry in line], "roof dotted"),
        path([entry.tokens_per_second for entry in line], "curve"),
    ]
    for entry in entries:
        kind = "simulated" if entry.simulated else "estimated"
        told = (
            f"{entry.micro_batches} micro-batches of {entry.micro_batch_size}: {number(entry.tokens_per_second)} "
            f"tokens/s ({kind})"
        )
        face = colour_class(colour) if entry.simulated else "hollow"
        place = {"cx": x(entry.micro_batches), "cy": y(entry.tokens_per_second), "r": 3.2}
        parts.append(element("circle", element("title", told), class_=f"point line-{colour_class(colour)} {face}",
                             clip_path="url(#plot)", **place))  # fmt: skip
    return parts


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`, about `most` of them."""
    step = 1.0
    while (high - low) / step > most:
        step *= 10
    while (high - low) / (step / 10) <= most:
        step /= 10
    for finer in (5.0, 2.0):
        if (high - low) / (step / finer) <= most:
            step /= finer
            break
    first = -(-low // step)
    found = []
    while first * step <= high:
        found.append(first * step)
        first += 1
    return found


def _star(across: float, up: float, radius: float = 9.0) -> str:
    corners = [
        (across + size * sin(turn * pi / 5), up - size * cos(turn * pi / 5))
        for turn in range(10)
        for size in [radius if turn % 2 == 0 else radius * 0.42]
    ]
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in corners) + "Z"
