"""Mixtures of experts, and models of which a part gets no gradient: streamed training equals plain PyTorch's, and what
is exported has the names, the shapes and the files of what was opened."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from ssdplan.executor.memory.states import saved_entries
from ssdplan.executor.model.directory.export import export_model
from ssdplan.executor.model.model import StreamedModel, open_model
from ssdplan.executor.model.saved_form import SavedForm
from ssdplan.executor.model.weights import Weights
from ssdplan.plans.errors import MismatchError, UsageError
from tests.executor.test_architectures import LATENT, make, refused
from tests.executor.test_families import compare, make_steps

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
# Fused in their files and not, with routers of several kinds, parts that get no gradient, q, k and v apart.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "gpt_oss": EXPERTS | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "deepseek_v3": EXPERTS | ROUTED | LATENT,
    "deepseek_v32": EXPERTS | ROUTED | LATENT | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    "llama4_text": EXPERTS | {"intermediate_size_mlp": 48, "head_dim": 8, "moe_layers": None, "num_key_value_heads": 2},
    "olmo_hybrid": LINEAR,
}  # fmt: skip


@pytest.mark.parametrize("family", MIXTURES)
def test_training_equals_plain_pytorch(tmp_path: Path, family: str) -> None:
    path = make(family, tmp_path / "model", **MIXTURES[family])
    compare(path, make_steps(2, 2, padded=True), torch.float32, 5e-6, 1e-3, head_chunks=(5,))


@pytest.mark.parametrize("family", ["bart", "marian"])
def test_a_decoder_that_lacks_its_encoder_trains_on_labels_that_are_shifted_for_it(tmp_path: Path, family: str) -> None:
    sizes = {
        "d_model": 32,
        "decoder_ffn_dim": 48,
        "decoder_layers": 3,
        "encoder_layers": 3,
        "decoder_attention_heads": 4,
    }
    path = make(family, tmp_path / "model", **sizes, dropout=0.0, is_encoder_decoder=False)
    model = open_model(path, torch.float32)
    assert not model.anatomy.shifts_labels and all("encoder_attn" in name for name in model.anatomy.unused)
    (remark,) = (each for each in model.remarks(8) if "text never reaches" in each)
    assert "encoder_attn" in remark


def rounded(model: StreamedModel, weights: Weights) -> Any:
    """(name, piece) of all of a model's own tensors, some elements at a time."""
    for index, state in enumerate(model.states):
        for tensor in state.tensors:
            for first in range(0, tensor.elements, 1000):
                piece = torch.empty(min(1000, tensor.elements - first), dtype=model.dtype)
                weights.read(index, piece, tensor.offset + first)
                yield tensor.name, piece
    yield from model.persistent_buffers.items()


def stored(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}


