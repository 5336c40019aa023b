"""What the device keeps: the program's forms against the bytes of the schedules, and what the program makes of room."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.program.choices import FixedChoices, GradientBuffers, KeptShares, Limits
from ssdplan.planner.program.placement import ProgramResult, _checkpoints, _values, footprint
from ssdplan.planner.program.program import solve_program
from ssdplan.planner.program.traffic import layer_groups, stages
from ssdplan.planner.program.variables import CONSTANT, DELAY_RATIO, value
from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.state_layout import checkpoint_bytes
from ssdplan.plans.graph.ops import Update
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.profiles import GIB, MIB, made_machine, made_model, made_volume
from tests.made.works import work_of
from tests.planner.machines import models

PAGES = 4096 * 64
"""Rounding of every form of every state to whole grains, and of checkpoints to whole pages."""


def by_forms(model: Model, decision: Decision) -> dict[str, float]:
    """Bytes of a step on each way, and elements that host and device update."""
    work = replace(work_of(decision.micro_batch_size, decision.micro_batches), updates_wait=decision.updates_wait)
    at = {DELAY_RATIO: decision.delay_ratio} | _checkpoints(decision.checkpoint_host, decision.checkpoint_device)
    for name, placement in decision.placement.items():
        at |= _values(name, placement, 0.0)
    total = dict.fromkeys(("read", "write", "h2d", "d2h", "cpu", "device"), 0.0)
    for stage in stages(model, layer_groups(model), work):
        forms = (
            stage.read_bytes, stage.write_bytes, stage.h2d_bytes, stage.d2h_bytes, stage.updates, stage.device_updates
        )  # fmt: skip
        for way, form in zip(total, forms, strict=True):
            total[way] += stage.count * value({CONSTANT: 0.0, **form}, at)
    return total


@settings(deadline=None, max_examples=examples(80), print_blob=True)
@given(
    model=models(), n=st.integers(1, 3), alpha=st.sampled_from([0.0, 0.3, 1.0]), clips=st.booleans(),
    on_device=st.sampled_from([0.0, 1.0]), updated=st.sampled_from([0.0, 1.0]), inputs=st.sampled_from([0.0, 1.0]),
    on_host=st.sampled_from([0.0, 0.4, 1.0]),
)  # fmt: skip
def test_forms_are_the_bytes_of_the_schedule(model, n, alpha, clips, on_device, updated, inputs, on_host) -> None:
    decision = decide(
        model, micro_batches=n, alpha=1.0 if clips else alpha, clip_grad_norm=1.0 if clips else None, chunk=1 << 14,
        on_device=on_device, updated=updated * on_device, inputs=inputs, optimizer=on_host, checkpoints=on_host,
        parameters=on_host,
    )  # fmt: skip
    schedule = build_schedule(model, decision)
    forms = by_forms(model, decision)
    # Where all blocks' inputs stay, the head's does too, which no form of a fraction can say.
    of_head = 3 * (n - 1) * checkpoint_bytes(model, 1) * inputs
    rounding = PAGES * len(model.states)
    for way, moved in schedule.traffic("steady").items():
        assert moved - rounding <= forms[way] <= moved + rounding + (of_head if way in ("h2d", "d2h") else 0), way
    updates = [op for op in schedule.steady.ops if isinstance(op, Update)]
    for way, there in (("cpu", False), ("device", True)):
        elements = sum(op.elements for op in updates if op.on_device == there)
        assert forms[way] == pytest.approx(elements, abs=2048 * len(model.states)), way
    kept = sum(buffer.nbytes for buffer in schedule.buffers if buffer.tier == "device" and not buffer.pool)
    assert (
        footprint(model, decision).device_bytes <= kept <= footprint(model, decision).device_bytes + rounding + of_head
    )


def test_room_on_the_device_is_used_before_the_drive() -> None:
    """Behind a slow drive optimizer states go to the device as far as there is room, and the step is shorter for it."""
    model = made_model(blocks=8, hidden=256, vocab=512, sequence=64, flops=1e13)
    machine = made_machine(device_update_rate=2e10, volumes=(made_volume(read=2e8, write=2e8),))
    states = sum(state.elements for state in model.states)
    seconds, shares = [], []
    for room in (8 * MIB, 32 * MIB, 64 * MIB, GIB):
        found = solve_program(
            model, machine, micro_batch_size=1, micro_batches=2, limits=Limits(4 * MIB, device_bytes=float(room))
        )
        assert found is not None
        there = (
            sum(found.placement[state.state_class].optimizer_device * state.elements for state in model.states) / states
        )
        seconds.append(found.seconds)
        shares.append(there)
    assert shares == sorted(shares) and shares[0] < 0.5 and shares[-1] > 0.9
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < 0.2 * seconds[0]


@pytest.mark.parametrize("what", [{"optimizer": 1.0}, {"kept": {}}])
def test_what_was_said_of_states_is_not_for_the_program(what) -> None:
    model = made_model(blocks=4)
    machine = made_machine(device_update_rate=2e10)
    found = solve_program(
        model, machine, micro_batch_size=1, micro_batches=1, limits=Limits(GIB, device_bytes=float(GIB)),
        fixed=FixedChoices(**what),
    )  # fmt: skip
    assert found and not any(place.optimizer_device for place in found.placement.values())


def test_a_machine_whose_updates_nobody_measured_keeps_none_there() -> None:
    model = made_model(blocks=4)
    limits = Limits(1 * MIB, device_bytes=float(GIB))
    for rate, there in ((None, False), (2e10, True)):
        machine = made_machine(device_update_rate=rate, volumes=(made_volume(read=1e7, write=1e7),))
        found = solve_program(model, machine, micro_batch_size=1, micro_batches=1, limits=limits)
        assert found and all((place.optimizer_device > 0.5) == there for place in found.placement.values())


def test_whole_states_that_the_user_wants_updated_there() -> None:
    model = made_model(blocks=4)
    shares = {
        state.state_class: KeptShares(1.0, 0.0, 0.5 if state.state_class == "block" else 0.0) for state in model.states
    }
    fixed = FixedChoices(kept=shares, delay_ratio=0.25)
    found = solve_program(
        model,
        made_machine(device_update_rate=2e10),
        micro_batch_size=1,
        micro_batches=1,
        limits=Limits(GIB),
        fixed=fixed,
    )
    assert found is not None
    assert {name: place.optimizer_device for name, place in found.placement.items()} == {
        name: each.updated for name, each in shares.items()
    }


BUFFERS = GradientBuffers((("embedding", 1.0), ("head", 0.25)), 8.0 * MIB, 2.0 * MIB)
"""Of an embedding and a head a quarter as large."""


@pytest.mark.parametrize("embedding", [0.0, 1.0])
@pytest.mark.parametrize("head", [0.0, 1.0])
def test_gradient_buffers_are_for_the_largest_that_host_updates(embedding: float, head: float) -> None:
    kept = {"embedding": KeptShares(embedding, 0.0, embedding), "head": KeptShares(head, 0.0, head)}
    found = solve_program(
        made_model(blocks=4, vocab=4096), made_machine(device_update_rate=2e10), micro_batch_size=1, micro_batches=1,
        limits=Limits(GIB, device_bytes=float(GIB), gradient_buffers=BUFFERS), fixed=FixedChoices(kept=kept),
    )  # fmt: skip
    assert found is not None
    taken = found.limited_bytes - found.host_bytes
    assert taken == pytest.approx(8 * MIB * max(1.0 - embedding, 0.25 * (1.0 - head)))


def test_a_device_updates_what_host_has_no_buffer_for() -> None:
    """As far as host has no room for the buffers of a large state, the program has the device update it; and a device
    that has none either for the buffers of what host updates keeps less."""
    model, machine = made_model(blocks=4, vocab=4096), made_machine(device_update_rate=1e3)

    def solved(host: float, device: float) -> ProgramResult | None:
        limits = Limits(host, device_bytes=device, gradient_buffers=BUFFERS)
        return solve_program(model, machine, micro_batch_size=1, micro_batches=2, limits=limits)

    shares = []
    for host in (64 * MIB, 6 * MIB, 4 * MIB, 1 * MIB):
        found = solved(host, float(GIB))
        assert found is not None and found.limited_bytes <= host * (1 + 1e-6)
        shares.append(found.placement["embedding"].optimizer_device)
    assert shares == sorted(shares) and shares[0] < 0.01  # so slow are its updates that it makes none it need not
    for host, share in zip((6, 4, 1), shares[1:], strict=True):
        assert share >= 1.0 - host / 8 - 1e-6
    assert solved(64 * MIB, 1.9 * MIB) is None and solved(64 * MIB, 2.1 * MIB) is not None
