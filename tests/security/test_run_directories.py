"""Runs' directories that came from somebody else, or in which others put links."""

import json
import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from ssdplan.cli import main
from ssdplan.commands import show
from ssdplan.executor.snapshots.claims import Claims
from ssdplan.executor.snapshots.export_run import export_run
from ssdplan.executor.snapshots.resume import reopened
from ssdplan.executor.store import inspect
from ssdplan.plans.documents.run import SCHEMA, Run
from ssdplan.plans.errors import SsdplanError, UsageError
from ssdplan.plans.files import LinkError
from tests.executor.memory.test_migration import SPREAD
from tests.executor.runs import prepare
from tests.executor.snapshots.test_resume import plan_of, resume, same_run, stopped
from tests.executor.snapshots.test_resume import run as train_run


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"), layers=2)


@pytest.fixture(scope="module")
def expected(directory, tmp_path_factory):
    out = tmp_path_factory.mktemp("expected") / "run"
    return out, train_run(directory, out, plan_of(directory, SPREAD))


def content(*places: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for place in places for path in sorted(place.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def begun(directory, tmp_path_factory) -> Path:
    """Two runs that were stopped: `inside` has its store in its directory, `outside` on a `drive` beside it."""
    home = tmp_path_factory.mktemp("begun")
    stopped(directory, home / "inside", plan_of(directory, SPREAD), 3)
    stopped(directory, home / "outside", plan_of(directory, SPREAD), 3, volumes=(home / "drive",))
    return home


def claimed(out: Path) -> Path:
    """A copy of a run, as if it had been begun at `out`."""
    Claims.of_user().note(Run.load(out / "run.json").identity, out)
    return out


@pytest.fixture
def victim(begun, tmp_path) -> Path:
    """A run of the user's, stopped, its store on a drive outside of its directory."""
    out = shutil.copytree(begun / "outside", tmp_path / "victim")
    shutil.copytree(begun / "drive", tmp_path / "drive")
    document = json.loads((out / "run.json").read_text())
    assert document["volumes"] == [str(begun / "drive")]
    (out / "run.json").write_text(json.dumps({**document, "volumes": [str(tmp_path / "drive")]}))
    return claimed(out)


@pytest.fixture
def own(begun, tmp_path) -> Path:
    """A run of the user's, stopped, its store in its directory."""
    return claimed(shutil.copytree(begun / "inside", tmp_path / "run"))


def received(begun: Path, tmp_path: Path, victim: Path, **fields: object) -> Path:
    """A run that came from elsewhere, with a snapshot of its own, whose run.json says `fields`."""
    there = shutil.copytree(begun / "inside", tmp_path / "received")
    document = json.loads((there / "run.json").read_text())
    theirs = Run.load(victim / "run.json")
    document["stores"] = [*theirs.stores, *document["stores"]]
    (there / "run.json").write_text(json.dumps({**document, **fields}))
    return there


@pytest.mark.parametrize("field", ["left", "volumes"])
def test_a_received_run_touches_no_store_of_another(directory, begun, tmp_path, victim, expected, field):
    """Its run.json names the identity of the other's store, and where that lies."""
    place = str(tmp_path / "drive" / "volume-0.ssdplan") if field == "left" else str(tmp_path / "drive")
    there = received(begun, tmp_path, victim, **{field: [place]})
    before = content(victim, tmp_path / "drive")
    with pytest.raises(UsageError, match=r"begun elsewhere .*has its store outside of it, in .*drive"):
        resume(directory, there)
    with pytest.raises(UsageError, match=r"going on with it writes to .*drive/volume-0.ssdplan.*--adopt"):
        resume(directory, there, volumes=(tmp_path / "drive",))
    assert content(victim, tmp_path / "drive") == before
    same_run(victim, resume(directory, victim), *expected)


def test_an_identity_alone_clears_nothing_away(directory, begun, tmp_path, victim, expected):
    """Nobody says where the other store is, but it lies where the received run's store is to move."""
    there = received(begun, tmp_path, victim)
    (tmp_path / "drive" / "keep").mkdir()
    before = content(victim, tmp_path / "drive")
    with pytest.raises(UsageError, match="--adopt"):
        resume(directory, there, volumes=(tmp_path / "drive",))
    same_run(there, resume(directory, there), *expected)
    assert content(victim, tmp_path / "drive") == before


def test_a_link_in_a_received_run_is_not_followed_to_a_volume(directory, begun, tmp_path, victim):
    there = received(begun, tmp_path, victim)
    (there / "volume-7.ssdplan").symlink_to(tmp_path / "drive" / "volume-0.ssdplan")
    before = content(victim, tmp_path / "drive")
    with pytest.raises(SsdplanError, match=r"volume-7.ssdplan: is a symbolic link"):
        resume(directory, there)
    assert content(victim, tmp_path / "drive") == before


def test_a_hard_link_in_a_received_run_is_not_cleared_away(directory, begun, tmp_path, victim, expected):
    there = received(begun, tmp_path, victim)
    os.link(tmp_path / "drive" / "volume-0.ssdplan", there / "volume-7.ssdplan")
    before = content(tmp_path / "drive")
    same_run(there, resume(directory, there), *expected)
    assert content(tmp_path / "drive") == before


def hard_linked(run: Path, copy: Path) -> Path:
    """`cp -al run copy`, claimed."""
    return claimed(shutil.copytree(run, copy, copy_function=os.link))


def test_a_run_copied_by_hard_links_does_not_change_the_other(directory, tmp_path, own, expected):
    """A store is written in its place, so both names would have one run's states under the other's run.json."""
    copy = hard_linked(own, tmp_path / "copy")
    before = content(own)
    never = {"at": lambda step: pytest.fail("a step was made")}
    for name in ("metrics.jsonl", "volume-0.ssdplan"):
        with pytest.raises(LinkError, match=rf"{copy / name}: has 2 names .*cp -r --reflink=auto") as caught:
            resume(directory, copy, **never)
        assert caught.value.exit_code == 2
        assert content(own) == before and content(copy) == {copy / p.relative_to(own): d for p, d in before.items()}
        shutil.copy(copy / name, tmp_path / "own-copy")
        (tmp_path / "own-copy").rename(copy / name)
    same_run(copy, resume(directory, copy), *expected)
    assert content(own) == before
    same_run(own, resume(directory, own), *expected)


@pytest.mark.parametrize("name", ["metrics.jsonl", "volume-0.ssdplan"])
def test_a_hard_link_in_place_of_a_file_is_not_written_to(directory, tmp_path, own, begun, name):
    theirs = begun / "inside" / name
    before = theirs.read_bytes()
    (own / name).unlink()
    os.link(theirs, own / name)
    try:
        for command in (lambda: resume(directory, own), lambda: export_run(own, tmp_path / "exported")):
            with pytest.raises(LinkError, match=rf"{own / name}: has 2 names"):
                command()
    finally:
        (own / name).unlink()  # the runs that were begun are also those of other tests
    assert theirs.read_bytes() == before


def test_a_volume_that_the_user_names_may_have_no_other_name(directory, tmp_path, victim):
    os.link(tmp_path / "drive" / "volume-0.ssdplan", tmp_path / "other-name")
    before = content(victim, tmp_path / "drive")
    with pytest.raises(LinkError, match=r"drive/volume-0.ssdplan: has 2 names"):
        resume(directory, victim, volumes=(tmp_path / "drive",))
    assert content(victim, tmp_path / "drive") == before


def test_a_store_that_is_a_link_ends_with_the_code_of_links(directory, tmp_path, own):
    (own / "volume-0.ssdplan").rename(tmp_path / "moved")
    (own / "volume-0.ssdplan").symlink_to(tmp_path / "moved")
    before = (tmp_path / "moved").read_bytes()
    with pytest.raises(LinkError, match=r"volume-0.ssdplan: is a symbolic link") as caught:
        resume(directory, own)
    assert caught.value.exit_code == 2 and (tmp_path / "moved").read_bytes() == before


def test_a_run_that_was_moved_goes_on_with_its_volumes_when_told(directory, tmp_path, victim, expected):
    victim.rename(tmp_path / "moved")
    with pytest.raises(UsageError, match=r"--volume PLACE --adopt"):
        resume(directory, tmp_path / "moved")
    with reopened(tmp_path / "moved", [tmp_path / "drive"], adopt=True) as kept:
        assert kept.step == 2
    same_run(tmp_path / "moved", resume(directory, tmp_path / "moved"), *expected)


def test_what_is_cleared_away_is_told_first(directory, tmp_path, victim):
    notes: list[str] = []
    shutil.copytree(tmp_path / "drive", tmp_path / "copy")
    resume(directory, victim, volumes=(tmp_path / "other",), notes=notes)
    (tmp_path / "copy").rename(tmp_path / "drive2")
    document = json.loads((victim / "run.json").read_text())
    document["left"] = [str(tmp_path / "drive2")]
    (victim / "run.json").write_text(json.dumps(document))
    notes.clear()
    resume(directory, victim, steps=8, notes=notes)
    (identity,) = {store for store in document["stores"] if any(store[:8] in note for note in notes)}
    assert any(f"clears away the store {identity[:8]} on {tmp_path / 'drive2'}" in note for note in notes)
    assert not inspect([tmp_path / "drive2"])


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "report.json", "trace.json", "run.json", "plan.json", "config.yaml", "plan.next.json", "model"],
)
def test_no_file_is_written_through_a_link(directory, tmp_path, own, name):
    out, precious = own, tmp_path / "precious"
    precious.write_bytes((out / name).read_bytes() if (out / name).exists() else b"precious\n")
    before = precious.read_bytes()
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(precious)
    with pytest.raises(LinkError, match=rf"{out / name}: is a symbolic link") as caught:
        resume(directory, out, at=lambda step: pytest.fail("a step was made"))
    assert caught.value.exit_code == 2
    assert precious.read_bytes() == before and (out / name).is_symlink()


