"""The linear program (GreedySnake 4.5): the fastest placement for one micro-batch size and number of micro-batches.

Owns the constraints and the order of objectives; what moves comes from `traffic`, the solver from `lexicographic`.
Alpha and all residencies are variables of one program, so it is never worse than GreedySnake's sweep (section 4.5).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ssdplan.plans.plan import Decision, Placement
from ssdplan.plans.profile import Machine, Model
from ssdplan.plans.state_layout import GRADIENT_BYTES, OptimizerStates, checkpoint_bytes

from .forms import TRAFFIC, Forms, Work, forms_of
from .lexicographic import Highs, Linear, Problem, Ranges, Row, minimise, value
from .traffic import (
    ALPHA,
    CHECKPOINT_HOST,
    Stage,
    StateVariables,
    device_bytes,
    layer_groups,
    total_bytes,
    variables_of,
)

Aim = Literal["seconds", "host memory", "ssd space", "ssd writes"]
DIGITS = 6
"""Decimals of every fraction: finer than any state can be cut, coarser than the noise of a solver."""
NEGLIGIBLE = 1e-6
"""Of a step's least seconds: what a whole delay ratio may cost at most when one objective stands for two."""
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class FixedChoices:
    """What the user has decided; None leaves it to the program. Residencies are fractions on host."""

    delay_ratio: float | None = None
    parameters: float | None = None
    optimizer: float | None = None
    checkpoints: float | None = None
    optimizer_states: OptimizerStates = "fp32"
    """It changes numbers, so it is never the program's choice."""
    clip_grad_norm: float | None = None
    """Of no weight here: whoever sets it sets the delay ratio to 1 too."""
    kept: Mapping[str, tuple[float, float]] | None = None
    """State class -> the fractions of its states whose parameters stay on the device, for the whole run and across the
    turn. None leaves both to the program, as fractions of elements; where `Limits.device_bytes` is None, they are 0."""
    schedule: Literal["vertical", "horizontal"] = "vertical"
    """Whose forms are taken; whoever sets horizontal sets the delay ratio to 0 too."""
    unified_memory: bool = False
    """Compute works on host memory: what "the device keeps" is kept there, by whole states, and no parameters are in
    any other form on host. `parameters` then speaks of those."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a placement may take. None: no limit."""

    host_bytes: float
    """For what stays on host, and for the two kinds of pipeline buffers below."""
    ssd_bytes: float | None = None
    """Size of the store."""
    ssd_write_bytes: float | None = None
    """Written a step: the drive's wear."""
    device_bytes: float | None = None
    """For parameters that the device keeps between uses; None: it keeps none, unless they are fixed."""
    parameter_buffers: float = 0.0
    """Host bytes that parameters on their way take when all live on ssd; in proportion to the fraction that does."""
    checkpoint_buffers: float = 0.0
    """The same of checkpoints."""


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


def solve_program(
    model: Model,
    machine: Machine,
    *,
    micro_batch_size: int,
    micro_batches: int,
    limits: Limits,
    fixed: FixedChoices = FixedChoices(),
    aim: Aim = "seconds",
    solver: Callable[[Ranges, Sequence[Row]], Problem] = Highs,
) -> ProgramResult | None:
    """The best placement within `limits` that honours `fixed`, or None when there is none.

    Among placements of equal seconds it takes the one that writes least to ssd, then the smallest delay ratio, then the
    one that reads least. `aim` puts another objective before the seconds, to learn the least that a limit could be.
    """
    program = _Program(model, machine, micro_batch_size, micro_batches, limits, fixed)
    objectives = [program.forms.seconds, program.writes, {ALPHA: 1.0}, program.reads, program.generic]
    if aim != "seconds":
        objectives.insert(0, program.aims[aim])
    found = minimise(program.bounds, program.rows, objectives, solver)
    return program.result(found) if found else None


@dataclass(frozen=True, slots=True)
class Bound:
    """The program's optimum without the placement that reaches it."""

    seconds: float
    delay_ratio: float


