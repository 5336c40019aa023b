"""The linear program (GreedySnake 4.5), stated in PuLP's terms.

Owns the variables' ranges, the constraints and the objectives. The coefficients of what a stage moves and how long that
takes come from `forms.py`; a solver is somebody else's business. Alpha and all storage ratios x are variables of one
program, so it is never worse than GreedySnake's sweep over alpha.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pulp

from ssdplan.plans.documents.profile import Rung, rungs_to_save_by
from ssdplan.plans.schedule.saved import saved_bytes

from .choices import KEPT_NOTHING, FixedChoices, KeptShares, Limits
from .forms import Forms, StageRow
from .variables import (
    CHECKPOINTS_ON_DEVICE,
    CHECKPOINTS_ON_HOST,
    CONSTANT,
    DELAY_RATIO,
    GRADIENT_BUFFERS,
    Linear,
    OfClass,
    Variable,
    variables_of,
)

TIER_WEIGHTS = {"reclaimed": 0.0, "device": 0.0, "ssd": 3.0}
"""Of the tie-breaking weights: reclaimed memory and the device before host memory, and that before ssd, as schedules
do."""
USUAL_WEIGHT = 1.0
GOLDEN_RATIO = 0.6180339887498949
"""The fractional parts of its multiples are spread evenly over 0 to 1."""
LONGEST_LABEL = 40
"""Characters of a class in a name: a file of the program has names of at most 100."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One thing to minimise."""

    name: str
    form: Linear


