"""Plan: every decision of a run and what it predicts, as plain data. The planner writes it, all others read it.

Owns the fields of plan.json (docs/plan-format.md) and the checks that make an edited plan safe to open. A plan alone is
enough to build its schedule (`schedule/build.py`).
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ..errors import MismatchError
from . import state_layout
from .base import Bytes, Count, Document, Fraction, Name, Part, Positive, Seconds, Sparing
from .matrices import unfit_plan
from .overlap import Overlap, unfit_overlap
from .profile import Machine, Model, Rung
from .rates import rows_rates, updates_on_device
from .state_layout import GRAIN, Elements, Format, Masters, OptimizerFormats, OptimizerStates, Precision
from .zeroth_order import ZerothOrder, parameter_format

ScheduleName = Literal["vertical", "horizontal", "zeroth-order"]
"""The orders of operations (`ORDERS` of `schedule/build.py`)."""
TOLERANCE = 1e-6
MOST_RANKS = 1024
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
MAX_VISITS, MAX_UPDATES = 1 << 18, 1 << 18
"""The most micro-batches times layers, and the most updates, of a step: each is a few operations, and a million of them
take a minute to lay out and gigabytes to hold."""


class Placement(Part):
    """Where the states of one class live, as fractions of their elements (prompt or delayed, host or ssd).

    optimizer_* and parameters_* on host and ssd each sum to 1; their delayed parts sum to the plan's delay ratio, as do
    the two delayed_gradient_* fractions. Frozen states have no update: all their parameters are prompt, and all other
    fractions but the device's are 0. parameters_device, parameters_turn and optimizer_device are fractions of the
    class's states, each kept whole or not at all; parameters_* on host and ssd speak of the states whose parameters are
    not kept for the whole run, optimizer_* and delayed_gradient_* of those that are not updated on the device.
    """

    optimizer_prompt_host: Fraction
    optimizer_prompt_ssd: Fraction
    optimizer_delayed_host: Fraction
    optimizer_delayed_ssd: Fraction
    parameters_prompt_host: Fraction
    parameters_prompt_ssd: Fraction
    parameters_delayed_host: Fraction
    parameters_delayed_ssd: Fraction
    delayed_gradient_host: Fraction
    delayed_gradient_ssd: Fraction
    parameters_device: Fraction = 0.0
    """The fraction of the class's states whose parameters stay on the device for the whole run."""
    parameters_turn: Fraction = 0.0
    """The fraction of the class's states, all of them blocks', whose parameters stay on the device from the forward to
    the same layer's backward."""
    optimizer_device: Fraction = 0.0
    """The fraction of the class's states whose optimizer states stay on the device, which updates them: at most
    parameters_device, as their parameters stay there too. None of such a state is delayed, unless all updates wait for
    a step's last gradient: then all of it is, and its gradient waits on the device."""

    @property
    def frozen(self) -> bool:
        """Whether it is of states without optimizer states."""
        return not (
            self.optimizer_prompt_host
            or self.optimizer_prompt_ssd
            or self.optimizer_delayed_host
            or self.optimizer_delayed_ssd
        )


SavedTier = Literal["device", "host", "ssd"]


class Saved(Part):
    """A share of the activations of one class of blocks: what the forward keeps of them, and where that lies until the
    backward."""

    rung: Name
    tier: SavedTier
    share: Fraction
    """Of the class's pairs of layer and micro-batch, of which a schedule takes a whole number: one more or less."""


