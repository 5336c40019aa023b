"""A snapshot of several ranks in one process: exported, whichever of them is ahead."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ssdplan.executor.snapshots.drop import drop_store
from ssdplan.executor.snapshots.export_run import export_run
from ssdplan.executor.store import survey, withdraw
from ssdplan.plans.errors import StoreError, UsageError
from tests.executor.ranks.processes import run
from tests.executor.runs import prepare

PLAN = {"alpha": 0.4, "optimizer": 0.37, "parameters": 0.5, "precision": "bf16", "masters": "residual"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With runs of two ranks that ended after two steps and after one, each step with a snapshot."""
    path = prepare(tmp_path_factory.mktemp("models"))
    for steps in (1, 2):
        run(path, path / f"run-{steps}", 2, recipe={"steps": steps, "snapshot_every": 1}, **PLAN)
    return path


def weights(model: Path) -> bytes:
    return (model / "model.safetensors").read_bytes()


def test_an_export_has_the_bytes_of_the_model_that_the_ranks_wrote(directory: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in (directory / "run-2").rglob("*.ssdplan")}
    assert export_run(directory / "run-2", tmp_path / "model") == 2
    assert weights(tmp_path / "model") == weights(directory / "run-2" / "model")
    assert before == {path: path.read_bytes() for path in (directory / "run-2").rglob("*.ssdplan")}, "it reads"


@pytest.mark.parametrize("behind", [0, 1])
def test_an_export_takes_the_newest_snapshot_that_all_ranks_have(directory: Path, tmp_path: Path, behind: int) -> None:
    """After a kill between two commits one rank has a snapshot more; the others' last is beside it."""
    out = tmp_path / "run"
    shutil.copytree(directory / "run-2", out)
    for place in (out, out / "rank-1"):
        lines = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
        last = max(number for number, line in enumerate(lines) if "snapshot_seconds" in line)
        (place / "metrics.jsonl").write_text("".join(lines[:last]))
    (lying,) = survey([out / "rank-1" if behind else out])
    withdraw(lying)
    assert export_run(out, tmp_path / "model") == 1
    assert weights(tmp_path / "model") == weights(directory / "run-1" / "model")


def test_an_export_names_what_is_missing(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(directory / "run-2", out)
    (out / "rank-1").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"is a run of 2 ranks, and .*rank-1 is not there"):
        export_run(out, tmp_path / "model")
    (tmp_path / "elsewhere").rename(out / "rank-1")
    (store,) = (out / "rank-1").glob("*.ssdplan")
    store.unlink()
    with pytest.raises(StoreError, match="its store is on none of"):
        export_run(out, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_drop_removes_the_stores_of_all_ranks(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(directory / "run-2", out)
    with pytest.raises(UsageError, match=r"rank-1/volume-0.*give --yes"):
        drop_store(out, sure=False, without_model=False)
    assert len(list(out.rglob("*.ssdplan"))) == 2
    dropped = drop_store(out, sure=True, without_model=False)
    assert dropped.step == 2 and len(dropped.removed) == 2 and not list(out.rglob("*.ssdplan"))
    with pytest.raises(UsageError, match="was dropped already"):
        drop_store(out, sure=True, without_model=False)


def test_a_drop_that_was_cut_off_ends_with_the_other_ranks_stores(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(directory / "run-2", out)
    share = next((out / "rank-1").glob("*.ssdplan"))
    kept = share.read_bytes()
    drop_store(out, sure=True, without_model=False)
    share.write_bytes(kept)
    assert drop_store(out, sure=True, without_model=False).removed == (share,) and not share.exists()
