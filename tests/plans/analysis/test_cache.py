"""What a step finds in time: figures that are known by hand, and those of whole plans beside a search by bytes."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.planner.predict.simulator import simulate
from ssdplan.plans.analysis.cache import (
    FIGURES,
    CacheReader,
    OnSsd,
    accesses_of,
    figures_of,
    mean_figures,
    predicted_figures,
    states_on_ssd,
)
from ssdplan.plans.documents.metrics import CacheFigures, StepMetrics
from ssdplan.plans.documents.stripe_shares import room
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.graph.contents import Content
from ssdplan.plans.graph.ops import Backward, Forward, Graph, Op, Perturb, Region, Resource, Transfer, Update
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import made_machine, made_model
from tests.plans.hand_made import made_forward, made_transfer, made_update

SSD, HOST, TRANSIT, DEVICE, OTHER_DEVICE, HIDDEN, HIDDEN_ON_HOST = (Region(buffer, 0, 4096) for buffer in range(7))
CHUNK, GRADIENT, UPDATED, ON_SSD, PIECE_OF_GRADIENT = (Region(buffer, 0, 4096) for buffer in range(10, 15))


def timeline_of(*rows: tuple[Op, float, float]) -> Timeline:
    assert [row[0].index for row in rows] == list(range(len(rows)))
    return Timeline(Graph("steady", tuple(r[0] for r in rows), 3), tuple(r[1] for r in rows), tuple(r[2] for r in rows))


def read_off(timeline: Timeline, *, unified: bool = False) -> CacheFigures:
    return figures_of(accesses_of(timeline.graph), timeline, unified=unified)


def moved(index: int, kind: Resource, source: Region, target: Region, *waits: int, **more: Any) -> Transfer:
    return made_transfer(index, kind, source, target, waits=waits, **more)


def forward(index: int, stage: int, weights: Region, *waits: int, hidden: Region | None = None) -> Forward:
    return made_forward(index, stage=stage, weights=(weights,), waits=waits, hidden=hidden)


def update(index: int, *waits: int) -> Update:
    return made_update(index, 1024, CHUNK, GRADIENT, UPDATED, waits=waits)


OF_THREE_LAYERS = (
    (moved(0, "read", SSD, TRANSIT), 0.0, 2.0),
    (moved(1, "h2d", TRANSIT, DEVICE, 0), 2.0, 3.0),  # the link was free from the beginning: host had it not
    (forward(2, 0, DEVICE, 1), 3.0, 5.0),  # waits 3 s
    (moved(3, "h2d", HOST, OTHER_DEVICE), 3.0, 5.5),
    (moved(4, "h2d", HIDDEN_ON_HOST, HIDDEN, content=Content.HIDDEN_STATE), 5.5, 6.0),
    (forward(5, 1, OTHER_DEVICE, 3, 4, hidden=HIDDEN), 6.0, 7.0),  # for its input, 1 s, not for its parameters
    (forward(6, 1, OTHER_DEVICE, 3), 7.0, 8.0),  # the same use
    (moved(7, "h2d", HOST, DEVICE, 2), 6.0, 8.00002),
    (forward(8, 2, DEVICE, 7), 8.00002, 9.0),  # waits 0.02 ms
)


def test_uses_and_waits_of_three_layers() -> None:
    found = read_off(timeline_of(*OF_THREE_LAYERS))
    assert found.device_hit_rate == pytest.approx(1 / 3)
    assert found.host_hit_rate == pytest.approx(2 / 3)
    assert found.waits_below_10us == pytest.approx(1 / 3)
    assert found.waits_below_30us == found.waits_below_100us == pytest.approx(2 / 3)
    assert found.compute_wait_seconds == pytest.approx(3.0 + 1.0 + 0.00002)
    assert found.optimizer_miss_rate is None
    assert (found.device_memory_use, found.host_memory_use, found.ssd_use) == (None, None, None)


def test_a_wait_of_exactly_a_threshold_is_not_below_it() -> None:
    for seconds, below in ((0.5e-5, (1, 1, 1)), (1.5e-5, (0, 1, 1)), (5e-5, (0, 0, 1)), (1e-4, (0, 0, 0))):
        late = timeline_of((moved(0, "h2d", HOST, DEVICE), 0.0, seconds), (forward(1, 0, DEVICE, 0), seconds, 1.0))
        found = read_off(late)
        assert (found.waits_below_10us, found.waits_below_30us, found.waits_below_100us) == below
        assert found.device_hit_rate == 0


def test_the_first_operation_of_a_stage_in_time_is_the_one_that_finds_its_parameters_or_not() -> None:
    """Two micro-batches, of which the second runs first, since the first's input comes late."""
    rows = (
        (moved(0, "h2d", HOST, DEVICE), 0.0, 2.0),
        (moved(1, "h2d", HIDDEN_ON_HOST, HIDDEN, content=Content.HIDDEN_STATE), 2.0, 5.0),
        (forward(2, 0, DEVICE, 0, 1, hidden=HIDDEN), 5.0, 6.0),
        (forward(3, 0, DEVICE, 0), 2.0, 4.0),
    )
    found = read_off(timeline_of(*rows))
    assert found.device_hit_rate == 0 and found.compute_wait_seconds == pytest.approx(2.0 + 1.0)


