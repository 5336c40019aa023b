"""Tiny random model directories, one for each family, with every odd feature that the family has.

The families' own classes write them (save_pretrained, safetensors, fp32), so what a test opens is what a user has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

_version = Version(transformers.__version__)
# Older ones draw a random number before each layer of OPT's, also where no layer is left out.
_OPT = ("opt",) if _version >= Version("5.23") else ()
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", *_OPT, "phi3", "gemma2", "gemma3")
# Older ones have no Gemma 4, or one whose layers share keys needlessly, and a Mamba with a loss of its own.
_RECENT = ("gemma4", "mamba") if _version >= Version("5.20") else ()
OTHERS = ("gpt_neox", "gptj", "bloom", "falcon", "gpt_neo", "olmo2", "cohere2", *_RECENT)
EOS = "<|endoftext|>"

# What each family has that others have not. Windows are shorter than the tests' sequences.
_ODD: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }},
    "mistral": {"sliding_window": 5, "head_dim": 12},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 12, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "scale_attn_by_inverse_layer_idx": True},
    "opt": {"dropout": 0.0, "word_embed_proj_dim": 16, "ffn_dim": 40},
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": 5, "pad_token_id": 0},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 5, "head_dim": 12,
               "query_pre_attn_scalar": 12},
    "gemma3": {"sliding_window": 5, "head_dim": 12, "query_pre_attn_scalar": 10, "final_logit_softcapping": 4.0,
               "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
    # Stored under other names than the model's own; layers that return tuples; alibi; layers of two kinds; parallel
    # residuals; buffers that belong to the checkpoint; no attention at all.
    "gpt_neox": {"rotary_pct": 0.5},
    "gptj": {"rotary_dim": 4, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
    "bloom": {"n_head": 4},
    "falcon": {"alibi": True, "new_decoder_architecture": False},
    "gpt_neo": {"num_layers": 3, "num_heads": 4, "window_size": 5, "embed_dropout": 0.0,
                "attention_types": [[["global", "local", "global"], 1]]},
    "olmo2": {},
    "cohere2": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma4": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 5, "global_head_dim": 8,
               "head_dim": 12, "final_logit_softcapping": 3.0, "pad_token_id": 0,
               "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "mamba": {"state_size": 4},
}  # fmt: skip
_MODEL_TYPES = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}


def make_model(
    family: str,
    directory: Path,
    *,
    layers: int = 3,
    vocab: int = 97,
    hidden: int = 32,
    seed: int = 0,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    **odd: Any,
) -> Path:
    """Writes a tiny random causal language model of `family` (FAMILIES or OTHERS) into `directory` and returns that.

    Weights are normal numbers large enough that every part of the model matters to its loss. `odd` are fields of the
    family's configuration and override what it has here.
    """
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": hidden + 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    fields |= _ODD[family]
    if isinstance(fields.get("layer_types"), list):
        fields["layer_types"] = fields["layer_types"][:layers]
    fields |= odd
    config = AutoConfig.for_model(_MODEL_TYPES.get(family, family), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise, alpha=0.1)
            else:
                parameter.copy_(noise * 0.8 / min(parameter.shape) ** 0.5)
        parameters = dict(model.named_parameters())
        for name, tensor in model.state_dict().items():
            if name not in parameters and not name.startswith("lm_head"):
                tensor.mul_(1.25)  # a buffer of the checkpoint is not the constructor's
    model.to(dtype).save_pretrained(directory)
    return directory


def make_tokenizer(directory: Path, *, vocab: int = 300) -> Path:
    """Writes a byte-level BPE tokenizer of at most `vocab` tokens into `directory`; token 0 ends a sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS).save_pretrained(directory)
    return directory


_LINES = (
    "The quick brown fox jumps over the lazy dog.",
    "What is stored is read again, and what is read again is the same.",
    "A layer is read, run, and written; then the next layer is read.",
    "Die Schichten werden gelesen, gerechnet und geschrieben. 0123456789",
)
