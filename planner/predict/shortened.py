"""Shortened models: estimates a step of many blocks from simulated steps of a few.

Owns which blocks stand for all, and how a step's seconds follow from two lengths. It decides nothing.
"""

from collections.abc import Callable

from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.graph.ops import Schedule
from ssdplan.plans.schedule.build import build_schedule

from .simulator import simulated_seconds

Build = Callable[[Model, Decision], Schedule]

ENDS = 4
"""Layers of each kind kept at either end of a shortened model: more than the stages that a buffer lives."""
LENGTHS = {"vertical": (2, 4), "horizontal": (4, 6), "zeroth-order": (2, 4)}
"""Schedule -> blocks kept at either end of the two models between which a step's seconds are a straight line."""
COUNTS = (2, 4)
"""Of the horizontal schedule's micro-batches, those that are simulated when there are more: the others are alike."""
FEW_PAIRS = 256
"""Of layer and micro-batch: where nothing but activations moves, about as many operations as two short models have."""
QUARTERS, OF_QUARTERS = 4, (2, 4)
"""What the device keeps of blocks is counted in quarters, in two models that have them."""


def shortened(model: Model, ends: int = ENDS) -> Model:
    """`model` with only the first and last few blocks of each kind: its pipeline's buffers are the same.

    `model` itself when that would leave more than half of it.
    """
    kinds: dict[tuple[str, tuple[tuple[str, int], ...]], list[int]] = {}
    for number, layer in enumerate(model.layers):
        states = tuple((model.states[index].state_class, model.states[index].elements) for index in layer.states)
        kinds.setdefault((layer.layer_class, states), []).append(number)
    keep = {number for members in kinds.values() for number in (*members[:ends], *members[-ends:])}
    if 2 * len(keep) > len(model.layers):
        return model
    layers = [layer for number, layer in enumerate(model.layers) if number in keep]
    used = sorted({index for layer in layers for index in layer.states})
    place = {index: position for position, index in enumerate(used)}
    return model.model_copy(
        update={
            "states": tuple(model.states[index] for index in used),
            "layers": tuple(
                layer.model_copy(update={"states": tuple(place[index] for index in layer.states)}) for layer in layers
            ),
        }
    )


def step_seconds(model: Model, machine: Machine, decision: Decision, build: Build = build_schedule) -> float:
    """A simulated step of a decision, for a part of the work of simulating it. `build` makes the schedules.

    Once a pipeline is full every further block takes as long as the one before, and so does every further micro-batch
    of the horizontal schedule: two short models give the line, and two small numbers of micro-batches another. It is
    exact where one resource is the slowest, and a few percent short where two are about as slow as each other, for then
    a pipeline takes long to fill. Of parameters that the device keeps it takes the nearest quarter of the blocks.
    Models that are not much longer than the longer of the two, or have several kinds of blocks, are simulated whole; so
    are few pairs of layer and micro-batch of what never leaves the device, which have few operations, and of plans that
    save activations, whose shares of so few pairs a shorter model would round to others.
    """
    n = decision.micro_batches
    stays = all(p.optimizer_device == 1.0 for p in decision.placement.values())
    if (stays or decision.saved) and n * len(model.layers) <= FEW_PAIRS:
        return simulated_seconds(build(model, decision), model, machine, decision)
    if decision.schedule != "horizontal" or n <= COUNTS[1]:
        return _by_length(model, machine, decision, build)
    one, more = (
        _by_length(model, machine, decision.model_copy(update={"micro_batches": count}), build) for count in COUNTS
    )
    return more + (n - COUNTS[1]) * (more - one) / (COUNTS[1] - COUNTS[0])


def _by_length(model: Model, machine: Machine, decision: Decision, build: Build) -> float:
    def simulated(model: Model, decision: Decision) -> float:
        return simulated_seconds(build(model, decision), model, machine, decision)

    keeps = any(p.parameters_device or p.parameters_turn for p in decision.placement.values())
    keeps = keeps or 0.0 < decision.checkpoint_device < 1.0
    lengths = OF_QUARTERS if keeps else LENGTHS[decision.schedule]
    short, longer = (shortened(model, ends) for ends in lengths)
    kinds = {(layer.layer_class, tuple(model.states[i].elements for i in layer.states)) for layer in model.layers[1:-1]}
    if len(kinds) > 1 or len(longer.layers) == len(model.layers):
        return simulated(model, decision)
    alike = _in_quarters(decision)
    high, low = simulated(longer, alike), simulated(short, alike)  # one of them is often built already
    per_layer = (high - low) / (len(longer.layers) - len(short.layers))
    return high + per_layer * (len(model.layers) - len(longer.layers))


def _in_quarters(decision: Decision) -> Decision:
    """`decision` with shares of the blocks that models of any multiple of four blocks have."""
    placement = {}
    for name, p in decision.placement.items():
        device = round(QUARTERS * p.parameters_device) / QUARTERS
        turn = min(round(QUARTERS * p.parameters_turn) / QUARTERS, 1.0 - device)
        updated = min(round(QUARTERS * p.optimizer_device) / QUARTERS, device)
        placement[name] = p.model_copy(
            update={"parameters_device": device, "parameters_turn": turn, "optimizer_device": updated}
        )
    there = round(QUARTERS * decision.checkpoint_device) / QUARTERS
    return decision.model_copy(update={"placement": placement, "checkpoint_device": there})
