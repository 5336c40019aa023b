"""What a command line says of training without gradients.

Owns which options have no meaning then, and which have one only then.
"""

from collections.abc import Collection

from ssdplan.plans.documents.state_layout import Masters
from ssdplan.plans.documents.zeroth_order import MOST_DIRECTIONS, ZerothOrder
from ssdplan.plans.errors import UsageError

_OF_GRADIENTS = (
    "optimizer_states",
    "clip_grad_norm",
    "delay_ratio",
    "recompute",
    "activations",
    "wear_price",
    "schedule",
)
"""Options that say nothing without gradients and the optimizer's states."""
_OF_MEZO = {
    "directions": "only --optimizer mezo draws random directions; give that too",
}


def asked_zeroth_order(given: Collection[str], *, mezo: bool, directions: int, masters: Masters) -> ZerothOrder | None:
    """How to train without gradients, if so. `given`: the options that the user named. Raises UsageError for those that
    would say nothing."""
    if not mezo:
        for name, why in _OF_MEZO.items():
            if name in given:
                raise UsageError(f"--{name}: {why}")
        return None
    for name in _OF_GRADIENTS:
        if name in given:
            raise UsageError(
                f"--{name.replace('_', '-')}: optimizer mezo has no gradients, no optimizer states and nothing to "
                "recompute; leave it out"
            )
    if masters == "residual":
        raise UsageError("--masters residual: only --optimizer adamw has it; take fp32 or none")
    if directions > MOST_DIRECTIONS:
        raise UsageError(f"--directions {directions}: at most {MOST_DIRECTIONS}")
    return ZerothOrder(directions=directions, masters=masters == "fp32")
