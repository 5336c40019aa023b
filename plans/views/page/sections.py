"""The page's parts: tables, lists and bars of what a plan holds, readable without a script.

Owns words and order within a part. Figures read as in `views/plan_text.py`, so that text and page agree; fields
that no part names are shown by `rest`, in their own names, so that nothing in a plan is left out.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from pydantic import BaseModel

from ...analysis.allocators import blocks
from ...analysis.memory_usage import label, memories
from ...analysis.overlay import Overlay
from ...analysis.work import OTHER_COLOUR, RESOURCE_LABELS
from ...documents.plan import Alternative, Plan
from ...documents.stripe_shares import room
from ...graph.ops import RESOURCES, Schedule
from ...graph.timeline import Timeline
from ...units import format_bytes
from ..overlay_text import STEPS
from ..plan_text import is_chosen
from ..quantities import count, duration, exact_percent, number, percent
from .charts import bar, swatch, throughput_chart
from .html import Markup, element, facts, joined, section, table

_SHOWN = {"schema_", "model", "machine", "decision", "prediction", "alternatives", "sensitivity", "reasons"}
"""Fields of a plan that have a part of their own."""


def opening(plan: Plan, overlay: Overlay | None) -> Markup:
    """What the page is of, and the figures that one comes for."""
    model, machine, p, d = plan.model, plan.machine, plan.prediction, plan.decision
    n, size = d.micro_batches, d.micro_batch_size
    words = [
        f"{count(model.parameters)} parameters in {d.precision}",
        f"{n} micro-batch{'es' if n > 1 else ''} of {size} sequence{'s' if size > 1 else ''}"
        f" of {d.sequence_length:,} tokens",
        f"{d.schedule} schedule",
        f"alpha {number(d.delay_ratio)}",
    ]
    estimated = "estimated" in (machine.figures, model.figures)
    badge = "a what-if, from data sheets: nothing was measured" if estimated else "from a profile of the machine"
    if overlay:
        badge = "a run, its last step beside the plan"
    tokens = d.tokens
    step, speed = duration(p.step_seconds), number(p.tokens_per_second)
    tiles = [
        _tile("a step", step, f"bound by {p.bound_by}"),
        _tile("tokens a second", speed, f"{tokens:,} tokens a step"),
    ]
    if overlay:
        seconds = overlay.measured.seconds
        tiles = [
            _tile("the last step", duration(seconds), f"predicted: {step} ({seconds / p.step_seconds - 1:+.1%})"),
            _tile("tokens a second in it", number(tokens / seconds), f"predicted: {speed}"),
        ]
    tiles += [
        *(
            _tile(f"peak {tier} memory", format_bytes(peak), f"of {format_bytes(budget)}", bar(peak, budget))
            for tier, (peak, budget) in memories(plan).items()
        ),
        _tile("read from ssd a step", format_bytes(p.ssd_read_bytes), f"store of {format_bytes(p.ssd_bytes)}"),
        _tile("written to ssd a step", format_bytes(p.ssd_write_bytes), "the drive's wear"),
    ]
    return element(
        "header",
        element("p", "ssdplan", element("span", badge, class_="badge"), class_="kicker"),
        element("h1", model.name, element("span", f" on {machine.name}")),
        element("p", " · ".join(words), class_="lead"),
        element("dl", *tiles, class_="tiles"),
    )


def _tile(name: str, value: str, more: str, *parts: str) -> Markup:
    return element("div", element("dt", name), element("dd", element("strong", value), *parts, element("small", more)))


def reasons(plan: Plan) -> Markup:
    """Why the plan is as it is, in the plan's own words."""
    given = getattr(plan, "reasons", ())
    bound = element("p", f"What bounds the step: {plan.prediction.bound_by}.")
    return section("Why", _value("reasons", given) if given else bound, name="why")


def step(timelines: Mapping[str, Timeline]) -> Markup:
    """The drawing of the step; its operations are in the page's data."""
    graph = next(iter(timelines.values())).graph
    keys = (
        "Drag to move, turn the wheel or pinch to zoom, click an operation to keep it. Keys: the arrows move, + and - "
        "zoom, 0 shows all; n and p go to a lane's next and previous operation, u and d to another lane."
    )
    tools = element(
        "div",
        *(
            element("button", word, type="button", data_do=what, aria_label=about)
            for word, what, about in (
                ("All", "all", "Show the whole step"),
                ("\N{MINUS SIGN}", "out", "Zoom out"),
                ("+", "in", "Zoom in"),
                ("\N{LEFTWARDS ARROW}", "left", "Move to earlier"),
                ("\N{RIGHTWARDS ARROW}", "right", "Move to later"),
            )
        ),
        element("output", id="range"),
        class_="tools",
    )
    drawings = [
        element(
            "figure",
            element("figcaption", f"{name.capitalize()}: {duration(timeline.seconds)}"),
            element(
                "canvas",
                data_draw="timeline",
                data_of=name,
                tabindex="0",
                role="img",
                aria_label=f"The {name} step, one lane a resource, {len(graph.ops):,} operations",
            ),
        )
        for name, timeline in timelines.items()
    ]
    if len(timelines) > 1:
        lag = element("canvas", data_draw="lag", tabindex="0", role="img", aria_label="How far the run is behind")
        drawings.append(element("figure", element("figcaption", "How far compute is behind its prediction"), lag))
    words = STEPS.get(graph.name, "")
    legend = element("ul", id="works", class_="legend")
    pattern = element("template", swatch(OTHER_COLOUR), id="swatch")
    return section(
        "The step, operation by operation",
        element("noscript", element("p", "The drawings of time need JavaScript; all tables below do without.")),
        element("div", tools, legend, class_="bar"),
        pattern,
        element("canvas", data_draw="overview", aria_hidden="true"),
        *drawings,
        element("output", class_="told", id="told", aria_live="polite"),
        element("p", keys, class_="keys"),
        lead=f"{words[:1].upper()}{words[1:]}." if words else "",
        name="step",
        wide=True,
    )


