"""The process's memory as the kernel counts it: in use, still to be had, and kept by malloc. Also the processor time
that the host of a virtual machine gives to others.

Owns the reading of /proc, of control groups and of resource limits, where they bear on that (in a container the limits
count, not the hardware), and glibc's settings. On another C library, the settings do nothing.

Left alone, malloc keeps what a layer's compute freed, in pieces that the next layer's tensors do not fit into, and the
process grows by a half more than ever lives at once. Giving every large piece back at once costs up to a fifth of a
layer's time in new pages; giving back where compute turns to another kind of layer costs nothing that shows. So large
pieces are kept where the same ones come again with every layer, and go at once where they would leave holes.
"""

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Of mallopt, as glibc's malloc.h numbers them."""
_LARGE_BYTES = 1 << 20
"""A piece this large is mapped by itself and given back when it is freed, unless `keep_large`. Left alone, glibc comes
to 32 MiB; logits would leave holes in the heap, differently in every process: with 8 MiB, those of half as long rows,
7.8 MiB, made place for a whole row's, and a head's growth 118 MiB in one profile and 102 in the next."""
_MOST_MAPPED = 65536
"""Pieces that may be mapped by themselves at once, where any may: glibc's own default."""
_KEPT_BYTES = 1 << 30
_PEAK_SLACK = 4 << 20
"""A peak this far above what is resident, just after it was to be forgotten, was not."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of host memory: of the machine, and what may be taken now."""

    total: int
    available: int


