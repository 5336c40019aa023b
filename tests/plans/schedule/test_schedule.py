"""The graph is right in every order that its waits allow, moves exactly the bytes that it should, and shares
memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.plans.graph.ops import Backward, Forward, Graph, Schedule, Transfer, Update
from ssdplan.plans.graph.verify import verify
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import made_model

fractions = st.sampled_from([0.0, 0.37, 1.0]) | st.floats(0, 1)


@settings(max_examples=examples(60), deadline=None, print_blob=True)
@given(
    blocks=st.integers(1, 5),
    tied=st.booleans(),
    precision=st.sampled_from(["bf16", "fp32"]),
    alpha=fractions,
    optimizer=fractions,
    parameters=fractions,
    checkpoints=fractions,
    gradient=fractions,
    micro_batches=st.integers(1, 4),
    chunk=st.integers(1, 16).map(lambda grains: grains * 2048),
    lookahead=st.integers(1, 4),
    on_device=fractions,
    across_turn=fractions,
    overlap=st.sampled_from(["all", "parameters", "none"]),
)
def test_every_schedule_verifies(blocks, tied, precision, on_device, across_turn, **choices):
    model = made_model(blocks=blocks, tied=tied, precision=precision)
    across_turn *= 1 - on_device
    schedule = build_schedule(model, decide(model, on_device=on_device, across_turn=across_turn, **choices))
    verify(schedule)
    assert_every_element_is_updated_once(schedule, model)


def assert_every_element_is_updated_once(schedule: Schedule, model) -> None:
    def covered(graph: Graph, delayed: bool) -> set[tuple[int, int, int]]:
        ops = [op for op in graph.ops if isinstance(op, Update) and op.delayed == delayed]
        return {(op.state, op.start, op.stop) for op in ops}

    prompt, delayed = covered(schedule.steady, False), covered(schedule.steady, True)
    assert prompt == covered(schedule.first, False) and not covered(schedule.first, True)
    assert delayed == covered(schedule.flush, True) and not covered(schedule.flush, False)
    for index, state in enumerate(model.states):
        ranges = sorted((start, stop) for owner, start, stop in prompt | delayed if owner == index)
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == state.elements


def test_each_layer_computes_each_micro_batch_once_in_alternating_order():
    model = made_model(blocks=3)
    graph = build_schedule(model, decide(model, micro_batches=3)).steady
    computes = [op for op in graph.ops if isinstance(op, Forward | Backward)]
    order = [(type(op).__name__, op.layer, op.micro_batch) for op in computes]
    stages = [("Forward", layer) for layer in range(4)] + [("Backward", layer) for layer in (4, 3, 2, 1, 0)]
    assert order == [
        (kind, layer, micro_batch)
        for stage, (kind, layer) in enumerate(stages)
        for micro_batch in ([0, 1, 2] if stage % 2 == 0 else [2, 1, 0])
    ]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("n", [1, 3])
def test_traffic_is_that_of_the_design(alpha: float, n: int):
    """Everything on ssd, untied: the sums over stages, written out again here."""
    blocks, element = 4, 2
    model = made_model(blocks=blocks, hidden=64, vocab=512, sequence=64)
    decision = decide(model, alpha=alpha, micro_batches=n, chunk=2048)
    schedule = build_schedule(model, decision)
    elements = [state.elements for state in model.states]
    delayed = [count - round((1 - alpha) * (count // 2048)) * 2048 for count in elements]
    prompt = [count - late for count, late in zip(elements, delayed, strict=True)]
    c = 1 * 64 * 64 * element
    states = range(len(elements))
    head = len(elements) - 1
    read = sum(12 * elements[i] for i in states)
    read += sum(element * prompt[i] for i in states)  # first use: the delayed part comes from its update
    read += sum(element * elements[i] for i in states if i != head)  # backward; the head has one stage only
    read += blocks * n * c
    written = sum((12 + element) * elements[i] for i in states) + blocks * n * c
    down = sum(element * elements[i] * (1 if i == head else 2) for i in states)
    down += blocks * (n - 1) * c + (n - 1) * c  # inputs of forwards of the blocks and of the head
    down += blocks * n * c + (blocks + 1) * (n - 1) * c  # checkpoints, inter-layer gradients
    up = sum(4 * elements[i] for i in states)
    up += blocks * n * c + (n - 1) * c + (blocks + 1) * (n - 1) * c
    traffic = schedule.traffic("steady")
    assert traffic == {"read": read, "write": written, "h2d": down, "d2h": up}


def test_a_host_that_holds_everything_needs_no_ssd():
    model = made_model(blocks=3, tied=True)
    decision = decide(model, alpha=0.3, optimizer=1, parameters=1, checkpoints=1, gradient=1)
    schedule = build_schedule(model, decision)
    assert schedule.arenas["ssd"] == 0
    assert {op.resource for op in schedule.steady.ops} == {"h2d", "d2h", "compute", "cpu"}


def test_a_tied_state_is_updated_after_both_of_its_uses():
    model = made_model(blocks=2, tied=True)
    graph = build_schedule(model, decide(model, chunk=1 << 20)).steady
    update = next(op for op in graph.ops if isinstance(op, Update) and op.state == 0)
    last = [op for op in graph.ops if isinstance(op, Backward) and op.layer == 0][-1]
    assert update.index > last.index
    embedding = [op for op in graph.ops if isinstance(op, Backward) and op.layer == 0]
    assert all(not any(op.fresh) for op in embedding), "the embedding adds to what the head has left"


def test_delayed_gradients_take_the_place_of_consumed_checkpoints():
    """GreedySnake 4.4: with as many bytes of either, they cost no memory beyond the checkpoints'."""
    model = made_model(blocks=6, hidden=64, vocab=64, sequence=256)
    kept = decide(model, checkpoints=1.0, micro_batches=6)
    both = decide(model, checkpoints=1.0, micro_batches=6, alpha=0.5, gradient=1.0)
    block = next(state for state in model.states if state.state_class == "block")
    assert block.elements // 2 * 4 <= 6 * 256 * 64 * 2, "the checkpoints of a layer must be the larger"
    without, with_delayed = build_schedule(model, kept).arenas["host"], build_schedule(model, both).arenas["host"]
    outside = sum(4 * state.elements for state in model.states if state.state_class != "block")
    assert with_delayed - without <= outside


