"""Unified memory: nothing is copied for compute's sake, and each schedule is still right in every order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.graph.contents import Content, Role
from ssdplan.plans.graph.ops import Backward, Forward, Transfer, Update
from ssdplan.plans.graph.verify import verify
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.schedule.homes import kept_on_device
from ssdplan.plans.units import PAGE
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import made_model
from tests.plans.schedule.test_schedule import assert_every_element_is_updated_once, fractions


@settings(max_examples=examples(60), deadline=None, print_blob=True)
@given(
    schedule=st.sampled_from(["vertical", "horizontal"]),
    blocks=st.integers(1, 5),
    tied=st.booleans(),
    precision=st.sampled_from(["bf16", "fp32"]),
    alpha=fractions,
    optimizer=fractions,
    checkpoints=fractions,
    gradient=fractions,
    micro_batches=st.integers(1, 4),
    chunk=st.integers(1, 16).map(lambda grains: grains * 2048),
    lookahead=st.integers(1, 4),
    on_device=fractions,
    across_turn=fractions,
)
def test_every_unified_schedule_verifies(schedule, blocks, tied, precision, alpha, on_device, across_turn, **choices):
    model = made_model(blocks=blocks, tied=tied, precision=precision)
    vertical = schedule == "vertical"
    decision = decide(
        model,
        unified=True,
        schedule=schedule,
        alpha=alpha if vertical else 0.0,
        on_device=on_device,
        across_turn=across_turn * (1 - on_device) if vertical else 0.0,
        **choices,
    )
    made = build_schedule(model, decision)
    verify(made)
    assert_every_element_is_updated_once(made, model)
    assert made.arenas["device"] == 0
    for graph in (made.first, made.steady, made.flush, made.evaluate):
        copies = [op for op in graph.ops if isinstance(op, Transfer) and op.kind in ("h2d", "d2h")]
        assert all(op.kind == "d2h" and op.final_gradient for op in copies)
        prompt = [op for op in graph.ops if isinstance(op, Update) and not op.delayed]
        assert all(op.final_gradient for op in prompt)
        # Every gradient is looked at once: in the copy of what waits for the next step, or by its prompt update.
        looked = sum(op.nbytes for op in copies) + sum(op.gradient.nbytes for op in prompt)
        trains = any(isinstance(op, Backward) for op in graph.ops)
        assert looked == (4 * sum(state.elements for state in model.states) if trains else 0)


def test_compute_reads_what_lives_on_host_where_it_lives_and_what_lives_on_ssd_where_it_is_read_to():
    model = made_model(blocks=4, tied=True)
    decision = decide(model, unified=True, on_device=0.5, optimizer=1.0, checkpoints=1.0, micro_batches=2)
    schedule = build_schedule(model, decision)
    homes = {
        home.parameters.buffer for home in schedule.homes if schedule.buffers[home.parameters.buffer].tier == "host"
    }
    read_to = {op.target.buffer for op in schedule.steady.ops if isinstance(op, Transfer) and op.kind == "read"}
    kept = kept_on_device(model, decision).device
    assert 0 < len(kept) < len(model.states)
    for op in schedule.steady.ops:
        if isinstance(op, Forward | Backward):
            for state, region in zip(model.layers[op.layer].states, op.weights, strict=True):
                assert region.buffer in (homes if state in kept else read_to)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_each_layer_reads_what_the_layer_before_has_written(schedule):
    model = made_model(blocks=3)
    graph = build_schedule(
        model, decide(model, unified=True, schedule=schedule, checkpoints=0.5, micro_batches=3)
    ).steady
    out = {(op.layer, op.micro_batch): op.out for op in graph.ops if isinstance(op, Forward)}
    into = {(op.layer, op.micro_batch): op.in_gradient for op in graph.ops if isinstance(op, Backward)}
    for op in graph.ops:
        if isinstance(op, Forward) and op.layer:
            assert op.hidden == out[op.layer - 1, op.micro_batch]
        if isinstance(op, Backward) and op.out_gradient:
            assert op.out_gradient == into[op.layer + 1, op.micro_batch]


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
def test_checkpoints_are_whole_on_host_or_on_ssd(fraction):
    model, n = made_model(blocks=4), 2
    schedule = build_schedule(model, decide(model, unified=True, checkpoints=fraction, micro_batches=n))
    each = -(-model.sequence_length * model.hidden_size * 2 // PAGE) * PAGE
    sizes = {buffer.tier: 0 for buffer in schedule.buffers}
    for buffer in schedule.buffers:
        if buffer.role == Role.CHECKPOINTS:
            assert buffer.nbytes == each
            sizes[buffer.tier] += 1
    assert sizes["host"] == round(4 * n * fraction) and sizes["ssd"] == 4 * n - round(4 * n * fraction)
    transfers = [op for op in schedule.steady.ops if isinstance(op, Transfer)]
    moved = [op for op in transfers if op.content == Content.ACTIVATION_CHECKPOINT]
    assert len(moved) == 2 * sizes["ssd"]


def test_parameters_in_parts_on_host_are_refused():
    model = made_model()
    data = decide(model, parameters=0.5).model_dump() | {"unified_memory": True}
    with pytest.raises(ValidationError, match="unified_memory a state's parameters stay whole"):
        Decision.model_validate(data)
