"""Arenas: exactly the memory asked for, seen by torch without a copy, and never freed under a live tensor."""

import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ssdplan.native as native
from tests.bounds import HANG_SECONDS

PAGE = os.sysconf("SC_PAGESIZE")


def mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * PAGE


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, (2 << 20) + 1, (33 << 20) + 7 * PAGE + 3])
def test_an_arena_takes_its_size_rounded_to_a_page_and_no_more(nbytes: int) -> None:
    native.Arena(nbytes).close()
    gc.collect()
    before = mapped_bytes()
    arena = native.Arena(nbytes)
    assert mapped_bytes() - before == -(-nbytes // PAGE) * PAGE
    assert arena.nbytes == nbytes
    assert arena.address % (2 << 20 if nbytes >= 2 << 20 else PAGE) == 0
    arena.close()
    assert mapped_bytes() == before


def locked_bytes() -> int:
    """What the kernel counts as locked by this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) * 1024
    pytest.skip("this system does not count locked memory")


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, (2 << 20) + 1, (33 << 20) + 7 * PAGE + 3])
def test_locking_wastes_less_than_a_page(nbytes: int) -> None:
    before = locked_bytes()
    arena = native.Arena(nbytes)
    if not arena.locked:
        pytest.skip(arena.lock_error)
    assert nbytes <= locked_bytes() - before < nbytes + PAGE
    arena.close()
    assert locked_bytes() == before
    native.Arena(nbytes, lock=False).close()
    unlocked = native.Arena(nbytes, lock=False)
    assert locked_bytes() == before
    assert unlocked.nbytes == nbytes


def test_huge_pages_are_counted_where_the_system_has_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    small = native.Arena(PAGE)
    assert small.huge_bytes == 0
    arena = native.Arena((8 << 20) + PAGE)
    assert arena.huge_bytes % (2 << 20) == 0
    assert arena.huge_bytes <= 8 << 20
    if not setting.exists() or "[never]" in setting.read_text():
        assert arena.huge_bytes == 0
    else:
        # A system whose memory is in pieces may have none to give: then none of many arenas has any.
        assert any(native.Arena(8 << 20).huge_bytes for _ in range(8))
    arena.close()
    with pytest.raises(RuntimeError, match="closed"):
        _ = arena.huge_bytes


def test_every_page_is_resident_from_the_start() -> None:
    nbytes = 24 << 20
    before = resource.getrusage(resource.RUSAGE_SELF)
    arena = native.Arena(nbytes)
    created = resource.getrusage(resource.RUSAGE_SELF)
    torch.from_dlpack(arena).fill_(1)
    filled = resource.getrusage(resource.RUSAGE_SELF)
    assert created.ru_minflt > before.ru_minflt
    assert filled.ru_minflt - created.ru_minflt < nbytes // PAGE // 10


def test_torch_and_numpy_see_the_memory_itself() -> None:
    arena = native.Arena(3 * PAGE)
    tensor = torch.from_dlpack(arena)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (3 * PAGE,)
    assert tensor.data_ptr() == arena.address
    assert not tensor.any()
    tensor.view(torch.float32)[5] = 1.5
    assert np.from_dlpack(arena).view(np.float32)[5] == 1.5


def test_close_is_refused_under_a_live_tensor() -> None:
    arena = native.Arena(PAGE)
    tensor = torch.from_dlpack(arena)
    view = tensor[100:200]
    assert arena.exports == 1
    del tensor
    with pytest.raises(RuntimeError, match=f"{PAGE} bytes.*1 exported view"):
        arena.close()
    view.fill_(3)
    del view
    assert arena.exports == 0
    arena.close()
    arena.close()
    with pytest.raises(RuntimeError, match="closed"):
        _ = arena.address
    with pytest.raises(RuntimeError, match="closed"):
        torch.from_dlpack(arena)


def test_memory_outlives_a_dropped_arena_while_a_tensor_shows_it() -> None:
    arena = native.Arena(5 << 20)
    tensor = torch.from_dlpack(arena)
    del arena
    gc.collect()
    tensor.fill_(7)
    assert tensor.sum().item() == 7 * (5 << 20)


def test_a_capsule_that_nobody_consumes_gives_its_view_back() -> None:
    arena = native.Arena(PAGE)
    capsule = arena.__dlpack__()
    assert arena.exports == 1
    del capsule
    assert arena.exports == 0


def test_exports_that_cannot_be_had_are_refused() -> None:
    arena = native.Arena(PAGE)
    assert arena.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError):
        arena.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        arena.__dlpack__(dl_device=(2, 0))
    assert arena.exports == 0


def test_impossible_sizes_name_the_bytes() -> None:
    with pytest.raises(MemoryError, match="10000000000000 bytes"):
        native.Arena(10**13)
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match="nbytes"):
            native.Arena(nbytes)


def test_locking_says_why_it_did_not_happen() -> None:
    unlocked = native.Arena(PAGE, lock=False)
    assert not unlocked.locked
    assert unlocked.lock_error
    locked = native.Arena(PAGE)
    assert locked.locked == (locked.lock_error == "")


def test_a_lock_limit_leaves_a_usable_arena() -> None:
    script = """
import os, resource
if os.getuid() == 0:  # root may lock without limit
    os.setgid(65534); os.setuid(65534)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
arena = native.Arena(1 << 20)
assert not arena.locked and "65536" in arena.lock_error, arena.lock_error
native.copy(arena.address, arena.address + 4096, 4096)
"""
    subprocess.run([sys.executable, "-c", "import ssdplan.native as native" + script], check=True, timeout=HANG_SECONDS)


def own_control_group() -> Path:
    """A new control group with a limit of 256 MiB, of whichever version this system has."""
    name = f"ssdplan-test-{os.getpid()}"
    for root, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        group = Path(root) / name
        if not (Path(root) / "cgroup.procs").exists():
            continue
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(256 << 20))
            return group
        except OSError:
            group.rmdir()
    pytest.skip("a control group of one's own is not to be had here")


def test_a_control_group_that_is_too_small_is_an_error_and_no_kill() -> None:
    group = own_control_group()
    script = f"""
import os
open("{group}/cgroup.procs", "w").write(str(os.getpid()))
import ssdplan.native as native
native.Arena(8 << 20).close()
try:
    native.Arena(512 << 20)
except MemoryError as error:
    assert str(512 << 20) in str(error), error
else:
    raise SystemExit("more than the control group allows")
"""
    try:
        subprocess.run([sys.executable, "-c", script], check=True, timeout=HANG_SECONDS)
    finally:
        group.rmdir()
