"""Saving: what a batch's plan gains by activations that it saves, and by a device that keeps much.

Owns which batches beside the chosen one have room for that, and which of their plans is the best. `search.py` finds the
batch by plans that recompute everything; `trials.py` runs what is tried here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from .explain.alternatives import rungs_by
from .fit.budgets import Candidate
from .fit.found import Branch
from .fit.pace import budget_below
from .pacing import FEW_OPS, WAITING
from .ranked import (
    ENOUGH,
    FEW,
    FINALISTS,
    WORTH,
    Ranked,
    Scanned,
    Simulated,
    at_most,
    smallest_good_enough,
    with_more_room,
)
from .scanning import Scan
from .trials import Trials

LEANER = 8
"""Smaller host budgets that are tried, as long as the program's step with them is shorter than the best simulated."""
FURTHER = 1.125
"""Times as many micro-batches as before are looked at, where a step waits for want of them."""


class Saving:
    """Plans beside one that a search has found."""

    def __init__(self, trials: Trials) -> None:
        self.trials, self.model, self.fitter = trials, trials.model, trials.fitter
        self.pacing, self.scanner = trials.pacing, trials.scanner

    def save(self, plain: Simulated, scan: Scan) -> Simulated:
        """The best plan of a batch, or of a part of it, or of as good a one of other micro-batches, which
        have room for more activations: by a token's seconds, and what it writes more than in `plain`, as the program
        weighs it. `plain` is the batch's plan that recomputes everything."""
        own = plain.solved.fitted.candidate
        slow = Saving(self.trials.at_one_pace())
        found = slow._saved(plain, own, scan) if rungs_by("all", self.model, own.micro_batch_size) else [plain]
        best, lightest = plain, inf
        for each in sorted(found, key=lambda each: self.trials.weight(each, plain)):
            if self.trials.promised(each, plain) < lightest:
                paced = self.pacing.hastened(each, each.solved.fitted.candidate, (each.solved.branch,))
                if (weight := self.trials.weight(paced, plain)) < lightest:
                    best, lightest = paced, weight
        return best

    def _saved(self, plain: Simulated, own: Candidate, scan: Scan) -> list[Simulated]:
        """What `save` chooses from, each at one pace."""
        known = {entry.candidate: entry for entry in scan.known}
        auto = self._saving(own, known)
        entry = self.scanner.surely(own, auto)
        least = known[own].tokens_per_second * (1 + WORTH) if own in known else 0.0
        larger = self._larger_that_saves(entry, known, plain) if entry else None
        if larger is not None:
            own, found = larger.solved.fitted.candidate, [plain, larger]
        elif entry and (entry.tokens_per_second >= least or self.trials.keeps_everything(plain)):
            saving = self.trials.simulate(own, entry.branches, plain)
            found = [plain, *([saving] if saving else [])]
        else:
            found = [plain, self.trials.weighed(plain, own, auto, plain)]
        ranked = self._with_more_room(own, known, max(each.tokens_per_second for each in found))
        for each in ranked:
            if each.tokens_per_second > max(every.tokens_per_second for every in found):
                saving = self.trials.simulate(each.candidate, each.scanned.branches, beside=plain)
                found += [saving] if saving else []
        return found

    def _larger_that_saves(
        self, own: Scanned, known: Mapping[Candidate, Scanned], plain: Simulated
    ) -> Simulated | None:
        """The plan of the fewest more micro-batches than `own`'s that are good enough with saved activations, where
        `own` is not beside it: as many as are enough where all is recomputed may be too few to hide the states beside a
        shorter compute. The program sees that, or a shortened model waits for what the program does not see; and
        shortened models must agree. None where there is none."""
        before = [each.tokens_per_second for each in self.trials.rank(own)]
        least, ranked = max([plain.tokens_per_second, *before]), list[Ranked]()
        for entry in self._further(own, known, waits=bool(before) and before[0] * WAITING < own.tokens_per_second):
            reached = max([least, *(each.tokens_per_second for each in ranked)])
            if ENOUGH * at_most(entry, self.trials.reached, self.pacing.tokens) <= reached:
                continue
            more = self.trials.rank(entry)
            if not more:  # nor do more micro-batches fit
                break
            ranked += more
        faster = [each for each in ranked if ENOUGH * each.tokens_per_second > least]
        best = smallest_good_enough(faster).scanned if faster else None
        found = self.trials.simulate(best.candidate, best.branches, plain) if best else None
        return found if found and ENOUGH * found.tokens_per_second > least else None

    def _further(self, own: Scanned, known: Mapping[Candidate, Scanned], *, waits: bool) -> list[Scanned]:
        """More micro-batches of `own`'s size that may be noticeably faster with saved activations: those that the
        program has the fastest, or where a step `waits` a few, each with an eighth more than the one before."""
        more = [each for each in known if each.micro_batch_size == own.candidate.micro_batch_size]
        more = sorted((each for each in more if each.order > own.candidate.order), key=lambda each: each.order)
        best, steps = own, list[Scanned]()
        for each in more:
            entry = self._scan_saving(each, known)
            if entry is None or (entry.tokens_per_second <= best.tokens_per_second and not waits):
                break
            best = max(best, entry, key=lambda each: each.tokens_per_second)
            if each.micro_batches >= FURTHER * (steps[-1] if steps else own).candidate.micro_batches:
                steps.append(entry)
            if waits and len(steps) == FINALISTS:
                return steps
        return steps if waits else [best] if ENOUGH * best.tokens_per_second > own.tokens_per_second else []

    def _scan_saving(self, candidate: Candidate, known: Mapping[Candidate, Scanned]) -> Scanned | None:
        """`candidate` with saved activations, by the program of its first branch, which is nearly always the fastest
        then too."""
        branches = self._saving(candidate, known)
        entry = self.scanner.one(candidate, branches[:1])
        return replace(entry, branches=tuple(branches)) if entry else None

    def _saving(self, candidate: Candidate, known: Mapping[Candidate, Scanned]) -> list[Branch]:
        """The branches of a candidate where backward recomputes what it has to."""
        given = known[candidate].branches if candidate in known else self.fitter.branches(candidate)
        return [replace(each, fixed=replace(each.fixed, recompute="auto")) for each in given]

    def _with_more_room(
        self,
        own: Candidate,
        known: Mapping[Candidate, Scanned],
        reached: float,
    ) -> list[Ranked]:
        """Of batches of about as many rows as `own`, or as `PARTS` of it, in micro-batches of each size, those that
        may be faster than `reached` tokens/s with saved activations, as shortened models run them; the fastest first.
        """
        sizes = {each.micro_batch_size for each in known if rungs_by("all", self.model, each.micro_batch_size)}
        entries = []
        for candidate in with_more_room(own, known, sizes):
            if self.scanner.most_tokens_per_second(candidate) > reached:
                entries.append(self._scan_saving(candidate, known))
        worth = [entry for entry in entries if entry and entry.tokens_per_second >= reached * (1 + WORTH)]
        worth.sort(key=lambda entry: (-entry.tokens_per_second, entry.candidate.order))
        ranked = list[Ranked]()
        for entry in worth[:FINALISTS]:
            if at_most(entry, self.trials.reached, self.pacing.tokens) >= reached * (1 + WORTH):
                ranked += self.trials.rank(entry)
        return sorted(ranked, key=lambda each: -each.tokens_per_second)

    def settle(self, chosen: Simulated, candidates: Sequence[Candidate]) -> Simulated:
        """`chosen` as `_leaner` has it; or where a device has a budget the smallest batch of `candidates` that is good
        enough, of those whose plans save activations and write nothing to ssd: what a plan that recomputes everything
        makes of a batch says little of them, least of all where the device can keep all states."""
        if len(chosen.solved.fitted.schedule.steady.ops) > FEW_OPS:
            return chosen
        own, found = chosen.solved.fitted.candidate, [self._leaner(chosen)]
        in_memory, ranked = not chosen.solved.fitted.needs.writes, list[Ranked]()
        for candidate in candidates:
            known = candidate == own or candidate.micro_batch_size != own.micro_batch_size
            branches = [] if known or candidate.micro_batches not in FEW else self._with_budgets(candidate)
            if branches and (in_memory or self.fitter.resident_sketch(candidate, branches)):
                entry = self.scanner.one(candidate, branches)
                ranked += self.trials.rank(entry) if entry else []
        for each in sorted(ranked, key=lambda each: -each.tokens_per_second)[:FINALISTS]:
            other = self.trials.simulate(each.candidate, each.scanned.branches)
            found += [self._leaner(other)] if other and not other.solved.fitted.needs.writes else []
        best = max(each.tokens_per_second for each in found)
        enough = [each for each in found if each.tokens_per_second >= ENOUGH * best]
        return min(enough, key=lambda each: each.solved.fitted.candidate.order)

    def _leaner(self, chosen: Simulated) -> Simulated:
        """`chosen`; or where a device has a budget and nothing is written to ssd what is faster of the other branches
        and of plans for less host memory: the program takes memory for the least gain, and does not see all that a step
        waits for. So more memory makes no step noticeably longer."""
        best, candidate, own = chosen, chosen.solved.fitted.candidate, self.fitter.budget.host
        host, given = own, [] if chosen.solved.fitted.needs.writes else self._with_budgets(candidate)
        for _ in range(LEANER):
            entry = self.scanner.one(
                candidate, [each.with_host(each.limits.host_bytes - (own - host)) for each in given]
            )
            # Of a step that waits for little the program says nearly all: other programs are compared with it.
            waits = best.timeline.seconds > WAITING * best.solved.program.seconds
            least = best.timeline.seconds if waits else best.solved.program.seconds
            if entry is None or entry.bound.seconds >= (below := least * (1 - WORTH)):
                break
            most = 0
            for branch in entry.branches:
                known = host == own and branch.fixed == chosen.solved.branch.fixed
                other = chosen.solved if known else self.fitter.leaner(candidate, branch, host, below)
                if other is not None and not known and not other.fitted.needs.writes:
                    again = self.pacing.simulated(other)
                    faster = self.pacing.with_operations(again) < self.pacing.with_operations(best) * (1 - WORTH)
                    best = again if faster else best
                most = max(most, other.fitted.needs.host if other else 0)
            host = budget_below(min(host, most or host))
        return best

    def _with_budgets(self, candidate: Candidate) -> list[Branch]:
        """The branches of a candidate where a device has a budget for what it keeps; none elsewhere."""
        return [each for each in self.fitter.branches(candidate) if each.limits.device_bytes is not None]
