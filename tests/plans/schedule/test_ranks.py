"""Schedules of several ranks: each verifies by itself, and together they own, gather and exchange everything once."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.state_layout import ELEMENT_BYTES, GRAIN
from ssdplan.plans.graph.collectives import AddShares, Exchange, Gather
from ssdplan.plans.graph.ops import Backward, Graph, Schedule, Update
from ssdplan.plans.graph.verify import verify
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.schedule.shards import Shards
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import made_model

fractions = st.sampled_from([0.0, 0.3, 1.0])


def schedules(model: Model, decision: Decision) -> list[Schedule]:
    return [build_schedule(model, decision, rank) for rank in range(decision.ranks)]


def collectives(graph: Graph) -> list[tuple[str, int, int]]:
    return [(type(op).__name__, op.state, op.nbytes) for op in graph.ops if isinstance(op, Gather | Exchange)]


@settings(max_examples=examples(60), deadline=None)
@example(
    blocks=1, tied=True, frozen=False, hidden=16, micro_batches=1, ranks=2, unified=False, alpha=0.0, optimizer=0.0,
    parameters=0.0, gradient=0.0, on_device=0.0, across_turn=0.0, updated=0.0, precision="bf16", schedule="vertical",
    behind=True,
)  # fmt: skip
@given(
    blocks=st.integers(1, 4),
    tied=st.booleans(),
    frozen=st.booleans(),
    hidden=st.sampled_from([16, 64]),
    micro_batches=st.integers(1, 3),
    ranks=st.integers(2, 5),
    unified=st.booleans(),
    alpha=fractions,
    optimizer=fractions,
    parameters=fractions,
    gradient=fractions,
    on_device=fractions,
    across_turn=fractions,
    updated=fractions,
    precision=st.sampled_from(["bf16", "fp32"]),
    schedule=st.sampled_from(["vertical", "horizontal"]),
    behind=st.booleans(),
)
def test_every_rank_verifies_and_all_own_everything_once(
    blocks, tied, frozen, hidden, micro_batches, ranks, unified, alpha, optimizer, parameters, gradient, on_device,
    across_turn, updated, precision, schedule, behind,
):  # fmt: skip
    if schedule == "horizontal":
        alpha, across_turn, behind = 0.0, 0.0, False
    model = made_model(blocks=blocks, tied=tied, hidden=hidden, precision=precision)
    if frozen:
        first = model.states[0].model_copy(update={"frozen": True, "state_class": "frozen"})
        model = model.model_copy(update={"states": (first, *model.states[1:])})
    decision = decide(
        model, alpha=alpha, optimizer=optimizer, parameters=0.0 if unified else parameters, gradient=gradient,
        micro_batches=micro_batches, on_device=on_device, across_turn=min(across_turn, 1.0 - on_device),
        updated=0.0 if unified or schedule == "horizontal" else min(updated, on_device),
        unified=unified, ranks=ranks, schedule=schedule, behind=behind,
    )  # fmt: skip
    Decision.model_validate(decision.model_dump())
    made = schedules(model, decision)
    owned: Counter[int] = Counter()
    for rank, schedule in enumerate(made):
        verify(schedule)
        for home in schedule.homes:
            start, stop = Shards(ranks, rank).own(model.states[home.state].elements)
            assert start <= home.start < home.stop <= stop and home.start % GRAIN == 0
            owned[home.state] += home.elements
    assert owned == {index: state.elements for index, state in enumerate(model.states)}
    for name in ("first", "steady", "flush", "evaluate"):
        graphs = [getattr(schedule, name) for schedule in made]
        assert len({tuple(collectives(graph)) for graph in graphs}) == 1, "every rank has the same ones in one order"
        for graph in graphs:
            assert_collectives_in_order(graph)
    for graph in (schedule.steady for schedule in made):
        assert_gradients_are_exchanged_once(graph, model)


def assert_collectives_in_order(graph: Graph) -> None:
    before = -1
    for op in graph.ops:
        if op.resource == "network":
            assert before == -1 or before in op.waits
            before = op.index


def assert_gradients_are_exchanged_once(graph: Graph, model: Model) -> None:
    """Behind a state's last backward, before its first update of this step; and added up at once."""
    exchanged = {op.state: op for op in graph.ops if isinstance(op, Exchange)}
    added = [op.state for op in graph.ops if isinstance(op, AddShares)]
    trained = {index for index, state in enumerate(model.states) if not state.frozen}
    assert exchanged.keys() == trained and sorted(added) == sorted(trained)
    for state, exchange in exchanged.items():
        last = max(op.index for op in graph.ops if isinstance(op, Backward) and state in model.layers[op.layer].states)
        assert last < exchange.index
        assert all(
            exchange.index < op.index
            for op in graph.ops
            if isinstance(op, Update) and op.state == state and not op.delayed
        )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("unified", [False, True])
