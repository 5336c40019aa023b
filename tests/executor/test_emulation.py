"""Runs whose operations are made to last: no result changes, and who cannot be emulated is told."""

import json
from pathlib import Path

import pytest
import torch

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.runtime import pace
from ssdplan.executor.train import train
from ssdplan.planner.replan import Replanner
from ssdplan.plans.documents.emulation import Emulation
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import UsageError
from tests.executor.runs import LENGTH, opened, prepare
from tests.made.plans import make_plan

EMULATION = Emulation(like="larger", gpu="made", ssd="made", smaller=16, slower=2.0)
PLACES = {"alpha": 0.3, "optimizer": 0.4, "parameters": 0.2, "checkpoints": 0.5, "chunk": 4096}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"), layers=2)


def run(directory: Path, out: Path, *, emulated: bool, serial: bool = False, **choices):
    model = opened(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, **PLACES)
    if emulated:
        update = {"figures": "emulated", "emulation": EMULATION, "compute_shares_cpu": False}
        plan = Plan.model_validate(
            plan.model_copy(update={"machine": plan.machine.model_copy(update=update)}).model_dump(by_alias=True)
        )
    recipe = Recipe(steps=3, optimizer=AdamW(lr=1e-3), serial=serial, **choices)
    result = train(
        plan, model, EmulatedDevice(), data=directory / "text.txt", out=out, recipe=recipe, advisor=Replanner(plan)
    )
    return result.losses, (out / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("serial", [False, True])
def test_no_result_changes(directory, tmp_path, monkeypatch, serial) -> None:
    monkeypatch.setattr(pace, "require_pace", lambda pacer, plan: None)
    monkeypatch.setattr("ssdplan.executor.loop.require_pace", lambda pacer, plan: None)  # however busy this machine is
    plain = run(directory, tmp_path / "plain", emulated=False)
    assert run(directory, tmp_path / "emulated", emulated=True, serial=serial) == plain
    lines = [json.loads(line) for line in (tmp_path / "emulated" / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "loss" in line]) == 3


def test_operations_last_as_the_plan_says(directory, tmp_path, monkeypatch) -> None:
    """However quick their own work is: each of them is at least as long as the simulator has it, alone."""
    monkeypatch.setattr("ssdplan.executor.loop.require_pace", lambda pacer, plan: None)
    run(directory, tmp_path / "emulated", emulated=True)
    plan = Plan.load(tmp_path / "emulated" / "plan.json")
    trace = json.loads((tmp_path / "emulated" / "trace.json").read_text())
    from ssdplan.plans.schedule.build import build_schedule

    graph = build_schedule(plan.model, plan.decision).steady
    alone = Replanner(plan).expectation(graph).alone_seconds
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X" and "op" in event.get("args", {})]
    found = {event["args"]["op"]: event["dur"] * 1e-6 for event in spans}
    assert len(found) == len(graph.ops)
    assert all(found[op.index] >= 0.999 * alone[op.index] - 2e-9 for op in graph.ops)


def test_a_plan_for_an_emulated_machine_is_not_replanned(directory, tmp_path) -> None:
    with pytest.raises(UsageError, match="--replan: the plan is for an emulated machine"):
        run(directory, tmp_path / "out", emulated=True, replan=True)
    assert not (tmp_path / "out").exists()
