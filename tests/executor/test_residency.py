"""Whole runs with parameters that stay on the device: the same bits as without, and as plain PyTorch trains."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ssdplan.executor.device import EmulatedDevice
from ssdplan.executor.model import open_model
from ssdplan.executor.optimizer import AdamW
from ssdplan.executor.train import Recipe, train
from tests import reference
from tests.executor.planned import make_plan
from tests.executor.runs import LENGTH, micro_batches_of, prepare

OPTIMIZER = AdamW(lr=1e-3, weight_decay=0.1, beta2=0.95)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = prepare(tmp_path_factory.mktemp("tied"), layers=4)
    prepare(path / "untied", layers=4, tied=False)
    return path


def run(directory: Path, out: Path, *, serial: bool = False, precision: str = "fp32", **choices):
    model = open_model(directory / "llama", torch.bfloat16 if precision == "bf16" else torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, precision=precision, chunk=4096, **choices)
    recipe = Recipe(steps=3, optimizer=OPTIMIZER, serial=serial, eval_every=2)
    held_out = directory / "held-out.txt"
    data = directory / "text.txt"
    return train(plan, model, EmulatedDevice(), data=data, out=out, recipe=recipe, eval_data=held_out)


def bits(directory: Path, out: Path, **choices) -> tuple[object, ...]:
    """All that a run yields: losses, held-out losses, gradient norms and the exported weights."""
    result = run(directory, out, **choices)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    norms = tuple(line["grad_norm"] for line in lines if "grad_norm" in line)
    assert len(norms) == 3
    weights = hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()
    return tuple(result.losses), tuple(result.eval_losses.items()), norms, weights


# alpha, on device, across the turn, serial. Four blocks, so a half and a quarter are whole numbers of them.
GRID = [
    (0.0, 0.0, 0.0, True),
    (0.0, 0.5, 0.0, False),
    (0.0, 1.0, 0.0, False),
    (0.0, 0.0, 0.5, False),
    (0.0, 0.0, 1.0, True),
    (0.3, 0.5, 0.5, False),
    (0.3, 1.0, 0.0, True),
    (0.3, 0.25, 0.25, False),
    (1.0, 0.5, 0.5, True),
    (1.0, 1.0, 0.0, False),
    (1.0, 0.0, 1.0, False),
]


@pytest.mark.parametrize(("tied", "precision"), [(True, "fp32"), (False, "bf16")])
@pytest.mark.parametrize("n", [1, 3])
def test_what_stays_on_the_device_changes_no_bit(directory, tmp_path, n, tied, precision):
    model = directory if tied else directory / "untied"
    seen = {}
    for number, (alpha, on_device, across_turn, serial) in enumerate(GRID):
        seen[number] = bits(
            model,
            tmp_path / str(number),
            alpha=alpha,
            on_device=on_device,
            across_turn=across_turn,
            serial=serial,
            micro_batches=n,
            micro_batch_size=1,
            precision=precision,
            optimizer=0.37 * (number % 3),
            parameters=0.5 * (number % 2),
            checkpoints=0.6,
            gradient=0.5,
        )
    assert len(set(seen.values())) == 1, seen


def test_a_run_that_keeps_parameters_on_the_device_equals_plain_pytorch(directory, tmp_path):
    choices = {"alpha": 0.4, "on_device": 0.5, "across_turn": 0.5, "micro_batches": 3}
    result = run(directory, tmp_path / "run", **choices)
    steps = [micro_batches_of(directory, step, micro_batches=3) for step in range(3)]
    settings = reference.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses, weights = reference.train(directory / "llama", steps, settings)
    assert result.losses == pytest.approx(losses, rel=5e-6)
    for name, tensor in load_file(tmp_path / "run" / "model" / "model.safetensors").items():
        difference = torch.linalg.vector_norm(tensor - weights[name])
        assert difference <= 1e-3 * torch.linalg.vector_norm(weights[name]), name


def test_memory_and_traffic_are_the_plans_to_the_byte(directory, tmp_path):
    result = run(directory, tmp_path / "run", alpha=0.3, optimizer=0.4, on_device=0.5, across_turn=0.25)
    compared = {row.quantity: row for row in result.compared}
    for quantity in ("host_arena_bytes", "device_arena_bytes", "ssd_read_bytes", "ssd_write_bytes"):
        assert compared[quantity].measured == compared[quantity].predicted > 0, quantity