def test_what_was_brought_for_an_earlier_stage_is_found() -> None:
    """The wait that a later stage has for something else is not for its parameters."""
    rows = (
        (moved(0, "h2d", HOST, DEVICE), 0.0, 1.0),
        (forward(1, 0, DEVICE, 0), 1.0, 2.0),
        (moved(2, "h2d", HIDDEN_ON_HOST, HIDDEN, content=Content.HIDDEN_STATE), 1.0, 4.0),
        (forward(3, 1, DEVICE, 0, 2, hidden=HIDDEN), 4.0, 5.0),
    )
    found = read_off(timeline_of(*rows))
    assert found.device_hit_rate == 0.5 and found.host_hit_rate == 1.0  # of the one use that host serves


def test_two_states_of_a_layer_each_wait_as_long_as_it_takes_them_to_come() -> None:
    both = made_forward(2, weights=(DEVICE, OTHER_DEVICE), waits=(0, 1))
    rows = (
        (moved(0, "h2d", HOST, DEVICE), 0.0, 2e-5),
        (moved(1, "h2d", HOST, OTHER_DEVICE), 2e-5, 4e-5),
        (both, 4e-5, 1.0),
    )
    found = read_off(timeline_of(*rows))
    assert (found.waits_below_10us, found.waits_below_30us, found.waits_below_100us) == (0, 0.5, 1)
    assert found.compute_wait_seconds == pytest.approx(4e-5)


def test_a_free_place_that_is_waited_for_is_no_miss_of_host() -> None:
    """The copy begins when the place on the device is free, at 3 s; its source was there at 2 s."""
    rows = (
        (moved(0, "read", SSD, TRANSIT), 0.0, 2.0),
        (forward(1, 0, DEVICE), 0.0, 3.0),
        (moved(2, "h2d", TRANSIT, DEVICE, 0, 1), 3.0, 4.0),
        (forward(3, 1, DEVICE, 2), 4.0, 5.0),
    )
    found = read_off(timeline_of(*rows))
    assert found.host_hit_rate == 1.0 and found.device_hit_rate == 0.5


def test_updates_that_wait_for_their_states() -> None:
    states = {"content": Content.OPTIMIZER_STATES}
    rows = (
        (moved(0, "read", ON_SSD, CHUNK, **states), 0.0, 1.0),
        (update(1, 0), 1.0, 2.0),  # waits
        (moved(2, "read", ON_SSD, CHUNK, **states), 1.0, 1.5),
        (update(3, 2), 2.0, 3.0),  # the lane was not free before
        (update(4), 3.0, 3.5),  # nothing comes
        (moved(5, "read", ON_SSD, CHUNK, **states), 3.0, 4.0),
        (moved(6, "d2h", PIECE_OF_GRADIENT, GRADIENT, content=Content.GRADIENT), 4.0, 5.0),
        (update(7, 5, 6), 5.0, 6.0),  # waits for its gradient, after its states have come
    )
    found = read_off(timeline_of(*rows))
    assert found.optimizer_miss_rate == 0.25
    assert (found.device_hit_rate, found.host_hit_rate, found.waits_below_10us) == (None, None, None)


