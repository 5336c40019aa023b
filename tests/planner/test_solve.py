"""solve: what a user relies on. Budgets kept exactly, choices honoured, refusals that name a way out."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner import pacing
from ssdplan.planner import solve as solving
from ssdplan.planner.predict.critical_path import SHARED_CORES
from ssdplan.planner.predict.peaks import predict_peaks
from ssdplan.planner.predict.shortened import shortened
from ssdplan.planner.predict.simulator import simulate
from ssdplan.planner.request import SolveRequest
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Machine, Model, Profile
from ssdplan.plans.errors import InfeasibleError, UsageError
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import parse_bytes
from tests.extent import FULL, examples, short_or_full
from tests.made.profiles import GIB, MIB, made_machine, made_model, made_profile, made_volume, planned
from tests.planner.machines import machines, models

QUICK = settings(deadline=None, max_examples=examples(12), print_blob=True)


def small() -> Profile:
    """About 26 MB of states; a drive and a compute of about the same weight."""
    return made_profile(
        machine=made_machine(update_rate=2e8, volumes=(made_volume(read=1e9, write=8e8),)),
        model=made_model(blocks=12, hidden=128, vocab=1024, sequence=64, flops=2e12, tied=True),
    )


def least_named(error: InfeasibleError) -> tuple[str, int]:
    """The constraint and the least budget in bytes, as a user reads them."""
    found = re.search(r"fits: (.*) of .* least that would do is ([0-9.]+) (KiB|MiB|GiB)(?:$|\. )", str(error))
    assert found, str(error)
    return found[1], parse_bytes(f"{found[2]} {found[3]}")


def printed_before(nbytes: int) -> int:
    """The budget that is one less in the last of three digits, of KiB or MiB: the next that could be named."""
    unit = MIB if nbytes >= MIB else 1 << 10
    return nbytes - unit // (100 if nbytes < 10 * unit else 10 if nbytes < 100 * unit else 1)


def check(profile: Profile, request: SolveRequest, plan: Plan) -> None:
    """All that every plan promises, recomputed from the plan alone."""
    assert Plan.model_validate(json.loads(plan.text())) == plan
    assert plan.profile_sha256 == profile.sha256()
    decision, prediction = plan.decision, plan.prediction
    schedule = build_schedule(plan.model, decision)
    peaks = predict_peaks(schedule, plan.model, decision)
    assert prediction.host_arena_bytes == schedule.arenas["host"] == peaks.host_arena <= peaks.host
    assert prediction.peak_host_bytes == peaks.host <= request.host_memory_bytes
    if not decision.unified_memory:
        assert peaks.host == peaks.host_arena
    assert prediction.peak_device_bytes == peaks.device <= decision.device_budget_bytes
    assert prediction.ssd_bytes == schedule.arenas["ssd"]
    traffic = schedule.traffic("steady")
    assert (prediction.ssd_read_bytes, prediction.ssd_write_bytes) == (traffic["read"], traffic["write"])
    assert (prediction.h2d_bytes, prediction.d2h_bytes) == (traffic["h2d"], traffic["d2h"])
    timeline = simulate(schedule.steady, plan.model, plan.machine, decision.micro_batch_size)
    assert prediction.step_seconds == timeline.seconds
    tokens = decision.micro_batch_size * decision.micro_batches * decision.sequence_length
    assert prediction.tokens_per_second == pytest.approx(tokens / timeline.seconds)
    for op in schedule.steady.ops:
        assert all(timeline.ends[before] <= timeline.starts[op.index] for before in op.waits)
    if request.max_ssd_write_bytes is not None:
        assert prediction.ssd_write_bytes <= request.max_ssd_write_bytes
    chosen = (decision.micro_batch_size, decision.micro_batches)
    own = [row for row in plan.alternatives if (row.micro_batch_size, row.micro_batches) == chosen]
    assert len(own) == 1 and own[0].simulated and own[0].tokens_per_second == prediction.tokens_per_second
    for row in plan.alternatives:
        bound = tokens_per_step(plan.model, row.micro_batch_size, row.micro_batches) / row.program_seconds
        slack = 1 + 1e-5
        assert bound <= row.compute_tokens_per_second * slack and bound <= row.io_tokens_per_second * slack
    assert all(row.throughput_gain >= -1e-5 and row.seconds_per_unit <= 1e-5 for row in plan.sensitivity)


def tokens_per_step(model: Model, b: int, n: int) -> int:
    return b * n * model.sequence_length


@QUICK
@given(models(), machines(), st.floats(0.02, 1.3), st.sampled_from((1, 4, 12)))
def test_every_plan_keeps_its_promises(model: Model, machine: Machine, memory: float, batch: int | None) -> None:
    profile = made_profile(machine=machine, model=model)
    states = sum(state.elements for state in model.states)
    request = SolveRequest(host_memory_bytes=int(memory * 20 * states) + MIB, global_batch=batch)
    try:
        plan = planned(profile, request)
    except InfeasibleError as error:
        constraint, least = least_named(error)
        assert constraint == "host memory" and least > request.host_memory_bytes
        enough = SolveRequest(host_memory_bytes=least, global_batch=batch)
        check(profile, enough, planned(profile, enough))
        return
    check(profile, request, plan)


@settings(deadline=None, max_examples=examples(25), print_blob=True)
@given(models(), machines(), st.integers(1, 6), st.floats(0, 1))
def test_no_resource_does_more_than_its_work_in_the_time(model: Model, machine: Machine, n: int, memory: float) -> None:
    """A step is at least as long as the work of each lane, and about as long as the program's bound."""
    states = sum(state.elements for state in model.states)
    request = SolveRequest(host_memory_bytes=int(memory * 16 * states) + 64 * MIB, micro_batch_size=2, micro_batches=n)
    plan = planned(made_profile(machine=machine, model=model), request)
    decision, p = plan.decision, plan.prediction
    compute = sum(
        model.timing(layer.layer_class, 2).backward_seconds
        + (model.timing(layer.layer_class, 2).forward_seconds if number < len(model.layers) - 1 else 0)
        for number, layer in enumerate(model.layers)
    )
    there = sum(decision.placement[state.state_class].optimizer_device * state.elements for state in model.states)
    updates = (states - there) / machine.update_rate
    links = p.h2d_bytes / machine.h2d_bandwidth, p.d2h_bytes / machine.d2h_bandwidth
    work = [*links, compute * decision.micro_batches, updates]
    if machine.compute_shares_cpu:
        work.append(compute * decision.micro_batches + updates + sum(links) / machine.cores)
    assert p.step_seconds >= max(work) * (1 - 1e-9)


