"""Parameters that stay on the device: which, and the bytes that need not move for them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdplan.plans.graph.contents import Role
from ssdplan.plans.graph.ops import SumSquares, Transfer, Update
from ssdplan.plans.graph.verify import verify
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.schedule.homes import kept_on_device
from tests.made.decisions import decide
from tests.made.profiles import made_model

ELEMENT = 2


@given(blocks=st.integers(1, 30), on_device=st.floats(0, 1), across_turn=st.floats(0, 1))
def test_as_many_states_as_the_fractions_say_at_even_distances(blocks, on_device, across_turn):
    model = made_model(blocks=blocks)
    across_turn *= 1 - on_device
    kept = kept_on_device(model, decide(model, on_device=on_device, across_turn=across_turn))
    of_blocks = [index for index, state in enumerate(model.states) if state.state_class == "block"]
    device = [state for state in of_blocks if state in kept.device]
    rest = [state for state in of_blocks if state not in kept.device]
    turn = [state for state in rest if state in kept.turn]
    assert abs(len(device) - on_device * blocks) <= 0.5
    assert len(turn) == len(kept.turn) and abs(len(turn) - across_turn * blocks) <= 1
    assert (0 in kept.device) == (len(model.states) - 1 in kept.device) == (on_device > 0.5)
    for chosen, among in ((device, of_blocks), (turn, rest)):
        gaps = {among.index(b) - among.index(a) for a, b in pairwise(chosen)}
        assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("on_device", "across_turn"), [(0.5, 0.0), (0.0, 0.5), (0.25, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_the_bytes_that_need_not_move(on_device, across_turn, alpha, n):
    """Everything else on ssd: what each state that stays saves of the traffic of one that streams."""
    model = made_model(blocks=4)
    plain, keeping = (
        build_schedule(model, decide(model, alpha=alpha, micro_batches=n, chunk=2048, **choices))
        for choices in ({}, {"on_device": on_device, "across_turn": across_turn})
    )
    kept = kept_on_device(model, decide(model, on_device=on_device, across_turn=across_turn))
    assert len(kept.turn) == 4 * across_turn and len(kept.device) == (6 if on_device == 1 else 4 * on_device)
    saved = {"read": 0, "write": 0, "h2d": 0, "d2h": 0}
    for index, state in enumerate(model.states):
        whole = ELEMENT * state.elements
        prompt = ELEMENT * round((1 - alpha) * (state.elements // 2048)) * 2048
        uses = 1 if state.name == "head" else 2
        if index in kept.device:
            saved["read"] += prompt + (uses - 1) * whole  # at its first use the delayed part is made by its update
            saved["write"] += whole
            saved["h2d"] += uses * whole - whole  # what is updated comes to the device in its place
        elif index in kept.turn:
            saved["read"] += whole
            saved["h2d"] += whole
    before, after = (schedule.traffic("steady") for schedule in (plain, keeping))
    assert {kind: before[kind] - after[kind] for kind in before} == saved
    before, after = (schedule.traffic("evaluate") for schedule in (plain, keeping))
    resident = sum(ELEMENT * model.states[index].elements for index in kept.device)
    assert before["h2d"] - after["h2d"] == before["read"] - after["read"] == resident, "nothing is kept across a turn"


def test_the_device_holds_what_it_keeps_and_no_copy_of_it():
    model = made_model(blocks=6, tied=True)
    every = build_schedule(model, decide(model, on_device=1.0, alpha=0.5))
    homes = [buffer for buffer in every.buffers if buffer.tier == "device" and buffer.role == Role.PARAMETERS]
    assert [buffer.nbytes for buffer in homes] == [ELEMENT * state.elements for state in model.states]
    assert not any(buffer.pool for buffer in homes)
    for graph in (every.first, every.steady, every.flush, every.evaluate):
        to_weights = [
            op
            for op in graph.ops
            if isinstance(op, Transfer) and op.kind == "h2d" and op.target.buffer in {buffer.index for buffer in homes}
        ]
        updates = [op for op in graph.ops if isinstance(op, Update)]
        assert [op.source for op in to_weights] == [op.parameters for op in updates]


def test_weights_kept_across_the_turn_are_all_on_the_device_at_the_turn_and_no_others():
    """Beside them: the head's, or those of a layer that computes and of the one that arrives."""
    model = made_model(blocks=8)
    block = ELEMENT * model.states[1].elements

    def slots(across_turn: float) -> int:
        schedule = build_schedule(model, decide(model, across_turn=across_turn))
        mine = [b for b in schedule.buffers if b.tier == "device" and b.role == Role.PARAMETERS and b.nbytes == block]
        return len({b.offset for b in mine if not b.name.startswith("evaluate")})

    assert slots(0.0) == 2
    assert slots(1.0) == 8
    assert 4 <= slots(0.5) <= 6


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("choices", [{}, {"alpha": 1.0, "clip_grad_norm": 1.0}])
def test_where_all_stays_on_the_device_nothing_moves(n, tied, choices):
    model = made_model(blocks=4, tied=tied)
    decision = decide(model, micro_batches=n, on_device=1.0, updated=1.0, inputs=1.0, chunk=2048, **choices)
    schedule = build_schedule(model, decision)
    verify(schedule)
    for name in ("first", "steady", "flush", "evaluate"):
        assert not any(schedule.traffic(name).values())
    assert schedule.arenas["ssd"] == schedule.arenas["host"] == 0
    updates = [op for op in schedule.steady.ops if isinstance(op, Update)]
    assert {op.resource for op in updates} == {"compute"} and {op.delayed for op in updates} == {bool(choices)}
    assert sum(op.elements for op in updates) == sum(state.elements for state in model.states)
    norms = [op for op in schedule.steady.ops if isinstance(op, SumSquares)]
    assert sorted(op.state for op in norms) == list(range(len(model.states)))


@given(
    blocks=st.integers(1, 9), n=st.integers(1, 4), alpha=st.sampled_from([0.0, 0.3, 1.0]), clips=st.booleans(),
    on_device=st.sampled_from([0.0, 0.25, 0.5, 1.0]), updated=st.floats(0, 1), inputs=st.floats(0, 1),
    tied=st.booleans(), on_host=st.sampled_from([0.0, 0.4, 1.0]),
)  # fmt: skip
def test_whatever_stays_on_the_device_the_graphs_are_right(
    blocks, n, alpha, clips, on_device, updated, inputs, tied, on_host
):
    model = made_model(blocks=blocks, tied=tied)
    decision = decide(
        model, micro_batches=n, alpha=1.0 if clips else alpha, clip_grad_norm=1.0 if clips else None, chunk=2048,
        on_device=on_device, updated=updated * on_device, inputs=inputs, optimizer=on_host, checkpoints=on_host,
    )  # fmt: skip
    schedule = build_schedule(model, decision)
    verify(schedule)
    kept = kept_on_device(model, decision)
    assert kept.updated <= kept.device
    there = {
        schedule.buffers[home.optimizer.buffer].tier == "device"
        for home in schedule.homes
        if home.state in kept.updated
    }
    assert there <= {True}
    for graph in (schedule.first, schedule.steady, schedule.flush):
        moved = {op.state for op in graph.ops if isinstance(op, Transfer)}
        assert not moved & kept.updated
