"""`benchmarks/learning.py`: it is judged by other works than it learns from, and its accuracy is that of answers."""

import json
import random
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


def lay(work: Path, name: str, author: str) -> None:
    """A work of lines that name their author, among what no verse has."""
    drawn = random.Random(name)
    lines = [f"{author} of {name.partition('.')[0]} sings {drawn.randrange(10**6)} of men" for _ in range(60)]
    lines[6], lines[13], lines[20] = "A SCENE OF FIVE WORDS HERE", "[Enter some of the five lords]", "HAMLET."
    path = work / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))


def test_three_lines_of_verse_have_nothing_else_among_them(learning: Any) -> None:
    text = "one two three four five\nsix seven eight nine ten  60\na b c d e\nHAMLET.\nf g h i j\nk l m n o\np q r s t"
    assert list(learning.verses(text)) == [
        "one two three four five\nsix seven eight nine ten\na b c d e",
        "f g h i j\nk l m n o\np q r s t",
    ]


def test_the_task_is_judged_by_other_works_and_answers_are_counted(learning: Any, tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    model = make_model("llama", assets / "model", vocab_size=300)
    make_tokenizer(model)
    texts = assets / "downloads" / "package" / "miltondata" / "texts"
    lay(texts, "paradise_lost_gut.txt", "Milton")
    lay(texts, "paradise_regained_gut.txt", "Milton")
    for play in ("hamlet", "coriolanus"):
        lay(assets / "train", f"{play}.txt", "Shakespeare")
    learning.make_task(tmp_path, model, 1)
    works = {"train.jsonl": ("paradise_lost_gut", "hamlet"), "held-out.jsonl": ("paradise_regained_gut", "coriolanus")}
    for file, (milton, shakespeare) in works.items():
        rows = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        assert sorted(row["completion"] for row in rows) == [" Milton"] * (len(rows) // 2) + [" Shakespeare"] * (
            len(rows) // 2
        )
        for row in rows:
            work = milton if row["completion"] == " Milton" else shakespeare
            verse, question = row["prompt"].rsplit("\n", 1)
            assert question == "The author is"
            assert all(line.startswith(f"{row['completion'].strip()} of {work} sings") for line in verse.splitlines())
    tokenizer, whole = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).float()
    right = 0
    for row in rows:
        scores = {}
        for author in learning.AUTHORS:
            ids = tokenizer(f"{row['prompt']} {author}", return_tensors="pt").input_ids
            prompt = len(tokenizer(row["prompt"]).input_ids)
            labels = ids.clone()
            labels[:, :prompt] = -100
            with torch.no_grad():
                scores[author] = -float(whole(input_ids=ids, labels=labels).loss) * (ids.shape[1] - prompt)
        right += max(scores, key=scores.__getitem__) == row["completion"].strip()
    assert learning.accuracy(model, tmp_path / "held-out.jsonl") == right / len(rows)
