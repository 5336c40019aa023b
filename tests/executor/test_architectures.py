"""Architectures with something odd: right to the loss of plain transformers, or refused by name, never half-way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.directory.loaded import Zeroed
from ssdplan.executor.model.inspection.inspection import inspect
from ssdplan.executor.model.inspection.isolation import isolation
from ssdplan.executor.model.inspection.position_wise import head_kind
from ssdplan.executor.model.inspection.standins import parameters_as
from ssdplan.executor.model.layers import MicroBatch
from ssdplan.executor.model.model import open_model
from ssdplan.executor.model.weights import Weights
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import train
from ssdplan.plans.errors import MismatchError
from tests import reference
from tests.executor.losses import plain_loss, rows_of, streamed_loss
from tests.executor.runs import micro_batches_of, prepare
from tests.executor.test_families import compare, make_steps
from tests.made.models import make_model
from tests.made.plans import make_plan

GENERAL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
BATCHES = [rows_of(9, 12), rows_of(14, 14, seed=1)]


def make(model_type: str, directory: Path, **fields: Any) -> Path:
    """A tiny random model of a type, with weights large enough to matter."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = AutoConfig.for_model(model_type, **(GENERAL | fields))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.1 if parameter.dim() == 1 else 0.8 / min(parameter.shape) ** 0.5)
    model.save_pretrained(directory)
    return directory


def refused(path: Path, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(MismatchError) as error:
        open_model(path, dtype)
    assert "\n" not in str(error.value)
    return str(error.value)


# Layers that own parameters directly


def test_layers_that_own_parameters_directly_are_streamed(tmp_path: Path) -> None:
    path = make("doge", tmp_path, keep_window_size=64)
    compare(path, make_steps(2, 2, padded=True), torch.float32, 5e-6, 1e-3, head_chunks=(None, 5))


def test_a_head_that_fails_leaves_every_parameter_as_it_was() -> None:
    with init_empty_weights(include_buffers=False):
        module = LlamaForCausalLM(LlamaConfig(**GENERAL, tie_word_embeddings=True))
    before = dict(module.named_parameters(remove_duplicate=False))

    def fail(*_: Any) -> None:
        raise RuntimeError("no head today")

    module.lm_head.register_forward_pre_hook(fail)
    after = ["model.norm.weight", "model.embed_tokens.weight"]
    given = {"after": after, "returned": None, "hidden_size": 32, "vocab_size": 97}
    assert head_kind(module, module.model.layers, **given) == "whole"  # type: ignore[arg-type]
    assert all(parameter is before[name] for name, parameter in module.named_parameters(remove_duplicate=False))


def test_parameters_are_back_after_an_error_between() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight  # one parameter in two places
    before = dict(module.named_parameters(remove_duplicate=False))
    other = torch.zeros(2, 2)
    with pytest.raises(ZeroDivisionError), parameters_as(module, {"0.weight": other}):
        assert module[0].weight is other and module[1].weight is other and module[0].bias is before["0.bias"]
        raise ZeroDivisionError
    assert all(parameter is before[name] for name, parameter in module.named_parameters(remove_duplicate=False))


# Parts that are not there


def test_a_configuration_without_a_number_of_layers(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    coder = small | {"num_hidden_layers": 1, "vocab_size": 97}
    config = AutoConfig.for_model(
        "blt", vocab_size=97, patch_in_forward=False, encoder_config=coder, decoder_config=coder,
        global_config=small | {"num_hidden_layers": 2}, patcher_config=coder, encoder_hash_byte_group_vocab=100,
        encoder_hash_byte_group_size=[2, 3],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "num_hidden_layers" in refused(tmp_path)


# Parameters in fp32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_buffer_or_an_absent_name_in_fp32_refuses_no_model(tmp_path: Path, dtype: torch.dtype) -> None:
    """DeepSeek-V3 keeps `e_score_correction_bias` in fp32, a buffer of experts that its dense layers do not have."""
    path = make("deepseek_v3", tmp_path, first_k_dense_replace=99, **LATENT)
    loaded = reference.load(path, dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    model = open_model(path, dtype)
    assert streamed_loss(model, BATCHES) == pytest.approx(plain_loss(path, BATCHES, dtype), rel=2e-3)


def test_parameters_that_are_loaded_in_fp32_stay_so(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"]}
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1}
    path = make("nemotron_h", tmp_path, head_dim=8, **config, **mamba)
    kept = sorted(n for n, p in reference.load(path, torch.bfloat16).named_parameters() if p.dtype == torch.float32)
    if kept:
        model = open_model(path, torch.bfloat16)
        wide = [tensor.name for state in model.states if state.precision == "fp32" for tensor in state.tensors]
        assert sorted(wide) == kept
    elif json.loads((path / "config.json").read_text()).get("residual_in_fp32"):
        assert "residual_in_fp32" in refused(path, torch.bfloat16)
    else:
        assert open_model(path, torch.bfloat16).dtype == torch.bfloat16
    assert streamed_loss(open_model(path, torch.float32), BATCHES) == pytest.approx(plain_loss(path, BATCHES), rel=1e-6)


# Attention in both directions


@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra", "rembert"])
def test_a_model_in_which_tokens_see_those_behind_them_is_refused(tmp_path: Path, model_type: str) -> None:
    more = {"type_vocab_size": 1, "embedding_size": 32, "input_embedding_size": 32, "output_embedding_size": 32}
    more |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
    path = make(model_type, tmp_path, is_decoder=True, **more)
    batches = [rows_of(9, 9), rows_of(12, 12, seed=1)]
    assert streamed_loss(open_model(path, torch.float32), batches) == pytest.approx(plain_loss(path, batches), rel=1e-6)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"is_decoder": False}))
    assert "sees those behind it, and would learn to repeat them; set is_decoder to true" in refused(path)


class _Looking(LlamaForCausalLM):
    """Its head adds to each position what the last one has."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda _, inputs, output: output + output[:, -1:])


def test_a_head_in_which_tokens_see_those_behind_them_is_refused() -> None:
    with init_empty_weights(include_buffers=False):
        module = _Looking(LlamaConfig(**GENERAL))
    with pytest.raises(MismatchError, match="sees those behind it"):
        inspect(module)


def test_padding_that_shows_in_spite_of_its_mask_is_found(tmp_path: Path) -> None:
    """Layers that are made to add the number of a row's tokens, padding too."""
    model = open_model(make_model("llama", tmp_path), torch.float32)
    found = isolation(model.module, model.blocks, returned=None, hidden_size=32)
    assert not found.padding_shows and found.causal and found.looks_ahead is False
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: output + output.shape[1])
    found = isolation(model.module, model.blocks, returned=None, hidden_size=32)
    assert found.padding_shows and not found.causal and found.looks_ahead is False


