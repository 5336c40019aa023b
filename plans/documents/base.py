"""The base of every JSON document that a person or a program may hand to us: strict, frozen, with readable errors.

Owns reading, checking and writing of documents; it never interprets one. What it parses is hostile until checked.
"""

import hashlib
import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from ..errors import DiskFullError, UsageError
from ..files import read_bounded, write_whole
from ..json_errors import json_reason
from ..room import no_room

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Kept = Annotated[float, Field(gt=0.0, le=1.0)]
"""Of what something does alone: never nothing."""
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Seconds = NonNegative
Bytes = Annotated[int, Field(ge=0, lt=1 << 60)]
Count = Annotated[int, Field(ge=1, lt=1 << 40)]
Index = Annotated[int, Field(ge=0, lt=1 << 32)]
Name = Annotated[str, Field(min_length=1, max_length=256)]

MAX_DOCUMENT_BYTES = 64 << 20
TAKEN_BY = {
    "plan": "ssdplan run and ssdplan show take a plan, and ssdplan solve makes one of a profile",
    "profile": "ssdplan solve makes a plan of a profile, and ssdplan show prints either",
    "sweep": "it is what ssdplan solve --sweep --json printed, and no command takes it",
    "run": "ssdplan run and ssdplan show take the directory that it is in",
    "snapshot": "ssdplan run --resume takes the directory that it is in",
}
"""Kind of document -> who takes it."""


class Part(BaseModel):
    """A piece of a document: immutable, and an unknown key in it is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, ser_json_inf_nan="null")


_EMPTY: tuple[Any, ...] = (None, [], {})


class Sparing(Part):
    """A piece whose fields of `_SPARED` are left out of a file where they are empty, as files have them that were
    written before these fields were."""

    _SPARED: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _spare(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = serialise(self)
        return {name: value for name, value in content.items() if name not in self._SPARED or value not in _EMPTY}


class Document(Part):
    """A whole file, named in errors by its class, with a `schema` that says its kind and version."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check `path`. Raises UsageError, one line: the file, the field and what is wrong with it."""
        kind = cls.__name__.lower()
        try:
            data = read_bounded(path, MAX_DOCUMENT_BYTES, kind)
        except OSError as error:
            raise UsageError(f"{path}: cannot read this {kind}: {error.strerror}") from error
        return cls.parse(data, path)

    @classmethod
    def parse(cls, data: bytes, path: Path) -> Self:
        """The document that `data` is, which came from `path`. Raises UsageError, as `load`."""
        kind = cls.__name__.lower()
        try:
            content = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not a {kind}: not UTF-8 text") from error
        except (ValueError, RecursionError) as error:  # a JSONDecodeError, or a number of thousands of digits
            raise UsageError(f"{path}: not a {kind}: {json_reason(error)}") from error
        other = _kind(content.get("schema")) if isinstance(content, dict) else ""
        if other in TAKEN_BY and other != _kind(cls.model_fields["schema_"].annotation):
            raise UsageError(f"{path}: this is a {other}, not a {kind}; {TAKEN_BY[other]}")
        try:
            return cls.model_validate_json(data, strict=True)  # a boolean is no number, and "10" none either
        except ValidationError as error:
            raise UsageError(f"{path}: not a valid {kind}: {describe(error, cls)}") from error

    def save(self, path: Path) -> None:
        """Write atomically and durably. Raises UsageError where it cannot be written, DiskFullError without room."""
        try:
            write_whole(path, self.text(), durable=True)
        except OSError as error:
            if reason := no_room(error):
                raise DiskFullError(f"{path}: cannot write: {reason}") from error
            raise UsageError(f"{path}: cannot write: {error.strerror}") from error

    def text(self) -> str:
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1) + "\n"

    def sha256(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem of a failed validation in one line, with the nearest known name for an unknown key."""
    first = error.errors(include_url=False)[0]
    where = ".".join(_shown(str(part)) for part in first["loc"]) or "(top level)"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        near = get_close_matches(str(first["loc"][-1]), sorted(_field_names(model)), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{where}: unknown key{hint}{more}"
    if first["type"] == "missing":
        return f"{where}: this field is missing{more}"
    words = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]  # ours, without a prefix
    if first["type"] == "value_error" and isinstance(first["input"], dict):  # parts of it do not fit each other
        return f"{words}{more}" if not first["loc"] else f"{where}: {words}{more}"
    value = repr(first["input"])
    return f"{where} = {value if len(value) < 60 else value[:57] + '...'}: {words}{more}"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, which may name a key once. Raises ValueError: of two values nobody knows which is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{_shown(twice)} is named twice in one object; leave one of them")
    return found


def _kind(schema: object) -> str:
    """`plan` of `ssdplan.plan/1`, or of the type of a field that only that can be; empty for what is no schema."""
    text = schema if isinstance(schema, str) else next(iter(get_args(schema)), "")
    found = re.fullmatch(r"ssdplan\.([a-z]+)/[0-9]+", text) if isinstance(text, str) else None
    return found[1] if found else ""


def _shown(key: str) -> str:
    """A key as part of one line; in a hostile document it is anything."""
    return key if key.isprintable() and 0 < len(key) <= 60 else repr(key[:60])


def _field_names(model: type[BaseModel]) -> set[str]:
    names: set[str] = set()
    todo: list[type[BaseModel]] = [model]
    seen: set[type[BaseModel]] = set()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        for name, field in current.model_fields.items():
            names.add(field.alias or name)
            for inner in _models_in(field.annotation):
                todo.append(inner)
    return names


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models_in(argument)]