def memory(plan: Plan, schedule: Schedule, timelines: Mapping[str, Timeline]) -> Markup:
    """Memory over the same time, on host and on device."""
    drawings = []
    for tier, (_, budget) in memories(plan).items():
        arena = schedule.arenas[tier]
        words = f"{tier.capitalize()}: {format_bytes(arena)} reserved, budget {format_bytes(budget)}"
        canvas = element("canvas", data_draw="memory", data_of=tier, tabindex="0", role="img", aria_label=words)
        drawings.append(element("figure", element("figcaption", words), canvas, element("ul", class_="legend")))
    of = ""
    if len(timelines) > 1:
        options = (element("option", name, value=name) for name in timelines)
        of = element("label", "of the ", element("select", *options, id="memory-of"), " step")
    lead = "What is alive, by what it is for, under what is reserved and allowed; on the time axis of the step above."
    return section("Memory over the step", of, *drawings, lead=lead, name="memory", wide=True)


# The plan.


def throughput(plan: Plan) -> Markup:
    """Tokens a second against the number of micro-batches, and the table of it."""
    if not plan.alternatives:
        return Markup()
    return section(
        "Throughput against the batch",
        throughput_chart(plan),
        element("details", element("summary", f"All {len(plan.alternatives)} candidates"), _candidates(plan)),
        lead="Each candidate that was looked at, under the rooflines of compute alone and of all that is not compute.",
        name="throughput",
    )


def _candidates(plan: Plan) -> Markup:
    def row(entry: Alternative) -> Sequence[str]:
        return (
            "★" if is_chosen(plan, entry) else "",
            str(entry.micro_batch_size),
            str(entry.micro_batches),
            number(entry.tokens_per_second),
            f"{entry.delay_ratio:.3g}",
            number(entry.compute_tokens_per_second),
            number(entry.io_tokens_per_second),
            "simulated" if entry.simulated else "estimated",
        )

    heads = ("", "size", "n", "tokens/s", "alpha", "if only compute", "if only I/O", "")
    ordered = sorted(plan.alternatives, key=lambda entry: (entry.micro_batch_size, entry.micro_batches))
    return table(heads, [row(entry) for entry in ordered], words=(0, 7))


def sensitivities(plan: Plan) -> Markup:
    """What one unit more of each thing would bring, the most first."""
    ordered = sorted(plan.sensitivity, key=lambda row: -row.throughput_gain)
    most = max((abs(row.throughput_gain) for row in ordered), default=1.0)
    rows = []
    for row in ordered:
        unit = row.unit if row.unit[:1].isdigit() else f"1 {row.unit}"
        nothing = abs(row.throughput_gain) < 5e-5
        rows.append(
            (
                getattr(row, "words", "") or f"{unit} more of {row.resource}",
                "nothing" if nothing else f"{100 * row.throughput_gain:+.2f}%",
                "" if nothing else bar(abs(row.throughput_gain), most),
                ""
                if nothing
                else f"{duration(abs(row.seconds_per_unit))} {_more_or_less(row.seconds_per_unit)} a step",
            )
        )
    made = table(("", "tokens/s", "", "time"), rows, words=(0, 2)) if rows else ""
    return section("What more would bring", made, name="sensitivity")


def _more_or_less(seconds: float) -> str:
    return "more" if seconds > 0 else "less"


def budgets(plan: Plan) -> Markup:
    """Peaks against what is allowed."""
    p = plan.prediction
    free = room(plan.machine.volumes)
    rows = [
        (name, bar(used, most), format_bytes(used), format_bytes(most), percent(used / most if most else 0.0))
        for name, used, most in (
            *((f"{tier} memory", *figures) for tier, figures in memories(plan).items()),
            ("space on ssd", p.ssd_bytes, free),
        )
    ]
    return section("Peaks against budgets", table(("", "", "peak", "budget", ""), rows, words=(0, 1)), name="budgets")


def busy(plan: Plan) -> Markup:
    """The share of the step in which each resource works."""
    given = plan.prediction.busy
    names = [*(name for name in RESOURCES if name in given), *sorted(set(given) - set(RESOURCES))]
    rows = [(RESOURCE_LABELS.get(name, name), bar(given[name], 1.0), percent(given[name])) for name in names]
    return section("How busy each resource is", table((), rows, words=(0, 1)), name="busy")


