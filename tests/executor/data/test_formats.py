"""Each format is read as it is meant, what is learnt of it is exactly that, and what is wrong with a row is said."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet
from tokenizers import AddedToken

from ssdplan.executor.data.reading.files import find_files
from ssdplan.executor.data.samples.formats import FORMATS
from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.plans.errors import SsdplanError, UsageError
from tests.extent import examples
from tests.made.models import EOS, make_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}(...)"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('a system message comes first') }}{% endif %}" + CHATML
)

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is stored?"},
    {"role": "assistant", "content": "What is read again."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "It is the same.\n"},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(model_dir: Path) -> Any:
    found = load_tokenizer(model_dir)
    found.add_tokens([AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>")])
    return found


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, tokenizer: Any, **options: Any) -> TextData:
    return TextData(path, tokenizer, **{"sequence_length": 512, "pack": False, **options})


def learnt(data: TextData, tokenizer: Any, sample: int = 0) -> tuple[str, list[str]]:
    """A sample's text, and the parts of it that are learnt."""
    ids, mask = data.sample(sample)
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1), len(ids)]
    parts = [tokenizer.decode(ids[a:b]) for a, b in itertools.pairwise(borders) if mask[a]]
    return tokenizer.decode(ids), parts


# What is learnt


def test_of_a_prompt_and_its_completion_the_completion_is_learnt(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {"prompt": "The quick", "completion": " brown fox", "id": 7},
        {"prompt": "", "completion": "dog"},
        {"prompt": "dog", "completion": ""},
    ]
    data = load(write(tmp_path / "a.jsonl", rows), tokenizer)
    assert data.format == "completion" and data.documents == 3
    end = tokenizer.eos_token
    assert [learnt(data, tokenizer, i) for i in range(3)] == [
        (f"The quick brown fox{end}", [f" brown fox{end}"]),
        (f"dog{end}", [f"dog{end}"]),
        (f"dog{end}", [end]),
    ]


def test_a_prompt_has_the_tokens_that_it_has_alone(tmp_path: Path, tokenizer: Any) -> None:
    """A border within a word is no border of the whole text's tokens; the model is asked with the prompt's alone."""
    prompt, completion = "What i", "s stored"
    joint, alone = tokenizer(prompt + completion)["input_ids"], tokenizer(prompt)["input_ids"]
    assert joint[: len(alone)] != alone, "the case that this test is about"
    data = load(write(tmp_path / "a.jsonl", [{"prompt": prompt, "completion": completion}]), tokenizer)
    ids, mask = data.sample(0)
    assert ids[~mask].tolist() == alone
    assert ids[mask].tolist() == [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id]


def test_a_tokenizer_that_adds_a_space_cannot_take_a_word_apart(tmp_path: Path, tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    path = write(tmp_path / "a.jsonl", [{"prompt": "What is", "completion": " stored"}])
    assert learnt(load(path, tokenizer), tokenizer)[1] == [f" stored{tokenizer.eos_token}"]
    path = write(tmp_path / "a.jsonl", [{"prompt": "What i", "completion": "s stored"}])
    with pytest.raises(UsageError, match=r"a\.jsonl:1: prompt and completion share a token.*'What is stored'"):
        load(path, tokenizer)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_of_a_conversation_the_assistants_messages_are_learnt(tmp_path: Path, tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    data = load(write(tmp_path / "a.jsonl", [{"messages": TALK}, {"messages": TALK[1:3]}]), tokenizer)
    assert data.format == "messages"
    whole, parts = learnt(data, tokenizer)
    assert whole == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK)
    assert parts == ["What is read again.<|im_end|>", "It is the same.\n<|im_end|>"]
    ids, mask = data.sample(1)
    assert ids.tolist() == tokenizer(tokenizer.apply_chat_template(TALK[1:3], tokenize=False))["input_ids"]
    asked = tokenizer("<|im_start|>user\nWhat is stored?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert ids[: len(asked)].tolist() == asked and not mask[: len(asked)].any() and mask[len(asked)]


TURN = (
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}"
)


@pytest.mark.parametrize(
    "template",
    [
        f"{{% macro turn(m) %}}{TURN}{{% endmacro %}}{{% for m in messages %}}{{{{ turn(m) }}}}{{% endfor %}}",
        f"{{% for m in messages %}}{{% set t %}}{TURN}{{% endset %}}{{{{ t }}}}{{% endfor %}}",
        "{% macro body(c) %}{% generation %}{{ c }}<|im_end|>{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ body(m.content) }}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}",
        "{% for m in messages %}\n<|im_start|>{{ m.role }}\n\n  {%- if m.role == 'assistant' %}\n    {{- '\\n' }}"
        "\n    {%- generation -%}\n  {{ m.content }}<|im_end|>\n   {%- endgeneration -%}\n {% else %}\n{{- '\\n' }}"
        "{{ m.content }}<|im_end|>{% endif %}\n{{ '\\n' }}\n{%- endfor %}",
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}\n    {% if m.role == 'assistant' %}\n"
        "    {% generation %}\n{{ m.content }}<|im_end|>{%+ endgeneration +%}{% else %}{{ m.content }}<|im_end|>"
        "{% endif %}{{- '\\n' }}{% endfor %}",
    ],
    ids=["macro", "set", "body", "trimmed", "lines"],
)
def test_markers_hold_wherever_in_the_template_they_stand(tmp_path: Path, tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    whole, parts = learnt(load(write(tmp_path / "a.jsonl", [{"messages": TALK}]), tokenizer), tokenizer)
    assert whole.strip() == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK).strip()
    assert parts == ["What is read again.<|im_end|>", "It is the same.\n<|im_end|>"]


