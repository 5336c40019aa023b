"""Decided: the decision that an answer of the program stands for.

Owns how choices, budgets and a pace become a `Decision`, and which decision shows what a pipeline takes. How much that
is, others find out.
"""

from dataclasses import replace

from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Machine, Model

from ..program.choices import FixedChoices, KeptShares, Limits
from ..program.placement import ProgramResult
from ..program.program import solve_program
from .budgets import UNLIMITED, Candidate, Needs
from .pace import Pace


def decision_of(
    model: Model, budget: Needs, fixed: FixedChoices, candidate: Candidate, program: ProgramResult, pace: Pace
) -> Decision:
    """What is to be done by what a program found for a candidate, within `budget` and by what is fixed."""
    return Decision(
        schedule=fixed.schedule,
        optimizer="mezo" if fixed.zeroth_order else "muon" if model.muon else "adamw",
        zeroth_order=fixed.zeroth_order,
        optimizer_states=fixed.formats.moments,
        masters=fixed.formats.masters,
        clip_grad_norm=fixed.clip_grad_norm,
        precision=model.precision,
        micro_batch_size=candidate.micro_batch_size,
        micro_batches=candidate.micro_batches,
        sequence_length=model.sequence_length,
        delay_ratio=program.delay_ratio,
        placement=program.placement,
        checkpoint_host=program.checkpoint_host,
        checkpoint_device=program.checkpoint_device,
        recompute="part" if program.saved else "all",
        saved=program.saved,
        update_chunk_elements=pace.chunk_elements,
        update_lookahead=pace.lookahead,
        host_budget_bytes=budget.host,
        device_budget_bytes=budget.device,
        unified_memory=fixed.unified_memory,
        ranks=fixed.ranks,
        matrices_on_device=True if fixed.matrices_on_device else None,
        exchange_behind=pace.behind and fixed.schedule == "vertical",
        overlap=pace.overlap,
    )


def spilled(
    model: Model,
    machine: Machine,
    budget: Needs,
    fixed: FixedChoices,
    pace: Pace,
    micro_batch_size: int,
    n: int,
    checkpoint_host: float,
    there: tuple[str, ...],
) -> Decision:
    """Everything on ssd, but for a fraction of the activation checkpoints, and classes `there` that the device keeps
    and updates."""
    choices = replace(fixed, parameters=0.0, optimizer=0.0, checkpoints=checkpoint_host)
    choices = replace(choices, delay_ratio=0.0, recompute="all")
    if there:
        choices = replace(choices, kept=dict.fromkeys(there, KeptShares(1.0, 0.0, 1.0)), checkpoints_device=0.0)
    limits = Limits(UNLIMITED)
    program = solve_program(
        model, machine, micro_batch_size=micro_batch_size, micro_batches=n, limits=limits, fixed=choices
    )
    assert program is not None, "no limit, and still no placement"
    return decision_of(model, budget, fixed, Candidate(micro_batch_size, n), program, pace)
