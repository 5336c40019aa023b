"""The first screen of a plan: short, never wider than a terminal, and each figure the document's."""

from pathlib import Path

import pytest

from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import format_bytes
from ssdplan.plans.views.quantities import duration, number
from ssdplan.plans.views.screen import describe_briefly
from tests.made.profiles import GIB, made_profile

EXAMPLES = sorted((Path(__file__).parents[3] / "plans" / "examples").glob("*.json"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_plan_is_told_in_a_dozen_lines(path: Path) -> None:
    plan = Plan.load(path)
    p, d = plan.prediction, plan.decision
    lines = describe_briefly(plan, build_schedule(plan.model, d), f"ssdplan show {path.name}").splitlines()
    assert len(lines) <= 14 and max(map(len, lines)) <= 100, "ten figures, and the title"
    text = "\n".join(lines)
    assert f"{duration(p.step_seconds)} a step, {number(p.tokens_per_second)} tokens/s." in text
    assert f"{d.rows} rows of {d.sequence_length} tokens" in text and p.bound_by in text
    assert f"writes {format_bytes(p.ssd_write_bytes)}" in text and "a day without a pause" in text
    assert format_bytes(p.ssd_bytes) in text and "with snapshots" in text
    assert lines[-1].split() == ["more", "ssdplan", "show", path.name]
    assert "You do not need" not in text


def test_where_all_fits_the_first_line_says_that_ssdplan_is_not_needed() -> None:
    plan = solve(made_profile(), SolveRequest(64 * GIB, micro_batches=2))
    text = describe_briefly(plan, build_schedule(plan.model, plan.decision), "more")
    assert not plan.prediction.ssd_bytes and " ".join(text.split("\n", 2)[2].split()).startswith("You do not need")
    assert "store on ssd" not in text and "drive wear" not in text
