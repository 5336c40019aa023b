"""Whole runs on unified memory: no bit differs from runs on an emulated device, and nothing is copied to one."""

import json
from pathlib import Path

import pytest
import torch

from ssdplan.executor.model.model import open_model
from tests.executor.runs import LENGTH, prepare
from tests.executor.test_schedules import bits
from tests.extent import FULL
from tests.made.plans import make_plan


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = prepare(tmp_path_factory.mktemp("unified"), layers=4)
    prepare(path / "untied", layers=4, tied=False)
    return prepare(path, "gpt2", layers=2, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)


# alpha, on host (whole states), across the turn, optimizer, checkpoints, serial.
GRID = [
    (0.0, 0.0, 0.0, 0.0, 0.0, True),
    (0.0, 1.0, 0.0, 1.0, 1.0, False),
    (0.3, 0.5, 0.5, 0.37, 0.5, False),
    (1.0, 0.5, 0.25, 0.37, 0.25, False),
]
if FULL:
    GRID += [
        (0.0, 0.0, 0.0, 0.0, 0.0, False),
        (0.3, 0.25, 0.0, 0.0, 1.0, True),
        (1.0, 1.0, 0.0, 1.0, 0.0, False),
    ]


@pytest.mark.parametrize(
    ("n", "name", "tied", "precision"),
    [
        (1, "llama", True, "fp32"),
        (3, "llama", False, "bf16"),
        (1, "gpt2", True, "bf16"),
        *([(3, "llama", True, "fp32"), (1, "llama", False, "bf16"), (3, "gpt2", True, "bf16")] if FULL else []),
    ],
)
def test_no_bit_differs_from_an_emulated_device(directory, tmp_path, name, n, tied, precision):
    model = directory if tied else directory / "untied"
    shape = {"precision": precision, "micro_batches": n, "micro_batch_size": 1}
    seen = {"emulated": bits(model, tmp_path / "emulated", name, alpha=0.3, optimizer=0.5, parameters=0.4, **shape)}
    for number, (alpha, on_host, across_turn, optimizer, checkpoints, serial) in enumerate(GRID):
        seen[str(number)] = bits(
            model,
            tmp_path / str(number),
            name,
            unified=True,
            alpha=alpha,
            on_device=on_host,
            across_turn=across_turn,
            optimizer=optimizer,
            checkpoints=checkpoints,
            gradient=0.5,
            serial=serial,
            **shape,
        )
    assert len(set(seen.values())) == 1, seen


@pytest.mark.parametrize("clip", [None, 0.5])
def test_clipping_and_the_norm_are_the_same(directory, tmp_path, clip):
    choices = {"alpha": 1.0, "clip_grad_norm": clip, "optimizer": 0.5}
    assert bits(directory, tmp_path / "emulated", **choices) == bits(
        directory, tmp_path / "unified", unified=True, on_device=0.5, **choices
    )


@pytest.mark.parametrize(("tied", "precision"), [(True, "fp32"), (False, "bf16")])
def test_a_horizontal_run_gives_the_same_bits(directory, tmp_path, tied, precision):
    model = directory if tied else directory / "untied"
    choices = {"schedule": "horizontal", "precision": precision, "micro_batches": 3, "micro_batch_size": 1}
    emulated = bits(model, tmp_path / "emulated", optimizer=0.4, parameters=0.4, checkpoints=0.4, **choices)
    for on_host in (0.0, 0.5, 1.0):
        out = tmp_path / f"{on_host}"
        assert emulated == bits(model, out, unified=True, on_device=on_host, optimizer=on_host, **choices)


def test_snapshots_change_no_bit(directory, tmp_path):
    choices = {"unified": True, "alpha": 0.3, "on_device": 0.5, "optimizer": 0.5, "checkpoints": 0.5}
    assert bits(directory, tmp_path / "plain", **choices) == bits(
        directory, tmp_path / "snapshots", snapshot_every=1, **choices
    )


def test_the_peak_is_the_arena_and_what_compute_takes_besides(directory, tmp_path):
    bits(directory, tmp_path / "run", unified=True, on_device=0.5, optimizer=0.5)
    plan = make_plan(
        open_model(directory / "llama", torch.float32),
        sequence_length=LENGTH,
        chunk=4096,
        unified=True,
        on_device=0.5,
        optimizer=0.5,
    )
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert first["device_peak_bytes"] == 0
    assert first["host_peak_bytes"] > plan.prediction.host_arena_bytes
