"""DRAM: what drives, links and updates take of its bandwidth, which they share where it was found out.

Owns how many bytes an update moves through it. Whose turn it is, nobody decides: what runs together slows alike.
"""

from ssdplan.plans.documents.state_layout import GRADIENT_BYTES, OPTIMIZER_BYTES, OptimizerStates

COPY_BYTES = 2
"""Of an element's parameters that an update leaves, in half precision."""


def updated_bytes(optimizer_states: OptimizerStates) -> float:
    """Bytes that the fused update moves an element: it reads master, two moments and gradient, and writes all but the
    gradient, and the copy that compute uses."""
    return 2 * OPTIMIZER_BYTES[optimizer_states] + GRADIENT_BYTES + COPY_BYTES