def program_bound(
    model: Model,
    machine: Machine,
    *,
    micro_batch_size: int,
    micro_batches: int,
    limits: Limits,
    fixed: FixedChoices = FixedChoices(),
) -> Bound | None:
    """The optimum of `solve_program`, and about the least delay ratio that reaches it, for a fifth of the work."""
    program = _Program(model, machine, micro_batch_size, micro_batches, limits, fixed)
    found = minimise(program.bounds, program.rows, [{**program.forms.seconds, ALPHA: NEGLIGIBLE}])
    if found is None:
        return None
    return Bound(program.forms.unit * value(program.forms.seconds, found), round(found[ALPHA], DIGITS))


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a decision keeps on host and on ssd, and writes to ssd a step, before any rounding."""

    host_bytes: float
    ssd_bytes: float
    ssd_write_bytes: float
    device_bytes: float
    """What the device keeps of parameters."""


def footprint(model: Model, decision: Decision) -> Footprint:
    """The program's own forms at a decision."""
    groups, forms = layer_groups(model), TRAFFIC[decision.schedule]
    size, n, states = decision.micro_batch_size, decision.micro_batches, decision.optimizer_states
    at: dict[str, float] = {ALPHA: decision.delay_ratio, CHECKPOINT_HOST: decision.checkpoint_host}
    for name, placement in decision.placement.items():
        at |= _values(name, placement, 0.0)
    kept = value(device_bytes(model, groups), at)
    checkpoints = n * checkpoint_bytes(model, size) * decision.checkpoint_host
    reclaimed = 0.0
    for group in groups:
        if group.role == "block":
            waiting = (use.elements * decision.placement[use.state_class].delayed_gradient_host for use in group.uses)
            reclaimed += group.count * min(checkpoints, GRADIENT_BYTES * sum(waiting))
    return Footprint(
        host_bytes=value(forms.host_bytes(model, groups, size, n, states), at)
        + (kept if decision.unified_memory else 0.0)
        - reclaimed,
        ssd_bytes=value(forms.ssd_bytes(model, groups, size, n, states), at),
        ssd_write_bytes=value(total_bytes(forms.stages(model, groups, size, n, states), "write"), at),
        device_bytes=0.0 if decision.unified_memory else kept,
    )


