"""Requests: checks what the user asks of a search; says what that fixes, and which candidates it leaves.

Owns the words in which a request that cannot be meant is refused. It searches nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from ssdplan.plans.analysis.sublayers import blocks_with_backward
from ssdplan.plans.documents.matrices import seconds_of, unfit_muon
from ssdplan.plans.documents.plan import (
    MOST_RANKS,
    Recompute,
    ScheduleName,
    most_micro_batches,
    needs_all_gradients,
)
from ssdplan.plans.documents.profile import PAPER, Machine, Model
from ssdplan.plans.documents.rates import updates_on_device
from ssdplan.plans.documents.state_layout import (
    OPTIMIZER_FORMATS,
    Masters,
    OptimizerFormats,
    OptimizerStates,
    unfit_masters,
)
from ssdplan.plans.documents.stripe_shares import room
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.errors import UsageError
from ssdplan.plans.units import format_enough, format_there

from .fit.budgets import UNLIMITED, Candidate, Needs
from .program.choices import WEAR_PRICE, FixedChoices, KeptShares

MOST_MICRO_BATCHES = 64
LADDER = (*range(1, 17), 18, 20, 22, 24, 28, 32, 36, 40, 48, 56, MOST_MICRO_BATCHES)
"""Numbers of micro-batches that are tried first; the search then looks between the two that matter."""
RESIDENCIES = ("parameters", "optimizer", "checkpoints", "device", "turn", "updates", "inputs")


@dataclass(frozen=True, slots=True)
class SolveRequest:
    """What the user wants; None leaves it to the search."""

    host_memory_bytes: int
    device_memory_bytes: int | None = None
    """None: what the machine has."""
    global_batch: int | None = None
    micro_batch_size: int | None = None
    micro_batches: int | None = None
    delay_ratio: float | None = None
    residency: Mapping[str, float] = field(default_factory=dict)
    """parameters, optimizer, checkpoints -> the fraction on host; device, turn -> the fraction of states whose
    parameters stay on the device for the whole run, or (of blocks) across the turn; updates -> the fraction of states
    that the device updates, whose parameters and optimizer states both stay there; inputs -> the fraction of blocks
    whose activation checkpoints stay there."""
    max_ssd_write_bytes: int | None = None
    """Written a step."""
    schedule: Literal["vertical", "horizontal", "single"] = "vertical"
    """horizontal: one micro-batch through all layers before the next; single: one micro-batch, the whole batch."""
    optimizer_states: OptimizerStates = "fp32"
    masters: Masters = "fp32"
    clip_grad_norm: float | None = None
    unified_memory: bool = False
    """Compute works on host memory, as it can where it runs on the same cores; there is no device memory then."""
    recompute: Recompute = "auto"
    wear_price: float = WEAR_PRICE
    """What activations that go to ssd must gain: in proportion to the step's seconds, for twice the bytes written."""
    activations: Literal["int8"] | None = None
    """A format that saved activations may have beside their own, in which training is not exact."""
    ranks: int = 1
    """Processes that train together. Budgets, micro-batches and all figures are of one of them; the global batch is of
    all."""
    optimizer: Literal["adamw", "muon"] | None = None
    """Of training by gradients. None: that which the profile was made for."""
    zeroth_order: ZerothOrder | None = None
    """Train without gradients (`--optimizer mezo`), along so many random directions a step. Whether the perturbed
    copies take turns, and how often parameters are written, is for the search."""
    solver: str | None = None
    """One of PuLP's solvers by name, which solves the programs that decide the plan too, and must find the same optima.
    None: HiGHS alone. It changes no plan."""


def budget_of(machine: Machine, request: SolveRequest) -> Needs:
    """What a plan may take. Raises UsageError for unified memory where the device has its own, and for more memory than
    a card or the measured machine has."""
    device = _device_budget(machine, request)
    _require_there(machine, request.host_memory_bytes, device)
    return Needs(
        host=request.host_memory_bytes,
        device=device,
        ssd=room(machine.volumes),
        writes=UNLIMITED if request.max_ssd_write_bytes is None else request.max_ssd_write_bytes,
    )


