"""The zeroth-order schedule: verified by the checker that shares no code with it, and counted by hand."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.state_layout import FP32, GRAIN
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.graph.contents import Role
from ssdplan.plans.graph.ops import Forward, Perturb, Schedule, Transfer
from ssdplan.plans.graph.verify import verify
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.schedule.streamed import AHEAD
from tests.made.decisions import decide
from tests.made.profiles import made_model, with_frozen

fractions = st.sampled_from([0.0, 0.3, 1.0])


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(1, 5),
    tied=st.booleans(),
    micro_batches=st.integers(1, 4),
    directions=st.integers(1, 3),
    in_turns=st.booleans(),
    unified=st.booleans(),
    parameters=fractions,
    on_device=fractions,
    grains=st.sampled_from([0, 0, 1, 5, 64]),
    every=st.integers(1, 2),
    masters=st.booleans(),
    by_rows=st.booleans(),
    freezes=st.booleans(),
)
def test_every_schedule_verifies(
    blocks,
    tied,
    micro_batches,
    directions,
    in_turns,
    unified,
    parameters,
    on_device,
    grains,
    every,
    masters,
    by_rows,
    freezes,
):
    """`grains`: of a piece; 0: states are on their way whole. `freezes`: the embedding."""
    model = made_model(blocks=blocks, tied=tied)
    if freezes:
        model = with_frozen(model, [1.0] + [0.0] * (len(model.states) - 1))
    by_rows = by_rows and not (tied or unified)
    zeroth = ZerothOrder(
        by_rows=by_rows,
        written_every=every,
        masters=masters,
        piece_elements=grains * GRAIN,
        directions=directions,
        in_turns=in_turns,
    )
    decision = decide(
        model,
        micro_batches=micro_batches,
        zeroth_order=zeroth,
        unified=unified,
        parameters=0.0 if unified else parameters,
        on_device=on_device,
    )
    made = build_schedule(model, decision)
    verify(made)
    assert_forwards_are_twice_each_direction(made, decision)
    assert_each_state_is_updated_once(made)
    assert_each_block_crosses_once_each_way(made, model, decision)
    if not freezes:  # what is frozen comes whole
        assert_pieces_take_few_places(made, decision)


def assert_forwards_are_twice_each_direction(made: Schedule, decision: Decision) -> None:
    """Each layer, micro-batch, direction and side once; both sides read other weights; a layer's before the next's."""
    assert decision.zeroth_order is not None
    forwards = [op for op in made.steady.ops if isinstance(op, Forward)]
    seen = Counter((op.layer, op.micro_batch, op.direction, op.side) for op in forwards)
    layers = {op.layer for op in forwards}
    assert seen == Counter(
        (layer, micro_batch, direction, side)
        for layer in layers
        for micro_batch in range(decision.micro_batches)
        for direction in range(decision.zeroth_order.directions)
        for side in ("plus", "minus")
    )
    assert [op.layer for op in forwards] == sorted(op.layer for op in forwards)
    copies = {
        region.buffer
        for op in forwards
        for region in op.weights
        if made.buffers[region.buffer].role is Role.PERTURBED_PARAMETERS
    }
    written = {
        region.buffer for op in made.steady.ops if isinstance(op, Perturb) for region in (op.plus, op.minus) if region
    }
    assert copies == written
    assert [op for op in made.first.ops if isinstance(op, Forward)] and made.traffic("first") == made.traffic("steady")


def assert_each_state_is_updated_once(made: Schedule) -> None:
    """In a step, and in the flush, which makes no copy."""
    whole: Counter[int] = Counter()
    for home in made.homes:
        if home.trained:
            whole[home.state] += home.elements
    for graph in (made.steady, made.flush):
        updated: Counter[int] = Counter()
        at: Counter[int] = Counter()
        for op in graph.ops:
            if isinstance(op, Perturb) and op.updates and not op.by_rows:
                assert op.start == at[op.state], "pieces come in order"
                at[op.state] = op.stop
                updated[op.state] += op.elements
        assert updated == whole
    assert all(op.plus is None and op.minus is None for op in made.flush.ops if isinstance(op, Perturb))
    assert all(op.rounded and not op.updates for op in made.evaluate.ops if isinstance(op, Perturb))


def assert_pieces_take_few_places(made: Schedule, decision: Decision) -> None:
    """However large a state is: one is worked on, `AHEAD` follow, and as many of the next layer's are there already."""
    assert decision.zeroth_order is not None
    if not decision.zeroth_order.piece_elements:
        return
    roles = (Role.PARAMETERS, Role.PARAMETERS_IN_TRANSIT)
    passing = [b for b in made.buffers if b.role in roles and b.pool and not b.pool.startswith("rows/")]
    places = {(b.tier, b.offset) for b in passing}
    assert all("piece" in b.pool for b in passing)
    assert Counter(tier for tier, _ in places).total() <= 2 * (2 * AHEAD + 1)


