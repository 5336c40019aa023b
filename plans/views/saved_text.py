"""What a plan saves of its blocks' activations, in words: by class, rung and tier, in pairs and bytes.

Owns these lines. Pairs and bytes are the schedule's own: a pair is a layer and a micro-batch.
"""

from collections import Counter

from ..analysis.sublayers import blocks_with_backward
from ..documents.plan import Plan, SavedTier
from ..graph.contents import Content, Role
from ..graph.ops import Backward, Buffer, Schedule, Tier, Transfer
from ..units import format_bytes
from .quantities import amount, exact_percent, percent, times
from .tables import Row, short

Kept = tuple[str, str, SavedTier]
"""A class of blocks, a rung and a tier."""


def decided(plan: Plan, schedule: Schedule) -> list[tuple[str, str]]:
    """What the decision says of saved activations, and whether the user asked for it; nothing where it saves none and
    nobody asked."""
    decision, asked = plan.decision, plan.asked
    lines: list[str] = []
    pairs, nbytes, every = _counted(plan, schedule)
    for name in blocks_with_backward(plan.model) if decision.saved else ():
        of = f"of {times(every[name], 'pair')}"
        title = short(name, 14)
        for each in decision.saved.get(name, ()):
            kept = (name, each.rung, each.tier)
            if not pairs[kept]:  # a share that is rounded to nothing
                continue
            where = f"{short(each.rung, 14)} on {each.tier}"
            share = exact_percent(each.share)
            lines.append(f"{title}: {where} for {share}, {pairs[kept]:,} {of}, {format_bytes(nbytes[kept])} a step")
        rest = every[name] - sum(pairs[kept] for kept in pairs if kept[0] == name)
        if rest:
            lines.append(f"{title}: nothing for {rest:,} {of}, whose whole forward is recomputed")
    if lines:
        lines.append("a pair is a layer and a micro-batch")
        lines.append("backward recomputes what the rung of a pair does not keep")
    if not plan.exact:
        lines.append("some are kept in int8: training is not exact")
    told = [(("saved activations" if number == 0 else ""), line) for number, line in enumerate(lines)]
    if asked.recompute:
        told.append(("", f"--recompute {asked.recompute} was asked for"))
    if asked.activations:
        told.append(("", f"--activations {asked.activations} was asked for"))
    if asked.wear_price is not None:
        told.append(("", f"--wear-price {asked.wear_price:.10g} was asked for"))
    return told


def _counted(plan: Plan, schedule: Schedule) -> tuple[Counter[Kept], Counter[Kept], Counter[str]]:
    """Pairs and bytes of each that is kept in a steady step, and the pairs of each class of blocks."""
    on_ssd, moved = set(), set()
    for op in schedule.steady.ops:
        if isinstance(op, Transfer) and op.content == Content.SAVED_ACTIVATIONS:
            moved.add((op.layer, op.micro_batch))
            if op.kind == "write":
                on_ssd.add((op.layer, op.micro_batch))
    pairs: Counter[Kept] = Counter()
    nbytes: Counter[Kept] = Counter()
    every: Counter[str] = Counter()
    for op in schedule.steady.ops:
        if isinstance(op, Backward):
            every[op.layer_class] += 1
            if op.saved:
                pair = (op.layer, op.micro_batch)
                on_host = pair in moved or plan.decision.unified_memory
                tier: SavedTier = "ssd" if pair in on_ssd else "host" if on_host else "device"
                pairs[op.layer_class, op.rung, tier] += 1
                nbytes[op.layer_class, op.rung, tier] += op.saved.nbytes
    return pairs, nbytes, every


def kept_bytes(schedule: Schedule) -> Counter[Tier]:
    """Tier -> bytes of the places in which saved activations wait for their backward."""
    kept: Counter[Tier] = Counter()
    for buffer in schedule.buffers:
        if waits_in(buffer):
            kept[buffer.tier] += buffer.nbytes
    return kept


def waits_in(buffer: Buffer) -> bool:
    """Whether saved activations have their place there: not only on their way."""
    return buffer.role == Role.SAVED_ACTIVATIONS and not buffer.pool


def residency(kept: Counter[Tier]) -> Row:
    """The row of saved activations in the table of residency: their shares of all that is saved, and the bytes."""
    whole = kept.total()
    shares = (kept["host"] / whole, kept["ssd"] / whole, 0.0, 0.0)
    return ("", "saved activations", *map(percent, shares), amount(kept["host"]), amount(kept["ssd"]))


def on_device(kept: Counter[Tier]) -> list[str]:
    """A line on what the table has no column for."""
    nbytes = kept["device"]
    if not nbytes:
        return []
    return [f"  and {format_bytes(nbytes)} of saved activations, {percent(nbytes / kept.total())}, stay on the device"]
