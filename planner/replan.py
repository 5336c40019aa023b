"""Replan: predicts a plan's step on a machine that is not as its profile says, and asks what solve would choose there.

Owns a plan's own advisor, and that solving happens in a process of its own: a run that solved would keep its memory
tens of MiB larger to its end, and nothing that goes wrong in a solver may end a week of training.
"""

import json
import subprocess
import sys
from datetime import UTC, datetime

from ssdplan.plans.analysis.drift import Expectation
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Machine, Model, Profile
from ssdplan.plans.errors import InfeasibleError, SsdplanError, UsageError, error_of
from ssdplan.plans.graph.ops import Graph
from ssdplan.plans.graph.timeline import Timeline

from .predict.simulator import expectation, simulate

SOLVER = "ssdplan.planner.solve_again"
"""Not imported here: it would bring the linear program's library into every run."""
SECONDS = 600.0
"""The longest that solving may take; a model of 175B parameters takes five to ten."""


class Replanner:
    """A plan's own advisor (`Advisor` of `plans/analysis/drift.py`)."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def expectation(self, graph: Graph) -> Expectation:
        plan = self._plan
        return expectation(graph, plan.model, plan.machine, plan.decision.micro_batch_size)

    def step_seconds(self, graph: Graph, machine: Machine, model: Model) -> float:
        """What a graph of the plan takes, simulated with these figures."""
        return simulate(graph, model, machine, self._plan.decision.micro_batch_size).seconds

    def predicted(self, plan: Plan, graph: Graph) -> Timeline:
        return simulate(graph, plan.model, plan.machine, plan.decision.micro_batch_size)

    def replanned(self, machine: Machine, model: Model, ranks: int | None = None) -> Plan:
        """What solve chooses now, for another number of ranks if that is given. Raises InfeasibleError when nothing
        fits any more, UsageError where ranks cannot share the batch, SsdplanError when solving itself fails."""
        profile = Profile(
            schema="ssdplan.profile/1",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=machine,
            model=model,
            notes=("rates and times as a run measured them",),
        )
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", SOLVER],
                input=json.dumps([self._plan.text(), profile.text(), *([ranks] if ranks else ())]),
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SsdplanError(f"solving again: {error}") from None
        if done.returncode in (InfeasibleError.exit_code, UsageError.exit_code):
            raise error_of(done.returncode, done.stderr.strip())
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise SsdplanError(f"solving again ended with {done.returncode}: {last}")
        return Plan.model_validate_json(done.stdout)
