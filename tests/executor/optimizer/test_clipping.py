"""Clipping by the global norm: equal to plain PyTorch, and the same bits whatever the placement, the cuts and the
runner, with evaluations that finish a step's updates early or without."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.device.squares import squares_of_rows
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import Result, train
from tests import reference
from tests.executor.runs import LENGTH, micro_batches_of, opened, prepare
from tests.made.plans import make_plan

OPTIMIZER = AdamW(lr=3e-3, weight_decay=0.1, beta2=0.95, eps=0.1)
"""With this epsilon a gradient's size matters: AdamW with a small one does the same for gradients of any scale."""
STEPS = 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"))


class SumsWhole(EmulatedDevice):
    """Sums a gradient once, as a GPU does, with the copy of its first range."""

    def copy_d2h_gradient(self, target, source, whole):
        self.copy_d2h(target, source)
        squares = 0 if whole is None else squares_of_rows(whole)
        return lambda: (squares is not None, squares or 0)


def run(
    directory: Path,
    out: Path,
    *,
    steps: int = STEPS,
    eval_every: int = 0,
    serial: bool = False,
    device: EmulatedDevice | None = None,
    **choices,
) -> Result:
    model = opened(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, **{"alpha": 1.0, "micro_batches": 2, "chunk": 4096, **choices})
    return train(
        plan,
        model,
        device or EmulatedDevice(),
        data=directory / "text.txt",
        out=out,
        recipe=Recipe(steps=steps, optimizer=OPTIMIZER, eval_every=eval_every, serial=serial),
        eval_data=directory / "held-out.txt",
    )


def oracle(directory: Path, clip: float | None, steps: int = STEPS):
    """Losses, weights and the norms before clipping, of plain PyTorch."""
    batches = [micro_batches_of(directory, step, micro_batches=2) for step in range(steps)]
    settings = reference.AdamW(lr=3e-3, betas=(0.9, 0.95), eps=0.1, weight_decay=0.1, clip_grad_norm=clip)
    norms: list[float] = []
    losses, weights = reference.train(directory / "llama", batches, settings, norms=norms)
    return losses, weights, norms


def measured_norms(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["grad_norm"] for line in lines if "grad_norm" in line]


@pytest.mark.parametrize("bites", ["always", "sometimes"])
def test_a_clipped_run_equals_plain_pytorch(directory, tmp_path, bites):
    free_losses, free_weights, free_norms = oracle(directory, None)
    clip = 0.3 * min(free_norms) if bites == "always" else sorted(free_norms)[STEPS // 2]
    losses, weights, norms = oracle(directory, clip)
    clipped = sum(norm > clip for norm in norms)
    assert clipped == STEPS if bites == "always" else 0 < clipped < STEPS, (clip, norms)

    result = run(directory, tmp_path / "run", clip_grad_norm=clip, optimizer=0.5, parameters=0.2, gradient=0.6)
    assert result.losses == pytest.approx(losses, rel=5e-6)
    assert measured_norms(tmp_path / "run") == pytest.approx(norms, rel=1e-5)
    assert losses != pytest.approx(free_losses, rel=1e-3), "clipping must matter, or this says nothing"
    for name, tensor in load_file(tmp_path / "run" / "model" / "model.safetensors").items():
        moved = torch.linalg.vector_norm(weights[name] - free_weights[name])
        assert torch.linalg.vector_norm(tensor - weights[name]) <= 0.01 * moved, name


def test_a_device_that_sums_whole_gradients_finds_the_same_norms(directory, tmp_path):
    norms = []
    for name, device in (("ranges", EmulatedDevice()), ("whole", SumsWhole())):
        choices = {"clip_grad_norm": 0.5, "optimizer": 0.5, "gradient": 0.6, "chunk": 2048}
        run(directory, tmp_path / name, steps=3, device=device, **choices)
        norms.append(measured_norms(tmp_path / name))
    assert norms[1] == pytest.approx(norms[0], rel=1e-6) and len(norms[0]) == 3


def test_the_last_step_of_a_run_is_clipped_too(directory, tmp_path):
    """Its updates run after it, when the run ends."""
    _, free, norms = oracle(directory, None, steps=1)
    _, weights, _ = oracle(directory, 0.25 * norms[0], steps=1)
    run(directory, tmp_path / "run", steps=1, clip_grad_norm=0.25 * norms[0])
    for name, tensor in load_file(tmp_path / "run" / "model" / "model.safetensors").items():
        moved = torch.linalg.vector_norm(weights[name] - free[name])
        assert torch.linalg.vector_norm(tensor - weights[name]) <= 0.01 * moved, name


def test_placement_cuts_runner_and_evaluation_change_no_bit_of_a_clipped_run(directory, tmp_path):
    seen = {}
    for number, (residency, chunk, serial, eval_every) in enumerate(
        [
            (0.0, 4096, False, 0),
            (0.0, 2048, True, 0),
            (0.37, 1 << 14, False, 0),
            (1.0, 1 << 20, False, 0),
            (0.37, 8192, False, 1),
            (0.37, 8192, True, 3),
        ]
    ):
        out = tmp_path / str(number)
        result = run(
            directory,
            out,
            eval_every=eval_every,
            serial=serial,
            clip_grad_norm=0.5,
            optimizer=residency,
            parameters=residency,
            checkpoints=residency,
            gradient=residency,
            chunk=chunk,
        )
        weights = hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()
        norms = tuple(measured_norms(out))
        assert min(norms) > 0.5
        seen[residency, chunk, serial, eval_every] = (weights, tuple(result.losses), norms)
    assert len(set(seen.values())) == 1, seen


def test_squares_of_rows_are_the_same_wherever_a_range_is_cut():
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(1300 * 2048, generator=generator) * torch.logspace(-12, 12, 1300 * 2048)
    exact = float(gradient.double().square().sum())
    whole = squares_of_rows(gradient)
    assert whole is not None and whole / (1 << 1074) == pytest.approx(exact, rel=1e-6)
    for size in (2048, 7 * 2048, 511 * 2048, 513 * 2048):
        assert sum(squares_of_rows(part) or 0 for part in gradient.split(size)) == whole


def test_squares_of_rows_beyond_fp32_and_of_nothing():
    gradient = torch.zeros(3 * 2048)
    assert squares_of_rows(gradient) == 0
    gradient[5000] = 3e38
    gradient[1] = 2.0
    found = squares_of_rows(gradient)
    assert found is not None and found / (1 << 1074) == pytest.approx(float(gradient.double().square().sum()), rel=1e-6)
    assert found == sum(squares_of_rows(part) or 0 for part in gradient.split(2048))
    for bad in (float("inf"), float("-inf"), float("nan")):
        gradient[2100] = bad
        assert squares_of_rows(gradient) is None
