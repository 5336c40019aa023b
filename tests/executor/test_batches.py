"""A run's texts: what is not in the cache is tokenised, once."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdplan.executor import batches as texts
from ssdplan.executor.data.preview import describe, look
from ssdplan.executor.data.reader import Here
from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.tokenising import tokenise
from ssdplan.executor.data.tokens import end_tokens, load_tokenizer
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.plans.errors import MismatchError, UsageError
from tests.executor.runs import LENGTH, prepare
from tests.made.plans import make_plan


def test_texts_that_no_cache_has_are_tokenised_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def counted(work: Any, *rest: Any) -> None:
        asked.append(Path(work.path).name)
        tokenise(work, *rest)

    directory = prepare(tmp_path)
    model = open_model(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, micro_batches=2, micro_batch_size=1)
    recipe = Recipe(steps=1, optimizer=AdamW(lr=1e-3), token_cache=tmp_path / "tokens")
    for _ in range(2):
        found = texts.Texts(
            plan,
            recipe,
            directory / "text.txt",
            directory / "held-out.txt",
            Here(load_tokenizer(model.path), counted),
            model,
            Watch(),
            datetime(2024, 7, 26),
        )
        assert found.step(0) and found.evaluated
    assert asked == ["text.txt", "held-out.txt"]


def test_a_run_says_what_the_preview_says_and_appends_ends_as_it_is_told(tmp_path: Path) -> None:
    directory = prepare(tmp_path)
    template = "{% for m in messages %}{{ m.role + ' ' + m.content }}{% endfor %}"
    (directory / "llama" / "chat_template.jinja").write_text(template)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = directory / "talk.jsonl"
    data.write_text((json.dumps({"messages": talk}) + "\n") * 2)
    model = open_model(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, micro_batches=1, micro_batch_size=1)
    tokenizer = load_tokenizer(model.path)
    for append_eos in (False, True):
        recipe = Recipe(steps=1, optimizer=AdamW(lr=1e-3), append_eos=append_eos, pack=False)
        assert recipe.deciding()["append_eos"] is append_eos
        notes: list[str] = []
        now = datetime(2024, 7, 26)
        found = texts.Texts(plan, recipe, data, None, tokenizer, model, Watch(note=notes.append), now)
        (batch,) = found.step(0)
        last = batch.labels[0][batch.labels[0] != -100][-1]
        assert (last == tokenizer.eos_token_id) == append_eos
        told = TextData(data, tokenizer, sequence_length=LENGTH, pack=False, append_eos=append_eos).remarks()
        assert [note for note in notes if "end token" in note] == told and len(told) == (0 if append_eos else 1)


def test_a_run_and_the_preview_say_what_is_cut_in_the_same_words(tmp_path: Path) -> None:
    directory = prepare(tmp_path)
    data = directory / "rows.jsonl"
    rows = [("a", " b" * 200), (" a" * 200, "b"), ("a", " b"), ("a", " b" * 300)]
    data.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in rows))
    model = open_model(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, micro_batches=1, micro_batch_size=1)
    tokenizer = load_tokenizer(model.path)
    notes: list[str] = []
    recipe = Recipe(steps=1, optimizer=AdamW(lr=1e-3))
    texts.Texts(plan, recipe, data, None, tokenizer, model, Watch(note=notes.append), datetime(2024, 7, 26))
    lengths = [len(tokenizer(a + b)["input_ids"]) + 1 for a, b in rows]
    ends = ", ".join(tokenizer.convert_ids_to_tokens(end_tokens(tokenizer)))
    expected = [
        f"2 of 4 sample(s) are cut before an end token ({ends}) is learnt, first {data}:1; a model that "
        "is trained so does not learn to stop behind texts that are as long: take a longer --sequence-length, or split "
        "the samples",
        f"1 sample is left out, since nothing of it is learnt within a row ({lengths[1]} tokens)",
        f"2 samples are longer than a row of {LENGTH} tokens: {lengths[0] + lengths[3] - 2 * LENGTH} of their tokens "
        "are cut off",
    ]
    found = TextData(data, tokenizer, sequence_length=LENGTH)
    shown = describe(look(data, found, tokenizer, 1), colour=False).splitlines()
    for words in expected:
        assert f"{data}: {words}" in notes
        assert sum(line.endswith(words) for line in shown) == 1, words


def test_texts_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    """As when somebody writes to the model's directory while a run reads it: each text has a process of its own."""
    directory = prepare(tmp_path)
    model = open_model(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, micro_batches=1, micro_batch_size=1)
    recipe = Recipe(steps=1, optimizer=AdamW(lr=1e-3))
    data, held_out = directory / "text.txt", directory / "held-out.txt"

    class Meanwhile(Here):
        def read(self, *asked: Any) -> Any:
            answered = super().read(*asked)
            self._tokenizer.add_tokens(["quick"])
            return answered

    tokenizer = Meanwhile(load_tokenizer(model.path))
    with pytest.raises(UsageError, match=r"llama: the tokenizer changed while it was read; start again"):
        texts.Texts(plan, recipe, data, held_out, tokenizer, model, Watch(), datetime(2024, 7, 26))


def test_a_plan_for_whole_rows_takes_no_others(tmp_path: Path) -> None:
    """It has no memory for the masks of rows that samples share, or that are padded."""
    directory = prepare(tmp_path)
    data = directory / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"{number} and so on " * LENGTH}) + "\n" for number in range(3)))
    model = open_model(directory / "llama", torch.float32)
    plan = make_plan(model, sequence_length=LENGTH, micro_batches=1, micro_batch_size=1)
    whole = plan.model_copy(update={"model": plan.model.model_copy(update={"rows": "whole"})})

    def read(**choices: Any) -> texts.Texts:
        recipe = Recipe(steps=1, optimizer=AdamW(lr=1e-3), **choices)
        reader = Here(load_tokenizer(model.path), tokenise)
        return texts.Texts(whole, recipe, data, None, reader, model, Watch(), datetime(2024, 7, 26))

    with pytest.raises(MismatchError, match=r"shared by samples.*--rows whole.*--attend-across"):
        read()
    [batch] = read(attend_across=True).step(0)
    assert batch.attention_mask is None and batch.position_ids is None
    data.write_text(json.dumps({"text": "short"}) + "\n")
    with pytest.raises(MismatchError, match="padded"):
        read(pack=False)
