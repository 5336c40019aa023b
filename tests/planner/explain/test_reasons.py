"""Why a plan is as it is: on machines where the answer is known, and every sentence against its own figures."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.explain.reasons import Evidence, explain
from ssdplan.planner.explain.recomputation import SavedEvidence
from ssdplan.planner.explain.sensitivity import more_host_memory, scaled_compute
from ssdplan.planner.predict.critical_path import SHARED_CORES
from ssdplan.planner.predict.peaks import OP_BYTES, predict_peaks
from ssdplan.planner.request import SolveRequest
from ssdplan.plans.analysis.wear import drive_words, lifetime, wear
from ssdplan.plans.documents.plan import Least, Plan, Sensitivity
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.errors import InfeasibleError
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import parse_bytes
from ssdplan.plans.views.plan_text import describe_plan
from ssdplan.plans.views.saved_text import kept_bytes
from tests.extent import examples
from tests.made.profiles import GIB, MIB, made_machine, made_model, made_profile, made_volume, planned
from tests.planner.machines import machines, models

EXAMPLES = sorted((Path(__file__).parents[3] / "plans" / "examples").glob("*.json"))
BATCH = SolveRequest(12 * MIB, micro_batch_size=1, micro_batches=2)
FAST = made_volume(read=2e10, write=2e10)


def model_of(flops: float = 2e12) -> Model:
    """26 MB of states in 12 blocks, and little to compute."""
    return made_model(blocks=12, hidden=128, vocab=1024, sequence=64, flops=flops, tied=True)


def plan_for(machine: Machine, request: SolveRequest = BATCH, model: Model | None = None) -> Plan:
    return planned(made_profile(machine=machine, model=model or model_of()), request)


def told(plan: Plan, topic: str) -> str:
    """The one text on a topic; empty when there is none."""
    texts = [reason.text for reason in plan.reasons if reason.topic == topic]
    assert len(texts) <= 1
    return "".join(texts)


@pytest.mark.parametrize(
    ("machine", "flops", "bound", "chain", "helps"),
    [
        (made_machine(volumes=(FAST,)), 5e10, "compute", "compute", "a GPU twice as fast"),
        (made_machine(volumes=(made_volume(read=1e7, write=1e7),)), 2e12, "ssd", "ssd", "an SSD 1 GB/s faster"),
        (made_machine(link=1e7, d2h=1e9), 2e12, "link to device", "copies to the device", "a link twice as fast"),
        (made_machine(link=1e9, d2h=1e7), 2e12, "link from device", "copies from the device", "a link twice as fast"),
        (made_machine(update_rate=1e6), 2e12, "cpu updates", "updates", "twice the cores for updates"),
        (
            made_machine(shared=True, volumes=(FAST,)),
            5e10,
            SHARED_CORES,
            "compute",
            "a device twice as fast",
        ),
    ],
)
def test_what_bounds_a_step_and_what_would_help(
    machine: Machine, flops: float, bound: str, chain: str, helps: str
) -> None:
    plan = plan_for(machine, model=model_of(flops))
    text = told(plan, "bound")
    busy = re.match(
        rf"The step is bound by {re.escape(bound)}, busy for (\d+)% of it; next comes .* with (\d+)%\.", text
    )
    assert busy, text
    assert int(busy[1]) >= int(busy[2])
    first = re.search(r"so long is (\d+)% ([^,.]+?)(,| and|\.)", text)
    assert first and chain in first[2], text
    assert re.match(rf"At this batch, {re.escape(helps)}: \+[\d.]+% tokens/s(;|\.)", told(plan, "to be faster"))
    best = max(plan.sensitivity, key=lambda row: row.throughput_gain)
    assert best.words == helps


def test_what_bounds_it_is_as_busy_as_the_plan_says() -> None:
    plan = plan_for(made_machine(volumes=(FAST,)), model=model_of(5e10))
    assert f"busy for {plan.prediction.busy['compute']:.0%} of it" in told(plan, "bound")
    waits = {
        cause: seconds / plan.prediction.step_seconds for cause, seconds in plan.prediction.idle["compute"].items()
    }
    assert ("It still waits" in told(plan, "bound")) == (sum(waits.values()) >= 0.05)


def test_everything_fits_in_host_memory() -> None:
    plan = plan_for(made_machine(), SolveRequest(GIB, micro_batch_size=1, micro_batches=2))
    p = plan.prediction
    assert p.ssd_bytes == p.ssd_read_bytes == p.ssd_write_bytes == 0
    text = told(plan, "ssd")
    assert text.startswith("The ssd is not used: ") and "fit in the host budget of 1 GiB" in text
    left = re.search(r"leave ([\d.]+) MiB of it", text)
    assert left and float(left[1]) * MIB == pytest.approx(GIB - p.peak_host_bytes, rel=0.01)
    assert told(plan, "wear") == ""
    # The link and the drive bring nothing to what they do not hold up.
    assert "an SSD 1 GB/s faster" in told(plan, "to be faster").split("nothing from")[1]


def test_a_tight_host_memory_sends_states_to_the_ssd() -> None:
    model = model_of()
    plan = plan_for(made_machine(), model=model)
    states = 14 * sum(state.elements for state in model.states)
    text = told(plan, "ssd")
    assert f"{states / MIB:.3g} MiB of parameters and optimizer states" in text
    assert "are more than the host budget of 12 MiB, so " in text
    share = re.search(r"On host stay (.*) of the parameters, (.*?) of the optimizer states,? ", text)
    assert share
    kept = sum(
        state.elements
        * (
            plan.decision.placement[state.state_class].optimizer_prompt_host
            + plan.decision.placement[state.state_class].optimizer_delayed_host
        )
        for state in model.states
    ) / sum(state.elements for state in model.states)
    words = {"all": 1.0, "none": 0.0}
    assert words.get(share[2]) or float(share[2].rstrip("%")) / 100 == pytest.approx(kept, abs=0.001)


def test_a_residency_that_was_asked_for_is_its_own_reason() -> None:
    request = SolveRequest(GIB, micro_batch_size=1, micro_batches=2, residency={"optimizer": 0.0})
    text = told(plan_for(made_machine(), request), "ssd")
    assert (
        text.startswith("What stays on host of the optimizer states was asked for, so ")
        and "none of the optimizer states" in text
    )


def test_offloading_when_the_device_holds_all_and_when_it_does_not() -> None:
    """26 MB of states in bf16 take 14 bytes a parameter, and 4 of gradient."""
    model = model_of()
    states = 18 * sum(state.elements for state in model.states)
    small = made_machine(device_memory=6 * MIB)
    for machine, words in ((made_machine(), "can be trained there without offloading"), (small, "layers pass through")):
        text = told(plan_for(machine, SolveRequest(GIB, micro_batch_size=1, micro_batches=2)), "offloading")
        assert words in text
        named = re.search(r"take (?:about|at least) ([\d.]+) MiB", text)
        assert named and states < float(named[1]) * MIB < 1.5 * states


def test_what_the_device_keeps_is_not_on_host() -> None:
    """All parameters have room on the device, and gradients and optimizer states have not."""
    model = model_of()
    machine = made_machine(device_memory=24 * MIB, link=1e8)
    plan = plan_for(machine, SolveRequest(12 * MIB, micro_batch_size=1, micro_batches=2), model)
    assert {place.parameters_device for place in plan.decision.placement.values()} == {1.0}
    text = told(plan, "ssd")
    assert "On host stay none of the parameters, " in text
    assert " The device keeps all of the parameters and all of the checkpoints." in text
    assert told(plan, "offloading").endswith("so its parameters stay there, and updates run on host.")


def test_a_device_that_keeps_everything_says_so() -> None:
    """It updates there, nothing moves, and nothing is delayed."""
    machine, request = made_machine(device_update_rate=2e10), SolveRequest(GIB, micro_batch_size=1, micro_batches=2)
    plan = plan_for(machine, request)
    assert {place.optimizer_device for place in plan.decision.placement.values()} == {1.0}
    p = plan.prediction
    assert not (p.h2d_bytes or p.d2h_bytes or p.ssd_read_bytes or p.ssd_write_bytes or p.host_arena_bytes)
    assert told(plan, "ssd").endswith(
        "all of the parameters, all of the optimizer states and all of the checkpoints stay on the device, which "
        "updates them."
    )
    assert told(plan, "offloading").endswith("nothing moves there but the step's tokens.")
    assert told(plan, "delay ratio") == "No update is delayed: the device makes each where its state lies."
    slower = plan_for(machine, replace(request, residency={"optimizer": 1.0}))
    assert not any(place.optimizer_device for place in slower.decision.placement.values())
    assert plan.prediction.step_seconds < slower.prediction.step_seconds


def test_more_device_memory_counts_by_the_parameters_that_stay_there() -> None:
    """Behind a slow link, with room on the device for a part of them; 8 GiB more hold them all."""
    tight = plan_for(made_machine(device_memory=4 * MIB, link=1e7))
    shares = [place.parameters_device for place in tight.decision.placement.values()]
    assert min(shares) < 1.0
    (row,) = [row for row in tight.sensitivity if row.resource == "device memory"]
    wide = plan_for(made_machine(device_memory=4 * MIB + 8 * GIB, link=1e7))
    assert row.throughput_gain > 0.1
    found = tight.prediction.step_seconds + row.seconds_per_unit
    assert found == pytest.approx(wide.prediction.step_seconds, rel=0.05)


def test_with_the_least_device_memory_no_more_is_reached_than_the_plan_says() -> None:
    """The host budget is as it is: what it holds is not read, however lean the device."""
    model = model_of(2e13)
    machine = made_machine(device_memory=24 * MIB, volumes=(made_volume(read=2e8, write=2e8),))
    request = SolveRequest(GIB, micro_batch_size=1, micro_batches=2)
    (row,) = [row for row in plan_for(machine, request, model).least if row.budget == "device memory"]
    there = plan_for(machine, replace(request, device_memory_bytes=row.least_bytes), model)
    assert there.prediction.tokens_per_second <= row.tokens_per_second * (1 + 1e-9)


def test_a_batch_that_was_asked_for_and_one_that_was_found() -> None:
    assert told(plan_for(made_machine()), "batch").startswith("A batch of 2 rows was asked for. Compute alone")
    plan = plan_for(made_machine(volumes=(FAST,)), SolveRequest(16 * MIB), model_of(5e10))
    batch = plan.decision.micro_batch_size * plan.decision.micro_batches
    text = told(plan, "batch")
    assert text.startswith(
        f"A batch of {batch} rows ({plan.decision.micro_batches} x {plan.decision.micro_batch_size})"
    )
    simulated = [row.tokens_per_second for row in plan.alternatives if row.simulated]
    reach = re.search(r"reaches ([\d.]+)% of what", text)
    if plan.prediction.tokens_per_second < max(simulated):
        assert reach and float(reach[1]) >= 99.0
        assert float(reach[1]) == pytest.approx(100 * plan.prediction.tokens_per_second / max(simulated), abs=0.06)
    else:
        assert "is the fastest that was simulated" in text
    smaller = re.search(r"(?:comes nearest, with|reach at most) ([\d.]+)%", text)
    assert smaller and float(smaller[1]) <= 99.05


def test_the_delay_ratio_and_what_it_saves() -> None:
    """A drive that updates keep busy in backward alone: delayed ones fill its forward."""
    drive = made_machine(volumes=(made_volume(read=2e8, write=2e8),))
    request = SolveRequest(13 * MIB, micro_batch_size=4, micro_batches=8, residency={"parameters": 0.0})
    plan = plan_for(drive, request, model_of(1e11))
    assert plan.decision.delay_ratio > 0
    text = told(plan, "delay ratio")
    longer = re.search(r"the program's step would take ([\d.]+)% longer", text)
    assert longer, text
    prompt = plan_for(drive, replace(request, delay_ratio=0.0), model_of(1e11))
    assert told(prompt, "delay ratio") == "The delay ratio of 0 was asked for."
    slower = prompt.prediction.program_seconds / plan.prediction.program_seconds - 1
    assert float(longer[1]) / 100 == pytest.approx(slower, abs=0.02)  # it has its own buffers
    nothing_to_wait_for = plan_for(made_machine(volumes=(FAST,)), model=model_of(1e9))
    assert nothing_to_wait_for.decision.delay_ratio == 0
    assert told(nothing_to_wait_for, "delay ratio").startswith("No delayed update would make")


def test_wear_is_warned_of_and_only_where_it_is_near() -> None:
    def rated(endurance: int) -> Machine:
        volume = made_volume(read=1e9, write=1e9).model_copy(update={"endurance_bytes": endurance})
        return made_machine(volumes=(volume,))

    soon, late = (plan_for(rated(endurance)) for endurance in (10**12, 10**17))
    p = soon.prediction
    days = 10**12 / (p.ssd_write_bytes / p.step_seconds * 86400)
    assert f"reaches its rated 1 TB after {days:.3g} days" in told(soon, "wear")
    assert told(soon, "wear").endswith(" days of training without a pause.") and "drives" not in told(soon, "wear")
    assert "years of training without a pause." in told(late, "wear")
    assert "reaches its rated 2 GB after" in told(plan_for(rated(2 * 10**9)), "wear"), "not 0 TB"
    assert told(plan_for(made_machine()), "wear") == "", "nobody knows"


def test_the_drive_that_wears_out_first_counts() -> None:
    """Three quarters of what is written go to the drive that is three times as fast; a year has 365.25 days."""
    slow = made_volume(read=1e9, write=1e9, path="/slow").model_copy(update={"endurance_bytes": 10**12})
    fast = made_volume(read=3e9, write=3e9, path="/fast").model_copy(update={"endurance_bytes": 10**12})
    found = wear(made_machine(volumes=(slow, fast)), 10**9, 1.0)
    assert found.bytes_a_day == 86_400 * 10**9
    assert found.volume == fast and found.days == pytest.approx(10**12 / (0.75 * found.bytes_a_day))
    unknown = fast.model_copy(update={"endurance_bytes": None})
    found = wear(made_machine(volumes=(slow, unknown)), 10**9, 1.0)
    assert found.volume == slow and found.unrated == 1
    assert found.days == pytest.approx(10**12 / (0.25 * found.bytes_a_day))
    assert wear(made_machine(volumes=(slow,)), 0, 1.0).days is None
    assert lifetime(730.5) == "2 years" and lifetime(36.5) == "36.5 days"


def test_more_of_anything_in_words() -> None:
    plan = plan_for(made_machine(volumes=(made_volume(read=1e8, write=1e8),)))
    words = {row.resource: row.words for row in plan.sensitivity}
    assert words == {
        "host memory": "4 MiB more host memory",
        "device memory": "8 GiB more device memory",
        "drives": "a second SSD like the first",
        "ssd bandwidth": "an SSD 1 GB/s faster",
        "compute": "a GPU twice as fast",
        "link": "a link twice as fast",
        "update rate": "twice the cores for updates",
        "optimizer states in bf16": "both moments in bf16 (--optimizer-states bf16)",
    }
    steps = {3 * MIB: MIB, 12 * MIB: 4 * MIB, 24 * GIB: 8 * GIB, 64 * GIB: 16 * GIB, 512 * GIB: 16 * GIB, 1: 1}
    assert {budget: more_host_memory(budget) for budget in steps} == steps


def test_a_second_drive_does_what_two_would() -> None:
    """The row's own machine, solved from scratch, takes the seconds that the row says."""
    volume = made_volume(read=1e8, write=1e8)
    nowhere_else = replace(BATCH, residency={"parameters": 0.0})
    one, two = (plan_for(made_machine(volumes=(volume,) * count), nowhere_else) for count in (1, 2))
    (row,) = [row for row in one.sensitivity if row.resource == "drives"]
    assert row.throughput_gain > 0.5
    found = one.prediction.step_seconds + row.seconds_per_unit
    assert found == pytest.approx(two.prediction.step_seconds, rel=0.03)


