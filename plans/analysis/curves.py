"""Curves: what metrics.jsonl says of a run's steps, whether it runs, ended or was killed.

Owns the reading, line by line and checked, into tables of pandas, and the thinning of long curves. A step that was done
again after a resume counts once, as it was done last. What a run writes there is in `executor/metrics/metrics.py`.
"""

import json
import math
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..documents.metrics import CacheFigures, StepMetrics
from ..errors import UsageError
from ..files import open_regular
from .frames import INTEGER, TRUTH

MAX_BYTES = 1 << 30
"""Of a metrics.jsonl: some two million steps."""
MAX_LINE_BYTES = 1 << 16
WRITTEN = "ssd_written_bytes"
_CACHE = tuple(each.name for each in fields(CacheFigures))
DRAWN = ("loss", "grad_norm", "lr", "tokens_per_second", "step_seconds", "loss_scale", "tokens", WRITTEN, *_CACHE)
"""Numbers of a step that are drawn or told."""
_STEP = {each.name: each.type for each in fields(StepMetrics) if each.name != "step"}
_WHOLE = tuple(name for name, kind in _STEP.items() if kind is int)
EVERY = tuple(name for name, kind in _STEP.items() if kind is not bool)
"""All numbers of a step, in the order in which metrics.jsonl has them."""
_SNAPSHOT = ("snapshot_seconds", "snapshot_bytes", WRITTEN)
_AT_ONCE = np.iinfo(np.int64).max

Floats = npt.NDArray[np.float64]


class _Lines:
    """The lines of one kind, in order: for each its number in the file, its step and its numbers."""

    def __init__(self, names: Sequence[str]) -> None:
        self.line, self.step = array("q"), array("q")
        self.columns = {name: array("d") for name in names}

    def frame(self) -> pd.DataFrame:
        columns = {"line": self.line, "step": self.step, **self.columns}
        return pd.DataFrame({name: np.asarray(column) for name, column in columns.items()})


def _no_steps() -> pd.DataFrame:
    return pd.DataFrame({name: np.empty(0) for name in DRAWN}, index=_no_index()).assign(skipped=np.empty(0, bool))


def _no_index() -> pd.Index:
    return pd.Index([], dtype="int64", name="step")


@dataclass(slots=True)
class Curves:
    """A run's steps in order, each once; what was not finite, or not there, is NaN. The tables' index is `step`."""

    by_step: pd.DataFrame = field(default_factory=_no_steps)
    """A row a step, from step 1: the numbers that were asked for, DRAWN among them, and `skipped`: whether its
    gradients overflowed in fp16. `ssd_written_bytes` counts all of the run until then."""
    held_out: pd.Series = field(default_factory=lambda: pd.Series(np.empty(0), index=_no_index()))
    """The held-out loss after so many steps, in the order in which it was measured."""
    snapshots: pd.DataFrame = field(
        default_factory=lambda: pd.DataFrame({name: np.empty(0) for name in _SNAPSHOT}, index=_no_index())
    )
    """What each snapshot took, after so many steps: `snapshot_seconds`, `snapshot_bytes`, and `ssd_written_bytes`: as
    of a step, with it."""
    resumed: pd.Index = field(default_factory=_no_index)
    """After how many steps the run went on."""
    rated: bool = True
    """Whether it wrote to the drives that its plan's profile is of, so that their rating is theirs."""
    reported_bytes: int = 0
    """What the whole run wrote, by its report; 0 where there is none."""
    written_at: float = 0.0
    """When the file was written to last, in seconds since 1970."""

    def __len__(self) -> int:
        return len(self.by_step)

    def of(self, name: str) -> Floats:
        """A column as numbers [steps]."""
        return self.by_step[name].to_numpy()

    @property
    def learnt_per_second(self) -> pd.Series:
        """Tokens that a step's loss is the mean of, a second [steps]; `tokens_per_second` counts all positions."""
        seconds = self.by_step["step_seconds"]
        return self.by_step["tokens"] / seconds.where(seconds > 0)

    @property
    def cache(self) -> CacheFigures | None:
        """Of each figure the mean over the steps that have it; None where no step has any, as in earlier versions."""
        means = {name: float(self.by_step[name].mean()) for name in _CACHE}
        known = {name: mean for name, mean in means.items() if math.isfinite(mean)}
        return CacheFigures(**known) if known else None

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """The number of each step [steps], from 1."""
        return self.by_step.index.to_numpy()

    @property
    def skipped(self) -> npt.NDArray[np.int64]:
        """Steps whose gradients overflowed in fp16 [skipped steps]."""
        return self.by_step.index[self.by_step["skipped"]].to_numpy()

    def table(self) -> pd.DataFrame:
        """A row a step, with what was measured after it, and one for what was measured before the first: `step`, the
        numbers that were read, `skipped`, `eval_loss`, `snapshot_seconds`, `snapshot_bytes`, and whether the run went
        on after it (`resumed`). What was not measured is missing."""
        known = [name for name in _STEP if name in self.by_step]
        resumed = pd.Series(True, index=self.resumed.unique(), name="resumed")
        snapshots = self.snapshots[~self.snapshots.index.duplicated(keep="last")].drop(columns=WRITTEN)
        events = [self.held_out.rename("eval_loss"), snapshots, resumed]
        table = self.by_step[known].join(events, how="outer").sort_index().reset_index(names="step")
        table = table.astype({"skipped": TRUTH, "resumed": TRUTH}).fillna({"resumed": False})
        for name in (*_WHOLE, "snapshot_bytes"):
            if name in table and (table[name].isna() | (table[name] % 1 == 0) & (table[name].abs() < 1 << 53)).all():
                table[name] = table[name].astype(INTEGER)
        return table

    @property
    def written_bytes(self) -> float:
        """What the whole run has written so far, with its last snapshot and what it did behind its last step."""
        told = pd.concat([self.by_step[WRITTEN], self.snapshots[WRITTEN]])
        return max(told.max() if told.notna().any() else 0.0, self.reported_bytes)

    @property
    def last(self) -> int:
        """How many steps the run has behind it."""
        return int(self.by_step.index[-1]) if len(self) else 0


