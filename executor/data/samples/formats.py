"""Formats: what the fields of a row mean, and which format a data set has.

Owns the formats, how one is recognised by its fields, and what is wrong with a row of it. How a sample becomes
text and tokens is in `data/rendering.py`.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdplan.plans.errors import UsageError

from ..reading.documents import (
    Document,
    Row,
    field_names,
    is_plain_text,
    json_name,
    plain_text,
    require_content,
    rows,
    string,
)
from ..reading.files import splits_of
from ..reading.places import At, unsaid
from .notes import AMBIGUOUS, HELD_OUT, UNREAD, Tally

FORMATS = {
    "text": ("text",),
    "completion": ("prompt", "completion"),
    "chat-completion": ("prompt", "completion"),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "alpaca": ("instruction", "output"),
}
"""The fields that a row of each format must have. A chat-completion is a completion whose two fields are lists of
messages, as TRL's conversational prompts and completions; conversations are ShareGPT's."""
CHATS = ("chat-completion", "messages", "conversations", "alpaca")
"""Formats of conversations, which go through a chat template; alpaca where there is one."""
_OPTIONAL = {"alpaca": ("input",), "messages": ("tools",)}
_MESSAGE_FIELDS = ("role", "content")
_TURN_FIELDS = ("from", "value")
"""The same in ShareGPT's conversations."""
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system", "tool", "developer")),
}
"""Who speaks in ShareGPT's conversations -> the role; None: the same word."""
_CONTENTS = (
    *("system", "system_prompt", "history", "context", "functions", "documents", "chat_template_kwargs"),
    *("image", "images", "audio", "audios", "video", "videos"),
)
"""Fields that no format reads, and in which others put what a model is to see: that is told."""
_VERDICT = "label"
"""In which others put, of a prompt and its completion, whether that is what a model should say."""
_SPLITS = ("split", "partition")
"""In which others put what part of a data set a row belongs to."""
_NAMED = 12


@dataclass(frozen=True)
class Completion:
    """A prompt, and what is to be learnt: the text that follows it."""

    place: str
    prompt: str
    completion: str
    unread: tuple[str, ...] = ()
    """Fields of the row that say something and are not read."""


@dataclass(frozen=True)
class Conversation:
    """Messages, each with its `role` and `content`; what is to be learnt is the assistant's."""

    place: str
    messages: tuple[dict[str, str], ...]
    unread: tuple[str, ...] = ()
    """As of a completion."""
    given: int = 0
    """Messages at the beginning that are a prompt: nothing of them is learnt, whoever speaks."""


Sample = Document | Completion | Conversation


def recognise(files: list[Path], asked: str | None = None, at: At = unsaid) -> str:
    """The one format of all `files`, by their fields; `asked` decides where the fields would do for several. `at` is
    told of each file before it is opened.

    Raises UsageError, by file, for fields of no format or of several, and for files of different formats.
    """
    found: tuple[Path, str] | None = None
    for file in files:
        at("reading", str(file), 0)
        require_content(file)
        format = _format_of(file, asked)
        if format is None:
            continue
        if found and found[1] != format:
            raise UsageError(
                f"{file}: holds `{format}`, but {found[0]} holds `{found[1]}`; train on one at a time, or convert "
                "one of them"
            )
        found = found or (file, format)
    return found[1] if found else "text"


def _format_of(file: Path, asked: str | None) -> str | None:
    if is_plain_text(file):
        if asked not in (None, "text"):
            raise UsageError(f"{file}: a .txt file is `text`, not `{asked}`; take it away, or leave --data-format out")
        return "text"
    first = field_names(file)
    if first is None:
        return None
    place, names = first
    if asked:
        _require(place, names, asked)
        return _of_lists(file) if asked == "completion" else asked
    fitting = _fitting(names)
    if not fitting:
        others = ", nor those of another format: " + "; ".join(
            " and ".join(f"`{name}`" for name in fields) for fields in dict.fromkeys(list(FORMATS.values())[1:])
        )
        raise UsageError(f"{place}: the row has no field `text` (its fields: {listed(names)}){others}")
    if len(fitting) > 1:
        raise ambiguous(f"{place}: its fields ({listed(names)})", _either(fitting))
    return _of_lists(file) if fitting[0] == "completion" else fitting[0]


