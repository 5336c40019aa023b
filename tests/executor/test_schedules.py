"""Whole runs with parameters that stay on the device, and runs of the horizontal schedule: exact as all others."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import train
from tests import reference
from tests.executor.runs import LENGTH, micro_batches_of, opened, prepare
from tests.extent import FULL, short_or_full
from tests.made.plans import make_plan

DTYPES_OF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPTIMIZER = AdamW(lr=1e-3, weight_decay=0.1, beta2=0.95)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = prepare(tmp_path_factory.mktemp("tied"), layers=4)
    prepare(path / "untied", layers=4, tied=False)
    return prepare(path, "gpt2", layers=2, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)


def run(
    directory: Path,
    out: Path,
    name: str = "llama",
    *,
    serial: bool = False,
    precision: str = "fp32",
    snapshot_every: int = 0,
    **choices,
):
    model = opened(directory / name, DTYPES_OF[precision])
    plan = make_plan(model, sequence_length=LENGTH, precision=precision, chunk=4096, **choices)
    recipe = Recipe(steps=3, optimizer=OPTIMIZER, serial=serial, eval_every=2, snapshot_every=snapshot_every)
    held_out = directory / "held-out.txt"
    data = directory / "text.txt"
    return train(plan, model, EmulatedDevice(), data=data, out=out, recipe=recipe, eval_data=held_out)


def bits(directory: Path, out: Path, name: str = "llama", **choices) -> tuple[object, ...]:
    """All that a run yields: losses, held-out losses, gradient norms and the exported weights."""
    result = run(directory, out, name, **choices)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    norms = tuple(line["grad_norm"] for line in lines if "grad_norm" in line)
    assert len(norms) == 3
    weights = hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()
    return tuple(result.losses), tuple(result.eval_losses.items()), norms, weights


# alpha; on the device: states, states across the turn, states that it updates, blocks' inputs; serial. Of four blocks a
# half and a quarter are whole numbers.
GRID = [
    (0.0, 0.0, 0.0, 0.0, 0.0, True),
    (0.0, 0.0, 1.0, 0.0, 0.5, False),
    (0.3, 0.5, 0.5, 0.0, 0.0, False),
    (0.3, 1.0, 0.0, 0.5, 0.25, True),
    (0.0, 1.0, 0.0, 1.0, 1.0, False),
    (1.0, 0.0, 0.5, 0.0, 0.75, True),
]
if FULL:
    GRID += [
        (0.0, 0.5, 0.0, 0.0, 1.0, False),
        (0.3, 0.25, 0.25, 0.25, 0.5, False),
        (1.0, 1.0, 0.0, 0.0, 0.0, False),
        (1.0, 1.0, 0.0, 1.0, 1.0, True),
    ]


@pytest.mark.parametrize(
    ("n", "tied", "precision"),
    [(1, True, "fp32"), (3, False, "bf16"), *([(1, False, "bf16"), (3, True, "fp32")] if FULL else [])],
)
def test_what_stays_on_the_device_changes_no_bit(directory, tmp_path, n, tied, precision):
    model = directory if tied else directory / "untied"
    seen = {}
    for number, (alpha, on_device, across_turn, updated, inputs, serial) in enumerate(GRID):
        seen[number] = bits(
            model,
            tmp_path / str(number),
            alpha=alpha,
            on_device=on_device,
            across_turn=across_turn,
            updated=updated,
            inputs=inputs,
            serial=serial,
            micro_batches=n,
            micro_batch_size=1,
            precision=precision,
            optimizer=0.37 * (number % 3),
            parameters=0.5 * (number % 2),
            checkpoints=0.6,
            gradient=0.5,
            overlap=("all", "parameters", "none")[number % 3],
        )
    assert len(set(seen.values())) == 1, seen


@pytest.mark.parametrize(
    ("tied", "precision", "choices"),
    [(True, "bf16", {"clip_grad_norm": 0.05}), (False, "fp16", {}), (True, "bf16", {"optimizer_states": "bf16"})],
)
def test_updates_on_the_device_change_no_bit(directory, tmp_path, tied, precision, choices):
    """With clipping and in fp16 all of them wait for the step's last gradient; moments may be in bf16."""
    alpha = 0.0 if "optimizer_states" in choices else 1.0
    seen = {}
    for updated, serial in ((0.0, False), (0.5, False), (1.0, True), (1.0, False)):
        seen[updated, serial] = bits(
            directory if tied else directory / "untied",
            tmp_path / f"{updated}-{serial}",
            alpha=alpha,
            on_device=1.0,
            updated=updated,
            serial=serial,
            micro_batches=2,
            micro_batch_size=1,
            precision=precision,
            snapshot_every=2,
            **choices,
        )
    assert len(set(seen.values())) == 1, seen


