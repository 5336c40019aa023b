"""A slice of the benchmark of every model type: what it says of types of several kinds."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bounds import HANG_SECONDS
from tests.extent import short_or_full

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "models.py"
SLICE = ("granitemoe", "lfm2_moe", "openai-gpt", "roformer", "whisper", "smolvlm")
"""Fused experts, experts in parts, layers that return lists, positions that are frozen parameters, a decoder that lacks
its encoder, and a model that takes images."""


def said(*words: str) -> str:
    call = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(call, capture_output=True, text=True, timeout=4 * HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_types_of_several_kinds_train() -> None:
    types = short_or_full(SLICE[1:], SLICE)
    assert f"{len(types)} of {len(types)} train" in said(*types)


@pytest.mark.parametrize("model_type", short_or_full(["qwen3_moe"], ["qwen3_moe", "deepseek_v32", "gemma3", "marian"]))
def test_the_commands_train_one(model_type: str) -> None:
    assert "1 of 1 train" in said("--commands", model_type)


def test_a_refusal_names_its_cause() -> None:
    assert "| zamba2 | refused |  |  |  | model.layers.1.shared_transformer" in said("zamba2")