@pytest.mark.parametrize(
    ("body", "content"),
    [
        ("{% generation %}{{ m.content }}{% endgeneration %}", " space"),  # trimmed, where the marks keep it
        ("{% generation %}{{ m.content }}{% endgeneration %}{{ m.content.split('a')[0] }}", "\ufdd0"),
    ],
)
def test_markers_that_the_template_works_on_are_refused(
    tmp_path: Path, tokenizer: Any, body: str, content: str
) -> None:
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{% set t %}}{body}{{% endset %}}{{{{ t|trim }}}}{{% endfor %}}"
    )
    rows = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]}]
    with pytest.raises(UsageError, match=r"a\.jsonl:1: .*generation"):
        load(write(tmp_path / "a.jsonl", rows), tokenizer)


@pytest.mark.parametrize(
    "ahead",
    [
        "{# {% generation %} is not used {% endgeneration %} #}",
        "{% raw %}{% endraw %}{#- {% generation %} -#}\r\n",
        "{% if false %}{{ '{% generation %}' }}{% raw %}{% generation %}{% endgeneration %}{% endraw %}{% endif %}",
    ],
)
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_marks_in_comments_raw_blocks_and_strings_are_none(
    tmp_path: Path, tokenizer: Any, ahead: str, template: str
) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": TALK}])
    tokenizer.chat_template = ahead + template
    found = learnt(load(path, tokenizer), tokenizer)
    assert found[0] == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert found[1] == ["What is read again.<|im_end|>", "It is the same.\n<|im_end|>"]


@pytest.mark.parametrize("role", ["model", "gpt", "Assistant", "bot", "human", "ipython"])
def test_messages_of_a_role_that_is_not_learnt_are_told(tmp_path: Path, tokenizer: Any, role: str) -> None:
    other = [*TALK, {"role": role, "content": "Yes, it is."}]
    path = write(tmp_path / "a.jsonl", [{"messages": TALK}, {"messages": other}])
    end = tokenizer.eos_token
    for template in (CHATML, MARKED):
        tokenizer.chat_template = template.replace("<|im_end|>", end)
        [note] = load(path, tokenizer).notes()
        assert note.startswith(f"{path}: 1 of 2 sample(s) have messages of a role that is not `assistant`"), note
        assert f"first message 6 (`{role}`) of {path}:2;" in note
    tokenizer.chat_template = MARKED.replace("<|im_end|>", end).replace("== 'assistant'", "not in ['user', 'system']")
    assert not load(path, tokenizer).notes()
    roles = [{"role": role, "content": "a"} for role in ("system", "user", "tool", "function", "developer")]
    tokenizer.chat_template = CHATML.replace("<|im_end|>", end)
    assert not load(write(path, [{"messages": [*roles, TALK[2]]}]), tokenizer).notes()


def test_both_ways_to_tell_what_is_learnt_say_the_same(tmp_path: Path, tokenizer: Any) -> None:
    found = []
    for template in (CHATML, MARKED):
        tokenizer.chat_template = template
        found.append(load(write(tmp_path / "a.jsonl", [{"messages": TALK}]), tokenizer).sample(0))
    assert all((one == other).all() for one, other in zip(*found, strict=True))


