"""Solve again: `python -m ssdplan.planner.solve_again` reads a plan and a profile, and writes what solve chooses now.

Owns the request that a plan answers, recovered from it: its budgets, schedule and batch, and what the user fixed. All
else is free, since it changes no result.
"""

import json
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.errors import SsdplanError, UsageError

from .program.choices import WEAR_PRICE
from .request import SolveRequest
from .solve import solve


def request_of(plan: Plan) -> SolveRequest:
    """What a plan was asked for, as far as another must keep to it."""
    decision, asked = plan.decision, plan.asked
    return SolveRequest(
        host_memory_bytes=decision.host_budget_bytes,
        device_memory_bytes=None if decision.unified_memory else decision.device_budget_bytes,
        micro_batch_size=decision.micro_batch_size,
        micro_batches=decision.micro_batches,
        schedule="vertical" if decision.schedule == "zeroth-order" else decision.schedule,
        optimizer_states=decision.optimizer_states,
        masters=decision.masters,
        clip_grad_norm=decision.clip_grad_norm,
        unified_memory=decision.unified_memory,
        ranks=decision.ranks,
        delay_ratio=asked.delay_ratio,
        residency=asked.residency,
        max_ssd_write_bytes=asked.max_ssd_write_bytes,
        recompute=asked.recompute or "auto",
        wear_price=WEAR_PRICE if asked.wear_price is None else asked.wear_price,
        activations=asked.activations,
        zeroth_order=decision.zeroth_order and _asked_of(decision.zeroth_order),
    )


def request_for(plan: Plan, ranks: int) -> SolveRequest:
    """The same for another number of ranks, which take the same batch in all. Host memory is what all of them had
    together, since ranks of one machine share it. Micro-batches stay as large as they are where the batch allows it.
    Raises UsageError for a batch that so many cannot share."""
    decision, request = plan.decision, request_of(plan)
    if decision.rows % ranks:
        raise UsageError(f"{ranks} ranks cannot share a global batch of {decision.rows} rows evenly")
    same_size = decision.rows // ranks % decision.micro_batch_size == 0
    return replace(
        request,
        ranks=ranks,
        host_memory_bytes=decision.host_budget_bytes * decision.ranks // ranks,
        global_batch=decision.rows,
        micro_batch_size=decision.micro_batch_size if same_size else None,
        micro_batches=None,
    )


def _asked_of(zeroth_order: ZerothOrder) -> ZerothOrder:
    """Of what a decision says, what a user decides."""
    return ZerothOrder(directions=zeroth_order.directions, masters=zeroth_order.masters)


def main() -> int:
    """Standard input is a JSON list of two texts, a plan and a profile, and of the number of ranks if that is to be
    another. Standard output is the plan found, without comparisons; where there is none, standard error says why, and
    the exit code is the error's."""
    for asked in (signal.SIGINT, signal.SIGHUP):
        signal.signal(asked, signal.SIG_IGN)  # who wants the run to end tells the run, which waits for this
    with suppress(OSError):  # where memory ends, it is this process that goes, and not the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    text, profile, *ranks = json.load(sys.stdin)
    try:
        plan = Plan.model_validate_json(text)
        request = request_for(plan, *ranks) if ranks else request_of(plan)
        found = solve(Profile.model_validate_json(profile), request, compared=False)
    except SsdplanError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(found.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
