"""Networks: what ranks exchange over, between machines and between the GPUs of one machine. Data only."""

from dataclasses import dataclass
from typing import Literal

from .figure import Figure, assumed, measured

Between = Literal["machines", "GPUs"]


@dataclass(frozen=True, slots=True)
class Interconnect:
    """One network. Its bandwidth is what each machine, or each GPU, receives while it sends as much."""

    name: str
    between: Between
    bandwidth: Figure
    latency: Figure
    """Seconds of a collective that moves next to nothing."""
    gpus: tuple[str, ...] = ()
    """Of an NVLink: the GPUs that it joins, by the names that gpus.py has."""


_FRAMES = "of the line: TCP has 1,448 of the 1,538 bytes that a full Ethernet frame takes"
_TCP = assumed(2e-4, "s", "a few messages over TCP")
_RDMA = assumed(3e-5, "s", "a few messages without the kernel")
_NCCL = assumed(2e-5, "s", "a kernel's launch and its flags")


def _ethernet(name: str, gigabits: float) -> Interconnect:
    return Interconnect(name, "machines", assumed(gigabits * 1e9 / 8 * 1448 / 1538, "bytes/s", _FRAMES), _TCP)


NETWORKS = (
    _ethernet("1gbe", 1),
    _ethernet("2.5gbe", 2.5),
    _ethernet("10gbe", 10),
    _ethernet("25gbe", 25),
    _ethernet("100gbe", 100),
    Interconnect(
        "infiniband-hdr",
        "machines",
        assumed(23.5e9, "bytes/s", "94% of 200 Gbit/s, one adapter a machine"),
        _RDMA,
    ),
    Interconnect(
        "infiniband-ndr",
        "machines",
        assumed(47.0e9, "bytes/s", "94% of 400 Gbit/s, one adapter a machine"),
        _RDMA,
    ),
    Interconnect(
        "nvlink-3090",
        "GPUs",
        assumed(49.0e9, "bytes/s", "87% of the bridge's 56.25 GB/s a direction; it joins two cards"),
        _NCCL,
        ("rtx-3090", "rtx-a5000", "rtx-a6000", "a40"),
    ),
    Interconnect(
        "nvlink-a100",
        "GPUs",
        measured(200e9, "bytes/s", "NCCL's bus bandwidth on 8 A100 SXM (github.com/NVIDIA/nccl-tests issue 149)"),
        _NCCL,
        ("a100-40gb", "a100-80gb"),
    ),
    Interconnect(
        "nvlink-h100-pcie",
        "GPUs",
        measured(115e9, "bytes/s", "NCCL's bus bandwidth on two bridged cards (github.com/NVIDIA/nccl issue 1161)"),
        _NCCL,
        ("h100-pcie",),
    ),
    Interconnect(
        "nvlink-h100",
        "GPUs",
        measured(340e9, "bytes/s", "NCCL's all-gather inside an H100 SXM machine (github.com/NVIDIA/nccl issue 1218)"),
        _NCCL,
        ("h100-80gb", "h200", "h200-nvl", "gh200"),
    ),
)
OVER_LINK, OVER_DRAM = "pcie", "dram"
"""The network between GPUs that no NVLink joins, and between ranks of one machine without GPUs."""
LINK_SHARE = assumed(
    0.6,
    "fraction",
    "what NCCL reaches of a link's copies: 35 GB/s on four RTX 5090, 28 on eight (github.com/NVIDIA/nccl issue 1639)",
)
_GLOO = "gloo between two processes, as ssdplan profile measured on the machine of the README"
DRAM_BANDWIDTH = assumed(0.9e9, "bytes/s", _GLOO)
LATENCY_OF_LINK = _NCCL
LATENCY_OF_DRAM = assumed(3e-4, "s", _GLOO)
