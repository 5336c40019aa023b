"""Reasons and tables of a plan agree: whatever was asked for, each sentence is true of the figures beside it."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.explain.alternatives import NO_DELAY
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve, solve_and_build
from ssdplan.plans.analysis.memory_usage import snapshot_store_bytes
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.errors import InfeasibleError
from ssdplan.plans.units import format_bytes
from ssdplan.plans.views.plan_text import describe_plan
from tests.made.profiles import GIB, MIB, made_machine, made_model, made_profile, made_volume, with_frozen
from tests.planner.machines import machines, models

CLIP = "clipping by the global norm needs all gradients before any update"
FP16 = "skipping steps that overflow in fp16 needs all gradients before any update"
SLOW = made_volume(read=2e8, write=2e8)


def told(plan: Plan, topic: str) -> str:
    texts = [reason.text for reason in plan.reasons if reason.topic == topic]
    assert len(texts) <= 1
    return "".join(texts)


def small(**changes: Any) -> Profile:
    usual: dict[str, Any] = {"blocks": 3, "hidden": 128, "vocab": 512, "sequence": 64, "flops": 1e11}
    unified, rate = changes.pop("unified", False), changes.pop("device_update_rate", None)
    machine = made_machine(shared=unified, cores=4, update_rate=1e8, device_update_rate=rate, volumes=(SLOW,))
    return made_profile(machine=machine, model=made_model(**(usual | changes)))


def check(plan: Plan) -> None:
    """All that must hold of any plan's reasons, by figures that stand elsewhere in it."""
    p, decision = plan.prediction, plan.decision
    for reason in plan.reasons:
        assert re.fullmatch(r"[A-Z0-9].*\.", reason.text) and ", ." not in reason.text, reason
    _check_delay(plan)
    # The least budgets promise no more than the same bound gives the plan, which stands beside them.
    tokens = decision.micro_batches * decision.micro_batch_size * decision.sequence_length
    own = tokens / p.program_seconds
    assert all(row.tokens_per_second <= own * (1 + 1e-9) for row in plan.least)
    # What would help is what the table says.
    gains = {row.words: row.throughput_gain for row in plan.sensitivity}
    words = told(plan, "to be faster")
    for name, gain in gains.items():
        found = re.search(rf"{re.escape(name)}: \+([\d.e+]+)%", words)
        assert (found is not None) == (gain >= 5e-4), (name, words)
        if found:
            assert float(found[1]) == pytest.approx(100 * gain, rel=0.06, abs=0.51 if gain >= 0.1 else 0)
    # The batch reaches of the best what the table says.
    simulated = [row.tokens_per_second for row in plan.alternatives if row.simulated]
    reach = re.search(r"(?<!rows, with )reaches ([\d.]+)% of what", told(plan, "batch"))
    if reach:
        assert float(reach[1]) == pytest.approx(100 * p.tokens_per_second / max(simulated), abs=0.06)
    # The ssd is used where bytes live there, and the first line says so.
    assert told(plan, "ssd").startswith("The ssd is not used") == (not p.ssd_bytes)
    if decision.unified_memory:
        assert "device" not in told(plan, "ssd")


def _check_delay(plan: Plan) -> None:
    decision, text = plan.decision, told(plan, "delay ratio")
    forced = CLIP if decision.clip_grad_norm else FP16 if decision.precision == "fp16" else ""
    rows = [row for row in plan.comparison if row.name == NO_DELAY]
    if forced:
        assert text == f"All of each update runs during the next step's forward: {forced}."
        assert all(row.step_seconds is None for row in rows), "it is not possible, so nothing is said of its speed"
        return
    if decision.schedule == "horizontal" or plan.asked.delay_ratio is not None or not decision.delay_ratio:
        assert "without that" not in text
        return
    (row,) = rows
    if not row.fits:
        assert text.endswith("no placement was found that keeps the budgets.")
        return
    assert row.step_seconds
    longer = row.step_seconds / plan.prediction.step_seconds - 1
    found = re.search(r"would take ([\d.]+)% (longer|less)", text)
    if abs(longer) < 5e-4:
        assert found is None and "would take as long" in text
    else:
        assert found and found[2] == ("longer" if longer > 0 else "less"), (text, longer)
        assert float(found[1]) == pytest.approx(100 * abs(longer), abs=0.006)


ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "a batch that the search finds": ({}, {"micro_batches": None}),
    "clip": ({}, {"clip_grad_norm": 1.0}),
    "clip, and the ratio asked for": ({}, {"clip_grad_norm": 1.0, "delay_ratio": 1.0}),
    "fp16": ({"precision": "fp16"}, {}),
    "fp16 and clip": ({"precision": "fp16"}, {"clip_grad_norm": 0.5}),
    "unified": ({"unified": True}, {"unified_memory": True}),
    "unified and clip": ({"unified": True}, {"unified_memory": True, "clip_grad_norm": 1.0}),
    "horizontal": ({}, {"schedule": "horizontal"}),
    "single": ({}, {"schedule": "single", "micro_batches": 1}),
    "one micro-batch": ({}, {"micro_batches": 1}),
    "prompt": ({}, {"delay_ratio": 0.0}),
    "a batch": ({}, {"global_batch": 8, "micro_batches": None}),
    "bf16 states": ({}, {"optimizer_states": "bf16", "host_memory_bytes": 6 * MIB}),
    "optimizer on ssd": ({}, {"residency": {"optimizer": 0.0}}),
    "all in memory, on the device": ({"device_update_rate": 1e10}, {}),
    "all in memory, on the device, and fp16": ({"device_update_rate": 1e10, "precision": "fp16"}, {}),
    "updates on the device": ({"device_update_rate": 1e10}, {"device_memory_bytes": 10 * MIB}),
    "all in memory": ({}, {"host_memory_bytes": GIB, "micro_batches": 4}),
    "all in memory and clip": ({}, {"host_memory_bytes": GIB, "clip_grad_norm": 1.0, "micro_batches": 4}),
}


