"""A run's curves in words: where it stands, its figures, and loss and speed drawn with characters.

Owns the text of at most 100 columns. The reading of metrics.jsonl is in `curves`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..analysis.curves import Curves, Floats, thinned
from ..analysis.wear import share_of_rating
from ..documents.plan import Plan
from ..units import format_bytes
from .quantities import decimal, duration, loss_figure, number, percent, times
from .tables import COLUMNS, Whole, facts, page, wrapped

PLOT_COLUMNS = 78
LOSS_ROWS, SPEED_ROWS = 10, 5
LAST_STEPS = 25
_SILENT_SECONDS = 60.0
_GUTTER = 10
_LEAST_RANGE = 1e-12
"""Of what is drawn: a curve within less is a line in the middle."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a run besides its metrics."""

    directory: str
    steps: int
    """That it was started for."""
    done: bool
    """It came to its end."""
    snapshots: bool
    """Whether it could go on after a kill."""
    now: float
    """Seconds since 1970."""
    store: tuple[str, ...] = ()
    """Lines on what there is of its store; none: nothing."""
    dropped: int | None = None
    """After how many steps its states were when its store was dropped; None: it was not."""
    goes_on: bool | None = None
    """Whether a process trains it now; None where nobody knows."""
    newest: int | None = None
    """The step of the newest snapshot, from which a stopped run goes on, 0 before the first; None: it needs none."""


def describe_curves(curves: Curves, plan: Plan, standing: Standing) -> str:
    """The text. Without any step it says only that."""
    title = "The run"
    if not len(curves):
        return page(title, _progress(curves, standing))
    loss, speed = curves.of("loss"), curves.of("tokens_per_second")
    predicted = plan.prediction.tokens_per_second
    return page(
        title,
        _progress(curves, standing),
        ("Figures", facts(*figures(curves, plan))),
        ("Loss over steps: * training" + (", o held-out" if len(curves.held_out) else ""), _loss(curves, loss)),
        ("Tokens a second over steps: * measured, - predicted", _speed(curves, speed, predicted)),
    )


def figures(curves: Curves, plan: Plan) -> list[tuple[str, str]]:
    """Names and values of what the curves come to; a value without a name goes with the one before."""
    steps = curves.by_step
    loss, norm = steps["loss"], steps["grad_norm"]
    pairs: list[tuple[str, str]] = []
    if len(known := _finite(loss)):
        pairs.append(("loss", f"{loss_figure(known.iloc[0])} first, {loss_figure(known.iloc[-1])} last"))
        pairs.append(("", f"{loss_figure(loss.min())} lowest, in step {loss.idxmin():,}"))
        if len(known) > LAST_STEPS:
            pairs.append(("", f"{loss_figure(known.iloc[-LAST_STEPS:].mean())} mean of the last {LAST_STEPS} steps"))
    if len(curves.held_out):
        pairs.append(("held-out loss", _of_held_out(curves.held_out)))
    speed, seconds = _finite(steps["tokens_per_second"]), _finite(steps["step_seconds"])
    if len(speed):
        predicted = number(plan.prediction.tokens_per_second)
        every = f"median of all {len(curves):,} steps" if len(curves) > 1 else "in the one step"
        pairs.append(("tokens a second", f"{number(speed.median())} {every}; {predicted} predicted"))
        if len(learnt := _finite(curves.learnt_per_second)):
            words = f"{number(learnt.median())} of them learnt, not prompts or padding"
            pairs.append(("", f"of all positions of the rows; {words}"))
    if len(seconds):
        low, middle, high = map(duration, seconds.quantile([0.1, 0.5, 0.9]))
        spread = f" median of all {len(curves):,}; four of five take {low} to {high}" if len(curves) > 1 else ""
        pairs.append(("a step", f"{middle}{spread}"))
        pairs.append(("all steps", duration(seconds.sum())))
    if len(_finite(norm)):
        middle, most = number(norm.median()), number(norm.max())
        pairs.append(("gradient norm", f"{middle} median, {most} at most, in step {norm.idxmax():,}"))
    if len(rate := _finite(steps["lr"])):
        pairs.append(("learning rate", f"{rate.iloc[-1]:.3g} last, {rate.max():.3g} at most"))
    if len(curves.skipped):
        words = times(len(curves.skipped), "step")
        pairs.append(("skipped", f"{words} whose gradients overflowed, the last of them step {curves.skipped[-1]:,}"))
    if len(curves.snapshots):
        last = f"the last after step {curves.snapshots.index[-1]:,}"
        pairs.append(("snapshots", f"{len(curves.snapshots):,}, {last}{_each(curves.snapshots)}"))
    if len(curves.resumed):
        after = ", ".join(f"{step:,}" for step in curves.resumed[-6:])
        more = "... " if len(curves.resumed) > 6 else ""
        pairs.append(("went on", f"{times(len(curves.resumed), 'time')}, after step {more}{after}"))
    if (written := curves.written_bytes) > 0:
        share = share_of_rating(plan.machine, written) if curves.rated else None
        rated = "" if share is None else f", {percent(share)} of what the drive is rated for"
        pairs.append(("written to ssd", f"{decimal(written)}{rated}"))
    return pairs


def _each(snapshots: pd.DataFrame) -> str:
    """What a snapshot took, by the medians of what is told of them."""
    told = []
    if len(seconds := _finite(snapshots["snapshot_seconds"])):
        told.append(f"{seconds.median() * 1e3:.3g} ms")
    if len(nbytes := _finite(snapshots["snapshot_bytes"])):
        told.append(format_bytes(nbytes.median()))
    return f"; {' and '.join(told)} each (medians)" if told else ""


