"""Operations that are made to last: at the times of the simulator, with their own work inside."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.executor.runtime.pace import Courses, Pacer, require_pace
from ssdplan.planner.predict.simulator import expectation, simulate
from ssdplan.plans.analysis.drift import Expectation
from ssdplan.plans.documents.emulation import Emulation
from ssdplan.plans.errors import UsageError
from ssdplan.plans.graph.ops import RESOURCES, Graph
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.plans import machine as machine_of_plans
from tests.planner.machines import machines, models


def run(graph: Graph, expected: Expectation) -> Timeline:
    """The graph on courses, by the runner's policy: a lane takes the ready operation that is first in the graph."""
    courses, now = Courses(0.0), 0.0
    missing = [len(op.waits) for op in graph.ops]
    followers: list[list[int]] = [[] for _ in graph.ops]
    for op in graph.ops:
        for wait in op.waits:
            followers[wait].append(op.index)
    ready: list[list[int]] = [[] for _ in RESOURCES]
    running, starts, ends = {}, [0.0] * len(graph.ops), [0.0] * len(graph.ops)
    for op in graph.ops:
        if not op.waits:
            ready[RESOURCES.index(op.resource)].append(op.index)
    while running or any(ready):
        for lane, waiting in enumerate(ready):
            if lane not in running and waiting:
                index = heapq.heappop(waiting)
                starts[index] = now
                seconds = expected.alone_seconds[index]
                running[lane] = index, courses.begin(lane, seconds, expected.speeds, now)
        now = max(courses.next_end(), now) if any(turn.ended is None for _, turn in running.values()) else now
        courses.move_on(now)
        for lane, (index, turn) in list(running.items()):
            if turn.ended is not None:
                ends[index] = turn.ended
                del running[lane]
                for follower in followers[index]:
                    missing[follower] -= 1
                    if not missing[follower]:
                        heapq.heappush(ready[RESOURCES.index(graph.ops[follower].resource)], follower)
    return Timeline(graph, tuple(starts), tuple(ends))


@settings(deadline=None, max_examples=examples(30), print_blob=True)
@given(
    model=models(), machine=machines(), n=st.integers(1, 3), alpha=st.sampled_from([0.0, 0.4]),
    on_host=st.sampled_from([0.0, 0.5]), on_device=st.sampled_from([0.0, 1.0]),
)  # fmt: skip
def test_courses_are_those_of_the_simulator(model, machine, n, alpha, on_host, on_device) -> None:
    machine = machine.model_copy(update={"device": "cuda", "compute_shares_cpu": False})
    decision = decide(
        model, micro_batches=n, alpha=alpha, optimizer=on_host, parameters=on_host, checkpoints=on_host,
        on_device=on_device, chunk=1 << 14,
    )  # fmt: skip
    graph = build_schedule(model, decision).steady
    found, simulated = run(graph, expectation(graph, model, machine, 1)), simulate(graph, model, machine, 1)
    assert found.seconds == pytest.approx(simulated.seconds, rel=1e-6)
    assert found.starts == pytest.approx(simulated.starts, rel=1e-6, abs=1e-6 * simulated.seconds)
    assert found.ends == pytest.approx(simulated.ends, rel=1e-6, abs=1e-6 * simulated.seconds)


class Hour:
    """A time that passes where somebody works or waits; one thread."""

    def __init__(self) -> None:
        self.now = 7.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def notify_all(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


@pytest.mark.parametrize("work", [0.25, 1.0, 1.5])
def test_an_operation_lasts_as_it_is_to_and_no_less_than_its_work(work: float) -> None:
    model = machine_model()
    graph = build_schedule(model, decide(model)).steady
    hour = Hour()
    pacer = Pacer(clock=hour)
    pacer._turned = hour  # type: ignore[assignment]
    full = tuple((1.0,) * len(RESOURCES) for _ in range(1 << len(RESOURCES)))
    done = []

    def action() -> None:
        hour.wait(work)
        done.append(hour())

    lasting = pacer.paced(graph, [action] * len(graph.ops), Expectation((1.0,) * len(graph.ops), full))
    for number, each in enumerate(lasting[:5]):
        began = hour()
        assert each() is None
        assert hour() - began == pytest.approx(max(work, 1.0)) and len(done) == number + 1
    _, share = pacer.share()
    assert share == pytest.approx(max(work, 1.0)) if work > 1 else share <= 1.0 + 1e-9


def machine_model():
    from tests.made.profiles import made_model

    return made_model(blocks=2)


def test_a_machine_that_is_too_slow_is_told_what_it_can() -> None:
    from tests.made.plans import planned
    from tests.made.profiles import made_model

    emulation = Emulation(like="a", gpu="b", ssd="c", smaller=16, slower=2.0)
    model, decision = made_model(blocks=2), None
    decision = decide(model)
    machine = machine_of_plans().model_copy(update={"figures": "emulated", "emulation": emulation})
    schedule = build_schedule(model, decision)
    plan = planned(model, machine, decision, schedule)
    pacer = Pacer()
    pacer.given["compute"], pacer.worked["compute"] = 10.0, 9.9
    pacer.given["cpu"], pacer.worked["cpu"] = 0.01, 5.0  # next to nothing of the step
    require_pace(pacer, plan)
    pacer.worked["compute"] = 15.0
    with pytest.raises(UsageError, match=r"of compute alone .* takes 1\.50 times .* slower=3\.3 or more"):
        require_pace(pacer, plan)
    pacer.begin()
    require_pace(pacer, plan)
