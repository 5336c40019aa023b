"""The linear program, against its rows written down a second time, layer by layer, and searched by force."""

import random
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.predict.drive import combined_frontier
from ssdplan.planner.program.choices import FixedChoices, KeptShares, Limits
from ssdplan.planner.program.placement import ProgramResult, footprint
from ssdplan.planner.program.program import program_bound, solve_program
from ssdplan.planner.program.variables import (
    CHECKPOINTS_ON_DEVICE,
    CONSTANT,
    DELAY_RATIO,
    Variable,
    value,
    variables_of,
)
from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.graph.contents import Role
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import examples
from tests.made.profiles import GIB, made_machine, made_model, made_volume
from tests.made.works import work_of
from tests.planner.machines import machines, models
from tests.planner.predict.test_drive import seconds_by_turns
from tests.planner.program.pulp_solver import solve_by

ELEMENT = {"bf16": 2, "fp32": 4}
RELAXED = settings(deadline=None, max_examples=examples(60), print_blob=True)


class Sweep:
    """What a step takes at any placement, summed layer by layer. Fractions may be numpy arrays of many placements.

    A placement is eight fractions: optimizer and parameters, each prompt on host, delayed on host; delayed gradients on
    host, on ssd; alpha; checkpoints on host. All classes share it, as in the paper.
    """

    def __init__(self, model: Model, machine: Machine, b: int, n: int) -> None:
        self.model, self.machine, self.b, self.n = model, machine, b, n
        nbytes = b * model.sequence_length * model.hidden_size * ELEMENT[model.precision]
        self.c = (nbytes + 4095) // 4096 * 4096
        self.w = ELEMENT[model.precision]
        self.last = len(model.layers) - 1

    def host(self, at):
        """Residents, with the delayed gradients that fit in a layer's own checkpoints for nothing."""
        total = 0.0
        for number, layer in enumerate(self.model.layers):
            checkpoints = self.n * self.c * at["c_h"] if 0 < number < self.last else 0.0
            gradients = 0.0
            for index in layer.states:
                if self.model.uses(index)[0] == number:
                    elements = self.model.states[index].elements
                    total = total + elements * (12 * (at["o_ph"] + at["o_dh"]) + self.w * (at["p_ph"] + at["p_dh"]))
                    gradients = gradients + 4 * elements * at["g_h"]
            total = total + np.maximum(checkpoints, gradients)
        return total

    def seconds(self, at):
        alpha, total = at["alpha"], 0.0
        o_ps, o_ds = 1 - alpha - at["o_ph"], alpha - at["o_dh"]
        p_ps, p_ds, c_s = 1 - alpha - at["p_ph"], alpha - at["p_dh"], 1 - at["c_h"]
        n, c, w = self.n, self.c, self.w
        head_own = sum(self.elements(i) for i in self.model.layers[-1].states if self.model.uses(i)[0] == self.last)
        spread = min(3, self.last - 1)
        for number, layer in enumerate(self.model.layers):
            timing = self.model.timing(layer.layer_class, self.b)
            own = sum(self.elements(i) for i in layer.states if self.model.uses(i)[0] == number)
            every = sum(self.elements(i) for i in layer.states)
            first, last, block = number == 0, number == self.last, 0 < number < self.last
            if not last:
                delayed = own + (head_own / spread if number >= self.last - spread else 0)
                kept = n * c if number < self.last - 1 else 0
                total = total + self.stage(
                    read=w * every * p_ps + delayed * (12 * o_ds + 4 * at["g_s"]),
                    write=delayed * (12 * o_ds + w * p_ds) + kept * c_s,
                    h2d=w * every + (0 if first else (n - 1) * c),
                    d2h=kept if kept else (n - 1) * c,
                    updates=alpha * delayed,
                    compute=n * timing.forward_seconds,
                )
            shared_here = sum(self.elements(i) for i in layer.states if first and len(self.model.uses(i)) > 1)
            total = total + self.stage(
                read=w * every * p_ps
                + w * (every - (own if last else 0)) * p_ds
                + 12 * own * o_ps
                + (n * c * c_s if block else 0),
                write=own * (12 * o_ps + w * p_ps + 4 * at["g_s"]),
                h2d=w * every + 4 * shared_here + (n - 1) * c + (n * c if block else 0),
                d2h=4 * every + (0 if first else (n - 1) * c),
                updates=(1 - alpha) * own,
                compute=n * timing.backward_seconds,
            )
        return total

    def elements(self, index):
        return self.model.states[index].elements

    def stage(self, *, read, write, h2d, d2h, updates, compute):
        machine = self.machine
        to, back, cpu = h2d / machine.h2d_bandwidth, d2h / machine.d2h_bandwidth, updates / machine.update_rate
        frontier = list(combined_frontier(machine.volumes))
        if len(frontier) == 2:
            drive = read / frontier[0][0] + write / frontier[1][1]
        else:
            drive = np.vectorize(lambda r, w: seconds_by_turns(frontier, r, w))(read, write)
        if machine.compute_shares_cpu:
            others = [compute + cpu + (to + back) / machine.cores, to, back]
        else:
            others = [compute, cpu, to, back]
        slowest = drive
        for each in others:
            slowest = np.maximum(slowest, each)
        return slowest


