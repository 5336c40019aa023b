"""Benchmarks: compares our engine and kernels with their rivals on this machine, each with the target that we set.

Owns which comparisons there are, in which order they run, and the check that the machine has the memory for them. How
each is measured is in `engine.py` and `kernels.py`; the document and its text are in `report.py`.
"""

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from ssdplan.native import InvalidRequestError, isa
from ssdplan.native.process import host_memory
from ssdplan.plans.errors import IoFailure, MemoryBudgetError, UsageError
from ssdplan.plans.units import format_bytes

from ..measure import Progress, portion
from ..processor import cores, cpu_name, transparent_pages
from .engine import EngineBench, EngineRow, Fio, measure_engine
from .kernels import (
    Setting,
    measure_adam,
    measure_checksum,
    measure_overflow,
    measure_page_lock,
    measure_quantise,
    measure_zeroth_order,
)
from .report import Bench, Row, Surroundings, Target
from .turns import spread

KERNELS: dict[str, Callable[[Setting, Progress], list[Row]]] = {
    "adam": measure_adam,
    "overflow": measure_overflow,
    "quantise": measure_quantise,
    "zeroth-order": measure_zeroth_order,
    "checksum": measure_checksum,
    "page-lock": measure_page_lock,
}
ENGINE = "engine"
GROUPS = (ENGINE, *KERNELS)
"""What there is to compare, in the order in which it runs."""
ENGINE_SHARE = 6
"""About how many times as long the engine takes as one of the kernels."""
SMALLEST = 64 << 20
"""Bytes; less would fit into caches, and a file of less says nothing of a drive."""
SPARE = 256 << 20
"""Bytes of memory left to the process itself and to others."""


def bench(
    volumes: Sequence[Path], *, nbytes: int, pairs: int, groups: Sequence[str] = GROUPS, progress: Progress
) -> Bench:
    """Measure `groups`, each in `pairs` pairs of runs that take turns, within about `nbytes` of memory and of files.

    Errors: UsageError for what cannot be meant, MemoryBudgetError where memory is short, DiskFullError, and IoFailure
    where a drive fails. What cannot be measured here, for want of a rival or of direct I/O, is a row that says so.
    """
    _check(volumes, nbytes, pairs, groups)
    load = os.getloadavg()[0]
    threads = cores()
    setting = Setting(nbytes, threads, pairs)
    before, rows = torch.get_num_threads(), list[Row]()
    torch.set_num_threads(threads)
    try:
        chosen = [group for group in GROUPS if group in groups]
        shares = [ENGINE_SHARE if group == ENGINE else 1 for group in chosen]
        for number, group in enumerate(chosen):
            done = sum(shares[:number]) / sum(shares)
            part = portion(progress, done, done + shares[number] / sum(shares))
            rows += _engine(volumes, setting, part) if group == ENGINE else KERNELS[group](setting, part)
    finally:
        torch.set_num_threads(before)
    return Bench(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=surroundings(threads, load),
        volumes=tuple(str(volume.resolve()) for volume in volumes) if ENGINE in groups else (),
        size_bytes=nbytes,
        pairs=pairs,
        rows=tuple(rows),
    )


def surroundings(threads: int, load: float) -> Surroundings:
    """What this machine and its software are."""
    return Surroundings(
        processor=cpu_name(),
        cores=threads,
        isa=isa(),
        host_memory_bytes=host_memory().total,
        kernel=platform.release(),
        huge_pages=transparent_pages() or "unknown",
        python=platform.python_version(),
        torch=torch.__version__,
        load=load,
    )


def engine_rows(found: EngineBench) -> list[Row]:
    """What the engine reached beside fio: with buffers of the same kind, and with those that fio takes by itself."""
    return [row for pattern in found.rows for row in _pattern_rows(found, pattern)]


def _pattern_rows(found: EngineBench, pattern: EngineRow) -> list[Row]:
    ours = statistics.median(pattern.ours)
    rivals = (
        (f"{pattern.name}, fio, same buffers", pattern.fio, pattern.ratios, Target(0.95), ""),
        (f"{pattern.name}, fio, its own", pattern.fio_default, pattern.default_ratios, Target(2.0), _gain(pattern)),
    )
    if not isinstance(found.fio, Fio):
        missing = f"{found.fio.reason}; install fio, which most distributions have"
        return [Row(ENGINE, name, "B/s", ours, target=target, missing=missing) for name, _, _, target, _ in rivals]
    return [
        Row(ENGINE, name, "B/s", ours, statistics.median(rival), spread(ratios), target, note=note)
        for name, rival, ratios, target, note in rivals
    ]


def _gain(pattern: EngineRow) -> str:
    """Where huge pages do not matter to the drive, no engine is twice as fast for having them."""
    if not pattern.fio:
        return ""
    gain = spread([a / b for a, b in zip(pattern.fio, pattern.fio_default, strict=True)]).median
    return f"the same buffers make fio {gain:.2f} times as fast here"


def _engine(volumes: Sequence[Path], setting: Setting, progress: Progress) -> list[Row]:
    try:
        found = measure_engine(volumes, nbytes=setting.nbytes, pairs=setting.pairs, progress=progress)
    except IoFailure as error:
        if isinstance(error.__cause__, InvalidRequestError):
            missing = f"{error} (no direct I/O there?); name a directory on ext4 or xfs with --volume"
            return [Row(ENGINE, "read and write", "B/s", missing=missing)]
        raise
    return engine_rows(found)


def _check(volumes: Sequence[Path], nbytes: int, pairs: int, groups: Sequence[str]) -> None:
    if not groups or not set(groups) <= set(GROUPS) or len(set(groups)) < len(groups):
        raise UsageError(f"{','.join(groups)!r}: name some of {', '.join(GROUPS)}, each once")
    if pairs < 1:
        raise UsageError(f"{pairs} pairs: a ratio needs at least one")
    least = SMALLEST * (max(len(volumes), 1) if ENGINE in groups else 1)
    if nbytes < least:
        raise UsageError(
            f"a size of {format_bytes(nbytes)} is too small to tell anything; at least {format_bytes(least)}"
        )
    available = host_memory().available
    if nbytes + SPARE > available:
        raise MemoryBudgetError(
            f"a size of {format_bytes(nbytes)} needs {format_bytes(nbytes + SPARE)} of memory, and "
            f"{format_bytes(available)} are available; give a smaller --size"
        )
