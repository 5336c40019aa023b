"""Evaluations: the mean loss over the held-out text's tokens is plain PyTorch's, before, between and after steps."""

from pathlib import Path

import pytest
import torch

from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import train
from tests import reference
from tests.executor.runs import LENGTH, prepare
from tests.made.plans import make_plan


def held_out_loss(directory: Path, model: Path) -> float:
    """Of texts of very different lengths, each a row of its own, one row at a time and nothing padded."""
    tokenizer = load_tokenizer(directory / "llama")
    module = reference.load(model).eval()
    total, count = 0.0, 0
    for text in (directory / "held-out.jsonl").read_text().splitlines():
        ids = [*tokenizer(text[10:-2])["input_ids"], tokenizer.eos_token_id][:LENGTH]
        if len(ids) < 2:
            continue
        row = torch.tensor([ids])
        with torch.no_grad():
            total += float(module(input_ids=row, labels=row).loss) * (len(ids) - 1)
        count += len(ids) - 1
    return total / count


def test_held_out_losses_are_those_of_plain_pytorch(tmp_path):
    prepare(tmp_path)
    texts = ["the fox", "a", "the quick brown fox jumps over the lazy dog again and again", "dogs", "over the lazy"]
    (tmp_path / "held-out.jsonl").write_text("\n".join(f'{{"text": "{text}"}}' for text in texts) + "\n")
    model = open_model(tmp_path / "llama", torch.float32)

    def run(out: Path, steps: int) -> dict[int, float]:
        return train(
            make_plan(model, sequence_length=LENGTH, alpha=0.5, optimizer=0.5, chunk=4096),
            model,
            EmulatedDevice(),
            data=tmp_path / "rows.jsonl",
            out=out,
            recipe=Recipe(steps=steps, optimizer=AdamW(lr=3e-3), pack=False, eval_every=2),
            eval_data=tmp_path / "held-out.jsonl",
        ).eval_losses

    losses = run(tmp_path / "run", steps=3)
    assert sorted(losses) == [0, 2, 3] and run(tmp_path / "two", steps=2)[2] == losses[2]
    assert losses[0] == pytest.approx(held_out_loss(tmp_path, tmp_path / "llama"), rel=1e-5)
    assert losses[2] == pytest.approx(held_out_loss(tmp_path, tmp_path / "two" / "model"), rel=1e-5)
    assert losses[3] == pytest.approx(held_out_loss(tmp_path, tmp_path / "run" / "model"), rel=1e-5)
    assert losses[3] != losses[2]