def _of_lists(file: Path) -> str:
    """Which of the two formats of prompts and completions a file has, by its first row."""
    first = next(rows(file, FORMATS["completion"]), None)
    lists = first is not None and all(isinstance(first.fields.get(name), list) for name in FORMATS["completion"])
    return "chat-completion" if lists else "completion"


def ambiguous(what: str, formats: str) -> UsageError:
    """That `what` would do as several `formats`, and nobody said which is meant."""
    return UsageError(f"{what} would do as {formats}; say which with --data-format")


def _fitting(names: Iterable[str]) -> list[str]:
    """The formats that a row with these fields may have."""
    named = {format: fields for format, fields in FORMATS.items() if format != "chat-completion"}
    return [format for format, fields in named.items() if set(fields) <= set(names)]


def _either(formats: Iterable[str]) -> str:
    return " or ".join(f"`{format}`" for format in formats)


def unread_fields(files: Iterable[Path], format: str, at: At = unsaid) -> list[str]:
    """The fields that the first rows of `files` have and no sample is made of, sorted; but for those that are told row
    by row (`_CONTENTS`). Those that only later rows have, `samples` tells of. `at` is told of each file before it is
    read."""
    found: set[str] = set()
    for file in files:
        if not is_plain_text(file):
            at("reading", str(file), 0)
            first = field_names(file)
            found.update(first[1] if first else ())
    return sorted(found - {*_read(format), *(() if format == "text" else _CONTENTS)})


def _read(format: str) -> tuple[str, ...]:
    return (*FORMATS[format], *_OPTIONAL.get(format, ()))


def _require(place: str, names: Iterable[str], format: str) -> None:
    names = list(names)
    for field in FORMATS[format]:
        if field not in names:
            raise UsageError(
                f"{place}: the row has no field `{field}` (its fields: {listed(names)}), which `{format}` needs; "
                "put it there"
            )


