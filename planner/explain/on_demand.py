"""Fetching on demand: what a step would find in time by ZeRO-Infinity's habits, as the baseline of 10Cache's figures.

Owns that model of them (10Cache, sections 2 and 5): the horizontal order, every optimizer state on ssd, nothing kept on
the device, and one operation at a time, each fetch only when somebody asks for what it brings. Nothing runs it: a plan
is compared with it.
"""

from collections.abc import Sequence
from dataclasses import replace

from ssdplan.plans.analysis.cache import accesses_of, figures_of
from ssdplan.plans.documents.metrics import CacheFigures
from ssdplan.plans.documents.plan import Decision, Placement, Plan
from ssdplan.plans.graph.contents import Content
from ssdplan.plans.graph.ops import Graph, Op, Transfer
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule

from ..predict.simulator import expectation

MICRO_BATCHES = 2
"""As many as are laid out at most: each fetches every layer anew, so that more of them change no share."""


def on_demand_figures(plan: Plan) -> CacheFigures | None:
    """The shares of a step's uses, waits and updates; the seconds and bytes of a whole step it does not say. None for a
    plan without gradients or of several ranks, and where updates wait for all gradients, which that order does not
    know."""
    decision = plan.decision
    if decision.zeroth_order or decision.updates_wait or decision.ranks > 1:
        return None
    baseline = _baseline(decision)
    graph = build_schedule(plan.model, baseline).steady
    alone = expectation(graph, plan.model, plan.machine, baseline.micro_batch_size).alone_seconds
    slower = plan.machine.emulation.slower if plan.machine.emulation else 1.0
    timeline = one_by_one(graph, alone)
    found = figures_of(accesses_of(graph), timeline, unified=baseline.unified_memory, slower=slower)
    return replace(found, compute_wait_seconds=None)


def one_by_one(graph: Graph, seconds: Sequence[float]) -> Timeline:
    """One operation at a time, in the graph's order, but that a fetch comes when what it brings is asked for."""
    starts, ends, now = [0.0] * len(graph.ops), [0.0] * len(graph.ops), 0.0
    for index in _by_demand(graph.ops):
        starts[index], now = now, now + seconds[index]
        ends[index] = now
    return Timeline(graph, tuple(starts), tuple(ends))


def _by_demand(ops: Sequence[Op]) -> list[int]:
    """A layer's parameters last of all that it asks for: it is called with its input, and then fetches its weights."""

    def brings_parameters(index: int) -> bool:
        op = ops[index]
        return isinstance(op, Transfer) and op.content == Content.PARAMETERS

    order: list[int] = []
    done = [False] * len(ops)

    def bring(index: int) -> None:
        for wait in sorted(ops[index].waits, key=brings_parameters):
            if not done[wait]:
                bring(wait)
        done[index] = True
        order.append(index)

    for op in ops:
        if not _is_fetch(op):
            bring(op.index)
    for op in ops:
        if not done[op.index]:
            bring(op.index)
    return order


def _is_fetch(op: Op) -> bool:
    return isinstance(op, Transfer) and op.kind in ("read", "h2d")


def _baseline(decision: Decision) -> Decision:
    """The decision of a plan by those habits: the parameters of its states live where they lived, as far as that is not
    the device."""
    unified = decision.unified_memory
    return decision.model_copy(
        update={
            "schedule": "horizontal",
            "micro_batches": min(decision.micro_batches, MICRO_BATCHES),
            "delay_ratio": 0.0,
            "placement": {name: _placed(placement, unified) for name, placement in decision.placement.items()},
            "checkpoint_host": 1.0,
            "checkpoint_device": 0.0,
            "recompute": "all",
            "saved": {},
        }
    )


def _placed(placement: Placement, unified: bool) -> Placement:
    on_host = placement.parameters_prompt_host + placement.parameters_delayed_host
    placed = dict.fromkeys(Placement.model_fields, 0.0) | {
        "parameters_prompt_host": on_host,
        "parameters_prompt_ssd": 1.0 - on_host,
        "parameters_device": placement.parameters_device if unified else 0.0,
    }
    if not placement.frozen:
        placed["optimizer_prompt_ssd"] = 1.0
    return Placement(**placed)
