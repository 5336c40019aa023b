"""Traffic of the zeroth-order schedule: what each layer's stage moves, draws and computes, as linear forms.

Owns ZO-Offloading's step (sections 2.2 and 2.3) in the words of `traffic.py`: one stage a layer, in which every
micro-batch runs forward twice for each direction. There are no gradients, no optimizer states and no checkpoints, so
all of their forms are zero. What goes back to where it lives does so in one step of `ZerothOrder.written_every`, so a
step's share of it is on average. Of a table that comes by rows these alone move; what host does to the table itself has
the whole step, so each stage has its share.
"""

from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.state_layout import checkpoint_bytes
from ssdplan.plans.documents.zeroth_order import SIDES
from ssdplan.plans.schedule.rows import rows_elements

from .stages import LayerGroup, Stage, Work
from .traffic import Traffic, add
from .variables import CONSTANT, Linear, Variable, variables_of


def stages(model: Model, groups: tuple[LayerGroup, ...], work: Work) -> tuple[Stage, ...]:
    """One for each kind of layer."""
    return tuple(_stage(model, group, work) for group in groups)


def host_bytes(model: Model, groups: tuple[LayerGroup, ...], work: Work) -> Linear:
    """Parameters that live on host."""
    return _parameters(model, groups, work, on_host=True)


def ssd_bytes(model: Model, groups: tuple[LayerGroup, ...], work: Work) -> Linear:
    """Parameters that live on ssd."""
    return _parameters(model, groups, work, on_host=False)


def _parameters(model: Model, groups: tuple[LayerGroup, ...], work: Work, *, on_host: bool) -> Linear:
    total: dict[Variable, float] = {}
    for group in groups:
        for use in group.uses:
            if use.own:
                lives = variables_of(use.state_class).parameters
                variable = lives.prompt_host if on_host else lives.prompt_ssd
                each = work.parameter_bytes(use)
                add(total, variable, each * group.count * use.elements)
    return total


def class_by_rows(model: Model, work: Work) -> str | None:
    """The class of the table that comes by rows, if one does: it has no other state."""
    if work.zeroth_order is None or not work.zeroth_order.by_rows or model.table is None:
        return None
    return model.states[model.table].state_class


def _stage(model: Model, group: LayerGroup, work: Work) -> Stage:
    zeroth_order = work.zeroth_order
    assert zeroth_order is not None
    every = zeroth_order.written_every
    forwards = SIDES * zeroth_order.directions * work.micro_batches
    passing = float((forwards - 1) * checkpoint_bytes(model, work.micro_batch_size))
    read: dict[Variable, float] = {}
    write: dict[Variable, float] = {}
    h2d: dict[Variable, float] = {CONSTANT: 0.0 if group.role == "embedding" else passing}
    d2h: dict[Variable, float] = {CONSTANT: 0.0 if group.role == "head" else passing}
    pending: dict[Variable, float] = {}
    perturbed = taken = 0.0
    lagging, here = zeroth_order.waiting(lags=True), zeroth_order.waiting(lags=False)
    by_rows = class_by_rows(model, work)
    on_host = sum(state.elements for state in model.states if state.state_class == by_rows and not state.frozen)
    for use in group.uses:
        each = work.parameter_bytes(use)
        fractions, nbytes = variables_of(use.state_class), float(each * use.elements)
        if use.state_class == by_rows:
            elements = rows_elements(model, work.micro_batches * work.micro_batch_size * model.sequence_length)
            taken += each * elements
            add(h2d, CONSTANT, each * elements)
            if not use.frozen:
                perturbed += zeroth_order.rounds * elements
                add(pending, CONSTANT, elements * here)
            continue
        comes = zeroth_order.rounds if zeroth_order.piece_elements and not use.frozen else 1
        add(read, fractions.parameters.prompt_ssd, comes * nbytes)
        add(h2d, CONSTANT, comes * nbytes)
        add(h2d, fractions.device, -comes * nbytes)
        if use.frozen:
            continue
        perturbed += zeroth_order.rounds * use.elements
        again = comes - 1 if use.own else comes
        """Passes over what was updated before in the step, and was written by that in some steps only."""
        if use.own:
            add(write, fractions.parameters.prompt_ssd, nbytes / every)
            add(d2h, CONSTANT, nbytes / every)
            add(d2h, fractions.device, -nbytes / every)
            add(pending, CONSTANT, use.elements * lagging)
            add(pending, fractions.device, use.elements * (here - lagging))
        if every > 1:
            add(pending, CONSTANT, again * use.elements * lagging * (1 - 1 / every))
            add(pending, fractions.device, -again * use.elements * lagging * (1 - 1 / every))
    seconds = model.timing(group.layer_class, work.micro_batch_size).forward_stage_seconds(forwards)
    return Stage(
        layer_class=group.layer_class,
        phase="forward",
        count=group.count,
        read_bytes=read,
        write_bytes=write,
        updates={},
        h2d_bytes=h2d,
        d2h_bytes=d2h,
        compute_seconds={CONSTANT: seconds},
        perturbed=perturbed,
        pending=pending,
        on_host=on_host * here / len(model.layers),  # beside all stages
        taken=taken,
    )


ZEROTH_ORDER = Traffic(stages=stages, host_bytes=host_bytes, ssd_bytes=ssd_bytes)
