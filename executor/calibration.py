"""Calibration of a run: compares its first steady steps with the profile; says what drifted, and what to do then.

Owns when it looks and which gain is worth a move. The figures are from `plans/analysis/drift.py`, the words from
`plans/views/drift_text.py`. What solve would choose comes from an advisor that is handed in, since the executor does
not know the planner.
"""

from collections.abc import Callable

from ssdplan.native import process
from ssdplan.plans.analysis.drift import Advisor, find_drift
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import InfeasibleError, SsdplanError
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.views.drift_text import describe_change, describe_drift
from ssdplan.plans.views.quantities import duration

STEPS = 3
"""Steady steps that are looked at; the first of a run and those after a flush are none."""
WORTH = 0.02
"""Of a step: a plan that gains less is not worth the move."""


class Calibrator:
    """Looks once at a run's steady steps."""

    def __init__(self, plan: Plan, advisor: Advisor, note: Callable[[str], None], *, replan: bool) -> None:
        """`note` takes sentences for people; `replan`: whether the run would move to a better plan."""
        self._plan, self._advisor, self._note, self._replan = plan, advisor, note, replan
        self._timelines: list[Timeline] = []

    def take(self, timeline: Timeline) -> Plan | None:
        """One steady step more. The plan to move to, when this was the last to look at and one is worth it."""
        if len(self._timelines) >= STEPS:
            return None
        self._timelines.append(timeline)
        if len(self._timelines) < STEPS:
            return None
        process.give_back()  # what steps left in the heap may be what another process solves in
        return self._look()

    def _look(self) -> Plan | None:
        drift = find_drift(self._plan, self._timelines, self._advisor)
        if drift is None:
            return None
        text = describe_drift(self._plan, drift)
        try:
            better = self._advisor.replanned(drift.machine, drift.model)
        except InfeasibleError as error:
            self._note(f"{text}; solve would find no plan: {error}")
            return None
        except SsdplanError as error:
            self._note(f"{text}; {error}")
            return None
        if better.prediction.step_seconds * (1 + WORTH) > drift.step_seconds:
            self._note(f"{text}; solve would choose none that is faster by {WORTH:.0%} with this batch")
            return None
        chosen = f"{duration(better.prediction.step_seconds)} with {describe_change(self._plan, better)}"
        hint = "" if self._replan else "; ssdplan run --replan would move to that plan"
        self._note(f"{text}; solve would now choose a step of {chosen}{hint}")
        return better if self._replan else None
