"""The facts that decide whether, and how well, ssdplan works here: asked of the kernel, or tried where that is silent.

Owns the gathering. `doctor.py` judges them; the profiler measures how fast things are. It works without
torch, and leaves nothing behind. A probe that raises ends nothing: what it raised is a fact too.
"""

import contextlib
import ctypes
import errno
import importlib.metadata
import os
import platform
import resource
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ssdplan.native import Arena, Engine, isa
from ssdplan.native.engines import ENGINE_VARIABLE
from ssdplan.native.process import (
    Memory,
    host_memory,
    own_limits,
    read_fields,
    read_lines,
    read_words,
    stolen_share,
)
from ssdplan.plans.documents.state_layout import Precision
from ssdplan.plans.errors import IoFailure, MemoryBudgetError, SsdplanError

from ..processor import cores, cpu_name, transparent_pages
from .drives import Drive, Mount, drives_of, mount_of
from .health import Health, ask

MIB = 1 << 20
Found = TypeVar("Found")
TRIED_BYTES = 8 * MIB
"""Of memory that is locked, and of the file that is written and read back."""
_CAP_IPC_LOCK = 14
"""Of linux/capability.h: may lock any memory."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device that torch can use."""

    name: str
    nbytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of memory that are larger than 4 KiB."""

    transparent: str
    """When the kernel uses them: always, madvise or never; empty: this kernel has none."""
    tried_share: float
    """Of memory that was asked for in huge pages, what came in them."""
    reserved_free_bytes: int
    """Set aside for programs that ask for them by name, which ssdplan does not, and unused."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Parts of memory, each nearer to some cores than to others (NUMA)."""

    count: int
    interleaved: bool
    """This process was started so that its pages go to all of them in turn."""


@dataclass(frozen=True, slots=True)
class Locking:
    """Page-locked memory: RLIMIT_MEMLOCK, soft and hard; None: no limit."""

    soft_bytes: int | None
    hard_bytes: int | None
    privileged: bool
    """No limit counts for this process."""
    problem: str
    """Why a few MiB could not be locked; empty: they could."""


@dataclass(frozen=True, slots=True)
class Uring:
    """io_uring, tried by a read."""

    description: str
    """What is in use of it; empty where it is not to be had."""
    problem: str
    disabled: str
    """The setting kernel.io_uring_disabled: 0 is for all, 1 for some, 2 for none; empty: this kernel has no setting."""
    asked_for: str
    """The engine that the environment asks for; empty: none."""


@dataclass(frozen=True, slots=True)
class Place:
    """A directory for a store."""

    path: str
    is_directory: bool
    mount: Mount | None
    free_bytes: int | None
    """None: the file system does not count."""
    problem: str
    """Why it is no directory to use, or a file could not be written there and read back past the page cache; empty: it
    could."""
    errno: int
    """Of that; 0 without one."""
    drives: tuple[Drive, ...]
    health: tuple[Health | str, ...]
    """Of each drive; words: why it is not known."""


@dataclass(frozen=True, slots=True)
class Package:
    """Another package that ssdplan needs."""

    name: str
    wanted: str
    """Of its version, such as >=2.6; empty: any."""
    version: str
    """Empty: it is not installed."""
    fits: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """What a probe raised."""

    why: str
    exit_code: int
    """That a run would end with, should it meet the same."""


@dataclass(slots=True)
class Probes:
    """Runs probes, and keeps what those raised that failed."""

    failed: dict[str, Failure] = field(default_factory=dict)
    """By what they look at."""

    def run(self, what: str, probe: Callable[[], Found], otherwise: Found) -> Found:
        """What `probe` returns; `otherwise` where it raises anything: who asks the doctor is to hear it from him."""
        try:
            return probe()
        except Exception as error:
            code = SsdplanError.exit_code
            if isinstance(error, MemoryError):
                code = MemoryBudgetError.exit_code
            elif isinstance(error, OSError):
                code = IoFailure.exit_code
            self.failed[what] = Failure(f"{type(error).__name__}: {' '.join(str(error).split())}", code)
            return otherwise


