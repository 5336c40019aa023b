"""The page: one HTML file in which a plan, and a run of it, can be read and looked into, offline.

Owns the document: what stands on it, in which order, and that it loads nothing. The functions of the other views write
its figures; its colours are those of `analysis/work.py`. Everything in a plan is another's text: it is escaped on its
way into HTML and into the script's data, and a policy on the page allows no script and no style but those that came
with it.
"""

import json
from base64 import b64encode
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ...analysis.cache import Beside
from ...analysis.overlay import Overlay
from ...documents.plan import Plan
from ...files import write_whole
from ...graph.ops import Schedule
from ...graph.timeline import Timeline
from ..plan_text import describe_plan
from . import sections
from .cache import found_in_time
from .colours import style_of_colours
from .comparison import comparison
from .data import page_data
from .html import Markup, element, joined

if TYPE_CHECKING:
    from ...analysis.curves import Curves

SCRIPTS = ("data.js", "drawings.js", "input.js")
"""One script on the page, in this order."""


def write_page(
    plan: Plan,
    schedule: Schedule,
    timeline: Timeline,
    path: Path,
    *,
    overlay: Overlay | None = None,
    curves: "Curves | None" = None,
    cache: Beside | None = None,
) -> None:
    """Write the page of `plan` to `path`. Raises OSError when it cannot be written.

    `schedule` is the plan's, `timeline` a step of it as predicted. With `overlay`, a run's, its two timelines take that
    one's place, one above the other. With `curves`, a run's, its losses and its speed come first. `cache`: what steady
    steps find in time, as predicted, and of a run as measured.
    """
    write_whole(path, make_page(plan, schedule, timeline, overlay, curves, cache))


def make_page(
    plan: Plan,
    schedule: Schedule,
    timeline: Timeline,
    overlay: Overlay | None = None,
    curves: "Curves | None" = None,
    cache: Beside | None = None,
) -> str:
    """The HTML of `write_page`."""
    title = f"{plan.model.name} on {plan.machine.name}"
    style = style_of_colours() + _asset("page.css")
    script = "\n".join(map(_asset, SCRIPTS))
    timelines = {"predicted": timeline}
    if overlay:
        timelines = {"measured": overlay.measured, "predicted": overlay.predicted}
    data = json.dumps(page_data(plan, schedule, timelines), separators=(",", ":"))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    head = joined(
        Markup('<meta charset="utf-8">'),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title}: ssdplan"),
        element("style", Markup(style)),
    )
    body = joined(
        sections.opening(plan, overlay),
        element(
            "main",
            _training(curves, plan) if curves else "",
            sections.reasons(plan),
            sections.step(timelines),
            comparison(overlay) if overlay else "",
            found_in_time(cache) if cache else "",
            sections.memory(plan, schedule, timelines),
            element(
                "div", sections.throughput(plan), sections.decision(plan), sections.pools(schedule), sections.rest(plan)
            ),
            element(
                "div",
                sections.sensitivities(plan),
                sections.budgets(plan),
                sections.busy(plan),
                sections.prediction(plan),
            ),
            sections.as_text(describe_plan(plan, schedule, cache)),
        ),
        # In JSON a < may as well be an escape, and then no text can end the element.
        element("script", Markup(data.replace("<", "\\u003c")), type="application/json", id="data"),
        element("script", Markup(script)),
    )
    root = element("html", element("head", head), element("body", body), lang="en")
    return f"<!doctype html>\n{root}\n"


def _training(curves: "Curves", plan: Plan) -> Markup:
    from .training import training  # with pandas, which the page of a plan alone does without

    return training(curves, plan)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
