"""Which files of a model directory are its weights, tensors that have no place, and files that cannot be read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.executor.model.directory.weight_files import left_weights, weight_files, weights_fingerprint
from ssdplan.executor.model.model import open_model
from ssdplan.executor.model.weights import Weights
from ssdplan.plans.errors import MismatchError, UsageError
from tests import reference, warm
from tests.executor.losses import plain_loss, rows_of, streamed_loss
from tests.made.models import make_model, make_tokenizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BATCHES = [rows_of(9, 12), rows_of(5, 5, seed=1)]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_model("llama", tmp_path / "llama")


def edit_config(path: Path, **fields: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = path / SINGLE
    tensors = change({name: tensor.clone() for name, tensor in load_file(file).items()})
    save_file(tensors, file, metadata={"format": "pt"})


def add_shards(path: Path, seed: int = 5) -> None:
    """Another model's weights in shards, with their index, into a directory that may have weights already."""
    other = make_model("llama", path.parent / "other", seed=seed)
    reference.load(other).save_pretrained(path.parent / "shards", max_shard_size="20KB")
    for file in (path.parent / "shards").glob("model*"):
        shutil.copy(file, path)


def test_weights_count_in_no_limit_of_what_may_be_written_to(tmp_path: Path) -> None:
    """Nor where a kernel promises no more memory than it has. Opened by torch, a file is mapped whole, to write to."""
    save_file({"weight": torch.zeros(64 << 20, dtype=torch.uint8)}, tmp_path / SINGLE)
    done = warm.python(
        "import re, resource\n"
        "from pathlib import Path\n"
        "from ssdplan.executor.model.directory.shards import _header\n"
        "mapped = int(re.search(r'VmData:\\s*([0-9]+)', Path('/proc/self/status').read_text())[1]) << 10\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (mapped + (16 << 20),) * 2)\n"
        f"print(_header(Path({SINGLE!r})))",
        cwd=tmp_path,
    )
    assert done.returncode == 0 and "67108864" in done.stdout, done.stderr


# Several sets of weights


def test_the_set_that_from_pretrained_loads_is_taken_and_the_other_is_named(llama: Path) -> None:
    alone = plain_loss(llama, BATCHES)
    before = weights_fingerprint(llama)
    add_shards(llama)
    expected = plain_loss(llama, BATCHES)
    assert expected == alone, "transformers takes the single file"
    model = open_model(llama, torch.float32)
    assert streamed_loss(model, BATCHES) == pytest.approx(expected, rel=1e-6)
    (note,) = Weights(model).notes
    assert f"those of {SINGLE} are taken" in note and INDEX in note.partition("left are")[2]
    assert weights_fingerprint(llama) == before
    (llama / SINGLE).unlink()
    sharded = plain_loss(llama, BATCHES)
    assert abs(sharded - expected) > 0.01
    model = open_model(llama, torch.float32)
    assert streamed_loss(model, BATCHES) == pytest.approx(sharded, rel=1e-6)
    assert Weights(model).notes == ()
    assert weights_fingerprint(llama) != before


def test_the_file_that_the_configuration_names_comes_before_all_others(llama: Path) -> None:
    add_shards(llama)
    edit_config(llama, transformers_weights=INDEX)
    expected = plain_loss(llama, BATCHES)
    model = open_model(llama, torch.float32)
    assert streamed_loss(model, BATCHES) == pytest.approx(expected, rel=1e-6)
    (note,) = Weights(model).notes
    assert f"those of {INDEX} are taken" in note and note.endswith(f"left are {SINGLE}")
    for name in ("nothing.safetensors", "../llama/model.safetensors", "weights.bin", 7):
        edit_config(llama, transformers_weights=name)
        with pytest.raises(MismatchError, match="transformers_weights"):
            weight_files(llama)


def test_other_files_with_weights_are_named(llama: Path) -> None:
    for name in ("consolidated.safetensors", "model.fp16.safetensors"):
        shutil.copy(llama / SINGLE, llama / name)
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "rng_state_0.pth", "scheduler.pt"):
        (llama / name).write_bytes(b"x")
    assert left_weights(llama).endswith("left are consolidated.safetensors, model.fp16.safetensors, pytorch_model.bin")
    for name in ("tf_model.h5", "original/consolidated.00.pth"):
        (llama / name).parent.mkdir(exist_ok=True)
        (llama / name).write_bytes(b"")
    assert left_weights(llama).endswith("original/consolidated.00.pth, pytorch_model.bin and 1 more")
    (llama / SINGLE).unlink()
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is a pickle"):
        weight_files(llama)
    (llama / "pytorch_model.bin").unlink()
    (llama / "optimizer.pt").unlink()
    with pytest.raises(UsageError, match=r"loads no weights from here.*found consolidated\.safetensors, model\.fp16"):
        weight_files(llama)


@pytest.mark.parametrize(
    ("name", "says"),
    [("adapter_config.json", "merge it"), ("shard-00001-model-00001-of-00002.safetensors", "save the model whole")],
)
def test_what_from_pretrained_would_load_otherwise_is_refused(llama: Path, name: str, says: str) -> None:
    (llama / name).write_text("{}")
    with pytest.raises(MismatchError, match=says):
        open_model(llama, torch.float32)


