"""What a model directory becomes: layers, states, weights and buffers; and everything that is refused, by name."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from ssdplan.executor.model.directory import shards as checkpoint
from ssdplan.executor.model.inspection.inspection import inspect
from ssdplan.executor.model.model import StreamedModel, open_model
from ssdplan.executor.model.weights import Weights
from ssdplan.plans.documents.state_layout import GRAIN, TENSOR_ALIGNMENT
from ssdplan.plans.errors import MismatchError, UsageError
from tests import reference, warm
from tests.extent import short_or_full
from tests.made.models import FAMILIES, OTHERS, make_model, make_tokenizer


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_model("llama", tmp_path / "llama")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], StreamedModel]:
    """A model of a family, in fp32 and untied, opened once."""
    home = tmp_path_factory.mktemp("known")

    @functools.cache
    def model(family: str) -> StreamedModel:
        return open_model(make_model(family, home / family), torch.float32)

    return model


def edit_config(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = path / "model.safetensors"
    tensors = change({name: tensor.clone() for name, tensor in load_file(file).items()})
    save_file(tensors, file, metadata={"format": "pt"})


def read_all(model: StreamedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor of every state, read into buffers that were full of something else."""
    weights = Weights(model)
    result = {}
    for index, state in enumerate(model.states):
        out = torch.full((state.elements,), 7.0, dtype=dtype)
        weights.read(index, out)
        for tensor in state.tensors:
            place = out[tensor.offset : tensor.offset + tensor.elements]
            result[tensor.name] = place.clone().view(tensor.shape)
            place.zero_()
        assert not out.any(), "gaps and padding are zero"
    weights.close()
    return result


def test_a_state_is_read_in_ranges_as_it_is_whole(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PIECE_ELEMENTS", 1000)  # no divisor of any tensor
    model = open_model(llama, torch.float32)
    weights, stored = Weights(model), load_file(llama / "model.safetensors")
    for index, state in enumerate(model.states):
        expected = torch.zeros(state.elements)
        for tensor in state.tensors:
            expected[tensor.offset : tensor.offset + tensor.elements] = stored[tensor.name].view(-1)
        for length in (state.elements, 2048, 777):
            found = torch.full((state.elements,), 7.0)
            for start in range(0, state.elements, length):
                weights.read(index, found[start : start + length], start)
            assert torch.equal(found, expected)


def test_a_shard_that_is_cut_off_after_it_was_opened_is_an_error(llama: Path) -> None:
    model = open_model(llama, torch.float32)
    weights, file = Weights(model), llama / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(MismatchError, match="cannot be read"):
        for index, state in enumerate(model.states):
            weights.read(index, torch.empty(state.elements))


# Layers and states


def test_layers_are_embedding_blocks_and_head(llama: Path) -> None:
    model = open_model(llama, torch.float32)
    assert [layer.name for layer in model.layers] == ["embedding", "block.0", "block.1", "block.2", "head"]
    assert [layer.layer_class for layer in model.layers] == ["embedding", "block", "block", "block", "head"]
    assert (model.name, model.architecture) == ("llama", "LlamaForCausalLM")
    assert (model.hidden_size, model.vocab_size, model.dtype) == (32, 97, torch.float32)
    names = [[tensor.name for s in layer.states for tensor in model.states[s].tensors] for layer in model.layers]
    assert names[0] == ["model.embed_tokens.weight"]
    assert names[4] == ["model.norm.weight", "lm_head.weight"]
    assert all(name.startswith("model.layers.1.") for name in names[2])


def test_tied_tensors_are_a_state_of_their_own(tmp_path: Path) -> None:
    model = open_model(make_model("gpt2", tmp_path / "gpt2", tied=True), torch.float32)
    states = {state.name: [tensor.name for tensor in state.tensors] for state in model.states}
    assert states["embedding"] == ["transformer.wpe.weight"]
    assert states["head"] == ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    assert states["tied"] == ["transformer.wte.weight"]
    named = [[model.states[index].name for index in layer.states] for layer in model.layers]
    assert named[0] == ["embedding", "tied"] and named[-1] == ["head", "tied"]


def test_an_embedding_without_tensors_of_its_own_lists_only_the_tied_state(tmp_path: Path) -> None:
    model = open_model(make_model("llama", tmp_path / "llama", tied=True), torch.float32)
    assert [[model.states[i].name for i in layer.states] for layer in (model.layers[0], model.layers[-1])] == [
        ["tied"],
        ["head", "tied"],
    ]
    assert "embedding" not in {state.name for state in model.states}


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_states_hold_every_parameter_once_and_aligned(known: Callable[[str], StreamedModel], family: str) -> None:
    model = known(family)
    shapes: dict[str, tuple[int, ...]] = {}
    for state in model.states:
        assert state.tensors and state.elements % GRAIN == 0
        end = 0
        for tensor in state.tensors:
            assert tensor.offset >= end and tensor.offset % TENSOR_ALIGNMENT == 0
            end = tensor.offset + tensor.elements
            assert tensor.name not in shapes
            shapes[tensor.name] = tensor.shape
        assert end <= state.elements
    assert shapes == {name: tuple(parameter.shape) for name, parameter in model.module.named_parameters()}
    assert sorted({index for layer in model.layers for index in layer.states}) == list(range(len(model.states)))


@pytest.mark.parametrize(
    ("family", "classes"),
    [
        ("mistral", ["block", "block", "block"]),
        ("qwen2", ["block.0", "block.1", "block.1"]),
        ("qwen3", ["block.0", "block.0", "block.1"]),
        ("gemma2", ["block.0", "block.1", "block.0"]),
        ("gemma3", ["block.0", "block.1", "block.0"]),
        ("gpt_neo", ["block.0", "block.1", "block.0"]),
    ],
)
def test_blocks_of_different_attention_are_classes_of_their_own(
    known: Callable[[str], StreamedModel], family: str, classes: list[str]
) -> None:
    assert [layer.layer_class for layer in known(family).layers[1:-1]] == classes


@pytest.mark.parametrize(("family", "limit"), [("gpt2", 64), ("opt", 64), ("llama", None), ("gemma3", None)])
def test_learned_position_tables_bound_the_sequence(
    known: Callable[[str], StreamedModel], family: str, limit: int | None
) -> None:
    assert known(family).max_sequence_length == limit


def test_dynamic_rotary_scaling_is_exact_up_to_its_first_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}
    model = open_model(make_model("llama", tmp_path / "llama", rope_parameters=rope), torch.float32)
    assert model.max_sequence_length == 64


