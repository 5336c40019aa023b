"""What a plan decides, in words: schedule, optimizer, batch, and what the device keeps (`plan_text.py`).

Owns those rows and nothing else.
"""

from ..documents.overlap import Overlap
from ..documents.plan import Decision, Plan, needs_all_gradients
from ..graph.ops import Schedule
from ..schedule.homes import device_tier
from . import saved_text
from .quantities import count, exact_percent, times
from .tables import facts, short

RECORD_BYTES, DIRECTION_BYTES = 32, 8
"""Of a step in the log: its number, its decay and a checksum; and the number along each direction."""


_BESIDE: dict[Overlap, str] = {
    "parameters": "the device has the next one's parameters, but not the last one's gradient, which leaves first",
    "none": "the device has nothing of other layers: parameters, inputs and gradients come and go in turn",
}


def decided(plan: Plan, schedule: Schedule) -> list[str]:
    """A row each."""
    decision = plan.decision
    n, size, length = decision.micro_batches, decision.micro_batch_size, decision.sequence_length
    alpha = exact_percent(decision.delay_ratio)
    delayed = f"{decision.delay_ratio:.10g}: {alpha} of each layer's update waits for the next step's forward"
    reason = needs_all_gradients(decision.precision, decision.clip_grad_norm)
    if not reason and all(each.optimizer_device == 1.0 for each in decision.placement.values() if not each.frozen):
        delayed = f"{decision.delay_ratio:.10g}, of no effect: the device updates each state in its own step"
    owns = "owns a share of every state" if decision.shares > 1 else "has all of every state"
    ranks = f"{decision.ranks}; all else here is of each of them, which {owns}"
    beside = "beside the next layer's backward" if decision.exchange_behind else "before the next layer's backward"
    there = "; the device updates all matrices" if decision.matrices_on_device else ""
    numbers = [
        *([("ranks", ranks)] if decision.ranks > 1 else []),
        *([("gradients exchanged", beside)] if decision.shares > 1 else []),
        ("precision", decision.precision),
        ("batch", f"{times(n, 'micro-batch', 'micro-batches')} of {times(size, 'sequence')} of {length:,} tokens"),
        ("", f"{decision.tokens:,} tokens a step{' of all ranks' if decision.ranks > 1 else ''}"),
    ]
    by_gradients = [
        ("schedule", f"{decision.schedule}, backward recomputes {decision.recompute} of a layer's forward"),
        *saved_text.decided(plan, schedule),
        ("optimizer", f"{decision.optimizer}, states in {decision.optimizer_states}{there}"),
        *_changed_numbers(decision),
        *([("clipping", f"the gradients' norm to {decision.clip_grad_norm:.10g}")] if decision.clip_grad_norm else []),
        *numbers,
        ("delay ratio, alpha", delayed if decision.delay_ratio else "0: every update runs in its own step"),
        *([("", reason)] if reason else []),
        *_checkpoints(decision),
    ]
    if decision.overlap != "all":
        by_gradients.append(("beside a layer", _BESIDE[decision.overlap]))
    chunks = f"at most {decision.update_chunk_elements:,} elements at once, {decision.update_lookahead} ahead"
    without = decision.zeroth_order is not None
    return facts(
        *([*_without_gradients(plan), *numbers] if without else by_gradients),
        *([("memory", "unified: compute works on host memory itself")] if decision.unified_memory else []),
        *_kept(f"parameters on {device_tier(decision)}", decision, "parameters_device", "for the whole run"),
        *_kept("and across the turn", decision, "parameters_turn", "from forward to backward"),
        *_kept("updated on device", decision, "optimizer_device", "with their optimizer states"),
        *([] if without else [("update", chunks)]),
    )


def _changed_numbers(decision: Decision) -> list[tuple[str, str]]:
    """What formats of optimizer states do to the numbers that are trained."""
    moments: dict[str, str] = {
        "bf16": "both moments rounded to bf16: numbers differ from fp32 moments",
        "int8": "both moments rounded to 8 bits: numbers differ from fp32 moments",
    }
    masters: dict[str, str] = {
        "residual": "residual: nothing is lost, but ties away from zero change numbers",
        "none": "none: bf16 weights are updated; numbers differ from fp32 masters",
    }
    found = [("", moments[decision.optimizer_states])] if decision.optimizer_states in moments else []
    return [*found, *([("masters", masters[decision.masters])] if decision.masters in masters else [])]


def _checkpoints(decision: Decision) -> list[tuple[str, str]]:
    """Where blocks' inputs wait for their backwards."""
    there = decision.checkpoint_device
    rows = [("checkpoints on device", f"{exact_percent(there)} of the blocks'")] if there else []
    if there < 1.0:
        of = " of the others" if there else ""
        rows.append(("checkpoints on host", exact_percent(decision.checkpoint_host) + of))
    return rows


def _kept(words: str, decision: Decision, field: str, when: str) -> list[tuple[str, str]]:
    """A line on what of each class's parameters the device keeps, if it keeps any."""
    shares = [(name, getattr(placement, field)) for name, placement in decision.placement.items()]
    kept = ", ".join(f"{short(name, 14)} {exact_percent(share)}" for name, share in shares if share)
    return [(words, f"{kept} of the states, {when}")] if kept else []


def _without_gradients(plan: Plan) -> list[tuple[str, str]]:
    """The rows on schedule and optimizer, in place of those of training by gradients."""
    zeroth_order = plan.decision.zeroth_order
    assert zeroth_order is not None
    every, directions, masters = zeroth_order.written_every, zeroth_order.directions, zeroth_order.masters
    pieces = zeroth_order.piece_elements
    copies = "take turns in one place: less memory, and each direction is drawn twice"
    return [
        ("schedule", "zeroth-order: forwards alone, two along each direction, layer by layer"),
        ("optimizer", f"mezo, {times(directions, 'random direction')} a step; no gradients, no states"),
        *([("masters", f"fp32; a copy's numbers are rounded to {plan.decision.precision}")] if masters else []),
        ("perturbed copies", copies if zeroth_order.in_turns else "both are there at once, made in one pass"),
        *([("on their way", f"in pieces of {count(pieces)} parameters, not whole states")] if pieces else []),
        *([("token embeddings", _rows(plan))] if zeroth_order.by_rows else []),
        ("parameters", f"go back to where they live every {every} steps" if every > 1 else "go back in each step"),
    ]


def _rows(plan: Plan) -> str:
    """Of the table that comes by rows."""
    table = next(state.table for state in plan.model.states if state.table)
    most = table.most_elements(plan.decision.rank_tokens) // table.row_elements
    return f"by rows: at most {count(most)} of {count(table.rows)} come; host updates the table where it lives"


def resuming(plan: Plan) -> str:
    """What a run keeps so that it can go on."""
    assert plan.decision.zeroth_order is not None
    nbytes = RECORD_BYTES + DIRECTION_BYTES * plan.decision.zeroth_order.directions
    return f"a log of {nbytes} bytes a step, which with the first weights is the state"
