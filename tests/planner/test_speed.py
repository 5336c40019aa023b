"""Planning is quick: how often its two costly steps are taken, and bounds on processor time.

Counts depend on nobody else who uses the machine. Processor time does, where two threads share a core or a clock
changes (by a half, from second to second, on some machines), so it is held against that of a plain loop (a yard). The
loop runs before and after; where the work takes seconds, it runs meanwhile.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ssdplan.planner.catalogue.whatif import WhatIf, estimate
from ssdplan.planner.fit import estimate as building
from ssdplan.planner.fit import transit as pipeline
from ssdplan.planner.predict.simulator import simulate
from ssdplan.planner.program import program
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.schedule.build import build_schedule
from tests.made.decisions import decide

GIB = 1 << 30
SOLVE_YARDS, SIMULATE_YARDS, EXPAND_YARDS = 110.0, 6.0, 22.0
"""A solve took 65 of them, a simulation 1.5, and an expansion with it 10.6 (2026-11-26). A yard is about a tenth of a
second on an idle core of a server of 2023."""


def yard() -> float:
    """Processor seconds of a plain loop that makes small objects, looks them up and sorts them, as planning does."""
    began = time.process_time()
    found = {(number, number % 7): (number, str(number)) for number in range(200_000)}
    sum(number for number, _ in sorted(found))
    return time.process_time() - began


def large(model: str, gpu: str, ssd: str, host_gib: int) -> Profile:
    return estimate(WhatIf(model=model, gpu=gpu, ssds=[ssd], host_memory_bytes=host_gib * GIB))


YARD_EVERY = 6
"""Builds of shortened schedules."""


@pytest.fixture
def yards() -> list[float]:
    """Those of a test so far."""
    return []


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch, yards: list[float]) -> Counter[str]:
    """How often whole and shortened schedules are built and programs solved from now on; a yard now and then."""
    found: Counter[str] = Counter()

    def counted(kind: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found[kind(*args)] += 1
            if kind(*args) == "shortened" and found["shortened"] % YARD_EVERY == 0:
                yards.append(yard())
            return function(*args)

        return call

    def length(model: Any, _: Any) -> str:
        return "whole" if len(model.layers) > 80 else "shortened"

    for module in (building, pipeline):
        monkeypatch.setattr(module, "build_schedule", counted(length, build_schedule))
    monkeypatch.setattr(program, "minimise", counted(lambda *_: "programs", program.minimise))
    return found


def test_a_solve_builds_and_programs_seldom_and_takes_seconds(counts: Counter[str], yards: list[float]) -> None:
    profile = large("llama-3.1-70b", "rtx-4090", "samsung-990-pro*2", 64)
    began = time.process_time()
    plan = solve(profile, SolveRequest(host_memory_bytes=64 * GIB))
    spent = time.process_time() - began - sum(yards)
    assert len(yards) >= 4
    assert spent < SOLVE_YARDS * max(yards)
    # A whole schedule of the plan alone, and at times one more when a rounding breaks a budget; two of shortened models
    # for each candidate that is ranked and each row that is compared, and one for each look at what a decision takes.
    simulated = sum(entry.simulated for entry in plan.alternatives)
    assert counts["whole"] <= 2 and simulated <= 6
    assert counts["shortened"] <= 60
    # At most two branches a candidate and its bound without compute; besides, what is asked of a candidate when fitted.
    assert counts["programs"] <= 3 * len(plan.alternatives) + 25 * simulated


def test_96_layers_of_16_micro_batches_are_expanded_and_simulated_in_seconds() -> None:
    profile = large("gpt-175b", "a100-40gb", "samsung-pm9a3", 400)
    model = profile.model
    decision = decide(model, alpha=0.25, optimizer=0.3, checkpoints=0.5, micro_batches=16, chunk=1 << 25)
    yards = [yard(), yard()]
    began = time.process_time()
    steady = build_schedule(model, decision).steady
    expanded = time.process_time()
    simulate(steady, model, profile.machine, 1)
    ended = time.process_time()
    assert len(model.layers) >= 96 and len(steady.ops) > 20_000
    longest = max(*yards, yard(), yard())
    assert ended - expanded < SIMULATE_YARDS * longest
    assert ended - began < EXPAND_YARDS * longest
