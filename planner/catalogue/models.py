"""Models by name: their shapes, from what their publishers say, and what they weigh when published. Data only.

What a shape is, and what it counts, is in `shapes.py`.
"""

from .shapes import Shape


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
) -> Shape:
    return Shape(name, family, hidden, blocks, heads, kv_heads, intermediate, vocab, tied, published, source)


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


def _config(model: str, count: str) -> str:
    return f"config.json of {model}; parameters: {count}"


_INDEX = "total_size of its model.safetensors.index.json, over 2 bytes"
_CARD = "its model card"
_GPT3 = "Brown et al. 2020 (arXiv:2005.14165), table 2.1; vocabulary and learned positions as in GPT-2"
_OPT = "Zhang et al. 2022 (arXiv:2205.01068), table 1; vocabulary and positions by config.json of facebook/"
_HALVES = "; parameters: the size of its pytorch_model.bin, over 2 bytes"
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
    _plain("gpt2", "gpt2", 768, 12, 12, 50257, 1024, 124_439_808, _config("openai-community/gpt2", "its tensors")),
    _plain("gpt2-large", "gpt2", 1280, 36, 20, 50257, 1024, 774_030_080,
           _config("openai-community/gpt2-large", "its tensors")),
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
