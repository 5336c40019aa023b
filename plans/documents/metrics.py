"""metrics.jsonl: the lines that a run writes while it trains.

Owns the fields of a step's line and of a snapshot's. The executor writes them, `analysis/curves.py` reads them.
"""

from dataclasses import dataclass

METRICS = "metrics.jsonl"
REPORT = "report.json"
TRACE = "trace.json"
KIND = "file of metrics"


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl: a step. Bytes of ssd are this step's; peaks are of the arenas, on the device of what
    compute takes besides (of a GPU, what torch's allocator held of it), and of all that the process had resident, as
    the kernel counts it, since loading ended."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    """Those that are learnt: what the loss is the mean of."""
    computed_tokens: int
    """All positions of the step's rows, prompts and padding too. `tokens_per_second` is of these, as a plan's is."""
    step_seconds: float
    tokens_per_second: float
    learnt_tokens_per_second: float
    ssd_read_bytes: int
    ssd_write_bytes: int
    host_peak_bytes: int
    device_peak_bytes: int
    process_peak_bytes: int
    loss_scale: float = 1.0
    """Of fp16; the gradient norm is without it."""
    skipped: bool = False
    """The gradients overflowed in fp16, so nothing was updated."""
    ssd_written_bytes: int = 0
    """Of states, by the whole run until now: when they were loaded, in steps and between them. What a kill undid is
    not in it, nor is the filling of a new store."""
    stolen_seconds: float = 0.0
    """Processor time, of all cores, that the host of a virtual machine gave to others meanwhile."""


@dataclass(frozen=True)
class SnapshotCost:
    """What a snapshot took."""

    snapshot_seconds: float
    """To write what lives on host, and to commit."""
    snapshot_bytes: int
    """Of states, written."""
    flush_seconds: float
    """Before that, to finish delayed updates, which the next step then need not."""
