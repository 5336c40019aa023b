"""Ranks in many shapes beside one rank on the same batches: each family, and a sample in which any two of residency,
delay, rung, snapshots and what becomes of the run meet at least once."""

from __future__ import annotations

import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdplan.executor.model.model import open_model
from ssdplan.executor.snapshots.reshare import reshare
from ssdplan.plans.documents.plan import Saved
from tests.bounds import HANG_SECONDS
from tests.executor.model.test_layers import opened as in_memory
from tests.executor.model.test_saved import values_at
from tests.executor.ranks.processes import ended, run, started
from tests.executor.ranks.test_runs import ALIKE, assert_alike
from tests.executor.runs import LENGTH, prepare
from tests.extent import short_or_full
from tests.made.models import FAMILIES, OTHERS
from tests.made.plans import make_plan

ROWS, STEPS = 4, 6
EPS = 1e-4
"""With this epsilon a gradient that is rounding alone (of the bias of OPT's keys) moves nothing."""


@pytest.mark.parametrize(("family", "ranks"), short_or_full(
    [("qwen3", (2,)), ("gemma2", (4,))], [(family, (2, 4)) for family in (*FAMILIES, *OTHERS)]
))  # fmt: skip
def test_every_family_trains_as_on_one_rank(tmp_path: Path, family: str, ranks: tuple[int, ...]) -> None:
    """Losses in fp32 to 5e-6, and each tensor to a thousandth of its norm."""
    prepare(tmp_path, family, tied=False)
    choices: dict[str, Any] = {"name": family, "recipe": {"steps": 4}, "micro_batch_size": 1, "alpha": 0.3, "eps": EPS}
    one = run(tmp_path, tmp_path / "one", 1, micro_batches=ROWS, **choices)
    for size in ranks:
        several = run(tmp_path, tmp_path / f"of-{size}", size, micro_batches=ROWS // size, **choices)
        assert several["losses"] == pytest.approx(one["losses"], rel=ALIKE), size
        assert_alike(tmp_path / f"of-{size}", tmp_path / "one")


FACTORS: dict[str, tuple[Any, ...]] = {
    "residency": (
        {},
        {"optimizer": 0.37, "parameters": 0.5, "gradient": 0.0},
        {"optimizer": 1.0, "parameters": 1.0, "checkpoints": 1.0, "on_device": 0.5},
        {"optimizer": 1.0, "unified": True},
    ),
    "alpha": (0.0, 0.4, 1.0),
    "saves": (False, True),
    "snapshot_every": (1, 3),
    "then": ("whole", "killed", "killed, then 4 ranks", "killed, then 1 rank", "4 ranks", "of 4 ranks, killed"),
}


def pairwise(seed: int) -> list[dict[str, Any]]:
    """Rows of which any two values of two factors meet in one: the best of some random rows, until all have."""
    rng, names = random.Random(seed), list(FACTORS)
    left = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(range(len(FACTORS[a])), range(len(FACTORS[b])))
    }
    rows: list[dict[str, Any]] = []
    while left:
        tried = [{name: rng.randrange(len(FACTORS[name])) for name in names} for _ in range(60)]
        met = [{(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)} & left for row in tried]
        best = max(range(len(tried)), key=lambda number: len(met[number]))
        left -= met[best]
        if met[best]:
            rows.append({name: FACTORS[name][value] for name, value in tried[best].items()})
    return rows


ROWS_OF_SAMPLE = pairwise(0)


def test_the_sample_meets_every_pair() -> None:
    assert 18 <= len(ROWS_OF_SAMPLE) <= 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of one rank that nobody stopped."""
    path = prepare(tmp_path_factory.mktemp("models"))
    recipe = {"steps": STEPS, "eval_every": 2}
    run(path, path / "one", 1, recipe=recipe, micro_batches=ROWS, micro_batch_size=1, alpha=0.4)
    return path


@pytest.mark.parametrize("number", short_or_full(range(2, 4), range(len(ROWS_OF_SAMPLE))))
def test_any_two_choices_train_as_one_rank_does(directory: Path, tmp_path: Path, number: int) -> None:
    row, rng = ROWS_OF_SAMPLE[number], random.Random(number)
    choices: dict[str, Any] = {**row["residency"], "alpha": row["alpha"], "micro_batch_size": 1}
    if row["saves"]:
        (values,) = values_at(in_memory(directory / "llama"), 0.0)
        choices |= {"rungs": {"all": sorted(values)}, "saved": [Saved(rung="all", tier="host", share=1.0)]}
    ranks = 4 if row["then"] == "of 4 ranks, killed" else 2
    out, recipe = tmp_path / "run", {"eval_every": 2, "snapshot_every": row["snapshot_every"]}

    def shared(size: int) -> dict[str, Any]:
        return {**choices, "micro_batches": ROWS // size}

    stop = STEPS if row["then"] == "whole" else STEPS // 2 if row["then"] == "4 ranks" else None
    if stop:
        found = run(directory, out, ranks, recipe=recipe | {"steps": stop}, **shared(ranks))
    else:
        with started(directory, out, ranks, recipe=recipe | {"steps": STEPS}, **shared(ranks)) as processes:
            metrics, deadline = out / "metrics.jsonl", time.monotonic() + HANG_SECONDS
            while not (metrics.exists() and "snapshot_seconds" in metrics.read_text()):
                assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
            processes[rng.randrange(ranks)].kill()
            ended(processes)
    if stop != STEPS:
        size = {"killed, then 4 ranks": 4, "4 ranks": 4, "killed, then 1 rank": 1}.get(row["then"], ranks)
        if size != ranks:
            model = open_model(directory / "llama", torch.float32)
            reshare(out, make_plan(model, sequence_length=LENGTH, ranks=size, **shared(size)))
        found = run(directory, out, size, recipe=recipe | {"steps": STEPS}, resumes=True, **shared(size))
    expected = json.loads((directory / "one.json").read_text())
    assert found["losses"] == pytest.approx(expected["losses"], rel=ALIKE)
    both = [step for step in expected["eval"] if step in found["eval"]]  # a run that ended before evaluates there too
    assert len(both) >= 4, (found["eval"], expected["eval"])
    assert [found["eval"][step] for step in both] == pytest.approx([expected["eval"][step] for step in both], rel=ALIKE)
    assert_alike(out, directory / "one")