@pytest.mark.parametrize("name", ASKED)
def test_reasons_agree_with_tables_whatever_is_asked(name: str) -> None:
    profile, request = ASKED[name]
    asked = replace(SolveRequest(8 * MIB, micro_batches=3), **request)
    plan, schedule = solve_and_build(small(**profile), asked)
    check(plan)
    text = describe_plan(plan, schedule)
    first = text.split("\n\n")[0]
    assert ("You do not need" in " ".join(first.split())) == (not plan.prediction.ssd_bytes)
    (kept,) = [line for line in text.splitlines() if line.startswith("  with snapshots")]
    store = format_bytes(snapshot_store_bytes(schedule, keep=2))
    there = "the store takes" if plan.prediction.ssd_bytes else "a store of"
    assert f" {there} {store} (run --snapshot-every N)" in kept, (
        "snapshots are on ssd, even of what a step has not there"
    )
    assert kept.endswith(" with --keep 1"), "the line is whole"
    assert ("all in memory" in name) == (not plan.prediction.ssd_bytes)


def test_reasons_agree_with_tables_of_a_frozen_model() -> None:
    model = made_model(blocks=6, hidden=128, vocab=512, sequence=64, flops=1e11)
    frozen = with_frozen(model, [1.0, *[1.0] * 3, *[0.0] * 3, 0.0])
    profile = made_profile(machine=made_machine(volumes=(SLOW,)), model=frozen)
    for request in (SolveRequest(8 * MIB), SolveRequest(8 * MIB, clip_grad_norm=1.0)):
        check(solve(profile, replace(request, micro_batch_size=1, micro_batches=3)))
    # Among all batches, where a shortened model is faster than every bound of the program.
    assert solve(profile, SolveRequest(8 * MIB), compared=False).prediction.ssd_bytes


def test_reasons_agree_with_tables_of_a_what_if() -> None:
    profile = estimate(
        WhatIf("smollm2-135m", "rtx-4090", ["samsung-990-pro*2"], GIB, sequence_length=256, micro_batch_sizes=(1,))
    )
    for request in (SolveRequest(GIB, micro_batches=4), SolveRequest(GIB, micro_batches=4, clip_grad_norm=1.0)):
        check(solve(profile, request))


@settings(deadline=None, max_examples=4, print_blob=True)
@given(models(), machines(), st.floats(0.1, 1.2), st.integers(1, 6), st.sampled_from((None, 1.0)))
def test_reasons_agree_with_tables_of_any_plan(model: Any, machine: Any, memory: float, n: int, clip: Any) -> None:
    states = sum(state.elements for state in model.states)
    request = SolveRequest(
        int(memory * 16 * states) + 2 * MIB, micro_batch_size=1, micro_batches=n, clip_grad_norm=clip
    )
    try:
        plan = solve(made_profile(machine=machine, model=model), request)
    except InfeasibleError:
        return
    check(plan)


def test_what_was_asked_for_is_a_reason_only_where_it_is_one() -> None:
    """Optimizer states that were asked onto the host are not why others live on ssd."""
    profile = small()
    asked = SolveRequest(23 * MIB // 2, micro_batches=3, residency={"optimizer": 1.0, "device": 0.0})
    plan = solve(profile, asked, compared=False)
    assert plan.prediction.ssd_bytes and "asked for" not in told(plan, "ssd")
    plan = solve(profile, replace(asked, residency={"optimizer": 0.0}), compared=False)
    assert told(plan, "ssd").startswith("What stays on host of the optimizer states was asked for, so ")
    everything = {"parameters": 0.0, "optimizer": 0.0, "checkpoints": 0.0}
    plan = solve(profile, replace(asked, residency=everything), compared=False)
    assert told(plan, "ssd").startswith("What stays on host was asked for, so ")
