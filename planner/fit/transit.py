"""Transit: estimates the bytes of the pipeline's buffers as a function of what the program decides.

Owns that estimate, from a few small schedules that are really built. It only leads the program to a good placement;
whether a decision keeps its budgets is read from its own schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.state_layout import checkpoint_bytes
from ssdplan.plans.graph.contents import ROLES, Role
from ssdplan.plans.graph.ops import TIERS, Schedule, Tier
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import whole_pages

from ..predict.peaks import workspace_bytes

SHARED: Literal["shared"] = "shared"
"""In place of a role: what slots of different stages save by sharing bytes, as negative bytes."""
Holder = Role | Literal["shared"]
MEASURED = (1, 2, 6)
"""Numbers of micro-batches that are built; from two on everything grows linearly."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Bytes of buffers that follow each other in slots."""

    constant: float
    """On host, whatever the placement."""
    parameters: float
    """On host besides, when all parameters live on ssd; in proportion to the fraction that does."""
    checkpoints: float
    """On host besides, when all activation checkpoints live on ssd; in proportion to the fraction that does."""
    device: float
    """The device's peak."""


class Pipelines:
    """Pipelines of one model at any micro-batch size and number of micro-batches."""

    def __init__(self, model: Model, short: Model, decide: Callable[[int, int, float], Decision]) -> None:
        """`decide` gives the decision for a micro-batch size, n and fraction of activation checkpoints on host, with
        all else on ssd; `short` is the model that schedules are built of."""
        self.model, self.short, self.decide = model, short, decide
        self.size = min(model.micro_batch_sizes)
        self._measured: dict[tuple[int, float], dict[tuple[Tier, Holder], int]] = {}

    def at(self, micro_batch_size: int, n: int, *, mixed: bool) -> Pipeline:
        """`mixed`: activation checkpoints may lie on host and on ssd; otherwise all on ssd, which takes fewer slots."""
        scale = checkpoint_bytes(self.model, micro_batch_size) / checkpoint_bytes(self.model, self.size)

        def host(role: Holder, fraction: float) -> float:
            return self._linear(n, fraction, "host", role)

        # What passes between layers follows the activation checkpoints, parameters in transit those that ssd holds.
        hidden, transit = Role.HIDDEN_STATES, Role.PARAMETERS_IN_TRANSIT
        kept = host(hidden, 1.0) if mixed else host(hidden, 0.0)
        spilled = 2 * (host(hidden, 0.5) - kept) if mixed else 0.0
        roles = {role for _, role in self._at(MEASURED[0], 0.0)} | {role for _, role in self._at(MEASURED[1], 0.0)}
        others = sum(host(role, 0.0) for role in roles - {hidden, transit})
        device = sum(
            self._linear(n, 0.0, "device", role) * (scale if role != SHARED and ROLES[role].by_tokens else 1.0)
            for role in roles
        )
        workspace = workspace_bytes(self.model, micro_batch_size)
        return Pipeline(
            constant=others + scale * kept,
            parameters=host(transit, 0.0),
            checkpoints=scale * max(spilled, 0.0),
            device=device + workspace + n * self.model.context_bytes[micro_batch_size],
        )

    def _linear(self, n: int, fraction: float, tier: Tier, role: Holder) -> float:
        one, two, six = MEASURED
        key = (tier, role)
        if n <= two:
            return self._at(one if n == one else two, fraction).get(key, 0)
        low, high = self._at(two, fraction).get(key, 0), self._at(six, fraction).get(key, 0)
        return low + (high - low) * (n - two) / (six - two)

    def _at(self, n: int, fraction: float) -> dict[tuple[Tier, Holder], int]:
        key = (n, fraction)
        if key not in self._measured:
            self._measured[key] = _by_role(build_schedule(self.short, self.decide(self.size, n, fraction)))
        return self._measured[key]


def _by_role(schedule: Schedule) -> dict[tuple[Tier, Holder], int]:
    """Bytes of the slots that the buffers of each role pass through, and what slots that share bytes save."""
    size: dict[tuple[Tier, str], int] = {}
    kept = dict.fromkeys(TIERS, 0)
    for buffer in schedule.buffers:
        end = whole_pages(buffer.offset + buffer.nbytes)
        if buffer.pool:
            size[buffer.tier, buffer.pool] = max(size.get((buffer.tier, buffer.pool), 0), end - buffer.offset)
        else:
            kept[buffer.tier] = max(kept[buffer.tier], end)
    slots = {
        (buffer.tier, buffer.pool, buffer.offset): (buffer.role, size[buffer.tier, buffer.pool])
        for buffer in schedule.buffers
        if buffer.pool
    }
    total: dict[tuple[Tier, Holder], int] = {
        (tier, SHARED): schedule.arenas[tier]
        - kept[tier]
        - sum(nbytes for key, (_, nbytes) in slots.items() if key[0] == tier)
        for tier in TIERS
    }
    for (tier, _, _), (role, nbytes) in slots.items():
        total[tier, role] = total.get((tier, role), 0) + nbytes
    return total
