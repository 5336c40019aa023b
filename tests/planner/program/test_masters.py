"""Masters other than fp32: an update reads the parameters that it writes. Program and schedule move the same bytes of
them, wherever they live, and every order that the waits allow is safe."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.program.forms import TRAFFIC
from ssdplan.planner.program.placement import _checkpoints, _values, footprint
from ssdplan.planner.program.traffic import layer_groups
from ssdplan.planner.program.variables import CONSTANT, DELAY_RATIO, value
from ssdplan.plans.documents.state_layout import OPTIMIZER_FORMATS, SCALED
from ssdplan.plans.graph.ops import Update
from ssdplan.plans.graph.verify import verify
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import made_model, with_fp32
from tests.made.works import work_of

NOTHING_OR_ALL = st.sampled_from([0.0, 1.0])


@settings(deadline=None, max_examples=examples(60), print_blob=True)
@given(
    tied=st.booleans(),
    masters=st.sampled_from(["residual", "none"]),
    moments=st.sampled_from(["fp32", "int8"]),
    schedule=st.sampled_from(["vertical", "horizontal"]),
    unified=st.booleans(),
    ranks=st.sampled_from([1, 1, 2]),
    n=st.integers(1, 3),
    alpha=NOTHING_OR_ALL,
    where=st.sampled_from(["ssd", "host", "device", "across the turn", "updated there"]),
    optimizer=NOTHING_OR_ALL,
    behind=st.booleans(),
    wide=st.sampled_from([0.0, 0.0, 0.25]),
)
def test_forms_are_the_bytes_of_the_schedule(
    tied, masters, moments, schedule, unified, ranks, n, alpha, where, optimizer, behind, wide,
):  # fmt: skip
    """Where nothing is a fraction of a state, nothing is rounded but the pages of scales. With `wide`, that part of
    each state is in fp32."""
    vertical = schedule == "vertical"
    if where == "updated there" and (unified or ranks > 1 or not vertical):
        where = "device"
    if (where == "host" and unified) or (where == "across the turn" and not vertical):
        where = "ssd"
    alpha = alpha if vertical else 0.0
    model = made_model(blocks=3, tied=tied, hidden=128, vocab=1024)
    model = with_fp32(model, [wide] * len(model.states)) if wide else model
    decision = decide(
        model, masters=masters, optimizer_states=moments, schedule=schedule, unified=unified, ranks=ranks,
        micro_batches=n, alpha=alpha, on_device=float(where in ("device", "updated there")),
        across_turn=float(where == "across the turn"), updated=float(where == "updated there"),
        parameters=float(where == "host"), optimizer=optimizer, behind=behind and ranks > 1 and vertical, chunk=1 << 16,
    )  # fmt: skip
    built = build_schedule(model, decision)
    verify(built)
    work = replace(work_of(1, n, schedule), ranks=ranks, unified_memory=unified, formats=decision.formats)
    at = {DELAY_RATIO: alpha} | _checkpoints(decision.checkpoint_host, 0.0)
    for name, placement in decision.placement.items():
        at |= _values(name, placement, 0.0)
    made = TRAFFIC[schedule].stages(model, layer_groups(model, ranks), work)
    moved = built.traffic("steady")
    updates = sum(isinstance(op, Update) for op in built.steady.ops)
    for form, way in (("read", "read"), ("write", "write"), ("h2d", "h2d"), ("d2h", "d2h")):
        if unified and form in ("h2d", "d2h"):
            continue
        total = sum(stage.count * value({CONSTANT: 0.0, **getattr(stage, f"{form}_bytes")}, at) for stage in made)
        pages = 4096 * updates if moments == "int8" and form in ("read", "write") else 0
        assert total == pytest.approx(moved[way], rel=1e-9, abs=pages), (form, total, moved[way])
    assert footprint(model, decision).ssd_bytes == pytest.approx(built.arenas["ssd"], abs=4096 * updates)


def test_bytes_of_a_parameter_and_step_where_all_is_on_ssd() -> None:
    """What a step costs where the drive bounds it: 30 bytes a parameter with fp32 masters and moments."""
    side = 4 * 4 / SCALED
    """Scales of both moments, read and written."""
    expected = {("fp32", "fp32"): 30, ("residual", "fp32"): 26, ("none", "fp32"): 22, ("residual", "bf16"): 18}
    expected |= {("none", "bf16"): 14, ("residual", "int8"): 14 + side, ("none", "int8"): 10 + side}
    model = made_model(blocks=4, hidden=512, vocab=64)
    block = model.states[1].elements
    for (masters, moments), each in expected.items():
        two, three = (
            build_schedule(
                made_model(blocks=blocks, hidden=512, vocab=64),
                decide(model, masters=masters, optimizer_states=moments, chunk=1 << 18, checkpoints=1.0),
            ).traffic("steady")
            for blocks in (4, 5)
        )
        total = three["read"] + three["write"] - two["read"] - two["write"]
        assert total == pytest.approx(each * block, rel=2e-3), (masters, moments)
        assert OPTIMIZER_FORMATS[masters, moments].takes_copy == (masters != "fp32")
