"""Facts in, findings out: what is well is said to be, and each thing that is not is named with what mends it."""

import errno
import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ssdplan import cli
from ssdplan.commands import profile as profile_command
from ssdplan.native import process
from ssdplan.native.process import Memory
from ssdplan.profiler.doctor import facts as facts_module
from ssdplan.profiler.doctor.doctor import judge
from ssdplan.profiler.doctor.drives import Drive, Mount
from ssdplan.profiler.doctor.facts import (
    Facts,
    Failure,
    Gpu,
    Locking,
    Nodes,
    Package,
    Pages,
    Place,
    Uring,
    gather,
    memory_nodes,
)
from ssdplan.profiler.doctor.findings import Finding, describe
from ssdplan.profiler.doctor.health import Health
from ssdplan.profiler.products import DEFAULT_PRECISION, slow_precision

MIB, GIB = 1 << 20, 1 << 30
DRIVE = Drive("nvme0n1", "Made SSD 1000", 2 * 10**12, virtual=False, usb=False, rotates=False)
HEALTH = Health(
    passed=True, critical_warning=0, used_percent=10, spare_percent=100, spare_threshold_percent=10,
    written_bytes=120 * 10**12, media_errors=0, celsius=45,
)  # fmt: skip
PLACE = Place("/volume", True, Mount("/volume", "xfs", "/dev/nvme0n1p1", False), 1 << 40, "", 0, (DRIVE,), (HEALTH,))
WELL = Facts(
    system="Linux",
    kernel="6.8.0-45-generic",
    container=False,
    python="3.12.1",
    processor="Made CPU 9000",
    cores=16,
    isa="x86-64-v4",
    stolen_share=0.004,
    hardware_bytes=64 * GIB,
    hardware_available_bytes=60 * GIB,
    memory=Memory(64 * GIB, 60 * GIB),
    limits={},
    nodes=Nodes(1, False),
    pages=Pages("madvise", 1.0, 0),
    locking=Locking(None, None, False, ""),
    uring=Uring("io_uring, queue depth 16", "", "0", ""),
    place=PLACE,
    packages=(Package("torch", ">=2.6", "2.9.0", True), Package("numpy", "", "2.1.0", True)),
    torch_problem="",
    torch_cuda="12.8",
    driver="580.65",
    gpus=(Gpu("Made GPU", 24 * GIB, (8, 9)),),
    products={},
    failed={},
)


def findings(facts: Facts, what: str) -> list[Finding]:
    return [finding for finding in judge(facts).findings if finding.what == what]


def place(**changes: object) -> Facts:
    return replace(WELL, place=replace(PLACE, **changes))


def mounted(kind: str) -> Facts:
    return place(mount=Mount("/volume", kind, "somewhere", False))


def healthy(**changes: object) -> Facts:
    return place(health=(replace(HEALTH, **changes),))


def test_a_machine_that_is_well_is_said_to_be() -> None:
    report = judge(WELL)
    assert {finding.status for finding in report.findings} == {"ok"} and report.exit_code == 0
    assert not any(finding.means or finding.mend or finding.exit_code for finding in report.findings)
    text = describe(report)
    assert text.splitlines()[-1] == "ssdplan can run here"
    assert max(map(len, text.splitlines())) <= 100
    for said in ("Made SSD 1000", "90% of its endurance left", "rated for about 1,200 TB", "Made GPU", "x86-64-v4"):
        assert said in text
    assert "of 79 billion parameters; of 29 billion with snapshots" in " ".join(text.split())