def in_shards(path: Path) -> Path:
    """The same model, in three files that have its tensors in turn."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    where = {name: names[number % 3] for number, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in tensors if where[name] == file}, path / file, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v32", "olmo_hybrid", "gpt_neox", "fuyu"])
def test_an_export_has_the_names_shapes_and_files_of_the_original(tmp_path: Path, family: str, sharded: bool) -> None:
    path = make(family, tmp_path / "model", **MIXTURES.get(family, {}))
    path = in_shards(path) if sharded else path
    model = open_model(path, torch.float32)
    form, weights = SavedForm(model), Weights(model)
    entries, tensors = form.entries(saved_entries(model)), form.tensors(rounded(model, weights))
    export_model(tmp_path / "out", source=path, entries=entries, tensors=tensors, files=form.files)
    before, after = stored(path), stored(tmp_path / "out")
    assert {file: sorted(found) for file, found in after.items()} == {
        file: sorted(each) for file, each in before.items()
    }
    for file, found in after.items():
        for name, tensor in found.items():
            assert torch.equal(tensor, before[file][name]), name
    with safe_open(next((tmp_path / "out").glob("*.safetensors")), framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    again, original = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (tmp_path / "out", path))
    assert all(torch.equal(again[name], original[name]) for name in original)


def test_parts_are_read_in_any_pieces(tmp_path: Path) -> None:
    """Gates and projections of each expert lie side by side in the model, and apart in the files."""
    path = make("qwen3_moe", tmp_path / "model", **EXPERTS)
    model = open_model(path, torch.float32)
    weights, expected = Weights(model), AutoModelForCausalLM.from_pretrained(path).state_dict()
    (index,) = (number for number, state in enumerate(model.states) if state.name == "block.1")
    (fused,) = (each for each in model.states[index].tensors if each.name.endswith("gate_up_proj"))
    whole = torch.empty(model.states[index].elements)
    weights.read(index, whole)
    place = slice(fused.offset, fused.offset + fused.elements)
    assert torch.equal(whole[place].view(fused.shape), expected[fused.name])
    assert len(weights.stored(fused.name)) == 8
    for length in (7, 129, 1000):
        pieces = torch.empty_like(whole)
        for start in range(0, len(whole), length):
            weights.read(index, pieces[start : start + length], start)
        assert torch.equal(pieces, whole)


def test_a_missing_expert_and_one_that_is_there_twice_are_refused(tmp_path: Path) -> None:
    path = make("mixtral", tmp_path / "model", **EXPERTS)
    tensors = load_file(path / "model.safetensors")
    name = next(each for each in tensors if "experts.2." in each)
    save_file({each: tensors[each] for each in tensors if each != name}, path / "model.safetensors")
    with pytest.raises(MismatchError, match=f"the checkpoint has 3 of them: it lacks {re.escape(name)}; config.json"):
        Weights(open_model(path, torch.float32))
    beyond = name.replace("experts.2.", "experts.4.")
    save_file(tensors | {beyond: tensors[name].clone()}, path / "model.safetensors")
    with pytest.raises(MismatchError, match=f"the checkpoint has 5 of them: it has {re.escape(beyond)}; config.json"):
        Weights(open_model(path, torch.float32))
    save_file({each: tensors[each] for each in tensors if each != name}, path / "model.safetensors")
    fused = tmp_path / "fused"
    shutil.copytree(path, fused)
    save_file(tensors, path / "model.safetensors")
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(fused, save_original_format=False)
    whole = load_file(fused / "model.safetensors")
    assert Weights(open_model(fused, torch.float32)), "as one tensor they load, too"
    save_file(
        tensors | {"model.layers.0.mlp.experts.down_proj": whole["model.layers.0.mlp.experts.down_proj"]},
        path / "model.safetensors",
    )
    with pytest.raises(MismatchError, match="whole and in parts"):
        Weights(open_model(path, torch.float32))


def test_a_router_that_takes_more_experts_than_there_are_is_refused_with_what_to_mend(tmp_path: Path) -> None:
    path = make("mixtral", tmp_path / "model", **(EXPERTS | {"num_experts_per_tok": 9}))
    assert refused(path, torch.float32).endswith("look at config.json, such as num_experts_per_tok")


def test_experts_are_frozen_together_or_not_at_all(tmp_path: Path) -> None:
    path = make("qwen3_moe", tmp_path / "model", **EXPERTS)
    with pytest.raises(
        UsageError, match=r"matches 2 of 8 stored parts of model\.layers\.0\.mlp\.experts\.gate_up_proj"
    ):
        open_model(path, torch.float32, freeze=["*.experts.1.*"])
    model = open_model(path, torch.float32, freeze=["*.experts.*"])
    frozen = {tensor.name for index in model.frozen_states for tensor in model.states[index].tensors}
    assert frozen == {
        f"model.layers.{layer}.mlp.experts.{name}" for layer in range(3) for name in ("gate_up_proj", "down_proj")
    }


def test_a_large_mixture_is_looked_into_without_memory_for_an_expert(tmp_path: Path) -> None:
    """Of experts that are too large to be made, each has numbers of its own."""
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 2}
    path = make("qwen3_moe", tmp_path / "model", **EXPERTS, num_hidden_layers=1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | sizes))
    model = open_model(path, torch.float32)
    apart = model.anatomy.isolation
    assert apart.causal and apart.keeps_apart == "positions" and apart.looks_ahead is False


def test_gpt_oss_from_mxfp4_is_refused_until_it_is_converted_as_documented(tmp_path: Path) -> None:
    path = make("gpt_oss", tmp_path / "quantised", **(MIXTURES["gpt_oss"] | {"intermediate_size": 32}))
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, size, out = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(
            256, (experts, out, size // 32, 16), generator=generator, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.full((experts, out, size // 32), 120, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    spared = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": spared}
    (path / "config.json").write_text(json.dumps(config))
    assert "Mxfp4Config(dequantize=True)" in refused(path, torch.bfloat16)
    way_out = {"dtype": torch.bfloat16, "quantization_config": Mxfp4Config(dequantize=True)}
    plain = AutoModelForCausalLM.from_pretrained(path, **way_out)
    plain.save_pretrained(tmp_path / "plain", save_original_format=False)
    model = open_model(tmp_path / "plain", torch.bfloat16)
    found: dict[str, list[torch.Tensor]] = {}
    for name, piece in rounded(model, Weights(model)):
        found.setdefault(name, []).append(piece.reshape(-1).clone())
    expected = plain.state_dict()
    assert all(torch.equal(torch.cat(found[name]), expected[name].reshape(-1)) for name in expected)
