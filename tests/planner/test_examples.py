"""The examples are what the planner finds: decisions and predictions agree, but for the last digits of a solver."""

from pathlib import Path
from typing import Any

import pytest

from ssdplan import cli
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.schedule.build import build_schedule
from tests.extent import FULL
from tests.planner.examples import DIRECTORY, EXAMPLES, file_of

LARGEST = 200 << 10


def assert_close(found: Any, kept: Any, where: str = "") -> None:
    """Equal documents, numbers to a ten-thousandth."""
    if isinstance(kept, dict):
        assert found.keys() == kept.keys(), where
        for key in kept:
            assert_close(found[key], kept[key], f"{where}.{key}")
    elif isinstance(kept, float) or (isinstance(kept, int) and kept > 10_000):
        assert found == pytest.approx(kept, rel=1e-4, abs=1e-4), where
    else:
        assert found == kept, where


LARGE = ("llama-3.1-70b", "gpt-175b")
"""Of the models, those that take long."""


@pytest.mark.parametrize("name", [name for name in EXAMPLES if FULL or not name.startswith(LARGE)])
def test_an_example_is_what_solve_finds(name: str, tmp_path: Path) -> None:
    assert cli.main(["solve", *EXAMPLES[name], "-o", str(tmp_path / "plan.json")]) == 0
    found, kept = Plan.load(tmp_path / "plan.json"), Plan.load(file_of(name))
    assert (found.model, found.machine) == (kept.model, kept.machine)
    assert_close(found.decision.model_dump(), kept.decision.model_dump(), "decision")
    assert_close(found.prediction.model_dump(), kept.prediction.model_dump(), "prediction")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_keeps_its_budgets(name: str) -> None:
    """By the schedule that its decision expands into, which the file does not hold."""
    plan = Plan.load(file_of(name))
    arenas = build_schedule(plan.model, plan.decision).arenas
    prediction, decision = plan.prediction, plan.decision
    assert arenas["host"] == prediction.host_arena_bytes <= prediction.peak_host_bytes <= decision.host_budget_bytes
    assert arenas["device"] == prediction.device_arena_bytes
    assert prediction.peak_device_bytes <= decision.device_budget_bytes
    assert plan.machine.figures == plan.model.figures == "estimated"
    assert file_of(name).stat().st_size < LARGEST


def test_every_file_has_its_command() -> None:
    assert {path.name for path in DIRECTORY.iterdir()} == {file_of(name).name for name in EXAMPLES}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_reasons_of_an_example_are_sentences(name: str) -> None:
    """The 175B's delay ratio gains nothing; its reason ended in a comma and a full stop."""
    for reason in Plan.load(file_of(name)).reasons:
        assert ",." not in reason.text and reason.text.endswith(".")
