"""A run that was stopped and goes on yields the bits of one that never was, under any plan, from whatever it left.

The oracle is always the run that nobody stopped. tests/executor/snapshots/test_kills.py kills runs at any moment.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ssdplan.executor import sessions as session
from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.device.tensors import DTYPES
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.optimizer.learning_rate import LearningRate
from ssdplan.executor.optimizer.loss_scale import LossScale
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.executor.snapshots.export_run import export_run
from ssdplan.executor.snapshots.resume import Kept, reopened
from ssdplan.executor.snapshots.run_directory import RunDirectory
from ssdplan.executor.snapshots.snapshots import Origin
from ssdplan.executor.store import Locks, check, initialise, inspect
from ssdplan.executor.train import Result, train
from ssdplan.plans.documents.metrics import StepMetrics
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.run import Run
from ssdplan.plans.errors import DiskFullError, MismatchError, StoreError, UsageError
from ssdplan.plans.views.quantities import decimal
from ssdplan.plans.views.report_text import describe_report
from tests.bounds import HANG_SECONDS
from tests.executor.memory.test_migration import (
    ON_DEVICE,
    ON_HOST,
    ON_SSD,
    SPREAD,
    UNIFIED,
    UNIFIED_ON_SSD,
    UPDATED_IN_PART,
    UPDATED_THERE,
    bits,
)
from tests.executor.runs import LENGTH, opened, prepare
from tests.extent import FULL, short_or_full
from tests.made.plans import make_plan

STEPS = 6
RECIPE: dict[str, Any] = {"steps": STEPS, "optimizer": AdamW(lr=1e-3, weight_decay=0.1), "eval_every": 4}


class Stop(Exception):  # noqa: N818 - it stands for a crash
    """What a test stops a run by."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"), layers=2)


def plan_of(directory: Path, choices: dict[str, Any], **more: Any) -> Plan:
    precision = {**choices, **more}.get("precision", "fp32")
    model = opened(directory / "llama", DTYPES[precision])
    return make_plan(model, sequence_length=LENGTH, **{**choices, **more})


def run(
    directory: Path,
    out: Path,
    plan: Plan | None,
    *,
    kept: Kept | None = None,
    at: Callable[[int], None] = lambda step: None,
    notes: list[str] | None = None,
    volumes: tuple[Path, ...] = (),
    anyway: bool = False,
    data: str = "text.txt",
    held_out: str | None = "held-out.txt",
    **recipe: Any,
) -> Result:
    """Train; `at` is called behind every step, with its number."""
    plan = plan or (kept.plan if kept else None)
    assert plan
    model = opened(directory / "llama", DTYPES[plan.decision.precision])

    def step(metrics: StepMetrics) -> None:
        at(metrics.step)

    return train(
        plan,
        model,
        EmulatedDevice(),
        data=directory / data,
        eval_data=directory / held_out if held_out else None,
        out=out,
        recipe=Recipe(**{**RECIPE, **recipe}),
        volumes=volumes,
        watch=Watch(step=step, note=(notes if notes is not None else []).append),
        resume=kept,
        anyway=anyway,
    )


def resume(
    directory: Path, out: Path, plan: Plan | None = None, *, volumes: tuple[Path, ...] = (), **choices: Any
) -> Result:
    with reopened(out, volumes) as kept:
        return run(directory, out, plan, kept=kept, volumes=volumes, **{"snapshot_every": 2, **choices})


def stopping(step: int) -> Callable[[int], None]:
    def at(number: int) -> None:
        if number == step:
            raise Stop

    return at


def stopped(directory: Path, out: Path, plan: Plan, step: int, **choices: Any) -> None:
    with pytest.raises(Stop):
        run(directory, out, plan, at=stopping(step), **{"snapshot_every": 2, **choices})


def same_run(out: Path, result: Result, reference: Path, expected: Result) -> None:
    """Losses, held-out losses, norms and weights to the bit, and one line a step."""
    assert result.losses == expected.losses and result.eval_losses == expected.eval_losses
    name = "model/model.safetensors"
    assert (out / name).read_bytes() == (reference / name).read_bytes()
    lines, others = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (out, reference)
    )
    for field in ("loss", "grad_norm", "lr", "tokens"):
        ours, theirs = ([(line["step"], line[field]) for line in each if field in line] for each in (lines, others))
        assert ours == theirs, field
    report = json.loads((out / "report.json").read_text())
    assert report["losses"] == expected.losses and report["steps"] == len(expected.losses)


@pytest.fixture(scope="module")
def expected(directory, tmp_path_factory) -> tuple[Path, Result]:
    """The run that nobody stops. It takes no snapshots, so these are also seen to change nothing."""
    out = tmp_path_factory.mktemp("expected") / "run"
    return out, run(directory, out, plan_of(directory, SPREAD))


