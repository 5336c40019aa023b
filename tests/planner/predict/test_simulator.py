"""The simulator, against closed forms and against a slow twin in exact arithmetic."""

import random
import time
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.predict.dram import shares_of
from ssdplan.planner.predict.simulator import simulate
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve_and_build
from ssdplan.plans.documents.profile import Machine, Network
from ssdplan.plans.documents.rates import updated_bytes
from ssdplan.plans.documents.state_layout import USUAL
from ssdplan.plans.graph.collectives import Exchange
from ssdplan.plans.graph.ops import Backward, Forward, Graph, Op, Region, Transfer, Update
from tests.extent import examples
from tests.made.profiles import GIB, made_machine, made_model, made_profile, made_volume
from tests.plans.hand_made import made_backward, made_forward, made_transfer, made_update

MODEL = made_model(flops=1e9)
FORWARD = MODEL.timing("block", 1).forward_seconds
BACKWARD = MODEL.timing("block", 1).backward_seconds
COLD = 0.25
"""Of a layer's seconds: how much longer it takes with nothing in caches."""


def transfer(index: int, kind: str, nbytes: int, waits: tuple[int, ...] = ()) -> Transfer:
    return made_transfer(index, kind, Region(0, 0, nbytes), Region(1, 0, nbytes), waits=waits)


def forward(index: int, waits: tuple[int, ...] = ()) -> Forward:
    return made_forward(index, waits=waits)


def backward(index: int, waits: tuple[int, ...] = ()) -> Backward:
    return made_backward(index, waits=waits)


def update(index: int, elements: int, waits: tuple[int, ...] = ()) -> Update:
    nowhere = Region(0, 0, 1)
    return made_update(index, elements, nowhere, nowhere, nowhere, waits=waits)


def exchange(index: int, nbytes: int, waits: tuple[int, ...] = ()) -> Exchange:
    """Of two ranks: each sends and receives so many bytes."""
    everything = Region(0, 0, 2 * nbytes)
    return Exchange(
        index=index, waits=waits, stage=0, state=0, state_name="made", ranks=2, gradient=everything, received=everything
    )


def seconds(machine: Machine, *ops: Op) -> float:
    return simulate(Graph("made", ops, 1), MODEL, machine, 1).seconds


def test_nothing_takes_no_time() -> None:
    assert seconds(made_machine()) == 0.0


def test_a_pipeline_fills_flows_and_drains() -> None:
    """Five items through read (2 s), h2d (3 s) and d2h (1 s): the first takes all three, the others the slowest."""
    machine = made_machine(link=1e6, d2h=3e6, volumes=(made_volume(read=1.5e6, write=1e6),))
    ops: list[Op] = []
    for item in range(5):
        first = 3 * item
        ops.append(transfer(first, "read", 3_000_000))
        ops.append(transfer(first + 1, "h2d", 3_000_000, (first,)))
        ops.append(transfer(first + 2, "d2h", 3_000_000, (first + 1,)))
    assert seconds(machine, *ops) == pytest.approx(2 + 5 * 3 + 1)


def test_a_lane_takes_the_lowest_ready_op() -> None:
    machine = made_machine(update_rate=1.0)
    timeline = simulate(
        Graph("made", (update(0, 1), update(1, 1, (0,)), update(2, 5), update(3, 1, (0,))), 1), MODEL, machine, 1
    )
    assert timeline.starts == (0.0, 1.0, 2.0, 7.0)


@pytest.mark.parametrize(("mixed", "kept"), [((), 1 / 2), (((1.5e6, 1.5e6),), 3 / 4)])
def test_a_read_and_a_write_share_the_drive(mixed: tuple[tuple[float, float], ...], kept: float) -> None:
    """A read of 1 s and a write of 2 s alone: together at the frontier, then the write alone."""
    machine = made_machine(volumes=(made_volume(read=2e6, write=2e6, mixed=mixed),))
    timeline = simulate(
        Graph("made", (transfer(0, "read", 2_000_000), transfer(1, "write", 4_000_000)), 1), MODEL, machine, 1
    )
    assert timeline.ends == pytest.approx((1 / kept, 1 / kept + 1))