def test_the_simulated_step_is_the_bound_with_fill_and_drain() -> None:
    """Fill and drain come on top of the program's seconds, whatever bounds the step. A percent is for what the program
    does not see: a stage that waits for the drive may hide behind neighbours that compute."""
    for number, flops in enumerate((1e11, 1e12, 1e13)):
        for memory in (8, 24):
            for shared in short_or_full(((number + memory // 24) % 2 == 0,), (False, True)):
                profile = made_profile(
                    machine=made_machine(shared=shared, update_rate=2e8, volumes=(made_volume(read=1e9, write=8e8),)),
                    model=made_model(blocks=12, hidden=128, vocab=1024, sequence=64, flops=flops, tied=True),
                )
                prediction = planned(
                    profile, SolveRequest(memory * MIB, micro_batch_size=2, micro_batches=4)
                ).prediction
                low, high = 0.99 * prediction.program_seconds, 1.7 * prediction.program_seconds
                assert low <= prediction.step_seconds <= high


def test_a_step_that_waits_for_chunks_gets_more_of_them_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive about as slow as updates: what a stage waits for cannot be hidden later."""
    monkeypatch.setattr(pacing, "GPU_OPERATION_SECONDS", 0.0)
    machine = made_machine(update_rate=4e8, volumes=(made_volume(read=3e9, write=3e9),))
    profile = made_profile(model=made_model(blocks=12, hidden=1024, flops=8e10), machine=machine)
    request = SolveRequest(host_memory_bytes=700 * MIB, micro_batches=1, micro_batch_size=1)
    plan = planned(profile, request)
    check(profile, request, plan)
    monkeypatch.setattr(pacing, "FEW_OPS", 0)
    usual = planned(profile, request)
    assert plan.decision.update_lookahead > usual.decision.update_lookahead
    assert plan.prediction.step_seconds < 0.96 * usual.prediction.step_seconds


def test_of_paces_about_as_fast_the_one_with_fewer_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations count where compute wants the cores that run them, and where they were measured to begin on a GPU."""

    def operations(*, shared: bool, core_seconds: float, gpu_seconds: float = 0.0) -> int:
        monkeypatch.setattr(pacing, "OPERATION_CORE_SECONDS", core_seconds)
        monkeypatch.setattr(pacing, "GPU_OPERATION_SECONDS", gpu_seconds)
        machine = made_machine(shared=shared, update_rate=4e8, volumes=(made_volume(read=3e9, write=3e9),))
        profile = made_profile(model=made_model(blocks=12, hidden=1024, flops=8e10), machine=machine)
        plan = planned(profile, SolveRequest(700 * MIB, micro_batches=1, micro_batch_size=1))
        return len(build_schedule(plan.model, plan.decision).steady.ops)

    free, dear = (operations(shared=True, core_seconds=each) for each in (0.0, 1.0))
    assert dear < 0.7 * free
    assert operations(shared=False, core_seconds=0.0) == operations(shared=False, core_seconds=1.0) > dear
    assert operations(shared=True, core_seconds=0.0, gpu_seconds=1.0) == free
    assert operations(shared=False, core_seconds=0.0, gpu_seconds=1.0) < 0.7 * free


def test_what_fits_in_memory_does_not_use_the_drive() -> None:
    plan = planned(small(), SolveRequest(GIB, global_batch=8))
    assert plan.prediction.ssd_bytes == plan.prediction.ssd_read_bytes == plan.prediction.ssd_write_bytes == 0


def test_more_memory_is_not_slower() -> None:
    """Each plan is at least about as fast as those of smaller budgets; the simulator's last percent may differ."""
    plans = [
        planned(small(), SolveRequest(m * MIB, global_batch=16, micro_batches=8))
        for m in range(8, 44, short_or_full(12, 6))
    ]
    rates = [plan.prediction.tokens_per_second for plan in plans]
    for number, rate in enumerate(rates):
        assert rate >= 0.97 * max(rates[: number + 1])
    assert rates[-1] > 1.2 * rates[0]


def test_the_smallest_good_enough_batch_is_chosen() -> None:
    plan = planned(made_profile(blocks=3, hidden=128, sequence=64), SolveRequest(6 * MIB))
    simulated = [row for row in plan.alternatives if row.simulated]
    best = max(row.tokens_per_second for row in simulated)
    chosen = plan.decision.micro_batch_size * plan.decision.micro_batches
    assert plan.prediction.tokens_per_second >= 0.99 * best
    for row in simulated:
        if row.micro_batch_size * row.micro_batches < chosen:
            assert row.tokens_per_second < 0.99 * best
    assert len(plan.alternatives) > 40


def test_a_search_finds_what_a_fixed_number_of_micro_batches_would() -> None:
    """With hardly any host memory the fastest by the program do not fit, nor do many others."""
    profile = made_profile(
        machine=made_machine(update_rate=2e8, device_memory=512 * MIB, volumes=(made_volume(read=1e9, write=8e8),)),
        model=made_model(blocks=6, hidden=128, vocab=512, sequence=128, flops=2e13, tied=True, micro_batch_sizes=(1,)),
    )
    request = SolveRequest(4 * MIB)
    fixed = planned(profile, replace(request, micro_batches=4))
    assert planned(profile, request).prediction.tokens_per_second >= 0.98 * fixed.prediction.tokens_per_second


def test_fixed_choices_are_in_the_plan() -> None:
    request = SolveRequest(
        64 * MIB,
        micro_batch_size=2,
        micro_batches=3,
        delay_ratio=0.3,
        residency={"parameters": 0.75, "optimizer": 0.2, "checkpoints": 0.5},
    )
    plan = planned(small(), request)
    decision = plan.decision
    assert (decision.micro_batch_size, decision.micro_batches) == (2, 3)
    assert (decision.delay_ratio, decision.checkpoint_host) == (0.3, 0.5)
    for placement in decision.placement.values():
        assert placement.parameters_prompt_host + placement.parameters_delayed_host == pytest.approx(0.75, abs=1e-12)
        assert placement.optimizer_prompt_host + placement.optimizer_delayed_host == pytest.approx(0.2, abs=1e-12)
    check(small(), request, plan)


def test_a_global_batch_is_factored_over_the_measured_sizes() -> None:
    plan = planned(small(), SolveRequest(32 * MIB, global_batch=12))
    pairs = {(row.micro_batch_size, row.micro_batches) for row in plan.alternatives}
    assert pairs == {(1, 12), (2, 6), (4, 3)}
    plan = planned(small(), SolveRequest(32 * MIB, global_batch=12, micro_batches=6))
    assert (plan.decision.micro_batch_size, plan.decision.micro_batches) == (2, 6)
    plan = planned(small(), SolveRequest(32 * MIB, global_batch=4, schedule="single"))
    assert (plan.decision.micro_batch_size, plan.decision.micro_batches) == (4, 1)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (SolveRequest(GIB, micro_batch_size=3), "3 was not profiled; the profile has 1, 2, 4"),
        (
            SolveRequest(GIB, micro_batch_size=4, global_batch=7),
            "of micro-batch size 4, which was asked for; the size 1 can be used: it can be made of 7 micro",
        ),
        (
            SolveRequest(GIB, micro_batch_size=4, global_batch=6),
            "of micro-batch size 4, which was asked for; the sizes 1, 2 can be used: it can be made of 3, 6 micro",
        ),
        (
            SolveRequest(GIB, global_batch=6, micro_batches=4),
            "6 in 4 micro-batches is not a multiple of any of the micro-batch sizes 1, 2, 4: it can be made of 3, 6",
        ),
        (SolveRequest(GIB, device_memory_bytes=128 * GIB), "device memory of 128 GiB: made GPU has 24 GiB for a"),
        (SolveRequest(GIB, global_batch=12, micro_batches=5), "3, 6, 12 micro-batches"),
        (SolveRequest(GIB, global_batch=8, schedule="single"), "1, 2, 4"),
        (SolveRequest(GIB, micro_batches=2, schedule="single"), "only be 1"),
        (SolveRequest(GIB, residency={"gradients": 0.5}), "parameters, optimizer, checkpoints"),
        (SolveRequest(GIB, residency={"optimizer": 1.5}), "from 0 to 1"),
        (SolveRequest(GIB, delay_ratio=-0.1), "from 0 to 1"),
        (SolveRequest(GIB, residency={"turn": 0.5}, schedule="horizontal"), "turn=0.5: with schedule horizontal"),
        (SolveRequest(0), "host memory = 0"),
        (SolveRequest(GIB, micro_batches=10**6), "1000000 micro-batches: "),
        (SolveRequest(GIB, global_batch=10**8), "25000000 micro-batches: "),
        (SolveRequest(GIB, global_batch=10**15 + 1), " is the most for one step of "),
    ],
)
def test_wrong_requests_say_what_is_possible(request_: SolveRequest, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        planned(small(), request_)
    assert caught.value.exit_code == 2


def refused(profile: Profile, request: SolveRequest) -> tuple[str, int]:
    with pytest.raises(InfeasibleError) as caught:
        planned(profile, request)
    assert caught.value.exit_code == 3
    return least_named(caught.value)


@pytest.mark.parametrize(
    ("tied", "blocks", "fixed"),
    [
        (True, 1, {}),
        *([(False, 8, {})] if FULL else []),
        (False, 1, {"residency": {"optimizer": 0.5}}),
        (True, 8, {"residency": {"optimizer": 0.5}}),
        (True, 1, {"delay_ratio": 0.4}),
        (False, 8, {"delay_ratio": 0.4}),
    ],
)
def test_too_little_host_memory(tied: bool, blocks: int, fixed: dict) -> None:
    """Any two of the three choices meet in a case. The first is searched for among all numbers of
    micro-batches; in full, each is among all batches."""
    if not FULL:
        fixed = {**fixed, "micro_batch_size": 1} | ({"micro_batches": 2} if fixed else {})
    profile = made_profile(model=made_model(blocks=blocks, hidden=128, vocab=1024, sequence=64, tied=tied))
    constraint, least = refused(profile, SolveRequest(1 << 16, **fixed))
    assert constraint == "host memory"
    enough = SolveRequest(least, **fixed)
    check(profile, enough, planned(profile, enough))
    assert refused(profile, SolveRequest(printed_before(least), **fixed)) == (
        constraint,
        least,
    )


FOUR: dict[str, Any] = short_or_full({"micro_batch_size": 1, "micro_batches": 4}, {"global_batch": 4})


def test_too_little_device_memory() -> None:
    constraint, least = refused(small(), SolveRequest(GIB, device_memory_bytes=MIB, **FOUR))
    assert constraint == "device memory"
    request = SolveRequest(GIB, device_memory_bytes=least, **FOUR)
    check(small(), request, planned(small(), request))
    assert refused(small(), SolveRequest(GIB, device_memory_bytes=printed_before(least), **FOUR)) == (
        constraint,
        least,
    )


@pytest.mark.parametrize("blocks", [3, 40])
def test_the_least_device_memory_is_as_fast_as_a_little_more(blocks: int) -> None:
    """Whatever the search estimates: what is exactly enough is enough for all that host memory can hold."""
    model = made_model(blocks=blocks, hidden=128, vocab=1024, sequence=64, flops=2e12, tied=True)
    profile = made_profile(machine=small().machine, model=model)
    request = SolveRequest(GIB, device_memory_bytes=MIB, micro_batch_size=1, micro_batches=8)
    _, least = refused(profile, request)
    exact, more = (
        solving.solve(profile, replace(request, device_memory_bytes=nbytes)) for nbytes in (least, round(1.05 * least))
    )
    assert exact.comparison and exact.prediction.peak_device_bytes <= least
    assert exact.prediction.tokens_per_second >= 0.9 * more.prediction.tokens_per_second


@pytest.mark.parametrize("memory", short_or_full([8], [8, 16]))
def test_too_few_writes_allowed(memory: int) -> None:
    constraint, least = refused(small(), SolveRequest(memory * MIB, **FOUR, max_ssd_write_bytes=100_000))
    assert constraint == "ssd writes"
    request = SolveRequest(memory * MIB, **FOUR, max_ssd_write_bytes=least)
    check(small(), request, planned(small(), request))
    less = SolveRequest(memory * MIB, **FOUR, max_ssd_write_bytes=printed_before(least))
    assert refused(small(), less) == (constraint, least)


def test_a_bound_on_writes_is_kept_and_costs_time() -> None:
    free = planned(small(), SolveRequest(16 * MIB, **FOUR))
    _, least = refused(small(), SolveRequest(16 * MIB, **FOUR, max_ssd_write_bytes=100_000))
    limit = (least + free.prediction.ssd_write_bytes) // 2
    request = SolveRequest(16 * MIB, **FOUR, max_ssd_write_bytes=limit)
    check(small(), request, planned(small(), request))


def test_too_little_space_on_the_drives() -> None:
    def on(free_bytes: int) -> Profile:
        return made_profile(machine=made_machine(volumes=(made_volume(free_bytes=free_bytes),)), model=small().model)

    constraint, least = refused(on(MIB), SolveRequest(8 * MIB, **FOUR))
    assert constraint == "ssd space"
    request = SolveRequest(8 * MIB, **FOUR)
    plan = planned(on(least), request)
    check(on(least), request, plan)
    assert plan.prediction.ssd_bytes <= least
    assert refused(on(printed_before(least)), request) == (constraint, least)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (made_machine(), "compute"),
        (made_machine(volumes=(made_volume(read=1e7, write=1e7),)), "ssd"),
        (made_machine(link=1e7, d2h=1e9), "link to device"),
        (made_machine(link=1e9, d2h=1e7), "link from device"),
        (made_machine(update_rate=1e6), "cpu updates"),
        (
            made_machine(shared=True, volumes=(made_volume(read=2e10, write=2e10),)),
            SHARED_CORES,
        ),
    ],
)
def test_names_what_bounds_the_run(machine: Machine, words: str) -> None:
    flops = 5e10 if "compute" in words else 2e12
    model = made_model(blocks=12, hidden=128, vocab=1024, sequence=64, flops=flops, tied=True)
    profile = made_profile(machine=machine, model=model)
    plan = planned(profile, SolveRequest(12 * MIB, micro_batch_size=1, micro_batches=2))
    assert plan.prediction.bound_by == words
    gains = {row.resource: row.throughput_gain for row in plan.sensitivity if row.resource != "host memory"}
    helps = {SHARED_CORES: "compute", "cpu updates": "update rate", "ssd": "ssd bandwidth"}
    helps |= {"link to device": "link", "link from device": "link"}
    assert max(gains, key=lambda name: gains[name]) == helps.get(words, words)


