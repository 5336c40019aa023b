"""Models by name: their shapes, from what their publishers say, and what they weigh when published. Data only.

What a shape is, and what it counts, is in `shapes.py`.
"""

from dataclasses import replace

from .shapes import Experts, Shape


def _gated(
    name: str,
    family: str,
    hidden: int,
    blocks: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    published: float,
    source: str,
    tied: bool = False,
    head_width: int = 0,
) -> Shape:
    shape = Shape(name, family, hidden, blocks, heads, kv_heads, intermediate, vocab, tied, published, source)
    return replace(shape, head_width=head_width)


def _mixture(
    name: str,
    family: str,
    hidden: int,
    blocks: int,
    heads: int,
    kv_heads: int,
    experts: Experts,
    vocab: int,
    published: float,
    source: str,
    head_width: int = 0,
) -> Shape:
    of_active = _gated(name, family, hidden, blocks, heads, kv_heads, experts.inner, vocab, published, source)
    return replace(of_active, head_width=head_width, experts=experts)


def _plain(
    name: str,
    family: str,
    hidden: int,
    blocks: int,
    heads: int,
    vocab: int,
    max_positions: int,
    published: float,
    source: str,
) -> Shape:
    return Shape(name, family, hidden, blocks, heads, heads, 4 * hidden, vocab, True, published, source, max_positions)


def _windowed(shape: Shape, tokens: int) -> Shape:
    """With a remark, for no formula knows windows."""
    remark = f"attention is counted over whole rows, though some of its blocks see {tokens:,} tokens back"
    return replace(shape, remarks=(remark,), window=tokens)


def _config(model: str, count: str) -> str:
    return f"config.json of {model}; parameters: {count}"


_INDEX = "total_size of its model.safetensors.index.json, over 2 bytes"
_CARD = "its model card"
_GPT3 = "Brown et al. 2020 (arXiv:2005.14165), table 2.1; vocabulary and learned positions as in GPT-2"
_OPT = "Zhang et al. 2022 (arXiv:2205.01068), table 1; vocabulary and positions by config.json of facebook/"
_HALVES = "; parameters: the size of its pytorch_model.bin, over 2 bytes"
_GEMMA = "Gemma 3 technical report (arXiv:2503.19786), table 1, without the part for images"
_OSS = "table 1 of its model card (arXiv:2508.10925); the tensors that it publishes are quantised"
_NAMED = (
    "10Cache, section 5 (GPT-2 of {}), which gives no sizes: assumed to be 2,560 wide, as many blocks as the name's "
    "parameters take; vocabulary and positions as in GPT-2"
)
_SNAKE = (
    "GreedySnake, table 2 and section 6.2 (Megatron-LM's GPT, 2048 tokens); vocabulary of 51,200 by Narayanan et al. "
    "2021 (arXiv:2104.04473, section 5.1)"
)

