"""What a search knows of a candidate: its bound, its shortened models, its whole step; which of them is good enough.

Owns these records and that rule (GreedySnake 4.5). `solve.py` makes and compares them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from ssdplan.plans.graph.timeline import Timeline

from .fit.budgets import Candidate
from .fit.found import Branch, Solved
from .program.placement import ProgramResult
from .program.program import Bound

FEW = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of micro-batches of plans in memory that are looked at."""
FINALISTS = 3
ENOUGH = 0.99
"""The share of the best throughput that a smaller batch must reach to be preferred (GreedySnake 4.5)."""
CLOSE = 0.9
"""A bound below this share of the best cannot win by a better fill and drain."""
WORTH = 5e-3
"""What must be gained for more work to be done: by the program by saving activations, by a plan for less host memory
beside that for all of it, and by another pace on a shortened model."""
LOST = 0.5
"""Of the least seconds that a step lost beside its bound, for a pipeline that fills and drains: others of its
micro-batch size are taken to lose as many, and fewer micro-batches as many for each."""
PARTS = (1, 2, 4, 8)
"""Of a batch that recomputes everything, which may have room to save activations: all, a half, a quarter and an eighth
of it."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """A candidate, its branches (the fastest first) and the bound of the first."""

    candidate: Candidate
    branches: tuple[Branch, ...]
    bound: Bound
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate as its shortened models run it."""

    scanned: Scanned
    program: ProgramResult
    tokens_per_second: float

    @property
    def candidate(self) -> Candidate:
        return self.scanned.candidate


@dataclass(frozen=True, slots=True)
class Simulated:
    solved: Solved
    timeline: Timeline
    """Of a step, in a zeroth-order plan of one that writes."""
    tokens_per_second: float
    seconds: float
    """Of a step, on average where some write and others do not."""

    @property
    def by_rows(self) -> bool:
        """Whether a zeroth-order plan's table of token embeddings comes by rows."""
        zeroth_order = self.solved.fitted.decision.zeroth_order
        return zeroth_order is not None and zeroth_order.by_rows

    @property
    def writes(self) -> bool:
        """Whether updated parameters leave the place where they are updated."""
        traffic = self.solved.fitted.schedule.traffic("steady")
        return any(traffic[kind] > self.solved.fitted.schedule.traffic("unwritten")[kind] for kind in ("write", "d2h"))


def good_enough(scanned: Sequence[Scanned]) -> list[Scanned]:
    best = max(entry.tokens_per_second for entry in scanned)
    enough = [entry for entry in scanned if entry.tokens_per_second >= ENOUGH * best]
    return sorted(enough, key=lambda entry: entry.candidate.order)


def smallest_good_enough(ranked: Sequence[Ranked]) -> Ranked:
    best = max(found.tokens_per_second for found in ranked)
    enough = [found for found in ranked if found.tokens_per_second >= ENOUGH * best]
    return min(enough, key=lambda found: (found.candidate.global_batch, -found.tokens_per_second))


Tokens = Callable[[Candidate], int]
"""Of a candidate's step."""


def at_most(entry: Scanned, others: Iterable[tuple[Scanned, float]], tokens: Tokens) -> float:
    """Tokens/s that a candidate may reach: by its bound, and a part of the least seconds that `others` of its size,
    which reached as many as that, lost beside theirs."""
    lost = [
        seconds * min(entry.candidate.micro_batches / other.micro_batches, 1.0)
        for other, seconds in _lost(others, tokens)
        if other.micro_batch_size == entry.candidate.micro_batch_size
    ]
    return _losing(entry, LOST * min(lost, default=0.0), tokens)


def expected(entry: Scanned, others: Iterable[tuple[Scanned, float]], tokens: Tokens) -> float:
    """Tokens/s that a candidate is likely to reach: by its bound, and the seconds that a step of it is likely to lose.
    `others` of its size, or where there are none all others, say how many, by what they lost beside their own bounds.
    With rows between those of two others it loses what is on the line between them. With fewer rows than all, or more,
    half of what the nearest lost is taken to be lost once a step, and half in proportion to the rows."""
    known = _lost(others, tokens)
    if not known:
        return entry.tokens_per_second
    alike = [each for each in known if each[0].micro_batch_size == entry.candidate.micro_batch_size] or known
    points, rows = sorted((other.global_batch, seconds) for other, seconds in alike), entry.candidate.global_batch
    fewer, more = [each for each in points if each[0] <= rows], [each for each in points if each[0] > rows]
    if fewer and more:
        (low, at_low), (high, at_high) = fewer[-1], more[0]
        return _losing(entry, at_low + (rows - low) / (high - low) * (at_high - at_low), tokens)
    nearest, at_nearest = fewer[-1] if fewer else more[0]
    return _losing(entry, at_nearest * (1 + rows / nearest) / 2, tokens)


def _lost(others: Iterable[tuple[Scanned, float]], tokens: Tokens) -> list[tuple[Candidate, float]]:
    """The seconds that a step of each of `others`, which reached as many tokens/s as that, lost beside its bound."""
    return [
        (other.candidate, tokens(other.candidate) * (1 / reached - 1 / other.tokens_per_second))
        for other, reached in others
    ]


def _losing(entry: Scanned, seconds: float, tokens: Tokens) -> float:
    """Tokens/s of a step that loses so many seconds beside its bound; of negative ones it loses none."""
    own = tokens(entry.candidate)
    return own / (own / entry.tokens_per_second + max(seconds, 0.0))


def with_more_room(own: Candidate, known: Iterable[Candidate], sizes: Iterable[int]) -> list[Candidate]:
    """Of micro-batches of each of `sizes` the most of `known` that have no more rows than `own`, or than a half, a
    quarter or an eighth of it; the smallest batch first."""
    order = sorted(known, key=lambda each: each.order)
    found = set[Candidate]()
    for size, part in product(sizes, PARTS):
        most = own.global_batch // part
        found |= set([each for each in order if each.micro_batch_size == size and each.global_batch <= most][-1:])
    return sorted(found - {own}, key=lambda each: each.order)
