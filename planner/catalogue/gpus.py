"""GPUs: memory and its bandwidth, FLOP/s by the data sheet and as measured in large matrix products. Data only.

`peak` is bf16 (and fp16) with fp32 accumulation, without sparsity: GeForce cards run it at half the rate of fp16
accumulation. It says how far measurements are from data sheets, and nothing is computed from it: some cards exceed it
(a GeForce's clock goes beyond its rated boost), others never come near it (their power limit slows their clock).
"""

from dataclasses import dataclass

from .figure import Figure, assumed, measured

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card, in bytes, FLOP/s, bytes/s and fractions."""

    name: str
    memory: Figure
    peak: Figure
    """bf16, by its data sheet."""
    products: Figure
    """The best that large matrix products in bf16 were measured at on this card."""
    products_fp32: Figure
    """The same in fp32 on the ordinary cores, which PyTorch uses unless TF32 is switched on."""
    memory_bandwidth: Figure
    attention: Figure
    """Of `products`, what fused causal attention reaches in long rows."""
    link: str
    """Its fastest link to the host, by the name that links.py has."""
    bf16: bool = True
    """Whether it multiplies bf16 as fast as fp16."""
    cpu: str = ""
    """The processor that it comes with, by the name that cpus.py has; empty: any."""
    unified: bool = False
    """`memory` is host memory too: the GPU has what host leaves of it."""


TRAINING = assumed(
    0.95,
    "fraction",
    "the products of a transformer's layers are nearly as large as those that were measured; with gpu.passes by a fit "
    "to five trainings of llm-foundry, which 23 others bear out to 6% in the median (docs/catalogue.md)",
)
"""Of `products`, what the products of a transformer's layers reach in training. One factor for all cards."""

PASSES = assumed(
    2.5,
    "times",
    "PyTorch's norms, activations, rotations and sums are kernels of their own; with gpu.efficiency by a fit to five "
    "trainings of llm-foundry (docs/catalogue.md)",
)
"""How often these kernels move what autograd keeps of a layer, over once written and once read."""

LAUNCH = assumed(
    7e-4,
    "s",
    "134 kernels of a block's forward, launched by one interpreter in 0.7 to 0.8 ms (a Llama block, on the machine of "
    "the README)",
)
"""What a block's forward takes at least; its backward three times that."""

ATTENTION_TOKENS = assumed(
    400,
    "tokens",
    "twice the 184 and 270 at which FlashAttention-2 without a mask reaches half of its best on RTX A5000 "
    "(github.com/gpu-mode/ring-attention issue 10) and H100 (github.com/Dao-AILab/flash-attention pull request 2688): "
    "a causal mask leaves half of the row",
)
"""The row length at which fused causal attention reaches half of what it does in long rows."""

FP32_OF_PEAK = 0.65
"""Of fp32 FLOP/s by the data sheet, what products reach: 0.65 on RTX 4090, 0.63 on RTX A6000, 0.55 on RTX 6000 Ada."""

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
_ADA_4070 = (
    "NVIDIA's announcement of GeForce RTX 4070: 184 tensor cores, 2.475 GHz, 12 GB of GDDR6X at 504 GB/s (by "
    "thefpsreview.com/gpu-family/nvidia-geforce-rtx-4070-gpu-family-specifications)"
)
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A"
_HOPPER = "NVIDIA H100 Tensor Core GPU architecture whitepaper, SXM5 column"
_L40S = "NVIDIA L40S data sheet"
_A5000 = "NVIDIA RTX A5000 data sheet, recalled: we could not look it up again"
_A6000 = "NVIDIA RTX A6000 data sheet"

_ADA_6000 = "NVIDIA RTX 6000 Ada Generation data sheet"
_HOPPER_PCIE = "NVIDIA H100 Tensor Core GPU architecture whitepaper, PCIe column"