class OnDevice(Update):
    """An update that compute itself does."""

    @property
    def resource(self) -> Resource:
        return "compute"


def test_an_update_on_compute_is_an_operation_of_compute() -> None:
    """It takes its place on that lane, and waits on it for its states."""
    plain = update(1, 0)
    on_device = OnDevice(**{each.name: getattr(plain, each.name) for each in fields(Update)})
    rows = (
        (moved(0, "h2d", HOST, CHUNK, content=Content.OPTIMIZER_STATES), 0.0, 1.0),
        (on_device, 1.0, 3.0),
        (moved(2, "h2d", HOST, DEVICE), 1.0, 2.0),
        (forward(3, 0, DEVICE, 2), 3.0, 4.0),
    )
    found = read_off(timeline_of(*rows))
    assert (found.optimizer_miss_rate, found.device_hit_rate, found.compute_wait_seconds) == (1.0, 1.0, 1.0)


def test_with_unified_memory_compute_takes_what_ssd_brings_to_host() -> None:
    rows = (
        (moved(0, "read", SSD, TRANSIT), 0.0, 1.0),
        (forward(1, 0, TRANSIT, 0), 1.0, 3.0),
        (forward(2, 1, HOST), 3.0, 4.0),
        (moved(3, "read", SSD, DEVICE), 1.0, 3.5),
        (forward(4, 2, DEVICE, 3), 4.0, 5.0),
    )
    found = read_off(timeline_of(*rows), unified=True)
    assert found.device_hit_rate is None
    assert found.host_hit_rate == found.waits_below_100us == pytest.approx(2 / 3)


def test_late_by_less_than_times_are_good_to_is_in_time() -> None:
    rows = ((moved(0, "h2d", HOST, DEVICE), 0.0, 5e-9), (forward(1, 0, DEVICE, 0), 5e-9, 1.0))
    found = read_off(timeline_of(*rows))
    assert found.device_hit_rate == 1.0 and found.compute_wait_seconds == 0.0


# Whole plans.

CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"alpha": 0.5, "optimizer": 0.5, "parameters": 0.5},
    {"alpha": 0.3, "parameters": 0.4, "on_device": 0.5, "gradient": 0.5},
    {"across_turn": 0.5, "optimizer": 1.0, "checkpoints": 0.5},
    {"on_device": 1.0, "optimizer": 1.0},
    {"schedule": "horizontal", "parameters": 0.5},
    {"unified": True, "alpha": 0.5},
    {"unified": True, "on_device": 0.5},
    {"zeroth_order": ZerothOrder()},
    {"zeroth_order": ZerothOrder(piece_elements=4096), "parameters": 0.5},
    {"zeroth_order": ZerothOrder(written_every=2), "unified": True},
)


@dataclass
class Held:
    """Bytes [start, stop) of a buffer, and the operation that wrote them last."""

    start: int
    stop: int
    writer: Op