def test_a_second_drive_takes_as_much_of_the_cores_for_each_byte() -> None:
    """On two cores that compute shares: a second drive brings what solving with two says, whether the drive is what is
    slow or the cores are."""
    for flops, cores, least, most in ((1e11, 0.2, 0.9, 1.1), (3e10, 0.8, 0.05, 0.15), (1e10, 0.8, 0.0, 0.02)):
        volume = made_volume(read=4e8, write=4e8).model_copy(update={"read_cores": cores, "write_cores": cores})
        one, two = (
            plan_for(
                made_machine(shared=True, cores=2, volumes=(volume,) * number),
                replace(BATCH, residency={"parameters": 0.0}),
                model=model_of(flops),
            )
            for number in (1, 2)
        )
        (row,) = [row for row in one.sensitivity if row.resource == "drives"]
        found = one.prediction.step_seconds + row.seconds_per_unit
        assert found == pytest.approx(two.prediction.step_seconds, rel=0.03)
        assert least <= row.throughput_gain <= most


def test_a_faster_part_brings_what_solving_with_it_gives() -> None:
    """A step that compute and the drive bound about alike: a GPU twice as fast does not bring what compute alone would
    say, nor does a second drive, for each then waits for the other."""
    slow = made_volume(read=4e8, write=4e8)
    machine, model = made_machine(volumes=(slow,)), model_of(1.5e11)
    plan = plan_for(machine, model=model)
    rows = {row.resource: row.throughput_gain for row in plan.sensitivity}
    faster = {
        "compute": plan_for(machine, model=scaled_compute(model, 0.5)),
        "drives": plan_for(made_machine(volumes=(slow,) * 2), model=model),
    }
    for resource, better in faster.items():
        gain = better.prediction.tokens_per_second / plan.prediction.tokens_per_second - 1
        assert rows[resource] == pytest.approx(gain, abs=0.05), resource


