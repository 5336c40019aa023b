"""Another number of ranks at resume: every state is shared out anew, a kill at any moment loses nothing, and what is
trained from there on is what one rank trains on the same batches."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdplan.executor.model.model import open_model
from ssdplan.executor.snapshots.claims import Claims
from ssdplan.executor.snapshots.export_run import export_run
from ssdplan.executor.snapshots.reshare import finish, reshare
from ssdplan.executor.snapshots.run_directory import RunDirectory
from ssdplan.executor.snapshots.shares import ranks_of
from ssdplan.executor.store import Store, survey, volumes
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import DiskFullError, MismatchError
from ssdplan.plans.files import Folder
from tests.executor.ranks.processes import run
from tests.executor.runs import LENGTH, prepare
from tests.extent import short_or_full
from tests.made.plans import make_plan

ALIKE = 5e-6
STEPS, ROWS = 2, 12
PLACEMENT: dict[str, Any] = {"alpha": 0.4, "optimizer": 0.37, "parameters": 0.5, "micro_batch_size": 1}
OTHER: dict[str, Any] = {"alpha": 1.0, "optimizer": 0.6, "on_device": 0.3}


def plan_of(directory: Path, ranks: int, **choices: Any) -> Plan:
    model = open_model(directory / "llama", torch.float32)
    chosen = {**PLACEMENT, "micro_batches": ROWS // ranks, **choices}
    return make_plan(model, sequence_length=LENGTH, ranks=ranks, **chosen)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of two ranks that has a snapshot after each of two steps, and its model."""
    path = prepare(tmp_path_factory.mktemp("models"))
    recipe = {"steps": STEPS, "snapshot_every": 1, "eval_every": 1}
    run(path, path / "two", 2, recipe=recipe, **PLACEMENT, micro_batches=ROWS // 2)
    return path


def weights(model: Path) -> bytes:
    return (model / "model.safetensors").read_bytes()


def exported(out: Path, to: Path) -> bytes:
    export_run(out, to)
    return weights(to)


def stores_in(out: Path) -> list[Path]:
    return sorted(out.rglob("*.ssdplan"))


def places(out: Path) -> list[Path]:
    return [out, *(path for path in out.glob("rank-*") if path.name[5:].isdecimal())]


def test_states_are_shared_out_to_any_number_of_ranks_and_back(directory: Path, tmp_path: Path) -> None:
    """The export has the same bytes each time, whatever the placement, and metrics of each rank tell of every step."""
    out, told = tmp_path / "run", []
    shutil.copytree(directory / "two", out)
    for number, (ranks, choices) in enumerate([(4, OTHER), (1, {}), (3, OTHER), (2, {})]):
        reshare(out, plan_of(directory, ranks, **choices), note=told.append)
        assert ranks_of(out) == ranks == len(stores_in(out)) == len(places(out))
        assert exported(out, tmp_path / f"model-{number}") == weights(directory / "two" / "model")
        for place in places(out):
            lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
            assert [line["step"] for line in lines if "loss" in line] == [1, 2]
            assert {line["step"] for line in lines if "eval_loss" in line} == {0, 1, 2}
    assert sum("instead of" in text and "bits may differ" in text for text in told) == 4
    assert len(list(out.glob("rank-1-until-2*"))) == 1, "what a rank told stays"
    aside = out / "rank-1-until-2"
    assert (aside / "metrics.jsonl").exists() and not stores_in(aside)


def on_drive(out: Path, drive: Path) -> Path:
    """Let the stores of this run lie on a drive that it was told, and the run be one that this user began here."""
    for place in places(out):
        there = drive if place == out else drive / place.name
        there.mkdir(parents=True)
        for store in place.glob("*.ssdplan"):
            store.rename(there / store.name)
        document = json.loads((place / "run.json").read_text()) | {"volumes": [str(there)]}
        (place / "run.json").write_text(json.dumps(document))
        Claims.of_user().note(document["identity"], place)
    return drive


def stores_on(drive: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(drive)) for path in stores_in(drive))


def test_stores_stay_on_the_drive_that_the_run_was_told(directory: Path, tmp_path: Path) -> None:
    """Each rank's in a directory of its own there; and no directory stays behind of a rank that is no more."""
    out = tmp_path / "run"
    shutil.copytree(directory / "two", out)
    drive = on_drive(out, tmp_path / "drive")
    for ranks, where in ((4, [".", "rank-1", "rank-2", "rank-3"]), (1, ["."]), (2, [".", "rank-1"])):
        reshare(out, plan_of(directory, ranks))
        assert stores_on(drive) == where and not stores_in(out)
        for place in places(out):
            document = json.loads((place / "run.json").read_text())
            assert document["volumes"] == [str(drive if place == out else drive / place.name)]
            assert not document["left"]
        assert len(list(drive.glob("rank-*"))) == ranks - 1
        assert exported(out, tmp_path / f"model-{ranks}") == weights(directory / "two" / "model")


def test_a_volume_that_is_one_ranks_alone_is_left(directory: Path, tmp_path: Path) -> None:
    out, told = tmp_path / "run", []
    shutil.copytree(directory / "two", out)
    drive = on_drive(out, tmp_path / "drive")
    (store,) = drive.glob("*.ssdplan")
    document = json.loads((out / "run.json").read_text()) | {"volumes": [str(store)]}
    (out / "run.json").write_text(json.dumps(document))
    reshare(out, plan_of(directory, 4), note=told.append)
    assert f"{store} is one rank's alone, so the store of each rank is from now on in {out}" in told[1]
    assert not stores_on(drive) and len(stores_in(out)) == 4
    for place in places(out):
        document = json.loads((place / "run.json").read_text())
        assert not document["volumes"] and not document["left"]


