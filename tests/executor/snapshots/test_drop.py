"""The store of a run, before and after: what its snapshots take is said before they are taken, what it is for when the
run ends, and it goes when it is told to, and not before."""

import os
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ssdplan.executor.loop import Loop
from ssdplan.executor.runtime import interruption
from ssdplan.executor.snapshots.drop import drop_store
from ssdplan.executor.snapshots.export_run import export_run
from ssdplan.executor.snapshots.keeper import Keeper
from ssdplan.executor.snapshots.resume import reopened
from ssdplan.executor.snapshots.run_directory import RunDirectory
from ssdplan.executor.store import initialise, inspect
from ssdplan.plans.analysis.memory_usage import snapshot_store_bytes
from ssdplan.plans.documents.run import Exported
from ssdplan.plans.errors import StoppedWithSnapshot, StoreError, UsageError
from ssdplan.plans.schedule.build import build_schedule
from ssdplan.plans.units import format_bytes
from tests.executor.memory.test_migration import ON_HOST, ON_SSD, SPREAD
from tests.executor.runs import prepare
from tests.executor.snapshots.test_resume import plan_of, resume, run, stopped

TABLES = 3 << 20
"""What superblocks, tables and the rest of a stripe take at most of the stores here."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"), layers=2)


@pytest.mark.parametrize("choices", [SPREAD, ON_HOST, ON_SSD, {**ON_SSD, "optimizer_states": "bf16"}])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_plan_says_what_its_store_takes_with_snapshots(directory, tmp_path, choices, keep):
    plan = plan_of(directory, choices)
    run(directory, tmp_path / "run", plan, steps=1, snapshot_every=1, keep=keep)
    (path,) = (tmp_path / "run").glob("*.ssdplan")
    said = snapshot_store_bytes(build_schedule(plan.model, plan.decision), keep=keep)
    assert said <= path.stat().st_size < said + TABLES


def test_a_run_without_snapshots_says_before_its_first_step_what_a_stop_loses(directory, tmp_path):
    notes: list[str] = []
    seen: list[int] = []

    def at(step: int) -> None:
        seen.append(sum("all its steps are lost" in note for note in notes))

    plan = plan_of(directory, SPREAD)
    run(directory, tmp_path / "run", plan, at=at, notes=notes, steps=3)
    assert seen == [1, 1, 1]
    (said,) = [note for note in notes if "all its steps are lost" in note]
    assert "--snapshot-every N" in said
    (read,) = [note for note in notes if "a step takes " in note]
    assert notes.index(said) < notes.index(read)  # before data are read and the model is loaded, which may take long
    run(directory, tmp_path / "kept", plan, notes=(notes := []), steps=1, snapshot_every=1)
    (path,) = (tmp_path / "kept").glob("*.ssdplan")
    assert f"with a store of {format_bytes(path.stat().st_size)}" in said
    assert not any("are lost" in note for note in notes)


def test_a_finished_run_names_its_store_and_what_removes_it(directory, tmp_path):
    notes: list[str] = []
    out = tmp_path / "run"
    run(directory, out, plan_of(directory, SPREAD), notes=notes, steps=2, snapshot_every=1)
    (path,) = out.glob("*.ssdplan")
    assert f"in {path}, {format_bytes(path.stat().st_size)}: " in notes[-1]
    assert f"ssdplan run --resume {out} --steps N" in notes[-1] and f"ssdplan volume drop {out}" in notes[-1]


def test_a_store_is_dropped_when_it_is_told_to_and_the_run_says_so_later(directory, tmp_path):
    out = tmp_path / "run"
    run(directory, out, plan_of(directory, SPREAD), steps=2, snapshot_every=1)
    (path,) = out.glob("*.ssdplan")
    nbytes = path.stat().st_size
    with pytest.raises(UsageError, match=re.escape(str(path)) + ".*after step 2.*--yes"):
        drop_store(out, sure=False, without_model=False)
    with reopened(out), pytest.raises(StoreError, match="in use by another run"):
        drop_store(out, sure=True, without_model=False)
    assert path.exists()
    gone = drop_store(out, sure=True, without_model=False)
    assert (gone.step, gone.removed, gone.blank, gone.nbytes) == (2, (path,), (), nbytes)
    assert not path.exists() and (out / "model" / "model.safetensors").exists()
    with pytest.raises(StoreError, match=r"dropped \(ssdplan volume drop\).*after step 2"):
        resume(directory, out, steps=3)
    with pytest.raises(UsageError, match="was dropped already, with the states after step 2"):
        drop_store(out, sure=True, without_model=False)
    assert export_run(out, tmp_path / "model") is None, "the model that it finished with"
    name = "model.safetensors"
    assert (tmp_path / "model" / name).read_bytes() == (out / "model" / name).read_bytes()


def test_states_of_which_there_is_no_model_are_not_dropped_unless_told(directory, tmp_path):
    out = tmp_path / "run"
    stopped(directory, out, plan_of(directory, SPREAD), 5)
    with pytest.raises(UsageError, match=r"no model yet.*after step 4.*ssdplan export.*--without-model"):
        drop_store(out, sure=True, without_model=False)
    with pytest.raises(UsageError, match="--yes"):
        drop_store(out, sure=False, without_model=True)
    assert list(out.glob("*.ssdplan"))
    drop_store(out, sure=True, without_model=True)
    assert not list(out.glob("*.ssdplan"))
    with pytest.raises(UsageError, match="neither a snapshot nor a finished model"):
        export_run(out, tmp_path / "model")


def test_states_whose_model_was_exported_are_dropped_without_asking_for_it_again(directory, tmp_path):
    """Only those: not where the export is gone, or the run has gone on since."""
    out, to = tmp_path / "run", tmp_path / "exported"
    stopped(directory, out, plan_of(directory, SPREAD), 5)
    assert export_run(out, to) == 4
    with pytest.raises(UsageError, match=r"would drop .*the states after step 4.*give --yes"):
        drop_store(out, sure=False, without_model=False)
    to.rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="no model yet"):
        drop_store(out, sure=True, without_model=False)
    (tmp_path / "elsewhere").rename(to)
    (to / "model.safetensors").rename(tmp_path / "weights")
    with pytest.raises(UsageError, match="no model yet"):
        drop_store(out, sure=True, without_model=False)
    (tmp_path / "weights").rename(to / "model.safetensors")
    with RunDirectory.open(out) as there:
        there.change(exported=Exported(step=2, to=str(to)))
    with pytest.raises(UsageError, match="no model yet"):
        drop_store(out, sure=True, without_model=False)
    with RunDirectory.open(out) as there:
        there.change(exported=Exported(step=4, to=str(to)))
    assert drop_store(out, sure=True, without_model=False).step == 4
    assert not list(out.glob("*.ssdplan")) and (to / "model.safetensors").is_file()
    with pytest.raises(StoreError, match="dropped.*its model is in " + re.escape(str(to))):
        resume(directory, out, steps=5)
    to.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"dropped.*no model of it is known here"):
        resume(directory, out, steps=5)


def test_a_volume_that_was_not_made_for_a_run_becomes_blank(directory, tmp_path):
    initialise(tmp_path / "v.ssdplan", 64 << 20, force=False)
    out = tmp_path / "run"
    volumes = (tmp_path / "v.ssdplan",)
    run(directory, out, plan_of(directory, SPREAD), steps=1, snapshot_every=1, volumes=volumes)
    gone = drop_store(out, sure=True, without_model=False)
    assert (gone.removed, gone.blank) == ((), volumes)
    (info,) = inspect(volumes)
    assert info.superblock and info.superblock.blank


def test_a_drop_that_was_cut_off_leaves_a_run_that_goes_on(directory, tmp_path, monkeypatch):
    out = tmp_path / "run"
    run(directory, out, plan_of(directory, SPREAD), steps=2, snapshot_every=1)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("ssdplan.executor.snapshots.drop.clear", killed)
        drop_store(out, sure=True, without_model=False)
    resume(directory, out, steps=3)
    with reopened(out) as kept:
        assert kept.step == 3 and kept.directory.run.dropped is None
    assert drop_store(out, sure=True, without_model=False).step == 3


@pytest.mark.parametrize("held_out", [None, "held-out.txt"])
def test_a_signal_is_told_what_it_leads_to(directory, tmp_path, monkeypatch, held_out):
    """After the last step nothing is left but the model, so the run finishes; a moment before it stops, as it says."""
    ends = "its steps are done: it ends with its model; a second signal stops it now"
    stops = "stops with a snapshot when this step ends; a second signal stops it now"

    def signalled(method):
        def then(it, steps_or_session, *more):
            if 2 in (steps_or_session, *more):
                os.kill(os.getpid(), signal.SIGHUP)
            return method(it, steps_or_session, *more)

        return then

    at_once = SimpleNamespace(
        Thread=lambda *, target, daemon: SimpleNamespace(start=target),
        current_thread=threading.current_thread,
        main_thread=threading.main_thread,
    )
    monkeypatch.setattr(interruption, "threading", at_once)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    choices = {"steps": 2, "snapshot_every": 100, "held_out": held_out}
    plan, notes = plan_of(directory, SPREAD), []
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Keeper, "take", signalled(Keeper.take))
            result = run(directory, tmp_path / "finished", plan, notes=notes, **choices)
        assert ends in notes and stops not in notes and len(result.losses) == 2
        assert (tmp_path / "finished" / "model" / "model.safetensors").is_file()
        notes.clear()
        with monkeypatch.context() as patch, pytest.raises(StoppedWithSnapshot):
            patch.setattr(Loop, "_evaluate", signalled(Loop._evaluate))
            run(directory, tmp_path / "stopped", plan, notes=notes, **choices)
        assert stops in notes and ends not in notes
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_with_a_snapshot_is_no_error(directory, tmp_path):
    notes: list[str] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def at(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGHUP)

    try:
        with pytest.raises(StoppedWithSnapshot):
            run(directory, tmp_path / "run", plan_of(directory, SPREAD), at=at, notes=notes, snapshot_every=100)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "the states after step 2, the last snapshot" in notes[-1]
