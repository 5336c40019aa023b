"""Models that take images too train on text as plain PyTorch trains them, and what text never reaches is exported as it
was stored."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from ssdplan.executor.memory.states import saved_entries
from ssdplan.executor.model.directory.export import export_model
from ssdplan.executor.model.model import open_model
from ssdplan.executor.model.saved_form import SavedForm
from ssdplan.executor.model.weights import Weights
from tests import reference
from tests.executor.test_families import compare, make_steps
from tests.executor.test_mixtures import rounded


@pytest.fixture(scope="module")
def tiny() -> ModuleType:
    """The benchmark's own tiny models of every type."""
    file = Path(__file__).parents[2] / "benchmarks" / "tiny_models.py"
    spec = importlib.util.spec_from_file_location("tiny_models", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "idefics3"])
def test_training_equals_plain_pytorch(tmp_path: Path, tiny: ModuleType, family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    path = tiny.make_tiny(family, tmp_path / "model")
    compare(path, make_steps(2, 2, padded=True), torch.float32, 5e-6, 1e-3, head_chunks=(5,))
    model = open_model(path, torch.float32)
    assert all("vis" in name or "connector" in name or "projector" in name for name in model.anatomy.unused)
    assert "which text never reaches, stay as they are" in "".join(model.remarks(8))
    assert not {tensor.name for state in model.states for tensor in state.tensors} & model.anatomy.unused


def test_what_text_never_reaches_is_exported_in_its_own_precision(tmp_path: Path, tiny: ModuleType) -> None:
    path = tiny.make_tiny("llava", tmp_path / "model")
    (path / "preprocessor_config.json").write_text("{}")
    model = open_model(path, torch.bfloat16)
    form = SavedForm(model)
    entries, tensors = form.entries(saved_entries(model)), form.tensors(rounded(model, Weights(model)))
    export_model(tmp_path / "out", source=path, entries=entries, tensors=tensors, files=form.files)
    before, after = (load_file(each / "model.safetensors") for each in (path, tmp_path / "out"))
    assert before.keys() == after.keys()
    kept = [name for name, tensor in after.items() if tensor.dtype == torch.float32]
    assert len(kept) == len(model.anatomy.unused)
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == "{}"
    assert reference.load(tmp_path / "out")
