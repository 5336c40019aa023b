"""Pace: makes each operation of a run last as long as the machine would take that the run emulates (DESIGN 11).

Owns the courses of the lanes: what each has to do, one operation after the other, and how lanes that share a drive slow
each other, as the simulator has it. An operation does its own work for real and then waits until its time is over, so
no result changes. It knows which figures count, and not where they come from.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ssdplan.plans.analysis.drift import TIE, Expectation
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import UsageError
from ssdplan.plans.graph.ops import RESOURCES, Graph, Resource

from ..device.interface import Action

_LANE = {resource: number for number, resource in enumerate(RESOURCES)}


@dataclass(slots=True)
class Turn:
    """An operation on its course."""

    left: float
    """Seconds that it still takes with nothing beside it."""
    ended: float | None = None
    """When its time was over."""


class Courses:
    """The lanes in time, which whoever asks moves on. Not for several threads at once."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._lanes: list[deque[Turn]] = [deque() for _ in RESOURCES]
        self._speeds: Sequence[Sequence[float]] = ()

    def begin(self, lane: int, seconds: float, speeds: Sequence[Sequence[float]], now: float) -> Turn:
        """An operation that comes behind those of its lane. `speeds`: by the bit mask of lanes at work, of each."""
        self.move_on(now)
        self._speeds = speeds
        turn = Turn(seconds)
        self._lanes[lane].append(turn)
        return turn

    def move_on(self, now: float) -> None:
        """Let time pass until `now`."""
        while True:
            working = [lane for lane, turns in enumerate(self._lanes) if turns]
            if not working:
                self._now = max(self._now, now)
                return
            of = self._speeds[sum(1 << lane for lane in working)]
            needed = {lane: self._lanes[lane][0].left / of[lane] for lane in working}
            seconds = min(needed.values())
            if self._now + seconds > now:
                for lane in working:
                    self._lanes[lane][0].left -= max(now - self._now, 0.0) * of[lane]
                self._now = max(self._now, now)
                return
            self._now += seconds
            together = seconds + TIE * self._now
            for lane in working:
                if needed[lane] <= together:
                    self._lanes[lane].popleft().ended = self._now
                else:
                    self._lanes[lane][0].left -= seconds * of[lane]

    def next_end(self) -> float:
        """When the next operation would be over, as things are."""
        working = [lane for lane, turns in enumerate(self._lanes) if turns]
        of = self._speeds[sum(1 << lane for lane in working)]
        return self._now + min(self._lanes[lane][0].left / of[lane] for lane in working)


@dataclass
class Pacer:
    """Operations of all lanes of a run, and how their own work compares with the time that they are given."""

    clock: Callable[[], float] = time.perf_counter
    worked: dict[Resource, float] = field(init=False)
    """Seconds of their own work in this step, by lane."""
    given: dict[Resource, float] = field(init=False)
    """Seconds that they are to last."""

    def __post_init__(self) -> None:
        self.begin()
        self._turned = threading.Condition()
        self._courses = Courses(self.clock())

    def paced(self, graph: Graph, actions: Sequence[Action], expectation: Expectation) -> list[Action]:
        """The same actions, each of which lasts as its operation is expected to."""
        return [
            self._lasting(action, op.resource, seconds, expectation.speeds)
            for op, action, seconds in zip(graph.ops, actions, expectation.alone_seconds, strict=True)
        ]

    def _lasting(
        self, action: Action, resource: Resource, seconds: float, speeds: Sequence[Sequence[float]]
    ) -> Callable[[], None]:
        def last() -> None:
            with self._turned:
                began = self.clock()
                turn = self._courses.begin(_LANE[resource], seconds, speeds, began)
                self._turned.notify_all()  # who is at work beside it is slower now
            rest = action()
            if rest is not None:
                rest()
            with self._turned:
                self.worked[resource] += self.clock() - began
                self.given[resource] += seconds
                self._wait(turn)

        return last

    def _wait(self, turn: Turn) -> None:
        while True:
            now = self.clock()
            self._courses.move_on(now)
            if turn.ended is not None:
                self._turned.notify_all()
                return
            self._turned.wait(max(self._courses.next_end() - now, 0.0))

    def begin(self) -> None:
        """A step begins: from here on its work counts."""
        self.worked = dict.fromkeys(RESOURCES, 0.0)
        self.given = dict.fromkeys(RESOURCES, 0.0)

    def share(self) -> tuple[Resource, float]:
        """The lane whose own work is the largest share of the time that it is given, and that share."""
        every = sum(self.given.values())
        shares = {lane: self.worked[lane] / seconds for lane, seconds in self.given.items() if seconds > 0.01 * every}
        lane = max(shares, key=lambda each: shares[each], default=RESOURCES[0])
        return lane, shares.get(lane, 0.0)


ROOM = 1.1
"""What a slower emulation is to leave beyond the work that was seen."""


def require_pace(pacer: Pacer, plan: Plan) -> None:
    """Raise UsageError where this machine is too slow for the step that has just ended."""
    lane, share = pacer.share()
    emulation = plan.machine.emulation
    assert emulation is not None
    if share > 1.0:
        least = f"slower={emulation.slower * share * ROOM:.2g}"
        raise UsageError(
            f"emulation: of {lane} alone this machine takes {share:.2f} times as long as operations are to last; "
            f"profile again with --emulate {least} or more, or with a larger number for smaller"
        )