WARNED = [
    (replace(WELL, kernel="5.10.0"), "kernel", "5.13"),
    (replace(WELL, kernel="4.18.0-553.el8"), "kernel", "5.13"),
    (replace(WELL, isa="baseline"), "processor", ""),
    (replace(WELL, stolen_share=0.12), "processor", ""),
    (replace(WELL, limits={"-v": GIB}), "memory", "ulimit -v unlimited"),
    (replace(WELL, limits={"-v": GIB, "-d": 32 * GIB}), "memory", "ulimit -d unlimited; ulimit -v unlimited"),
    (replace(WELL, memory=Memory(GIB, GIB)), "memory", "docker run --memory"),
    (replace(WELL, memory=Memory(32 * GIB, GIB), hardware_available_bytes=GIB), "memory", "end other programs"),
    (replace(WELL, locking=Locking(8 * MIB, 8 * MIB, False, "")), "locked memory", "/etc/security/limits.d"),
    (replace(WELL, locking=Locking(8 * MIB, None, False, "")), "locked memory", "ulimit -l unlimited"),
    (replace(WELL, locking=Locking(8 * MIB, 8 * MIB, False, ""), container=True), "locked memory", "--ulimit memlock"),
    (replace(WELL, locking=Locking(None, None, True, "mlock: no")), "locked memory", ""),
    (replace(WELL, pages=Pages("never", 0.0, 0)), "huge pages", "echo madvise"),
    (replace(WELL, pages=Pages("", 0.0, 0)), "huge pages", ""),
    (replace(WELL, pages=Pages("always", 0.2, 0)), "huge pages", "compact_memory"),
    (replace(WELL, pages=Pages("always", 1.0, 32 * GIB)), "reserved pages", "vm.nr_hugepages=0"),
    (replace(WELL, uring=Uring("", "Operation not permitted", "2", "")), "io_uring", "io_uring_disabled=0"),
    (replace(WELL, uring=Uring("", "Cannot allocate memory", "0", "")), "io_uring", "ulimit -l"),
    (replace(WELL, uring=Uring("", "Operation not permitted", "0", ""), container=True), "io_uring", "seccomp"),
    (replace(WELL, uring=Uring("", "Function not implemented", "", "")), "io_uring", "CONFIG_IO_URING"),
    (replace(WELL, uring=Uring("io_uring", "", "0", "threads")), "io_uring", "unset SSDPLAN_IO_ENGINE"),
    (mounted("tmpfs"), "file system", "--volume DIR"),
    (mounted("nfs4"), "file system", "--volume DIR"),
    (mounted("fuse.sshfs"), "file system", "--volume DIR"),
    (mounted("overlay"), "file system", "docker run -v"),
    (mounted("btrfs"), "file system", "chattr +C"),
    (mounted("zfs"), "file system", "--volume DIR"),
    (place(drives=(replace(DRIVE, rotates=True),)), "drive", "--volume DIR"),
    (place(drives=(replace(DRIVE, usb=True),)), "drive", "PCIe"),
    (place(health=("neither smartctl nor nvme is installed",)), "health", "install smartmontools"),
    (place(health=("smartctl may not read it as this user",)), "health", "sudo smartctl"),
    (healthy(used_percent=97), "health", "--max-ssd-write-per-step"),
    (healthy(used_percent=130), "health", "--max-ssd-write-per-step"),
    (healthy(media_errors=3), "health", "smartctl"),
    (healthy(celsius=88), "health", "heat sink"),
    (healthy(critical_warning=2), "health", "heat sink"),
    (replace(WELL, gpus=(Gpu("Old GPU", 24 * GIB, (7, 5)),)), "GPU", "--device cuda --precision fp16"),
    (replace(WELL, gpus=(), torch_cuda=""), "GPU", "pip install"),
    (replace(WELL, gpus=()), "GPU", "CUDA_VISIBLE_DEVICES"),
    (replace(WELL, gpus=(), driver="", products={"bf16": 22.4, "fp16": 27.3}), "precision", "--precision fp32"),
]
NO_TORCH = Package("torch", ">=2.6", "", False)
REFUSED = [
    (replace(WELL, system="Darwin"), "kernel", "", 1),
    (replace(WELL, limits={"-d": 100 * MIB}), "memory", "ulimit -d", 4),
    (replace(WELL, memory=Memory(60 * GIB, 100 * MIB)), "memory", "docker", 4),
    (replace(WELL, failed={"huge pages": Failure("MemoryError: no arena", 4)}), "huge pages", "end other programs", 4),
    (replace(WELL, failed={"GPU": Failure("RuntimeError: CUDA error", 1)}), "GPU", "", 1),
    (replace(WELL, uring=Uring("io_uring", "", "0", "turbo")), "io_uring", "unset", 2),
    (replace(WELL, uring=Uring("", "Operation not permitted", "0", "io_uring")), "io_uring", "unset", 6),
    (place(is_directory=False, problem="none", errno=errno.ENOENT), "directory", "mkdir -p /volume", 2),
    (place(is_directory=False, problem="a file", errno=errno.ENOTDIR), "directory", "--volume DIR", 2),
    (place(is_directory=False, problem="no", errno=errno.EACCES), "directory", "--volume DIR", 2),
    (mounted("proc"), "file system", "--volume DIR", 6),
    (place(problem="Invalid argument", errno=errno.EINVAL), "direct I/O", "ext4 or xfs", 6),
    (place(problem="Permission denied", errno=errno.EACCES), "direct I/O", "install -d -o", 6),
    (place(problem="Read-only file system", errno=errno.EROFS), "direct I/O", "remount,rw /volume", 6),
    (place(problem="No space left on device", errno=errno.ENOSPC), "direct I/O", "df -h", 5),
    (place(problem="Input/output error", errno=errno.EIO), "direct I/O", "dmesg", 6),
    (place(free_bytes=100 * MIB), "free space", "room", 5),
    (healthy(passed=False), "health", "replace", 6),
    (healthy(critical_warning=4), "health", "replace", 6),
    (healthy(critical_warning=1), "health", "replace", 6),
    (healthy(critical_warning=8), "health", "replace", 6),
    (replace(WELL, packages=(Package("transformers", ">=5.0", "4.50", False),)), "packages", "pip install", 1),
    (replace(WELL, packages=(NO_TORCH,), torch_problem="No module", gpus=()), "packages", "'torch>=2.6'", 1),
    (replace(WELL, torch_problem="libcudart.so.12: no such file", gpus=()), "packages", "reinstall", 1),
]


