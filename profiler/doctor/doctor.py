"""Judges the facts of a machine: what is well, what costs speed or safety, what stands in the way of training, and the
command that fixes each problem.

Owns these judgements and their words. It asks nothing of the machine: facts in, findings out.
"""

import re
from collections.abc import Callable, Iterator

from ssdplan.native.engines import ENGINE_VARIABLE, ENGINES
from ssdplan.plans.errors import IoFailure, MemoryBudgetError, SsdplanError, UsageError
from ssdplan.plans.units import format_bytes

from ..products import DEFAULT_PRECISION, SLOW_PRODUCTS, faster_precision, times_of_fp32
from .facts import Facts, Failure
from .findings import Finding, Report
from .storage import judge_place

GIB, MIB = 1 << 30, 1 << 20
LEAST_MEMORY_BYTES = 512 * MIB
"""Python, torch and the libraries take some 400 MiB before a plan's first byte."""
LITTLE_MEMORY_BYTES = 2 * GIB
MUCH_STOLEN = 0.02
"""Of the processor time that was wanted."""
OLD_KERNEL, URING_KERNEL = (5, 13), (5, 6)
"""From the one on io_uring keeps buffers and files registered; from the other it has the reads that are used."""
NATIVE_BF16 = (8, 0)
"""The compute capability from which an NVIDIA GPU computes in bf16 itself."""


def judge(facts: Facts) -> Report:
    """What the facts mean, in the order in which one would mend them."""
    findings: list[Finding] = []
    for what, check in _checks().items():
        findings += [_failed(what, facts.failed[what])] if what in facts.failed else check(facts)
    return Report(facts, tuple(findings))


def _checks() -> dict[str, Callable[[Facts], Iterator[Finding]]]:
    """By what they look at, as the probes are named."""
    return {
        "kernel": _kernel,
        "processor": _processor,
        "memory": _memory,
        "memory nodes": _nodes,
        "locked memory": _locking,
        "huge pages": _pages,
        "io_uring": _uring,
        "directory": _storage,
        "packages": _packages,
        "GPU": _gpu,
        "precision": _products,
    }


def _failed(what: str, failure: Failure) -> Finding:
    mend = "end other programs" if failure.exit_code == MemoryBudgetError.exit_code else ""
    means = "This could not be looked at, and a run may meet the same."
    return Finding(what, "bad", failure.why, means, mend, failure.exit_code)


def _kernel(facts: Facts) -> Iterator[Finding]:
    found = f"{facts.system} {facts.kernel}" + (", in a container" if facts.container else "")
    version = tuple(int(part) for part in re.findall(r"\d{1,6}", facts.kernel)[:2])
    if facts.system != "Linux":
        yield Finding("kernel", "bad", found, "ssdplan needs Linux.", exit_code=SsdplanError.exit_code)
    elif version < URING_KERNEL:
        yield Finding("kernel", "warn", found, "It has no io_uring that ssdplan can use.", "a kernel of 5.13 or newer")
    elif version < OLD_KERNEL:
        means = "Its io_uring keeps no buffers registered, so each transfer costs more processor time."
        yield Finding("kernel", "warn", found, means, "a kernel of 5.13 or newer")
    else:
        yield Finding("kernel", "ok", found)


def _processor(facts: Facts) -> Iterator[Finding]:
    found = f"{facts.processor}, {facts.cores} core{'s' if facts.cores > 1 else ''} for this process"
    if facts.isa == "baseline":
        means = "It has no AVX2, so updates and checksums run at a part of memory's speed."
        yield Finding("processor", "warn", f"{found}, no vector kernels", means)
    elif facts.stolen_share >= MUCH_STOLEN:
        found += f"; {facts.stolen_share:.0%} of the time that was wanted on them, the host gave to others (steal)"
        yield Finding("processor", "warn", found, "Steps are as much slower, and less even than a profile can tell.")
    else:
        yield Finding("processor", "ok", f"{found}, kernels for {facts.isa}")


