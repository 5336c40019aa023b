"""A run beside its plan: every prediction with the figure that was measured, as report.json keeps it.

Owns which quantities are compared, and over which steps.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..documents.metrics import StepMetrics
from ..documents.plan import Plan


@dataclass(frozen=True)
class Compared:
    """A prediction beside its measurement; the error is (measured - predicted) / predicted."""

    quantity: str
    unit: str
    predicted: float
    measured: float

    @property
    def relative_error(self) -> float:
        if self.predicted == self.measured:
            return 0.0
        return (self.measured - self.predicted) / self.predicted if self.predicted else float("inf")


def compare(plan: Plan, steady: list[StepMetrics], arenas: dict[str, int], *, full_rows: bool) -> list[Compared]:
    """Each predicted figure beside the median of the steady steps, or their mean where some write and others do not;
    `arenas` are the bytes in use, by tier. What the plan predicts of the process is for rows of any length; where all
    are full (`full_rows`), it is less."""
    prediction = plan.prediction
    if not steady:
        return []
    middle: Callable[[Iterable[float]], float] = statistics.median
    if plan.decision.zeroth_order and plan.decision.zeroth_order.written_every > 1:
        middle = statistics.fmean  # some steps write and others do not
    seconds = middle(metrics.step_seconds for metrics in steady)
    process = max(m.process_peak_bytes for m in steady)
    in_process = prediction.peak_process_bytes
    if in_process is not None and full_rows:
        model, size = plan.model, plan.decision.micro_batch_size
        in_process -= model.kernel_bytes(size) - model.kernel_bytes(size, full_rows=True)
    return [
        Compared("step_seconds", "s", prediction.step_seconds, seconds),
        Compared(
            "tokens_per_second",
            "tokens/s",
            prediction.tokens_per_second,
            middle(metrics.tokens_per_second for metrics in steady),
        ),
        Compared("host_arena_bytes", "B", prediction.host_arena_bytes, arenas["host"]),
        Compared("device_arena_bytes", "B", prediction.device_arena_bytes, arenas["device"]),
        Compared("peak_host_bytes", "B", prediction.peak_host_bytes, max(m.host_peak_bytes for m in steady)),
        Compared("peak_device_bytes", "B", prediction.peak_device_bytes, max(m.device_peak_bytes for m in steady)),
        *([Compared("peak_process_bytes", "B", in_process, process)] if in_process is not None else []),
        Compared("ssd_read_bytes", "B", prediction.ssd_read_bytes, middle(m.ssd_read_bytes for m in steady)),
        Compared("ssd_write_bytes", "B", prediction.ssd_write_bytes, middle(m.ssd_write_bytes for m in steady)),
    ]


def stolen_share(measured: list[StepMetrics], cores: int) -> float:
    """Of the processors' time, what the host of a virtual machine gave to others during these steps."""
    seconds = sum(metrics.step_seconds for metrics in measured)
    return sum(metrics.stolen_seconds for metrics in measured) / (cores * seconds) if seconds else 0.0
