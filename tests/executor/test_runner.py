"""Both runners obey the waits; the overlapped one really overlaps, and stops cleanly on an error."""

import contextlib
import threading
import time

import pytest

from ssdplan.executor.runner import OverlappedRunner, SerialRunner
from ssdplan.plans.schedule import RESOURCES, Graph, Region, Transfer

LANES = {resource: resource for resource in RESOURCES}


def chain(*ops: tuple[str, tuple[int, ...]]) -> Graph:
    region = Region(0, 0, 4096)
    return Graph(
        "made",
        tuple(Transfer(i, 0, waits, kind, region, region, f"{i}") for i, (kind, waits) in enumerate(ops)),
        1,
    )


@contextlib.contextmanager
def no_lane(resource):
    yield


@pytest.fixture(params=["serial", "overlapped"])
def runner(request):
    made = SerialRunner(no_lane) if request.param == "serial" else OverlappedRunner(no_lane, LANES)
    yield made
    made.close()


def test_waits_are_obeyed_and_times_recorded(runner):
    graph = chain(("read", ()), ("h2d", (0,)), ("read", ()), ("write", (1, 2)), ("d2h", ()))
    done: list[int] = []
    actions = [lambda i=i: (time.sleep(0.01), done.append(i)) for i in range(5)]
    for _ in range(20):
        done.clear()
        timeline = runner.run(graph, actions)
        assert sorted(done) == list(range(5))
        for op in graph.ops:
            for wait in op.waits:
                assert done.index(wait) < done.index(op.index)
                assert timeline.ends[wait] <= timeline.starts[op.index]
        assert timeline.seconds >= 0.03


def test_independent_lanes_overlap_and_one_lane_does_not():
    runner = OverlappedRunner(no_lane, LANES)
    graph = chain(("read", ()), ("write", ()), ("read", ()))
    meeting = threading.Barrier(2, timeout=5)
    timeline = runner.run(graph, [meeting.wait, meeting.wait, lambda: None])
    assert timeline.starts[2] >= timeline.ends[0]
    runner.close()


def test_of_ready_ops_the_first_in_the_graph_starts_first():
    runner = OverlappedRunner(no_lane, LANES)
    graph = chain(("read", ()), *(("h2d", (0,)) for _ in range(6)))
    started: list[int] = []
    runner.run(graph, [lambda i=i: started.append(i) for i in range(7)])
    assert started == list(range(7))
    runner.close()


def test_an_error_stops_the_graph_and_reaches_the_caller(runner):
    graph = chain(("read", ()), ("h2d", (0,)), ("write", (1,)))
    ran = []

    def fail():
        raise ValueError("broken op")

    with pytest.raises(ValueError, match="broken op"):
        runner.run(graph, [lambda: ran.append(0), fail, lambda: ran.append(2)])
    assert ran == [0]
    assert runner.run(graph, [lambda: None] * 3).seconds >= 0, "the runner can be used again"


def test_what_runs_is_finished_before_an_error_is_raised():
    runner = OverlappedRunner(no_lane, LANES)
    finished = threading.Event()
    started = threading.Event()

    def slow():
        started.set()
        time.sleep(0.2)
        finished.set()

    def fail():
        started.wait(5)
        raise ValueError("broken op")

    with pytest.raises(ValueError):
        runner.run(chain(("read", ()), ("write", ())), [slow, fail])
    assert finished.is_set()
    runner.close()


def test_lanes_that_share_a_worker_never_run_together():
    runner = OverlappedRunner(no_lane, {**LANES, "cpu": "compute", "write": "read"})
    busy = threading.Lock()

    def alone():
        assert busy.acquire(blocking=False)
        time.sleep(0.002)
        busy.release()

    runner.run(chain(*[("read", ()), ("write", ())] * 10), [alone] * 20)
    runner.close()