def paper(alpha, x_optimizer, x_parameters, x_checkpoints):
    """One residency for both parts of a state; delayed gradients all on host (GreedySnake, Algorithm 1)."""
    return {
        "alpha": alpha,
        "o_ph": (1 - alpha) * x_optimizer,
        "o_dh": alpha * x_optimizer,
        "p_ph": (1 - alpha) * x_parameters,
        "p_dh": alpha * x_parameters,
        "g_h": alpha,
        "g_s": 0.0,
        "c_h": x_checkpoints,
    }


def scale_of(model: Model, machine: Machine, b: int, n: int) -> float:
    """Host bytes with everything resident."""
    return float(Sweep(model, machine, b, n).host(paper(0.0, 1.0, 1.0, 1.0)))


def solved(model: Model, machine: Machine, b: int, n: int, host: float, **fixed: Any) -> ProgramResult | None:
    return solve_program(
        model,
        machine,
        micro_batch_size=b,
        micro_batches=n,
        limits=Limits(host),
        fixed=FixedChoices(**fixed),
    )


def decision_of(model: Model, result: ProgramResult, b: int, n: int) -> Decision:
    return Decision(
        schedule="vertical",
        optimizer="adamw",
        optimizer_states="fp32",
        precision=model.precision,
        micro_batch_size=b,
        micro_batches=n,
        sequence_length=model.sequence_length,
        delay_ratio=result.delay_ratio,
        placement=result.placement,
        checkpoint_host=result.checkpoint_host,
        recompute="all",
        update_chunk_elements=1 << 16,
        update_lookahead=3,
        host_budget_bytes=GIB,
        device_budget_bytes=GIB,
    )


