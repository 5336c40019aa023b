"""The horizontal schedule: right in every order that its waits allow, and it moves what ZeRO-Infinity's way moves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.plans.graph.contents import Content, Role
from ssdplan.plans.graph.ops import Backward, Forward, Transfer, Update
from ssdplan.plans.graph.verify import verify
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import made_model
from tests.plans.schedule.test_schedule import assert_every_element_is_updated_once, fractions

ELEMENT = 2


@settings(max_examples=examples(40), deadline=None, print_blob=True)
@given(
    blocks=st.integers(1, 5),
    tied=st.booleans(),
    precision=st.sampled_from(["bf16", "fp32"]),
    optimizer=fractions,
    parameters=fractions,
    checkpoints=fractions,
    on_device=fractions,
    micro_batches=st.integers(1, 4),
    chunk=st.integers(1, 16).map(lambda grains: grains * 2048),
    lookahead=st.integers(1, 4),
)
def test_every_horizontal_schedule_verifies(blocks, tied, precision, **choices):
    model = made_model(blocks=blocks, tied=tied, precision=precision)
    schedule = build_schedule(model, decide(model, schedule="horizontal", **choices))
    verify(schedule)
    assert_every_element_is_updated_once(schedule, model)
    assert not schedule.flush.ops
    sums_are_whole(schedule.steady.ops, model, choices["micro_batches"])


def sums_are_whole(ops, model, n: int) -> None:
    """Replay of sums alone: each backward adds one to what it finds, and every update takes one of each of n."""
    held: dict[int, int] = {}
    host: dict[tuple[int, int], int] = {}
    for op in ops:
        if isinstance(op, Backward):
            for region, fresh in zip(op.gradients, op.fresh, strict=True):
                held[region.buffer] = (0 if fresh else held[region.buffer]) + 1
        elif isinstance(op, Transfer) and op.content in (Content.GRADIENT, Content.DELAYED_GRADIENT):
            if op.kind == "d2h":
                host[op.target.buffer, op.target.start] = held[op.source.buffer]
            else:
                assert op.kind == "h2d"
                held[op.target.buffer] = host[op.source.buffer, op.source.start]
        elif isinstance(op, Update):
            assert host[op.gradient.buffer, op.gradient.start] == n * len(model.uses(op.state))


def test_each_micro_batch_goes_through_all_layers_before_the_next():
    model = made_model(blocks=2)
    schedule = build_schedule(model, decide(model, schedule="horizontal", micro_batches=3))
    one = [("Forward", layer) for layer in (0, 1, 2)] + [("Backward", layer) for layer in (3, 2, 1, 0)]

    def order(graph):
        computes = [op for op in graph.ops if isinstance(op, Forward | Backward)]
        assert [op.stage for op in computes] == list(range(graph.stages)), "one compute op a stage"
        return [(type(op).__name__, op.layer, op.micro_batch) for op in computes]

    assert order(schedule.steady) == [(*each, micro_batch) for micro_batch in range(3) for each in one]
    assert order(schedule.evaluate) == [
        ("Forward", layer, micro_batch) for micro_batch in range(3) for layer in range(4)
    ]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_traffic_is_that_of_zero_infinity(n):
    """GreedySnake section 1: parameters 2 n times, checkpoints twice, gradients 2 n - 1 times in fp32, whatever else.

    Everything on ssd, untied. The head turns around with what it has: its parameters come once a micro-batch.
    """
    blocks = 4
    model = made_model(blocks=blocks, hidden=64, vocab=512, sequence=64)
    schedule = build_schedule(model, decide(model, schedule="horizontal", micro_batches=n, chunk=2048))
    elements = sum(state.elements for state in model.states)
    head = model.states[-1].elements
    checkpoints = n * blocks * 64 * 64 * ELEMENT
    weights = n * ELEMENT * (2 * elements - head)
    assert schedule.traffic("steady") == {
        "read": weights + 12 * elements + checkpoints,
        "write": (12 + ELEMENT) * elements + checkpoints,
        "h2d": weights + (n - 1) * 4 * elements + checkpoints,
        "d2h": n * 4 * elements + checkpoints,
    }
    assert schedule.traffic("evaluate") == {
        "read": n * ELEMENT * elements,
        "write": 0,
        "h2d": n * ELEMENT * elements,
        "d2h": 0,
    }


@pytest.mark.parametrize("n", [1, 3])
def test_both_uses_of_a_tied_state_add_to_one_sum(n):
    """Its sum comes to the device for every use of every micro-batch but the first, and leaves it for every one."""
    model = made_model(blocks=3, tied=True)
    schedule = build_schedule(model, decide(model, schedule="horizontal", micro_batches=n, parameters=1.0))
    moved = {"h2d": 0, "d2h": 0}
    for op in schedule.steady.ops:
        if isinstance(op, Transfer) and (op.content, op.state) == (Content.GRADIENT, 0):
            moved[op.kind] += op.nbytes
    whole = 4 * model.states[0].elements
    assert moved == {"h2d": (2 * n - 1) * whole, "d2h": 2 * n * whole}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("choices", [{}, {"on_device": 0.5, "checkpoints": 0.3, "optimizer": 0.4}])
def test_of_one_micro_batch_it_is_the_vertical_schedule(tied, choices):
    model = made_model(blocks=4, tied=tied)
    one, other = (
        build_schedule(model, decide(model, schedule=schedule, micro_batches=1, **choices))
        for schedule in ("vertical", "horizontal")
    )
    for graph in ("first", "steady", "flush", "evaluate"):
        ours, theirs = (getattr(schedule, graph) for schedule in (one, other))
        assert one.traffic(ours.name) == other.traffic(theirs.name)
        work = [[str(op) for op in each.ops if not isinstance(op, Transfer)] for each in (ours, theirs)]
        assert work[0] == work[1]


def test_memory_does_not_grow_with_micro_batches():
    """Checkpoints are those of one micro-batch, and the sum of gradients is one, whole, in fp32, on host."""
    model = made_model(blocks=4)
    one, two, five = (
        build_schedule(model, decide(model, schedule="horizontal", micro_batches=n, checkpoints=0.5)) for n in (1, 2, 5)
    )
    assert two.arenas == five.arenas and one.arenas["ssd"] == two.arenas["ssd"]
    sums = [b for b in two.buffers if b.role == Role.ACCUMULATED_GRADIENTS]
    assert all(buffer.tier == "host" and not buffer.pool for buffer in sums)
    assert sorted(b.nbytes for b in sums) == sorted(4 * state.elements for state in model.states)
    assert not any(buffer.role == Role.ACCUMULATED_GRADIENTS for buffer in one.buffers)


def test_updates_run_beside_the_last_micro_batchs_backward_and_wait_for_no_layer_below():
    model = made_model(blocks=6)
    ops = build_schedule(model, decide(model, schedule="horizontal", micro_batches=3)).steady.ops
    after: list[set[int]] = []
    for op in ops:
        after.append(set(op.waits).union(*(after[wait] for wait in op.waits)))
    backwards = {op.layer: op.index for op in ops if isinstance(op, Backward) and op.micro_batch == 2}
    for op in ops:
        if isinstance(op, Update):
            layer = model.uses(op.state)[0]
            assert backwards[layer] in after[op.index]
            assert not any(backwards[below] in after[op.index] for below in range(layer))
