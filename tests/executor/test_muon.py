"""Runs by Muon: equal to torch.optim.Muon with torch.optim.AdamW for the rest, and the same bits in every placement."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ssdplan.executor.checks import schedule_of
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.kinds import said_of_muon
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.loss_scale import LossScale
from ssdplan.executor.optimizer.muon import Muon
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import train
from ssdplan.plans.documents.matrices import Matrix
from ssdplan.plans.errors import MismatchError
from tests import reference, warm
from tests.bounds import HANG_SECONDS
from tests.executor.runs import LENGTH, micro_batches_of, prepare, texts
from tests.executor.test_architectures import make
from tests.executor.test_mixtures import MIXTURES
from tests.made.models import make_tokenizer
from tests.made.plans import make_plan

RECIPE = Recipe(steps=4, optimizer=Muon(lr=1e-4, beta2=0.95, weight_decay=0.1, lr_of_matrices=2.0))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"))


def run(directory: Path, out: Path, *, recipe: Recipe = RECIPE, precision="fp32", **choices):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model = open_model(directory / "llama", dtype, muon=True)
    plan = make_plan(model, sequence_length=LENGTH, precision=precision, **choices)
    return model, train(plan, model, EmulatedDevice(), data=directory / "text.txt", out=out, recipe=recipe)


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_a_run_equals_torchs_muon_with_adamw_for_the_rest(directory, tmp_path, adjust):
    recipe = replace(RECIPE, optimizer=replace(RECIPE.optimizer, adjust_lr=adjust))
    model, result = run(directory, tmp_path / "run", recipe=recipe, alpha=0.4, optimizer=0.5, micro_batches=1)
    names = [tensor.name for state in model.states if state.muon for tensor in state.tensors]
    assert len(names) == 3 * 7
    steps = [micro_batches_of(directory, step, micro_batches=1) for step in range(recipe.steps)]
    settings = reference.AdamW(
        lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, muon=names, muon_lr=2e-4, muon_adjust=adjust
    )
    losses, weights = reference.train(directory / "llama", steps, settings)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    for name, tensor in exported.items():
        norm = torch.linalg.vector_norm
        assert norm(tensor - weights[name]) <= 1e-5 * norm(weights[name]), name


def test_placement_delay_and_runner_change_no_bit(directory, tmp_path):
    grid = [
        {},
        {"alpha": 0.3, "optimizer": 0.4, "parameters": 0.6, "chunk": 4096},
        {"alpha": 1.0, "optimizer": 1.0, "unified": True, "parameters": 0.0},
        {"alpha": 0.5, "optimizer": 0.2, "gradient": 0.5, "on_device": 1.0, "updated": 0.5},
        {"alpha": 0.4, "optimizer": 0.3, "gradient": 0.5, "parameters": 0.4, "chunk": 4096, "visiting": True},
        {"alpha": 0.3, "optimizer": 0.4, "on_device": 1.0, "updated": 0.3, "visiting": True},
    ]
    found = set()
    for number, choices in enumerate(grid):
        out = tmp_path / str(number)
        run(directory, out, recipe=replace(RECIPE, serial=number == 1), **choices)
        found.add(digest(out))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("precision", "masters", "clip"), [("bf16", "fp32", 0.5), ("bf16", "residual", None), ("bf16", "none", None)]
)
def test_formats_and_clipping_equal_torchs(directory, tmp_path, precision, masters, clip):
    """Placements give the same bits; and plain PyTorch about the same weights, for a model in half precision."""
    choices = {"precision": precision, "masters": masters, "clip_grad_norm": clip, "micro_batches": 1}
    late = {"alpha": 1.0} if clip else {}
    model, _ = run(directory, tmp_path / "0", **choices, **(late or {"alpha": 0.3}), optimizer=0.4, chunk=4096)
    run(directory, tmp_path / "1", **choices, **late, optimizer=1.0, on_device=1.0, updated=0.6)
    assert digest(tmp_path / "0") == digest(tmp_path / "1")
    names = [tensor.name for state in model.states if state.muon for tensor in state.tensors]
    steps = [micro_batches_of(directory, step, micro_batches=1) for step in range(RECIPE.steps)]
    settings = reference.AdamW(
        lr=1e-4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        muon=names,
        muon_lr=2e-4,
        masters=masters,
        clip_grad_norm=clip,
    )
    _, weights = reference.train(directory / "llama", steps, settings, torch.bfloat16)
    exported = load_file(tmp_path / "0" / "model" / "model.safetensors")
    norm = torch.linalg.vector_norm
    for name in names:
        assert norm(exported[name].float() - weights[name]) <= 4e-3 * norm(weights[name]), name


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    """In a process of its own, as `tests/executor/snapshots/test_kills.py` does it: killed within a step."""
    code = (
        "import os; os.environ['SSDPLAN_KILL_OPTIMIZER'] = 'muon'; from pathlib import Path; import torch; "
        "from tests.executor.snapshots import killing; torch.set_num_threads(1); "
        f"killing.prepare(Path({str(tmp_path)!r}), layers=2); "
        f"print(killing.boundaries(Path({str(tmp_path)!r}), 300))"
    )
    ended = warm.python(code, cwd=Path.cwd(), seconds=HANG_SECONDS + 300)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_a_plan_for_other_matrices_is_refused(directory, tmp_path):
    model = open_model(directory / "llama", torch.float32, muon=True)
    plan = make_plan(model, sequence_length=LENGTH)
    states = []
    for state in plan.model.states:
        turned = [Matrix(rows=each.columns, columns=each.rows, start=each.start) for each in state.matrices]
        states.append(state.model_copy(update={"matrices": tuple(turned)}))
    turned = plan.model_copy(update={"model": plan.model.model_copy(update={"states": tuple(states)})})
    with pytest.raises(MismatchError, match="are not this model's"):
        schedule_of(turned, model, EmulatedDevice())
    with pytest.raises(MismatchError, match="another model"):
        schedule_of(plan, open_model(directory / "llama", torch.float32), EmulatedDevice())


def test_what_muon_takes_and_what_not_is_said(directory):
    model = open_model(directory / "llama", torch.float32, muon=True)
    by_muon, rest = said_of_muon(model.states)
    assert by_muon.startswith("Muon updates 21 matrices of blocks, ") and "mlp.down_proj" in by_muon
    assert "1 tied, of embedding and head" in rest and "norms, biases" in rest
    assert said_of_muon(open_model(directory / "llama", torch.float32).states) == ()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_step_in_fp16_that_overflows_leaves_every_matrix_as_it_was(directory, tmp_path):
    recipe = replace(RECIPE, steps=1, loss_scale=LossScale(2.0**100))
    _, result = run(directory, tmp_path / "run", recipe=recipe, precision="fp16", alpha=1.0, optimizer=0.4)
    exported = stored(tmp_path / "run" / "model")
    for name, tensor in stored(directory / "llama").items():
        assert torch.equal(exported[name], tensor.half()), name
    assert result.losses[0] > 0


def test_steps_in_fp16_that_overflow_count_nowhere(directory, tmp_path):
    """The first ones do, until the scale has come down, wherever states live."""
    late = replace(RECIPE, steps=8, loss_scale=LossScale(2.0**24))
    choices = {"precision": "fp16", "alpha": 1.0, "chunk": 4096}
    _, first = run(directory, tmp_path / "0", recipe=late, optimizer=0.4, **choices)
    _, second = run(directory, tmp_path / "1", recipe=late, optimizer=1.0, on_device=1.0, updated=0.6, **choices)
    assert first.losses == second.losses and digest(tmp_path / "0") == digest(tmp_path / "1")
    lines = [json.loads(line) for line in (tmp_path / "0" / "metrics.jsonl").read_text().splitlines()]
    skipped = [line["skipped"] for line in lines if "loss" in line]
    assert skipped.count(True) >= 1 and not skipped[-1] and skipped == sorted(skipped, reverse=True)


@pytest.mark.parametrize("family", ["ernie4_5_moe"])
def test_routers_that_stay_in_fp32_are_no_matrices_of_half_precision(tmp_path, family):
    """A mixture in bf16 whose routers' parameters are fp32: the same bits in two placements, and fp32 in the export."""
    folder = texts(tmp_path)
    make(family, tmp_path / "llama", **MIXTURES[family], vocab_size=320)
    make_tokenizer(tmp_path / "llama")
    run(folder, tmp_path / "0", precision="bf16", alpha=0.3, optimizer=0.4, chunk=4096)
    run(folder, tmp_path / "1", precision="bf16", optimizer=1.0, on_device=1.0, updated=0.6)
    assert digest(tmp_path / "0") == digest(tmp_path / "1")
    exported, before = stored(tmp_path / "0" / "model"), stored(tmp_path / "llama")
    routers = {name for name in exported if name.endswith("mlp.gate.weight")}
    kept = {name for name, tensor in exported.items() if tensor.dtype == torch.float32}
    assert routers and kept - routers <= {name for name in exported if "moe_statics" in name} and routers <= kept
    assert all(not torch.equal(exported[name], before[name].float()) for name in routers)