def test_a_template_without_special_tokens_is_learnt_to_the_end_of_the_message(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    data = load(write(tmp_path / "a.jsonl", [{"messages": TALK[1:3]}]), tokenizer)
    assert learnt(data, tokenizer)[1] == ["assistant: What is read again.\n"]


def test_an_alpaca_row_is_rendered_by_the_template_or_under_headings(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {"instruction": "Say it", "input": "fox", "output": "dog"},
        {"instruction": "Say it", "input": "", "output": "dog"},
        {"instruction": "Say it", "input": None, "output": "dog"},
        {"instruction": "Say it", "output": "dog"},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    data, end = load(path, tokenizer), tokenizer.eos_token
    assert not data.as_chat
    short = f"### Instruction:\nSay it\n\n### Response:\ndog{end}"
    with_input = f"### Instruction:\nSay it\n\n### Input:\nfox\n\n### Response:\ndog{end}"
    assert [learnt(data, tokenizer, i) for i in range(4)] == [
        (with_input, [f"dog{end}"]),
        *[(short, [f"dog{end}"])] * 3,
    ]
    tokenizer.chat_template = CHATML
    data = load(path, tokenizer)
    assert data.as_chat and learnt(data, tokenizer) == (
        "<|im_start|>user\nSay it\n\nfox<|im_end|>\n<|im_start|>assistant\ndog<|im_end|>\n",
        ["dog<|im_end|>"],
    )


def test_what_is_not_learnt_counts_in_no_label(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "The quick", "completion": " brown fox"}, {"prompt": "a", "completion": " dog"}]
    data = load(write(tmp_path / "a.jsonl", rows), tokenizer)
    ((batch,),) = data.eval_batches(2)
    for i in range(2):
        ids, mask = data.sample(i)
        expected = np.full(batch.labels.shape[1], -100)
        expected[: len(ids)][mask] = ids[mask]
        assert batch.labels[i].tolist() == expected.tolist()


def test_samples_of_which_nothing_is_learnt_within_a_row_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = [{"prompt": "dog " * 50, "completion": "fox"}, {"prompt": "dog", "completion": " fox" * 50}]
    path = write(tmp_path / "a.jsonl", rows)
    for pack in (True, False):
        data = load(path, tokenizer, sequence_length=16, pack=pack)
        assert (data.left_out, data.cut, data.samples) == (1, 1, 1)
        lost = data.lengths()[1] - 16
        assert [remark.split(": ", 1)[1] for remark in data.remarks()] == [
            f"1 of 2 sample(s) are cut before an end token ({EOS}) is learnt, first {path}:2; a model that is trained "
            "so does not learn to stop behind texts that are as long: take a longer --sequence-length, or split the "
            "samples",
            f"1 sample is left out, since nothing of it is learnt within a row ({data.lengths()[0]} tokens)",
            f"1 sample is longer than a row of 16 tokens: {lost} of its tokens are cut off",
        ]
        with pytest.raises(UsageError, match="no sample has a token to learn within 16 tokens; plan for a longer"):
            load(write(tmp_path / "b.jsonl", rows[:1]), tokenizer, sequence_length=16, pack=pack)


# What cannot be rendered

NO_ANSWER = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("template", "rows", "why"),
    [
        (None, [{"messages": TALK}], r"a\.jsonl:1: messages need a chat template, and .* has none"),
        (STRICT, [{"messages": TALK}, {"messages": TALK[1:]}], r"a\.jsonl:2: .*refuses.*a system message comes first"),
        (FORGETFUL, [{"messages": TALK[1:3]}, {"messages": TALK}], r"a\.jsonl:2: .*writes message 3 otherwise"),
        (CHATML, [{"messages": TALK[2:]}], r"a\.jsonl:1: the assistant speaks first"),
        (CHATML, [{"messages": NO_ANSWER}], r"a\.jsonl:1: no message has the role `assistant`"),
        (CHATML, [{"messages": []}], r"a\.jsonl:1: no message has the role `assistant`"),
        (CHATML, [{"messages": "hello"}], r"a\.jsonl:1: the field `messages` is a string; it must be a list"),
        (CHATML, [{"messages": None}], r"a\.jsonl:1: the field `messages` is null"),
        (CHATML, [{"messages": ["hello"]}], r"a\.jsonl:1: message 1 is a string; it must be an object"),
        (CHATML, [{"messages": [{"role": "user"}]}], r"message 1 has no field `content` \(its fields: `role`\)"),
        (
            CHATML,
            [{"messages": [{"role": 3, "content": "?"}]}],
            r"`role` of message 1 is a number; it must be a string",
        ),
        (CHATML, [{"messages": [{"role": "user", "content": [{"type": "text"}]}]}], "`content` of message 1 is a list"),
        (CHATML, [{"messages": [{**NO_ANSWER[0], "tool_calls": [1]}]}], "message 1 has a field `tool_calls`"),
        (CHATML, [{"messages": TALK, "tools": ["x"]}], "the row has `tools`, which are not rendered"),
        (None, [{"prompt": "a", "completion": "b"}, {"prompt": "a"}], r"a\.jsonl:2: the row has no field `completion`"),
        (
            None,
            [{"prompt": ["a"], "completion": "b"}],
            r"a\.jsonl:1: the field `prompt` is a list; it must be a string",
        ),
        (None, [{"prompt": "a", "completion": {}}], "the field `completion` is an object"),
        (None, [{"prompt": "\ud83d", "completion": ""}], "the field `prompt` has half of a surrogate pair"),
        (None, [{"instruction": "a", "output": 3}], "the field `output` is a number"),
        (None, [{"instruction": "a", "output": "b", "input": ["c"]}], "the field `input` is a list"),
        (None, [{"instruction": "a"}], r"no field `text` .*`instruction` and `output`"),
        (None, [{"text": "a", "prompt": "b", "completion": "c"}], "would do as `text` or `completion`; say which"),
        (None, [{"text": "a"}, {"prompt": "b", "completion": "c"}], r"a\.jsonl:2: the row has no field `text`"),
    ],
)
def test_a_row_that_cannot_be_rendered_is_named_with_the_reason(
    tmp_path: Path, tokenizer: Any, template: str | None, rows: list[Any], why: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=why) as refused:
        load(write(tmp_path / "a.jsonl", rows), tokenizer, cache=tmp_path / "cache")
    assert str(refused.value).startswith(f"{tmp_path / 'a.jsonl'}:") and "\n" not in str(refused.value)
    assert not list(tmp_path.glob("cache/*"))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ({"rag": CHATML, "tool_use": CHATML}, r"several chat templates \(rag, tool_use\) and none is called default"),
        (5, "the chat template is a number, not text"),
    ],
)
def test_a_tokenizer_with_no_one_chat_template_is_refused(
    tmp_path: Path, tokenizer: Any, template: Any, why: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=why):
        load(write(tmp_path / "a.jsonl", [{"messages": TALK}]), tokenizer)