@pytest.mark.parametrize(
    ("keep", "choices"),
    [
        (1, SPREAD),
        (2, ON_SSD),
        (2, ON_HOST),
        (1, UNIFIED),
        (2, UPDATED_THERE),
        (1, UPDATED_IN_PART),
        *([(2, SPREAD), (1, ON_SSD), (1, ON_HOST), (2, UNIFIED)] if FULL else []),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_bits(directory, tmp_path, expected, choices, keep):
    """With its states on ssd, on host alone, or both; stopped twice."""
    out = tmp_path / "run"
    stopped(directory, out, plan_of(directory, choices), 3, keep=keep)
    size = (out / "volume-0.ssdplan").stat().st_size
    with pytest.raises(Stop):
        resume(directory, out, at=stopping(5), keep=keep)
    result = resume(directory, out, keep=keep)
    same_run(out, result, *expected)
    assert (out / "volume-0.ssdplan").stat().st_size == size and len(list(out.glob("*.ssdplan"))) == 1
    assert not check([out], lambda share: None).damaged
    resumed = [line for line in (out / "metrics.jsonl").read_text().splitlines() if "resume_seconds" in line]
    assert [json.loads(line)["step"] for line in resumed] == [2, 4]
    report = json.loads((out / "report.json").read_text())
    assert report["predictions"] and report["steady_steps"] == 1
    assert json.loads((out / "trace.json").read_text())["traceEvents"]


PAIRS = [
    (SPREAD, ON_HOST, {}),
    (ON_HOST, SPREAD, {}),
    (ON_SSD, ON_DEVICE, {"precision": "bf16", "masters": "none", "optimizer_states": "int8"}),
    (ON_DEVICE, ON_SSD, {"precision": "bf16", "optimizer_states": "bf16"}),
    (UNIFIED, UNIFIED_ON_SSD, {}),
    (UPDATED_THERE, SPREAD, {}),
    (ON_SSD, UPDATED_THERE, {"precision": "bf16", "masters": "residual"}),
]


@pytest.mark.parametrize(("first", "second", "common"), PAIRS)
def test_a_run_goes_on_under_another_plan_to_the_same_bits(directory, tmp_path, first, second, common):
    plan, other = (plan_of(directory, choices, **common) for choices in (first, second))
    stayed = run(directory, tmp_path / "stayed", plan)
    out = tmp_path / "run"
    stopped(directory, out, plan, 5)
    result = resume(directory, out, other)
    assert bits(tmp_path / "stayed", stayed)[0] == bits(out, result)[0]
    same_run(out, result, tmp_path / "stayed", stayed)
    assert Plan.load(out / "plan.json") == other and Plan.load(out / "plan-0.json") == plan
    assert not (out / "plan.next.json").exists() and len(list(out.glob("*.ssdplan"))) == 1


def test_a_run_of_a_version_with_fewer_fields_goes_on(directory, tmp_path, expected, monkeypatch):
    """Its plan, and the hash of that in its snapshots, know nothing of fields that came later."""
    out, text = tmp_path / "run", Plan.text

    def older(plan: Plan) -> str:
        document = json.loads(text(plan))
        del document["model"]["freeze"]
        return json.dumps(document, indent=1) + "\n"

    with monkeypatch.context() as before:
        before.setattr(Plan, "text", older)
        stopped(directory, out, plan_of(directory, SPREAD), 3)
    assert "freeze" not in (out / "plan.json").read_text()
    with pytest.raises(Stop):
        resume(directory, out, at=stopping(5))
    same_run(out, resume(directory, out), *expected)


def test_a_run_goes_on_with_more_steps(directory, tmp_path, expected):
    out = tmp_path / "run"
    notes: list[str] = []
    run(directory, out, plan_of(directory, SPREAD), steps=4, snapshot_every=100, notes=notes)
    assert f"after step 4, the last snapshot, are in {out / 'volume-0.ssdplan'}" in notes[-1]
    assert f"--resume {out} --steps" in notes[-1]
    for steps, says in ((4, "larger number"), (3, "has 4 behind it")):
        with pytest.raises(UsageError, match=says):
            resume(directory, out, steps=steps)
    model = (out / "model" / "model.safetensors").read_bytes()
    same_run(out, resume(directory, out), *expected)
    assert (out / "model-4" / "model.safetensors").read_bytes() == model


def test_the_model_of_fewer_steps_never_passes_for_that_of_more(directory, tmp_path, expected):
    """Wherever the run that went on is stopped: its model has another name from then on."""
    out, weights = tmp_path / "run", Path("model.safetensors")
    run(directory, out, plan_of(directory, SPREAD), steps=4, snapshot_every=100)
    model = (out / "model" / weights).read_bytes()
    with pytest.raises(Stop):
        resume(directory, out, at=stopping(5), snapshot_every=100)
    assert (out / "model-4" / weights).read_bytes() == model and not (out / "model").exists()
    resume(directory, out, steps=4)
    assert (out / "model" / weights).read_bytes() == model

    def terminate(step: int) -> None:
        if step == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        resume(directory, out, at=terminate)
    assert not (out / "model").exists()
    same_run(out, resume(directory, out), *expected)
    assert all((out / name / weights).read_bytes() == model for name in ("model-4", "model-4-1"))


@pytest.mark.parametrize("step", [3, 5])
def test_the_loss_scale_and_what_was_skipped_go_on(directory, tmp_path, step):
    """In fp16, between steps that overflow: the scale, the optimizer's count and the learning rate's place are those of
    the run that nobody stopped."""
    plan = plan_of(directory, SPREAD, precision="fp16", alpha=1.0)
    choices = {
        "steps": 8,
        "loss_scale": LossScale(scale=2.0**26, growth_interval=2),
        "learning_rate": LearningRate("cosine", steps=8, warmup_steps=3),
    }
    expected = run(directory, tmp_path / "expected", plan, **choices)
    lines = [json.loads(line) for line in (tmp_path / "expected" / "metrics.jsonl").read_text().splitlines()]
    skipped = [line["step"] for line in lines if line.get("skipped")]
    assert any(number <= step - 1 for number in skipped) and any(number > step for number in skipped)
    out = tmp_path / "run"
    stopped(directory, out, plan, step, **choices)
    result = resume(directory, out, **choices)
    same_run(out, result, tmp_path / "expected", expected)


def test_a_run_that_was_stopped_after_its_last_step_is_exported(directory, tmp_path, expected):
    """Or while it wrote its model: there is no step left to do."""
    out = tmp_path / "run"
    run(directory, out, plan_of(directory, SPREAD), snapshot_every=4)
    (out / "model").rename(out / ".model.partial-5c")
    (out / "report.json").unlink()
    result = resume(directory, out)
    same_run(out, result, *expected)
    assert json.loads((out / "report.json").read_text())["predictions"] == []
    assert not list(out.glob(".model*"))


def test_a_run_stopped_before_its_first_snapshot_begins_again(directory, tmp_path, expected):
    out, notes = tmp_path / "run", []
    stopped(directory, out, plan_of(directory, SPREAD), 3, snapshot_every=100, notes=notes)
    assert "no snapshot was taken yet" in notes[-1] and not list(out.glob("*.ssdplan"))
    (out / "volume-0.ssdplan").write_bytes(b"cut off while it was made")
    for name in ("run.json.4711", "plan-0.json.4711", "config.yaml"):
        (out / f".{name}.tmp").write_text("cut off while it was written")
    same_run(out, resume(directory, out, plan_of(directory, ON_SSD)), *expected)
    assert not list(out.glob(".*.tmp"))


def test_a_run_that_is_stopped_while_it_begins_again_begins_again(directory, tmp_path, expected, monkeypatch):
    """Under another plan, which takes the place of the first at one moment."""
    out, write = tmp_path / "run", RunDirectory._write
    stopped(directory, out, plan_of(directory, SPREAD), 3, snapshot_every=100)

    def cut_off(self: RunDirectory, name: str, text: str) -> None:
        if name == "plan.json":
            raise Stop
        write(self, name, text)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(RunDirectory, "_write", cut_off)
        resume(directory, out, plan_of(directory, ON_SSD))
    same_run(out, resume(directory, out), *expected)


def test_snapshots_are_taken_by_time(directory, tmp_path):
    out = tmp_path / "run"
    stopped(directory, out, plan_of(directory, SPREAD), 3, snapshot_every=0, snapshot_minutes=1e-9)
    with reopened(out) as kept:
        assert kept.step == 2
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    snapshots = [line for line in lines if "snapshot_seconds" in line]
    assert [line["step"] for line in snapshots] == [1, 2]
    plan = plan_of(directory, SPREAD)
    on_host = plan.decision.placement["block"].optimizer_prompt_host
    assert on_host and all(line["snapshot_bytes"] > 0 and line["flush_seconds"] > 0 for line in snapshots)


def test_a_snapshot_writes_what_lives_on_host_and_no_more(directory, tmp_path):
    for name, choices, share in (("ssd", ON_SSD, 0.0), ("host", ON_HOST, 1.0)):
        plan = plan_of(directory, choices)
        run(directory, tmp_path / name, plan, steps=2, snapshot_every=1)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        written = {line["snapshot_bytes"] for line in lines if "snapshot_bytes" in line}
        assert written == {int(share * 12 * sum(state.elements for state in plan.model.states))}


def test_what_a_run_wrote_counts_every_snapshot(directory, tmp_path):
    """The last one too, behind the last step, and those before it went on; and beside it the model."""
    out, plan = tmp_path / "run", plan_of(directory, ON_HOST)
    run(directory, out, plan, steps=2, snapshot_every=1)

    def told() -> tuple[list[dict[str, int]], dict[str, int]]:
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        written = [line for line in lines if "ssd_written_bytes" in line]
        return written, json.loads((out / "report.json").read_text())

    lines, report = told()
    assert ["snapshot_bytes" in line for line in lines] == [False, True, False, True]
    grown = [after["ssd_written_bytes"] - before["ssd_written_bytes"] for before, after in pairwise(lines)]
    assert [grown[0], grown[2]] == [line["snapshot_bytes"] for line in lines[1::2]] and grown[0] > 0
    assert report["ssd_written_bytes"] == lines[-1]["ssd_written_bytes"]
    assert 0 < report["model_bytes"] < (out / "model" / "model.safetensors").stat().st_size
    said = describe_report(out / "report.json")
    assert f"ssd in all  {decimal(report['ssd_written_bytes'])}: loading, steps and snapshots; the model takes " in said
    resume(directory, out, plan, steps=3)
    again, report = told()
    assert again[:4] == lines and again[4]["ssd_written_bytes"] >= lines[-1]["ssd_written_bytes"]
    assert report["ssd_written_bytes"] == again[-1]["ssd_written_bytes"] > lines[-1]["ssd_written_bytes"]


# What is not the same run.


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"optimizer": AdamW(lr=2e-3, weight_decay=0.1)}, "optimizer.lr was 0.001 and is 0.002"),
        ({"seed": 5}, "seed was 0 and is 5"),
        ({"data": "other.txt"}, "the training data changed"),
        ({"held_out": "other.txt"}, "the held-out data changed"),
        ({"plan": {"micro_batches": 3}}, "micro_batches was 2 and is 3"),
        ({"plan": {"micro_batch_size": 1}}, "micro_batch_size was 2 and is 1"),
        ({"plan": {"schedule": "horizontal", "alpha": 0.0}}, "schedule was vertical and is horizontal"),
        ({"plan": {"clip_grad_norm": 0.5, "alpha": 1.0}}, "clip_grad_norm was not given and is 0.5"),
        ({"weights": True}, "the model's weights changed"),
    ],
)
def test_another_run_is_refused_unless_told(directory, tmp_path, change, says):
    home = tmp_path / "home"
    shutil.copytree(directory, home)
    out, notes = tmp_path / "run", []
    stopped(home, out, plan_of(home, SPREAD), 3)
    (home / "other.txt").write_text((home / "text.txt").read_text().replace("fox", "cat"))
    plan = plan_of(home, SPREAD, **change.pop("plan")) if "plan" in change else None
    if change.pop("weights", False):
        file = home / "llama" / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        file.write_bytes(data)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(MismatchError, match="another run") as refused:
        resume(home, out, plan, **change)
    assert says in str(refused.value) and "--resume-anyway" in str(refused.value)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before, "nothing was touched"
    result = resume(home, out, plan, anyway=True, notes=notes, **change)
    assert len(result.losses) == STEPS and any(says in note for note in notes)


INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "default", "instruction_set was ")
PRODUCTS = ("MKL_CBWR", "COMPATIBLE", "MKL_CBWR was not given and is COMPATIBLE")


@pytest.mark.parametrize("changed", short_or_full([(INSTRUCTIONS, PRODUCTS)], [(INSTRUCTIONS,), (PRODUCTS,)]))
def test_what_rounds_otherwise_is_another_run(directory, tmp_path, changed):
    """In a process of its own, since libraries look at the environment once: plain PyTorch's product of two matrices
    has other bits there, or may have."""
    out = tmp_path / "run"
    stopped(directory, out, plan_of(directory, SPREAD), 3)
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.executor.snapshots.test_resume import resume\n"
        "resume(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", code, str(directory), str(out)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **{variable: value for variable, value, _ in changed}}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
    assert ended.returncode and "MismatchError" in ended.stderr, ended.stderr
    assert all(says in ended.stderr for _, _, says in changed), ended.stderr
    resume(directory, out)


def test_a_snapshot_of_a_version_that_did_not_look_says_nothing_of_rounding(directory):
    model = opened(directory / "llama", torch.float32)
    recipe = Recipe(steps=1, optimizer=AdamW(lr=1e-3))
    now = Origin.of(plan_of(directory, SPREAD), model, {}, {}, recipe)
    assert now.numerics["torch"] == torch.__version__
    before = now.model_copy(update={"numerics": {}})
    other = now.model_copy(update={"numerics": {**now.numerics, "torch": "2.0.0"}})
    assert not before.differences(now) and not now.differences(now)
    assert other.differences(now) == [f"torch was 2.0.0 and is {torch.__version__}"]