@pytest.mark.parametrize("name", ["report.json", "trace.json", "model"])
def test_a_link_that_appears_in_a_run_is_an_error_and_stays(directory, tmp_path, name):
    """The model is what days of training were for: it is written all the same, unless the link is in its own place."""
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(LinkError, match=rf"{out / name}: is a symbolic link"):
        train_run(
            directory, out, plan_of(directory, SPREAD), steps=2,
            at=lambda step: (out / name).symlink_to(elsewhere) if step == 2 else None,
        )  # fmt: skip
    assert (out / name).is_symlink() and not os.listdir(elsewhere)
    assert (out / "model" / "model.safetensors").is_file() == (name != "model")


@pytest.mark.parametrize("name", [".trace.json.tmp", ".report.json.tmp", ".run.json.1.tmp", ".config.yaml.tmp"])
def test_no_temporary_name_can_be_foreseen(directory, tmp_path, own, name):
    out, precious = own, tmp_path / "precious"
    precious.write_text("precious")
    (out / name).symlink_to(precious)
    resume(directory, out)
    assert precious.read_text() == "precious"


def test_a_run_is_its_owners_alone_whatever_the_umask(directory, tmp_path):
    before = os.umask(0)
    try:
        train_run(directory, tmp_path / "new" / "run", plan_of(directory, SPREAD), snapshot_every=3)
    finally:
        os.umask(before)
    for path in (tmp_path / "new", *sorted((tmp_path / "new").rglob("*"))):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory to another user")