def test_opening_takes_no_memory_for_weights(tmp_path: Path) -> None:
    """A model of two billion parameters opens; its weights are looked for only when they are read."""
    config = LlamaConfig(num_hidden_layers=3, hidden_size=8192, intermediate_size=16384, num_attention_heads=64)
    config.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["LlamaForCausalLM"])
    (tmp_path / "model.safetensors").write_bytes(b"")
    model = open_model(tmp_path, torch.bfloat16)
    assert sum(state.elements for state in model.states) > 2e9
    assert all(parameter.is_meta for parameter in model.module.parameters())
    with pytest.raises(MismatchError, match=r"model\.safetensors: not a whole safetensors file"):
        Weights(model)


@pytest.mark.parametrize("names", [5, "LlamaForCausalLM", [5], {"a": 1}])
def test_architectures_that_are_no_list_of_names_are_refused(names: object, tmp_path: Path) -> None:
    edit_config(make_model("llama", tmp_path, layers=1), architectures=names)
    with pytest.raises(MismatchError, match=r"config\.json: .*architectures"):
        open_model(tmp_path, torch.float32)


# Fingerprints


def test_fingerprints_tell_models_apart_and_nothing_else(tmp_path: Path) -> None:
    first = open_model(make_model("llama", tmp_path / "a", layers=1), torch.float32)
    moved = make_model("llama", tmp_path / "b", layers=1, seed=5)
    edit_config(moved, _name_or_path="elsewhere", transformers_version="4.0.0", dtype="float16", use_cache=False)
    assert open_model(moved, torch.bfloat16).fingerprint == first.fingerprint
    others = [
        make_model("llama", tmp_path / "c", layers=2),
        make_model("llama", tmp_path / "d", layers=1, rms_norm_eps=1e-3),
        make_model("llama", tmp_path / "e", layers=1, tied=True),
        make_model("llama", tmp_path / "f", layers=1, rope_parameters={"rope_type": "default", "rope_theta": 5.0}),
        make_model("mistral", tmp_path / "g", layers=1),
    ]
    fingerprints = {open_model(path, torch.float32).fingerprint for path in others} | {first.fingerprint}
    assert len(fingerprints) == 1 + len(others)


