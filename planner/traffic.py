"""Traffic: what each layer's stages move and compute, as linear forms in the fractions that the program chooses.

Owns the traffic of a stage (GreedySnake sections 3 and 4), refined to what the graph does: the head has no
forward stage, states may be tied or frozen, the stack of blocks has ends. It knows no rates.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ssdplan.plans.profile import Model
from ssdplan.plans.state_layout import ELEMENT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES, OptimizerStates, checkpoint_bytes

from .lexicographic import Linear

ALPHA = "alpha"
CHECKPOINT_HOST = "checkpoint host"
DELAYED_USES_AHEAD = 3
"""Stages over which the head's delayed updates are spread: read, update and write (GreedySnake 4.4)."""


@dataclass(frozen=True, slots=True)
class StateVariables:
    """The variables of one state class: its part of every state, as fractions of the elements of all its states.

    Parameters are split five ways: prompt or delayed times host or ssd, and the device. What lives on the device is
    prompt and delayed too, as its update is.
    """

    state_class: str
    optimizer: tuple[str, str, str, str]
    """Prompt on host, prompt on ssd, delayed on host, delayed on ssd."""
    parameters: tuple[str, str, str, str]
    gradient: tuple[str, str, str]
    """Delayed gradients: in memory reclaimed from consumed checkpoints, in extra host memory, on ssd."""
    device: tuple[str, str]
    """Parameters that stay on the device for the whole run, and the delayed part of these."""
    turn: tuple[str, str]
    """Parameters that stay on the device from forward to backward, and what of them would be read from ssd."""

    @property
    def of_updates(self) -> frozenset[str]:
        """Those that say where something of an update is, which frozen states have none of."""
        return frozenset((*self.optimizer, *self.parameters[2:], *self.gradient, self.device[1]))

    def all(self) -> tuple[str, ...]:
        return (*self.optimizer, *self.parameters, *self.gradient, *self.device, *self.turn)


