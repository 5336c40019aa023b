"""Curves: what metrics.jsonl says of a run's steps, whether it runs, ended or was killed.

Owns the reading, line by line and checked, and the thinning of long curves. A step that was done again after a resume
counts once, as it was done last. What a run writes there is in `executor/metrics/metrics.py`.
"""

import json
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..files import open_regular

MAX_BYTES = 1 << 30
"""Of a metrics.jsonl: some two million steps."""
MAX_LINE_BYTES = 1 << 16
_OF_STEPS = ("loss", "grad_norm", "lr", "tokens_per_second", "step_seconds", "loss_scale", "tokens")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SnapshotLine:
    """A snapshot after `step` steps."""

    step: int
    seconds: float
    nbytes: float


@dataclass(slots=True)
class Curves:
    """A run's steps in order, each once; what was not finite, or not there, is NaN."""

    step: "array[int]" = field(default_factory=lambda: array("q"))
    columns: "dict[str, array[float]]" = field(default_factory=lambda: {name: array("d") for name in _OF_STEPS})
    """Of each step: `loss`, `grad_norm`, `lr`, `tokens_per_second`, `step_seconds`, `loss_scale`, `tokens`."""
    written: "array[float]" = field(default_factory=lambda: array("d"))
    """Bytes of states written to ssd by the run until then."""
    skipped: list[int] = field(default_factory=list)
    """Steps whose gradients overflowed in fp16."""
    held_out: dict[int, float] = field(default_factory=dict)
    """After how many steps -> the held-out loss."""
    snapshots: list[SnapshotLine] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    """After how many steps the run went on."""
    rated: bool = True
    """Whether it wrote to the drives that its plan's profile is of, so that their rating is theirs."""
    written_at: float = 0.0
    """When the file was written to last, in seconds since 1970."""

    def __len__(self) -> int:
        return len(self.step)

    def of(self, name: str) -> Floats:
        """A column as numbers [steps]."""
        return np.frombuffer(self.columns[name], dtype=np.float64) if len(self) else np.empty(0)

    @property
    def learnt_per_second(self) -> Floats:
        """Tokens that a step's loss is the mean of, a second [steps]; `tokens_per_second` counts all positions."""
        seconds = self.of("step_seconds")
        return np.divide(self.of("tokens"), seconds, out=np.full(len(seconds), np.nan), where=seconds > 0)

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """The number of each step [steps], from 1."""
        return np.frombuffer(self.step, dtype=np.int64) if len(self) else np.empty(0, dtype=np.int64)

    @property
    def last(self) -> int:
        """How many steps the run has behind it."""
        return self.step[-1] if self.step else 0


@dataclass(frozen=True, slots=True)
class Thinned:
    """A curve of few points: each stands for several steps that follow each other."""

    step: Floats
    mean: Floats
    low: Floats
    high: Floats


def read_curves(path: Path) -> Curves:
    """Read a metrics.jsonl. A last line without an end is being written, or a crash cut it off: it is left out.

    Raises UsageError, with its line, for what no run wrote.
    """
    curves = Curves()
    try:
        with open_regular(path, "file of metrics") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size > MAX_BYTES:
                raise UsageError(f"{path}: larger than {MAX_BYTES >> 30} GiB, so too large to show")
            curves.written_at = stat.st_mtime
            number = 0
            while data := file.readline(MAX_LINE_BYTES):
                number += 1
                if data.endswith(b"\n"):
                    _take(curves, f"{path}:{number}", data)
                elif len(data) == MAX_LINE_BYTES:
                    raise UsageError(f"{path}:{number}: longer than any line of a run's metrics")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    return curves


def thinned(steps: Sequence[int] | npt.NDArray[np.int64], values: Floats, most: int) -> Thinned:
    """`values` [steps] as at most `most` points, each the mean, least and largest of those steps that it stands for;
    what is not finite counts in none, and a point without any is left out."""
    finite = np.isfinite(values)
    kept, at = values[finite], np.asarray(steps, dtype=np.float64)[finite]
    count = len(kept)
    if not count:
        return Thinned(at, kept, kept, kept)
    edges = np.unique(np.linspace(0, count, min(most, count) + 1).astype(np.int64))[:-1]
    sizes = np.diff(np.append(edges, count))
    return Thinned(
        step=np.add.reduceat(at, edges) / sizes,
        mean=np.add.reduceat(kept, edges) / sizes,
        low=np.minimum.reduceat(kept, edges),
        high=np.maximum.reduceat(kept, edges),
    )


def _take(curves: Curves, place: str, data: bytes) -> None:
    """One line more."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: not a line of a run's metrics: not valid JSON") from error
    if not isinstance(fields, dict):
        raise UsageError(f"{place}: not a line of a run's metrics: no object of fields")
    step = fields.get("step")
    if type(step) is not int or not 0 <= step < 1 << 40:
        raise UsageError(f"{place}: not a line of a run's metrics: it has no `step` that counts from 0")
    if "loss" in fields:
        _cut(curves, step)
        curves.step.append(step)
        for name, column in curves.columns.items():
            column.append(_number(place, fields, name))
        curves.written.append(_number(place, fields, "ssd_written_bytes"))
        if fields.get("skipped") is True:
            curves.skipped.append(step)
    elif "eval_loss" in fields:
        curves.held_out.pop(step, None)
        curves.held_out[step] = _number(place, fields, "eval_loss")
    elif "snapshot_seconds" in fields:
        seconds, nbytes = (_number(place, fields, name) for name in ("snapshot_seconds", "snapshot_bytes"))
        curves.snapshots.append(SnapshotLine(step, seconds, nbytes))
    elif "resume_seconds" in fields:
        _cut(curves, step + 1)
        curves.resumed.append(step)


def _cut(curves: Curves, step: int) -> None:
    """Forget step `step` and all behind it: they are done again."""
    if not curves.step or curves.step[-1] < step:
        return
    keep = bisect_left(curves.step, step)
    del curves.step[keep:]
    for column in (curves.written, *curves.columns.values()):
        del column[keep:]
    curves.skipped = [each for each in curves.skipped if each < step]
    curves.held_out = {after: loss for after, loss in curves.held_out.items() if after < step}
    curves.snapshots = [each for each in curves.snapshots if each.step < step]
    curves.resumed = [each for each in curves.resumed if each < step]


def _number(place: str, fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{place}: `{name}` is no number")
    try:
        return float(value)
    except OverflowError as error:
        raise UsageError(f"{place}: `{name}` is out of range") from error