@dataclass(frozen=True, slots=True)
class Facts:
    """All that `doctor.judge` looks at."""

    system: str
    kernel: str
    container: bool
    python: str
    processor: str
    cores: int
    isa: str
    stolen_share: float
    """Of the processor time that was wanted here since the start, what the host of a virtual machine gave to others."""
    hardware_bytes: int
    """Of DRAM, whatever this process may use of it."""
    hardware_available_bytes: int
    """Of that, what is available, whatever the control groups of this process allow."""
    memory: Memory
    limits: Mapping[str, int]
    """Bytes that this process may still map, by the option of `ulimit` that says so (-d, -v); none: no limit is set."""
    nodes: Nodes
    pages: Pages
    locking: Locking
    uring: Uring
    place: Place
    packages: tuple[Package, ...]
    torch_problem: str
    """Why torch cannot be imported; empty: it can."""
    torch_cuda: str
    """The CUDA that torch was built for; empty: none."""
    driver: str
    """The version of NVIDIA's kernel module; empty: none is loaded."""
    gpus: tuple[Gpu, ...]
    products: Mapping[Precision, float]
    """What products of matrices take on the processor, as a multiple of what they take in fp32."""
    failed: Mapping[str, Failure]
    """Probes that raised, by what they look at; the facts that they were to find say nothing."""

    @property
    def obtainable_bytes(self) -> int:
        """Of memory, what this process may still take: what is available, within its own limits."""
        return min((self.memory.available, *self.limits.values()))


def gather(
    directory: Path,
    gpus: tuple[Gpu, ...],
    torch_problem: str,
    torch_cuda: str,
    products: Mapping[Precision, float],
    probes: Probes | None = None,
) -> Facts:
    """The facts of this machine and of `directory`; what torch says of itself and its devices, and how quick it is, is
    handed in, and `probes` with what failed of asking it.

    Writes a file of a few MiB into the directory, and removes it. Takes a second or two; where a tool that asks a drive
    hangs, ten more each.
    """
    probes = probes or Probes()
    meminfo = dict(read_fields(Path("/proc/meminfo")))
    threads, kernels, stolen = probes.run("processor", lambda: (cores(), isa(), stolen_share()), (0, "", 0.0))
    unlimited: dict[str, int] = {}
    memory, limits = probes.run("memory", lambda: (host_memory(), own_limits()), (Memory(0, 0), unlimited))
    nowhere = Place(str(directory.absolute()), False, None, None, "", 0, (), ())
    return Facts(
        system=platform.system(),
        kernel=platform.release(),
        container=in_container(),
        python=platform.python_version(),
        processor=cpu_name(),
        cores=threads,
        isa=kernels,
        stolen_share=stolen,
        hardware_bytes=_kibibytes(meminfo, "MemTotal"),
        hardware_available_bytes=_kibibytes(meminfo, "MemAvailable"),
        memory=memory,
        limits=limits,
        nodes=probes.run("memory nodes", memory_nodes, Nodes(1, False)),
        pages=probes.run("huge pages", lambda: _pages(meminfo), Pages("", 0.0, 0)),
        locking=probes.run("locked memory", _locking, Locking(None, None, False, "")),
        uring=probes.run("io_uring", _uring, Uring("", "", "", "")),
        place=probes.run("directory", lambda: _place(directory), nowhere),
        packages=probes.run("packages", lambda: tuple(_packages()), ()),
        torch_problem=torch_problem,
        torch_cuda=torch_cuda,
        driver=nvidia_driver(),
        gpus=gpus,
        products=dict(products),
        failed=probes.failed,
    )


def in_container(root: Path = Path("/")) -> bool:
    return (
        (root / ".dockerenv").exists()
        or (root / "run/.containerenv").exists()
        or "KUBERNETES_SERVICE_HOST" in os.environ
        or any(line.startswith("container=") for line in _environment_of_init(root))
    )


def _environment_of_init(root: Path) -> list[str]:
    return [entry for line in read_lines(root / "proc/1/environ") for entry in line.split("\0")]