class LinearProgram:
    """The variables, constraints and objectives of one choice and one set of limits.

    Seconds of a stage are counted in the stage's unit of `forms`, and bytes in multiples of all that there is to move
    or keep, for a solver's tolerances are absolute.
    """

    def __init__(self, forms: Forms, limits: Limits, fixed: FixedChoices) -> None:
        self.forms, self.limits, self.fixed = forms, limits, fixed
        self.limited = bytes_with_buffers(forms, limits)
        """What `Limits.host_bytes` counts."""
        self.problem = pulp.LpProblem("ssdplan", pulp.LpMinimize)
        self.variables: dict[Variable, Any] = self._variables()
        """Each variable of the program -> PuLP's."""
        self.alpha = self.variables[DELAY_RATIO]
        self.x = {name: variables_of(name).map(self._variable) for name in forms.classes}
        """The storage ratios of each class of states."""
        self._split_states()
        if forms.work.keeps:
            self._keep_on_device()
        self._honour_residencies()
        self._reclaim_checkpoints()
        self._save_activations()
        self._respect_limits()
        self._take_stages()

    # Variables.

    def _variables(self) -> dict[Variable, Any]:
        fixed = self.fixed
        ranges: dict[Variable, tuple[float, float | None]] = {
            DELAY_RATIO: (0.0, 1.0) if fixed.delay_ratio is None else (fixed.delay_ratio, fixed.delay_ratio),
            CHECKPOINTS_ON_HOST: (0.0, 1.0) if fixed.checkpoints is None else (fixed.checkpoints, fixed.checkpoints),
        }
        if self.forms.work.checkpoints_on_device:
            there = fixed.checkpoints_device
            ranges[CHECKPOINTS_ON_HOST] = (0.0, 1.0)
            ranges[CHECKPOINTS_ON_DEVICE] = (0.0, 1.0) if there is None else (there, there)
        if self.limits.gradient_buffers.classes and self.forms.work.updates_on_device:
            ranges[GRADIENT_BUFFERS] = (0.0, 1.0)
        for name in self.forms.classes:
            variables = variables_of(name)
            ranges |= dict.fromkeys(variables.elsewhere, (0.0, 1.0))
            if self.forms.work.keeps:
                ranges |= self._ranges_on_device(variables)
            if name in self.forms.frozen:
                ranges |= {variable: (0.0, 0.0) for variable in variables.of_updates if variable in ranges}
        for shares in self.forms.saved.values():
            ranges |= {share: (0.0, 1.0 if self._may_save(rung, share) else 0.0) for rung, share in shares}
        ranges |= {variable: (least, None) for variable, least in self.forms.least_seconds.items()}
        labels = _labels(self.forms.classes)
        return {
            variable: self.problem.add_variable(self._name(variable, labels), low, high)
            for variable, (low, high) in ranges.items()
        }

    def _may_save(self, rung: Rung, share: Variable) -> bool:
        """Whether the device has places for what passes through it."""
        most = self.limits.pair_bytes
        return share.tier == "device" or most is None or saved_bytes(rung) <= most

    def _ranges_on_device(self, variables: OfClass[Variable]) -> dict[Variable, tuple[float, float]]:
        """How much of a class the device may keep: only blocks have a turn to keep parameters across."""
        turns = self.fixed.schedule == "vertical" and variables.state_class in self.forms.turning
        device, turn = (0.0, 1.0), (0.0, 1.0 if turns else 0.0)
        updated = (0.0, 1.0)
        for each in self.fixed.kept_within:
            if each.state_class == variables.state_class:
                device, updated = each.device, each.updated
        if self.fixed.kept is not None:
            kept = self.kept(variables.state_class)
            device, turn, updated = ((share, share) for share in kept)
        ranges: dict[Variable, tuple[float, float]] = {
            variables.device: device,
            variables.device_delayed: (0.0, 1.0),
            variables.turn: turn,
            variables.turn_ssd: (0.0, 1.0),
        }
        if self.forms.work.updates_on_device:
            ranges |= {variables.updated: updated, variables.updated_delayed: (0.0, 1.0)}
        return ranges

    def kept(self, state_class: str) -> KeptShares:
        """What the device keeps of a class where that is fixed: of a table that comes by rows nothing."""
        assert self.fixed.kept is not None
        by_rows = state_class == self.forms.by_rows
        return KEPT_NOTHING if by_rows else self.fixed.kept.get(state_class, KEPT_NOTHING)

    def _variable(self, variable: Variable) -> Any:
        """PuLP's variable, or 0 for what this program does not have because its device keeps nothing."""
        return self.variables.get(variable, 0)

    def _name(self, variable: Variable, labels: dict[str, str]) -> str:
        """What a variable is called in a file, in the paper's letters and words."""
        if variable.form == "delay ratio":
            return "alpha"
        if variable.form == "stage seconds":
            return f"t_{self._stage(variable.stage)}"
        if variable.form == "saved activations":
            return f"x_saved_{_label(variable.rung)}_{variable.tier}_{_label(variable.layer_class)}"
        parts = (variable.form, "" if variable.part == "all" else variable.part, variable.tier)
        words = "_".join(part.replace(" ", "_") for part in parts if part)
        return f"x_{words}_{labels[variable.state_class]}" if variable.state_class else f"x_{words}"

    def _stage(self, number: int) -> str:
        stage = self.forms.stages[number]
        return f"{stage.phase}_{_label(stage.layer_class)}_{number}"

    # Constraints.

    def _split_states(self) -> None:
        """A state's prompt part is 1 - alpha of it and its delayed part alpha, wherever they live."""
        alpha = self.alpha
        for name, x in self.x.items():
            optimizer, parameters = x.optimizer, x.parameters
            if name == self.forms.by_rows:
                self._require(parameters.prompt_host == 1, "by_rows", name)
            if name in self.forms.frozen:
                self._require(parameters.prompt_host + parameters.prompt_ssd + x.device == 1, "frozen", name)
                continue
            late = alpha - x.updated_delayed  # of what is updated on host
            self._require(
                optimizer.prompt_host + optimizer.prompt_ssd + x.updated + late == 1, "prompt_optimizer_states", name
            )
            self._require(optimizer.delayed_host + optimizer.delayed_ssd == late, "delayed_optimizer_states", name)
            device_prompt = x.device - x.device_delayed
            self._require(
                parameters.prompt_host + parameters.prompt_ssd + device_prompt == 1 - alpha, "prompt_parameters", name
            )
            self._require(
                parameters.delayed_host + parameters.delayed_ssd + x.device_delayed == alpha, "delayed_parameters", name
            )
            self._require(pulp.lpSum(x.gradient) == late, "delayed_gradients", name)

    def _keep_on_device(self) -> None:
        """What of the device's parameters, and of what it updates, is delayed, and what need not be read again in
        backward.

        Where the user has fixed what the device keeps, all are products of constants and variables. While the program
        chooses, they are free within what they could be, so its optimum is a bound of what any choice can reach.
        """
        for name, x in self.x.items():
            if self.forms.work.updates_on_device and name not in self.forms.frozen:
                if self.fixed.kept is None:
                    self._require(x.updated <= x.device, "updated_on_device", name)
                    self._require(x.updated_delayed <= x.updated, "updated_on_device_delayed", name)
                    self._require(x.updated_delayed <= x.device_delayed, "of_device_delayed", name)
                    prompt, of = x.updated - x.updated_delayed, x.device - x.device_delayed
                    self._require(prompt <= of, "of_device_prompt", name)
                else:
                    share = self.kept(name).updated
                    self._require(x.updated_delayed == share * self.alpha, "updated_on_device_delayed", name)
            parameters_ssd = x.parameters.prompt_ssd + x.parameters.delayed_ssd
            if self.fixed.kept is None:
                self._require(x.device_delayed <= x.device, "device_delayed", name)
                self._require(x.turn + x.device <= 1, "device_and_turn", name)
                self._require(x.turn_ssd <= x.turn, "turn_from_ssd", name)
                self._require(x.turn_ssd <= parameters_ssd, "turn_of_what_is_on_ssd", name)
            else:
                whole, across, _ = self.kept(name)
                share = across / (1.0 - whole) if whole < 1.0 else 0.0
                if name not in self.forms.frozen:
                    self._require(x.device_delayed == whole * self.alpha, "device_delayed", name)
                self._require(x.turn_ssd == share * parameters_ssd, "turn_from_ssd", name)

    def _honour_residencies(self) -> None:
        """The fractions on host that the user has fixed, of what the device does not keep."""
        fixed = self.fixed
        for name, x in self.x.items():
            if fixed.optimizer is not None and name not in self.forms.frozen:
                on_host = x.optimizer.prompt_host + x.optimizer.delayed_host
                self._require(on_host == fixed.optimizer * (1 - x.updated), "optimizer_states_on_host", name)
            on_host = x.parameters.prompt_host + x.parameters.delayed_host
            if fixed.unified_memory:
                self._require(on_host == 0, "parameters_on_host", name)
                if fixed.parameters is not None and fixed.kept is None:
                    self._require(x.device == fixed.parameters, "parameters_kept", name)
            elif fixed.parameters is not None and name != self.forms.by_rows:
                self._require(on_host == fixed.parameters * (1 - x.device), "parameters_on_host", name)

    def _reclaim_checkpoints(self) -> None:
        """Delayed gradients may lie where activation checkpoints were that backward has consumed (GreedySnake 4.4):
        those on host, which are what neither device nor ssd has."""
        if self.forms.work.checkpoints_on_device:
            host, device = self.variables[CHECKPOINTS_ON_HOST], self.variables[CHECKPOINTS_ON_DEVICE]
            self.problem += host + device <= 1, "activation_checkpoints"
            if self.fixed.checkpoints is not None:
                self.problem += host == self.fixed.checkpoints * (1 - device), "activation_checkpoints_on_host"
        for number, form in enumerate(self.forms.reclaimed):
            self.problem += self.expression(form) <= 0, f"reclaimed_checkpoints_{number}"

    def _save_activations(self) -> None:
        """Each pair of layer and micro-batch saves its activations in one way at most; where the user has said what
        backward recomputes, every pair in those."""
        for name, shares in self.forms.saved.items():
            asked = rungs_to_save_by([rung for rung, _ in shares], by_paper=self.fixed.recompute == "paper")
            wanted = [self.variables[share] for rung, share in shares if rung in asked]
            every = pulp.lpSum(self.variables[share] for _, share in shares)
            self.problem += every <= 1, f"saved_activations_of_{_label(name)}"
            if self.fixed.recompute in ("none", "paper") and wanted:
                self.problem += pulp.lpSum(wanted) == 1, f"recompute_{self.fixed.recompute}_of_{_label(name)}"

    def _respect_limits(self) -> None:
        """What stays on host, on ssd and on the device, and what is written, each at most its limit. What is fixed of
        the device is there in any case: whether it has room, its schedule says."""
        limits, forms = self.limits, self.forms
        if GRADIENT_BUFFERS in self.variables:
            for name, size in limits.gradient_buffers.classes:
                needed = self.variables[GRADIENT_BUFFERS] + size * self.x[name].updated >= size
                self._require(needed, "gradient_buffers", name)
        self._require_at_most(self.limited, limits.host_bytes, "host_memory")
        if limits.ssd_bytes is not None:
            self._require_at_most(forms.store_bytes, limits.ssd_bytes, "ssd_space")
        if limits.ssd_write_bytes is not None:
            self._require_at_most(forms.write_bytes, limits.ssd_write_bytes, "ssd_writes")
        if limits.device_bytes is not None and (self.fixed.kept is None or "device" in forms.work.saves):
            form = device_bytes_with_buffers(forms, limits)
            there = ((self.variables[each], factor) for each, factor in form.items() if each is not CONSTANT)
            fixed = sum(factor * of.lowBound for of, factor in there if of.lowBound == of.upBound)
            self._require_at_most(form, max(limits.device_bytes, fixed + form.get(CONSTANT, 0.0)), "device_memory")

    def require_seconds_at_most(self, seconds: float) -> None:
        """No step longer than this."""
        within = {**self.forms.seconds, CONSTANT: self.forms.seconds.get(CONSTANT, 0.0) - seconds / self.forms.unit}
        self.problem += self.expression(within) <= 0, "step_seconds_at_most"

    def _take_stages(self) -> None:
        """A stage takes at least as long as each of its resources: t >= max(compute, ssd, links, updates)."""
        for number, row in enumerate(self.forms.stage_rows):
            self.problem += self._takes(row), f"{row.resource}_of_{self._stage(row.stage)}_row_{number}"

    def _takes(self, row: StageRow) -> Any:
        return self.expression(row.seconds) <= self.variables[row.variable]

    def _require(self, constraint: Any, what: str, state_class: str) -> None:
        self.problem += constraint, f"{what}_of_{_labels(self.forms.classes)[state_class]}"

    def _require_at_most(self, form: Linear, limit: float, name: str) -> None:
        scale = _positive(form)
        within = _scaled(form, scale) | {CONSTANT: (form.get(CONSTANT, 0.0) - limit) / scale}
        self.problem += self.expression(within) <= 0, name

    def expression(self, form: Linear) -> Any:
        """A linear form in PuLP's terms."""
        terms = {
            self.variables[variable]: factor for variable, factor in form.items() if factor and variable is not CONSTANT
        }
        return pulp.LpAffineExpression(terms, constant=form.get(CONSTANT, 0.0))

    # Objectives.

    def objectives(self) -> list[Objective]:
        """What to minimise, the most important first.

        The last prefers host to ssd and leaves next to nothing open, so that every solver finds about the same point.
        """
        return [
            Objective("step_seconds", self.forms.seconds),
            self.ssd_writes(),
            Objective("delay_ratio", {DELAY_RATIO: 1.0}),
            Objective("ssd_reads", relative(self.forms.read_bytes)),
            Objective("tie_breaking_weights", self._tie_breaking_weights()),
        ]

    def host_memory(self) -> Objective:
        return Objective("host_memory", relative(self.forms.host_bytes))

    def ssd_space(self) -> Objective:
        return Objective("ssd_space", relative(self.forms.store_bytes))

    def ssd_writes(self) -> Objective:
        return Objective("ssd_writes", relative(self.forms.write_bytes))

    def _tie_breaking_weights(self) -> Linear:
        """A weight for each fraction: its tier's, and less than 1 more, in which no two fractions are alike.

        Some ties stay: weights of neighbours differ by the same, so that what is prompt on host and delayed on ssd may
        as well be prompt on ssd and delayed on host. `minimise` takes the point of one solver, whoever confirms it.
        """
        fractions = (variable for variable in self.variables if variable.form != "stage seconds")
        return {
            variable: TIER_WEIGHTS.get(variable.tier or "", USUAL_WEIGHT) + number * GOLDEN_RATIO % 1.0
            for number, variable in enumerate(fractions, 1)
        }


