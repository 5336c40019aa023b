"""Solve: finds the best plan that fits, from a profile and what the user wants.

Owns how a search's finding becomes a plan, and when a zeroth-order plan writes. The search is `search.py`'s, the words
in which a plan is justified those of `explain/`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ssdplan.plans.documents.plan import Asked, Compared, Plan, Prediction
from ssdplan.plans.documents.profile import Machine, Model, Profile
from ssdplan.plans.documents.rates import rows_rates
from ssdplan.plans.documents.state_layout import GRAIN
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.errors import InfeasibleError, UsageError
from ssdplan.plans.gc_pause import no_collection
from ssdplan.plans.graph.ops import Schedule

from .explain import zeroth_order
from .explain.alternatives import compare
from .explain.reasons import explain, gather
from .explain.sensitivity import sensitivities
from .fit.budgets import ROOMS, Needs, Room
from .fit.fit import Fitter
from .fit.prediction import prediction_of
from .program.choices import KEPT_NOTHING, WEAR_PRICE, FixedChoices
from .program.lexicographic import Watch
from .program.placement import ProgramResult
from .program.program import answer
from .program.solvers import solver_of
from .ranked import ENOUGH, WORTH, Simulated
from .refusal import refusal
from .request import (
    SolveRequest,
    allowed,
    budget_of,
    candidates_of,
    fixed_choices,
    given_in,
    least_of,
    matrices_on_device,
    require_network,
    require_optimizer,
    require_rates,
    require_updates,
)
from .search import Found, Search

WRITTEN_EVERY = (1, 2, 4, 8, 16, 32, 64)
"""Steps from one write of a zeroth-order plan's parameters to the next, of which one is chosen."""
_Tried = tuple[Search, Found, tuple[tuple[int, float], ...]]
"""A search, what it found, and the steps from one write of parameters to the next -> seconds of a step."""
Told = Literal["all", "screen", "step"]
"""Of a plan: everything that is known of it; what a first screen tells, so no other batches, ways and reasons; or the
decision and its prediction alone. To find out the rest takes about as long as the plan, which is the same."""
LEAST_TOLD: Mapping[Told, tuple[Room, ...]] = {"all": ROOMS, "screen": ("host memory",), "step": ()}
"""The budgets whose least is told."""
PIECES, LEAST_PIECE = 32, 1 << 18
"""Of the largest state, where parameters come in pieces; and the elements that a piece has at least."""


def solve(profile: Profile, request: SolveRequest, *, compared: bool = True, told: Told = "all") -> Plan:
    """The plan with the smallest global batch that reaches 99% of the best throughput, or the best for a given batch.

    `compared`: with its `comparison`; `told`: how much of it. Raises UsageError for a request that names what was not
    measured or cannot be, and InfeasibleError, naming the constraint and the least budget that would do, when nothing
    fits.
    """
    return solve_and_build(profile, request, compared=compared, told=told)[0]


