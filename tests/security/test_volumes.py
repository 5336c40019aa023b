"""Volumes in places where others can write: swapped paths, links, other users' files, one device under two names."""

import os
import stat
from pathlib import Path

import pytest

from ssdplan.executor.store import Store, discard, initialise, survey, tools
from ssdplan.executor.store.volumes import Locks, candidates
from ssdplan.plans.errors import SsdplanError, StoreError
from ssdplan.plans.files import LinkError
from tests.e2e.test_volume import block_device, committed
from tests.executor.store.test_store import MIB, PLAN, one

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user or make a device")


def test_a_path_that_is_swapped_after_the_look_is_not_written(tmp_path, monkeypatch):
    """The attack: an empty file is looked at, then its path becomes a link to a file of the user's."""
    victim, place = tmp_path / "victim.bin", tmp_path / "place.bin"
    victim.write_bytes(b"\7" * (8 * MIB))
    place.write_bytes(bytes(8 * MIB))
    look = tools.refuse_foreign

    def swapped(*arguments):
        look(*arguments)
        place.rename(tmp_path / "looked-at.bin")
        place.symlink_to(victim)

    monkeypatch.setattr(tools, "refuse_foreign", swapped)
    initialise(place, None, force=False)
    assert victim.read_bytes() == b"\7" * (8 * MIB)
    assert (tmp_path / "looked-at.bin").read_bytes()[:8] != bytes(8), "what was looked at is what became a volume"


def test_a_link_in_a_directory_is_named_and_not_followed(tmp_path):
    committed(tmp_path / "theirs")
    target = tmp_path / "theirs" / "volume-0.ssdplan"
    before = target.read_bytes()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "volume-7.ssdplan").symlink_to(target)
    for use in (
        lambda: Store.open([tmp_path / "mine"], one(2 * MIB)),
        lambda: Store.create([tmp_path / "mine"], one(MIB), PLAN),
    ):
        with pytest.raises(LinkError, match=r"volume-7.ssdplan: is a symbolic link") as caught:
            use()
        assert caught.value.exit_code == 2
    assert target.read_bytes() == before
    assert candidates([tmp_path / "mine" / "volume-7.ssdplan"]), "one that is named itself may be a link"


@needs_root
def test_volumes_of_others_in_a_shared_directory_are_left_alone_unless_named(tmp_path):
    initialise(tmp_path / "volume-5.ssdplan", 16 * MIB, force=False)
    os.chown(tmp_path / "volume-5.ssdplan", NOBODY, NOBODY)
    store = Store.create([tmp_path], one(MIB), PLAN)
    assert [path.name for path in store.paths] == ["volume-0.ssdplan"], "a file of its own, not the other user's"
    store.remove()
    store = Store.create([tmp_path / "volume-5.ssdplan"], one(MIB), PLAN)
    assert [path.name for path in store.paths] == ["volume-5.ssdplan"]
    store.remove()


@needs_root
def test_a_store_of_another_user_is_not_opened_by_its_directory_and_the_error_says_so(tmp_path):
    committed(tmp_path)
    os.chown(tmp_path / "volume-0.ssdplan", NOBODY, NOBODY)
    with pytest.raises(StoreError, match=r"no store lies there; .*volume-0.ssdplan is another user's"):
        Store.open([tmp_path], one(2 * MIB))
    Store.open([tmp_path / "volume-0.ssdplan"], one(2 * MIB)).close()


def test_one_file_under_two_names_is_one_volume(tmp_path):
    initialise(tmp_path / "a", 16 * MIB, force=False)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(StoreError, match=r"b: is the same as .*a; name each volume once"):
        Store.create([tmp_path / "a", tmp_path / "b"], one(MIB), PLAN)


def test_no_store_is_made_in_a_volume_with_two_names(tmp_path):
    """A blank volume has nothing to lose, but its other name may be in another run's directory."""
    initialise(tmp_path / "a", 16 * MIB, force=False)
    (tmp_path / "mine").mkdir()
    os.link(tmp_path / "a", tmp_path / "mine" / "b.ssdplan")
    before = (tmp_path / "a").read_bytes()
    for use in (
        lambda: Store.create([tmp_path / "a"], one(MIB), PLAN),
        lambda: Store.create([tmp_path / "mine"], one(MIB), PLAN),
        lambda: initialise(tmp_path / "a", None, force=True),
    ):
        with pytest.raises(LinkError, match=r"(a|b.ssdplan): has 2 names \(hard links\)") as caught:
            use()
        assert caught.value.exit_code == 2
    assert (tmp_path / "a").read_bytes() == before


def test_no_store_is_opened_to_write_under_two_names(tmp_path):
    committed(tmp_path / "theirs")
    target = tmp_path / "theirs" / "volume-0.ssdplan"
    before = target.read_bytes()
    (tmp_path / "mine").mkdir()
    os.link(target, tmp_path / "mine" / "volume-0.ssdplan")
    with pytest.raises(LinkError, match=r"mine/volume-0.ssdplan: has 2 names"):
        Store.open([tmp_path / "mine"], one(2 * MIB))
    (lying,) = survey([tmp_path / "mine"])
    for made in (True, False):
        with pytest.raises(LinkError, match=r"mine/volume-0.ssdplan: has 2 names"):
            discard(lying, [made])
    assert tools.check([tmp_path / "mine"], lambda done: None).store == lying.store, "to look is allowed"
    assert target.read_bytes() == before
    (tmp_path / "mine" / "volume-0.ssdplan").unlink()
    Store.open([tmp_path / "theirs"], one(2 * MIB)).close()


@needs_root
def test_one_device_under_two_names_is_one_volume(tmp_path):
    with block_device(tmp_path / "backing", 64 * MIB) as device:
        alias = tmp_path / "alias"
        try:
            os.mknod(alias, stat.S_IFBLK | 0o600, device.stat().st_rdev)
        except OSError as error:
            pytest.skip(f"no device nodes here: {error}")
        initialise(device, None, force=False)
        assert candidates([device, alias]) == [device]
        with pytest.raises(SsdplanError, match=r"alias: is the same as /dev/loop|in use"):
            Store.create([device, alias], one(MIB), PLAN)


def test_a_file_that_a_loop_device_lies_on_is_refused_even_by_force(tmp_path):
    backing = tmp_path / "backing"
    with block_device(backing, 64 * MIB) as device:
        for force in (False, True):
            with pytest.raises(StoreError, match=rf"backing: {device} lies on this file"):
                initialise(backing, None, force=force)
        with pytest.raises(StoreError, match="lies on this file"):
            Locks().take(backing)
    initialise(backing, None, force=False)


def test_a_store_is_its_owners_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        store = Store.create([tmp_path / "new"], one(MIB), PLAN)
        initialise(tmp_path / "blank", 16 * MIB, force=False)
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (*store.paths, tmp_path / "blank", tmp_path / "new")
    }
    assert modes == {"volume-0.ssdplan": 0o600, "blank": 0o600, "new": 0o700}
    store.close()


def test_a_locked_path_is_opened_by_its_descriptor(tmp_path):
    (tmp_path / "a").write_bytes(b"first")
    (tmp_path / "b").write_bytes(b"second")
    locks = Locks()
    descriptor = locks.take(tmp_path / "a")
    (tmp_path / "b").replace(tmp_path / "a")
    assert os.pread(descriptor, 10, 0) == b"first"
    assert Path(f"/proc/self/fd/{descriptor}").stat().st_size == 5
    locks.close()