def test_compute_updates_and_copies_share_the_cores() -> None:
    """Compute and updates want two cores, a copy wants one: it gets two thirds of it, and of what the others get, which
    is all when it has gone, three quarters are the update's where nobody measured what is."""
    machine = made_machine(shared=True, cores=2, update_rate=1e6, link=1e6)
    graph = Graph("made", (backward(0), update(1, 500_000), transfer(2, "h2d", 1_000)), 1)
    timeline = simulate(graph, MODEL, machine, 1)
    beside = 0.001 * 3 / 2
    assert timeline.starts == (0.0, 0.0, 0.0) and BACKWARD < 0.1
    assert timeline.ends[2] == pytest.approx(beside)
    assert timeline.ends[0] == pytest.approx(beside + 4 * (BACKWARD - beside / 4 * 2 / 3))
    assert timeline.ends[1] == pytest.approx(BACKWARD + 0.5 + 0.001 / 2)
    measured = machine.model_copy(update={"compute_beside_updates": 0.4, "updates_beside_compute": 0.5})
    timeline = simulate(Graph("made", graph.ops[:2], 1), MODEL, measured, 1)
    assert timeline.ends == pytest.approx((BACKWARD / 0.4, 0.5 + BACKWARD / 0.4 * 0.5))
    apart = simulate(graph, MODEL, made_machine(cores=2, update_rate=1e6, link=1e6), 1)
    assert apart.ends == pytest.approx((BACKWARD, 0.5, 0.001))


def test_the_first_micro_batch_of_a_stage_is_cold() -> None:
    model = made_model(flops=1e9, cold=0.25)
    stages = [replace(forward(index), stage=stage) for index, stage in enumerate((0, 0, 0, 1, 1))]
    timeline = simulate(Graph("made", (*stages, backward(5)), 2), model, made_machine(), 1)
    durations = [end - start for start, end in zip(timeline.starts, timeline.ends, strict=True)]
    longer = 1.25 * FORWARD
    assert durations == pytest.approx([longer, FORWARD, FORWARD, longer, FORWARD, 1.25 * BACKWARD])


@pytest.mark.parametrize("shared", [True, False])
def test_an_update_between_two_micro_batches_leaves_nothing_in_caches_of_the_same_cores(shared: bool) -> None:
    model = made_model(flops=1e9, cold=0.25)
    machine = made_machine(shared=shared, update_rate=1e9)
    graph = Graph("made", (backward(0), update(1, 1_000_000, (0,)), backward(2, (1,)), backward(3, (2,))), 1)
    timeline = simulate(graph, model, machine, 1)
    durations = [end - start for start, end in zip(timeline.starts, timeline.ends, strict=True)]
    again = 1.25 if shared else 1.0
    assert durations == pytest.approx([1.25 * BACKWARD, 0.001, again * BACKWARD, BACKWARD])
    # Beside it: what begins meanwhile, not what follows that.
    graph = Graph("made", (backward(0), update(1, 1_000_000, (0,)), backward(2, (0,)), backward(3, (2,))), 1)
    timeline = simulate(graph, model, machine, 1)
    durations = [end - start for start, end in zip(timeline.starts, timeline.ends, strict=True)]
    took, lost = (0.004 / 3, 0.001) if shared else (0.001, 0.0)
    assert durations == pytest.approx([1.25 * BACKWARD, took, again * BACKWARD + lost, BACKWARD])


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_program_and_simulation_count_the_same_compute(schedule: Literal["vertical", "horizontal"]) -> None:
    """All in memory on a slow device, where compute is all that takes time: nothing but fill and drain is between the
    program's seconds and the simulated ones, and both have every cold stage."""
    n = 3
    profile = made_profile(model=made_model(blocks=6, flops=1e7, cold=0.5))
    request = SolveRequest(1 << 30, micro_batch_size=2, micro_batches=n, schedule=schedule, delay_ratio=0.0)
    plan, built = solve_and_build(profile, request, compared=False)
    busy = simulate(built.steady, profile.model, profile.machine, 2).busy()["compute"]
    timings = [profile.model.timing(layer.layer_class, 2) for layer in profile.model.layers]
    stages = 1 if schedule == "vertical" else n
    by_hand = sum(n * t.forward_seconds + stages * t.forward_cold_seconds for t in timings[:-1])
    by_hand += sum(n * t.backward_seconds + stages * t.backward_cold_seconds for t in timings)
    assert busy == pytest.approx(by_hand)
    assert by_hand <= plan.prediction.program_seconds * (1 + 1e-9) <= plan.prediction.step_seconds * (1 + 2e-9)
    assert plan.prediction.program_seconds == pytest.approx(by_hand, rel=0.01)
    (chosen,) = (row for row in plan.alternatives if row.micro_batches == n and row.micro_batch_size == 2)
    assert chosen.compute_tokens_per_second == pytest.approx(n * 2 * profile.model.sequence_length / by_hand)


