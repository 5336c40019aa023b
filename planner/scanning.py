"""Scanning: what the linear program alone says of candidates, before anything is built or simulated.

Owns these bounds, which candidates are worth one, and the seconds of their compute. `search.py` chooses by them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ssdplan.plans.documents.profile import Machine, Model
from ssdplan.plans.documents.zeroth_order import SIDES

from .fit.budgets import Candidate
from .fit.fit import Fitter
from .fit.found import Branch
from .predict.peaks import compute_seconds, forward_seconds
from .program.program import Bound, program_bound
from .ranked import CLOSE, ENOUGH, Scanned, good_enough
from .request import LADDER

SLOW = 0.85
"""Micro-batches of a size whose compute alone makes less than this share of the best bound are not looked at, unless
nothing else makes as much."""
HANDICAP = 1.001
"""Of a branch that keeps no checkpoint at all: it must gain something, for what fits in memory touches no drive."""
PLATEAU = 3
"""Of numbers of micro-batches that are all about as fast as the fastest every third is looked at."""


@dataclass(slots=True)
class Scan:
    """What was looked at, by batch, and what was not, for its compute alone is too slow."""

    entries: list[Scanned] = field(default_factory=list)
    slow: list[Candidate] = field(default_factory=list)
    passed: list[Scanned] = field(default_factory=list)
    """Not looked at, because fewer and more micro-batches of the same size tell enough: the slower of these two stands
    for it. It is no slower than that, unless the device may update states with fewer micro-batches and not with more
    (`ROOMY` in `fit/fit.py`)."""

    @property
    def known(self) -> list[Scanned]:
        """Looked at or passed, by batch."""
        return sorted([*self.entries, *self.passed], key=lambda entry: entry.candidate.order)

    def add(self, entries: Sequence[Scanned]) -> None:
        self.entries = sorted([*self.entries, *entries], key=lambda entry: entry.candidate.order)


class Scanner:
    """Bounds of one model's candidates on one machine, in one set of budgets."""

    def __init__(self, model: Model, machine: Machine, fitter: Fitter, tokens: Callable[[Candidate], int]) -> None:
        """`tokens`: of a candidate's step."""
        self.model, self.machine, self.fitter, self.tokens = model, machine, fitter, tokens

    def scan(self, candidates: Sequence[Candidate]) -> Scan:
        """The bound of every candidate whose pipeline leaves room on device and host. Where none does on the device, of
        every one with room on host: that is estimated, and one may fit exactly. The sizes whose compute is the quickest
        come first, and then no size that is slow beside them."""
        found, best = Scan(), 0.0
        by_size: dict[int, list[Candidate]] = {}
        with_room = self._with_room(candidates)
        for candidate in with_room:
            by_size.setdefault(candidate.micro_batch_size, []).append(candidate)
        most = {size: max(map(self.most_tokens_per_second, mine)) for size, mine in by_size.items()}
        for size, mine in sorted(by_size.items(), key=lambda each: -most[each[0]]):
            if most[size] < SLOW * best:
                found.slow += mine
                continue
            entries, passed = self._climb(mine, best)
            found.add(entries)
            found.passed += passed
            best = max([best, *(entry.tokens_per_second for entry in entries)])
        return found

    def _climb(self, mine: Sequence[Candidate], best: float) -> tuple[list[Scanned], list[Scanned]]:
        """The bounds of as many candidates of one size, by their micro-batches, as show where these are the fastest and
        which fewer are nearly as fast, as `best` tokens/s of another size are too; and those between that are passed.

        A step's seconds by the program are a convex function of the micro-batches, for all that these take grows with
        them: with more of them tokens/s rise to a top, and fall beyond it. So what lies between two numbers is looked
        at only where the top may lie there, or the rise to it.
        """
        found, reached = dict[int, Scanned | None](), dict[int, float]()
        wanted = {0, len(mine) // 2, len(mine) - 1}
        while wanted:
            for number in sorted(wanted):
                entry = self.one(mine[number], self.fitter.branches(mine[number]))
                found[number], reached[number] = entry, entry.tokens_per_second if entry else 0.0
            top = max(reached.values())
            spans = [span for span in pairwise(sorted(found)) if span[1] - span[0] > 1 and top]
            wanted = {sum(span) // 2 for span in spans if _may_matter(span, reached, top, max(top, best))}
        # What lies beside one that leaves no room may leave none either: whether it fits is asked of others.
        passed = list[Scanned]()
        for first, last in spans:
            ends = [entry for entry in (found[first], found[last]) if entry]
            slower = min(ends, key=lambda entry: entry.tokens_per_second, default=None)
            if slower and len(ends) == 2:
                passed += [self._like(slower, mine[number]) for number in range(first + 1, last)]
        return [entry for entry in found.values() if entry], passed

    def _like(self, entry: Scanned, candidate: Candidate) -> Scanned:
        """A candidate as fast as `entry`, with its own branches in the order of those."""
        order = [branch.fixed.checkpoints for branch in entry.branches]
        own = [branch for branch in self.fitter.branches(candidate) if branch.fixed.checkpoints in order]
        branches = tuple(sorted(own, key=lambda branch: order.index(branch.fixed.checkpoints)))
        seconds = self.tokens(candidate) / entry.tokens_per_second
        return Scanned(candidate, branches, Bound(seconds, entry.bound.delay_ratio), entry.tokens_per_second)

    def _with_room(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those for whose pipelines the device has room, or where it has for none of them all."""
        return list(filter(self.fitter.has_room, candidates)) or candidates

    def each(self, candidates: Sequence[Candidate]) -> list[Scanned]:
        """The bound of each that leaves room."""
        scanned = (self.one(candidate, self.fitter.branches(candidate)) for candidate in candidates)
        return [entry for entry in scanned if entry]

    def one(self, candidate: Candidate, given: Sequence[Branch]) -> Scanned | None:
        """The bound of a candidate by the best of these branches; None where none leaves room. Where one takes no
        longer than compute alone no other can be better, and the others follow it as they are."""
        possible: list[tuple[float, Branch, Bound]] = []
        left = sorted(given, key=lambda branch: branch.fixed.checkpoints is not None)
        enough = HANDICAP * self.compute_seconds(candidate)
        while left and all(bound.seconds > enough for _, _, bound in possible):
            branch = left.pop(0)
            bound = self.bound(self.model, candidate, branch)
            if bound is not None:
                handicap = 1.0 if branch.fixed.checkpoints is None else HANDICAP
                possible.append((bound.seconds * handicap, branch, bound))
        if not possible:
            return None
        possible.sort(key=lambda each: each[0])
        bound = possible[0][2]
        branches = (*(branch for _, branch, _ in possible), *left)
        return Scanned(candidate, branches, bound, self.tokens(candidate) / bound.seconds)

    def surely(self, candidate: Candidate, given: Sequence[Branch]) -> Scanned | None:
        """The same of a candidate that fits: where the estimate of its buffers leaves no room, it is too careful."""
        return self.one(candidate, given) or self.one(candidate, self.fitter.at_most(given))

    def between(self, scan: Scan) -> None:
        """Add the candidates between the smallest that is good enough and the one before it on the ladder."""
        if scan.entries:
            first = good_enough(scan.entries)[0].candidate
            n = first.micro_batches
            before = max((rung for rung in LADDER if rung < n), default=0)
            between = [Candidate(first.micro_batch_size, number) for number in range(before + 1, n)]
            scan.add(self.each(self._with_room(between)))

    def bound(self, model: Model, candidate: Candidate, branch: Branch) -> Bound | None:
        """The program's, of a model like the scanner's."""
        return program_bound(
            model,
            self.machine,
            micro_batch_size=candidate.micro_batch_size,
            micro_batches=candidate.micro_batches,
            limits=branch.limits,
            fixed=branch.fixed,
        )

    def most_tokens_per_second(self, candidate: Candidate) -> float:
        """What compute alone would allow."""
        return self.tokens(candidate) / self.compute_seconds(candidate)

    def compute_seconds(self, candidate: Candidate) -> float:
        """All forwards and backwards of a step, one after the other."""
        times, n = 1, candidate.micro_batches
        if self.fitter.fixed.zeroth_order:
            forwards = SIDES * self.fitter.fixed.zeroth_order.directions * n
            return forward_seconds(self.model, candidate.micro_batch_size, forwards)
        if self.fitter.fixed.schedule == "horizontal":
            times, n = n, 1
        saves = self.fitter.fixed.recompute != "all"
        return times * compute_seconds(self.model, candidate.micro_batch_size, n, saves=saves)


def _may_matter(span: tuple[int, int], reached: Mapping[int, float], top: float, best: float) -> bool:
    """Whether between the two ends of `span`, whose tokens/s are among `reached`, there may be a higher top, fewer
    micro-batches on the rise to it that come close to `best`, or so many on a plateau that some are worth a look."""
    first, last = (reached[number] for number in span)
    flat = min(first, last) >= ENOUGH * top
    beside_top = max(first, last) == top and not flat
    rise = first < min(ENOUGH * top, last) and last >= CLOSE * best
    plateau = flat and top >= CLOSE * best and span[1] - span[0] > PLATEAU
    return beside_top or rise or plateau
