"""What drives tell of themselves, whatever they tell; and what a directory lies on, by made trees of /proc and /sys."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdplan.profiler.doctor import health
from ssdplan.profiler.doctor.drives import drives_of, mount_of
from ssdplan.profiler.doctor.health import Health, ask, from_nvme, from_smartctl
from tests.extent import examples

SMARTCTL = {
    "model_name": "Made SSD",
    "smart_status": {"passed": True},
    "nvme_smart_health_information_log": {
        "critical_warning": 0, "temperature": 41, "available_spare": 100, "available_spare_threshold": 10,
        "percentage_used": 20, "data_units_written": 234_375_000, "media_errors": 0,
    },
}  # fmt: skip
NVME = {
    "critical_warning": {"value": 4, "nvm_subsystem_reliability": 1}, "temperature": 314, "avail_spare": 9,
    "spare_thresh": 10, "percent_used": 120, "data_units_written": "340282366920938463463374607431768211455",
    "media_errors": 7,
}  # fmt: skip
SATA = {"smart_status": {"passed": False}, "temperature": {"current": 33}, "endurance_used": {"current_percent": 4}}


def test_what_the_tools_print_is_read() -> None:
    read = from_smartctl(json.dumps(SMARTCTL).encode())
    assert read == Health(True, 0, 20, 100, 10, 120 * 10**12, 0, 41)
    assert read.rated_bytes == 600 * 10**12
    assert from_nvme(json.dumps(NVME).encode()) == Health(None, 4, 120, 9, 10, ((1 << 128) - 1) * 512_000, 7, 41)
    assert from_smartctl(json.dumps(SATA).encode()) == Health(passed=False, used_percent=4, celsius=33)


@pytest.mark.parametrize(("used", "rated"), [(None, None), (0, None), (2, None), (3, 4 * 10**15), (120, None)])
def test_a_rating_is_told_only_where_percents_tell_it(used: int | None, rated: int | None) -> None:
    """An unused drive's percents are too coarse, and one that is past its rating counts on."""
    assert Health(used_percent=used, written_bytes=120 * 10**12).rated_bytes == rated


NAMES = [*SMARTCTL, *SMARTCTL["nvme_smart_health_information_log"], *NVME, *SATA, "passed", "current", "value"]
HOSTILE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats()
    | st.sampled_from(["1", "-1", "9" * 50, "9" * 5000, "\u0661", "", "\x1b[2J"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=examples(300), deadline=None)
@given(st.one_of(st.binary(max_size=60), HOSTILE.map(lambda raw: json.dumps(raw).encode())))
def test_any_bytes_are_health_that_can_be_or_none(text: bytes) -> None:
    for read in (from_smartctl, from_nvme):
        found = read(text)
        if found is not None:
            assert found != Health()
            for name in Health.__dataclass_fields__:
                value = getattr(found, name)
                assert value is None or (isinstance(value, bool) if name == "passed" else 0 <= value <= 1 << 160)


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b"1" * 5000, b" " * (1 << 20) + b"{}", b'{"a": NaN}', b"\xff"])
def test_what_is_no_answer_is_none(text: bytes) -> None:
    assert from_smartctl(text) is None and from_nvme(text) is None


def tool(directory: Path, name: str, script: str) -> None:
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)


def test_tools_are_asked_within_bounds(tmp_path, monkeypatch) -> None:
    """The first that knows counts; what hangs, fails or may not is told in words."""
    which = health.shutil.which
    monkeypatch.setattr(health.shutil, "which", lambda name, path: which(name, path=str(tmp_path)))
    drive = Path("/dev/nvme0n1")
    assert ask(drive) == "neither smartctl nor nvme is installed"
    tool(tmp_path, "smartctl", 'echo "Permission denied" >&2; exit 2')
    assert ask(drive) == "smartctl may not read it as this user"
    tool(tmp_path, "smartctl", "echo '{}'")
    assert ask(drive) == "the drive tells smartctl nothing of its health"
    tool(tmp_path, "smartctl", f"test \"$*\" = '--json --all /dev/nvme0n1' && echo '{json.dumps(SMARTCTL)}'; exit 4")
    assert ask(drive) == Health(True, 0, 20, 100, 10, 120 * 10**12, 0, 41)
    monkeypatch.setattr(health, "SECONDS", 0.2)
    tool(tmp_path, "smartctl", "exec sleep 30")
    assert ask(drive) == "smartctl had no answer within 0 s"
    tool(tmp_path, "nvme", f"echo '{json.dumps(NVME)}'")
    found = ask(drive)
    assert isinstance(found, Health) and found.used_percent == 120
    assert ask(Path("/dev/sda")) == "smartctl had no answer within 0 s", "nvme is not for others"


def made(root: Path, directory: Path, way: str, files: dict[str, str]) -> None:
    """A /sys in which the drive of `directory` is at `way`."""
    number = os.stat(directory).st_dev
    block = root / "sys/devices" / way
    for name, text in files.items():
        (block / name).parent.mkdir(parents=True, exist_ok=True)
        (block / name).write_text(text)
    link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(block)