@RELAXED
@given(models(), machines(), st.sampled_from((1, 2, 4)), st.integers(1, 6), st.floats(0, 1))
def test_never_worse_than_the_papers_sweep(model: Model, machine: Machine, b: int, n: int, memory: float) -> None:
    budget = memory * scale_of(model, machine, b, n)
    sweep = Sweep(model, machine, b, n)
    steps = np.linspace(0, 1, 6)
    points = np.array(list(product(np.linspace(0.01, 0.5, 50), steps, steps, steps))).T
    at = paper(*points)
    plain = len(combined_frontier(machine.volumes)) == 2
    inside = np.flatnonzero(sweep.host(at) <= budget)
    if not plain:  # taking turns between many points is slow to compute: a sample will do
        inside = inside[:: max(1, len(inside) // 100)]
    if not len(inside):
        return
    best = sweep.seconds(paper(*points[:, inside])).min()
    result = solved(model, machine, b, n, budget)
    assert result is not None
    assert result.seconds <= best * (1 + 1e-6)


@RELAXED
@given(models(), machines(), st.sampled_from((1, 2, 4)), st.integers(1, 6), st.floats(0, 1), st.integers(0, 2**32))
def test_no_random_four_way_split_is_better(
    model: Model, machine: Machine, b: int, n: int, memory: float, seed: int
) -> None:
    budget = memory * scale_of(model, machine, b, n)
    sweep = Sweep(model, machine, b, n)
    result = solved(model, machine, b, n, budget)
    assert result is not None
    draw = random.Random(seed)
    for _ in range(60):
        alpha = draw.choice((0.0, draw.random(), 1.0))
        at = {"alpha": alpha, "c_h": draw.choice((0.0, draw.random(), 1.0))}
        for name, whole in (("o_ph", 1 - alpha), ("o_dh", alpha), ("p_ph", 1 - alpha), ("p_dh", alpha), ("g_h", alpha)):
            at[name] = whole * draw.choice((0.0, draw.random(), 1.0))
        at["g_s"] = alpha - at["g_h"]
        if sweep.host(at) <= budget:
            assert result.seconds <= sweep.seconds(at) * (1 + 1e-6)


@RELAXED
@given(models(), machines(), st.sampled_from((1, 2, 4)), st.integers(1, 6), st.floats(0, 1))
def test_what_it_says_of_its_placement_is_so(model: Model, machine: Machine, b: int, n: int, memory: float) -> None:
    """With one state class the sweep's formulas apply to the answer: same seconds, within memory.

    Its fractions are rounded to six decimals, so what lies on the drive differs by so much of all that could.
    """
    states = tuple(state.model_copy(update={"state_class": "all"}) for state in model.states)
    model = model.model_copy(update={"states": states})
    budget = memory * scale_of(model, machine, b, n)
    result = solved(model, machine, b, n, budget)
    assert result is not None
    p = result.placement["all"]
    at = {
        "alpha": result.delay_ratio,
        "o_ph": p.optimizer_prompt_host,
        "o_dh": p.optimizer_delayed_host,
        "p_ph": p.parameters_prompt_host,
        "p_dh": p.parameters_delayed_host,
        "g_h": p.delayed_gradient_host,
        "g_s": p.delayed_gradient_ssd,
        "c_h": result.checkpoint_host,
    }
    sweep = Sweep(model, machine, b, n)
    rounded = 2e-6 * float(sweep.seconds(paper(0.0, 0.0, 0.0, 0.0)))
    assert float(sweep.seconds(at)) == pytest.approx(result.seconds, abs=rounded)
    assert sum(stage.count * stage.seconds for stage in result.stages) == pytest.approx(result.seconds, abs=rounded)
    assert float(sweep.host(at)) <= budget + 1e-5 * scale_of(model, machine, b, n)


@RELAXED
@given(models(), machines(), st.sampled_from((1, 4)), st.integers(1, 4), st.floats(0, 1))
def test_counts_what_the_graph_moves(model: Model, machine: Machine, b: int, n: int, memory: float) -> None:
    """Bytes of every resource, of the store and of the host agree with the built schedule up to the grain."""
    result = solved(model, machine, b, n, memory * scale_of(model, machine, b, n))
    assert result is not None
    decision = decision_of(model, result, b, n)
    schedule = build_schedule(model, decision)
    traffic = schedule.traffic("steady")
    layers = len(model.layers)
    grain = 2 * layers * (2048 * 18 + n * 4096)
    assert traffic["read"] == pytest.approx(result.ssd_read_bytes, abs=2 * grain)
    assert traffic["write"] == pytest.approx(result.ssd_write_bytes, abs=2 * grain)
    assert schedule.arenas["ssd"] == pytest.approx(result.ssd_bytes, abs=grain)
    assert footprint(model, decision).host_bytes == pytest.approx(result.host_bytes, rel=1e-4, abs=8192)
    links = [(stage.count, stage) for stage in _stages_of(model, b, n)]
    assert traffic["h2d"] == sum(count * stage.h2d_bytes[CONSTANT] for count, stage in links)
    assert traffic["d2h"] == sum(count * stage.d2h_bytes[CONSTANT] for count, stage in links)


def kept_of(model: Model, device: float, turn: float) -> dict[str, tuple[float, float]]:
    """About these fractions of each class, in whole states; across the turn only blocks."""
    kept = {}
    for name in {state.state_class for state in model.states}:
        states = [index for index, state in enumerate(model.states) if state.state_class == name]
        whole = round(device * len(states))
        ends = any({0, len(model.layers) - 1} & set(model.uses(index)) for index in states)
        across = 0 if ends else min(round(turn * len(states)), len(states) - whole)
        kept[name] = KeptShares(whole / len(states), across / len(states))
    return kept


SHARES = st.sampled_from((0.0, 0.3, 0.5, 1.0))


@RELAXED
@given(models(), machines(), st.integers(1, 4), st.floats(0, 1), SHARES, SHARES, st.sampled_from((None, 0.0, 0.4, 1.0)))
def test_counts_what_the_graph_moves_around_what_the_device_keeps(
    model: Model, machine: Machine, n: int, memory: float, device: float, turn: float, alpha: float | None
) -> None:
    """Parameters on the device for the whole run and across the turn, by the graph's own bytes."""
    kept = kept_of(model, device, turn)
    host = memory * scale_of(model, machine, 1, n)
    result = solved(model, machine, 1, n, host, kept=kept, delay_ratio=alpha)
    assert result is not None
    assert {name: KeptShares(p.parameters_device, p.parameters_turn) for name, p in result.placement.items()} == kept
    decision = decision_of(model, result, 1, n)
    schedule, without = build_schedule(model, decision), build_schedule(model, nothing_kept(decision))
    traffic = schedule.traffic("steady")
    grain = 2 * len(model.layers) * (2048 * 18 + n * 4096)
    assert traffic["read"] == pytest.approx(result.ssd_read_bytes, abs=2 * grain)
    assert traffic["write"] == pytest.approx(result.ssd_write_bytes, abs=2 * grain)
    assert schedule.arenas["ssd"] == pytest.approx(result.ssd_bytes, abs=grain)
    values = at(decision)
    for link in ("h2d", "d2h"):
        form = [(stage.count, getattr(stage, f"{link}_bytes")) for stage in _stages_of(model, 1, n)]
        assert traffic[link] == pytest.approx(sum(count * value(each, values) for count, each in form), abs=2 * grain)
    there = footprint(model, decision).device_bytes
    slots = sum(b.nbytes for b in without.buffers if b.tier == "device" and b.role == Role.PARAMETERS)
    assert schedule.arenas["device"] <= without.arenas["device"] + there
    assert schedule.arenas["device"] >= without.arenas["device"] + there - slots


def nothing_kept(decision: Decision) -> Decision:
    nothing = {"parameters_device": 0.0, "parameters_turn": 0.0}
    placement = {name: p.model_copy(update=nothing) for name, p in decision.placement.items()}
    return decision.model_copy(update={"placement": placement})


def at(decision: Decision) -> dict[Variable, float]:
    """The variables that links depend on, of a decision."""
    values = {DELAY_RATIO: decision.delay_ratio}
    for name, p in decision.placement.items():
        variables = variables_of(name)
        values[variables.device] = p.parameters_device
        values[variables.device_delayed] = p.parameters_device * decision.delay_ratio
        values[variables.turn] = p.parameters_turn
        values |= dict.fromkeys(variables.updated_there, 0.0)
    return values | {CHECKPOINTS_ON_DEVICE: 0.0}


@RELAXED
@given(models(), machines(), st.integers(1, 3), st.floats(0, 1), st.floats(0, 1.2))
def test_whole_states_on_the_device_are_never_better_than_the_programs_fractions(
    model: Model, machine: Machine, n: int, memory: float, room: float
) -> None:
    """Brute force over every number of states that fit: the program's optimum is below each, and above none by more
    device memory."""
    element = 2 if model.precision == "bf16" else 4
    device = room * element * sum(state.elements for state in model.states)
    host = memory * scale_of(model, machine, 1, n)

    def seconds(kept: dict[str, tuple[float, float]] | None, limit: float | None) -> float:
        found = program_bound(
            model,
            machine,
            micro_batch_size=1,
            micro_batches=n,
            limits=Limits(host, device_bytes=limit),
            fixed=FixedChoices(kept=kept),
        )
        assert found is not None
        return found.seconds

    free = seconds(None, device)
    assert free <= seconds(None, None) * (1 + 1e-5) and seconds(None, 1.5 * device) <= free * (1 + 1e-5)
    counts = Counter(state.state_class for state in model.states)
    size = {state.state_class: element * state.elements for state in model.states}
    for share in (0.0, 0.5, 1.0):
        for across in (0.0, 0.5, 1.0):
            kept = kept_of(model, share, across)
            if sum(sum(kept[name]) * counts[name] * size[name] for name in counts) <= device:
                assert free <= seconds(kept, None) * (1 + 1e-5)


def _stages_of(model: Model, b: int, n: int):
    from ssdplan.planner.program.traffic import layer_groups, stages

    return stages(model, layer_groups(model), work_of(b, n))


@RELAXED
@given(models(), machines(), st.integers(1, 6), st.floats(0, 1), st.floats(0, 1), st.floats(1, 3))
def test_more_of_anything_is_never_slower(
    model: Model, machine: Machine, n: int, memory: float, more: float, factor: float
) -> None:
    scale = scale_of(model, machine, 2, n)
    low, high = sorted((memory * scale, more * scale))

    def seconds(machine: Machine, host: float) -> float:
        bound = program_bound(model, machine, micro_batch_size=2, micro_batches=n, limits=Limits(host))
        assert bound is not None
        return bound.seconds

    base = seconds(machine, low)
    assert seconds(machine, high) <= base * (1 + 1e-6)
    for name in ("h2d_bandwidth", "d2h_bandwidth", "update_rate"):
        faster = machine.model_copy(update={name: getattr(machine, name) * factor})
        assert seconds(faster, low) <= base * (1 + 1e-6)
    volumes = tuple(
        made_volume(
            read=volume.frontier[0].read * factor,
            write=volume.frontier[-1].write * factor,
            mixed=tuple((point.read * factor, point.write * factor) for point in volume.frontier[1:-1]),
        )
        for volume in machine.volumes
    )
    assert seconds(machine.model_copy(update={"volumes": volumes}), low) <= base * (1 + 1e-6)


FRACTION = st.one_of(st.none(), st.sampled_from((0.0, 0.25, 1.0)), st.floats(0, 1))


@RELAXED
@given(models(), machines(), FRACTION, FRACTION, FRACTION, FRACTION)
def test_fixed_choices_are_kept_exactly(
    model: Model,
    machine: Machine,
    alpha: float | None,
    parameters: float | None,
    optimizer: float | None,
    checkpoints: float | None,
) -> None:
    result = solve_program(
        model,
        machine,
        micro_batch_size=2,
        micro_batches=3,
        limits=Limits(GIB * 100),
        fixed=FixedChoices(alpha, parameters, optimizer, checkpoints),
    )
    assert result is not None
    decision_of(model, result, 2, 3)  # the plan's own validation
    if alpha is not None:
        assert result.delay_ratio == alpha
    if checkpoints is not None:
        assert result.checkpoint_host == checkpoints
    for p in result.placement.values():
        if parameters is not None:
            assert p.parameters_prompt_host + p.parameters_delayed_host == pytest.approx(parameters, abs=1e-12)
        if optimizer is not None:
            assert p.optimizer_prompt_host + p.optimizer_delayed_host == pytest.approx(optimizer, abs=1e-12)


def test_impossible_choices_have_no_placement() -> None:
    model, machine = made_model(), made_machine()
    assert solved(model, machine, 1, 1, 1000.0, optimizer=1.0) is None
    assert (
        solve_program(
            model,
            machine,
            micro_batch_size=1,
            micro_batches=2,
            limits=Limits(0.0, ssd_write_bytes=1000.0),
        )
        is None
    )


def test_what_fits_touches_no_drive() -> None:
    model = made_model(blocks=6)
    result = solved(model, made_machine(), 4, 4, GIB)
    assert result is not None and result.ssd_bytes == result.ssd_read_bytes == result.ssd_write_bytes == 0.0


def test_limits_on_the_drive_are_kept() -> None:
    model, machine = made_model(blocks=6), made_machine()
    host = 0.3 * scale_of(model, machine, 1, 4)
    free = solved(model, machine, 1, 4, host)
    least = solve_program(model, machine, micro_batch_size=1, micro_batches=4, limits=Limits(host), aim="ssd writes")
    assert free is not None and least is not None and least.ssd_write_bytes <= free.ssd_write_bytes
    limit = (least.ssd_write_bytes + free.ssd_write_bytes) / 2
    limited = solve_program(
        model, machine, micro_batch_size=1, micro_batches=4, limits=Limits(host, ssd_write_bytes=limit)
    )
    assert limited is not None and limited.ssd_write_bytes <= limit * (1 + 1e-5)


def test_alpha_spreads_the_update_over_forward_and_backward() -> None:
    """A drive so slow that only it counts: moving updates to the forward gains nothing, so alpha stays 0. With compute
    to hide behind in forward, alpha is what levels the two."""
    slow = made_machine(volumes=(made_volume(read=1e6, write=1e6),), link=1e12, update_rate=1e12)
    model = made_model(blocks=8, flops=1e15)
    result = solved(model, slow, 1, 1, 0.0)
    assert result is not None and result.delay_ratio == 0.0
    balanced = solved(made_model(blocks=8, flops=3e5), slow, 1, 1, 0.0)
    assert balanced is not None and 0.0 < balanced.delay_ratio < 1.0


@settings(RELAXED, max_examples=examples(15))
@given(models(), machines(), st.integers(1, 4), st.floats(0, 1))
def test_the_solver_does_not_matter(model: Model, machine: Machine, n: int, memory: float) -> None:
    """CBC, which PuLP 3 brings along, finds the placement that HiGHS finds, by itself."""
    cbc = pulp.PULP_CBC_CMD(msg=False)
    if not cbc.available():
        pytest.skip("no CBC here")
    arguments = {"micro_batch_size": 2, "micro_batches": n, "limits": Limits(memory * scale_of(model, machine, 2, n))}
    one = solve_program(model, machine, **arguments)
    other = solve_by(cbc, model, machine, **arguments)
    assert one is not None and other is not None
    assert one.seconds == pytest.approx(other.seconds, rel=1e-5)
    assert one.ssd_write_bytes == pytest.approx(other.ssd_write_bytes, rel=1e-3, abs=4096)
    assert one.delay_ratio == pytest.approx(other.delay_ratio, abs=1e-3)
