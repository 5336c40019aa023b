"""GPUs: memory, dense tensor FLOP/s, memory bandwidth, and how much of the FLOP/s training reaches. Data only.

`flops` is bf16 (and fp16) with fp32 accumulation, without sparsity: GeForce cards run it at half the rate of fp16
accumulation. `flops_fp32` is that of the ordinary cores, which PyTorch uses for fp32 unless TF32 is switched on.
"""

from dataclasses import dataclass

from .figure import Figure, assumed

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card, in bytes, FLOP/s, bytes/s and a fraction."""

    name: str
    memory: Figure
    flops: Figure
    flops_fp32: Figure
    memory_bandwidth: Figure
    efficiency: Figure
    """The share of `flops` that the layers of a transformer reach, everything between the matrix products included."""
    link: str
    """Its fastest link to the host, by the name that links.py has."""


RESERVE = assumed(
    float(GIB),
    "bytes",
    "CUDA context, cuBLAS and cuDNN workspaces; half of it is typical",
)
"""Of a GPU's memory, what no plan may have."""

FRAGMENTATION = assumed(
    0.18,
    "fraction",
    "GMLake (Guo et al. 2024, arXiv:2401.08156) finds 15% of what PyTorch's allocator reserves lost to fragmentation, "
    "on average over eight language models (up to 33%), so 18% of what they use; of whole trainings, where here an "
    "arena holds all but workspaces",
)
"""What PyTorch's caching allocator takes beyond the tensors of a workspace, in fractions of their bytes."""

_AMPERE_A100 = "NVIDIA A100 Tensor Core GPU data sheet (nvidia-1758950), SXM column"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A"
_ADA = "NVIDIA Ada GPU architecture whitepaper, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A"
_HOPPER = "NVIDIA H100 Tensor Core GPU architecture whitepaper, SXM5 column"
_L40S = "NVIDIA L40S data sheet"
_A5000 = "NVIDIA RTX A5000 data sheet, recalled: we could not look it up again"
_A6000 = "NVIDIA RTX A6000 data sheet"

_USUAL = assumed(
    0.5,
    "fraction",
    "between the 0.44 to 0.52 that Megatron-LM reaches on A100, recomputation counted (Narayanan et al. 2021, "
    "arXiv:2104.04473, table 1), and the 0.57 of GreedySnake on A5000 (section 6.2); none was measured on this card",
)
_A100_EFFICIENCY = Figure(
    0.48,
    "fraction",
    "the middle of the 138 to 163 TFLOP/s of 312 that Narayanan et al. 2021 (arXiv:2104.04473, section 5.1) report for "
    "GPT, recomputation counted; GreedySnake (section 6.2) reaches 128.3 of them over whole steps",
)
_A5000_EFFICIENCY = Figure(
    0.57, "fraction", "GreedySnake, section 6.2: 63.1 TFLOP/s of 111.1 with GPT-65B on RTX A5000, whole steps"
)
_H100_EFFICIENCY = Figure(
    0.41,
    "fraction",
    "The Llama 3 Herd of Models (arXiv:2407.21783), table 4: 380 to 430 TFLOP/s of 989 with Llama 3 405B on H100, "
    "communication included, so rather low for one GPU",
)


def _gpu(
    name: str,
    memory_gib: float,
    tera: float,
    tera_fp32: float,
    giga_bytes: float,
    source: str,
    efficiency: Figure = _USUAL,
    link: str = "pcie-4.0-x16",
    dense: str = "",
    recalled: bool = False,
) -> Gpu:
    return Gpu(
        name=name,
        memory=Figure(memory_gib * GIB, "bytes", source, recalled),
        flops=Figure(tera * 1e12, "FLOP/s", source + dense, recalled),
        flops_fp32=Figure(tera_fp32 * 1e12, "FLOP/s", source, recalled),
        memory_bandwidth=Figure(giga_bytes * 1e9, "bytes/s", source, recalled),
        efficiency=efficiency,
        link=link,
    )


_HALF = ": half of the figure with sparsity"

GPUS = (
    _gpu("rtx-3090", 24, 71.0, 35.6, 936, _GA102),
    _gpu("rtx-4090", 24, 165.2, 82.6, 1008, _ADA),
    _gpu("rtx-5090", 32, 209.5, 104.8, 1792, _BLACKWELL, link="pcie-5.0-x16"),
    _gpu("rtx-a5000", 24, 111.1, 27.8, 768, _A5000, _A5000_EFFICIENCY, dense=_HALF, recalled=True),
    _gpu("rtx-a6000", 48, 154.8, 38.7, 768, _A6000, dense=_HALF),
    _gpu("a100-40gb", 40, 312.0, 19.5, 1555, _AMPERE_A100, _A100_EFFICIENCY),
    _gpu("a100-80gb", 80, 312.0, 19.5, 2039, _AMPERE_A100, _A100_EFFICIENCY),
    _gpu("h100-80gb", 80, 989.4, 66.9, 3350, _HOPPER, _H100_EFFICIENCY, link="pcie-5.0-x16"),
    _gpu("l40s", 48, 362.05, 91.6, 864, _L40S),
)
