"""What a person sees of what a plan saves: pairs, shares and bytes by rung and tier, and sums that are right."""

import re
from typing import Literal

import pytest
from rich.cells import cell_len

from ssdplan.plans.documents.plan import Asked, Saved
from ssdplan.plans.documents.profile import Model
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import format_bytes, whole_pages
from ssdplan.plans.views.plan_text import describe_plan
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import made_machine, made_model

RUNGS = ((0.25, 0.5), (1.0, 0.0))
MIXED = (
    Saved(rung="rung-1", tier="host", share=0.25),
    Saved(rung="rung-2", tier="host", share=0.25),
    Saved(rung="rung-2", tier="ssd", share=0.25),
)


def model_of() -> Model:
    return made_model(blocks=4, hidden=128, rungs=RUNGS)


def page_of(asked: Asked | None = None, model: Model | None = None, **choices) -> str:
    """A plan of three micro-batches in four blocks, so of twelve pairs."""
    model = model or model_of()
    decision = decide(model, micro_batches=3, **choices)
    schedule = build_schedule(model, decision)
    plan = planned(model, made_machine(), decision, schedule).model_copy(update={"asked": asked or Asked()})
    return describe_plan(plan, schedule)


def section(page: str, heading: str) -> list[str]:
    found = page.split(f"\n{heading}")[1].split("\n\n")[0]
    return [" ".join(line.split()) for line in found.splitlines()[1:]]


def bytes_of(number: int) -> int:
    """What one pair of a rung keeps: all is 34 bytes a token and hidden unit and byte of an element, in whole pages."""
    return whole_pages(round(RUNGS[number][0] * 34 * 32 * 128 * 2))


def words(pairs: int, number: int) -> str:
    return format_bytes(pairs * bytes_of(number))


@pytest.mark.parametrize("unified", [False, True])
def test_the_decision_says_what_is_saved_where_and_how_much(unified: bool) -> None:
    lines = section(page_of(saved=MIXED, unified=unified), "What it decides")
    assert lines[0] == "schedule vertical, backward recomputes part of a layer's forward"
    assert lines[1:7] == [
        f"saved activations block: rung-1 on host for 25%, 3 of 12 pairs, {words(3, 0)} a step",
        f"block: rung-2 on host for 25%, 3 of 12 pairs, {words(3, 1)} a step",
        f"block: rung-2 on ssd for 25%, 3 of 12 pairs, {words(3, 1)} a step",
        "block: nothing for 3 of 12 pairs, whose whole forward is recomputed",
        "a pair is a layer and a micro-batch",
        "backward recomputes what the rung of a pair does not keep",
    ]


def test_a_share_that_is_rounded_to_no_pair_has_no_line() -> None:
    few = (Saved(rung="rung-1", tier="host", share=0.0005), Saved(rung="rung-2", tier="ssd", share=0.5))
    page = "\n".join(section(page_of(saved=few), "What it decides"))
    assert "rung-1" not in page and "rung-2 on ssd" in page


def test_int8_is_said_of_the_decision() -> None:
    model = model_of()
    int8 = {"format": "int8"}
    classes = tuple(
        entry.model_copy(update={"timings": tuple(
            timing.model_copy(update={"rungs": tuple(rung.model_copy(update=int8) for rung in timing.rungs)})
            for timing in entry.timings)})
        for entry in model.classes
    )  # fmt: skip
    lossy = model.model_copy(update={"classes": classes})
    lines = section(page_of(Asked(activations="int8"), lossy, saved=MIXED), "What it decides")
    assert "some are kept in int8: training is not exact" in lines
    assert "--activations int8 was asked for" in lines
    exact = section(page_of(saved=MIXED), "What it decides")
    assert not any("int8" in line for line in exact)


