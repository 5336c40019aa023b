"""The search: finds the batch whose plan is the fastest, or good enough and small (GreedySnake, Algorithm 1).

Owns the outer search over micro-batch sizes and numbers of micro-batches. The program finds placements, `fit/fit.py`
makes them exact, the simulator predicts; `solve.py` makes a plan of it.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import inf

from ssdplan.plans.documents.plan import Alternative, Least, Recompute
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.documents.zeroth_order import ZerothOrder

from .explain.alternatives import rungs_by
from .explain.sensitivity import scaled_compute
from .fit.budgets import Candidate
from .fit.fit import Fitter
from .fit.found import Branch, Sketch, Solved, inputs_elsewhere
from .fit.pace import budget_below
from .pacing import FEW_OPS, WAITING, Pacing
from .predict.shortened import step_seconds
from .program.program import Bound
from .ranked import CLOSE, ENOUGH, WORTH, Ranked, Scanned, Simulated, at_most, smallest_good_enough, with_more_room
from .request import least_of, smallest_of
from .scanning import Scan, Scanner

FEW = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of micro-batches of plans in memory that are looked at."""
FINALISTS = 3
LEANER = 8
"""Smaller host budgets that are tried, as long as the program's step with them is shorter than the best simulated."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found, and what it looked at."""

    chosen: Simulated
    scan: Scan
    ranked: list[Ranked]


