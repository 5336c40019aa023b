"""A chat template that writes the time writes that of one instant, and else what transformers has it write."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from ssdplan.executor.data.samples.clock import timed
from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.tokens import load_tokenizer
from ssdplan.plans.errors import UsageError
from tests.made.models import EOS, make_tokenizer

NOON = datetime(2024, 7, 26, 12, 30, 5, 678)
LATER = datetime(2025, 1, 2, 3, 4, 5, 6)
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + EOS + "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LLAMA = """{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 1924" %}
    {%- endif %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}"""
TEMPLATES = {
    "llama 3": LLAMA + TURNS,
    "a variable": "{% set how = '%H:%M:%S.%f' %}{{ strftime_now(how) | upper }} 100% {{ '%d' }}" + TURNS,
    "within a macro": "{% macro now() %}{{ strftime_now('%A, %Y') }}{% endmacro %}\n{{ now() }}\n" + TURNS,
    "by name": "{{ strftime_now(format='%j') }}" + TURNS,
    "white space first": "\n  {% if strftime_now is defined %}\n {{ strftime_now('%Y年%m月') }}{% endif %}\n" + TURNS,
    "indented": "   {% if true %}\n {{ strftime_now('%e') }}\n{% endif %} x" + TURNS,
    "never": "{# strftime_now #}" + TURNS,
    "never, in words": "strftime_now {% raw %}{{ strftime_now('%d') }}{% endraw %} {{ 'strftime_now' }}" + TURNS,
    "beside printf": "{{ strftime_now('%d') ~ '%s %i' % (4, 3) }}" + TURNS,
    "told by a variable, beside printf": "{% set f = '%d' %}{{ strftime_now(f) ~ '%s' % 3 }}" + TURNS,
    "an alias": "{% set now = strftime_now %}{{ now('%Y') }}" + TURNS,
    "either": "{{ strftime_now('%Y' if messages else '%m') }}" + TURNS,
    "not at all": TURNS,
}
TALK = [{"role": "user", "content": "What is stored?"}, {"role": "assistant", "content": "What is read."}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return load_tokenizer(make_tokenizer(tmp_path / "model"))


def by_transformers(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, template: str, instant: datetime) -> str:
    """What transformers has the template write when it is `instant`."""

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return instant

    with monkeypatch.context() as patches:
        patches.setattr(chat_template_utils, "datetime", Stopped)
        text: str = tokenizer.apply_chat_template(TALK, tokenize=False, chat_template=template)
    return text


def rows(path: Path) -> Path:
    path.write_text(json.dumps({"messages": TALK}) + "\n")
    return path


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_what_transformers_has_it_write_at_that_instant(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tokenizer.chat_template = TEMPLATES[name]
    for instant in (NOON, LATER):
        data = TextData(rows(tmp_path / "a.jsonl"), tokenizer, sequence_length=256, instant=instant)
        ids, _ = data.sample(0)
        text = by_transformers(monkeypatch, tokenizer, TEMPLATES[name], instant)
        assert tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False) == text
        assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_what_of_an_instant_decides_the_text() -> None:
    assert timed(TURNS, NOON) == timed(TURNS, LATER) and timed(TURNS, NOON).times == ""
    assert json.loads(timed(LLAMA, NOON).times) == {"%d %b %Y": "26 Jul 2024"}
    assert timed(LLAMA, NOON) == timed(LLAMA, NOON.replace(hour=1)) != timed(LLAMA, LATER)


@pytest.mark.parametrize(
    ("template", "formats"),
    [
        ("{# strftime_now('%Y') #}{{ '%d' }}", None),
        ("{% raw %}{{ strftime_now('%Y') }}{% endraw %}{{ '%d' }}", None),
        ("{{ 'strftime_now' }}{{ '%d' }}", None),
        ("{% if strftime_now is defined %}{{ '%d' % 3 }}{% endif %}", []),
        ("{{ strftime_now('%Y') }}{{ '%s has %d' % (1, 2) }}", ["%Y"]),
        ("{{ strftime_now(format='%Y') }}{{ '%d' % 3 }}", ["%Y"]),
        ("{% set f = '%Y' %}{{ strftime_now(f) }}{{ '%d' % 3 }}{{ '%s' % 3 }}", ["%Y", "%d"]),
        ("{{ strftime_now('%Y' ~ '%m') }}", ["%Y", "%m"]),
    ],
)
def test_only_what_a_template_asks_with_is_written_of_an_instant(template: str, formats: list[str] | None) -> None:
    found = timed(template, NOON)
    assert (list(*found.variables.values()) if found.variables else None) == formats
    assert found.times == (json.dumps({each: NOON.strftime(each) for each in formats}) if formats else "")


def test_tokens_of_another_day_are_another_cache(tmp_path: Path, tokenizer: Any) -> None:
    path, cache = rows(tmp_path / "a.jsonl"), tmp_path / "cache"

    def tokens(instant: datetime) -> list[int]:
        return TextData(path, tokenizer, sequence_length=256, cache=cache, instant=instant).sample(0)[0].tolist()

    tokenizer.chat_template = LLAMA + TURNS
    assert tokens(NOON) == tokens(NOON.replace(hour=23)) and len(list(cache.iterdir())) == 1
    assert tokens(LATER) != tokens(NOON) and len(list(cache.iterdir())) == 2
    tokenizer.chat_template = TURNS
    assert tokens(LATER) == tokens(NOON) and len(list(cache.iterdir())) == 3


def test_a_format_that_a_template_does_not_write_out_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ strftime_now('%' ~ 'Y') }}" + TURNS
    with pytest.raises(UsageError, match=r"a\.jsonl:1: .*a format that it does not write out, %Y; write that out"):
        TextData(rows(tmp_path / "a.jsonl"), tokenizer, sequence_length=64)


def test_the_time_that_is_written_is_told(tmp_path: Path, tokenizer: Any) -> None:
    path = rows(tmp_path / "a.jsonl")
    tokenizer.chat_template = LLAMA + TURNS
    [note] = TextData(path, tokenizer, sequence_length=256, instant=NOON).notes()
    assert "2024-07-26 12:30:05" in note and '{"%d %b %Y": "26 Jul 2024"}' in note
    tokenizer.chat_template = TURNS
    assert not TextData(path, tokenizer, sequence_length=256, instant=NOON).notes()
