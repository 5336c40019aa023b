"""Metrics: writes metrics.jsonl while a run goes on, and report.json when it ends.

Owns how both are written; `plans/documents/metrics.py` has the fields of a line. In the report every prediction of the
plan stands beside its measurement.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from ssdplan.plans.analysis.cache import FIGURES
from ssdplan.plans.analysis.report import Compared
from ssdplan.plans.documents.metrics import KIND, METRICS, REPORT, SnapshotCost, StepMetrics
from ssdplan.plans.errors import DiskFullError, IoFailure, MismatchError
from ssdplan.plans.files import Folder
from ssdplan.plans.room import no_room

_LINE_BYTES = 1 << 20
Line = Mapping[str, Any]
"""A line of metrics.jsonl: `step`, and numbers by name; None is a number that is not finite."""


class MetricsFile:
    """metrics.jsonl, appended line by line. JSON has no number that is not finite: null stands for it. Raises
    DiskFullError or IoFailure; a line that was cut off then, or by a crash, is dropped by `cut_back`."""

    def __init__(self, folder: Folder, also: Callable[[Line], None] = lambda line: None) -> None:
        """In the run's directory; `also` gets each line once it is written."""
        self._path, self._also = folder.path / METRICS, also
        with _told(self._path):
            self._file = folder.append(METRICS)
            folder.flush()

    def write(self, metrics: StepMetrics) -> None:
        self._line(asdict(metrics))

    def write_evaluation(self, step: int, eval_loss: float) -> None:
        """A line of its own for an evaluation after `step` steps."""
        self._line({"step": step, "eval_loss": eval_loss})

    def write_snapshot(self, step: int, cost: SnapshotCost) -> None:
        """A line of its own for a snapshot of the states after `step` steps."""
        self._line({"step": step, **asdict(cost)})

    def write_resumed(self, step: int, seconds: float) -> None:
        """A line of its own for a run that goes on after `step` steps, and what it took until it could."""
        self._line({"step": step, "resume_seconds": seconds})

    def sync(self) -> None:
        """Make all lines durable."""
        with _told(self._path):
            os.fsync(self._file.fileno())

    def _line(self, fields: dict[str, Any]) -> None:
        finite: dict[str, Any] = _finite(fields)
        left = memoryview((json.dumps(finite) + "\n").encode())
        with _told(self._path):
            while left:
                left = left[self._file.write(left) or 0 :]
        self._also(finite)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


@dataclass
class History:
    """What metrics.jsonl says of the steps that a run has behind it."""

    losses: list[float] = field(default_factory=list)
    """Of every step, the first one's first."""
    eval_losses: dict[int, float] = field(default_factory=dict)
    ssd_written_bytes: int = 0
    """By the last of these steps, and its snapshot."""


_GROUPS = {
    "train": ("loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens", "computed_tokens"),
    "held_out": ("eval_loss",),
    "speed": ("tokens_per_second", "learnt_tokens_per_second", "step_seconds", "stolen_seconds"),
    "ssd": ("ssd_read_bytes", "ssd_write_bytes", "ssd_written_bytes"),
    "cache": FIGURES,
    "memory": ("host_peak_bytes", "device_peak_bytes", "process_peak_bytes"),
    "snapshot": ("snapshot_seconds", "snapshot_bytes", "flush_seconds"),
    "resume": ("resume_seconds",),
}
_TAGS = {name: f"{group}/{name}" for group, names in _GROUPS.items() for name in names}


def tagged(line: Line) -> tuple[int, dict[str, float]]:
    """A line's step, and its numbers by the names that they have where a `/` parts them into groups: `train/loss`. What
    is not finite is left out."""
    return line["step"], {
        _TAGS[name]: float(value) for name, value in line.items() if name != "step" and value is not None
    }


def lines(folder: Folder) -> Iterator[Line]:
    """The lines of a metrics.jsonl that `cut_back` has read."""
    with _told(folder.path / METRICS), folder.open(METRICS, KIND) as file:
        yield from map(json.loads, _lines(file))


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """One that is too long for a line of ours comes in pieces, none of which is a line."""
    return iter(lambda: file.readline(_LINE_BYTES), b"")


def cut_back(folder: Folder, step: int) -> History:
    """Cut metrics.jsonl behind the last line of the first `step` steps, and read what is left; with `step` 0, all goes.

    Raises MismatchError when the lines of some of these steps are not there, DiskFullError, IoFailure.
    """
    history, kept, path = History(), 0, folder.path / METRICS
    if step:
        with _told(path), folder.open(METRICS, KIND) as file:
            kept = _read(file, step, history)
    if len(history.losses) != step:
        raise MismatchError(
            f"{path}: has the losses of {len(history.losses)} steps, the snapshot was taken after {step}; the file was "
            "changed: bring the run's own back"
        )
    with _told(path), folder.append(METRICS) as file:
        file.truncate(kept)
        os.fsync(file.fileno())
    return history


def _read(file: BinaryIO, step: int, history: History) -> int:
    """Add the lines of the first `step` steps to `history`, as far as they are whole; returns their bytes."""
    kept = 0
    for line in _lines(file):
        try:
            fields = json.loads(line)
            if not line.endswith(b"\n") or fields["step"] > step:
                break
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        if "loss" in fields:
            if fields["step"] != len(history.losses) + 1:
                break
            history.losses.append(math.nan if fields["loss"] is None else fields["loss"])
            history.ssd_written_bytes = fields.get("ssd_written_bytes", 0)
        elif "eval_loss" in fields:
            history.eval_losses[fields["step"]] = math.nan if fields["eval_loss"] is None else fields["eval_loss"]
        elif "snapshot_seconds" in fields:
            history.ssd_written_bytes = fields.get("ssd_written_bytes", history.ssd_written_bytes)
        kept += len(line)
    return kept


def tells_of_snapshot(folder: Folder) -> bool:
    """Whether a line of metrics.jsonl, if it is there, is that of a snapshot."""
    with _told(folder.path / METRICS):
        if not folder.has_file(METRICS):
            return False
        with folder.open(METRICS, KIND) as file:
            return any(b'"snapshot_seconds"' in line for line in _lines(file))


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if room := no_room(error):
            raise DiskFullError(f"{path}: cannot take another line: {room}") from error
        raise IoFailure(f"{path}: {error.strerror}") from error


def write_report(folder: Folder, compared: list[Compared], more: dict[str, object]) -> None:
    """report.json: `predictions`, and what else is worth keeping of the run. As in metrics.jsonl, null stands for what
    is not finite: the loss of a step of fp16 that overflowed, the error of what was predicted to be nothing."""
    rows = [{**asdict(row), "relative_error": row.relative_error} for row in compared]
    text = json.dumps(_finite({"predictions": rows, **more}), indent=1, allow_nan=False)
    with _told(folder.path / REPORT):
        folder.write(REPORT, text + "\n")


def _finite(value: Any) -> Any:
    """The same, with None for each number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
