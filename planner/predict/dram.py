"""DRAM: what drives, links and updates take of its bandwidth, which they share where it was found out.

Owns how many bytes what host works at moves through it. Whose turn it is, nobody decides: what runs together slows
alike.
"""

from collections.abc import Sequence

from ssdplan.plans.documents.profile import Machine
from ssdplan.plans.documents.rates import rows_rates, update_rate, updated_bytes
from ssdplan.plans.documents.state_layout import USUAL, OptimizerFormats
from ssdplan.plans.graph.ops import Op, Perturb, TakeRows, Update


def host_moves(machine: Machine, ops: Sequence[Op]) -> float:
    """Bytes a second through DRAM of what host works at in a graph, at full speed: of updates by gradients those of
    their states, in the format of most; of the passes over a table that comes by rows, which draw more than they move,
    its parameters read and written; of rows that are packed, these read and written."""
    rates = rows_rates(machine)
    passes = [op for op in ops if isinstance(op, Perturb) and op.on_host]
    if rates and passes:
        return max(2 * op.parameters.nbytes * rates[0] / (op.elements * op.waiting) for op in passes)
    if rates and any(isinstance(op, TakeRows) for op in ops):
        return 2 * rates[1]
    updated: dict[OptimizerFormats, int] = {}
    for op in ops:
        if isinstance(op, Update) and not op.on_device:
            updated[op.formats] = updated.get(op.formats, 0) + op.elements
    formats = max(updated, key=lambda form: updated[form], default=USUAL)
    return update_rate(machine, formats) * updated_bytes(formats)