def test_a_token_that_reaches_out_of_the_assistants_message_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = [("user", "dog"), ("assistant", " What i"), ("user", "s stored")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in talk]}]
    with pytest.raises(UsageError, match=r"a\.jsonl:1: a token reaches across the end.*'dog What is stored'"):
        load(write(tmp_path / "a.jsonl", rows), tokenizer)


def test_a_field_of_a_message_that_says_nothing_is_as_if_it_were_not_there(tmp_path: Path, tokenizer: Any) -> None:
    """As transformers drops null; its templates do with an empty list what they do without the field."""
    tokenizer.chat_template = "{% for m in messages %}{% if m.tool_calls %}tools{% endif %}{{ m.content }}{% endfor %}"
    nothing: list[Any] = [None, [], {}, "", {"name": None, "arguments": {}}]
    talks = [[*TALK[:-1], {**TALK[-1], "tool_calls": value}] for value in nothing]
    data = load(write(tmp_path / "a.jsonl", [{"messages": talk, "tools": []} for talk in talks]), tokenizer)
    plain = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert [tokenizer.decode(data.sample(i)[0]) for i in range(len(talks))] == [plain] * len(talks)
    assert tokenizer.apply_chat_template(talks[1], tokenize=False) == plain
    for value in (0, [None], {"name": "f"}):
        rows = [{"messages": [{**TALK[0], "tool_calls": value}, *TALK[1:]]}]
        with pytest.raises(UsageError, match=r"b\.jsonl:1: message 1 has a field `tool_calls`"):
            load(write(tmp_path / "b.jsonl", rows), tokenizer)


def test_fields_that_are_not_read_are_told(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path / "a.jsonl", [{"instruction": "a", "output": "b", "score": "c", "input": ""}])
    parquet_file(tmp_path / "b.parquet", pyarrow.table({"instruction": ["a"], "output": ["b"], "id": ["c"]}))
    assert load(tmp_path, tokenizer).notes() == [f"{tmp_path}: fields that are not read: `id`, `score`"]


def test_fields_that_only_later_rows_have_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    row, more = {"prompt": "a", "completion": "b", "id": 1}, {"instruction": "Be brief.", "tools": [1], "label": None}
    path = write(tmp_path / "b.jsonl", [row, {**row, "input": ""}, {**row, **more}, {**row, "tools": ["x"]}])
    write(tmp_path / "a.jsonl", [row])
    first, *counted = load(tmp_path, tokenizer).notes()
    assert first == f"{tmp_path}: fields that are not read: `id`"
    assert [note.split("; ")[0] for note in counted] == [
        f"{tmp_path}: the field `instruction` of 1 of 5 sample(s) is not read, first {path}:3",
        f"{tmp_path}: the field `tools` of 2 of 5 sample(s) is not read, first {path}:3",
    ]
    for number in (12, 13):
        write(path, [row, {**row, **{f"f{i}": 1 for i in range(number + 1)}}, {**row, "g": 1}])
        notes = load(path, tokenizer).notes()
        assert (
            len(notes) == 14 and "other fields of 2 of 3 sample(s) are not read either, first `f12` of" in notes[-1]
        ), notes


def test_fields_of_texts_that_only_later_rows_have_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b", "system": "Be brief.", "prompt": "c"}])
    notes = load(path, tokenizer).notes()
    assert [note.split("; ")[0] for note in notes] == [
        f"{path}: the field `{name}` of 1 of 2 sample(s) is not read, first {path}:2" for name in ("prompt", "system")
    ]