@pytest.mark.parametrize(("facts", "what", "mend"), WARNED)
def test_what_could_be_better_is_told_with_what_mends_it(facts: Facts, what: str, mend: str) -> None:
    (finding,) = [finding for finding in judge(facts).findings if finding.status != "ok"]
    assert (finding.what, finding.status) == (what, "warn") and finding.means and mend in finding.mend
    assert bool(mend) == bool(finding.mend)
    report = judge(facts)
    assert report.exit_code == 0 and describe(report).splitlines()[-1] == "ssdplan can run here; 1 could be better"


@pytest.mark.parametrize(("facts", "what", "mend", "code"), REFUSED)
def test_what_stands_in_the_way_ends_with_a_runs_code(facts: Facts, what: str, mend: str, code: int) -> None:
    report = judge(facts)
    (finding,) = [finding for finding in report.findings if finding.status != "ok"]
    assert (finding.what, finding.status, finding.exit_code) == (what, "bad", code) and mend in finding.mend
    assert report.exit_code == code and "cannot run here: 1 in its way" in describe(report)
    assert json.loads(report.json())["can_run"] is False


@pytest.mark.parametrize(
    ("listed", "maps", "nodes"),
    [
        ("", "", Nodes(1, False)),
        ("0\n", "7f00 default anon=1\n", Nodes(1, False)),
        ("0-1\n", "7f00 default anon=1\n\n7f01\n", Nodes(2, False)),
        ("0-2,5\n", "7f00 default anon=1\n7f02 interleave:0-5 anon=3\n", Nodes(4, True)),
        ("3-1,x,-,9999999\n", "interleave\n", Nodes(1, False)),
    ],
)
def test_nodes_of_memory_are_counted(tmp_path: Path, listed: str, maps: str, nodes: Nodes) -> None:
    for name, text in (("sys/devices/system/node/has_memory", listed), ("proc/self/numa_maps", maps)):
        if text:
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).write_text(text)
    assert memory_nodes(tmp_path) == nodes


