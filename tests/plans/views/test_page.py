"""The page stands alone, says what the plan says, takes any text for text, and works in a real browser."""

import base64
import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from ssdplan.planner.predict.simulator import simulate
from ssdplan.plans.analysis.curves import DRAWN, Curves
from ssdplan.plans.analysis.memory_usage import label, memory_usage
from ssdplan.plans.analysis.overlay import Overlay, lay_over, stalls
from ssdplan.plans.analysis.work import RESOURCE_LABELS, ROLE_COLOURS, SIZE_COLOURS, WORK_COLOURS, work_of
from ssdplan.plans.documents.base import Part
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.graph.contents import Content, Role
from ssdplan.plans.graph.ops import RESOURCES, Schedule, Transfer, Update
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import format_bytes
from ssdplan.plans.views.page import make_page, write_page
from ssdplan.plans.views.page.colours import DARK_GROUND, LEAST_CONTRAST, on_dark
from ssdplan.plans.views.page.data import pack
from ssdplan.plans.views.plan_text import describe_plan
from ssdplan.plans.views.quantities import duration, number
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import made_machine, made_model
from tests.plans.views import browser

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"> &amp; \u2028'"
VOID = {"meta", "rect", "line", "path", "circle", "img", "br"}


def _made(*, blocks: int = 4, micro_batches: int = 2, hidden: int = 64) -> tuple[Plan, Schedule, Timeline]:
    model = made_model(blocks=blocks, hidden=hidden)
    decision = decide(
        model, alpha=0.25, optimizer=0.3, parameters=0.5, checkpoints=1.0, micro_batches=micro_batches, chunk=1 << 13
    )
    decision = decision.model_copy(update={"host_budget_bytes": 1 << 25, "device_budget_bytes": 1 << 24})
    schedule = build_schedule(model, decision)
    machine = made_machine()
    return planned(model, machine, decision, schedule), schedule, simulate(schedule.steady, model, machine, 1)


def _slower(timeline: Timeline, factor: float) -> Timeline:
    """As if everything had taken `factor` times as long."""
    longer = [tuple(time * factor for time in times) for times in (timeline.starts, timeline.ends)]
    return Timeline(timeline.graph, longer[0], longer[1])


