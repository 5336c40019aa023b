"""Which candidates are bounded before anything is simulated, and that those which are left out would not be chosen."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ssdplan.planner import scanning
from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.fit.budgets import Candidate
from ssdplan.planner.fit.fit import Fitter
from ssdplan.planner.program.program import Bound
from ssdplan.planner.ranked import ENOUGH, LOST, Scanned, at_most, expected, with_more_room
from ssdplan.planner.request import LADDER, SolveRequest, allowed, budget_of, fixed_choices, least_of, smallest_of
from ssdplan.planner.scanning import PLATEAU, Scanner
from ssdplan.planner.search import Search
from ssdplan.planner.solve import Told, solve
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.profile import Profile

GIB = 1 << 30


@pytest.fixture(scope="module")
def profile() -> Profile:
    """A row alone takes a third longer than sixteen at once."""
    sizes = (1, 4, 16)
    source = WhatIf("llama-3.2-1b", "rtx-pro-6000", ["micron-9550-pro*2"], 8 * GIB, sequence_length=512)
    return estimate(replace(source, micro_batch_sizes=sizes, figures={"gpu.memory": 6.0 * GIB}))


def planned(profile: Profile, told: Told = "step", gib: int = 8) -> Plan:
    return solve(profile, SolveRequest(gib * GIB), told=told, compared=False)


def test_slow_sizes_are_left_out_and_change_no_plan(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded: list[Candidate] = []
    bound = scanning.Scanner.bound

    def noted(self: scanning.Scanner, model: object, candidate: Candidate, branch: object) -> object:
        bounded.append(candidate)
        return bound(self, model, candidate, branch)  # type: ignore[arg-type]

    monkeypatch.setattr(scanning.Scanner, "bound", noted)
    plan = planned(profile)
    slow = [candidate for candidate in bounded if candidate.micro_batch_size == 1]
    assert len(bounded) > 10 and set(slow) == {Candidate(1, 1)}, "of the least alone it is asked whether it fits"
    monkeypatch.setattr(scanning, "SLOW", 0.0)
    bounded.clear()
    assert planned(profile).decision == plan.decision
    assert any(candidate.micro_batch_size == 1 < candidate.micro_batches for candidate in bounded)


def test_slow_sizes_are_among_the_alternatives(profile: Profile) -> None:
    plan, screen = planned(profile, "all"), planned(profile, "screen")
    assert {entry.micro_batch_size for entry in plan.alternatives} == {1, 4, 16}
    assert screen.decision == plan.decision
    assert screen.sensitivity == plan.sensitivity
    assert [row.budget for row in plan.least] == ["host memory", "device memory", "ssd space"]
    assert screen.least == plan.least[:1], "a first screen tells of host memory alone"


def test_where_nothing_else_is_as_fast_slow_sizes_are_looked_at(profile: Profile) -> None:
    """A device that has room for one row at a time alone."""
    small = profile.machine.model_copy(update={"device_memory_bytes": 3 * GIB})
    plan = planned(profile.model_copy(update={"machine": small}))
    assert plan.decision.micro_batch_size == 1


def test_the_least_are_those_that_no_other_is_less_than() -> None:
    free = [Candidate(size, count) for size in (1, 2, 4) for count in (1, 2, 8)]
    assert least_of(free) == [Candidate(1, 1)]
    assert smallest_of(free) == [Candidate(1, 1), Candidate(2, 1), Candidate(4, 1)]
    batch = [Candidate(1, 8), Candidate(2, 4), Candidate(4, 2)]
    assert sorted(least_of(batch), key=lambda each: each.micro_batch_size) == batch


def scanner_of(model: str, gpu: str, drives: str, gib: int, tokens: int) -> tuple[Scanner, tuple[int, ...]]:
    """That of a search for a batch, and the micro-batch sizes."""
    source = WhatIf(model, gpu, [drives], gib * GIB, sequence_length=tokens)
    profile, request = estimate(source), SolveRequest(gib * GIB)
    model_, machine = allowed(profile.model, request), profile.machine
    fitter = Fitter(model_, machine, budget_of(machine, request), fixed_choices(model_, request))
    search = Search(model_, machine, fitter).recomputing_everything()
    return search.scanner, model_.micro_batch_sizes


@pytest.mark.parametrize(
    "asked",
    [
        ("llama-3.2-1b", "rtx-4090", "micron-9550-pro", 6, 1024),
        ("llama-3.2-3b", "none", "samsung-990-pro*2", 16, 512),
        ("qwen3-4b", "rtx-a5000", "intel-p4510*2", 2, 512),
        ("gpt-oss-20b", "rtx-5090", "samsung-990-pro*2", 64, 2048),
        ("gemma-3-1b", "gb10", "kioxia-cm7-r*3", 4, 4096),
        ("llama-3.1-70b", "h100-80gb", "samsung-980-pro", 16, 512),
    ],
    ids=lambda asked: "-".join(map(str, asked[:2])),
)
def test_a_climb_finds_what_bounds_of_all_would(asked: tuple[str, str, str, int, int]) -> None:
    """The top, and the fewest micro-batches that are good enough beside it. What it passes is no slower than what it
    is taken for, within a thousandth; and it takes about half as many bounds."""
    scanner, sizes = scanner_of(*asked)
    bounded = possible = 0
    for size in sizes:
        mine = list(filter(scanner.fitter.has_room, (Candidate(size, count) for count in LADDER)))
        every = {entry.candidate: entry.tokens_per_second for entry in scanner.each(mine)}
        entries, passed = scanner._climb(mine, 0.0)
        bounded, possible = bounded + len(entries), possible + len(every)
        assert bool(entries) == bool(every)
        if not entries:
            continue
        found = {entry.candidate: entry.tokens_per_second for entry in entries}
        assert found == {candidate: every[candidate] for candidate in found}
        top = max(found.values())
        assert top > 0.998 * max(every.values())
        enough, seen = ([each for each in of if of[each] >= ENOUGH * top] for of in (every, found))
        assert min(seen, key=lambda each: each.order) == min(enough, key=lambda each: each.order)
        for each in passed:
            assert each.candidate not in found and each.tokens_per_second <= 1.001 * every[each.candidate]
        # What is neither lies beside one that leaves no room, beyond the most that were looked at.
        left = every.keys() - found.keys() - {each.candidate for each in passed}
        assert all(each.micro_batches > max(one.micro_batches for one in found) for each in left)
    assert bounded < 0.75 * possible


def test_a_plateau_is_looked_at_here_and_there() -> None:
    """Where many numbers of micro-batches are about as fast, of those that follow each other some are looked at."""
    scanner, sizes = scanner_of("llama-3.2-1b", "rtx-4090", "micron-9550-pro", 6, 1024)
    mine = [Candidate(sizes[0], count) for count in LADDER]
    entries, _ = scanner._climb(mine, 0.0)
    found = {entry.candidate: entry.tokens_per_second for entry in entries}
    top = max(found.values())
    flat = [number for number, each in enumerate(mine) if found.get(each, 0.0) >= ENOUGH * top]
    assert flat[-1] - flat[0] > 2 * PLATEAU
    assert all(after - before <= PLATEAU for before, after in pairwise(flat))


def scanned(size: int, count: int, tokens_per_second: float) -> Scanned:
    """A step has a token a row."""
    return Scanned(Candidate(size, count), (), Bound(size * count / tokens_per_second, 0.0), tokens_per_second)


def rows(candidate: Candidate) -> int:
    return candidate.global_batch


def test_a_step_may_lose_half_of_what_others_of_its_size_lost() -> None:
    entry = scanned(4, 4, 2.0)  # 16 rows in 8 s
    assert at_most(entry, [], rows) == 2.0
    lost = [(scanned(4, 8, 4.0), 3.2)]  # 32 rows in 10 s instead of 8, of half as many micro-batches one of these two
    assert at_most(entry, lost, rows) == pytest.approx(16 / (8 + LOST * 1.0))
    more = scanned(4, 16, 4.0)  # of twice as many no more than two
    assert at_most(more, lost, rows) == pytest.approx(64 / (16 + LOST * 2.0))
    least = [*lost, (scanned(4, 4, 2.0), 16 / 8.5)]  # and another lost half a second
    assert at_most(entry, least, rows) == pytest.approx(16 / (8 + LOST * 0.5))
    assert at_most(entry, [*lost, (scanned(4, 4, 2.0), 2.5)], rows) == 2.0  # a shortened model beat its bound
    assert at_most(scanned(8, 4, 2.0), lost, rows) == 2.0  # of another size nothing is known


def test_a_step_is_likely_to_lose_what_others_with_about_as_many_rows_lost() -> None:
    entry = scanned(4, 4, 2.0)  # 16 rows in 8 s
    few, many = (scanned(4, 2, 2.0), 8 / 6), (scanned(4, 6, 4.0), 24 / 7)  # 8 rows lost 2 s, 24 rows 1 s
    assert expected(entry, [few, many], rows) == pytest.approx(16 / 9.5)  # halfway
    assert expected(entry, [few], rows) == pytest.approx(16 / 11)  # twice the rows: 1 s once, 2 s for them
    assert expected(entry, [many], rows) == pytest.approx(16 / (8 + (1 + 2 / 3) / 2))
    assert expected(scanned(4, 1, 2.0), [few, many], rows) == pytest.approx(4 / 3.5)
    other = (scanned(2, 8, 4.0), 16 / 8)  # of another size 16 rows lost 4 s
    assert expected(entry, [other], rows) == pytest.approx(16 / 12)
    assert expected(entry, [other, few, many], rows) == pytest.approx(16 / 9.5)  # those of its own size count first
    assert expected(entry, [(scanned(4, 2, 2.0), 2.5)], rows) == 2.0  # a shortened model beat its bound


def test_those_with_more_room_have_no_more_rows_than_a_part() -> None:
    known = [Candidate(size, count) for size in (1, 4) for count in (1, 2, 3, 8, 12)]
    found = with_more_room(Candidate(4, 8), known, (1, 4))
    assert found == sorted(found, key=lambda each: each.order)
    of_four = {Candidate(4, 3), Candidate(4, 2), Candidate(4, 1)}  # of 32 rows it is itself; at most 16, 8 and 4
    of_one = {Candidate(1, 12), Candidate(1, 8), Candidate(1, 3)}
    assert set(found) == of_four | of_one
    assert with_more_room(Candidate(4, 8), known, (1,)) == sorted(of_one, key=lambda each: each.order)