def test_slots_of_one_pool_are_as_few_as_buffers_alive_at_once():
    model = made_model(blocks=12)
    schedule = build_schedule(model, decide(model, micro_batches=4))
    members = [b for b in schedule.buffers if b.tier == "device" and b.pool.startswith("weights") and b.role]
    blocks = [b for b in members if b.nbytes == model.states[1].elements * 2 and not b.name.startswith("evaluate")]
    assert len({b.offset for b in blocks}) == 2, "one layer computes, the next arrives"


def test_delayed_gradients_on_ssd_take_no_host_memory_but_their_way_there():
    model = made_model(blocks=8)
    on_ssd = build_schedule(model, decide(model, alpha=0.5, gradient=0.0, chunk=2048))
    chunks = {b.offset for b in on_ssd.buffers if b.pool == "gradient chunk"}
    none = build_schedule(model, decide(model, alpha=0.0, chunk=2048))
    assert len(chunks) <= len({b.offset for b in none.buffers if b.pool == "gradient chunk"})


def broken(schedule: Schedule, graph: Graph, index: int, waits: tuple[int, ...]) -> Schedule:
    ops = list(graph.ops)
    ops[index] = ops[index].placed(index, waits)
    changed = Graph(graph.name, tuple(ops), graph.stages)
    return replace(schedule, make_graph=lambda name: changed if name == graph.name else schedule.make_graph(name))


def test_verify_finds_a_wait_that_is_missing():
    """Every single wait that no other path implies is missed."""
    model = made_model(blocks=2, tied=True)
    schedule = build_schedule(model, decide(model, alpha=0.4, checkpoints=0.5, optimizer=0.3, micro_batches=2))
    verify(schedule)
    graph = schedule.steady
    reach: list[set[int]] = []
    for op in graph.ops:
        reach.append(set(op.waits).union(*(reach[wait] for wait in op.waits)))
    tried = 0
    for op in graph.ops:
        for wait in op.waits:
            others = [other for other in op.waits if other != wait]
            if any(wait in reach[other] for other in others):
                continue
            tried += 1
            with pytest.raises(AssertionError, match="may run together"):
                verify(broken(schedule, graph, op.index, tuple(others)))
    assert tried > 100


def test_verify_finds_buffers_that_share_memory_while_both_are_needed():
    model = made_model(blocks=3)
    schedule = build_schedule(model, decide(model, micro_batches=3))
    device = [b for b in schedule.buffers if b.tier == "device" and b.pool == "hidden"]
    a, b = device[0], next(other for other in device if other.offset != device[0].offset)
    buffers = list(schedule.buffers)
    buffers[b.index] = replace(b, offset=a.offset, zone=a.zone)
    with pytest.raises(AssertionError):
        verify(replace(schedule, buffers=tuple(buffers)))


def test_transfers_move_whole_pages_on_ssd():
    model = made_model(blocks=3, hidden=48, sequence=33)
    schedule = build_schedule(model, decide(model, alpha=0.31, checkpoints=0.43, optimizer=0.2, parameters=0.7))
    for op in schedule.steady.ops:
        if isinstance(op, Transfer) and op.kind in ("read", "write"):
            for region in (op.source, op.target):
                start = schedule.buffers[region.buffer].offset + region.start
                assert start % 4096 == 0 and region.nbytes % 4096 == 0, op