def decision(plan: Plan) -> Markup:
    """Every field of the decision, and the placement as a table."""
    fields = {name: value for name, value in plan.decision if name != "placement"}
    placement = plan.decision.placement
    shares = {name: dict(shares) for name, shares in placement.items()}
    lines = [line for line in next(iter(shares.values()), {}) if any(given.get(line) for given in shares.values())]
    rows = [(_words(line), *(_share(given.get(line)) for given in shares.values())) for line in lines]
    return section(
        "What it decides",
        facts([(_words(name), _formatted(name, value)) for name, value in fields.items()]),
        element("h3", "Where states live between their uses, as shares of each class"),
        table(("", *shares), rows),
        name="decision",
    )


def _share(value: object) -> str:
    return exact_percent(value) if isinstance(value, float) and value else "-" if not value else str(value)


def prediction(plan: Plan) -> Markup:
    """Every field of the prediction."""
    plain = {name: value for name, value in plan.prediction if not isinstance(value, Mapping)}
    nested = {name: value for name, value in plan.prediction if isinstance(value, Mapping) and name != "busy" and value}
    return section(
        "What it predicts of a steady step",
        facts([(_words(name), _formatted(name, value)) for name, value in plain.items()]),
        *(joined(element("h3", _words(name)), _value(name, value)) for name, value in nested.items()),
        name="prediction",
    )


def pools(schedule: Schedule) -> Markup:
    """Host memory in slots, by what follows each other in them."""
    found = sorted(blocks(schedule).pools, key=lambda pool: -pool.nbytes)
    most = max((pool.nbytes for pool in found), default=1)
    rows = [
        (
            label(*pool.roles),
            f"{pool.slots:,}",
            format_bytes(pool.slot_bytes),
            format_bytes(pool.nbytes),
            bar(pool.nbytes, most),
        )
        for pool in found
    ]
    made = table(("", "slots", "each", "together", ""), rows, words=(0, 4)) if rows else ""
    return section("Host memory in slots", made, lead="Buffers of one use and size take turns.", name="pools")


def rest(plan: Plan) -> Markup:
    """What else the plan holds, under its own names."""
    parts = [
        joined(element("h3", _words(name)), _value(name, value))
        for name, value in plan
        if name not in _SHOWN and not isinstance(value, str) and value
    ]
    return section("More of the plan", *parts, name="more")


def as_text(text: str) -> Markup:
    """The same as `ssdplan show` prints it."""
    shown = element("pre", text, tabindex="0")
    inside = element("details", element("summary", "The plan as ssdplan show prints it"), shown)
    return element("section", inside, class_="wide", id="text")


# Any field.


def _value(name: str, value: object) -> Markup:
    """Any value that a plan may hold: sentences as a list, parts as rows, mappings as names and values."""
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, Mapping):
        if value and all(isinstance(entry, Mapping) for entry in value.values()):
            return _by_key(name, value)
        if any(isinstance(entry, Mapping | BaseModel | tuple) for entry in value.values()):
            return joined(*(joined(element("h4", _words(key)), _value(name, entry)) for key, entry in value.items()))
        return facts([(_words(str(key)), _formatted(name, entry)) for key, entry in value.items()])
    if isinstance(value, tuple | list):
        parts = [dict(entry) for entry in value if isinstance(entry, BaseModel)]
        if len(parts) != len(value):
            return element("ul", *(element("li", _formatted(name, entry)) for entry in value))
        heads = list(parts[0]) if parts else []
        rows = [[_formatted(head, part[head]) for head in heads] for part in parts]
        if len(heads) == 2 and all(isinstance(entry, str) for part in parts for entry in part.values()):
            grouped = groupby(rows, key=lambda row: row[0])
            return facts([(topic, " ".join(row[1] for row in mine)) for topic, mine in grouped], class_="reasons")
        words = [at for at, head in enumerate(heads) if any(isinstance(part[head], str) for part in parts)]
        return table([_words(head) for head in heads], rows, words=words or (0,))
    return element("p", _formatted(name, value))


def _by_key(name: str, value: Mapping[str, Mapping[str, object]]) -> Markup:
    """A mapping of mappings: a row an entry, the outer key before the first of its own."""
    rows = []
    for key, entries in value.items():
        for at, (inner, entry) in enumerate(entries.items()):
            outer = RESOURCE_LABELS.get(key, key) if at == 0 else ""
            rows.append((outer, RESOURCE_LABELS.get(inner, inner), _formatted(name, entry)))
    return table((), rows, words=(0, 1))


def _words(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


def _formatted(name: str, value: object) -> str:
    """A value in the unit that its field's name ends in."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if name.endswith("_bytes"):
            return format_bytes(value)
        if name.endswith("_seconds") or name in ("idle", "critical_path"):
            return duration(value)
        return f"{value:,}" if isinstance(value, int) else number(value)
    return str(value)
