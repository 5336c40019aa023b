"""Processors with the memory that goes with them: cores, DRAM bandwidth, peak fp32 FLOP/s, lanes for drives. Data
only."""

from dataclasses import dataclass

from .figure import Figure, assumed


@dataclass(frozen=True, slots=True)
class Cpu:
    """One processor, one socket."""

    name: str
    cores: Figure
    memory_bandwidth: Figure
    """Of all its channels, by the standard."""
    flops: Figure
    """fp32, all cores at the base clock."""
    drives: Figure | None = None
    """SSDs that have four lanes to the processor each, beside a GPU with its sixteen; the others share the chipset's
    link. None: as many as anyone has, or nobody knows."""


CHIPSET = assumed(
    7.4e9,
    "bytes/s",
    "four lanes of PCIe 4.0 to the chipset of AM4 and AM5 boards, 7.88 GB/s each way by the standard, of which a drive "
    "alone reads 7.45",
)
"""What the SSDs behind the chipset share, each way."""


DRIVE_A_CORE = assumed(
    7e9,
    "bytes/s",
    "what a core moves between drives and memory when it does nothing else, checksums included: a core of an AMD EPYC "
    "takes sums of 10 GB/s, and 23 GB/s are assumed for the rest; in a virtual machine it may be 1.5 in all",
)
"""Where compute works on the same cores, it goes without what the drives take."""
MEMORY_EFFICIENCY = assumed(
    0.8, "fraction", "of DRAM bandwidth in long streams; STREAM results of 0.75 to 0.9 are usual"
)
COMPUTE_EFFICIENCY = assumed(
    0.7,
    "fraction",
    "of fp32 FLOP/s: matrix products reach 0.8 and more, the rest of a layer waits for memory; blocks of 768 reached "
    "0.6 to 0.73 of what products of 2,048 did on two cores of an AMD EPYC",
)
"""bf16 counts as fast as fp32: many processors have no instructions for it."""


_RECALLED = ", recalled: we could not look it up again"


def _cpu(
    name: str,
    cores: int,
    ghz: float,
    flops_a_cycle: int,
    giga_bytes: float,
    memory: str,
    page: str,
    recalled: bool = True,
    drives: int = 0,
) -> Cpu:
    source = page + (_RECALLED if recalled else "")
    wide = "512" if flops_a_cycle == 64 else "256"
    return Cpu(
        name=name,
        cores=Figure(cores, "cores", source, recalled),
        memory_bandwidth=Figure(giga_bytes * 1e9, "bytes/s", f"{memory}; {source}", recalled),
        flops=Figure(
            cores * ghz * 1e9 * flops_a_cycle,
            "FLOP/s",
            f"{cores} cores at a base clock of {ghz:g} GHz, times {flops_a_cycle} fp32 FLOP a cycle (two {wide}-bit "
            f"fused multiply-adds); {source}",
            recalled,
        ),
        drives=Figure(drives, "SSDs", f"16 lanes go to a GPU, 4 to the chipset; {page}{_RECALLED}", True)
        if drives
        else None,
    )


CPUS = (
    _cpu("ryzen-9-5950x", 16, 3.4, 32, 51.2, "2 channels of DDR4-3200", "AMD product page, Ryzen 9 5950X", drives=1),
    _cpu(
        "ryzen-9-7950x", 16, 4.5, 32, 83.2, "2 channels of DDR5-5200", "AMD product page, Ryzen 9 7950X", False, 2
    ),
    _cpu("ryzen-7-7840u", 8, 3.3, 32, 89.6, "2 channels of DDR5-5600", "AMD product page, Ryzen 7 7840U"),
    _cpu("epyc-7302", 16, 3.0, 32, 204.8, "8 channels of DDR4-3200", "AMD product page, EPYC 7302"),
    _cpu("epyc-7763", 64, 2.45, 32, 204.8, "8 channels of DDR4-3200", "AMD product page, EPYC 7763", recalled=False),
    _cpu("epyc-9654", 96, 2.4, 32, 460.8, "12 channels of DDR5-4800", "AMD product page, EPYC 9654"),
    _cpu("xeon-8462y", 32, 2.8, 64, 307.2, "8 channels of DDR5-4800", "Intel ARK, Xeon Platinum 8462Y+"),
    _cpu("ryzen-9-9950x", 16, 4.3, 64, 89.6, "2 channels of DDR5-5600", "AMD product page, Ryzen 9 9950X", drives=2),
    _cpu("ryzen-ai-max-395", 16, 3.0, 64, 256.0, "256 bits of LPDDR5X-8000", "AMD product page, Ryzen AI Max+ 395"),
    _cpu("threadripper-7980x", 64, 3.2, 32, 166.4, "4 channels of DDR5-5200", "AMD product page, Threadripper 7980X"),
    _cpu(
        "threadripper-pro-7995wx", 96, 2.5, 32, 332.8, "8 channels of DDR5-5200",
        "AMD product page, Threadripper PRO 7995WX",
    ),
    _cpu("epyc-9965", 192, 2.25, 64, 576.0, "12 channels of DDR5-6000", "AMD product page, EPYC 9965"),
    _cpu("xeon-8592", 64, 1.9, 64, 358.4, "8 channels of DDR5-5600", "Intel ARK, Xeon Platinum 8592+"),
    _cpu(
        "xeon-6980p", 128, 2.0, 64, 614.4, "12 channels of DDR5-6400",
        "128 cores at 2.0 GHz by ceotech.it (intel-xeon-6-128-core-e-500w-per-dominare-i-server), the rest Intel ARK",
    ),
    _cpu(
        "grace", 72, 3.1, 32, 384.0, "480 GB of LPDDR5X",
        "NVIDIA Grace data sheet; four 128-bit units count as two of 256",
    ),
    _cpu(
        "gb10", 20, 2.8, 32, 273.0, "256 bits of LPDDR5X",
        "NVIDIA DGX Spark hardware guide (20 Arm cores); their clock and units are assumed",
    ),
)  # fmt: skip
