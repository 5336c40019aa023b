"""The process's memory, against what is known to be there."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ssdplan.native import Arena, process
from tests.bounds import HANG_SECONDS

MIB = 1 << 20


def run(code: str) -> str:
    """What a fresh interpreter prints; memory of this one has a history."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_SECONDS
    )
    return done.stdout.strip()


def test_an_arena_is_resident_to_the_page_and_gone_when_closed() -> None:
    before = process.resident_bytes()
    arena = Arena(64 * MIB, lock=False)
    held = process.resident_bytes() - before
    arena.close()
    assert held == pytest.approx(64 * MIB, abs=2 * MIB)
    assert process.resident_bytes() - before == pytest.approx(0, abs=2 * MIB)


def test_a_peak_is_remembered_until_it_is_forgotten() -> None:
    before = process.resident_bytes()
    Arena(64 * MIB, lock=False).close()
    assert process.peak_resident_bytes() >= before + 62 * MIB
    process.forget_peak()
    assert process.peak_resident_bytes() == pytest.approx(process.resident_bytes(), abs=2 * MIB)


def test_what_work_makes_the_process_grow_by() -> None:
    """The most at once, not the sum, and nothing of what was there before."""

    def work() -> None:
        for nbytes in (24 * MIB, 64 * MIB, 8 * MIB):
            Arena(nbytes, lock=False).close()

    Arena(128 * MIB, lock=False).close()
    assert process.growth_bytes(work) == pytest.approx(64 * MIB, abs=2 * MIB)
    assert process.growth_bytes(lambda: None) == pytest.approx(0, abs=MIB)


def test_growth_is_unknown_where_the_kernel_keeps_the_old_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    Arena(128 * MIB, lock=False).close()
    monkeypatch.setattr(process, "forget_peak", lambda: None)
    assert process.growth_bytes(lambda: pytest.fail("nothing can be learned from it")) is None


def test_what_is_freed_in_small_pieces_is_given_back() -> None:
    code = (
        "from ssdplan.native import process\n"
        "import numpy as np\n"
        "process.settle_heap()\n"
        "before = process.resident_bytes()\n"
        "pieces = [np.ones(1 << 19, np.uint8) for _ in range(256)]\n"
        "keep = pieces[::8]\n"  # holes between them, so that the heap's top is not free
        "full = process.resident_bytes()\n"
        "del pieces\n"
        "freed = process.resident_bytes()\n"
        "process.give_back()\n"
        "print(full - before, freed - before, process.resident_bytes() - before)"
    )
    full, freed, given = (int(word) / MIB for word in run(code).split())
    assert full == pytest.approx(128, abs=4)
    assert freed == pytest.approx(128, abs=4), "malloc keeps what is freed"
    assert given == pytest.approx(16, abs=4), "until it is told not to"


@pytest.mark.parametrize("large", [2, 7, 24])  # MiB; of a head the logits of short rows, and of long ones
def test_large_pieces_go_back_by_themselves(large: int) -> None:
    code = (
        "from ssdplan.native import process\n"
        "import numpy as np\n"
        "process.settle_heap()\n"
        "for _ in range(3):\n"  # left alone, glibc keeps such pieces once the first was freed
        f"    piece = np.ones({large} << 20, np.uint8)\n"
        "    small = np.ones(1 << 16, np.uint8)\n"
        "    del piece\n"
        "before = process.resident_bytes()\n"
        f"piece = np.ones({large} << 20, np.uint8)\n"
        "full = process.resident_bytes()\n"
        "del piece\n"
        "print(full - before, process.resident_bytes() - before)"
    )
    full, after = (int(word) / MIB for word in run(code).split())
    assert full == pytest.approx(large, abs=0.5) and after == pytest.approx(0, abs=0.5)


def test_large_pieces_stay_where_they_are_to_be_kept() -> None:
    code = (
        "from ssdplan.native import process\n"
        "import numpy as np\n"
        "process.settle_heap()\n"
        "before = process.resident_bytes()\n"
        "def left():\n"
        "    piece = np.ones(24 << 20, np.uint8)\n"
        "    del piece\n"
        "    return process.resident_bytes() - before\n"
        "process.keep_large(True)\n"
        "kept = left()\n"
        "again = left()\n"
        "process.give_back()\n"
        "given = process.resident_bytes() - before\n"
        "process.keep_large(False)\n"
        "print(kept, again, given, left())"
    )
    kept, again, given, after = (int(word) / MIB for word in run(code).split())
    assert kept == pytest.approx(24, abs=1) and again == pytest.approx(24, abs=1), "the second is where the first was"
    assert given == pytest.approx(0, abs=1) and after == pytest.approx(0, abs=1)


@pytest.mark.parametrize("limit", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_limits_of_the_process_bound_what_it_may_still_take(limit: str) -> None:
    code = (
        "import resource\n"
        "from ssdplan.native import process\n"
        "most = process.obtainable_bytes()\n"
        f"resource.setrlimit(resource.{limit}, (4 << 30, resource.RLIM_INFINITY))\n"
        "left = process.obtainable_bytes()\n"
        "import mmap\n"
        "mapped = mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "print(most, left, process.obtainable_bytes())"
    )
    most, left, less = map(int, run(code).split())
    assert left <= min(most, 4 << 30)
    if left < most:  # else there is less in the machine than the limit admits
        assert left - less == pytest.approx(256 * MIB, abs=2 * MIB)


def test_limits_that_are_not_set_do_not_count() -> None:
    if resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
        pytest.skip("this process has a limit of its own")
    assert process.obtainable_bytes() <= process.host_memory().total


def test_what_a_host_gave_to_others_is_what_proc_says(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    assert process.stolen_seconds(tmp_path) == 0.0
    (tmp_path / "proc/stat").write_text("cpu  9 8 7 6 5 4 3 250 1 0\ncpu0 1 1 1 1 1 1 1 125 1 0\n")
    assert process.stolen_seconds(tmp_path) == 250 / os.sysconf("SC_CLK_TCK")
    assert process.stolen_share(tmp_path) == 250 / (9 + 8 + 7 + 4 + 3 + 250)
    (tmp_path / "proc/stat").write_text("cpu  9 8 7 6\n")  # of a kernel that does not tell
    assert process.stolen_seconds(tmp_path) == process.stolen_share(tmp_path) == 0.0
    assert 0.0 <= process.stolen_seconds() <= process.stolen_seconds()