def host_memory(root: Path = Path("/")) -> Memory:
    """Memory of the machine, bounded by the limits of this process's control groups. Page cache counts as available."""
    values = dict(read_fields(root / "proc/meminfo"))
    total, available = (int(values[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    for group in control_groups("memory", root):
        files = ("memory.max", "memory.high", "memory.limit_in_bytes")  # beyond `high` a group is all but stopped
        limits = [int(words[0]) for file in files if (words := read_words(group / file)) and words[0] != "max"]
        used = read_words(group / "memory.current") or read_words(group / "memory.usage_in_bytes")
        if not limits or not used:
            continue
        statistics = dict(line.split() for line in read_lines(group / "memory.stat"))
        cache = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
        total = min(total, *limits)
        available = min(available, max(min(limits) - int(used[0]) + cache, 0))
    return Memory(total, available)


def hardware_bytes(root: Path = Path("/")) -> int:
    """Memory of the machine, whatever the control groups of this process allow."""
    return int(dict(read_fields(root / "proc/meminfo"))["MemTotal"].split()[0]) << 10


def obtainable_bytes() -> int:
    """What this process may still take: what is available, within its own limits (`ulimit -d` and `-v`), which count
    what is mapped and not only what is used."""
    return min((host_memory().available, *own_limits().values()))


def own_limits() -> dict[str, int]:
    """Bytes that this process may still map within its resource limits, by the option of `ulimit` (-d, -v); of those
    that are set. They count what is mapped, and not only what is used."""
    found = {}
    for option, which, counted in (("-d", resource.RLIMIT_DATA, "VmData"), ("-v", resource.RLIMIT_AS, "VmSize")):
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY:
            found[option] = max(limit - _status(counted), 0)
    return found


@contextmanager
def growing_at_most(nbytes: int) -> Iterator[None]:
    """Within the block the process's addresses grow by at most `nbytes`: what wants more fails where it is asked for,
    instead of the machine some time later. It bounds all threads."""
    size = int(dict(read_fields(Path("/proc/self/status")))["VmSize"].split()[0]) << 10
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    ours = size + nbytes
    bounded = [limit for limit in (soft, hard, ours) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounded), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def stolen_seconds(root: Path = Path("/")) -> float:
    """Processor time, of all cores since the start, that the host of this virtual machine gave to others while it was
    wanted here (steal); 0 on a machine of one's own. It grows by hundredths of a second."""
    return _stolen_and_wanted(root)[0] / os.sysconf("SC_CLK_TCK")


def stolen_share(root: Path = Path("/")) -> float:
    """Of the processor time that was wanted on this machine since its start, what its host gave to others."""
    stolen, wanted = _stolen_and_wanted(root)
    return stolen / wanted if wanted else 0.0


def _stolen_and_wanted(root: Path) -> tuple[int, int]:
    """Ticks of all cores since the start; none where the kernel does not tell."""
    words = read_words(root / "proc/stat")
    if len(words) <= 8 or words[0] != "cpu":
        return 0, 0
    user, nice, system, _, _, irq, softirq, stolen = map(int, words[1:9])
    return stolen, user + nice + system + irq + softirq + stolen


def resident_bytes() -> int:
    """What the process has in memory, pages of files that it maps included."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The most that `resident_bytes` ever was, or since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Let the peak begin again from what is resident; where the kernel forbids it, the old one stays."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def growth_bytes(work: Callable[[], object]) -> int | None:
    """Run `work`; by how much the process grew at most meanwhile. None where the kernel keeps no peak of its own."""
    give_back()
    forget_peak()
    before = resident_bytes()
    if peak_resident_bytes() > before + _PEAK_SLACK:
        return None
    work()
    return max(peak_resident_bytes() - before, 0)


def settle_heap() -> None:
    """Have malloc keep what is freed until `give_back`, but for large pieces. To be called before much is allocated:
    then a process does not depend on what it happened to free."""
    if (mallopt := _of_libc("mallopt")) is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def keep_large(wanted: bool) -> None:
    """Whether malloc keeps large pieces too when they are freed, until `give_back`. Takes less than a microsecond.

    Where pieces of the same sizes come again and again, the kernel need not find, clear and map pages for each of them
    anew: that was 10 of the 53 ms of a backward of 31 million parameters. Pieces that are there already stay as they
    are.
    """
    if (mallopt := _of_libc("mallopt")) is not None:
        mallopt(_MMAP_MAX, 0 if wanted else _MOST_MAPPED)


@contextmanager
def nothing_kept() -> Iterator[None]:
    """The C library holds no memory that was freed: what it keeps of earlier work would not count as taken, and what it
    keeps of this work, because the next array does not fit where one lay, would count twice. Afterwards it keeps as
    much as `settle_heap` lets it, whatever `keep_large` was told before."""
    give_back()
    keep_large(False)
    if (mallopt := _of_libc("mallopt")) is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_TRIM_THRESHOLD, 0)
    try:
        yield
    finally:
        settle_heap()


def give_back() -> None:
    """Return the heap's free pages to the kernel."""
    if (trim := _of_libc("malloc_trim")) is not None:
        trim(0)


@cache
def _of_libc(name: str) -> Callable[..., int] | None:
    """A function of the C library; None where it has none of the name."""
    return getattr(ctypes.CDLL(None), name, None)


def kept_bytes() -> int:
    """What is resident when the heap's free pages are returned."""
    give_back()
    return resident_bytes()


def _status(name: str) -> int:
    return int(dict(read_fields(Path("/proc/self/status")))[name].split()[0]) << 10


def read_lines(path: Path) -> list[str]:
    """The lines of a small file, none where it cannot be read: kernels differ in what they offer."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def read_words(path: Path) -> tuple[str, ...]:
    return tuple(word for line in read_lines(path) for word in line.split())


def read_fields(path: Path) -> Iterator[tuple[str, str]]:
    """The `name: value` lines of a file, the last first, so that in a dict the first of a name counts."""
    for line in reversed(read_lines(path)):
        name, found, value = line.partition(":")
        if found:
            yield name.strip(), value.strip()


def control_groups(controller: str, root: Path) -> Iterator[Path]:
    """The directories, version 1 or 2, of the control groups that bound this process: its own and all above."""
    own: dict[str, str] = {}
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))  # version 2 has no controllers here: ""
    for line in read_lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        shown, mount = left.split()[3:5]
        kind, _, options = right.split()[:3]
        name = {"cgroup": controller, "cgroup2": ""}.get(kind)
        if name not in own or (kind == "cgroup" and controller not in options.split(",")):
            continue
        top = root / mount.lstrip("/")
        # A container may see its own group as the top of the mount, under the path that it has outside.
        inside = Path(own[name]).relative_to(shown) if Path(own[name]).is_relative_to(shown) else Path()
        for group in (top / inside, *(top / inside).parents):
            yield group
            if group == top:
                break
