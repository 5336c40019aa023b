"""What is frozen has no gradient, no optimizer states and no update, and what is below all that is trained runs no
backward: in every schedule, wherever states live."""

from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ssdplan.plans.documents.profile import Model
from ssdplan.plans.graph.contents import Content, Role
from ssdplan.plans.graph.ops import Backward, Forward, Schedule, Transfer, Update
from ssdplan.plans.graph.verify import verify
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import made_model, with_frozen

fractions = st.sampled_from([0.0, 0.37, 1.0]) | st.floats(0, 1)
SHARE = st.sampled_from([0.0, 0.0, 0.4, 1.0, 1.0])


@settings(max_examples=examples(120), deadline=None, print_blob=True)
@given(
    data=st.data(),
    blocks=st.integers(1, 5),
    tied=st.booleans(),
    below=st.integers(0, 7),
    schedule=st.sampled_from(["vertical", "horizontal"]),
    unified=st.booleans(),
    alpha=fractions,
    optimizer=fractions,
    parameters=fractions,
    checkpoints=fractions,
    gradient=fractions,
    micro_batches=st.integers(1, 4),
    on_device=fractions,
    across_turn=fractions,
)
def test_every_schedule_verifies_and_touches_nothing_that_is_frozen(
    data, blocks, tied, below, schedule, unified, alpha, parameters, on_device, across_turn, **choices
):
    """`below`: so many layers from the embedding up are frozen whole, a model's usual use; others at random."""
    whole = made_model(blocks=blocks, tied=tied)
    shares = [1.0 if number < below else data.draw(SHARE) for number in range(len(whole.states))]
    assume(any(share < 1.0 for share in shares))
    model = with_frozen(whole, shares)
    horizontal = schedule == "horizontal"
    decision = decide(
        model,
        schedule=schedule,
        unified=unified,
        alpha=0.0 if horizontal else alpha,
        parameters=0.0 if unified else parameters,
        on_device=on_device,
        across_turn=0.0 if horizontal else across_turn * (1 - on_device),
        chunk=4096,
        **choices,
    )
    built = build_schedule(model, decision)
    verify(built)
    assert_exactly_what_is_trained_is_updated(model, built)
    assert_backward_stops_where_training_does(model, built, decision.micro_batches)
    assert_checkpoints_are_of_layers_with_a_backward(model, built)


def assert_exactly_what_is_trained_is_updated(model: Model, schedule: Schedule) -> None:
    for graphs in ([schedule.steady], [schedule.first, schedule.flush]):
        updated: Counter[int] = Counter()
        for graph in graphs:
            for op in graph.ops:
                if isinstance(op, Update):
                    updated[op.state] += op.elements
        assert updated == {i: s.elements for i, s in enumerate(model.states) if not s.frozen}
    frozen = [state.name for state in model.states if state.frozen]
    for graph in (schedule.first, schedule.steady, schedule.flush, schedule.evaluate):
        for op in graph.ops:
            if isinstance(op, Transfer) and op.state_name in frozen:
                assert op.state is not None and model.states[op.state].frozen
                assert op.content == Content.PARAMETERS and op.kind in ("read", "h2d"), f"{graph.name}: {op}"
    held = {"optimizer", "gradient", "delayed gradient", "accumulated gradient", "partial"}
    for buffer in schedule.buffers:
        names = buffer.name.split("/")
        assert not (names[0] in held and set(names) & set(frozen)), buffer.name


def assert_backward_stops_where_training_does(model: Model, schedule: Schedule, n: int) -> None:
    head = len(model.layers) - 1
    trains = [any(not model.states[state].frozen for state in layer.states) for layer in model.layers]
    lowest = trains.index(True)
    for graph in (schedule.first, schedule.steady):
        forwards = Counter(op.layer for op in graph.ops if isinstance(op, Forward))
        backwards = [op for op in graph.ops if isinstance(op, Backward)]
        assert forwards == dict.fromkeys(range(head), n)
        assert Counter(op.layer for op in backwards) == dict.fromkeys(range(lowest, head + 1), n)
        for op in backwards:
            assert (op.in_gradient is None) == (op.layer == lowest)
            assert (op.hidden is None) == (op.layer == 0)
            assert (op.out_gradient is None) == (op.layer == head)
            states = model.layers[op.layer].states
            assert len(op.weights) == len(states)
            assert len(op.gradients) == len(op.fresh) == sum(not model.states[state].frozen for state in states)


def assert_checkpoints_are_of_layers_with_a_backward(model: Model, schedule: Schedule) -> None:
    kept = {int(buffer.name.split("/")[1]) for buffer in schedule.buffers if buffer.role == Role.CHECKPOINTS}
    lowest = next(i for i, layer in enumerate(model.layers) if any(not model.states[s].frozen for s in layer.states))
    assert kept == set(range(max(lowest, 1), len(model.layers) - 1))


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_the_head_alone(schedule):
    """Everything else runs forward only, and no checkpoint is kept."""
    model = with_frozen(made_model(blocks=3), [1.0, 1.0, 1.0, 1.0, 0.0])
    built = build_schedule(model, decide(model, schedule=schedule, micro_batches=2))
    computes = [op for op in built.steady.ops if isinstance(op, Forward | Backward)]
    assert {(type(op), op.layer) for op in computes} == {(Forward, layer) for layer in range(4)} | {(Backward, 4)}
    assert built.traffic("steady")["write"] == 14 * model.states[4].elements
    verify(built)


def test_a_plan_cannot_be_edited_into_updates_of_frozen_states():
    whole = made_model(blocks=2)
    model = with_frozen(whole, [1.0, 1.0, 0.0, 0.0])
    with pytest.raises(ValidationError, match="every state is frozen"):
        Model(**{**dict(whole), "states": tuple(s.model_copy(update={"frozen": True}) for s in whole.states)})
    mixed = tuple(s.model_copy(update={"frozen": s.name == "block.0"}) for s in whole.states)
    with pytest.raises(ValidationError, match=r"block\.1 is not frozen, and others of its class block are"):
        Model(**{**dict(whole), "states": mixed})
    decision = decide(model)
    broken = decision.placement["block.forward"].model_copy(update={"parameters_delayed_ssd": 0.5})
    with pytest.raises(ValidationError, match=r"block.forward.parameters_delayed_\* sum to 0.5, not 0 .*frozen"):
        type(decision)(**{**dict(decision), "placement": {**decision.placement, "block.forward": broken}})