def test_more_device_memory_counts_by_the_micro_batches_that_it_admits() -> None:
    """Four rows at once take three quarters of the seconds of four in turn, and more memory than there is."""
    model = model_of(1e10)
    classes = tuple(
        entry.model_copy(
            update={
                "timings": tuple(
                    timing
                    if timing.micro_batch_size < 4
                    else timing.model_copy(
                        update={
                            "forward_seconds": 0.75 * timing.forward_seconds,
                            "backward_seconds": 0.75 * timing.backward_seconds,
                            "backward_workspace_bytes": 4 * GIB,
                        }
                    )
                    for timing in entry.timings
                )
            }
        )
        for entry in model.classes
    )
    profile = made_profile(
        machine=made_machine(device_memory=GIB, volumes=(FAST,)), model=model.model_copy(update={"classes": classes})
    )
    plan = planned(profile, SolveRequest(GIB, global_batch=4))
    assert plan.decision.micro_batch_size < 4
    (row,) = [row for row in plan.sensitivity if row.resource == "device memory"]
    assert row.throughput_gain == pytest.approx(1 / 0.75 - 1, rel=0.02)
    richer = profile.model_copy(update={"machine": made_machine(device_memory=9 * GIB, volumes=(FAST,))})
    assert planned(richer, SolveRequest(GIB, global_batch=4)).decision.micro_batch_size == 4