class _Page(HTMLParser):
    """Elements with their attributes, the text of each, and whether they are nested as they should be."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        # A void element that holds a title is an SVG's, which has an end tag.
        assert tag in VOID or self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def data(self) -> dict:
        (text,) = [text for tag, text in self.texts if tag == "script" and text.startswith("{")]
        return json.loads(text)

    def all_text(self) -> str:
        return "\n".join(text for tag, text in self.texts if tag not in ("script", "style"))


def _unpacked(packed: dict) -> list[int]:
    """The encoding read by its description, one number at a time."""
    raw = base64.b64decode(packed["data"], validate=True)
    if packed["type"] == "v":
        values, value, shift = [], 0, 0
        for byte in raw:
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                values.append(value)
                value, shift = 0, 0
        assert shift == 0
    else:
        size = int(packed["type"].removeprefix("u"))
        values = [int.from_bytes(raw[at : at + size], "little") for at in range(0, len(raw), size)]
    return [value * packed["unit"] for value in values]


@pytest.mark.parametrize(
    "values",
    [[], [0], [1, 2, 255], [256, 3], [1 << 20, 5], [1 << 32, 1], [0, 1 << 52], [4096 * 3, 4096 * 70_000], [0] * 9,
     [(1 << 32) - 1, 127, 128, 16383, 16384]],
)  # fmt: skip
def test_numbers_are_packed_without_loss(values: list[int]) -> None:
    assert _unpacked(pack(values)) == values


def test_it_stands_alone(tmp_path: Path) -> None:
    plan, schedule, timeline = _made()
    path = tmp_path / "page.html"
    write_page(plan, schedule, timeline, path)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z0-9-]+\.|@import|url\((?!#)|\bimport\(|fetch\(|XMLHttp|WebSocket", text)
    page = _Page(text)
    for tag, attributes in page.found:
        assert not {"src", "style", "srcset", "background", "data", "href"} & set(attributes), (tag, attributes)
        assert tag not in ("link", "iframe", "img", "object", "embed", "base", "form")
        assert not any(name.startswith("on") for name in attributes)
    (policy,) = [a["content"] for tag, a in page.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy and policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert policy.count("sha256-") == 2


def test_the_data_are_the_timelines() -> None:
    plan, schedule, timeline = _made()
    data = _Page(make_page(plan, schedule, timeline)).data()
    graph, ops = data["graph"], timeline.graph.ops
    assert [data["lanes"][lane] for lane in _unpacked(graph["lane"])] == [RESOURCE_LABELS[op.resource] for op in ops]
    used = {op.resource for op in ops}
    assert data["lanes"] == [RESOURCE_LABELS[name] for name in RESOURCES if name in used]
    assert data["lanes"][data["compute"]] == RESOURCE_LABELS["compute"]
    works = [data["works"][work]["name"] for work in _unpacked(graph["work"])]
    assert works == [work_of(op) for op in ops]
    assert _unpacked(graph["stage"]) == [op.stage for op in ops]
    numbers = iter(_unpacked(graph["numbers"]))
    words = []
    for template in _unpacked(graph["template"]):
        first, *others = graph["templates"][template]
        words.append(first + "".join(str(next(numbers)) + piece for piece in others))
    assert words == [str(op) for op in ops] and next(numbers, None) is None
    back = iter(_unpacked(graph["back"]))
    assert [tuple(op.index - next(back) for _ in range(waits)) for op, waits in zip(
        ops, _unpacked(graph["waits"]), strict=True)] == [op.waits for op in ops]  # fmt: skip
    for op, index in zip(ops, _unpacked(graph["amount"]), strict=True):
        size = op.nbytes if isinstance(op, Transfer) else op.elements if isinstance(op, Update) else 0
        assert graph["amounts"][index][0] == size
    (step,) = data["timelines"]
    assert step["seconds"] == timeline.seconds == plan.prediction.step_seconds
    tick = step["seconds"] / step["ticks"]
    _spans_are(step, timeline.starts, timeline.ends, tick)
    pieces = stalls(timeline)
    _spans_are(step["stalls"], [p.start for p in pieces], [p.end for p in pieces], tick)
    assert _unpacked(step["stalls"]["cause"]) == [len(ops) if p.cause is None else p.cause for p in pieces]


def _spans_are(packed: dict, starts, ends, tick: float) -> None:
    first, length = _unpacked(packed["start"]), _unpacked(packed["length"])
    assert [start * tick for start in first] == pytest.approx(list(starts), abs=tick)
    stops = [start + more for start, more in zip(first, length, strict=True)]
    assert [stop * tick for stop in stops] == pytest.approx(list(ends), abs=tick)


def test_the_data_are_the_memory_and_the_budgets() -> None:
    plan, schedule, timeline = _made()
    data = _Page(make_page(plan, schedule, timeline)).data()
    usage = memory_usage(schedule, timeline)
    for tier, used in usage.items():
        packed = data["timelines"][0]["memory"][tier]
        assert packed["arena"] == schedule.arenas[tier]
        assert len(_unpacked(packed["time"])) == len(used.times)
        assert {role["name"] for role in packed["roles"]} == {label(role) for role in used.alive}
        for role, values in used.alive.items():
            (mine,) = [entry for entry in packed["roles"] if entry["name"] == label(role)]
            told, at = [], 0
            for step, nbytes in zip(_unpacked(mine["at"]), _unpacked(mine["bytes"]), strict=True):
                at += step
                told += [told[-1] if told else 0] * (at - len(told)) + [nbytes]
            assert tuple(told + [told[-1]] * (len(values) - len(told))) == values
    assert data["tiers"] == {
        "host": {"budget": plan.decision.host_budget_bytes, "peak": plan.prediction.peak_host_bytes},
        "device": {"budget": plan.decision.device_budget_bytes, "peak": plan.prediction.peak_device_bytes},
    }


def test_figures_are_in_the_tables_without_a_script() -> None:
    plan, schedule, timeline = _made()
    page = _Page(make_page(plan, schedule, timeline))
    text, p = page.all_text(), plan.prediction
    for figure in (
        duration(p.step_seconds),
        number(p.tokens_per_second),
        p.bound_by,
        *map(format_bytes, (p.peak_host_bytes, p.peak_device_bytes, p.ssd_read_bytes, p.ssd_write_bytes)),
        *(number(entry.tokens_per_second) for entry in plan.alternatives),
        "+9.00%",
        "1 GiB more of host memory",
    ):
        assert figure in text, figure
    (told,) = [text for tag, text in page.texts if tag == "pre"]
    assert told == describe_plan(plan, schedule)


def test_what_a_plan_has_besides_is_shown() -> None:
    """Fields that the page does not know of are shown in their own names, whatever their shape."""
    plan, schedule, timeline = _made()

    class Said(Part):
        topic: str
        text: str

    class Further(Plan):
        remarks: tuple[Said, ...]
        notes_of_all: tuple[str, ...]
        idle: dict[str, dict[str, float]]

    further = Further.model_validate(
        {
            **json.loads(plan.text()),
            "remarks": [{"topic": "The drive", "text": "because of <b>this</b>"}],
            "least": [{"budget": "host memory", "least_bytes": 3 << 30, "tokens_per_second": 1.0}],
            "notes_of_all": ["one note"],
            "idle": {"compute": {"waits for the drive": 0.25}},
        }
    )
    text = _Page(make_page(further, schedule, timeline)).all_text()
    for words in ("because of <b>this</b>", "3 GiB", "notes of all", "one note", "waits for the drive", "250 ms"):
        assert words in text, words


def _hostile() -> tuple[Plan, Schedule, Timeline]:
    plan, schedule, timeline = _made()
    model = plan.model.model_copy(update={"name": HOSTILE})
    machine = plan.machine.model_copy(update={"name": HOSTILE, "device_name": HOSTILE})
    prediction = plan.prediction.model_copy(update={"bound_by": HOSTILE, "busy": {HOSTILE: 0.5}})
    sensitivity = tuple(row.model_copy(update={"resource": HOSTILE, "unit": HOSTILE}) for row in plan.sensitivity)
    update = {"model": model, "machine": machine, "prediction": prediction, "sensitivity": sensitivity}
    ops = tuple(
        replace(op, content=Content.PARAMETERS, state_name=HOSTILE) if isinstance(op, Transfer) else op
        for op in timeline.graph.ops
    )
    graph = type(timeline.graph)(timeline.graph.name, ops, timeline.graph.stages)
    return plan.model_copy(update=update), schedule, Timeline(graph, timeline.starts, timeline.ends)


def test_text_of_others_is_text() -> None:
    page = make_page(*_hostile())
    assert "<img" not in page and page.count("<script") == 2 and page.count("</script") == 2
    parsed = _Page(page)
    (heading,) = [text for tag, text in parsed.texts if tag == "h1"]
    assert heading == HOSTILE
    assert f"read {HOSTILE}" in ["".join(template) for template in parsed.data()["graph"]["templates"]]


def test_a_run_lies_over_its_plan() -> None:
    plan, schedule, timeline = _made()
    overlay = lay_over(plan, schedule, timeline, _slower(timeline, 1.25))
    page = _Page(make_page(plan, schedule, timeline, overlay))
    steps = {step["name"]: step["seconds"] for step in page.data()["timelines"]}
    assert steps == {"measured": overlay.measured.seconds, "predicted": timeline.seconds}
    text = page.all_text()
    assert "(+25.0%)" in text and "1.25x" in text
    assert all(row.words in text for row in overlay.causes[:3])


def test_colours_are_the_plots_and_are_seen_in_the_dark() -> None:
    plan, schedule, timeline = _made()
    page = make_page(plan, schedule, timeline)
    for colour in {*WORK_COLOURS.values(), *ROLE_COLOURS.values(), *SIZE_COLOURS}:
        assert f":{colour};" in page
        assert _contrast(on_dark(colour), DARK_GROUND) >= LEAST_CONTRAST - 0.01
    assert on_dark("#DDCC77") == "#ddcc77"  # light enough as it is
    assert f"--plot: {DARK_GROUND}" in page


def _contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_large_step_is_a_few_megabytes_in_time() -> None:
    plan, schedule, timeline = _made(blocks=96, micro_batches=16, hidden=128)
    assert len(timeline.graph.ops) > 20_000
    start = time.process_time()
    page = make_page(plan, schedule, timeline)
    assert time.process_time() - start < 20
    assert len(page) < 4_000_000


def test_a_step_without_operations() -> None:
    plan, schedule, _ = _made()
    empty = Timeline(build_schedule(plan.model, decide(plan.model)).flush, (), ())
    page = make_page(plan.model_copy(update={"alternatives": (), "sensitivity": ()}), schedule, empty)
    assert _Page(page).data()["timelines"][0]["seconds"] == 0


def _curves() -> Curves:
    """Forty steps, the third without a finite loss, evaluated twice."""
    steps = pd.RangeIndex(1, 41, name="step")
    loss = (4.0 / steps.to_series()).where(steps != 3)
    by_step = pd.DataFrame(256.0, index=steps, columns=DRAWN)
    by_step = by_step.assign(loss=loss, ssd_written_bytes=1000.0 * steps, skipped=False)
    return Curves(by_step=by_step, held_out=pd.Series({0: 4.5, 40: 0.5}))


def test_a_run_s_curves_are_drawn_where_its_losses_are() -> None:
    plan, schedule, timeline = _made()
    page = _Page(make_page(plan, schedule, timeline, None, _curves()))
    assert "4.0000 first, 0.1000 last; 0.1000 lowest, in step 40" in page.all_text()
    drawings = {a.get("aria-label"): at for at, (tag, a) in enumerate(page.found) if tag == "svg"}
    begins, ends = (drawings[f"{what} over 40 steps"] for what in ("Training loss", "Tokens a second"))
    paths = [a["d"] or "" for tag, a in page.found[begins:ends] if tag == "path"]
    places = [tuple(map(float, point.split())) for point in paths[0].removeprefix("M").split("L")]
    assert len(places) == 39 and [x for x, _ in places] == sorted(x for x, _ in places)
    # The drawing is linear: from two of its points follow all.
    (x1, y1), (x40, y40) = places[0], places[-1]
    losses = [4.0 / step for step in range(1, 41) if step != 3]
    for step, loss, (x, y) in zip([n for n in range(1, 41) if n != 3], losses, places, strict=True):
        assert x == pytest.approx(x1 + (x40 - x1) * (step - 1) / 39, abs=0.11)
        assert y == pytest.approx(y1 + (y40 - y1) * (4.0 - loss) / (4.0 - 0.1), abs=0.11)
    assert make_page(plan, schedule, timeline, None, Curves()) == make_page(plan, schedule, timeline)


# In a browser.

needs_chromium = pytest.mark.skipif(browser.find() is None, reason="no Chromium is installed, so no page is opened")


def _opened(tmp_path: Path, page: str, *, width: int = 1400, dark: bool = False) -> browser.Browser:
    program = browser.find()
    assert program
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    opened = browser.Browser(program, tmp_path / "profile", width=width, height=900, dark=dark)
    opened.open(tmp_path / "page.html")
    return opened


def _place(page: browser.Browser, canvas: str) -> tuple[float, float, float, float]:
    box = page.evaluate(
        f"(() => {{ const c = document.querySelector('{canvas}'); c.scrollIntoView({{block: 'center'}});"
        " const b = c.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    time.sleep(0.3)  # a wheel turned just after a scroll is taken for the scroll's
    page.settle()
    return tuple(box)


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (1400, True), (500, False), (500, True)])
def test_it_draws_at_any_width_in_light_and_dark(tmp_path: Path, width: int, dark: bool) -> None:
    plan, schedule, timeline = _made()
    overlay = lay_over(plan, schedule, timeline, _slower(timeline, 1.25))
    with _opened(tmp_path, make_page(plan, schedule, timeline, overlay, _curves()), width=width, dark=dark) as page:
        assert page.complaints == [] and all(url.startswith("file:") for url in page.requests)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        drawn = page.evaluate(
            "[...document.querySelectorAll('canvas')].map((c) => { const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; const seen = new Set();"
            " for (let i = 0; i < d.length; i += 4)"
            " if (d[i + 3] === 255) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);"
            " return [c.dataset.draw, [...seen]]; })"
        )
        kinds = [kind for kind, _ in drawn]
        assert kinds == ["overview", "timeline", "timeline", "lag", "memory", "memory"]
        for kind, seen in drawn:
            colours = {f"#{value:06x}" for value in seen}
            shown = on_dark if dark else str.lower
            if kind == "timeline":
                assert {shown(WORK_COLOURS[work]) for work in ("forward", "backward")} <= colours
            if kind == "memory":
                assert shown(ROLE_COLOURS[Role.PARAMETERS]) in colours


@needs_chromium
def test_it_zooms_moves_and_tells(tmp_path: Path) -> None:
    plan, schedule, timeline = _made()
    with _opened(tmp_path, make_page(plan, schedule, timeline)) as page:
        shown = "document.getElementById('range').textContent"
        everything = page.evaluate(shown)
        assert everything.startswith("all ")
        left, top, width, _ = _place(page, "canvas[data-draw=timeline]")
        # Hover the middle of the longest compute op: the lane is the fifth.
        compute = [op.index for op in timeline.graph.ops if op.resource == "compute"]
        longest = max(compute, key=lambda index: timeline.ends[index] - timeline.starts[index])
        middle = (timeline.starts[longest] + timeline.ends[longest]) / 2
        x = left + 158 + (width - 158) * middle / timeline.seconds
        y = top + 4 + 4 * 30 + 11
        page.mouse("mouseMoved", x, y)
        tip = page.evaluate("document.querySelector('.tip').textContent").splitlines()
        assert tip[0] == str(timeline.graph.ops[longest])
        last = timeline.last_wait(longest)
        assert last is not None and tip[-1].startswith(f"waited for {timeline.graph.ops[last]} (")
        # The wheel zooms about the pointer, so the same op stays under it.
        for _ in range(4):
            page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
        zoomed = page.evaluate(shown)
        assert zoomed != everything
        page.mouse("mouseMoved", x + 1, y)
        assert page.evaluate("document.querySelector('.tip').textContent").splitlines()[0] == tip[0]
        # Dragging moves.
        page.mouse("mousePressed", x, y, button="left", clickCount=1, buttons=1)
        page.mouse("mouseMoved", x - 90, y, button="left", buttons=1)
        page.mouse("mouseReleased", x - 90, y, button="left", clickCount=1)
        moved = page.evaluate(shown)
        assert moved != zoomed and moved.rsplit("(", 1)[1] == zoomed.rsplit("(", 1)[1]
        # The keyboard does all of it.
        page.evaluate("document.querySelector('canvas[data-draw=timeline]').focus()")
        page.key("0")
        assert page.evaluate(shown) == everything
        page.key("+")
        assert page.evaluate(shown) != everything
        page.key("n")
        told = page.evaluate("document.getElementById('told').textContent").splitlines()[0]
        assert told in {str(op) for op in timeline.graph.ops if op.resource == "read"}
        page.key("d")
        told = page.evaluate("document.getElementById('told').textContent").splitlines()[0]
        assert told in {str(op) for op in timeline.graph.ops if op.resource == "write"}
        page.key("Escape")
        assert page.evaluate("document.getElementById('told').textContent") == ""
        # Memory tells its roles, on the same axis.
        left, top, width, _ = _place(page, "canvas[data-draw=memory]")
        page.mouse("mouseMoved", left + 158 + (width - 158) / 2, top + 50)
        assert page.evaluate("document.querySelector('.tip').textContent").startswith("host at ")
        assert page.complaints == []


@needs_chromium
def test_ops_that_are_under_way_at_once_are_drawn_one_above_the_other(tmp_path: Path) -> None:
    plan, schedule, timeline = _made()
    starts, ends = list(timeline.starts), list(timeline.ends)
    reads = sorted((op.index for op in timeline.graph.ops if op.resource == "read"), key=lambda index: starts[index])
    pairs = list(zip(reads[::2], reads[1::2], strict=False))
    for one, other in pairs:
        starts[other], ends[one] = starts[one], ends[other]
    measured = Timeline(timeline.graph, tuple(starts), tuple(ends))
    one, other = max(pairs, key=lambda pair: ends[pair[0]] - starts[pair[0]])
    with _opened(tmp_path, make_page(plan, schedule, timeline, lay_over(plan, schedule, timeline, measured))) as page:
        left, top, width, _ = _place(page, "canvas[data-draw=timeline]")  # the measured step is the upper one
        x = left + 158 + (width - 158) * (starts[one] + ends[one]) / 2 / timeline.seconds
        told = []
        for y in (top + 4 + 5, top + 4 + 17):  # the upper and the lower half of the first lane
            page.mouse("mouseMoved", x, y)
            told.append(page.evaluate("document.querySelector('.tip').textContent").splitlines()[0])
        assert told == [str(timeline.graph.ops[one]), str(timeline.graph.ops[other])]
        assert page.complaints == []


@needs_chromium
def test_hostile_text_does_not_run(tmp_path: Path) -> None:
    plan, schedule, timeline = _hostile()
    overlay: Overlay = lay_over(plan, schedule, timeline, _slower(timeline, 2.0))
    with _opened(tmp_path, make_page(plan, schedule, timeline, overlay)) as page:
        left, top, width, _ = _place(page, "canvas[data-draw=timeline]")
        for step in range(20):  # over the reads, whose words are hostile
            page.mouse("mouseMoved", left + 160 + step * (width - 170) / 20, top + 15)
        page.evaluate("document.querySelector('canvas[data-draw=timeline]').focus()")
        page.key("n")
        assert page.evaluate("document.getElementById('told').textContent").startswith(f"read {HOSTILE}")
        assert page.evaluate("document.title") == f"{HOSTILE} on {HOSTILE}: ssdplan"
        assert page.evaluate("document.images.length") == 0
        # And had it become an element, the policy would have kept it from running.
        page.evaluate(
            "document.body.append(Object.assign("
            "document.createElement('script'), {textContent: \"document.title='x'\"}))"
        )
        assert page.evaluate("document.title") != "x"