def by_bytes(timeline: Timeline, *, unified: bool) -> CacheFigures:
    """The figures by what lies in each byte when an operation reads it, in the graph's order, rather than by waits."""
    held: dict[int, list[Held]] = defaultdict(list)
    sources: dict[int, list[tuple[Region, Op]]] = {}
    """Operation -> what it reads, and who wrote that."""
    for op in timeline.graph.ops:
        sources[op.index] = [
            (region, each.writer)
            for region in op.reads
            for each in held[region.buffer]
            if max(each.start, region.start) < min(each.stop, region.stop)
        ]
        for region in op.writes:
            kept = []
            for each in held[region.buffer]:
                left = ((each.start, min(each.stop, region.start)), (max(each.start, region.stop), each.stop))
                kept += [Held(start, stop, each.writer) for start, stop in left if start < stop]
            held[region.buffer] = [*kept, Held(region.start, region.stop, op)]

    def end(op: Op) -> float:
        return timeline.ends[op.index]

    def before(op: Op) -> float:
        """When the lane was free."""
        me = (timeline.starts[op.index], end(op), op.index)
        return max(
            (end(o) for o in timeline.graph.ops
             if o.resource == op.resource and (timeline.starts[o.index], end(o), o.index) < me),
            default=0.0,
        )  # fmt: skip

    def late(op: Op, data: Sequence[Op]) -> float:
        """By how much the last of `data` comes later than everything else."""
        rest = [timeline.graph.ops[wait] for wait in op.waits if timeline.graph.ops[wait] not in data]
        by = max(map(end, data), default=0.0) - max([before(op), *map(end, rest)])
        return by if by > 1e-8 else 0.0

    def of(op: Op, content: Content | None, *at: Region) -> list[Op]:
        return [
            writer for region, writer in sources[op.index]
            if region in at and isinstance(writer, Transfer) and content in (None, writer.content)
        ]  # fmt: skip

    copies = {
        region.buffer
        for op in timeline.graph.ops if isinstance(op, Perturb)
        for region in (op.plus, op.minus, op.rounded) if region
    }  # fmt: skip
    stages: dict[tuple[int, Region], list[Op]] = defaultdict(list)
    lost = 0.0
    for op in timeline.graph.ops:
        if op.resource == "compute":
            lost += late(op, of(op, None, *op.reads))
            parameters = op.weights if isinstance(op, Forward | Backward) else op.reads  # of a pass it is all it reads
            for region in parameters:
                if region.buffer not in copies:
                    stages[op.stage, region].append(op)
    waits, hosts = [], []
    spent: list[Op] = []
    for (_, region), ops in stages.items():
        mine = [each for op in ops for each in of(op, Content.PARAMETERS, region) if each not in spent]
        spent += mine
        first = min(ops, key=lambda op: (timeline.starts[op.index], op.index))
        weights = first.weights if isinstance(first, Forward | Backward) else (region,)
        everything = of(first, Content.PARAMETERS, *weights)
        rest = [o for o in map(timeline.graph.ops.__getitem__, first.waits) if o not in everything]
        wait = max(map(end, mine), default=0.0) - max([before(first), *map(end, rest)])
        waits.append(wait if wait > 1e-8 else 0.0)
        uploads = [op for op in mine if op.resource == "h2d"]
        if uploads:
            hosts.append(not any(late(op, of(op, None, *op.reads)) for op in uploads))
    hits = [wait == 0 for wait in waits]
    updates = [op for op in timeline.graph.ops if isinstance(op, Update)]
    return CacheFigures(
        device_hit_rate=None if unified else fmean(hits),
        host_hit_rate=fmean(hits) if unified else fmean(hosts) if hosts else None,
        optimizer_miss_rate=fmean(late(op, of(op, Content.OPTIMIZER_STATES, op.optimizer)) > 0 for op in updates)
        if updates
        else None,
        waits_below_10us=fmean(wait < 1e-5 for wait in waits),
        waits_below_30us=fmean(wait < 3e-5 for wait in waits),
        waits_below_100us=fmean(wait < 1e-4 for wait in waits),
        compute_wait_seconds=lost,
    )


def again(timeline: Timeline, seed: int) -> Timeline:
    """In the same order, each operation longer or shorter by chance, and begun a little late."""
    rng = random.Random(seed)
    starts, ends = [0.0] * len(timeline.starts), [0.0] * len(timeline.starts)
    free: dict[Resource, float] = defaultdict(float)
    for index in sorted(range(len(starts)), key=lambda index: (timeline.starts[index], timeline.ends[index], index)):
        op = timeline.graph.ops[index]
        begins = max([free[op.resource], *(ends[wait] for wait in op.waits)])
        starts[index] = begins + rng.choice((0.0, 1e-6, 2e-5))
        took = timeline.ends[index] - timeline.starts[index]
        ends[index] = free[op.resource] = starts[index] + took * rng.choice((0.3, 1.0, 3.0))
    return Timeline(timeline.graph, tuple(starts), tuple(ends))


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(CHOICES), st.integers(1, 3), st.integers(0, 1 << 30), st.sampled_from(["steady", "first"]))
def test_the_figures_of_any_plan_are_those_by_bytes(
    choices: dict[str, Any], micro_batches: int, seed: int, name: str
) -> None:
    model = made_model(blocks=2, hidden=64)
    decision = decide(model, micro_batches=micro_batches, **choices)
    machine = made_machine().model_copy(update={"perturb_rate": 1e9, "pending_rate": 1e9})
    graph: Graph = getattr(build_schedule(model, decision), name)
    simulated = simulate(graph, model, machine, 1)
    for timeline in (simulated, again(simulated, seed)):
        unified = decision.unified_memory
        found, wanted = figures_of(accesses_of(graph), timeline, unified=unified), by_bytes(timeline, unified=unified)
        assert astuple(found) == pytest.approx(astuple(wanted), abs=1e-9)


