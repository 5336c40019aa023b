"""Peaks: how much of each tier a schedule takes, exactly.

Owns the sum of what buffer assignment and the profile know; it assigns nothing.
"""

from dataclasses import dataclass

from ssdplan.plans.homes import GRADIENT_BYTES, OPTIMIZER_BYTES
from ssdplan.plans.plan import Decision
from ssdplan.plans.profile import ELEMENT_BYTES, Model, OptimizerStates
from ssdplan.plans.schedule import PAGE, Schedule

from .traffic import checkpoint_bytes


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes that a run takes of each tier."""

    host_arena: int
    """Every buffer on host."""
    host: int
    """The host arena, and what is the device's where memory is separate."""
    device_arena: int
    device: int
    """The device arena, the largest compute workspace and what every micro-batch keeps for the whole step; nothing
    where compute works on host memory."""
    ssd: int
    """The store."""
    residents: int
    """The part of the host arena that states, checkpoints and waiting gradients keep for the whole run."""


def predict_peaks(schedule: Schedule, model: Model, decision: Decision) -> Peaks:
    """The peaks of a run of `schedule`, evaluation included. `decision` is the one it was built from."""
    size = decision.micro_batch_size
    # Every layer runs forward in an evaluation, if not in a step, and backward in a step.
    timings = [model.timing(name, size) for name in {layer.layer_class for layer in model.layers}]
    workspace = max(max(timing.forward_workspace_bytes, timing.backward_workspace_bytes) for timing in timings)
    stay: dict[int, int] = {}
    for buffer in schedule.buffers:
        if buffer.tier == "host" and not buffer.pool:
            stay[buffer.zone] = max(stay.get(buffer.zone, 0), buffer.offset + buffer.nbytes - buffer.zone)
    beside = workspace + decision.micro_batches * model.context_bytes[size]
    arena = schedule.arenas["device"]
    return Peaks(
        host_arena=schedule.arenas["host"],
        host=schedule.arenas["host"] + (beside if decision.unified_memory else 0),
        device_arena=arena,
        device=0 if decision.unified_memory else arena + beside,
        ssd=schedule.arenas["ssd"],
        residents=sum(-(-nbytes // PAGE) * PAGE for nbytes in stay.values()),
    )


def device_alone_bytes(model: Model, micro_batch_size: int, optimizer_states: OptimizerStates) -> int:
    """About the least device memory in which a model trains without any offloading: all states, fp32 gradients, and the
    checkpoints, context and workspace of one micro-batch at a time, each layer recomputed."""
    elements = sum(state.elements for state in model.states)
    each = ELEMENT_BYTES[model.precision] + OPTIMIZER_BYTES[optimizer_states] + GRADIENT_BYTES
    timings = [model.timing(entry.name, micro_batch_size) for entry in model.classes]
    workspace = max(timing.backward_workspace_bytes for timing in timings)
    checkpoints = (len(model.layers) - 2) * checkpoint_bytes(model, micro_batch_size)
    return each * elements + checkpoints + workspace + model.context_bytes[micro_batch_size]
