"""A run that goes on has the tokens that it began with, or is refused with what made others of the same files.

The oracle is the run that nobody stopped.
"""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssdplan.executor import batches as texts
from ssdplan.executor import train
from ssdplan.executor.data import reader, text_data
from ssdplan.executor.data.token_cache import open_cache, write_cache
from ssdplan.executor.data.tokenising import tokenise
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.plans.documents.run import RUN
from ssdplan.plans.errors import MismatchError
from tests.executor.memory.test_migration import SPREAD
from tests.executor.runs import opened, prepare
from tests.executor.snapshots.test_resume import STEPS, resume, run, stopped
from tests.made.models import EOS
from tests.made.plans import make_plan

TIMED = (
    "{{ strftime_now('%j %H:%M:%S.%f') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}" + EOS + "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DATA: dict[str, Any] = {"data": "talks.jsonl", "held_out": "asked.jsonl"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = prepare(tmp_path_factory.mktemp("models"), layers=2)
    (home / "llama" / "chat_template.jinja").write_text(TIMED)
    for name, count in (("talks", 40), ("asked", 3)):
        talks = [
            {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": f"is {i}"}]}
            for i in range(count)
        ]
        (home / f"{name}.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return home


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[datetime]]:
    """A clock that goes on by more than a day whenever a run looks at it, and the instants that it said."""
    said: list[datetime] = []

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            said.append(datetime(2024, 7, 26, 12) + len(said) * timedelta(days=1, hours=1, microseconds=7))
            return said[-1]

    monkeypatch.setattr(train, "datetime", Clock)
    yield said


def plan(directory: Path) -> Any:
    return make_plan(opened(directory / "llama", torch.float32), sequence_length=64, **SPREAD)


def test_a_template_that_writes_the_time_writes_the_same_when_a_run_goes_on(directory, tmp_path, clock):
    expected = run(directory, tmp_path / "whole", plan(directory), **DATA)
    other = run(directory, tmp_path / "later", plan(directory), **DATA)
    assert other.losses != expected.losses, "the time is learnt from"
    clock.clear()
    stopped(directory, tmp_path / "run", plan(directory), 3, **DATA)
    result = resume(directory, tmp_path / "run", **DATA)
    assert result.losses == expected.losses and result.eval_losses == expected.eval_losses
    assert len(clock) == 1
    assert json.loads((tmp_path / "run" / RUN).read_text())["rendered_at"] == clock[0].isoformat()


def test_a_run_that_is_stopped_before_its_first_snapshot_keeps_its_time(directory, tmp_path, clock):
    expected = run(directory, tmp_path / "whole", plan(directory), **DATA)
    clock.clear()
    stopped(directory, tmp_path / "run", plan(directory), 1, **DATA)
    assert resume(directory, tmp_path / "run", **DATA).losses == expected.losses and len(clock) == 1


def test_a_run_of_a_version_that_did_not_keep_the_time_is_refused(directory, tmp_path, clock):
    out = tmp_path / "run"
    stopped(directory, out, plan(directory), 3, **DATA)
    document = json.loads((out / RUN).read_text())
    del document["rendered_at"]
    (out / RUN).write_text(json.dumps(document))
    with pytest.raises(MismatchError) as refused:
        resume(directory, out, **DATA)
    for what in ("training", "held-out"):
        assert f"the tokens of the {what} data changed (the times that the chat template writes " in str(refused.value)
    assert '{"%j %H:%M:%S.%f": "208 12:00:00.000000"} and are {"%j' in str(refused.value)
    assert "rendered_at" not in json.loads((out / RUN).read_text()), "nothing was touched"
    notes: list[str] = []
    assert len(resume(directory, out, anyway=True, notes=notes, **DATA).losses) == STEPS
    assert any("the tokens of the training data changed" in note for note in notes)


def test_other_tokens_of_the_same_files_are_refused(directory, tmp_path, monkeypatch):
    """As another version of a library, or of ours, may make them."""
    out = tmp_path / "run"
    monkeypatch.setattr(reader, "made_by", lambda: "tokenizers 1")
    stopped(directory, out, plan(directory), 3)
    monkeypatch.setattr(reader, "made_by", lambda: "tokenizers 2")
    changed: list[str] = []

    def otherwise(work: Any, tokenizer: Any, file: Path, progress: Any) -> None:
        tokenise(work, tokenizer, file.with_name("before"), progress)
        made = open_cache(file.with_name("before"))
        assert made
        tokens = made.tokens.copy()
        if Path(work.path).name in changed:
            tokens[0] ^= 1
        starts = np.concatenate([[0], made.ends[:-1]]).astype(int)
        write_cache(file, ((tokens[i:j], True) for i, j in zip(starts, made.ends.astype(int), strict=True)))

    monkeypatch.setattr(train, "Apart", lambda model: reader.Here(load_tokenizer(model), otherwise))
    for name, what in (("text.txt", "training"), ("held-out.txt", "held-out")):
        changed[:] = [name]
        with pytest.raises(MismatchError) as refused:
            resume(directory, out)
        assert (
            f"another run than the one that was stopped: the tokens of the {what} data changed (they were made by "
            "tokenizers 1 and now by tokenizers 2); go on" in str(refused.value)
        )
    changed.clear()
    assert len(resume(directory, out).losses) == STEPS, "the same tokens are the same, whoever made them"


def test_a_run_says_what_it_read(directory, tmp_path):
    home = tmp_path / "data"
    home.mkdir()
    rows = [f'{{"text": "the quick brown fox {i}", "id": {i}}}\n' for i in range(20)]
    (home / "a.jsonl").write_text("".join(rows))
    (home / "notes.md").write_text("not read")
    (tmp_path / "held-out.jsonl").write_text(rows[3] + '{"text": "none of these, but as long as they are"}\n')

    def said(held_out: Path | None, **more: Any) -> list[str]:
        notes: list[str] = []
        model = opened(directory / "llama", torch.float32)
        short = make_plan(model, sequence_length=8, micro_batches=2, micro_batch_size=2)
        recipe = Recipe(steps=1, optimizer=AdamW(lr=1e-3), **more)
        watch = Watch(note=notes.append)
        texts.Texts(short, recipe, home, held_out, load_tokenizer(model.path), model, watch, datetime(2024, 1, 1))
        return notes

    first, *others = said(tmp_path / "held-out.jsonl")
    assert first.startswith(f"{home}: 1 file(s) of `text` (a.jsonl), 20 sample(s), ")
    row_count = int(first.split(", ")[-1].split()[0])
    assert first.endswith(f"{row_count} row(s) of 8")
    assert others[:2] == [
        f"{home}: left alone are 1 file(s) of other kinds (notes.md)",
        f"{home}: fields that are not read: `id`",
    ]
    assert others[2].startswith(f"{tmp_path / 'held-out.jsonl'}: 1 file(s) of `text` (held-out.jsonl), 2 sample(s), ")
    assert others[3] == f"{tmp_path / 'held-out.jsonl'}: fields that are not read: `id`"
    assert others[4].startswith(f"{tmp_path / 'held-out.jsonl'}: 1 of its 2 sample(s) are in the training data too")
    assert len(others) == 5
    held = said(None, hold_out=text_data.HoldOut(samples=4))
    assert f"{home}: held out of that are 4 sample(s) besides, " in held[-1] and "16 sample(s), " in held[0]
