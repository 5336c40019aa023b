"""What a directory lies on: its file system, and the drives below that.

Owns what /proc and /sys say of them. It opens no drive and writes nothing.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import networkx

from ssdplan.native.process import read_lines, read_words

_NOT_REAL = ("QEMU", "VBOX", "VMware", "Virtual", "Amazon Elastic Block", "PersistentDisk", "Msft")
"""What the models of disks begin with, or hold, that another machine lends."""
SECTOR_BYTES = 512
"""The unit of sizes in /sys/block, whatever the drive's own sectors are."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    point: str
    kind: str
    """As the kernel calls it: ext4, xfs, nfs4, fuse.sshfs."""
    source: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Drive:
    """A drive, or what passes for one."""

    name: str
    """As in /dev."""
    model: str
    """Empty where it tells none."""
    nbytes: int
    virtual: bool
    """Another machine's, or a file's: what it is made of is not known here."""
    usb: bool
    rotates: bool


def mount_of(directory: Path, root: Path = Path("/")) -> Mount | None:
    """The file system that holds `directory`; None where the kernel does not tell."""
    place = directory.resolve()
    found: Mount | None = None
    for line in read_lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) < 6 or len(rest) < 3:
            continue
        point = _unescaped(fields[4])
        if place.is_relative_to(point) and (found is None or len(point) >= len(found.point)):
            options = {*fields[5].split(","), *rest[2].split(",")}
            found = Mount(point, rest[0], _unescaped(rest[1]), "ro" in options)
    return found


def drives_of(directory: Path, mount: Mount | None, root: Path = Path("/")) -> tuple[Drive, ...]:
    """The drives below the file system of `directory`, through partitions, mappings and arrays; none where it lies on
    none, or on none that this kernel shows."""
    numbers = [os.stat(directory).st_dev]
    if mount and mount.source.startswith("/dev/") and os.path.exists(mount.source):
        numbers.append(os.stat(mount.source).st_rdev)  # file systems of several drives have a number of their own
    for number in numbers:
        block = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
        if block.exists():
            return tuple(_drive(each) for each in _below(block.resolve(), root))
    return ()


def _below(block: Path, root: Path) -> list[Path]:
    """The drives that a block device is made of: of all that it lies on, what lies on nothing."""
    below = _block_devices(root)
    below.add_node(block)
    return [each for each in networkx.dfs_preorder_nodes(below, block) if not below[each]]


def _block_devices(root: Path) -> "networkx.DiGraph[Path]":
    """Each block device -> what it lies on: a partition on its drive, a mapping or an array on its parts, by name."""
    below: networkx.DiGraph[Path] = networkx.DiGraph()
    for block in {link.resolve() for link in (root / "sys/dev/block").glob("*")}:
        parts = [block.parent] if (block / "partition").exists() else sorted((block / "slaves").glob("*"))
        below.add_edges_from((block, part.resolve()) for part in parts)
    return below


def _drive(block: Path) -> Drive:
    told = " ".join(read_words(block / "device" / "model"))
    model = "".join(letter if letter.isprintable() else "?" for letter in told)  # the firmware's words
    way = str(block)
    made_up = "/devices/virtual/" in way and "/nvme-subsystem/" not in way  # where NVMe drives of several paths are
    lent = made_up or "/virtio" in way or "/vbd-" in way
    size = read_words(block / "size")
    return Drive(
        name=block.name,
        model=model,
        nbytes=int(size[0]) * SECTOR_BYTES if size and size[0].isdecimal() else 0,
        virtual=lent or any(word in model for word in _NOT_REAL),
        usb="/usb" in way,
        rotates=read_words(block / "queue" / "rotational") == ("1",),
    )


def _unescaped(text: str) -> str:
    """A path as mountinfo writes it: blanks and the like in octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
