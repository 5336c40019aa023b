"""Rendering: prompts, completions and conversations become tokens, each marked as learnt or not.

Owns which of a sample's tokens count towards the loss, and proves it: where a part that is learnt begins and ends, the
tokens of the text up to there must be the first of the whole text's tokens. A sample for which that does not hold is
refused by name. Conversations are rendered by the model's own chat template.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from ssdplan.plans.errors import UsageError, first_line

from .clock import timed
from .documents import json_name
from .formats import Completion, Conversation
from .tokens import BATCH_CHARACTERS, WHOLE_CHARACTERS, encode, special_tokens_around

NOT_LEARNT = np.uint32(1 << 31)
"""Set in a token that the loss does not count; the rest is its id."""

Tokens = npt.NDArray[np.uint32]

_MARKERS = re.compile(r"\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}")
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Characters that no text has: Unicode leaves them to programs."""


@dataclass(frozen=True)
class _Rendered:
    """A sample's text, and the spans of it, in characters, that are learnt."""

    place: str
    text: str
    spans: tuple[tuple[int, int], ...]
    completes: bool
    """Whether it is a prompt and its completion, which gets the special tokens of a text, or a whole conversation."""

    def cuts(self) -> list[int]:
        """Where the text's tokens must be known to end, but for its ends."""
        return sorted({cut for span in self.spans for cut in span} - {0, len(self.text)})


def chat_template(tokenizer: Any) -> str | None:
    """The tokenizer's own chat template; None where it has none. Raises UsageError where it is not one text."""
    template = tokenizer.chat_template
    if not template:
        return None
    name = tokenizer.name_or_path or "the tokenizer"
    if isinstance(template, dict):
        if "default" not in template:
            raise UsageError(
                f"{name}: has several chat templates ({', '.join(sorted(template))}) and none is called default; "
                "write the one that is meant to chat_template.jinja"
            )
        template = template["default"]
    if not isinstance(template, str):
        raise UsageError(
            f"{name}: the chat template is {json_name(template)}, not text; copy tokenizer_config.json and "
            "chat_template.jinja again"
        )
    return template


def sample_tokens(
    samples: Iterable[Completion | Conversation], tokenizer: Any, eos: int, instant: datetime
) -> Iterator[Tokens]:
    """Yields each sample's tokens, in order; what is not learnt has NOT_LEARNT set. `instant`: when it is for a chat
    template that writes the time.

    A completion is learnt with the end-of-sequence token after it; of a conversation the assistant's messages, with
    what the template ends them by. Raises UsageError, with the sample's place, where that cannot be told exactly.
    """
    chat = _Chat(tokenizer, instant)
    before, after = special_tokens_around(tokenizer)
    closing = after if after and after[-1] == eos else [*after, eos]
    for batch in _batched(_rendered(samples, chat)):
        texts = [[each.text, *(each.text[:cut] for cut in each.cuts())] for each in batch]
        ids = iter(encode(tokenizer, [text for group in texts for text in group]))
        for each, group in zip(batch, texts, strict=True):
            whole, *prefixes = [next(ids) for _ in group]
            if not each.completes:
                yield _marked(each, whole, prefixes)
                continue
            if prefixes and whole[: len(prefixes[0])] != prefixes[0]:
                prompt, answer = prefixes[0], _apart(each, prefixes[0], tokenizer)
            else:
                start = len(prefixes[0]) if prefixes else (0 if each.spans[0][0] == 0 else len(whole))
                prompt, answer = whole[:start], whole[start:]
            prompt = [*before, *prompt]
            found = np.asarray([*prompt, *answer, *closing], np.uint32)
            found[: len(prompt)] |= NOT_LEARNT
            yield found


def _rendered(samples: Iterable[Completion | Conversation], chat: "_Chat") -> Iterator[_Rendered]:
    for sample in samples:
        if isinstance(sample, Completion):
            text = sample.prompt + sample.completion
            rendered = _Rendered(sample.place, text, ((len(sample.prompt), len(text)),), completes=True)
        else:
            rendered = _Rendered(sample.place, *chat.render(sample), completes=False)
        if len(rendered.text) > WHOLE_CHARACTERS:
            raise UsageError(
                f"{sample.place}: a sample of {len(rendered.text)} characters ({WHOLE_CHARACTERS} at most)"
            )
        yield rendered


def _batched(samples: Iterable[_Rendered]) -> Iterator[list[_Rendered]]:
    batch: list[_Rendered] = []
    characters = 0
    for sample in samples:
        batch.append(sample)
        characters += len(sample.text) + sum(sample.cuts()) + 64
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _marked(sample: _Rendered, whole: list[int], prefixes: list[list[int]]) -> Tokens:
    ends = {0: 0, len(sample.text): len(whole)}
    for cut, prefix in zip(sample.cuts(), prefixes, strict=True):
        if whole[: len(prefix)] != prefix:
            around = sample.text[max(0, cut - 20) : cut + 20]
            raise UsageError(
                f"{sample.place}: a token reaches across the border of an assistant's message, in {around!r}, so it is "
                "neither learnt nor not; change the message there, or the chat template"
            )
        ends[cut] = len(prefix)
    found = np.asarray(whole, np.uint32) | NOT_LEARNT
    for start, stop in sample.spans:
        found[ends[start] : ends[stop]] &= ~NOT_LEARNT
    return found