def test_reads_and_writes_take_their_cores_from_compute() -> None:
    """On two cores: beside a read that keeps half of one busy compute gets three quarters, the read all it needs."""
    volume = made_volume(read=2e9, write=2e9).model_copy(update={"read_cores": 0.5, "write_cores": 1.0})
    machine = made_machine(shared=True, cores=2, volumes=(volume,))
    beside = 0.5 * BACKWARD
    graph = Graph("made", (backward(0), transfer(1, "read", round(2e9 * beside))), 1)
    timeline = simulate(graph, MODEL, machine, 1)
    assert timeline.ends == pytest.approx((BACKWARD + beside / 4, beside))
    half = round(1e9 * beside)
    both = Graph("made", (backward(0), transfer(1, "read", half), transfer(2, "write", half)), 1)
    # Each at half its bandwidth, so of their 1.5 cores they take half.
    assert simulate(both, MODEL, machine, 1).ends[0] == pytest.approx(BACKWARD + beside * 0.75 / 2)
    apart = simulate(graph, MODEL, made_machine(cores=2, volumes=(volume,)), 1)
    assert apart.ends[0] == pytest.approx(BACKWARD)


def test_what_an_update_sums_in_passing_costs_the_update_time_and_the_transfer_fewer_cores() -> None:
    """States that are read, updated and written again: three parts in four of what is read, and all that is written."""
    volume = made_volume(read=2e9, write=2e9).model_copy(
        update={"read_cores": 1.0, "read_cores_unsummed": 0.2, "write_cores": 0.8, "write_cores_unsummed": 0.4}
    )
    machine = made_machine(shared=True, cores=2, update_rate=1e9, volumes=(volume,))
    machine = machine.model_copy(update={"checksum_rate": 4e9})
    states, on_ssd, elsewhere, nowhere = (
        Region(0, 0, 12_000_000),
        Region(1, 0, 12_000_000),
        Region(2, 0, 4_000_000),
        Region(3, 0, 1),
    )
    read = made_transfer(0, "read", on_ssd, states, summed_by_update=True)
    other = made_transfer(1, "read", elsewhere, elsewhere, waits=(0,))
    updated = made_update(2, 1_000_000, states, nowhere, nowhere, waits=(1,), stored=on_ssd)
    write = made_transfer(3, "write", states, on_ssd, waits=(2,), summed_by_update=True)
    long = replace(backward(4), waits=(2,))
    timeline = simulate(Graph("made", (read, other, updated, write, long), 1), MODEL, machine, 1)
    ends = timeline.ends
    assert ends[1] == pytest.approx(16e6 / 2e9)  # nobody computes beside them
    assert ends[2] - ends[1] == pytest.approx(1e-3 + 12e6 / 4e9)
    beside = 12e6 / 2e9
    assert ends[3] - ends[2] == pytest.approx(beside) and beside < BACKWARD
    assert ends[4] - ends[2] == pytest.approx(BACKWARD + beside * 0.4 / 2)
    slowed = simulate(Graph("made", (read, other, backward(2)), 1), MODEL, machine, 1).ends[2]
    mean = 0.75 * 0.2 + 0.25 * 1.0
    assert slowed == pytest.approx(BACKWARD + 8e-3 * mean / 2)