class Decision(Sparing):
    """What the run will do."""

    _SPARED = ("saved", "zeroth_order", "matrices_on_device")

    schedule: ScheduleName
    optimizer: Literal["adamw", "muon", "mezo"]
    zeroth_order: ZerothOrder | None = None
    """Of `mezo` alone."""
    optimizer_states: OptimizerStates
    """The format of both moments."""
    masters: Masters = "fp32"
    """What the masters of trained parameters are: fp32, the residual that bf16 parameters lack, or none. Of `mezo`
    `zeroth_order` says it."""
    clip_grad_norm: Positive | None = None
    """The most that the norm of all gradients may be; larger ones are scaled down to it. None: no clipping."""
    precision: Precision
    micro_batch_size: Count
    micro_batches: Count
    sequence_length: Count
    delay_ratio: Fraction
    placement: dict[Name, Placement]
    """State class -> placement."""
    checkpoint_host: Fraction
    """The fraction of each block's input, for each micro-batch, that stays on host; the rest is written to ssd."""
    checkpoint_device: Fraction = 0.0
    """The fraction of the blocks that run backward whose inputs, of all micro-batches, stay on the device, and the
    gradients of these inputs after them. checkpoint_host speaks of the other blocks."""
    recompute: Literal["all", "part"]
    """What backward recomputes of the layers' forwards: everything, or what `saved` does not keep."""
    saved: dict[Name, tuple[Saved, ...]] = Field(default_factory=dict)
    """Class of blocks -> what is kept of their activations. Of the rest of the class's pairs of layer and micro-batch
    only the block's input is kept."""
    update_chunk_elements: Count
    """The largest range of elements that one update op takes."""
    update_lookahead: Count
    """How many chunks' optimizer states are on their way between ssd and host at once."""
    host_budget_bytes: Bytes
    device_budget_bytes: Bytes
    unified_memory: bool = False
    """Compute works on host memory itself: nothing is copied to a device or back, and there is no device memory."""
    ranks: Ranks = 1
    """Processes that train together: each owns a part of every state, or with zeroth_order has all of it, and takes so
    many `micro_batches` of a step. All else that is said here is of one rank, and the same for each."""
    matrices_on_device: Literal[True] | None = None
    """Of muon: the device updates every matrix, and optimizer states that live elsewhere come there for it."""
    exchange_behind: bool = False
    """Of several ranks: a layer's gradients are exchanged while the next layer runs backward, and not before it."""
    overlap: Overlap = "all"
    """What the device has of other layers while one runs: parameters and a gradient, parameters, or nothing at all."""

    @model_validator(mode="after")
    def _sums(self) -> Self:
        zeroth = (self.schedule == "zeroth-order", self.optimizer == "mezo", self.zeroth_order is not None)
        if any(zeroth) and not all(zeroth):
            raise ValueError("schedule zeroth-order, optimizer mezo and zeroth_order belong together")
        turns = any(placement.parameters_turn for placement in self.placement.values())
        gradients = bool(self.delay_ratio or self.clip_grad_norm or self.saved)
        if self.zeroth_order and (why := self.zeroth_order.unfit(self.precision, self.formats, gradients, turns)):
            raise ValueError(why)
        if why := state_layout.unfit_masters(self.masters, self.precision):
            raise ValueError(why)
        for name, p in self.placement.items():
            alpha, states = (0.0, 0.0) if p.frozen else (self.delay_ratio, 1.0)
            rows = {
                "optimizer_prompt_*": (p.optimizer_prompt_host + p.optimizer_prompt_ssd, states - alpha),
                "optimizer_delayed_*": (p.optimizer_delayed_host + p.optimizer_delayed_ssd, alpha),
                "parameters_prompt_*": (p.parameters_prompt_host + p.parameters_prompt_ssd, 1 - alpha),
                "parameters_delayed_*": (p.parameters_delayed_host + p.parameters_delayed_ssd, alpha),
                "delayed_gradient_*": (p.delayed_gradient_host + p.delayed_gradient_ssd, alpha),
            }
            for row, (total, wanted) in rows.items():
                if abs(total - wanted) > TOLERANCE:
                    why = "its states are frozen" if p.frozen else f"delay_ratio {alpha:g}"
                    raise ValueError(f"placement.{name}.{row} sum to {total:g}, not {wanted:g} ({why})")
            if p.parameters_device + p.parameters_turn > 1 + TOLERANCE:
                kept = p.parameters_device + p.parameters_turn
                raise ValueError(f"placement.{name}.parameters_device and parameters_turn sum to {kept:g}, more than 1")
            if p.optimizer_device > p.parameters_device + TOLERANCE:
                raise ValueError(
                    f"placement.{name}.optimizer_device = {p.optimizer_device:g}: at most parameters_device, "
                    f"{p.parameters_device:g}"
                )
            if p.optimizer_device and (p.frozen or self.unified_memory or self.schedule != "vertical"):
                why = "its states are frozen" if p.frozen else f"schedule {self.schedule}"
                why = "with unified_memory there is no device memory" if self.unified_memory else why
                raise ValueError(f"placement.{name}.optimizer_device = {p.optimizer_device:g}: {why}; set it to 0")
            if self.schedule == "horizontal" and p.parameters_turn:
                raise ValueError(
                    f"placement.{name}.parameters_turn = {p.parameters_turn:g}: the horizontal schedule keeps nothing "
                    "from forward to backward; set it to 0, or schedule to vertical"
                )
            if self.unified_memory and p.parameters_device < 1 and p.parameters_prompt_host + p.parameters_delayed_host:
                raise ValueError(
                    f"placement.{name}: with unified_memory a state's parameters stay whole (parameters_device) or "
                    "live on ssd; set parameters_prompt_host and parameters_delayed_host to 0"
                )
        if self.checkpoint_device and (self.unified_memory or self.schedule != "vertical"):
            why = "unified_memory leaves no device memory" if self.unified_memory else f"schedule {self.schedule}"
            raise ValueError(f"checkpoint_device = {self.checkpoint_device:g}: {why}; set it to 0")
        if self.schedule == "horizontal" and self.delay_ratio:
            raise ValueError(
                f"delay_ratio = {self.delay_ratio:g}: the horizontal schedule updates everything in its own step; "
                "set it to 0, or schedule to vertical"
            )
        for name, shares in self.saved.items():
            if (whole := sum(each.share for each in shares)) > 1 + TOLERANCE:
                raise ValueError(f"saved.{name}: the shares sum to {whole:g}, more than 1")
            if len({(each.rung, each.tier) for each in shares}) != len(shares):
                raise ValueError(f"saved.{name} names a rung and tier twice")
            if self.unified_memory and any(each.tier == "device" for each in shares):
                raise ValueError(f"saved.{name}: with unified_memory there is no device memory; take host")
        if self.exchange_behind and (self.ranks == 1 or self.schedule != "vertical"):
            raise ValueError("exchange_behind: only several ranks with schedule vertical; set it to false")
        if why := unfit_overlap(self):
            raise ValueError(why)
        if (self.recompute == "all") != (not self.saved):
            raise ValueError(f"recompute = {self.recompute}, and saved says otherwise")
        if self.update_chunk_elements % GRAIN:
            raise ValueError(f"update_chunk_elements = {self.update_chunk_elements} is not a multiple of {GRAIN}")
        return self

    @property
    def shares(self) -> int:
        """So many ranks each state is shared out among: all, but without gradients each has all of them."""
        return 1 if self.zeroth_order else self.ranks

    @property
    def rows(self) -> int:
        """Of a step of all ranks."""
        return self.ranks * self.micro_batches * self.micro_batch_size

    @property
    def tokens(self) -> int:
        """Of a step of all ranks, padding included."""
        return self.rows * self.sequence_length

    @property
    def rank_tokens(self) -> int:
        """Of a step of one rank, padding included."""
        return self.tokens // self.ranks

    @property
    def updates_wait(self) -> bool:
        """Whether no update may begin before a step's last gradient is there."""
        return bool(needs_all_gradients(self.precision, self.clip_grad_norm))

    @property
    def formats(self) -> OptimizerFormats:
        """Of optimizer states, but for those of matrices that Muon updates."""
        return state_layout.OPTIMIZER_FORMATS[self.masters, self.optimizer_states]

    def parameters_of(self, state: Elements) -> Format:
        """The format of a state's parameters wherever they live, move and are updated."""
        precision = state_layout.precision_of(state, self.precision)
        return parameter_format(precision, self.zeroth_order, frozen=state.frozen)

    def computed_of(self, state: Elements) -> Format:
        """The format of a state's parameters that compute takes."""
        return state_layout.PARAMETERS[state_layout.precision_of(state, self.precision)]

    def formats_of(self, state: Elements) -> OptimizerFormats:
        """Of a state's optimizer states."""
        return state_layout.formats_in(state_layout.precision_of(state, self.precision), self.formats, muon=state.muon)


