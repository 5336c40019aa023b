"""What a run says of itself: metrics.jsonl while it runs, report.json when it ends.

Owns the two formats. Every prediction of the plan stands beside its measurement.
"""

import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ssdplan.plans.plan import Prediction


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl: a step. Bytes of ssd are this step's; peaks are of the arenas, on the device of what
    compute takes besides, and of all that the process had resident, as the kernel counts it, since loading ended."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_seconds: float
    tokens_per_second: float
    ssd_read_bytes: int
    ssd_write_bytes: int
    host_peak_bytes: int
    device_peak_bytes: int
    process_peak_bytes: int
    loss_scale: float = 1.0
    """Of fp16; the gradient norm is without it."""
    skipped: bool = False
    """The gradients overflowed in fp16, so nothing was updated."""


class MetricsFile:
    """metrics.jsonl, appended line by line; a line is whole or not there. JSON has no number that is not finite: null
    stands for it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, metrics: StepMetrics) -> None:
        self._write(asdict(metrics))

    def write_evaluation(self, step: int, eval_loss: float) -> None:
        """A line of its own for an evaluation after `step` steps."""
        self._write({"step": step, "eval_loss": eval_loss})

    def _write(self, line: dict[str, Any]) -> None:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in line.items()
        }
        self._file.write(json.dumps(finite) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


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


def compare(prediction: Prediction, steady: list[StepMetrics], arenas: dict[str, int]) -> list[Compared]:
    """Each predicted figure beside the median of the steady steps; `arenas` are the bytes in use, by tier."""
    if not steady:
        return []
    seconds = statistics.median(metrics.step_seconds for metrics in steady)
    process = max(m.process_peak_bytes for m in steady)
    in_process = prediction.peak_process_bytes
    return [
        Compared("step_seconds", "s", prediction.step_seconds, seconds),
        Compared(
            "tokens_per_second",
            "tokens/s",
            prediction.tokens_per_second,
            statistics.median(metrics.tokens_per_second for metrics in steady),
        ),
        Compared("host_arena_bytes", "B", prediction.host_arena_bytes, arenas["host"]),
        Compared("device_arena_bytes", "B", prediction.device_arena_bytes, arenas["device"]),
        Compared("peak_host_bytes", "B", prediction.peak_host_bytes, max(m.host_peak_bytes for m in steady)),
        Compared("peak_device_bytes", "B", prediction.peak_device_bytes, max(m.device_peak_bytes for m in steady)),
        *([Compared("peak_process_bytes", "B", in_process, process)] if in_process is not None else []),
        Compared("ssd_read_bytes", "B", prediction.ssd_read_bytes, statistics.median(m.ssd_read_bytes for m in steady)),
        Compared(
            "ssd_write_bytes", "B", prediction.ssd_write_bytes, statistics.median(m.ssd_write_bytes for m in steady)
        ),
    ]


def write_report(path: Path, compared: list[Compared], more: dict[str, object]) -> None:
    """report.json: `predictions`, and what else is worth keeping of the run."""
    rows = [{**asdict(row), "relative_error": row.relative_error} for row in compared]
    path.write_text(json.dumps({"predictions": rows, **more}, indent=1) + "\n", encoding="utf-8")