def test_the_drive_keeps_what_it_was_measured_to_keep_beside_compute() -> None:
    """Four fifths while compute runs, all of its bandwidth afterwards."""
    volume = made_volume(read=2e9, write=2e9).model_copy(update={"bandwidth_kept": 0.8})
    machine = made_machine(shared=True, cores=2, volumes=(volume,))
    graph = Graph("made", (backward(0), transfer(1, "read", round(2e9 * 2 * BACKWARD))), 1)
    timeline = simulate(graph, MODEL, machine, 1)
    assert timeline.ends == pytest.approx((BACKWARD, BACKWARD + (2 - 0.8) * BACKWARD))
    apart = simulate(graph, MODEL, made_machine(cores=2, volumes=(volume,)), 1)
    assert apart.ends == pytest.approx((BACKWARD, 2 * BACKWARD))


def slowly(graph: Graph, machine: Machine, kept: Fraction) -> tuple[list[Fraction], list[Fraction]]:
    """The policy once more, exactly and without cleverness: all work that is left is counted down at every event."""

    def work(op: Op) -> Fraction:
        if isinstance(op, Transfer):
            volume = machine.volumes[0]
            rate = {
                "read": volume.frontier[0].read,
                "write": volume.frontier[-1].write,
                "h2d": machine.h2d_bandwidth,
                "d2h": machine.d2h_bandwidth,
            }[op.kind]
            return Fraction(op.nbytes) / Fraction(rate)
        if isinstance(op, Update):
            return Fraction(op.elements) / Fraction(machine.update_rate)
        if isinstance(op, Exchange):
            assert machine.network is not None
            return Fraction(op.nbytes) / Fraction(machine.network.exchange_bandwidth)
        return Fraction(FORWARD if isinstance(op, Forward) else BACKWARD)

    left = {op.index: work(op) for op in graph.ops}
    starts: dict[int, Fraction] = {}
    ends: dict[int, Fraction] = {}
    warm: int | None = None
    """The stage whose layer is in caches."""
    now = Fraction(0)
    while len(ends) < len(graph.ops):
        running = [op for op in graph.ops if op.index in starts and op.index not in ends]
        shared = machine.compute_shares_cpu
        for op in sorted(graph.ops, key=lambda op: (not isinstance(op, Update), op.index)):
            free = all(op.resource != other.resource for other in running)
            if op.index not in starts and free and all(before in ends for before in op.waits):
                starts[op.index] = now
                running.append(op)
                if isinstance(op, Forward | Backward):
                    if warm != op.stage or (shared and any(isinstance(other, Update) for other in running)):
                        left[op.index] *= 1 + Fraction(COLD)
                    warm = op.stage
        kinds = {op.resource for op in running}
        speed = {}
        for op in running:
            speed[op.index] = Fraction(1)
            if op.resource in ("read", "write"):
                speed[op.index] = kept if {"read", "write"} <= kinds else Fraction(1)
            elif machine.compute_shares_cpu:
                wanted = ("h2d" in kinds) + ("d2h" in kinds)
                wanted += machine.cores * bool({"compute", "cpu"} & kinds)
                speed[op.index] = min(Fraction(1), Fraction(machine.cores, wanted or 1))
                if {"compute", "cpu"} <= kinds and op.resource in ("compute", "cpu"):
                    updates, compute = machine.updates_beside_compute, machine.compute_beside_updates
                    speed[op.index] *= Fraction((updates or 0.75) if op.resource == "cpu" else (compute or 0.25))
            if (network := machine.network) and "network" in kinds:
                computes, copies = kinds & ({"compute", "cpu"} if shared else {"compute"}), kinds & {"h2d", "d2h"}
                if op.resource in computes:
                    speed[op.index] *= Fraction(network.compute_kept or 1)
                if op.resource in copies:
                    speed[op.index] *= Fraction(network.copies_kept or 1)
                if op.resource == "network" and computes:
                    speed[op.index] *= Fraction(network.kept_beside_compute or 1)
                if op.resource == "network" and copies:
                    speed[op.index] *= Fraction(network.kept_beside_copies or 1)
        step = min(left[op.index] / speed[op.index] for op in running)
        now += step
        for op in running:
            left[op.index] -= step * speed[op.index]
            if left[op.index] == 0:
                ends[op.index] = now
                if shared and isinstance(op, Update) and not any(isinstance(o, Forward | Backward) for o in running):
                    warm = None
    return [starts[op.index] for op in graph.ops], [ends[op.index] for op in graph.ops]


