"""Tiny checkpoints of every causal model type of the installed transformers, for models.py beside it.

Owns their sizes. Each is the type's own default configuration with every size made small, so that what a type has and
others have not stays as it is by default; a few fields a type are set where small sizes do not go together. The types'
own classes write them (save_pretrained), so what is opened is what a user has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "mistral3", "internvl", "paligemma", "smolvlm", "idefics3")
"""Types that take images too, and are no causal language models by themselves."""
LAYERS, WIDTH, VOCABULARY, EXPERTS, LENGTH = 4, 32, 320, 4, 64
END = "<|endoftext|>"

_BY_SIZE: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    LAYERS: "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_blocks num_attention_heads n_head n_heads num_heads attention_heads num_kv_heads "
    "encoder_attention_heads decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "linear_num_value_heads linear_num_heads swa_num_attention_heads num_experts n_routed_experts num_local_experts "
    "moe_num_experts mamba_d_conv rotary_dim d_rel time_step_rank mamba_dt_rank block_size index_block_size "
    "prompt_length gated_norm_rank",
    WIDTH: "hidden_size d_model n_embd emb_dim embedding_dim embedding_size lru_width attention_hidden_size "
    "word_embed_proj_dim input_embedding_size output_embedding_size dim_model_base",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dff dim_ff d_inner "
    "feed_forward_size intermediate_size_mlp dense_intermediate_size",
    2: "num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k linear_num_key_heads "
    "index_n_heads mamba_expand swa_num_key_value_heads n_mamba_heads num_query_groups o_groups hc_mult "
    "zero_expert_num num_layers_per_stack type_vocab_size max_window_layers",
    1: "topk_group n_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts n_groups "
    "mamba_n_groups first_k_dense_replace num_dense_layers moe_layer_start_index",
    0: "num_kv_shared_layers num_nextn_predict_layers mem_len",
    6: "sliding_window sliding_window_size window_size attention_window_size local_attention",
    8: "head_dim qk_rope_head_dim v_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim "
    "linear_head_dim mamba_d_state mamba_n_heads mamba_d_head state_size ssm_state_size mamba_num_heads "
    "mamba_head_dim mamba_headdim "
    "dim_head d_head kv_channels swa_head_dim attention_head_dim attention_head_size laurel_rank adapter_rank "
    "o_lora_rank hc_lowrank ple_embed_dim chunk_size mamba_chunk_size hidden_size_per_layer_input "
    "pronunciation_embed_dim shape_embed_dim",
    16: "kv_lora_rank q_lora_rank qk_head_dim moe_intermediate_size expert_ffn_hidden_size index_head_dim rel_extent "
    "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size "
    "shared_experts_intermediate_size router_hidden_size position_bias_num_buckets max_source_positions",
    60: "shape_vocab_size pronunciation_vocab_size",
    LENGTH: "max_position_embeddings n_positions n_ctx context_length max_seq_len max_target_positions index_topk "
    "attention_chunk_size original_max_position_embeddings mamba_d_ssm model_max_length",
    100: "encoder_hash_byte_group_vocab ngram_vocab_size_base",
}
_SIZES = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
_ALL_HEADS = {"num_key_value_heads": 4}
_HYBRID = ["sliding_attention", "full_attention"] * 2
_CHOSEN = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_ODD: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "dots3_note": {"text_config": _ALL_HEADS, "vision_config": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH}},
    "dots3_note_text": _ALL_HEADS,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "qwen4_exp": {"text_config": _CHOSEN | {"head_dim": 8}},
    "qwen4_exp_text": _CHOSEN | {"head_dim": 8},
    "qwen2_vl": {"text_config": _MROPE},
    "qwen2_5_vl": {"text_config": _MROPE},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "mamba_headdim": 8, "n_mamba_heads": 8, "attention_hidden_size": 64, "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 64, "attention_head_dim": 16,
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "reformer": {
        "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4, "num_buckets": 4, "attn_layers": ["local", "lsh"] * 2,
    },
    "cohere_compass_text": {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }},
}  # fmt: skip
_BEHIND_ENCODERS = ("bart", "pegasus", "marian", "whisper", "prophetnet", "mvp", "blender", "musicgen")


def tiny_config(model_type: str) -> PretrainedConfig:
    """A type's default configuration with small sizes. Raises whatever the type's own code raises."""
    kind = CONFIG_MAPPING[model_type]
    return _shrunk(kind, kind(), _ODD.get(model_type, {}))


def _shrunk(kind: Any, given: PretrainedConfig, odd: dict[str, Any]) -> PretrainedConfig:
    fields = given.to_dict()
    parts = set(getattr(kind, "sub_configs", None) or ())
    layers = getattr(given, "num_hidden_layers", None)
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name in parts:
            part = getattr(given, name)
            if isinstance(part, PretrainedConfig):
                small[name] = _shrunk(type(part), part, odd.get(name, {})).to_dict()
        elif isinstance(value, bool):
            continue
        elif name in _SIZES and not isinstance(value, list) and (value is not None or name == "num_key_value_heads"):
            small[name] = _SIZES[name]
        elif isinstance(value, float) and ("drop" in name or name.endswith("jitter_noise")):
            small[name] = 0.0
        elif isinstance(value, int) and name.endswith("token_id") and value >= VOCABULARY:
            small[name] = 0 if name.startswith("pad") else 3
        elif isinstance(value, list) and LAYERS < len(value) == layers:
            kinds = list({str(each): each for each in value}.values())
            small[name] = (kinds + value)[:LAYERS] if len(kinds) > 1 else value[:LAYERS]
    if fields.get("is_decoder") is False and not any(name in kind.__module__ for name in _BEHIND_ENCODERS):
        small["is_decoder"] = True
    if "kv_lora_rank" in fields:
        small |= _ALL_HEADS
    small |= {name: value for name, value in odd.items() if name not in parts}
    made: PretrainedConfig = kind(**small)
    return made


def auto_class(model_type: str) -> Any:
    """The library's class that loads models of a type."""
    return AutoModelForCausalLM if model_type in TYPES else AutoModelForImageTextToText


def make_tiny(model_type: str, folder: Path) -> Path:
    """Writes a random checkpoint of a type, with a tokenizer of bytes, into `folder`, and returns that. Weights are
    large enough that every part matters. Raises whatever the type's own code raises."""
    torch.manual_seed(0)
    model = auto_class(model_type).from_config(tiny_config(model_type), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.1 if parameter.dim() == 1 else 0.8 / min(parameter.shape[-2:]) ** 0.5)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