def test_an_adapter_alone_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="an adapter and no model"):
        open_model(tmp_path, torch.float32)


def test_a_tensor_that_two_shards_have_must_be_the_same_in_both(llama: Path) -> None:
    norm = "model.norm.weight"
    tensors = load_file(llama / SINGLE)
    (llama / SINGLE).unlink()
    shards = ("model-1.safetensors", "model-2.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shards[0]) | {norm: shards[1]}}
    (llama / INDEX).write_text(json.dumps(index))
    save_file(tensors, llama / shards[0], metadata={"format": "pt"})
    for more, fine in ((0.0, True), (1.0, False)):
        save_file({norm: tensors[norm] + more}, llama / shards[1], metadata={"format": "pt"})
        model = open_model(llama, torch.float32)
        if fine:
            assert streamed_loss(model, BATCHES) == pytest.approx(plain_loss(llama, BATCHES), rel=1e-6)
            continue
        with pytest.raises(MismatchError, match=r"model-2.*norm\.weight differs from .* of model-1.*remove the one"):
            streamed_loss(model, BATCHES)


# Tensors without a place


def test_tensors_without_a_place_are_refused_unless_they_may_be_left_out(llama: Path) -> None:
    """Biases of queries, keys and values, in a model whose configuration says that it has none."""
    edit_config(llama, attention_bias=False)
    with pytest.raises(
        MismatchError, match=r"no place for 12 stored tensors .*\*\.self_attn\.k_proj\.bias.*and 1 more"
    ):
        Weights(open_model(llama, torch.float32))
    model = open_model(llama, torch.float32, allow_unused_weights=True)
    (note,) = Weights(model).notes
    assert "12 stored tensors without a place in the model, neither trained nor exported" in note
    assert streamed_loss(model, BATCHES) == pytest.approx(plain_loss(llama, BATCHES), rel=1e-6)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),  # once of each layer
        ("gpt2", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias", "h.1.attn.bias"]),
        ("gpt_neox", ["gpt_neox.layers.0.attention.masked_bias", "gpt_neox.layers.0.attention.bias"]),
        ("gptj", ["transformer.h.0.attn.masked_bias", "transformer.h.0.attn.bias"]),
    ],
)
def test_buffers_of_old_checkpoints_are_left_out_as_transformers_leaves_them(
    tmp_path: Path, family: str, names: list[str]
) -> None:
    path = make_model(family, tmp_path / family)
    expected = plain_loss(path, BATCHES)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    edit_weights(path, lambda tensors: tensors | {name: mask.clone() for name in names})
    model = open_model(path, torch.float32)
    assert Weights(model).notes == ()
    assert streamed_loss(model, BATCHES) == pytest.approx(expected, rel=1e-6)


def test_one_tensor_under_two_spellings_must_be_the_same_in_both(tmp_path: Path) -> None:
    path = make_model("gpt2", tmp_path / "gpt2")
    name = "transformer.ln_f.weight"
    edit_weights(path, lambda tensors: tensors | {"ln_f.weight": tensors[name].clone()})
    assert streamed_loss(open_model(path, torch.float32), BATCHES) == pytest.approx(plain_loss(path, BATCHES), rel=1e-6)
    edit_weights(path, lambda tensors: tensors | {"ln_f.weight": tensors[name] + 1})
    with pytest.raises(MismatchError, match=r"ln_f\.weight differs from transformer\.ln_f\.weight .*both are one"):
        streamed_loss(open_model(path, torch.float32), BATCHES)


# Files that cannot be read

_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.mark.parametrize("name", [SINGLE, INDEX, "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named_as_one(llama: Path, name: str) -> None:
    make_tokenizer(llama)
    if name == INDEX:
        (llama / SINGLE).unlink()
    (llama / name).write_text(_POINTER)
    with pytest.raises(UsageError, match=rf"{name}: a pointer of git LFS, not the file.*git lfs pull"):
        load_tokenizer(llama) if name == "tokenizer.json" else Weights(open_model(llama, torch.float32))


@pytest.mark.parametrize("name", [SINGLE, INDEX, "config.json", "tokenizer.json"])
def test_a_file_that_may_not_be_read_is_named(llama: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the permission, which is no matter to root: there the system's answer is made."""
    make_tokenizer(llama)
    if name == INDEX:
        (llama / SINGLE).unlink()
    (llama / name).touch()
    (llama / name).chmod(0)
    if os.geteuid() == 0:
        really = Path.open

        def opened(self: Path, *arguments: object, **options: object) -> object:
            if self.name == name:
                raise PermissionError(13, "Permission denied", str(self))
            return really(self, *arguments, **options)  # type: ignore[call-overload]

        monkeypatch.setattr(Path, "open", opened)
        really_opens = os.open

        def opens(path: Path | str, *arguments: Any, **options: Any) -> int:
            if Path(path).name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return really_opens(path, *arguments, **options)

        monkeypatch.setattr(os, "open", opens)
    with pytest.raises(UsageError, match=rf"{name}: no permission to read it"):
        load_tokenizer(llama) if name == "tokenizer.json" else Weights(open_model(llama, torch.float32))