def listed(names: Iterable[str]) -> str:
    found = list(names)
    more = [f"and {len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return ", ".join([*(f"`{_on_a_line(name)}`" for name in found[:_NAMED]), *more]) or "none"


def _on_a_line(name: str) -> str:
    """A field's name as an error can show it."""
    return name[:40] if name.isprintable() else ascii(name[:40])


def samples(
    files: list[Path], format: str, *, as_chat: bool, at: At = unsaid, tally: Tally | None = None
) -> Iterator[Sample]:
    """The samples of `files`, in order. `as_chat` makes a conversation of an alpaca row, for a model with a chat
    template; without, it is a prompt under headings and a completion. `at` is told of each row before it is parsed,
    `tally` of the fields that only rows behind the first of their file have. Raises UsageError, with its place, for a
    row that is none."""
    others = () if format == "text" else (*_CONTENTS, _VERDICT)
    wanted = (*_read(format), *others, *_SPLITS)
    told = {*_read(format), *others, *unread_fields(files, format, at)} if tally else set()
    number = 0
    for file in files:
        if is_plain_text(file):
            yield plain_text(file)
            number += 1
            continue
        for row in rows(file, wanted, at):
            if tally and not row.fields.keys() <= set(_read(format)):
                _tell(row, format, told, number, tally)
            yield _sample(row, format, as_chat)
            number += 1


def _tell(row: Row, format: str, told: Collection[str], number: int, tally: Tally) -> None:
    """What there is to tell of the fields of a row that its format does not read."""
    saying = [name for name, value in row.fields.items() if not _is_nothing(value)]
    for name in saying:
        if name not in told:
            tally.add(UNREAD, number, _on_a_line(name))
        value = row.fields[name]
        if name in _SPLITS and isinstance(value, str) and splits_of(Path(value)) - {"train"}:
            tally.add(HELD_OUT, number, f"`{name}` is {value[:40]!a}")
    if len(fitting := _fitting({*saying, *FORMATS[format]})) > 1:
        tally.add(AMBIGUOUS, number, _either(fitting))


def _sample(row: Row, format: str, as_chat: bool) -> Sample:
    _require(row.place, row.fields, format)
    if format == "text":
        return Document(row.place, (_field(row, "text"),))
    if format == "completion":
        return Completion(row.place, _field(row, "prompt"), _field(row, "completion"), _unread(row))
    if format == "messages":
        return Conversation(row.place, _messages(row, "messages"), _unread(row))
    if format == "conversations":
        return Conversation(row.place, _messages(row, "conversations"), _unread(row))
    if format == "chat-completion":
        prompt, answer = (_listed(row, name) for name in FORMATS[format])
        _require_assistant(row, answer)
        return Conversation(row.place, (*prompt, *answer), _unread(row), given=len(prompt))
    return _alpaca(row, as_chat)


def _unread(row: Row) -> tuple[str, ...]:
    found = tuple(name for name in _CONTENTS if not _is_nothing(row.fields.get(name)))
    return (*found, _VERDICT) if row.fields.get(_VERDICT) is False else found


def _is_nothing(value: Any) -> bool:
    """Whether a field's value says what its absence says: null, an empty string or list, an object of such fields."""
    if isinstance(value, dict):
        return all(map(_is_nothing, value.values()))
    return value is None or (isinstance(value, (str, list)) and not value)


def _field(row: Row, name: str) -> str:
    return string(row.place, f"the field `{name}`", row.fields[name])


def _messages(row: Row, field: str) -> tuple[dict[str, str], ...]:
    found = _listed(row, field)
    _require_assistant(row, found)
    return found


def _listed(row: Row, field: str) -> tuple[dict[str, str], ...]:
    """The messages of a field."""
    if row.fields.get("tools"):
        raise UsageError(
            f"{row.place}: the row has `tools`, which are not rendered; render them into a message yourself"
        )
    messages = row.fields[field]
    if not isinstance(messages, list):
        raise UsageError(f"{row.place}: the field `{field}` is {json_name(messages)}; it must be a list of messages")
    read = _turn if field == "conversations" else _message
    return tuple(read(row.place, number, message) for number, message in enumerate(messages, start=1))


def _require_assistant(row: Row, messages: Iterable[dict[str, str]]) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise UsageError(f"{row.place}: no message has the role `assistant`, so nothing to learn; take the row away")


def _turn(place: str, number: int, message: Any) -> dict[str, str]:
    """A message of a ShareGPT conversation, which may also be written as others are."""
    if not isinstance(message, dict) or not any(name in message for name in _TURN_FIELDS):
        return _message(place, number, message)
    found = _message(place, number, message, _TURN_FIELDS)
    speaker = found["from"]
    if speaker not in _SPEAKERS:
        raise UsageError(
            f"{place}: message {number} is from {speaker[:40]!a}, which is none of {', '.join(sorted(_SPEAKERS))}; "
            "render it into a message of one of these, or take the row away"
        )
    return {"role": _SPEAKERS[speaker] or speaker, "content": found["value"]}


def _message(place: str, number: int, message: Any, fields: tuple[str, str] = _MESSAGE_FIELDS) -> dict[str, str]:
    if not isinstance(message, dict):
        raise UsageError(f"{place}: message {number} is {json_name(message)}; it must be an object")
    for name, value in message.items():
        if name not in fields and not _is_nothing(value):
            raise UsageError(
                f"{place}: message {number} has a field `{_on_a_line(name)}`, which is not rendered; put it into its "
                f"`{fields[1]}`, or take it away"
            )
    for name in fields:
        if name not in message:
            raise UsageError(f"{place}: message {number} has no field `{name}` (its fields: {listed(message)})")
    return {name: string(place, f"`{name}` of message {number}", message[name]) for name in fields}


def _alpaca(row: Row, as_chat: bool) -> Sample:
    instruction, output = _field(row, "instruction"), _field(row, "output")
    context = _field(row, "input") if row.fields.get("input") is not None else ""
    if as_chat:
        asked = f"{instruction}\n\n{context}" if context else instruction
        messages = ({"role": "user", "content": asked}, {"role": "assistant", "content": output})
        return Conversation(row.place, messages, _unread(row))
    parts = [("Instruction", instruction), *([("Input", context)] if context else [])]
    prompt = "".join(f"### {heading}:\n{text}\n\n" for heading, text in parts)
    return Completion(row.place, f"{prompt}### Response:\n", output, _unread(row))