def _apart(sample: _Rendered, prompt: list[int], tokenizer: Any) -> list[int]:
    """The completion's tokens by itself, where prompt and completion share a token when they are tokenised as one.

    A model that is asked sees the prompt's tokens alone. Refused where the two then do not read as the text.
    """
    start = sample.spans[0][0]
    (answer,) = encode(tokenizer, [sample.text[start:]])
    if tokenizer.decode([*prompt, *answer], clean_up_tokenization_spaces=False) != sample.text:
        raise UsageError(
            f"{sample.place}: prompt and completion share a token, in {sample.text[max(0, start - 20) : start + 20]!r},"
            " and cannot be taken apart; let the prompt end, or the completion begin, at the border of a word"
        )
    return answer


class _Chat:
    """Conversations through a chat template, and where in the text the assistant's messages are.

    A template with generation markers says so itself: it is rendered once more with a character at each of them, and
    without these characters both texts must be the same. Otherwise the conversation is rendered up to each of the
    assistant's messages, with what asks for it, and up to its end; each of these texts must begin the next.
    """

    def __init__(self, tokenizer: Any, instant: datetime) -> None:
        self._tokenizer = tokenizer
        template = chat_template(tokenizer)
        told = timed(template or "", instant)
        self._template, self._variables = told.template if template else None, told.variables
        self._marked = _MARKERS.sub(_with_characters, self._template or "")
        self._specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]

    def render(self, sample: Conversation) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The text, and the spans of it that are learnt."""
        if self._template is None:
            name = self._tokenizer.name_or_path or "the tokenizer"
            raise UsageError(
                f"{sample.place}: `messages` need a chat template, and {name} has none; copy chat_template.jinja of a "
                "model of its family into it, or give rows of `prompt` and `completion`"
            )
        return self._by_prefixes(sample) if self._marked == self._template else self._by_markers(sample)

    def _by_markers(self, sample: Conversation) -> tuple[str, tuple[tuple[int, int], ...]]:
        messages = list(sample.messages)
        text, marked = self._text(sample, messages), self._text(sample, messages, chat_template=self._marked)
        begun, *parts = marked.split(_BEGIN)
        halves = [part.split(_END) for part in parts]
        if any(len(half) != 2 for half in halves) or begun + "".join(map("".join, halves)) != text:
            raise UsageError(
                f"{sample.place}: the chat template of {self._tokenizer.name_or_path or 'the tokenizer'} goes on to "
                "work on what it writes between {% generation %} and {% endgeneration %}, so what is learnt cannot be "
                "told; let it write that part as it is, or take the marks away"
            )
        spans, place = [], len(begun)
        for learnt, rest in halves:
            spans.append((place, place + len(learnt)))
            place += len(learnt) + len(rest)
        found = tuple((start, stop) for start, stop in spans if start < stop)
        if not found:
            raise UsageError(
                f"{sample.place}: the chat template marks nothing of it as the assistant's ({{% generation %}}); "
                "nothing to learn"
            )
        return text, found

    def _by_prefixes(self, sample: Conversation) -> tuple[str, tuple[tuple[int, int], ...]]:
        messages = list(sample.messages)
        whole = self._text(sample, messages)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if index == 0:
                raise UsageError(
                    f"{sample.place}: the assistant speaks first, and nothing asks it; begin with a message"
                )
            asked = self._text(sample, messages[:index], add_generation_prompt=True)
            answered = self._text(sample, messages[: index + 1])
            if not (answered.startswith(asked) and whole.startswith(answered)):
                raise UsageError(
                    f"{sample.place}: the chat template writes message {index + 1} otherwise when others follow it, or "
                    "begins it otherwise than it asks for it, so what is learnt cannot be told; split the conversation "
                    "into rows that end with it, or mark the assistant's part in the template ({% generation %})"
                )
            spans.append((len(asked), self._end_of_turn(answered, len(asked))))
        return whole, tuple(spans)

    def _text(self, sample: Conversation, messages: list[dict[str, str]], **options: Any) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, **{"chat_template": self._template, **self._variables, **options}
            )
        except Exception as error:  # whatever a template raises
            raise _refused(sample, error) from error
        return text

    def _end_of_turn(self, text: str, start: int) -> int:
        """The end of a message that begins at `start`: behind its last special token where only white space follows,
        for there the model stops writing."""
        found = ((text.rfind(special, start), len(special)) for special in self._specials)
        end = max((place + length for place, length in found if place >= 0), default=len(text))
        return end if not text[end:].strip() else len(text)


def _with_characters(marker: re.Match[str]) -> str:
    """A generation marker that also writes its character, with an empty block on the other side of that, so that white
    space around the marker is trimmed as before."""
    left, right = marker["left"], marker["right"]
    if marker["end"]:
        return f"{{%{left} if false %}}{{% endif %}}{{{{ '{_END}' }}}}{{% endgeneration {right}%}}"
    return f"{{%{left} generation %}}{{{{ '{_BEGIN}' }}}}{{% if false %}}{{% endif {right}%}}"


def _refused(sample: Conversation, error: Exception) -> UsageError:
    return UsageError(
        f"{sample.place}: the chat template refuses the conversation ({first_line(error)}); change its messages"
    )
