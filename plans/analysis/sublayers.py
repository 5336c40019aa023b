"""Sub-layers: how many bytes of activations each makes a second, and which make too many to be worth moving.

Owns PyAO's rule (section 5.1): of the sub-layers of a class of blocks, those whose activation throughput lies above the
upper fence of their distribution, Q3 + 1.5 (Q3 - Q1), and above the bandwidth of the way that activations would leave
by, are outliers. The paper recomputes these and keeps the others.
"""

from collections.abc import Sequence

import numpy as np

from ..documents.profile import Machine, Model, SubLayer, Timing

WHISKER = 1.5


def throughput(sublayer: SubLayer) -> float:
    """Bytes that autograd saves a second of forward."""
    return sublayer.saved_bytes / sublayer.forward_seconds if sublayer.forward_seconds else 0.0


def fence(sublayers: Sequence[SubLayer]) -> float:
    """The upper fence of the throughputs of the sub-layers that save anything, bytes a second; 0 where none does."""
    known = [throughput(each) for each in sublayers if each.saved_bytes]
    if not known:
        return 0.0
    low, high = np.quantile(known, [0.25, 0.75])
    return float(high + WHISKER * (high - low))


def outliers(sublayers: Sequence[SubLayer], bandwidth: float) -> tuple[bool, ...]:
    """Of each sub-layer whether it is one; `bandwidth` in bytes a second."""
    bound = max(fence(sublayers), bandwidth)
    return tuple(bool(each.saved_bytes) and throughput(each) > bound for each in sublayers)


def bound_of(machine: Machine) -> float:
    """The bandwidth of the slower way between host and device, bytes a second: what activations can leave and come
    back by."""
    return min(machine.h2d_bandwidth, machine.d2h_bandwidth)


def blocks_with_backward(model: Model) -> tuple[str, ...]:
    """The classes of blocks that run backward, in the order of their layers: those below all that is trained do not."""
    return tuple(dict.fromkeys(model.layers[block].layer_class for block in model.trained_blocks))


def has_sublayers(model: Model) -> bool:
    """Whether a profile measured any: older ones did not, and blocks that cannot be traced have none."""
    sizes = model.micro_batch_sizes
    return any(model.timing(name, size).sublayers for name in blocks_with_backward(model) for size in sizes)


def could_gain(timing: Timing) -> float:
    """The share of a block's seconds that recomputing everything takes, and so about the most that rungs can gain."""
    whole = timing.forward_seconds + timing.backward_seconds
    return timing.forward_seconds / whole if whole else 0.0