def _device_budget(machine: Machine, request: SolveRequest) -> int:
    if request.unified_memory:
        if not machine.compute_shares_cpu:
            raise UsageError(f"unified memory: {machine.device_name} has a memory of its own")
        if request.device_memory_bytes is not None:
            raise UsageError("unified memory: there is no device memory to limit")
        return 0
    asked, there = request.device_memory_bytes, machine.device_memory_bytes
    if asked is not None and asked > there and not machine.compute_shares_cpu:
        raise UsageError(
            f"device memory of {format_enough(asked)}: {machine.device_name} has {format_there(there)} for a plan; ask "
            "for less, or leave it out"
        )
    return there if asked is None else asked


def _require_there(machine: Machine, host: int, device: int) -> None:
    """Raise UsageError for budgets that the measured machine could never give. An estimated machine has what is asked
    for; a card bounds its own memory, and only an emulated device takes DRAM."""
    there, emulated = machine.host_memory_bytes, device if machine.compute_shares_cpu else 0
    if machine.figures != "measured" or host + emulated <= there:
        return
    if host > there:
        asked = f"host memory of {format_enough(host)}"
    elif emulated > there:
        asked = f"device memory of {format_enough(emulated)}, emulated in DRAM"
    else:
        asked = f"host memory of {format_enough(host)} and device memory of {format_enough(emulated)}, emulated in DRAM"
    raise UsageError(
        f"{asked}: the profiled machine has {format_there(there)} in all; ask for less, or plan for another machine by "
        "a what-if: --model NAME --gpu NAME --ssd NAME, without a profile"
    )


def beyond_available(machine: Machine, request: SolveRequest) -> str:
    """In words, that the budgets are more than the measured machine had available; empty where they are not."""
    device = _device_budget(machine, request) if machine.compute_shares_cpu else 0
    asked, there = request.host_memory_bytes + device, machine.host_available_bytes
    if machine.figures != "measured" or asked <= there:
        return ""
    budgets = "host and device memory" if device else "host memory"
    return (
        f"{budgets} of {format_enough(asked)} is more than the {format_there(there)} that were available when the "
        "machine was profiled"
    )


def require_network(machine: Machine, ranks: int) -> None:
    """Raise UsageError where nobody measured what so many ranks exchange."""
    network = machine.network
    if ranks > 1 and (network is None or network.ranks != ranks):
        measured = f"{network.ranks} ranks" if network else "one rank"
        raise UsageError(
            f"ranks = {ranks}: the profile is of {measured}; make one with ssdplan profile --ranks {ranks}"
        )


def require_updates(machine: Machine, request: SolveRequest, formats: OptimizerFormats) -> None:
    """Raise UsageError where nobody measured how fast updates of these formats are, or the device makes none."""
    if formats.moments == "int8" and machine.device == "cuda" and request.residency.get("updates"):
        raise UsageError("residency updates: a GPU updates no moments in int8; leave it out, or take fp32 or bf16")
    if formats.moments == "int8" and machine.update_rate_int8 is None:
        raise UsageError(
            "optimizer states int8: the profile says nothing of updates with them; make a new one with ssdplan profile"
        )


def require_optimizer(model: Model, request: SolveRequest) -> None:
    """Raise UsageError where the profile was made for another optimizer, which lays states out otherwise, or what is
    asked for cannot be by Muon."""
    wanted = "mezo" if request.zeroth_order else request.optimizer
    if wanted and (wanted == "muon") != model.muon:
        made = "muon" if model.muon else "adamw"
        other = "muon" if wanted == "muon" else "adamw"
        raise UsageError(
            f"optimizer {wanted}: the profile was made for {made}, whose states are others; make one with ssdplan "
            f"profile --optimizer {other}"
        )
    if model.muon and (why := unfit_muon(request.optimizer_states, request.ranks)):
        instead = "leave --optimizer out" if model.figures == "estimated" else "make a profile for adamw"
        raise UsageError(f"{why}, or {instead}")


def matrices_on_device(model: Model, machine: Machine, fixed: FixedChoices) -> bool:
    """Whether the device is to update all matrices, those too whose states live elsewhere: where it can, and takes less
    than half of the time. One place for all, since host and device may round their products otherwise."""
    may = fixed.schedule == "vertical" and not fixed.unified_memory and fixed.formats.masters == "fp32"
    if not (model.muon and may and updates_on_device(model, machine, fixed.formats)):
        return False
    every = [matrix for state in model.states for matrix in state.matrices]
    host, device = (seconds_of(model.matrix_updates, every, on_device=there) or 0.0 for there in (False, True))
    return device < host / 2


