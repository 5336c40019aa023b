"""Families: what a config.json of each `model_type` means for a shape, as transformers' configuration class has it.

Data only: which fields switch which tensors on, what a field is that the file leaves out, and which words transformers
knows of activation functions and of rotary embeddings.

`configs.py` reads a file by these. A family that is not here is refused there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .shapes import ARCHITECTURES, BUILDS, Build, Form

Switch = Literal["qkv_bias", "output_bias", "mlp_bias", "head_bias"]
Mixture = Literal["", "intermediate_size", "moe_intermediate_size"]
"""The field with an expert's width; of a family without experts none."""


ACTIVATIONS = frozenset(
    [
        "gelu",
        "gelu_10",
        "gelu_accurate",
        "gelu_fast",
        "gelu_new",
        "gelu_python",
        "gelu_python_tanh",
        "gelu_pytorch_tanh",
        "hardswish",
        "laplace",
        "leaky_relu",
        "linear",
        "mish",
        "quick_gelu",
        "relu",
        "relu2",
        "relu6",
        "sigmoid",
        "silu",
        "sqrtsoftplus",
        "swish",
        "tanh",
    ]
)
"""Functions between the products of an MLP by transformers' names (`transformers.activations.ACT2CLS`)."""
LEARNED_ACTIVATIONS = frozenset(["prelu", "xielu"])
"""Those that have parameters of their own."""
ONE_KERNEL = frozenset(
    [
        "gelu",
        "gelu_pytorch_tanh",
        "hardswish",
        "leaky_relu",
        "mish",
        "relu",
        "relu6",
        "sigmoid",
        "silu",
        "swish",
        "tanh",
    ]
)
"""Those that are one kernel, of which autograd keeps as much as of SiLU."""
COUNTED: Mapping[Form, tuple[str, frozenset[str]]] = {
    "gated": ("SiLU", ONE_KERNEL),
    "gpt2": ("GELU by its formula", frozenset(["gelu_new"])),
    "opt": ("ReLU", frozenset(["relu"])),
}
"""Form -> whose activations its formulas count, and the functions that keep as much."""
ROTARY = frozenset(["default", "dynamic", "linear", "llama3", "longrope", "mrope", "proportional", "su", "yarn"])
"""Kinds of rotary embeddings (`transformers.modeling_rope_utils`), and what single classes call theirs: `mrope` of
models for images, and `su`, the old name of `longrope`."""


_USUAL = Build()


@dataclass(frozen=True, slots=True)
class Family:
    """How to read one `model_type`."""

    architecture: str
    build: Build = _USUAL
    switches: Mapping[str, tuple[Switch, ...]] = field(default_factory=dict)
    """A boolean field -> what it switches in the build, which has the class's default."""
    tied: bool = False
    """Where the file does not say."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Sizes that the file may leave out."""
    heads_of_keys: bool = True
    """Whether there is a field for them; else keys have as many heads as queries."""
    own_head_width: bool = True
    """Whether `head_dim` counts."""
    wide: int = 0
    """Where the width of the MLP may be left out: it is so many times the hidden size."""
    mixture: Mixture = ""
    uneven: tuple[str, ...] = ()
    """Fields by which blocks would differ from each other; only what makes all alike is understood."""
    switched_norm: str = ""
    """A boolean field that gives each head's queries and keys norms of their own."""
    refused: Mapping[str, object] = field(default_factory=dict)
    """Field -> the only value with which tensors are as here."""
    activation: str = "hidden_act"
    """The field that names the function of its MLP; empty where its class has one function alone."""


_ATTENTION: dict[str, tuple[Switch, ...]] = {"attention_bias": ("qkv_bias", "output_bias")}
_BOTH: dict[str, tuple[Switch, ...]] = {**_ATTENTION, "mlp_bias": ("mlp_bias",)}
_ALL: dict[str, tuple[Switch, ...]] = {"use_bias": ("qkv_bias", "output_bias", "mlp_bias")}
_QWEN2 = {"num_key_value_heads": 32}
_PLAIN = Build("gpt2", "layer", qkv_bias=True, output_bias=True, mlp_bias=True)
_MINI = {"num_key_value_heads": 4, "head_dim": 256}
_GEMMA3 = Family(
    ARCHITECTURES["gemma3_text"],
    BUILDS["gemma3_text"],
    _ATTENTION,
    tied=True,
    defaults={
        **_MINI,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "vocab_size": 262_208,
    },
    activation="hidden_activation",
)
_QWEN3 = Family(ARCHITECTURES["qwen3"], BUILDS["qwen3"], _ATTENTION, defaults={**_QWEN2, "head_dim": 128})
_QWEN2_DENSE = Family(ARCHITECTURES["qwen2"], BUILDS["qwen2"], defaults=_QWEN2)
_UNEVEN = ("decoder_sparse_step", "mlp_only_layers")

