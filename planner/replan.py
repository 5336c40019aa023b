"""Replan: what a plan would do on a machine that is not as its profile says, and what solve would then choose.

Owns the request that a plan answers, recovered from it: its budgets, schedule and batch, and what the user fixed. All
else is free, since it changes no result.
"""

from datetime import UTC, datetime

from ssdplan.plans.calibration import Expectation
from ssdplan.plans.plan import Plan
from ssdplan.plans.profile import Machine, Model, Profile
from ssdplan.plans.schedule import Graph

from .simulator import expectation, simulate
from .solve import SolveRequest, solve


class Replanner:
    """A plan's own advisor (`plans.calibration.Advisor`)."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def expectation(self, graph: Graph) -> Expectation:
        plan = self._plan
        return expectation(graph, plan.model, plan.machine, plan.decision.micro_batch_size)

    def step_seconds(self, graph: Graph, machine: Machine, model: Model) -> float:
        """What a graph of the plan takes, simulated with these figures."""
        return simulate(graph, model, machine, self._plan.decision.micro_batch_size).seconds

    def replanned(self, machine: Machine, model: Model) -> Plan:
        """Raises InfeasibleError when nothing fits any more."""
        profile = Profile(
            schema="ssdplan.profile/1",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=machine,
            model=model,
            notes=("rates and times as a run measured them",),
        )
        return solve(profile, request_of(self._plan), compared=False)


def request_of(plan: Plan) -> SolveRequest:
    """What a plan was asked for, as far as another must keep to it."""
    decision, asked = plan.decision, plan.asked
    return SolveRequest(
        host_memory_bytes=decision.host_budget_bytes,
        device_memory_bytes=None if decision.unified_memory else decision.device_budget_bytes,
        micro_batch_size=decision.micro_batch_size,
        micro_batches=decision.micro_batches,
        schedule=decision.schedule,
        optimizer_states=decision.optimizer_states,
        clip_grad_norm=decision.clip_grad_norm,
        unified_memory=decision.unified_memory,
        delay_ratio=asked.delay_ratio,
        residency=asked.residency,
        max_ssd_write_bytes=asked.max_ssd_write_bytes,
    )