@settings(deadline=None, max_examples=examples(6), print_blob=True)
@given(models(), machines(), st.floats(0.05, 1.2), st.integers(1, 6))
def test_the_least_budgets_still_do_and_reasons_are_true_of_any_plan(
    model: Model, machine: Machine, memory: float, n: int
) -> None:
    profile = made_profile(machine=machine, model=model)
    states = sum(state.elements for state in model.states)
    request = SolveRequest(int(memory * 16 * states) + 2 * MIB, micro_batch_size=1, micro_batches=n)
    try:
        plan = planned(profile, request)
    except InfeasibleError:
        return
    least = {row.budget: row for row in plan.least}
    p = plan.prediction
    peaks = predict_peaks(build_schedule(model, plan.decision), model, plan.decision)
    assert peaks.host == p.peak_host_bytes
    assert p.peak_host_bytes + peaks.bookkeeping <= request.host_memory_bytes
    assert least["host memory"].least_bytes <= request.host_memory_bytes
    assert least["device memory"].least_bytes <= p.peak_device_bytes
    assert least["ssd space"].least_bytes <= p.ssd_bytes
    tight: dict[str, Any] = {"micro_batch_size": 1, "micro_batches": n}
    planned(profile, SolveRequest(least["host memory"].least_bytes, **tight))
    device = SolveRequest(request.host_memory_bytes, device_memory_bytes=least["device memory"].least_bytes, **tight)
    planned(profile, device)
    assert {reason.topic for reason in plan.reasons} >= {"bound", "batch", "delay ratio", "ssd", "offloading"}
    for reason in plan.reasons:
        assert reason.text.endswith(".") and "nan" not in reason.text and "inf" not in reason.text.replace("infer", "")
    assert ("is not used" in told(plan, "ssd")) == (p.ssd_bytes == 0)