def test_arenas_on_one_of_several_nodes_are_told() -> None:
    (one,) = findings(replace(WELL, nodes=Nodes(2, False)), "memory nodes")
    assert one.status == "warn" and one.mend.startswith("numactl --interleave=all ssdplan")
    (other,) = findings(replace(WELL, nodes=Nodes(2, True)), "memory nodes")
    assert other.status == "ok" and not other.mend


def test_a_limit_is_named_where_one_is_set_and_binds() -> None:
    """Not because memory that is available is counted twice, a moment apart; and 22 GiB are not little."""
    (well,) = findings(replace(WELL, limits={"-v": 60 * GIB, "-d": 100 * GIB}), "memory")
    assert well.status == "ok" and "ulimit" not in well.found
    (less,) = findings(replace(WELL, limits={"-v": 22 * GIB, "-d": 100 * GIB}), "memory")
    assert (less.status, less.mend) == ("warn", "ulimit -v unlimited") and "little" not in less.means
    assert less.found.endswith("; this process may take 22 GiB (ulimit -v)")
    (grouped,) = findings(replace(WELL, memory=Memory(24 * GIB, 22 * GIB)), "memory")
    assert (grouped.status, grouped.mend) == ("ok", "")


def test_limits_are_those_that_are_set(monkeypatch) -> None:
    """By what the process has mapped, as the kernel counts it."""
    limits = {resource.RLIMIT_AS: (8 * GIB, 9 * GIB), resource.RLIMIT_DATA: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[which])
    monkeypatch.setattr(process, "read_fields", lambda path: iter([("VmSize", "1048576 kB"), ("VmData", "1 kB")]))
    assert process.own_limits() == {"-v": 7 * GIB}
    limits[resource.RLIMIT_DATA] = (512, 1024)
    assert process.own_limits() == {"-v": 7 * GIB, "-d": 0}


def test_a_probe_that_raises_is_a_finding_beside_all_others(tmp_path, monkeypatch) -> None:
    """The JSON is whole, and names what was raised."""

    def none(nbytes: int, **options: object) -> None:
        raise MemoryError(f"cannot map {nbytes} bytes")

    def broken(*arguments: object) -> None:
        raise RuntimeError("CUDA driver error")

    monkeypatch.setattr(facts_module, "Arena", none)
    monkeypatch.setattr("ssdplan.executor.device.device.visible_gpus", broken)
    asked = ["doctor", str(tmp_path), "--json"]
    done = CliRunner().invoke(cli.make_command_line(), asked, catch_exceptions=False)
    document = json.loads(done.stdout)
    bad = {each["what"]: each for each in document["findings"] if each["status"] == "bad"}
    assert {"huge pages", "directory", "GPU"} <= set(bad) and document["can_run"] is False
    assert bad["huge pages"]["found"] == f"MemoryError: cannot map {8 * MIB} bytes"
    assert (bad["huge pages"]["exit_code"], bad["GPU"]["found"]) == (4, "RuntimeError: CUDA driver error")
    assert done.exit_code == next(each["exit_code"] for each in document["findings"] if each["status"] == "bad")
    assert {"kernel", "processor", "memory", "versions"} <= {each["what"] for each in document["findings"]}
    assert not list(tmp_path.iterdir())


def test_a_virtual_drive_is_not_blamed() -> None:
    """Virtual disks often say that they rotate, and have no health of their own."""
    lent = replace(DRIVE, virtual=True, rotates=True, model="")
    assert {finding.status for finding in judge(place(drives=(lent,), health=("another machine's",))).findings} == {
        "ok"
    }


