"""Plots are written, of the promised size and in time; and what they draw is what the plan says."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from ssdplan.planner.predict.simulator import simulate
from ssdplan.plans.analysis.memory_usage import Usage, memory_usage
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.graph.ops import Schedule
from ssdplan.plans.graph.timeline import Timeline
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.views.plots import plan_plots as plots
from ssdplan.plans.views.plots.plan_plots import SIZE_INCHES, draw_memory, draw_throughput, draw_timeline, write_plots
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import made_machine, made_model

NAMES = ["memory.png", "timeline.png", "throughput.png"]


def _made(blocks: int, micro_batches: int, *, hidden: int = 64, name: str = "made") -> tuple[Plan, Schedule, Timeline]:
    model = made_model(blocks=blocks, hidden=hidden).model_copy(update={"name": name})
    decision = decide(
        model, alpha=0.25, optimizer=0.3, parameters=0.5, checkpoints=1.0, micro_batches=micro_batches, chunk=1 << 13
    )
    schedule = build_schedule(model, decision)
    machine = made_machine()
    timeline = simulate(schedule.steady, model, machine, 1)
    return planned(model, machine, decision, schedule), schedule, timeline


def _legend(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    assert legend is not None
    return [entry.get_text() for entry in legend.get_texts()]


def _check(paths: list[Path], directory: Path) -> None:
    assert [path.name for path in paths] == NAMES
    assert sorted(path.name for path in directory.iterdir()) == sorted(NAMES)
    for path in paths:
        image = imread(path)
        assert image.shape[:2] == (SIZE_INCHES[1] * 100, SIZE_INCHES[0] * 100)
        assert 1200 <= image.shape[1] <= 1600
        ink = (image[..., :3].min(axis=2) < 0.95).mean()
        assert 0.005 < ink < 0.9  # not a blank page


def test_plots_are_written(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "yet"
    _check(write_plots(*_made(16, 8), directory), directory)


def test_every_graph_and_every_size(tmp_path: Path) -> None:
    """The flush of a plan that delays nothing has no operations at all; three layers need no enlargement."""
    plan, schedule, _ = _made(1, 1, name="$dollars$ and \n 模型")
    for graph in (schedule.first, schedule.flush, schedule.evaluate):
        timeline = simulate(graph, plan.model, plan.machine, 1)
        _check(write_plots(plan, schedule, timeline, tmp_path), tmp_path)
    empty = Timeline(build_schedule(plan.model, decide(plan.model)).flush, (), ())
    _check(write_plots(plan.model_copy(update={"alternatives": ()}), schedule, empty, tmp_path), tmp_path)


def test_plots_repeat_to_the_bit(tmp_path: Path) -> None:
    made = _made(4, 2)
    first, second = write_plots(*made, tmp_path / "a"), write_plots(*made, tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_large_step_draws_in_time(tmp_path: Path) -> None:
    plan, schedule, timeline = _made(96, 26)
    assert len(timeline.graph.ops) > 25_000
    start = time.process_time()
    _check(write_plots(plan, schedule, timeline, tmp_path), tmp_path)
    assert time.process_time() - start < 20  # a few seconds alone; the checks and a busy machine included


def test_memory_shows_reserved_budget_and_roles() -> None:
    plan, schedule, timeline = _made(16, 8)
    close = plan.decision.model_copy(update={"host_budget_bytes": int(schedule.arenas["host"] * 1.2)})
    figure = draw_memory(plan.model_copy(update={"decision": close}), schedule, timeline)
    host, device = figure.axes
    words = _legend(host)
    assert words[:2] == ["reserved for the whole run", "budget"]
    assert {"parameters", "optimizer states", "checkpoints", "delayed gradients"} <= set(words)
    heights = {float(np.asarray(line.get_ydata())[0]) for line in host.lines}
    assert schedule.arenas["host"] / (1 << 20) in heights
    assert "far above" in device.get_title(loc="left") and "far above" not in host.get_title(loc="left")
    assert host.get_xlim() == (0, timeline.seconds)


def test_timeline_shows_every_resource_and_kind() -> None:
    plan, schedule, timeline = _made(16, 8)
    figure = draw_timeline(plan, schedule, timeline)
    whole, part = figure.axes
    labels = [entry.get_text() for entry in whole.get_yticklabels()]
    busy = timeline.busy()
    assert labels[0].split() == ["ssd", "read", f"{busy['read'] / timeline.seconds:.0%}"]
    assert _legend(whole) == [work for work in plots.WORK_COLOURS if work != "perturb"]
    backward = min(s for op, s in zip(timeline.graph.ops, timeline.starts, strict=True) if "backward" in str(op))
    assert part.get_xlim()[0] < backward < part.get_xlim()[1]
    assert {note.get_text() for note in part.texts} == {"forward", "backward"}


def test_shares_of_time_are_exact() -> None:
    """Two works of a quarter of a column each, whatever lies across its edges."""
    edges = np.linspace(0.0, 4.0, 5)
    busy = plots._elapsed([0.5, 1.5, 3.25], edges) - plots._elapsed([0.75, 2.5, 3.5], edges)
    assert np.diff(busy).tolist() == [0.25, 0.5, 0.5, 0.25]


def test_thinning_keeps_the_peak() -> None:
    """A spike shorter than a pixel is still drawn."""
    count = 40_000
    values = np.full(count, 100)
    values[12_345] = 900
    times = tuple(float(t) for t in range(count + 1))
    drawn, alive = plots._columns(Usage("host", 1000, times, {"gradients": tuple(values.tolist())}))
    assert len(drawn) == plots.COLUMNS + 1 and alive["gradients"].max() == 900
    assert (alive["gradients"] == 900).sum() == 1


def test_thinning_agrees_with_the_usage() -> None:
    _, schedule, timeline = _made(16, 8)
    for usage in memory_usage(schedule, timeline).values():
        _, alive = plots._columns(usage)
        assert np.sum(list(alive.values()), axis=0).max() == usage.peak_bytes


def test_throughput_marks_the_plan() -> None:
    plan, _, _ = _made(16, 8)
    axes = draw_throughput(plan).axes[0]
    words = _legend(axes)
    assert words[:3] == ["this plan", "micro-batches of 1 sequence", "micro-batches of 2 sequences"]
    stars = [tuple(np.asarray(offsets)) for c in axes.collections for offsets in np.asarray(c.get_offsets())]
    assert (8.0, plan.prediction.tokens_per_second) in stars
    assert axes.get_ylim()[1] > plan.alternatives[0].compute_tokens_per_second


def test_a_roofline_far_above_does_not_flatten_the_curves() -> None:
    plan, _, _ = _made(16, 8)
    high = tuple(e.model_copy(update={"compute_tokens_per_second": 1e12}) for e in plan.alternatives)
    axes = draw_throughput(plan.model_copy(update={"alternatives": high})).axes[0]
    assert axes.get_ylim()[1] < 2 * max(e.tokens_per_second for e in high)
    assert any("far above" in note.get_text() for note in axes.texts)


@pytest.mark.parametrize("module", ["views.plots.plan_plots", "views.plan_text", "analysis.memory_usage"])
def test_what_importing_costs(module: str) -> None:
    """Nothing here imports the planner, the executor or torch; only plots needs matplotlib, and not its pyplot."""
    code = f"import sys, ssdplan.plans.{module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "matplotlib.pyplot", "ssdplan.planner", "ssdplan.executor", "ssdplan.profiler"} & set(loaded)
    assert ("matplotlib" in loaded) == (module == "views.plots.plan_plots")