@no_collection()
def solve_and_build(
    profile: Profile,
    request: SolveRequest,
    *,
    compared: bool = True,
    watch: Watch | None = None,
    told: Told = "all",
) -> tuple[Plan, Schedule]:
    """What `solve` finds, and the schedule that its decision expands into, which had to be built to find it.

    `watch` is told of the linear programs that decided the plan, each before it is solved again.
    """
    model, machine = allowed(profile.model, request), profile.machine
    referee = None if request.solver is None else solver_of(request.solver)
    require_optimizer(model, request)
    budget, fixed = budget_of(machine, request), fixed_choices(model, request)
    fixed = replace(fixed, matrices_on_device=matrices_on_device(model, machine, fixed))
    if request.zeroth_order:
        require_rates(machine)
    require_updates(machine, request, fixed.formats)
    require_network(machine, request.ranks)
    search, found, tried = _searched(model, machine, request, budget, fixed)
    chosen = found.chosen
    _decide_again(model, machine, chosen.solved.program, referee, watch)
    prediction = prediction_of(chosen.solved, chosen.timeline, chosen.tokens_per_second, model, machine, chosen.seconds)
    plan = Plan(
        schema="ssdplan.plan/1",
        profile_sha256=profile.sha256(),
        model=model,
        machine=machine,
        asked=Asked(
            delay_ratio=request.delay_ratio,
            residency=dict(request.residency),
            max_ssd_write_bytes=request.max_ssd_write_bytes,
            recompute=None if request.recompute == "auto" else request.recompute,
            wear_price=None if request.wear_price == WEAR_PRICE else request.wear_price,
            activations=request.activations,
        ),
        decision=chosen.solved.fitted.decision,
        prediction=prediction,
        alternatives=search.alternatives(found) if told == "all" else (),
        sensitivity=sensitivities(search.fitter, chosen.solved, prediction) if told != "step" else (),
        least=search.least(chosen, LEAST_TOLD[told]),
        comparison=_compared(model, machine, request, budget, search, chosen, prediction)
        if compared and told == "all"
        else (),
    )
    if told != "all":
        return plan, chosen.solved.fitted.schedule
    evidence = gather(search.fitter, chosen.solved, chosen.timeline, given_in(request), tried)
    return plan.model_copy(update={"reasons": explain(plan, evidence)}), chosen.solved.fitted.schedule


def _searched(model: Model, machine: Machine, request: SolveRequest, budget: Needs, fixed: FixedChoices) -> _Tried:
    """The search that found the plan, what it found, and, of a zeroth-order plan, the steps from one write of
    parameters to the next that were tried -> seconds of a step. Raises InfeasibleError."""
    candidates = candidates_of(model, request)
    between = request.micro_batches is None and request.global_batch is None and request.schedule != "single"
    ways, by_rows = _ways(model, fixed), _ways_by_rows(model, machine, fixed)
    leaner: list[tuple[Search, Found]] = []
    for number, way in enumerate((*ways, *by_rows)):
        if leaner and number in (1, len(ways)):
            break
        search = Search(model, machine, Fitter(model, machine, budget, way))
        of_batches = search.recomputing_everything()
        found = of_batches.find(candidates, between=between)
        if found is None:
            continue
        if of_batches is not search:
            found = replace(found, chosen=search.saving.save(found.chosen, found.scan))
        if not fixed.zeroth_order:
            found = replace(found, chosen=search.saving.settle(found.chosen, candidates if between else ()))
        leaner.append((search, found))
    if not leaner:
        raise refusal(of_batches.fitter, least_of(candidates), _without_gradients(model, machine, request, budget))
    search, found = max(leaner, key=lambda way: way[1].chosen.tokens_per_second)
    if not fixed.zeroth_order:
        return search, found, ()
    best = _written_as_often_as_pays(search, found)
    for way in by_rows if not best[1].chosen.by_rows else ():
        assert way.zeroth_order is not None
        other = search.estimating(way.zeroth_order)
        candidate = found.chosen.solved.fitted.candidate
        chosen = other.trials.simulate(candidate, other.fitter.branches(candidate))
        if chosen is None:
            continue
        tried = _written_as_often_as_pays(other, replace(found, chosen=chosen))
        if tried[1].chosen.seconds * (1 + WORTH) < best[1].chosen.seconds:
            best = tried
        if way is by_rows[0]:
            break
    return best


def _without_gradients(model: Model, machine: Machine, request: SolveRequest, budget: Needs) -> Fitter | None:
    """Of the plans without gradients that take the least memory; None where those are what was asked for already, or
    what else was asked for rules them out."""
    if request.zeroth_order:
        return None
    try:
        require_rates(machine)
        fixed = fixed_choices(model, replace(request, zeroth_order=ZerothOrder()))
    except UsageError:
        return None
    return Fitter(model, machine, budget, _ways(model, fixed)[-1])


