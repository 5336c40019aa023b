"""Formats: what the fields of a row mean, and which format a data set has.

Owns the four formats, how one is recognised by its fields, and what is wrong with a row of it. How a sample becomes
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
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
}
"""The fields that a row of each format must have."""
_OPTIONAL = {"alpaca": ("input",), "messages": ("tools",)}
_MESSAGE_FIELDS = ("role", "content")
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
        return asked
    fitting = _fitting(names)
    if not fitting:
        others = ", nor those of another format: " + "; ".join(
            " and ".join(f"`{name}`" for name in fields) for fields in list(FORMATS.values())[1:]
        )
        raise UsageError(f"{place}: the row has no field `text` (its fields: {listed(names)}){others}")
    if len(fitting) > 1:
        raise ambiguous(f"{place}: its fields ({listed(names)})", _either(fitting))
    return fitting[0]


def ambiguous(what: str, formats: str) -> UsageError:
    """That `what` would do as several `formats`, and nobody said which is meant."""
    return UsageError(f"{what} would do as {formats}; say which with --data-format")


def _fitting(names: Iterable[str]) -> list[str]:
    """The formats that a row with these fields may have."""
    return [format for format, fields in FORMATS.items() if set(fields) <= set(names)]


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
        return Conversation(row.place, _messages(row), _unread(row))
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


def _messages(row: Row) -> tuple[dict[str, str], ...]:
    if row.fields.get("tools"):
        raise UsageError(
            f"{row.place}: the row has `tools`, which are not rendered; render them into a message yourself"
        )
    messages = row.fields["messages"]
    if not isinstance(messages, list):
        raise UsageError(f"{row.place}: the field `messages` is {json_name(messages)}; it must be a list of messages")
    found = tuple(_message(row.place, number, message) for number, message in enumerate(messages, start=1))
    if not any(message["role"] == "assistant" for message in found):
        raise UsageError(f"{row.place}: no message has the role `assistant`, so nothing to learn; take the row away")
    return found


def _message(place: str, number: int, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise UsageError(f"{place}: message {number} is {json_name(message)}; it must be an object")
    for name, value in message.items():
        if name not in _MESSAGE_FIELDS and not _is_nothing(value):
            raise UsageError(
                f"{place}: message {number} has a field `{_on_a_line(name)}`, which is not rendered; put it into its "
                "`content`, or take it away"
            )
    for name in _MESSAGE_FIELDS:
        if name not in message:
            raise UsageError(f"{place}: message {number} has no field `{name}` (its fields: {listed(message)})")
    return {name: string(place, f"`{name}` of message {number}", message[name]) for name in _MESSAGE_FIELDS}


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
