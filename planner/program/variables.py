"""Variables of the linear program: keys with fields, and linear forms over them.

Owns what a variable stands for (GreedySnake 4.5: the delay ratio alpha, the storage ratios x, the seconds t of a stage)
and what people call it. It knows no model, no machine and no solver.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Literal, NamedTuple, TypeVar

from ssdplan.plans.documents.plan import SavedTier

Form = Literal[
    "delay ratio",
    "activation checkpoints",
    "gradient buffers",
    "optimizer states",
    "parameters",
    "gradients",
    "turn copies",
    "saved activations",
    "stage seconds",
    "constant",
]
"""Turn copies are parameters that stay on the device from a layer's forward to its backward."""
Part = Literal["all", "prompt", "delayed"]
Tier = Literal["host", "ssd", "device", "reclaimed"]
"""Reclaimed: host memory in which activation checkpoints lay that were consumed (GreedySnake 4.4)."""


class Variable(NamedTuple):
    """One variable of the program, or `CONSTANT`. Fields that mean nothing for its form keep their defaults."""

    form: Form
    state_class: str = ""
    """The class of states that it is a fraction of."""
    part: Part = "all"
    """Whether the updates of these elements are prompt or delayed."""
    tier: Tier | None = None
    stage: int = -1
    """Number of a stage, in the order of the traffic's stages."""
    layer_class: str = ""
    """The class of blocks whose activations are saved: it is a fraction of its pairs of layer and micro-batch."""
    rung: str = ""
    """By which these save them."""

    def __str__(self) -> str:
        """In words, such as `block: optimizer states, delayed, on ssd`."""
        if self.form == "stage seconds":
            return f"seconds of stage {self.stage}"
        if self.form == "saved activations":
            return f"{self.layer_class}: {self.form} by {self.rung}, on {self.tier}"
        words = self.form if self.part == "all" else f"{self.form}, {self.part}"
        if self.tier is not None:
            words += ", in reclaimed memory" if self.tier == "reclaimed" else f", on {self.tier}"
        return f"{self.state_class}: {words}" if self.state_class else words


Linear = Mapping[Variable, float]
"""A linear form: variable -> coefficient, and `CONSTANT` -> the constant term."""

CONSTANT = Variable("constant")
"""The key of a linear form's constant term. No program has it as a variable."""
DELAY_RATIO = Variable("delay ratio")
"""Alpha: the fraction of each state whose update runs during the next step's forward."""
CHECKPOINTS_ON_HOST = Variable("activation checkpoints", tier="host")
"""The fraction of all activation checkpoints that stays on host; what stays nowhere else goes to ssd."""
CHECKPOINTS_ON_DEVICE = Variable("activation checkpoints", tier="device")
"""The fraction that stays on the device, where their gradients take their place."""
GRADIENT_BUFFERS = Variable("gradient buffers")
"""The fraction of the buffers for large states' gradients that updates on host need."""


@lru_cache(maxsize=4096)
def seconds_of_stage(number: int) -> Variable:
    """The seconds that one kind of stage takes, in the program's unit for that stage."""
    return Variable("stage seconds", stage=number)


@lru_cache(maxsize=4096)
def saved_by(layer_class: str, rung: str, tier: SavedTier) -> Variable:
    """The share of a class's pairs of layer and micro-batch that save by `rung` and keep that on `tier`."""
    return Variable("saved activations", tier=tier, layer_class=layer_class, rung=rung)


Item = TypeVar("Item")
Other = TypeVar("Other")


@dataclass(frozen=True, slots=True)
class Split(Generic[Item]):
    """One thing for each part of a state on each tier outside the device."""

    prompt_host: Item
    prompt_ssd: Item
    delayed_host: Item
    delayed_ssd: Item

    def all(self) -> tuple[Item, Item, Item, Item]:
        return self.prompt_host, self.prompt_ssd, self.delayed_host, self.delayed_ssd

    @property
    def on_host(self) -> tuple[Item, Item]:
        return self.prompt_host, self.delayed_host

    @property
    def on_ssd(self) -> tuple[Item, Item]:
        return self.prompt_ssd, self.delayed_ssd

    @property
    def delayed(self) -> tuple[Item, Item]:
        return self.delayed_host, self.delayed_ssd


