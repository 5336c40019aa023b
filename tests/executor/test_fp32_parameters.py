"""Parameters that a model keeps in fp32 when it is loaded in bf16: they stay so from the file to the export, and train
as plain PyTorch trains the model that transformers loads, wherever they live."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.layers import MicroBatch
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.optimizer.zeroth_order import MeZO
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.executor.snapshots.export_run import export_run
from ssdplan.executor.snapshots.replay import replay
from ssdplan.executor.snapshots.resume import reopened
from ssdplan.executor.train import Result, train
from ssdplan.plans.documents.state_layout import Masters
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from tests import reference
from tests.executor.ranks.processes import run as run_ranks
from tests.executor.runs import LENGTH, micro_batches_of, opened, texts
from tests.executor.test_architectures import make
from tests.executor.test_mixtures import MIXTURES
from tests.executor.test_zeroth_order import InMemory
from tests.made.models import make_tokenizer
from tests.made.plans import make_plan

STEPS = 3
# Routers that transformers keeps, with a correction that gets no gradient; those that a model's own code makes in fp32;
# decays.
FAMILIES: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": MIXTURES["ernie4_5_moe"] | {"tie_word_embeddings": False},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "olmo_hybrid": MIXTURES["olmo_hybrid"],
}
OPTIMIZER = AdamW(lr=3e-3, weight_decay=0.1, beta2=0.95, eps=1e-4)
MIXED: dict[str, Any] = {"optimizer": 0.4, "parameters": 0.3, "checkpoints": 0.5, "gradient": 0.6, "chunk": 4096}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for family, fields in FAMILIES.items():
        whole = reference.load(make(family, path / "whole" / family, vocab_size=320, **fields), torch.bfloat16)
        whole.save_pretrained(path / family)
        make_tokenizer(path / family)
    return texts(path)


def run(
    directory: Path,
    out: Path,
    family: str = "ernie4_5_moe",
    *,
    steps: int = STEPS,
    snapshot_every: int = 0,
    stop: int = 0,
    resumed: bool = False,
    settings: AdamW | MeZO = OPTIMIZER,
    note: Callable[[str], None] = lambda text: None,
    **choices: Any,
) -> Result:
    model = opened(directory / family, torch.bfloat16)
    plan = make_plan(model, sequence_length=LENGTH, precision="bf16", **{"micro_batches": 2, **MIXED, **choices})

    def step(metrics: Any) -> None:
        if metrics.step == stop:
            raise KeyboardInterrupt

    with contextlib.ExitStack() as stack:
        return train(
            plan,
            model,
            EmulatedDevice(),
            data=directory / "text.txt",
            out=out,
            recipe=Recipe(steps=steps, optimizer=settings, snapshot_every=snapshot_every),
            watch=Watch(step=step, note=note),
            resume=stack.enter_context(reopened(out)) if resumed else None,
        )


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def bits(out: Path, result: Result) -> tuple[Any, ...]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    norms = tuple(line["grad_norm"] for line in lines if "grad_norm" in line)
    return tuple(result.losses), norms, hashlib.sha256((out / "model/model.safetensors").read_bytes()).digest()


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm())


@pytest.mark.parametrize(
    ("family", "masters"), [("ernie4_5_moe", "fp32"), ("hunyuan_v1_moe", "none"), ("olmo_hybrid", "residual")]
)
def test_training_equals_plain_pytorch(directory: Path, tmp_path: Path, family: str, masters: Masters) -> None:
    """Nearer to plain PyTorch's run in bf16 than the same with each row by itself is, which rounds otherwise."""
    path = directory / family
    batches = [micro_batches_of(directory, step, micro_batches=2, family=family) for step in range(STEPS)]
    apart = [
        [MicroBatch(each.input_ids[row : row + 1], each.labels[row : row + 1]) for each in step for row in (0, 1)]
        for step in batches
    ]
    settings = reference.AdamW(lr=3e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1, masters=masters)
    (losses, plain), (others, other) = (
        reference.train(path, steps, settings, torch.bfloat16) for steps in (batches, apart)
    )
    result = run(directory, tmp_path / "run", family, alpha=0.4, masters=masters)
    assert result.losses == pytest.approx(losses, rel=max(abs(a - b) / a for a, b in zip(losses, others, strict=True)))

    kept = {name: each.dtype for name, each in reference.load(path, torch.bfloat16).named_parameters()}
    trained = reference.load(tmp_path / "run" / "model", torch.bfloat16).state_dict()
    plain, other = ({name: each.to(kept[name]) for name, each in found.items()} for found in (plain, other))
    for name, tensor in plain.items():
        assert trained[name].dtype == kept[name], name
        assert far(trained[name], tensor) <= far(other[name], tensor), name
    wide = [name for name, dtype in kept.items() if dtype == torch.float32]
    assert wide and any(far(trained[name], trained[name].bfloat16()) for name in wide), "they have more than 16 bits"


