"""Fitting: from the program's fractions to a decision whose schedule keeps every budget, exactly.

Owns which programs of a candidate are tried, at which paces and in which order, and what is left where none of them
fits. `attempts.py` makes one attempt, `lean_ways.py` has what takes least memory.
"""

from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf

from ssdplan.plans.documents.plan import Recompute
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.documents.zeroth_order import ZerothOrder

from ..program.choices import Aim, FixedChoices, Limits
from ..program.placement import ProgramResult, footprint
from .answers import Answers
from .attempts import SURE, Attempts
from .budgets import UNLIMITED, Candidate, Constraint, Needs, Room, in_memory
from .decided import spilled
from .estimate import Builder
from .found import Branch, Sketch, Solved, fastest
from .kept import everything, large_to_update_there, may_keep_everything
from .lean import fastest_within, leanest_of
from .lean_ways import LeanWays
from .pace import ROOM, Pace, Paces
from .transit import Pipelines

LESS_HIDDEN = 0.99
"""Of a program's seconds: a pace that hides less is taken where its program takes no more."""
DOUBTFUL = 2
"""Estimates that are too much before the leanest is looked at; most that fits does with the first or the second."""
ROOMY = 1.5
"""Times the host memory of a pipeline of states on ssd, which the leanest plan takes at most. With less the device
keeps parameters alone, as that plan does, so that the least budget is its own."""


