"""Conversations are rendered as transformers renders them, and what the assistant says is learnt, with what ends it.

The templates are in the style of those of seven families, the tokenizers of three kinds. What a row's tokens must be,
transformers' own `apply_chat_template` says; what is learnt of them is written down beside each template.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ssdplan.executor.data.text_data import TextData
from ssdplan.executor.data.tokens import _KNOWN_SPLITS, end_tokens, load_tokenizer
from ssdplan.plans.errors import UsageError

LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turn') }}"
    "{% endif %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + "
    "m.content | trim + '<|eot_id|>' %}{{ (bos_token if loop.first else '') + content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
PHI_3 = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ '<|system|>\\n' + m.content + '<|end|>\\n' }}"
    "{% elif m.role == 'user' %}{{ '<|user|>\\n' + m.content + '<|end|>\\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>\\n' + m.content + '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}\n{% if m.role == 'user' %}\n{{ '<|user|>\n' + m.content + eos_token }}\n"
    "{% elif m.role == 'system' %}\n{{ '<|system|>\n' + m.content + eos_token }}\n"
    "{% elif m.role == 'assistant' %}\n{{ '<|assistant|>\n'  + m.content + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
ENDS_ONCE = (
    "{% for m in messages %}{{ '\\n' + m.role + ': ' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\nassistant:' }}{% else %}{{ eos_token }}{% endif %}"
)
JOINED = (
    "{% for m in messages %}{{ (' ' if not loop.first else '') + m.role + ': ' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' assistant:' }}{% else %}{{ eos_token }}{% endif %}"
)
STYLES: dict[str, tuple[str, Callable[[str, bool], str]]] = {
    "Llama 2": (LLAMA_2, lambda said, last: f" {said.strip()} </s>"),
    "Llama 3": (LLAMA_3, lambda said, last: f"{said.strip()}<|eot_id|>"),
    "Phi 3": (PHI_3, lambda said, last: f"{said}<|end|>" + ("\n</s>" if last else "")),
    "ChatML": (CHATML, lambda said, last: f"{said}<|im_end|>"),
    "Gemma": (GEMMA, lambda said, last: f"{said.strip()}<end_of_turn>"),
    "Mistral": (MISTRAL, lambda said, last: f" {said}</s>"),
    "Zephyr": (ZEPHYR, lambda said, last: f"{said}</s>"),
    "ends once": (ENDS_ONCE, lambda said, last: f" {said}" + ("</s>" if last else "")),
    "joined": (JOINED, lambda said, last: f" {said}" + ("</s>" if last else "")),
}
"""A template, and what is learnt of a message of the assistant's, which may be the conversation's last."""
SPECIAL = (
    *("<unk>", "<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|system|>", "<|user|>"),
    *("<|assistant|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"),
)
LINES = (
    "What is stored is read again, and what is read again is the same. Yes. No.",
    "\n\n\nassistant: user: system [INST] [/INST] <<SYS>>\n<</SYS>>\n\n Hello. Hello.\n\n",
    "model\n\n\n# A list\n\n\n- one\n\n- two\n\n\n",
    "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ .,:;?!()<>/|_'",
)
TALK = [
    {"role": "user", "content": "What is stored?"},
    {"role": "assistant", "content": "What is read again."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "It is\n\nthe same."},
    {"role": "user", "content": "Again?"},
    {"role": "assistant", "content": "Yes."},
]


def byte_level() -> Tokenizer:
    """Of Llama 3's kind: runs of line breaks are one token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_KNOWN_SPLITS[0]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    _train(tokenizer, trainers.BpeTrainer(special_tokens=list(SPECIAL), initial_alphabet=alphabet, vocab_size=400))
    return tokenizer


def metaspace() -> Tokenizer:
    """Of Llama 2's kind: a text's first word has a space before it, and unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    _train(tokenizer, trainers.BpeTrainer(special_tokens=[*SPECIAL, *bytes_], vocab_size=600, max_token_length=12))
    return tokenizer


def gemma_like() -> Tokenizer:
    """Of Gemma's kind: spaces are marks, nothing is put before the first word, line breaks merge."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|▁?[^▁\n]+|▁"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    _train(tokenizer, trainers.BpeTrainer(special_tokens=list(SPECIAL), vocab_size=300))
    return tokenizer


def _train(tokenizer: Tokenizer, trainer: Any) -> None:
    trainer.show_progress = False
    tokenizer.train_from_iterator(LINES * 3, trainer)


KINDS = {"byte level": byte_level, "Metaspace": metaspace, "Gemma": gemma_like}


@pytest.fixture(scope="module", params=sorted(KINDS))
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tokenizer that begins every text with <s>."""
    return save(KINDS[request.param](), tmp_path_factory.mktemp("model"))


def save(tokenizer: Tokenizer, directory: Path) -> Path:
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)
    return directory


@pytest.fixture
def tokenizer(kept: Path) -> Any:
    return load_tokenizer(kept)


@pytest.fixture
def merging(tmp_path: Path) -> Any:
    return load_tokenizer(save(byte_level(), tmp_path / "model"))


def load(path: Path, tokenizer: Any, rows: list[Any], **options: Any) -> TextData:
    path.mkdir(exist_ok=True)
    (path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TextData(path / "a.jsonl", tokenizer, **{"sequence_length": 512, "pack": False, **options})


def talk(path: Path, tokenizer: Any, messages: list[dict[str, str]], template: str, **options: Any) -> TextData:
    tokenizer.chat_template = template
    return load(path, tokenizer, [{"messages": messages}], **options)


def learnt(data: TextData, tokenizer: Any, sample: int = 0) -> list[str]:
    ids, mask = data.sample(sample)
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1), len(ids)]
    return [read(tokenizer, ids[a:b]) for a, b in itertools.pairwise(borders) if mask[a]]


def read(tokenizer: Any, ids: Any) -> str:
    """Tokens as text, in whatever context: a decoder drops the space before a text's first word."""
    (mark,) = tokenizer.convert_tokens_to_ids(["<unk>"])
    return str(tokenizer.decode([mark, *ids], clean_up_tokenization_spaces=False)).removeprefix("<unk>")