def test_parameters_that_stay_on_the_device_are_always_found() -> None:
    model = made_model(blocks=3)
    schedule = build_schedule(model, decide(model, on_device=1.0, optimizer=1.0))
    found = read_off(simulate(schedule.steady, model, made_machine(), 1))
    assert (found.device_hit_rate, found.waits_below_10us, found.optimizer_miss_rate) == (1.0, 1.0, 0.0)
    assert found.host_hit_rate is None


# What a plan's steps come to.


def test_memory_is_used_as_far_as_the_budgets_say() -> None:
    model = made_model(blocks=2)
    decision = decide(model)
    schedule = build_schedule(model, decision)
    plan = planned(model, made_machine(), decision, schedule)
    timeline = simulate(schedule.steady, model, plan.machine, 1)
    half = decision.host_budget_bytes // 2
    found = CacheReader(plan).figures(timeline, {"host": half, "device": 1 << 38, "ssd": 12345})
    assert (found.host_memory_use, found.device_memory_use) == (0.5, 0.25)
    assert found.ssd_use == 12345 / room(plan.machine.volumes)
    p, predicted = plan.prediction, predicted_figures(plan, schedule, lambda graph: timeline)
    assert predicted == CacheReader(plan).figures(
        timeline, {"host": p.peak_host_bytes, "device": p.peak_device_bytes, "ssd": p.ssd_bytes}
    )
    unified = plan.model_copy(update={"decision": decide(model, unified=True)})
    assert CacheReader(unified).figures(timeline, {"host": 1, "device": 0, "ssd": 0}).device_memory_use is None


def test_a_plan_that_writes_in_some_steps_is_predicted_on_average() -> None:
    model = made_model(blocks=2)
    decision = decide(model, zeroth_order=ZerothOrder(written_every=3))
    schedule = build_schedule(model, decision)
    machine = made_machine().model_copy(update={"perturb_rate": 1e9, "pending_rate": 1e9})
    plan = planned(model, machine, decision, schedule)

    def predict(graph: Graph) -> Timeline:
        once = simulate(graph, model, machine, 1)
        times = 1.0 if graph is schedule.steady else 5.0
        return Timeline(graph, tuple(times * t for t in once.starts), tuple(times * t for t in once.ends))

    each = [read_off(predict(graph)).compute_wait_seconds for graph in (schedule.steady, schedule.unwritten)]
    assert None not in each and each[0] != each[1]
    found = predicted_figures(plan, schedule, predict).compute_wait_seconds
    assert found == pytest.approx((each[0] + 2 * each[1]) / 3)  # type: ignore[operator]


def test_a_mean_is_over_the_steps_that_have_a_figure() -> None:
    steps = [CacheFigures(ssd_use=0.5), CacheFigures(ssd_use=1.0, host_hit_rate=0.25), CacheFigures()]
    assert mean_figures(steps) == CacheFigures(ssd_use=0.75, host_hit_rate=0.25)


def test_a_line_of_the_metrics_ends_with_the_figures() -> None:
    names = tuple(each.name for each in fields(StepMetrics))
    assert names[0] == "step" and names[-len(FIGURES) :] == FIGURES


def test_states_on_ssd_are_counted_whole_or_in_part() -> None:
    model = made_model(blocks=3)
    states = len(model.states)
    assert states_on_ssd(build_schedule(model, decide(model))) == OnSsd(states, states, states, states, states, states)
    some = states_on_ssd(build_schedule(model, decide(model, parameters=0.5, optimizer=1.0)))
    assert some == OnSsd(states, 0, states, 0, 0, states)
    none = states_on_ssd(build_schedule(model, decide(model, zeroth_order=ZerothOrder(), parameters=1.0)))
    assert none == OnSsd(0, 0, states, 0, 0, 0)