def test_a_device_of_what_keeping_all_takes_is_enough() -> None:
    """Without buffers to pass parameters through, all of a small model takes no more of a device than a part of it."""
    model = made_model(blocks=3, hidden=64, vocab=64, sequence=64, tied=False)
    profile = made_profile(machine=made_machine(device_memory=GIB), model=model)
    states = sum(state.elements for state in model.states)
    request = SolveRequest(2 * states + 2 * MIB, micro_batch_size=1, micro_batches=1)
    least = {row.budget: row.least_bytes for row in planned(profile, request).least}
    request = replace(request, host_memory_bytes=least["host memory"])
    plan = planned(profile, request)
    assert {placement.parameters_device for placement in plan.decision.placement.values()} == {1.0}
    same = planned(profile, replace(request, device_memory_bytes=plan.prediction.peak_device_bytes))
    assert same.prediction.peak_device_bytes <= plan.prediction.peak_device_bytes


def test_the_least_may_be_with_all_updates_delayed() -> None:
    """One block in fp32: buffers for updates behind backward would take more than what they update."""
    model = made_model(blocks=1, hidden=64, vocab=64, sequence=128, precision="fp32", tied=False)
    profile = made_profile(machine=made_machine(), model=model)
    request = SolveRequest(2 * MIB + 40 * 1024, micro_batch_size=1, micro_batches=4)
    plan = planned(profile, request)
    assert plan.decision.delay_ratio > 0.9
    leasts = {row.budget: row.least_bytes for row in plan.least}
    assert leasts["host memory"] < request.host_memory_bytes
    planned(profile, replace(request, device_memory_bytes=leasts["device memory"]))