def ids_of(data: TextData, sample: int = 0) -> list[int]:
    return [int(token) for token in data.sample(sample)[0]]


def given(data: TextData, sample: int = 0) -> list[int]:
    """The tokens before the first that is learnt."""
    ids, mask = data.sample(sample)
    return [int(token) for token in ids[: int(np.argmax(mask))]]


# Whole conversations


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_conversation_is_that_of_transformers_and_the_assistants_part_is_learnt(
    tmp_path: Path, tokenizer: Any, style: str, turns: int
) -> None:
    template, answer = STYLES[style]
    data = talk(tmp_path / "data", tokenizer, messages := TALK[: 2 * turns], template)
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert ids_of(data) == expected
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    assert learnt(data, tokenizer) == [answer(each, each == said[-1]) for each in said]
    assert expected.count(tokenizer.bos_token_id) == ({"Llama 2": turns}.get(style, int("bos_token" in template)))


@pytest.mark.parametrize("style", ["Llama 2", "Llama 3", "Phi 3", "ChatML", "Zephyr"])
def test_a_system_message_is_given_and_what_follows_the_last_answer_is_not_learnt(
    tmp_path: Path, tokenizer: Any, style: str
) -> None:
    template, answer = STYLES[style]
    messages = [{"role": "system", "content": "Be brief."}, *TALK[:3]]
    data = talk(tmp_path / "data", tokenizer, messages, template)
    assert ids_of(data) == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert learnt(data, tokenizer) == [answer("What is read again.", False)]
    assert "Be brief." in tokenizer.decode(given(data)) and not any("leaves" in note for note in data.notes())


@pytest.mark.parametrize(
    "body",
    [
        # another end token when others follow: which of them ends a message is not known
        "{{ m.content }}{% if loop.last %}</s>{% else %}<|end|>{% endif %}",
        "{{ m.content }}{% if loop.last %}<|end|>{% else %}</s>{% endif %}",
        "{{ m.content }}{% if loop.last %}</s>{% else %} | {% endif %}",  # more than white space between turns
        "{{ m.content }}<|end|>{% if loop.last %}<|eot_id|>{% else %}</s>{% endif %}",
        "{{ m.content if loop.last else '(...)' }}{% if loop.last %}</s>{% endif %}",  # the message itself
        "{{ m.content }}{% if loop.last %} That is all.</s>{% endif %}",  # words behind it
        "{% if loop.last %}<think></think>{% endif %}{{ m.content }}",  # words before it
        "{{ m.content if loop.last else m.content | upper }}",
    ],
)
def test_messages_that_a_template_writes_in_two_ways_are_refused(tmp_path: Path, merging: Any, body: str) -> None:
    template = (
        f"{{% for m in messages %}}<|{{{{ m.role }}}}|>\n{{% if m.role == 'assistant' %}}{body}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    template += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    with pytest.raises(UsageError, match=r"a\.jsonl:1: the chat template writes message 2 otherwise when others"):
        talk(tmp_path / "data", merging, TALK[:4], template)


PLAIN = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT = "<|endoftext|>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plain", [PLAIN[:3], PLAIN])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_headers_that_are_plain_text_for_the_tokenizer_are_those_of_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, plain: tuple[str, ...], turns: int
) -> None:
    """A header (<|user|>) and the end of the last message alone (<|endoftext|>) begin with the same characters."""
    special = (*(name for name in SPECIAL if name not in plain), END_OF_TEXT)
    monkeypatch.setattr(f"{__name__}.SPECIAL", special)
    found = load_tokenizer(save(KINDS[kind](), tmp_path / "model"))
    found.eos_token = END_OF_TEXT
    data = talk(tmp_path / "data", found, messages := TALK[: 2 * turns], PHI_3)
    assert ids_of(data) == found.apply_chat_template(messages, return_dict=True)["input_ids"]
    line = "\n" if "<|end|>" in plain else ""  # no token at which the message is known to end: all up to the header
    said = [f"What is read again.<|end|>{line}", f"It is\n\nthe same.<|end|>{line}", "Yes.<|end|>"][:turns]
    said[-1] = f"{said[-1].removesuffix(line)}\n<|endoftext|>"
    assert learnt(data, found) == said


def test_headers_that_are_plain_text_are_refused_where_something_else_may_end_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SPECIAL", (*(name for name in SPECIAL if name not in PLAIN), END_OF_TEXT))
    found = load_tokenizer(save(byte_level(), tmp_path / "model"))
    found.eos_token = END_OF_TEXT
    template = PHI_3.replace(
        "'<|assistant|>\\n' + m.content + '<|end|>\\n'",
        "'<|assistant|>\\n' + m.content + ('' if loop.last else '<|im_end|>\\n')",
    )
    assert template != PHI_3
    with pytest.raises(UsageError) as refused:
        talk(tmp_path / "data", found, TALK[:4], template)
    assert "writes message 2 otherwise when others follow it" in str(refused.value)
    assert "again.<|endoftext|>' against " in str(refused.value) and "again.<|im_end|>" in str(refused.value)


def test_a_message_that_is_begun_otherwise_than_it_is_asked_for_is_refused_as_such(
    tmp_path: Path, merging: Any
) -> None:
    template = CHATML.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>' }}")
    with pytest.raises(UsageError) as refused:
        talk(tmp_path / "data", merging, TALK[:4], template)
    assert "a.jsonl:1: the chat template begins message 2 otherwise than it asks for it (" in str(refused.value)
    assert "<think>' against " in str(refused.value) and "when others follow" not in str(refused.value)


def test_an_empty_answer_is_told_apart_from_one_that_is_replaced(tmp_path: Path, merging: Any) -> None:
    messages = [TALK[0], {"role": "assistant", "content": ""}, *TALK[2:4]]
    data = talk(tmp_path / "data", merging, messages, PHI_3)
    assert learnt(data, merging) == ["<|end|>", "It is\n\nthe same.<|end|>\n</s>"]
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' and not loop.last %}(...)"
        "{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    with pytest.raises(UsageError, match="writes message 2 otherwise"):
        talk(tmp_path / "data", merging, messages, template)


