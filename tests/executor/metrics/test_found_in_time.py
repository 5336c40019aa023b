"""What a run's steps find in time: each line's figures are those of the times that the run recorded."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import train
from ssdplan.planner.replan import Replanner
from ssdplan.plans.analysis.cache import FIGURES, CacheReader, predicted_figures, states_on_ssd
from ssdplan.plans.analysis.curves import read_curves
from ssdplan.plans.documents.stripe_shares import room
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.report_text import describe_report
from ssdplan.plans.views.trace import read_trace
from tests.executor.runs import LENGTH, opened, prepare
from tests.made.plans import make_plan


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    "choices", [{"alpha": 0.4, "optimizer": 0.5, "parameters": 0.3}, {"unified": True, "alpha": 0.5, "on_device": 0.5}]
)
def test_a_run_records_what_its_times_say(directory: Path, tmp_path: Path, choices: dict[str, Any]) -> None:
    model = opened(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, chunk=4096, **choices)
    out, advisor = tmp_path / "run", Replanner(plan)
    recipe = Recipe(steps=3, optimizer=AdamW(lr=1e-3))  # two steady ones: too few to look for drift
    train(plan, model, EmulatedDevice(), data=directory / "text.txt", out=out, recipe=recipe, advisor=advisor)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]

    schedule = build_schedule(plan.model, plan.decision)
    last, used = lines[-1], {"host": lines[-1]["host_peak_bytes"], "device": lines[-1]["device_peak_bytes"], "ssd": 0}
    found = asdict(CacheReader(plan).figures(read_trace(out / "trace.json", schedule), used))
    for name in set(FIGURES) - {"ssd_use"}:
        assert last[name] == pytest.approx(found[name], abs=1e-6), name
    assert last["host_memory_use"] == last["host_peak_bytes"] / plan.decision.host_budget_bytes > 0
    assert last["ssd_use"] * room(plan.machine.volumes) >= schedule.arenas["ssd"], "the store and its tables"
    for name in FIGURES:
        absent = "unified" in choices and name in ("device_hit_rate", "device_memory_use")
        assert all((line[name] is None) == absent for line in lines), name

    report = json.loads((out / "report.json").read_text())["cache"]
    assert report["predicted"] == asdict(predicted_figures(plan, schedule, partial(advisor.predicted, plan)))
    assert report["states_on_ssd"] == asdict(states_on_ssd(schedule))
    for name, mean in report["measured"].items():
        steady = [line[name] for line in lines[1:]]
        assert mean is None if steady[0] is None else mean == pytest.approx(sum(steady) / 2), name
    text = describe_report(out / "report.json")
    assert "optimizer misses" in text and ("  device hits " in text) == ("unified" not in choices)
    curves = read_curves(out / "metrics.jsonl")
    assert curves.cache is not None and curves.cache.optimizer_miss_rate == pytest.approx(
        sum(line["optimizer_miss_rate"] for line in lines) / 3
    )
