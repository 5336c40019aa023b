"""The store keeps bytes, stripes them by bandwidth, notices what changed, and refuses what is not its own."""

import errno
import itertools
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ssdplan import native
from ssdplan.executor.store import Locks, Record, Store, check, discard, inspect, survey
from ssdplan.executor.store.layout import LONGEST_EXTENT, MOST_KEPT, Layout
from ssdplan.executor.store.store import required_bytes
from ssdplan.executor.store.striping import Striping
from ssdplan.executor.store.volumes import Staging
from ssdplan.plans.documents.stripe_shares import STRIPE_BYTES
from ssdplan.plans.errors import DiskFullError, IoFailure, StoreError, UsageError
from tests.bounds import HANG_SECONDS
from tests.executor.store.disks import SimulatedDisk

PLAN = "ab" * 32
MIB = 1 << 20
PAGE = 4096


def one(nbytes: int, *cuts: int, durable: bool = True) -> list[Record]:
    return [Record("optimizer/all", 0, nbytes, durable, cuts)]


def put(store: Store, offset: int, data: bytes) -> None:
    memory = Staging(len(data))
    memory.put(data)
    store.write(offset, len(data), memory.address)


def get(store: Store, offset: int, nbytes: int) -> bytes:
    memory = Staging(nbytes)
    store.read(offset, nbytes, memory.address)
    return memory.get(0, nbytes)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))
        os.fsync(file.fileno())


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("shares", [[1.0], [1.0, 1.0], [3.0, 1.0], [5.0, 2.0, 1.0]])
def test_what_is_written_is_read_again(tmp_path, shares, durable):
    rng = random.Random(7)
    size = 37 * MIB
    cuts = sorted({0, size, *(rng.randrange(0, size, PAGE) for _ in range(40))})
    directories = [tmp_path / str(number) for number in range(len(shares))]
    store = Store.create(directories, one(size, *cuts[1:-1]), PLAN, shares, durable=durable)
    oracle = bytearray(size)
    written = [False] * (len(cuts) - 1)
    for turn in range(150):
        first = rng.randrange(len(cuts) - 1)
        last = min(first + rng.randrange(1, 4), len(cuts) - 1)
        offset, nbytes = cuts[first], cuts[last] - cuts[first]
        if rng.random() < 0.6 or not all(written[first:last]):
            data = rng.randbytes(nbytes)
            put(store, offset, data)
            oracle[offset : offset + nbytes] = data
            written[first:last] = [True] * (last - first)
        else:
            assert get(store, offset, nbytes) == oracle[offset : offset + nbytes]
        if durable and turn % 20 == 0:
            store.commit({"turn": turn})
    store.close()


@pytest.mark.parametrize("durable", [False, True])
def test_who_takes_checksums_in_passing_brings_and_asks_for_them(tmp_path, durable):
    """Each extent has its own; what another hand wrote, or the drive changed, is noticed when they are asked for."""
    size = 9 * MIB
    store = Store.create([tmp_path], one(size, 8 * MIB), PLAN, [1.0], durable=durable)
    assert store.extents(0, size) == (4 * MIB, 8 * MIB, 9 * MIB) and store.extents(8 * MIB, MIB) == (MIB,)
    memory, rng = Staging(8 * MIB), random.Random(3)
    memory.put(rng.randbytes(8 * MIB))
    sums = [native.checksum(memory.address + start, 4 * MIB) for start in (0, 4 * MIB)]
    store.write(0, 8 * MIB, memory.address, sums)
    again = Staging(8 * MIB)
    store.read(0, 8 * MIB, again.address)  # which looks itself
    again.put(bytes(8 * MIB))
    store.read_unchecked(0, 8 * MIB, again.address)
    assert again.get(0, 8 * MIB) == memory.get(0, 8 * MIB)
    store.require(0, 8 * MIB, sums)
    for wrong in ([sums[1], sums[0]], [sums[0], sums[1] ^ 1]):
        with pytest.raises(StoreError, match="is not what was written there"):
            store.require(0, 8 * MIB, wrong)
    with pytest.raises(AssertionError, match="a checksum for each extent"):
        store.write(0, 8 * MIB, memory.address, sums[:1])
    store.close()


def test_threads_read_and_write_at_once(tmp_path):
    """Two of each, as the runner's lanes do, on ranges of their own; every byte and all traffic is right."""
    shares, size, turns = 4, 3 * MIB, 25
    store = Store.create([tmp_path], one(shares * size, *range(size, shares * size, size)), PLAN, durable=True)
    initial = random.Random(1).randbytes(shares * size)
    put(store, 0, initial)
    failures = []

    def work(share, writes):
        rng = random.Random(share)
        data = initial[share * size : (share + 1) * size]
        try:
            for _ in range(turns):
                if writes:
                    data = rng.randbytes(size)
                    put(store, share * size, data)
                else:
                    assert get(store, share * size, size) == data
            assert get(store, share * size, size) == data
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(share, share % 2 == 0)) for share in range(shares)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.bytes_read == (2 * turns + shares) * size
    assert store.bytes_written == (2 * turns + shares) * size
    store.close()