def test_the_least_of_a_deep_model_is_the_least_that_a_refusal_names() -> None:
    """40 blocks, where the least is read from a shortened model: no less than the exact one, and above it by
    at most a grain of every state in every form and what the run keeps of ten ops of it."""
    model = made_model(blocks=40, hidden=128, vocab=1024, sequence=64, flops=2e12)
    profile = made_profile(machine=made_machine(), model=model)
    plan = planned(profile, SolveRequest(32 * MIB, micro_batch_size=1, micro_batches=3))
    (row,) = [row for row in plan.least if row.budget == "host memory"]
    with pytest.raises(InfeasibleError) as refused:
        planned(profile, SolveRequest(MIB, micro_batch_size=1, micro_batches=3))
    named = re.search(r"would do is ([\d.]+ MiB)", str(refused.value))
    assert named, str(refused.value)
    exact = parse_bytes(named[1])
    assert exact - MIB // 100 <= row.least_bytes <= exact + len(model.states) * (2048 * 18 + 10 * OP_BYTES)
    found = planned(profile, SolveRequest(row.least_bytes, micro_batch_size=1, micro_batches=3))
    assert found.prediction.tokens_per_second <= row.tokens_per_second * (1 + 1e-9)


def test_explanations_are_of_the_plan_in_hand() -> None:
    """An edited plan is explained anew: its figures, and not those that it was solved with."""
    plan = plan_for(made_machine(volumes=(made_volume(read=1e8, write=1e8),)))
    rows = (
        Sensitivity(resource="a", unit="b", seconds_per_unit=-1.0, throughput_gain=0.38, words="a second SSD"),
        Sensitivity(
            resource="a", unit="b", seconds_per_unit=-0.1, throughput_gain=0.09, words="16 GiB more host memory"
        ),
        Sensitivity(resource="a", unit="b", seconds_per_unit=0.0, throughput_gain=0.0001, words="a faster GPU"),
    )
    evidence = Evidence(frozenset({"batch"}), {"ssd": 1.0, "compute": 0.5}, MIB, None, None)
    edited = plan.model_copy(
        update={"sensitivity": rows, "least": (Least(budget="ssd space", least_bytes=1, tokens_per_second=1.0),)}
    )
    edited = edited.model_copy(update={"reasons": explain(edited, evidence)})
    assert told(edited, "to be faster") == (
        "At this batch, a second SSD: +38% tokens/s; 16 GiB more host memory: +9%; nothing from a faster GPU."
    )


