"""The store keeps bytes, stripes them by bandwidth, and refuses what is not its own."""

import os
import random
import subprocess
import sys

import pytest
import torch

from ssdplan import native
from ssdplan.executor.store import HEADER_BYTES, STRIPE_BYTES, Store
from ssdplan.plans.errors import DiskFullError, IoFailure, StoreError

PLAN = "ab" * 32
MIB = 1 << 20


def memory(nbytes: int) -> torch.Tensor:
    return torch.from_dlpack(native.Arena(nbytes, lock=False))


@pytest.mark.parametrize("shares", [[1.0], [1.0, 1.0], [3.0, 1.0], [5.0, 2.0, 1.0]])
def test_what_is_written_is_read_again(tmp_path, shares):
    directories = [tmp_path / str(number) for number in range(len(shares))]
    size = 37 * MIB
    store = Store.create(directories, size, PLAN, shares)
    rng = random.Random(7)
    oracle = bytearray(size)
    buffer = memory(8 * MIB)
    for _ in range(60):
        offset = rng.randrange(0, size - 8 * MIB, 4096)
        nbytes = rng.randrange(4096, 8 * MIB, 4096)
        if rng.random() < 0.6:
            values = rng.randbytes(nbytes)
            buffer[:nbytes] = torch.frombuffer(bytearray(values), dtype=torch.uint8)
            store.write(offset, nbytes, buffer.data_ptr())
            oracle[offset : offset + nbytes] = values
        else:
            buffer.zero_()
            store.read(offset, nbytes, buffer.data_ptr())
            assert bytes(buffer[:nbytes].numpy()) == oracle[offset : offset + nbytes]
    store.close()


def test_stripes_follow_bandwidth(tmp_path):
    store = Store.create([tmp_path / "fast", tmp_path / "slow"], 64 * STRIPE_BYTES, PLAN, [3.0, 1.0])
    store.close()
    sizes = [(tmp_path / name / f"volume-{i}.ssdplan").stat().st_size for i, name in enumerate(("fast", "slow"))]
    assert sizes == [48 * STRIPE_BYTES + HEADER_BYTES, 16 * STRIPE_BYTES + HEADER_BYTES]


def test_a_file_that_is_there_is_left_alone(tmp_path):
    path = tmp_path / "volume-0.ssdplan"
    path.write_bytes(b"somebody's work")
    with pytest.raises(StoreError, match="belongs to another run"):
        Store.create([tmp_path], MIB, PLAN)
    assert path.read_bytes() == b"somebody's work"


def test_nothing_stays_of_a_store_that_fails_on_its_second_volume(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "volume-1.ssdplan").write_bytes(b"other")
    with pytest.raises(StoreError):
        Store.create([tmp_path / "a", tmp_path / "b"], MIB, PLAN)
    assert not list((tmp_path / "a").iterdir()) if (tmp_path / "a").exists() else True


def test_a_full_volume_is_refused_before_anything_is_written(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(DiskFullError, match="are free"):
        Store.create([tmp_path], free * 2, PLAN)
    assert not list(tmp_path.iterdir())


def test_a_store_in_use_is_locked(tmp_path):
    store = Store.create([tmp_path], MIB, PLAN)
    code = (
        "import fcntl, os, sys\n"
        "f = os.open(sys.argv[1], os.O_RDONLY)\n"
        "try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except OSError: sys.exit(3)"
    )
    path = str(tmp_path / "volume-0.ssdplan")
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == 3
    store.close()
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == 0


def test_no_direct_io_is_an_error_with_a_way_out(tmp_path, monkeypatch):
    class Refusing(native.Engine):
        def open(self, path, **options):
            raise OSError(22, "Invalid argument", path)

    monkeypatch.setattr(native, "Engine", Refusing)
    with pytest.raises(IoFailure, match="refuses direct I/O"):
        Store.create([tmp_path], MIB, PLAN)
    assert not list(tmp_path.iterdir())


def test_traffic_is_counted(tmp_path):
    store = Store.create([tmp_path], 4 * MIB, PLAN)
    buffer = memory(MIB)
    store.write(0, MIB, buffer.data_ptr())
    store.write(MIB, 8192, buffer.data_ptr())
    store.read(0, 4096, buffer.data_ptr())
    assert (store.bytes_read, store.bytes_written) == (4096, MIB + 8192)
    store.close()