def test_an_export_has_the_formats_of_the_original(directory: Path, tmp_path: Path) -> None:
    """Of a run that ended, and of a snapshot. What gets no gradient has the bits of the original; the run names it."""
    with pytest.raises(KeyboardInterrupt):
        run(directory, tmp_path / "run", snapshot_every=1, stop=2)
    notes: list[str] = []
    run(directory, tmp_path / "whole", steps=1, note=notes.append)
    (kept,) = (each for each in notes if "stay in fp32" in each)
    (frozen,) = (each for each in notes if "the model itself gives no gradient" in each)
    assert "mlp.gate.weight" in kept and "e_score_correction_bias" in frozen
    assert export_run(tmp_path / "run", tmp_path / "out", model=directory / "ernie4_5_moe") == 1
    original, trained, exported = map(weights, (directory / "ernie4_5_moe", tmp_path / "whole/model", tmp_path / "out"))
    assert {name: each.dtype for name, each in trained.items()} == {name: each.dtype for name, each in original.items()}
    assert trained.keys() == exported.keys() and all(torch.equal(trained[name], exported[name]) for name in trained)
    untrained = [name for name in original if name.endswith("e_score_correction_bias")]
    assert untrained and all(torch.equal(trained[name], original[name]) for name in untrained)


PLACEMENTS = [
    {"alpha": 0.0, "optimizer": 1.0, "parameters": 1.0, "across_turn": 0.5},
    {"alpha": 1.0, "on_device": 1.0, "updated": 0.5, "gradient": 0.0},
    {"alpha": 0.4, "unified": True, "parameters": 0.0},
]


@pytest.mark.parametrize("masters", ["fp32", "none"])
def test_placements_and_a_stop_change_no_bit(directory: Path, tmp_path: Path, masters: Masters) -> None:
    found = [
        bits(tmp_path / f"{number}", run(directory, tmp_path / f"{number}", masters=masters, **placement))
        for number, placement in enumerate(PLACEMENTS)
    ]
    assert len(set(found)) == 1
    out = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run(directory, out, masters=masters, alpha=0.4, snapshot_every=1, stop=2)
    assert bits(out, run(directory, out, masters=masters, snapshot_every=1, resumed=True, **PLACEMENTS[1])) == found[0]


def test_ranks_keep_them_too(directory: Path, tmp_path: Path) -> None:
    """Two ranks have the bits of each other's placements, and the losses of one rank but for the order of sums."""
    shared = {"name": "ernie4_5_moe", "precision": "bf16", "micro_batch_size": 1}
    one = run_ranks(directory, tmp_path / "one", 1, micro_batches=4, **shared)
    two = run_ranks(directory, tmp_path / "two", 2, micro_batches=2, **shared)
    other = run_ranks(
        directory, tmp_path / "other", 2, micro_batches=2, alpha=0.4, optimizer=0.5, on_device=0.5, **shared
    )
    assert two["losses"] == other["losses"] == pytest.approx(one["losses"], rel=1e-3)
    every = [weights(tmp_path / name / "model") for name in ("two", "other")]
    assert all(torch.equal(every[0][name], tensor) for name, tensor in every[1].items())
    assert torch.float32 in {tensor.dtype for tensor in every[0].values()}


def test_without_gradients(directory: Path, tmp_path: Path) -> None:
    """To the bits of the estimator in memory, and of the log's replay."""
    optimizer = MeZO(lr=1e-2, eps=1e-2, weight_decay=0.1, decay_all=True)
    oracle = InMemory(directory / "olmo_hybrid", optimizer, 2, dtype=torch.bfloat16)
    expected = [
        oracle.step(step, micro_batches_of(directory, step, micro_batches=2, family="olmo_hybrid"))
        for step in range(STEPS)
    ]
    for masters, written_every in ((True, 2), (False, 1)):
        out = tmp_path / f"{masters}"
        zeroth_order = ZerothOrder(directions=2, written_every=written_every, masters=masters)
        mixed = {"optimizer": 0.0, "parameters": 0.4, "on_device": 0.3, "checkpoints": 0.0, "gradient": 1.0}
        result = run(directory, out, "olmo_hybrid", settings=optimizer, zeroth_order=zeroth_order, **mixed)
        replay(out, tmp_path / f"replayed-{masters}", model=directory / "olmo_hybrid")
        trained, again = weights(out / "model"), weights(tmp_path / f"replayed-{masters}")
        assert all(torch.equal(again[name], tensor) for name, tensor in trained.items())
        assert trained["model.layers.0.linear_attn.A_log"].dtype == torch.float32
        if masters:
            assert result.losses == [sum(map(sum, step)) / 4 for step in expected]
            found = reference.load(out / "model", torch.bfloat16).state_dict()
            for name, tensor in oracle.weights().items():
                assert torch.equal(found[name], tensor.detach()), name