@pytest.mark.parametrize("verbs", [("read", "read"), ("write", "write"), ("read", "write")])
def test_nothing_is_locked_while_bytes_move(verbs):
    """On a disk whose transfers end only when two are under way."""
    layout, striping = Layout.of(one(2 * MIB, MIB), durable=True), Striping(b"\x00")
    meeting = threading.Barrier(2, timeout=HANG_SECONDS)

    class Meeting(SimulatedDisk):
        met = False

        def read_summed(self, ranges):
            if self.met:
                meeting.wait()
            return super().read_summed(ranges)

        def write_summed(self, ranges):
            if self.met:
                meeting.wait()
            return super().write_summed(ranges)

    disk = Meeting([bytes(size) for size in required_bytes(layout, striping, 64 << 10)])
    store = Store.format(disk, disk.volumes(), layout, striping, 64 << 10, PLAN, durable=True)
    put(store, 0, b"\x01" * (2 * MIB))
    disk.met = True
    memory = [Staging(MIB) for _ in verbs]
    failures = []

    def move(number):
        try:
            getattr(store, verbs[number])(number * MIB, MIB, memory[number].address)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=move, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_committed_store_is_opened_again(tmp_path):
    records = [*one(8 * MIB, 3 * MIB), Record("checkpoint", 8 * MIB, MIB, False)]
    store = Store.create([tmp_path], records, PLAN, durable=True)
    data = random.Random(1).randbytes(8 * MIB)
    put(store, 0, data)
    store.fill(lambda share: None)
    store.commit({"step": 7, "names": ["a"]})
    put(store, 3 * MIB, bytes(5 * MIB))  # of the generation that never comes
    store.close()
    again = Store.open([tmp_path], records)
    assert (again.generation, again.metadata) == (1, {"step": 7, "names": ["a"]})
    assert get(again, 0, 8 * MIB) == data
    put(again, 0, bytes(3 * MIB))
    again.commit({"step": 8})
    again.close()
    once_more = Store.open([tmp_path], records)
    assert get(once_more, 0, 8 * MIB) == bytes(3 * MIB) + data[3 * MIB :]
    once_more.close()


def test_the_last_two_generations_are_not_overwritten(tmp_path):
    """Also when a state is written many times between two commits."""
    store = Store.create([tmp_path], one(MIB), PLAN, durable=True)
    for generation in range(1, 6):
        for _ in range(4):
            put(store, 0, bytes([generation]) * MIB)
        store.commit({})
    for _ in range(3):
        put(store, 0, b"\xff" * MIB)
    store.close()
    held = check([tmp_path], lambda share: None)
    assert (held.generations, held.extents, held.damages) == ((5, 4), 2, ())


def test_a_store_is_opened_only_for_its_own_records(tmp_path):
    store = Store.create([tmp_path], one(8 * MIB), PLAN, durable=True)
    put(store, 0, bytes(8 * MIB))
    store.commit({})
    store.close()
    with pytest.raises(StoreError, match="made for another plan"):
        Store.open([tmp_path], one(8 * MIB, 5 * MIB))


def test_stripes_follow_bandwidth(tmp_path):
    Store.create([tmp_path / "fast", tmp_path / "slow"], one(64 * STRIPE_BYTES), PLAN, [3.0, 1.0]).close()
    sizes = [(tmp_path / name / f"volume-{i}.ssdplan").stat().st_size for i, name in enumerate(("fast", "slow"))]
    assert sizes == [49 * STRIPE_BYTES, 17 * STRIPE_BYTES]  # superblocks and tables take one


def test_extents_are_no_longer_than_one_checksum_may_cover():
    layout = Layout.of(one(21 * MIB + PAGE, 20 * MIB), durable=True)
    assert all(extent.nbytes <= LONGEST_EXTENT for extent in layout.extents)
    assert sum(extent.nbytes for extent in layout.extents) == 21 * MIB + PAGE
    assert layout.nbytes == (MOST_KEPT + 1) * (21 * MIB + PAGE)
    places = sorted((place, extent.nbytes) for extent in layout.extents for place in extent.places)
    assert all(left + nbytes <= right for (left, nbytes), (right, _) in itertools.pairwise(places))


# Damage.