MODELS = (
    _gated("smollm2-135m", "llama", 576, 30, 9, 3, 1536, 49152, 134_515_008,
           _config("HuggingFaceTB/SmolLM2-135M", "its model.safetensors"), tied=True),
    _gated("llama-3.2-1b", "llama", 2048, 16, 32, 8, 8192, 128256, 1.24e9,
           _config("meta-llama/Llama-3.2-1B", _CARD), tied=True),
    _gated("llama-3.2-3b", "llama", 3072, 28, 24, 8, 8192, 128256, 3.21e9,
           _config("meta-llama/Llama-3.2-3B", _CARD), tied=True),
    _gated("llama-3.1-8b", "llama", 4096, 32, 32, 8, 14336, 128256, 16_060_522_496 / 2,
           _config("meta-llama/Llama-3.1-8B", _INDEX)),
    _gated("llama-3.1-70b", "llama", 8192, 80, 64, 8, 28672, 128256, 141_107_412_992 / 2,
           _config("meta-llama/Llama-3.1-70B", _INDEX)),
    _gated("llama-3.1-405b", "llama", 16384, 126, 128, 8, 53248, 128256, 405.85e9,
           _config("meta-llama/Llama-3.1-405B", "405B in its model card, 405.85 by its tensors")),
    _gated("llama-2-7b", "llama", 4096, 32, 32, 32, 11008, 32000, 6.74e9,
           _config("meta-llama/Llama-2-7b-hf", _CARD)),
    _gated("llama-2-13b", "llama", 5120, 40, 40, 40, 13824, 32000, 13.02e9,
           _config("meta-llama/Llama-2-13b-hf", _CARD)),
    _gated("llama-3.3-70b", "llama", 8192, 80, 64, 8, 28672, 128256, 141_107_412_992 / 2,
           _config("meta-llama/Llama-3.3-70B-Instruct", _INDEX)),
    _gated("mistral-7b", "mistral", 4096, 32, 32, 8, 14336, 32768, 14_496_047_104 / 2,
           _config("mistralai/Mistral-7B-v0.3", _INDEX)),
    _gated("qwen2.5-0.5b", "qwen2", 896, 24, 14, 2, 4864, 151936, 494_032_768,
           _config("Qwen/Qwen2.5-0.5B", "its model.safetensors"), tied=True),
    _gated("qwen2.5-1.5b", "qwen2", 1536, 28, 12, 2, 8960, 151936, 1.54e9,
           _config("Qwen/Qwen2.5-1.5B", _CARD), tied=True),
    _gated("qwen2.5-3b", "qwen2", 2048, 36, 16, 2, 11008, 151936, 3.09e9,
           _config("Qwen/Qwen2.5-3B", _CARD), tied=True),
    _gated("qwen2.5-7b", "qwen2", 3584, 28, 28, 4, 18944, 152064, 15_231_233_024 / 2,
           _config("Qwen/Qwen2.5-7B", _INDEX)),
    _gated("qwen2.5-14b", "qwen2", 5120, 48, 40, 8, 13824, 152064, 29_540_067_328 / 2,
           _config("Qwen/Qwen2.5-14B", _INDEX)),
    _gated("qwen2.5-32b", "qwen2", 5120, 64, 40, 8, 27648, 152064, 65_527_752_704 / 2,
           _config("Qwen/Qwen2.5-32B", _INDEX)),
    _gated("qwen2.5-72b", "qwen2", 8192, 80, 64, 8, 29568, 152064, 145_412_407_296 / 2,
           _config("Qwen/Qwen2.5-72B", _INDEX)),
    _gated("qwen3-0.6b", "qwen3", 1024, 28, 16, 8, 3072, 151936, 0.44e9 + 151936 * 1024,
           _config("Qwen/Qwen3-0.6B", "0.44 billion without embeddings in its model card, and those"),
           tied=True, head_width=128),
    _gated("qwen3-1.7b", "qwen3", 2048, 28, 16, 8, 6144, 151936, 1.72e9,
           _config("Qwen/Qwen3-1.7B", "1.7 billion in its model card, 1.72 by its tensors"),
           tied=True, head_width=128),
    _gated("qwen3-4b", "qwen3", 2560, 36, 32, 8, 9728, 151936, 8_044_936_192 / 2,
           _config("Qwen/Qwen3-4B", _INDEX), tied=True, head_width=128),
    _gated("qwen3-8b", "qwen3", 4096, 36, 32, 8, 12288, 151936, 16_381_470_720 / 2,
           _config("Qwen/Qwen3-8B", _INDEX), head_width=128),
    _gated("qwen3-14b", "qwen3", 5120, 40, 40, 8, 17408, 151936, 29_536_614_400 / 2,
           _config("Qwen/Qwen3-14B", _INDEX), head_width=128),
    _gated("qwen3-32b", "qwen3", 5120, 64, 64, 8, 25600, 151936, 65_524_246_528 / 2,
           _config("Qwen/Qwen3-32B", _INDEX), head_width=128),
    _mixture("qwen3-30b-a3b", "qwen3_moe", 2048, 48, 32, 4, Experts(128, 8, 768), 151936, 61_064_245_248 / 2,
             _config("Qwen/Qwen3-30B-A3B", _INDEX), head_width=128),
    _windowed(_gated("gemma-3-1b", "gemma3_text", 1152, 26, 4, 1, 6912, 262144, 1.0e9,
                     _config("google/gemma-3-1b-pt", _GEMMA), tied=True, head_width=256), 512),
    _windowed(_gated("gemma-3-4b", "gemma3_text", 2560, 34, 8, 4, 10240, 262208, 3.884e9,
                     _config("google/gemma-3-4b-pt", _GEMMA), tied=True, head_width=256), 1024),
    _windowed(_gated("gemma-3-12b", "gemma3_text", 3840, 48, 16, 8, 15360, 262208, 11.771e9,
                     _config("google/gemma-3-12b-pt", _GEMMA), tied=True, head_width=256), 1024),
    _windowed(_gated("gemma-3-27b", "gemma3_text", 5376, 62, 32, 16, 21504, 262208, 27.016e9,
                     _config("google/gemma-3-27b-pt", _GEMMA), tied=True, head_width=128), 1024),
    _gated("phi-4", "phi3", 5120, 40, 40, 10, 17920, 100352, 29_319_014_400 / 2,
           _config("microsoft/phi-4", _INDEX)),
    _windowed(_mixture("gpt-oss-20b", "gpt_oss", 2880, 24, 64, 8, Experts(32, 4, 2880, biases=True), 201088, 20.91e9,
                       _config("openai/gpt-oss-20b", _OSS), head_width=64), 128),
    _windowed(_mixture("gpt-oss-120b", "gpt_oss", 2880, 36, 64, 8, Experts(128, 4, 2880, biases=True), 201088, 116.83e9,
                       _config("openai/gpt-oss-120b", _OSS), head_width=64), 128),
    _mixture("mixtral-8x7b", "mixtral", 4096, 32, 32, 8, Experts(8, 2, 14336), 32000, 93_405_585_408 / 2,
             _config("mistralai/Mixtral-8x7B-v0.1", _INDEX)),
    _plain("bloom-7b", "bloom", 4096, 30, 32, 250880, 0, 7_069_016_064,
           _config("bigscience/bloom-7b1", _CARD)),
    replace(_plain("falcon-7b", "falcon", 4544, 32, 71, 65024, 0, 14_434_379_520 / 2 - 65024 * 4544,
                   _config("tiiuae/falcon-7b", _INDEX + ", without the second copy of the embedding in it")),
            kv_heads=1),
    _gated("falcon3-10b", "llama", 3072, 40, 12, 4, 23040, 131072, 10.3e9,
           _config("tiiuae/Falcon3-10B-Base", _CARD), head_width=256),
    replace(_plain("falcon-11b", "falcon", 4096, 60, 32, 65024, 0, 11.1e9,
                   _config("tiiuae/falcon-11B", _CARD)),
            kv_heads=8, tied=False),
    _plain("gpt2", "gpt2", 768, 12, 12, 50257, 1024, 124_439_808, _config("openai-community/gpt2", "its tensors")),
    _plain("gpt2-large", "gpt2", 1280, 36, 20, 50257, 1024, 774_030_080,
           _config("openai-community/gpt2-large", "its tensors")),
    _plain("gpt-1.7b", "gpt2", 2560, 20, 32, 50257, 1024, 1.7e9, _NAMED.format("1.7B")),
    _plain("gpt-4b", "gpt2", 2560, 49, 32, 50257, 1024, 4.0e9, _NAMED.format("4.0B")),
    _plain("gpt-5.9b", "gpt2", 2560, 73, 32, 50257, 1024, 5.9e9, _NAMED.format("5.9B")),
    _plain("gpt-30b", "gpt2", 7168, 48, 56, 51200, 2048, 30e9, _SNAKE),
    _plain("gpt-65b", "gpt2", 8192, 80, 64, 51200, 2048, 65e9, _SNAKE),
    _plain("gpt-175b", "gpt2", 12288, 96, 96, 50257, 2048, 175e9, _GPT3),
    _plain("opt-125m", "opt", 768, 12, 12, 50272, 2048, 125e6, _OPT + "opt-125m"),
    _plain("opt-1.3b", "opt", 2048, 24, 32, 50272, 2048, 1_315_758_080, _OPT + "opt-1.3b"),
    _plain("opt-2.7b", "opt", 2560, 32, 32, 50272, 2048, 2.65e9, _OPT + "opt-2.7b" + _HALVES),
    _plain("opt-6.7b", "opt", 4096, 32, 32, 50272, 2048, 6.66e9, _OPT + "opt-6.7b" + _HALVES),
    _plain("opt-13b", "opt", 5120, 40, 40, 50272, 2048, 12.85e9, _OPT + "opt-13b" + _HALVES),
    _plain("opt-30b", "opt", 7168, 48, 56, 50272, 2048, 30e9, _OPT + "opt-30b"),
    _plain("opt-66b", "opt", 9216, 64, 72, 50272, 2048, 66e9, _OPT + "opt-66b"),
    _plain("opt-175b", "opt", 12288, 96, 96, 50272, 2048, 175e9, _OPT + "opt-66b"),
)  # fmt: skip
