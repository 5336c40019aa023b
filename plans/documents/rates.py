"""Rates: how fast a machine updates, and makes zeroth-order passes, by the figures of its profile.

Owns which of a machine's figures counts for which formats, what counts where nobody measured one, and how many bytes an
update moves.
"""

from .matrices import seconds_of
from .profile import Machine, Model
from .state_layout import GRADIENT_BYTES, OptimizerFormats

NORM_SHARE = 1 / 8
"""Of the seconds of updates on the device, what the norm of their gradient takes before them: four of the bytes that
both move, of about 34."""


COPY_BYTES = 2
"""Of an element's parameters that an update leaves, in half precision."""


def updated_bytes(formats: OptimizerFormats) -> float:
    """Bytes that the fused update moves an element: it reads master, two moments and gradient, and writes all but the
    gradient, and the copy that compute uses, which it may read too."""
    return 2 * formats.mean_bytes + GRADIENT_BYTES + COPY_BYTES * (2 if formats.takes_copy else 1)


def update_rate(machine: Machine, formats: OptimizerFormats) -> float:
    """Elements a second that `machine` updates with optimizer states of these formats. It was measured with fp32
    masters; the kernels that have less of them move fewer bytes, and are taken to be as fast."""
    if formats.moments == "int8":
        assert machine.update_rate_int8 is not None, "moments in int8 on a machine where nobody measured them"
        return machine.update_rate_int8
    if formats.moments == "bf16" and machine.update_rate_bf16 is not None:
        return machine.update_rate_bf16
    return machine.update_rate


def device_update_rate(machine: Machine, formats: OptimizerFormats) -> float | None:
    """Elements a second that the device of `machine` updates where optimizer states of these formats stay on it, with
    their gradient's norm taken before; None where it cannot."""
    if machine.device_update_rate is not None and (machine.device == "cpu" or formats.moments != "int8"):
        return machine.device_update_rate
    if machine.device != "cpu" or (formats.moments == "int8" and machine.update_rate_int8 is None):
        return None
    return (1 - NORM_SHARE) * update_rate(machine, formats)


def updates_on_device(model: Model, machine: Machine, formats: OptimizerFormats) -> bool:
    """Whether the device of `machine` can update any state of `model`: all that Muon updates of it were measured
    there."""
    matrices = (matrix for state in model.states for matrix in state.matrices)
    there = seconds_of(model.matrix_updates, matrices, on_device=True) is not None
    return there and device_update_rate(machine, formats) is not None


def perturb_seconds(machine: Machine, elements: float, *, copies: bool, pending: float, masters: bool) -> float:
    """Seconds of a zeroth-order pass over so many elements, with copies or without, where so many updates are pending.
    `masters`: over fp32 masters in half precision. The machine's rates are known: a request sees to it."""
    copying, updating = machine.perturb_rate, machine.pending_rate
    if masters:
        copying, updating = machine.perturb_rate_masters or copying, machine.pending_rate_masters or updating
    assert copying and updating
    return elements * (copies / copying + pending / updating)


def rows_rates(machine: Machine) -> tuple[float, float] | None:
    """`pending_rate_host` and `rows_bandwidth` of a machine; None where nobody measured them."""
    rate, bandwidth = machine.pending_rate_host, machine.rows_bandwidth
    return (rate, bandwidth) if rate and bandwidth else None