def test_the_figures_of_the_ssd_add_up_when_updates_are_delayed() -> None:
    """What lives on ssd is all that is named less what stays on host, to the digits that are printed."""
    model = model_of()
    plan = plan_for(made_machine(), model=model, request=replace(BATCH, micro_batches=16, delay_ratio=0.5))
    text = told(plan, "ssd")
    parts = re.findall(r"([\d.]+) ([KMG])iB of (parameters and optimizer states|checkpoints|delayed gradients)", text)
    scale = {"K": 2**10, "M": MIB, "G": GIB}
    nbytes = {name: float(figure) * scale[unit] for figure, unit, name in parts}
    elements = sum(state.elements for state in model.states)
    assert nbytes["delayed gradients"] == pytest.approx(0.5 * 4 * elements, rel=0.01)
    stay = re.search(
        r"On host stay (.*) of the parameters, (.*) of the optimizer states, (.*) of the checkpoints and (.*?) of the "
        r"delayed gradients",
        text,
    )
    assert stay
    shares = [1.0 if word == "all" else 0.0 if word == "none" else float(word[:-1]) / 100 for word in stay.groups()]
    wholes = [2 * elements, 12 * elements, nbytes["checkpoints"], nbytes["delayed gradients"]]
    device = re.search(r"The device keeps (.*) of the parameters", text)
    if device:
        shares[0] += 1.0 if device[1] == "all" else float(device[1][:-1]) / 100
    on_ssd = sum((1 - share) * whole for share, whole in zip(shares, wholes, strict=True))
    assert on_ssd == pytest.approx(plan.prediction.ssd_bytes, rel=0.03)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_shares_are_of_the_whole_wherever_it_lies(path: Path) -> None:
    """As in the table beside the reasons. The device's share and host's are no more than all, together."""
    plan = Plan.load(path)
    decision, schedule = plan.decision, build_schedule(plan.model, plan.decision)
    host, _, device = told(plan, "ssd").split("On host stay ")[1].partition(" The device keeps ")
    saved = kept_bytes(schedule)
    for what, on_host, on_device in (
        ("checkpoints", (1 - decision.checkpoint_device) * decision.checkpoint_host, decision.checkpoint_device),
        ("saved activations", saved["host"] / saved.total(), saved["device"] / saved.total()),
    ):
        assert _share(host, what) == pytest.approx(on_host, abs=6e-4)
        assert _share(device, what) == pytest.approx(on_device, abs=6e-4)
    table = describe_plan(plan, schedule).split("Where states live")[1]
    row = next(line for line in table.splitlines() if " checkpoints " in line)
    cell = row.split(" checkpoints ")[1].split()[0]
    shown = 0.0 if cell == "-" else float(cell.strip("<>%")) / 100
    assert _share(host, "checkpoints") == pytest.approx(shown, abs=0.006)


def test_what_host_and_device_keep_are_shares_of_the_same() -> None:
    plan = plan_for(made_machine())
    saved = SavedEvidence({"device": 30, "host": 35, "ssd": 35})
    evidence = Evidence(frozenset(), {"ssd": 1.0, "compute": 0.5}, MIB, None, None, saved)
    apart = {"checkpoint_host": 0.611, "checkpoint_device": 0.312}
    decision = plan.decision.model_copy(update=apart)
    reasons = explain(plan.model_copy(update={"decision": decision}), evidence)
    text = next(reason.text for reason in reasons if reason.topic == "ssd")
    host, _, device = text.partition(" The device keeps ")
    assert "42.0% of the checkpoints, 35.0% of the saved activations" in host and "100 B of saved" in host
    assert "31.2% of the checkpoints and 30.0% of the saved activations." in device


def _share(text: str, what: str) -> float:
    """What a text says of it; 0 where it says nothing."""
    found = re.search(rf"([\d.]+%|all|none) of the {what}", text)
    return 0.0 if not found or found[1] == "none" else 1.0 if found[1] == "all" else float(found[1][:-1]) / 100


def test_a_what_if_names_a_drive_without_its_number() -> None:
    names = ("fast:2TB (0)", "fast:2TB (1)")
    volumes = tuple(
        made_volume(read=1e9, write=1e9).model_copy(update={"path": name, "endurance_bytes": 10**12}) for name in names
    )
    machine = made_machine(volumes=volumes)
    assert [drive_words(machine, volume) for volume in volumes] == list(names), "directories may have such names"
    guessed = machine.model_copy(update={"figures": "estimated"})
    assert drive_words(guessed, volumes[1]) == "fast:2TB (the second of 2)"
    text = told(plan_for(guessed), "wear")
    assert "TB a day, to both drives together: fast:2TB (the first of 2) reaches" in text


def test_without_a_device_none_is_spoken_of() -> None:
    """Compute on host memory: neither reasons nor comparison nor causes to idle name a device."""
    request = replace(BATCH, unified_memory=True)
    plan = plan_for(made_machine(shared=True, volumes=(FAST,)), model=model_of(), request=request)
    words = [reason.text for reason in plan.reasons if reason.topic != "offloading"]
    words += [row.note for row in plan.comparison] + [row.words for row in plan.sensitivity]
    words += [cause for causes in plan.prediction.idle.values() for cause in causes]
    assert [text for text in words if "device" in text] == []
