"""Placement: rounds a point of the linear program to fractions that add up exactly, and says what they imply.

Owns the rounding, and the program's own forms at a decision. It states and solves nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ssdplan.plans.documents.plan import Decision, Placement, Saved
from ssdplan.plans.documents.profile import Model, Rung
from ssdplan.plans.documents.state_layout import GRADIENT_BYTES, checkpoint_bytes

from .choices import KeptShares, Question
from .forms import TRAFFIC
from .linear_program import LinearProgram
from .saved import TIERS, rungs_of
from .stages import Stage, Work
from .traffic import device_bytes, layer_groups, total_bytes
from .variables import (
    CHECKPOINTS_ON_DEVICE,
    CHECKPOINTS_ON_HOST,
    DELAY_RATIO,
    GRADIENT_BUFFERS,
    Linear,
    OfClass,
    Split,
    Variable,
    saved_by,
    value,
    variables_of,
)

LEAST_SHARE = 1e-4
"""Of a class's pairs: less is a solver's noise, and no pair."""
DIGITS = 6
"""Decimals of every fraction: finer than any state can be cut, coarser than the noise of a solver."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """How long one kind of stage takes, and what makes it take that long."""

    layer_class: str
    phase: str
    count: int
    seconds: float
    bound_by: str
    """compute, ssd, h2d, d2h, cpu; cores when compute and updates share them."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """An optimal placement and what it implies."""

    seconds: float
    """The program's optimum for a step, before fractions are rounded to `DIGITS`."""
    delay_ratio: float
    placement: dict[str, Placement]
    checkpoint_host: float
    """Of the blocks whose activation checkpoints the device does not keep."""
    checkpoint_device: float
    """The fraction of blocks whose activation checkpoints it keeps."""
    saved: dict[str, tuple[Saved, ...]]
    """Class of blocks -> what is kept of their activations."""
    reclaimed: dict[str, float]
    """State class -> the fraction of elements whose delayed gradients lie where consumed checkpoints were."""
    host_bytes: float
    """What stays on host."""
    limited_bytes: float
    """What `Limits.host_bytes` counts."""
    ssd_bytes: float
    ssd_read_bytes: float
    ssd_write_bytes: float
    stages: tuple[StageTime, ...]
    question: Question
    """What the program was asked."""


def result_of(question: Question, program: LinearProgram, found: Mapping[Variable, float]) -> ProgramResult:
    """The placement at a point that a solver found, in fractions that add up exactly, and what it implies."""
    forms, fixed = program.forms, program.fixed
    alpha = fixed.delay_ratio if fixed.delay_ratio is not None else round(found[DELAY_RATIO], DIGITS)
    there = min(round(found.get(CHECKPOINTS_ON_DEVICE, 0.0), DIGITS), 1.0)
    if fixed.checkpoints is not None:
        checkpoints = fixed.checkpoints
    elif there == 1.0:
        checkpoints = 1.0
    else:
        checkpoints = min(round(found[CHECKPOINTS_ON_HOST] / (1.0 - there), DIGITS), 1.0)
    exact: dict[Variable, float] = {DELAY_RATIO: alpha, **_checkpoints(checkpoints, there)}
    placement, reclaimed = {}, {}
    for name in forms.classes:
        at = variables_of(name).map(lambda variable: found.get(variable, 0.0))
        late = 0.0 if name in forms.frozen else alpha
        placement[name], reclaimed[name] = _placement(program, name, at, late)
        exact |= _values(name, placement[name], reclaimed[name])
    large = program.limits.gradient_buffers.classes
    on_host = (size * (1.0 - placement[name].optimizer_device) for name, size in large)
    exact[GRADIENT_BUFFERS] = max(on_host, default=0.0)
    saved = {name: kept for name, shares in forms.saved.items() if (kept := _saved(shares, found))}
    exact |= dict.fromkeys((share for shares in forms.saved.values() for _, share in shares), 0.0)
    exact |= _saved_values(saved)
    return ProgramResult(
        seconds=forms.unit * value(forms.seconds, found),
        delay_ratio=alpha,
        placement=placement,
        checkpoint_host=checkpoints,
        checkpoint_device=there,
        saved=saved,
        reclaimed=reclaimed,
        host_bytes=value(forms.host_bytes, exact),
        limited_bytes=value(program.limited, exact),
        ssd_bytes=value(forms.store_bytes, exact),
        ssd_read_bytes=value(forms.read_bytes, exact),
        ssd_write_bytes=value(forms.write_bytes, exact),
        stages=tuple(_stage_time(stage, each, exact) for stage, each in zip(forms.stages, forms.times, strict=True)),
        question=question,
    )


