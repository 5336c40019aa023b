"""Runs take turns, in an order that favours nobody; ratios are of neighbours."""

from collections.abc import Callable

import pytest

from ssdplan.profiler.bench.turns import ratio_of, spread, take_turns
from tests.profiler.test_measure import Clock, silent


class Course:
    """Contenders whose cost is known, and a record of who ran when."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.ran: list[str] = []
        self.rested: list[float] = []

    def contender(self, name: str, seconds: Callable[[int], float]) -> Callable[[], None]:
        """The n-th call of `name`, counted from 0, costs seconds(n)."""

        def run() -> None:
            self.clock.now += seconds(self.ran.count(name))
            self.ran.append(name)

        return run

    def rest(self, seconds: float) -> None:
        self.clock.now += seconds
        self.rested.append(seconds)


def test_the_order_is_swapped_every_round() -> None:
    course = Course()
    contenders = {name: course.contender(name, lambda call: 0.2) for name in "abc"}
    found = take_turns(contenders, 3, silent, "", sample_seconds=0.1, clock=course.clock, rest=course.rest)
    assert "".join(course.ran) == "aabbcc" + "abc" + "cba" + "abc"  # two calls of each to warm up and to estimate
    assert found == {name: (pytest.approx(0.2),) * 3 for name in "abc"}
    assert len(course.rested) == 9  # and no rest is counted as work


def test_what_is_quick_is_run_often_and_counted_by_the_call() -> None:
    course = Course()
    contenders = {
        "quick": course.contender("quick", lambda call: 0.01),
        "slow": course.contender("slow", lambda call: 3),
    }
    found = take_turns(contenders, 2, silent, "", sample_seconds=0.1, clock=course.clock, rest=course.rest)
    assert course.ran.count("quick") == 2 + 2 * 10 and course.ran.count("slow") == 2 + 2
    assert found["quick"] == (pytest.approx(0.01),) * 2 and found["slow"] == (pytest.approx(3.0),) * 2


def test_the_first_calls_do_not_count() -> None:
    course = Course()
    contender = course.contender("a", lambda call: 50.0 if call == 0 else 0.5)
    assert take_turns({"a": contender}, 4, silent, "", clock=course.clock, rest=course.rest)["a"] == (0.5,) * 4


def test_drift_that_hits_both_alike_leaves_the_ratio() -> None:
    """The machine slows down to a tenth over the run: medians say little, the ratio of neighbours is still 2."""
    course = Course()
    drifting = {
        "ours": course.contender("ours", lambda call: 1.0 * 1.26**call),
        "rival": course.contender("rival", lambda call: 2.0 * 1.26**call),
    }
    found = take_turns(drifting, 10, silent, "", clock=course.clock, rest=course.rest)
    assert max(found["ours"]) > 7 * min(found["ours"])
    ratio = ratio_of(found["rival"], found["ours"])
    assert (ratio.low, ratio.median, ratio.high) == (pytest.approx(2.0),) * 3


def test_progress_never_falls_and_ends() -> None:
    course, told = Course(), list[float]()
    contenders = {name: course.contender(name, lambda call: 0.2) for name in "ab"}
    take_turns(contenders, 5, lambda done, what: told.append(done), "x", clock=course.clock, rest=course.rest)
    assert told == sorted(told) and told[0] == 0.0 and told[-1] == 1.0


def test_quartiles_by_hand() -> None:
    """Of 1, 2, 3, 4, 100 a half lies between 2 and 4; one wild run moves nothing."""
    ratio = spread([4.0, 100.0, 1.0, 3.0, 2.0])
    assert (ratio.low, ratio.median, ratio.high) == (2.0, 3.0, 4.0)
    alone = spread([0.7])
    assert (alone.low, alone.median, alone.high) == (0.7, 0.7, 0.7)


def test_a_ratio_is_of_pairs() -> None:
    assert ratio_of([2.0, 30.0], [1.0, 10.0]).median == 2.5
    with pytest.raises(ValueError, match="shorter"):
        ratio_of([1.0, 2.0], [1.0])