def require_rates(machine: Machine) -> None:
    """Raise UsageError where nobody measured how fast zeroth-order passes are."""
    if machine.perturb_rate is None or machine.pending_rate is None:
        raise UsageError(
            "optimizer mezo: the profile says nothing of zeroth-order passes; make a new one with ssdplan profile"
        )


def _require_zeroth_order(request: SolveRequest) -> None:
    """Raise UsageError for what gradients alone give a meaning."""
    meaningless = {
        "clip grad norm": request.clip_grad_norm is not None,
        "delay ratio": request.delay_ratio is not None,
        "optimizer states": request.optimizer_states != "fp32",
        "masters": request.masters != "fp32",
        "recompute": request.recompute != "auto",
        "activations": request.activations is not None,
        f"schedule {request.schedule}": request.schedule != "vertical",
        **{
            f"residency {name}": name in request.residency
            for name in ("optimizer", "checkpoints", "turn", "updates", "inputs")
        },
    }
    for name, given in meaningless.items():
        if given:
            raise UsageError(
                f"{name}: optimizer mezo has no gradients, no optimizer states and nothing to recompute; leave it out"
            )


def fixed_choices(model: Model, request: SolveRequest) -> FixedChoices:
    """What the program may not choose any more. Raises UsageError for figures and names that cannot be meant."""
    if request.zeroth_order:
        _require_zeroth_order(request)
    unknown = sorted(set(request.residency) - set(RESIDENCIES))
    if unknown:
        raise UsageError(f"residency: no {unknown[0]!r}; it takes {', '.join(RESIDENCIES)}")
    if request.unified_memory and "device" in request.residency:
        raise UsageError("residency device: compute works on host memory here; say parameters")
    if request.unified_memory and "updates" in request.residency:
        raise UsageError("residency updates: compute works on host memory here, where all updates are; say optimizer")
    if request.unified_memory and "inputs" in request.residency:
        raise UsageError("residency inputs: compute works on host memory here; say checkpoints")
    given = {"delay ratio": request.delay_ratio, **{f"residency {k}": v for k, v in request.residency.items()}}
    for name, fraction in given.items():
        if fraction is not None and not 0.0 <= fraction <= 1.0:
            raise UsageError(f"{name} = {fraction:g}: a fraction is from 0 to 1")
    sizes = {
        "host memory": request.host_memory_bytes,
        "device memory": request.device_memory_bytes,
        "global batch": request.global_batch,
        "micro-batches": request.micro_batches,
    }
    for name, number in sizes.items():
        if number is not None and number < 1:
            raise UsageError(f"{name} = {number}: must be positive")
    if request.clip_grad_norm is not None and not 0.0 < request.clip_grad_norm < inf:
        raise UsageError(f"clip grad norm = {request.clip_grad_norm:g}: must be positive")
    if why := unfit_masters(request.masters, model.precision):
        raise UsageError(why)
    _require_ranks(request)
    delay_ratio = 0.0 if request.zeroth_order else request.delay_ratio
    if request.zeroth_order:
        pass  # there are no gradients to wait for
    elif reason := needs_all_gradients(model.precision, request.clip_grad_norm):
        if delay_ratio not in (None, 1.0):
            raise UsageError(f"delay ratio = {delay_ratio:g}: it can only be 1, for {reason}")
        if request.schedule == "horizontal":
            raise UsageError(f"schedule horizontal delays no update; vertical or single do, for {reason}")
        delay_ratio = 1.0
    if request.schedule == "horizontal":
        if delay_ratio not in (None, 0.0):
            raise UsageError(f"delay ratio = {delay_ratio:g}: with schedule horizontal it can only be 0")
        if turn := request.residency.get("turn"):
            raise UsageError(f"residency turn={turn:g}: with schedule horizontal it can only be 0; say device")
        if updates := request.residency.get("updates"):
            raise UsageError(f"residency updates={updates:g}: with schedule horizontal it can only be 0")
        if inputs := request.residency.get("inputs"):
            raise UsageError(f"residency inputs={inputs:g}: with schedule horizontal it can only be 0")
        delay_ratio = 0.0
    residency = dict(request.residency)
    if request.unified_memory and "parameters" in residency:
        residency["device"] = residency.pop("parameters")  # by whole states, as a device keeps them
    return FixedChoices(
        delay_ratio=delay_ratio,
        parameters=residency.get("parameters"),
        optimizer=residency.get("optimizer"),
        checkpoints=1.0 if request.zeroth_order else residency.get("checkpoints"),
        checkpoints_device=_inputs(model, residency),
        formats=OPTIMIZER_FORMATS[request.masters, request.optimizer_states],
        clip_grad_norm=request.clip_grad_norm,
        kept=_kept(model, residency),
        schedule=_schedule(request),
        zeroth_order=request.zeroth_order,
        ranks=request.ranks,
        unified_memory=request.unified_memory,
        recompute="all" if request.zeroth_order else _recompute(model, request),
        wear_price=request.wear_price,
    )


