"""What TensorBoard and Weights & Biases get is what metrics.jsonl has, and neither can end or change a run.

Event files are read by TensorBoard's own reader. A stand-in that keeps the package's calls takes the place of wandb, so
nothing is sent anywhere.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.metrics.event_file import EventFile
from ssdplan.executor.metrics.metrics import MetricsFile, cut_back, tagged, write_report
from ssdplan.executor.metrics.reporting import Reporting, Reports
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.executor.snapshots.resume import reopened
from ssdplan.executor.train import train
from ssdplan.plans.analysis.report import Compared
from ssdplan.plans.documents.metrics import StepMetrics
from ssdplan.plans.errors import UsageError
from ssdplan.plans.files import Folder
from ssdplan.plans.views.report_text import describe_report
from tests.executor.runs import LENGTH, prepare
from tests.made.plans import make_plan


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"), layers=2)


class FakeWandb:
    """The calls of wandb 0.31 that are made, and what its server would have."""

    def __init__(self) -> None:
        self.history: dict[str, dict[int, dict[str, float]]] = {}
        self.inits: list[dict[str, Any]] = []
        self.exit_codes: list[int] = []
        self.fails_at: int | None = None

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802 - the package's name
        return settings

    def init(self, **options: Any) -> "FakeRun":
        self.inits.append(options)
        if options["project"] == "locked":
            raise RuntimeError("api_key not configured (no-tty)\nsecond line")
        return FakeRun(self, self.history.setdefault(options["id"], {}))


class FakeRun:
    def __init__(self, package: FakeWandb, rows: dict[int, dict[str, float]]) -> None:
        self._package, self._rows = package, rows
        self.step = max(rows, default=-1) + 1

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= self.step, "it would drop this step"
        if step == self._package.fails_at:
            raise ConnectionError("no network")
        self.step = step
        self._rows.setdefault(step, {}).update(values)

    def finish(self, exit_code: int) -> None:
        self._package.exit_codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch) -> FakeWandb:
    package = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", package)  # type: ignore[arg-type]
    return package


class Killed(Exception):  # noqa: N818 - it stands for a crash
    pass


def run(directory: Path, out: Path, reports: Reports, *, at: int | None = None, notes: list[str] | None = None) -> Any:
    """Six steps with a snapshot after every second; with `at` it dies behind that step. Goes on if it was begun."""
    model = open_model(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, alpha=0.3, optimizer=0.37, parameters=0.5)

    def step(metrics: StepMetrics) -> None:
        if metrics.step == at:
            raise Killed

    def go(kept: Any = None) -> Any:
        return train(
            plan,
            model,
            EmulatedDevice(),
            data=directory / "text.txt",
            eval_data=directory / "held-out.txt",
            out=out,
            recipe=Recipe(steps=6, optimizer=AdamW(lr=1e-3), eval_every=3, snapshot_every=2),
            watch=Watch(step=step, note=([] if notes is None else notes).append),
            reports=reports,
            resume=kept,
            options={"lr": "1e-3"},
        )

    if not (out / "run.json").exists():
        return go()
    with reopened(out) as kept:
        return go(kept)


def metrics_of(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), as metrics.jsonl has them."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        step, values = tagged(json.loads(line))
        for name, value in values.items():
            found.setdefault(name, []).append((step, value))
    return found


def events_of(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), as TensorBoard reads them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(directory), size_guidance={reader.SCALARS: 0})
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def same_curves(one: dict[str, list[tuple[int, float]]], other: dict[str, list[tuple[int, float]]]) -> None:
    """To the bit of fp32."""
    assert one.keys() == other.keys()
    for name, points in one.items():
        rounded = [(step, float(torch.tensor(value, dtype=torch.float32))) for step, value in points]
        assert rounded == other[name], name


def test_a_run_that_dies_and_goes_on_is_one_curve_in_both(directory, tmp_path, wandb):
    expected = run(directory, tmp_path / "quiet", Reports())
    out, reports = tmp_path / "run", Reports(Path("tensorboard"), "team/project")
    with pytest.raises(Killed):
        run(directory, out, reports, at=5)
    assert wandb.exit_codes == [1]
    result = run(directory, out, reports)
    assert result.losses == expected.losses and wandb.exit_codes == [1, 0]
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in (out, tmp_path / "quiet")]
    assert weights[0] == weights[1]
    # Steps 5 and 6 were done twice, and 5 was told twice; the readers have each once, in order.
    metrics = metrics_of(out)
    assert [step for step, _ in metrics["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in metrics["held_out/eval_loss"]] == [0, 3, 6]
    assert len(list((out / "tensorboard").iterdir())) == 2
    ((identity, rows),) = wandb.history.items()
    assert json.loads((out / "run.json").read_text())["wandb"] == identity
    for name in ("train/loss", "train/grad_norm", "train/lr"):
        assert metrics[name] == [(step, row[name]) for step, row in rows.items() if name in row]
    first, second = wandb.inits
    assert (first["entity"], first["project"], first["name"]) == ("team", "project", "run")
    assert (first["resume"], second["resume"]) == (None, "allow") and first["config"] == {"lr": "1e-3"}
    same_curves(metrics, events_of(out / "tensorboard"))


def test_events_that_are_first_asked_for_on_resume_begin_with_the_first_step(directory, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run(directory, out, Reports(), at=3)
    elsewhere = tmp_path / "logs" / "one"
    run(directory, out, Reports(elsewhere))
    same_curves(metrics_of(out), events_of(elsewhere))
    with pytest.raises(UsageError, match="another run"):
        run(directory, tmp_path / "other", Reports(elsewhere))
    assert not (tmp_path / "other").exists()


def test_what_fails_on_the_way_is_told_and_left(directory, tmp_path, wandb):
    wandb.fails_at = 2
    notes: list[str] = []
    result = run(directory, tmp_path / "run", Reports(Path("events"), "project"), notes=notes)
    assert len(result.losses) == 6 and [len(rows) for rows in wandb.history.values()] == [2]
    told = [note for note in notes if "Weights & Biases" in note]
    assert len(told) == 2 and "no network; the run goes on" in told[0] and "before step 2" in told[1]
    same_curves(metrics_of(tmp_path / "run"), events_of(tmp_path / "run" / "events"))


def test_a_drive_that_fails_takes_only_the_events(tmp_path, monkeypatch):
    events = EventFile(tmp_path / "events", step=0, resumed=False)
    monkeypatch.setattr(events, "_file", SimpleNamespace(name="events", write=lambda record: 7, close=lambda: None))
    notes: list[str] = []
    with Reporting([events], notes.append) as reporting, MetricsFile(Folder(tmp_path), reporting.write) as file:
        for step in (1, 2):
            file.write_evaluation(step, 1.0)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2
    assert len(notes) == 2 and "only 7 of" in notes[0] and "before step 1" in notes[0]


def test_what_cannot_begin_is_refused_before_the_first_step(directory, tmp_path, wandb, monkeypatch):
    with pytest.raises(UsageError, match=r"^--wandb locked: api_key not configured \(no-tty\); run wandb login"):
        run(directory, tmp_path / "run", Reports(tmp_path / "logs", "locked"))
    assert not (tmp_path / "run").exists() and not list((tmp_path / "logs").iterdir()), "it may be tried again"
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="no event file can be made there"):
        run(directory, tmp_path / "run", Reports(tmp_path / "file" / "events"))
    for module in (None, SimpleNamespace()):  # not installed; a directory that happens to be called so
        monkeypatch.setitem(sys.modules, "wandb", module)
        with pytest.raises(UsageError, match=r"pip install wandb \(or ssdplan\[wandb\]\)"):
            Reports(wandb="project").require_packages()
    Reports(Path("events")).require_packages()


def test_numbers_of_any_size_are_events(tmp_path):
    lines: list[dict[str, Any]] = [
        {"step": 1, "loss": 1e39, "grad_norm": None, "lr": 0.0, "tokens": 127, "skipped": True},
        {"step": 1 << 39, "loss": -1e-30, "grad_norm": 3.5, "lr": 1e-5, "tokens": 1 << 40, "skipped": False},
    ]
    events = EventFile(tmp_path, step=0, resumed=False)
    for line in lines:
        events.write(line)
    events.close(failed=False)
    found = events_of(tmp_path)
    assert found["train/loss"] == [(1, math.inf), (1 << 39, float(torch.tensor(-1e-30)))]
    assert found["train/grad_norm"] == [(1 << 39, 3.5)] and found["train/tokens"] == [(1, 127.0), (1 << 39, 2.0**40)]
    assert found["train/skipped"] == [(1, 1.0), (1 << 39, 0.0)]


def test_every_number_of_a_step_has_a_name_in_a_group():
    fields = [name for name in StepMetrics.__dataclass_fields__ if name != "step"]
    _, values = tagged({"step": 1, **dict.fromkeys(fields, 2)})
    assert [name.rpartition("/")[2] for name in values] == fields and all("/" in name for name in values)


def test_a_report_of_what_was_not_finite_is_json_and_can_be_read(tmp_path: Path) -> None:
    """As of a step of fp16 whose loss overflowed, and of what was predicted to be nothing."""
    path = tmp_path / "report.json"
    compared = [Compared("ssd_read_bytes", "B", 0.0, 5.0), Compared("step_seconds", "s", 2.0, 3.0)]
    more = {"model": "made", "steps": 2, "steady_steps": 1, "losses": [math.inf, 2.5], "eval_losses": {"2": math.nan}}
    write_report(Folder(tmp_path), compared, more)

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(path.read_text(), parse_constant=refused)
    assert document["losses"] == [None, 2.5] and document["eval_losses"] == {"2": None}
    assert [row["relative_error"] for row in document["predictions"]] == [None, 0.5]
    text = describe_report(path)
    assert "training loss  not finite first, 2.5000 last" in text and "held-out loss  not finite after 2 steps" in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("  s")] == ["-", "+50.0%"]


def test_a_held_out_loss_that_was_not_finite_is_a_number_again_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(Folder(tmp_path)) as file:
        file.write_evaluation(0, math.inf)
    path.write_text(path.read_text() + '{"step": 1, "loss": 2.0}\n')
    history = cut_back(Folder(tmp_path), 1)
    assert history.losses == [2.0] and math.isnan(history.eval_losses[0])
    assert f"{history.eval_losses[0]:.4f}" == "nan", "as the run said it before"
