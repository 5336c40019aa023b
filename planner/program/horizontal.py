"""Traffic of the horizontal schedule: what each stage of one micro-batch moves and computes, as linear forms.

Owns ZeRO-Infinity's order of work in the words of `traffic.py` (GreedySnake 1 and 3.3), refined to what the graph does:
the head turns around with what it has, states may be tied. No update is delayed; of delayed parts all forms are zero.
"""

from dataclasses import replace

from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.state_layout import (
    GRADIENT_BYTES,
    checkpoint_bytes,
)

from . import saved
from .stages import LayerGroup, Stage, Updating, Work
from .traffic import Traffic
from .traffic import host_bytes as vertical_host_bytes
from .traffic import ssd_bytes as vertical_ssd_bytes
from .variables import CHECKPOINTS_ON_HOST, CONSTANT, Linear, Variable, variables_of


def stages(model: Model, groups: tuple[LayerGroup, ...], work: Work) -> tuple[Stage, ...]:
    """Every kind of stage of a step. A backward is one of three kinds: of the first micro-batch,
    which begins the sums of gradients, of the last, which is followed by updates, and of those between."""
    micro_batch_size, n, made = work.micro_batch_size, work.micro_batches, []
    for group in groups:
        timing = model.timing(group.layer_class, micro_batch_size)
        if group.role != "head":
            made.append(saved.saving(_forward(model, group, work), group, timing, 1))
        if not group.backward:
            continue
        for first, last, times in ((True, n == 1, 1), (False, False, n - 2), (False, True, 1 if n > 1 else 0)):
            if times > 0:
                stage = _backward(model, group, work, times, first=first, last=last)
                made.append(saved.rebuilding(stage, group, timing, 1))
    return tuple(made)


def host_bytes(model: Model, groups: tuple[LayerGroup, ...], work: Work) -> Linear:
    """What stays on host for the whole run: states, the checkpoints of one micro-batch, and the sums of gradients."""
    states = vertical_host_bytes(model, groups, replace(work, micro_batches=1))
    return {**states, CONSTANT: GRADIENT_BYTES * _accumulated_elements(groups, work.micro_batches)}


def ssd_bytes(model: Model, groups: tuple[LayerGroup, ...], work: Work) -> Linear:
    """The size of the store, which holds the checkpoints of one micro-batch, however many there are."""
    return vertical_ssd_bytes(model, groups, replace(work, micro_batches=1))


def _accumulated_elements(groups: tuple[LayerGroup, ...], n: int) -> int:
    """Elements whose sum of gradients has a place on host: all, or with one micro-batch those that two layers use."""
    return sum(
        group.count * use.whole for group in groups for use in group.uses if use.updated and (n > 1 or use.shared)
    )


def _forward(model: Model, group: LayerGroup, work: Work) -> Stage:
    micro_batch_size, several = work.micro_batch_size, work.ranks > 1
    checkpoint = checkpoint_bytes(model, micro_batch_size) if group.keeps_output else 0
    return Stage(
        layer_class=group.layer_class,
        phase="forward",
        count=work.micro_batches * group.count,
        read_bytes=_parameters_read(group),
        write_bytes=_checkpoint_on_ssd(checkpoint),
        updates={},
        h2d_bytes=_parameters_uploaded(group),
        d2h_bytes={CONSTANT: float(checkpoint)},
        compute_seconds={CONSTANT: model.timing(group.layer_class, micro_batch_size).forward_stage_seconds(1)},
        gathered=_gathered(group) if several else {},
        collectives=len(group.uses) if several else 0,
    )


def _backward(
    model: Model,
    group: LayerGroup,
    work: Work,
    times: int,
    *,
    first: bool,
    last: bool,
) -> Stage:
    micro_batch_size, several, exchanged, added, collectives = work.micro_batch_size, work.ranks > 1, 0.0, 0.0, 0
    checkpoint = checkpoint_bytes(model, micro_batch_size) if group.role == "block" else 0
    read, write, updating = _parameters_read(group), dict[Variable, float](), Updating()
    h2d, d2h = _parameters_uploaded(group), {CONSTANT: 0.0}
    h2d[CONSTANT] += checkpoint
    for variable, nbytes in _checkpoint_on_ssd(checkpoint).items():
        read[variable] = read.get(variable, 0.0) + nbytes
    for use in group.uses:
        if use.frozen:
            continue
        fractions, size, formats = variables_of(use.state_class), use.elements, work.formats_of(use)
        completed = last and use.own
        d2h[CONSTANT] += GRADIENT_BYTES * (size if completed else use.whole)
        if not first or (use.own and use.shared):  # the head has begun the sum of what it shares
            h2d[CONSTANT] += GRADIENT_BYTES * use.whole
        if completed:
            exchanged += GRADIENT_BYTES * use.others
            added += GRADIENT_BYTES * use.padded
            collectives += 1
            updating.add(use, 1.0, {CONSTANT: 1.0}, {})
            h2d[fractions.device] += use.element * size  # what an update makes
            if formats.takes_copy:
                d2h[fractions.device] = d2h.get(fractions.device, 0.0) + use.element * size
            for total, variable, each in (
                (read, fractions.optimizer.prompt_ssd, formats.mean_bytes),
                (write, fractions.optimizer.prompt_ssd, formats.mean_bytes),
                (write, fractions.parameters.prompt_ssd, use.element),
            ):
                total[variable] = total.get(variable, 0.0) + each * size
    return Stage(
        layer_class=group.layer_class,
        phase="backward",
        count=times * group.count,
        read_bytes=read,
        write_bytes=write,
        updates=updating.host,
        matrices=updating.matrices,
        matrix_seconds=updating.seconds,
        h2d_bytes=h2d,
        d2h_bytes=d2h,
        compute_seconds={CONSTANT: model.timing(group.layer_class, micro_batch_size).backward_stage_seconds(1)},
        gathered=_gathered(group) if several else {},
        exchanged=exchanged if several else 0.0,
        added=added if several else 0.0,
        collectives=len(group.uses) + collectives if several else 0,
    )


def _gathered(group: LayerGroup) -> dict[Variable, float]:
    """Bytes of the other ranks' parameters, for every stage anew."""
    return {CONSTANT: float(sum(use.element * use.others for use in group.uses))}


def _parameters_uploaded(group: LayerGroup) -> dict[Variable, float]:
    """All but those that the device keeps."""
    moved = {CONSTANT: 0.0}
    for use in group.uses:
        nbytes = float(use.element * use.elements)
        device = variables_of(use.state_class).device
        moved[CONSTANT] += nbytes
        moved[device] = moved.get(device, 0.0) - nbytes
    return moved


def _parameters_read(group: LayerGroup) -> dict[Variable, float]:
    read: dict[Variable, float] = {}
    for use in group.uses:
        on_ssd = variables_of(use.state_class).parameters.prompt_ssd
        read[on_ssd] = read.get(on_ssd, 0.0) + use.element * use.elements
    return read


def _checkpoint_on_ssd(nbytes: int) -> dict[Variable, float]:
    return {CONSTANT: float(nbytes), CHECKPOINTS_ON_HOST: -float(nbytes)} if nbytes else {}


HORIZONTAL = Traffic(stages=stages, host_bytes=host_bytes, ssd_bytes=ssd_bytes)