@lru_cache(maxsize=4096)
def variables_of(state_class: str) -> StateVariables:
    """The variables of a class, whose names are made once."""

    def name(what: str) -> str:
        return f"{state_class}: {what}"

    def four(what: str) -> tuple[str, str, str, str]:
        prompt, delayed = f"{what} prompt", f"{what} delayed"
        return name(f"{prompt} host"), name(f"{prompt} ssd"), name(f"{delayed} host"), name(f"{delayed} ssd")

    return StateVariables(
        state_class=state_class,
        optimizer=four("optimizer"),
        parameters=four("parameters"),
        gradient=(name("gradient reclaimed"), name("gradient host"), name("gradient ssd")),
        device=(name("parameters device"), name("parameters device delayed")),
        turn=(name("parameters turn"), name("parameters turn ssd")),
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """What one kind of stage takes, and how many of them a step has."""

    layer_class: str
    phase: str
    """forward or backward."""
    count: int
    read_bytes: Linear
    write_bytes: Linear
    updates: Linear
    """Elements."""
    h2d_bytes: Linear
    d2h_bytes: Linear
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class _Use:
    """One state of a layer."""

    state_class: str
    elements: int
    own: bool
    """The layer is the first that uses the state: it owns its updates."""
    shared: bool
    """Another layer uses it too."""
    frozen: bool
    """It has parameters only, which nothing updates."""

    @property
    def updated(self) -> bool:
        """The layer is the one that updates the state."""
        return self.own and not self.frozen


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that cost the same, stage by stage."""

    layer_class: str
    role: str
    """embedding, block or head."""
    uses: tuple[_Use, ...]
    backward: bool
    """It is not below all layers that are trained."""
    lowest: bool
    """Of those the first, which hands no gradient down."""
    keeps_output: bool
    """Its output is a checkpoint, not only the next layer's input."""
    head_share: float
    """The part of the head's delayed updates that runs during its forward."""
    count: int = field(default=1)


def layer_groups(model: Model) -> tuple[LayerGroup, ...]:
    """The layers of `model`, equal ones together, in order of first appearance."""
    first: dict[int, int] = {}
    times: dict[int, int] = {}
    for number, layer in enumerate(model.layers):
        for index in layer.states:
            first.setdefault(index, number)
            times[index] = times.get(index, 0) + 1
    last, lowest = len(model.layers) - 1, model.first_trained
    spread = min(DELAYED_USES_AHEAD, last - 1)
    states = model.states
    counts: dict[tuple[Any, ...], int] = {}
    for number, layer in enumerate(model.layers):
        key = (  # of plain values: a group for every layer takes long to make
            layer.layer_class,
            "embedding" if number == 0 else "head" if number == last else "block",
            tuple(
                (
                    states[index].state_class,
                    states[index].elements,
                    first[index] == number,
                    times[index] > 1,
                    states[index].frozen,
                )
                for index in layer.states
            ),
            number >= lowest,
            number == lowest,
            lowest <= number + 1 < last,
            1 / spread if last - spread <= number < last else 0.0,
        )
        counts[key] = counts.get(key, 0) + 1
    return tuple(
        LayerGroup(
            layer_class=layer_class,
            role=role,
            uses=tuple(_Use(*use) for use in uses),
            backward=backward,
            lowest=lowest_trained,
            keeps_output=keeps_output,
            head_share=head_share,
            count=count,
        )
        for (layer_class, role, uses, backward, lowest_trained, keeps_output, head_share), count in counts.items()
    )


def stages(
    model: Model, groups: tuple[LayerGroup, ...], micro_batch_size: int, n: int, optimizer_states: OptimizerStates
) -> tuple[Stage, ...]:
    """Every kind of stage of a step of `n` micro-batches."""
    each = OPTIMIZER_BYTES[optimizer_states]
    head = next(group for group in groups if group.role == "head")
    made = []
    for group in groups:
        timing = model.timing(group.layer_class, micro_batch_size)
        if group.role != "head":
            made.append(_forward(model, group, head, micro_batch_size, n, each, timing.forward_stage_seconds(n)))
        if group.backward:
            made.append(_backward(model, group, micro_batch_size, n, each, timing.backward_stage_seconds(n)))
    return tuple(made)


def host_bytes(
    model: Model, groups: tuple[LayerGroup, ...], micro_batch_size: int, n: int, optimizer_states: OptimizerStates
) -> Linear:
    """What stays on host for the whole run: states, checkpoints, and what of delayed gradients these do not hold."""
    element = ELEMENT_BYTES[model.precision]
    total: dict[str, float] = {}
    for group in groups:
        for use in group.uses:
            if use.own:
                names = variables_of(use.state_class)
                size = group.count * use.elements
                for name in (names.parameters[0], names.parameters[2]):
                    _add(total, name, element * size)
                if use.frozen:
                    continue
                for name in (names.optimizer[0], names.optimizer[2]):
                    _add(total, name, OPTIMIZER_BYTES[optimizer_states] * size)
                _add(total, names.gradient[1], GRADIENT_BYTES * size)
        if group.role == "block" and group.backward:
            _add(total, CHECKPOINT_HOST, group.count * n * checkpoint_bytes(model, micro_batch_size))
    return total


def ssd_bytes(
    model: Model, groups: tuple[LayerGroup, ...], micro_batch_size: int, n: int, optimizer_states: OptimizerStates
) -> Linear:
    """The size of the store."""
    element = ELEMENT_BYTES[model.precision]
    total: dict[str, float] = {}
    for group in groups:
        for use in group.uses:
            if use.own:
                names = variables_of(use.state_class)
                size = group.count * use.elements
                for name in (names.parameters[1], names.parameters[3]):
                    _add(total, name, element * size)
                if use.frozen:
                    continue
                for name in (names.optimizer[1], names.optimizer[3]):
                    _add(total, name, OPTIMIZER_BYTES[optimizer_states] * size)
                _add(total, names.gradient[2], GRADIENT_BYTES * size)
        if group.role == "block" and group.backward:
            _add_checkpoints_on_ssd(total, group.count * n * checkpoint_bytes(model, micro_batch_size))
    return total


def device_bytes(model: Model, groups: tuple[LayerGroup, ...]) -> Linear:
    """Parameters that the device keeps between uses; the most of it at the turn, where both kinds are there."""
    element = ELEMENT_BYTES[model.precision]
    total: dict[str, float] = {}
    for group in groups:
        for use in group.uses:
            if use.own:
                names = variables_of(use.state_class)
                for name in (names.device[0], names.turn[0]):
                    _add(total, name, element * group.count * use.elements)
    return total


def without_links(stage: Stage) -> Stage:
    """`stage` where compute works on host memory: a gradient that waits for the next step is all that is copied."""
    waiting = stage.updates.get("", 0.0)  # what backward could update, but for alpha of it
    return replace(stage, h2d_bytes={}, d2h_bytes={ALPHA: GRADIENT_BYTES * waiting} if waiting else {})


def total_bytes(stages: Iterable[Stage], kind: str) -> Linear:
    """read_bytes or write_bytes of a whole step."""
    total: dict[str, float] = {}
    for stage in stages:
        for name, factor in (stage.read_bytes if kind == "read" else stage.write_bytes).items():
            _add(total, name, stage.count * factor)
    return total


def _forward(
    model: Model,
    group: LayerGroup,
    head: LayerGroup,
    micro_batch_size: int,
    n: int,
    optimizer_bytes: float,
    compute_seconds: float,
) -> Stage:
    element = ELEMENT_BYTES[model.precision]
    checkpoint = checkpoint_bytes(model, micro_batch_size)
    read: dict[str, float] = {}
    write: dict[str, float] = {}
    updates: dict[str, float] = {}
    h2d: dict[str, float] = {"": 0.0 if group.role == "embedding" else float((n - 1) * checkpoint)}
    for use in group.uses:
        names, size = variables_of(use.state_class), float(use.elements)
        _add(read, names.parameters[1], element * size)
        _add(h2d, "", element * size)
        _add(h2d, names.device[0], -element * size)
    delayed = [(use, 1.0) for use in group.uses if use.updated]
    if group.head_share:
        delayed += [(use, group.head_share) for use in head.uses if use.updated]
    for use, share in delayed:
        names, size = variables_of(use.state_class), share * use.elements
        _add(read, names.optimizer[3], optimizer_bytes * size)
        _add(read, names.gradient[2], GRADIENT_BYTES * size)
        _add(write, names.optimizer[3], optimizer_bytes * size)
        _add(write, names.parameters[3], element * size)
        _add(h2d, names.device[1], element * size)
        _add(updates, ALPHA, size)
    if group.keeps_output:
        _add_checkpoints_on_ssd(write, n * checkpoint)
    return Stage(
        layer_class=group.layer_class,
        phase="forward",
        count=group.count,
        read_bytes=read,
        write_bytes=write,
        updates=updates,
        h2d_bytes=h2d,
        d2h_bytes={"": float((n if group.keeps_output else n - 1) * checkpoint)},
        compute_seconds=compute_seconds,
    )


def _backward(
    model: Model, group: LayerGroup, micro_batch_size: int, n: int, optimizer_bytes: float, compute_seconds: float
) -> Stage:
    element = ELEMENT_BYTES[model.precision]
    checkpoint = checkpoint_bytes(model, micro_batch_size)
    read: dict[str, float] = {}
    write: dict[str, float] = {}
    updates: dict[str, float] = {}
    h2d: dict[str, float] = {"": float((n - 1) * checkpoint)}  # inter-layer gradients; for the head, its input
    d2h: dict[str, float] = {"": 0.0 if group.lowest else float((n - 1) * checkpoint)}
    for use in group.uses:
        names, size = variables_of(use.state_class), use.elements
        _add(read, names.parameters[1], element * size)
        if group.role != "head" or not use.own:  # the head's own delayed part comes from its update, not from ssd
            _add(read, names.parameters[3], element * size)
        _add(read, names.turn[1], -element * size)
        _add(h2d, "", element * size)
        for kept in (names.device[0], names.turn[0]):
            _add(h2d, kept, -element * size)
        if use.frozen:
            continue
        _add(d2h, "", GRADIENT_BYTES * size)
        if use.own:
            _add(read, names.optimizer[1], optimizer_bytes * size)
            _add(write, names.optimizer[1], optimizer_bytes * size)
            _add(write, names.parameters[1], element * size)
            _add(write, names.gradient[2], GRADIENT_BYTES * size)
            _add(updates, "", size)
            _add(updates, ALPHA, -size)
            _add(h2d, names.device[0], element * size)  # what a prompt update makes
            _add(h2d, names.device[1], -element * size)
            if use.shared:
                _add(h2d, "", GRADIENT_BYTES * size)  # what the head has added to the gradient
    if group.role == "block":
        _add_checkpoints_on_ssd(read, n * checkpoint)
        _add(h2d, "", n * checkpoint)
    return Stage(
        layer_class=group.layer_class,
        phase="backward",
        count=group.count,
        read_bytes=read,
        write_bytes=write,
        updates=updates,
        h2d_bytes=h2d,
        d2h_bytes=d2h,
        compute_seconds=compute_seconds,
    )


def _add(total: dict[str, float], name: str, factor: float) -> None:
    total[name] = total.get(name, 0.0) + factor


def _add_checkpoints_on_ssd(total: dict[str, float], nbytes: float) -> None:
    _add(total, "", nbytes)
    _add(total, CHECKPOINT_HOST, -nbytes)
