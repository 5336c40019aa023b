"""The watchdog: says what a stalled step waits for, instead of letting it hang in silence.

Owns the clock of a stall and its words. It looks at a runner from a thread of its own, now and then; it touches no
operation, and ends a run only where it was told to.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import StallError
from ssdplan.plans.graph.collectives import AddShares, Collective, Exchange, Gather
from ssdplan.plans.graph.ops import (
    Backward,
    Forward,
    Graph,
    Op,
    Perturb,
    Region,
    Schedule,
    SumSquares,
    TakeRows,
    Transfer,
    Update,
)
from ssdplan.plans.units import format_bytes, format_seconds

from ..store import Store
from .runner import Standing

LEAST_SECONDS = 60.0
PREDICTED_STEPS = 5.0
"""A stall is told after this many predicted steps, and not before LEAST_SECONDS, unless the user says otherwise."""
FOLLOWERS = 3
"""Waiting ops that are named; the rest are counted."""
_LOOKS = 10
"""Looks at the runner within the time after which a stall is told."""
_LONGEST_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Patience:
    """How long a run may stand still."""

    tell_after_seconds: float
    """Without an operation that ends; told again at twice the time, and so on."""
    abort_after_seconds: float | None = None
    """Without an operation that ends; then the run ends with a StallError. None: never."""

    @classmethod
    def of(cls, plan: Plan, tell_after: float | None = None, abort_after: float | None = None) -> Self:
        """What the user says (None: nothing), else by the plan."""
        usual = max(LEAST_SECONDS, PREDICTED_STEPS * plan.prediction.step_seconds)
        return cls(usual if tell_after is None else tell_after, abort_after)


class Watchdog:
    """Watches a runner for as long as it is entered."""

    def __init__(
        self,
        patience: Patience,
        standing: Callable[[], Standing | None],
        words: Callable[[Standing, float], str],
        note: Callable[[str], None],
        abort: Callable[[StallError], None],
    ) -> None:
        """`standing`: where the runner is; `words`: of that at a moment (time.perf_counter); `note`: takes them;
        `abort`: ends the run with an error, called once, and only where `patience` ends."""
        self._patience, self._standing, self._words = patience, standing, words
        self._note, self._abort = note, abort
        self._stalled_at: float | None = None
        self._after = patience.tell_after_seconds
        self._aborted = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ssdplan-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        tell_after, abort_after = self._patience.tell_after_seconds, self._patience.abort_after_seconds
        soonest = min(tell_after, abort_after or tell_after)
        while not self._stop.wait(min(soonest / _LOOKS, _LONGEST_LOOK_SECONDS)):
            standing = self._standing()
            self.look(standing, time.perf_counter())

    def look(self, standing: Standing | None, now: float) -> None:
        """What is due where the runner stands so at the moment `now` (time.perf_counter); None: it runs nothing."""
        if standing is None:
            return
        if standing.last_end != self._stalled_at:
            self._stalled_at, self._after = standing.last_end, self._patience.tell_after_seconds
        still = now - standing.last_end
        abort_after = self._patience.abort_after_seconds
        if abort_after is not None and still >= abort_after and not (self._aborted or _waits_for_ranks(standing)):
            self._abort(StallError(self._words(standing, now)))
            self._aborted = True  # what cannot be left, compute, is told again
        if still >= self._after:
            self._note(self._words(standing, now))
            while self._after <= still:
                self._after *= 2


def _waits_for_ranks(standing: Standing) -> bool:
    """Whether all that runs waits for other ranks, which ends by itself, with an error that names one of them
    (`ranks/group.py`)."""
    ops = standing.graph.ops
    return bool(standing.running) and all(isinstance(ops[index], Collective) for index, _ in standing.running)


class Words:
    """A stall in words: each operation that runs, what it is of, where its bytes are, and what waits for it."""

    def __init__(self, plan: Plan, schedule: Schedule, store: Store | None) -> None:
        self._model, self._schedule, self._store = plan.model, schedule, store

    def __call__(self, standing: Standing, now: float) -> str:
        ops = standing.graph.ops
        still = format_seconds(now - standing.last_end)
        under_way = f"{len(standing.running)} under way:" if standing.running else "none is under way"
        ended = f"{standing.ended} of {len(ops)} of the {standing.graph.name} step have"
        lines = [f"no operation has ended for {still}; {ended}, {under_way}"]
        for index, began in standing.running:
            lines.append(f"  {ops[index]} ({self._of(ops[index])}), for {format_seconds(max(now - began, 0.0))}")
            lines += [
                f"    {detail}" for detail in (*self._outstanding(ops[index]), self._waiting(standing.graph, index))
            ]
        return "\n".join(lines)

    def _of(self, op: Op) -> str:
        """The tensors and sizes of an operation."""
        match op:
            case Transfer():
                return f"{format_bytes(op.nbytes)}, from {self._place(op.source)} to {self._place(op.target)}"
            case Update():
                return f"{op.elements:,} elements of {self._model.states[op.state].name}"
            case Perturb():
                return f"{op.elements:,} parameters of {self._model.states[op.state].name}"
            case TakeRows():
                return f"{format_bytes(op.nbytes)} of {self._model.states[op.state].name}"
            case Gather():
                return f"{format_bytes(op.nbytes)} of {self._model.states[op.state].name} from {op.ranks - 1} rank(s)"
            case Exchange():
                return f"{format_bytes(op.nbytes)} of {self._model.states[op.state].name} with {op.ranks - 1} rank(s)"
            case AddShares():
                return f"{format_bytes(op.received.nbytes)} of {self._model.states[op.state].name}"
            case SumSquares():
                return f"{format_bytes(op.gradient.nbytes)} of {self._model.states[op.state].name}"
            case Forward() | Backward():
                layer = self._model.layers[op.layer]
                return f"layer {layer.name}, of {', '.join(self._model.states[index].name for index in layer.states)}"
            case _:
                raise AssertionError(f"unknown op {op}")

    def _place(self, region: Region) -> str:
        buffer = self._schedule.buffers[region.buffer]
        return f"{buffer.name} [{region.start}, {region.stop}) on {buffer.tier}"

    def _outstanding(self, op: Op) -> list[str]:
        """A line for each volume that has not moved all of a read's or write's bytes."""
        if not isinstance(op, Transfer) or op.kind not in ("read", "write"):
            return []
        assert self._store is not None
        region = op.source if op.kind == "read" else op.target
        start = self._schedule.buffers[region.buffer].offset + region.start
        left = self._store.outstanding(start, region.nbytes)
        if not left:
            return ["the volumes have moved all of its bytes"]
        return [f"{path}: {format_bytes(nbytes)} outstanding" for path, nbytes in left.items()]

    def _waiting(self, graph: Graph, index: int) -> str:
        followers = [str(op) for op in graph.ops[index + 1 :] if index in op.waits]
        if not followers:
            return "nothing waits for it but the end of the step"
        named = "; ".join(followers[:FOLLOWERS])
        more = len(followers) - FOLLOWERS
        return f"waiting for it: {named}" + (f"; and {more} more" if more > 0 else "")