def seconds_at(program: LinearProgram, result: ProgramResult) -> float:
    """The seconds of a step by `program`, of another machine or for other limits, with the placement of `result`."""
    at: dict[Variable, float] = {
        DELAY_RATIO: result.delay_ratio,
        **_checkpoints(result.checkpoint_host, result.checkpoint_device),
    }
    for name, placement in result.placement.items():
        at |= _values(name, placement, result.reclaimed[name])
    at |= dict.fromkeys((share for shares in program.forms.saved.values() for _, share in shares), 0.0)
    at |= _saved_values(result.saved)
    forms = program.forms
    times = zip(forms.stages, forms.times, strict=True)
    return sum(stage.count * _stage_time(stage, each, at).seconds for stage, each in times)


def _saved(shares: list[tuple[Rung, Variable]], found: Mapping[Variable, float]) -> tuple[Saved, ...]:
    """What a class of blocks saves, in the order of its rungs; what rounds to nothing is nothing."""
    made: list[Saved] = []
    left = 1.0
    for rung, share in shares:
        part = min(round(found[share], DIGITS), left)
        part = left if left - part < LEAST_SHARE else part  # a solver's noise too
        if part > LEAST_SHARE:
            assert share.tier is not None and share.tier != "reclaimed"
            made.append(Saved(rung=rung.name, tier=share.tier, share=part))
            left = round(left - part, DIGITS)
    return tuple(made)


def _saved_values(saved: Mapping[str, tuple[Saved, ...]]) -> dict[Variable, float]:
    return {saved_by(name, each.rung, each.tier): each.share for name, kept in saved.items() for each in kept}


def _placement(program: LinearProgram, state_class: str, at: OfClass[float], alpha: float) -> tuple[Placement, float]:
    """The placement of one class of states, and the fraction of its delayed gradients in reclaimed memory."""
    fixed, frozen = program.fixed, state_class in program.forms.frozen
    device, turn, updated = KeptShares(round(at.device, DIGITS), round(at.turn, DIGITS), round(at.updated, DIGITS))
    if fixed.kept is not None:
        device, turn, updated = program.kept(state_class)
    updated = 0.0 if frozen else min(updated, device)
    on_host = Split(1.0 - alpha, 0.0, alpha, 0.0)
    if updated < 1.0:  # a placement's fractions are of what the device does not keep
        on_host = Split(*(fraction / (1.0 - updated) for fraction in at.optimizer.all()))
    optimizer = Split(0.0, 0.0, 0.0, 0.0) if frozen else _four(on_host, alpha, fixed.optimizer)
    outside = Split(1.0 - alpha, 0.0, alpha, 0.0)
    if device < 1.0:
        outside = Split(*(fraction / (1.0 - device) for fraction in at.parameters.all()))
    by_rows = state_class == program.forms.by_rows
    parameters = _four(outside, alpha, 0.0 if fixed.unified_memory else 1.0 if by_rows else fixed.parameters)
    waiting = 1.0 - updated if updated < 1.0 else 1.0
    reclaimed = min(round(at.gradient_reclaimed / waiting, DIGITS), alpha)
    host = min(max(reclaimed, round((at.gradient_reclaimed + at.gradient_host) / waiting, DIGITS)), alpha)
    if updated == 1.0:
        host = alpha
    placement = Placement(
        optimizer_prompt_host=optimizer.prompt_host,
        optimizer_prompt_ssd=optimizer.prompt_ssd,
        optimizer_delayed_host=optimizer.delayed_host,
        optimizer_delayed_ssd=optimizer.delayed_ssd,
        parameters_prompt_host=parameters.prompt_host,
        parameters_prompt_ssd=parameters.prompt_ssd,
        parameters_delayed_host=parameters.delayed_host,
        parameters_delayed_ssd=parameters.delayed_ssd,
        delayed_gradient_host=host,
        delayed_gradient_ssd=alpha - host,
        parameters_device=device,
        parameters_turn=min(turn, 1.0 - device),
        optimizer_device=updated,
    )
    return placement, reclaimed


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a decision keeps on host and on ssd, and writes to ssd a step, before any rounding."""

    host_bytes: float
    ssd_bytes: float
    ssd_write_bytes: float
    device_bytes: float
    """What the device keeps of states, and of activations."""


def footprint(model: Model, decision: Decision) -> Footprint:
    """The program's own forms at a decision."""
    groups, forms = layer_groups(model, decision.shares), TRAFFIC[decision.schedule]
    size, n = decision.micro_batch_size, decision.micro_batches
    work = Work(
        micro_batch_size=size,
        micro_batches=n,
        schedule=decision.schedule,
        formats=decision.formats,
        zeroth_order=decision.zeroth_order,
        updates_wait=decision.updates_wait,
        ranks=decision.shares,
    )
    shares = _checkpoints(decision.checkpoint_host, decision.checkpoint_device)
    at: dict[Variable, float] = {DELAY_RATIO: decision.delay_ratio, **shares}
    for name, placement in decision.placement.items():
        at |= _values(name, placement, 0.0)
    at |= dict.fromkeys(
        (saved_by(group.layer_class, rung.name, tier) for group in groups for tier in TIERS
         for rung in rungs_of(group, model.timing(group.layer_class, size))), 0.0
    )  # fmt: skip
    at |= _saved_values(decision.saved)
    kept = value(device_bytes(model, groups, work), at)
    checkpoints = n * checkpoint_bytes(model, size) * shares[CHECKPOINTS_ON_HOST]
    reclaimed = 0.0
    for group in groups:
        if group.role == "block":
            waiting = (use.elements * _waiting_on_host(decision.placement[use.state_class]) for use in group.uses)
            reclaimed += group.count * min(checkpoints, GRADIENT_BYTES * sum(waiting))
    return Footprint(
        host_bytes=value(forms.host_bytes(model, groups, work), at)
        + (kept if decision.unified_memory else 0.0)
        - reclaimed,
        ssd_bytes=value(forms.ssd_bytes(model, groups, work), at),
        ssd_write_bytes=value(total_bytes(forms.stages(model, groups, work), "write"), at),
        device_bytes=0.0 if decision.unified_memory else kept,
    )


