"""Conversations: messages become text by the model's own chat template, and where in it the assistant's messages are.

Owns what is learnt of a conversation, in characters of its text, and what the template leaves out of it. A conversation
of which that cannot be told is refused by name. `data/rendering.py` makes tokens of the text.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ssdplan.plans.errors import UsageError, first_line

from ..reading.documents import json_name
from .clock import timed
from .formats import Conversation
from .notes import CHANGED, DROPPED, SPECIAL, UNLEARNT

Spans = tuple[tuple[int, int], ...]

_MARKERS = re.compile(r"\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}")
_LINE_BREAK = re.compile("\r\n|\r|\n")
_ROLES = frozenset(("system", "user", "tool", "function", "developer", "assistant"))
_BEGIN, _END = "\ufdd0", "\ufdd1"
_FROM, _TO, _STOP = "\ufdd2", "\ufdd3", "\ufdd4"
"""Characters that no text has: Unicode leaves them to programs. The first two stand for generation markers; the others
enclose what a message says, as FROM number STOP ... TO number STOP."""
_PROBES = re.compile(f"([{_FROM}{_TO}])([0-9]+){_STOP}")

_WRITTEN, _WRITTEN_A_CHARACTER = 1 << 20, 64
"""A template writes no more than so many characters, and so many for each of the messages."""


@dataclass(frozen=True)
class Rendering:
    """A conversation's text, the spans of it, in characters, that are learnt, and what it lacks: kinds of `notes`, each
    with the message that it is so of."""

    text: str
    spans: Spans
    lacks: tuple[tuple[str, str], ...]


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


class Chat:
    """Conversations through a chat template, and where in the text the assistant's messages are.

    A template with generation markers says so itself: it is rendered once more with a character at each of them, and
    without these characters both texts must be the same. Otherwise the conversation is rendered up to each of the
    assistant's messages, with what asks for it, and up to its end; each of these texts must begin the next, but for
    what the template writes behind the last message alone.
    """

    def __init__(self, tokenizer: Any, instant: datetime, ends: Collection[int] = ()) -> None:
        """`instant`: when it is for a template that writes the time. `ends`: tokens at which a model stops."""
        self._tokenizer = tokenizer
        self._name = tokenizer.name_or_path or "the tokenizer"
        template = chat_template(tokenizer)
        told = timed(template or "", instant)
        self._template, self._variables = told.template if template else None, told.variables
        self._marked = _with_marks(self._template) if self._template else None
        self._specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._closing = re.compile(rf"(?:{_either(self._specials)}|\s)*+")
        added = () if getattr(tokenizer, "split_special_tokens", False) else tokenizer.added_tokens_decoder.items()
        own = (token.content for id, token in added if token.special or id in {tokenizer.bos_token_id, *ends})
        self._brought = re.compile(_either(own))

    def render(self, sample: Conversation) -> Rendering:
        """The conversation as the template writes it. Raises UsageError, with the sample's place."""
        if self._template is None:
            raise UsageError(
                f"{sample.place}: messages need a chat template, and {self._name} has none; copy chat_template.jinja "
                "of a model of its family into it, or give rows of `prompt` and `completion`"
            )
        messages = list(sample.messages)
        text = self._text(sample, messages)
        said = sum(len(message["role"]) + len(message["content"]) for message in messages)
        if len(text) > _WRITTEN + _WRITTEN_A_CHARACTER * (said + len(messages)):
            raise UsageError(
                f"{sample.place}: the chat template of {self._name} makes {len(text):,} characters of the "
                f"{said:,} of its messages; look at the template"
            )
        found = self._found(sample, text)
        if self._marked == self._template:
            spans = self._by_prefixes(sample, text, found)
        else:
            spans = self._by_markers(sample, text)
        lacks = (
            *_lacking(messages, text, found),
            *_unlearnt(messages, text, found, spans),
            *self._special(messages, text, found),
        )
        return Rendering(text, self._behind_prompt(sample, text, spans), lacks)

    def _behind_prompt(self, sample: Conversation, text: str, spans: Spans) -> Spans:
        """The spans that lie behind the messages that were given. Raises UsageError where that cannot be told."""
        given = list(sample.messages[: sample.given])
        if not any(message["role"] == "assistant" for message in given):
            return spans
        asked = self._text(sample, given, add_generation_prompt=True)
        if not text.startswith(asked):
            raise UsageError(
                f"{sample.place}: the chat template writes the prompt otherwise when the completion follows it "
                f"({_difference(asked, text)}), so what is learnt cannot be told; give the row as `messages`"
            )
        return tuple(span for span in spans if span[0] >= len(asked))

    def _special(self, messages: list[dict[str, str]], text: str, found: "_Found | None") -> Iterator[tuple[str, str]]:
        """The first special token that stands in the text of a message: a kind of note. A message may begin or end a
        turn by it, as if the template had written it."""
        for index, message in enumerate(messages):
            if found and found.lacks(index):
                continue
            place = found.get(index) if found else None
            written = text[slice(*place)] if place else message["content"]
            if brought := self._brought.search(written):
                yield SPECIAL, f"{brought[0]} in message {index + 1} (`{message['role']}`)"
                return

    def _by_markers(self, sample: Conversation, text: str) -> Spans:
        marked = self._text(sample, list(sample.messages), chat_template=self._marked)
        begun, *parts = marked.split(_BEGIN)
        halves = [part.split(_END) for part in parts]
        if any(len(half) != 2 for half in halves) or begun + "".join(map("".join, halves)) != text:
            raise UsageError(
                f"{sample.place}: the chat template of {self._name} goes on to work on what it writes between "
                "{% generation %} and {% endgeneration %}, so what is learnt cannot be told; let it write that part as "
                "it is, or take the marks away"
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
        return found

    def _by_prefixes(self, sample: Conversation, whole: str, found: "_Found | None") -> Spans:
        messages = list(sample.messages)
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
            if not answered.startswith(asked):
                raise UsageError(
                    f"{sample.place}: the chat template begins message {index + 1} otherwise than it asks for it "
                    f"({_difference(asked, answered)}), so what is learnt cannot be told; mark the assistant's part in "
                    "the template ({% generation %})"
                )
            if not whole.startswith(answered):
                answered = self._without_closing(sample, index, answered, whole, found)
            spans.append((len(asked), self._end_of_turn(answered, len(asked))))
        return tuple(spans)

    def _without_closing(
        self, sample: Conversation, index: int, answered: str, whole: str, found: "_Found | None"
    ) -> str:
        """A conversation up to message `index`, which others follow in `whole`, without what the template writes behind
        the last message alone. Raises UsageError where more than special tokens and white space at its end differs.

        What follows in the whole, but for white space between turns, must be what the template begins the next message
        with when nothing is before it: else something else may end the message there.
        """
        said, following = (found.get(each) if found else None for each in (index, index + 1))
        if said and following and answered[: said[1]] == whole[: said[1]]:
            alike = said[1] + _alike(answered[said[1] :], whole[said[1] : following[0]])
            for cut in range(alike, said[1] - 1, -1):
                if self._closing.fullmatch(answered, cut):
                    if self._begins_alone(sample, index + 1, whole[cut : following[0]].lstrip()):
                        return answered[:cut]
                    break
        raise UsageError(
            f"{sample.place}: the chat template writes message {index + 1} otherwise when others follow it "
            f"({_difference(answered, whole)}), so what is learnt cannot be told; split the conversation into rows "
            "that end with it, or mark the assistant's part in the template ({% generation %})"
        )

    def _begins_alone(self, sample: Conversation, index: int, header: str) -> bool:
        """Whether the template writes `header` right before message `index` too when no message is before that."""
        alone = Conversation(sample.place, sample.messages[index : index + 1])
        try:
            text = self._text(alone, list(alone.messages))
        except UsageError:  # the template takes it only behind others
            return False
        found = self._found(alone, text)
        place = found.get(0) if found else None
        return place is not None and text[: place[0]].endswith(header)

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

    def _found(self, sample: Conversation, text: str) -> "_Found | None":
        """Where in the text each message is: what it says, without the white space around it. It is found by rendering
        the messages with characters around that; None where the template then writes something else."""
        if any(mark in text for mark in (_FROM, _TO, _STOP)):
            return None
        messages = [
            {**message, "content": _probed(message["content"], number)}
            for number, message in enumerate(sample.messages)
        ]
        try:
            probed = self._text(sample, messages)
        except UsageError:  # the template takes only some contents
            return None
        if _PROBES.sub("", probed) != text:
            return None
        starts: dict[int, int] = {}
        stops: dict[int, int] = {}
        length = 0
        for mark in _PROBES.finditer(probed):
            places = starts if mark[1] == _FROM else stops
            if int(mark[2]) in places:
                return None  # written twice
            places[int(mark[2])] = mark.start() - length
            length += len(mark[0])
        return _Found(starts, stops)


@dataclass(frozen=True)
class _Found:
    """Where in a text what each message says begins and ends, by the message's index; those that are not there lack."""

    starts: dict[int, int]
    stops: dict[int, int]

    def lacks(self, index: int) -> bool:
        return index not in self.starts and index not in self.stops

    def get(self, index: int) -> tuple[int, int] | None:
        if index not in self.starts or index not in self.stops:
            return None
        return self.starts[index], self.stops[index]


def _probed(content: str, number: int) -> str:
    said = content.strip()
    start = content.find(said)
    before, after = content[:start], content[start + len(said) :]
    return f"{before}{_FROM}{number}{_STOP}{said}{_TO}{number}{_STOP}{after}"


def _lacking(messages: list[dict[str, str]], text: str, found: _Found | None) -> Iterator[tuple[str, str]]:
    """What of the messages is not in the text: kinds of notes, each with the first message that it is so of."""
    told = set()
    for index, message in enumerate(messages):
        said = message["content"].strip()
        if not said:
            continue
        kind: str | None
        if found is None:
            kind = None if said in text else CHANGED
        elif found.lacks(index):
            kind = DROPPED
        else:
            place = found.get(index)
            kind = None if place and text[slice(*place)] == said else CHANGED
        if kind and kind not in told:
            told.add(kind)
            yield kind, f"message {index + 1} (`{message['role']}`)"


def _unlearnt(
    messages: list[dict[str, str]], text: str, found: _Found | None, spans: Spans
) -> Iterator[tuple[str, str]]:
    """The first message of a role that may be what the assistant is called elsewhere, and of which nothing is learnt: a
    kind of note."""
    for index, message in enumerate(messages):
        said = message["content"].strip()
        if message["role"] in _ROLES or not said:
            continue
        place = found.get(index) if found else None
        if place:
            learnt = any(start < place[1] and place[0] < stop for start, stop in spans)
        else:
            learnt = any(said in text[start:stop] for start, stop in spans)
        if not learnt:
            yield UNLEARNT, f"message {index + 1} (`{message['role']}`)"
            return


def _with_marks(template: str) -> str:
    """The template with characters at its generation markers; those in comments, raw blocks and strings are none."""
    from jinja2 import Environment, TemplateSyntaxError

    lines = _LINE_BREAK.sub("\n", template)  # as Jinja reads it
    begins, place = set(), 0
    try:
        for _, kind, value in Environment(keep_trailing_newline=True).lexer.tokeniter(lines, None):
            while not lines.startswith(value, place):  # white space that is trimmed is no token
                place += 1
            if kind == "block_begin":
                begins.add(place)
            place += len(value)
    except TemplateSyntaxError:  # what is wrong with it is said when it is rendered
        return template
    marks = [mark for mark in _MARKERS.finditer(lines) if mark.start() in begins]
    if not marks:
        return template
    parts, place = [], 0
    for mark in marks:
        parts += [lines[place : mark.start()], _with_characters(mark)]
        place = mark.end()
    return "".join([*parts, lines[place:]])


def _with_characters(marker: re.Match[str]) -> str:
    """A generation marker that also writes its character, with an empty block on the other side of that, so that white
    space around the marker is trimmed as before."""
    left, right = marker["left"], marker["right"]
    if marker["end"]:
        return f"{{%{left} if false %}}{{% endif %}}{{{{ '{_END}' }}}}{{% endgeneration {right}%}}"
    return f"{{%{left} generation %}}{{{{ '{_BEGIN}' }}}}{{% if false %}}{{% endif {right}%}}"


def _either(names: Iterable[str]) -> str:
    """An expression of any of the names, the longest first; of nothing at all where there is none. It looks at the
    first two characters before the rest: a tokenizer may have a thousand, and a text as many that begin like them."""
    rests: dict[str, list[str]] = {}
    for name in sorted(filter(None, names), key=len, reverse=True):
        rests.setdefault(name[:2], []).append(re.escape(name[2:]))
    return "|".join(f"{re.escape(begun)}(?:{'|'.join(each)})" for begun, each in rests.items()) or r"(?!)"


def _alike(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _difference(one: str, other: str) -> str:
    """Two texts from a little before the place where they begin to differ, as an error shows them."""
    start = max(0, _alike(one, other) - 20)
    return f"{one[start : start + 50]!r} against {other[start : start + 50]!r}"


def _refused(sample: Conversation, error: Exception) -> UsageError:
    return UsageError(
        f"{sample.place}: the chat template refuses the conversation ({first_line(error)}); change its messages"
    )