# A message that begins with white space


@pytest.mark.parametrize("style", ["Phi 3", "ChatML", "Zephyr"])
def test_a_message_that_begins_with_line_breaks_follows_what_asks_for_it(
    tmp_path: Path, merging: Any, style: str
) -> None:
    """The header's line break and the message's would be one token, which a model that is asked never sees."""
    template, answer = STYLES[style]
    if style == "Phi 3":  # its header is a special token, and with nothing behind it nothing could merge
        template = template.replace("<|assistant|>", "assistant")
    messages = [TALK[0], {"role": "assistant", "content": "\n\nHello."}, TALK[2], TALK[3]]
    data = talk(tmp_path / "data", merging, messages, template)
    whole = merging.apply_chat_template(messages, tokenize=False)
    asked = merging.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    alone = merging(whole, add_special_tokens=False)["input_ids"]
    assert alone[: len(asked)] != asked, "the case that this test is about"
    assert given(data) == asked
    text = merging.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    assert ids_of(data) == asked + merging(whole[len(text) :], add_special_tokens=False)["input_ids"]
    assert merging.decode(ids_of(data)) == whole
    assert learnt(data, merging) == [answer("\n\nHello.", False), answer(TALK[3]["content"], True)]


def test_each_such_message_is_tokenised_apart(tmp_path: Path, merging: Any) -> None:
    said = ["\n\nHello.", "\nYes.", "No."]
    messages = [m for i, each in enumerate(said) for m in (TALK[2 * i], {"role": "assistant", "content": each})]
    data = talk(tmp_path / "data", merging, messages, CHATML)
    header = "<|im_start|>assistant\n"
    parts = merging.apply_chat_template(messages, tokenize=False).split(header)
    expected: list[int] = []
    for part in [parts[0] + header, parts[1] + header, parts[2] + header + parts[3]]:
        expected += merging(part, add_special_tokens=False)["input_ids"]
    assert ids_of(data) == expected
    assert learnt(data, merging) == [f"{each}<|im_end|>" for each in said]


def test_the_same_in_a_template_that_marks_what_is_generated(tmp_path: Path, merging: Any) -> None:
    marked = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}"
        "{% endfor %}"
    )
    messages = [TALK[0], {"role": "assistant", "content": "\n\nHello."}]
    one, other = (talk(tmp_path / name, merging, messages, t) for name, t in (("a", marked), ("b", CHATML)))
    assert ids_of(one) == ids_of(other) and (one.sample(0)[1] == other.sample(0)[1]).all()


def test_where_a_tokenizer_puts_a_space_before_the_rest_it_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    found = load_tokenizer(save(tokenizer, tmp_path / "model"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "What i"}, {"role": "assistant", "content": "s stored"}]
    with pytest.raises(UsageError, match=r"a\.jsonl:1: what asks the assistant and its message share a token.*'What i"):
        talk(tmp_path / "data", found, messages, template)


# The token at which a model stops

NO_END = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
EARLY = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("template", [NO_END, EARLY])
def test_a_conversation_of_which_no_end_is_learnt_is_told(tmp_path: Path, merging: Any, template: str) -> None:
    merging.chat_template = template
    rows = [{"messages": TALK[:4]}, {"messages": TALK[:2]}]
    data = load(tmp_path / "data", merging, rows)
    (note,) = data.notes()
    assert note.startswith(
        f"{tmp_path / 'data' / 'a.jsonl'}: 2 of 2 sample(s) learn no end token (</s>), first {tmp_path}/data/a.jsonl:1;"
    )
    assert "--append-eos" in note and note in data.remarks()


@pytest.mark.parametrize("style", sorted(set(STYLES) - {"Llama 3", "ChatML", "Gemma"}))
def test_one_of_which_an_end_is_learnt_is_not(tmp_path: Path, merging: Any, style: str) -> None:
    assert not talk(tmp_path / "data", merging, TALK, STYLES[style][0]).notes()


def test_ends_are_those_of_the_tokenizer_and_of_the_models_generation(tmp_path: Path, kept: Path) -> None:
    tokenizer = load_tokenizer(kept)
    names = tokenizer.convert_tokens_to_ids
    try:
        assert end_tokens(tokenizer) == (names("</s>"),)
        assert "learn no end token (</s>)" in talk(tmp_path / "data", tokenizer, TALK, CHATML).notes()[0]
        (kept / "config.json").write_text(json.dumps({"eos_token_id": names("<|eot_id|>")}))
        assert end_tokens(tokenizer) == (names("</s>"), names("<|eot_id|>"))
        assert "(</s>, <|eot_id|>)" in talk(tmp_path / "data", tokenizer, TALK, CHATML).notes()[0]
        (kept / "generation_config.json").write_text(json.dumps({"eos_token_id": [names("<|im_end|>"), 99999]}))
        assert end_tokens(tokenizer) == (names("</s>"), names("<|im_end|>"), 99999)
        assert not talk(tmp_path / "data", tokenizer, TALK, CHATML).notes()
        assert "<|im_end|>, " in talk(tmp_path / "data", tokenizer, TALK, LLAMA_3).notes()[0]
        for wrong in ("{", '{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}'):
            (kept / "generation_config.json").write_text(wrong)
            with pytest.raises(UsageError, match=r"generation_config\.json: "):
                talk(tmp_path / "data", tokenizer, TALK, CHATML)
    finally:
        for name in ("config.json", "generation_config.json"):
            (kept / name).unlink(missing_ok=True)


def test_an_end_can_be_put_behind_the_last_answer(tmp_path: Path, tokenizer: Any) -> None:
    """Up to there the tokens are the template's, as the model sees them when it is asked."""
    without = talk(tmp_path / "data", tokenizer, TALK[:4], NO_END)
    data = talk(tmp_path / "data", tokenizer, TALK[:4], NO_END, append_eos=True)
    assert ids_of(data) == [*ids_of(without), tokenizer.eos_token_id]
    assert learnt(data, tokenizer) == [
        "<|assistant|>\nWhat is read again.",
        "<|assistant|>\nIt is\n\nthe same.</s>",
    ]
    assert not data.notes()
    asked = talk(tmp_path / "data", tokenizer, TALK[:3], NO_END, append_eos=True)
    assert ids_of(asked) == [*ids_of(talk(tmp_path / "data", tokenizer, TALK[:2], NO_END)), tokenizer.eos_token_id]


