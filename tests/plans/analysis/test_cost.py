"""What a training takes: hours, money, and the life of the drives, by hand."""

import json
from pathlib import Path

import pytest

from ssdplan import cli
from ssdplan.commands.parsing.cost import power_price, prices, tokens, watts
from ssdplan.plans.analysis.cost import Price, Training, cost_of
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import UsageError
from ssdplan.plans.views.screen.cost_text import describe_cost

EXAMPLE = Path(__file__).parents[3] / "plans" / "examples" / "llama-3.1-8b-rtx-4090-64gib.json"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.load(EXAMPLE)


def test_a_training_takes_whole_steps(plan: Plan) -> None:
    p, a_step = plan.prediction, plan.decision.tokens
    one, two = (cost_of(plan, Training(asked)) for asked in (a_step, a_step + 1))
    assert (one.steps, two.steps) == (1, 2)
    assert one.hours == pytest.approx(p.step_seconds / 3600) and one.written_bytes == p.ssd_write_bytes
    assert one.money is one.kwh is one.for_machine is one.for_energy is None


def test_money_is_of_the_machine_its_hours_and_its_energy(plan: Plan) -> None:
    asked = 1000 * plan.decision.tokens
    hours = 1000 * plan.prediction.step_seconds / 3600
    rented = cost_of(plan, Training(asked, Price(0.5, hourly=True)))
    assert rented.money == pytest.approx(0.5 * hours) and rented.kwh is None
    bought = cost_of(plan, Training(asked, Price(2500, hourly=False), watts=400, kwh_price=0.25))
    assert bought.kwh == pytest.approx(0.4 * hours)
    assert bought.money == pytest.approx(2500 + 0.1 * hours) and bought.for_machine == 2500
    assert "2,500 for the machine" in describe_cost(plan, Training(asked, Price(2500, hourly=False)))
    drawn = describe_cost(plan, Training(asked, watts=400))
    assert "kWh" in drawn and "currency" not in drawn


def test_drives_that_do_not_last_are_named(plan: Plan) -> None:
    """Two alike, so each has half of what is written."""
    rating = plan.machine.volumes[0].endurance_bytes
    assert rating and len(plan.machine.volumes) == 2
    a_step = plan.prediction.ssd_write_bytes / 2
    for steps, word in ((rating // a_step, "of the rating"), (rating // a_step + 1, "too short: ")):
        found = cost_of(plan, Training(round(steps) * plan.decision.tokens))
        assert found.worn == pytest.approx(steps * a_step / rating) and found.lasts_hours
        assert (found.worn > 1) == (found.hours > found.lasts_hours) == (word == "too short: ")
        assert word in " ".join(describe_cost(plan, Training(round(steps) * plan.decision.tokens)).split())
    machine = plan.machine.model_copy(
        update={"volumes": tuple(each.model_copy(update={"endurance_bytes": None}) for each in plan.machine.volumes)}
    )
    unknown = plan.model_copy(update={"machine": machine})
    assert cost_of(unknown, Training(10**9)).worn is None
    assert "profile --endurance SIZE" in describe_cost(unknown, Training(10**9))


def test_amounts_are_written_with_their_units() -> None:
    assert [tokens(text) for text in ("1B", "300m", "2.5T", "1e9", "12345", "8k")] == [
        10**9, 3 * 10**8, 25 * 10**11, 10**9, 12345, 8000,
    ]  # fmt: skip
    assert prices("0.79/h, 2500") == (Price(0.79, hourly=True), Price(2500.0, hourly=False))
    assert watts("450W,1.2 kW") == (450.0, 1200.0) and power_price("0.30/kWh") == 0.3
    for read, wrong in (
        (tokens, ("0", "B", "1Q", "-1", "1e99", "nan")),
        (prices, ("1/d", "", "0", "-1/h", "1,,2", "nan")),
        (watts, ("450", "W", "0W", "450V", "inf W")),
        (power_price, ("0.3", "0.3/h", "0/kWh")),
    ):
        for text in wrong:
            with pytest.raises(UsageError):
                read(text)


def test_commands_say_what_a_training_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    what_if = ["solve", "--model", "smollm2-135m", "--gpu", "rtx-4090", "--ssd", "samsung-990-pro", "--host-memory"]
    what_if += ["256MiB", "--device-memory", "1GiB", "--sequence-length", "256", "--micro-batch-sizes", "1"]
    what_if += ["--micro-batches", "1"]
    paid = ["--tokens", "1B", "--price", "0.5/h", "--power", "400W", "--power-price", "0.25/kWh"]
    assert cli.main([*what_if, *paid, "-o", "plan.json"]) == 0
    brief = capsys.readouterr().out
    assert cli.main(["show", "plan.json", *paid]) == 0
    shown = capsys.readouterr().out
    found = cost_of(Plan.load(Path("plan.json")), Training(10**9, Price(0.5, hourly=True), 400, 0.25))
    assert found.steps == 3_906_250
    for text in (brief, shown):
        assert (
            f"1 billion tokens: {found.hours:,.0f} hours" in text
            and f"{found.money:,.0f} in --price's currency" in text
        )
    swept = [*what_if, "--tokens", "1B", "--price", "0.5/h,1/h", "--sweep", "ssds=1,2"]
    assert cli.main([*swept, "--json"]) == 0
    raw = json.loads(capsys.readouterr().out)
    first, second = (point["result"] for point in raw["points"])
    assert raw["tokens"] == 10**9 and first["hours"] == pytest.approx(found.hours) and first["worn"] > 0
    assert first["cost"] == pytest.approx(0.5 * first["hours"]) and second["cost"] == pytest.approx(second["hours"])
    assert cli.main(swept) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("hours", "cost", "worn", "1 billion tokens"))
    assert all(len(line) <= 100 for line in table.splitlines())
    for wrong, why in (
        ([*what_if, "--price", "1/h"], "--price: is of a training"),
        ([*what_if, "--tokens", "1B", "--power-price", "1/kWh"], "say that with --power"),
        ([*what_if, "--tokens", "1B", "--price", "1/h,2/h"], "2 are given, and there is one plan"),
        ([*what_if, "--tokens", "1B", "--json"], "nothing is said of a training"),
        (["show", "plan.json", "--tokens", "1B", "--json"], "nothing is said of a training"),
        (["show", "plan.json", "--tokens", "1B", "--prefetch-table"], "leave out --tokens"),
    ):
        assert cli.main(wrong) == UsageError.exit_code
        assert why in capsys.readouterr().err