@dataclass(frozen=True, slots=True)
class OfClass(Generic[Item]):
    """One thing for each variable of one class of states. All are fractions of the elements of the class.

    Parameters are split five ways: prompt or delayed times host or ssd, and the device. What lives on the device has a
    prompt and a delayed part too, as its update has.
    """

    state_class: str
    optimizer: Split[Item]
    parameters: Split[Item]
    gradient_reclaimed: Item
    """Delayed gradients in memory reclaimed from consumed activation checkpoints."""
    gradient_host: Item
    """Delayed gradients in host memory of their own."""
    gradient_ssd: Item
    device: Item
    """Parameters that stay on the device for the whole run."""
    device_delayed: Item
    """The delayed part of these."""
    turn: Item
    """Parameters that stay on the device from forward to backward."""
    turn_ssd: Item
    """The part of these whose home is on ssd: backward need not read it again."""
    updated: Item
    """Of the parameters that stay on the device for the whole run, those whose optimizer states do too."""
    updated_delayed: Item
    """The part of these that would be delayed anywhere else."""

    @property
    def gradient(self) -> tuple[Item, Item, Item]:
        return self.gradient_reclaimed, self.gradient_host, self.gradient_ssd

    @property
    def elsewhere(self) -> tuple[Item, ...]:
        """Everything that lives outside the device: optimizer states, parameters, delayed gradients."""
        return (*self.optimizer.all(), *self.parameters.all(), *self.gradient)

    @property
    def on_device(self) -> tuple[Item, Item, Item, Item]:
        """All parameters that the device keeps between uses."""
        return self.device, self.device_delayed, self.turn, self.turn_ssd

    @property
    def updated_there(self) -> tuple[Item, Item]:
        """What the device updates."""
        return self.updated, self.updated_delayed

    @property
    def of_updates(self) -> tuple[Item, ...]:
        """Where something of an update is. A frozen state has none of it."""
        optimizer = (*self.optimizer.all(), *self.updated_there)
        return (*optimizer, *self.parameters.delayed, *self.gradient, self.device_delayed)

    def all(self) -> tuple[Item, ...]:
        return (*self.elsewhere, *self.on_device, *self.updated_there)

    def map(self, function: Callable[[Item], Other]) -> "OfClass[Other]":
        """The same of what `function` makes of each."""

        def split(four: Split[Item]) -> Split[Other]:
            return Split(*(function(item) for item in four.all()))

        rest = (function(item) for item in (*self.gradient, *self.on_device, *self.updated_there))
        return OfClass(self.state_class, split(self.optimizer), split(self.parameters), *rest)


@lru_cache(maxsize=4096)
def variables_of(state_class: str) -> OfClass[Variable]:
    """The variables of a class of states."""

    def split(form: Form) -> Split[Variable]:
        return Split(
            prompt_host=Variable(form, state_class, "prompt", "host"),
            prompt_ssd=Variable(form, state_class, "prompt", "ssd"),
            delayed_host=Variable(form, state_class, "delayed", "host"),
            delayed_ssd=Variable(form, state_class, "delayed", "ssd"),
        )

    return OfClass(
        state_class=state_class,
        optimizer=split("optimizer states"),
        parameters=split("parameters"),
        gradient_reclaimed=Variable("gradients", state_class, "delayed", "reclaimed"),
        gradient_host=Variable("gradients", state_class, "delayed", "host"),
        gradient_ssd=Variable("gradients", state_class, "delayed", "ssd"),
        device=Variable("parameters", state_class, tier="device"),
        device_delayed=Variable("parameters", state_class, "delayed", "device"),
        turn=Variable("turn copies", state_class, tier="device"),
        turn_ssd=Variable("turn copies", state_class, tier="ssd"),
        updated=Variable("optimizer states", state_class, tier="device"),
        updated_delayed=Variable("optimizer states", state_class, "delayed", "device"),
    )


def value(form: Linear, at: Mapping[Variable, float]) -> float:
    """The value of a linear form at a point."""
    return sum(factor if variable is CONSTANT else factor * at[variable] for variable, factor in form.items())


def is_constant(form: Linear) -> bool:
    """Whether a form has no variable."""
    return all(variable is CONSTANT for variable in form)