def test_what_the_device_keeps_has_a_line() -> None:
    page = page_of(saved=(Saved(rung="rung-1", tier="device", share=0.5), Saved(rung="rung-1", tier="ssd", share=0.5)))
    assert f"saved activations block: rung-1 on device for 50%, 6 of 12 pairs, {words(6, 0)} a step" in section(
        page, "What it decides"
    )
    lines = section(page, "Where states live")
    assert f"saved activations - 50% - {words(6, 0)}" in lines
    assert f"and {words(6, 0)} of saved activations, 50%, stay on the device" in lines


def test_the_horizontal_schedule_moves_more_than_it_keeps() -> None:
    """One micro-batch's places are taken by the next one."""
    page = page_of(saved=(Saved(rung="rung-2", tier="ssd", share=0.5),), schedule="horizontal")
    lines = section(page, "What it decides")
    assert f"saved activations block: rung-2 on ssd for 50%, 6 of 12 pairs, {words(6, 1)} a step" in lines
    assert "block: nothing for 6 of 12 pairs, whose whole forward is recomputed" in lines
    assert f"saved activations - 100% - {words(2, 1)}" in section(page, "Where states live")


def test_residency_has_a_row_and_its_sums_are_right() -> None:
    saved, without = (section(page_of(saved=each, checkpoints=0.5), "Where states live") for each in (MIXED, ()))
    on_host, on_ssd = 3 * bytes_of(0) + 3 * bytes_of(1), 3 * bytes_of(1)
    share = on_host / (on_host + on_ssd)
    row = f"saved activations {100 * share:.1f}% {100 * (1 - share):.1f}% {words(3, 0)} {words(3, 1)}"
    row = row.replace(words(3, 0), format_bytes(on_host), 1)
    assert saved[-2] == row and saved[:-2] == without[:-1]
    before, after = (re.findall(r"[\d.]+ [KM]iB", lines[-1]) for lines in (without, saved))
    assert [_bytes(new) - _bytes(old) for old, new in zip(before, after, strict=True)] == pytest.approx(
        [on_host, on_ssd], rel=0.02
    )


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit]


def test_delayed_gradients_share_no_bytes_with_saved_activations() -> None:
    """They lie where checkpoints were, as much as without anything saved."""
    notes = [
        [
            line
            for line in section(page_of(saved=each, alpha=0.5, checkpoints=1.0), "Where states live")
            if "twice" in line
        ]
        for each in (MIXED, ())
    ]
    assert notes[0] == notes[1] and len(notes[0]) == 1


@pytest.mark.parametrize("saved", [(), (Saved(rung="rung-2", tier="host", share=1.0),)])
def test_what_was_asked_for_is_said(saved: tuple[Saved, ...]) -> None:
    recompute: Literal["all", "none"] = "none" if saved else "all"
    page = page_of(Asked(recompute=recompute, wear_price=0.25), saved=saved)
    lines = section(page, "What it decides")
    first = lines.index(f"--recompute {recompute} was asked for")
    assert lines[first + 1] == "--wear-price 0.25 was asked for" and first == (4 if saved else 1)
    assert "asked for" not in page_of(saved=saved)


def test_a_plan_that_saves_nothing_says_nothing_of_it() -> None:
    page = page_of()
    assert "saved activations" not in page
    assert page == page_of(model=made_model(blocks=4, hidden=128)), "rungs that no plan takes change nothing"


def test_long_names_fit() -> None:
    model = model_of()
    timings = {
        entry.name: [
            timing.model_copy(
                update={"rungs": tuple(each.model_copy(update={"name": each.name * 20}) for each in timing.rungs)}
            )
            for timing in entry.timings
        ]
        for entry in model.classes
    }
    classes = tuple(entry.model_copy(update={"timings": tuple(timings[entry.name])}) for entry in model.classes)
    saved = (Saved(rung="rung-1" * 20, tier="host", share=0.123456),)
    page = page_of(model=model.model_copy(update={"classes": classes}), saved=saved)
    assert all(cell_len(line) <= 100 for line in page.splitlines())
    assert any("... on host for 12.3456%, 1 of 12 pairs, " in line for line in section(page, "What it decides"))