def test_a_partition_is_on_its_drive(tmp_path) -> None:
    way = "pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1"
    made(tmp_path, tmp_path, f"{way}/nvme0n1p2", {"partition": "2"})
    block = tmp_path / "sys/devices" / way
    for name, text in {
        "size": "3907029168\n",
        "device/model": "Made SSD\x1b 1000  \n",
        "queue/rotational": "0",
    }.items():
        (block / name).parent.mkdir(exist_ok=True)
        (block / name).write_text(text)
    (drive,) = drives_of(tmp_path, None, tmp_path)
    assert (drive.name, drive.model, drive.nbytes) == ("nvme0n1", "Made SSD? 1000", 3907029168 * 512)
    assert not (drive.virtual or drive.usb or drive.rotates)


def test_an_array_is_on_all_its_drives_and_a_virtual_one_on_none_that_is_known(tmp_path) -> None:
    made(tmp_path, tmp_path, "virtual/block/md0", {"size": "8"})
    slaves = tmp_path / "sys/devices/virtual/block/md0/slaves"
    slaves.mkdir()
    for name, way in (("sda", "pci0/usb1/host0/block/sda"), ("vdb", "pci0/virtio1/block/vdb")):
        (tmp_path / "sys/devices" / way / "queue").mkdir(parents=True)
        (tmp_path / "sys/devices" / way / "queue/rotational").write_text("1\n")
        (slaves / name).symlink_to(tmp_path / "sys/devices" / way)
    one, other = drives_of(tmp_path, None, tmp_path)
    assert (one.name, one.usb, one.rotates, one.virtual) == ("sda", True, True, False)
    assert (other.name, other.usb, other.virtual, other.model, other.nbytes) == ("vdb", False, True, "", 0)


def plainly_below(block: Path) -> list[Path]:
    """The drives of a block device, by going down each way."""
    if (block / "partition").exists():
        block = block.parent
    parts = sorted((block / "slaves").glob("*"))
    found = [drive for part in parts for drive in plainly_below(part.resolve())] or [block]
    return list(dict.fromkeys(found))


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_drives_are_found_through_any_stack(tmp_path_factory, data) -> None:
    """Partitions, mappings and arrays on each other, at random, each shown in /sys as the kernel does."""
    root = tmp_path_factory.mktemp("root")
    devices = root / "sys/devices/block"
    blocks = [devices / f"d{number}" for number in range(data.draw(st.integers(1, 6)))]
    blocks += [block / f"{block.name}p{number}" for block in blocks for number in range(data.draw(st.integers(0, 2)))]
    for block in blocks:
        block.mkdir(parents=True)
        if block.parent != devices:
            (block / "partition").write_text("1")
    for number in range(data.draw(st.integers(0, 6))):
        mapped = devices / data.draw(st.sampled_from([f"m{number}", f"a{number}"]))
        (mapped / "slaves").mkdir(parents=True)
        for part in data.draw(st.lists(st.sampled_from(blocks), unique=True, max_size=4)):
            (mapped / "slaves" / part.name).symlink_to(part)
        blocks.append(mapped)
    (root / "sys/dev/block").mkdir(parents=True)
    for number, block in enumerate(data.draw(st.permutations(blocks))):
        (root / f"sys/dev/block/9:{number}").symlink_to(block)
    for block in blocks:
        number = os.stat(root).st_dev
        link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
        link.unlink(missing_ok=True)
        link.symlink_to(block)
        assert [drive.name for drive in drives_of(root, None, root)] == [one.name for one in plainly_below(block)]


def test_a_real_drive_may_stand_among_the_virtual_ones(tmp_path) -> None:
    """Kernels that know several paths to an NVMe drive show it there."""
    way = "virtual/nvme-subsystem/nvme-subsys0/nvme0n1"
    made(tmp_path, tmp_path, way, {"size": "8", "device/model": "Made SSD 1000"})
    (drive,) = drives_of(tmp_path, None, tmp_path)
    assert drive.model == "Made SSD 1000" and not drive.virtual


def test_a_directory_on_no_drive_has_none(tmp_path) -> None:
    assert drives_of(tmp_path, None, tmp_path) == ()
    (mount,) = [mount_of(Path("/proc"))]
    assert mount and mount.kind == "proc" and mount.point == "/proc"


def test_the_mount_of_a_directory_is_the_last_above_it(tmp_path) -> None:
    place = (tmp_path / "a b/c").resolve()
    place.mkdir(parents=True)
    escaped = str(place.parent).replace(" ", "\\040")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "20 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        f"21 20 0:33 / {escaped} rw - tmpfs none rw\n"
        f"22 20 8:1 / {escaped} ro,noatime - xfs /dev/sda1 rw\n"
        f"23 20 8:1 / {escaped}/c-not rw - zfs pool rw\n"
        "damaged\n\n- -\n"
    )
    mount = mount_of(place, tmp_path)
    assert mount and (mount.kind, mount.source, mount.read_only) == ("xfs", "/dev/sda1", True)
    assert mount.point == str(place.parent)
    assert (top := mount_of(Path("/"), tmp_path)) and top.kind == "ext4"
    assert mount_of(place, tmp_path / "nothing") is None