# Weights and buffers


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        *((family, False) for family in (*FAMILIES, *OTHERS)),
        *((family, True) for family in short_or_full(FAMILIES, (*FAMILIES, *OTHERS))),
    ],
)
def test_weights_and_buffers_equal_from_pretrained(
    known: Callable[[str], StreamedModel], tmp_path: Path, family: str, tied: bool
) -> None:
    model = open_model(make_model(family, tmp_path / family, tied=True), torch.float32) if tied else known(family)
    whole = reference.load(model.path)
    expected, got = dict(whole.named_parameters()), read_all(model, torch.float32)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    buffers = dict(model.module.named_buffers())
    assert buffers.keys() == dict(whole.named_buffers()).keys()
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffers[name], buffer) and buffers[name].dtype == buffer.dtype, name
    assert whole.state_dict().keys() >= model.persistent_buffers.keys()
    assert model.head_is_position_wise


@pytest.mark.parametrize(
    "family", [*FAMILIES, *short_or_full([family for family in OTHERS if family in ("gptj", "mamba")], OTHERS)]
)
def test_buffers_equal_from_pretrained_in_bf16(tmp_path: Path, family: str) -> None:
    path = make_model(family, tmp_path / family, **({"residual_in_fp32": False} if family == "mamba" else {}))
    model = open_model(path, torch.bfloat16)
    assert model.head_is_position_wise
    buffers = dict(model.module.named_buffers())
    for name, buffer in reference.load(path, torch.bfloat16).named_buffers():
        assert torch.equal(buffers[name], buffer) and buffers[name].dtype == buffer.dtype, name