@settings(deadline=None, max_examples=examples(150), print_blob=True)
@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 5))
def test_agrees_with_its_slow_twin(seed: int, shared: bool, cores: int) -> None:
    draw = random.Random(seed)
    machine = made_machine(
        shared=shared, cores=cores, link=1.3e9, d2h=0.7e9, update_rate=1e9, volumes=(made_volume(read=3e9, write=2e9),)
    )
    if draw.random() < 0.5:
        pair = {"compute_beside_updates": draw.uniform(0.1, 1.0), "updates_beside_compute": draw.uniform(0.1, 1.0)}
        machine = machine.model_copy(update=pair)
    network = Network(ranks=2, gather_bandwidth=1e9, exchange_bandwidth=0.9e9, add_rate=1e10)
    if draw.random() < 0.7:
        beside = ("compute_kept", "kept_beside_compute", "copies_kept", "kept_beside_copies")
        network = network.model_copy(update={kept: draw.uniform(0.1, 1.0) for kept in beside})
    machine = machine.model_copy(update={"network": network})
    ops: list[Op] = []
    for index in range(draw.randrange(1, 40)):
        waits = tuple(sorted(draw.sample(range(index), min(index, draw.randrange(3)))))
        kind = draw.choice(("read", "write", "h2d", "d2h", "compute", "cpu", "network"))
        if kind == "compute":
            made = forward(index, waits) if draw.random() < 0.5 else backward(index, waits)
            ops.append(replace(made, stage=draw.randrange(3)))
        elif kind == "cpu":
            ops.append(update(index, draw.randrange(1, 10_000_000), waits))
        elif kind == "network":
            ops.append(exchange(index, draw.randrange(1, 10_000_000), waits))
        else:
            ops.append(transfer(index, kind, draw.randrange(1, 10_000_000), waits))
    graph = Graph("made", tuple(ops), 1)
    model = made_model(flops=1e9, cold=COLD)
    timeline = simulate(graph, model, machine, 1)
    starts, ends = slowly(graph, machine, Fraction(1, 2))
    assert timeline.starts == pytest.approx([float(start) for start in starts], rel=1e-9, abs=1e-12)
    assert timeline.ends == pytest.approx([float(end) for end in ends], rel=1e-9, abs=1e-12)
    assert simulate(graph, model, machine, 1) == timeline
    for op in ops:
        assert all(timeline.ends[before] <= timeline.starts[op.index] for before in op.waits)