def test_a_flipped_bit_in_any_extent_is_found_and_named(tmp_path):
    """By the read that meets it, and by a check."""
    store = Store.create([tmp_path], one(64 * PAGE, *range(PAGE, 64 * PAGE, PAGE)), PLAN, durable=True)
    put(store, 0, random.Random(3).randbytes(64 * PAGE))
    store.commit({})
    path = tmp_path / "volume-0.ssdplan"
    store.close()
    for page in range(0, 64, 7):
        flip(path, STRIPE_BYTES + page * PAGE + 100 + page)
        found = check([tmp_path], lambda share: None)
        (damage,) = found.damages
        assert (damage.path, damage.offset, damage.generation) == (path, STRIPE_BYTES + page * PAGE, 1)
        assert f"byte {page * PAGE} of optimizer/all" in damage.what and found.damaged
        again = Store.open([tmp_path], one(64 * PAGE, *range(PAGE, 64 * PAGE, PAGE)))
        with pytest.raises(StoreError, match=f"byte {page * PAGE} of optimizer/all .*checksum differs"):
            get(again, 0, 64 * PAGE)
        again.close()
        flip(path, STRIPE_BYTES + page * PAGE + 100 + page)
    assert not check([tmp_path], lambda share: None).damages


def test_a_flipped_bit_in_any_superblock_or_table_is_found_and_named(tmp_path):
    """And the generation before is opened when the last one's are gone."""
    records = one(4 * PAGE)
    store = Store.create([tmp_path], records, PLAN, durable=True)
    for generation in (1, 2):
        put(store, 0, bytes([generation]) * 4 * PAGE)
        store.commit({})
    table_bytes = store._superblock.table_bytes
    store.close()
    path = tmp_path / "volume-0.ssdplan"
    rng = random.Random(4)
    for slot, opened in ((0, 1), (1, 2)):
        for offset in (0, 9, 60, 300, 4095, *(rng.randrange(PAGE) for _ in range(20))):
            flip(path, slot * PAGE + offset)
            found = check([tmp_path], lambda share: None)
            assert found.generations[0] == opened and found.damaged
            assert f"superblock {slot} is not whole" in str(found.damages[0])
            flip(path, slot * PAGE + offset)
        for offset in (0, 30, 200):
            flip(path, 2 * PAGE + slot * table_bytes + offset)
            found = check([tmp_path], lambda share: None)
            assert found.generations[0] == opened
            assert any("the table is not whole" in str(damage) for damage in found.damages)
            again = Store.open([tmp_path], records)
            assert get(again, 0, 4 * PAGE) == bytes([opened]) * 4 * PAGE
            again.close()
            flip(path, 2 * PAGE + slot * table_bytes + offset)


def test_a_store_that_is_cut_off_is_refused(tmp_path):
    store = Store.create([tmp_path], one(8 * MIB), PLAN, durable=True)
    store.commit({})
    store.close()
    os.truncate(tmp_path / "volume-0.ssdplan", 6 * MIB)
    with pytest.raises(StoreError, match="it was cut off"):
        Store.open([tmp_path], one(8 * MIB))


# Volumes.


def test_moved_and_renamed_volumes_are_found_again(tmp_path):
    records = one(40 * MIB)
    store = Store.create([tmp_path / "a", tmp_path / "b"], records, PLAN, durable=True)
    data = random.Random(2).randbytes(40 * MIB)
    put(store, 0, data)
    store.commit({})
    store.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(tmp_path / "a" / "volume-0.ssdplan", elsewhere / "zebra.ssdplan")
    shutil.move(tmp_path / "b" / "volume-1.ssdplan", tmp_path / "unlikely name")
    again = Store.open([tmp_path / "unlikely name", elsewhere], records)
    assert get(again, 0, 40 * MIB) == data
    again.close()


def test_a_missing_volume_is_named_with_where_it_was(tmp_path):
    store = Store.create([tmp_path / "a", tmp_path / "b"], one(40 * MIB), PLAN, durable=True)
    put(store, 0, bytes(40 * MIB))
    store.commit({})
    store.close()
    with pytest.raises(StoreError, match=r"volume 1 of the 2 .* is missing \(it was last at .*/b/volume-1.ssdplan\)"):
        Store.open([tmp_path / "a"], one(40 * MIB))


def test_copies_and_strangers_are_refused(tmp_path):
    store = Store.create([tmp_path / "a"], one(MIB), PLAN, durable=True)
    store.commit({})
    store.close()
    shutil.copy(tmp_path / "a" / "volume-0.ssdplan", tmp_path / "a" / "copy.ssdplan")
    with pytest.raises(StoreError, match="copies of one volume"):
        Store.open([tmp_path / "a"], one(MIB))
    (tmp_path / "a" / "copy.ssdplan").unlink()
    Store.create([tmp_path / "c"], one(MIB), PLAN, durable=True).close()
    with pytest.raises(StoreError, match="2 stores lie there"):
        Store.open([tmp_path / "a", tmp_path / "c"], one(MIB))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.ssdplan").write_bytes(os.urandom(MIB))
    with pytest.raises(StoreError, match="no store lies there"):
        Store.open([tmp_path / "d"], one(MIB))
    with pytest.raises(UsageError):
        Store.open([tmp_path / "nowhere"], one(MIB))