def _require_ranks(request: SolveRequest) -> None:
    """Raise UsageError for a number of ranks that nothing can have."""
    if not 1 <= request.ranks <= MOST_RANKS:
        raise UsageError(f"ranks = {request.ranks}: from 1 to {MOST_RANKS}")


def _schedule(request: SolveRequest) -> ScheduleName:
    if request.zeroth_order:
        return "zeroth-order"
    return "horizontal" if request.schedule == "horizontal" else "vertical"


def allowed(model: Model, request: SolveRequest) -> Model:
    """The model without the rungs that the user does not allow: those that are not exact. Raises UsageError where int8
    is allowed and nobody measured it."""
    wanted: tuple[str | None, ...] = (None, request.activations)
    there = {rung.format for entry in model.classes for timing in entry.timings for rung in timing.rungs}
    if there <= set(wanted) and (request.activations in there or not request.activations):
        return model
    if request.activations not in there and request.activations:
        raise UsageError(
            f"activations {request.activations}: the profile has no rungs in {request.activations}; make one with "
            "ssdplan profile --compression-error"
        )
    classes = tuple(
        entry.model_copy(
            update={
                "timings": tuple(
                    timing.model_copy(update={"rungs": tuple(rung for rung in timing.rungs if rung.format in wanted)})
                    for timing in entry.timings
                )
            }
        )
        for entry in model.classes
    )
    return model.model_copy(
        update={"classes": classes, "compression": model.compression if request.activations else ()}
    )


def _recompute(model: Model, request: SolveRequest) -> Recompute:
    """Raises UsageError where it needs rungs that nobody measured."""
    if not 0.0 <= request.wear_price < inf:
        raise UsageError(f"wear price = {request.wear_price:g}: must not be negative")
    wanted = request.recompute
    if wanted in ("none", "paper"):
        chosen = request.micro_batch_size
        sizes = (chosen,) if chosen in model.micro_batch_sizes else model.micro_batch_sizes
        for name in blocks_with_backward(model):
            rungs = [rung.name for size in sizes for rung in model.timing(name, size).rungs]
            if (wanted == "none" and not rungs) or (wanted == "paper" and PAPER not in rungs):
                raise UsageError(
                    f"recompute {wanted}: the profile has no rung for it of {name}; profile again, or leave it out"
                )
    return wanted


def _inputs(model: Model, residency: Mapping[str, float]) -> float | None:
    """The fraction of blocks whose activation checkpoints the user wants on the device; None leaves it to the
    search, unless the user has said where they are outside of it."""
    if "inputs" not in residency:
        return 0.0 if "checkpoints" in residency else None
    blocks = len(model.trained_blocks)
    return round(residency["inputs"] * blocks) / blocks if blocks else 0.0


def _kept(model: Model, residency: Mapping[str, float]) -> dict[str, KeptShares] | None:
    """What the user wants the device to keep, as whole states of each class; nothing where the user has said where all
    parameters live outside of it; None leaves it to the search."""
    if not {"device", "turn", "updates"} & set(residency):
        return {} if "parameters" in residency else None
    turn, updates = (residency.get(name, 0.0) for name in ("turn", "updates"))
    device = residency.get("device", updates)
    if device + turn > 1.0:
        raise UsageError(f"residency device={device:g},turn={turn:g}: more than all parameters")
    if updates > device:
        raise UsageError(
            f"residency device={device:g},updates={updates:g}: the device updates only what it keeps the parameters of"
        )
    first = max(model.first_trained, 1)
    blocks = {model.states[index].state_class for layer in model.layers[first:-1] for index in layer.states}
    frozen = {state.state_class for state in model.states if state.frozen}
    kept = {}
    for name, count in Counter(state.state_class for state in model.states).items():
        whole = round(device * count)
        across = min(round(turn * count), count - whole) if name in blocks else 0
        updated = 0 if name in frozen else min(round(updates * count), whole)
        kept[name] = KeptShares(whole / count, across / count, updated / count)
    return kept


