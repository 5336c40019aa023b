"""Traffic: what each layer's stages move and compute, as linear forms in the fractions that the program chooses.

Owns the traffic of a stage (GreedySnake sections 3 and 4), refined to what the graph does: the head has no
forward stage, states may be tied or frozen, the stack of blocks has ends. It knows no rates.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ssdplan.plans.documents.matrices import seconds_of
from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.state_layout import (
    GRADIENT_BYTES,
    checkpoint_bytes,
    precision_of,
)
from ssdplan.plans.schedule.shards import Shards

from . import saved
from .stages import LayerGroup, Stage, Updating, Use, Work
from .variables import CHECKPOINTS_ON_DEVICE, CHECKPOINTS_ON_HOST, CONSTANT, DELAY_RATIO, Linear, Variable, variables_of

DELAYED_USES_AHEAD = 3
"""Stages over which the head's delayed updates are spread: read, update and write (GreedySnake 4.4)."""


def layer_groups(model: Model, ranks: int = 1) -> tuple[LayerGroup, ...]:
    """The layers of `model`, equal ones together, in order of first appearance; of several `ranks` as each has them."""
    shards = Shards(ranks)
    first: dict[int, int] = {}
    times: dict[int, int] = {}
    for number, layer in enumerate(model.layers):
        for index in layer.states:
            first.setdefault(index, number)
            times[index] = times.get(index, 0) + 1
    last, lowest = len(model.layers) - 1, model.first_trained
    spread = min(DELAYED_USES_AHEAD, last - 1)
    states = model.states
    of_matrices = [
        (
            state.muon,
            seconds_of(model.matrix_updates, state.matrices) or 0.0,
            seconds_of(model.matrix_updates, state.matrices, on_device=True) if state.muon else None,
        )
        for state in states
    ]
    counts: dict[tuple[Any, ...], int] = {}
    for number, layer in enumerate(model.layers):
        key = (  # of plain values: a group for every layer takes long to make
            layer.layer_class,
            "embedding" if number == 0 else "head" if number == last else "block",
            tuple(
                (
                    states[index].state_class,
                    shards.share(states[index].elements),
                    first[index] == number,
                    times[index] > 1,
                    states[index].frozen,
                    states[index].elements,
                    shards.whole(states[index].elements),
                    precision_of(states[index], model.precision),
                    *of_matrices[index],
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
            uses=tuple(Use(*use) for use in uses),
            backward=backward,
            lowest=lowest_trained,
            keeps_output=keeps_output,
            head_share=head_share,
            count=count,
        )
        for (layer_class, role, uses, backward, lowest_trained, keeps_output, head_share), count in counts.items()
    )


def stages(model: Model, groups: tuple[LayerGroup, ...], work: Work) -> tuple[Stage, ...]:
    """Every kind of stage of a step."""
    n = work.micro_batches
    head = next(group for group in groups if group.role == "head")
    made = []
    for group in groups:
        timing = model.timing(group.layer_class, work.micro_batch_size)
        if group.role != "head":
            stage = _forward(model, group, head, work, timing.forward_stage_seconds(n))
            made.append(saved.saving(stage, group, timing, n))
        if group.backward:
            stage = _backward(model, group, work, timing.backward_stage_seconds(n))
            made.append(saved.rebuilding(stage, group, timing, n))
    return tuple(made)


def host_bytes(model: Model, groups: tuple[LayerGroup, ...], work: Work) -> Linear:
    """What stays on host for the whole run: states, checkpoints, and what of delayed gradients these do not hold."""
    return _kept_bytes(model, groups, work, on_host=True)


def ssd_bytes(model: Model, groups: tuple[LayerGroup, ...], work: Work) -> Linear:
    """The size of the store."""
    return _kept_bytes(model, groups, work, on_host=False)


def _kept_bytes(model: Model, groups: tuple[LayerGroup, ...], work: Work, *, on_host: bool) -> Linear:
    """What a tier, host or ssd, keeps of states, delayed gradients and activation checkpoints."""
    micro_batch_size, n = work.micro_batch_size, work.micro_batches
    total: dict[Variable, float] = {}
    for group in groups:
        for use in group.uses:
            if use.own:
                x = variables_of(use.state_class)
                size = group.count * use.elements
                for variable in x.parameters.on_host if on_host else x.parameters.on_ssd:
                    add(total, variable, use.element * size)
                if use.frozen:
                    continue
                for variable in x.optimizer.on_host if on_host else x.optimizer.on_ssd:
                    add(total, variable, work.formats_of(use).mean_bytes * size)
                add(total, x.gradient_host if on_host else x.gradient_ssd, GRADIENT_BYTES * size)
        if group.role == "block" and group.backward:
            checkpoints = group.count * n * checkpoint_bytes(model, micro_batch_size)
            if on_host:
                add(total, CHECKPOINTS_ON_HOST, checkpoints)
            else:
                _add_checkpoints_on_ssd(total, checkpoints)
            timing = model.timing(group.layer_class, micro_batch_size)
            for variable, nbytes in saved.kept_bytes(group, timing, "host" if on_host else "ssd").items():
                add(total, variable, group.count * n * nbytes)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one order of operations (`plans/schedule/order.py`) moves and keeps, as linear forms."""

    stages: Callable[[Model, tuple[LayerGroup, ...], Work], tuple[Stage, ...]]
    """Of a model, its groups of layers and the work: every kind of stage of a step."""
    host_bytes: Callable[[Model, tuple[LayerGroup, ...], Work], Linear]
    """Of the same: what stays on host for the whole run."""
    ssd_bytes: Callable[[Model, tuple[LayerGroup, ...], Work], Linear]
    """Of the same: the size of the store."""


VERTICAL = Traffic(stages=stages, host_bytes=host_bytes, ssd_bytes=ssd_bytes)


def device_bytes(model: Model, groups: tuple[LayerGroup, ...], work: Work) -> Linear:
    """What the device keeps between uses: parameters, the most of them at the turn, where both kinds are there,
    optimizer states with the gradients that wait for them, and activation checkpoints and what is saved beside them, of
    all micro-batches that are under way at once."""
    kept = work.micro_batches if work.schedule == "vertical" else 1
    total: dict[Variable, float] = {}
    for group in groups:
        for use in group.uses:
            if use.own:
                fractions = variables_of(use.state_class)
                element = work.parameter_bytes(use)
                size = group.count * use.elements
                add(total, fractions.device, element * size)
                add(total, fractions.turn, element * group.count * use.padded)
                if not use.frozen:
                    gradient = GRADIENT_BYTES if work.updates_wait else 0
                    add(total, fractions.updated, (work.formats_of(use).mean_bytes + gradient) * size)
        if group.role == "block" and group.backward:
            checkpoints = group.count * kept * checkpoint_bytes(model, work.micro_batch_size)
            add(total, CHECKPOINTS_ON_DEVICE, checkpoints)
        if group.role == "head" and group.backward:  # where all blocks' inputs stay, its own does too
            add(total, CHECKPOINTS_ON_DEVICE, kept * checkpoint_bytes(model, work.micro_batch_size))
        timing = model.timing(group.layer_class, work.micro_batch_size)
        for variable, nbytes in saved.kept_bytes(group, timing, "device").items():
            add(total, variable, group.count * kept * nbytes)
    return total


def without_links(stage: Stage) -> Stage:
    """`stage` where compute works on host memory: a gradient that waits for the next step is all that is copied."""
    waiting = stage.updates.get(CONSTANT, 0.0)  # what backward could update, but for alpha of it
    return replace(stage, h2d_bytes={}, d2h_bytes={DELAY_RATIO: GRADIENT_BYTES * waiting} if waiting else {})


def total_bytes(stages: Iterable[Stage], kind: str) -> Linear:
    """read_bytes or write_bytes of a whole step."""
    total: dict[Variable, float] = {}
    for stage in stages:
        for variable, factor in (stage.read_bytes if kind == "read" else stage.write_bytes).items():
            add(total, variable, stage.count * factor)
    return total


def _forward(
    model: Model,
    group: LayerGroup,
    head: LayerGroup,
    work: Work,
    compute_seconds: float,
) -> Stage:
    n = work.micro_batches
    checkpoint = checkpoint_bytes(model, work.micro_batch_size)
    read: dict[Variable, float] = {}
    write: dict[Variable, float] = {}
    updating = Updating()
    gathered: dict[Variable, float] = {}
    h2d: dict[Variable, float] = {CONSTANT: 0.0 if group.role == "embedding" else float((n - 1) * checkpoint)}
    if group.role == "block" and group.backward:
        add(h2d, CHECKPOINTS_ON_DEVICE, -(n - 1) * checkpoint)
    for use in group.uses:
        fractions, size, element = variables_of(use.state_class), float(use.elements), use.element
        add(read, fractions.parameters.prompt_ssd, element * size)
        add(h2d, CONSTANT, element * size)
        add(h2d, fractions.device, -element * size)
        add(gathered, CONSTANT, element * use.others)
    d2h: dict[Variable, float] = {}
    delayed = [(use, 1.0) for use in group.uses if use.updated]
    if group.head_share:
        delayed += [(use, group.head_share) for use in head.uses if use.updated]
    for use, share in delayed:
        fractions, size, element = variables_of(use.state_class), share * use.elements, use.element
        formats = work.formats_of(use)
        add(read, fractions.optimizer.delayed_ssd, formats.mean_bytes * size)
        add(read, fractions.gradient_ssd, GRADIENT_BYTES * size)
        add(write, fractions.optimizer.delayed_ssd, formats.mean_bytes * size)
        add(write, fractions.parameters.delayed_ssd, element * size)
        add(h2d, fractions.device_delayed, element * size)
        add(h2d, fractions.updated_delayed, -element * size)
        if formats.takes_copy:  # the update takes what it makes anew
            add(read, fractions.parameters.delayed_ssd, element * size)
            add(d2h, fractions.device_delayed, element * size)
            add(d2h, fractions.updated_delayed, -element * size)
        late = {DELAY_RATIO: 1.0, fractions.updated_delayed: -1.0}
        visits = use.muon and work.matrices_on_device
        updating.add(use, share, late, {fractions.updated: 1.0} if work.updates_wait else {}, visits=visits)
        if visits:  # states and gradient come to the device, states and parameters go back
            add_all(h2d, late, (formats.mean_bytes + GRADIENT_BYTES) * size)
            add_all(d2h, late, formats.mean_bytes * size)
            add_all(d2h, {DELAY_RATIO: 1.0, fractions.device_delayed: -1.0}, element * size)
            add(h2d, fractions.device_delayed, -element * size)
            add(h2d, fractions.updated_delayed, element * size)
    add(d2h, CONSTANT, float((n if group.keeps_output else n - 1) * checkpoint))
    if group.keeps_output:
        _add_checkpoints_on_ssd(write, n * checkpoint)
        add(d2h, CHECKPOINTS_ON_DEVICE, -n * checkpoint)
    return Stage(
        layer_class=group.layer_class,
        phase="forward",
        count=group.count,
        read_bytes=read,
        write_bytes=write,
        updates=updating.host,
        device_updates=updating.device,
        matrices=updating.matrices,
        matrix_seconds=updating.seconds,
        device_matrix_seconds=updating.device_seconds,
        h2d_bytes=h2d,
        d2h_bytes=d2h,
        compute_seconds={CONSTANT: compute_seconds},
        gathered=gathered if work.ranks > 1 else {},
        collectives=len(group.uses) if work.ranks > 1 else 0,
    )


def _backward(model: Model, group: LayerGroup, work: Work, compute_seconds: float) -> Stage:
    n = work.micro_batches
    checkpoint = checkpoint_bytes(model, work.micro_batch_size)
    read: dict[Variable, float] = {}
    write: dict[Variable, float] = {}
    updating = Updating()
    gathered: dict[Variable, float] = {}
    exchanged = added = 0.0
    # Inter-layer gradients; for the head, its input.
    h2d: dict[Variable, float] = {CONSTANT: float((n - 1) * checkpoint)}
    d2h: dict[Variable, float] = {CONSTANT: 0.0 if group.lowest else float((n - 1) * checkpoint)}
    for use in group.uses:
        fractions, size, element = variables_of(use.state_class), use.elements, use.element
        formats = work.formats_of(use)
        add(read, fractions.parameters.prompt_ssd, element * size)
        if group.role != "head" or not use.own:  # the head's own delayed part comes from its update, not from ssd
            add(read, fractions.parameters.delayed_ssd, element * size)
        if use.frozen or (work.unified_memory and work.ranks == 1) or not formats.takes_copy:
            add(read, fractions.turn_ssd, -element * size)  # else an update takes them on host
        add(h2d, CONSTANT, element * size)
        for variable in (fractions.device, fractions.turn):
            add(h2d, variable, -element * size)
        add(gathered, CONSTANT, element * use.others)
        add(gathered, fractions.turn, -element * use.others)
        if use.frozen:
            continue
        leaves = GRADIENT_BYTES * (size if use.own else use.whole)
        add(d2h, CONSTANT, leaves)
        add(d2h, fractions.updated, -leaves)
        if use.own:
            exchanged += GRADIENT_BYTES * use.others
            added += GRADIENT_BYTES * use.padded
            add(read, fractions.optimizer.prompt_ssd, formats.mean_bytes * size)
            add(write, fractions.optimizer.prompt_ssd, formats.mean_bytes * size)
            add(write, fractions.parameters.prompt_ssd, element * size)
            add(write, fractions.gradient_ssd, GRADIENT_BYTES * size)
            prompt = {CONSTANT: 1.0, DELAY_RATIO: -1.0, fractions.updated: -1.0, fractions.updated_delayed: 1.0}
            visits = use.muon and work.matrices_on_device
            there = {} if work.updates_wait else {fractions.updated: 1.0}
            updating.add(use, 1.0, prompt, there, visits=visits)
            if visits:  # the gradient stays; states come and go, and parameters leave unless they live there
                add_all(h2d, prompt, formats.mean_bytes * size)
                add_all(d2h, prompt, (formats.mean_bytes - GRADIENT_BYTES) * size)
                live = {CONSTANT: 1.0, DELAY_RATIO: -1.0, fractions.device: -1.0, fractions.device_delayed: 1.0}
                add_all(d2h, live, element * size)
            for sign, kept, late in (
                ()
                if visits
                else (
                    (1, fractions.device, fractions.device_delayed),  # what a prompt update makes
                    (-1, fractions.updated, fractions.updated_delayed),
                )
            ):
                for link in (h2d, d2h) if formats.takes_copy else (h2d,):
                    add(link, kept, sign * element * size)
                    add(link, late, -sign * element * size)
            if use.shared:
                add(h2d, CONSTANT, GRADIENT_BYTES * use.whole)  # what the head has added to the gradient
                add(h2d, fractions.updated, -GRADIENT_BYTES * use.whole)
    if group.role == "block":
        _add_checkpoints_on_ssd(read, n * checkpoint)
        add(h2d, CONSTANT, n * checkpoint)
        add(h2d, CHECKPOINTS_ON_DEVICE, -(2 * n - 1) * checkpoint)  # and the gradients from the block above
        if not group.lowest:
            add(d2h, CHECKPOINTS_ON_DEVICE, -(n - 1) * checkpoint)
    return Stage(
        layer_class=group.layer_class,
        phase="backward",
        count=group.count,
        read_bytes=read,
        write_bytes=write,
        updates=updating.host,
        device_updates=updating.device,
        matrices=updating.matrices,
        matrix_seconds=updating.seconds,
        device_matrix_seconds=updating.device_seconds,
        h2d_bytes=h2d,
        d2h_bytes=d2h,
        compute_seconds={CONSTANT: compute_seconds},
        gathered=gathered if work.ranks > 1 else {},
        exchanged=exchanged if work.ranks > 1 else 0.0,
        added=added if work.ranks > 1 else 0.0,
        collectives=len(group.uses) + sum(use.updated for use in group.uses) if work.ranks > 1 else 0,
    )


def add(total: dict[Variable, float], variable: Variable, factor: float) -> None:
    """Add a term to a linear form that is being made."""
    total[variable] = total.get(variable, 0.0) + factor


def add_all(total: dict[Variable, float], form: Linear, factor: float) -> None:
    """Add so many times a form."""
    for variable, each in form.items():
        add(total, variable, factor * each)


def _add_checkpoints_on_ssd(total: dict[Variable, float], nbytes: float) -> None:
    add(total, CONSTANT, nbytes)
    add(total, CHECKPOINTS_ON_HOST, -nbytes)
    add(total, CHECKPOINTS_ON_DEVICE, -nbytes)
