"""A whole run beside `transformers.Trainer` on the same rows: the options that people use, all at once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.optimizer.learning_rate import LearningRate
from ssdplan.executor.recipe import Recipe
from ssdplan.executor.train import train
from tests.executor.runs import LENGTH, micro_batches_of, prepare
from tests.made.plans import make_plan

STEPS, MICRO_BATCHES, ROWS = 6, 3, 2


def _pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """To the longest of a micro-batch, on the right."""
    longest = max(len(row["input_ids"]) for row in rows)
    padded: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        rest = longest - len(row["input_ids"])
        padded["input_ids"].append(row["input_ids"] + [0] * rest)
        padded["labels"].append(row["labels"] + [-100] * rest)
        padded["attention_mask"].append([1] * len(row["input_ids"]) + [0] * rest)
    return {name: torch.tensor(values) for name, values in padded.items()}


class _InOrder(Trainer):
    def _get_train_sampler(self, *arguments: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def test_a_run_equals_transformers_trainer(tmp_path: Path) -> None:
    """Rows from 2 to 16 tokens, alone in their rows, over three micro-batches a step; a cosine schedule with warm-up,
    weight decay but of norms and biases, and clipping that bites in some steps."""
    directory = prepare(tmp_path, tied=False)
    tokenizer = load_tokenizer(directory / "llama")
    words = "a the quick brown fox jumps over the lazy dog, what is stored is read again".split()  # noqa: SIM905
    rows = [" ".join(words[: 1 + (7 * i) % 13]) for i in range(60)]
    lengths = {min(len(tokenizer(row)["input_ids"]) + 1, LENGTH) for row in rows}
    assert min(lengths) <= 2 and max(lengths) == LENGTH
    (directory / "lengths.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    clip, rate = 4.5, LearningRate("cosine", steps=STEPS, warmup_steps=2)
    model = open_model(directory / "llama", torch.float32)
    plan = make_plan(
        model, sequence_length=LENGTH, micro_batches=MICRO_BATCHES, micro_batch_size=ROWS, alpha=1.0, optimizer=0.4,
        chunk=4096, clip_grad_norm=clip,
    )  # fmt: skip
    result = train(
        plan,
        model,
        EmulatedDevice(),
        data=directory / "lengths.jsonl",
        out=tmp_path / "run",
        recipe=Recipe(
            steps=STEPS,
            optimizer=AdamW(lr=3e-3, eps=1e-3, weight_decay=0.3, decay_all=False),
            learning_rate=rate,
            pack=False,
        ),
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    dataset = []
    for step in range(STEPS):
        for batch in micro_batches_of(directory, step, micro_batches=MICRO_BATCHES, pack=False, data="lengths.jsonl"):
            for row, labels in zip(batch.input_ids, batch.labels, strict=True):
                count = int((labels != -100).nonzero().max()) + 1
                # The first token of a row is predicted from nothing: the Trainer would count it as if it were.
                dataset.append({"input_ids": row[:count].tolist(), "labels": [-100, *labels[1:count].tolist()]})
    trainer = _InOrder(
        model=AutoModelForCausalLM.from_pretrained(directory / "llama", dtype=torch.float32),
        args=TrainingArguments(
            output_dir=str(tmp_path / "trainer"), per_device_train_batch_size=ROWS, max_steps=STEPS, use_cpu=True,
            gradient_accumulation_steps=MICRO_BATCHES, learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=2,
            weight_decay=0.3, adam_epsilon=1e-3, max_grad_norm=clip, logging_steps=1, report_to="none",
            save_strategy="no", disable_tqdm=True, remove_unused_columns=False, seed=0, optim="adamw_torch",
        ),
        train_dataset=dataset,  # type: ignore[arg-type]
        data_collator=_pad,  # type: ignore[arg-type]
    )  # fmt: skip
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == len(lines) == STEPS
    for ours, theirs in zip(lines, logged, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-6)
        assert ours["lr"] == pytest.approx(theirs["learning_rate"], rel=1e-12)
    norms = [line["grad_norm"] for line in lines]
    assert min(norms) < clip < max(norms), "clipping bites in some steps"
    expected = trainer.model.state_dict()
    for name, tensor in load_file(result.model_directory / "model.safetensors").items():
        assert torch.linalg.vector_norm(tensor - expected[name]) <= 5e-6 * torch.linalg.vector_norm(tensor), name
