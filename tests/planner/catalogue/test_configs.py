"""Shapes of configurations: the tensors of transformers' own model of each family, and what is refused of a file."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.activations import ACT2CLS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ssdplan import cli
from ssdplan.executor.model.model import open_model
from ssdplan.planner.catalogue.configs import DTYPES, MOST_BYTES, is_path, shape_of_path
from ssdplan.planner.catalogue.costs import Compute
from ssdplan.planner.catalogue.families import ACTIVATIONS, FAMILIES, LEARNED_ACTIVATIONS, ONE_KERNEL, ROTARY
from ssdplan.planner.catalogue.shapes import Shape, remarks_of
from ssdplan.planner.catalogue.whatif import estimate_model
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.errors import UsageError
from tests.extent import FULL

IN_IMAGES = {
    "gemma3": "gemma3_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
}
"""Models for images: the type of the text model in them. Those that are no causal models alone are tried there."""
ALONE = [kind for kind in FAMILIES if kind not in IN_IMAGES.values() or kind == "gemma3_text"]
NUMBERS: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_local_experts": 5,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "vocab_size": 320}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gptj": GPT | {"rotary_dim": 4},
    "codegen": GPT | {"rotary_dim": 4, "n_head": 4},
    "mpt": {"d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 64, "vocab_size": 320},
    "gpt_neo": {
        "hidden_size": 48,
        "num_layers": 2,
        "num_heads": 6,
        "max_position_embeddings": 64,
        "vocab_size": 320,
        "attention_types": [[["global", "local"], 1]],
    },
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 6, "vocab_size": 320},
    "opt": {k: v for k, v in NUMBERS.items() if "intermediate" not in k and "expert" not in k}
    | {"ffn_dim": 80, "word_embed_proj_dim": 48},
}
OTHERS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": ({"num_key_value_heads": None},),
    "cohere": ({"use_qk_norm": True},),
    "gpt_bigcode": ({"multi_query": False},),
    "gpt2": ({"n_inner": 100},),
    "falcon": (
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"parallel_attn": False, "multi_query": False, "bias": True},
        {"ffn_hidden_size": 100},
    ),
    "phimoe": ({"lm_head_bias": True},),
}
"""Besides what every family is tried with."""
CASES = [
    *((kind, {}) for kind in ALONE),
    *((kind, {"tie_word_embeddings": not FAMILIES[kind].tied}) for kind in ALONE),
    *((kind, {key: value}) for kind in ALONE for key in FAMILIES[kind].switches for value in (True, False)),
    *((kind, {"head_dim": 16}) for kind in ALONE if FAMILIES[kind].own_head_width and kind != "helium"),
    *((kind, fields) for kind, several in OTHERS.items() for fields in several),
]


def configuration(kind: str, fields: dict[str, Any]) -> PretrainedConfig:
    sizes = SIZES.get(kind) or {key: value for key, value in NUMBERS.items() if key in _declared(kind)}
    own = {"head_dim": 8} if kind in ("ministral", "helium") else {}  # these classes work with no other
    return CONFIG_MAPPING[kind](**{**sizes, **own, **fields})


def _declared(kind: str) -> set[str]:
    """Names of the fields that a class knows, under its own names or the usual ones."""
    own = CONFIG_MAPPING[kind]()
    return {key for key in NUMBERS if hasattr(own, key)}


def meta(config: PretrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def tensors(model: torch.nn.Module) -> tuple[Counter[tuple[int, ...]], list[Counter[tuple[int, ...]]]]:
    """Sizes of the parameters of both ends, and of each block; a matrix is the same either way round."""
    ends: Counter[tuple[int, ...]] = Counter()
    blocks: dict[int, Counter[tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters():
        numbers = [int(part) for part in name.split(".") if part.isdecimal()]
        where = blocks.setdefault(numbers[0], Counter()) if numbers else ends
        where[tuple(sorted(parameter.shape))] += 1
    return ends, [blocks[index] for index in sorted(blocks)]


def counted(shape: Shape, part: Callable[[], tuple[tuple[int, ...], ...]]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(sorted(tensor)) for tensor in part())


@pytest.mark.parametrize(("kind", "fields"), CASES, ids=lambda value: value if isinstance(value, str) else str(value))
def test_a_shape_has_the_tensors_of_transformers_own_model(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    config = configuration(kind, fields)
    config.save_pretrained(tmp_path / "Tiny model")
    shape = shape_of_path(tmp_path / "Tiny model")
    model = meta(config)
    ends, blocks = tensors(model)
    assert shape.name == "tiny_model"
    assert shape.architecture == type(model).__name__
    assert blocks == [counted(shape, shape.block)] * shape.blocks
    assert ends == counted(shape, lambda: (*shape.embedding(), *shape.shared(), *shape.head()))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.hidden, shape.vocab) == (48, 320)


STREAMED = ("bloom", "qwen3_moe")
"""Odd ends, and experts; all families in full."""


def test_what_weights_may_be_saved_in_torch_knows() -> None:
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES - {"auto"})


@pytest.mark.parametrize("kind", ALONE if FULL else STREAMED)
def test_its_states_are_those_that_stream(kind: str, tmp_path: Path) -> None:
    """Those of the same model when it is opened to train, name by name. Blocks that attend otherwise than each other
    have a class each there, and one in a what-if."""
    model = AutoModelForCausalLM.from_config(configuration(kind, {}))
    model.save_pretrained(tmp_path)
    real = open_model(tmp_path, torch.float32)
    made = estimate_model(
        shape_of_path(tmp_path), Compute(1e12, 1e11, 1e12, 0.0), precision="fp32", sequence_length=32,
        micro_batch_sizes=(1,),
    )  # fmt: skip
    assert [(state.name, state.elements) for state in made.states] == [(s.name, s.elements) for s in real.states]
    assert [(layer.name, layer.states) for layer in made.layers] == [(s.name, s.states) for s in real.layers]
    assert made.architecture == real.architecture


@pytest.mark.parametrize("kind", IN_IMAGES)
def test_of_a_model_for_images_the_text_model_counts(kind: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[kind]()
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        setattr(config.text_config, key, NUMBERS[key])
    config.text_config.layer_types = ["full_attention"] * 2
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    shape = shape_of_path(tmp_path / "config.json")
    assert shape.family == IN_IMAGES[kind]
    images = ("model.visual", "model.vision_tower", "model.multi_modal_projector")
    of_text = sum(p.numel() for name, p in model.named_parameters() if not name.startswith(images))
    assert shape.parameters == of_text
    assert any("text model alone" in remark for remark in shape.remarks)


@pytest.mark.parametrize("kind", [kind for kind in ALONE if kind not in ("ministral", "nemotron")])
def test_what_a_file_leaves_out_is_as_transformers_class_has_it(kind: str, tmp_path: Path) -> None:
    """Nothing but what each file has: sizes that no class could know. Two classes do not work with their defaults."""
    config = configuration(kind, {})
    known = config.to_dict()
    sizes = {
        key: known[key] for key in known if key in {*NUMBERS, *GPT, *SIZES["mpt"], *SIZES["gpt_neo"], *SIZES["opt"]}
    }
    for left_out in ("num_key_value_heads", "head_dim"):
        sizes.pop(left_out, None)
    sizes |= {
        "num_attention_heads": 32,
        "num_heads": 32,
        "n_head": 32,
        "n_heads": 32,
        "hidden_size": 640,
        "n_embd": 640,
    }
    sizes |= {"d_model": 640, "word_embed_proj_dim": 640}
    if kind in ("helium", "glm", "glm4"):
        sizes |= {"num_attention_heads": 20, "hidden_size": 2560}
    sizes = {key: value for key, value in sizes.items() if key in known or key in CONFIG_MAPPING[kind].attribute_map}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **sizes}))
    theirs = meta(CONFIG_MAPPING[kind](**sizes))
    assert shape_of_path(file).parameters == sum(parameter.numel() for parameter in theirs.parameters())


QWEN = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 320,
}
MIXTURE = QWEN | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
FALCON = QWEN | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' has no formula here .*ssdplan profile DIR"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": ["qwen3"]}, r"has no model_type in words \(it is list\)"),
        ({"model_type": 5}, r"has no model_type in words \(it is 5\)"),
        ({"hidden_size": None}, "qwen3: has no hidden_size or n_embd"),
        ({"hidden_size": "64"}, 'hidden_size is "64", no whole number from 1 to 262,144'),
        ({"hidden_size": True}, "hidden_size is true"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"hidden_size": [64]}, "hidden_size is list"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 10**400}, "hidden_size is 1000.*[.][.][.], no whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, no whole number from 1 to 4,096"),
        ({"n_layer": 3}, "num_hidden_layers and n_layer contradict each other"),
        (
            {"num_key_value_heads": 3},
            r"4 heads cannot share 3 heads of keys evenly \(num_attention_heads and num_key_value_heads, or",
        ),
        *(
            ({"hidden_act": name}, "hidden_act is .*, which transformers does not know")
            for name in ("foo", "SILU", "", 5, None, True, ["silu"], {"silu": 1})
        ),
        *(({"hidden_act": name}, "hidden_act is .*, which has parameters of its own") for name in ("prelu", "xielu")),
        (
            {"model_type": "gpt2", "n_positions": 64, "activation_function": "foo"},
            'activation_function is "foo", which transformers does not know',
        ),
        ({"model_type": "gemma2", "hidden_activation": "foo"}, 'hidden_activation is "foo", which transformers'),
        (
            {"model_type": "llava", "text_config": QWEN | {"hidden_act": "foo"}},
            'hidden_act is "foo", which transformers does not know',
        ),
        *(({key: 5}, f"{key} is 5, no object with fields") for key in ("rope_parameters", "rope_scaling")),
        ({"rope_scaling": {"type": "zork"}}, 'rope_type of rope_scaling is "zork", which transformers does not know'),
        ({"rope_parameters": {"rope_type": 5}}, "rope_type of rope_parameters is 5, which"),
        ({"rope_parameters": {"full_attention": {"rope_type": "zork"}}}, 'rope_type of rope_parameters is "zork"'),
        *(({"rope_theta": theta}, "rope_theta is .*, no number above 0") for theta in (0, -1.5, "10000", True, [1])),
        ({"rope_parameters": {"full_attention": {"rope_theta": 0}}}, "rope_theta is 0, no number above 0"),
        *(({key: 0}, f"{key} is 0, no number above 0") for key in ("rope_local_base_freq", "rotary_emb_base")),
        ({"head_dim": None, "hidden_size": 68}, r"heads of 17 elements \(hidden_size by num_attention_heads\)"),
        ({"head_dim": 17}, r"heads of 17 elements \(head_dim\), and rotary embeddings turn pairs"),
        *(
            ({"dtype": name}, "dtype is .*, and no weights are saved in that")
            for name in ("float7", 16, ["float32"], "int32", {"": "bfloat16"})
        ),
        ({"torch_dtype": "bfloat"}, 'torch_dtype is "bfloat", and no weights are saved in that'),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is true"),
        ({"architectures": "Qwen3ForCausalLM"}, 'architectures is "Qwen3ForCausalLM", no list of names'),
        ({"architectures": [5]}, "architectures begins with 5, no name"),
        (
            {"architectures": ["Qwen3ForSequenceClassification"]},
            'architectures names "Qwen3ForSequenceClassification", and tensors are known only for Qwen3ForCausalLM',
        ),
        ({"model_type": "mpt", "expansion_ratio": 8}, "expansion_ratio is 8, and tensors are known only for 4"),
        ({"head_dim": None, "hidden_size": 66}, "66 is no multiple of num_attention_heads 4"),
        ({"attention_bias": "yes"}, 'attention_bias is "yes", neither true nor false'),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, neither"),
        ({"model_type": "x\x1b[31m" + "y" * 100}, r"model_type 'x\\x1b"),
        (MIXTURE | {"mlp_only_layers": [0]}, "mlp_only_layers is list: its blocks differ"),
        (MIXTURE | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2: its blocks differ"),
        (
            MIXTURE | {"num_experts_per_tok": 9},
            r"a token goes through 9 of 8 experts \(num_experts_per_tok, num_experts\)",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 16},
            r"a token goes through 16 of 8 experts \(num_experts_per_tok, num_local_experts\)",
        ),
        *(
            (
                {"model_type": kind, "text_config": None},
                f"of model_type '{kind}' only .*, and text_config, .*, is null; ",
            )
            for kind in ("gemma3", "llava")
        ),
        ({"model_type": "qwen2_5_vl"}, "of model_type 'qwen2_5_vl' only the text .* text_config, .* is not there; "),
        (
            {"model_type": "opt", "max_position_embeddings": 64, "do_layer_norm_before": False},
            "do_layer_norm_before is",
        ),
        ({"model_type": "opt", "max_position_embeddings": 64, "word_embed_proj_dim": 32}, "embeddings are projected"),
        *(
            ({"sliding_window": window}, "sliding_window is .*, no whole number from 1 to 16,777,216")
            for window in (-1, "4096", 4.5, True, False, 0.0, [4096], {}, 10**30)
        ),
        *(
            ({"layer_types": kinds}, "layer_types is .*, no list with a type for each of 2 blocks")
            for kinds in ("full_attention", 2, {})
        ),
        *(
            ({"layer_types": ["full_attention"] * kinds}, f"layer_types has {kinds} types for 2 blocks")
            for kinds in (0, 1, 3)
        ),
        *(
            (
                {"model_type": kind, "text_config": text},
                "text_config is .*, no object with the fields of its text model",
            )
            for kind, text in (("llava", 5), ("gemma3", "x"), ("qwen3", [{}]))
        ),
        ({"max_position_embeddings": "long"}, 'max_position_embeddings is "long", no whole number'),
        ({"layer_types": ["full_attention", "mamba"]}, 'layer_types has "mamba", none of full_attention'),
        ({"layer_types": [{}, []]}, "layer_types has dict, none of"),
        (MIXTURE | {"decoder_sparse_step": True}, "decoder_sparse_step is true"),
        *((FALCON | {"num_ln_in_parallel_attn": norms}, "neither 1 nor 2") for norms in (1.0, True, "1", [1], 3)),
        ({"vocab_size": 1 << 22, "hidden_size": 1 << 18}, "its embedding has 1,099,511,627,776 parameters, more than"),
        ({"num_attention_heads": 1 << 16, "head_dim": 1 << 18}, "a block has .* parameters, more than 1,000,000,000"),
        (
            {"num_hidden_layers": 4096, "hidden_size": 1 << 15, "intermediate_size": 1 << 18},
            "it has .* parameters, more than 10,000,000,000,000",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_not_understood_is_refused_with_the_way_out(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN | fields))
    with pytest.raises(UsageError, match=says) as refused:
        shape_of_path(file)
    assert "\x1b" not in str(refused.value) and len(str(refused.value)) < 1500
    assert "ssdplan profile DIR" in str(refused.value)


def test_the_parts_of_a_model_may_be_saved_in_other_dtypes(tmp_path: Path) -> None:
    """As transformers writes them; of a text model by itself a word is expected (above)."""
    file = tmp_path / "config.json"
    dtypes = {"": "float32", "text_config": "bfloat16", "vision_config": None}
    around = {"model_type": "llava", "text_config": QWEN, "dtype": dtypes}
    file.write_text(json.dumps(around))
    assert shape_of_path(file).hidden == QWEN["hidden_size"]
    file.write_text(json.dumps(around | {"dtype": dtypes | {"vision_config": "zork"}}))
    with pytest.raises(UsageError, match='dtype is "zork", and no weights are saved in that'):
        shape_of_path(file)


def test_the_names_of_functions_are_those_of_transformers() -> None:
    assert set(ACT2CLS) == ACTIVATIONS | LEARNED_ACTIVATIONS
    assert not ACTIVATIONS & LEARNED_ACTIVATIONS and ONE_KERNEL <= ACTIVATIONS
    assert {*ROPE_INIT_FUNCTIONS, "default", "mrope", "su"} == ROTARY


@pytest.mark.parametrize("kind", ALONE)
def test_an_unknown_function_is_refused_where_transformers_refuses_it(kind: str, tmp_path: Path) -> None:
    """By the field that the class of each family reads, and by no other."""
    fields = ("hidden_act", "hidden_activation", "activation_function", "activation")
    config, taken = configuration(kind, {}), set()
    for field in fields:
        config.save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {field: "foo"}))
        try:
            meta(CONFIG_MAPPING[kind].from_pretrained(tmp_path))
        except KeyError:
            taken.add(field)
            with pytest.raises(UsageError, match=f'{field} is "foo"'):
                shape_of_path(tmp_path)
        else:
            shape_of_path(tmp_path)
    assert taken == ({FAMILIES[kind].activation} if FAMILIES[kind].activation else set())


@pytest.mark.parametrize("fields", [{}, {"architectures": []}, {"architectures": ["QWEN3ForCausalLM"]}])
def test_what_no_other_model_says_is_taken(fields: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    usual = {"is_encoder_decoder": False, "rope_scaling": {"type": "yarn", "factor": 4.0}, "hidden_act": "silu"}
    file.write_text(json.dumps(QWEN | usual | fields))
    assert len(remarks_of(shape_of_path(file), 1024)) == 1, "norms of queries and keys"


@pytest.mark.parametrize(
    ("kind", "said", "remarked"),
    [
        ("qwen3", {"hidden_act": "gelu_new"}, "hidden_act is gelu_new, and what its MLP keeps is counted as with SiLU"),
        ("qwen3", {"hidden_act": "gelu"}, ""),
        ("gpt2", {"activation_function": "relu"}, "is relu, .* counted as with GELU by its formula"),
        ("gpt2", {"activation_function": "gelu_new"}, ""),
        ("opt", {"activation_function": "gelu"}, "is gelu, .* counted as with ReLU"),
    ],
)
def test_another_function_than_the_formulas_count_is_remarked(
    kind: str, said: dict[str, Any], remarked: str, tmp_path: Path
) -> None:
    configuration(kind, said).save_pretrained(tmp_path)
    found = [remark for remark in shape_of_path(tmp_path).remarks if "counted as with" in remark]
    assert len(found) == bool(remarked)
    assert all(re.search(remarked, remark) for remark in found)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", r"config.json: not a config.json \(Expecting value"),
        (b"[1]", r"config.json: not a config.json \(not an object with fields\)$"),
        (b"\xff\xfe", r"config.json: not a config.json \(not UTF-8 text\)$"),
        (b"\xef\xbb\xbf{}", r"config.json: not a config.json \(Unexpected UTF-8 BOM"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 100_000, r"not a config.json \(nested too deeply\)"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b'{"rope_theta": NaN}', "NaN is no number that JSON has"),
        (b'{"rope_scaling": {"factor": Infinity}}', "Infinity is no number that JSON has"),
        (b'{"rms_norm_eps": [-Infinity]}', "-Infinity is no number that JSON has"),
        (b'{"rope_theta": 1e999}', "the number 1e999 is out of range"),
        (b'{"rope_theta": -1' + b"0" * 400 + b".0}", "the number -1000.* is out of range"),
        (b'{"schema": "ssdplan.profile/1"}', "is a document of ssdplan, not a config.json; give solve a profile alone"),
        (b" " * (MOST_BYTES + 1), "config.json"),
    ],
    ids=range(15),
)
def test_a_hostile_file_is_refused(data: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(data)
    with pytest.raises(UsageError, match=says):
        shape_of_path(file)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config.json in it.* name a model of the catalogue"):
        shape_of_path(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds an adapter: merge that"):
        shape_of_path(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UsageError, match="is a directory"):
        shape_of_path(tmp_path)


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "config.json.json"])
def test_what_is_plainly_a_path_is_no_name(name: str) -> None:
    assert is_path(name)
    with pytest.raises(UsageError, match="cannot read it: No such file"):
        shape_of_path(Path(name))
    assert not is_path("meta-llama/Llama-3.1-8B") and not is_path("x" * 10_000) and not is_path("a\0b")


def test_a_mixture_streams_all_experts_and_computes_with_the_active_ones(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MIXTURE))
    shape = shape_of_path(file)
    attention = 64 * (64 + 2 * 32 + 64)
    assert shape.multiplied() == attention + 8 * 64 + 2 * 3 * 64 * 32, "queries to output, router, two experts"
    assert shape.parameters - shape.active_parameters == 2 * 6 * 3 * 64 * 32, "two blocks, six idle experts"
    assert shape.intermediate == 2 * 32
    assert any("all 8 experts of a block stream" in remark for remark in remarks_of(shape, 1024))


def test_what_the_formulas_leave_out_is_remarked(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN | {"sliding_window": 4096, "quantization_config": "mxfp4"}))
    window, quantised, norms = remarks_of(shape_of_path(file), 1024)
    assert "see 4,096 tokens back" in window and "quantised" in quantised and "norms" in norms
    file.write_text(json.dumps(QWEN | {"sliding_window": 4096, "use_sliding_window": False}))
    assert len(remarks_of(shape_of_path(file), 1024)) == 1


def test_rows_beyond_the_positions_that_a_file_names_are_remarked(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN | {"max_position_embeddings": 4096}))
    assert not any("positions" in remark for remark in remarks_of(shape_of_path(file), 4096))
    assert "names 4,096 positions, and rows have 8,192 tokens" in " ".join(remarks_of(shape_of_path(file), 8192))
    file.write_text(json.dumps(QWEN))
    assert not any("positions" in remark for remark in remarks_of(shape_of_path(file), 1 << 20))


def test_solve_plans_for_a_directory_without_weights(tmp_path: Path) -> None:
    file = tmp_path / "My Model" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(MIXTURE))
    command = "--gpu rtx-4090 --ssd samsung-990-pro --host-memory 1GiB --micro-batches 1 --micro-batch-sizes 1 --json"
    for path in (file.parent, file):
        answer = CliRunner().invoke(cli.make_command_line(), ["solve", "--model", str(path), *command.split()])
        assert answer.exit_code == 0, answer.output
        plan = Plan.model_validate_json(answer.stdout)
        assert plan.model.name == "my_model" and plan.model.architecture == "Qwen3MoeForCausalLM"
        assert plan.model.parameters == shape_of_path(path).parameters
    answer = CliRunner().invoke(cli.make_command_line(), ["solve", "--model", str(tmp_path), *command.split()])
    assert answer.exit_code == UsageError.exit_code and "no config.json in it" in answer.stderr