class Search:
    """The outer search on one model, machine and set of budgets."""

    def __init__(self, model: Model, machine: Machine, fitter: Fitter, *, paces: bool = True) -> None:
        """`paces`: what is simulated is tried at other paces too."""
        self.model, self.machine, self.fitter, self.paces = model, machine, fitter, paces
        self.pacing = Pacing(model, machine, fitter)
        self.scanner = Scanner(model, machine, fitter, self.pacing.tokens)
        self._ranked: dict[Candidate, list[Ranked]] = {}

    def find(self, candidates: Sequence[Candidate], *, between: bool) -> Found | None:
        """The smallest batch that is good enough of all that the user allows, and what was tried on the way; None where
        nothing fits. `between`: look at numbers of micro-batches between those of the ladder too."""
        if all(map(self.fitter.cannot_fit, least_of(candidates))):
            return None
        scan = self.scanner.scan(candidates)
        if between:
            self.scanner.between(scan)
        ranked = self.narrow_down(scan.entries)
        reached = max((each.tokens_per_second for each in ranked), default=0.0)
        if any(self.scanner.most_tokens_per_second(candidate) > reached for candidate in scan.slow):
            scan = self._looked_at(scan, scan.slow)
            ranked = self.narrow_down(scan.entries)
        others = [candidate for candidate in candidates if candidate not in (*scan.slow, *scan.passed)]
        ranked += self.look_beyond(others, scan.entries, ranked)
        chosen = self.choose(ranked, candidates)
        return Found(chosen, scan, ranked) if chosen else None

    def _looked_at(self, scan: Scan, candidates: Sequence[Candidate]) -> Scan:
        """`scan` with the bounds of `candidates`, which it left out."""
        slow, passed = ([each for each in left if each not in candidates] for left in (scan.slow, scan.passed))
        whole = Scan(scan.entries, slow, passed)
        whole.add(self.scanner.each(candidates))
        return whole

    def estimating(self, zeroth_order: ZerothOrder) -> "Search":
        """The search for zeroth-order plans of that kind."""
        return Search(self.model, self.machine, self.fitter.estimating(zeroth_order))

    def recomputing_everything(self) -> "Search":
        """The search for a batch. Where plans may save activations it is that of plans that do not, at one pace: a
        batch fits with them or without, and is not made smaller, to write states more often, for what they gain alone.
        """
        could_save = any(rungs_by("all", self.model, size) for size in self.model.micro_batch_sizes)
        if self.fitter.fixed.recompute != "auto" or not could_save:
            return self
        return Search(self.model, self.machine, self.fitter.with_recompute("all"), paces=False)

    def save(self, plain: Simulated, scan: Scan) -> Simulated:
        """The best plan of a batch, or of a part of it, or of as good a one of other micro-batches, which
        have room for more activations: by a token's seconds, and what it writes more than in `plain`, as the program
        weighs it. `plain` is the batch's plan that recomputes everything."""
        own = plain.solved.fitted.candidate
        slow = copy(self)
        slow.paces = False
        found = slow._saved(plain, own, scan) if rungs_by("all", self.model, own.micro_batch_size) else [plain]
        best, lightest = plain, inf
        for each in sorted(found, key=lambda each: self._weight(each, plain)):
            candidate, program = each.solved.fitted.candidate, each.solved.program
            hidden = (each.timeline.seconds - program.seconds) / self.pacing.tokens(candidate)  # no pace hides more
            if self._weight(each, plain) - hidden < lightest:
                paced = self.pacing.hastened(each, candidate, (each.solved.branch,))
                if (weight := self._weight(paced, plain)) < lightest:
                    best, lightest = paced, weight
        return best

    def _saved(self, plain: Simulated, own: Candidate, scan: Scan) -> list[Simulated]:
        """What `save` chooses from, each at one pace."""
        known = {entry.candidate: entry for entry in scan.entries}
        auto = self._saving(own, known)
        entry = self.scanner.surely(own, auto)
        least = known[own].tokens_per_second * (1 + WORTH) if own in known else 0.0
        larger = self._larger_that_saves(entry, known, plain) if entry else None
        if larger is not None:
            own, found = larger.solved.fitted.candidate, [plain, larger]
        elif entry and (entry.tokens_per_second >= least or self._keeps_everything(plain)):
            saving = self.simulate(own, entry.branches, plain)
            found = [plain, *([saving] if saving else [])]
        else:
            found = [plain, self._weighed(plain, own, auto, plain)]
        ranked = self._with_more_room(own, plain, known, scan.passed, max(each.tokens_per_second for each in found))
        for each in ranked[: FINALISTS - 1]:
            if each.tokens_per_second > max(every.tokens_per_second for every in found):
                saving = self.simulate(each.candidate, each.scanned.branches)
                found += [saving] if saving else []
        return found

    def _larger_that_saves(
        self, own: Scanned, known: Mapping[Candidate, Scanned], plain: Simulated
    ) -> Simulated | None:
        """The plan of more micro-batches than `own`'s, those that the program has the fastest with saved activations,
        where `own` is not good enough beside it: as many as are enough where all is recomputed may be too few to hide
        the states beside a shorter compute. Shortened models must agree. None where there is none."""
        size, order, best = own.candidate.micro_batch_size, own.candidate.order, own
        more = [each for each in known if each.micro_batch_size == size and each.order > order]
        for each in sorted(more, key=lambda each: each.order):
            entry = self._scan_saving(each, known)
            if entry is None or entry.tokens_per_second <= best.tokens_per_second:
                break
            best = entry
        if ENOUGH * best.tokens_per_second <= own.tokens_per_second:
            return None
        before, after = ([each.tokens_per_second for each in self._rank(entry)] for entry in (own, best))
        if not after or (before and ENOUGH * after[0] <= before[0]):
            return None
        found = self.simulate(best.candidate, best.branches, plain)
        good = found is not None and ENOUGH * found.tokens_per_second > max([plain.tokens_per_second, *before])
        return found if good else None

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
        plain: Simulated,
        known: Mapping[Candidate, Scanned],
        passed: Sequence[Candidate],
        reached: float,
    ) -> list[Ranked]:
        """Of batches of about as many rows as `own`, or as `PARTS` of it, in micro-batches of each size, those that
        may be faster than `reached` tokens/s with saved activations, as shortened models run them; the fastest first.
        """
        sizes = {each.micro_batch_size for each in known if rungs_by("all", self.model, each.micro_batch_size)}
        entries = []
        for candidate in with_more_room(own, (*known, *passed), sizes):
            if self.scanner.most_tokens_per_second(candidate) > reached:
                entries.append(self._scan_saving(candidate, known))
        worth = [entry for entry in entries if entry and entry.tokens_per_second >= reached * (1 + WORTH)]
        worth.sort(key=lambda entry: (-entry.tokens_per_second, entry.candidate.order))
        whole = known.get(plain.solved.fitted.candidate)
        lost = [(whole, plain.tokens_per_second)] if whole else []
        ranked = list[Ranked]()
        for entry in worth[:FINALISTS]:
            if at_most(entry, lost, self.pacing.tokens) >= reached * (1 + WORTH):
                ranked += (more := self._rank(entry))
                lost += [(each.scanned, each.tokens_per_second) for each in more]
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
                ranked += self._rank(entry) if entry else []
        for each in sorted(ranked, key=lambda each: -each.tokens_per_second)[:FINALISTS]:
            other = self.simulate(each.candidate, each.scanned.branches)
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
            entry = self.scanner.one(candidate, [self.fitter.within(each, host) for each in given])
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

    def _weight(self, simulated: Simulated, plain: Simulated) -> float:
        """Seconds of a token, and what it writes more than in `plain` by the wear price."""
        tokens, before = (self.pacing.tokens(each.solved.fitted.candidate) for each in (simulated, plain))
        written, base = simulated.solved.fitted.needs.writes / tokens, plain.solved.fitted.needs.writes / before
        seconds = plain.timeline.seconds / before
        more, price = max(written - base, 0.0), self.fitter.fixed.wear_price
        wear = more / base if base else inf
        return simulated.timeline.seconds / tokens + (price * seconds * wear if price and more else 0.0)

    def narrow_down(self, scanned: list[Scanned]) -> list[Ranked]:
        """Simulate the best candidates on shortened models: enough to find about the smallest batch that suffices.

        The program's favourites first: its fastest, and its smallest batch that is good enough. Where the program sees
        a plateau, a larger batch still hides more of what its stages wait for each other, so larger ones follow as long
        as they are faster. When fill and drain make the smallest fall short, halve what lies between. Where the
        fastest does not fit, the most micro-batches of each size that do take its place.
        """
        fastest = sorted(scanned, key=lambda entry: (-entry.tokens_per_second, entry.candidate.order))
        ranked = self._rank(fastest[0]) if fastest else []
        ranked = ranked or self._largest_that_fit(fastest)
        if not ranked:
            return []
        best = ranked[-1].scanned
        fastest = [entry for entry in fastest if all(entry is not found.scanned for found in ranked)]
        if all(entry.candidate.global_batch == best.candidate.global_batch for entry in fastest):
            close = [entry for entry in fastest if entry.tokens_per_second >= CLOSE * best.tokens_per_second]
            return ranked + [found for entry in close[: FINALISTS - 1] for found in self._rank(entry)]
        for _ in range(FINALISTS - 1):
            larger = self._larger(scanned, best, ranked[-1].tokens_per_second)
            found = self._rank(larger) if larger else []
            ranked += found
            if larger is None or not found or found[0].tokens_per_second <= ranked[-2].tokens_per_second:
                break
            best = larger
        reached = max(found.tokens_per_second for found in ranked)
        lost = [(found.scanned, found.tokens_per_second) for found in ranked]
        smaller = [entry for entry in scanned if entry.candidate.order <= best.candidate.order]
        enough = [entry for entry in smaller if at_most(entry, lost, self.pacing.tokens) >= ENOUGH * reached]
        low, high = -1, len(enough) - 1
        for step in range(FINALISTS):
            if not enough or (high - low < 2 and step):  # none: a shortened model may be faster than every bound
                break
            middle = 0 if step == 0 else (low + high) // 2
            if middle == high:
                break
            found = [each for each in ranked if each.candidate == enough[middle].candidate]
            if not found and at_most(enough[middle], lost, self.pacing.tokens) >= ENOUGH * reached:
                found = self._rank(enough[middle])
                ranked += found
                lost += [(each.scanned, each.tokens_per_second) for each in found]
            if found and smallest_good_enough(ranked) is found[0]:
                high = middle
            else:
                low = middle
        return ranked

    def look_beyond(
        self, candidates: Sequence[Candidate], scanned: Sequence[Scanned], ranked: Sequence[Ranked]
    ) -> list[Ranked]:
        """Of the candidates for whose buffers the estimate left no room on host the largest that fit after all, where
        they could be noticeably faster than what fits without doubt."""
        reached = max((found.tokens_per_second for found in ranked), default=0.0)
        seen = {entry.candidate for entry in scanned}
        left = []
        for candidate in candidates:
            if candidate not in seen and self.fitter.has_room(candidate):
                entry = self.scanner.one(candidate, self.fitter.at_most(self.fitter.branches(candidate)))
                if entry is not None and ENOUGH * entry.tokens_per_second > reached:
                    left.append(entry)
        return self._largest_that_fit(sorted(left, key=lambda entry: (-entry.tokens_per_second, entry.candidate.order)))

    def choose(self, ranked: Sequence[Ranked], candidates: Sequence[Candidate]) -> Simulated | None:
        """The smallest batch that is good enough, fitted and simulated whole; where what was ranked does not fit after
        all, the next, and at last the fastest of the smallest of each size. None when nothing fits."""
        left = list(ranked)
        while left:
            best = smallest_good_enough(left)
            found = self.simulate(best.candidate, best.scanned.branches)
            if found is not None:
                return found
            left = [each for each in left if each is not best]
        least = least_of(candidates)
        last = [self.simulate(candidate, self.fitter.branches(candidate)) for candidate in least]
        others = [candidate for candidate in smallest_of(candidates) if candidate not in least] if any(last) else []
        last += [self.simulate(candidate, self.fitter.branches(candidate)) for candidate in others]
        return max((each for each in last if each), key=lambda each: each.tokens_per_second, default=None)

    def _largest_that_fit(self, fastest: Sequence[Scanned]) -> list[Ranked]:
        """Of each micro-batch size that could be the fastest about the most micro-batches that fit, and the fewer ones
        that were tried on the way; the fastest last. What does not fit is taken not to with more of them."""
        ranked: list[Ranked] = []
        for size in dict.fromkeys(entry.candidate.micro_batch_size for entry in fastest):
            mine = [entry for entry in fastest if entry.candidate.micro_batch_size == size]
            if ranked and mine[0].tokens_per_second <= ranked[-1].tokens_per_second:
                continue
            mine.sort(key=lambda entry: entry.candidate.order)
            found = self._rank(mine[0])
            fits, too_many = 0, len(mine)
            while found and too_many - fits > 1:
                middle = (fits + too_many) // 2
                more = self._rank(mine[middle])
                found += more
                fits, too_many = (middle, too_many) if more else (fits, middle)
            ranked = sorted([*ranked, *found], key=lambda each: each.tokens_per_second)
        return ranked

    def _larger(self, scanned: list[Scanned], best: Scanned, reached: float) -> Scanned | None:
        """The candidate with half as many micro-batches again as `best`, if it could be noticeably faster."""
        mine = (
            entry
            for entry in sorted(scanned, key=lambda entry: entry.candidate.order)
            if entry.candidate.micro_batch_size == best.candidate.micro_batch_size
            and 2 * entry.candidate.micro_batches >= 3 * best.candidate.micro_batches
        )
        found = next(mine, None)
        return found if found and ENOUGH * found.tokens_per_second > reached else None

    def _rank(self, entry: Scanned) -> list[Ranked]:
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
        self, candidate: Candidate, branches: Sequence[Branch], plain: Simulated | None = None
    ) -> Simulated | None:
        """The candidate's best decision, fitted and simulated; None when it does not fit. Where the simulated step
        waits for chunks, the fastest of the paces that hide more, what their operations take counted in; without
        `paces` the usual one."""
        solved = self.fitter.solve(candidate, branches)
        if solved is None:
            return None
        best = self._met(solved, candidate, branches)
        if self.fitter.fixed.recompute == "auto" and rungs_by("all", self.model, candidate.micro_batch_size):
            best = self._weighed(best, candidate, branches, plain)
        return best

    def _weighed(
        self, best: Simulated, candidate: Candidate, branches: Sequence[Branch], plain: Simulated | None
    ) -> Simulated:
        """The best of what the program found, of recomputing everything (`plain`, where that is known), and of PyAO's
        rule: by the simulator's seconds and what each writes, as the program weighs it."""
        everything = best
        if best.solved.fitted.decision.saved or self._keeps_everything(best):
            plain = plain or self._recomputing("all", candidate, branches, paced_below=best.timeline.seconds)
            everything = plain or best
        best = min(best, everything, key=lambda each: self._weight(each, everything))
        if rungs_by("paper", self.model, candidate.micro_batch_size) is None:
            return best
        most = self._weight(best, everything) * self.pacing.tokens(candidate)
        by_rule = self._recomputing("paper", candidate, branches, most=most, paced_below=most)
        return min((best, *([by_rule] if by_rule else [])), key=lambda each: self._weight(each, everything))

    def _keeps_everything(self, simulated: Simulated) -> bool:
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

    def alternatives(self, found: Found) -> tuple[Alternative, ...]:
        """Every candidate, by batch: the simulator's figure where there is one, else the program's bound."""
        scanned = self.recomputing_everything()._looked_at(found.scan, [*found.scan.slow, *found.scan.passed]).entries
        ranked, chosen = found.ranked, found.chosen
        bounds = {entry.candidate: entry.bound for entry in scanned}
        branches = {entry.candidate: entry.branches[0] for entry in (*scanned, *(each.scanned for each in ranked))}
        exact: dict[Candidate, float] = {}
        for each in ranked:
            exact[each.candidate] = each.tokens_per_second
            bounds[each.candidate] = Bound(each.program.seconds, each.program.delay_ratio)
        own, program = chosen.solved.fitted.candidate, chosen.solved.program
        exact[own] = chosen.tokens_per_second
        bounds[own] = Bound(program.seconds, program.delay_ratio)
        branches[own] = chosen.solved.branch
        without_compute = scaled_compute(self.model, 0.0)
        rows = []
        for candidate in sorted(bounds, key=lambda candidate: candidate.order):
            bound, io = bounds[candidate], self.scanner.bound(without_compute, candidate, branches[candidate])
            assert io is not None, "a candidate that fits only when it computes"
            tokens = self.pacing.tokens(candidate)
            rows.append(
                Alternative(
                    micro_batch_size=candidate.micro_batch_size,
                    micro_batches=candidate.micro_batches,
                    tokens_per_second=exact.get(candidate, tokens / bound.seconds),
                    delay_ratio=bound.delay_ratio,
                    program_seconds=bound.seconds,
                    compute_tokens_per_second=tokens / self.scanner.compute_seconds(candidate),
                    # The placement that the bound is of takes no longer without compute, wherever that was found.
                    io_tokens_per_second=tokens / min(io.seconds, bound.seconds),
                    simulated=candidate in exact,
                )
            )
        return tuple(rows)

    def least(self, chosen: Simulated) -> tuple[Least, ...]:
        """The budgets that would still do for the chosen batch."""
        found = self.fitter.least_beside(chosen.solved)
        tokens = self.pacing.tokens(chosen.solved.fitted.candidate)
        own = chosen.solved.program.seconds  # by the same bound, which less of anything cannot beat
        return tuple(
            Least(budget=room, least_bytes=nbytes, tokens_per_second=tokens / max(seconds, own))
            for room, (nbytes, seconds) in found.items()
        )
