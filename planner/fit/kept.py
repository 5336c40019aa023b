"""What the device keeps: from a program's fractions to whole states and whole blocks.

Owns that rounding, and the case of a device that keeps everything.
"""

from collections import Counter

from ssdplan.plans.documents.profile import Machine, Model, State
from ssdplan.plans.documents.rates import updates_on_device
from ssdplan.plans.documents.state_layout import (
    ELEMENT_BYTES,
    GRADIENT_BYTES,
    OptimizerFormats,
    optimizer_bytes,
    parameters_bytes,
    precision_of,
)
from ssdplan.plans.documents.zeroth_order import parameter_format
from ssdplan.plans.schedule.shards import Shards

from ..program.choices import FixedChoices, KeptShares
from ..program.placement import ProgramResult
from .budgets import Needs

MUCH = 0.05
"""Of the host budget: a gradient of more is worth a look at plans in which the device updates its state."""
WHOLE = 1e-4
"""Of a state: what a program's fraction may fall short of it and still be meant."""


def whole_states(model: Model, program: ProgramResult) -> tuple[dict[str, KeptShares], float]:
    """As many whole states of each class, and the fraction of blocks whose inputs, as the fractions of `program` are
    room for."""
    kept: dict[str, KeptShares] = {}
    for name, placement in program.placement.items():
        states = sum(state.state_class == name for state in model.states)
        device = int(placement.parameters_device * states + WHOLE)
        both = int((placement.parameters_device + placement.parameters_turn) * states + WHOLE)
        across = both - device if placement.parameters_turn else 0
        updated = min(int(placement.optimizer_device * states + WHOLE), device)
        kept[name] = KeptShares(device / states, across / states, updated / states)
    blocks = len(model.trained_blocks)
    return kept, int(program.checkpoint_device * blocks + WHOLE) / blocks if blocks else 0.0


def everything(model: Model) -> dict[str, KeptShares]:
    """All states stay, and those that are trained are updated there."""
    frozen = {state.state_class for state in model.states if state.frozen}
    return {name: KeptShares(1.0, 0.0, float(name not in frozen)) for name in {s.state_class for s in model.states}}


def states_bytes(model: Model, formats: OptimizerFormats) -> int:
    """What a device that keeps everything has of states alone."""
    updated = optimizer_bytes(model.states, model.precision, formats)
    return updated + parameters_bytes(model.states, model.precision)


def may_keep_everything(model: Model, machine: Machine, device_bytes: int, fixed: FixedChoices) -> bool:
    """Whether the device can update, has room for all states, and nothing that the user has fixed is against it."""
    decided = fixed.optimizer, fixed.kept, fixed.checkpoints_device, fixed.zeroth_order
    may = fixed.schedule == "vertical" and all(each is None for each in decided)
    can = updates_on_device(model, machine, fixed.formats)
    return may and can and states_bytes(Shards(fixed.shares).owned(model), fixed.formats) < device_bytes


def large_to_update_there(
    model: Model, machine: Machine, budget: Needs, fixed: FixedChoices
) -> tuple[tuple[str, float], ...]:
    """Classes of one large state, as an embedding and a head are, with their elements in proportion to the largest's:
    where the device has room to keep and update all of them, and the gradients that host then needs no buffer for are
    a part of its budget that counts."""
    counts = Counter(state.state_class for state in model.states)
    alone = [state for state in model.states if counts[state.state_class] == 1 and not state.frozen]
    large = [state for state in alone if GRADIENT_BYTES * state.elements > MUCH * budget.host]
    decided = fixed.optimizer, fixed.parameters, fixed.kept, fixed.zeroth_order
    may = fixed.schedule == "vertical" and not fixed.unified_memory and all(each is None for each in decided)
    each = fixed.formats.mean_bytes + ELEMENT_BYTES[model.precision]
    if not may or not updates_on_device(model, machine, fixed.formats):
        return ()
    if sum(state.elements for state in large) * each >= budget.device:
        return ()
    most = max((state.elements for state in large), default=0)
    return tuple((state.state_class, state.elements / most) for state in large)


def keeps(program: ProgramResult) -> bool:
    """Whether the device keeps anything between its uses."""
    states = any(p.parameters_device or p.parameters_turn for p in program.placement.values())
    saved = any(each.tier == "device" for shares in program.saved.values() for each in shares)
    return states or saved or bool(program.checkpoint_device)


def parameter_bytes(state: State, model: Model, fixed: FixedChoices) -> int:
    """What a state's parameters take wherever they live."""
    precision = precision_of(state, model.precision)
    return parameter_format(precision, fixed.zeroth_order, frozen=state.frozen).bytes_of(state.elements)