def _ways(model: Model, fixed: FixedChoices) -> list[FixedChoices]:
    """What is fixed, and where a zeroth-order plan needs less memory than that takes: copies that take turns, whose
    directions are drawn twice, and pieces, whose coming is hidden in part, and which come once for each copy that has
    its turn."""
    zeroth_order = fixed.zeroth_order
    if zeroth_order is None:
        return [fixed]
    pieces = piece_elements(model)
    others: list[dict[str, int]] = [
        {"in_turns": True},
        {"piece_elements": pieces},
        {"in_turns": True, "piece_elements": pieces},
    ]
    return [fixed, *(replace(fixed, zeroth_order=zeroth_order.model_copy(update=other)) for other in others)]


def _ways_by_rows(model: Model, machine: Machine, fixed: FixedChoices) -> list[FixedChoices]:
    """The same where the table of token embeddings comes by rows; none where it cannot, or the user has said that it
    lives elsewhere than on host."""
    if not fixed.zeroth_order or model.table is None or fixed.unified_memory or rows_rates(machine) is None:
        return []
    own = model.states[model.table].state_class
    if fixed.parameters not in (None, 1.0) or (fixed.kept and fixed.kept.get(own, KEPT_NOTHING).device):
        return []
    ways = ((way, way.zeroth_order) for way in _ways(model, fixed))
    return [replace(way, zeroth_order=of.model_copy(update={"by_rows": True})) for way, of in ways if of]


def piece_elements(model: Model) -> int:
    """Of a piece, where parameters come in pieces."""
    largest = max(state.elements for state in model.states if not state.frozen)
    return max(-(-largest // (PIECES * GRAIN)), LEAST_PIECE // GRAIN) * GRAIN


def _written_as_often_as_pays(search: Search, first: Found) -> _Tried:
    """The same batch where parameters go back to where they live every 1, 2, 4 ... steps: the fewest writes of those
    whose steps are about as short as the shortest."""
    candidate, zeroth_order = first.chosen.solved.fitted.candidate, search.fitter.fixed.zeroth_order
    assert zeroth_order is not None
    found = {1: (search, first.chosen)}
    for every in WRITTEN_EVERY[1:]:
        other = search.estimating(zeroth_order.model_copy(update={"written_every": every}))
        chosen = other.trials.simulate(candidate, other.fitter.branches(candidate))
        if chosen is None or not (chosen.writes or found[1][1].writes):
            break
        found[every] = other, chosen
        if chosen.seconds > 1.1 * min(each.seconds for _, each in found.values()):
            break
    shortest = min(chosen.seconds for _, chosen in found.values())
    every = max(every for every, (_, chosen) in found.items() if chosen.seconds <= shortest / ENOUGH)
    best, chosen = found[every]
    return best, replace(first, chosen=chosen), tuple((k, chosen.seconds) for k, (_, chosen) in found.items())


def _compared(
    model: Model,
    machine: Machine,
    request: SolveRequest,
    budget: Needs,
    search: Search,
    chosen: Simulated,
    prediction: Prediction,
) -> tuple[Compared, ...]:
    """The plan's batch trained in other ways; a zeroth-order plan beside the best one by gradients."""
    if not request.zeroth_order:
        return compare(search.fitter, chosen.solved, prediction)
    by_gradients = replace(request, zeroth_order=None, residency={})
    first_order, why_not = None, ""
    try:
        _, found, _ = _searched(model, machine, by_gradients, budget, fixed_choices(model, by_gradients))
        best = found.chosen
        first_order = prediction_of(best.solved, best.timeline, best.tokens_per_second, model, machine)
    except InfeasibleError as error:
        why_not = str(error).removeprefix("no plan fits: ")
    return tuple(zeroth_order.rows(chosen.solved.fitted.decision, prediction, first_order, why_not))


def _decide_again(model: Model, machine: Machine, program: ProgramResult, referee: Any, watch: Watch | None) -> None:
    """Solve the programs that decided the plan again where somebody watches, or another solver must find the same.

    The search ranks hundreds of neighbours by HiGHS alone. Raises UsageError where the two do not agree.
    """
    if referee is not None or watch is not None:
        again = answer(model, machine, program.question, referee, watch)
        assert again == program, "the same program has another placement"
