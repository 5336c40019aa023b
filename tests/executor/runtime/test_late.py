"""A device that takes work and does it late: the runner keeps every order that a graph asks for, and whoever takes one
away is found out."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.device.interface import Action, Begun
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.optimizer.zeroth_order import MeZO
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.runtime import runner as runner_module
from ssdplan.executor.runtime.operations import Operations
from ssdplan.executor.runtime.runner import IN_FLIGHT, MOST_TAKEN, OverlappedRunner
from ssdplan.executor.train import train
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.graph.ops import Graph, Region, Resource, Schedule
from ssdplan.plans.schedule.build import build_schedule
from tests.bounds import HANG_SECONDS
from tests.executor.runs import LENGTH, opened, prepare
from tests.executor.runtime.devices import Checked, CheckingDevice, Taken, Watched, checked
from tests.extent import short_or_full
from tests.made.decisions import decide
from tests.made.plans import make_plan
from tests.made.profiles import made_model
from tests.plans.hand_made import made_transfer

Pick = Callable[[Sequence[Taken]], Taken]


def at_random(seed: int) -> Pick:
    return random.Random(seed).choice


def latest(free: Sequence[Taken]) -> Taken:
    return free[-1]


def soonest(free: Sequence[Taken]) -> Taken:
    return free[0]


PICKS: dict[str, Pick] = {"soonest": soonest, "latest": latest, "random": at_random(1), "others": at_random(2)}
TRAINED = short_or_full(("latest", "random"), tuple(PICKS))
"""Orders in which whole runs are trained; graphs alone are tried in all."""
PLANS: dict[str, dict[str, Any]] = {
    "vertical": {"alpha": 0.3, "optimizer": 0.5, "parameters": 0.5, "micro_batches": 3},
    "all on ssd": {"micro_batches": 2},
    "kept on the device": {"on_device": 0.5, "across_turn": 0.5, "micro_batches": 2, "parameters": 1.0},
    "clipped": {"alpha": 1.0, "clip_grad_norm": 0.5, "micro_batches": 2},
    "horizontal": {"schedule": "horizontal", "micro_batches": 3, "optimizer": 1.0},
    "zeroth order": {"zeroth_order": ZerothOrder(directions=2, written_every=2), "micro_batches": 2},
    "a table by rows": {"zeroth_order": ZerothOrder(directions=2, by_rows=True), "parameters": 0.5, "micro_batches": 2},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"), layers=4)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"), layers=2, tied=False, hidden=64)


def run(directory: Path, out: Path, device: EmulatedDevice, choices: dict[str, Any]) -> list[float]:
    model = opened(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, chunk=4096, **choices)
    optimizer = MeZO(lr=1e-4, seed=3) if "zeroth_order" in choices else AdamW(lr=1e-3, weight_decay=0.1)
    recipe = Recipe(steps=3, optimizer=optimizer, eval_every=2)
    held_out = directory / "held-out.txt"
    result = train(plan, model, device, data=directory / "text.txt", out=out, recipe=recipe, eval_data=held_out)
    assert result.losses and result.eval_losses
    return [*result.losses, *result.eval_losses.values()]


@pytest.mark.parametrize("name", PLANS)
def test_work_that_is_done_late_gives_the_same_bits(
    directory: Path, untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bind, directory = Operations.bind, untied if name == "a table by rows" else directory
    expected = run(directory, tmp_path / "usual", EmulatedDevice(), PLANS[name])
    weights = (tmp_path / "usual" / "model" / "model.safetensors").read_bytes()
    monkeypatch.setattr(Operations, "bind", lambda self, graph: checked(self, graph, bind(self, graph)))
    for pick in TRAINED:
        device = CheckingDevice(PICKS[pick])
        try:
            assert run(directory, tmp_path / pick, device, PLANS[name]) == expected
        finally:
            device.stop()
        assert (tmp_path / pick / "model" / "model.safetensors").read_bytes() == weights
        assert max(device.most_taken.values()) <= MOST_TAKEN


def test_a_lane_gives_so_many_ops_ahead_and_no_more() -> None:
    """None ends before so many are given: with fewer ahead this would hang, and with more an end would see them."""
    count, region = 3 * MOST_TAKEN, Region(0, 0, 4096)
    ops = tuple(made_transfer(i, "compute", region, region, state_name=f"{i}") for i in range(count))
    given: list[Begun] = []
    wrong: list[int] = []
    changed = threading.Condition()

    class Held:
        holds = False

        def __init__(self) -> None:
            self.number = len(given)

        def wait(self) -> tuple[float, float]:
            expected = min(self.number + MOST_TAKEN, count)
            with changed:
                assert changed.wait_for(lambda: wrong or len(given) >= expected, HANG_SECONDS)
                if len(given) != expected:
                    wrong.append(self.number)
                    changed.notify_all()
            return 0.0, 0.0

    def submit(resource: Resource, action: Action, after: Sequence[Begun]) -> Begun:
        with changed:
            given.append(Held())
            changed.notify_all()
            return given[-1]

    runner = OverlappedRunner(submit)
    runner.run(Graph("made", ops, 1), [lambda: None] * count)
    runner.close()
    assert len(given) == count and not wrong


# Orders that are taken away


def made_schedule() -> Schedule:
    model = made_model(blocks=3)
    return build_schedule(model, decide(model, alpha=0.5, optimizer=0.5, parameters=0.5, micro_batches=2))


def races(schedule: Schedule, graph: Graph, pick: Pick = soonest, late: int = 50) -> list[tuple[frozenset[int], str]]:
    """Of a graph whose ops do nothing: every two that touch the same bytes in no order."""
    watched = Watched(graph, schedule.buffers, strict=False, by_lanes=False)
    device = CheckingDevice(pick, late)
    runner = OverlappedRunner(device.submit, IN_FLIGHT)
    try:
        runner.run(graph, [Checked(op, watched, lambda: None) for op in graph.ops])
    finally:
        runner.close()
        device.stop()
    return watched.races


def without(graph: Graph, index: int, wait: int) -> Graph:
    ops = list(graph.ops)
    ops[index] = replace(ops[index], waits=tuple(each for each in ops[index].waits if each != wait))
    return Graph(graph.name, tuple(ops), *(getattr(graph, name) for name in graph.__slots__[2:]))


def implied(graph: Graph, index: int, wait: int) -> bool:
    """Whether other waits lead from an op to what it waits for."""
    reached, paths = set[int](), [each for each in graph.ops[index].waits if each != wait]
    while paths:
        if (each := paths.pop()) not in reached:
            reached.add(each)
            paths += graph.ops[each].waits
    return wait in reached


def test_the_whole_graph_has_no_race() -> None:
    schedule = made_schedule()
    for graph in (schedule.first, schedule.steady, schedule.flush):
        for pick in PICKS.values():
            assert not races(schedule, graph, pick)


def test_every_wait_that_others_do_not_imply_is_missed() -> None:
    schedule = made_schedule()
    graph = schedule.steady
    edges = [(op.index, wait) for op in graph.ops for wait in op.waits if not implied(graph, op.index, wait)]
    kinds = {(graph.ops[wait].resource, graph.ops[index].resource) for index, wait in edges}
    assert len(edges) > 50 and len(kinds) > 10
    for index, wait in edges:
        found = dict(races(schedule, without(graph, index, wait), late=0))
        words = found.get(frozenset((index, wait)), "")
        for number in (index, wait):
            assert f"{graph.ops[number]} (op {number})" in words, (
                f"{graph.ops[index]} without {graph.ops[wait]}: {found}"
            )


# Runners that are wrong


def of_none(program: Any) -> None:
    """The device is told of nothing in other lanes."""
    program.behind = [()] * len(program.behind)


def hosts_too(program: Any) -> None:
    """Ops of the host begin when what they wait for was given to the device."""
    program.on_device = program.followers
    program.on_host = [()] * len(program.on_host)


def first_wait_alone(program: Any) -> None:
    program.behind = [behind[:1] for behind in program.behind]


def lane_only(lane: str) -> Callable[[Any], None]:
    def forget(program: Any) -> None:
        """The device is told of nothing in one lane."""
        resources = program.resources
        program.behind = [tuple(each for each in behind if resources[each] != lane) for behind in program.behind]

    return forget


def too_soon(lane: str) -> Callable[[Any], None]:
    def forget(program: Any) -> None:
        """Ops of one lane wait for one op less."""
        program.waits = [
            count - (count > 0 and resource == lane)
            for count, resource in zip(program.waits, program.resources, strict=True)
        ]
        program.first = [index for index, count in enumerate(program.waits) if not count]

    return forget


FAULTS: dict[str, Callable[[Any], None]] = {
    "behind nothing": of_none,
    "host at once": hosts_too,
    "behind one": first_wait_alone,
    **{f"not behind {lane}": lane_only(lane) for lane in ("compute", "h2d", "d2h")},
    **{f"{lane} too soon": too_soon(lane) for lane in ("read", "write", "cpu", "h2d", "d2h", "compute")},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_runner_that_loses_an_order_is_found_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    schedule = made_schedule()

    class Faulty(runner_module._Program):
        def __init__(self, graph: Graph) -> None:
            super().__init__(graph)
            FAULTS[name](self)

    monkeypatch.setattr(runner_module, "_Program", Faulty)
    found = races(schedule, schedule.steady, latest)
    assert found and all(len(both) == 2 for both, _ in found)
