"""`ssdplan volume` as a user runs it, and stores on volumes made by it: files, and block devices where tests may."""

import contextlib
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssdplan.executor.store import Record, Store
from ssdplan.executor.store.volumes import held_blank
from ssdplan.plans.documents.stripe_shares import STRIPE_BYTES
from tests.bounds import HANG_SECONDS
from tests.e2e.test_commands import QUICK, briefly, refused, ssdplan
from tests.executor.store.test_store import MIB, PLAN, flip, get, one, put
from tests.made.models import make_model, make_tokenizer


@contextlib.contextmanager
def block_device(backing: Path, nbytes: int) -> Iterator[Path]:
    """A loop device over a file, as long as the block lasts."""
    backing.write_bytes(b"")
    os.truncate(backing, nbytes)
    try:
        made = subprocess.run(
            ["losetup", "--find", "--show", "--direct-io=on", str(backing)],
            check=True,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop devices here: {error}")
    device = made.stdout.strip()
    try:
        yield Path(device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True, timeout=HANG_SECONDS)


def committed(*places: Path, nbytes: int = 2 * MIB) -> bytes:
    store = Store.create(places, one(nbytes), PLAN, durable=True)
    data = random.Random(5).randbytes(nbytes)
    for generation in (1, 2):
        put(store, 0, data if generation == 2 else bytes(nbytes))
        store.commit({"step": generation})
    store.close()
    return data


def test_a_volume_is_made_described_and_used(tmp_path):
    ssdplan("volume", "init", tmp_path, "--size", "32MiB", cwd=tmp_path)
    path = tmp_path / "volume-0.ssdplan"
    assert path.stat().st_size == 32 * MIB
    assert "a blank volume" in ssdplan("volume", "info", tmp_path, cwd=tmp_path).stdout
    data = committed(tmp_path)
    assert list(tmp_path.iterdir()) == [path], "the blank volume was taken, no other file was made"
    told = ssdplan("volume", "info", tmp_path, cwd=tmp_path).stdout
    assert "volume 0 of 1 of store" in told and "generation 2" in told and f"plan {PLAN[:8]}" in told
    (info,) = json.loads(ssdplan("volume", "info", "--json", path, cwd=tmp_path).stdout)
    assert (info["generation"], info["volumes"], info["capacity_bytes"]) == (2, 1, 32 * MIB)
    checked = ssdplan("volume", "check", tmp_path, cwd=tmp_path).stdout
    assert "generations 2 and 1: 2 extents, 4 MiB" in checked and "every checksum is right" in checked
    again = Store.open([path], one(2 * MIB))
    assert get(again, 0, 2 * MIB) == data
    again.remove()
    assert "a blank volume" in ssdplan("volume", "info", path, cwd=tmp_path).stdout, "it was not made by the store"


def test_a_flipped_bit_is_named_and_exits_with_7(tmp_path):
    committed(tmp_path)
    path = tmp_path / "volume-0.ssdplan"
    flip(path, STRIPE_BYTES + 2 * MIB + 12345)
    done = ssdplan("volume", "check", tmp_path, cwd=tmp_path, expect=7)
    assert f"damaged: {path}, byte {STRIPE_BYTES + 2 * MIB}: byte 0 of optimizer/all" in done.stdout
    found = json.loads(ssdplan("volume", "check", path, "--json", cwd=tmp_path, expect=7).stdout)
    assert found["damaged"] and found["damages"][0]["offset"] == STRIPE_BYTES + 2 * MIB


def test_what_is_not_ours_is_left_alone_unless_told_twice(tmp_path):
    treasure = tmp_path / "treasure.bin"
    treasure.write_bytes(bytes(7 * MIB) + os.urandom(MIB))
    before = treasure.read_bytes()
    assert "holds data that is not ours" in refused("volume", "init", treasure, cwd=tmp_path, code=7)
    assert treasure.read_bytes() == before
    ssdplan("volume", "init", treasure, "--force", cwd=tmp_path)
    assert "a blank volume" in ssdplan("volume", "info", treasure, cwd=tmp_path).stdout
    committed(treasure, nbytes=MIB)
    assert "holds the store" in refused("volume", "init", treasure, cwd=tmp_path, code=7)
    ssdplan("volume", "check", treasure, cwd=tmp_path)
    (tmp_path / "small").write_bytes(b"x")
    for wrong in (
        (tmp_path / "small",),
        (tmp_path / "new", "--size", "1MiB"),
        (tmp_path / "new",),
        (treasure, "--size", "9MiB"),
        ("/dev/null",),
        ("/dev/no-such-device", "--size", "64MiB"),
    ):
        refused("volume", "init", *wrong, cwd=tmp_path, code=2)
    refused("volume", "check", tmp_path / "nowhere", cwd=tmp_path, code=2)
    assert "no store lies there" in refused("volume", "check", tmp_path, "small", cwd=tmp_path, code=7)


def test_a_store_in_use_is_not_touched(tmp_path):
    store = Store.create([tmp_path], one(MIB), PLAN, durable=True)
    store.commit({})
    path = tmp_path / "volume-0.ssdplan"
    for command in (("init", path, "--force"), ("check", path)):
        assert "in use by another run" in refused("volume", *command, cwd=tmp_path, code=7)
    assert "generation 1" in ssdplan("volume", "info", path, cwd=tmp_path).stdout
    store.close()


def test_a_store_on_block_devices_and_a_file(tmp_path):
    """Two devices and a directory, striped by bandwidth; found again under other names; blank after it is removed."""
    with block_device(tmp_path / "a", 64 * MIB) as first, block_device(tmp_path / "b", 64 * MIB) as second:
        assert "not a volume of ssdplan" in ssdplan("volume", "info", first, cwd=tmp_path).stdout
        for device in (first, second):
            ssdplan("volume", "init", device, cwd=tmp_path)
        places = [first, second, tmp_path / "files"]
        records = [*one(24 * MIB, 5 * MIB), Record("checkpoint", 24 * MIB, MIB, False)]
        store = Store.create(places, records, PLAN, [2.0, 2.0, 1.0], durable=True)
        data = random.Random(9).randbytes(24 * MIB)
        put(store, 0, data)
        store.fill(lambda share: None)
        store.commit({"step": 1})
        store.close()
        again = Store.open([tmp_path / "files", second, first], records)
        assert get(again, 0, 24 * MIB) == data
        again.close()
        ssdplan("volume", "check", *places, cwd=tmp_path)
        assert "volume 1 of the 3" in refused("volume", "check", first, places[2], cwd=tmp_path, code=7)
        last = Store.open(places, records)
        last.remove()
        told = ssdplan("volume", "info", first, second, tmp_path / "files", cwd=tmp_path).stdout
        assert told.count("a blank volume") == 3


def test_a_device_that_was_not_made_a_volume_is_refused(tmp_path):
    with block_device(tmp_path / "a", 64 * MIB) as device:
        with pytest.raises(Exception, match="ssdplan volume init") as raised:
            Store.create([device], one(MIB), PLAN)
        assert raised.value.exit_code == 7


PROFILE = ("profile", "--model", "model", "--sequence-length", 32, "--micro-batch-sizes", 1, "--precision", "fp32",
           *QUICK)  # fmt: skip


def test_a_blank_volume_is_profiled_and_run_on(tmp_path):
    make_model("llama", tmp_path / "model", layers=2, vocab=320, hidden=64)
    make_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    place = tmp_path / "place"
    place.mkdir()
    ssdplan("volume", "init", place, "--size", "80MiB", cwd=tmp_path)
    path = place / "volume-0.ssdplan"
    untouched = path.read_bytes()[8192:]
    assert not any(untouched)
    ssdplan(*PROFILE, "--volume", place, cwd=tmp_path, start=briefly)
    notes = json.loads((tmp_path / "profile.json").read_text())["notes"]
    assert f"{place}: measured on the blank volume volume-0.ssdplan" in notes
    assert list(place.iterdir()) == [path] and any(path.read_bytes()[8192:])
    assert "a blank volume" in ssdplan("volume", "info", place, cwd=tmp_path).stdout
    ssdplan(*PROFILE, "--volume", path, "-o", "alone.json", cwd=tmp_path, start=briefly)
    (alone,) = json.loads((tmp_path / "alone.json").read_text())["machine"]["volumes"]
    assert (alone["path"], alone["free_bytes"]) == (str(path), 80 * MIB)
    ssdplan("solve", "profile.json", "--residency", "parameters=0,optimizer=0", cwd=tmp_path)
    ssdplan("run", "plan.json", "--data", "text.txt", "--steps", 2, "--volume", place, "--out", "run", cwd=tmp_path)
    assert list(place.iterdir()) == [path], "the run took what was measured"
    assert "a blank volume" in ssdplan("volume", "info", place, cwd=tmp_path).stdout


def test_what_is_no_blank_volume_is_not_profiled(tmp_path):
    make_model("llama", tmp_path / "model", layers=1, vocab=320, hidden=64)
    other = tmp_path / "other"
    other.write_bytes(b"mine" * MIB)
    (tmp_path / "used").mkdir()
    committed(tmp_path / "used")
    used = tmp_path / "used" / "volume-0.ssdplan"
    kept = used.read_bytes()
    for path, says in ((other, "not ours"), (used, "holds the store")):
        assert says in refused(*PROFILE, "--volume", path, cwd=tmp_path, code=7)
    assert other.read_bytes() == b"mine" * MIB and used.read_bytes() == kept
    small = tmp_path / "small"
    ssdplan("volume", "init", small, "--size", "32MiB", cwd=tmp_path)
    assert "needs 64 MiB" in refused(*PROFILE, "--volume", small, cwd=tmp_path, code=5)
    ssdplan("volume", "init", "blank", "--size", "80MiB", cwd=tmp_path)
    twice = ("--volume", "blank", "--volume", "blank")
    assert "named twice" in refused(*PROFILE, *twice, cwd=tmp_path, code=2)
    with held_blank(tmp_path / "blank"):
        assert "in use by another run" in refused(*PROFILE, "--volume", "blank", cwd=tmp_path, code=7)


def test_a_blank_device_is_profiled(tmp_path):
    make_model("llama", tmp_path / "model", layers=1, vocab=320, hidden=64)
    with block_device(tmp_path / "a", 96 * MIB) as device:
        ssdplan("volume", "init", device, cwd=tmp_path)
        ssdplan(*PROFILE, "--volume", device, cwd=tmp_path, start=briefly)
        (volume,) = json.loads((tmp_path / "profile.json").read_text())["machine"]["volumes"]
        assert (volume["path"], volume["free_bytes"]) == (str(device), 96 * MIB)
        assert "a blank volume" in ssdplan("volume", "info", device, cwd=tmp_path).stdout


def test_a_mounted_device_is_refused_even_when_forced(tmp_path):
    with block_device(tmp_path / "a", 64 * MIB) as device:
        try:
            subprocess.run(["mkfs.ext4", "-q", str(device)], check=True, capture_output=True, timeout=HANG_SECONDS)
            (tmp_path / "mounted").mkdir()
            subprocess.run(["mount", str(device), str(tmp_path / "mounted")], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot mount here: {error}")
        try:
            assert "in use" in refused("volume", "init", device, "--force", cwd=tmp_path, code=7)
        finally:
            subprocess.run(["umount", str(tmp_path / "mounted")], check=True)
        assert "not ours" in refused("volume", "init", device, cwd=tmp_path, code=7)