def assert_each_block_crosses_once_each_way(made: Schedule, model: Model, decision: Decision) -> None:
    """However many micro-batches and directions there are; a state that two layers share comes in for each. In pieces,
    a block comes in for each direction, and for each copy where copies take turns."""
    assert decision.zeroth_order is not None
    rounds = decision.zeroth_order.rounds if decision.zeroth_order.piece_elements else 1
    moved: Counter[tuple[int, str]] = Counter()
    for op in made.steady.ops:
        if isinstance(op, Transfer) and op.state is not None:
            moved[op.state, op.kind] += op.nbytes
    for state in range(len(model.states)):
        sizes: Counter[str] = Counter()
        for home in made.homes:
            if home.state == state:
                sizes[made.buffers[home.parameters.buffer].tier] += home.parameters.nbytes
        comes = len(model.uses(state)) * (1 if model.states[state].frozen else rounds)
        if decision.zeroth_order.by_rows and state == model.table:
            rows = min(512, decision.tokens) * 64 * (4 if decision.parameters_of(model.states[state]) == FP32 else 2)
            assert moved[state, "h2d"] == rows < sizes["host"]
            assert not moved[state, "read"] and not moved[state, "write"] and not moved[state, "d2h"]
            continue
        if model.states[state].frozen:
            assert moved[state, "read"] == comes * sizes["ssd"] and not moved[state, "write"]
            continue
        assert moved[state, "read"] == comes * sizes["ssd"] and moved[state, "write"] == sizes["ssd"]
        if not decision.unified_memory:
            assert moved[state, "h2d"] == comes * (sizes["ssd"] + sizes["host"])
            assert moved[state, "d2h"] == sizes["ssd"] + sizes["host"]


@pytest.mark.parametrize("unified", [False, True])
def test_pieces_spare_the_places_of_whole_states(unified: bool) -> None:
    """All on ssd: on the device there are both copies of a layer and a few pieces; on host a few pieces."""
    model = made_model(blocks=6)
    largest = max(state.elements for state in model.states) * 2
    bytes_of = {}
    for pieces in (0, GRAIN):
        zeroth = ZerothOrder(piece_elements=pieces)
        made = build_schedule(model, decide(model, unified=unified, zeroth_order=zeroth, parameters=0.0))
        for role in (Role.PARAMETERS, Role.PARAMETERS_IN_TRANSIT):
            places = {(b.tier, b.offset): b.nbytes for b in made.buffers if b.role is role and b.pool}
            bytes_of[role, pieces] = sum(places.values())
    assert bytes_of[Role.PARAMETERS_IN_TRANSIT, 0] > 2 * largest
    assert bytes_of[Role.PARAMETERS_IN_TRANSIT, GRAIN] <= (2 * AHEAD + 1) * 2 * GRAIN
    assert bytes_of[Role.PARAMETERS, GRAIN] <= (2 * AHEAD + 1) * 2 * GRAIN


@pytest.mark.parametrize("grains", [0, 1])
@pytest.mark.parametrize("directions", [1, 3])
def test_copies_that_take_turns_need_one_place(grains: int, directions: int) -> None:
    """Of the largest layer: both at once, or one; however many directions."""
    model = made_model(blocks=4)
    peaks = {}
    for in_turns in (False, True):
        zeroth = ZerothOrder(in_turns=in_turns, directions=directions, piece_elements=grains * GRAIN)
        decision = decide(model, micro_batches=2, unified=True, parameters=0.0, zeroth_order=zeroth)
        made = build_schedule(model, decision)
        places = {(buffer.offset, buffer.nbytes) for buffer in made.buffers if buffer.role is Role.PERTURBED_PARAMETERS}
        peaks[in_turns] = sum(nbytes for _, nbytes in places)
    assert peaks[True] < 0.75 * peaks[False]


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_memory_for_parameters_does_not_depend_on_the_micro_batches(micro_batches: int) -> None:
    model = made_model(blocks=6)
    made = build_schedule(model, decide(model, micro_batches=micro_batches, zeroth_order=ZerothOrder(), unified=False))
    few = build_schedule(model, decide(model, micro_batches=1, zeroth_order=ZerothOrder(), unified=False))
    for role in (Role.PARAMETERS, Role.PERTURBED_PARAMETERS, Role.PARAMETERS_IN_TRANSIT):
        one, other = ({(b.tier, b.offset) for b in schedule.buffers if b.role is role} for schedule in (made, few))
        assert len(one) <= len(other) + 2


def test_what_belongs_together_is_refused_apart() -> None:
    model = made_model()
    good = decide(model, zeroth_order=ZerothOrder()).model_dump()
    for change in ({"optimizer": "adamw"}, {"zeroth_order": None}, {"schedule": "vertical"}):
        with pytest.raises(ValueError, match="belong together"):
            Decision.model_validate(good | change)
    with pytest.raises(ValueError, match="piece_elements"):
        ZerothOrder(piece_elements=GRAIN + 1)
    with pytest.raises(ValueError, match="no gradients"):
        Decision.model_validate(good | {"clip_grad_norm": 1.0})


def test_no_pace_changes_a_step() -> None:
    """It has no updates to cut into chunks, so a search tries no paces."""
    model = made_model(blocks=3, hidden=64)
    decision = decide(model, micro_batches=2, parameters=0.5, zeroth_order=ZerothOrder(written_every=2))
    shorter = decision.model_copy(update={"update_chunk_elements": GRAIN, "update_lookahead": 12})
    made, other = build_schedule(model, decision), build_schedule(model, shorter)
    assert decision.update_chunk_elements > 4 * GRAIN
    for graph, same in ((made.steady, other.steady), (made.unwritten, other.unwritten)):
        assert graph.ops == same.ops
