"""What a step finds in time, in words and on the page: each figure beside its prediction, and nothing of old runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ssdplan.planner.predict.simulator import simulate
from ssdplan.plans.analysis.cache import FIGURES, Beside, OnSsd, predicted_figures, states_on_ssd
from ssdplan.plans.documents.metrics import CacheFigures
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import UsageError
from ssdplan.plans.graph.ops import Schedule
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.cache_text import NAMES, NO_DEVICE, cache_lines, describe_cache, predicted_lines
from ssdplan.plans.views.page import make_page
from ssdplan.plans.views.plan_text import describe_plan
from ssdplan.plans.views.report_text import describe_report
from ssdplan.plans.views.tables import COLUMNS
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import made_machine, made_model

PREDICTED = CacheFigures(
    device_hit_rate=0.975,
    host_hit_rate=1.0,
    optimizer_miss_rate=0.0,
    waits_below_10us=0.975,
    waits_below_30us=0.98,
    waits_below_100us=0.99,
    compute_wait_seconds=0.25,
    device_memory_use=0.5,
    host_memory_use=0.75,
    ssd_use=0.125,
)
MEASURED = CacheFigures(device_hit_rate=0.8, optimizer_miss_rate=0.3, compute_wait_seconds=0.0)
ON_SSD = OnSsd(12, 10, 26, 25, 0, 1024)
REPORT = {"steps": 3, "model": "made", "steady_steps": 2, "losses": [], "eval_losses": {}, "predictions": []}


def test_each_figure_stands_beside_its_prediction() -> None:
    lines = cache_lines(Beside(PREDICTED, MEASURED, ON_SSD))
    cells = {line[2:].split("  ")[0]: line.split()[-2:] for line in lines}
    assert cells["device hits"] == ["97.5%", "80%"] and cells["host hits"] == ["100%", "-"]
    assert cells["optimizer misses"] == ["0%", "30%"], "none is a figure, and no `-`"
    assert "0.25 s" in lines[7] or "250 ms" in lines[7]
    assert lines[-1] == "  states on ssd: parameters of 12 of 26 (10 whole), optimizer states of 25 of 1,024 (0 whole)"
    assert set(NAMES) == set(FIGURES) and all(any(name in line for line in lines) for name in NAMES.values())
    assert NO_DEVICE not in "".join(lines)


def test_without_a_device_it_says_so() -> None:
    alone = CacheFigures(host_hit_rate=0.5, waits_below_10us=0.5, waits_below_30us=0.5, waits_below_100us=0.5)
    lines = cache_lines(Beside(alone, alone, OnSsd(0, 0, 2, 0, 0, 0)))
    assert f"  {NO_DEVICE}" in lines and not any("device hits" in line for line in lines[:-2])
    assert lines[-1] == "  states on ssd: parameters of 0 of 2 (0 whole)"
    told = predicted_lines(Beside(alone, None, ON_SSD))
    words = "50% of the uses of parameters: compute, on host memory itself, does not wait"
    assert told[0].startswith("  host hits ") and told[0].endswith(f"  {words}")


def made(**choices: Any) -> tuple[Plan, Schedule, Timeline, Beside]:
    model = made_model(blocks=3, hidden=64)
    decision = decide(model, **choices)
    schedule = build_schedule(model, decision)
    plan = planned(model, made_machine(), decision, schedule)
    timeline = simulate(schedule.steady, model, plan.machine, 1)
    predicted = predicted_figures(plan, schedule, lambda graph: timeline)
    return plan, schedule, timeline, Beside(predicted, None, states_on_ssd(schedule))


@pytest.mark.parametrize("choices", [{"alpha": 0.5}, {"unified": True}, {"on_device": 1.0, "optimizer": 1.0}])
def test_a_plan_has_few_lines_of_it_and_the_page_a_table(choices: dict[str, Any]) -> None:
    plan, schedule, timeline, beside = made(**choices)
    text = describe_plan(plan, schedule, beside)
    heading = "What a steady step finds in time, as predicted"
    body = text.split(f"{heading}\n")[1].split("\n\n")[0].splitlines()
    assert 4 <= len(body) <= 6 and max(map(len, body)) <= COLUMNS and body == predicted_lines(beside)
    assert heading not in describe_plan(plan, schedule)
    page = make_page(plan, schedule, timeline, cache=beside)
    part = page.split('<section id="cache"')[1].split("</section>")[0]
    assert "optimizer misses" in part and "measured" not in part and (NO_DEVICE in part) == ("unified" in choices)
    assert 'id="cache"' not in make_page(plan, schedule, timeline)
    both = make_page(plan, schedule, timeline, cache=Beside(PREDICTED, MEASURED, ON_SSD))
    row = both.split("device hits")[1].split("</tr>")[0]
    assert ">97.5%<" in row and ">80%<" in row and "Measured is the mean of all steps." in both


def written(path: Path, **more: Any) -> Path:
    (path / "report.json").write_text(json.dumps({**REPORT, **more}))
    return path / "report.json"


def test_a_report_has_the_table_and_an_older_one_is_shown_without(tmp_path: Path) -> None:
    told = {"predicted": asdict(PREDICTED), "measured": asdict(MEASURED), "states_on_ssd": asdict(ON_SSD)}
    text = describe_report(written(tmp_path, cache=told))
    assert "\n".join(cache_lines(Beside(PREDICTED, MEASURED, ON_SSD))) in text
    assert max(map(len, text.splitlines())) <= COLUMNS
    alone = describe_report(written(tmp_path, cache=told | {"predicted": None, "measured": None}))
    assert "states on ssd" in alone and "device hits" not in alone
    assert "finds in time" not in describe_report(written(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"predicted": {}},
        {"predicted": asdict(PREDICTED) | {"ssd_use": "full"}},
        {"measured": asdict(PREDICTED) | {"ssd_use": -1.0}},
        {"measured": asdict(PREDICTED) | {"ssd_use": True}},
        {"measured": asdict(PREDICTED) | {"ssd_use": 10**400}},
        {"measured": 7},
        {"states_on_ssd": {}},
        {"states_on_ssd": asdict(ON_SSD) | {"parameters": "many"}},
        {"states_on_ssd": asdict(ON_SSD) | {"more": 1}},
        {"states_on_ssd": []},
    ],
)
def test_a_report_that_no_run_wrote_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    told = {"predicted": None, "measured": None, "states_on_ssd": asdict(ON_SSD)}
    with pytest.raises(UsageError, match=r"report\.json: not a run's report"):
        describe_report(written(tmp_path, cache=told | change))
    with pytest.raises(UsageError, match=r"report\.json: not a run's report"):
        describe_report(written(tmp_path, cache=[1]))


def test_a_run_without_a_report_has_a_page_of_it() -> None:
    text = describe_cache(Beside(PREDICTED, MEASURED, ON_SSD))
    assert text.startswith("What its steps found in time") and "optimizer misses" in text
