"""The search: finds the batch whose plan is the fastest, or good enough and small (GreedySnake, Algorithm 1).

Owns the outer search over micro-batch sizes and numbers of micro-batches. The program finds placements, `fit/fit.py`
makes them exact, the simulator predicts; `solve.py` makes a plan of it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from ssdplan.plans.documents.plan import Alternative, Least
from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.documents.zeroth_order import ZerothOrder

from .explain.alternatives import rungs_by
from .explain.sensitivity import scaled_compute
from .fit.budgets import ROOMS, Candidate, Room
from .fit.fit import Fitter
from .fit.whole import bound_of
from .program.program import Bound
from .ranked import CLOSE, ENOUGH, FINALISTS, Ranked, Scanned, Simulated, expected, smallest_good_enough
from .request import least_of, smallest_of
from .saving import Saving
from .scanning import Scan
from .trials import Trials

NEARLY = 4 / 3
"""Times a device's memory. A pipeline that takes no more than that at the usual pace may fit at one that hides less."""


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
        self.model, self.machine, self.fitter = model, machine, fitter
        self.trials = Trials(model, machine, fitter, paces=paces)
        self.pacing, self.scanner = self.trials.pacing, self.trials.scanner
        self.saving = Saving(self.trials)

    def find(self, candidates: Sequence[Candidate], *, between: bool) -> Found | None:
        """The smallest batch that is good enough of all that the user allows, and what was tried on the way; None where
        nothing fits. `between`: look at numbers of micro-batches between those of the ladder too."""
        if all(map(self._cannot_fit, least_of(candidates))):
            return None
        scan = self.scanner.scan(candidates)
        if between:
            self.scanner.between(scan)
        ranked = self.narrow_down(scan.known)
        reached = max((each.tokens_per_second for each in ranked), default=0.0)
        if any(self.scanner.most_tokens_per_second(candidate) > reached for candidate in scan.slow):
            scan = self._looked_at(scan, scan.slow)
            ranked = self.narrow_down(scan.known)
        others = [candidate for candidate in candidates if candidate not in scan.slow]
        ranked += self.look_beyond(others, scan.known, ranked)
        chosen = self.choose(ranked, candidates)
        return Found(chosen, scan, ranked) if chosen else None

    def _cannot_fit(self, candidate: Candidate) -> bool:
        """Whether even the leanest takes too much. That is not looked at, for it takes long, where the device has room
        for the pipeline and the program finds a placement."""
        room = self.fitter.has_room(candidate)
        found = self.scanner.one(candidate, self.fitter.branches(candidate)) if room else None
        return found is None and self.fitter.cannot_fit(candidate)

    def _looked_at(self, scan: Scan, candidates: Sequence[Candidate]) -> Scan:
        """`scan` with the bounds of `candidates`, which it left out."""
        slow = [each for each in scan.slow if each not in candidates]
        passed = [each for each in scan.passed if each.candidate not in candidates]
        whole = Scan(scan.entries, slow, passed)
        whole.add(self.scanner.each(candidates))
        return whole

    def _looked_at_all(self, scan: Scan) -> Scan:
        """`scan` with the bounds of all that it left out."""
        return self._looked_at(scan, [*scan.slow, *(each.candidate for each in scan.passed)])

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

    def narrow_down(self, scanned: list[Scanned]) -> list[Ranked]:
        """Simulate the best of `scanned`, which are in the order of their batches, on shortened models: enough to find
        about the smallest batch that suffices.

        The program's fastest first. Where the program sees a plateau, a larger batch still hides more of what its
        stages wait for each other, so larger ones follow as long as they are faster. Then smaller ones, each time the
        smallest that is likely good enough by what fill and drain were seen to lose. Where the fastest does not fit,
        the most micro-batches of each size that do take its place.
        """
        fastest = sorted(scanned, key=lambda entry: (-entry.tokens_per_second, entry.candidate.order))
        ranked = self.trials.rank(fastest[0]) if fastest else []
        ranked = ranked or self._largest_that_fit(fastest)
        if not ranked:
            return []
        best = ranked[-1].scanned
        fastest = [entry for entry in fastest if all(entry is not found.scanned for found in ranked)]
        if all(entry.candidate.global_batch == best.candidate.global_batch for entry in fastest):
            close = [entry for entry in fastest if entry.tokens_per_second >= CLOSE * best.tokens_per_second]
            return ranked + [found for entry in close[: FINALISTS - 1] for found in self.trials.rank(entry)]
        for _ in range(FINALISTS - 1):
            larger = self._larger(scanned, best, ranked[-1].tokens_per_second)
            found = self.trials.rank(larger) if larger else []
            ranked += found
            if larger is None or not found or found[0].tokens_per_second <= ranked[-2].tokens_per_second:
                break
            best = larger
        for _ in range(FINALISTS):
            smaller = self._smaller(scanned, ranked)
            if smaller is None:
                break
            ranked += self.trials.rank(smaller)
        return ranked

    def _smaller(self, scanned: Sequence[Scanned], ranked: Sequence[Ranked]) -> Scanned | None:
        """The smallest batch that is likely good enough, of those with fewer rows than what is good enough so far."""
        reached = ENOUGH * max(found.tokens_per_second for found in ranked)
        rows = smallest_good_enough(ranked).candidate.global_batch
        tried = self.trials.reached
        for entry in scanned:
            smaller = entry.candidate.global_batch < rows and not self.trials.has_ranked(entry.candidate)
            if smaller and expected(entry, tried, self.pacing.tokens) >= reached:
                return entry
        return None

    def look_beyond(
        self, candidates: Sequence[Candidate], scanned: Sequence[Scanned], ranked: Sequence[Ranked]
    ) -> list[Ranked]:
        """Of the candidates for whose buffers the estimate left no room the largest that fit after all, where they
        could be noticeably faster than what fits without doubt. On host the estimate may be too careful. On the device
        it is of the usual pace, and others take less. Where the device has no room at that pace for one micro-batch of
        a size, it has little left for saved activations: such a size is looked at where its bound is clearly faster."""
        reached = max((found.tokens_per_second for found in ranked), default=0.0)
        seen = {entry.candidate for entry in scanned}
        sizes = {each.micro_batch_size for each in smallest_of(candidates) if self.fitter.has_room(each)}
        left = []
        for candidate in candidates:
            least = reached / (ENOUGH if candidate.micro_batch_size in sizes or not sizes else CLOSE)
            may = candidate not in seen and self.scanner.most_tokens_per_second(candidate) > least
            if may and self.fitter.has_room(candidate, NEARLY):
                entry = self.scanner.surely(candidate, self.fitter.branches(candidate))
                if entry is not None and entry.tokens_per_second > least:
                    left.append(entry)
        return self._largest_that_fit(sorted(left, key=lambda entry: (-entry.tokens_per_second, entry.candidate.order)))

    def choose(self, ranked: Sequence[Ranked], candidates: Sequence[Candidate]) -> Simulated | None:
        """The smallest batch that is good enough, fitted and simulated whole; where what was ranked does not fit after
        all, the next, and at last the fastest of the smallest of each size. None when nothing fits."""
        left = list(ranked)
        while left:
            best = smallest_good_enough(left)
            found = self.trials.simulate(best.candidate, best.scanned.branches)
            if found is not None:
                return found
            left = [each for each in left if each is not best]
        least = least_of(candidates)
        last = [self.trials.simulate(candidate, self.fitter.branches(candidate)) for candidate in least]
        others = [candidate for candidate in smallest_of(candidates) if candidate not in least] if any(last) else []
        last += [self.trials.simulate(candidate, self.fitter.branches(candidate)) for candidate in others]
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
            found = self.trials.rank(mine[0])
            fits, too_many = 0, len(mine)
            while found and too_many - fits > 1:
                middle = (fits + too_many) // 2
                more = self.trials.rank(mine[middle])
                found += more
                fits, too_many = (middle, too_many) if more else (fits, middle)
            ranked = sorted([*ranked, *found], key=lambda each: each.tokens_per_second)
        return ranked

    def _larger(self, scanned: list[Scanned], best: Scanned, reached: float) -> Scanned | None:
        """The candidate with half as many micro-batches again as `best`, if it could be noticeably faster."""
        mine = (
            entry
            for entry in scanned
            if entry.candidate.micro_batch_size == best.candidate.micro_batch_size
            and 2 * entry.candidate.micro_batches >= 3 * best.candidate.micro_batches
        )
        found = next(mine, None)
        return found if found and ENOUGH * found.tokens_per_second > reached else None

    def alternatives(self, found: Found) -> tuple[Alternative, ...]:
        """Every candidate, by batch: the simulator's figure where there is one, else the program's bound."""
        scanned = self.recomputing_everything()._looked_at_all(found.scan).entries
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
            bound, branch = bounds[candidate], branches[candidate]
            io = bound_of(branch, partial(self.scanner.bound, without_compute, candidate)) or bound
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

    def least(self, chosen: Simulated, rooms: Collection[Room] = ROOMS) -> tuple[Least, ...]:
        """The budgets for `rooms` that would still do for the chosen batch."""
        found = self.fitter.least_beside(chosen.solved, rooms)
        tokens = self.pacing.tokens(chosen.solved.fitted.candidate)
        own = chosen.solved.program.seconds  # by the same bound, which less of anything cannot beat
        return tuple(
            Least(budget=room, least_bytes=nbytes, tokens_per_second=tokens / max(seconds, own))
            for room, (nbytes, seconds) in found.items()
        )