@dataclass(frozen=True, slots=True)
class Thinned:
    """A curve of few points: each stands for several steps that follow each other."""

    step: Floats
    mean: Floats
    low: Floats
    high: Floats


def read_curves(path: Path, numbers: Sequence[str] = DRAWN) -> Curves:
    """Read a metrics.jsonl, of each step `numbers`, DRAWN among them. A last line without an end is being written, or a
    crash cut it off: it is left out.

    Raises UsageError, with its line, for what no run wrote.
    """
    found = _Found(numbers)
    try:
        with open_regular(path, "file of metrics") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size > MAX_BYTES:
                raise UsageError(f"{path}: larger than {MAX_BYTES >> 30} GiB, so too large to show")
            number = 0
            while data := file.readline(MAX_LINE_BYTES):
                number += 1
                if data.endswith(b"\n"):
                    found.take(f"{path}:{number}", number, data)
                elif len(data) == MAX_LINE_BYTES:
                    raise UsageError(f"{path}:{number}: longer than any line of a run's metrics")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    curves = found.curves()
    curves.written_at = stat.st_mtime
    return curves


def thinned(steps: Sequence[int] | npt.NDArray[np.int64], values: Floats, most: int) -> Thinned:
    """`values` [steps] as at most `most` points, each the mean, least and largest of those steps that it stands for;
    what is not finite counts in none, and a point without any is left out."""
    curve = pd.DataFrame({"step": np.asarray(steps, dtype=np.float64), "value": values})
    curve = curve[np.isfinite(curve["value"])]
    ends = np.linspace(0, len(curve), min(most, len(curve)) + 1).astype(np.int64)[1:]
    points = curve.groupby(np.searchsorted(ends, np.arange(len(curve)), side="right"))
    value = points["value"]
    each = (points["step"].mean(), value.mean(), value.min(), value.max())
    return Thinned(*(column.to_numpy(np.float64) for column in each))


class _Found:
    """What was read so far, a table for each kind of line."""

    def __init__(self, numbers: Sequence[str]) -> None:
        self.steps = _Lines(numbers)
        self.skipped = array("b")
        self.held_out = _Lines(["eval_loss"])
        self.snapshots = _Lines(_SNAPSHOT)
        self.resumed = _Lines([])

    def take(self, place: str, number: int, data: bytes) -> None:
        """Line `number` more."""
        try:
            told = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{place}: not a line of a run's metrics: not valid JSON") from error
        if not isinstance(told, dict):
            raise UsageError(f"{place}: not a line of a run's metrics: no object of fields")
        step = told.get("step")
        if type(step) is not int or not 0 <= step < 1 << 40:
            raise UsageError(f"{place}: not a line of a run's metrics: it has no `step` that counts from 0")
        if "loss" in told:
            lines = self.steps
            self.skipped.append(told.get("skipped") is True)
        elif "eval_loss" in told:
            lines = self.held_out
        elif "snapshot_seconds" in told:
            lines = self.snapshots
        elif "resume_seconds" in told:
            lines = self.resumed
        else:
            return
        lines.line.append(number)
        lines.step.append(step)
        for name, column in lines.columns.items():
            column.append(_number(place, told, name))

    def curves(self) -> Curves:
        """Without what was done again."""
        steps = self.steps.frame().assign(skipped=np.asarray(self.skipped, dtype=bool))
        held_out, snapshots, resumed = (each.frame() for each in (self.held_out, self.snapshots, self.resumed))
        begins = pd.concat([steps.set_index("line")["step"], resumed.set_index("line")["step"] + 1]).sort_index()

        def kept(lines: pd.DataFrame) -> pd.DataFrame:
            return _before_what_begins_again(lines, begins).set_index("step").drop(columns="line")

        return Curves(
            by_step=kept(steps),
            held_out=kept(held_out.drop_duplicates("step", keep="last"))["eval_loss"],
            snapshots=kept(snapshots),
            resumed=kept(resumed).index,
        )


def _before_what_begins_again(lines: pd.DataFrame, begins: pd.Series) -> pd.DataFrame:
    """The lines whose step no later line begins again. `begins`: the step from which a line, by its number, begins: a
    step's own, and where a run goes on, the one after those that it keeps."""
    least = np.append(begins[::-1].cummin()[::-1].to_numpy(), _AT_ONCE)
    later = begins.index.searchsorted(lines["line"], side="right")
    return lines[lines["step"].to_numpy() < least[later]]


def _number(place: str, told: dict[str, Any], name: str) -> float:
    value = told.get(name)
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{place}: `{name}` is no number")
    try:
        return float(value)
    except OverflowError as error:
        raise UsageError(f"{place}: `{name}` is out of range") from error