class Fitter:
    """Fits candidates of one model on one machine into one set of budgets. `pipelines`: another fitter's, where what
    passes through memory is the same."""

    def __init__(
        self,
        model: Model,
        machine: Machine,
        budget: Needs,
        fixed: FixedChoices,
        pipelines: Pipelines | None = None,
    ) -> None:
        self.model, self.machine, self.budget, self.fixed = model, machine, budget, fixed
        self.paces, self.builder = Paces(model, budget, fixed), Builder(model)
        self.answers = Answers(model, machine, budget, fixed, self.builder)
        self.attempts = Attempts(self.answers)
        large = () if self.answers.in_dram else large_to_update_there(model, machine, budget, fixed)
        # A function of no fitter, for what refers to itself is freed late, and with it the schedules that it keeps.
        decide = partial(spilled, model, machine, budget, fixed, self.paces.usuals[-1])
        self.pipelines = pipelines or Pipelines(model, self.builder.short, decide, large)
        self.lean_ways = LeanWays(self.answers, self.paces, self.pipelines)

    def with_recompute(self, recompute: Recompute) -> "Fitter":
        """The same where backward recomputes that. The two share what they build and solve."""
        return self._by(replace(self.fixed, recompute=recompute))

    def estimating(self, zeroth_order: ZerothOrder) -> "Fitter":
        """The same for zeroth-order plans of that kind."""
        return self._by(replace(self.fixed, zeroth_order=zeroth_order))

    def _by(self, fixed: FixedChoices) -> "Fitter":
        other = copy(self)
        other.fixed, other.answers = fixed, self.answers.by(fixed)
        other.attempts, other.lean_ways = Attempts(other.answers), self.lean_ways.by(other.answers)
        return other

    # Before solving: what the program may use.

    def branches(self, candidate: Candidate) -> list[Branch]:
        """The programs to choose between: activation checkpoints all on ssd, which takes fewer buffers, or anywhere.
        What is too much for the device by the estimate of its pipeline may fit exactly, so it is tried with nothing
        kept there."""
        found, unified, inputs = [], self.fixed.unified_memory, self.fixed.checkpoints_device or 0.0
        for checkpoints in (0.0, None) if self.fixed.checkpoints is None else (self.fixed.checkpoints,):
            mixed, fixed = checkpoints != 0.0, replace(self.fixed, checkpoints=checkpoints)
            pipeline = self.pipelines.at(candidate, mixed=mixed)
            if self.budget.host < ROOMY * (pipeline.host - pipeline.gradients.host):
                fixed = replace(fixed, updates_there=False, checkpoints_device=inputs)
            limits = Limits(
                host_bytes=(1 - SURE) * self.budget.host - pipeline.constant - (pipeline.device if unified else 0),
                ssd_bytes=self.budget.ssd,
                ssd_write_bytes=None if self.budget.writes == UNLIMITED else self.budget.writes,
                device_bytes=None if unified else self.answers.spare_on_device(pipeline.device),
                parameter_buffers=pipeline.parameters,
                checkpoint_buffers=pipeline.checkpoints,
                gradient_buffers=pipeline.gradients,
            )
            found.append(Branch(fixed, limits))
        return found

    def at_most(self, branches: Sequence[Branch]) -> list[Branch]:
        """`branches` with all of the host budget, as if the estimate of the buffers were too careful."""
        return [each.with_host(self.budget.host) for each in branches]

    def has_room(self, candidate: Candidate, part: float = 1.0) -> bool:
        """Whether a part of the device has room for the pipeline, by its estimate, which may be a little too much."""
        return self.fixed.unified_memory or self.pipelines.fits_device(candidate, part * self.budget.device)

    def _paces(self, candidate: Candidate) -> tuple[tuple[Pace, ...], tuple[Pace, ...]]:
        """The usual paces and the tight ones; where the device may have no room, then those for less of it."""
        return self.paces.where(roomy=self.has_room(candidate, ROOM))

    # Solving.

    def solve(self, candidate: Candidate, branches: Sequence[Branch]) -> Solved | None:
        """The fastest decision of a candidate that keeps every budget, by the first of `branches` that has one."""
        usuals, tight = self._paces(candidate)
        branches = self._fastest_first(candidate, branches)
        for pace, branch in product(usuals, branches):
            solved = self.attempts.approach(candidate, branch, pace, "seconds", self.budget)
            if solved is not None and solved.branch.limits.saved_in_transit:
                # It saves less for want of room; shorter chunks leave more, and hide less.
                below = solved.program.seconds * LESS_HIDDEN
                return self.attempts.approach(candidate, branch, tight[0], "seconds", self.budget, below) or solved
            if solved is not None:
                return solved
        if not self.lean_ways.hopeless(candidate):
            for aim, pace, branch in product(("seconds", *self._last_resorts(candidate)), tight, branches):
                solved = self.attempts.approach(candidate, branch, pace, aim, self.budget)
                if solved is not None:
                    return solved
        smaller = self._with_smaller_pairs(candidate, branches)
        return self.solve(candidate, smaller) if smaller else fastest_within(self.lean_ways.of(candidate), self.budget)

    def _fastest_first(self, candidate: Candidate, branches: Sequence[Branch]) -> list[Branch]:
        """By the program with whole states, on a device; as they are where one has no room by the estimate."""
        known = not self.fixed.unified_memory and all(self.seconds(candidate, each) < inf for each in branches)
        return sorted(branches, key=lambda each: self.seconds(candidate, each)) if known else list(branches)

    def _with_smaller_pairs(self, candidate: Candidate, branches: Sequence[Branch]) -> list[Branch]:
        """`branches` without the saved activations that left no room at the usual paces; none where none did."""
        usuals, _ = self._paces(candidate)
        return self.attempts.with_smaller_pairs(candidate, branches, usuals, self.budget)

    def paced(self, candidate: Candidate, branches: Sequence[Branch], pace: Pace) -> Solved | None:
        """The same at that one of `others`, for whoever can tell which is the fastest: the program knows no pace."""
        found = (self.attempts.approach(candidate, branch, pace, "seconds", self.budget) for branch in branches)
        return next((solved for solved in found if solved), None)

    def seconds(self, candidate: Candidate, branch: Branch) -> float:
        """The program's seconds of a step with whole states; infinite where it has no placement."""
        program = self.answers.program(candidate, self.answers.whole_states(candidate, branch, "seconds"), "seconds")
        return program.seconds if program else inf

    def leaner(self, candidate: Candidate, branch: Branch, host: int, below: float) -> Solved | None:
        """The fastest decision by a branch within `host`, as a plan for all of the host budget; None where by the
        program a step takes `below` seconds or more."""
        if below <= self.seconds(candidate, branch) < inf:
            return None
        solved = self.attempts.approach(
            candidate, branch, self.paces.usual, "seconds", self.budget.changed("host memory", host)
        )
        if solved is None:
            return None
        return replace(solved, branch=branch.with_host(branch.limits.host_bytes + self.budget.host - host))

    def resident(self, candidate: Candidate, branches: Sequence[Branch]) -> Solved | None:
        """The decision that keeps all on the device, and updates there; None where that does not fit or may not be."""
        for branch in self._keeping_everything(branches):
            solved = self.attempts.approach(candidate, branch, self.paces.usual, "seconds", self.budget)
            if solved is not None:
                return replace(solved, branch=branch)
        return None

    def resident_sketch(self, candidate: Candidate, branches: Sequence[Branch]) -> Sketch | None:
        """About what `resident` would find, by the estimate."""
        return self._first_that_fits(
            candidate, [(each, self.paces.usual) for each in self._keeping_everything(branches)]
        )

    def _keeping_everything(self, branches: Sequence[Branch]) -> list[Branch]:
        """Those of `branches` that may keep all on the device, with that fixed."""
        if not may_keep_everything(self.model, self.machine, self.budget.device, self.fixed):
            return []
        there = [each for each in branches if each.limits.device_bytes is not None]
        kept = everything(self.model)
        return [replace(each, fixed=replace(each.fixed, kept=kept, checkpoints_device=1.0)) for each in there]

    def least(self, candidate: Candidate, constraint: Constraint) -> int | None:
        """The least of one budget with which `solve` succeeds, the others as they are; None when they rule it out."""
        budget, ways = self.budget.without(constraint), self.lean_ways.of(candidate)
        if all(in_memory(way.at_least.over(budget)) for way in ways):
            return None
        leanest = leanest_of(ways, constraint, budget)
        found = [leanest.of(constraint)] if leanest else []
        if constraint in ("ssd space", "ssd writes"):
            aim: Aim = "ssd space" if constraint == "ssd space" else "ssd writes"
            for pace, branch in product(self._paces(candidate)[1], self.branches(candidate)):
                solved = self.attempts.approach(candidate, branch, pace, aim, budget)
                found += [solved.fitted.needs.of(constraint)] if solved else []
        return min(found, default=None)

    def least_beside(self, solved: Solved, rooms: Collection[Room]) -> dict[Room, tuple[int, float]]:
        """Each of `rooms` that there is -> about the least of it with which the candidate of `solved` still fits, the
        other budgets as they are, and the program's seconds of a step there.

        What the shortened model takes, rounded up.
        """
        candidate, own, found = solved.fitted.candidate, solved.fitted.needs, dict[Room, tuple[int, float]]()
        memories: tuple[Room, ...] = ("host memory",) if self.fixed.unified_memory else ("host memory", "device memory")
        for constraint in (memory for memory in memories if memory in rooms):
            found[constraint] = own.of(constraint), solved.program.seconds
            lean = self.lean_ways.sketches(candidate, every=constraint == "device memory")
            fits = [each.needs for each in lean if not each.needs.over(self.budget.without(constraint))]
            least = min(fits, key=lambda needs: needs.of(constraint), default=own)
            if least.of(constraint) < own.of(constraint):
                # As if all of it, and of the other budget, were for what stays.
                room = self.budget.changed(constraint, least.of(constraint))
                limits = Limits(room.host, device_bytes=self.answers.spare_on_device(self.budget.device - room.device))
                best = self.answers.program(candidate, Branch(self.fixed, limits), "seconds")
                found[constraint] = least.of(constraint), best.seconds if best else solved.program.seconds
            elif constraint == "host memory":
                # What the plan takes is no budget that does: of less room, more goes to the operations that it keeps.
                found[constraint] = self._least_host(candidate), solved.program.seconds
        if "ssd space" not in rooms:
            return found
        found["ssd space"] = own.ssd, solved.program.seconds
        limits = replace(solved.branch.limits, ssd_bytes=None)
        smallest = self.answers.program(candidate, Branch(solved.branch.fixed, limits), "ssd space")
        if smallest is not None and smallest.ssd_bytes < own.ssd:
            needs = self.answers.sketched(candidate, smallest, self.paces.tight).needs
            if not needs.over(self.budget) and needs.ssd < own.ssd:
                found["ssd space"] = needs.ssd, smallest.seconds
        return found

    def _least_host(self, candidate: Candidate) -> int:
        """The least host memory of a candidate that fits: what a lean way takes, or where all of them take more of
        something else than there is, what the program finds."""
        budget = self.budget.without("host memory")
        exact = leanest_of(self.lean_ways.of(candidate), "host memory", budget)
        if exact is not None and exact.host <= self.budget.host:
            return exact.host
        branches = [each.with_host(UNLIMITED) for each in self.branches(candidate)]
        ways = product(branches, self._paces(candidate)[1])
        solved = (self.attempts.approach(candidate, *way, "host memory", budget) for way in ways)
        return min([self.budget.host, *(each.fitted.needs.host for each in solved if each)])

    def _last_resorts(self, candidate: Candidate) -> tuple[Aim, ...]:
        """What to aim for, when the fastest placement breaks a budget by its rounding: the least of that budget."""
        corner = self.lean_ways.corner(candidate, self.fixed.kept)
        everything = footprint(self.model, self.answers.decision(candidate, corner, self.paces.tight))
        aims: list[Aim] = []
        if everything.ssd_write_bytes > 0.9 * self.budget.writes:
            aims.append("ssd writes")
        if everything.ssd_bytes > 0.9 * self.budget.ssd:
            aims.append("ssd space")
        return tuple(aims)

    def sketch(self, candidate: Candidate, branches: Sequence[Branch]) -> Sketch | None:
        """About what `solve` would find, by the same attempts on the shortened model alone."""
        tried = 0
        for branch, pace, aim in self._attempts(candidate, self._fastest_first(candidate, branches)):
            fitting = list[tuple[ProgramResult, Sketch]]()
            for sketch, _ in self.attempts.placements(candidate, branch, pace, aim, self.budget):
                if not sketch.needs.over(self.budget):
                    fitting.append((sketch.program, sketch))
                elif (tried := tried + 1) == DOUBTFUL and not fitting and self.lean_ways.hopeless(candidate):
                    return None
            if fitting:
                return fastest(fitting)[1] if aim == "seconds" else fitting[-1][1]
        if smaller := self._with_smaller_pairs(candidate, branches):
            return self.sketch(candidate, smaller)
        lean = [each for each in self.lean_ways.sketches(candidate) if not each.needs.over(self.budget)]
        return min(lean, key=lambda each: each.program.seconds, default=None)

    def _attempts(self, candidate: Candidate, branches: Sequence[Branch]) -> Iterator[tuple[Branch, Pace, Aim]]:
        """What `solve` tries, one after the other."""
        yield from ((branch, pace, "seconds") for pace, branch in product(self.paces.usuals, branches))
        usuals, tight = self._paces(candidate)
        yield from ((branch, pace, "seconds") for pace, branch in product(usuals[len(self.paces.usuals) :], branches))
        for aim in ("seconds", *self._last_resorts(candidate)):
            yield from ((branch, pace, aim) for pace, branch in product(tight, branches))

    def glance(self, candidate: Candidate, branch: Branch) -> Sketch | None:
        """The same without the attempts that find the leanest: for a comparison, which nothing runs."""
        found = self._first_that_fits(candidate, [(branch, self.paces.usual), (branch, self.paces.tight)])
        more = self._paces(candidate)[0][len(self.paces.usuals) :] if found is None else ()
        return found or self._first_that_fits(candidate, [(branch, pace) for pace in more])

    def _first_that_fits(self, candidate: Candidate, ways: Sequence[tuple[Branch, Pace]]) -> Sketch | None:
        return self.attempts.first_that_fits(candidate, ways, self.budget)

    def cannot_fit(self, candidate: Candidate) -> bool:
        """Whether even the leanest takes too much memory: by the estimate, and by what it takes at least."""
        ways = self.lean_ways.of(candidate) if self.lean_ways.hopeless(candidate) else ()
        return bool(ways) and all(in_memory(way.at_least.over(self.budget)) for way in ways)