def test_a_format_that_is_said_is_the_one_that_was_recognised(directory):
    model = opened(directory / "llama", torch.float32)

    def origin(said: str | None, found: str) -> Origin:
        recipe = Recipe(steps=1, optimizer=AdamW(lr=1e-3), data_format=said)
        return Origin.of(plan_of(directory, SPREAD), model, {"format": found}, {}, recipe)

    recognised = origin(None, "messages")
    assert not recognised.differences(origin("messages", "messages"))
    assert not origin("messages", "messages").differences(recognised)
    assert recognised.differences(origin("text", "text")) == [
        "the training data changed",
        "data_format was not given and is text",
    ]


def test_what_of_a_tokenizer_changed_is_named(directory, tmp_path):
    def content(**change: str) -> dict[str, str]:
        tokenizer = load_tokenizer(directory / "llama")
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        for name, value in change.items():
            setattr(tokenizer, name, value)
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps({"messages": [{"role": r, "content": "a"} for r in ("user", "assistant")]}))
        return TextData(path, tokenizer, sequence_length=16, append_eos=True).content

    def told(before: dict[str, str], now: dict[str, str]) -> list[str]:
        model, recipe = opened(directory / "llama", torch.float32), Recipe(steps=1, optimizer=AdamW(lr=1e-3))
        one, other = (Origin.of(plan_of(directory, SPREAD), model, data, {}, recipe) for data in (before, now))
        return [each for each in one.differences(other) if "token" in each or "template" in each]

    first = content()
    assert not told(first, content())
    other = content(chat_template="{% for m in messages %}{{ m.content }}!{% endfor %}")
    assert told(first, other) == ["the chat template changed"]
    assert told(first, content(eos_token="a")) == [
        "the tokenizer changed",
        "the end tokens (generation_config.json) changed",
    ]
    kept = {name: value for name, value in first.items() if name in ("files", "format", "tokenizer")}
    assert told(kept, other) == ["the tokenizer, its chat template or its end tokens changed"]