def most_micro_batches(model: Model) -> int:
    """How many micro-batches a step may have at most: each is a few operations a layer, which a run holds."""
    return max(MAX_VISITS // len(model.layers), 1)


def needs_all_gradients(precision: Precision, clip_grad_norm: float | None) -> str:
    """Why no update may begin before a step's last gradient is there, so that all are delayed; empty where they may."""
    if clip_grad_norm is not None:
        return "clipping by the global norm needs all gradients before any update"
    if precision == "fp16":
        return "skipping steps that overflow in fp16 needs all gradients before any update"
    return ""


class Prediction(Part):
    """What one steady step will take. Peaks are exact; seconds come from the simulator at the profile's rates."""

    step_seconds: Positive
    tokens_per_second: Positive
    peak_host_bytes: Bytes
    """The host arena: every buffer on host."""
    peak_device_bytes: Bytes
    """The device arena plus the largest compute workspace and the step's context."""
    host_arena_bytes: Bytes
    device_arena_bytes: Bytes
    peak_process_bytes: Bytes | None = None
    """Resident memory of the whole process, as the kernel counts it; None in a plan that says nothing of it."""
    ssd_bytes: Bytes
    """The size of the store."""
    ssd_read_bytes: Bytes
    ssd_write_bytes: Bytes
    h2d_bytes: Bytes
    d2h_bytes: Bytes
    bound_by: str
    """The resource that bounds steady steps, in words; where some write parameters and others do not, on average."""
    busy: dict[str, Fraction]
    """Resource -> share of the step in which it works."""
    program_seconds: Seconds
    """The linear program's own optimum: an estimate, the sum of stages that each take as long as their slowest
    resource, without fill and drain. A simulated step may beat it where one stage's work runs beside another's."""
    critical_path: dict[str, dict[str, Seconds]] = Field(default_factory=dict)
    """Resource -> kind of work -> its seconds on the chain of operations that makes the step as long as it is."""
    idle: dict[str, dict[str, Seconds]] = Field(default_factory=dict)
    """Resource -> cause -> seconds of the step in which it does nothing, by what it waits for."""

    @property
    def explained_seconds(self) -> float:
        """Of the step that `busy`, `critical_path` and `idle` are of: where some write parameters and others do not,
        of one that writes."""
        return sum(sum(kinds.values()) for kinds in self.critical_path.values()) or self.step_seconds


class Alternative(Part):
    """One candidate of the outer search."""

    micro_batch_size: Count
    micro_batches: Count
    tokens_per_second: Positive
    delay_ratio: Fraction
    program_seconds: Positive
    compute_tokens_per_second: Positive
    """Roofline: compute alone."""
    io_tokens_per_second: Positive
    """Roofline: everything but compute."""
    simulated: bool
    """True when tokens_per_second is the simulator's figure (for all but the plan itself of shortened models), False
    when the program's bound."""


class Sensitivity(Part):
    """One dual of the linear program: what a unit more of something would bring."""

    resource: str
    unit: str
    seconds_per_unit: float
    throughput_gain: float
    """Relative tokens/s gained by one more unit; 0.09 is +9%."""
    words: str = ""
    """What one more unit is, for people: a second drive."""


class Least(Part):
    """The least of one budget with which the plan's batch still works, the others as they are."""

    budget: Literal["host memory", "device memory", "ssd space"]
    least_bytes: Bytes
    """No less than the true least, and close to it: rounded up where no whole schedule was built."""
    tokens_per_second: Positive
    """What the program reaches there, an estimate as `program_seconds`: at most the plan's own, and often too much."""


class Reason(Part):
    """A true sentence or two on why the plan is as it is."""

    topic: str
    text: str


class Compared(Part):
    """The plan's batch trained another way, beside the plan. A figure is None where there is none."""

    kind: Literal["schedule", "idea"]
    """schedule: another schedule or place of states; idea: a rung from ZeRO-Infinity's way to this plan."""
    name: str
    host_bytes: Bytes | None = None
    """That it would take, which may be more than there is."""
    device_bytes: Bytes | None = None
    ssd_read_bytes: Bytes | None = None
    ssd_write_bytes: Bytes | None = None
    step_seconds: Positive | None = None
    tokens_per_second: Positive | None = None
    fits: bool
    """Within the plan's budgets."""
    note: str = ""
    """What it stands for, or why it is not possible."""


Recompute = Literal["auto", "all", "none", "paper"]
"""What backward recomputes of blocks: what the program decides, everything, nothing, or what PyAO's rule says."""


class Asked(Sparing):
    """What the user fixed of a plan's placement, so that another that takes its place keeps to it as well."""

    _SPARED = ("recompute", "wear_price", "activations")

    delay_ratio: Fraction | None = None
    residency: dict[str, Fraction] = Field(default_factory=dict)
    """Of parameters, optimizer and checkpoints the fraction on host; of device and turn that of states kept there."""
    max_ssd_write_bytes: Bytes | None = None
    """Written a step."""
    recompute: Recompute | None = None
    wear_price: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """What activations on ssd had to gain for what they write."""
    activations: Literal["int8"] | None = None
    """The format that saved activations may have beside their own."""


class Plan(Document):
    """plan.json."""

    schema_: Literal["ssdplan.plan/1"] = Field("ssdplan.plan/1", alias="schema")
    profile_sha256: str
    model: Model
    machine: Machine
    asked: Asked = Asked()
    decision: Decision
    prediction: Prediction
    alternatives: tuple[Alternative, ...]
    sensitivity: tuple[Sensitivity, ...]
    least: tuple[Least, ...] = ()
    reasons: tuple[Reason, ...] = ()
    comparison: tuple[Compared, ...] = ()

    @model_validator(mode="after")
    def _belongs(self) -> Self:
        classes = {state.state_class for state in self.model.states}
        if set(self.decision.placement) != classes:
            raise ValueError(f"decision.placement must name exactly the state classes {sorted(classes)}")
        if self.decision.precision != self.model.precision:
            raise ValueError("decision.precision differs from the model's")
        if self.decision.sequence_length != self.model.sequence_length:
            raise ValueError("decision.sequence_length differs from the one the model was profiled at")
        if self.decision.optimizer_states == "int8" and self.machine.update_rate_int8 is None:
            raise ValueError("decision.optimizer_states is int8, and machine.update_rate_int8 says nothing of updates")
        if self.decision.micro_batch_size not in self.model.micro_batch_sizes:
            raise ValueError("decision.micro_batch_size was not profiled")
        there = updates_on_device(self.model, self.machine, self.decision.formats)
        for state in self.model.states:
            placement = self.decision.placement[state.state_class]
            if placement.frozen != (state.frozen or self.decision.optimizer == "mezo"):
                has = "no optimizer states, and is not" if placement.frozen else "optimizer states, and is"
                raise ValueError(f"decision.placement.{state.state_class}: {state.name} has {has} frozen")
            if placement.optimizer_device and not there:
                where = f"placement.{state.state_class}.optimizer_device = {placement.optimizer_device:g}"
                raise ValueError(f"{where}: the machine has no device_update_rate or device_seconds; set it to 0")
        if why := unfit_plan(self.decision, muon=self.model.muon, there=there):
            raise ValueError(why)
        turning = self.model.trained_blocks
        for index, state in enumerate(self.model.states):
            turn = self.decision.placement[state.state_class].parameters_turn
            if turn and not set(self.model.uses(index)) <= set(turning):
                why = f"{state.name} is not a state of blocks alone that run backward; set it to 0"
                raise ValueError(f"decision.placement.{state.state_class}.parameters_turn = {turn:g}: {why}")
        together = self.machine.network.ranks if self.machine.network else 1
        if self.decision.ranks not in (1, together):
            raise ValueError(f"decision.ranks = {self.decision.ranks}: machine.network is of {together} rank(s)")
        blocks = {self.model.layers[block].layer_class for block in turning}
        for name, kept in self.decision.saved.items():
            if name not in blocks:
                raise ValueError(f"decision.saved.{name} is no class of blocks that run backward")
            known = [rung.name for rung in self.model.timing(name, self.decision.micro_batch_size).rungs]
            for each in kept:
                if each.rung not in known:
                    raise ValueError(f"decision.saved.{name}: {each.rung} is none of its rungs: {', '.join(known)}")
        self._require_rows()
        if self.decision.micro_batches > (most := most_micro_batches(self.model)):
            raise ValueError(
                f"decision.micro_batches = {self.decision.micro_batches}: {most} is the most for one step of "
                f"{len(self.model.layers)} layers; take more rows a micro-batch"
            )
        chunk = self.decision.update_chunk_elements
        chunks = sum(-(-state.elements // chunk) for state in self.model.states if not state.frozen)
        if chunks > MAX_UPDATES:
            raise ValueError(
                f"decision.update_chunk_elements = {chunk} makes {chunks} updates a step, more than {MAX_UPDATES}; "
                "take more elements at once"
            )
        reason = needs_all_gradients(self.decision.precision, self.decision.clip_grad_norm)
        if reason and not self.decision.zeroth_order and self.decision.delay_ratio != 1.0:
            raise ValueError(f"decision.delay_ratio must be 1: {reason}")
        return self

    def _require_rows(self) -> None:
        """Refuse a table by rows where there is none, or where it does not live whole on host beside a device."""
        if not (self.decision.zeroth_order and self.decision.zeroth_order.by_rows):
            return
        where = "decision.zeroth_order.by_rows"
        if self.model.table is None:
            raise ValueError(f"{where}: no state of the model has a table; set it to false")
        if self.decision.unified_memory:
            raise ValueError(f"{where}: with unified_memory nothing is moved to a device; set it to false")
        if rows_rates(self.machine) is None:
            raise ValueError(f"{where}: the machine lacks pending_rate_host or rows_bandwidth; set it to false")
        name = self.model.states[self.model.table].state_class
        placement = self.decision.placement[name]
        if placement.parameters_device or placement.parameters_prompt_host < 1 - TOLERANCE:
            raise ValueError(f"{where}: placement.{name} does not keep the table whole on host; set it to false")

    def saving_rungs(self) -> dict[tuple[str, str], Rung]:
        """(class of blocks, name) -> each rung that the plan saves activations by."""
        size = self.decision.micro_batch_size
        return {
            (name, each.rung): self.model.timing(name, size).rung(each.rung)
            for name, kept in self.decision.saved.items()
            for each in kept
        }

    @property
    def exact(self) -> bool:
        """Whether training has the bits of recomputing everything: nothing is saved in int8."""
        return all(rung.format is None for rung in self.saving_rungs().values())

    def refuse_estimates(self) -> None:
        """Raise MismatchError for a what-if: nobody measured that machine or that model, so nothing can be run."""
        if "estimated" in (self.machine.figures, self.model.figures):
            raise MismatchError(
                f"this plan is a what-if for {self.model.name} on {self.machine.name}, made from data sheets; "
                "profile this machine and the model, and solve again"
            )
