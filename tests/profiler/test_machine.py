"""The facts of a machine are those of /proc, bounded by control groups; rates are those that were made."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ssdplan.native import adamw_statistics, adamw_summed
from ssdplan.native.process import host_memory
from ssdplan.plans.documents.rates import updated_bytes
from ssdplan.plans.documents.state_layout import USUAL, Precision
from ssdplan.profiler import machine
from ssdplan.profiler.machine import UPDATE_CHUNK, UpdateBench, Updates, measure_dram, measure_link, measure_update
from ssdplan.profiler.measure import Limits, Measurement
from ssdplan.profiler.processor import cores, cpu_name
from tests.profiler.made import MadeDevice
from tests.profiler.made_time import MadeTime

GIB = 1 << 30


def silent(fraction: float, what: str) -> None:
    pass


def test_this_machine_is_what_proc_says() -> None:
    meminfo = Path("/proc/meminfo").read_text()
    total = int(meminfo.split("MemTotal:")[1].split()[0]) * 1024
    memory = host_memory()
    assert 0 < memory.available <= memory.total <= total
    assert 1 <= cores() <= len(os.sched_getaffinity(0))
    assert cpu_name() in Path("/proc/cpuinfo").read_text() + os.uname().machine


def made_root(root: Path, files: dict[str, str]) -> Path:
    common = {
        "proc/meminfo": "MemTotal:       67108864 kB\nMemFree: 1 kB\nMemAvailable:   33554432 kB\n",
        "proc/cpuinfo": "processor : 0\nmodel name\t: Made CPU 9000: fast\n\nprocessor : 1\nmodel name\t: other\n",
    }
    for name, text in (common | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    root = made_root(tmp_path, {})
    assert cpu_name(root) == "Made CPU 9000: fast"
    assert cores(root) == len(os.sched_getaffinity(0))
    memory = host_memory(root)
    assert (memory.total, memory.available) == (64 * GIB, 32 * GIB)


def test_limits_of_control_groups_of_version_2_and_of_those_above(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user.slice/job"
    files = {
        "proc/self/cgroup": "0::/user.slice/job\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
        f"{group}/cpu.max": "max 100000\n",
        "sys/fs/cgroup/user.slice/cpu.max": "100000 100000\n",
        f"{group}/memory.max": str(16 * GIB),
        f"{group}/memory.high": "max\n",
        f"{group}/memory.current": str(10 * GIB),
        f"{group}/memory.stat": f"anon 1\ninactive_file {3 * GIB}\nactive_file 5\n",
        "sys/fs/cgroup/user.slice/memory.max": "max\n",
        "sys/fs/cgroup/user.slice/memory.current": str(10 * GIB),
    }
    root = made_root(tmp_path, files)
    assert cores(root) == 1
    memory = host_memory(root)
    assert (memory.total, memory.available) == (16 * GIB, 9 * GIB)
    (root / group / "memory.high").write_text(str(12 * GIB))  # beyond it a group is all but stopped
    assert (host_memory(root).total, host_memory(root).available) == (12 * GIB, 5 * GIB)


def test_limits_of_control_groups_of_version_1_in_a_container(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "12:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
        "proc/self/mountinfo": (
            "31 23 0:27 / / rw - overlay overlay rw\n"
            "32 31 0:28 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            "33 31 0:29 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        ),
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(8 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(9 * GIB),
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
    }
    root = made_root(tmp_path, files)
    assert cores(root) == 1
    assert host_memory(root).total == 8 * GIB and host_memory(root).available == 0


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/x\n1:cpu:/\n",
        "proc/self/mountinfo": (
            "32 31 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        ),
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "4096\n",
    }
    root = made_root(tmp_path, files)
    assert cores(root) == len(os.sched_getaffinity(0))
    assert (host_memory(root).total, host_memory(root).available) == (64 * GIB, 32 * GIB)


def test_bandwidths_of_a_link_that_are_known() -> None:
    """On a clock that only copies move."""
    clock = MadeTime()
    device = MadeDevice(h2d=2e9, d2h=4e9, sleep=clock.sleep)
    h2d, d2h, notes = measure_link(device, Limits(seconds=1.5), silent, clock=clock)
    assert h2d.rate == pytest.approx(2e9) and d2h.rate == pytest.approx(4e9)
    assert len(device.released) == 1
    assert not [note for note in notes if "host memory" in note]


def test_host_memory_that_is_not_page_locked_is_noted() -> None:
    device = MadeDevice(h2d=800e9, d2h=800e9, note="RLIMIT_MEMLOCK is 8 MiB")
    _, _, notes = measure_link(device, Limits(seconds=0.2), silent)
    assert notes[0] == "host memory: RLIMIT_MEMLOCK is 8 MiB"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_rate_of_updates_is_that_of_the_kernel(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels that really run, but on a clock that they move by known nanoseconds an element."""
    made, called = MadeTime(), set()

    def moving(kernel: Callable[..., Any], nanoseconds: Callable[[Mapping[str, Any]], float]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            done = kernel(*given, **named)
            *_, given_precision, count = given
            assert (given_precision, named["threads"]) == (precision, 1)
            made.sleep(count * nanoseconds(named) * 1e-9)
            called.add((kernel.__name__, named.get("moment_dtype", "fp32")))
            return done

        return run

    plain = {"fp32": 2.0, "bf16": 1.0, "int8": 4.0}
    monkeypatch.setattr(
        machine, "adamw_statistics", moving(adamw_statistics, lambda named: plain[named["moment_dtype"]])
    )
    monkeypatch.setattr(machine, "adamw_summed", moving(adamw_summed, lambda named: 2.5))
    figures, notes = measure_update(UpdateBench(precision, 1, 1 << 30, clock=made), Limits(seconds=1.6), silent)
    assert len(called) == 4 and not notes
    assert [each.rate for each in (figures.fp32, figures.bf16, figures.int8)] == pytest.approx([0.5e9, 1e9, 0.25e9])
    assert figures.summed.rate == pytest.approx(0.4e9), "its pauses are not counted"
    assert figures.checksum_rate == pytest.approx(USUAL.mean_bytes / 0.5e-9)


def test_what_checksums_take_in_passing_is_the_difference() -> None:
    def figure(rate: float) -> Measurement:
        return Measurement(1 / rate, 0.0, 9, stable=True)

    assert Updates(figure(1e9), figure(2e9), figure(3e9), figure(0.5e9)).checksum_rate == pytest.approx(12e9)
    assert Updates(figure(1e9), figure(2e9), figure(3e9), figure(1e9)).checksum_rate is None
    assert Updates(figure(1e9), figure(2e9), figure(3e9), figure(1.1e9)).checksum_rate is None


def test_little_memory_is_enough_for_the_rate_of_updates() -> None:
    figures, _ = measure_update(UpdateBench("bf16", 1, 100 << 20), Limits(seconds=0.2), silent)
    assert all(figure.rate > 1e6 for figure in (figures.fp32, figures.bf16, figures.summed))


class SharedMemory(MadeDevice):
    """Updates and copies of one DRAM, each of which slows the other. It is an `UpdateBench` too."""

    count = UPDATE_CHUNK

    def __init__(self, copied: float, updated: float) -> None:
        self.time = MadeTime()
        super().__init__(h2d=20e9, d2h=10e9, sleep=self._copy)
        self.kept = {"copies": copied, "updates": updated}
        self.running = {"copies": 0, "updates": 0}

    def _run(self, what: str, other: str, seconds: float) -> float:
        self.running[what] += 1
        self.time.sleep(seconds / (self.kept[what] if self.running[other] else 1.0))
        self.running[what] -= 1
        return seconds

    def _copy(self, seconds: float) -> None:
        self._run("copies", "updates", seconds)

    def seconds_of_a_chunk(self, first: int, states: str, *, summed: bool) -> float:
        assert (first, states, summed) == (0, "fp32", False)
        return self._run("updates", "copies", UPDATE_CHUNK / 1e9)


@pytest.mark.parametrize(("copied", "updated"), [(0.5, 0.8), (1.0, 1.0), (0.3, 0.2)])
def test_dram_is_what_updates_and_copies_move_beside_each_other(copied: float, updated: float) -> None:
    shared: Any = SharedMemory(copied, updated)
    limits = Limits(seconds=20.0, least=3, most=5)
    found, notes = measure_dram(shared, shared, (1e9, 20e9, 10e9), limits, silent, clock=shared.time)
    alone = 1e9 * updated_bytes(USUAL)
    assert found == pytest.approx(max(alone, updated * alone + copied * 2 / (1 / 20e9 + 1 / 10e9)), rel=0.05)
    assert not notes and len(shared.released) == 1