def test_an_end_that_follows_an_answer_is_learnt_instead(tmp_path: Path, kept: Path) -> None:
    tokenizer = load_tokenizer(kept)
    try:
        (kept / "generation_config.json").write_text(
            json.dumps({"eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>")})
        )
        without = talk(tmp_path / "data", tokenizer, TALK[:4], EARLY)
        assert len(without.notes()) == 1 and learnt(without, tokenizer)[0] == "What is read again."
        data = talk(tmp_path / "data", tokenizer, TALK[:4], EARLY, append_eos=True)
        assert ids_of(data) == ids_of(without)
        assert learnt(data, tokenizer) == ["What is read again.<|im_end|>", "It is\n\nthe same.<|im_end|>"]
        assert not data.notes()
    finally:
        (kept / "generation_config.json").unlink()


@pytest.mark.parametrize("style", sorted(set(STYLES) - {"Llama 3", "ChatML", "Gemma"}))
def test_where_an_end_is_learnt_none_is_put(tmp_path: Path, merging: Any, style: str) -> None:
    found = [talk(tmp_path / "data", merging, TALK, STYLES[style][0], append_eos=each) for each in (False, True)]
    assert ids_of(found[0]) == ids_of(found[1]) and (found[0].sample(0)[1] == found[1].sample(0)[1]).all()


def test_an_end_that_is_put_is_another_cache_and_other_content(tmp_path: Path, merging: Any) -> None:
    cache = tmp_path / "cache"
    found = [
        talk(tmp_path / "data", merging, TALK, NO_END, append_eos=each, cache=cache) for each in (False, True, False)
    ]
    assert len(list(cache.iterdir())) == 2
    assert ids_of(found[0]) == ids_of(found[2]) != ids_of(found[1])
    assert found[0].content == found[2].content != found[1].content
    assert found[0].notes() == found[2].notes() and not found[1].notes(), "what is told is in the cache"


def test_texts_and_completions_always_learn_an_end(tmp_path: Path, merging: Any) -> None:
    for rows in ([{"text": "Yes."}], [{"prompt": "What?", "completion": " Yes."}]):
        for append_eos in (False, True):
            data = load(tmp_path / "data", merging, rows, append_eos=append_eos)
            assert ids_of(data)[-1] == merging.eos_token_id and data.sample(0)[1][-1] and not data.notes()


# Special tokens that a text brings along


@pytest.mark.parametrize(
    "text", ["What is stored?", "<s>What is stored?", "What is stored?</s>", "<s>What is stored?</s>"]
)
def test_a_text_with_special_tokens_of_its_own_has_each_once(tmp_path: Path, tokenizer: Any, text: str) -> None:
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    expected = [*([] if own[0] == start else [start]), *own, *([] if own[-1] == end else [end])]
    data = load(tmp_path / "data", tokenizer, [{"text": "Yes."}, {"text": text}])
    assert ids_of(data, 1) == expected and expected.count(start) == expected.count(end) == 1
    names = " and ".join(name for name in ("<s>", "</s>") if name in text)
    place = f"{tmp_path}/data/a.jsonl"
    assert data.notes() == (
        [
            f"{place}: 1 of 2 sample(s) bring {names} of their own where the tokenizer puts it too, first {place}:2; "
            "it is there once"
        ]
        if names
        else []
    )


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("[INST] What is stored? [/INST]", " Yes."),
        ("<s>[INST] What is stored? [/INST]", " Yes."),
        ("<s>[INST] What is stored? [/INST]", " Yes.</s>"),
        ("", "<s>Yes.</s>"),
        ("<s>", "Yes."),
        ("What?</s>", ""),
    ],
)
def test_a_completion_with_special_tokens_of_its_own_has_each_once(
    tmp_path: Path, tokenizer: Any, prompt: str, completion: str
) -> None:
    own, asked = tokenizer([prompt + completion, prompt], add_special_tokens=False)["input_ids"]
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    before = [] if own[0] == start else [start]
    data = load(tmp_path / "data", tokenizer, [{"prompt": prompt, "completion": completion}])
    assert ids_of(data) == [*before, *own, *([] if completion.endswith("</s>") else [end])]
    assert given(data) == [*before, *(asked or own[:1] * (own[0] == start))]
    told = ["have tokens in their midst that begin or end texts, first </s> of"] if prompt.endswith("</s>") else []
    told += ["bring <s>"] if prompt.startswith("<s>") or "<s>" in completion else []
    assert all(f": 1 of 1 sample(s) {words}" in note for note, words in zip(data.notes(), told, strict=True))


def test_a_token_that_begins_and_ends_texts_is_taken_once_for_each(tmp_path: Path) -> None:
    tokenizer = byte_level()
    directory = save(tokenizer, tmp_path / "model")
    found = load_tokenizer(directory)
    found.bos_token = "</s>"
    found.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", found.eos_token_id)]
    )
    data = load(tmp_path / "data", found, [{"text": text} for text in ("Yes.", "</s>Yes.", "Yes.</s>", "</s>")])
    yes, end = found("Yes.", add_special_tokens=False)["input_ids"], found.eos_token_id
    assert [ids_of(data, i) for i in range(4)] == [[end, *yes, end]] * 3 + [[end, end]]


def test_a_tokenizer_that_ends_texts_by_itself_adds_no_second_end(tmp_path: Path, tokenizer: Any) -> None:
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", start), ("</s>", end)]
    )
    yes = tokenizer("Yes.")["input_ids"]
    rows = [{"text": text} for text in ("Yes.", "<s>Yes.", "Yes.</s>", "<s>Yes.</s>")]
    data = load(tmp_path / "data", tokenizer, rows)
    own = [tokenizer(row["text"], add_special_tokens=False)["input_ids"] for row in rows]
    assert [ids_of(data, i) for i in range(4)] == [
        [*([] if ids[0] == start else [start]), *ids, *([] if ids[-1] == end else [end])] for ids in own
    ]
    assert ids_of(data, 0) == yes


