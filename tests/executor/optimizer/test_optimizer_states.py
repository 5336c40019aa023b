"""Optimizer states with moments in bf16: equal to plain PyTorch that rounds its moments, the same bits wherever they
live, and no more bytes than the plan says."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW, RangeUpdate
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import Result, train
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.state_layout import OPTIMIZER_FORMATS
from tests import reference
from tests.executor.runs import LENGTH, micro_batches_of, opened, prepare
from tests.made.plans import make_plan

OPTIMIZER = AdamW(lr=1e-3, weight_decay=0.1, beta2=0.95)
SETTINGS = reference.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"))


def run(directory: Path, out: Path, *, steps: int, serial: bool = False, **choices) -> tuple[Plan, Result]:
    model = opened(directory / "llama", torch.bfloat16 if choices.get("precision") == "bf16" else torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, **{"optimizer_states": "bf16", "micro_batches": 2, **choices})
    recipe = Recipe(steps=steps, optimizer=OPTIMIZER, eval_every=2, serial=serial)
    return plan, train(
        plan,
        model,
        EmulatedDevice(),
        data=directory / "text.txt",
        out=out,
        recipe=recipe,
        eval_data=directory / "held-out.txt",
    )


@pytest.mark.parametrize("elements", [2048, 6144])
def test_a_range_holds_masters_then_moments(elements: int) -> None:
    """Two updates in numpy, each operation rounded to fp32 by itself, the moments to bf16 in between."""
    f = np.float32
    rng = np.random.default_rng(elements)
    p, gradients = rng.standard_normal(elements).astype(f), rng.standard_normal((2, elements)).astype(f)
    states = torch.zeros(8 * elements, dtype=torch.uint8)
    states[: 4 * elements].view(torch.float32).copy_(torch.from_numpy(p))
    parameters = torch.zeros(elements, dtype=torch.bfloat16)
    m, v = np.zeros_like(p), np.zeros_like(p)
    for step in (1, 2):
        gradient = torch.from_numpy(gradients[step - 1])
        RangeUpdate(states, OPTIMIZER_FORMATS["fp32", "bf16"], gradient, parameters, threads=2)(
            OPTIMIZER, step=step, gradient_scale=0.3
        )
        g = gradients[step - 1] * f(0.3)
        m = m + (g - m) * f(1 - 0.9)
        v = v * f(0.95) + (g * g) * f(1 - 0.95)
        denominator = np.sqrt(v) * f(1 / np.sqrt(1 - 0.95**step)) + f(1e-8)
        p = p * f(1 - 1e-3 * 0.1) - (f(1e-3 / (1 - 0.9**step)) * m) / denominator
        m, v = (torch.from_numpy(moment).bfloat16().float().numpy() for moment in (m, v))
    assert np.array_equal(states[: 4 * elements].view(torch.float32).numpy(), p)
    moments = states[4 * elements :].view(torch.bfloat16).float().numpy()
    assert np.array_equal(moments[:elements], m) and np.array_equal(moments[elements:], v)
    assert torch.equal(parameters, torch.from_numpy(p).bfloat16())


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_a_run_equals_plain_pytorch_that_rounds_its_moments(directory, tmp_path, alpha):
    steps = [micro_batches_of(directory, step, micro_batches=2) for step in range(10)]
    rounding = reference.AdamW(**{**vars(SETTINGS), "bf16_moments": True})
    losses, weights = reference.train(directory / "llama", steps, rounding)
    _, others = reference.train(directory / "llama", steps, SETTINGS)
    _, result = run(
        directory, tmp_path / "run", steps=10, alpha=alpha, optimizer=0.5, parameters=0.2, gradient=0.5, chunk=4096
    )
    assert result.losses == pytest.approx(losses, rel=1e-5)
    for name, tensor in load_file(tmp_path / "run" / "model" / "model.safetensors").items():
        rounded = torch.linalg.vector_norm(weights[name] - others[name])
        assert torch.linalg.vector_norm(tensor - weights[name]) <= 0.1 * rounded, name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_placement_delay_and_runner_change_no_bit(directory, tmp_path, precision):
    seen = {}
    for number, (alpha, residency, chunk, serial) in enumerate(
        [
            (0.0, 0.0, 4096, True),
            (0.0, 1.0, 1 << 20, False),
            (0.3, 0.37, 2048, False),
            (0.3, 0.0, 8192, True),
            (1.0, 0.37, 1 << 14, False),
            (1.0, 0.0, 4096, True),
        ]
    ):
        out = tmp_path / str(number)
        _, result = run(
            directory,
            out,
            steps=4,
            serial=serial,
            precision=precision,
            alpha=alpha,
            optimizer=residency,
            parameters=residency,
            checkpoints=residency,
            gradient=residency,
            chunk=chunk,
        )
        weights = hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()
        seen[number] = (weights, tuple(result.losses), tuple(result.eval_losses.values()))
    assert len(set(seen.values())) == 1, seen


def test_memory_and_traffic_are_the_plans_to_the_byte(directory, tmp_path):
    choices = {"alpha": 0.3, "optimizer": 0.4, "parameters": 0.2, "checkpoints": 0.5, "gradient": 0.7, "chunk": 4096}
    plan, result = run(directory, tmp_path / "run", steps=5, **choices)
    compared = {row.quantity: row for row in result.compared}
    for quantity in ("host_arena_bytes", "device_arena_bytes", "ssd_read_bytes", "ssd_write_bytes"):
        assert compared[quantity].measured == compared[quantity].predicted, quantity
    whole = make_plan(
        open_model(directory / "llama", torch.float32), sequence_length=LENGTH, micro_batches=2, **choices
    )
    assert plan.prediction.ssd_write_bytes < whole.prediction.ssd_write_bytes
