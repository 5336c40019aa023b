"""metrics.jsonl: the lines that a run writes while it trains.

Owns the fields of a step's line and of a snapshot's. The executor writes them, `analysis/curves.py` reads them, and
`analysis/cache.py` finds those of the cache.
"""

from dataclasses import dataclass

METRICS = "metrics.jsonl"
REPORT = "report.json"
TRACE = "trace.json"
KIND = "file of metrics"


@dataclass(frozen=True)
class Progress:
    """What a step learnt, and what it took. Bytes of ssd are this step's; peaks are of the arenas, on the device of
    what compute takes besides (of a GPU, what torch's allocator held of it), and of all that the process had resident,
    as the kernel counts it, since loading ended."""

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
    """Of states, by the whole run until now: when they were loaded, in steps and between them, snapshots too. What a
    kill undid is not in it, nor is the filling of a new store."""
    stolen_seconds: float = 0.0
    """Processor time, of all cores, that the host of a virtual machine gave to others meanwhile."""


@dataclass(frozen=True, kw_only=True)
class CacheFigures:
    """What of its data a step found in time, and how full each tier is (10Cache, section 4.2). `analysis/cache.py`
    says exactly what is counted. Rates, shares and uses are fractions; a figure is None where nothing was counted."""

    device_hit_rate: float | None = None
    """Of the uses of parameters by compute, those for which compute did not wait. None with unified memory."""
    host_hit_rate: float | None = None
    """Of those uses whose parameters came from host memory, the ones that were there before the link could take them.
    With unified memory, of all uses, those for which compute did not wait."""
    optimizer_miss_rate: float | None = None
    """Of the updates, those that waited for their optimizer states."""
    waits_below_10us: float | None = None
    """Of the uses of parameters, those that compute waited for less than 0.01 ms."""
    waits_below_30us: float | None = None
    """The same for 0.03 ms."""
    waits_below_100us: float | None = None
    """The same for 0.1 ms."""
    compute_wait_seconds: float | None = None
    """Of the step, in which compute waited for data of any kind to arrive."""
    device_memory_use: float | None = None
    """Peak over budget. None with unified memory."""
    host_memory_use: float | None = None
    """Peak over budget."""
    ssd_use: float | None = None
    """The store over what was free on the profile's volumes."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics(CacheFigures, Progress):
    """One line of metrics.jsonl: a step. Its fields are those of `Progress`, then those of `CacheFigures`."""


@dataclass(frozen=True)
class SnapshotCost:
    """What a snapshot took."""

    snapshot_seconds: float
    """To write what lives on host, and to commit."""
    snapshot_bytes: int
    """Of states, written."""
    flush_seconds: float
    """Before that, to finish delayed updates, which the next step then need not."""
    ssd_written_bytes: int = 0
    """By the whole run until then, as a step's line has it, with this snapshot."""