_MAMF = (
    "the best of many large shapes, by mamf-finder (github.com/mag-/gpu_benchmark, table of its README; the method is "
    "stas00's, github.com/stas00/ml-engineering, compute/accelerator/benchmarks)"
)
_CUBLAS = "cuBLASLt, dense bf16 (github.com/xzwgit/gpu-flops-bench, table of its README)"
_FP32 = (
    "0.65 of the data sheet: large fp32 products reach 53.8 of 82.6 TFLOP/s on RTX 4090 "
    "(github.com/zzc0721/torch-performance-test-data issue 78), 24.4 of 38.7 on RTX A6000 and 50.1 of 91.1 on RTX 6000 "
    "Ada (github.com/chsasank/device-benchmarks issues 15 and 16)"
)
_LIKE_SUPER = (
    "1.05 of the data sheet, as the best of RTX 4070 SUPER: 74.5 of 71.0 TFLOP/s in large bf16 products "
    "(github.com/zzc0721/torch-performance-test-data issue 54); no measurement of this card was found"
)
_TORCH = "the best of five sizes of PyTorch's bf16 products (github.com/zzc0721/torch-performance-test-data, {})"
_ADA_4080 = (
    "specifications of GeForce RTX 4080: 304 tensor cores, 2.505 GHz, 16 GB at 717 GB/s (by "
    "holynerdvana.com/2022/10/nvidia-geforce-rtx-4080-specifications.html)"
)
_BLACKWELL_PRO = (
    "NVIDIA's announcement of RTX PRO 6000 Blackwell: 188 SMs, 125 TFLOP/s in fp32, 96 GB at 1792 GB/s (by "
    "topcpu.net/es/news/nvidia-launches-96gb-rtx-5090-model-with-a-whopping-price-tag-of-10000); products at full rate "
    "with fp32 sums, as on its predecessors"
)
_A40 = "NVIDIA A40 data sheet, recalled but for its 149.7 TFLOP/s (github.com/hahnyuan/LLM-Viewer issue 7)"
_V100 = "NVIDIA V100 data sheet, SXM2 column, recalled; 125 TFLOP/s in fp16, which stands for bf16 here"
_H200 = (
    "NVIDIA H200 data sheet (by github.com/stas00/ml-engineering, compute/accelerator: H100's FLOP/s, 4.8 TB/s; 140 of "
    "its 141 GB are there for use)"
)
_B200 = (
    "NVIDIA Blackwell data sheet (by github.com/stas00/ml-engineering, compute/accelerator); 8 TB/s; 179 GiB are there "
    "for use"
)
_MI300X = (
    "AMD Instinct MI300X data sheet: 304 compute units at 2.1 GHz, 163.4 TFLOP/s in fp32, 192 GB at 5.3 TB/s (by "
    "github.com/stas00/ml-engineering, compute/accelerator)"
)
_GH200 = (
    "NVIDIA GH200 data sheet, 480 GB and 96 GB of HBM3 at 4 TB/s, recalled; of these 94.5 GiB are there for use "
    "(github.com/stas00/ml-engineering pull request 60)"
)
_GB10 = (
    "NVIDIA DGX Spark hardware guide: 128 GB of LPDDR5X at 273 GB/s, 6,144 cores (by ai-infrastructure.net/dgx-spark), "
    "of which 121.6 GiB are there for use (github.com/AlexsJones/llmfit pull request 872); 125 TFLOP/s are an eighth "
    "of its petaFLOP in fp4 with sparsity"
)
_GB10_MEASURED = "PyTorch 2.10 (github.com/huggingface/kernels pull request 283)"
_8060S = (
    "Radeon 8060S: 40 compute units at 2.9 GHz (techpowerup.com/330548), 512 FLOP a cycle each, 256 bits of "
    "LPDDR5X-8000; 120 GB are there for use (github.com/AMD-AGI/TraceLens pull request 943)"
)
_8060S_MEASURED = (
    "the best of three runs (github.com/AMD-AGI/TraceLens pull request 943); in fp32 by mamf-finder "
    "(github.com/ROCm/legacy-rocm-build issue 5807)"
)
_FLASH_BLACKWELL = measured(
    0.2,
    "fraction",
    "FlashAttention-2, which does not use the instructions of B200, forward and backward: 259 to 346 TFLOP/s at 512 to "
    "16384 tokens without a mask, 64 wide (github.com/Dao-AILab/flash-attention issue 1589), of 1,696 in products",
)
_FLASH_NOT_NVIDIA = assumed(0.4, "fraction", "no training kernel was found measured on this GPU; as on H100")
_FLASH_VOLTA = assumed(
    0.4,
    "fraction",
    "FlashAttention-2 has no kernels for it, and PyTorch falls back to slower ones, which gain next to nothing over "
    "plain attention (github.com/facebookresearch/xformers pull request 362): half of what it is on RTX A5000",
)
_FLASH = measured(
    0.85,
    "fraction",
    "FlashAttention-2, which PyTorch has, forward and backward on RTX A5000: 59 to 79 TFLOP/s at 512 to 8192 tokens "
    "without a mask (github.com/gpu-mode/ring-attention issue 10), of 93.9 in products; the limit of a fit",
)
_FLASH_ELSEWHERE = assumed(0.85, "fraction", "as on RTX A5000: " + _FLASH.source)
_FLASH_HOPPER = measured(
    0.4,
    "fraction",
    "FlashAttention-2, which PyTorch has and which does not use Hopper's own instructions, forward and backward on "
    "H100: 204 to 302 TFLOP/s at 512 to 8192 tokens without a mask (github.com/Dao-AILab/flash-attention pull request "
    "2688), of 792 in products; the limit of a fit. FlashAttention-3 is twice as fast (pull request 1791)",
)


