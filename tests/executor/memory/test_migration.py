"""A run that moves to another plan between steps yields the bits of one that never did; and says why it moved."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdplan.executor.calibration import STEPS, Calibrator
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.device.host_arena import HostArena
from ssdplan.executor.metrics.metrics import MetricsFile
from ssdplan.executor.model.model import StreamedModel, open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.executor.store import Store, check, initialise
from ssdplan.executor.train import Result, train
from ssdplan.planner.predict.simulator import expectation, simulate
from ssdplan.plans.analysis.drift import Expectation
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.errors import InfeasibleError, SsdplanError
from ssdplan.plans.graph.ops import Graph
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from tests.executor.runs import LENGTH, opened, prepare
from tests.extent import FULL
from tests.made.plans import make_plan

STEPS_IN_ALL = 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"))


class Advice:
    """Says that another plan is ten times as fast, whatever was measured."""

    def __init__(self, plan: Plan, other: Plan) -> None:
        self.plan, self.asked = plan, 0
        fast = other.prediction.model_copy(update={"step_seconds": 1e-9})
        self.other = other.model_copy(update={"prediction": fast})

    def expectation(self, graph: Graph) -> Expectation:
        expected = expectation(graph, self.plan.model, self.plan.machine, self.plan.decision.micro_batch_size)
        return Expectation(tuple(1e-9 * seconds for seconds in expected.alone_seconds), expected.speeds)

    def step_seconds(self, graph: Graph, machine: Machine, model: Model) -> float:
        return sum(timing.backward_seconds for entry in model.classes for timing in entry.timings)

    def predicted(self, plan: Plan, graph: Graph) -> Timeline:
        return simulate(graph, plan.model, plan.machine, plan.decision.micro_batch_size)

    def replanned(self, machine: Machine, model: Model) -> Plan:
        self.asked += 1
        return self.other


def run(
    directory: Path, out: Path, plan: Plan, other: Plan | None, *, watch: Watch | None = None, **choices
) -> tuple[Result, Advice | None]:
    model = opened(directory / "llama", _dtype(plan), freeze=plan.model.freeze)
    recipe = Recipe(steps=STEPS_IN_ALL, optimizer=AdamW(lr=1e-3, weight_decay=0.1), replan=other is not None, **choices)
    advice = Advice(plan, other) if other else None
    result = train(
        plan,
        model,
        EmulatedDevice(),
        data=directory / "text.txt",
        eval_data=directory / "held-out.txt",
        out=out,
        recipe=recipe,
        watch=watch,
        advisor=advice,
    )
    return result, advice


def _dtype(plan: Plan) -> torch.dtype:
    return torch.bfloat16 if plan.decision.precision == "bf16" else torch.float32


def bits(out: Path, result: Result) -> tuple[object, ...]:
    norms = tuple(json.loads(line).get("grad_norm") for line in (out / "metrics.jsonl").read_text().splitlines())
    weights = hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()
    return tuple(result.losses), tuple(result.eval_losses.items()), norms, weights


SPREAD = {"alpha": 0.3, "optimizer": 0.4, "parameters": 0.2, "checkpoints": 0.5, "gradient": 0.5, "chunk": 4096}
ON_SSD = {"alpha": 0.0, "optimizer": 0.0, "parameters": 0.0, "checkpoints": 0.0, "chunk": 8192}
ON_HOST = {"alpha": 1.0, "optimizer": 1.0, "parameters": 1.0, "checkpoints": 1.0, "chunk": 6144}
ON_DEVICE = {"alpha": 0.6, "optimizer": 0.7, "on_device": 1.0, "checkpoints": 1.0, "gradient": 0.0, "chunk": 2048}
UPDATED_THERE = {**ON_DEVICE, "updated": 1.0, "inputs": 1.0}
UPDATED_IN_PART = {**ON_DEVICE, "alpha": 0.3, "updated": 0.5, "inputs": 0.5}
UNIFIED = {"alpha": 0.3, "optimizer": 0.4, "on_device": 0.5, "checkpoints": 0.5, "unified": True, "chunk": 4096}
UNIFIED_ON_SSD = {**UNIFIED, "alpha": 0.0, "optimizer": 0.0, "on_device": 0.0, "checkpoints": 0.0, "chunk": 8192}


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        (SPREAD, ON_HOST, {}),
        *([(ON_HOST, SPREAD, {})] if FULL else []),
        (ON_SSD, ON_DEVICE, {"precision": "bf16", "masters": "residual", "optimizer_states": "int8"}),
        (ON_DEVICE, ON_SSD, {"precision": "bf16", "optimizer_states": "bf16"}),
        (UPDATED_THERE, SPREAD, {"precision": "bf16"}),
        (ON_SSD, UPDATED_IN_PART, {"freeze": ("model.layers.0.*", "*.1.mlp.*")}),
        *([(UNIFIED, UNIFIED_ON_SSD, {})] if FULL else []),
        (UNIFIED_ON_SSD, UNIFIED, {"precision": "bf16", "masters": "none"}),
        (ON_SSD, ON_HOST, {"freeze": ("model.layers.0.*", "*.1.mlp.*")}),
        (ON_HOST, UNIFIED, {"freeze": ("*.self_attn.*",)}),
    ],
)
def test_a_run_that_moves_yields_the_same_bits(directory, tmp_path, first, second, common):
    freeze = (common := {**common}).pop("freeze", ())
    dtype = torch.bfloat16 if "precision" in common else torch.float32
    model = open_model(directory / "llama", dtype, freeze=freeze)
    plan, other = (make_plan(model, sequence_length=LENGTH, **choices, **common) for choices in (first, second))
    stayed, _ = run(directory, tmp_path / "stayed", plan, None)
    notes: list[str] = []
    moved, advice = run(directory, tmp_path / "moved", plan, other, watch=Watch(note=notes.append))
    assert advice and advice.asked == 1
    assert bits(tmp_path / "moved", moved) == bits(tmp_path / "stayed", stayed)
    assert not (tmp_path / "stayed" / "plan-0.json").exists()
    assert Plan.load(tmp_path / "moved" / "plan-0.json") == plan
    assert Plan.load(tmp_path / "moved" / "plan.json") == advice.other
    assert not list((tmp_path / "moved").glob("*.ssdplan")), "both stores are gone"
    text = "\n".join(notes)
    assert "the machine is not as its profile says: " in text and "backward of block" in text
    assert f"moved to the other plan after step {STEPS + 1}" in text and "plan-0.json" in text
    lines = [json.loads(line) for line in (tmp_path / "moved" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS_IN_ALL + 1))
    assert steps[STEPS]["ssd_write_bytes"] == plan.prediction.ssd_write_bytes
    assert steps[-1]["ssd_write_bytes"] == other.prediction.ssd_write_bytes
    compared = {row.quantity: row for row in moved.compared}
    for quantity in ("host_arena_bytes", "device_arena_bytes", "ssd_read_bytes", "ssd_write_bytes"):
        assert compared[quantity].measured == compared[quantity].predicted == getattr(other.prediction, quantity)


@pytest.mark.parametrize("serial", [False, True])
def test_a_move_between_snapshots_loses_none(directory, tmp_path, serial):
    """The states are durable in one store or the other at every moment: with snapshots, the move makes one."""
    model = open_model(directory / "llama", torch.float32)
    plan, other = (make_plan(model, sequence_length=LENGTH, **choices) for choices in (SPREAD, ON_HOST))
    stayed, _ = run(directory, tmp_path / "stayed", plan, None, snapshot_every=3)
    moved, _ = run(directory, tmp_path / "moved", plan, other, snapshot_every=3, serial=serial, eval_every=4)
    assert bits(tmp_path / "moved", moved)[0] == bits(tmp_path / "stayed", stayed)[0]
    assert bits(tmp_path / "moved", moved)[3] == bits(tmp_path / "stayed", stayed)[3]

    def stop(metrics) -> None:
        if metrics.step == STEPS + 2:
            raise KeyboardInterrupt

    notes: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(directory, tmp_path / "cut", plan, other, snapshot_every=30, watch=Watch(step=stop, note=notes.append))
    assert f"the states after step {STEPS + 1}, the last snapshot" in notes[-1]
    assert not check([tmp_path / "cut"], lambda share: None).damaged


def test_the_losses_are_durable_before_a_move_makes_a_snapshot(directory, tmp_path, monkeypatch):
    """Else a power cut leaves a snapshot of steps that no line tells of, which nothing can go on from."""
    metrics, durable, commit = tmp_path / "run" / "metrics.jsonl", [0], Store.commit

    def synced(file: MetricsFile) -> None:
        durable.append(sum('"loss"' in line for line in metrics.read_text().splitlines()))

    def committed(store: Store, metadata: dict[str, Any]) -> None:
        assert durable[-1] == metadata["step"]
        commit(store, metadata)

    monkeypatch.setattr(MetricsFile, "sync", synced)
    monkeypatch.setattr(Store, "commit", committed)
    model = open_model(directory / "llama", torch.float32)
    plan, other = (make_plan(model, sequence_length=LENGTH, **choices) for choices in (ON_SSD, ON_HOST))
    run(directory, tmp_path / "run", plan, other, snapshot_every=100)
    assert durable == [0, STEPS + 1, STEPS_IN_ALL]


def test_never_are_two_host_arenas_there(directory, tmp_path, monkeypatch):
    arenas: list[HostArena] = []

    def made(self: EmulatedDevice, nbytes: int) -> HostArena:
        assert all(arena._arena.exports == 0 and "bytes" not in vars(arena) for arena in arenas)
        arenas.append(HostArena(nbytes))
        return arenas[-1]

    monkeypatch.setattr(EmulatedDevice, "host_arena", made)
    model = open_model(directory / "llama", torch.float32)
    plan, other = (make_plan(model, sequence_length=LENGTH, **choices) for choices in (SPREAD, ON_HOST))
    run(directory, tmp_path / "run", plan, other)
    assert [arena.nbytes for arena in arenas] == [p.prediction.host_arena_bytes for p in (plan, other)]


def test_without_space_for_a_second_store_the_plan_is_kept(directory, tmp_path, monkeypatch):
    from ssdplan.executor.store import volumes

    real = volumes.check_space
    stores: list[Path] = []

    def once(path: Path, nbytes: int) -> None:
        stores.append(path)
        real(path, nbytes if len(stores) == 1 else 1 << 60)

    monkeypatch.setattr(volumes, "check_space", once)
    model = open_model(directory / "llama", torch.float32)
    plan, other = (make_plan(model, sequence_length=LENGTH, **choices) for choices in (SPREAD, ON_SSD))
    stayed, _ = run(directory, tmp_path / "stayed", plan, None)
    stores.clear()
    notes: list[str] = []
    kept, _ = run(directory, tmp_path / "kept", plan, other, watch=Watch(note=notes.append))
    assert len(stores) == 2
    assert bits(tmp_path / "kept", kept) == bits(tmp_path / "stayed", stayed)
    assert any("the run keeps its plan" in note and "--volume" in note for note in notes)
    assert Plan.load(tmp_path / "kept" / "plan.json") == plan and not (tmp_path / "kept" / "plan-0.json").exists()


def test_on_a_volume_of_its_own_the_plan_is_kept(directory, tmp_path):
    """A file or device that was made a volume has room for one store."""
    initialise(tmp_path / "volume", 32 << 20, force=False)
    model = open_model(directory / "llama", torch.float32)
    plan, other = (make_plan(model, sequence_length=LENGTH, **choices) for choices in (SPREAD, ON_HOST))
    notes: list[str] = []
    train(
        plan,
        model,
        EmulatedDevice(),
        data=directory / "text.txt",
        out=tmp_path / "run",
        recipe=Recipe(steps=6, optimizer=AdamW(lr=1e-3), replan=True),
        volumes=[tmp_path / "volume"],
        watch=Watch(note=notes.append),
        advisor=Advice(plan, other),
    )
    assert any("the run keeps its plan" in note and "holds the store" in note for note in notes), notes
    assert Plan.load(tmp_path / "run" / "plan.json") == plan


# What is told, and when.


def _advised(model: StreamedModel, replanned: Callable[[Plan], Plan]) -> tuple[Plan, Graph, Advice]:
    plan = make_plan(model, sequence_length=LENGTH, **SPREAD)
    advice = Advice(plan, plan)
    advice.expectation = lambda graph: expectation(graph, plan.model, plan.machine, 2)  # type: ignore[method-assign]
    advice.replanned = lambda machine, model: replanned(plan)  # type: ignore[method-assign]
    return plan, build_schedule(plan.model, plan.decision).steady, advice


def test_a_machine_as_profiled_is_passed_over_in_silence(directory):
    plan, graph, advice = _advised(open_model(directory / "llama", torch.float32), lambda plan: plan)
    notes: list[str] = []
    calibrator = Calibrator(plan, advice, notes.append, replan=True)
    timeline = simulate(graph, plan.model, plan.machine, 2)
    assert [calibrator.take(timeline) for _ in range(STEPS + 2)] == [None] * (STEPS + 2)
    assert not notes


def test_what_is_told_of_a_drift_says_the_figure_the_change_and_the_way(directory):
    slow = make_plan(open_model(directory / "llama", torch.float32), sequence_length=LENGTH).model
    classes = tuple(
        entry.model_copy(
            update={
                "timings": tuple(
                    t.model_copy(update={"backward_seconds": 2 * t.backward_seconds}) for t in entry.timings
                )
            }
        )
        for entry in slow.classes
    )
    slow = slow.model_copy(update={"classes": classes})

    def told(replanned: Callable[[Plan], Plan], *, replan: bool) -> tuple[str, Plan | None]:
        plan, graph, advice = _advised(open_model(directory / "llama", torch.float32), replanned)
        notes: list[str] = []
        calibrator = Calibrator(plan, advice, notes.append, replan=replan)
        timeline = simulate(graph, slow, plan.machine, 2)
        taken = [calibrator.take(timeline) for _ in range(STEPS)]
        assert taken[:-1] == [None] * (STEPS - 1) and len(notes) == 1
        return notes[0], taken[-1]

    def better(plan: Plan) -> Plan:
        decision = plan.decision.model_copy(update={"checkpoint_host": 1.0})
        prediction = plan.prediction.model_copy(update={"step_seconds": 1e-6})
        return plan.model_copy(update={"decision": decision, "prediction": prediction})

    text, chosen = told(better, replan=False)
    assert chosen is None and "backward of block 6 ms instead of 3 ms" in text
    assert "solve would now choose a step of 1 us with checkpoints on host 50.0% -> 100.0%; ssdplan run" in text
    text, chosen = told(better, replan=True)
    assert chosen is not None and chosen.decision.checkpoint_host == 1.0 and "--replan" not in text
    text, chosen = told(lambda plan: plan, replan=True)
    assert chosen is None and "solve would choose none that is faster by 2%" in text

    def none(plan: Plan) -> Plan:
        raise InfeasibleError("no plan fits: ssd space")

    text, chosen = told(none, replan=True)
    assert chosen is None and "solve would find no plan: no plan fits" in text

    def failing(plan: Plan) -> Plan:
        raise SsdplanError("solving again ended with -9: ")

    text, chosen = told(failing, replan=True)
    assert chosen is None and text.endswith("; solving again ended with -9: ") and "no plan" not in text