# What from_pretrained makes of what it reads


def test_a_row_that_from_pretrained_zeroes_is_zero(tmp_path: Path) -> None:
    path = make("youtu", tmp_path, pad_token_id=5, **LATENT)
    name = "model.embed_tokens.weight"
    expected = reference.load(path).state_dict()[name]
    assert not expected[5].any(), "transformers zeroes it, whatever is stored"
    model = open_model(path, torch.float32)
    assert model.zeroed == (Zeroed(name, 5 * 32, 6 * 32),)
    weights = Weights(model)
    (state, tensor), *_ = [(s, t) for s in model.states for t in s.tensors if t.name == name]
    whole = torch.full((state.elements,), 7.0)
    weights.read(model.states.index(state), whole)
    assert torch.equal(whole[tensor.offset : tensor.offset + tensor.elements].view(97, 32), expected)
    for length in (8, 77, 160, 1000):
        pieces = torch.full((state.elements,), 7.0)
        for start in range(0, state.elements, length):
            weights.read(model.states.index(state), pieces[start : start + length], start)
        assert torch.equal(pieces, whole)
    ids = torch.tensor([[7, 5, 9, 5, 11, 3]])
    batch = type(BATCHES[0])(ids, ids)
    assert streamed_loss(model, [batch]) == pytest.approx(plain_loss(path, [batch]), rel=1e-6)
    compare(path, make_steps(2, 2, padded=True), torch.float32, 5e-6, 1e-3)


# Rows to whose length it matters

HALF = [1.0, 1.1, 1.3, 1.6]
LONGROPE = {"rope_type": "longrope", "short_factor": HALF, "long_factor": [4.0, 6.0, 9.0, 12.0], "rope_theta": 1e4}


@pytest.fixture
def longrope(tmp_path: Path) -> Path:
    return make_model(
        "phi3", tmp_path / "phi3", rope_parameters=LONGROPE | {"factor": 2.0}, max_position_embeddings=256,
        original_max_position_embeddings=48, partial_rotary_factor=1.0, sliding_window=None,
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [(43, 20), (48, 48), (128, 128), (49, 128), (49, 49)])
def test_rows_that_are_all_shorter_or_all_longer_get_what_they_get_alone(
    longrope: Path, lengths: tuple[int, ...]
) -> None:
    batches = [rows_of(*lengths)]
    model = open_model(longrope, torch.float32)
    assert streamed_loss(model, batches) == pytest.approx(plain_loss(longrope, batches), rel=2e-6)


@pytest.mark.parametrize("lengths", [(43, 43), (128, 20), (48, 49), (64, 48)])
@pytest.mark.parametrize("training", [True, False])
def test_a_row_that_would_get_another_rows_factors_is_refused(
    longrope: Path, lengths: tuple[int, ...], training: bool
) -> None:
    model = open_model(longrope, torch.float32)
    assert model.max_sequence_length is None and model.least_row(48) == 1 and model.least_row(49) == 49
    with pytest.raises(MismatchError, match=r"rows of 49 tokens and more otherwise.*--sequence-length 48"):
        streamed_loss(model, [rows_of(*lengths, width=64 if max(lengths) < 64 else None)], training=training)
    assert "of 49 tokens and more" in model.remarks(128)[0] and model.remarks(48) == ()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rotary_scaling_that_knows_no_length_is_exact_at_any(tmp_path: Path, rope: dict[str, Any]) -> None:
    path = make_model("llama", tmp_path / "llama", rope_parameters=rope | {"rope_theta": 1000.0})
    model = open_model(path, torch.float32)
    assert model.least_row(4096) == 1 and model.max_sequence_length is None
    batches = [rows_of(3, 40), rows_of(17, 17, seed=1)]
    assert streamed_loss(model, batches) == pytest.approx(plain_loss(path, batches), rel=1e-6)