def _gpu(
    name: str,
    memory_gib: float,
    tera: float,
    tera_measured: float,
    tera_fp32: float,
    giga_bytes: float,
    source: str,
    link: str = "pcie-4.0-x16",
    attention: Figure = _FLASH_ELSEWHERE,
    by: str = _MAMF,
    dense: str = "",
    recalled: bool = False,
    supposed: bool = False,
    measured_fp32: float = 0.0,
    bf16: bool = True,
    cpu: str = "",
    unified: bool = False,
) -> Gpu:
    """FLOP/s in units of 10^12: by the data sheet, as measured (`supposed`: as another card's were), and in fp32 by the
    data sheet; `measured_fp32`: what `by` has for those, 0 where it has none."""
    return Gpu(
        name=name,
        memory=Figure(memory_gib * GIB, "bytes", source, recalled),
        peak=Figure(tera * 1e12, "FLOP/s", source + dense, recalled),
        products=Figure(tera_measured * 1e12, "FLOP/s", by, supposed, not supposed),
        products_fp32=measured(measured_fp32 * 1e12, "FLOP/s", by)
        if measured_fp32
        else assumed(FP32_OF_PEAK * tera_fp32 * 1e12, "FLOP/s", _FP32),
        memory_bandwidth=Figure(giga_bytes * 1e9, "bytes/s", source, recalled),
        attention=attention,
        link=link,
        bf16=bf16,
        cpu=cpu,
        unified=unified,
    )


_HALF = ": half of the figure with sparsity"
_5 = "pcie-5.0-x16"

GPUS = (
    _gpu("rtx-3090", 24, 71.0, 78.0, 35.6, 936, _GA102),
    _gpu("rtx-4070", 12, 58.3, 61.2, 29.1, 504, _ADA_4070, by=_LIKE_SUPER, supposed=True),
    _gpu("rtx-4080", 16, 97.5, 102.4, 48.7, 717, _ADA_4080, by=_LIKE_SUPER, supposed=True),
    _gpu("rtx-4090", 24, 165.2, 178.5, 82.6, 1008, _ADA),
    _gpu("rtx-5080", 16, 112.6, 102.9, 56.3, 960, _BLACKWELL, _5, by=_TORCH.format("issue 104"), measured_fp32=33.6),
    _gpu("rtx-5090", 32, 209.5, 254.0, 104.8, 1792, _BLACKWELL, _5, by=_CUBLAS),
    _gpu("rtx-a5000", 24, 111.1, 93.9, 27.8, 768, _A5000, attention=_FLASH, dense=_HALF, recalled=True),
    _gpu("rtx-a6000", 48, 154.8, 131.2, 38.7, 768, _A6000, dense=_HALF),
    _gpu("rtx-6000-ada", 48, 364.2, 278.5, 91.1, 960, _ADA_6000, dense=_HALF),
    _gpu("rtx-pro-6000", 96, 500.5, 457.6, 125.0, 1792, _BLACKWELL_PRO, _5, by=_CUBLAS, measured_fp32=83.6),
    _gpu("a40", 48, 149.7, 122.3, 37.4, 696, _A40, by=_TORCH.format("issue 185"), recalled=True, measured_fp32=23.7),
    _gpu("l40s", 48, 362.05, 252.0, 91.6, 864, _L40S),
    _gpu(
        "v100-32gb", 32, 125.3, 97.4, 15.7, 900, _V100, "pcie-3.0-x16", _FLASH_VOLTA,
        by=_TORCH.format("issue 140, in fp16: it has no tensor cores for bf16"), recalled=True, measured_fp32=14.5,
        bf16=False,
    ),
    _gpu("a100-40gb", 40, 312.0, 267.9, 19.5, 1555, _AMPERE_A100),
    _gpu("a100-80gb", 80, 312.0, 267.9, 19.5, 2039, _AMPERE_A100),
    _gpu("h100-pcie", 80, 756.4, 499.5, 51.2, 2039, _HOPPER_PCIE, _5, _FLASH_HOPPER),
    _gpu("h100-80gb", 80, 989.4, 792.1, 66.9, 3350, _HOPPER, _5, _FLASH_HOPPER),
    _gpu(
        "h200", 140, 989.4, 790.3, 66.9, 4800, _H200, _5, _FLASH_HOPPER, by=_TORCH.format("issue 45"),
        measured_fp32=51.3,
    ),
    _gpu("h200-nvl", 140, 989.4, 853.3, 66.9, 4800, _H200, _5, _FLASH_HOPPER, by=_CUBLAS, measured_fp32=47.3),
    _gpu(
        "gh200", 94.5, 989.4, 842.5, 66.9, 4000, _GH200, "nvlink-c2c", _FLASH_HOPPER, recalled=True, cpu="grace",
    ),
    _gpu(
        "b200", 179, 2250.0, 1696.0, 80.0, 8000, _B200, _5, _FLASH_BLACKWELL, by=_TORCH.format("database.md"),
        measured_fp32=66.2,
    ),
    _gpu("mi300x", 192, 1307.4, 758.3, 163.4, 5300, _MI300X, _5, _FLASH_NOT_NVIDIA),
    _gpu(
        "gb10", 121.6, 125.0, 92.3, 31.0, 273, _GB10, "unified-memory", by=_GB10_MEASURED, cpu="gb10", unified=True,
    ),
    _gpu(
        "radeon-8060s", 111.7, 59.4, 36.0, 29.7, 256, _8060S, "unified-memory", _FLASH_NOT_NVIDIA, by=_8060S_MEASURED,
        measured_fp32=8.7, cpu="ryzen-ai-max-395", unified=True,
    ),
)  # fmt: skip