def test_weights_convert_to_the_dtype_of_the_buffer(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "llama", dtype=torch.bfloat16)
    expected = dict(reference.load(path, torch.bfloat16).named_parameters())
    model = open_model(path, torch.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert all(torch.equal(t, expected[name].to(dtype)) for name, t in read_all(model, dtype).items())


def test_shards_are_read_across_files(tmp_path: Path) -> None:
    path = make_model("qwen3", tmp_path / "one")
    reference.load(path).save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    expected = read_all(open_model(path, torch.float32), torch.float32)
    got = read_all(open_model(tmp_path / "many", torch.float32), torch.float32)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_names_may_lack_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    path = make_model("gpt2", tmp_path / "gpt2", tied=True)
    expected = read_all(open_model(path, torch.float32), torch.float32)
    edit_weights(path, lambda tensors: {name.removeprefix("transformer."): t for name, t in tensors.items()})
    got = read_all(open_model(path, torch.float32), torch.float32)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_tied_tensors_may_be_stored_once_under_either_name_or_twice(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "llama", tied=True)
    embedding = "model.embed_tokens.weight"
    expected = load_file(path / "model.safetensors")[embedding]
    edit_weights(path, lambda tensors: tensors | {"lm_head.weight": tensors[embedding].clone()})
    assert torch.equal(read_all(open_model(path, torch.float32), torch.float32)[embedding], expected)
    edit_weights(path, lambda tensors: {name: t for name, t in tensors.items() if name != embedding})
    assert torch.equal(read_all(open_model(path, torch.float32), torch.float32)[embedding], expected)


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "llama", tied=True)
    edit_weights(path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(MismatchError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        read_all(open_model(path, torch.float32), torch.float32)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(llama: Path) -> None:
    edit_weights(llama, lambda tensors: tensors | {"model.norm.weight": torch.zeros(31)})
    with pytest.raises(MismatchError, match=r"model\.safetensors: model\.norm\.weight has shape \[31\].*\[32\]"):
        Weights(open_model(llama, torch.float32))


def test_a_missing_tensor_is_named(llama: Path) -> None:
    edit_weights(llama, lambda tensors: {name: t for name, t in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(MismatchError, match=r"no tensor lm_head\.weight \(shape \[97, 32\]\)"):
        Weights(open_model(llama, torch.float32))


def test_a_tensor_of_integers_is_refused(llama: Path) -> None:
    edit_weights(llama, lambda tensors: tensors | {"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    with pytest.raises(MismatchError, match=r"model\.norm\.weight is I8"):
        Weights(open_model(llama, torch.float32))


def test_a_cut_file_is_refused(llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(MismatchError, match=r"model\.safetensors: not a whole safetensors file"):
        Weights(open_model(llama, torch.float32))


# Directories that are not a model's


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a directory"):
        open_model(tmp_path / "nowhere", torch.float32)


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        open_model(tmp_path, torch.float32)


@pytest.mark.parametrize("text", ["{", "[]", "7"])
def test_a_config_that_is_no_configuration(llama: Path, text: str) -> None:
    (llama / "config.json").write_text(text)
    with pytest.raises(UsageError, match="not a model configuration"):
        open_model(llama, torch.float32)


def test_a_directory_without_weights_names_what_it_looked_for(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"looked for model\.safetensors and model\.safetensors\.index\.json"):
        open_model(llama, torch.float32)


def test_pickles_are_never_opened(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is a pickle.*convert to safetensors"):
        open_model(llama, torch.float32)


def test_an_index_that_names_missing_shards(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}}))
    with pytest.raises(MismatchError, match=r"not there: model-00001\.safetensors"):
        open_model(llama, torch.float32)


def test_an_index_cannot_reach_outside_of_its_directory(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    for name in ("../other/model.safetensors", "/etc/passwd", "sub/model.safetensors"):
        (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(MismatchError, match="outside of its directory"):
            open_model(llama, torch.float32)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}'])
def test_an_index_that_is_none(llama: Path, text: str) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text(text)
    with pytest.raises(MismatchError, match="not an index"):
        open_model(llama, torch.float32)


def test_advice_of_the_library_is_left_out(tmp_path: Path) -> None:
    """GPT-2 has no loss_type, of which transformers warns where a model makes its loss. It does so once in a process,
    so the model is opened in one of its own."""
    make_model("gpt2", tmp_path)
    opens = "import torch, pathlib; from ssdplan.executor.model.model import open_model; "
    done = warm.python(f"{opens}open_model(pathlib.Path(), torch.float32)", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Models that are refused


def test_remote_code_is_never_run(llama: Path) -> None:
    (llama / "modeling_new.py").write_text("raise SystemExit('remote code has run')\n")
    edit_config(llama, model_type="new", auto_map={"AutoConfig": "modeling_new.New"})
    with pytest.raises(MismatchError, match="'new' needs remote code"):
        open_model(llama, torch.float32)


def test_a_known_family_is_opened_without_the_code_beside_it(llama: Path) -> None:
    (llama / "modeling_llama.py").write_text("raise SystemExit('remote code has run')\n")
    edit_config(llama, auto_map={"AutoModelForCausalLM": "modeling_llama.New"})
    assert open_model(llama, torch.float32).architecture == "LlamaForCausalLM"


def test_an_unknown_family(llama: Path) -> None:
    edit_config(llama, model_type="nobody")
    with pytest.raises(MismatchError, match="'nobody' cannot be opened"):
        open_model(llama, torch.float32)


def test_a_quantised_checkpoint(llama: Path) -> None:
    edit_config(llama, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(MismatchError, match="quantised"):
        open_model(llama, torch.float32)


def test_a_configuration_that_no_model_has(llama: Path) -> None:
    edit_config(llama, num_attention_heads=5, head_dim=..., num_key_value_heads=3)
    with pytest.raises(MismatchError):
        open_model(llama, torch.float32)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            lambda: T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_ff=8, num_layers=1)),
            "encoder-decoder",
        ),
        (
            lambda: ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)),
            "not a causal language model",
        ),
        (
            lambda: BertForMaskedLM(
                BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
            ),
            "holds a BertForMaskedLM, not a causal language model",
        ),
        (
            lambda: LlamaForSequenceClassification(
                LlamaConfig(
                    vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
                )
            ),
            "holds a LlamaForSequenceClassification",
        ),
    ],
)
def test_models_that_are_not_causal_language_models(
    tmp_path: Path, model: Callable[[], PreTrainedModel], why: str
) -> None:
    model().save_pretrained(tmp_path)
    with pytest.raises(MismatchError, match=why):
        open_model(tmp_path, torch.float32)


_GEMMA3N = {
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "intermediate_size": [48, 48],
    "activation_sparsity_pattern": [0.0, 0.0],
}
_GEMMA4 = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "head_dim": 8}


