"""Judges a directory, its file system and its drives: what they mean for a store.

Owns these judgements, as `doctor.py` owns those of the machine: facts in, findings out.
"""

import errno
from collections.abc import Iterator, Sequence

from ssdplan.plans.errors import DiskFullError, IoFailure, UsageError
from ssdplan.plans.units import format_bytes
from ssdplan.plans.views.quantities import decimal

from .drives import Drive, Mount
from .facts import Place
from .findings import Finding
from .health import READ_ONLY, RELIABILITY, SPARE, TEMPERATURE, Health

LEAST_FREE_BYTES = 512 << 20
"""What measuring a volume needs (`storage`)."""
STATE_BYTES, SNAPSHOT_STATE_BYTES = 14, 38
"""Of ssd for each parameter: bf16 weights and fp32 optimizer states; with two snapshots the latter in three places."""
WORN_PERCENT, HOT_CELSIUS = 90, 80

_NETWORK = ("nfs", "cifs", "smb", "ceph", "glusterfs", "9p", "lustre", "beegfs", "afs", "gpfs", "fuse", "virtiofs")
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_NO_FILES = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "mqueue", "bpf")
_OTHER = "profile and run with --volume DIR, a directory of yours on an SSD, on ext4 or xfs"


def judge_place(place: Place) -> Iterator[Finding]:
    """The findings on a directory."""
    if not place.is_directory:
        mend = f"mkdir -p {place.path}" if place.errno == errno.ENOENT else _OTHER
        yield Finding("directory", "bad", f"{place.path}: {place.problem}", "", mend, UsageError.exit_code)
        return
    mount = place.mount
    if mount and mount.kind in _NO_FILES:
        found = f"{place.path} on {mount.kind}, which keeps no files"
        yield Finding("file system", "bad", found, "", _OTHER, IoFailure.exit_code)
        return
    where = f"{place.path} on {mount.kind}, mounted at {mount.point}" if mount else f"{place.path}, mounted nowhere"
    yield _file_system(where, mount)
    yield _direct_io(place)
    if not place.problem:
        yield _space(place.free_bytes)
    for drive, health in zip(place.drives, place.health, strict=True):
        yield _drive(drive)
        if not drive.virtual:
            yield _health(drive, health)
    if not place.drives and not (mount and _of(mount, (*_NETWORK, *_IN_MEMORY))):
        yield Finding("drive", "ok", "which it is cannot be seen from here")


def _of(mount: Mount, kinds: Sequence[str]) -> bool:
    return mount.kind.startswith(tuple(kinds))


def _file_system(where: str, mount: Mount | None) -> Finding:
    what = "file system"
    if mount is None:
        return Finding(what, "ok", where)
    if _of(mount, _IN_MEMORY):
        means = "It lies in DRAM: what a plan puts there takes the memory that it is to save, and goes with the power."
        return Finding(what, "warn", where, means, _OTHER)
    if _of(mount, _NETWORK):
        means = "It is as fast and as reliable as what is behind it, which may be a network."
        return Finding(what, "warn", where, means, _OTHER)
    if mount.kind == "overlay":
        means = "It is a container's layer, which goes with the container."
        return Finding(what, "warn", where, means, "docker run -v HOST-DIRECTORY:VOLUME ...   # and name VOLUME")
    if mount.kind == "btrfs":
        means = "It copies on write and sums what it writes, which makes direct I/O slow."
        return Finding(
            what, "warn", where, means, "chattr +C DIRECTORY   # while it is empty; or a directory on xfs or ext4"
        )
    if mount.kind == "zfs":
        means = "It copies on write, and caches what is read and written past the page cache."
        return Finding(what, "warn", where, means, _OTHER)
    return Finding(what, "ok", where)


def _direct_io(place: Place) -> Finding:
    if not place.problem:
        return Finding("direct I/O", "ok", "a file was written and read back past the page cache, and removed")
    what, code = "direct I/O", IoFailure.exit_code
    if place.errno in (errno.EACCES, errno.EPERM):
        means = "This user may not write there."
        return Finding(what, "bad", place.problem, means, f'sudo install -d -o "$USER" {place.path}/ssdplan', code)
    if place.errno == errno.EROFS:
        mend = f"sudo mount -o remount,rw {place.mount.point}" if place.mount else ""
        return Finding(what, "bad", place.problem, "It is mounted for reading only.", mend, code)
    if place.errno == errno.EFBIG:
        means = "A file may not be as large as that here: its size is limited for this process, or by the file system."
        return Finding(what, "bad", place.problem, means, "ulimit -f unlimited", DiskFullError.exit_code)
    if place.errno in (errno.ENOSPC, errno.EDQUOT):
        mend = f"df -h {place.path}   # and make room"
        return Finding(what, "bad", place.problem, "", mend, DiskFullError.exit_code)
    if place.errno in (errno.EINVAL, errno.EOPNOTSUPP):
        means = "The file system does no direct I/O, which training is made of."
        return Finding(what, "bad", place.problem, means, _OTHER, code)
    return Finding(what, "bad", place.problem, "The drive, or the way to it, failed.", "sudo dmesg | tail", code)


