"""Models that a run writes, as others load them: transformers in full, and of llama.cpp and vLLM what their packages
check without them: the names of tensors, their shapes, and the tokenizer's files."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import train
from tests.executor.runs import LENGTH, prepare
from tests.extent import short_or_full
from tests.made.plans import make_plan

GGUF = {
    "llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gpt2": "GPT2", "phi3": "PHI3",
    "gemma2": "GEMMA2", "gemma3": "GEMMA3",
}  # fmt: skip
"""Family -> what llama.cpp calls its architecture."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TEMPLATE = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"


@pytest.fixture(scope="module", params=short_or_full(["llama", "gpt2", "qwen3", "gemma3"], list(GGUF)))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A family, a model of it with all that a tokenizer and a generation need, and the same after a step in bf16."""
    family = request.param
    path = tmp_path_factory.mktemp(family)
    source = prepare(path, family, tied=family in ("gpt2", "gemma2", "gemma3")) / family
    (source / "chat_template.jinja").write_text(TEMPLATE)
    said = {"eos_token_id": [0, 5], "temperature": 0.6, "top_p": 0.9, "do_sample": True, "max_new_tokens": 7}
    (source / "generation_config.json").write_text(json.dumps(said, indent=4))  # not as transformers would write it
    model = open_model(source, torch.bfloat16)
    plan = make_plan(model, sequence_length=LENGTH, precision="bf16")
    recipe = Recipe(steps=1, optimizer=AdamW(lr=1e-3))
    done = train(plan, model, EmulatedDevice(), data=path / "text.txt", out=path / "run", recipe=recipe)
    return family, source, done.model_directory


def tensors(directory: Path) -> dict[str, tuple[str, list[int]]]:
    """Name -> dtype and shape of all tensors of a model directory, by the headers alone."""
    found: dict[str, Any] = {}
    for file in directory.glob("*.safetensors"):
        data = file.read_bytes()
        found |= json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return {name: (entry["dtype"], entry["shape"]) for name, entry in found.items() if name != "__metadata__"}


def test_names_and_shapes_are_the_originals_and_the_dtype_is_the_runs(trained: tuple[str, Path, Path]) -> None:
    _, source, made = trained
    assert {name: shape for name, (_, shape) in tensors(made).items()} == {
        name: shape for name, (_, shape) in tensors(source).items()
    }
    assert {dtype for dtype, _ in tensors(made).values()} == {"BF16"}
    config, before = (json.loads((each / "config.json").read_text()) for each in (made, source))
    assert config["architectures"] == before["architectures"] and config["model_type"] == before["model_type"]
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


def test_what_belongs_to_the_tokenizer_and_to_generation_is_copied_byte_for_byte(
    trained: tuple[str, Path, Path],
) -> None:
    _, source, made = trained
    for name in (*TOKENIZER, "generation_config.json"):
        assert (made / name).read_bytes() == (source / name).read_bytes(), name
    generation = GenerationConfig.from_pretrained(made)
    assert generation.eos_token_id == [0, 5] and generation.temperature == 0.6 and generation.max_new_tokens == 7
    tokenizer = AutoTokenizer.from_pretrained(made)
    chat = [{"role": "user", "content": "The quick"}]
    assert tokenizer.chat_template == TEMPLATE
    assert (
        tokenizer.apply_chat_template(chat)["input_ids"]
        == AutoTokenizer.from_pretrained(source).apply_chat_template(chat)["input_ids"]
    )


def test_transformers_loads_all_of_it_and_nothing_else(trained: tuple[str, Path, Path]) -> None:
    _, _, made = trained
    model, info = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    assert model.dtype == torch.bfloat16 and type(model).__name__ == AutoConfig.from_pretrained(made).architectures[0]
    assert model.generation_config.max_new_tokens == 7
    assert isinstance(model, transformers.PreTrainedModel) and len(AutoTokenizer.from_pretrained(made)) <= (
        model.get_input_embeddings().num_embeddings
    )
    tokens = AutoTokenizer.from_pretrained(made)("The quick", return_tensors="pt", return_token_type_ids=False)
    assert model.generate(**tokens, do_sample=False).shape[1] > tokens["input_ids"].shape[1]
    model.save_pretrained(made.parent / "again")  # what it writes itself has the same names
    again = tensors(made.parent / "again")
    assert {name: entry for name, entry in again.items() if name in tensors(made)} == tensors(made)


def test_llama_cpp_has_a_name_for_every_tensor_and_reads_the_tokenizer(trained: tuple[str, Path, Path]) -> None:
    """By the tables and the reader of its package, which its converter uses."""
    gguf = pytest.importorskip("gguf")
    family, source, made = trained
    config = AutoConfig.from_pretrained(made)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[GGUF[family]], config.num_hidden_layers)
    found = {name: names.get_name(name, try_suffixes=(".weight", ".bias")) for name in tensors(made)}
    assert all(found.values()), [name for name, called in found.items() if called is None]
    assert len(set(found.values())) == len(found), "no two become one"
    special, before = (gguf.SpecialVocab(each, load_merges=True) for each in (made, source))
    assert special.merges and special.merges == before.merges and special.special_token_ids == before.special_token_ids
    assert special.chat_template == TEMPLATE