@pytest.mark.parametrize(
    ("choices", "what"),
    [
        ({"micro_batches": 5}, "rows a step was 12 and is 5"),
        ({"clip_grad_norm": 0.5, "alpha": 1.0}, "clip_grad_norm was None and is 0.5"),
        ({"precision": "bf16"}, "another model|precision was fp32 and is bf16"),
    ],
)
def test_another_training_is_refused_and_changes_nothing(
    directory: Path, tmp_path: Path, choices: dict[str, Any], what: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(directory / "two", out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(MismatchError, match=what):
        reshare(out, plan_of(directory, 1, **choices))
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_disk_that_is_full_leaves_the_ranks_that_there_were(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last of the new stores, when the others are durable."""
    out, create, made = tmp_path / "run", Store.create, []
    shutil.copytree(directory / "two", out)
    before = stores_in(out)

    def full(*arguments: Any, **more: Any) -> Store:
        made.append(arguments)
        if len(made) == 4:
            raise DiskFullError("no room for this store")
        return create(*arguments, **more)

    monkeypatch.setattr(Store, "create", full)
    with pytest.raises(DiskFullError, match="no room"):
        reshare(out, plan_of(directory, 4))
    assert ranks_of(out) == 2 and stores_in(out) == before and len(places(out)) == 2
    assert exported(out, tmp_path / "model") == weights(directory / "two" / "model")


def killed_at(moment: int, work: Callable[[], object]) -> bool:
    """Do it in a process of its own, which is gone before so many things have become durable or are removed. Whether
    it came so far."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            left = [moment]

            def counted(owner: Any, name: str) -> None:
                made = getattr(owner, name)

                def call(*arguments: Any, **more: Any) -> Any:
                    if not left[0]:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left[0] -= 1
                    return made(*arguments, **more)

                setattr(owner, name, call)

            for owner, name in (
                (Store, "create"), (Store, "write"), (Store, "commit"), (Folder, "write"), (Folder, "remove"),
                (Path, "rename"), (Path, "unlink"), (Path, "rmdir"), (os, "rename"), (os, "fsync"),
            ):  # fmt: skip
                counted(owner, name)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed otherwise"
    return os.WIFSIGNALED(status)


def killed_in(owner: Any, name: str, when: Callable[..., bool], work: Callable[[], object]) -> None:
    """Do it in a process of its own, which is gone when this is called so."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            made = getattr(owner, name)

            def call(*arguments: Any, **more: Any) -> Any:
                if when(*arguments):
                    os.kill(os.getpid(), signal.SIGKILL)
                return made(*arguments, **more)

            setattr(owner, name, call)
            work()
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_store_that_a_kill_left_half_made_does_not_stay_in_the_way(directory: Path, tmp_path: Path) -> None:
    """Its file is there, and nothing of a store is in it yet."""
    out, plan = tmp_path / "run", plan_of(directory, 4)
    shutil.copytree(directory / "two", out)
    killed_in(volumes, "_flush_directory", lambda at: at == out / "rank-2", lambda: reshare(out, plan))
    assert stores_in(out / "rank-2")
    finish(out, lambda text: None)
    assert len(places(out)) == 2
    reshare(out, plan)
    assert exported(out, tmp_path / "model") == weights(directory / "two" / "model")


@pytest.mark.parametrize("name", ["_claim", "_save"])
def test_a_rank_whose_directory_was_just_begun_does_not_stay_in_the_way(
    directory: Path, tmp_path: Path, name: str
) -> None:
    """Though it is to have its store elsewhere, which is believed of this user's own runs alone."""
    out, plan = tmp_path / "run", plan_of(directory, 4)
    shutil.copytree(directory / "two", out)
    drive = on_drive(out, tmp_path / "drive")
    killed_in(RunDirectory, name, lambda of, *_: of.path == out / "rank-2", lambda: reshare(out, plan))
    finish(out, lambda text: None)
    assert len(places(out)) == 2
    reshare(out, plan)
    assert stores_on(drive) == [".", "rank-1", "rank-2", "rank-3"]


@pytest.mark.parametrize(
    ("ranks", "on_a_drive"), short_or_full([(1, True), (4, False)], [(1, False), (1, True), (4, False), (4, True)])
)
def test_a_kill_at_any_moment_loses_nothing(directory: Path, tmp_path: Path, ranks: int, on_a_drive: bool) -> None:
    """The snapshot is there at once, and after what was left is brought to its end; then it goes on as before."""
    expected = weights(directory / "two" / "model")
    plan, moment, seen = plan_of(directory, ranks, **OTHER), 0, set()
    while True:
        out = tmp_path / f"run-{moment}"
        shutil.copytree(directory / "two", out)
        drive = on_drive(out, tmp_path / f"drive-{moment}") if on_a_drive else out
        if not killed_at(moment, lambda out=out: reshare(out, plan)):
            break
        assert exported(out, tmp_path / f"at-once-{moment}") == expected
        finish(out, lambda text: None)
        seen.add(ranks_of(out))
        assert ranks_of(out) in (2, ranks) and len(places(out)) == ranks_of(out)
        assert exported(out, tmp_path / f"then-{moment}") == expected
        if ranks_of(out) == 2:
            reshare(out, plan)
            assert exported(out, tmp_path / f"again-{moment}") == expected
        for place in places(out):
            where = drive if place == out else drive / place.name
            assert sum(each.generation > 0 for each in survey([where])) == 1, "no other store with states"
            assert drive == out or not stores_in(place)
        shutil.rmtree(out)
        moment += short_or_full(7, 1)
    assert moment > 20 and seen == {2, ranks}
