"""Why a step takes as long as it does: against the longest path of a graph, and where the cause is known."""

import random
import time
from itertools import pairwise

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.predict.critical_path import find_causes
from ssdplan.planner.predict.simulator import simulate
from ssdplan.plans.documents.profile import Machine
from ssdplan.plans.graph.ops import Graph, Op, Region, Transfer, Update
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import made_machine, made_model, made_volume
from tests.planner.machines import machines
from tests.plans.hand_made import made_backward, made_forward, made_transfer, made_update

MODEL = made_model(flops=1e9)
FORWARD = MODEL.timing("block", 1).forward_seconds
MACHINE = made_machine(link=1e6, d2h=1e6, update_rate=1e6, volumes=(made_volume(read=1e6, write=1e6),))
"""A megabyte, or a million elements, a second."""


def move(index: int, kind: str, seconds: float, source: int, target: int, waits: tuple[int, ...] = ()) -> Transfer:
    nbytes = round(seconds * 1e6)
    return made_transfer(index, kind, Region(source, 0, nbytes), Region(target, 0, nbytes), waits=waits)


def update(index: int, seconds: float, optimizer: int, gradient: int, waits: tuple[int, ...] = ()) -> Update:
    elements = round(seconds * 1e6)
    states, sums = Region(optimizer, 0, 12 * elements), Region(gradient, 0, elements)
    return made_update(index, elements, states, sums, Region(99, 0, 1), waits=waits)


def timed(machine: Machine, *ops: Op) -> Timeline:
    return simulate(Graph("made", ops, 1), MODEL, machine, 1)


def assert_adds_up(timeline: Timeline) -> None:
    """What any step must satisfy."""
    found = find_causes(timeline)
    step = timeline.seconds
    assert sum(sum(spent.values()) for spent in found.path_seconds.values()) == pytest.approx(step, rel=1e-9)
    busy = timeline.busy()
    for resource in busy:
        idle = sum(found.idle.get(resource, {}).values())
        assert busy[resource] + idle == pytest.approx(step, rel=1e-9, abs=1e-12)
        assert resource not in found.idle.get(resource, {}), "nothing waits for itself"


def random_graph(seed: int, count: int) -> Graph:
    rng = random.Random(seed)
    ops: list[Op] = []
    for index in range(count):
        waits = tuple(sorted(rng.sample(range(index), min(index, rng.choice((0, 1, 1, 2, 3))))))
        kind = rng.choice(("read", "write", "h2d", "d2h", "forward", "backward", "update"))
        seconds = rng.choice((0.5, 1.0, 1.0, 2.0))
        if kind == "forward":
            ops.append(made_forward(index, waits=waits, out=Region(index, 0, 1)))
        elif kind == "backward":
            ops.append(made_backward(index, waits=waits, in_gradient=Region(index, 0, 1)))
        elif kind == "update":
            ops.append(update(index, seconds, 2 * index, 2 * index + 1, waits))
        else:
            ops.append(move(index, kind, seconds, rng.randrange(20), rng.randrange(20), waits))
    return Graph("random", tuple(ops), 1)


@settings(deadline=None, max_examples=examples(60), print_blob=True)
@given(seed=st.integers(0, 1 << 32), count=st.integers(1, 60), machine=machines())
def test_the_critical_path_is_the_longest_path(seed: int, count: int, machine: Machine) -> None:
    """networkx finds the longest path through waits and lanes, an operation weighing the seconds that it took."""
    graph = random_graph(seed, count)
    timeline = simulate(graph, MODEL, machine, 1)
    edges = networkx.DiGraph()
    edges.add_nodes_from(range(count))
    lanes: dict[str, int] = {}
    for index in sorted(range(count), key=lambda i: (timeline.starts[i], timeline.ends[i], i)):
        op = graph.ops[index]
        befores = {*op.waits, lanes[op.resource]} if op.resource in lanes else set(op.waits)
        took = timeline.ends[index] - timeline.starts[index]
        edges.add_edges_from((("begin", index, {"weight": took}),))
        edges.add_edges_from((before, index, {"weight": took}) for before in befores)
        lanes[op.resource] = index
    path = find_causes(timeline).path
    longest = networkx.dag_longest_path_length(edges)
    assert longest == pytest.approx(timeline.seconds)
    assert sum(timeline.ends[i] - timeline.starts[i] for i in path) == pytest.approx(longest)
    assert all(edges.has_edge(first, second) for first, second in pairwise(path))
    assert_adds_up(timeline)


@settings(deadline=None, max_examples=examples(15), print_blob=True)
@given(st.integers(1, 6), machines(), st.integers(1, 4), st.floats(0, 1), st.floats(0, 1))
def test_every_second_of_a_real_step_has_a_cause(
    blocks: int, machine: Machine, n: int, alpha: float, host: float
) -> None:
    model = made_model(blocks=blocks, hidden=64, tied=True)
    decision = decide(model, alpha=alpha, optimizer=host, parameters=host, micro_batches=n)
    timeline = simulate(build_schedule(model, decision).steady, model, machine, 1)
    assert_adds_up(timeline)
    found = find_causes(timeline)
    known = {"forward", "backward", "updates", "delayed updates", "parameters", "optimizer states", "gradient"}
    known |= {"checkpoint", "hidden state", "inter-layer gradient"}
    assert {kind for spent in found.path_seconds.values() for kind in spent} <= known