def memory_nodes(root: Path = Path("/")) -> Nodes:
    """As the kernel lists those that have memory, such as 0-1,3; one where it does not."""
    count = 0
    for part in "".join(read_words(root / "sys/devices/system/node/has_memory")).split(","):
        first, _, last = part.partition("-")
        if all(number.isascii() and number.isdecimal() and len(number) < 6 for number in (first, last or first)):
            count += max(int(last or first) - int(first) + 1, 0)
    policies = (line.split()[1:2] for line in read_lines(root / "proc/self/numa_maps"))
    return Nodes(max(count, 1), any(policy[0].startswith("interleave") for policy in policies if policy))


def nvidia_driver(root: Path = Path("/")) -> str:
    """The version in the first line of the driver's own file."""
    words = read_words(root / "proc/driver/nvidia/version")
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def _pages(meminfo: dict[str, str]) -> Pages:
    arena = Arena(TRIED_BYTES, lock=False)
    try:
        share = arena.huge_bytes / TRIED_BYTES
    finally:
        arena.close()
    free = int(meminfo.get("HugePages_Free", "0").split()[0])
    return Pages(transparent_pages(), share, free * _kibibytes(meminfo, "Hugepagesize"))


def _locking() -> Locking:
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    capabilities = dict(read_fields(Path("/proc/self/status"))).get("CapEff", "0")
    try:
        arena = Arena(TRIED_BYTES)
        problem = "" if arena.locked else arena.lock_error
        arena.close()
    except MemoryError as error:
        problem = str(error)
    return Locking(soft, hard, bool(int(capabilities, 16) >> _CAP_IPC_LOCK & 1), problem)


def _uring() -> Uring:
    description = problem = ""
    try:
        engine = Engine("io_uring")
        description = engine.description
        engine.close()
    except OSError as error:
        problem = error.strerror or str(error)
    disabled = read_words(Path("/proc/sys/kernel/io_uring_disabled"))
    return Uring(description, problem, disabled[0] if disabled else "", os.environ.get(ENGINE_VARIABLE, ""))


def _place(directory: Path) -> Place:
    try:
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        return Place(
            str(directory.absolute()), False, None, None, error.strerror or str(error), error.errno or 0, (), ()
        )
    mount = mount_of(directory)
    status = os.statvfs(directory)
    problem, number = "", 0
    try:
        try_direct_io(directory)
    except OSError as error:
        problem, number = error.strerror or str(error), error.errno or 0
    drives = drives_of(directory, mount)
    return Place(
        path=str(directory.absolute()),
        is_directory=True,
        mount=mount,
        free_bytes=status.f_bavail * status.f_frsize if status.f_blocks else None,
        problem=problem,
        errno=number,
        drives=drives,
        health=tuple("another machine's" if each.virtual else ask(Path("/dev") / each.name) for each in drives),
    )


def try_direct_io(directory: Path) -> None:
    """Write a file of a few MiB past the page cache, as training does, read it back, and remove it.

    Raises OSError, native.IoError where the engine met it."""
    path = directory / f".ssdplan-doctor-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as stack:
        arena = stack.enter_context(contextlib.closing(Arena(2 * TRIED_BYTES, lock=False)))
        engine = stack.enter_context(contextlib.closing(Engine("threads")))
        stack.callback(path.unlink, missing_ok=True)
        file = engine.open(path, create_bytes=TRIED_BYTES)
        written, read = arena.address, arena.address + TRIED_BYTES
        ctypes.memmove(written, os.urandom(TRIED_BYTES), TRIED_BYTES)
        engine.write([(file, 0, written, TRIED_BYTES)]).wait()
        engine.flush(file)
        engine.read([(file, 0, read, TRIED_BYTES)]).wait()
        if ctypes.string_at(written, TRIED_BYTES) != ctypes.string_at(read, TRIED_BYTES):
            raise OSError(errno.EIO, "what was read back is not what was written")


def _packages() -> Iterator[Package]:
    """What ssdplan's own metadata say that it needs, but for what is optional."""
    from packaging.requirements import Requirement

    for line in importlib.metadata.requires("ssdplan") or ():
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        fits = bool(version) and requirement.specifier.contains(version, prereleases=True)
        yield Package(requirement.name, str(requirement.specifier), version, fits)


def _kibibytes(fields: dict[str, str], name: str) -> int:
    return int(fields.get(name, "0").split()[0]) << 10