def test_held_out_data_may_come_and_go(directory, tmp_path):
    """Nothing that was measured before is then beside what it cannot be compared with."""
    out = tmp_path / "run"
    stopped(directory, out, plan_of(directory, SPREAD), 3, held_out=None)
    with pytest.raises(Stop):
        resume(directory, out, at=stopping(5))
    assert len(resume(directory, out, held_out=None).losses) == STEPS


def test_states_of_another_format_are_refused_whatever_is_told(directory, tmp_path):
    out = tmp_path / "run"
    stopped(directory, out, plan_of(directory, SPREAD), 3)
    with pytest.raises(MismatchError, match="solve with --masters fp32 --optimizer-states fp32"):
        resume(directory, out, plan_of(directory, SPREAD, optimizer_states="bf16"), anyway=True)


def test_a_run_without_snapshots_has_nothing_to_go_on_from(directory, tmp_path):
    with pytest.raises(Stop):
        run(directory, tmp_path / "run", plan_of(directory, SPREAD), at=stopping(3))
    with pytest.raises(UsageError, match="--snapshot-every"):
        resume(directory, tmp_path / "run")
    with pytest.raises(UsageError, match="no run"):
        resume(directory, tmp_path)


def test_a_run_that_goes_on_elsewhere_is_refused(directory, tmp_path):
    out = tmp_path / "run"
    stopped(directory, out, plan_of(directory, SPREAD), 3)

    def second(step: int) -> None:
        with pytest.raises(StoreError, match="in use by another run"):
            resume(directory, out)
        raise Stop

    with pytest.raises(Stop):
        resume(directory, out, at=second)


def test_metrics_that_were_tampered_with_are_refused(directory, tmp_path):
    out = tmp_path / "run"
    stopped(directory, out, plan_of(directory, SPREAD), 5)
    text = (out / "metrics.jsonl").read_text()
    lines = [line for line in text.splitlines(keepends=True) if '"step": 2, "loss"' not in line]
    (out / "metrics.jsonl").write_text("".join(lines))
    with pytest.raises(MismatchError, match="losses of 1 steps, the snapshot was taken after 4"):
        resume(directory, out)
    (out / "metrics.jsonl").write_text(text + '{"step": 6, "lo')
    resume(directory, out)


# Volumes.


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("alias", ["link/run", "disk/run/../run"])
def test_a_run_goes_on_by_whatever_names_its_directory_has(directory, tmp_path, expected, alias, named):
    out = tmp_path / "disk" / "run"
    (tmp_path / "link").symlink_to("disk")
    stopped(directory, out, plan_of(directory, SPREAD), 3, volumes=(out,) if named else ())
    again, volumes = (tmp_path / alias, ()) if named else (out, (tmp_path / alias,))
    with pytest.raises(Stop):
        resume(directory, again, at=stopping(5), volumes=volumes)
    assert (out / "volume-0.ssdplan").exists()
    out.parent.rename(tmp_path / "moved")
    out = tmp_path / "moved" / "run"
    same_run(out, resume(directory, out, volumes=(out,)), *expected)
    assert [path.name for path in out.glob("*.ssdplan")] == ["volume-0.ssdplan"]