def test_a_file_that_is_there_is_left_alone(tmp_path):
    path = tmp_path / "volume-0.ssdplan"
    path.write_bytes(b"somebody's work")
    with pytest.raises(StoreError, match="belongs to another run"):
        Store.create([tmp_path], one(MIB), PLAN)
    assert path.read_bytes() == b"somebody's work"


def test_nothing_stays_of_a_store_that_fails_on_its_second_volume(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "volume-1.ssdplan").write_bytes(b"other")
    with pytest.raises(StoreError):
        Store.create([tmp_path / "a", tmp_path / "b"], one(MIB), PLAN)
    assert not list((tmp_path / "a").iterdir())


def test_a_full_volume_is_refused_before_anything_is_written(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(DiskFullError, match="are free"):
        Store.create([tmp_path], one(free // PAGE * 2 * PAGE), PLAN)
    assert not list(tmp_path.iterdir())


def test_only_what_was_seen_and_made_is_cleared_away(tmp_path):
    places = [tmp_path / "a", tmp_path / "b"]
    Store.create(places, one(MIB), PLAN, durable=True).close()
    made, linked = tmp_path / "a" / "volume-0.ssdplan", tmp_path / "link"
    linked.symlink_to(tmp_path / "b" / "volume-1.ssdplan")
    (lying,) = survey([linked, made])
    assert lying.paths == (made, linked) and lying.numbers == (0, 1)
    before = {path: path.read_bytes() for path in lying.paths}
    locks = Locks()
    locks.take(linked)
    with pytest.raises(StoreError, match="in use"):
        discard(lying, [True, True])
    locks.close()
    assert {path: path.read_bytes() for path in lying.paths} == before
    discard(lying, [True, True])
    assert not made.exists() and linked.is_symlink()
    assert [info.superblock and info.superblock.blank for info in inspect([linked])] == [True]
    (tmp_path / "b" / "volume-1.ssdplan").unlink()
    for path in lying.paths:
        path.unlink(missing_ok=True)
    Store.create(places, one(MIB), PLAN, durable=True).close()
    others = {path: path.read_bytes() for place in places for path in place.iterdir()}
    linked.symlink_to(tmp_path / "b" / "volume-1.ssdplan")
    discard(lying, [True, True])
    assert {path: path.read_bytes() for path in others} == others, "it is another store by now"


def test_a_second_process_is_refused(tmp_path):
    store = Store.create([tmp_path], one(MIB), PLAN, durable=True)
    put(store, 0, bytes(MIB))
    store.commit({})
    code = (
        "import sys, pathlib\n"
        "from ssdplan.executor.store import Record, Store\n"
        "from ssdplan.plans.errors import StoreError\n"
        "try: Store.open([pathlib.Path(sys.argv[1])], [Record('optimizer/all', 0, 1 << 20, True)])\n"
        "except StoreError as error: sys.exit(f'{error.exit_code} {error}')"
    )
    second = [sys.executable, "-c", code, str(tmp_path)]
    refused = subprocess.run(second, check=False, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert refused.returncode == 1 and "7 " in refused.stderr and "in use by another run" in refused.stderr
    store.close()
    assert subprocess.run(second, check=False, timeout=HANG_SECONDS).returncode == 0


def test_no_direct_io_is_an_error_with_a_way_out(tmp_path, monkeypatch):
    class Refusing(native.Engine):
        def open(self, path, **options):
            raise OSError(22, "Invalid argument", path)

    monkeypatch.setattr(native, "Engine", Refusing)
    with pytest.raises(IoFailure, match="refuses direct I/O"):
        Store.create([tmp_path], one(MIB), PLAN)
    assert not list(tmp_path.iterdir())


def test_traffic_is_counted(tmp_path):
    store = Store.create([tmp_path], one(4 * MIB, PAGE, MIB, MIB + 2 * PAGE), PLAN, durable=True)
    put(store, 0, bytes(MIB))
    put(store, MIB, bytes(2 * PAGE))
    get(store, 0, PAGE)
    store.commit({})
    assert (store.bytes_read, store.bytes_written) == (PAGE, MIB + 2 * PAGE)
    store.close()


def test_only_a_lock_that_another_has_is_another_run(tmp_path, monkeypatch):
    """A file system without locks is not somebody else's run."""

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("ssdplan.executor.store.volumes.fcntl.flock", refused)
    with pytest.raises(IoFailure, match=f"{tmp_path}: cannot be locked.*No locks available.*flock") as caught:
        Locks().take(tmp_path)
    assert "in use" not in str(caught.value)