def test_a_long_text_that_is_cut_into_pieces_has_each_once(
    tmp_path: Path, merging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssdplan.executor.data.tokens._PIECE_CHARACTERS", 2000)
    text = "<s>" + "What is stored is read again.\n\n" * 400 + "</s>"
    data = load(tmp_path / "data", merging, [{"text": text}, {"text": "Yes."}], sequence_length=10**6)
    assert ids_of(data) == merging(text, add_special_tokens=False)["input_ids"]
    assert len(data.notes()) == 1


@pytest.mark.parametrize("end", ["</s>\n", "</s> \n\n"])
def test_white_space_behind_a_texts_own_end_is_no_reason_for_another(tmp_path: Path, tokenizer: Any, end: str) -> None:
    """As the chat templates of Zephyr and others end a conversation. A model that is asked has stopped before it."""
    own, asked = tokenizer(["<s>What?Yes.</s>", "<s>What?"], add_special_tokens=False)["input_ids"]
    for row in ({"text": f"<s>What?Yes.{end}"}, {"prompt": "<s>What?", "completion": f"Yes.{end}"}):
        data = load(tmp_path / "data", tokenizer, [row])
        assert ids_of(data) == own and len(data.notes()) == 2
    assert given(data) == asked
    words = load(tmp_path / "data", tokenizer, [{"text": "Yes.</s> No."}])
    assert ids_of(words).count(tokenizer.eos_token_id) == 2
    assert ["first </s> of" in note for note in words.notes()] == [True]


@pytest.mark.parametrize("start", ["<s>", "  <s>", "\n\n<s>", "<s><s>", " <s> \n<s>"])
@pytest.mark.parametrize("end", ["", "</s>", "</s></s>", "</s>\n", "</s> </s>\n\n"])
def test_special_tokens_behind_white_space_and_several_of_them_are_there_once(
    tmp_path: Path, tokenizer: Any, start: str, end: str
) -> None:
    prompt, said = "[INST] What? [/INST]", " Yes. "
    own, asked = tokenizer([f"<s>{prompt}{said}", f"<s>{prompt}"], add_special_tokens=False)["input_ids"]
    rows = [{"prompt": start + prompt, "completion": said + end}, {"prompt": "", "completion": start + said + end}]
    alone = tokenizer(f"<s>{said}", add_special_tokens=False)["input_ids"]
    eos = tokenizer.eos_token_id
    data = load(tmp_path / "data", tokenizer, rows)
    assert [ids_of(data, 0), given(data, 0)] == [[*own, eos], asked]
    assert [ids_of(data, 1), given(data, 1)] == [[*alone, eos], [tokenizer.bos_token_id]]
    text = load(tmp_path / "text", tokenizer, [{"text": start + prompt + said + end}])
    assert ids_of(text) == [*own, eos]
    once = f"bring {'<s> and </s>' if end else '<s>'} of their own where the tokenizer puts it too"
    for found, many in ((data, 2), (text, 1)):
        first, all_of = f"first {found.path}:1", f"{found.path}: {many} of {many} sample(s)"
        blank = (
            f"{all_of} have white space outside special tokens of their own, before the first token or behind the end, "
            f"{first}; it is taken away"
        )
        own = [f"{all_of} {once}, {first}; it is there once"]
        assert found.notes() == ([blank] if any(each.strip("</s>") for each in (start, end)) else []) + own


@pytest.mark.parametrize("kind", ["byte level", "Metaspace"])
def test_white_space_of_several_tokens_a_character_is_white_space(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(save(KINDS[kind](), tmp_path / "model"))
    assert len(tokenizer("\u3000", add_special_tokens=False)["input_ids"]) >= 3
    texts = ["\u3000 \u3000<s>Yes.</s>\u3000\t", "\ufeff<s>Yes.</s>\u200b\n", "\u3001<s>Yes.</s>\u3001"]
    data = load(tmp_path / "data", tokenizer, [{"text": text} for text in texts])
    own, other = tokenizer(["<s>Yes.</s>", texts[2]], add_special_tokens=False)["input_ids"]
    assert ids_of(data) == ids_of(data, 1) == own
    assert ids_of(data, 2) == [tokenizer.bos_token_id, *other, tokenizer.eos_token_id], "a comma is none"


def test_white_space_that_is_outside_no_special_token_stays(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": "  What? \n"}, {"text": "<s>\n What? \n</s>"}, {"prompt": "  What?", "completion": " Yes.\n"}]
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    for number, row in enumerate(rows):
        data = load(tmp_path / str(number), tokenizer, [row])
        own = tokenizer("".join(row.values()), add_special_tokens=False)["input_ids"]
        assert ids_of(data) == [*([] if own[0] == start else [start]), *own, *([] if own[-1] == end else [end])]
        assert not any("taken away" in note for note in data.notes())


def test_the_same_where_the_end_lies_in_another_piece_of_a_long_text(
    tmp_path: Path, merging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssdplan.executor.data.tokens._PIECE_CHARACTERS", 2000)
    text = "<s>" + "What is stored is read again.\n\n" * 400 + "</s>"
    rows = [{"text": f"{' ' * 7000}{text}{end}"} for end in ("", "\n", "\n" * 7000, "</s>" + " \n" * 7000)]
    data = load(tmp_path / "data", merging, rows, sequence_length=10**6)
    own = merging(text, add_special_tokens=False)["input_ids"]
    assert all(ids_of(data, number) == own for number in range(len(rows)))


def test_a_text_that_ends_with_another_end_token_gets_no_second_end(tmp_path: Path, kept: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in kept.iterdir():
        (model / file.name).symlink_to(file)
    said = "<|user|>What?<|end|><|assistant|>Yes.<|end|>"
    prompt = said[: said.index("Yes.")]
    rows = [{"prompt": prompt, "completion": f"Yes.<|end|>{more}"} for more in ("", "\n", "\n</s>", "</s>")]
    plain = load_tokenizer(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": plain.convert_tokens_to_ids("<|end|>")}))
    tokenizer = load_tokenizer(model)
    texts = [f"<s>{said}{end}" for end in ("", "</s>", "\n</s>")]
    ids, both, line = tokenizer(texts, add_special_tokens=False)["input_ids"]
    data = load(tmp_path / "data", tokenizer, rows)
    assert [ids_of(data, number) for number in range(4)] == [ids, ids, line, both]
    assert all(given(data, number) == ids[: len(given(data, number))] for number in range(4))
    note = f"2 of 4 sample(s) bring <|end|> of their own at the end, at which the model stops, first {data.path}:1; no "
    assert any(f"{note}other end is put behind it" in each for each in data.notes())
    text = load(tmp_path / "text", tokenizer, [{"text": said}])
    assert ids_of(text) == ids
    cache = tmp_path / "cache"
    assert ids_of(load(tmp_path / "text", tokenizer, [{"text": said}], cache=cache)) == ids
    (model / "generation_config.json").unlink()
    assert ids_of(load(tmp_path / "text", tokenizer, [{"text": said}], cache=cache)) == both, "of another cache"


def test_a_completion_that_begins_as_a_text_does_is_told(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "What?", "completion": "Yes."}, {"prompt": "What?", "completion": " <s>Yes."}]
    data = load(tmp_path / "data", tokenizer, rows)
    assert data.notes() == [
        f"{data.path}: 1 of 2 sample(s) bring <s> of their own between prompt and completion, first {data.path}:2; it "
        "is learnt there, and a model that is asked sees none there: take it away"
    ]
    assert ids_of(data, 1).count(tokenizer.bos_token_id) == 2


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        (["Yes.</s>", "No."], "</s> in message 2 (`assistant`)"),
        (["Yes.", "<s> No."], "<s> in message 4 (`assistant`)"),
        (["Yes.", "No. <|end|>"], "<|end|> in message 4 (`assistant`)"),  # no end of this model's, but special
        (["Yes.", "No. <|end"], None),
    ],
)
def test_special_tokens_in_messages_are_told(
    tmp_path: Path, tokenizer: Any, said: list[str], detail: str | None
) -> None:
    messages = [
        each
        for asked, answer in zip(("What?", "And?"), said, strict=True)
        for each in ({"role": "user", "content": asked}, {"role": "assistant", "content": answer})
    ]
    data = talk(tmp_path / "data", tokenizer, messages, ZEPHYR)
    assert ids_of(data) == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    notes = [note for note in data.notes() if "special tokens in the text" in note]
    assert notes == (
        [
            f"{data.path}: 1 of 1 sample(s) have special tokens in the text of messages, beside those that the chat "
            f"template writes, first {detail} of {data.path}:1; they are trained on as they are: take them away, or "
            "write them otherwise"
        ]
        if detail
        else []
    )


@pytest.mark.parametrize(
    ("style", "token"),
    [("Phi 3", "<|end|>"), ("ChatML", "<|im_end|>"), ("Gemma", "<end_of_turn>"), ("Llama 3", "<|eot_id|>")],
)
def test_a_message_that_forges_a_turn_is_told_with_its_row(tmp_path: Path, kept: Path, style: str, token: str) -> None:
    """The tokens are those of transformers, to which the forged turn is one."""
    template = STYLES[style][0]
    tokenizer = load_tokenizer(kept)
    tokenizer.chat_template = template
    asked = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Yes."}]
    text = tokenizer.apply_chat_template(asked, tokenize=False).removeprefix("<s>").removesuffix("</s>").strip()
    content = text[text.index("What?") : text.index("Yes.")] + "No."
    forged = [{"role": "user", "content": content}, asked[1]]
    rows = [{"messages": asked}, {"messages": forged}, {"messages": forged}]
    cache = tmp_path / "cache"
    for _ in range(2):  # made, and kept
        data = load(tmp_path / "data", tokenizer, rows, cache=cache)
        said = [note for note in data.notes() if "special tokens in the text" in note]
        assert said == [
            f"{data.path}: 2 of 3 sample(s) have special tokens in the text of messages, beside those that the chat "
            f"template writes, first {token} in message 1 (`user`) of {data.path}:2; they are trained on as they are: "
            "take them away, or write them otherwise"
        ]
        assert said[0] in data.remarks()
        assert ids_of(data, 1) == tokenizer.apply_chat_template(forged, return_dict=True)["input_ids"]


def test_special_tokens_that_no_text_of_a_message_makes_are_not_told(tmp_path: Path, kept: Path) -> None:
    def told(template: str, content: str, **options: Any) -> list[str]:
        tokenizer = load_tokenizer(kept)
        tokenizer.add_tokens(["<think>"])  # not special
        for name, value in options.items():
            setattr(tokenizer, name, value)
        messages = [{"role": "system", "content": content}, *TALK[:2]]
        return [n for n in talk(tmp_path / "data", tokenizer, messages, template).notes() if "special tokens" in n]

    assert told(PHI_3, "Be <|end|> brief.") and not told(PHI_3, "Be <think> brief.")
    assert not told(PHI_3, "Be <|end|> brief.", split_special_tokens=True)
    assert not told(PHI_3.replace("m.content", "m.content | replace('<|end|>', '')"), "Be <|end|> brief.")
    assert not told(PHI_3.replace("m.role == 'system'", "m.role == 'nobody'"), "Be <|end|> brief."), "it is left out"


ENDS_TURNS = {"<|im_end|>", "<|end|>"}


@pytest.mark.parametrize(
    ("row", "token"),
    [
        ({"text": "What?</s>Yes."}, "</s>"),
        ({"text": "<s>What?</s> <s>Yes.</s>"}, "</s>"),  # two samples in one
        ({"text": "What?<s>Yes."}, "<s>"),
        ({"text": "What?<s>"}, "<s>"),
        ({"text": "What? <s>\n"}, "<s>"),
        ({"text": "What?<|im_end|>\nYes."}, "<|im_end|>"),
        ({"text": "What?</s></s>Yes."}, "</s>"),
        ({"prompt": "What?</s>", "completion": " Yes."}, "</s>"),
        ({"prompt": "What?</s>\n", "completion": "Yes."}, "</s>"),
        ({"prompt": "What?</s>", "completion": ""}, "</s>"),
        ({"prompt": "What?</s> And?", "completion": " Yes."}, "</s>"),
        ({"prompt": "What?", "completion": " Yes.</s> No."}, "</s>"),
        ({"prompt": "What?", "completion": " Yes.<s>"}, "<s>"),
        ({"instruction": "What?</s>", "output": "Yes."}, "</s>"),
        # what a chat template writes between turns, and what is at the start or at the end
        ({"text": "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"}, None),
        ({"prompt": "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n", "completion": "Yes."}, None),
        ({"text": "<|user|>\nWhat?<|end|>\n<|assistant|>\nYes.<|end|>\n</s>"}, None),
        ({"text": "<s>What? Yes.</s>"}, None),
        ({"text": " <s> What? Yes. </s> </s>\n"}, None),
        ({"prompt": "<s>What?", "completion": " Yes.</s>\n"}, None),
        ({"text": "</s>"}, None),
        ({"text": ""}, None),
    ],
)
def test_tokens_that_begin_or_end_texts_are_told_in_their_midst(
    tmp_path: Path, kept: Path, row: dict[str, str], token: str | None
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in kept.iterdir():
        (model / file.name).symlink_to(file)
    ids = load_tokenizer(model).convert_tokens_to_ids(sorted(ENDS_TURNS))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer = load_tokenizer(model)
    plain = dict.fromkeys(row, "Yes.")
    data = load(tmp_path / "data", tokenizer, [plain, row, row])
    assert not any("tokens at their start" in note for note in data.notes())
    assert [note for note in data.notes() if "midst" in note] == (
        [
            f"{data.path}: 2 of 3 sample(s) have tokens in their midst that begin or end texts, first {token} of "
            f"{data.path}:2; they are trained on as they are: take them away, or split the samples there, unless a "
            "chat template wrote them"
        ]
        if token
        else []
    )


@pytest.mark.parametrize("start", range(1970, 2010, 3))
@pytest.mark.parametrize(
    ("behind", "told"), [("What", True), ("\n\n\nWhat", True), ("<|user|>", False), ("\n<|user|>", False)]
)
def test_the_same_in_a_long_text_that_is_cut_into_pieces(
    tmp_path: Path, merging: Any, monkeypatch: pytest.MonkeyPatch, start: int, behind: str, told: bool
) -> None:
    monkeypatch.setattr("ssdplan.executor.data.tokens._PIECE_CHARACTERS", 2000)
    monkeypatch.setattr("ssdplan.executor.data.tokens._Cutter.LOOK_AHEAD", 40)
    filler = "What is stored is read again. " * 400
    text = f"{filler[:start]}</s>{behind}{filler}"
    data = load(tmp_path / "data", merging, [{"text": text}], sequence_length=10**6)
    assert bool(data.notes()) == told
    assert ids_of(data) == merging(f"<s>{text}</s>", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("start", "once"),
    [("", ""), ("<s>", "<s>"), ("<s><s>", "<s>"), ("<s><s><s>", "<s>"), ("<s> <s>", "<s>"), ("\n<s> \n<s>", "<s>")],
)
@pytest.mark.parametrize("end", ["", "</s>", "</s></s>", "</s> </s>\n"])
def test_of_several_tokens_one_stays_where_the_tokenizer_puts_none(
    tmp_path: Path, tokenizer: Any, start: str, once: str, end: str
) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    assert tokenizer("Yes.")["input_ids"][0] != tokenizer.bos_token_id, "the case that this test is about"
    prompt, said = "[INST] What? [/INST]", " Yes."
    own, asked = tokenizer([f"{once}{prompt}{said}</s>", once + prompt])["input_ids"]
    text = load(tmp_path / "text", tokenizer, [{"text": start + prompt + said + end}])
    assert ids_of(text) == own
    rows = [{"prompt": start + prompt, "completion": said + end}]
    data = load(tmp_path / "data", tokenizer, rows)
    assert [ids_of(data), given(data)] == [own, asked]
    for found in (text, data):
        first = f"{found.path}: 1 of 1 sample(s)"
        told = [note for note in found.notes() if "several times" in note]
        assert told == (
            [
                f"{first} bring <s> of their own several times at their start or end, first {found.path}:1; it is "
                "there once"
            ]
            if start.count("<s>") > 1
            else []
        )
        assert any(f"{first} bring </s> of their own where" in note for note in found.notes()) == bool(end)
        assert not any("midst" in note for note in found.notes())


@pytest.mark.parametrize("end", ["<|end|>", "<|end|><|end|>", "<|end|>\n<|end|>\n", "<|end|><|end|></s>"])
def test_of_several_other_end_tokens_one_stays(tmp_path: Path, kept: Path, end: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in kept.iterdir():
        (model / file.name).symlink_to(file)
    named = load_tokenizer(model).convert_tokens_to_ids("<|end|>")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    tokenizer = load_tokenizer(model)
    behind = "</s>" if end.endswith("</s>") else ""
    own = tokenizer(f"What? Yes.<|end|>{behind}")["input_ids"]
    for row in ({"text": f"What? Yes.{end}"}, {"prompt": "What?", "completion": f" Yes.{end}"}):
        data = load(tmp_path / "data", tokenizer, [row])
        assert ids_of(data) == own
        several = "bring <|end|> of their own several times at their start or end"
        assert any(several in note for note in data.notes()) == (end.count("<|end|>") > 1)


@pytest.mark.parametrize("begin", ["</s>", " </s>\n", "</s></s> ", "</s>" * 3000, "<s></s>"])
@pytest.mark.parametrize("other", ["", "</s>"])
@pytest.mark.parametrize("form", ["text", "completion"])
def test_an_end_token_at_the_start_of_a_text_is_told_to_be_there(
    tmp_path: Path, kept: Path, begin: str, other: str, form: str
) -> None:
    """Of a tokenizer that puts <s> before a text, and of one that knows no token that begins texts."""
    for puts in (True, False):
        tokenizer = load_tokenizer(kept)
        if not puts and "<s>" in begin:
            continue
        if not puts:
            tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
            tokenizer.bos_token = None
        asked = f"{begin}What?{other} So?"
        row = {"text": f"{asked} Yes."} if form == "text" else {"prompt": asked, "completion": " Yes."}
        data = load(tmp_path / f"data-{puts}", tokenizer, [dict.fromkeys(row, "Yes."), row])
        many, first = f"{data.path}: 1 of 2 sample(s) have tokens", f"first </s> of {data.path}:2; they are trained on"
        told = [note for note in data.notes() if "that begin or end texts" in note]
        assert told[0] == f"{many} at their start that begin or end texts, {first} as they are: take them away"
        assert len(told) == 1 + bool(other)
        assert not other or told[1].startswith(f"{many} in their midst that begin or end texts, {first}")


def test_a_token_that_begins_and_ends_texts_stays_once_at_each_end(tmp_path: Path, merging: Any) -> None:
    """As GPT-2's <|endoftext|>, which its tokenizer puts nowhere."""
    merging.bos_token = "</s>"
    merging.backend_tokenizer.post_processor = processors.Sequence([])
    texts = ("Yes.", "</s>Yes.", "</s></s>Yes.", "Yes.</s></s>")
    data = load(tmp_path / "data", merging, [{"text": text} for text in texts])
    yes, end = merging("Yes.")["input_ids"], merging.eos_token_id
    assert [ids_of(data, i) for i in range(4)] == [[*yes, end], [end, *yes, end], [end, *yes, end], [*yes, end]]
    rows = [{"prompt": "What?", "completion": "</s>"}, {"prompt": "What?", "completion": ""}]
    data = load(tmp_path / "data", merging, rows)
    assert ids_of(data) == ids_of(data, 1) == [*merging("What?")["input_ids"], end]
    assert not any("midst" in note or "between prompt" in note for note in data.notes())


def test_a_completion_that_begins_as_a_text_does_is_told_whatever_the_tokenizer_puts(
    tmp_path: Path, tokenizer: Any
) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    [note] = load(tmp_path / "data", tokenizer, [{"prompt": "What?", "completion": "<s>Yes."}]).notes()
    assert "bring <s> of their own between prompt and completion" in note


def test_a_chat_templates_text_as_a_row_of_text_is_the_same_conversation(tmp_path: Path, tokenizer: Any) -> None:
    """As transformers tokenises it: what the template wrote of special tokens is all that there is."""
    for style in ("Llama 2", "Mistral"):
        tokenizer.chat_template = STYLES[style][0]
        text = tokenizer.apply_chat_template(TALK, tokenize=False)
        one, other = (
            load(tmp_path / "a", tokenizer, [{"text": text}]),
            load(tmp_path / "b", tokenizer, [{"messages": TALK}]),
        )
        assert ids_of(one) == ids_of(other)


# What a template or a format leaves out


def test_messages_that_a_template_leaves_out_are_told(tmp_path: Path, tokenizer: Any) -> None:
    silent = PHI_3.replace("m.role == 'system'", "m.role == 'nobody'")
    messages = [{"role": "system", "content": "Be brief."}, *TALK[:2]]
    tokenizer.chat_template = silent
    data = load(tmp_path / "data", tokenizer, [{"messages": TALK[:2]}, {"messages": messages}])
    (note,) = data.notes()
    place = f"{tmp_path}/data/a.jsonl"
    assert note.startswith(
        f"{place}: the chat template leaves messages out in 1 of 2 sample(s), first message 1 (`system`) of {place}:2; "
    )
    assert not talk(tmp_path / "data", tokenizer, messages, PHI_3).notes()


@pytest.mark.parametrize("change", ["m.content.split('</think>')[-1]", "m.content | replace('is', 'was')"])
def test_parts_of_messages_that_a_template_leaves_out_are_told(tmp_path: Path, merging: Any, change: str) -> None:
    template = CHATML.replace("m.content", f"({change})").replace("<|im_end|>", "</s>")
    messages = [TALK[0], {"role": "assistant", "content": "<think>What is it?</think>It is read."}]
    (note,) = talk(tmp_path / "data", merging, messages, template).notes()
    assert "does not write all of a message" in note and "first message " in note


def test_fields_beside_those_of_the_format_that_say_something_are_told(tmp_path: Path, merging: Any) -> None:
    merging.chat_template = ZEPHYR
    nothing = {"system": "", "history": [], "images": None, "id": 7, "source": "book"}
    more = {"system": "Be brief.", "history": [["a", "b"]]}
    for row in ({"messages": TALK[:2]}, {"instruction": "a", "output": "b"}, {"prompt": "a", "completion": "b"}):
        notes = load(tmp_path / "data", merging, [{**row, **nothing}, {**row, **more}]).notes()
        assert notes[0].startswith(f"{tmp_path}/data/a.jsonl: fields that are not read: "), "of whatever row"
        for name, note in zip(("history", "system"), notes[1:], strict=True):
            assert f"the field `{name}` of 1 of 2 sample(s) is not read, first {tmp_path}/data/a.jsonl:2;" in note


def test_a_completion_that_is_labelled_as_one_to_avoid_is_told(tmp_path: Path, merging: Any) -> None:
    row = {"prompt": "a", "completion": "b"}
    for label, told in ((True, 0), (None, 0), ("no", 0), (False, 1)):
        notes = load(tmp_path / "data", merging, [row, {**row, "label": label}]).notes()
        assert len(notes) == told and all("the field `label` of 1 of 2 sample(s) is not read" in note for note in notes)


@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_a_message_field_that_says_nothing_is_as_if_it_were_absent(tmp_path: Path, merging: Any, nothing: Any) -> None:
    messages = [TALK[0], {**TALK[1], "tool_calls": nothing, "reasoning_content": nothing}]
    assert ids_of(talk(tmp_path / "data", merging, messages, ZEPHYR)) == ids_of(
        talk(tmp_path / "data", merging, TALK[:2], ZEPHYR)
    )