def bytes_with_buffers(forms: Forms, limits: Limits) -> Linear:
    """What stays on host, and the buffers of what does not."""
    total = dict(forms.host_bytes)
    for name, nbytes in limits.parameter_buffers:
        total |= dict.fromkeys(variables_of(name).parameters.on_ssd, nbytes)
    total[CONSTANT] = total.get(CONSTANT, 0.0) + limits.checkpoint_buffers
    total[CHECKPOINTS_ON_HOST] = total.get(CHECKPOINTS_ON_HOST, 0.0) - limits.checkpoint_buffers
    if forms.work.checkpoints_on_device:
        total[CHECKPOINTS_ON_DEVICE] = total.get(CHECKPOINTS_ON_DEVICE, 0.0) - limits.checkpoint_buffers
    _add_gradient_buffers(total, forms, limits, limits.gradient_buffers.host)
    if limits.saved_in_transit:
        for shares in forms.saved.values():
            for rung, share in shares:
                if share.tier == "ssd":
                    total[share] = total.get(share, 0.0) + limits.saved_in_transit * saved_bytes(rung)
    return total


def device_bytes_with_buffers(forms: Forms, limits: Limits) -> Linear:
    """What the device keeps, and what it needs for the updates that host makes."""
    total = dict(forms.device_bytes)
    _add_gradient_buffers(total, forms, limits, limits.gradient_buffers.device)
    return total


def _add_gradient_buffers(total: dict[Variable, float], forms: Forms, limits: Limits, nbytes: float) -> None:
    """Add bytes of buffers that are for gradients, all of which host needs where the device updates nothing."""
    of = GRADIENT_BUFFERS if limits.gradient_buffers.classes and forms.work.updates_on_device else CONSTANT
    total[of] = total.get(of, 0.0) + nbytes


def relative(form: Linear) -> Linear:
    """A form of bytes, in multiples of the sum of its positive coefficients."""
    return _scaled(form, _positive(form))


def _positive(form: Linear) -> float:
    return sum(factor for factor in form.values() if factor > 0)


def _scaled(form: Linear, scale: float) -> dict[Variable, float]:
    return {variable: factor / scale for variable, factor in form.items()}


@lru_cache(maxsize=64)
def _labels(classes: tuple[str, ...]) -> dict[str, str]:
    """A label for each class of states, in letters, digits and underscores; no two are alike."""
    labels: dict[str, str] = {}
    for number, name in enumerate(classes):
        label = _label(name)
        while label in labels.values():
            label = f"{label}_{number}"
        labels[name] = label
    return labels


@lru_cache(maxsize=4096)
def _label(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name)[:LONGEST_LABEL]
