"""Where the parts of a state lie, and in how many bytes: by hand, by counting, and in schedules of formats and of
layers that no model has yet."""

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ssdplan.plans.documents.profile import Model, State
from ssdplan.plans.documents.state_layout import (
    BF16,
    ELEMENT_BYTES,
    FP32,
    GRADIENT_BYTES,
    GRAIN,
    NONE,
    OPTIMIZER_FORMATS,
    RESIDUAL,
    SUMMED,
    USUAL,
    Format,
    OptimizerFormats,
    checkpoint_bytes,
    training_bytes,
)
from ssdplan.plans.graph.ops import Backward, Forward, Update
from ssdplan.plans.graph.verify import verify
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import PAGE
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import made_model

INT8 = Format("int8", 1, block_elements=256, side_bytes=4)
"""Made up: blocks of 256 under a scale in fp32."""
EIGHT_BITS = OptimizerFormats("fp32", "int8", FP32, INT8, INT8)

fractions = st.sampled_from([0.0, 0.37, 1.0]) | st.floats(0, 1)


def test_the_formats_that_there_are() -> None:
    assert ELEMENT_BYTES == {"bf16": 2, "fp16": 2, "fp32": 4} and GRADIENT_BYTES == 4
    each = {("fp32", "fp32"): 12, ("fp32", "bf16"): 8, ("fp32", "int8"): 6.125}
    each |= {("residual", "fp32"): 10, ("residual", "bf16"): 6, ("residual", "int8"): 4.125}
    each |= {("none", "fp32"): 8, ("none", "bf16"): 4, ("none", "int8"): 2.125}
    assert {name: forms.mean_bytes for name, forms in OPTIMIZER_FORMATS.items()} == each
    for name, forms in OPTIMIZER_FORMATS.items():
        assert name == (forms.masters, forms.moments)
        assert forms.range_bytes(32 * GRAIN) == 32 * GRAIN * each[name]
        assert isinstance(forms.mean_bytes, int) or forms.moments == "int8", "documents print them"
    assert [(part.what, part.offset, part.nbytes) for part in USUAL.parts(GRAIN)] == [
        ("master", 0, 8192),
        ("first moment", 8192, 8192),
        ("second moment", 16384, 8192),
    ]
    assert [(part.format, part.offset, part.nbytes) for part in OPTIMIZER_FORMATS["fp32", "bf16"].parts(GRAIN)] == [
        (FP32, 0, 8192),
        (BF16, 8192, 4096),
        (BF16, 12288, 4096),
    ]


def test_a_format_of_blocks_is_exact_to_the_byte() -> None:
    """A scale of 4 bytes for every 256 elements, the last of which may be fewer."""
    assert [INT8.bytes_of(n) for n in (0, 1, 256, 257, 2048)] == [0, 5, 260, 265, 2048 + 8 * 4]
    assert INT8.mean_bytes == 1 + 4 / 256 and EIGHT_BITS.mean_bytes == 4 + 2 * (1 + 4 / 256)
    master, first, second = EIGHT_BITS.parts(4096)
    assert (master.offset, master.nbytes) == (0, 16384)
    assert (first.offset, first.nbytes) == (16384, 4096 + 64)
    assert (second.offset, second.nbytes) == (16384 + 4096 + 256, 4160), "each part begins where sums do"
    assert EIGHT_BITS.range_bytes(4096) == 7 * PAGE, "16384 + 4352 + 4160 are 6.08 pages"
    assert first.places(2048, 4096) == ((16384 + 2048, 16384 + 4096), (16384 + 4096 + 32, 16384 + 4096 + 64))
    with pytest.raises(AssertionError, match="a block is not cut"):
        first.places(0, 100)


