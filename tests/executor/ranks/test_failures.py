"""What ranks say when one of them fails, hangs, or is not as the others are: a typed error each, in bounded time."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from ssdplan.executor.ranks.ended import Ended
from ssdplan.executor.ranks.group import ALONE, agreed
from ssdplan.executor.ranks.place import Place, place_of
from ssdplan.executor.snapshots.export_run import export_run
from ssdplan.plans.errors import DiskFullError, RankError, UsageError
from tests.bounds import HANG_SECONDS
from tests.executor.ranks.processes import ended, run, started
from tests.executor.runs import prepare

RANK_ERROR = RankError.exit_code


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"))


def test_recipes_that_differ_are_refused_on_every_rank_before_the_first_step(directory: Path, tmp_path: Path) -> None:
    with started(directory, tmp_path / "run", 2, of_ranks={1: {"seed": 5}}) as processes:
        for code, words in ended(processes):
            assert code == RANK_ERROR and "what run was told to do of rank 1" in words and "all ranks need" in words
    assert not (tmp_path / "run").exists()


def test_data_that_differ_are_named(directory: Path, tmp_path: Path) -> None:
    with started(directory, tmp_path / "run", 2, of_ranks={1: {"pack": False}}) as processes:
        assert all(code == RANK_ERROR for code, _ in ended(processes))


@pytest.mark.parametrize("asked", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_end_with_a_rank_that_dies_or_hangs(directory: Path, tmp_path: Path, asked: signal.Signals) -> None:
    """In the middle of a step, with an error that says who waited for whom at what; a hang is met within the patience.
    The last snapshot that all have is there."""
    recipe = {"steps": 100000, "snapshot_every": 1}
    patience = 3.0 if asked == signal.SIGSTOP else HANG_SECONDS
    with started(directory, tmp_path / "run", 2, recipe=recipe, patience=patience) as processes:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and "snapshot_seconds" in metrics.read_text()):
            assert all(process.poll() is None for process in processes), ended(processes)
            os.sched_yield()
        processes[1].send_signal(asked)
        ((code, words),) = ended(processes[:1])
        assert code == RANK_ERROR, words
        assert re.search(r"rank 0, (gather \w+|exchange gradient|telling).*: rank 1 has ended, or has not ans", words)
    assert export_run(tmp_path / "run", tmp_path / "model") >= 1


def test_a_full_disk_on_one_rank_ends_all_and_loses_nothing(directory: Path, tmp_path: Path) -> None:
    """It says so itself (5), and the others say which rank it was (9). Both go on together."""
    recipe, plan = {"steps": 4, "snapshot_every": 1}, {"alpha": 0.4, "optimizer": 0.37, "parameters": 0.5}
    whole = run(directory, tmp_path / "whole", 2, recipe=recipe, **plan)
    with started(directory, tmp_path / "run", 2, recipe=recipe, faults={1: [150, "ENOSPC"]}, **plan) as processes:
        (other, named), (full, said) = ended(processes)
    assert full == DiskFullError.exit_code and "No space left" in said, said
    assert other == RANK_ERROR and "rank 1 has ended" in named, named
    assert export_run(tmp_path / "run", tmp_path / "model") in (1, 2, 3)
    assert run(directory, tmp_path / "run", 2, recipe=recipe, resumes=True, **plan) == whole


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, 0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "2", "SSDPLAN_LAUNCHED": "/launched"}, Place(0, 2, 0, 1, Path("/launched"))),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Place(3, 4, 1, 2)),
    ],
)
def test_torchruns_environment_is_read(environment: dict[str, str], found: Place | None) -> None:
    assert place_of(environment) == found
    if found:
        assert found.meeting == ("file:///launched/meeting" if found.launcher else "env://")


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
        {"RANK": "1" * 7, "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "abc"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "65536"},
    ],
)
def test_an_environment_of_no_launcher_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="torchrun"):
        place_of(environment)


def test_what_a_step_found_is_told_as_bytes() -> None:
    one = Ended(1.5, (1 << 1300) + 7, "")
    other = Ended(-0.25, 3, "the loss of micro-batch 2")
    assert [Ended.read(each.words()) for each in (one, other)] == [one, other]
    both = Ended.of_all([one, other])
    assert both == Ended(1.25, (1 << 1300) + 10, "the loss of micro-batch 2 (rank 1)")
    assert len(Ended(0.0, 0, "ü" * 5000).words()) <= 1016
    for wrong in (b"", b"x" * 10, b"x" * 2000):
        with pytest.raises(RankError, match="of one version"):
            Ended.read(wrong)
    assert ALONE.tell(b"here") == [b"here"]
    agreed(ALONE, {"anything": "at all"})


class Other:
    """A rank 0 whose neighbour has other weights."""

    rank, size = 0, 2

    def tell(self, words: bytes) -> list[bytes]:
        return [words, b"other" if words == b"mine" else words]


def test_what_differs_is_named() -> None:
    agreed(Other(), {"the plan": "same"})  # type: ignore[arg-type]
    with pytest.raises(RankError, match="the model's weights of rank 1 is other, and that of rank 0 is mine"):
        agreed(Other(), {"the plan": "same", "the model's weights": "mine"})  # type: ignore[arg-type]
