"""Whole runs: the same bits whatever the placement, equal to plain PyTorch, within the planned memory and traffic."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ssdplan import native
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.executor.train import train
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import MismatchError, NumericalError, UsageError
from tests import reference
from tests.executor.runs import LENGTH, micro_batches_of, opened, prepare
from tests.executor.test_families import vanishing
from tests.extent import short_or_full
from tests.made.models import FAMILIES
from tests.made.plans import make_plan

RECIPE = Recipe(steps=5, optimizer=AdamW(lr=1e-3, weight_decay=0.1))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = prepare(tmp_path_factory.mktemp("models"))
    return prepare(path, "gpt2", layers=2, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)


def run(directory: Path, out: Path, name: str = "llama", *, recipe: Recipe = RECIPE, data="text.txt", **choices):
    model = opened(directory / name, torch.bfloat16 if choices.get("precision") == "bf16" else torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, **choices)
    return plan, train(
        plan,
        model,
        EmulatedDevice(),
        data=directory / data,
        out=out,
        recipe=recipe,
        eval_data=directory / "held-out.txt",
    )


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()


GRID = short_or_full(
    [(0.0, 0.0, False), (0.3, 0.37, False), (1.0, 1.0, False), (0.0, 0.37, True), (0.3, 1.0, True)],
    [
        *itertools.product([0.0, 0.3, 1.0], [0.0, 0.37, 1.0], [False]),
        (0.0, 0.37, True),
        (0.3, 0.0, True),
        (1.0, 1.0, True),
    ],
)


@pytest.mark.parametrize(("name", "precision"), [("llama", "fp32"), ("gpt2", "bf16")])
def test_placement_delay_and_runner_change_no_bit(directory, tmp_path, name, precision):
    seen = {}
    for alpha, residency, serial in GRID:
        out = tmp_path / f"{alpha}-{residency}-{serial}"
        _, result = run(
            directory,
            out,
            name,
            recipe=Recipe(steps=3, optimizer=RECIPE.optimizer, serial=serial, eval_every=2),
            precision=precision,
            micro_batches=3,
            micro_batch_size=1,
            alpha=alpha,
            optimizer=residency,
            parameters=residency,
            checkpoints=residency,
            gradient=residency,
            chunk=4096,
        )
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        norms = tuple(line["grad_norm"] for line in lines if "grad_norm" in line)
        assert len(norms) == 3
        seen[alpha, residency, serial] = (digest(out), tuple(result.losses), tuple(result.eval_losses.values()), norms)
    assert len(set(seen.values())) == 1, seen


@pytest.mark.parametrize(
    ("family", "micro_batches"),
    [
        (family, micro_batches)
        for number, family in enumerate(FAMILIES)
        for micro_batches in short_or_full([1 + 2 * (number % 2)], [1, 3])
    ],
)
def test_a_run_of_each_family_equals_plain_pytorch(tmp_path, family, micro_batches):
    """Many steps on texts of different length, each a row of its own, or packed; then each is trained on as if
    alone."""
    pack, many = micro_batches == 1, short_or_full(5, 20)
    prepare(tmp_path, family)
    recipe = Recipe(steps=many, optimizer=AdamW(lr=1e-3, weight_decay=0.1, beta2=0.95), pack=pack)
    _, result = run(
        tmp_path,
        tmp_path / "run",
        family,
        recipe=recipe,
        data="rows.jsonl",
        micro_batches=micro_batches,
        alpha=0.4,
        optimizer=0.5,
        parameters=0.2,
        checkpoints=0.6,
        chunk=4096,
    )
    steps = [
        micro_batches_of(tmp_path, step, micro_batches=micro_batches, family=family, pack=pack, data="rows.jsonl")
        for step in range(many)
    ]
    assert pack == any(batch.position_ids is not None for step in steps for batch in step)
    settings = reference.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses, weights = reference.train(tmp_path / family, steps, settings)
    assert result.losses == pytest.approx(losses, rel=5e-6)
    ignored = vanishing(tmp_path / family, steps[0], torch.float32)
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert len(exported) >= len(weights)
    for name, tensor in exported.items():
        difference = tensor - weights[name]
        if name in ignored:
            difference = difference[~ignored[name]]
        assert torch.linalg.vector_norm(difference) <= 1e-3 * torch.linalg.vector_norm(weights[name]), name


def test_memory_and_traffic_are_the_plans_to_the_byte(directory, tmp_path):
    plan, result = run(
        directory, tmp_path / "run", alpha=0.3, optimizer=0.4, parameters=0.2, checkpoints=0.5, gradient=0.7, chunk=4096
    )
    compared = {row.quantity: row for row in result.compared}
    for quantity in ("host_arena_bytes", "device_arena_bytes", "ssd_read_bytes", "ssd_write_bytes"):
        assert compared[quantity].measured == compared[quantity].predicted, quantity
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert all(line["ssd_write_bytes"] == plan.prediction.ssd_write_bytes for line in steps[1:])
    assert [line["loss"] for line in steps] == result.losses
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) > 50


def test_the_gradient_norm_is_that_of_plain_pytorch(directory, tmp_path):
    run(directory, tmp_path / "run", recipe=Recipe(steps=1, optimizer=RECIPE.optimizer), alpha=0.5)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    micro = micro_batches_of(directory, 0, micro_batches=2)
    model = reference.load(directory / "llama")
    reference.step_loss(model, micro, backward=True)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_nothing_stays_of_a_run_that_fails_before_its_first_step(directory, tmp_path):
    model = open_model(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH)
    out = tmp_path / "run"
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UsageError):
        train(plan, model, EmulatedDevice(), data=tmp_path / "empty.txt", out=out, recipe=RECIPE)
    assert not out.exists()

    def stop(fraction: float, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch = Watch(loading=stop)
        train(plan, model, EmulatedDevice(), data=directory / "text.txt", out=out, recipe=RECIPE, watch=watch)
    assert not out.exists()


@pytest.mark.parametrize("name", ["notes.txt", "volume-7.ssdplan", "wandb/theirs", "model/theirs"])
def test_what_others_put_beside_a_run_that_fails_stays(directory, tmp_path, name):
    model, out = open_model(directory / "llama", torch.float32), tmp_path / "run"
    plan = make_plan(model, sequence_length=LENGTH)

    def stop(fraction: float, what: str) -> None:
        if not out.exists():  # tokens come before the directory
            return
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch = Watch(loading=stop)
        train(plan, model, EmulatedDevice(), data=directory / "text.txt", out=out, recipe=RECIPE, watch=watch)
    assert [path for path in out.rglob("*") if path.is_file()] == [out / name] and (out / name).read_text() == "mine"


def test_a_directory_in_use_is_left_alone(directory, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not an empty directory"):
        run(directory, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_plan_for_another_model_is_refused(directory, tmp_path):
    llama, gpt2 = (open_model(directory / name, torch.float32) for name in ("llama", "gpt2"))
    with pytest.raises(MismatchError, match="another model"):
        train(
            make_plan(gpt2, sequence_length=LENGTH),
            llama,
            EmulatedDevice(),
            data=directory / "text.txt",
            out=tmp_path / "run",
            recipe=RECIPE,
        )


def test_a_plan_whose_memory_was_edited_is_refused(directory, tmp_path):
    model = open_model(directory / "llama", torch.float32)
    raw = json.loads(make_plan(model, sequence_length=LENGTH).text())
    raw["decision"]["micro_batches"] = 7
    edited = Plan.model_validate(raw)
    with pytest.raises(MismatchError, match="it was edited"):
        train(edited, model, EmulatedDevice(), data=directory / "text.txt", out=tmp_path / "run", recipe=RECIPE)


def test_training_that_diverges_stops(directory, tmp_path):
    with pytest.raises(NumericalError, match="step"):
        run(directory, tmp_path / "run", recipe=Recipe(steps=5, optimizer=AdamW(lr=1e30)))
    assert not (tmp_path / "run" / "model").exists()


def test_buffers_that_a_model_saves_are_exported(tmp_path):
    """Gemma 4 keeps a scalar a layer in a buffer: without it, the exported model would be another model."""
    pytest.importorskip("transformers.models.gemma4", reason="this transformers has no Gemma 4")
    prepare(tmp_path, "gemma4", tied=True)
    saved = load_file(tmp_path / "gemma4" / "model.safetensors")
    _, result = run(tmp_path, tmp_path / "run", "gemma4", recipe=Recipe(steps=1, optimizer=RECIPE.optimizer))
    exported = load_file(result.model_directory / "model.safetensors")
    assert exported.keys() == saved.keys()
    scalars = [name for name in saved if name.endswith("layer_scalar")]
    assert scalars and all(torch.equal(exported[name], saved[name]) for name in scalars)


def test_nothing_is_allocated_in_an_arena_after_the_first_step(directory, tmp_path, monkeypatch):
    made: list[int] = []
    arena = native.Arena

    def counted(nbytes: int, **options: bool) -> native.Arena:
        made.append(nbytes)
        return arena(nbytes, **options)

    monkeypatch.setattr(native, "Arena", counted)
    at_step: list[int] = []
    model = open_model(directory / "llama", torch.float32)
    train(
        make_plan(model, sequence_length=LENGTH, alpha=0.3),
        model,
        EmulatedDevice(),
        data=directory / "text.txt",
        out=tmp_path / "run",
        recipe=RECIPE,
        watch=Watch(step=lambda metrics: at_step.append(len(made))),
    )
    assert len(at_step) == RECIPE.steps and at_step[0] > 0 and len(set(at_step)) == 1


@pytest.mark.parametrize("last", [1, 3])
def test_who_watches_may_end_a_run_which_is_then_the_run_of_so_few_steps(directory, tmp_path, last):
    """Without snapshots; its delayed updates are made, its held-out loss is taken, and its report has a step."""
    plan, whole = run(directory, tmp_path / "whole", recipe=Recipe(last, RECIPE.optimizer), alpha=0.5)
    model = opened(directory / "llama", torch.float32)
    ended = train(
        plan,
        model,
        EmulatedDevice(),
        data=directory / "text.txt",
        out=tmp_path / "ended",
        recipe=RECIPE,
        eval_data=directory / "held-out.txt",
        watch=Watch(step=lambda metrics: metrics.step == last),
    )
    assert ended.losses == whole.losses and ended.eval_losses == whole.eval_losses and len(ended.losses) == last
    assert digest(tmp_path / "ended") == digest(tmp_path / "whole")
    report = json.loads((tmp_path / "ended" / "report.json").read_text())
    assert report["steps"] == last and report["steady_steps"] == max(last - 1, 1)
    assert json.loads((tmp_path / "ended" / "run.json").read_text())["steps"] == last