def _memory(facts: Facts) -> Iterator[Finding]:
    memory, obtainable = facts.memory, facts.obtainable_bytes
    binding = sorted(option for option, left in facts.limits.items() if left < memory.available)
    found = f"{format_bytes(memory.total)}, {format_bytes(memory.available)} available"
    if memory.total < facts.hardware_bytes:
        found += f"; the machine has {format_bytes(facts.hardware_bytes)}, control groups allow no more"
    if binding:
        found += f"; this process may take {format_bytes(obtainable)} (ulimit {' and '.join(binding)})"
    little = obtainable < LITTLE_MEMORY_BYTES
    if binding:
        mend = "; ".join(f"ulimit {option} unlimited" for option in binding)
    elif memory.total < facts.hardware_bytes and facts.hardware_available_bytes >= LITTLE_MEMORY_BYTES:
        mend = "give the container or service more memory, such as docker run --memory, systemd-run -p MemoryMax="
    else:
        mend = "end other programs"
    if obtainable < LEAST_MEMORY_BYTES:
        means = f"Python, torch and the libraries alone need {format_bytes(LEAST_MEMORY_BYTES)}."
        yield Finding("memory", "bad", found, means, mend, MemoryBudgetError.exit_code)
    elif little or binding:
        means = (
            "What a plan may keep in DRAM is little." if little else "A plan may keep less in DRAM than is available."
        )
        yield Finding("memory", "warn", found, means, mend)
    else:
        yield Finding("memory", "ok", found)


def _nodes(facts: Facts) -> Iterator[Finding]:
    nodes = facts.nodes
    if nodes.count == 1:
        yield Finding("memory nodes", "ok", "one: all memory is as near to each core")
    elif nodes.interleaved:
        yield Finding("memory nodes", "ok", f"{nodes.count} (NUMA), and pages go to all of them in turn")
    else:
        means = (
            "One thread fills the arenas, so they lie on its node: updates have the speed of that one, and cores of "
            "others wait longer."
        )
        mend = "numactl --interleave=all ssdplan ...   # profile and run alike"
        yield Finding("memory nodes", "warn", f"{nodes.count} (NUMA)", means, mend)


def _locking(facts: Facts) -> Iterator[Finding]:
    locking, wanted = facts.locking, facts.memory.available // 2
    soft = format_bytes(locking.soft_bytes or 0)
    if locking.problem and (locking.privileged or locking.soft_bytes is None):
        means = "The arena can be swapped out, which no plan expects."
        yield Finding("locked memory", "warn", f"cannot be locked: {locking.problem}", means)
    elif locking.privileged or locking.soft_bytes is None or locking.soft_bytes >= wanted:
        unlimited = locking.privileged or locking.soft_bytes is None
        yield Finding("locked memory", "ok", "no limit for this user" if unlimited else f"{soft} may be locked")
    else:
        found = (
            f"{soft} may be locked (RLIMIT_MEMLOCK); a plan takes up to {format_bytes(wanted)} unless told otherwise"
        )
        means = "A larger arena is not locked: it can be swapped out, and io_uring pins its pages at each transfer."
        yield Finding("locked memory", "warn", found, means, _unlock(facts, wanted))


def _unlock(facts: Facts, wanted: int) -> str:
    hard = facts.locking.hard_bytes
    if hard is None or hard >= wanted:
        return "ulimit -l " + ("unlimited" if hard is None else str(hard >> 10))
    if facts.container:
        return "docker run --ulimit memlock=-1 ..."
    return 'echo "$USER - memlock unlimited" | sudo tee /etc/security/limits.d/ssdplan.conf   # then log in again'


def _pages(facts: Facts) -> Iterator[Finding]:
    pages = facts.pages
    slower = "Direct I/O reaches about half its speed with small pages."
    if pages.transparent == "":
        yield Finding("huge pages", "warn", "this kernel has no transparent huge pages", slower)
    elif pages.transparent == "never":
        mend = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("huge pages", "warn", "transparent huge pages are turned off", slower, mend)
    elif pages.tried_share < 0.5:
        found = f"transparent ({pages.transparent}), but only {pages.tried_share:.0%} of a trial came in them"
        mend = "echo 1 | sudo tee /proc/sys/vm/compact_memory"
        yield Finding("huge pages", "warn", found, f"Memory is fragmented. {slower}", mend)
    else:
        yield Finding("huge pages", "ok", f"transparent ({pages.transparent})")
    if pages.reserved_free_bytes > facts.hardware_bytes // 50:
        found = f"{format_bytes(pages.reserved_free_bytes)} of reserved huge pages lie idle"
        means = "ssdplan uses transparent ones; these are lost to it."
        yield Finding("reserved pages", "warn", found, means, "sudo sysctl vm.nr_hugepages=0")