def test_nothing_has_no_causes() -> None:
    found = find_causes(timed(MACHINE))
    assert found.path == () and found.path_seconds == {} and not any(found.idle.values())


def test_what_waits_for_data_waits_for_who_makes_it() -> None:
    """Two items are read for 2 s each and moved for 1 s: the link fills for 2 s, then waits 1 s for the drive."""
    ops = (
        move(0, "read", 2, 0, 1),
        move(1, "h2d", 1, 1, 2, (0,)),
        move(2, "read", 2, 3, 4),
        move(3, "h2d", 1, 4, 5, (2,)),
    )
    found = find_causes(timed(MACHINE, *ops))
    assert found.path == (0, 2, 3)
    assert found.path_seconds == {"read": {"parameters": 4.0}, "h2d": {"parameters": 1.0}}
    assert found.idle["h2d"] == {"fill": 2.0, "read": 1.0}
    assert found.idle["read"] == {"drain": 1.0}
    assert found.idle["compute"] == {"no work": 5.0}


def test_the_cause_is_followed_to_what_ran_meanwhile() -> None:
    """The second move (at 6 s) waits for a read of 2 s, which waited for an update that had begun before the gap."""
    ops = (
        move(0, "h2d", 1, 0, 1),
        update(1, 4, 2, 3),
        move(2, "read", 2, 2, 4, (1,)),  # what the update wrote
        move(3, "h2d", 1, 4, 5, (2,)),
    )
    found = find_causes(timed(MACHINE, *ops))
    assert found.idle["h2d"] == {"cpu": 3.0, "read": 2.0}
    assert found.path == (1, 2, 3)


def test_a_slot_that_is_not_free_is_its_own_cause() -> None:
    """The second read takes over the slot of the first's buffer (1, then 4), which a move of 3 s still empties."""
    ops = (
        move(0, "read", 1, 0, 1),
        move(1, "h2d", 3, 1, 2, (0,)),
        move(2, "read", 1, 3, 4, (1,)),
        move(3, "h2d", 1, 4, 5, (2,)),
    )
    found = find_causes(timed(MACHINE, *ops))
    assert found.idle["read"] == {"host buffer": 3.0, "drain": 1.0}
    assert found.idle["h2d"] == {"fill": 1.0, "read": 1.0}
    # Over the same buffer it is the state itself that waits: no memory would help.
    again = (*ops[:2], move(2, "read", 1, 3, 1, (1,)), move(3, "h2d", 1, 1, 5, (2,)))
    assert find_causes(timed(MACHINE, *again)).idle["read"] == {"h2d": 3.0, "drain": 1.0}


def test_device_buffers_are_named_as_such_and_hold_up_what_follows() -> None:
    """A move waits 2 s for a device slot; the write of what it brings waits for the move, and so for the slot."""
    ops = (
        move(0, "h2d", 1, 0, 1),
        move(1, "d2h", 3, 1, 2, (0,)),
        move(2, "write", 1, 2, 3),
        move(3, "h2d", 1, 4, 5, (1,)),  # takes over the slot of buffer 1
        move(4, "write", 1, 5, 6, (3,)),
    )
    found = find_causes(timed(MACHINE, *ops))
    assert found.idle["h2d"] == {"device buffer": 3.0, "drain": 1.0}
    assert found.idle["write"] == {"h2d": 1.0, "device buffer": 3.0}


def test_on_shared_cores_compute_and_updates_slow_each_other() -> None:
    machine = made_machine(shared=True, cores=2, update_rate=1e6)
    ops = (made_forward(0, out=Region(0, 0, 1)), update(1, 0.5, 1, 2))
    assert FORWARD < 0.1  # at a quarter of its speed
    found = find_causes(timed(machine, *ops))
    assert found.idle["cpu"] == {}
    assert found.idle["compute"] == {"drain": pytest.approx(0.5 + FORWARD - 4 * FORWARD)}
    assert found.path == (1,)


def test_a_large_step_takes_a_fraction_of_a_second() -> None:
    """96 blocks, 16 micro-batches. CPU seconds, for other work may share the machine."""
    model = made_model(blocks=96, hidden=256, sequence=64, flops=1e12)
    decision = decide(model, alpha=0.3, optimizer=0.2, parameters=0.2, micro_batches=16, chunk=1 << 16)
    machine = made_machine(link=1e9, update_rate=2e8, volumes=(made_volume(read=1e9, write=1e9),))
    timeline = simulate(build_schedule(model, decision).steady, model, machine, 1)
    assert len(timeline.graph.ops) > 15_000
    begin = time.process_time()
    find_causes(timeline)
    assert time.process_time() - begin < 1.0
