"""Builds a decision's schedule and counts exactly what it takes; or estimates that from a few of its layers.

Owns the estimate, and the last schedules that were built. It decides nothing.
"""

from collections import deque
from dataclasses import astuple, dataclass

from ssdplan.plans.documents.plan import Decision
from ssdplan.plans.documents.profile import Model
from ssdplan.plans.documents.state_layout import GRADIENT_BYTES, GRAIN
from ssdplan.plans.graph.ops import Schedule
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.schedule.shards import Shards
from ssdplan.plans.units import PAGE

from ..predict.peaks import Peaks, predict_peaks
from ..predict.shortened import shortened
from ..program.placement import footprint
from .budgets import Candidate, Needs
from .transit import bookkeeping_of

KEPT = (2, 8)
"""As many of the last schedules of whole and of shortened models are kept."""
FEW_STAY = 0.25
"""Of the blocks. Where the device keeps no more of them, somewhere three pass one after another, which is as many as a
pipeline has buffers for: it takes as much as where all pass."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A decision, its schedule, of several ranks that of rank 0, and what they take exactly, or any rank at most."""

    candidate: Candidate
    decision: Decision
    schedule: Schedule
    peaks: Peaks
    needs: Needs


class Builder:
    """Schedules of one model's decisions, and of the same for fewer layers of it."""

    def __init__(self, model: Model) -> None:
        self.model, self.short = model, shortened(model)
        self._whole, self._short = (deque[tuple[Model, Decision, Schedule]](maxlen=kept) for kept in KEPT)

    def build(self, candidate: Candidate, decision: Decision) -> Fitted:
        """A decision with its schedule, and what they take exactly."""
        schedule = self.schedule(self.model, decision)
        peaks = predict_peaks(schedule, self.model, decision)
        for rank in _unlike_ranks(self.model, decision):
            other = build_schedule(self.model, decision, rank)
            peaks = peaks.most(predict_peaks(other, self.model, decision))
        return Fitted(candidate, decision, schedule, peaks, _needs(schedule, peaks))

    def schedule(self, model: Model, decision: Decision) -> Schedule:
        """The schedule of a decision; the last are kept, for what was estimated is often simulated next."""
        built = self._whole if model is self.model else self._short
        for known, decided, schedule in built:
            if known == model and decided == decision:
                return schedule
        schedule = build_schedule(model, decision)
        built.append((model, decision, schedule))
        return schedule

    def in_short(self, decision: Decision) -> Schedule:
        """The schedule of the shortened model by a decision; of a class the device keeps all parameters or none."""
        fewer = len(self.short.layers) < len(self.model.layers)
        return self.schedule(self.short, _all_or_nothing(decision) if fewer else decision)

    def estimate(self, decision: Decision) -> Needs:
        """What a decision takes: `at_least`, and what rounding and bookkeeping of the layers that are left out may add:
        every form of a state is taken to be rounded up as far as can be, and so is every checkpoint."""
        least, peaks = self._at_least(decision)
        if len(self.short.layers) == len(self.model.layers):
            return least
        rounding = self._rounding(decision)
        there = least.ssd > 0  # or nothing is rounded to ssd
        return Needs(
            host=least.host + rounding + bookkeeping_of(peaks, self.model, self.short) - peaks.bookkeeping,
            device=least.device,
            ssd=least.ssd + rounding * there,
            writes=least.writes + rounding * there,
        )

    def at_least(self, decision: Decision) -> Needs:
        """What a decision takes at least, from the schedule of a shortened model and the program's forms for the
        rest. Where the device keeps more than `FEW_STAY` of a class, less may pass through than where it keeps none,
        and no less than where it keeps all."""
        least, _ = self._at_least(decision)
        whole = _all_or_nothing(decision, FEW_STAY)
        if _all_or_nothing(decision) == whole or len(self.short.layers) == len(self.model.layers):
            return least
        return Needs(*map(min, astuple(least), astuple(self._at_least(decision, whole)[0])))

    def _at_least(self, decision: Decision, as_if: Decision | None = None) -> tuple[Needs, Peaks]:
        """The same with the pipeline of `as_if`, and the peaks of the shortened model."""
        fewer = len(self.short.layers) < len(self.model.layers)
        less = _all_or_nothing(as_if or decision) if fewer else decision
        schedule = self.in_short(less)
        peaks = predict_peaks(schedule, self.short, less)
        built = _needs(schedule, peaks)
        if not fewer:
            return built, peaks
        whole, part = footprint(self.model, decision), footprint(self.short, less)
        needs = Needs(
            host=built.host + round(whole.host_bytes - part.host_bytes),
            device=built.device + round(whole.device_bytes - part.device_bytes),
            ssd=built.ssd + round(whole.ssd_bytes - part.ssd_bytes),
            writes=built.writes + round(whole.ssd_write_bytes - part.ssd_write_bytes),
        )
        return needs, peaks

    def _rounding(self, decision: Decision) -> int:
        """Bytes that whole grains and pages take at most beside the states and checkpoints that are left out."""
        states, dropped = (
            len(whole) - len(part)
            for whole, part in ((self.model.states, self.short.states), (self.model.layers, self.short.layers))
        )
        # Every form of a state is cut to whole grains, every activation checkpoint to whole pages.
        each = GRADIENT_BYTES + max(decision.parameters_of(state).element_bytes for state in self.model.states)
        largest = max(decision.formats_of(state).range_bytes(GRAIN) for state in self.model.states)
        rounding = states * (largest + GRAIN * each)
        if 0.0 < decision.checkpoint_host < 1.0:
            rounding += dropped * decision.micro_batches * PAGE
        return rounding


def _unlike_ranks(model: Model, decision: Decision) -> list[int]:
    """One of each kind of ranks that own fewer elements of some state than rank 0 does."""

    def owned(rank: int) -> tuple[int, ...]:
        spans = (Shards(decision.shares, rank).own(state.elements) for state in model.states)
        return tuple(stop - start for start, stop in spans)

    kinds = {owned(rank): rank for rank in reversed(range(decision.shares))}
    return sorted(kinds.values())[1:]


def _all_or_nothing(decision: Decision, more_than: float = 1.0) -> Decision:
    """`decision` with the device keeping all of a class, where it does or keeps `more_than` that share, or none: of a
    share, a shortened model has no states, and its pipeline is that of nothing kept."""

    def rounded(share: float) -> float:
        return float(share == 1.0 or share > more_than)

    placement = {
        name: p.model_copy(
            update={
                "parameters_device": rounded(p.parameters_device),
                "parameters_turn": 0.0,
                "optimizer_device": rounded(p.optimizer_device),
            }
        )
        for name, p in decision.placement.items()
    }
    there = rounded(decision.checkpoint_device)
    return decision.model_copy(update={"placement": placement, "checkpoint_device": there})


def _needs(schedule: Schedule, peaks: Peaks) -> Needs:
    # The first step never writes more than a steady one: it has no delayed updates.
    return Needs(peaks.host + peaks.bookkeeping, peaks.device, peaks.ssd, schedule.traffic("steady")["write"])