class _Program:
    """The variables, rows and objectives of one choice and one set of limits."""

    def __init__(
        self, model: Model, machine: Machine, micro_batch_size: int, n: int, limits: Limits, fixed: FixedChoices
    ) -> None:
        self.fixed = fixed
        self.keeps = fixed.kept is not None or limits.device_bytes is not None or fixed.unified_memory
        self.forms = forms = forms_of(
            model,
            machine,
            Work(micro_batch_size, n, fixed.schedule, fixed.optimizer_states, fixed.unified_memory, self.keeps),
        )
        self.limited = _with_buffers(forms, limits)
        self.bounds: dict[str, tuple[float, float | None]] = {
            ALPHA: (0.0, 1.0) if fixed.delay_ratio is None else (fixed.delay_ratio, fixed.delay_ratio),
            CHECKPOINT_HOST: (0.0, 1.0) if fixed.checkpoints is None else (fixed.checkpoints, fixed.checkpoints),
        }
        for name in forms.classes:
            names = variables_of(name)
            anywhere = (*names.optimizer, *names.parameters, *names.gradient)
            self.bounds |= dict.fromkeys(anywhere, (0.0, 1.0)) | (self._kept_bounds(names) if self.keeps else {})
            if name in forms.frozen:
                self.bounds |= dict.fromkeys(names.of_updates & self.bounds.keys(), (0.0, 0.0))
        fractions = list(self.bounds)
        self.bounds |= {name: (seconds, None) for name, seconds in forms.least_seconds.items()}
        self.writes, self.reads = _relative(forms.write_bytes), _relative(forms.read_bytes)
        self.aims: dict[Aim, Linear] = {
            "host memory": _relative(forms.host_bytes),
            "ssd space": _relative(forms.store_bytes),
            "ssd writes": self.writes,
        }
        self.generic: Linear = {
            name: (3.0 if name.endswith("ssd") else 0.0 if name.endswith("reclaimed") else 1.0)
            + (number + 1) * _GOLDEN % 1.0
            for number, name in enumerate(fractions)
        }
        """Nothing left to prefer but host over ssd, and what is reclaimed over host, as schedules do; weights without a
        pattern, so that one point is the best."""
        self.rows = [
            *self._splits(),
            *self._kept(),
            *self._residencies(),
            *forms.reclaimed_rows,
            *self._limits(limits),
            *forms.stage_rows,
        ]

    def _splits(self) -> list[Row]:
        rows = []
        for name in self.forms.classes:
            names = variables_of(name)
            whole, later = names.device
            there: tuple[dict[str, float], dict[str, float]] = ({whole: 1.0, later: -1.0}, {later: 1.0})
            if name in self.forms.frozen:
                anywhere = (*names.parameters[:2], *((whole,) if self.keeps else ()))
                rows.append(Row(dict.fromkeys(anywhere, 1.0) | {"": -1.0}, "=="))
                continue
            for four, (prompt, delayed) in (
                (names.optimizer, ({}, {})),
                (names.parameters, there if self.keeps else ({}, {})),
            ):
                rows.append(Row({four[0]: 1.0, four[1]: 1.0, ALPHA: 1.0, "": -1.0, **prompt}, "=="))
                rows.append(Row({four[2]: 1.0, four[3]: 1.0, ALPHA: -1.0, **delayed}, "=="))
            rows.append(Row(dict.fromkeys(names.gradient, 1.0) | {ALPHA: -1.0}, "=="))
        return rows

    def _kept_bounds(self, names: StateVariables) -> dict[str, tuple[float, float]]:
        """How much of a class's parameters the device may keep: only blocks have a turn to keep them across."""
        turns = self.fixed.schedule == "vertical" and names.state_class in self.forms.turning
        device, turn = (0.0, 1.0), (0.0, 1.0 if turns else 0.0)
        if self.fixed.kept is not None:
            whole, across = self.fixed.kept.get(names.state_class, (0.0, 0.0))
            device, turn = (whole, whole), (across, across)
        bounds = (device, (0.0, 1.0), turn, (0.0, 1.0))
        return dict(zip((*names.device, *names.turn), bounds, strict=True))

    def _kept(self) -> list[Row]:
        """What of the device's parameters is delayed, and what need not be read again in backward.

        Of states that are fixed both are products of constants and variables. While the program chooses, they are free
        within what they could be, so its optimum is a bound of what any choice can reach.
        """
        rows: list[Row] = []
        for name in self.forms.classes if self.keeps else ():
            names = variables_of(name)
            (device, later), (turn, saved) = names.device, names.turn
            _, prompt, _, delayed = names.parameters
            if self.fixed.kept is None:
                rows.append(Row({later: 1.0, device: -1.0}, "<="))
                rows.append(Row({turn: 1.0, device: 1.0, "": -1.0}, "<="))
                rows.append(Row({saved: 1.0, turn: -1.0}, "<="))
                rows.append(Row({saved: 1.0, prompt: -1.0, delayed: -1.0}, "<="))
            else:
                whole, across = self.fixed.kept.get(name, (0.0, 0.0))
                share = across / (1.0 - whole) if whole < 1.0 else 0.0
                if name not in self.forms.frozen:
                    rows.append(Row({later: 1.0, ALPHA: -whole}, "=="))
                rows.append(Row({saved: 1.0, prompt: -share, delayed: -share}, "=="))
        return rows

    def _residencies(self) -> list[Row]:
        rows = []
        for name in self.forms.classes:
            names = variables_of(name)
            if self.fixed.optimizer is not None and name not in self.forms.frozen:
                rows.append(Row({names.optimizer[0]: 1.0, names.optimizer[2]: 1.0, "": -self.fixed.optimizer}, "=="))
            if self.fixed.unified_memory:
                rows.append(Row({names.parameters[0]: 1.0, names.parameters[2]: 1.0}, "=="))
                if self.fixed.parameters is not None and self.fixed.kept is None:
                    rows.append(Row({names.device[0]: 1.0, "": -self.fixed.parameters}, "=="))
            elif (wanted := self.fixed.parameters) is not None:  # of those that the device does not keep
                host, later = names.parameters[0], names.parameters[2]
                there = {names.device[0]: wanted} if self.keeps else {}
                rows.append(Row({host: 1.0, later: 1.0, "": -wanted, **there}, "=="))
        return rows

    def _limits(self, limits: Limits) -> list[Row]:
        rows = [_at_most(self.limited, limits.host_bytes)]
        if limits.ssd_bytes is not None:
            rows.append(_at_most(self.forms.store_bytes, limits.ssd_bytes))
        if limits.ssd_write_bytes is not None:
            rows.append(_at_most(self.forms.write_bytes, limits.ssd_write_bytes))
        if limits.device_bytes is not None and self.fixed.kept is None:
            rows.append(_at_most(self.forms.device_bytes, limits.device_bytes))
        return rows

    def result(self, found: Mapping[str, float]) -> ProgramResult:
        alpha = self.fixed.delay_ratio if self.fixed.delay_ratio is not None else round(found[ALPHA], DIGITS)
        checkpoints = (
            self.fixed.checkpoints if self.fixed.checkpoints is not None else round(found[CHECKPOINT_HOST], DIGITS)
        )
        exact: dict[str, float] = {ALPHA: alpha, CHECKPOINT_HOST: checkpoints}
        placement, reclaimed = {}, {}
        for name in self.forms.classes:
            names = variables_of(name)
            frozen = name in self.forms.frozen
            late = 0.0 if frozen else alpha
            optimizer = (0.0,) * 4 if frozen else _four(found, names.optimizer, alpha, self.fixed.optimizer)
            device, turn = (round(found.get(variable, 0.0), DIGITS) for variable in (names.device[0], names.turn[0]))
            if self.fixed.kept is not None:
                device, turn = self.fixed.kept.get(name, (0.0, 0.0))
            elsewhere = dict(zip(names.parameters, (1.0 - late, 0.0, late, 0.0), strict=True))
            if device < 1.0:  # a placement's fractions are of what the device does not keep
                elsewhere = {variable: found[variable] / (1.0 - device) for variable in names.parameters}
            on_host = 0.0 if self.fixed.unified_memory else self.fixed.parameters
            parameters = _four(elsewhere, names.parameters, late, on_host)
            taken = min(round(found[names.gradient[0]], DIGITS), late)
            host = min(max(taken, round(found[names.gradient[0]] + found[names.gradient[1]], DIGITS)), late)
            placement[name] = Placement(
                optimizer_prompt_host=optimizer[0],
                optimizer_prompt_ssd=optimizer[1],
                optimizer_delayed_host=optimizer[2],
                optimizer_delayed_ssd=optimizer[3],
                parameters_prompt_host=parameters[0],
                parameters_prompt_ssd=parameters[1],
                parameters_delayed_host=parameters[2],
                parameters_delayed_ssd=parameters[3],
                delayed_gradient_host=host,
                delayed_gradient_ssd=late - host,
                parameters_device=device,
                parameters_turn=min(turn, 1.0 - device),
            )
            reclaimed[name] = taken
            exact |= _values(name, placement[name], taken)
        return ProgramResult(
            seconds=self.forms.unit * value(self.forms.seconds, found),
            delay_ratio=alpha,
            placement=placement,
            checkpoint_host=checkpoints,
            reclaimed=reclaimed,
            host_bytes=value(self.forms.host_bytes, exact),
            limited_bytes=value(self.limited, exact),
            ssd_bytes=value(self.forms.store_bytes, exact),
            ssd_read_bytes=value(self.forms.read_bytes, exact),
            ssd_write_bytes=value(self.forms.write_bytes, exact),
            stages=tuple(
                _stage_time(stage, each, exact) for stage, each in zip(self.forms.stages, self.forms.times, strict=True)
            ),
        )