def test_masters_of_fewer_bits_and_none() -> None:
    parts = OptimizerFormats("residual", "bf16", RESIDUAL, BF16, BF16).parts(GRAIN)
    assert [(part.what, part.offset, part.nbytes) for part in parts] == [
        ("master", 0, 4096),
        ("first moment", 4096, 4096),
        ("second moment", 8192, 4096),
    ]
    without = OptimizerFormats("none", "fp32", NONE, FP32, FP32)
    assert [(part.what, part.offset) for part in without.parts(GRAIN)] == [("first moment", 0), ("second moment", 8192)]
    assert without.range_bytes(GRAIN) == 8 * GRAIN


@pytest.mark.parametrize("block, side", [(256, 0), (0, 4), (3000, 4)])
def test_a_format_that_makes_no_sense_is_refused(block: int, side: int) -> None:
    with pytest.raises(AssertionError):
        Format("odd", 1, block_elements=block, side_bytes=side)


@given(
    forms=st.sampled_from(
        [*OPTIMIZER_FORMATS.values(), EIGHT_BITS, OptimizerFormats("residual", "int8", RESIDUAL, INT8, BF16)]
    ),
    grains=st.integers(1, 9),
    data=st.data(),
)
def test_every_byte_of_a_range_is_of_one_element_or_one_scale(forms, grains, data) -> None:
    """However the range is cut, the places of its pieces are each byte of its parts once, and the rest is padding."""
    elements = grains * GRAIN
    cuts = sorted({0, elements, *(GRAIN * cut for cut in data.draw(st.lists(st.integers(0, grains))))})
    seen: Counter[int] = Counter()
    for part in forms.parts(elements):
        for start, stop in itertools.pairwise(cuts):
            for first, end in part.places(start, stop):
                seen.update(range(first, end))
    parts = forms.parts(elements)
    between = [set(range(one.stop, other.offset)) for one, other in itertools.pairwise(parts)]
    assert all(len(gap) < SUMMED for gap in between)
    end = parts[-1].stop
    assert sorted(seen) == sorted(set(range(end)) - set().union(*between)) and set(seen.values()) == {1}
    assert forms.range_bytes(elements) == -(-end // PAGE) * PAGE


def test_bytes_of_a_model() -> None:
    model = made_model(blocks=2, precision="bf16")
    states = [*model.states, model.states[1].model_copy(update={"frozen": True})]
    elements = sum(state.elements for state in model.states)
    assert training_bytes(states, "bf16") == 14 * elements + 2 * model.states[1].elements
    assert checkpoint_bytes(model, 3) == 3 * PAGE, "3 rows of 32 tokens, 64 wide"
    assert checkpoint_bytes(made_model(sequence=33), 1) == 2 * PAGE, "4224 bytes"


@settings(max_examples=examples(30), deadline=None, print_blob=True)
@given(
    schedule=st.sampled_from(["vertical", "horizontal"]),
    unified=st.booleans(),
    alpha=fractions,
    optimizer=fractions,
    gradient=fractions,
    chunk=st.integers(1, 8).map(lambda grains: grains * GRAIN),
)
def test_a_format_of_blocks_needs_no_other_line_of_the_schedule(schedule, unified, alpha, optimizer, gradient, chunk):
    """A schedule with moments in a format that is only told here: every range in whole pages, and the waits hold."""
    model = made_model(blocks=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIMIZER_FORMATS, ("fp32", "bf16"), EIGHT_BITS)
        decision = decide(
            model,
            schedule=schedule,
            unified=unified,
            alpha=0.0 if schedule == "horizontal" else alpha,
            optimizer=optimizer,
            gradient=gradient,
            chunk=chunk,
            optimizer_states="bf16",
        )
        built = build_schedule(model, decision)
        verify(built)
        for home in built.homes:
            assert home.optimizer is not None
            least = 4 * home.elements + 2 * (home.elements + home.elements // 256 * 4)
            assert home.optimizer.start % PAGE == 0 == home.optimizer.nbytes % PAGE
            assert least <= home.optimizer.nbytes < least + SUMMED + PAGE
            assert least <= home.parts[-1].stop < least + SUMMED
        for op in built.steady.ops:
            if isinstance(op, Update):
                assert op.optimizer.nbytes == EIGHT_BITS.range_bytes(op.elements)
    held = {buffer.index for buffer in built.buffers if buffer.role == "optimizer"}
    assert {home.optimizer.buffer for home in built.homes if home.optimizer} == held


# A block of several states.


def with_pieces(model: Model, count: int, *, one_class: bool) -> Model:
    """`model` with each of its blocks cut into up to `count` states, all trained, the first the longest. With
    `one_class` all pieces of all blocks share a placement, else each number of piece has one."""
    states: list[State] = []
    layers = []
    for layer in model.layers:
        mine = []
        for index in layer.states:
            state = model.states[index]
            if len(model.uses(index)) > 1 or layer in (model.layers[0], model.layers[-1]):
                found = next((at for at, known in enumerate(states) if known.name == state.name), len(states))
                mine.append(found)
                if found == len(states):
                    states.append(state)
                continue
            grains = state.elements // GRAIN
            sizes = [grains // count] * (count - 1)
            for number, size in enumerate((grains - sum(sizes), *sizes)):
                name = state.state_class if one_class else f"{state.state_class}.{number}"
                mine.append(len(states))
                update = {"name": f"{state.name}.{number}", "state_class": name, "elements": size * GRAIN}
                states.append(state.model_copy(update=update))
        layers.append(layer.model_copy(update={"states": tuple(mine)}))
    return Model(**{**dict(model), "states": tuple(states), "layers": tuple(layers)})


@settings(max_examples=examples(60), deadline=None, print_blob=True)
@given(
    blocks=st.integers(1, 3),
    tied=st.booleans(),
    count=st.integers(2, 3),
    one_class=st.booleans(),
    schedule=st.sampled_from(["vertical", "horizontal"]),
    unified=st.booleans(),
    alpha=fractions,
    parameters=fractions,
    on_device=fractions,
    across_turn=fractions,
    optimizer=fractions,
    checkpoints=fractions,
    gradient=fractions,
    micro_batches=st.integers(1, 3),
)
def test_a_block_may_be_several_states(
    blocks, tied, count, one_class, schedule, unified, alpha, parameters, on_device, across_turn, **choices
):
    whole = made_model(blocks=blocks, tied=tied)
    assume(whole.states[1].elements >= count * GRAIN)
    model = with_pieces(whole, count, one_class=one_class)
    horizontal = schedule == "horizontal"
    decision = decide(
        model,
        schedule=schedule,
        unified=unified,
        alpha=0.0 if horizontal else alpha,
        parameters=0.0 if unified else parameters,
        on_device=on_device,
        across_turn=0.0 if horizontal else across_turn * (1 - on_device),
        chunk=4 * GRAIN,
        **choices,
    )
    built = build_schedule(model, decision)
    verify(built)
    for graphs in ([built.steady], [built.first, built.flush]):
        updated: Counter[int] = Counter()
        for graph in graphs:
            for op in graph.ops:
                if isinstance(op, Forward | Backward):
                    lengths = [region.nbytes // 2 for region in op.weights]
                    assert lengths == [model.states[state].elements for state in model.layers[op.layer].states]
                if isinstance(op, Backward):
                    assert len(op.gradients) == len(op.fresh) == len(model.layers[op.layer].states)
                if isinstance(op, Update):
                    updated[op.state] += op.elements
        assert updated == {index: state.elements for index, state in enumerate(model.states)}


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("held", [0.0, 1.0])
def test_pieces_of_a_block_move_as_many_bytes_as_the_block(schedule, held) -> None:
    whole = made_model(blocks=3, tied=True)
    traffic = [
        build_schedule(
            model, decide(model, schedule=schedule, optimizer=held, parameters=held, checkpoints=held, micro_batches=3)
        ).traffic("steady")
        for model in (whole, with_pieces(whole, 2, one_class=True), with_pieces(whole, 3, one_class=False))
    ]
    assert traffic[0] == traffic[1] == traffic[2] and traffic[0]["h2d"] and traffic[0]["d2h"]