def test_a_shortened_model_has_the_pipeline_of_the_whole() -> None:
    model = made_model(blocks=40)
    assert len(shortened(model).layers) == 10
    assert shortened(made_model(blocks=12)) == made_model(blocks=12)
    Model.model_validate(shortened(model).model_dump())


@pytest.mark.skipif(not FULL, reason="test_speed.py bounds the search of a model of 80 layers, with its comparison")
def test_eighty_layers_take_seconds() -> None:
    """A 16B model on a workstation. CPU seconds, for other work may share the machine."""
    profile = made_profile(
        model=made_model(blocks=80, hidden=4096, vocab=32000, sequence=2048, flops=6e14, micro_batch_sizes=(1, 2, 4, 8))
    )
    begin = time.process_time()
    plan = planned(profile, SolveRequest(64 * GIB, global_batch=64))
    spent = time.process_time() - begin
    assert plan.prediction.peak_host_bytes <= 64 * GIB
    print(f"{spent:.1f} CPU seconds, {len(build_schedule(plan.model, plan.decision).steady.ops)} ops")
    assert spent < 30


def test_planning_never_imports_torch() -> None:
    code = (
        "import sys; import ssdplan.planner.solve, ssdplan.planner.predict.simulator; "
        "bad = {'torch', 'transformers', 'ssdplan.executor', 'ssdplan.profiler', 'ssdplan.native'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
