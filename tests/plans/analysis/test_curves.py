"""A run's curves: read from whatever a run left, thinned without a false figure, shown in text and pictures."""

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.plans.analysis.curves import EVERY, Curves, read_curves, thinned
from ssdplan.plans.documents.metrics import StepMetrics
from ssdplan.plans.errors import UsageError
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.curves_text import Standing, describe_curves, figures
from ssdplan.plans.views.plots.curves_plot import draw_curves, write_curves_plot
from ssdplan.plans.views.quantities import duration, loss_figure, number
from ssdplan.plans.views.tables import COLUMNS
from tests.extent import examples
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import made_machine, made_model, made_volume
from tests.plans.read_csv import cell, written_and_read

MODEL = made_model(blocks=2, hidden=64)
DECISION = decide(MODEL)
SCHEDULE = build_schedule(MODEL, DECISION)
PLAN = planned(MODEL, made_machine(), DECISION, SCHEDULE)


def step_line(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "loss": loss, "grad_norm": 2.0, "lr": 1e-4, "tokens": 128, "step_seconds": 0.5,
        "tokens_per_second": 256.0, "ssd_read_bytes": 1, "ssd_write_bytes": 1, "host_peak_bytes": 1,
        "device_peak_bytes": 0, "process_peak_bytes": 1, "loss_scale": 1.0, "skipped": False,
        "ssd_written_bytes": 1000 * step, **more,
    }  # fmt: skip


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def standing(**more: Any) -> Standing:
    return Standing(**{"directory": "run", "steps": 100, "done": False, "snapshots": True, "now": time.time(), **more})


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What a run writes that is killed and goes on from its last snapshot, as if nothing had been cut back."""
    lines: list[dict[str, Any]] = []
    behind = snapshot = 0
    for _ in range(draw(st.integers(1, 4))):
        if lines:
            behind = snapshot
            lines.append({"step": behind, "resume_seconds": 1.5})
        for _ in range(draw(st.integers(1, 12))):
            behind += 1
            loss = draw(st.one_of(st.none(), st.floats(-10, 1e6)))
            lines.append(step_line(behind, loss, skipped=loss is None))
            if draw(st.booleans()):
                snapshot = behind
                lines.append({"step": behind, "snapshot_seconds": 0.1, "snapshot_bytes": 10, "flush_seconds": 0.0})
            if draw(st.booleans()):
                lines.append({"step": behind, "eval_loss": draw(st.floats(0, 10))})
    return lines


@settings(max_examples=examples(60), deadline=None)
@given(histories())
def test_a_step_that_was_done_again_counts_once(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    curves = read_curves(written(path, lines))
    # Lines taken one by one; one that goes on takes away what is behind it.
    steps: dict[int, dict[str, Any]] = {}
    held_out: dict[int, float] = {}
    snapshots: list[int] = []
    for line in lines:
        if "resume_seconds" in line:
            steps = {step: kept for step, kept in steps.items() if step <= line["step"]}
            held_out = {step: kept for step, kept in held_out.items() if step <= line["step"]}
            snapshots = [step for step in snapshots if step <= line["step"]]
        elif "loss" in line:
            steps[line["step"]] = line
        elif "eval_loss" in line:
            held_out[line["step"]] = line["eval_loss"]
        else:
            snapshots.append(line["step"])
    assert list(curves.steps) == list(steps) == list(range(1, len(steps) + 1))
    for found, line in zip(curves.of("loss"), steps.values(), strict=True):
        assert found == line["loss"] or (math.isnan(found) and line["loss"] is None)
    assert curves.held_out.to_dict() == held_out and list(curves.held_out.index) == list(held_out)
    assert list(curves.snapshots.index) == snapshots
    assert list(curves.skipped) == [step for step, line in steps.items() if line["skipped"]]
    text = describe_curves(curves, PLAN, standing())
    assert max(map(len, text.splitlines())) <= 100 and f"{len(steps)} of 100 steps" in text


def told(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


@settings(max_examples=examples(60), deadline=None)
@given(histories(), st.data())
def test_figures_are_those_of_the_steps_told_one_by_one(tmp_path_factory, lines, data):
    """Medians, quantiles and extremes, by plain Python."""
    for line in lines:
        if "loss" in line:
            line |= {
                name: data.draw(st.none() | st.floats(1e-6, 1e6))
                for name in ("step_seconds", "tokens_per_second", "lr")
            }
    curves = read_curves(written(tmp_path_factory.mktemp("run") / "m", lines))
    found = {name: value for name, value in figures(curves, PLAN) if name}
    steps = {line["step"]: line for line in lines if "loss" in line}
    steps = {step: steps[step] for step in curves.steps}
    of = {name: [line[name] for line in steps.values()] for name in ("loss", "step_seconds", "tokens_per_second", "lr")}
    if losses := told(of["loss"]):
        assert found["loss"] == f"{loss_figure(losses[0])} first, {loss_figure(losses[-1])} last"
        lowest = next(step for step, line in steps.items() if line["loss"] == min(losses))
        assert f"{loss_figure(min(losses))} lowest, in step {lowest:,}" in [value for _, value in figures(curves, PLAN)]
    if speed := told(of["tokens_per_second"]):
        every = f"median of all {len(steps)} steps" if len(steps) > 1 else "in the one step"
        assert found["tokens a second"].startswith(f"{number(median(speed))} {every}; ")
    if seconds := told(of["step_seconds"]):
        low, middle, high = (duration(one_of_ten(seconds, tenth)) for tenth in (1, 5, 9))
        spread = f" median of all {len(steps)}; four of five take {low} to {high}" if len(steps) > 1 else ""
        assert found["a step"] == f"{middle}{spread}"
        assert curves.by_step["step_seconds"].sum() == pytest.approx(sum(seconds), rel=1e-12)
    if rates := told(of["lr"]):
        assert found["learning rate"] == f"{rates[-1]:.3g} last, {max(rates):.3g} at most"


def one_of_ten(values: list[float], tenth: int) -> float:
    """The quantile between the two values that lie around it, by their distance."""
    place = (len(values) - 1) * tenth / 10
    low, high = sorted(values)[math.floor(place)], sorted(values)[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


@settings(max_examples=examples(60), deadline=None)
@given(histories())
def test_the_table_has_what_the_lines_say(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("run")
    curves = read_curves(written(folder / "metrics.jsonl", lines), EVERY)
    found = written_and_read(curves.table(), folder / "table.csv")
    told = [line for line in lines if "loss" in line]
    steps = {step: next(line for line in reversed(told) if line["step"] == step) for step in curves.steps}
    costs = {line["step"]: line for line in lines if "snapshot_seconds" in line}
    assert [line["step"] for line in found] == [str(step) for step in sorted({*steps, *curves.resumed})]
    for line in found:
        step = int(line["step"])
        for name, value in steps.get(step, {}).items():
            assert line[name] == cell(value), name
        assert line["eval_loss"] == cell(curves.held_out.get(step))
        taken = costs[step] if step in curves.snapshots.index else {}
        assert [line[name] for name in ("snapshot_seconds", "snapshot_bytes")] == [
            cell(taken.get(name)) for name in ("snapshot_seconds", "snapshot_bytes")
        ]
        assert line["resumed"] == str(step in curves.resumed)
    fields = [each.name for each in dataclasses.fields(StepMetrics)]
    assert list(found[0]) == [*fields, "eval_loss", "snapshot_seconds", "snapshot_bytes", "resumed"]


def test_a_table_says_nothing_that_no_line_says(tmp_path):
    """An evaluation before the first step has a row; a number that is too large to be whole stays what it is."""
    lines = [{"step": 0, "eval_loss": 4.5}, {"step": 1, "loss": 2.0, "tokens": 1e300}, {"step": 2, "loss": None}]
    table = read_curves(written(tmp_path / "m", lines), EVERY).table()
    found = written_and_read(table, tmp_path / "table.csv")
    assert [(line["step"], line["loss"], line["eval_loss"]) for line in found] == [
        ("0", "", "4.5"), ("1", "2.0", ""), ("2", "", ""),
    ]  # fmt: skip
    assert [line["tokens"] for line in found] == ["", "1e+300", ""] and found[0]["skipped"] == ""
    assert written_and_read(Curves().table(), tmp_path / "none.csv") == []


@pytest.mark.parametrize("name", ["host_peak_bytes", "stolen_seconds", "loss"])
def test_numbers_that_are_asked_for_are_checked(tmp_path, name):
    path = written(tmp_path / "m", [step_line(1, 2.0), step_line(2, 2.0) | {name: "low"}])
    with pytest.raises(UsageError, match=f":2: `{name}` is no number"):
        read_curves(path, EVERY)
    if name != "loss":
        assert read_curves(path).last == 2, "what nobody asked for is not looked at"


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    lines = [step_line(1, 3.5), {"step": 1, "eval_loss": 3.25}, step_line(2, 3.0)]
    whole = written(tmp_path / "metrics.jsonl", lines).read_bytes()
    begins = whole.rindex(b'{"step": 2')
    for end in range(begins, len(whole)):
        (tmp_path / "cut.jsonl").write_bytes(whole[:end])
        curves = read_curves(tmp_path / "cut.jsonl")
        assert list(curves.steps) == [1] and curves.held_out.to_dict() == {1: 3.25}, end
    # What a power cut leaves: room for lines that never came.
    (tmp_path / "cut.jsonl").write_bytes(whole + b"\0" * 4096)
    assert read_curves(tmp_path / "cut.jsonl").last == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "2: not a line of a run's metrics: not valid JSON"),
        (b"\xff\xfe", "2: not a line"),
        (b"[" * 30000, "2: not a line"),
        (b"[]", "no object"),
        (b"{}", "no `step`"),
        (b'{"step": -1, "loss": 1}', "no `step`"),
        (b'{"step": true, "loss": 1}', "no `step`"),
        (b'{"step": 2, "loss": "low"}', "2: `loss` is no number"),
        (b'{"step": 2, "loss": 1, "lr": [1]}', "2: `lr` is no number"),
        (b'{"step": 2, "eval_loss": ' + b"9" * 400 + b"}", "2: `eval_loss` is out of range"),
        (b'{"step": 2, "loss": ' + b"9" * 5000 + b"}", "2: not a line"),
        (b"x" * (1 << 16), "2: longer than any line"),
    ],
)
def test_what_no_run_wrote_is_refused_by_its_line(tmp_path, line, says):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json.dumps(step_line(1, 2.0)).encode() + b"\n" + line + b"\n")
    with pytest.raises(UsageError) as refused:
        read_curves(path)
    assert str(refused.value).startswith(f"{path}:") and says in str(refused.value)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.one_of(st.just(math.nan), st.just(math.inf), st.floats(-1e3, 1e3)), max_size=200), st.integers(1, 40)
)
def test_thinned_curves_say_nothing_false(values, most):
    steps = list(range(1, len(values) + 1))
    thin = thinned(steps, np.asarray(values, dtype=float), most)
    finite = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    assert len(thin.step) == min(most, len(finite))
    if finite:
        parts = np.array_split(np.arange(len(finite)), len(thin.step))
        assert min(thin.low) == min(value for _, value in finite)
        assert max(thin.high) == max(value for _, value in finite)
        sizes = [part.size for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert (thin.low <= thin.mean + 1e-9).all() and (thin.mean <= thin.high + 1e-9).all()
        assert (np.diff(thin.step) > 0).all()
        at = 0
        for place, size in enumerate(sizes if len(set(sizes)) == 1 else []):
            mine = [value for _, value in finite[at : at + size]]
            assert (thin.low[place], thin.high[place]) == (min(mine), max(mine))
            assert thin.mean[place] == pytest.approx(math.fsum(mine) / size, rel=1e-12, abs=1e-12)
            at += size
    if len(finite) <= most:
        assert list(thin.mean) == [value for _, value in finite]


def _noisy(count: int) -> Iterator[dict[str, Any]]:
    for step in range(1, count + 1):
        yield step_line(step, 4.0 / step**0.1 + 0.1 * math.sin(step * 12.9898))


def test_the_text_draws_what_happened(tmp_path):
    lines = [{"step": 0, "eval_loss": 4.0}, *_noisy(400), {"step": 400, "eval_loss": 2.2}]
    curves = read_curves(written(tmp_path / "m", lines))
    text = describe_curves(curves, PLAN, standing(steps=500))
    first, last, lowest = lines[1]["loss"], lines[400]["loss"], min(line["loss"] for line in lines[1:401])
    at = next(line["step"] for line in lines[1:401] if line["loss"] == lowest)
    assert f"{first:.4f} first, {last:.4f} last" in text and f"{lowest:.4f} lowest, in step {at}" in text
    assert "held-out loss       4.0000 after 0 steps, 2.2000 after 400" in text
    assert "400 of 500 steps" in text and "256 median" in text and "400 kB" in text
    drawn = [line.split("|", 1)[1] for line in text.splitlines() if "|" in line][:10]
    # From the upper left to the lower right: the first column's mark is above the last column's.
    rows = [max(row for row, line in enumerate(drawn) if line[at : at + 1] not in ("", " ")) for at in (1, 70)]
    assert rows[0] < rows[1] and drawn[0].startswith("o")


def test_a_run_that_stands_still_is_told_how_to_go_on(tmp_path):
    curves = read_curves(written(tmp_path / "m", [step_line(1, 3.0)]))
    written_at = curves.written_at
    assert "ssdplan run --resume run" not in describe_curves(curves, PLAN, standing(now=written_at + 5))
    assert "is 5 s old" in describe_curves(curves, PLAN, standing(now=written_at + 5))
    assert "ssdplan run --resume run" in describe_curves(curves, PLAN, standing(now=written_at + 500))
    lost = describe_curves(curves, PLAN, standing(now=written_at + 500, snapshots=False))
    assert "no snapshot" in lost and "--resume" not in lost
    assert "it is done" in describe_curves(curves, PLAN, standing(steps=1, done=True))
    assert "0 of 100 steps" in describe_curves(Curves(), PLAN, standing())


@pytest.mark.parametrize(
    "losses", [[None], [None, None], [2.0], [1e30, -1e30], [5.0] * 3, [0.0], [5e-324], [math.pi, None, 1e-9]]
)
def test_any_losses_are_shown_and_drawn(tmp_path, losses):
    lines = [step_line(step, loss, tokens_per_second=None) for step, loss in enumerate(losses, start=1)]
    curves = read_curves(written(tmp_path / "m", lines))
    text = describe_curves(curves, PLAN, standing())
    assert max(map(len, text.splitlines())) <= 100 and f"{len(losses)} of 100 steps" in text
    write_curves_plot(curves, PLAN, tmp_path)
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("most", [1e308, -1e308])
def test_a_number_that_is_about_the_largest_is_drawn(tmp_path, most):
    lines = [step_line(step, 2.0, grad_norm=most if step == 2 else 1.0) for step in range(1, 6)]
    lines += [{"step": 3, "eval_loss": most}]
    write_curves_plot(read_curves(written(tmp_path / "m", lines)), PLAN, tmp_path)
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_the_figures(tmp_path):
    lines = [*_noisy(50), {"step": 25, "eval_loss": 3.0}, {"step": 50, "eval_loss": 2.5}]
    curves = read_curves(written(tmp_path / "m", lines))
    loss, speed, norm, rate = draw_curves(curves, PLAN).axes
    training, held_out = loss.lines[:2]
    assert list(training.get_ydata()) == [line["loss"] for line in lines[:50]]
    assert list(held_out.get_xdata()) == [25, 50] and list(held_out.get_ydata()) == [3.0, 2.5]
    assert set(speed.lines[0].get_ydata()) == {256.0} and set(norm.lines[0].get_ydata()) == {2.0}
    assert set(speed.lines[1].get_ydata()) == {PLAN.prediction.tokens_per_second}
    assert set(rate.lines[0].get_ydata()) == {1e-4}


def test_a_long_run_is_quick(tmp_path):
    curves = written(tmp_path / "m", list(_noisy(50_000)))
    start = time.process_time()
    text = describe_curves(read_curves(curves), PLAN, standing(steps=50_000))
    assert time.process_time() - start < 5
    assert len(text.splitlines()) < 60


def test_the_speed_of_a_run_says_that_it_is_of_all_steps_and_counts_all_positions(tmp_path):
    """Four steps of 1,024 positions, of which 238 are learnt: 2, 4, 5 and 10 s. Medians 4.5 s, and between 1,024 / 5
    and 1,024 / 4."""
    seconds = (2.0, 4.0, 5.0, 10.0)
    lines = [
        {"step": n, "loss": 2.0, "tokens": 238, "step_seconds": s, "tokens_per_second": 1024 / s}
        for n, s in enumerate(seconds, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = figures(read_curves(tmp_path / "metrics.jsonl"), PLAN)
    at = [name for name, _ in found].index("tokens a second")
    assert found[at][1].startswith(f"{(1024 / 5 + 1024 / 4) / 2:.0f} median of all 4 steps; ")
    learnt = f"{(238 / 5 + 238 / 4) / 2:.1f} of them learnt"
    assert found[at + 1][1] == f"of all positions of the rows; {learnt}, not prompts or padding"
    assert dict(found)["a step"].startswith("4.5 s median of all 4; ")


def test_a_run_tells_of_its_store(tmp_path):
    curves = read_curves(written(tmp_path / "metrics.jsonl", [step_line(1, 2.0)]))
    words = ("Its store takes 4.75 GiB, the states of its last snapshots:", "  run/volume-0.ssdplan")
    lines = describe_curves(curves, PLAN, standing(done=True, store=words)).splitlines()
    assert lines.index(words[1]) == lines.index(words[0]) + 1 and "  ssdplan volume drop run --yes" in lines
    text = describe_curves(curves, PLAN, standing(now=curves.written_at + 1e6, dropped=1))
    assert "dropped with the states after step 1; it cannot go on" in text and "--resume" not in text


def test_no_share_of_a_rating_is_told_of_drives_that_were_not_profiled(tmp_path):
    rated = made_volume().model_copy(update={"endurance_bytes": 1_000_000})
    plan = planned(MODEL, made_machine(volumes=(rated,)), DECISION, SCHEDULE)
    curves = read_curves(written(tmp_path / "metrics.jsonl", [step_line(10, 2.0)]))
    assert dict(figures(curves, plan))["written to ssd"] == "10 kB, 1% of what the drive is rated for"
    curves.rated = False
    assert dict(figures(curves, plan))["written to ssd"] == "10 kB"


def test_snapshots_count_among_what_was_written(tmp_path) -> None:
    """Also the last one, behind the last step, and what a report knows besides; a line of an earlier version tells no
    number."""
    lines = [step_line(1, 2.0), {"step": 1, "snapshot_seconds": 0.1, "snapshot_bytes": 500}]
    assert read_curves(written(tmp_path / "earlier.jsonl", lines)).written_bytes == 1000
    lines[1]["ssd_written_bytes"] = 1500
    curves = read_curves(written(tmp_path / "metrics.jsonl", lines))
    assert dict(figures(curves, PLAN))["written to ssd"] == "1.5 kB"
    assert list(curves.table().columns).count("ssd_written_bytes") == 1
    curves.reported_bytes = 2000
    assert dict(figures(curves, PLAN))["written to ssd"] == "2 kB"
    assert Curves().written_bytes == 0


@pytest.mark.parametrize(
    ("newest", "says"),
    [
        (None, ""),
        (0, "It took no snapshot yet, so it begins again: steps 1 to 3, to the same losses."),
        (1, "It goes on from its snapshot after step 1, and makes steps 2 to 3 again."),
        (2, "It goes on from its snapshot after step 2, and makes step 3 again."),
        (3, "It goes on from its snapshot after step 3, and makes no step again."),
    ],
)
def test_a_stopped_run_says_what_is_made_again(tmp_path, newest, says) -> None:
    curves = read_curves(written(tmp_path / "metrics.jsonl", [step_line(step, 2.0) for step in (1, 2, 3)]))
    lines = describe_curves(curves, PLAN, standing(goes_on=False, newest=newest)).splitlines()
    assert "It goes on with: ssdplan run --resume run" in lines
    assert [line for line in lines if "again" in line] == ([says] if says else [])


def test_paths_and_commands_are_never_cut() -> None:
    """People copy them; any other line ends where the page ends."""
    path = "/a" * COLUMNS
    store = ("Its store takes 5 MiB:", f"  {path}/volume-0.ssdplan")
    standing = Standing(path, 8, False, True, 1e9, store, goes_on=False)
    lines = describe_curves(Curves(), PLAN, standing).splitlines()
    assert f"It goes on with: ssdplan run --resume {path}" in lines
    assert f"  {path}/volume-0.ssdplan" in lines and f"  ssdplan volume drop {path} --yes" in lines


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (((0.1, 1 << 20), (0.3, 3 << 20)), "200 ms and 2 MiB each (medians)"),
        (((None, None), (0.3, 3 << 20)), "300 ms and 3 MiB each (medians)"),
        (((0.1, None), (0.3, None)), "; 200 ms each (medians)"),
        (((None, None), (None, None)), "the last after step 2"),
    ],
)
def test_snapshots_whose_cost_is_not_told_have_no_part_in_the_medians(tmp_path, told, words):
    lines = [step_line(1, 2.0), step_line(2, 1.0)]
    for step, (seconds, nbytes) in enumerate(told, 1):
        lines.append({"step": step, "snapshot_seconds": seconds, "snapshot_bytes": nbytes, "flush_seconds": 0.0})
    written(tmp_path / "metrics.jsonl", lines)
    found = dict(figures(read_curves(tmp_path / "metrics.jsonl"), PLAN))
    assert found["snapshots"].endswith(words)
