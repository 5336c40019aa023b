"""The first screen of a plan: short, never wider than a terminal, and each figure the document's."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ssdplan.planner.basis import error_of, kinds_of
from ssdplan.planner.catalogue.ranks import Ranks
from ssdplan.planner.catalogue.whatif import WhatIf
from ssdplan.planner.request import SolveRequest
from ssdplan.planner.solve import solve
from ssdplan.plans.analysis.cost import Price, Training, cost_of
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import format_bytes
from ssdplan.plans.views.quantities import duration, number
from ssdplan.plans.views.screen import describe_briefly
from ssdplan.plans.views.screen.basis import Basis, likely
from tests.made.profiles import GIB, made_profile

EXAMPLES = sorted((Path(__file__).parents[3] / "plans" / "examples").glob("*.json"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_plan_is_told_in_few_lines(path: Path) -> None:
    plan = Plan.load(path)
    p, d = plan.prediction, plan.decision
    lines = describe_briefly(plan, build_schedule(plan.model, d), f"ssdplan show {path.name}").splitlines()
    assert len(lines) <= 17 and max(map(len, lines)) <= 100, "ten figures, and the title"
    text = "\n".join(lines)
    assert f"{duration(p.step_seconds)} a step, {number(p.tokens_per_second)} tokens/s." in text
    assert f"{d.rows} rows of {d.sequence_length} tokens" in text and p.bound_by in text
    assert f"writes {format_bytes(p.ssd_write_bytes)}" in text and "a day without a pause" in text
    assert format_bytes(p.ssd_bytes) in text and "with snapshots" in text
    best = max(plan.sensitivity, key=lambda row: row.throughput_gain)
    (told,) = re.findall(r"to be faster        (.*?): \+([0-9.]+)%", text)
    assert told[0] == best.words and float(told[1]) == pytest.approx(100 * best.throughput_gain, rel=0.05, abs=0.05)
    assert lines[-1].split() == ["more", "ssdplan", "show", path.name]
    assert "You do not need" not in text


def test_where_all_fits_the_first_line_says_that_ssdplan_is_not_needed() -> None:
    plan = solve(made_profile(), SolveRequest(64 * GIB, micro_batches=2))
    text = describe_briefly(plan, build_schedule(plan.model, plan.decision), "more")
    assert not plan.prediction.ssd_bytes and " ".join(text.split("\n", 2)[2].split()).startswith("You do not need")
    assert "store on ssd" not in text and "drive wear" not in text


def test_where_nothing_helps_that_is_said() -> None:
    plan = Plan.load(EXAMPLES[0])
    schedule = build_schedule(plan.model, plan.decision)
    slow = tuple(row.model_copy(update={"throughput_gain": 1e-4}) for row in plan.sensitivity)
    assert "to be faster        nothing: " in describe_briefly(
        plan.model_copy(update={"sensitivity": slow}), schedule, ""
    )


WHAT_IF = WhatIf("smollm2-135m", "rtx-4090", ["samsung-990-pro"], GIB, sequence_length=256, micro_batch_sizes=(1,))


@pytest.mark.parametrize(
    ("what_if", "has"),
    [
        (WHAT_IF, "as in half of 23 published trainings (A100, H100)"),
        (replace(WHAT_IF, gpu="none"), "no published training on a processor alone"),
        (replace(WHAT_IF, gpu="rtx-4070"), "gpu.flops is assumed"),
        (replace(WHAT_IF, figures={"gpu.passes": 3.0}), "gpu.passes is given"),
        (replace(WHAT_IF, model="gpt-oss-20b"), "mixture of experts"),
    ],
    ids=["gpu", "none", "assumed", "given", "mixture"],
)
def test_compute_has_an_error_only_where_such_estimates_were_compared(what_if: WhatIf, has: str) -> None:
    error, evidence = error_of(what_if)
    assert has in evidence and (error is not None) == (what_if is WHAT_IF)


def test_figures_are_told_by_what_they_are_worth() -> None:
    kinds = kinds_of(replace(WHAT_IF, ssds=["samsung-980-pro", "samsung-990-pro"], figures={"cpu.cores": 8}))
    assert kinds["given"] == ("cpu.cores",)
    assert {"gpu.flops", "link.h2d"} <= set(kinds["measured"]) and "gpu.memory" in kinds["data sheet"]
    assert "gpu.efficiency" in kinds["assumed"]
    assert "ssd.write" in kinds["measured"] and "ssd.write" in kinds["assumed"], "one drive was measured"


def test_the_range_is_of_what_bounds_the_step() -> None:
    plan, basis = Plan.load(EXAMPLES[1]), Basis({}, 0.06, "as it is")

    def changed(bound_by: str = "compute", gain: float = 0.3) -> Plan:
        rows = [row.model_copy(update={"throughput_gain": gain}) for row in plan.sensitivity]
        prediction = plan.prediction.model_copy(update={"bound_by": bound_by})
        return plan.model_copy(update={"prediction": prediction, "sensitivity": tuple(rows)})

    rate = plan.prediction.tokens_per_second
    assert likely(changed(), basis) == pytest.approx((rate / 1.06, rate / 0.94))
    assert likely(changed(gain=0.03), basis) == pytest.approx((rate / 1.06, 1.03 * rate))
    assert likely(changed(), None) is likely(changed(), Basis({}, None, "why")) is None
    assert likely(changed("ssd"), Basis({}, None, "why")) == pytest.approx((rate / 1.1, rate / 0.9))
    assert likely(changed("ssd", 0.03), basis) == pytest.approx((rate / 1.1, 1.03 * rate))
    assert likely(changed("compute and updates (shared cores)"), basis) is None
    told = f"{number(rate / 1.06)} to {number(rate / 0.94)} tokens/s with compute within 6%, as it is"
    by_ssd = (
        f"{number(rate / 1.1)} to {number(rate / 0.9)} tokens/s with ssd within 10%, assumed: no published training"
    )
    by_cores = "no range: bound by compute and updates (shared cores), and no published training that it bounds"
    for shown, words in (
        (changed(), told),
        (changed("ssd"), by_ssd),
        (changed("compute and updates (shared cores)"), by_cores),
    ):
        text = describe_briefly(shown, build_schedule(plan.model, plan.decision), "more", None, basis)
        assert words in " ".join(text.split())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_first_screen_of_a_what_if_has_at_most_25_lines(path: Path) -> None:
    """With everything that it can have: a range and a training, figures of ranks and given ones."""
    plan = Plan.load(path)
    plan = plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"bound_by": "compute"})})
    what_if = replace(
        WHAT_IF,
        gpu="a100-80gb",
        several=Ranks(4, 2),
        networks=["10gbe", "nvlink-a100"],
        ssds=["samsung-980-pro", "samsung-990-pro"],
        figures={"cpu.cores": 8},
    )
    training = Training(10**12, Price(2500, hourly=False), 450, 0.3)
    basis = Basis(kinds_of(what_if), *error_of(what_if))
    schedule = build_schedule(plan.model, plan.decision)
    text = describe_briefly(plan, schedule, "ssdplan show plan.json", training, basis)
    lines = text.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 100 and not any(line.endswith("...") for line in lines[1:])
    for word in ("range", "bound by", "to be faster", "host memory", "drive life", "given", "measured", "assumed"):
        assert f"  {word} " in text, word
    assert f"{number(cost_of(plan, training).hours)} hours" in text