def _checkpoints(host: float, device: float) -> dict[Variable, float]:
    """The program's variables where a decision keeps those fractions."""
    return {CHECKPOINTS_ON_HOST: host * (1.0 - device), CHECKPOINTS_ON_DEVICE: device}


def _waiting_on_host(placement: Placement) -> float:
    """Of a class's elements, those whose delayed gradients wait on host."""
    return (1.0 - placement.optimizer_device) * placement.delayed_gradient_host


def _values(state_class: str, placement: Placement, reclaimed: float) -> dict[Variable, float]:
    """The program's variables of a state class at a placement."""
    p = placement
    on_host = 1.0 - p.optimizer_device
    optimizer = (
        on_host * p.optimizer_prompt_host,
        on_host * p.optimizer_prompt_ssd,
        on_host * p.optimizer_delayed_host,
        on_host * p.optimizer_delayed_ssd,
    )
    elsewhere = 1.0 - p.parameters_device
    parameters = (
        elsewhere * p.parameters_prompt_host,
        elsewhere * p.parameters_prompt_ssd,
        elsewhere * p.parameters_delayed_host,
        elsewhere * p.parameters_delayed_ssd,
    )
    reclaimed *= on_host
    gradient = (reclaimed, on_host * p.delayed_gradient_host - reclaimed, on_host * p.delayed_gradient_ssd)
    device = (p.parameters_device, p.parameters_device * (p.parameters_delayed_host + p.parameters_delayed_ssd))
    turn = (p.parameters_turn, p.parameters_turn * (p.parameters_prompt_ssd + p.parameters_delayed_ssd))
    updated = (p.optimizer_device, p.optimizer_device * (p.optimizer_delayed_host + p.optimizer_delayed_ssd))
    every = (*optimizer, *parameters, *gradient, *device, *turn, *updated)
    return dict(zip(variables_of(state_class).all(), every, strict=True))


def _stage_time(stage: Stage, times: list[tuple[str, Linear]], at: Mapping[Variable, float]) -> StageTime:
    seconds: dict[str, float] = {}
    for resource, form in times:
        seconds[resource] = max(seconds.get(resource, 0.0), value(form, at))
    slowest = max(seconds, key=lambda resource: seconds[resource])
    return StageTime(
        layer_class=stage.layer_class,
        phase=stage.phase,
        count=stage.count,
        seconds=seconds[slowest],
        bound_by=slowest,
    )


def _four(at: Split[float], alpha: float, wanted: float | None) -> Split[float]:
    """The split nearest to `at` that sums exactly to 1 - alpha and alpha, and to the host fraction `wanted`."""
    host = wanted if wanted is not None else round(at.prompt_host + at.delayed_host, DIGITS)
    prompt = 1.0 - alpha
    delayed_host = min(max(round(at.delayed_host, DIGITS), host - prompt, 0.0), alpha, host)
    prompt_host = min(max(host - delayed_host, 0.0), prompt)
    return Split(prompt_host, max(prompt - prompt_host, 0.0), delayed_host, max(alpha - delayed_host, 0.0))