def _values(state_class: str, placement: Placement, reclaimed: float) -> dict[str, float]:
    """The program's variables of a state class at a placement."""
    names, p = variables_of(state_class), placement
    optimizer = (p.optimizer_prompt_host, p.optimizer_prompt_ssd, p.optimizer_delayed_host, p.optimizer_delayed_ssd)
    elsewhere = 1.0 - p.parameters_device
    parameters = (
        elsewhere * p.parameters_prompt_host,
        elsewhere * p.parameters_prompt_ssd,
        elsewhere * p.parameters_delayed_host,
        elsewhere * p.parameters_delayed_ssd,
    )
    gradient = (reclaimed, p.delayed_gradient_host - reclaimed, p.delayed_gradient_ssd)
    device = (p.parameters_device, p.parameters_device * (p.parameters_delayed_host + p.parameters_delayed_ssd))
    turn = (p.parameters_turn, p.parameters_turn * (p.parameters_prompt_ssd + p.parameters_delayed_ssd))
    return dict(zip(names.all(), (*optimizer, *parameters, *gradient, *device, *turn), strict=True))


def _with_buffers(forms: Forms, limits: Limits) -> Linear:
    """What stays on host and, by the size of their states, the buffers of what does not."""
    total = dict(forms.host_bytes)
    for name, elements in forms.largest.items():
        _, prompt, _, delayed = variables_of(name).parameters
        share = limits.parameter_buffers * elements / sum(forms.largest.values())
        total |= {prompt: share, delayed: share}
    total[""] = total.get("", 0.0) + limits.checkpoint_buffers
    total[CHECKPOINT_HOST] = total.get(CHECKPOINT_HOST, 0.0) - limits.checkpoint_buffers
    return total


def _stage_time(stage: Stage, times: list[tuple[str, Linear]], at: Mapping[str, float]) -> StageTime:
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


def _four(
    found: Mapping[str, float], names: tuple[str, str, str, str], alpha: float, wanted: float | None
) -> tuple[float, float, float, float]:
    """The split nearest the solver's that sums exactly to 1 - alpha and alpha, and to the host fraction wanted."""
    host = wanted if wanted is not None else round(found[names[0]] + found[names[2]], DIGITS)
    prompt = 1.0 - alpha
    delayed_host = min(max(round(found[names[2]], DIGITS), host - prompt, 0.0), alpha, host)
    prompt_host = min(max(host - delayed_host, 0.0), prompt)
    return prompt_host, max(prompt - prompt_host, 0.0), delayed_host, max(alpha - delayed_host, 0.0)


def _at_most(form: Linear, limit: float) -> Row:
    scale = sum(factor for factor in form.values() if factor > 0)
    return Row(_relative(form) | {"": (form.get("", 0.0) - limit) / scale}, "<=")


def _relative(form: Linear) -> dict[str, float]:
    scale = sum(factor for factor in form.values() if factor > 0)
    return {name: factor / scale for name, factor in form.items()}