def test_a_hundred_thousand_ops_take_about_a_second() -> None:
    draw = random.Random(0)
    ops: list[Op] = []
    for index in range(100_000):
        waits = tuple(sorted({draw.randrange(max(0, index - 50), index) for _ in range(3)})) if index else ()
        kind = ("read", "write", "h2d", "d2h", "cpu", "compute")[index % 6]
        if kind == "compute":
            ops.append(forward(index, waits))
        else:
            ops.append(update(index, 1000, waits) if kind == "cpu" else transfer(index, kind, 100_000, waits))
    graph = Graph("made", tuple(ops), 1)
    begin = time.process_time()
    simulate(graph, MODEL, made_machine(shared=True, cores=2), 1)
    assert time.process_time() - begin < 4.0


def test_what_passes_dram_shares_its_bandwidth() -> None:
    """A read, a copy to the device and an update ask for 2 + 3 + 5 MB/s of 5 MB/s: all of it is in use to the end. What
    asks for no more than there is goes as fast as alone, and so does all on a machine whose DRAM nobody knows."""
    rate = 5e6 / updated_bytes(USUAL)
    volumes = (made_volume(read=2e6, write=2e6),)
    machine = made_machine(link=3e6, update_rate=rate, volumes=volumes)
    shared = machine.model_copy(update={"dram_bandwidth": 5e6})
    together = transfer(0, "read", 2_000_000), transfer(1, "h2d", 3_000_000), update(2, round(rate))
    assert seconds(machine, *together) == pytest.approx(1.0, rel=1e-4)
    assert seconds(shared, *together) == pytest.approx(2.0, rel=1e-4)
    assert seconds(shared, *together[:2]) == pytest.approx(1.0, rel=1e-4)


def test_dram_is_shared_evenly_and_a_faster_link_slows_no_drive() -> None:
    """What asks for less than its share has all that it asks for; the others have the rest in equal parts."""
    assert shares_of([2.0, 3.0], 5.0) == [1.0, 1.0]
    assert shares_of([6.0, 1.0, 5.0], 5.0) == pytest.approx([2 / 6, 1.0, 2 / 5])
    assert shares_of([0.0, 8.0], 4.0) == pytest.approx([1.0, 0.5])
    read = transfer(0, "read", 2_000_000)
    for link in (3e6, 3e7, 3e8):
        machine = made_machine(link=link, volumes=(made_volume(read=2e6, write=2e6),))
        machine = machine.model_copy(update={"dram_bandwidth": 5e6})
        assert seconds(machine, read, transfer(1, "h2d", 3_000_000)) == pytest.approx(1.0, rel=1e-4)


def test_no_plan_moves_more_through_dram_than_it_can() -> None:
    """The program has a row for it, and the simulated step of a what-if keeps it too."""
    slow = {"cpu.memory-bandwidth": 20e9}
    what_if = WhatIf("llama-3.2-3b", "rtx-4090", ["samsung-990-pro*4"], 24 * GIB, sequence_length=256, figures=slow)
    profile = estimate(what_if)
    machine = profile.machine
    assert machine.dram_bandwidth == pytest.approx(20e9 * 0.8)
    plan, schedule = solve_and_build(profile, SolveRequest(24 * GIB, micro_batch_size=4, micro_batches=2))
    ops, p = schedule.steady.ops, plan.prediction
    moved = sum(op.nbytes for op in ops if isinstance(op, Transfer))
    moved += sum(op.elements * updated_bytes(USUAL) for op in ops if isinstance(op, Update) and not op.on_device)
    assert moved <= machine.dram_bandwidth * p.step_seconds * (1 + 1e-6)
    assert moved <= machine.dram_bandwidth * p.program_seconds * (1 + 1e-2)
    unknown = profile.model_copy(update={"machine": machine.model_copy(update={"dram_bandwidth": None})})
    free = solve_and_build(unknown, SolveRequest(24 * GIB, micro_batch_size=4, micro_batches=2))[0]
    assert free.prediction.step_seconds < p.step_seconds
