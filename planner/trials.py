"""Trials: what becomes of a candidate, as shortened models run it, and whole.

Owns these runs, and which of a candidate's own plans is the best: what the program found, recomputing everything, or
PyAO's rule. Which candidates are worth a trial, `search.py` and `saving.py` decide.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from math import inf

from ssdplan.plans.documents.plan import Recompute
from ssdplan.plans.documents.profile import Machine, Model

from .explain.alternatives import rungs_by
from .fit.budgets import Candidate
from .fit.fit import Fitter
from .fit.found import Branch, Sketch, Solved, inputs_elsewhere
from .pacing import WAITING, Pacing
from .predict.shortened import step_seconds
from .ranked import CLOSE, Ranked, Scanned, Simulated
from .scanning import Scanner


class Trials:
    """Trials of one model's candidates on one machine, in one set of budgets."""

    def __init__(self, model: Model, machine: Machine, fitter: Fitter, *, paces: bool = True) -> None:
        """`paces`: what is simulated is tried at other paces too."""
        self.model, self.machine, self.fitter, self.paces = model, machine, fitter, paces
        self.pacing = Pacing(model, machine, fitter)
        self.scanner = Scanner(model, machine, fitter, self.pacing.tokens)
        self._ranked: dict[Candidate, list[Ranked]] = {}

    def at_one_pace(self) -> "Trials":
        """The same without other paces; the two share what shortened models ran."""
        other = copy(self)
        other.paces = False
        return other

    def has_ranked(self, candidate: Candidate) -> bool:
        """Whether it was looked at before."""
        return candidate in self._ranked

    @property
    def reached(self) -> list[tuple[Scanned, float]]:
        """What was looked at and fits, with its tokens/s."""
        return [(found.scanned, found.tokens_per_second) for each in self._ranked.values() for found in each]

    def rank(self, entry: Scanned) -> list[Ranked]:
        """`entry` as shortened models run it; nothing when it does not fit."""
        if entry.candidate not in self._ranked:
            self._ranked[entry.candidate] = []
            ways = self.fitter.sketch, self.fitter.resident_sketch
            sketches = [sketch for way in ways if (sketch := way(entry.candidate, entry.branches)) is not None]
            found = [(self._step_seconds(sketch), sketch.program) for sketch in sketches]
            if found:
                seconds, program = min(found, key=lambda each: each[0])
                others = inputs_elsewhere(entry.branches) if sketches[0].decision.checkpoint_device else []
                if others and seconds > WAITING * program.seconds:
                    other = self.fitter.sketch(entry.candidate, others)
                    found += [(self._step_seconds(other), other.program)] if other else []
                    seconds, program = min(found, key=lambda each: each[0])
                self._ranked[entry.candidate].append(
                    Ranked(entry, program, self.pacing.tokens(entry.candidate) / seconds)
                )
        return list(self._ranked[entry.candidate])

    def _step_seconds(self, sketch: Sketch) -> float:
        """Of a step as shortened models run it."""
        return step_seconds(self.model, self.machine, sketch.decision, self.fitter.builder.schedule)

    def simulate(
        self,
        candidate: Candidate,
        branches: Sequence[Branch],
        plain: Simulated | None = None,
        beside: Simulated | None = None,
    ) -> Simulated | None:
        """The candidate's best decision, fitted and simulated; None when it does not fit. Where the simulated step
        waits for chunks, the fastest of the paces that hide more, what their operations take counted in; without
        `paces` the usual one. `plain` and `beside` as in `weighed`."""
        solved = self.fitter.solve(candidate, branches)
        if solved is None:
            return None
        best = self._met(solved, candidate, branches)
        if self.fitter.fixed.recompute == "auto" and rungs_by("all", self.model, candidate.micro_batch_size):
            best = self.weighed(best, candidate, branches, plain, beside)
        return best

    def weighed(
        self,
        best: Simulated,
        candidate: Candidate,
        branches: Sequence[Branch],
        plain: Simulated | None,
        beside: Simulated | None = None,
    ) -> Simulated:
        """The best of what the program found, of recomputing everything (`plain`, where that is known), and of PyAO's
        rule: by the simulator's seconds and what each writes more than `beside`, as the program weighs it, or than what
        recomputes everything. At one pace by what another may make of it, for whoever tries others later."""
        weight = self.weight if self.paces else self.promised
        everything = best
        if best.solved.fitted.decision.saved or self.keeps_everything(best):
            plain = plain or self._recomputing("all", candidate, branches, paced_below=best.timeline.seconds)
            everything = plain or best
        reference = beside or everything
        best = min(best, everything, key=lambda each: weight(each, reference))
        if rungs_by("paper", self.model, candidate.micro_batch_size) is None:
            return best
        most = weight(best, reference) * self.pacing.tokens(candidate)
        by_rule = self._recomputing("paper", candidate, branches, most=most, paced_below=most)
        return min((best, *([by_rule] if by_rule else [])), key=lambda each: weight(each, reference))

    def keeps_everything(self, simulated: Simulated) -> bool:
        """Whether it is a plan that keeps all on the device, of which the program's bounds say nothing."""
        return simulated.solved.branch.fixed.kept is not None and self.fitter.fixed.kept is None

    def _recomputing(
        self,
        recompute: Recompute,
        candidate: Candidate,
        branches: Sequence[Branch],
        *,
        most: float = inf,
        paced_below: float,
    ) -> Simulated | None:
        """The candidate where backward recomputes that; None where it does not fit, or where by the program's bound a
        step clearly takes longer than `most` seconds. Other paces are tried of a program of less than `paced_below`."""
        others = [replace(each, fixed=replace(each.fixed, recompute=recompute)) for each in branches]
        entry = self.scanner.surely(candidate, others)
        if entry is None:
            return None
        if CLOSE * entry.bound.seconds > most:  # what keeps everything on the device may be faster than that bound
            resident = self.fitter.resident(candidate, entry.branches)
            return None if resident is None else self.pacing.simulated(resident)
        solved = self.fitter.with_recompute(recompute).solve(candidate, entry.branches)
        return None if solved is None else self._met(solved, candidate, entry.branches, paced_below)

    def _met(
        self, solved: Solved, candidate: Candidate, branches: Sequence[Branch], paced_below: float = inf
    ) -> Simulated:
        if not self.paces:
            return self.pacing.met(solved, candidate, branches)
        return self.pacing.paced(solved, candidate, branches, paced_below)

    def weight(self, simulated: Simulated, plain: Simulated) -> float:
        """Seconds of a token, and what it writes more than in `plain` by the wear price."""
        tokens, before = (self.pacing.tokens(each.solved.fitted.candidate) for each in (simulated, plain))
        written, base = simulated.solved.fitted.needs.writes / tokens, plain.solved.fitted.needs.writes / before
        seconds = plain.timeline.seconds / before
        more, price = max(written - base, 0.0), self.fitter.fixed.wear_price
        wear = more / base if base else inf
        return simulated.timeline.seconds / tokens + (price * seconds * wear if price and more else 0.0)

    def promised(self, simulated: Simulated, plain: Simulated) -> float:
        """The same with the program's seconds, which no pace beats."""
        hidden = simulated.timeline.seconds - simulated.solved.program.seconds
        return self.weight(simulated, plain) - hidden / self.pacing.tokens(simulated.solved.fitted.candidate)