def test_tables_of_positions_in_buffers_bound_the_sequence(tmp_path: Path) -> None:
    assert open_model(make_model("gptj", tmp_path / "gptj"), torch.float32).max_sequence_length == 64


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        (
            "gemma3_text",
            {
                "head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention"] * 7 + ["full_attention"],
                "rope_parameters": {
                    "full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        ),
        (
            "bamba",
            {
                "attn_layer_indices": [7], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
                "mamba_n_groups": 1, "rope_parameters": DYNAMIC,
            },
        ),
    ],
    ids=["gemma3", "bamba"],
)  # fmt: skip
def test_a_length_that_matters_to_the_eighth_layer_alone_bounds_the_sequence(
    tmp_path: Path, model_type: str, fields: dict[str, Any]
) -> None:
    path = make(model_type, tmp_path, num_hidden_layers=8, max_position_embeddings=16, **fields)
    model = open_model(path, torch.float32)
    assert model.max_sequence_length == 16
    batches = [rows_of(9, 16)]
    assert streamed_loss(model, batches) == pytest.approx(plain_loss(path, batches), rel=1e-6)
    with pytest.raises(MismatchError, match="takes 16"):
        streamed_loss(model, [rows_of(16, 32)])


def test_layers_that_choose_among_a_rows_tokens_bound_rows_that_are_shared_or_padded(tmp_path: Path) -> None:
    """Equal tokens are equally good: which of them is chosen depends on what else is in the row."""
    path = make("doge", tmp_path, keep_window_size=16, sliding_window=None)
    model = open_model(path, torch.float32)
    ids = torch.randint(3, 97, (1, 48), generator=torch.Generator().manual_seed(0))

    def shared(*lengths: int) -> tuple[MicroBatch, list[MicroBatch]]:
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        row = ids[:, : sum(lengths)]
        parts = [MicroBatch(part, part) for part in row.split(lengths, 1)]
        return MicroBatch(row, row.masked_fill(positions == 0, -100), None, positions), parts

    row, parts = shared(7, 9)
    assert streamed_loss(model, [row]) == pytest.approx(plain_loss(path, parts), rel=1e-6)
    assert model.keeps_apart(16) and not model.keeps_apart(17) and model.remarks(16) == ()
    assert "of more than 16" in model.remarks(17)[0]
    with pytest.raises(MismatchError, match=r"rows of more than 16.*shares a row of 48"):
        streamed_loss(model, [shared(20, 28)[0]])
    with pytest.raises(MismatchError, match=r"rows of more than 16.*--sequence-length 16"):
        streamed_loss(model, [rows_of(20, 28)])
    full = [rows_of(28, 28), rows_of(48, seed=1)]
    assert streamed_loss(model, full) == pytest.approx(plain_loss(path, full), rel=1e-6)


def test_a_window_limits_no_row(tmp_path: Path) -> None:
    path = make("mistral", tmp_path, sliding_window=7)
    assert open_model(path, torch.float32).keeps_apart(4096)


@pytest.mark.parametrize("pack", [True, False])
def test_a_run_refuses_rows_of_other_lengths_and_trains_full_ones(tmp_path: Path, pack: bool) -> None:
    """Of which each gets the factors that it gets alone: the losses are plain PyTorch's."""
    prepare(
        tmp_path, "phi3", tied=False, rope_parameters=LONGROPE | {"factor": 2.0}, max_position_embeddings=64,
        original_max_position_embeddings=12, partial_rotary_factor=1.0, sliding_window=None,
    )  # fmt: skip
    model = open_model(tmp_path / "phi3", torch.float32)
    plan = make_plan(model, sequence_length=16)
    texts = {"data": tmp_path / "text.txt", "out": tmp_path / "run"}
    recipe = Recipe(steps=2, optimizer=AdamW(lr=1e-3), pack=pack, eval_every=1)
    says = "rows of 13 tokens and more otherwise than"
    rows = {"data": tmp_path / "rows.jsonl", "out": tmp_path / "refused"}
    with pytest.raises(MismatchError, match=says):
        train(plan, model, EmulatedDevice(), recipe=recipe, **rows)
    with pytest.raises(MismatchError, match=says):
        train(plan, model, EmulatedDevice(), recipe=recipe, eval_data=rows["data"], **texts)
    if not pack:
        return
    found = train(plan, model, EmulatedDevice(), recipe=recipe, eval_data=tmp_path / "text.txt", **texts)
    steps = [micro_batches_of(tmp_path, step, micro_batches=2, family="phi3") for step in range(2)]
    assert all(batch.attention_mask is None and batch.position_ids is None for step in steps for batch in step)
    rates = reference.AdamW(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    expected, _ = reference.train(tmp_path / "phi3", steps, rates)
    assert found.losses == pytest.approx(expected, rel=1e-5)