def test_what_is_not_the_runs_own_stays_in_its_directory(directory, tmp_path, expected):
    """The store of another run, a volume of the user's, and a file that another run is making."""
    first, second, plan = tmp_path / "first", tmp_path / "second", plan_of(directory, SPREAD)
    stopped(directory, first, plan, 3, volumes=(tmp_path / "drive",))
    stopped(directory, second, plan, 3, volumes=(first,))
    initialise(first / "volume-7.ssdplan", 4 << 20, force=False)
    locks = Locks()
    for name in ("volume-8.ssdplan", "volume-9.ssdplan"):
        (first / name).write_bytes(bytes(8192))
    locks.take(first / "volume-9.ssdplan")
    same_run(first, resume(directory, first), *expected)
    locks.close()
    assert sorted(path.name for path in first.glob("*.ssdplan")) == [f"volume-{n}.ssdplan" for n in (0, 7, 9)]
    same_run(second, resume(directory, second), *expected)


def test_of_a_store_that_was_left_the_files_go_and_volumes_stay(directory, tmp_path):
    """Whatever the order of their names: here the user's volume is the store's first, and found last."""
    out, drive = tmp_path / "run", tmp_path / "drive"
    drive.mkdir()
    initialise(drive / "z.ssdplan", 64 << 20, force=False)
    stopped(directory, out, plan_of(directory, ON_SSD), 3, volumes=(drive, drive))
    shutil.copytree(drive, tmp_path / "copy")
    with pytest.raises(Stop):
        resume(directory, out, volumes=(tmp_path / "other",), at=stopping(5))
    came_back(out, tmp_path / "copy", drive)
    resume(directory, out)
    assert [path.name for path in drive.iterdir()] == ["z.ssdplan"]
    (volume,) = inspect([drive])
    assert volume.superblock and volume.superblock.blank


def came_back(out: Path, copy: Path, drive: Path) -> None:
    """What a kill leaves when the states are on another drive, and the store of `drive` is to be cleared."""
    shutil.rmtree(drive, ignore_errors=True)
    left = [drive / path.name for path in copy.iterdir()]
    with RunDirectory.open(out) as opened:
        opened.change(left=left)
    copy.rename(drive)


def test_a_store_that_is_missing_is_not_begun_again(directory, tmp_path, expected, monkeypatch):
    """Though another one of the run is there, which a kill left before it held anything."""
    out, drive, other = tmp_path / "run", tmp_path / "drive", tmp_path / "other"
    stopped(directory, out, plan_of(directory, SPREAD), 3, volumes=(drive,))

    def killed(*arguments: Any) -> None:
        shutil.copytree(other, tmp_path / "copy")
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(session, "carry_over", killed)
        resume(directory, out, volumes=(other,))
    shutil.copytree(tmp_path / "copy", other, dirs_exist_ok=True)
    drive.rename(tmp_path / "away")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(StoreError, match="its store is on none of"):
        resume(directory, out, volumes=(other,))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (tmp_path / "away").rename(drive)
    same_run(out, resume(directory, out), *expected)


def test_an_earlier_store_does_not_pass_for_the_last(directory, tmp_path, expected):
    """A drive that the run moved away from while it was not connected: it is remembered, and cleared when it is back
    beside the other, but never gone on from."""
    out, drive, other = tmp_path / "run", tmp_path / "drive", tmp_path / "other"
    stopped(directory, out, plan_of(directory, SPREAD), 3, volumes=(drive,))
    shutil.copytree(drive, tmp_path / "copy")
    with pytest.raises(Stop):
        resume(directory, out, volumes=(other,), at=stopping(4))
    came_back(out, tmp_path / "copy", drive)
    drive.rename(tmp_path / "away")
    with pytest.raises(Stop):
        resume(directory, out, at=stopping(5))
    assert Run.load(out / "run.json").left == (str(drive / "volume-0.ssdplan"),)
    (tmp_path / "away").rename(drive)
    other.rename(tmp_path / "away")
    with pytest.raises(StoreError, match=r"the last snapshot is of step 4, .* step 2 only; .*--volume"):
        resume(directory, out, volumes=(drive,))
    (tmp_path / "away").rename(other)
    same_run(out, resume(directory, out), *expected)
    assert not list(drive.iterdir()) and Run.load(out / "run.json").left == ()


@pytest.mark.parametrize("part", ["superblock", "table"])
def test_a_run_goes_on_from_the_snapshot_before_one_that_is_damaged(directory, tmp_path, expected, part):
    """Even one that had ended, whose model keeps the number of steps that it is of."""
    out = tmp_path / "run"
    run(directory, out, plan_of(directory, SPREAD), snapshot_every=4)
    model = (out / "model" / "model.safetensors").read_bytes()
    (volume,) = inspect([out])
    assert volume.superblock
    with volume.path.open("r+b") as file:
        file.seek(volume.superblock.table_start if part == "table" else volume.superblock.slot * 4096)
        file.write(b"damaged")
    same_run(out, resume(directory, out), *expected)
    assert (out / f"model-{STEPS}" / "model.safetensors").read_bytes() == model