@pytest.mark.parametrize(
    ("name", "tied", "precision"), [("llama", True, "fp32"), ("llama", False, "bf16"), ("gpt2", True, "fp32")]
)
def test_of_one_micro_batch_both_schedules_give_the_same_bits(directory, tmp_path, name, tied, precision):
    """gpt2 with dropout, which is drawn for a layer and a micro-batch whenever they run."""
    seen = {
        schedule: bits(
            directory if tied else directory / "untied",
            tmp_path / schedule,
            name,
            schedule=schedule,
            precision=precision,
            micro_batches=1,
            optimizer=0.3,
            checkpoints=0.4,
        )
        for schedule in ("vertical", "horizontal")
    }
    assert seen["vertical"] == seen["horizontal"]


@pytest.mark.parametrize(("name", "tied", "precision"), [("llama", False, "fp32"), ("gpt2", True, "bf16")])
def test_residency_and_runner_change_no_bit_of_a_horizontal_run(directory, tmp_path, name, tied, precision):
    seen = {}
    for residency, on_device, serial in [
        (0.0, 0.0, True),
        (1.0, 0.0, False),
        (0.37, 0.5, False),
        (0.0, 1.0, False),
        *([(0.0, 0.0, False), (0.37, 0.0, False), (0.37, 0.5, True)] if FULL else []),
    ]:
        seen[residency, on_device, serial] = bits(
            directory if tied else directory / "untied",
            tmp_path / f"{residency}-{on_device}-{serial}",
            name,
            schedule="horizontal",
            precision=precision,
            serial=serial,
            micro_batches=3,
            micro_batch_size=1,
            optimizer=residency,
            parameters=residency,
            checkpoints=residency,
            on_device=on_device,
        )
    assert len(set(seen.values())) == 1, seen


@pytest.mark.parametrize(
    ("choices", "tied"),
    [
        (choices, tied)
        for number, choices in enumerate(
            [
                {"alpha": 0.4, "on_device": 0.5, "across_turn": 0.5},
                {"schedule": "horizontal"},
                {"schedule": "horizontal", "on_device": 0.5, "parameters": 0.3},
            ]
        )
        for tied in short_or_full([number % 2 == 0], [True, False])
    ],
)
def test_a_run_equals_plain_pytorch(directory, tmp_path, choices, tied):
    model = directory if tied else directory / "untied"
    result = run(model, tmp_path / "run", micro_batches=3, optimizer=0.5, checkpoints=0.6, snapshot_every=2, **choices)
    steps = [micro_batches_of(model, step, micro_batches=3) for step in range(3)]
    settings = reference.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses, weights = reference.train(model / "llama", steps, settings)
    assert result.losses == pytest.approx(losses, rel=5e-6)
    whole = reference.load(model / "llama")
    reference.step_loss(whole, steps[0], backward=True)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in whole.parameters()])
    line = next(line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if "grad_norm" in line)
    assert json.loads(line)["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert len(exported) >= len(weights)
    for name, tensor in exported.items():
        difference = torch.linalg.vector_norm(tensor - weights[name])
        assert difference <= 1e-3 * torch.linalg.vector_norm(weights[name]), name


@pytest.mark.parametrize(
    "choices",
    [
        {"alpha": 0.3, "on_device": 0.5, "across_turn": 0.25},
        {"alpha": 0.3, "gradient": 0.5, "overlap": "none"},
        {"schedule": "horizontal", "micro_batches": 3},
    ],
)
def test_memory_and_traffic_are_the_plans_to_the_byte(directory, tmp_path, choices):
    result = run(directory, tmp_path / "run", optimizer=0.4, checkpoints=0.5, **choices)
    compared = {row.quantity: row for row in result.compared}
    for quantity in ("host_arena_bytes", "device_arena_bytes", "ssd_read_bytes", "ssd_write_bytes"):
        assert compared[quantity].measured == compared[quantity].predicted > 0, quantity