def test_drives_of_an_array_are_each_looked_at() -> None:
    other = replace(DRIVE, name="nvme1n1")
    facts = place(drives=(DRIVE, other), health=(HEALTH, replace(HEALTH, passed=False)))
    assert [finding.status for finding in findings(facts, "health")] == ["ok", "bad"]
    assert "nvme1n1" in findings(facts, "health")[1].found


def test_all_of_it_is_json() -> None:
    document = json.loads(judge(WELL).json())
    assert document["can_run"] is True
    assert document["facts"]["place"]["health"][0]["used_percent"] == 10
    assert {"what", "status", "found", "means", "mend", "exit_code"} == document["findings"][0].keys()


def test_the_facts_of_this_machine(tmp_path) -> None:
    """Where these tests run at all, nothing but memory or this machine's settings may be bad; nothing is left."""
    facts = gather(tmp_path, (), "", "", {})
    assert not list(tmp_path.iterdir())
    assert facts.place.problem == "" and facts.place.mount and facts.place.free_bytes
    assert facts.hardware_bytes >= facts.memory.total and facts.cores >= 1
    assert bool(facts.uring.description) != bool(facts.uring.problem)
    assert all(package.fits for package in facts.packages) and {"torch", "transformers"} <= {
        package.name for package in facts.packages
    }
    missing = gather(tmp_path / "none", (), "", "", {})
    assert not missing.place.is_directory and not (tmp_path / "none").exists()
    assert judge(missing).exit_code == 2


@pytest.mark.gpu
def test_gpus_are_seen_as_torch_sees_them() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    from ssdplan.executor.device.device import cuda_of_torch, visible_gpus

    (name, nbytes, capability), *_ = visible_gpus()
    assert name == torch.cuda.get_device_name(0) and nbytes > GIB
    assert capability == torch.cuda.get_device_capability(0) and cuda_of_torch()


def test_formats_are_judged_only_where_the_processor_computes() -> None:
    assert not findings(replace(WELL, products={"bf16": 22.4, "fp16": 27.3}), "precision")
    assert "--device cuda uses it" in findings(WELL, "GPU")[0].found


@pytest.mark.parametrize(
    ("bf16", "fp16", "advice"),
    [
        (0.46, 10.2, ""),  # an EPYC with AVX512_BF16: fp32 17.0 ms, bf16 7.9, fp16 174
        (0.6, 1.9, ""),
        (1.4, 27.3, ""),  # a little slower, in half of the bytes
        (22.4, 27.3, "ssdplan profile --precision fp32"),
        (22.4, 0.5, "ssdplan profile --precision fp32"),
    ],
)
def test_advice_is_about_the_precision_that_a_profile_would_use(bf16: float, fp16: float, advice: str) -> None:
    (finding,) = findings(replace(WELL, gpus=(), products={"bf16": bf16, "fp16": fp16}), "precision")
    assert (finding.status, finding.mend) == ("warn" if advice else "ok", advice)
    assert ("fp16 is slow here, so keep bf16" in finding.found) == (not advice and fp16 > 2)
    assert f"bf16 {bf16:.2g} times, fp16 {fp16:.2g} times" in finding.found


def test_a_profile_advises_what_is_faster_than_what_it_uses() -> None:
    assert slow_precision("bf16", {"bf16": 0.46}) == slow_precision("bf16", {"bf16": 1.9}) == []
    (note,) = slow_precision("bf16", {"bf16": 22.4})
    assert "bf16 is slow" in note and "22 times as long as in fp32" in note and "--precision fp32" in note
    (note,) = slow_precision("fp16", {"fp16": 10.2, "bf16": 0.46})
    assert "fp16 is slow" in note and "--precision bf16" in note and "fp32;" in note
    (note,) = slow_precision("fp16", {"fp16": 27.3, "bf16": 22.4})
    assert "--precision fp32" in note
    assert slow_precision("fp16", {"fp16": 0.5, "bf16": 22.4}) == []


def test_the_doctor_knows_what_a_profile_uses() -> None:
    command = profile_command.command()
    assert command.values(command.parse(["--model", "m"]))["precision"] == DEFAULT_PRECISION