@pytest.mark.parametrize(
    ("model_type", "fields", "why"),
    [
        ("mixtral", {"num_local_experts": 4, "output_router_logits": True}, "a loss of its routers.*set output_router"),
        ("gemma3n_text", _GEMMA3N | {"num_hidden_layers": 2}, r"not \[batch, sequence, hidden\]"),
        ("gemma4_text", _GEMMA4 | {"hidden_size_per_layer_input": 8}, "depend on trained parameters|its arguments"),
        (
            "gemma4_text",
            {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_hidden_layers": 4,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 2,
            },
            "changes its arguments",
        ),
    ],
)
def test_families_that_cannot_be_streamed_exactly(
    tmp_path: Path, model_type: str, fields: dict[str, Any], why: str
) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    general = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(general | fields))).save_pretrained(tmp_path)
    with pytest.raises(MismatchError, match=why) as refused:
        open_model(tmp_path, torch.float32)
    assert "\n" not in str(refused.value)


_MAMBA2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("model_type", "fields"), [("mamba", {}), ("falcon_mamba", {}), ("mamba2", _MAMBA2)])
def test_hidden_states_that_stay_in_fp32_between_the_layers(
    tmp_path: Path, model_type: str, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    config = AutoConfig.for_model(model_type, vocab_size=97, hidden_size=32, num_hidden_layers=2, **fields)
    if not config.residual_in_fp32:
        pytest.skip(f"the {model_type} of this transformers rounds them itself")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(MismatchError, match=r"in float32.*--precision fp32, or set residual_in_fp32 to false"):
        open_model(tmp_path, dtype)
    edit_config(tmp_path, residual_in_fp32=False)
    assert open_model(tmp_path, dtype).dtype == dtype


def test_a_small_auxiliary_loss(tmp_path: Path) -> None:
    fields = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    config = AutoConfig.for_model(
        "bamba",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        z_loss_coefficient=1e-4,
        **fields,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(MismatchError, match="not the cross entropy of the next token"):
        open_model(tmp_path, torch.float32)


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_that_are_left_out_at_random(tmp_path: Path, layers: int) -> None:
    path = make_model("opt", tmp_path / "opt", layers=layers, layerdrop=0.01)
    with pytest.raises(MismatchError, match=r"set layerdrop to 0 in config\.json"):
        open_model(path, torch.float32)


class _Odd(LlamaForCausalLM):
    """A Llama whose forward is written out, with one oddity that no streamed run could reproduce."""

    oddity = "none"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        if self.oddity in ("parameter between layers", "unused parameter", "argument from a parameter"):
            self.extra = torch.nn.Parameter(torch.ones(config.hidden_size))
        if self.oddity == "layer that writes its input":
            self.model.layers[1].register_forward_pre_hook(
                lambda _, arguments: (arguments[0].mul_(2.0), *arguments[1:])
            )
        if self.oddity == "layer that returns another precision":
            self.model.layers[1].register_forward_hook(lambda *given: given[-1].double())
        if self.oddity == "frozen parameter":
            self.model.norm.weight.requires_grad_(False)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:  # type: ignore[override]
        embedded = hidden = self.model.embed_tokens(input_ids)
        if self.oddity == "embedding of another precision":
            hidden = hidden.double()
        positions = torch.arange(input_ids.shape[1])[None]
        rotary = self.model.rotary_emb(hidden, position_ids=positions)
        layers = list(self.model.layers)
        drawn = torch.nn.functional.dropout(torch.ones(64), training=self.training)
        outputs = []
        for index, layer in enumerate(reversed(layers) if self.oddity == "another order" else layers):
            arguments: dict[str, Any] = {"position_embeddings": rotary}
            if self.oddity == "argument from a layer" and index == 2:
                arguments["attention_mask"] = outputs[0][:, None, :, :1].expand(-1, -1, -1, input_ids.shape[1])
            if self.oddity == "argument from a parameter":
                arguments["scale"] = self.extra * 2
            if self.oddity == "argument drawn in training":
                arguments["scale"] = drawn
            if self.oddity == "layers left out in training" and self.training and torch.rand([]) < 0.01:
                continue
            hidden = layer(hidden, **arguments)
            outputs.append(hidden)
            if self.oddity == "parameter between layers":
                hidden = hidden * self.extra
            if self.oddity == "sum between layers":
                hidden = hidden + embedded
            if self.oddity == "a layer left out" and index == 1:
                break
        if self.oddity == "skip from the embedding":
            hidden = hidden + embedded
        if self.oddity == "skip from a layer":
            hidden = hidden + outputs[0]
        if self.oddity == "block weight in the head":
            hidden = hidden * layers[0].input_layernorm.weight
        logits = self.lm_head(self.model.norm(hidden))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size)
            if self.oddity == "another loss":
                loss = loss + 1e-1 * logits.logsumexp(-1).square().mean()
            if self.oddity == "another loss that is small":
                loss = loss + 1e-6 * logits.logsumexp(-1).square().mean()
            if self.oddity == "another loss in training" and self.training:
                loss = loss + 1e-4 * logits.abs().mean()
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast(loss=loss, logits=logits)


_ODDITIES = {
    "argument from a layer": "depend on another layer's output",
    "argument from a parameter": "depend on trained parameters",
    "parameter between layers": "not called with what layer 0 returns",
    "sum between layers": "layer 1 is not called with what layer 0 returns",
    "another order": "do not run once each, one after another",
    "a layer left out": "runs 2 of its 3 layers",
    "skip from the embedding": "more than the last layer's output",
    "skip from a layer": "more than the last layer's output",
    "block weight in the head": r"belongs to a layer, but is used outside",
    "layer that writes its input": "LlamaDecoderLayer changes its arguments",
    "layer that returns another precision": r"LlamaDecoderLayer returns a hidden state in float64.*--precision fp32$",
    "embedding of another precision": "its layers take a hidden state in float64",
    "argument drawn in training": "are drawn at random",
    "layers left out in training": "draws random numbers between its layers",
    "another loss": "not the cross entropy",
    "another loss that is small": "not the cross entropy",
    "another loss in training": "not the cross entropy",
    "shared weights": r"mlp\.up_proj\.weight is used by layer 1, but is not its own",
}


@pytest.mark.parametrize("oddity", ["none", *_ODDITIES])
def test_what_passes_between_layers_is_found_by_running_the_model(oddity: str) -> None:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    kind = type("OddForCausalLM", (_Odd,), {"oddity": oddity})
    with init_empty_weights(include_buffers=False):
        module = kind(config)
    if oddity == "shared weights":
        module.model.layers[1].mlp.up_proj.weight = module.model.layers[0].mlp.up_proj.weight
    if oddity == "none":
        assert inspect(module).blocks_path == "model.layers"
        return
    with pytest.raises(MismatchError, match=_ODDITIES[oddity]):
        inspect(module)


@pytest.mark.parametrize(
    ("oddity", "unused", "untrained"),
    [("unused parameter", {"extra"}, set()), ("frozen parameter", set(), {"model.norm.weight"})],
)
def test_what_gets_no_gradient_is_found(oddity: str, unused: set[str], untrained: set[str]) -> None:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    with init_empty_weights(include_buffers=False):
        found = inspect(type("OddForCausalLM", (_Odd,), {"oddity": oddity})(config))
    assert (found.unused, found.untrained) == (unused, untrained)


def test_the_tiny_tokenizer_loads_and_ends_sequences(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path))
    text = "Zwölf Boxkämpfer\nread\tit 123 ✓"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 0 and len(tokenizer) <= 300


def test_a_model_that_checkpoints_by_itself_is_told_and_does_not(tmp_path: Path) -> None:
    """Its blocks would be recomputed twice: once by the plan, and once within that."""
    path = make_model("llama", tmp_path / "llama")
    assert not open_model(path, torch.float32).remarks(16)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"gradient_checkpointing": True}))
    assert checkpointing(AutoModelForCausalLM.from_pretrained(path)), "as transformers opens it"
    model = open_model(path, torch.float32)
    assert not checkpointing(model.module)
    (remark,) = model.remarks(16)
    assert "config.json asks for gradient checkpointing, which is off here" in remark


def checkpointing(module: torch.nn.Module) -> bool:
    return any(getattr(child, "gradient_checkpointing", False) for child in module.modules())
