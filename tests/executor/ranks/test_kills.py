"""kill -9 of any rank at any moment: the run goes on to the bits of one that nobody killed."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ssdplan.executor.ranks.place import directory_of
from tests.executor.ranks.processes import ended, run, started
from tests.executor.runs import prepare
from tests.extent import short_or_full

STEPS = 12
RUNS, MOST_KILLS = short_or_full((1, 2), (20, 4))
"""Runs that are killed, and how often each at most: of all placements and numbers of ranks together, up to 80 kills."""
MOST_STARTS = 20
PATIENCE = 30.0
"""Seconds after which a rank ends whose neighbour was killed before they met."""
PLACEMENTS: list[dict[str, object]] = [
    {"alpha": 0.4, "optimizer": 0.0, "parameters": 0.5},
    {"alpha": 1.0, "optimizer": 1.0, "unified": True},
    {"alpha": 0.0, "optimizer": 0.37, "on_device": 0.5},
    {"zeroth_order": {"written_every": 2}, "parameters": 0.5},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"))


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()


def steps_of(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return metrics.read_text().count('"loss"') if metrics.exists() else 0


def places(out: Path, ranks: int) -> list[Path]:
    return [directory_of(out, rank) for rank in range(ranks)]


def begun(out: Path, ranks: int) -> bool:
    """Whether all ranks have begun to keep what they could go on with."""
    return all((place / "run.json").exists() for place in places(out, ranks))


@pytest.mark.parametrize("number", range(RUNS))
def test_a_killed_rank_loses_nothing(
    directory: Path, tmp_path: Path, number: int, record_property: Callable[[str, object], None]
) -> None:
    rng, ranks = random.Random(number), (2, 4)[number % 2]
    placement = PLACEMENTS[number % len(PLACEMENTS)]
    recipe = {"steps": STEPS, "snapshot_every": 2}
    whole = run(directory, tmp_path / "whole", ranks, recipe=recipe, **placement)
    out, kills, resumes = tmp_path / "killed", 0, False
    for _ in range(MOST_STARTS):
        with started(
            directory, out, ranks, recipe=recipe, resumes=resumes, patience=PATIENCE, **placement
        ) as processes:
            until, victim = rng.randrange(STEPS), rng.randrange(ranks)
            tick = threading.Event()
            while kills < MOST_KILLS and steps_of(out) < until and any(p.poll() is None for p in processes):
                tick.wait(0.002)
            if kills < MOST_KILLS and any(process.poll() is None for process in processes):
                tick.wait(rng.uniform(0.0, 0.05))  # anywhere in a step, a snapshot or the start
                processes[victim].kill()
                kills += 1
            codes = [code for code, _ in ended(processes)]
        if not any(codes):
            break
        resumes = begun(out, ranks)
        if not resumes:
            assert not steps_of(out), "a run that had begun cannot go on"
            for place in places(out, ranks):  # what a rank that was killed at once has left
                shutil.rmtree(place, ignore_errors=True)
    else:
        raise AssertionError("it never came to its end")
    record_property("kills", kills)
    found = json.loads(out.with_name("killed.json").read_text())
    assert found == whole and digest(out) == digest(tmp_path / "whole")
