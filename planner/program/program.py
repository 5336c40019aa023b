"""The program's answers: the best placement for one micro-batch size and number of micro-batches, or its bound alone.

Owns which objectives are asked for, and what was asked. `linear_program.py` states the program, `lexicographic.py`
takes its objectives in turn, and `placement.py` reads the point that is found.
"""

from dataclasses import dataclass, replace
from typing import Any

from ssdplan.plans.documents.plan import needs_all_gradients
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.documents.rates import updates_on_device

from .choices import FREE, Aim, FixedChoices, Limits, Question
from .forms import forms_of
from .lexicographic import Watch, minimise
from .linear_program import LinearProgram, Objective
from .placement import DIGITS, ProgramResult, result_of, seconds_at
from .stages import Work
from .variables import DELAY_RATIO, value

LEAST_WRITTEN = 4096.0
"""Bytes a step: fewer are a solver's noise, and none."""
NEGLIGIBLE = 1e-6
"""Of a step's least seconds: what a whole delay ratio may cost at most when one objective stands for two."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The program's optimum without the placement that reaches it."""

    seconds: float
    delay_ratio: float


def answer(
    model: Model, machine: Machine, question: Question, referee: Any = None, watch: Watch | None = None
) -> ProgramResult | None:
    """The best placement, or None when there is none. `referee`: one of PuLP's solvers beside HiGHS; `watch` is told of
    each linear program before it is solved: see `lexicographic.minimise`.

    Among placements of equal seconds it takes the one that writes least to ssd, then the smallest delay ratio, then the
    one that reads least. An aim puts another objective before the seconds, to learn the least that a limit could be.
    """
    program = state(model, machine, question)
    objectives = program.objectives()
    if question.aim == "seconds" and question.fixed.recompute == "auto" and program.forms.saved:
        program, objectives = _weighing_wear(model, machine, question, program)
    match question.aim:
        case "host memory":
            objectives.insert(0, program.host_memory())
        case "ssd space":
            objectives.insert(0, program.ssd_space())
        case "ssd writes":
            objectives.insert(0, program.ssd_writes())
    found = minimise(program, objectives, referee, watch)
    return result_of(question, program, found) if found else None


def _weighing_wear(
    model: Model, machine: Machine, question: Question, program: LinearProgram
) -> tuple[LinearProgram, list[Objective]]:
    """The program that writes more to ssd for the sake of saved activations only where that gains enough, and its
    objectives.

    Against the best placement that recomputes everything, each byte more counts as seconds, by
    `FixedChoices.wear_price`; and no step may be longer. Where that placement writes nothing, this one writes nothing.
    """
    everything = replace(question, fixed=replace(question.fixed, recompute="all"))
    without = state(model, machine, everything)
    found = minimise(without, [Objective("step_seconds", without.forms.seconds), without.ssd_writes()])
    if found is None:
        return program, program.objectives()
    seconds = without.forms.unit * value(without.forms.seconds, found)
    written = value(without.forms.write_bytes, found)
    if written <= LEAST_WRITTEN:
        limits = replace(question.limits, ssd_write_bytes=written)
        program = state(model, machine, replace(question, limits=limits))
        return program, program.objectives()
    program.require_seconds_at_most(seconds * (1 + NEGLIGIBLE))
    _, *rest = program.objectives()
    price = question.fixed.wear_price * seconds / written / program.forms.unit
    weighed = dict(program.forms.seconds)
    for variable, nbytes in program.forms.write_bytes.items():
        weighed[variable] = weighed.get(variable, 0.0) + price * nbytes
    return program, [Objective("step_seconds_and_wear", weighed), *rest]


def state(model: Model, machine: Machine, question: Question) -> LinearProgram:
    """The linear program of a question."""
    limits, fixed = question.limits, question.fixed
    work = Work(
        micro_batch_size=question.micro_batch_size,
        micro_batches=question.micro_batches,
        schedule=fixed.schedule,
        formats=fixed.formats,
        unified_memory=fixed.unified_memory,
        keeps=fixed.kept is not None or limits.device_bytes is not None or fixed.unified_memory,
        saves=fixed.saved_tiers(limits.device_bytes),
        zeroth_order=fixed.zeroth_order,
        updates_on_device=_updates_on_device(model, machine, limits, fixed),
        checkpoints_on_device=_checkpoints_on_device(limits, fixed),
        matrices_on_device=fixed.matrices_on_device,
        updates_wait=bool(needs_all_gradients(model.precision, fixed.clip_grad_norm)),
        ranks=fixed.shares,
    )
    return LinearProgram(forms_of(model, machine, work), limits, fixed)


def _updates_on_device(model: Model, machine: Machine, limits: Limits, fixed: FixedChoices) -> bool:
    """Whether the device may keep optimizer states: where the user has fixed what it keeps, as that says, and else
    where it may keep parameters and nobody has said where optimizer states live."""
    if fixed.schedule != "vertical" or fixed.unified_memory or not updates_on_device(model, machine, fixed.formats):
        return False
    if fixed.kept is not None:
        return any(shares.updated for shares in fixed.kept.values())
    return limits.device_bytes is not None and fixed.optimizer is None and fixed.updates_there


def _checkpoints_on_device(limits: Limits, fixed: FixedChoices) -> bool:
    """Whether the device may keep activation checkpoints."""
    if fixed.schedule != "vertical" or fixed.unified_memory:
        return False
    if fixed.checkpoints_device is None:
        return limits.device_bytes is not None and fixed.kept is None
    return fixed.checkpoints_device > 0.0


def solve_program(
    model: Model,
    machine: Machine,
    *,
    micro_batch_size: int,
    micro_batches: int,
    limits: Limits,
    fixed: FixedChoices = FREE,
    aim: Aim = "seconds",
) -> ProgramResult | None:
    """The best placement within `limits` that honours `fixed`, or None when there is none: see `answer`."""
    return answer(model, machine, Question(micro_batch_size, micro_batches, limits, fixed, aim))


def placed_seconds(model: Model, machine: Machine, result: ProgramResult) -> float:
    """The program's seconds of a step where the placement of `result` is kept, on whatever machine."""
    return seconds_at(state(model, machine, result.question), result)


def program_bound(
    model: Model,
    machine: Machine,
    *,
    micro_batch_size: int,
    micro_batches: int,
    limits: Limits,
    fixed: FixedChoices = FREE,
) -> Bound | None:
    """The optimum of `solve_program`, and about the least delay ratio that reaches it, for a fifth of the work."""
    program = state(model, machine, Question(micro_batch_size, micro_batches, limits, fixed))
    seconds = program.forms.seconds
    found = minimise(program, [Objective("step_seconds_and_delay_ratio", {**seconds, DELAY_RATIO: NEGLIGIBLE})])
    if found is None:
        return None
    return Bound(program.forms.unit * value(seconds, found), round(found[DELAY_RATIO], DIGITS))
