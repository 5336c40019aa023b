"""What `data preview` counts and shows is what a run would train on."""

import itertools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from ssdplan import cli
from ssdplan.executor.batches import Texts
from ssdplan.executor.data.preview import describe, look
from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.executor.model.model import open_model
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.plans.errors import MismatchError
from tests.extent import short_or_full
from tests.made.models import EOS, make_model, make_tokenizer
from tests.made.plans import make_plan

ROWS = [
    {"prompt": "The quick", "completion": " brown fox"},
    {"prompt": "What is", "completion": " stored \x1b[31mred"},
    {"prompt": "dog " * 80, "completion": "never seen"},
    {"prompt": "a", "completion": " dog" * 80},
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_tokenizer(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def preview(*more: str) -> list[str]:
    base = ["data", "preview", "--model", "model", "--data", "rows.jsonl", "--sequence-length", "64"]
    return [*base, "--token-cache", "cache", *more]


def test_counts_are_those_of_the_samples(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(preview("--json", "--samples", "2")) == 0
    found = json.loads(capsys.readouterr().out)
    tokenizer = load_tokenizer(home / "model")
    whole = [[*tokenizer(row["prompt"] + row["completion"])["input_ids"], 0] for row in ROWS]
    given = [len(tokenizer(row["prompt"])["input_ids"]) for row in ROWS]
    lengths = [len(ids) for ids in whole]
    assert found["samples"] == 4 and found["tokens"] == sum(lengths)
    assert found["learnt_before_cut"] == sum(lengths) - sum(given)
    assert found["learnt_tokens"] == sum(lengths[:2]) + 64 - sum(given[:2]) - given[3]
    assert found["row_tokens"] == lengths[0] + lengths[1] + 64
    assert (found["cut_off_tokens"], found["left_out_tokens"]) == (lengths[3] - 64, lengths[2])
    assert found["left_over_tokens"] == 0
    assert found["lengths"]["shortest"] == min(lengths) and found["lengths"]["longest"] == max(lengths)
    assert found["lengths"]["mean"] == sum(lengths) / 4
    assert (found["cut"], found["left_out"], found["rows"]) == (1, 1, 2)
    assert found["row_tokens_used"] == pytest.approx((lengths[0] + lengths[1] + 64) / 128)
    assert [sample["place"] for sample in found["shown"]] == ["rows.jsonl:1", "rows.jsonl:2"]
    assert found["shown"][0]["parts"] == [
        {"text": "The quick", "learnt": False, "cut": False},
        {"text": f" brown fox{EOS}", "learnt": True, "cut": False},
    ]
    assert found["shown"][0]["tokens"] == lengths[0]
    assert found["shown"][0]["learnt_tokens"] == lengths[0] - given[0]


def test_an_id_that_the_model_does_not_have_is_refused_as_a_run_refuses_it(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(home / "model")
    AutoConfig.for_model("llama", vocab_size=len(tokenizer)).save_pretrained(home / "model")
    tokenizer.add_tokens(["<picture>"])
    tokenizer.save_pretrained(home / "model")
    assert cli.main(preview()) == 0
    (home / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({**ROWS[1], "completion": "<picture>"}))
    assert cli.main(preview()) == 8
    assert f"rows.jsonl:2: becomes the id {len(tokenizer) - 1} ('<picture>')" in capsys.readouterr().err


def test_notes_of_what_was_read_are_shown(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "rows.jsonl").write_text(json.dumps({**ROWS[0], "source": "x"}) + "\n")
    assert cli.main(preview("--json")) == 0
    note = "rows.jsonl: fields that are not read: `source`"
    assert json.loads(capsys.readouterr().out)["notes"] == [note]
    assert cli.main(preview()) == 0
    assert capsys.readouterr().out.endswith(f"note            {note}\n")


def test_what_is_learnt_is_marked_with_and_without_colour(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(preview()) == 0  # not a terminal
    plain = capsys.readouterr().out
    assert f"The quick⟦ brown fox{EOS}⟧\n" in plain and "\x1b" not in plain
    assert "\\x1b[31mred" in plain, "what the data say to a terminal is shown, not obeyed"
    assert "Sample 1, rows.jsonl:1: " in plain and "1 sample is longer than a row of 64 tokens" in plain
    assert cli.main(preview("--color")) == 0
    coloured = capsys.readouterr().out
    assert f"\x1b[2mThe quick\x1b[0m\x1b[32m brown fox{EOS}\x1b[0m\n" in coloured and "⟦" not in coloured


def test_what_may_be_meant_otherwise_is_noted(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "What is", "completion": f" stored{EOS}"}, {**ROWS[0], "system": "Be brief.\x1b[31m"}]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(preview("--json")) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert notes == [
        f"rows.jsonl: 1 of 2 sample(s) bring {EOS} of their own where the tokenizer puts it too, first rows.jsonl:1; "
        "it is there once",
        "rows.jsonl: the field `system` of 1 of 2 sample(s) is not read, first rows.jsonl:2; put what it says into the "
        "fields that are, or take it away",
    ]
    for _ in range(2):  # from the cache too
        assert cli.main(preview()) == 0
        assert [line.split(None, 1)[1] for line in capsys.readouterr().out.splitlines() if line[:5] == "note "] == notes


def test_an_end_with_white_space_behind_it_is_shown_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "What is", "completion": f" stored{EOS}{EOS}\n"}
    (home / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert cli.main(preview()) == 0
    said = capsys.readouterr().out
    assert f"What is⟦ stored{EOS}⟧\n" in said
    first = "first rows.jsonl:1; it is"
    assert [line.split(None, 1)[1] for line in said.splitlines() if line[:5] == "note "] == [
        "rows.jsonl: 1 of 1 sample(s) have white space outside special tokens of their own, before the first token or "
        f"behind the end, {first} taken away",
        f"rows.jsonl: 1 of 1 sample(s) bring {EOS} of their own where the tokenizer puts it too, {first} there once",
    ]


def test_an_end_that_is_not_learnt_is_noted_and_can_be_appended(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role + ' ' + m.content }}{% endfor %}"
    )
    talk = [{"role": "user", "content": "dog"}, {"role": "assistant", "content": "fox"}]
    (home / "rows.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    assert cli.main(preview()) == 0
    said = capsys.readouterr().out
    assert (
        f"note            rows.jsonl: 1 of 1 sample(s) learn no end token ({EOS}), first rows.jsonl:1; a model" in said
    )
    assert "user dog⟦assistant fox⟧\n" in said
    assert cli.main(preview("--append-eos")) == 0
    said = capsys.readouterr().out
    assert f"user dog⟦assistant fox{EOS}⟧\n" in said and "note " not in said


def test_a_long_sample_is_shown_in_part(home: Path) -> None:
    tokenizer = load_tokenizer(home / "model")
    (home / "a.txt").write_text("dog " * 3000)
    data = TextData(home / "a.txt", tokenizer, sequence_length=32)
    found = look(home / "a.txt", data, tokenizer, 5)
    (shown,) = found.shown
    assert (shown.tokens, shown.shown_tokens) == (data.tokens, 400)
    assert f"... and {data.tokens - 400} tokens more" in describe(found, colour=False)
    assert found.learnt_before_cut == data.tokens - 1  # its first token is predicted from nothing
    assert found.learnt_tokens == found.rows * 31  # and so is the first of each row
    assert found.left_over_tokens == data.tokens % 32 > 0
    assert "are not trained on: they lie behind the last full row" in describe(found, colour=False)
    assert (found.rows, found.cut, found.row_tokens_used) == (data.tokens // 32, 0, 1.0)


@pytest.mark.parametrize(("pack", "attend_across"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("format", ["text", "completion"])
@pytest.mark.parametrize("length", [5, 16, 33])
def test_learnt_are_the_labels_of_all_rows_that_count(
    home: Path, format: str, length: int, pack: bool, attend_across: bool
) -> None:
    words = ["fox", "", "dog " * 7, "The quick brown fox " * 5, "x", "jumps over " * 9]
    rows = [
        {"text": a + b} if format == "text" else {"prompt": a, "completion": b + " red"} for a in words for b in words
    ]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(home / "model")
    data = TextData(
        home / "rows.jsonl", tokenizer, sequence_length=length, pack=pack, attend_across=attend_across, format=format
    )
    batches = [batch for (batch,) in data.eval_batches(1)]
    # the model's loss compares each position's logits with the next label, so a row's first label has no part in it
    counted = sum(int((batch.labels[:, 1:] != -100).sum()) for batch in batches)
    masks = [np.ones(batch.labels.shape) if batch.attention_mask is None else batch.attention_mask for batch in batches]
    present = sum(int(mask.sum()) for mask in masks)
    in_rows, learnt = data.in_rows()
    assert learnt.sum() == counted
    if not (pack and format == "completion"):  # there, rows that are shared have no mask for their padding
        assert in_rows.sum() == present
    found = look(home / "rows.jsonl", data, tokenizer, len(rows))
    assert found.learnt_tokens == counted == sum(sample.learnt_tokens for sample in found.shown)
    rest = found.cut_off_tokens + found.left_out_tokens + found.left_over_tokens
    assert found.tokens == found.row_tokens + rest and found.row_tokens == in_rows.sum()


def test_a_cut_sample_is_shown_as_it_is_trained_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(preview("--samples", "4", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    tokenizer = load_tokenizer(home / "model")
    given, ids = (tokenizer(text)["input_ids"] for text in ("a", "a" + " dog" * 80))
    assert found["shown"][3]["parts"] == [
        {"text": "a", "learnt": False, "cut": False},
        {"text": tokenizer.decode(ids[len(given) : 64]), "learnt": True, "cut": False},
        {"text": tokenizer.decode([*ids[64:], 0]), "learnt": False, "cut": True},
    ]
    assert found["shown"][3]["learnt_tokens"] == 64 - len(given)
    assert [part["learnt"] for part in found["shown"][2]["parts"]] == [False] and not found["shown"][2]["row_tokens"]
    assert cli.main(preview("--samples", "4")) == 0
    said = capsys.readouterr().out
    lost, left = len(ids) + 1 - 64, found["shown"][2]["tokens"]
    assert f"⟧⟨cut⟩{tokenizer.decode(ids[64:])}{EOS}\n{lost} of its {64 + lost} tokens are cut off" in said
    assert f"It is left out, since nothing of it is learnt within a row: {left} of its {left} tokens" in said
    assert f"\ncut             1 sample is longer than a row of 64 tokens: {lost} of its tokens are cut off\n" in said
    assert f"1 sample is left out, since nothing of it is learnt within a row ({left} tokens)\n" in said
    assert f"note            rows.jsonl: 1 of 4 sample(s) are cut before an end token ({EOS}) is learnt, first " in said
    assert "first rows.jsonl:4; " in said and "a longer --sequence-length, or split the samples" in said
    assert cli.main(preview("--sequence-length", "512")) == 0
    assert "end token" not in capsys.readouterr().out


@pytest.mark.parametrize(("most", "length"), [(48, 48), (4096, 1024), (None, 1024)])
def test_rows_are_no_longer_than_the_model_has_positions_unless_it_is_said(
    home: Path, capsys: pytest.CaptureFixture[str], most: int | None, length: int
) -> None:
    if most:
        AutoConfig.for_model("gpt2", vocab_size=512, n_positions=most).save_pretrained(home / "model")
    less = [each for each in preview() if each not in ("--sequence-length", "64")]
    assert cli.main([*less, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequence_length"] == length
    assert cli.main(less) == 0
    why = "the model's max_position_embeddings, " if length == 48 else ""
    said = capsys.readouterr().out
    assert f"\nrow length      {length} tokens, {why}since --sequence-length is not given\n" in said
    assert cli.main(preview()) == 0
    assert "\nrow length      64 tokens, as given\n" in capsys.readouterr().out


def test_data_that_fill_no_row_are_shown_with_their_notes_and_then_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "set").mkdir()
    (home / "set" / "a.txt").write_text("The quick brown fox")
    (home / "set" / "test.txt").write_text("jumps")
    tokenizer = load_tokenizer(home / "model")
    first, second = (len(tokenizer(text)["input_ids"]) + 1 for text in ("The quick brown fox", "jumps"))
    total = first + second
    why = f"set: {total} tokens in all, fewer than one row of 64; add text, plan for a --sequence-length of {total} or "
    assert cli.main(preview("--data", "set")) == 2
    said = capsys.readouterr()
    assert why in said.err
    assert f"Sample 1, set/a.txt:1: {first} tokens, 0 of them learnt\n⟨cut⟩The quick brown fox{EOS}\n" in said.out
    assert f"{second} of its {second} tokens are not trained on: the data fill no row\n" in said.out
    assert "\nrows            0, 0.0% full (samples share rows)\n" in said.out
    assert f"\nleft over       {total} token(s) in all, fewer than a row of 64\n" in said.out
    note = "set: set/test.txt is called test, and is read like the files beside it"
    assert said.out.endswith(f"\nnote            {note}\n")
    assert cli.main(preview("--data", "set", "--json")) == 2
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert why in said.err and found["refusal"].startswith(why) and found["notes"] == [note] and found["rows"] == 0
    assert len(found["shown"]) == 2 and (found["learnt_tokens"], found["left_over_tokens"]) == (0, total)
    assert cli.main(preview("--data", "set", "--no-pack", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["refusal"] == ""


@pytest.mark.parametrize("pack", ["--pack", "--no-pack"])
def test_data_of_which_nothing_is_learnt_within_a_row_are_shown_and_then_refused(
    home: Path, capsys: pytest.CaptureFixture[str], pack: str
) -> None:
    (home / "rows.jsonl").write_text(json.dumps(ROWS[2]) + "\n")
    assert cli.main(preview(pack)) == 2
    said = capsys.readouterr()
    assert "rows.jsonl: no sample has a token to learn within 64 tokens; plan for a longer" in said.err
    assert "It is left out, since nothing of it is learnt within a row" in said.out
    assert "\nrows            0, 0.0% full" in said.out and "\nleft out        1 sample is left out" in said.out


SHORT, LONG = [1.0, 1.1, 1.3, 1.6], [4.0, 6.0, 9.0, 12.0]


@pytest.mark.parametrize(
    ("length", "long", "written"),
    short_or_full(
        [
            (40, LONG, "rope_parameters"),
            (41, LONG, "rope_scaling"),
            (41, SHORT, "rope_scaling"),
            (128, LONG, "rope_parameters"),
        ],
        list(itertools.product([40, 41, 128], [LONG, SHORT], ["rope_parameters", "rope_scaling"])),
    ),
)
def test_rows_that_a_run_refuses_for_their_length_are_noted(
    home: Path, capsys: pytest.CaptureFixture[str], length: int, long: list[float], written: str
) -> None:
    rope = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": long, "rope_theta": 1e4, "factor": 1.0}
    make_model(
        "phi3", home / "model", vocab=512, rope_parameters=rope, max_position_embeddings=256, sliding_window=None,
        original_max_position_embeddings=40, partial_rotary_factor=1.0,
    )  # fmt: skip
    if written == "rope_scaling":  # as the models of the hub have it
        file = home / "model" / "config.json"
        config = json.loads(file.read_text())
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = {"type": "longrope", "short_factor": SHORT, "long_factor": long}
        file.write_text(json.dumps(config))
    (home / "one.txt").write_text("The quick brown fox. " * 40)
    model, tokenizer = open_model(home / "model", torch.float32), load_tokenizer(home / "model")
    plan = make_plan(model, sequence_length=length, micro_batches=1, micro_batch_size=1)
    for data, pack in (("rows.jsonl", True), ("rows.jsonl", False), ("one.txt", True), ("one.txt", False)):
        recipe = Recipe(steps=1, optimizer=AdamW(lr=1e-3), pack=pack, token_cache=home / "tokens")
        refusal = ""
        try:
            Texts(plan, recipe, Path(data), None, tokenizer, model, Watch(), datetime(2024, 7, 26))
        except MismatchError as error:
            refusal = str(error)
        assert bool(refusal) == (length > 40 and long == LONG and not (data == "one.txt" and pack))
        asked = preview("--data", data, "--sequence-length", str(length), "--pack" if pack else "--no-pack", "--json")
        assert cli.main(asked) == 0
        notes = [note for note in json.loads(capsys.readouterr().out)["notes"] if "a run refuses" in note]
        assert notes == ([f"a run refuses this: {refusal}"] if refusal else [])
        if refusal:
            assert refusal.startswith(
                "model: Phi3ForCausalLM computes rows of 41 tokens and more otherwise than shorter"
            )
            assert "profile with --sequence-length 40, or train on text with --attend-across" in refusal


@pytest.mark.parametrize(
    ("family", "odd", "data", "pack", "why"),
    [
        (
            "bloom",
            {},
            "rows.jsonl",
            True,
            "cannot keep texts apart that share a row of 48 tokens; train with",
        ),
        ("bloom", {}, "rows.jsonl", False, ""),
        ("bloom", {}, "several", True, "cannot keep texts apart that share a row of 48 tokens; train with"),
        ("bloom", {}, "one.txt", True, ""),
        ("llama", {}, "rows.jsonl", True, ""),
        ("gpt2", {"max_position_embeddings": 32, "n_positions": 32}, "one.txt", True, "rows of 32 tokens, not of 48"),
    ],
)
def test_a_model_that_a_run_refuses_for_these_rows_is_noted(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    odd: dict[str, Any],
    data: str,
    pack: bool,
    why: str,
) -> None:
    make_model(family, home / "model", vocab=512, **odd)
    (home / "one.txt").write_text("The quick brown fox. " * 40)
    (home / "several").mkdir()
    for name in ("a.txt", "b.txt"):
        (home / "several" / name).write_text("The quick brown fox. " * 40)
    asked = preview("--data", data, "--sequence-length", "48", "--pack" if pack else "--no-pack")
    assert cli.main([*asked, "--json"]) == 0
    notes = [note for note in json.loads(capsys.readouterr().out)["notes"] if "a run refuses this" in note]
    assert cli.main(asked) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "a run refuses this" in line]
    assert lines == [f"note            {note}" for note in notes]
    assert len(notes) == bool(why) and all(why in note for note in notes)


def test_a_model_that_cannot_be_streamed_is_noted(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model("llama", home / "model", vocab=512)
    file = home / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(MismatchError) as error:
        open_model(Path("model"), torch.float32)
    assert cli.main(preview("--json")) == 0
    assert json.loads(capsys.readouterr().out)["notes"][-1] == f"a run refuses this: {error.value}"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--data", "absent.jsonl"], "absent.jsonl: no such file"),
        (["--model", "."], "no tokenizer here"),
        (["--data-format", "messages"], "no field `messages`"),
        (["--sequence-length", "1"], "it must be 2 or more"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str], more: list[str], why: str
) -> None:
    assert cli.main(preview(*more)) == 2
    said: Any = capsys.readouterr()
    assert why in said.err and said.err.count("\n") == 1 and not said.out
