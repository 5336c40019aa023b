"""What a run says of itself: its drives are those of the plan or not, and a loss scale that is asked for when it goes
on as another run is the one that counts."""

from pathlib import Path

import pytest

from ssdplan.executor.optimizer.loss_scale import LossScale
from ssdplan.executor.snapshots.run_directory import on_planned_drives
from ssdplan.executor.snapshots.snapshots import SCHEMA, Origin, Scaling, Snapshot
from ssdplan.plans.schedule.build import build_schedule
from tests.made.decisions import decide
from tests.made.plans import planned
from tests.made.profiles import made_machine, made_model, made_volume


def test_drives_are_told_apart_however_many_there_are(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    model = made_model(blocks=2, hidden=64)
    decision = decide(model)
    volume = made_volume().model_copy(update={"path": str(tmp_path)})
    plan = planned(model, made_machine(volumes=(volume,)), decision, build_schedule(model, decision))
    assert on_planned_drives(plan, [tmp_path / "not" / "there" / "yet"])
    assert not on_planned_drives(plan, [other]), "as many, and another"
    assert not on_planned_drives(plan, [tmp_path, tmp_path])


def snapshot(scaling: Scaling | None) -> Snapshot:
    recipe = {"loss_scale.scale": 65536.0, "loss_scale.growth_interval": 2000}
    origin = Origin(model="m", weights="w", data={}, batch={}, recipe=recipe)
    return Snapshot(schema=SCHEMA, step=9, samples=9, origin=origin, scaling=scaling, made=(True,))


def test_a_loss_scale_goes_on_unless_another_is_asked_for() -> None:
    kept = snapshot(Scaling(scale=1024.0, growth_interval=2000, good_steps=7, skipped=3))
    assert kept.loss_scale(LossScale()) == LossScale(1024.0, 2000, 7, 3)
    assert kept.loss_scale(LossScale(scale=256.0)) == LossScale(256.0, 2000, 0, 3)
    assert kept.loss_scale(LossScale(growth_interval=5)) == LossScale(1024.0, 5, 7, 3)
    assert snapshot(None).loss_scale(LossScale()) is None