def given_in(request: SolveRequest) -> set[str]:
    """What the search did not decide, in the words of `reasons`."""
    asked = {
        "batch": request.global_batch or request.micro_batches or request.schedule == "single",
        "delay ratio": request.delay_ratio is not None,
        "residency": request.residency,
    }
    return {name for name, value in asked.items() if value}


def candidates_of(model: Model, request: SolveRequest) -> list[Candidate]:
    """Every pair that the request allows, smallest batch first. Raises UsageError when there is none."""
    there = sorted(model.micro_batch_sizes)
    names = ", ".join(map(str, there))
    estimated = model.figures == "estimated"
    sizes = there if request.micro_batch_size is None else [request.micro_batch_size]
    if not set(sizes) <= set(there):
        raise UsageError(
            f"micro-batch size {sizes[0]} is not one of --micro-batch-sizes ({names})"
            if estimated
            else f"micro-batch size {sizes[0]} was not profiled; the profile has {names}"
        )
    n = request.micro_batches
    most = most_micro_batches(model)
    if (least := n or (request.global_batch or 0) // max(sizes)) > most:
        raise UsageError(
            f"{least} micro-batches: {most} is the most for one step of {len(model.layers)} layers; take fewer, or "
            f"{'more rows a micro-batch (--micro-batch-sizes)' if estimated else 'profile more rows a micro-batch'}"
        )
    if request.schedule == "single":
        if n not in (None, 1):
            raise UsageError(f"schedule single runs the whole batch at once: micro-batches can only be 1, not {n}")
        n = 1
    if request.global_batch is None:
        return sorted(
            (Candidate(b, count) for b in sizes for count in ((n,) if n else LADDER)),
            key=lambda candidate: candidate.order,
        )
    if request.global_batch % request.ranks:
        raise UsageError(f"global batch {request.global_batch}: {request.ranks} ranks cannot share it evenly")
    batch = request.global_batch // request.ranks
    pairs = [Candidate(b, batch // b) for b in sizes if batch % b == 0 and n in (None, batch // b)]
    pairs = [pair for pair in pairs if pair.micro_batches <= most]
    if not pairs:
        raise _not_made(batch, n, sizes, there, most, estimated=estimated)
    return sorted(pairs, key=lambda candidate: candidate.order)


def _not_made(
    batch: int, n: int | None, sizes: Sequence[int], there: Sequence[int], most: int, *, estimated: bool
) -> UsageError:
    """Why no pair makes a global batch, and what would."""
    asked = f"micro-batch size {sizes[0]}" if len(sizes) == 1 < len(there) else ""
    whole = f" in {n} micro-batch{'es' if n > 1 else ''}" if n else ""
    listed = ", ".join(map(str, there))
    made = [b for b in there if batch % b == 0 and batch // b <= most]
    can = f"; the size{'s' if len(made) > 1 else ''} {', '.join(map(str, made))} can be used" if made else ""
    of = (
        f"{asked}, which was asked for{can}"
        if asked
        else f"any of the micro-batch sizes {listed}"
        if len(there) > 1
        else f"the micro-batch size {listed}"
    )
    problem = f"global batch {batch}{whole} is not a multiple of {of}"
    if possible := sorted(batch // b for b in made):
        return UsageError(f"{problem}: it can be made of {', '.join(map(str, possible))} micro-batches")
    if any(batch % b == 0 for b in there):
        return UsageError(f"{problem} with at most {most} micro-batches, which one step can have")
    more = "name one that divides it with --micro-batch-sizes" if estimated else "profile one that divides it"
    return UsageError(f"{problem}; {more}, or take another batch")


def smallest_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """For each micro-batch size the fewest micro-batches."""
    found: dict[int, Candidate] = {}
    for candidate in candidates:
        found.setdefault(candidate.micro_batch_size, candidate)
    return sorted(found.values(), key=lambda candidate: candidate.order)


def least_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that have no more rows in a micro-batch than another, or fewer micro-batches: more of either takes more of
    everything, so where nothing of these fits, nothing does."""
    found: list[Candidate] = []
    for each in sorted(candidates, key=lambda each: (each.micro_batch_size, each.micro_batches)):
        if not found or each.micro_batches < found[-1].micro_batches:
            found.append(each)
    return sorted(found, key=lambda candidate: candidate.order)
