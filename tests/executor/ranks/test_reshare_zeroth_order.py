"""Another number of ranks at resume, without gradients: ranks that join have the log and the weights that were kept,
a kill at any moment loses nothing, and the steps behind are those of one rank on the same batches, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.zeroth_order_log import read_log
from ssdplan.executor.snapshots.reshare import finish, reshare
from ssdplan.executor.snapshots.shares import ranks_of
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.errors import DiskFullError, MismatchError
from ssdplan.plans.files import Folder
from tests.executor.ranks.processes import run
from tests.executor.ranks.test_reshare import exported, killed_at, places, weights
from tests.executor.runs import LENGTH, prepare
from tests.extent import short_or_full
from tests.made.plans import make_plan

STEPS, ROWS = 5, 8
DIRECTIONS = 2
PLACEMENT: dict[str, Any] = {"parameters": 0.5, "micro_batch_size": 1}
RECIPE = {"eval_every": 2, "snapshot_every": 2}
"""Of the three steps before ranks change, the weights after the second are kept."""


def shared(ranks: int) -> dict[str, Any]:
    return {**PLACEMENT, "zeroth_order": {"directions": DIRECTIONS}, "micro_batches": ROWS // ranks}


def plan_of(directory: Path, ranks: int, **choices: Any) -> Plan:
    model = open_model(directory / "llama", torch.float32)
    chosen = {**shared(ranks), "zeroth_order": ZerothOrder(directions=DIRECTIONS), **choices}
    return make_plan(model, sequence_length=LENGTH, ranks=ranks, **chosen)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of one rank that nobody stopped, and runs of one rank and of two that have three of its steps."""
    path = prepare(tmp_path_factory.mktemp("models"))
    run(path, path / "whole", 1, recipe=RECIPE | {"steps": STEPS}, **shared(1))
    for ranks in (1, 2):
        run(path, path / f"of-{ranks}", ranks, recipe=RECIPE | {"steps": 3}, **shared(ranks))
    return path


def logs(out: Path) -> list[Any]:
    found = []
    for place in places(out):
        with Folder(place) as folder:
            found.append(read_log(folder).moves)
    return found


@pytest.mark.parametrize(("had", "ranks"), short_or_full([(1, 2), (2, 1)], [(1, 2), (2, 1), (2, 4), (1, 4)]))
def test_another_number_of_ranks_goes_on_to_the_same_bits(
    directory: Path, tmp_path: Path, had: int, ranks: int
) -> None:
    """From the weights that were kept; and then once more, since the log began with other ranks."""
    out, told = tmp_path / "run", list[str]()
    shutil.copytree(directory / f"of-{had}", out)
    reshare(out, plan_of(directory, ranks), note=told.append)
    assert ranks_of(out) == ranks == len(places(out))
    assert "Bits may differ" in told[0] and f"goes on with {ranks} rank(s) instead of {had}" in told[0]
    assert all((place / "weights-2.json").exists() and (place / "weights-2").is_dir() for place in places(out))
    for place in places(out):
        lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    expected = json.loads((directory / "whole.json").read_text())
    for steps in (4, STEPS):
        found = run(directory, out, ranks, resumes=True, recipe=RECIPE | {"steps": steps}, **shared(ranks))
    assert found["losses"] == expected["losses"]
    both = [step for step in expected["eval"] if step in found["eval"]]
    assert len(both) >= 3
    assert [found["eval"][step] for step in both] == pytest.approx([expected["eval"][step] for step in both], rel=1e-6)
    assert weights(out / "model") == weights(directory / "whole" / "model")
    assert logs(out) == logs(directory / "whole") * ranks
    for aside in out.glob("rank-*-until-3"):
        assert (aside / "metrics.jsonl").exists() and not list(aside.glob("weights-*"))
    assert len(list(out.glob("rank-*-until-3"))) == max(had - ranks, 0)


def test_a_run_without_a_step_goes_on_with_another_number(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(directory / "of-1", out)
    for name in ("zeroth-order.log", "metrics.jsonl", "weights-2.json"):
        (out / name).unlink()
    reshare(out, plan_of(directory, 2))
    found = run(directory, out, 2, resumes=True, recipe=RECIPE | {"steps": STEPS}, **shared(2))
    assert found["losses"] == json.loads((directory / "whole.json").read_text())["losses"]


def test_steps_that_rank_0_has_are_not_lost_with_the_others(directory: Path, tmp_path: Path) -> None:
    """A kill came between two ranks' records of one step: each record is of all ranks' losses."""
    out = tmp_path / "run"
    shutil.copytree(directory / "of-2", out)
    behind = out / "rank-1" / "zeroth-order.log"
    behind.write_bytes(behind.read_bytes()[:-1])
    reshare(out, plan_of(directory, 1))
    assert len(logs(out)[0]) == 3
    assert len(read_log_of(out / "rank-1-until-3").moves) == 2


def read_log_of(place: Path) -> Any:
    with Folder(place) as folder:
        return read_log(folder)


@pytest.mark.parametrize(
    ("choices", "what"),
    [
        ({"micro_batches": 5}, "rows a step was 8 and is 5.*--global-batch 8 --optimizer mezo --directions 2"),
        ({"zeroth_order": ZerothOrder(directions=1)}, "directions was 2 and is 1"),
        ({"zeroth_order": None}, "optimizer was mezo and is adamw"),
    ],
)
def test_another_training_is_refused_and_changes_nothing(
    directory: Path, tmp_path: Path, choices: dict[str, Any], what: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(directory / "of-2", out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(MismatchError, match=what):
        reshare(out, plan_of(directory, 1, **choices))
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_disk_that_is_full_leaves_the_ranks_that_there_were(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, made = tmp_path / "run", list[object]()
    shutil.copytree(directory / "of-2", out)

    def full(*arguments: Any) -> None:
        made.append(arguments)
        if len(made) == 2:
            raise DiskFullError("no room for these weights")

    monkeypatch.setattr("ssdplan.executor.snapshots.kept_weights.copy_model", full)
    with pytest.raises(DiskFullError, match="no room"):
        reshare(out, plan_of(directory, 4))
    assert ranks_of(out) == 2 == len(places(out))
    assert exported(out, tmp_path / "model") == weights(directory / "of-2" / "model")


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_kill_at_any_moment_loses_nothing(directory: Path, tmp_path: Path, ranks: int) -> None:
    """The steps are there at once, and after what was left is brought to its end; then it goes on as before."""
    expected, steps = weights(directory / "of-2" / "model"), logs(directory / "of-2")[0]
    plan, moment, seen = plan_of(directory, ranks), 0, set()
    while True:
        out = tmp_path / f"run-{moment}"
        shutil.copytree(directory / "of-2", out)
        if not killed_at(moment, lambda out=out: reshare(out, plan)):
            break
        assert exported(out, tmp_path / f"at-once-{moment}") == expected
        finish(out, lambda text: None)
        seen.add(ranks_of(out))
        assert ranks_of(out) in (2, ranks) and len(places(out)) == ranks_of(out)
        if ranks_of(out) == 2:
            reshare(out, plan)
        assert logs(out) == [steps] * ranks
        assert not [name for place in places(out) for name in place.glob(".*")], "nothing half-written is left"
        assert all((place / "weights-2.json").exists() for place in places(out))
        assert exported(out, tmp_path / f"then-{moment}") == expected
        shutil.rmtree(out)
        moment += short_or_full(5, 1)
    assert moment > 10 and seen == {2, ranks}
