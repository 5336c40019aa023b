"""Model directories with something odd, from profile to the trained model, by the commands."""

import json

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.test_commands import QUICK, briefly, refused, ssdplan
from tests.made.models import make_model, make_tokenizer


def test_weights_without_a_place_are_left_out_only_when_told(tmp_path):
    """Biases of queries, keys and values in the files of a model whose configuration has none."""
    make_tokenizer(make_model("llama", tmp_path / "model", layers=2, vocab=320, tied=True))
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_bias": False}))
    (tmp_path / "model" / "consolidated.safetensors").write_bytes(b"another set")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    shape = ["--model", "model", "--sequence-length", 16, "--micro-batch-sizes", 1, "--precision", "fp32", *QUICK]
    said = refused("profile", *shape, cwd=tmp_path, code=8)
    assert "no place for 8 stored tensors" in said and "--allow-unused-weights" in said
    ssdplan("profile", *shape, "--allow-unused-weights", cwd=tmp_path, start=briefly)
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert profile["model"]["allow_unused_weights"] is True
    for says in ("8 stored tensors without a place", "left are consolidated.safetensors"):
        assert any(says in note for note in profile["notes"]), profile["notes"]
    ssdplan("solve", "profile.json", "--host-memory", "64MiB", "--global-batch", 2, cwd=tmp_path)
    done = ssdplan(
        "run", "plan.json", "--data", "text.txt", "--steps", 1, "--lr", "1e-30", "--out", "run", cwd=tmp_path
    )
    assert "8 stored tensors without a place" in done.stderr and "left are consolidated" in done.stderr
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert all(torch.allclose(trained[name], tensor, rtol=0, atol=1e-20) for name, tensor in plain.named_parameters())
    assert trained.keys() == dict(plain.named_parameters()).keys()
