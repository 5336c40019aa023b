"""Attempts: one branch of a candidate's programs at one pace, until what it finds keeps the budgets.

Owns how limits are moved from one attempt to the next, by the estimate and then by what was built.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from ..program.choices import Aim
from .answers import Answers
from .budgets import Candidate, Needs, reduced
from .found import Branch, Sketch, Solved, fastest, largest_passing
from .kept import keeps
from .pace import Pace
from .transit import saved_in_transit

ROUNDS, HARDER = 5, 4.0
"""Attempts, and how many times as much as before is taken off the device's limit when it was too much again."""
SPARE = 0.005
"""A host budget with less than this share unused is used."""
SURE, NEAR = SPARE / 4, SPARE / 8
"""So much less than what would do is tried first, and after too much, for rounding may be against it."""


class Attempts:
    """Attempts to keep budgets by the program's answers."""

    def __init__(self, answers: Answers) -> None:
        self.answers, self.model, self.builder = answers, answers.model, answers.builder

    def approach(
        self, candidate: Candidate, branch: Branch, pace: Pace, aim: Aim, budget: Needs, below: float = inf
    ) -> Solved | None:
        """Of what fits by the estimate the fastest, or for another aim the last: build, compare, and again. Nothing
        where by the program a step takes `below` seconds or more."""
        placements = self.placements(candidate, branch, pace, aim, budget)
        fitting = [(sketch.program, found) for sketch, found in placements if not sketch.needs.over(budget)]
        if not fitting:
            return None
        best, found = fastest(fitting) if aim == "seconds" else fitting[-1]
        if best.seconds >= below:
            return None
        for number in range(ROUNDS):
            fitted = self.builder.build(candidate, self.answers.decision(candidate, best, pace))
            over = fitted.needs.over(budget)
            if not over:
                return Solved(fitted, best, found)
            if "device memory" in over and not keeps(best):
                break
            found = replace(found, limits=reduced(found.limits, over, HARDER**number, NEAR * budget.host))
            again = self.answers.program(candidate, self.answers.whole_states(candidate, found, aim), aim)
            if again is None:
                break
            best = again
        return None

    def placements(
        self, candidate: Candidate, branch: Branch, pace: Pace, aim: Aim, budget: Needs
    ) -> Iterator[tuple[Sketch, Branch]]:
        """What the program finds, by the estimate within `budget` or not, and what it was given: as much as leaves room
        for the pipeline's buffers, by solving, estimating, and again."""
        limits = branch.limits
        if aim == "ssd writes":
            limits = replace(limits, ssd_write_bytes=None)  # as little as can be, so only the exact figure counts
        elif aim == "ssd space":
            limits = replace(limits, ssd_bytes=None)
        guessed, fits, kept, broken, refused, push, harder = True, False, -inf, inf, -inf, 1.0, 1.0
        """The most that was found not to be too much, the least that was, what no placement has room in, and how hard
        to lean on what is too much."""
        for _ in range(ROUNDS):
            attempt = self.answers.whole_states(candidate, Branch(branch.fixed, limits), aim)
            program = self.answers.program(candidate, attempt, aim)
            if program is None:
                if guessed:
                    guessed, limits = False, replace(limits, host_bytes=budget.host)  # perhaps it was too careful
                    continue
                refused = limits.host_bytes
                if fits or not refused < broken < inf or broken - refused < SPARE * budget.host:
                    break
                limits = replace(limits, host_bytes=(refused + broken) / 2)
                continue
            sketch = self.answers.sketched(candidate, program, pace)
            over = sketch.needs.over(budget)
            if _passes_through_too_much(sketch, budget):
                yield sketch, Branch(branch.fixed, limits)
                break
            if "host memory" in over and program.saved and not limits.saved_in_transit:
                # The program knew nothing of what saved activations take on their way to ssd: now it does.
                pairs = saved_in_transit(self.builder.in_short(sketch.decision), self.model, sketch.decision)
                if pairs:
                    limits = replace(limits, host_bytes=branch.limits.host_bytes, saved_in_transit=pairs)
                    guessed = True
                    continue
            guessed, fits = False, fits or not over
            yield sketch, Branch(branch.fixed, limits)
            spare = budget.host - sketch.needs.host
            if spare < 0:
                broken = limits.host_bytes
                wanted = broken + push * spare - NEAR * budget.host
                push *= 2
            else:
                if "device memory" not in over:  # with less of the device, host has more to take
                    kept = max(kept, limits.host_bytes)
                unused = program.limited_bytes < limits.host_bytes - SPARE * budget.host
                wanted = limits.host_bytes if unused or spare < SPARE * budget.host else limits.host_bytes + spare
            if not over and wanted == limits.host_bytes:
                break
            least = max(kept, refused)
            if not least <= wanted < broken or wanted == refused:
                wanted = (max(least, min(wanted, limits.host_bytes)) + broken) / 2
            limits = replace(reduced(limits, over, harder), host_bytes=wanted)
            harder *= HARDER if "device memory" in over else 1.0

    def first_that_fits(
        self, candidate: Candidate, ways: Sequence[tuple[Branch, Pace]], budget: Needs
    ) -> Sketch | None:
        """The first answer of the first of `ways` that has one within `budget`, by the estimate."""
        found = (each for way in ways for each, _ in self.placements(candidate, *way, "seconds", budget))
        return next((each for each in found if not each.needs.over(budget)), None)

    def with_smaller_pairs(
        self, candidate: Candidate, branches: Sequence[Branch], paces: Sequence[Pace], budget: Needs
    ) -> list[Branch]:
        """`branches`, which were tried at `paces`, without the largest saved activations of those that were too much on
        their way through a device that keeps nothing; none where no such were found."""
        ways = product(branches, paces)
        tried = (each for way in ways for each, _ in self.placements(candidate, *way, "seconds", budget))
        passing = (each.program for each in tried if _passes_through_too_much(each, budget))
        largest = max((largest_passing(self.model, program) for program in passing), default=0)
        return [replace(each, limits=replace(each.limits, pair_bytes=largest - 1)) for each in branches if largest]


def _passes_through_too_much(sketch: Sketch, budget: Needs) -> bool:
    """Whether what is only on its way takes too much of the device, for it keeps nothing."""
    return "device memory" in sketch.needs.over(budget) and not keeps(sketch.program)