def _uring(facts: Facts) -> Iterator[Finding]:
    uring = facts.uring
    threads = "A pool of threads reads and writes instead, which takes more processor time."
    if uring.asked_for not in ("", *ENGINES):
        found = f"{ENGINE_VARIABLE}={uring.asked_for} is no engine"
        yield Finding("io_uring", "bad", found, "", f"unset {ENGINE_VARIABLE}", UsageError.exit_code)
    elif uring.asked_for == "io_uring" and not uring.description:
        found = f"is not to be had: {uring.problem}; but {ENGINE_VARIABLE}=io_uring allows nothing else"
        yield Finding("io_uring", "bad", found, "", f"unset {ENGINE_VARIABLE}", IoFailure.exit_code)
    elif uring.description and uring.asked_for == "threads":
        found = f"is to be had, but {ENGINE_VARIABLE}=threads turns it off"
        yield Finding("io_uring", "warn", found, threads, f"unset {ENGINE_VARIABLE}")
    elif uring.description:
        yield Finding("io_uring", "ok", "set up, and read through")
    else:
        if uring.disabled in ("1", "2"):
            mend = "sudo sysctl kernel.io_uring_disabled=0"
        elif "memory" in uring.problem.lower():
            mend = "ulimit -l unlimited"  # old kernels count rings as locked memory
        elif facts.container:
            mend = "docker run --security-opt seccomp=unconfined ...   # or a profile that allows io_uring"
        else:
            mend = "look for what forbids it: seccomp, SELinux, or a kernel built without CONFIG_IO_URING"
        yield Finding("io_uring", "warn", f"is not to be had: {uring.problem}", threads, mend)


def _storage(facts: Facts) -> Iterator[Finding]:
    return judge_place(facts.place)


def _packages(facts: Facts) -> Iterator[Finding]:
    named = ("torch", "transformers", "numpy")
    unfit = [package for package in facts.packages if not package.fits]
    for package in unfit:
        have = f"{package.name} {package.version}" if package.version else f"{package.name} is not installed"
        means = f"ssdplan needs {package.name}{package.wanted}."
        mend = f"pip install '{package.name}{package.wanted}'"
        yield Finding("packages", "bad", have, means, mend, SsdplanError.exit_code)
    if facts.torch_problem and not any(package.name == "torch" for package in unfit):
        mend = "pip install --force-reinstall torch"
        yield Finding("packages", "bad", f"torch: {facts.torch_problem}", "", mend, SsdplanError.exit_code)
    versions = {package.name: package.version for package in facts.packages if package.fits}
    found = [f"Python {facts.python}", *(f"{name} {versions[name]}" for name in named if name in versions)]
    yield Finding("versions", "ok", ", ".join(found))


def _gpu(facts: Facts) -> Iterator[Finding]:
    unused, uses = "Compute works on host memory, on the processor.", "ssdplan profile --device cuda"
    for gpu in facts.gpus:
        major, minor = gpu.capability
        found = f"{gpu.name}, {format_bytes(gpu.nbytes)}, compute capability {major}.{minor}"
        found += f", driver {facts.driver}" if facts.driver else ""
        found += f", CUDA {facts.torch_cuda}" if facts.torch_cuda else ""
        if gpu.capability < NATIVE_BF16:
            yield Finding("GPU", "warn", found, "It emulates bf16, slowly.", f"{uses} --precision fp16")
        else:
            yield Finding("GPU", "ok", f"{found}; {uses} uses it")
    if facts.gpus or facts.torch_problem:
        return
    if facts.driver and not facts.torch_cuda:
        found = f"NVIDIA's driver {facts.driver} is loaded, but torch was built without CUDA"
        yield Finding("GPU", "warn", found, unused, "pip install --force-reinstall torch   # without constraints.txt")
    elif facts.driver:
        found = f"NVIDIA's driver {facts.driver} is loaded, but torch finds no device"
        means = f"CUDA_VISIBLE_DEVICES may hide it, or the driver is too old for CUDA {facts.torch_cuda}. {unused}"
        yield Finding("GPU", "warn", found, means, "unset CUDA_VISIBLE_DEVICES; nvidia-smi")
    else:
        yield Finding("GPU", "ok", f"none. {unused}")


def _products(facts: Facts) -> Iterator[Finding]:
    """Advice on the format that `profile` uses unless told otherwise; of the other, only whether to leave it alone."""
    if facts.gpus or not facts.products:
        return  # the processor does not compute
    costs = facts.products
    took = ", ".join(f"{name} {times_of_fp32(cost)}" for name, cost in costs.items())
    found = f"products of matrices take this long on this processor, beside fp32: {took}"
    if better := faster_precision(DEFAULT_PRECISION, costs):
        means = f"It lacks instructions for {DEFAULT_PRECISION}, which ssdplan profile uses unless told otherwise."
        yield Finding("precision", "warn", found, means, f"ssdplan profile --precision {better}")
        return
    slow = [name for name, cost in costs.items() if cost >= SLOW_PRODUCTS]
    keep = f"; {' and '.join(slow)} is slow here, so keep {DEFAULT_PRECISION}" if slow else ""
    yield Finding("precision", "ok", f"{found}{keep}")