def test_a_run_of_another_user_is_refused(directory, own):
    os.chown(own, 65534, 65534)
    with pytest.raises(UsageError, match=r"belongs to another user .*cp -r"):
        resume(directory, own)


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_claims_that_others_may_write_prove_nothing(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("SSDPLAN_STATE", str(tmp_path))
    Claims.of_user().note("a" * 32, tmp_path)
    assert Claims.of_user().knows("a" * 32, tmp_path) and not Claims.of_user().knows("a" * 32, tmp_path.parent)
    (tmp_path / "runs").chmod(mode)
    with pytest.raises(UsageError, match="others may write here"):
        Claims.of_user()


def test_claims_of_runs_that_are_gone_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("SSDPLAN_STATE", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()
    claims = Claims.of_user()
    claims.note("a" * 32, tmp_path / "run")
    (tmp_path / "run").rmdir()
    claims.note("b" * 32, tmp_path)
    assert os.listdir(tmp_path / "state" / "runs") == ["b" * 32]


@pytest.mark.parametrize("name", ["plan.json", "run.json", "metrics.jsonl", "report.json", "trace.json"])
def test_show_follows_no_link_of_a_run(directory, tmp_path, expected, name, capsys):
    out = tmp_path / "run"
    shutil.copytree(expected[0], out)
    (tmp_path / "theirs").write_bytes((out / name).read_bytes())
    (out / name).unlink()
    (out / name).symlink_to(tmp_path / "theirs")
    assert main(["show", str(out)]) == 2
    assert f"{out / name}: is a symbolic link" in capsys.readouterr().err


def test_an_export_takes_no_other_model_for_the_runs(tmp_path, expected):
    out, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(expected[0], out)
    (out / "model").rename(other)
    (out / "model").symlink_to(other)
    with pytest.raises(LinkError, match="model: is a symbolic link"):
        export_run(out, tmp_path / "exported")


@pytest.mark.parametrize(("snapshots", "offered"), [({"snapshot_every": 2}, True), ({}, False)])
def test_to_go_on_is_offered_where_it_can_be(directory, tmp_path, snapshots, offered):
    out = tmp_path / "run"
    train_run(directory, out, plan_of(directory, SPREAD), steps=2, **snapshots)
    with pytest.raises(UsageError, match="exists already") as caught:
        train_run(directory, out, plan_of(directory, SPREAD))
    assert ("--resume" in str(caught.value)) == offered


@pytest.mark.parametrize("known", [True, False])
def test_a_shown_run_that_came_from_elsewhere_names_no_place_outside_of_it(known, tmp_path, monkeypatch):
    """Its run.json may name any directory; `show` would advise to remove what lies there."""
    run, outside = tmp_path / "run", tmp_path / "drive"
    run.mkdir()
    outside.mkdir()
    kept = Run.model_validate({"schema": SCHEMA, "identity": "0" * 32, "volumes": [str(outside)]}, strict=False)
    if known:
        Claims.of_user().note("0" * 32, run)
    looked_at = []
    monkeypatch.setattr("ssdplan.executor.store.inspect", lambda places: looked_at.extend(places) or [])
    plan = SimpleNamespace(decision=SimpleNamespace(zeroth_order=None))
    assert show._store(run, kept, plan) == ()
    assert looked_at == ([outside] if known else [])
