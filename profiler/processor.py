"""The processor, and how much of it this process may use.

Owns what of /proc and of control groups says so: in a container their quotas count, not the hardware. Never measures.
"""

import os
import platform
from pathlib import Path

from ssdplan.native.process import control_groups, read_fields, read_words


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name, or at least its architecture."""
    fields = ("model name", "Model", "cpu model", "Processor")
    values = dict(read_fields(root / "proc/cpuinfo"))
    return next((values[field] for field in fields if values.get(field)), platform.machine() or "unknown processor")


def cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, bounded by the quotas of its control groups."""
    count = len(os.sched_getaffinity(0))
    for group in control_groups("cpu", root):
        version_1 = (group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
        words = read_words(group / "cpu.max") or tuple(word for file in version_1 for word in read_words(file))
        if len(words) == 2 and words[0] not in ("max", "-1"):
            count = min(count, int(words[0]) // int(words[1]))
    return max(count, 1)


def transparent_pages(root: Path = Path("/")) -> str:
    words = read_words(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return next((word.strip("[]") for word in words if word.startswith("[")), "")