@pytest.mark.parametrize("format", ["text", "completion"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_that_say_that_they_are_held_out_are_told(
    tmp_path: Path, tokenizer: Any, format: str, suffix: str
) -> None:
    said = ["train", "train", "unseen", "dev_set", "", "latest"]
    row = {"text": "What"} if format == "text" else {"prompt": "What", "completion": " is"}
    rows = [{**row, "split": each} for each in said]
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        write(path, rows)
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    place = f"{path}:3" if suffix == "jsonl" else f"{path}: row 3"
    notes = load(path, tokenizer, pack=False).notes()
    assert notes == [
        f"{path}: fields that are not read: `split`",
        f"{path}: 2 of 6 sample(s) say that they are held-out data (`split` is 'unseen'), first {place}; they are read "
        "like the others: take them away, or give them by --eval-data",
    ]


def test_a_field_of_splits_that_only_later_rows_have_is_told_once_as_not_read(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": "What"}, {"text": "What", "split": "train"}, {"text": "What", "split": "test"}]
    path = write(tmp_path / "a.jsonl", rows)
    notes = load(path, tokenizer, pack=False).notes()
    assert len(notes) == 2 and "the field `split` of 2 of 3 sample(s) is not read" in notes[0]
    assert "1 of 3 sample(s) say that they are held-out data (`split` is 'test')" in notes[1]


def test_files_of_the_same_content_are_told(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "b.jsonl").hardlink_to(tmp_path / "a.jsonl")
    [note] = load(tmp_path, tokenizer).notes()
    assert "by another name" in note
    (tmp_path / "b.jsonl").unlink()
    for name in "bcd":
        write(tmp_path / f"{name}.jsonl", [{"text": "d" if name == "d" else "a"}])
    data = load(tmp_path, tokenizer)
    assert data.notes() == [
        f"{tmp_path}: 2 file(s) hold what another does, as {tmp_path / 'b.jsonl'} and {tmp_path / 'a.jsonl'}; each is "
        "read"
    ]
    assert data.documents == 4


# Which format


def test_a_later_row_that_would_do_for_several_formats_is_refused_as_the_first_is(
    tmp_path: Path, tokenizer: Any
) -> None:
    tokenizer.chat_template = CHATML
    both = {"text": "b", "messages": TALK}
    path, cache = write(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b", "messages": None}, both]), tmp_path / "c"
    for _ in range(2):  # made, and kept
        with pytest.raises(UsageError, match=r"a\.jsonl:3: .* would do as `text` or `messages`; say which"):
            load(path, tokenizer, cache=cache)
    said = load(path, tokenizer, cache=cache, format="text")
    assert said.documents == 3 and "the field `messages` of 1 of 3" in said.notes()[0]
    with pytest.raises(UsageError, match=r"a\.jsonl:3: .* would do as `text` or `messages`; say which"):
        load(path, tokenizer, cache=cache)
    with pytest.raises(UsageError, match="would do as `text` or `messages`"):
        load(write(tmp_path / "b.jsonl", [both]), tokenizer)


def test_a_format_may_be_said_where_the_fields_would_do_for_several(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "whole", "instruction": "Say it", "output": "dog"}])
    assert learnt(load(path, tokenizer, format="text"), tokenizer)[0].startswith("whole")
    assert load(path, tokenizer, format="alpaca").format == "alpaca"
    with pytest.raises(UsageError, match=r"a\.jsonl:1: the row has no field `prompt`.*`completion` needs"):
        load(path, tokenizer, format="completion")


def test_files_of_two_formats_are_not_mixed(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    write(tmp_path / "b.jsonl", [{"text": "a"}])
    with pytest.raises(UsageError, match=r"b\.jsonl: holds `text`, but .*a\.jsonl holds `completion`"):
        load(tmp_path, tokenizer)
    (tmp_path / "b.jsonl").rename(tmp_path / "b.txt")
    with pytest.raises(UsageError, match=r"b\.txt: holds `text`"):
        load(tmp_path, tokenizer)


def test_training_data_beside_another_split_are_not_mixed(tmp_path: Path) -> None:
    for name in ("train-00000.jsonl", "train-00001.jsonl", "test-00000.jsonl"):
        write(tmp_path / name, [{"text": name}])
    with pytest.raises(UsageError, match=r"beside another split \(test, train\).*'DIR/train-\*\.parquet'"):
        find_files(tmp_path)
    assert [file.name for file in find_files(tmp_path / "train-*.jsonl").files] == [
        "train-00000.jsonl",
        "train-00001.jsonl",
    ]
    with pytest.raises(UsageError, match="no such file"):
        find_files(tmp_path / "valid-*.jsonl")
    (tmp_path / "test-00000.jsonl").rename(tmp_path / "testament.jsonl")
    assert len(find_files(tmp_path).files) == 3


@pytest.mark.parametrize(
    ("training", "other"),
    [
        ("train.jsonl", "val.jsonl"),
        ("wiki-train.jsonl", "wiki-test.jsonl"),
        ("wiki.train.txt", "wiki.valid.txt"),
        ("x_TRAIN_0.txt", "x_hold_out_0.txt"),
        ("train/a.txt", "held-out/a.txt"),
        ("a/train1.txt", "a/dev1.txt"),
    ],
)
def test_another_split_is_known_by_a_word_anywhere_in_its_name(tmp_path: Path, training: str, other: str) -> None:
    for name in (training, other, "more.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a")
    with pytest.raises(UsageError, match="holds training data beside another split"):
        find_files(tmp_path)


def test_a_name_that_has_such_words_by_chance_is_no_split(tmp_path: Path) -> None:
    for name in ("train-test-split-explained.txt", "retrained.txt", "values.txt", "device.txt"):
        (tmp_path / name).write_text("a")
    assert len(find_files(tmp_path).files) == 4


# Tables


def arrow_stream(path: Path, table: pyarrow.Table) -> Path:
    with pyarrow.OSFile(str(path), "wb") as sink, ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def arrow_file(path: Path, table: pyarrow.Table) -> Path:
    with pyarrow.OSFile(str(path), "wb") as sink, ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def parquet_file(path: Path, table: pyarrow.Table) -> Path:
    parquet.write_table(table, path, row_group_size=3)
    return path


TABLES: dict[str, Callable[[Path], Callable[[pyarrow.Table], Path]]] = {
    "parquet": lambda folder: lambda table: parquet_file(folder / "a.parquet", table),
    "stream": lambda folder: lambda table: arrow_stream(folder / "a.arrow", table),
    "file": lambda folder: lambda table: arrow_file(folder / "a.arrow", table),
}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_table_says_what_its_rows_would_say(tmp_path: Path, tokenizer: Any, kind: str, format: str) -> None:
    tokenizer.chat_template = CHATML
    rows: list[dict[str, Any]] = {
        "text": [{"text": f"row {i} " * (i + 1)} for i in range(150)],
        "completion": [{"prompt": f"row {i}", "completion": f" is {i}"} for i in range(150)],
        "messages": [{"messages": TALK}, {"messages": TALK[1:3]}] * 40,
        "conversations": [
            {"conversations": [{"from": "human", "value": f"row {i}"}, {"from": "gpt", "value": "dog"}]}
            for i in range(150)
        ],
        "chat-completion": [{"prompt": TALK[:2], "completion": TALK[2:3]}] * 40,
        "alpaca": [{"instruction": f"row {i}", "input": None if i % 2 else "x", "output": "dog"} for i in range(150)],
    }[format]
    path = TABLES[kind](tmp_path)(pyarrow.Table.from_pylist([{**row, "id": i} for i, row in enumerate(rows)]))
    table, lines = load(path, tokenizer), load(write(tmp_path / "a.jsonl", rows), tokenizer)
    assert table.format == lines.format == format
    assert table.documents == lines.documents == len(rows)
    for i in range(len(rows)):
        assert all((one == other).all() for one, other in zip(table.sample(i), lines.sample(i), strict=True))


def test_a_wrong_row_of_a_table_is_named(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": "a"}] * 70 + [{"text": None}]
    with pytest.raises(UsageError, match=r"a\.parquet: row 71: the field `text` is null"):
        load(parquet_file(tmp_path / "a.parquet", pyarrow.Table.from_pylist(rows)), tokenizer)
    table = pyarrow.table({"text": [b"good", b"\xff"]})
    stream = arrow_stream(tmp_path / "a.arrow", table.cast(pyarrow.schema({"text": pyarrow.binary()})))
    with pytest.raises(UsageError, match=r"a\.arrow: row 1: the field `text` is a bytes; it must be a string"):
        load(stream, tokenizer)
    text = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"good", b"\xff"]).buffers())
    with pytest.raises(UsageError, match=r"a\.arrow: one of rows 1 to 2 cannot be read: .*UTF8"):
        load(arrow_stream(tmp_path / "a.arrow", pyarrow.table({"text": text})), tokenizer)


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    with pytest.raises(UsageError, match=r"a\.(parquet|arrow): has several columns called `text`; rename"):
        load(TABLES[kind](tmp_path)(table), tokenizer)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize(
    "damage", [lambda d: b"x" * 99, lambda d: d[: len(d) // 2], lambda d: d[:9] + b"\xff" * 40 + d[49:]]
)
def test_a_damaged_table_is_refused(
    tmp_path: Path, tokenizer: Any, suffix: str, damage: Callable[[bytes], bytes]
) -> None:
    table = pyarrow.Table.from_pylist([{"text": "row"}] * 200)
    path = (
        parquet_file(tmp_path / "a.parquet", table)
        if suffix == "parquet"
        else arrow_stream(tmp_path / "a.arrow", table)
    )
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=re.escape(str(path))):
        load(path, tokenizer)


def test_a_stream_that_was_cut_between_two_batches_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    table = pyarrow.Table.from_pylist([{"text": f"row {i}"} for i in range(40)])
    whole = arrow_stream(tmp_path / "a.arrow", table).read_bytes()
    borders: list[int] = []
    with ipc.open_stream(source := pyarrow.BufferReader(whole)) as stream:
        for _ in stream:
            borders.append(source.tell())
    assert load(tmp_path / "a.arrow", tokenizer).documents == 40
    for border in borders:
        (tmp_path / "a.arrow").write_bytes(whole[:border])
        with pytest.raises(UsageError, match=r"a\.arrow: the stream has no end-of-stream mark"):
            load(tmp_path / "a.arrow", tokenizer)
    (tmp_path / "a.arrow").write_bytes(whole + whole)
    with pytest.raises(UsageError, match=rf"a\.arrow: {len(whole)} bytes follow the end of the stream"):
        load(tmp_path / "a.arrow", tokenizer)
    old = ipc.IpcWriteOptions(metadata_version=ipc.MetadataVersion.V4, use_legacy_format=True)  # its mark is shorter
    with ipc.new_stream(tmp_path / "a.arrow", table.schema, options=old) as writer:
        writer.write_table(table)
    assert load(tmp_path / "a.arrow", tokenizer).documents == 40


def saved(folder: Path, shards: list[list[dict[str, Any]]], **state: Any) -> Path:
    """A directory as `datasets.Dataset.save_to_disk` makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        arrow_stream(folder / name, pyarrow.Table.from_pylist(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string", "_type": "Value"}}}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], **state}))
    return folder


def test_a_data_set_that_datasets_saved_is_read_in_its_own_order(tmp_path: Path, tokenizer: Any) -> None:
    path = saved(tmp_path / "set", [[{"text": "first"}, {"text": "second"}], [{"text": "third"}]])
    arrow_stream(path / "cache-123.arrow", pyarrow.Table.from_pylist([{"text": "not of the data set"}]))
    end = tokenizer.eos_token
    data = load(path, tokenizer)
    assert [learnt(data, tokenizer, i)[0] for i in range(data.documents)] == [
        f"first{end}",
        f"second{end}",
        f"third{end}",
    ]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"dataset_dict.json": '{"splits": ["train", "test"]}'}, r"splits \(train, test\); give the directory of one"),
        ({"state.json": "{"}, r"state\.json: not valid JSON"),
        ({"state.json": "[]"}, r"state\.json: holds no JSON object"),
        ({"state.json": '{"_data_files": []}'}, r"state\.json: names no data files"),
        ({"state.json": '{"_data_files": [{"filename": "gone.arrow"}]}'}, r"gone\.arrow: is missing"),
        ({"state.json": '{"_data_files": 3}'}, r"state\.json: names no data files"),
        ({"state.json": '{"_indices_files": [{"filename": "i.arrow"}]}'}, r"flatten_indices\(\)"),
    ],
)
def test_a_saved_data_set_that_cannot_be_read_says_why(tmp_path: Path, files: dict[str, str], why: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=why):
        find_files(tmp_path)


def test_without_pyarrow_the_error_names_it(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet_file(tmp_path / "a.parquet", pyarrow.Table.from_pylist([{"text": "a"}]))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"a\.parquet: \.parquet files need the package pyarrow: pip install pyarrow"):
        load(path, tokenizer)


# Anything at all

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=9)}),
    max_size=4,
)
ROWS = st.lists(
    st.dictionaries(
        st.sampled_from(sorted({f for fields in FORMATS.values() for f in fields} | {"input", "tools"})), JSON
    )
    | st.fixed_dictionaries({"messages": MESSAGES | JSON})
    | st.fixed_dictionaries({"prompt": st.text(max_size=9), "completion": st.text(max_size=9) | JSON})
    | JSON,
    min_size=1,
    max_size=4,
)
FUZZ = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def accepted(path: Path, tokenizer: Any, **options: Any) -> None:
    """Whatever is in the data, they are trained on or refused, with an exit code of ours."""
    try:
        data = load(path, tokenizer, sequence_length=8, **options)
    except SsdplanError as error:
        assert error.exit_code == 2 and "\n" not in str(error)
        return
    for batches in data.eval_batches(2):
        for batch in batches:
            assert batch.labels.shape == batch.input_ids.shape
            counted = batch.labels != -100
            assert (batch.labels[counted] == batch.input_ids[counted]).all()


@FUZZ
@given(rows=ROWS, pack=st.booleans(), template=st.sampled_from([None, CHATML, MARKED, PLAIN, FORGETFUL, STRICT]))
def test_any_rows_are_trained_on_or_refused(tmp_path, tokenizer, rows, pack, template) -> None:
    tokenizer.chat_template = template
    accepted(write(tmp_path / "a.jsonl", rows), tokenizer, pack=pack)


@FUZZ
@given(content=st.binary(max_size=60), suffix=st.sampled_from(["txt", "jsonl", "parquet", "arrow"]), pack=st.booleans())
def test_any_bytes_are_trained_on_or_refused(tmp_path, tokenizer, content, suffix, pack) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(content)
    accepted(path, tokenizer, pack=pack)


@FUZZ
@given(
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4),
    kind=st.sampled_from(sorted(TABLES)),
)
def test_a_table_with_any_bytes_changed_is_trained_on_or_refused(tmp_path, tokenizer, flips, kind) -> None:
    path = TABLES[kind](tmp_path)(pyarrow.Table.from_pylist([{"text": "row of a table"}] * 4))
    content = bytearray(path.read_bytes())
    for place, change in flips:
        content[place % len(content)] ^= change
    path.write_bytes(content)
    accepted(path, tokenizer)


# What TRL and ShareGPT call a conversation

SAID = [("system", "Be brief."), ("human", "What is read?"), ("gpt", "A layer."), ("user", "And?"), ("model", "Fox.")]
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}


def test_a_sharegpt_conversation_is_the_conversation_of_the_same_messages(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    turns = {"conversations": [{"from": speaker, "value": text} for speaker, text in SAID]}
    messages = {"messages": [{"role": ROLES.get(speaker, speaker), "content": text} for speaker, text in SAID]}
    other = {"conversations": messages["messages"]}
    turned, plain, mixed = (
        load(write(tmp_path / f"{number}.jsonl", [row]), tokenizer)
        for number, row in enumerate((turns, messages, other))
    )
    assert (turned.format, plain.format, mixed.format) == ("conversations", "messages", "conversations")
    assert learnt(turned, tokenizer) == learnt(plain, tokenizer) == learnt(mixed, tokenizer)
    assert learnt(turned, tokenizer)[1] == ["A layer.<|im_end|>", "Fox.<|im_end|>"]


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([{"from": "narrator", "value": "a"}], "message 1 is from 'narrator', which is none of assistant, "),
        ([{"from": "human", "value": "a"}], "no message has the role `assistant`"),
        ([{"from": "gpt"}], "message 1 has no field `value`"),
        (
            [{"from": "gpt", "value": "a", "weight": 1}],
            "a field `weight`, which is not rendered; put it into its `value`",
        ),
        ({"from": "gpt"}, "the field `conversations` is an object; it must be a list"),
    ],
)
def test_a_wrong_sharegpt_conversation_is_refused(tmp_path: Path, tokenizer: Any, turns: Any, says: str) -> None:
    tokenizer.chat_template = CHATML
    with pytest.raises(UsageError, match=re.escape(says)):
        load(write(tmp_path / "a.jsonl", [{"conversations": turns}]), tokenizer)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_of_a_prompt_of_messages_nothing_is_learnt(tmp_path: Path, tokenizer: Any, template: str) -> None:
    """Also where the assistant speaks in it; the text is that of the whole conversation."""
    tokenizer.chat_template = template
    talk = [{"role": ROLES.get(speaker, speaker), "content": text} for speaker, text in SAID]
    row = {"prompt": talk[:4], "completion": talk[4:]}
    given = load(write(tmp_path / "a.jsonl", [row]), tokenizer)
    whole = load(write(tmp_path / "b.jsonl", [{"messages": talk}]), tokenizer)
    assert given.format == "chat-completion"
    assert learnt(given, tokenizer)[0] == learnt(whole, tokenizer)[0]
    assert learnt(given, tokenizer)[1] == ["Fox.<|im_end|>"] == learnt(whole, tokenizer)[1][-1:]
    first = load(write(tmp_path / "c.jsonl", [{"prompt": talk[:2], "completion": talk[2:]}]), tokenizer)
    assert learnt(first, tokenizer)[1][-2:] == ["A layer.<|im_end|>", "Fox.<|im_end|>"]


def test_prompts_of_text_and_of_messages_are_not_mixed(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    lists = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    texts = {"prompt": "a", "completion": "b"}
    with pytest.raises(UsageError, match=r"a\.jsonl:2: the field `prompt` is a string; it must be a list"):
        load(write(tmp_path / "a.jsonl", [lists, texts]), tokenizer)
    with pytest.raises(UsageError, match=r"a\.jsonl:2: the field `prompt` is a list; it must be a string"):
        load(write(tmp_path / "a.jsonl", [texts, lists]), tokenizer, format="completion")
    with pytest.raises(UsageError, match="no message has the role `assistant`"):
        load(write(tmp_path / "a.jsonl", [{**lists, "completion": lists["prompt"]}]), tokenizer)
