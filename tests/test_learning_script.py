"""`benchmarks/learning.py`: it is judged by other plays than it learns from, and its accuracy is that of answers."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.made.models import make_model, make_tokenizer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module, of a small task."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("commands", "learning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import learning

    monkeypatch.setattr(learning, "ROWS", 12)
    monkeypatch.setattr(learning, "HELD_OUT_ROWS", 8)
    monkeypatch.setattr(learning, "LENGTH", 400)
    yield learning
    for name in ("commands", "learning"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def lay(path: Path) -> None:
    """A play of questions and statements that name it, among what no sentence has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    play = path.stem
    said = (
        f"What is it of {play} that moves {number} men?\nThere is of {play} a tale\nof as many as {number} men."
        for number in range(40)
    )
    path.write_text("PLAY.\n" + "\n\nHAMLET.\n".join(said))


def test_a_sentence_is_of_speech_alone_and_loses_its_mark(learning: Any) -> None:
    text = (
        "ACT I. SCENE OF FIVE WORDS\nIt begins here and now. \nHAMLET.\nWhat say you to that, my good\n"
        "lord of five words?\n[Enter some of the five lords]\nHe comes not here to speak of it. So short a one. Go\n"
        "from me now, and let it be as it was! So says the man who comes [aside] here.\nThat is the end of all of it."
    )
    assert learning.sentences(text) == [
        ("What say you to that, my good lord of five words", "?"),
        ("He comes not here to speak of it", "."),
    ]


def test_the_task_is_judged_by_other_plays_and_answers_are_counted(learning: Any, tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    model = make_model("llama", assets / "model", vocab_size=300)
    make_tokenizer(model)
    for play in ("hamlet", "coriolanus"):
        lay(assets / "train" / f"{play}.txt")
    learning.make_task(tmp_path, model, 1)
    for file, play in {"train.jsonl": "hamlet", "held-out.jsonl": "coriolanus"}.items():
        rows = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        answers = sorted(row["completion"] for row in rows)
        assert answers == [" asked."] * (len(rows) // 2) + [" said."] * (len(rows) // 2)
        for row in rows:
            begins = "What is it" if row["completion"] == " asked." else "There is"
            assert row["prompt"].startswith(f'"{begins} of {play} ') and row["prompt"].endswith(' men", he')
    tokenizer, whole = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).float()
    right = 0
    for row in rows:
        scores = {}
        for answer in learning.ANSWERS.values():
            ids = tokenizer(row["prompt"] + answer, return_tensors="pt").input_ids
            prompt = len(tokenizer(row["prompt"]).input_ids)
            labels = ids.clone()
            labels[:, :prompt] = -100
            with torch.no_grad():
                scores[answer] = -float(whole(input_ids=ids, labels=labels).loss) * (ids.shape[1] - prompt)
        right += max(scores, key=scores.__getitem__) == row["completion"]
    assert learning.accuracy(model, tmp_path / "held-out.jsonl") == right / len(rows)
