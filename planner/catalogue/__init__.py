"""The catalogue: GPUs, processors, SSDs, links and models that a what-if can name, each figure with its source.

The data are in gpus.py, cpus.py, ssds.py, links.py and models.py, and nothing here computes with them. Whom a name
means is in names.py.
"""

from .cpus import CHIPSET, COMPUTE_EFFICIENCY, CPUS, DRIVE_A_CORE, MEMORY_EFFICIENCY, Cpu
from .figure import Figure, assumed
from .gpus import ATTENTION_TOKENS, FRAGMENTATION, GPUS, LAUNCH, PASSES, RESERVE, TRAINING, Gpu
from .links import IN_DRAM, LINKS, Link
from .models import MODELS
from .names import find, nearest
from .shapes import Shape
from .ssds import SSDS, TB, Size, Ssd

__all__ = [
    "ATTENTION_TOKENS",
    "CHIPSET",
    "COMPUTE_EFFICIENCY",
    "CPUS",
    "DRIVE_A_CORE",
    "FRAGMENTATION",
    "GPUS",
    "IN_DRAM",
    "LAUNCH",
    "LINKS",
    "MEMORY_EFFICIENCY",
    "MODELS",
    "PASSES",
    "RESERVE",
    "SSDS",
    "TB",
    "TRAINING",
    "Cpu",
    "Figure",
    "Gpu",
    "Link",
    "Shape",
    "Size",
    "Ssd",
    "assumed",
    "find",
    "nearest",
]