def test_every_place_that_is_named_gets_its_share(directory, tmp_path, expected):
    out, second = tmp_path / "run", tmp_path / "second"
    stopped(directory, out, plan_of(directory, SPREAD), 3)
    with pytest.raises(Stop):
        resume(directory, out, volumes=(out, second), at=stopping(5))
    stores = {info.path.parent: info.superblock.store for info in inspect([out, second]) if info.superblock}
    assert len(stores) == 2 and stores[out] == stores[second]
    same_run(out, resume(directory, out), *expected)
    (info,) = inspect([second])
    assert info.superblock and info.superblock.store == stores[out], "it stays where it is"


def test_volumes_may_have_moved_and_a_missing_one_is_named(directory, tmp_path, expected):
    out, plan = tmp_path / "run", plan_of(directory, SPREAD)
    stopped(directory, out, plan, 3, volumes=(tmp_path / "a", tmp_path / "b"))
    (tmp_path / "b").rename(tmp_path / "c")
    with pytest.raises(StoreError, match=r"missing .*--volume"):
        resume(directory, out)
    (tmp_path / "a").rename(tmp_path / "d")
    with pytest.raises(StoreError, match="its store is on none of"):
        resume(directory, out)
    moved = (tmp_path / "d", tmp_path / "c")
    with pytest.raises(Stop):
        resume(directory, out, volumes=moved, at=stopping(5))
    assert Run.load(out / "run.json").volumes == tuple(map(str, moved))
    same_run(out, resume(directory, out), *expected)
    assert all((path / f"volume-{n}.ssdplan").exists() for n, path in enumerate(moved))


def test_a_run_and_its_directory_may_move(directory, tmp_path, expected):
    stopped(directory, tmp_path / "run", plan_of(directory, SPREAD), 3)
    (tmp_path / "run").rename(tmp_path / "moved")
    same_run(tmp_path / "moved", resume(directory, tmp_path / "moved"), *expected)


def test_states_move_to_volumes_that_are_named(directory, tmp_path, expected):
    out = tmp_path / "run"
    stopped(directory, out, plan_of(directory, SPREAD), 3)
    notes: list[str] = []
    same_run(out, resume(directory, out, volumes=(tmp_path / "drive",), notes=notes), *expected)
    assert not list(out.glob("*.ssdplan")) and (tmp_path / "drive" / "volume-0.ssdplan").exists()
    assert "drive" in notes[-1]
    assert Run.load(out / "run.json").left == ()


def test_another_number_of_snapshots_is_kept(directory, tmp_path, expected):
    out = tmp_path / "run"
    stopped(directory, out, plan_of(directory, ON_SSD), 3, keep=2)
    (volume,) = out.glob("*.ssdplan")
    size = volume.stat().st_size
    same_run(out, resume(directory, out, keep=1), *expected)
    (volume,) = out.glob("*.ssdplan")
    assert volume.stat().st_size < size


def test_a_volume_of_its_own_stays_and_is_gone_on_with(directory, tmp_path, expected):
    initialise(tmp_path / "volume", 32 << 20, force=False)
    out = tmp_path / "run"
    stopped(directory, out, plan_of(directory, SPREAD), 3, volumes=(tmp_path / "volume",))
    same_run(out, resume(directory, out), *expected)
    with pytest.raises(StoreError, match="holds the store"):
        resume(directory, out, plan_of(directory, ON_HOST), steps=8)
    assert len(resume(directory, out, plan_of(directory, ON_HOST), steps=8, volumes=(tmp_path / "d",)).losses) == 8
    initialise(tmp_path / "volume", None, force=False)  # blank again, so it needs no force