def _progress(curves: Curves, standing: Standing) -> list[str]:
    """How far it is, whether it goes on, and what it keeps."""
    words = _how_far(curves, standing)
    if standing.store:  # paths and the command stand alone: to be copied
        once = "This removes it:" if standing.done else "Once the run is done, this removes it:"
        words += [*map(Whole, standing.store), once, Whole(f"  ssdplan volume drop {standing.directory} --yes")]
    elif standing.dropped is not None:
        words += wrapped(f"Its store was dropped with the states after step {standing.dropped}; it cannot go on.")
    return words


def _how_far(curves: Curves, standing: Standing) -> list[str]:
    far = f"{curves.last:,} of {standing.steps:,} steps"
    if standing.done:
        return [f"{far}; it is done."]
    if standing.goes_on is False:
        words = f"{far}; no process trains it now."
        if standing.dropped is not None:
            return [words]
        if not standing.snapshots:
            return [words, "It kept no snapshots, so it cannot go on."]
        again = _made_again(curves.last, standing.newest)
        return [words, Whole(f"It goes on with: ssdplan run --resume {standing.directory}"), *again]
    if not len(curves):
        return [f"{far}; none is done yet."]
    silent = max(standing.now - curves.written_at, 0.0)
    words = f"{far}; the last line of its metrics is {duration(silent)} old."
    steps = curves.by_step["step_seconds"]
    usual = steps.median() if len(_finite(steps)) else 0.0
    if silent < max(_SILENT_SECONDS, 5 * usual):
        return [words]
    if standing.dropped is not None:
        return [words]
    if not standing.snapshots:
        return [words, "If it was stopped, it kept no snapshot to go on from."]
    return [words, Whole(f"If it was stopped: ssdplan run --resume {standing.directory}")]


def _made_again(last: int, newest: int | None) -> list[str]:
    """What a stopped run with `last` steps makes again when it goes on from its newest snapshot."""
    if newest is None or not last:
        return []
    if not newest:
        return [f"It took no snapshot yet, so it begins again: {_steps(1, last)}, to the same losses."]
    if newest >= last:
        return [f"It goes on from its snapshot after step {newest:,}, and makes no step again."]
    return [f"It goes on from its snapshot after step {newest:,}, and makes {_steps(newest + 1, last)} again."]


def _steps(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _of_held_out(found: pd.Series) -> str:
    by_step = found.sort_index()
    first, last = by_step.index[0], by_step.index[-1]
    best = found.idxmin() if found.notna().any() else found.index[0]
    words = f"{loss_figure(found[first])} after {first:,} steps"
    if last != first:
        words += f", {loss_figure(found[last])} after {last:,}"
    return words + (f"; lowest {loss_figure(found[best])} after {best:,}" if best != last else "")


def _finite(values: pd.Series) -> pd.Series:
    return values[np.isfinite(values)]


# Drawn with characters.


def _loss(curves: Curves, loss: Floats) -> list[str]:
    thin = thinned(curves.steps, loss, PLOT_COLUMNS)
    known = _finite(curves.held_out)
    low = min([*thin.mean, *known], default=0.0)
    high = max([*thin.mean, *known], default=0.0)
    return _plot(
        [("*", thin.step, thin.mean), ("o", known.index.to_numpy(), known.to_numpy())],
        limits=(low, high),
        last=curves.last,
        rows=LOSS_ROWS,
    )


def _speed(curves: Curves, speed: Floats, predicted: float) -> list[str]:
    thin = thinned(curves.steps, speed, PLOT_COLUMNS)
    across = np.linspace(0, curves.last, PLOT_COLUMNS)
    return _plot(
        [("-", across, [predicted] * PLOT_COLUMNS), ("*", thin.step, thin.mean)],
        limits=(0.0, max([predicted, *thin.mean])),
        last=curves.last,
        rows=SPEED_ROWS,
    )


def _plot(
    series: Sequence[tuple[str, Sequence[float] | Floats, Sequence[float] | Floats]],
    *,
    limits: tuple[float, float],
    last: int,
    rows: int,
) -> list[str]:
    """Points (step, value) of each series as its character, later ones over earlier; from step 0 to `last`."""
    low, high = limits
    if high - low < _LEAST_RANGE:
        half = abs(low) / 2 if abs(low) > _LEAST_RANGE else 0.5
        low, high = low - half, high + half
    grid = [[" "] * PLOT_COLUMNS for _ in range(rows)]
    for mark, steps, values in series:
        for step, value in zip(steps, values, strict=True):
            column = min(round(step / max(last, 1) * (PLOT_COLUMNS - 1)), PLOT_COLUMNS - 1)
            row = round((high - value) / (high - low) * (rows - 1))
            grid[min(max(row, 0), rows - 1)][column] = mark
    lines = []
    for at, row in enumerate(grid):
        value = high - (high - low) * at / (rows - 1)
        label = f"{value:,.0f}" if 1000 <= high < 1e6 else f"{value:.4g}"
        lines.append(f"{label if at % 2 == 0 or at == rows - 1 else '':>{_GUTTER}} |{''.join(row)}".rstrip())
    end = f"step {last:,}"
    lines.append(" " * _GUTTER + " +" + "-" * PLOT_COLUMNS)
    lines.append(" " * _GUTTER + "  0" + end.rjust(PLOT_COLUMNS - 1))
    assert max(map(len, lines)) <= COLUMNS
    return lines
