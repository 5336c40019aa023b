"""Links between host and device: what copies of page-locked memory reach each way. Data only."""

from dataclasses import dataclass

from .figure import Figure, assumed


@dataclass(frozen=True, slots=True)
class Link:
    """Bandwidths of one link, bytes/s, each way by itself."""

    name: str
    h2d: Figure
    d2h: Figure


LINKS = (
    Link(
        "pcie-3.0-x16",
        Figure(12.0e9, "bytes/s", "measured on V100 (BaM, github.com/ZaidQureshi/bam issue 54); 15.75 by the standard"),
        assumed(12.0e9, "bytes/s", "as the other way"),
    ),
    Link(
        "pcie-4.0-x16",
        Figure(
            25.1e9,
            "bytes/s",
            "nvbandwidth on A100 (github.com/NVIDIA/nvbandwidth issue 42), and 23.9 to 26.4 on RTX 4090 (issue 15); "
            "31.5 by the standard",
        ),
        Figure(26.3e9, "bytes/s", "nvbandwidth on RTX 4090, 26.3 to 27.1 (github.com/NVIDIA/nvbandwidth issue 15)"),
    ),
    Link(
        "pcie-5.0-x16",
        assumed(
            50.2e9,
            "bytes/s",
            "twice what PCIe 4.0 reaches, as by the standard; the way back was measured at 52.8 (nvbandwidth issue 24)",
        ),
        Figure(52.8e9, "bytes/s", "nvbandwidth on H100 (github.com/NVIDIA/nvbandwidth issue 24); 63.0 by the standard"),
    ),
)

IN_DRAM = Link(
    "dram",
    assumed(8.7e9, "bytes/s", "one core copying, as ssdplan profile measured on the machine of the README"),
    assumed(8.7e9, "bytes/s", "one core copying, as ssdplan profile measured on the machine of the README"),
)
"""The link of a device that is emulated in DRAM."""
