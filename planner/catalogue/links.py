"""Links between host and device: what copies of page-locked memory reach each way. Data only."""

from dataclasses import dataclass

from .figure import Figure, assumed, measured


@dataclass(frozen=True, slots=True)
class Link:
    """Bandwidths of one link, bytes/s, each way by itself."""

    name: str
    h2d: Figure
    d2h: Figure
    within: bool = False
    """Whether it is within a chip or a module: GPUs whose own link is another have none such."""


_WITHIN = assumed(
    105e9,
    "bytes/s",
    "a copy from place to place of one memory reads and writes it: half of the 202 to 231 GB/s that a GPU of that kind "
    "reads and writes (github.com/AMD-AGI/TraceLens pull request 943; 218 and 231 to 234 on GB10, "
    "github.com/huggingface/kernels pull request 283 and github.com/antirez/ds4 issue 773)",
)
LINKS = (
    Link(
        "pcie-3.0-x16",
        measured(12.0e9, "bytes/s", "on V100 (BaM, github.com/ZaidQureshi/bam issue 54); 15.75 by the standard"),
        assumed(12.0e9, "bytes/s", "as the other way"),
    ),
    Link(
        "pcie-4.0-x16",
        measured(
            25.1e9,
            "bytes/s",
            "nvbandwidth on A100 (github.com/NVIDIA/nvbandwidth issue 42), and 23.9 to 26.4 on RTX 4090 (issue 15); "
            "31.5 by the standard",
        ),
        measured(26.3e9, "bytes/s", "nvbandwidth on RTX 4090, 26.3 to 27.1 (github.com/NVIDIA/nvbandwidth issue 15)"),
    ),
    Link(
        "pcie-5.0-x16",
        measured(
            56.3e9,
            "bytes/s",
            "nvbandwidth on RTX 5090 (github.com/tinygrad/open-gpu-kernel-modules issue 29); 63.0 by the standard",
        ),
        measured(
            52.8e9,
            "bytes/s",
            "nvbandwidth on H100 (github.com/NVIDIA/nvbandwidth issue 24), and 57.3 on RTX 5090 (github.com/tinygrad/"
            "open-gpu-kernel-modules issue 29)",
        ),
    ),
    Link(
        "nvlink-c2c",
        measured(346e9, "bytes/s", "nvbandwidth on GH200 (github.com/NVIDIA/nvbandwidth issue 23), of 450"),
        measured(300e9, "bytes/s", "15% less than the other way (github.com/NVIDIA/nvbandwidth issue 23)"),
        within=True,
    ),
    Link("unified-memory", _WITHIN, _WITHIN, within=True),
)

IN_DRAM = Link(
    "dram",
    assumed(8.7e9, "bytes/s", "one core copying, as ssdplan profile measured on the machine of the README"),
    assumed(8.7e9, "bytes/s", "one core copying, as ssdplan profile measured on the machine of the README"),
)
"""The link of a device that is emulated in DRAM."""
