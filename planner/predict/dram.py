"""DRAM: what drives, links and updates take of its bandwidth, which they share where it was found out.

Owns how many bytes what host works at moves through it, and who gets how much of it: an equal share for each that moves
through it at once, and what one leaves of its share for the others (max-min fairness). So what asks for more than its
share slows itself alone, and no faster part slows another below that.
"""

from collections.abc import Sequence

from ssdplan.plans.documents.profile import Machine
from ssdplan.plans.documents.rates import rows_rates, update_rate, updated_bytes
from ssdplan.plans.documents.state_layout import USUAL, OptimizerFormats
from ssdplan.plans.graph.ops import Op, Perturb, TakeRows, Update


def shares_of(rates: Sequence[float], bandwidth: float) -> list[float]:
    """What each of those that want `rates` bytes a second at once gets of its own, as fractions, where all together get
    at most `bandwidth`."""
    left, kept = bandwidth, [1.0] * len(rates)
    ascending = sorted(range(len(rates)), key=lambda number: rates[number])
    for place, number in enumerate(ascending):
        given = min(rates[number], left / (len(rates) - place))
        kept[number] = given / rates[number] if rates[number] else 1.0
        left -= given
    return kept


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