def _space(free_bytes: int | None) -> Finding:
    if free_bytes is None:
        return Finding("free space", "ok", "the file system does not tell")
    found = f"{format_bytes(free_bytes)} free"
    if free_bytes < LEAST_FREE_BYTES:
        means = f"Measuring the drive alone needs {format_bytes(LEAST_FREE_BYTES)}."
        return Finding(
            "free space", "bad", found, means, "make room, or name a directory that has it", DiskFullError.exit_code
        )
    alone, kept = (free_bytes / each / 1e9 for each in (STATE_BYTES, SNAPSHOT_STATE_BYTES))
    found += f", for all states of {alone:.2g} billion parameters; of {kept:.2g} billion with snapshots"
    return Finding("free space", "ok", found)


def _drive(drive: Drive) -> Finding:
    found = f"{drive.name}, {drive.model or 'which does not tell its model'}"
    found += f", {decimal(drive.nbytes)}" if drive.nbytes else ""
    if drive.virtual:
        return Finding("drive", "ok", f"{found}; virtual, so its health and endurance are known to its host alone")
    if drive.usb:
        return Finding("drive", "warn", found, "USB bounds it to a part of an NVMe drive's speed.", "a drive on PCIe")
    if drive.rotates:
        means = "A rotating disk is tens of times slower than an SSD: a step waits for it nearly always."
        return Finding("drive", "warn", found, means, _OTHER)
    return Finding("drive", "ok", found)


def _health(drive: Drive, health: Health | str) -> Finding:
    what = "health"
    if isinstance(health, str):
        mend = f"sudo smartctl --all /dev/{drive.name}"
        if "installed" in health:
            mend = f"sudo apt install smartmontools; {mend}"
        means = "How worn it is, is not known."
        return Finding(what, "warn", f"{drive.name}: {health}", means, mend)
    found = f"{drive.name}: {_told(health)}"
    bits = health.critical_warning or 0
    code = IoFailure.exit_code
    if bits & READ_ONLY:
        return Finding(what, "bad", found, "The drive has gone to reading only.", "replace the drive", code)
    if health.passed is False or bits & (RELIABILITY | SPARE):
        means = "The drive says itself that it is failing: a week of work is not safe on it."
        return Finding(what, "bad", found, means, "save what is on it, and replace it", code)
    if bits & TEMPERATURE or (health.celsius or 0) >= HOT_CELSIUS:
        return Finding(what, "warn", found, "It is hot, and slows down or wears faster.", "a heat sink, or more air")
    if health.media_errors:
        means = "Some of its data could not be read without errors."
        return Finding(
            what, "warn", found, means, f"sudo smartctl --all /dev/{drive.name}   # and see whether they grow"
        )
    if (health.used_percent or 0) >= WORN_PERCENT:
        means = "Its rated endurance is nearly used up, or is."
        return Finding(
            what, "warn", found, means, "ssdplan solve --max-ssd-write-per-step SIZE bounds what a plan writes"
        )
    rated = health.rated_bytes
    if rated:
        found += f"; rated for about {decimal(rated)}, which ssdplan profile takes as --endurance"
    return Finding(what, "ok", found)


def _told(health: Health) -> str:
    parts = []
    if health.passed is not None:
        parts.append("passed its own test" if health.passed else "failed its own test")
    if health.used_percent is not None:
        parts.append(f"{max(100 - health.used_percent, 0)}% of its endurance left")
    if health.spare_percent is not None:
        parts.append(f"{health.spare_percent}% of its spare blocks")
    if health.written_bytes is not None:
        parts.append(f"{decimal(health.written_bytes)} written")
    if health.media_errors:
        parts.append(f"{health.media_errors} media errors")
    if health.celsius is not None:
        parts.append(f"{health.celsius} degrees C")
    return ", ".join(parts) or "it tells nothing of wear"