def test_the_network_moves_eight_bytes_a_parameter_however_many_micro_batches(ranks: int, unified: bool) -> None:
    """In bf16: two gathers of 2 bytes, one exchange of 4, each but for a rank's own share.
    What has one stage in a step, as the head, is gathered once."""
    moved = set()
    for micro_batches in (1, 2, 8):
        model = made_model(blocks=4, hidden=64)
        decision = decide(model, unified=unified, micro_batches=micro_batches).model_copy(update={"ranks": ranks})
        graph = build_schedule(model, decision).steady
        moved.add(sum(op.nbytes for op in graph.ops if isinstance(op, Gather | Exchange)))
        gathered = Counter(op.state for op in graph.ops if isinstance(op, Gather))
        assert gathered == {index: 1 if state.name == "head" else 2 for index, state in enumerate(model.states)}
    shards = Shards(ranks)
    elements = {state.name: shards.whole(state.elements) for state in model.states}
    half = ELEMENT_BYTES["bf16"]
    wanted = sum(each * ((1 if name == "head" else 2) * half + 4) for name, each in elements.items())
    assert moved == {wanted // ranks * (ranks - 1)}


@pytest.mark.parametrize("unified", [False, True])
def test_the_horizontal_schedule_moves_more_with_every_micro_batch(unified: bool) -> None:
    """Parameters are gathered for each anew, what has one stage of it once; gradients are exchanged once."""
    model = made_model(blocks=4, hidden=64)
    for micro_batches in (1, 3):
        decision = decide(model, unified=unified, micro_batches=micro_batches, schedule="horizontal", ranks=2)
        graph = build_schedule(model, decision).steady
        gathered = Counter(op.state for op in graph.ops if isinstance(op, Gather))
        once = {index: 1 if state.name == "head" else 2 for index, state in enumerate(model.states)}
        assert gathered == {index: times * micro_batches for index, times in once.items()}
        assert Counter(op.state for op in graph.ops if isinstance(op, Exchange)) == dict.fromkeys(once, 1)


@pytest.mark.parametrize("unified", [False, True])
def test_an_exchange_behind_is_beside_the_next_backward(unified: bool) -> None:
    """No backward waits, not even by way of others, for the exchange of the layer right above it. Else those of layers
    alike do, whose gradients have one place."""
    model = made_model(blocks=4, hidden=64)
    for behind in (False, True):
        decision = decide(model, unified=unified, micro_batches=3, ranks=2, behind=behind)
        ops = build_schedule(model, decision).steady.ops
        needed: list[set[int]] = []
        for op in ops:
            needed.append(set(op.waits).union(*(needed[wait] for wait in op.waits)))
        last = {op.layer: op.index for op in ops if isinstance(op, Backward)}
        free = []
        for op in ops:
            if isinstance(op, Exchange) and (below := min(model.uses(op.state)) - 1) >= 0:
                free.append(op.index not in needed[last[below]])
        assert len(free) == 5 and (all(free) if behind else not any(free[1:4]))


@pytest.mark.parametrize(("elements", "ranks"), [(GRAIN, 4), (5 * GRAIN, 2), (1000 * GRAIN, 7), (3 * GRAIN, 1)])
def test_shares_are_equal_and_cover_a_state(elements: int, ranks: int) -> None:
    own = [Shards(ranks, rank).own(elements) for rank in range(ranks)]
    share = Shards(ranks).share(elements)
    assert own[0][0] == 0 and own[-1][1] == elements and share % GRAIN == 0
    assert all(before[1] == after[0] for before, after in pairwise(own))
    assert all(stop - start <= share for start, stop in own) and own[0] == (0, min(share, elements))
    assert Shards(ranks).whole(elements) - elements < ranks * GRAIN


def test_what_several_ranks_do_not_do_is_refused() -> None:
    model = made_model()
    good = decide(model).model_dump() | {"ranks": 2}
    Decision.model_validate(good)
    for wrong in (0, -1, 1 << 20):
        with pytest.raises(ValueError, match="ranks"):
            Decision.model_validate(good | {"ranks": wrong})
    for alone in ({}, {"ranks": 2, "schedule": "horizontal"}):
        with pytest.raises(ValueError, match="exchange_behind"):
            Decision.model_validate(decide(model, **alone).model_dump() | {"exchange_behind": True})
