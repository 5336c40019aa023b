"""Sub-layers: how many bytes of activations each makes a second, and which make too many to be worth moving.

Owns PyAO's rule (section 5.1): of the sub-layers of a class of blocks, those whose activation throughput lies above the
upper fence of their distribution, Q3 + 1.5 (Q3 - Q1), and above the bandwidth of the way that activations would leave
by, are outliers. The paper recomputes these and keeps the others.
"""

from collections.abc import Sequence

import numpy as np

from ..documents.profile import SubLayer

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