FAMILIES: dict[str, Family] = {
    "llama": Family(ARCHITECTURES["llama"], BUILDS["llama"], _BOTH),
    "mistral": Family(ARCHITECTURES["mistral"], BUILDS["mistral"], defaults={"num_key_value_heads": 8}),
    "ministral": Family("MinistralForCausalLM", defaults={"num_key_value_heads": 8}),
    "qwen2": _QWEN2_DENSE,
    "qwen2_vl_text": _QWEN2_DENSE,
    "qwen2_5_vl_text": _QWEN2_DENSE,
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "gemma": Family(
        "GemmaForCausalLM", Build(), _ATTENTION, tied=True, defaults={"num_key_value_heads": 16, "head_dim": 256}
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        Build(norms=4),
        _ATTENTION,
        tied=True,
        defaults=_MINI,
        activation="hidden_activation",
    ),
    "gemma3_text": _GEMMA3,
    "phi": Family(
        "PhiForCausalLM",
        Build("gpt2", "layer", norms=1, qkv_bias=True, output_bias=True, mlp_bias=True, head_bias=True),
        refused={"qk_layernorm": False},
    ),
    "phi3": Family(ARCHITECTURES["phi3"], BUILDS["phi3"]),
    "olmo": Family("OlmoForCausalLM", Build(norm="none"), _ATTENTION),
    "olmo2": Family("Olmo2ForCausalLM", Build(query_norm="wide"), _ATTENTION),
    "olmo3": Family("Olmo3ForCausalLM", Build(query_norm="wide"), _ATTENTION),
    "cohere": Family(
        "CohereForCausalLM",
        Build(norm="scale", norms=1),
        _ATTENTION,
        tied=True,
        switched_norm="use_qk_norm",
    ),
    "cohere2": Family("Cohere2ForCausalLM", Build(norm="scale", norms=1), _ATTENTION, tied=True),
    "starcoder2": Family("Starcoder2ForCausalLM", _PLAIN, _ALL, tied=True, defaults={"num_key_value_heads": 2}),
    "glm": Family(
        "GlmForCausalLM",
        Build(qkv_bias=True, fused_gate=True),
        {"attention_bias": ("qkv_bias",)},
        defaults={"num_key_value_heads": 2, "head_dim": 128},
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        Build(qkv_bias=True, fused_gate=True, norms=4),
        {"attention_bias": ("qkv_bias",)},
        defaults={"num_key_value_heads": 2, "head_dim": 128},
    ),
    "granite": Family("GraniteForCausalLM", Build(), _BOTH),
    "smollm3": Family("SmolLM3ForCausalLM", Build(), _BOTH, tied=True, defaults={"num_key_value_heads": 4}),
    "stablelm": Family(
        "StableLmForCausalLM",
        Build(norm="layer"),
        {"use_qkv_bias": ("qkv_bias",)},
        own_head_width=False,
        defaults={"num_key_value_heads": 32},
        refused={"qk_layernorm": False, "use_parallel_residual": False},
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        Build(qkv_bias=True),
        {"attention_bias": ("qkv_bias",), "attention_out_bias": ("output_bias",), "mlp_bias": ("mlp_bias",)},
        defaults={"num_key_value_heads": 8, "head_dim": 128},
    ),
    "exaone4": Family("Exaone4ForCausalLM", Build(query_norm="head"), defaults={"num_key_value_heads": 32}),
    "arcee": Family("ArceeForCausalLM", Build("opt"), _BOTH),
    "nemotron": Family("NemotronForCausalLM", Build("opt", "layer"), _BOTH),
    "helium": Family(
        "HeliumForCausalLM",
        Build(),
        {"attention_bias": ("qkv_bias",), "mlp_bias": ("mlp_bias",)},
        defaults={"num_key_value_heads": 20, "head_dim": 128},
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM", Build(), _ALL, tied=True, defaults={"num_key_value_heads": 2, "head_dim": 128}
    ),
    "gpt2": Family(
        ARCHITECTURES["gpt2"],
        BUILDS["gpt2"],
        tied=True,
        wide=4,
        heads_of_keys=False,
        own_head_width=False,
        refused={"add_cross_attention": False},
        activation="activation_function",
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM",
        BUILDS["gpt2"],
        tied=True,
        wide=4,
        heads_of_keys=False,
        own_head_width=False,
        activation="activation_function",
    ),
    "opt": Family(
        ARCHITECTURES["opt"],
        BUILDS["opt"],
        tied=True,
        heads_of_keys=False,
        own_head_width=False,
        refused={
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
        },
        activation="activation_function",
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        Build("gpt2", "layer", qkv_bias=True, output_bias=True, mlp_bias=True, fused_qkv=True),
        _ATTENTION,
        heads_of_keys=False,
        own_head_width=False,
    ),
    "gptj": Family(
        "GPTJForCausalLM",
        Build("gpt2", "layer", norms=1, mlp_bias=True, head_bias=True),
        wide=4,
        heads_of_keys=False,
        own_head_width=False,
        activation="activation_function",
    ),
    "codegen": Family(
        "CodeGenForCausalLM",
        Build("gpt2", "layer", norms=1, mlp_bias=True, head_bias=True, fused_qkv=True),
        wide=4,
        heads_of_keys=False,
        own_head_width=False,
        activation="activation_function",
    ),
    "bloom": Family(
        ARCHITECTURES["bloom"],
        BUILDS["bloom"],
        tied=True,
        wide=4,
        heads_of_keys=False,
        own_head_width=False,
        activation="",
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        Build("gpt2", "layer", output_bias=True, mlp_bias=True, position_rows=0),
        tied=True,
        wide=4,
        heads_of_keys=False,
        own_head_width=False,
        activation="activation_function",
    ),
    "falcon": Family(
        ARCHITECTURES["falcon"],
        BUILDS["falcon"],
        {"bias": ("qkv_bias", "output_bias", "mlp_bias")},
        tied=True,
        wide=4,
        heads_of_keys=False,
        own_head_width=False,
        activation="activation",
    ),
    "mpt": Family(
        "MptForCausalLM",
        Build("gpt2", "scale", fused_qkv=True),
        tied=True,
        wide=4,
        heads_of_keys=False,
        own_head_width=False,
        refused={"no_bias": True, "expansion_ratio": 4},
        activation="",
    ),
    "mixtral": Family(
        ARCHITECTURES["mixtral"],
        BUILDS["mixtral"],
        defaults={"num_key_value_heads": 8},
        mixture="intermediate_size",
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        Build(qkv_bias=True),
        {"qkv_bias": ("qkv_bias",)},
        defaults={"num_key_value_heads": 16},
        mixture="moe_intermediate_size",
        uneven=_UNEVEN,
    ),
    "qwen3_moe": Family(
        ARCHITECTURES["qwen3_moe"],
        BUILDS["qwen3_moe"],
        _ATTENTION,
        defaults={"num_key_value_heads": 4},
        mixture="moe_intermediate_size",
        uneven=_UNEVEN,
    ),
    "gpt_oss": Family(
        ARCHITECTURES["gpt_oss"],
        BUILDS["gpt_oss"],
        _ATTENTION,
        defaults={"num_key_value_heads": 8, "head_dim": 64},
        mixture="intermediate_size",
        activation="",
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        Build(query_norm="wide"),
        _ATTENTION,
        own_head_width=False,
        mixture="intermediate_size",
        refused={"head_dim": None},
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        Build(norm="layer"),
        {**_ATTENTION, "lm_head_bias": ("head_bias",)},
        defaults={"num_key_value_heads": 8},
        mixture="intermediate_size",
    ),
    "granitemoe": Family("GraniteMoeForCausalLM", Build(), _ATTENTION, mixture="intermediate_size"),
}