def test_without_space_for_a_second_store_the_snapshot_stays(directory, tmp_path, expected, monkeypatch):
    from ssdplan.executor.store import volumes

    out, real = tmp_path / "run", volumes.check_space
    stopped(directory, out, plan_of(directory, SPREAD), 3)
    with monkeypatch.context() as patch:
        patch.setattr(volumes, "check_space", lambda path, nbytes: real(path, 1 << 60))
        with pytest.raises(DiskFullError, match="--volume"):
            resume(directory, out, plan_of(directory, ON_HOST))
    assert not (out / "plan.next.json").exists()
    same_run(out, resume(directory, out, plan_of(directory, ON_HOST)), *expected)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_disk_loses_nothing(directory, tmp_path):
    """A file system that others fill while the run writes its lines there."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", small], check=False).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    try:
        out, notes, drive = small / "run", [], (tmp_path / "drive",)

        def at(step: int) -> None:
            if step == 3:
                with contextlib.suppress(OSError), (small / "ballast").open("wb", buffering=0) as file:
                    while file.write(bytes(4096)):
                        pass

        plan, steps = plan_of(directory, SPREAD), 30
        with pytest.raises(DiskFullError, match=r"metrics\.jsonl") as failed:
            run(directory, out, plan, at=at, notes=notes, volumes=drive, snapshot_every=2, steps=steps)
        assert failed.value.exit_code == 5 and f"ssdplan run --resume {out}" in notes[-1]
        (small / "ballast").unlink()
        result = resume(directory, out, steps=steps)
        whole = run(directory, tmp_path / "whole", plan, steps=steps)
        same_run(out, result, tmp_path / "whole", whole)
    finally:
        subprocess.run(["umount", small], check=True)


# Signals.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("serial", [False, True])
def test_a_signal_ends_the_run_with_a_snapshot(directory, tmp_path, expected, number, serial):
    out, notes = tmp_path / "run", []

    def at(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        run(directory, out, plan_of(directory, SPREAD), at=at, snapshot_every=100, notes=notes, serial=serial)
    assert signal.getsignal(number) is before
    assert "the states after step 3, the last snapshot" in notes[-1] and f"ssdplan run --resume {out}" in notes[-1]
    assert any("second signal" in note for note in notes)
    same_run(out, resume(directory, out), *expected)


def test_a_second_signal_ends_the_run_at_once_and_loses_no_snapshot(directory, tmp_path, expected):
    out, notes = tmp_path / "run", []

    def at(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(directory, out, plan_of(directory, SPREAD), at=at, snapshot_every=2, notes=notes)
    assert "the states after step 2, the last snapshot" in notes[-1]
    same_run(out, resume(directory, out), *expected)


def test_a_signal_ends_an_evaluation_and_it_is_made_up_for(directory, tmp_path, expected, monkeypatch):
    out, notes, passes = tmp_path / "run", [], []
    from ssdplan.executor.batches import Texts

    real = Texts.held_out

    def interrupted(texts: Texts) -> Any:
        passes.append(1)
        if len(passes) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(texts)

    with monkeypatch.context() as patch:
        patch.setattr(Texts, "held_out", interrupted)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt):
            run(directory, out, plan_of(directory, SPREAD), snapshot_every=100, notes=notes)
    assert "the states after step 4, the last snapshot" in notes[-1]
    same_run(out, resume(directory, out), *expected)


def test_a_run_without_snapshots_says_that_nothing_is_kept(directory, tmp_path):
    notes: list[str] = []

    def at(step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(directory, tmp_path / "run", plan_of(directory, SPREAD), at=at, notes=notes)
    assert "nothing is kept" in notes[-1] and not list((tmp_path / "run").glob("*.ssdplan"))


# Export.


@pytest.mark.parametrize("choices", [{**SPREAD, "precision": "bf16"}, ON_HOST])
def test_the_export_of_a_run_is_its_model_at_the_last_snapshot(directory, tmp_path, choices):
    plan = plan_of(directory, choices)
    four = run(directory, tmp_path / "four", plan, steps=4)
    out = tmp_path / "run"
    stopped(directory, out, plan, 5)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert export_run(out, tmp_path / "exported") == 4
    after = {path.name: path.read_bytes() for path in out.iterdir()}
    told = json.loads(after.pop("run.json"))
    assert told == json.loads(before.pop("run.json")) | {"exported": {"step": 4, "to": str(tmp_path / "exported")}}
    assert after == before
    ours, theirs = (sorted(path.iterdir()) for path in (tmp_path / "exported", four.model_directory))
    assert [path.name for path in ours] == [path.name for path in theirs]
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(ours, theirs, strict=True))
    assert load_file(tmp_path / "exported" / "model.safetensors")
    with pytest.raises(UsageError, match="not an empty directory"):
        export_run(out, tmp_path / "exported")
    with pytest.raises(UsageError, match="is not at"), _moved(directory / "llama"):
        export_run(out, tmp_path / "again")
    assert not list(tmp_path.glob(".again*"))


def test_the_export_of_a_run_without_snapshots_is_its_model(directory, tmp_path, expected):
    out, result = expected
    assert export_run(out, tmp_path / "copy") is None
    for path in result.model_directory.iterdir():
        assert (tmp_path / "copy" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(Stop):
        run(directory, tmp_path / "run", plan_of(directory, SPREAD), at=stopping(3))
    with pytest.raises(UsageError, match="neither a snapshot nor a finished model"):
        export_run(tmp_path / "run", tmp_path / "none")


@contextlib.contextmanager
def _moved(path: Path):
    path.rename(path.with_name("elsewhere"))
    try:
        yield
    finally:
        path.with_name("elsewhere").rename(path)
