"""A mean counts as stable when it is; time goes to those who need it; progress never falls."""

import itertools
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.profiler.measure import FEWEST, Limits, fair_share, mean_of, portion, repeat, spread_of


class Clock:
    """A clock that only measured work moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def figure(self, cost: float, value: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            self.now += cost
            return value()

        return run


def silent(fraction: float, what: str) -> None:
    pass


def test_what_never_varies_is_measured_the_least_number_of_times() -> None:
    clock = Clock()
    figures = {"a": clock.figure(0.1, lambda: 7.0), "b": clock.figure(0.2, lambda: 9.0)}
    found = repeat(figures, Limits(seconds=100), silent, "", clock=clock)
    assert {key: (m.mean, m.spread, m.samples, m.stable) for key, m in found.items()} == {
        "a": (7.0, 0.0, 5, True),
        "b": (9.0, 0.0, 5, True),
    }
    assert found["a"].trouble() is None


@pytest.mark.parametrize(("noise", "stable"), [(0.01, True), (0.03, True), (1.5, False)])
def test_noise_is_stable_when_its_mean_is_known_well_enough(noise: float, stable: bool) -> None:
    rng, clock = random.Random(1), Clock()
    value = clock.figure(0.1, lambda: rng.lognormvariate(0, noise))
    found = repeat({"x": value}, Limits(seconds=100), silent, "", clock=clock)["x"]
    assert found.stable is stable
    assert (found.trouble() is None) is stable
    if stable:
        assert found.mean == pytest.approx(1.0, abs=0.03)
    else:
        assert found.samples == 50


def test_a_few_wild_samples_move_neither_mean_nor_stability() -> None:
    clock, calls = Clock(), iter([1.0, 50.0, 1.01, 0.99, 1.0, 30.0, 1.0, 1.01, 0.99, 1.0] * 5)
    found = repeat({"x": clock.figure(0.1, lambda: next(calls))}, Limits(seconds=100), silent, "", clock=clock)["x"]
    assert found.stable and found.mean == pytest.approx(1.0, abs=0.011)


@pytest.mark.parametrize(("count", "least", "most"), [(10, 0.80, 0.95), (50, 0.91, 0.99)])
def test_the_spread_covers_the_true_median_as_often_as_it_says(count: int, least: float, most: float) -> None:
    rng, hits = random.Random(2), 0
    for _ in range(1000):
        samples = [rng.gauss(10, 1) for _ in range(count)]
        hits += abs(statistics.median(samples) - 10) <= spread_of(samples) * statistics.median(samples)
    assert least <= hits / 1000 <= most


@given(samples=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=40), factor=st.floats(1e-3, 1e3))
def test_the_spread_is_a_fraction_and_knows_no_unit(samples: list[float], factor: float) -> None:
    assert spread_of([value * factor for value in samples]) == pytest.approx(spread_of(samples), rel=1e-6, abs=1e-12)
    assert spread_of(samples) >= 0


@settings(deadline=None)
@given(
    costs=st.lists(st.floats(0.001, 10), min_size=1, max_size=12),
    seconds=st.floats(0.01, 200),
    seed=st.integers(0, 1000),
)
def test_time_is_kept_and_shared(costs: list[float], seconds: float, seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    began = clock.now
    limits = Limits(seconds=seconds)
    seen: list[float] = []
    figures = {i: clock.figure(cost, lambda: rng.lognormvariate(0, 0.5)) for i, cost in enumerate(costs)}
    found = repeat(figures, limits, lambda fraction, what: seen.append(fraction), "", clock=clock)
    elapsed = clock.now - began
    assert elapsed <= max(seconds, sum(costs)) * 1.000001
    assert all(1 <= m.samples <= limits.most for m in found.values())
    assert seen == sorted(seen) and seen[0] >= 0 and seen[-1] == 1.0
    if limits.least * sum(costs) <= seconds * 0.99:
        assert all(m.samples >= limits.least for m in found.values())
    # Who costs less is never measured less often.
    by_cost = [found[i].samples for i in sorted(figures, key=lambda i: costs[i])]
    if elapsed < seconds - max(costs):
        assert by_cost == sorted(by_cost, reverse=True)


def test_a_slow_figure_does_not_starve_the_quick_ones() -> None:
    clock = Clock()
    figures = {"slow": clock.figure(8.0, lambda: 8.0), **{i: clock.figure(0.2, lambda: 0.2) for i in range(5)}}
    found = repeat(figures, Limits(seconds=20), silent, "", clock=clock)
    assert found["slow"].samples == 1 and found["slow"].trouble() == "measured once only, for want of time"
    assert all(found[i].samples == 5 and found[i].stable for i in range(5))


def test_too_few_samples_are_not_stable() -> None:
    clock = Clock()
    found = repeat({"x": clock.figure(1.0, lambda: 1.0)}, Limits(seconds=2.5), silent, "", clock=clock)["x"]
    assert found.samples == FEWEST - 1 and not found.stable


@given(wants=st.lists(st.floats(0, 100), min_size=1, max_size=20), total=st.floats(0.1, 500))
def test_a_fair_share_gives_out_exactly_what_there_is(wants: list[float], total: float) -> None:
    share = fair_share(wants, total)
    if share is None:
        assert sum(wants) <= total * (1 + 1e-9)
    else:
        assert sum(min(want, share) for want in wants) == pytest.approx(total)


def test_a_portion_of_the_progress() -> None:
    told: list[tuple[float, str]] = []
    part = portion(lambda fraction, what: told.append((fraction, what)), 0.2, 0.6)
    part(0.0, "a")
    part(0.5, "b")
    part(1.0, "c")
    assert told == [(pytest.approx(0.2), "a"), (pytest.approx(0.4), "b"), (pytest.approx(0.6), "c")]


@pytest.mark.parametrize("slow", [1, 2])
def test_what_others_take_counts_as_often_as_they_take_it(slow: int) -> None:
    """A machine that is half as quick in `slow` of four rounds: a sum of many samples is as many of their means."""
    clock = Clock()
    calls = itertools.cycle([0.2] * slow + [0.1] * (4 - slow))
    limits = Limits(seconds=100, most=48)
    found = repeat({"x": clock.figure(0.1, lambda: next(calls))}, limits, silent, "", clock=clock)["x"]
    assert found.mean == pytest.approx(0.1 + 0.025 * slow)


def test_one_wild_sample_counts_as_one_at_the_fence() -> None:
    samples = [0.98, 0.99, 1.0, 1.01, 1.02]
    assert mean_of([*samples, 1.0]) == pytest.approx(1.0)
    assert mean_of([*samples, 80.0]) == mean_of([*samples, 8.0])
    assert 1.0 < mean_of([*samples, 80.0]) < 1.02
    assert 0.98 < mean_of([*samples, 0.0]) < 1.0
    assert mean_of([3.0]) == 3.0
