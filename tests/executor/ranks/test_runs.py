"""Whole runs of several ranks over gloo: the losses and weights of one rank on the same batches, and the same bits from
run to run whatever the placement."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.executor.ranks.processes import run
from tests.executor.runs import prepare
from tests.extent import short_or_full

ALIKE = 5e-6
"""Of losses in fp32, which several ranks sum in another order."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = prepare(tmp_path_factory.mktemp("models"))
    return prepare(path, "gpt2", layers=2, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()


def assert_alike(found: Path, expected: Path) -> None:
    """Each tensor to a thousandth of its norm."""
    mine, theirs = weights_of(found), weights_of(expected)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        difference = float((mine[name].float() - tensor.float()).norm())
        assert difference <= 1e-3 * float(tensor.float().norm()), name


@pytest.mark.parametrize(
    ("name", "ranks", "plan"),
    short_or_full(
        [("llama", 2, {"alpha": 0.3}), ("llama", 2, {"schedule": "horizontal", "optimizer": 0.5})],
        [
            ("llama", 2, {"alpha": 0.3}),
            ("llama", 4, {"alpha": 0.3, "behind": True}),
            ("gpt2", 2, {"alpha": 0.3}),
            ("llama", 2, {"schedule": "horizontal", "optimizer": 0.5}),
            ("gpt2", 2, {"schedule": "horizontal", "unified": True}),
        ],
    ),
)
def test_ranks_train_as_one_does_on_the_same_batch(
    directory: Path, tmp_path: Path, name: str, ranks: int, plan: dict[str, Any]
) -> None:
    """Dropout included: it is drawn by the number of a micro-batch among all."""
    of_all = {"name": name, "recipe": {"steps": 4, "eval_every": 2}, "micro_batch_size": 1}
    alone = {each: value for each, value in plan.items() if each != "behind"}
    one = run(directory, tmp_path / "one", 1, micro_batches=4, **of_all, **alone)
    several = run(directory, tmp_path / "several", ranks, micro_batches=4 // ranks, **of_all, **plan)
    assert several["losses"] == pytest.approx(one["losses"], rel=ALIKE)
    assert several["eval"].keys() == one["eval"].keys() and len(one["eval"]) >= 2
    assert list(several["eval"].values()) == pytest.approx(list(one["eval"].values()), rel=ALIKE)
    assert_alike(tmp_path / "several", tmp_path / "one")


PLACEMENTS = short_or_full(
    [
        {},
        {"alpha": 0.4, "optimizer": 0.37, "parameters": 0.5, "on_device": 0.3, "across_turn": 0.5, "behind": True},
        {"alpha": 0.4, "optimizer": 0.5, "on_device": 1.0, "updated": 0.5, "behind": True},
        {"alpha": 1.0, "unified": True, "optimizer": 1.0, "serial": True},
    ],
    [
        {},
        {"behind": True},
        {"behind": True, "unified": True, "alpha": 0.4},
        {"alpha": 0.4, "optimizer": 0.37, "parameters": 0.5, "on_device": 0.3, "across_turn": 0.5},
        {"alpha": 1.0, "unified": True, "optimizer": 1.0, "serial": True},
        {"alpha": 0.4, "unified": True, "on_device": 1.0, "gradient": 0.0},
        {"optimizer": 1.0, "parameters": 1.0, "checkpoints": 1.0, "on_device": 1.0},
        {"alpha": 1.0, "chunk": 1 << 11, "lookahead": 1, "serial": True},
        {"optimizer": 0.5, "on_device": 0.7, "updated": 0.5},
        {"alpha": 0.4, "optimizer": 0.5, "on_device": 1.0, "updated": 0.5, "behind": True},
        {"on_device": 1.0, "updated": 1.0, "inputs": 1.0, "chunk": 1 << 11},
    ],
)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_placement_delay_and_runner_change_no_bit(directory: Path, tmp_path: Path, precision: str) -> None:
    seen = []
    formats = {"masters": "residual", "optimizer_states": "int8"} if precision == "bf16" else {}
    for number, placement in enumerate(PLACEMENTS):
        serial = bool(placement.get("serial"))
        plan = {name: value for name, value in placement.items() if name != "serial"}
        out = tmp_path / str(number)
        found = run(directory, out, 2, recipe={"steps": 3, "serial": serial}, precision=precision, **formats, **plan)
        seen.append((found["losses"], digest(out)))
    assert all(each == seen[0] for each in seen[1:])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_norm_clips_all_ranks_gradients(directory: Path, tmp_path: Path, precision: str) -> None:
    """As one rank's do on the same batch, to what half precision lets them differ by; and the norm that is told."""
    clipped = {"precision": precision, "clip_grad_norm": 0.05, "alpha": 1.0, "micro_batch_size": 1}
    one = run(directory, tmp_path / "one", 1, micro_batches=4, **clipped)
    two = run(directory, tmp_path / "two", 2, micro_batches=2, **clipped)
    there = run(directory, tmp_path / "there", 2, micro_batches=2, on_device=1.0, updated=0.5, **clipped)
    assert (there["losses"], digest(tmp_path / "there")) == (two["losses"], digest(tmp_path / "two"))
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-3)
    norms = [
        [
            line["grad_norm"]
            for line in map(json.loads, (tmp_path / name / "metrics.jsonl").open())
            if "grad_norm" in line
        ]
        for name in ("one", "two")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-2) and min(norms[0]) > 0.05
